#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "../clock.hpp"
#include "../guard.hpp"
#include "check.hpp"

using namespace kvferry;
using namespace std::chrono_literals;

static void a_guard_lives_until_it_is_ended() {
  GuardTable table(4);
  const Guard guard = table.open();
  CHECK(guard.number % 2 == 1 && table.alive(guard) && table.open_count() == 1);
  CHECK(table.enter(guard));
  table.leave(guard);
  table.end(guard);
  CHECK(!table.alive(guard) && !table.enter(guard) && table.open_count() == 0);
  table.end(guard);
  CHECK(table.open_count() == 0);
}

static void no_number_stands_twice() {
  GuardTable table(1);
  const Guard first = table.open();
  CHECK_FAILS(Kind::busy, "1 guard slots", table.open());
  table.end(first);
  const Guard second = table.open();
  CHECK(second.slot == first.slot && second.number > first.number);
  CHECK(!table.alive(first) && !table.enter(first) && table.alive(second));
  table.end(first);
  CHECK(table.alive(second));
}

static void what_was_never_a_guard_is_not_alive() {
  GuardTable table(2);
  for (const Guard guard : {Guard{}, Guard{9, 1}, Guard{0, 1}, Guard{1, 2}, Guard{1, 77}}) {
    CHECK(!table.alive(guard) && !table.enter(guard));
    table.end(guard);
    CHECK(table.end_if_idle(guard));
  }
  CHECK(table.open_count() == 0);
}

static void an_end_without_waiting_is_finished_by_the_next() {
  GuardTable table(1);
  const Guard guard = table.open();
  CHECK(table.enter(guard));
  table.end_without_waiting(guard);
  CHECK(!table.alive(guard) && !table.enter(guard));
  CHECK(!table.end_if_idle(guard));  // somebody is inside
  CHECK(table.open_count() == 1);
  table.leave(guard);
  CHECK(table.end_if_idle(guard));
  CHECK(table.open_count() == 0);
  const Guard next = table.open();
  table.end_without_waiting(next);
  table.end(next);
  table.end(next);
  CHECK(table.end_if_idle(next) && table.open_count() == 0);
}

static void patience_ends_and_the_guard_with_it() {
  GuardTable table(1);
  const Guard guard = table.open();
  CHECK(table.enter(guard));
  CHECK(!table.end(guard, 20));
  CHECK(!table.alive(guard) && !table.enter(guard) && table.open_count() == 1);
  CHECK(!table.end(guard, 0));
  table.leave(guard);
  CHECK(table.end(guard, 0) && table.open_count() == 0);
  CHECK(table.end(guard, 0));
}

static void end_waits_for_whoever_is_inside() {
  GuardTable table(1);
  const Guard guard = table.open();
  std::atomic<bool> inside{false}, left{false};
  std::thread writer([&] {
    CHECK(table.enter(guard));
    inside = true;
    std::this_thread::sleep_for(20ms);
    left = true;
    table.leave(guard);
  });
  while (!inside) std::this_thread::yield();
  std::vector<std::thread> enders;
  for (int i = 0; i < 3; ++i) {
    enders.emplace_back([&] {
      table.end(guard);
      CHECK(left);
    });
  }
  for (std::thread& ender : enders) ender.join();
  writer.join();
  CHECK(table.open_count() == 0);
}

// Threads write plain memory inside a guard; whoever ends it writes the same memory after. Any overlap is a data race for
// the thread sanitizer, and a lost write for everybody.
static void nobody_is_inside_after_the_end() {
  GuardTable table(2);
  std::uint64_t value = 0;
  for (int round = 0; round < 40; ++round) {
    const Guard guard = table.open();
    std::atomic<int> running{0};
    std::mutex one_writer;
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&] {
        ++running;
        while (table.enter(guard)) {
          {
            std::lock_guard lock(one_writer);
            ++value;
          }
          table.leave(guard);
        }
      });
    }
    while (running < 2) std::this_thread::yield();
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&, t] {
        if (t == 0)
          CHECK(table.end(guard));
        else
          table.end_without_waiting(guard);
      });
    }
    table.end(guard);
    value = 0;
    for (std::thread& thread : threads) thread.join();
    CHECK(value == 0);
    CHECK(table.open_count() == 0);
  }
}

static void several_guards_are_entered_all_or_none() {
  GuardTable table(3);
  const std::vector<Guard> guards = {table.open(), table.open()};
  {
    const Entered entered(table, guards);
    CHECK(static_cast<bool>(entered));
    table.end_without_waiting(guards[1]);
    CHECK(!table.end_if_idle(guards[1]));
  }
  CHECK(table.end_if_idle(guards[1]));
  {
    const Entered entered(table, guards);
    CHECK(!entered);
    CHECK(table.end_if_idle(guards[0]));  // nobody stayed behind in the first
  }
  const std::vector<Guard> none;
  CHECK(static_cast<bool>(Entered(table, none)));
}

static void a_peer_sees_the_page_and_cannot_write_it() {
  GuardTable table(8);
  const PeerPage peer(table.page_descriptor(), table.page().nonce);
  const Guard guard = table.open();
  CHECK(peer.alive(guard));
  CHECK(!peer.alive({8, 1}) && !peer.alive({~0U, 1}) && !peer.alive({}));
  const std::uint64_t epoch = peer.epoch();
  table.bump_epoch();
  CHECK(peer.epoch() == epoch + 1 && table.epoch() == peer.epoch());
  table.end(guard);
  CHECK(!peer.alive(guard));
  CHECK(mmap(nullptr, table.page_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, table.page_descriptor(), 0) == MAP_FAILED);
}

static void a_page_other_than_announced_is_refused() {
  const GuardTable table(8), other(8);
  CHECK_FAILS(Kind::refused, "announced", PeerPage(table.page_descriptor(), other.page().nonce));
  const int unsealed = memfd_create("t", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(ftruncate(unsealed, 4096) == 0);
  CHECK_FAILS(Kind::refused, "sealed", PeerPage(unsealed, table.page().nonce));
  CHECK(fcntl(unsealed, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  CHECK_FAILS(Kind::refused, "announced", PeerPage(unsealed, table.page().nonce));
  close(unsealed);
  CHECK_FAILS(Kind::refused, "", PeerPage(-1, table.page().nonce));
  const int pipe_like = open("/dev/null", O_RDWR | O_CLOEXEC);
  CHECK_FAILS(Kind::refused, "", PeerPage(pipe_like, table.page().nonce));
  close(pipe_like);

  const int lying = memfd_create("t", MFD_CLOEXEC | MFD_ALLOW_SEALING);  // more slots than its size has room for
  std::uint64_t words[8] = {ControlPage::magic_value, ControlPage::version_value | std::uint64_t{5000} << 32, 1, 2};
  CHECK(write(lying, words, sizeof words) == sizeof words && ftruncate(lying, 4096) == 0);
  CHECK(fcntl(lying, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  CHECK_FAILS(Kind::refused, "announced", PeerPage(lying, words + 2));
  close(lying);
}

static void a_child_cannot_end_its_parents_guards() {
  watch_forks();
  GuardTable table(4);
  const Guard guard = table.open();
  CHECK(table.enter(guard));
  const pid_t child = fork();
  if (child == 0) {
    const bool gone = !table.alive(guard) && !table.enter(guard) && fcntl(table.page_descriptor(), F_GETFD) < 0;
    table.end(guard);  // neither waits nor reaches the parent
    _exit(gone ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(table.alive(guard));
  table.leave(guard);
  table.end(guard);
}

int main() {
  a_guard_lives_until_it_is_ended();
  no_number_stands_twice();
  what_was_never_a_guard_is_not_alive();
  an_end_without_waiting_is_finished_by_the_next();
  patience_ends_and_the_guard_with_it();
  end_waits_for_whoever_is_inside();
  nobody_is_inside_after_the_end();
  several_guards_are_entered_all_or_none();
  a_peer_sees_the_page_and_cannot_write_it();
  a_page_other_than_announced_is_refused();
  a_child_cannot_end_its_parents_guards();
  return TEST_RESULT();
}
