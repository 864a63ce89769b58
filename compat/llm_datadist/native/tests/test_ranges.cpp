#include "../rules.hpp"
#include "check.hpp"

using namespace llm_datadist::rules;
using Numbers = std::vector<std::int64_t>;

static const auto none = std::nullopt;

static void layers_are_neighbouring_tensors() {
  CHECK(layer_tensors({1, 0}, 2) == Numbers{2, 3, 0, 1} && layer_tensors({}, 2).empty());
}

static void dim_0_counts_and_the_rest_is_a_unit() {
  const auto geometry = unit_geometry(2, {4, 3, 5}, 2);
  CHECK(geometry.unit_bytes == 30 && geometry.count == 4 && unit_geometry(1, Numbers(31, 1), 1).unit_bytes == 1);
  CHECK(unit_geometry(1, {std::int64_t{1} << 62}, 1).count == std::uint64_t{1} << 62);
  CHECK_FAILS(RuleError, "num_tensors", unit_geometry(0, {1}, 1));
  CHECK_FAILS(RuleError, "32 dimensions", unit_geometry(1, Numbers(32, 1), 1));
  CHECK_FAILS(RuleError, "0 dimensions", unit_geometry(1, {}, 1));
  for (const auto& shape : {Numbers{4, 0}, Numbers{-1, 8}}) CHECK_FAILS(RuleError, "not positive", unit_geometry(1, shape, 1));
  for (const auto& shape : {Numbers{1LL << 40, 1LL << 30}, Numbers{2, 1LL << 62}, Numbers{1, 1LL << 62, 1LL << 62}})
    CHECK_FAILS(RuleError, "2^63-1", unit_geometry(1, shape, 1));
}

static void layers_of_a_pull() {
  const auto given = [](std::optional<Layers> source, std::optional<Layers> destination, std::uint32_t tensors = 8, std::uint32_t width = 2) {
    const auto layers = pull_layers(source, destination, tensors, width);
    return std::pair(layers.source, layers.destination);
  };
  CHECK(given(none, none, 3) == std::pair(std::optional<Layers>(), std::optional<Layers>()));
  CHECK(given(Layers{2, 2}, none, 3).second == none);  // empty is not given
  CHECK(given(Layers{5, 9}, none) == std::pair(std::optional(Layers{5, 9}), std::optional(Layers{0, 4})));
  CHECK(given(none, Layers{1, 3}) == std::pair(std::optional<Layers>(), std::optional(Layers{1, 3})));
  CHECK_FAILS(RuleError, "whole number", given(none, Layers{0, 1}, 3));
  CHECK_FAILS(RuleError, "3 layers", given(Layers{0, 3}, none));
  CHECK_FAILS(RuleError, "dst_layer_range has 1", given(Layers{0, 2}, Layers{0, 1}));
  CHECK_FAILS(RuleError, "ends at 5", given(none, Layers{4, 5}));
  CHECK_FAILS(RuleError, "ends at 5", given(Layers{0, 1}, Layers{4, 5}));
}

static void layers_of_a_push() {
  CHECK(push_layers(none, none, 8, 2) == std::pair(Layers{0, 4}, Layers{0, 4}));
  CHECK(push_layers(none, none, 1, 2).first.count() == 0);  // callers' tests rely on it
  CHECK(push_layers(Layers{1, 2}, Layers{9, 10}, 8, 2).second == Layers{9, 10});
  CHECK_FAILS(RuleError, "whole number", push_layers(none, none, 10, 3));
  CHECK_FAILS(RuleError, "has 4", push_layers(Layers{0, 1}, none, 8, 2));
  CHECK_FAILS(RuleError, "has 3", push_layers(Layers{0, 2}, Layers{0, 3}, 8, 2));
  CHECK_FAILS(RuleError, "ends at 5", push_layers(Layers{4, 5}, Layers{0, 1}, 8, 2));
}

static void sizes() {
  CHECK(copied_bytes(0, -1, 8, 12) == 8 && copied_bytes(3, -1, 8, 8) == 5 && copied_bytes(3, 2, 8, 5) == 2);
  CHECK_FAILS(RuleError, "source's rows have 8", copied_bytes(8, 1, 8, 9));
  CHECK_FAILS(RuleError, "destination's rows have 4", copied_bytes(4, 1, 8, 4));
  CHECK_FAILS(RuleError, "do not fit", copied_bytes(0, -1, 9, 8));
  CHECK_FAILS(RuleError, "do not fit", copied_bytes(3, 6, 8, 20));
  check_blocks_of_row(100, 30, 4);
  for (const auto& [block, listed] : {std::pair{0, 1}, std::pair{100, 1}, std::pair{101, 1}}) CHECK_FAILS(RuleError, "dst_block_memory_size", (check_blocks_of_row(100, static_cast<std::uint64_t>(block), static_cast<std::uint64_t>(listed)), 0));
  CHECK_FAILS(RuleError, "fills 4", (check_blocks_of_row(100, 30, 5), 0));
}

int main() {
  layers_are_neighbouring_tensors();
  dim_0_counts_and_the_rest_is_a_unit();
  layers_of_a_pull();
  layers_of_a_push();
  sizes();
  return TEST_RESULT();
}
