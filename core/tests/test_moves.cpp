#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <vector>

#include "../clock.hpp"
#include "../geometry.hpp"
#include "check.hpp"

using namespace kvferry;

using Numbers = std::vector<std::int64_t>;

static std::shared_ptr<const Moves> blocks(const Numbers& from, const Numbers& to, bool keep_order = false) {
  return Moves::make_blocks(from.data(), from.size(), to.data(), to.size(), {}, {}, keep_order);
}

static void neighbouring_pairs_become_one_run() {
  const auto moves = blocks({4, 5, 6, 9, 10, 2}, {0, 1, 2, 3, 4, 7});
  CHECK((moves->source == std::vector<UnitRun>{{4, 3}, {9, 2}, {2, 1}}));
  CHECK((moves->destination == std::vector<UnitRun>{{0, 3}, {3, 2}, {7, 1}}));
  CHECK(moves->units == 6 && moves->source_end == 11 && moves->destination_end == 8 && moves->last_listed == 7);
  CHECK(!moves->duplicates);
}

static void of_two_writers_of_a_block_the_last_one_stays() {
  const auto moves = blocks({0, 1, 2, 3, 8}, {5, 6, 5, 9, 5});
  CHECK(moves->duplicates && moves->units == 3);
  CHECK((moves->source == std::vector<UnitRun>{{1, 1}, {3, 1}, {8, 1}}));
  CHECK((moves->destination == std::vector<UnitRun>{{6, 1}, {9, 1}, {5, 1}}));
  CHECK((moves->overwritten == std::vector<UnitRun>{{0, 1}, {2, 1}}) && blocks({0, 1}, {5, 6})->overwritten.empty());
}

static void in_given_order_every_pair_stays_and_no_run_reads_what_it_wrote() {
  const auto moves = blocks({0, 1, 2, 3}, {1, 2, 3, 4}, true);  // one after the other this copies block 0 everywhere
  CHECK(moves->source.size() == 4 && moves->units == 4);
  const auto far = blocks({0, 1, 2, 3, 4}, {2, 3, 4, 5, 6}, true);
  CHECK((far->source == std::vector<UnitRun>{{0, 2}, {2, 2}, {4, 1}}));
  const auto twice = blocks({0, 1}, {5, 5}, true);
  CHECK(twice->duplicates && twice->units == 2 && twice->overwritten.empty());
  CHECK(blocks({3, 4}, {3, 4}, true)->source.size() == 1);
}

static void unit_numbers_are_checked() {
  CHECK_FAILS(Kind::invalid_argument, "2 source blocks and 1 destination", blocks({1, 2}, {1}));
  CHECK_FAILS(Kind::invalid_argument, "source block -1, number 1", blocks({0, -1}, {1, 2}));
  CHECK_FAILS(Kind::invalid_argument, "destination block 4294967296", blocks({0, 1}, {1, std::int64_t{1} << 32}));
  CHECK(blocks({0, 7}, {0xffffffff, 0xffffffff})->units == 1);
  CHECK(blocks({0, 7, 8}, {0xffffffff, 3'000'000'000, 5})->units == 3);
  CHECK(blocks({}, {})->units == 0);
}

// Against the plain meaning: pairs one after the other, over random lists with and without gaps and repetitions.
static void merging_and_dropping_keep_the_meaning() {
  std::mt19937 random(5);
  for (int round = 0; round < 400; ++round) {
    const std::int64_t spread_out = round % 3 == 0 ? 100'000'000 : 1;  // bitmap and hash table
    Numbers from, to;
    while (from.size() < 40) {
      const std::int64_t s = random() % 30, d = random() % 30 * spread_out, n = random() % 4;
      for (std::int64_t i = 0; i <= n; ++i) from.push_back(s + i), to.push_back(d + i);
    }
    for (const bool keep_order : {false, true}) {
      const auto moves = blocks(from, to, keep_order);
      std::map<std::int64_t, std::int64_t> expected, got;
      for (std::size_t i = 0; i < from.size(); ++i) expected[to[i]] = from[i];
      std::uint64_t units = 0;
      CHECK(moves->source.size() == moves->destination.size());
      for (std::size_t r = 0; r < moves->source.size(); ++r) {
        CHECK(moves->source[r].count == moves->destination[r].count);
        for (std::uint32_t i = 0; i < moves->source[r].count; ++i, ++units) {
          got[moves->destination[r].first + i] = moves->source[r].first + i;
        }
      }
      CHECK(got == expected && units == moves->units);
      CHECK(units == (keep_order ? from.size() : expected.size()));
    }
  }
}

static void a_million_blocks_are_quick() {
  Numbers from(1'000'000), to(1'000'000);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = to[i] = static_cast<std::int64_t>(i);
  std::shuffle(to.begin(), to.end(), std::mt19937(1));
  const std::int64_t start = now_ns();
  const auto moves = blocks(from, to);
  const std::int64_t scattered_ns = now_ns() - start;
  CHECK(moves->units == 1'000'000);
  for (std::int64_t& block : to) block *= 4000;
  const std::int64_t again = now_ns();
  CHECK(blocks(from, to)->units == 1'000'000);
  const std::int64_t far_ns = now_ns() - again;
  std::printf("1,000,000 scattered blocks: %.1f ms, far apart %.1f ms\n", static_cast<double>(scattered_ns) / 1e6,
              static_cast<double>(far_ns) / 1e6);
}

static void window_membership_is_by_unit() {
  const std::vector<UnitRun> window = {{8, 2}, {2, 3}, {5, 1}};
  check_inside(window, {{2, 4}, {8, 1}, {9, 1}, {100, 0}}, "cache 3");
  CHECK_FAILS(Kind::not_found, "block 6 of cache 3", check_inside(window, {{3, 4}}, "cache 3"));
  CHECK_FAILS(Kind::not_found, "block 1 of cache 3", check_inside(window, {{1, 1}}, "cache 3"));
  CHECK_FAILS(Kind::not_found, "block 10", check_inside(window, {{10, 1}}, "cache 3"));
  CHECK_FAILS(Kind::not_found, "block 0", check_inside({}, {{0, 1}}, "cache 3"));
}

static void spans_are_checked_when_they_are_made() {
  using Listed = std::vector<std::uint64_t>;
  const auto made = [](const Listed& listed) { return Moves::make_spans(listed.data(), listed.size() / 3); };
  constexpr std::uint64_t top = std::uint64_t{1} << 63;
  const auto moves = made({5, 0, 3, 8, 3, 2, 0, 100, 7});
  CHECK(moves->form == Moves::Form::spans && moves->units == 3 && (moves->spans[1] == Run{8, 3, 2}));
  CHECK((source_spans(*moves) == std::vector<ByteSpan>{{5, 3}, {8, 2}, {0, 7}}));
  CHECK((destination_spans(*moves) == std::vector<ByteSpan>{{0, 3}, {3, 2}, {100, 7}}));
  CHECK(made({})->spans.empty());
  CHECK(made({top - 10, 0, 9})->spans.size() == 1);
  CHECK_FAILS(Kind::invalid_argument, "span 1 has 0 bytes", made({0, 0, 1, 0, 0, 0}));
  for (const auto& listed : {Listed{top, 0, 1}, Listed{0, top, 1}, Listed{0, 0, top}, Listed{top - 1, 0, 1}, Listed{0, top - 1, 1}, Listed{~0ull, 0, 1}})
    CHECK_FAILS(Kind::invalid_argument, "span 0: its offsets", made(listed));
  CHECK_FAILS(Kind::invalid_argument, "up to span 1", made({0, 0, top - 1, 0, 0, 1}));
}

static void a_span_lies_in_a_window_or_not() {
  Geometry geometry;
  geometry.cache_id = 3;
  geometry.unit_bytes = geometry.stride_bytes = 10;
  geometry.count = 20;
  geometry.tensors = {{4096, 0, 0}};
  const std::vector<UnitRun> window = {{8, 2}, {2, 3}, {5, 1}};  // bytes 20 to 60 and 80 to 100
  const auto check = [&](std::vector<ByteSpan> spans) { check_inside(window, spans, geometry); };
  check({{20, 40}, {80, 20}, {20, 1}, {59, 1}, {99, 1}});
  CHECK_FAILS(Kind::not_found, "span 1, 41 bytes from byte 20 of cache 3 on, does not lie in the window: block 6", check({{20, 40}, {20, 41}}));
  CHECK_FAILS(Kind::not_found, "block 1 is", check({{19, 2}}));
  CHECK_FAILS(Kind::not_found, "block 6 is", check({{50, 40}}));
  CHECK_FAILS(Kind::not_found, "block 10 is", check({{99, 2}}));
  CHECK_FAILS(Kind::not_found, "block 0 is", check({{0, 1}}));
  std::mt19937 random(8);
  for (int round = 0; round < 20'000; ++round) {
    const std::uint64_t offset = random() % 200, bytes = random() % (200 - offset) + 1;
    bool inside = true;
    for (auto at = offset; at < offset + bytes; ++at) inside &= (at >= 20 && at < 60) || (at >= 80 && at < 100);
    CHECK((testing::kind_of([&] { check({{offset, bytes}}); }) == Kind::ok) == inside);
  }
  geometry.stride_bytes = 16;
  CHECK_FAILS(Kind::invalid_argument, "gaps", check({{20, 1}}));
}

// Windows of many scattered blocks and lists of many spans go together in less than their product.
static void many_spans_are_checked_against_big_windows_quickly() {
  Geometry geometry;
  geometry.unit_bytes = geometry.stride_bytes = 4096;
  geometry.count = 20'000;
  geometry.tensors = {{4096, 0, 0}};
  std::vector<UnitRun> window;
  for (std::uint32_t i = 0; i < 10'000; ++i) window.push_back({2 * i, 1});
  std::shuffle(window.begin(), window.end(), std::mt19937(1));
  std::mt19937 random(2);
  std::vector<ByteSpan> spans(100'000);
  for (auto& span : spans) span = {std::uint64_t{random() % 10'000} * 8192 + random() % 4000, random() % 96 + 1};
  const std::int64_t start = now_ns();
  check_inside(window, spans, geometry);
  const auto took = now_ns() - start;
  std::printf("100,000 spans against a window of 10,000 runs: %.1f ms\n", static_cast<double>(took) / 1e6);
  CHECK(took < 2'000'000'000);
}

int main() {
  neighbouring_pairs_become_one_run();
  of_two_writers_of_a_block_the_last_one_stays();
  in_given_order_every_pair_stays_and_no_run_reads_what_it_wrote();
  unit_numbers_are_checked();
  merging_and_dropping_keep_the_meaning();
  a_million_blocks_are_quick();
  window_membership_is_by_unit();
  spans_are_checked_when_they_are_made();
  a_span_lies_in_a_window_or_not();
  many_spans_are_checked_against_big_windows_quickly();
  return TEST_RESULT();
}
