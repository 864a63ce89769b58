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
}

static void in_given_order_every_pair_stays_and_no_run_reads_what_it_wrote() {
  const auto moves = blocks({0, 1, 2, 3}, {1, 2, 3, 4}, true);  // one after the other this copies block 0 everywhere
  CHECK(moves->source.size() == 4 && moves->units == 4);
  const auto far = blocks({0, 1, 2, 3, 4}, {2, 3, 4, 5, 6}, true);
  CHECK((far->source == std::vector<UnitRun>{{0, 2}, {2, 2}, {4, 1}}));
  const auto twice = blocks({0, 1}, {5, 5}, true);
  CHECK(twice->duplicates && twice->units == 2);
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

int main() {
  neighbouring_pairs_become_one_run();
  of_two_writers_of_a_block_the_last_one_stays();
  in_given_order_every_pair_stays_and_no_run_reads_what_it_wrote();
  unit_numbers_are_checked();
  merging_and_dropping_keep_the_meaning();
  a_million_blocks_are_quick();
  window_membership_is_by_unit();
  return TEST_RESULT();
}
