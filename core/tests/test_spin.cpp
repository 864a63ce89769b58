#include "../spin.hpp"

#include "check.hpp"

using kvferry::Spin;

namespace {

std::int64_t clock_ns = 0;
std::int64_t tick() { return clock_ns += 1000; }

// How often a wait looks for what never comes; 0: it does not look at all.
int looks(Spin& spin) {
  int count = 0;
  CHECK(!spin.until([&] { return ++count < 0; }, tick));
  return count;
}

void passes_over(Spin& spin, int waits) {
  for (int i = 0; i < waits; ++i) CHECK(looks(spin) == 0);
}

// What comes so long after the wait has begun.
bool comes_after(Spin& spin, std::int64_t wait_ns) {
  const auto there = clock_ns + wait_ns;
  return spin.until([&] { return clock_ns >= there; }, tick);
}

}  // namespace

static void what_is_there_is_found_at_once() {
  Spin spin;
  int count = 0;
  CHECK(spin.until([&] { return ++count == 1; }, tick));
  CHECK(count == 1);
}

static void in_vain_it_looks_more_and_more_rarely_and_often_again_once_it_pays() {
  Spin spin;
  for (const int passed_over : {1, 3, 7, 15, 31, 63, 127, 127}) {
    CHECK(looks(spin) > 0);
    passes_over(spin, passed_over);
  }
  CHECK(spin.until([] { return true; }, tick));
  CHECK(looks(spin) > 0);
  passes_over(spin, 1);
  CHECK(looks(spin) > 0);
}

static void what_it_slept_for_and_came_soon_is_looked_for_for_longer() {
  Spin spin;
  CHECK(!comes_after(spin, 2 * Spin::near_ns));
  spin.slept(2 * Spin::near_ns);
  for (int i = 0; i < 10; ++i) CHECK(comes_after(spin, 2 * Spin::near_ns));
  CHECK(looks(spin) > 0);  // and nothing came: for a short while again
  passes_over(spin, 1);
  CHECK(!comes_after(spin, 2 * Spin::near_ns));
}

static void what_came_late_is_not() {
  Spin spin;
  CHECK(looks(spin) > 0);
  spin.slept(Spin::far_ns);
  passes_over(spin, 1);
  CHECK(!comes_after(spin, 2 * Spin::near_ns));
}

static void where_looking_for_longer_is_in_vain_it_is_tried_more_and_more_rarely() {
  Spin spin;
  for (const int passed_over : {1, 3, 7, 15, 31, 63, 127, 127}) {
    spin.slept(1);
    CHECK(looks(spin) > 0);  // for long
    for (int i = 0; i < passed_over; ++i) spin.slept(1);
  }
}

int main() {
  what_is_there_is_found_at_once();
  in_vain_it_looks_more_and_more_rarely_and_often_again_once_it_pays();
  what_it_slept_for_and_came_soon_is_looked_for_for_longer();
  what_came_late_is_not();
  where_looking_for_longer_is_in_vain_it_is_tried_more_and_more_rarely();
  return TEST_RESULT();
}
