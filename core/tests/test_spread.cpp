#include "../spread.hpp"

#include <optional>
#include <thread>
#include <vector>

#include "check.hpp"

using kvferry::Spread;

namespace {

// A machine of four cores: each copy in these tests is a number, and the one that looks is `turn`.
std::vector<int> core_of;
std::size_t turn = 0;
int moves = 0, cores = 4;

const kvferry::Cores machine{
    []() noexcept { return core_of[turn]; },
    [](const cpu_set_t& taken) noexcept {
      ++moves;
      for (int core = 0; core < cores; ++core)
        if (!CPU_ISSET(core, &taken)) return core_of[turn] = core, true;
      return false;
    }};

struct Copies {
  Spread spread{machine};
  std::vector<std::optional<Spread::Seat>> seats;
  Copies(std::vector<int> at, std::size_t staying = 0) : seats(at.size()) {
    core_of = std::move(at);
    moves = 0;
    for (turn = 0; turn < seats.size(); ++turn) seats[turn].emplace(spread, turn < staying);
  }
  void look() {
    for (turn = 0; turn < seats.size(); ++turn)
      if (seats[turn]) seats[turn]->look();
  }
};

}  // namespace

static void those_on_one_core_part() {
  Copies copies({2, 2, 2});
  copies.look();
  CHECK((core_of == std::vector<int>{2, 0, 1}));
  copies.look();
  CHECK(moves == 2);
}

static void somebody_elses_thread_is_not_moved_but_made_room_for() {
  Copies copies({3, 3}, 1);
  copies.look();
  CHECK((core_of == std::vector<int>{3, 0}));

  Copies later({1, 1, 1}, 0);
  turn = 2;
  later.seats[2].emplace(later.spread, true);  // it came last, and the others go
  later.look();
  CHECK((core_of == std::vector<int>{0, 2, 1}));
}

static void two_that_both_stay_are_left_where_they_are() {
  Copies copies({1, 1}, 2);
  copies.look();
  CHECK(moves == 0 && (core_of == std::vector<int>{1, 1}));
}

static void whoever_has_ended_is_in_nobodys_way() {
  Copies copies({0, 0});
  copies.seats[0].reset();
  copies.look();
  CHECK(moves == 0);
}

static void where_the_kernel_has_moved_one_is_seen_when_it_looks() {
  Copies copies({0, 1});
  core_of[1] = 0;
  copies.look();
  CHECK((core_of == std::vector<int>{0, 1}));
}

static void where_there_is_no_other_core_it_is_asked_for_once() {
  cores = 1;
  Copies copies({0, 0});
  for (int i = 0; i < 5; ++i) copies.look();
  cores = 4;
  CHECK(moves == 1 && (core_of == std::vector<int>{0, 0}));
}

static void more_than_have_seats_copy_where_they_are() {
  Copies copies(std::vector<int>(70, 0));
  copies.look();
  CHECK(core_of[69] == 0);
}

// The kernel itself: a thread that was put on the core of another one leaves it, and may use all of its cores afterwards.
static void a_thread_really_moves() {
  cpu_set_t all;
  CHECK(::sched_getaffinity(0, sizeof all, &all) == 0);
  if (CPU_COUNT(&all) < 2) return;
  Spread spread;
  const Spread::Seat mine(spread, true);
  const int here = ::sched_getcpu();
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(here, &one);
  CHECK(::sched_setaffinity(0, sizeof one, &one) == 0);  // this thread stays for the time of the test
  bool same = false, moved = false, free = false;
  std::thread([&] {  // it inherits the one core
    CHECK(::sched_setaffinity(0, sizeof one, &one) == 0);
    same = ::sched_getcpu() == here;
    Spread::Seat seat(spread, false);
    seat.look();  // it may use this core alone
    moved = ::sched_getcpu() != here;
  }).join();
  CHECK(same && !moved);
  std::thread([&] {
    CHECK(::sched_setaffinity(0, sizeof all, &all) == 0);
    Spread::Seat seat(spread, false);
    for (int i = 0; i < 1000 && ::sched_getcpu() != here; ++i) {
      CHECK(::sched_setaffinity(0, sizeof one, &one) == 0);
      CHECK(::sched_setaffinity(0, sizeof all, &all) == 0);
    }
    seat.look();
    moved = ::sched_getcpu() != here;
    cpu_set_t after;
    CHECK(::sched_getaffinity(0, sizeof after, &after) == 0);
    free = CPU_EQUAL(&after, &all);
  }).join();
  CHECK(moved && free);
  CHECK(::sched_setaffinity(0, sizeof all, &all) == 0);
}

int main() {
  those_on_one_core_part();
  somebody_elses_thread_is_not_moved_but_made_room_for();
  two_that_both_stay_are_left_where_they_are();
  whoever_has_ended_is_in_nobodys_way();
  where_the_kernel_has_moved_one_is_seen_when_it_looks();
  where_there_is_no_other_core_it_is_asked_for_once();
  more_than_have_seats_copy_where_they_are();
  a_thread_really_moves();
  return TEST_RESULT();
}
