#include <poll.h>

#include <random>
#include <thread>

#include "../interrupt.hpp"
#include "alone.hpp"

using namespace kvferry;
using namespace kvferry::testing;

constexpr std::int64_t patience_ms = 60'000;  // nobody who sleeps here wakes without being told

// Ends when its flag is set; who sets it says so by schedule().
static Need until_flag(Scripted& self) {
  if (!self.flag) return Need::nothing_yet;
  self.end({}, 5);
  return Need::done;
}

static void an_end_is_an_end() {
  Alone alone;
  const auto one = script(alone, [](Scripted& self) {
    self.end({}, 7);
    self.end({Kind::internal, "a second end", false, true});
    return Need::done;
  });
  const auto result = one->run_here();
  CHECK(result.outcome.ok() && result.bytes == 7 && result.transport == Transport::local && result.nanoseconds >= 0);
  CHECK(one->done() && one->ends == 1 && one->steps == 1 && alone.link->operations() == 0);
  one->schedule();
  one->cancel();
  CHECK(one->wait(Deadline::after_ms(0)) && one->result().outcome.ok());
  CHECK(!one->notify(std::make_shared<Notifier>(), 1));
}

static void what_a_step_throws_is_its_outcome() {
  Alone alone;
  const auto ends = [&](auto thrown) { return script(alone, [=](Scripted&) -> Need { throw thrown; })->run_here(); };
  CHECK_ENDS(Kind::busy, "later", ends(Error(Kind::busy, "later")));
  CHECK_ENDS(Kind::peer_lost, "not kvferry's protocol: odd", ends(wire::WireError("odd")));
  CHECK_ENDS(Kind::out_of_memory, "memory", ends(std::bad_alloc()));
  CHECK(alone.link->operations() == 0);
}

// One sets a flag and says so while the other is about to sleep: no wake-up is lost, here and on the crew.
static void no_wake_up_is_lost() {
  Alone alone;
  for (const bool here : {true, false}) {
    for (int i = 0; i < 1000; ++i) {
      const auto one = script(alone, until_flag);
      std::thread other([&] {
        for (int k = 0; k < i % 100; ++k) std::this_thread::yield();
        one->flag = true;
        one->schedule();
      });
      if (here)
        CHECK(one->run_here().bytes == 5);
      else
        one->start();
      CHECK(one->wait(Deadline::after_ms(patience_ms)) && one->result().outcome.ok() && one->ends == 1);
      other.join();
    }
  }
}

// Whoever schedules, and however many: one thread at a time drives.
static void one_driver_at_a_time() {
  Alone alone;
  for (int round = 0; round < 50; ++round) {
    const auto one = script(alone, [](Scripted& self) {
      if (self.steps % 4 == 0) std::this_thread::yield();
      return until_flag(self);
    });
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t)
      threads.emplace_back([&] {
        for (int i = 0; i < 40; ++i) one->schedule();
      });
    if (round % 2 == 0)
      one->start();
    else
      one->start_here();
    for (auto& thread : threads) thread.join();
    one->flag = true;
    one->schedule();
    CHECK(one->wait(Deadline::after_ms(patience_ms)) && one->ends == 1);
  }
}

static void a_cancel_is_heard_wherever_it_waits() {
  Alone alone;
  const std::vector<Scripted::Script> scripts = {
      until_flag,
      [](Scripted& self) { return self.take_lane(LaneUse::small) ? Need::readable : Need::lane; },
      [](Scripted& self) { return self.take_lane(LaneUse::push) ? Need::readable : Need::lane; }};
  for (const auto& steps : scripts) {
    for (int i = 0; i < 20; ++i) {
      const auto one = script(alone, steps);
      one->start();
      if (i % 2 == 0) sleep_ms(1);
      const auto began = now_ns();
      one->cancel();
      CHECK(one->wait(Deadline::after_ms(patience_ms)) && one->result().outcome.kind == Kind::cancelled);
      CHECK(now_ns() - began < 100'000'000);
    }
  }
  const auto asked = script(alone, until_flag);
  CHECK_ENDS(Kind::cancelled, "script was cancelled", [&] {
    const Interruptible here([] { return true; });
    return asked->run_here();
  }());
}

static void a_deadline_ends_it_wherever_it_waits() {
  Alone alone;
  const std::vector<Scripted::Script> scripts = {until_flag,
                                                 [](Scripted& self) { return self.take_lane(LaneUse::small) ? Need::readable : Need::lane; }};
  for (const auto& steps : scripts) {
    for (const bool here : {true, false}) {
      const auto one = script(alone, steps, 20);
      const auto began = now_ns();
      if (here)
        one->run_here();
      else
        one->start();
      CHECK(one->wait(Deadline::after_ms(patience_ms)) && one->result().outcome.kind == Kind::deadline);
      const auto ms = (now_ns() - began) / 1'000'000;
      CHECK(ms >= 19 && ms < 200);
    }
  }
  const auto late = script(alone, until_flag, -5);
  CHECK_ENDS(Kind::deadline, "time was up", late->run_here());
}

static void a_link_that_goes_down_ends_its_operations() {
  for (int round = 0; round < 60; ++round) {
    Alone alone;
    std::vector<std::shared_ptr<Scripted>> operations;
    for (int i = 0; i < 6; ++i)
      operations.push_back(script(alone, [i](Scripted& self) {
        if (i % 2 == 0) return until_flag(self);
        return self.take_lane(LaneUse::bulk) ? Need::readable : Need::lane;
      }));
    std::thread starting([&] {
      for (std::size_t i = 0; i < operations.size(); ++i) {
        try {
          if (i % 3 == 0)
            operations[i]->start_here();
          else if (i % 3 == 1)
            operations[i]->start();
          else
            operations[i]->run_here();
        } catch (const Error& error) {
          CHECK(error.outcome().kind == Kind::peer_lost);
          operations[i]->end(error.outcome());
        }
      }
    });
    for (int k = 0; k < round; ++k) std::this_thread::yield();
    CHECK(alone.link->take_down({Kind::peer_lost, "gone", false, true}));
    CHECK(!alone.link->take_down({Kind::peer_lost, "gone again", false, true}));
    starting.join();
    for (const auto& one : operations)
      CHECK(one->wait(Deadline::after_ms(patience_ms)) && one->result().outcome.sentence == "gone" && one->ends == 1);
    CHECK(alone.link->wait_until_quiet(Deadline::after_ms(1000)));
  }
}

static void a_readable_lane_wakes_its_operation() {
  Alone alone;
  for (const bool here : {true, false}) {
    for (int i = 0; i < 200; ++i) {
      std::atomic<int> far{-1};
      const auto one = script(alone, [&](Scripted& self) {
        if (!self.take_lane(LaneUse::small)) return Need::lane;
        char byte;
        if (::recv(self.lane()->descriptor.get(), &byte, 1, 0) == 1) {
          self.give_lane();
          self.end();
          return Need::done;
        }
        far = static_cast<int>(self.lane()->descriptor.get());
        return Need::readable;
      });
      std::thread peer([&] {
        while (far < 0) std::this_thread::yield();
        if (i % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
        const std::lock_guard lock(alone.mutex);
        for (const auto& end : alone.far_ends) {
          CHECK(::send(end.get(), "x", 1, MSG_NOSIGNAL) == 1);
          break;
        }
      });
      if (here)
        one->run_here();
      else
        one->start();
      CHECK(one->wait(Deadline::after_ms(patience_ms)) && one->result().outcome.ok());
      peer.join();
    }
  }
  CHECK(alone.dialled == 2);  // the same lanes all the time
}

// More operations than lanes, some of which give up while they wait or just as a lane is granted to them: every lane
// comes back and nobody starves.
static void lanes_are_never_lost_on_the_way() {
  Alone alone(3);
  std::vector<std::thread> threads;
  std::atomic<int> had_lane{0}, gave_up{0};
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      for (int i = 0; i < 150; ++i) {
        const auto use = static_cast<LaneUse>(random() % 3);
        const auto brief = random() % 3 == 0;
        auto one = script(
            alone,
            [&, use, breaks = random() % 10 == 0](Scripted& self) {
              if (!self.take_lane(use)) return Need::lane;
              std::this_thread::sleep_for(std::chrono::microseconds(50));
              if (breaks)
                self.break_lane();
              else
                self.give_lane();
              ++had_lane;
              self.end();
              return Need::done;
            },
            brief ? static_cast<std::int64_t>(random() % 2) : 20'000);
        const bool cancels = random() % 4 == 0;
        if (random() % 2 == 0 && !cancels) {
          one->run_here();
        } else {
          one->start();
          if (cancels) one->cancel();
        }
        if (random() % 4 == 0) continue;  // let go of
        CHECK(one->wait(Deadline::after_ms(10'000)));
        if (!one->result().outcome.ok()) ++gave_up;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(alone.link->wait_until_quiet(Deadline::after_ms(5000)));
  CHECK(alone.link->lanes.open_lanes() == 3);
  std::printf("%d had a lane, %d gave up\n", had_lane.load(), gave_up.load());
  // All of them are idle: three more get one at once.
  std::vector<std::shared_ptr<Scripted>> last;
  for (const auto use : {LaneUse::small, LaneUse::bulk, LaneUse::bulk, LaneUse::push}) {
    last.push_back(script(alone, [use](Scripted& self) {
      CHECK(self.take_lane(use));
      return until_flag(self);
    }));
    last.back()->start();
    CHECK(eventually([&] { return last.back()->steps > 0; }));
  }
}

static void a_notifier_hears_after_the_result_stands() {
  Alone alone;
  const auto notifier = std::make_shared<Notifier>();
  const auto one = script(alone, until_flag), two = script(alone, until_flag);
  one->start();
  two->start();
  CHECK(one->notify(notifier, 11) && two->notify(notifier, 12));
  auto forgotten = std::make_shared<Notifier>();
  CHECK(one->notify(forgotten, 13));
  forgotten.reset();
  for (const auto& operation : {one, two}) {
    operation->flag = true;
    operation->schedule();
  }
  std::vector<std::uint64_t> heard;
  CHECK(eventually([&] {
    for (const auto token : notifier->take()) heard.push_back(token);
    return heard.size() == 2;
  }));
  CHECK(heard[0] + heard[1] == 23 && one->done() && two->done());
  pollfd p{notifier->descriptor(), POLLIN, 0};
  CHECK(::poll(&p, 1, 0) == 0);
}

// Where no lane can be opened at first, those that wait get one when it can.
static void lanes_that_can_be_had_later_are_had_later() {
  Alone alone;
  alone.unreachable = true;
  std::vector<std::shared_ptr<Scripted>> waiting;
  for (const auto use : {LaneUse::small, LaneUse::bulk, LaneUse::push}) {
    waiting.push_back(script(alone, [use](Scripted& self) {
      if (!self.take_lane(use)) return Need::lane;
      self.give_lane();
      self.end();
      return Need::done;
    }));
    waiting.back()->start();
  }
  sleep_ms(5);
  for (const auto& one : waiting) CHECK(!one->done());
  alone.unreachable = false;
  for (const auto& one : waiting) CHECK(one->wait(Deadline::after_ms(patience_ms)) && one->result().outcome.ok());
}

static void timers_give_out_what_is_due() {
  Alone alone;
  Timers timers;
  const auto one = script(alone, until_flag), two = script(alone, until_flag);
  timers.add({100, 1}, one);
  timers.add({100, 2}, two);
  timers.add({50, 3}, script(alone, until_flag));  // gone already
  timers.add({200, 4}, one);
  std::int64_t next = INT64_MAX;
  CHECK(timers.due(49, next).empty() && next == 50);
  timers.remove({100, 2});
  timers.remove({100, 77});
  next = INT64_MAX;
  const auto due = timers.due(100, next);
  CHECK(due.size() == 1 && due[0] == one && next == 200);
  next = 150;
  CHECK(timers.due(100, next).empty() && next == 150);
}

// One that was started and that nobody holds any more goes on; one that was never started leaves nothing.
static void letting_go() {
  Alone alone;
  std::atomic<int> ended{0};
  {
    const auto one = script(alone, [&](Scripted& self) {
      if (self.steps < 3) {
        self.schedule();
        return Need::nothing_yet;
      }
      self.end();
      ++ended;
      return Need::done;
    });
    one->start();
    script(alone, until_flag);
  }
  CHECK(eventually([&] { return ended == 1; }));
  CHECK(alone.link->wait_until_quiet(Deadline::after_ms(1000)));
}

int main() {
  an_end_is_an_end();
  what_a_step_throws_is_its_outcome();
  no_wake_up_is_lost();
  one_driver_at_a_time();
  a_cancel_is_heard_wherever_it_waits();
  a_deadline_ends_it_wherever_it_waits();
  a_link_that_goes_down_ends_its_operations();
  a_readable_lane_wakes_its_operation();
  lanes_are_never_lost_on_the_way();
  a_notifier_hears_after_the_result_stands();
  lanes_that_can_be_had_later_are_had_later();
  timers_give_out_what_is_due();
  letting_go();
  return TEST_RESULT();
}
