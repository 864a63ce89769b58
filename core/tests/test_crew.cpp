#include "../crew.hpp"

#include <poll.h>
#include <sys/eventfd.h>

#include "alone.hpp"

using namespace kvferry;
using namespace kvferry::testing;

static Need end_at_once(Scripted& self) {
  self.end();
  return Need::done;
}

static Descriptor quiet() { return Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)); }

// What was queued before the end is done; only background work is dropped.
static void stopping_finishes_what_was_queued() {
  Alone alone;
  std::atomic<int> background{0};
  std::vector<std::shared_ptr<Scripted>> operations;
  for (int i = 0; i < 200; ++i) {
    operations.push_back(script(alone, end_at_once));
    operations.back()->start();
  }
  alone.engine.crew.submit_background([&] { ++background; });
  alone.engine.crew.stop();
  alone.engine.crew.stop();
  for (const auto& one : operations) CHECK(one->done() && one->ends == 1);
  CHECK(background <= 1);
}

static void background_work_goes_last_and_may_go_on() {
  Alone alone(2, 1);
  std::atomic<bool> hold{true};
  const auto holding = script(alone, [&](Scripted& self) {
    while (hold) std::this_thread::yield();
    return end_at_once(self);
  });
  holding->start();
  CHECK(eventually([&] { return holding->steps == 1; }));
  std::vector<int> order;
  std::mutex mutex;
  const auto note = [&](int what) {
    const std::lock_guard lock(mutex);
    order.push_back(what);
  };
  struct Some {
    Alone& alone;
    std::function<void(int)> note;
    int left;
    void operator()() {
      note(100 + left);
      if (--left > 0) alone.engine.crew.submit_background(*this);
    }
  };
  alone.engine.crew.submit_background(Some{alone, note, 3});
  const auto later = script(alone, [&](Scripted& self) {
    note(1);
    return end_at_once(self);
  });
  later->start();
  hold = false;
  CHECK(eventually([&] {
    const std::lock_guard lock(mutex);
    return order.size() == 4;
  }));
  CHECK((order == std::vector<int>{1, 103, 102, 101}));
}

static void helpers_are_asked_for_what_runs_already() {
  Alone alone(2, 2);
  struct Helped : Scripted {
    using Scripted::Scripted;
    std::atomic<int> helped{0};
    void help() override { ++helped; }
  };
  const auto one = std::make_shared<Helped>(alone, [](Scripted& self) {
    if (!self.flag) return Need::nothing_yet;
    return end_at_once(self);
  });
  one->start();
  CHECK(alone.engine.crew.ask_for_help(one, 0) == 0);
  CHECK(alone.engine.crew.ask_for_help(one, 9) == 2);
  CHECK(eventually([&] { return one->helped == 2; }));
  one->flag = true;
  one->schedule();
  CHECK(one->wait(Deadline::after_ms(1000)));
  CHECK(alone.engine.crew.ask_for_help(one, 1) == 1);  // too late is harmless
  CHECK(eventually([&] { return one->helped == 3; }));
}

// A thread that waits with a socket lets go of it as soon as anybody wants something else of it.
static void an_adopted_socket_is_let_go_of() {
  Alone alone;
  auto& crew = alone.engine.crew;
  const auto never = quiet();
  const auto timed = [&](auto&& meanwhile, bool expected = false) {
    std::atomic<bool> returned{false};
    bool ready = !expected;
    std::int64_t took = 0;
    std::thread waiting([&] {
      const auto began = now_ns();
      do {  // what is left of an earlier disturbance ends one wait too early
        ready = crew.wait_while_idle(never.get(), POLLIN, Deadline::after_ms(5000));
      } while (expected && !ready && now_ns() - began < 5'000'000'000);
      took = now_ns() - began;
      returned = true;
    });
    while (!returned) {  // it disturbs those who wait already, and this one may not have begun
      sleep_ms(3);
      meanwhile();
    }
    waiting.join();
    CHECK(ready == expected);
    return took / 1'000'000;
  };
  CHECK(timed([&] { script(alone, end_at_once)->start(); }) < 500);
  CHECK(timed([&] { crew.ask_for_help(script(alone, end_at_once), 1); }) < 500);
  CHECK(timed([&] { crew.disturb(); }) < 500);
  const auto already = now_ns();
  CHECK(!crew.wait_while_idle(never.get(), POLLIN, Deadline::after_ms(5000), [] { return true; }));
  CHECK(now_ns() - already < 500'000'000);
  const std::uint64_t one = 1;
  CHECK(timed([&] { CHECK(::write(never.get(), &one, sizeof one) == sizeof one); }, true) < 500);
  std::uint64_t count;
  CHECK(::read(never.get(), &count, sizeof count) == sizeof count);
  const auto began = now_ns();
  CHECK(!crew.wait_while_idle(never.get(), POLLIN, Deadline::after_ms(10)));
  CHECK(now_ns() - began < 500'000'000);
  CHECK(timed([&] { crew.stop(); }) < 500);
  CHECK(!crew.wait_while_idle(never.get(), POLLIN, Deadline::after_ms(5000)));  // it has stopped
}

// Work that comes while all threads wait with sockets is done at once.
static void work_goes_before_waiting() {
  Alone alone(2, 2);
  std::vector<std::shared_ptr<Scripted>> waiting;
  for (int i = 0; i < 2; ++i) {
    waiting.push_back(script(alone, [](Scripted& self) { return self.take_lane(LaneUse::small) ? Need::readable : Need::lane; }));
    waiting.back()->start();
  }
  for (int i = 0; i < 100; ++i) {
    const auto one = script(alone, end_at_once);
    const auto began = now_ns();
    one->start();
    CHECK(one->wait(Deadline::after_ms(3000)) && now_ns() - began < 200'000'000);
    if (i % 10 == 0) sleep_ms(1);
  }
}

int main() {
  stopping_finishes_what_was_queued();
  background_work_goes_last_and_may_go_on();
  helpers_are_asked_for_what_runs_already();
  an_adopted_socket_is_let_go_of();
  work_goes_before_waiting();
  return TEST_RESULT();
}
