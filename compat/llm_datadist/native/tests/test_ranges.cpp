#include "../rules.hpp"
#include "check.hpp"

using namespace llm_datadist::rules;
using Numbers = std::vector<std::int64_t>;

static const auto none = std::nullopt;
static constexpr std::int64_t float16 = 1, int8 = 2, int4 = 29;  // the vendor's numbers of types

static void layers_are_neighbouring_tensors() {
  CHECK(layer_tensors({1, 0}, 2) == Numbers{2, 3, 0, 1} && layer_tensors({}, 2).empty());
}

static void dim_0_counts_and_the_rest_is_a_unit() {
  const auto geometry = unit_geometry(2, {4, 3, 5}, float16);
  CHECK(geometry.unit_bytes == 30 && geometry.count == 4 && unit_geometry(1, Numbers(31, 1), int8).unit_bytes == 1);
  CHECK(unit_geometry(1, {std::int64_t{1} << 62}, int8).count == std::uint64_t{1} << 62);
  CHECK_FAILS(RuleError, "num_tensors", unit_geometry(0, {1}, int8));
  CHECK_FAILS(RuleError, "32 dimensions", unit_geometry(1, Numbers(32, 1), int8));
  CHECK_FAILS(RuleError, "0 dimensions", unit_geometry(1, {}, int8));
  for (const auto& shape : {Numbers{4, 0}, Numbers{-1, 8}}) CHECK_FAILS(RuleError, "not positive", unit_geometry(1, shape, int8));
  for (const auto& shape : {Numbers{1LL << 40, 1LL << 30}, Numbers{2, 1LL << 62}, Numbers{1, 1LL << 62, 1LL << 62}})
    CHECK_FAILS(RuleError, "2^63-1", unit_geometry(1, shape, int8));
}

static void elements_of_half_a_byte_are_rounded_up_by_the_tensor() {
  CHECK(element_bits(3) == 32u && element_bits(27) == 16u && element_bits(29) == 4u && element_bits(13) == 128u);
  for (const std::int64_t none : {-1, 5, 28, 99}) CHECK(!element_bits(none));
  for (const std::int64_t none : {-1, 5, 28, 99}) CHECK_FAILS(RuleError, "no data type with a size", unit_geometry(1, {2}, none));
  CHECK(unit_geometry(1, {4, 6}, int4).unit_bytes == 3 && unit_geometry(1, {4, 3, 2}, int4).unit_bytes == 3);
  CHECK(unit_geometry(1, {1, 3}, int4).unit_bytes == 2 && unit_geometry(1, {1}, int4).unit_bytes == 1);  // the only row is the tensor
  CHECK_FAILS(RuleError, "shape [4, 3] of DT_INT4 has 6 bytes, which are not 4 rows", unit_geometry(1, {4, 3}, int4));
  for (const auto& shape : {Numbers{2, 3}, Numbers{3, 3}, Numbers{5, 3}, Numbers{2}, Numbers{4}, Numbers{4, 1, 7}})
    CHECK_FAILS(RuleError, "whole bytes", unit_geometry(1, shape, int4));
}

static void what_a_call_may_say() {
  check_addresses(2, 2, false), check_size(-1), check_size(1), check_row("row", 1, 2), check_tensors_per_layer(1), check_timeout(1), check_paired(1, 1);
  CHECK_FAILS(RuleError, "empty", (check_addresses(0, 0, false), 0));
  CHECK_FAILS(RuleError, "3 addresses are given for 2", (check_addresses(3, 2, false), 0));
  CHECK_FAILS(RuleError, "contains 0", (check_addresses(2, 2, true), 0));
  for (const std::int64_t size : {0, -2}) CHECK_FAILS(RuleError, "size", (check_size(size), 0));
  CHECK_FAILS(RuleError, "row is 2, the cache has 2", (check_row("row", 2, 2), 0));
  CHECK_FAILS(RuleError, "over 0", (check_tensors_per_layer(0), 0));
  for (const std::int64_t timeout : {0, -1}) CHECK_FAILS(RuleError, "over 0", (check_timeout(timeout), 0));
  CHECK_FAILS(RuleError, "empty", (check_paired(0, 0), 0));
  CHECK_FAILS(RuleError, "same length", (check_paired(1, 2), 0));
}

static void ranges_with_inclusive_ends() {
  const auto pulled = [](Inclusive source, Inclusive destination, std::uint32_t width = 2) { return pull_layers(source, destination, 8, width).destination; };
  const Inclusive all;
  CHECK(pulled(all, all) == none && pulled(all, {1, 2}) == none && pulled({0, 0}, all, 3) == none);  // both or none
  CHECK(pulled({0, 1}, {2, 3}) == Layers{2, 4});
  for (const auto& [first, last] : {std::pair{-2, 0}, {0, -1}, {2, 1}}) {
    CHECK_FAILS(RuleError, "both ends", pulled({first, last}, all));
    CHECK_FAILS(RuleError, "dst_layer_range", pulled(all, {first, last}));
  }
  CHECK_FAILS(RuleError, "over 0", pulled(all, all, 0));
  const auto pushed = [](Inclusive source, Inclusive destination, std::uint32_t tensors = 8, std::uint32_t width = 2) { return push_layers(source, destination, tensors, width); };
  CHECK(pushed(all, all) == std::pair(Layers{0, 4}, Layers{0, 4}) && pushed({3, 3}, {0, 0}) == std::pair(Layers{3, 4}, Layers{0, 1}));
  CHECK_FAILS(RuleError, "equally long", pushed({0, 1}, {0, 0}));
  CHECK_FAILS(RuleError, "dst_layer_range has 1", pushed(all, {0, 0}));
  CHECK_FAILS(RuleError, "whole number", pushed(all, all, 10, 3));
  CHECK_FAILS(RuleError, "whole number", pushed(all, all, 1, 2));
  CHECK_FAILS(RuleError, "is 0", pushed(all, all, 0, 2));
  CHECK_FAILS(RuleError, "ends at 5", pushed({4, 4}, {0, 0}));
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

static void numbers_of_blocks_are_shown_as_they_were_given() {
  check_numbers("src_blocks", {});
  check_numbers("src_blocks", {0, 4294967295});
  CHECK_FAILS(RuleError, "src_blocks[1] is 4294967296: blocks are numbered from 0 to 4294967295", check_numbers("src_blocks", {0, 4294967296}));
  CHECK_FAILS(RuleError, "dst_blocks[0] is 18446744073709551615", check_numbers("dst_blocks", {UINT64_MAX}));
}

int main() {
  layers_are_neighbouring_tensors();
  dim_0_counts_and_the_rest_is_a_unit();
  elements_of_half_a_byte_are_rounded_up_by_the_tensor();
  what_a_call_may_say();
  ranges_with_inclusive_ends();
  layers_of_a_pull();
  layers_of_a_push();
  sizes();
  numbers_of_blocks_are_shown_as_they_were_given();
  return TEST_RESULT();
}
