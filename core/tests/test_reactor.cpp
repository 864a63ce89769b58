#include "../reactor.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <random>

#include "ends.hpp"

using namespace kvferry;
using namespace kvferry::testing;

struct Counting : Watcher {
  std::atomic<int> events{0};
  std::function<void()> then;
  void ready(std::uint32_t) override {
    ++events;
    if (then) then();
  }
};

static Reactor::Token watch(Reactor& reactor, const Ends& ends, const std::shared_ptr<Counting>& watcher, Reactor::Mode mode = Reactor::Mode::once) {
  return reactor.watch(ends.here.get(), EPOLLIN, watcher, mode);
}

static std::int64_t never(std::int64_t) { return INT64_MAX; }

static void a_watcher_hears_once_until_it_is_armed_again() {
  Reactor reactor(never);
  reactor.start();
  Ends ends;
  const auto watcher = std::make_shared<Counting>();
  const auto token = watch(reactor, ends, watcher);
  ends.say();
  CHECK(eventually([&] { return watcher->events == 1; }));
  ends.say();
  sleep_ms(5);
  CHECK(watcher->events == 1);
  reactor.rearm(token, ends.here.get(), EPOLLIN);
  CHECK(eventually([&] { return watcher->events == 2; }));
  reactor.rearm(token, ends.here.get(), 0);
  reactor.forget(token, ends.here.get());
  reactor.rearm(token, ends.here.get(), EPOLLIN);  // too late: nothing happens
  reactor.forget(token, ends.here.get());
  sleep_ms(5);
  CHECK(watcher->events == 2 && watcher.use_count() == 1);
}

static void one_that_wants_all_hears_all() {
  Reactor reactor(never);
  reactor.start();
  Ends ends;
  const auto watcher = std::make_shared<Counting>();
  watcher->then = [&] {
    char byte;
    [[maybe_unused]] const auto n = ::recv(ends.here.get(), &byte, 1, 0);
  };
  const auto token = watch(reactor, ends, watcher, Reactor::Mode::always);
  for (int i = 1; i <= 5; ++i) {
    ends.say();
    CHECK(eventually([&] { return watcher->events == i; }));
  }
  reactor.forget(token, ends.here.get());
}

// A number that is closed and given out again is somebody else's, whatever events were on their way.
static void a_reused_number_is_not_the_one_before() {
  Reactor reactor(never);
  reactor.start();
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    const auto first = std::make_shared<Counting>(), second = std::make_shared<Counting>();
    int number;
    {
      Ends ends;
      number = ends.here.get();
      const auto token = watch(reactor, ends, first);
      if (random() % 2 == 0) ends.say();
      reactor.forget(token, number);
    }
    Ends ends;
    if (ends.here.get() != number) continue;
    const auto token = watch(reactor, ends, second);
    ends.say();
    CHECK(eventually([&] { return second->events == 1; }));
    CHECK(first->events <= 1);
    reactor.forget(token, number);
  }
}

// Watched, armed and forgotten by many threads, with the events running.
static void many_threads_watch() {
  Reactor reactor(never);
  reactor.start();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 300; ++i) {
        Ends ends;
        const auto watcher = std::make_shared<Counting>();
        const auto token = watch(reactor, ends, watcher);
        ends.say();
        if (i % 3 != 0) CHECK(eventually([&] { return watcher->events == 1; }));
        if (i % 3 == 1) {
          reactor.rearm(token, ends.here.get(), EPOLLIN);
          CHECK(eventually([&] { return watcher->events == 2; }));
        }
        reactor.forget(token, ends.here.get());
      }
    });
  for (auto& thread : threads) thread.join();
}

static void tasks_run_in_order_on_the_control_thread() {
  Reactor reactor(never);
  std::vector<int> order;
  std::atomic<int> done{0};
  for (int i = 0; i < 3; ++i) reactor.post([&, i] { order.push_back(i), ++done; });  // before it runs
  reactor.start();
  CHECK(!reactor.on_control_thread());
  for (int i = 3; i < 100; ++i)
    reactor.post([&, i] {
      CHECK(reactor.on_control_thread());
      order.push_back(i);
      if (i % 10 == 0) reactor.post([&] { ++done; });  // from a task
      ++done;
    });
  CHECK(eventually([&] { return done == 109; }));
  reactor.stop();
  for (int i = 0; i < 100; ++i) CHECK(order[static_cast<std::size_t>(i)] == i);
}

// Whoever wants a tick at some time gets one, also if the control thread is just about to sleep.
static void no_wish_for_a_tick_is_lost() {
  std::atomic<std::int64_t> wanted{INT64_MAX}, ticked_for{0};
  Reactor reactor([&](std::int64_t now) {
    const auto at = wanted.load();
    if (at > now) return at;
    ticked_for = at;
    return INT64_MAX;
  });
  reactor.start();
  std::mt19937 random(4);
  for (int round = 0; round < 500; ++round) {
    const auto at = now_ns() + static_cast<std::int64_t>(random() % 2) * 1'000'000 * static_cast<std::int64_t>(random() % 3);
    wanted = at;
    reactor.wake_at(at);
    CHECK(eventually([&] { return ticked_for == at; }, 1000));
  }
}

static void stopping_lets_go_of_everything() {
  auto watcher = std::make_shared<Counting>();
  std::weak_ptr<Counting> seen = watcher;
  auto captured = std::make_shared<int>(1);
  std::weak_ptr<int> task = captured;
  Ends ends;
  Reactor reactor(never);
  reactor.start();
  watch(reactor, ends, watcher);
  watcher.reset();
  reactor.stop();
  reactor.stop();
  CHECK(seen.expired());
  {
    Reactor other(never);
    other.post([captured] {});
    captured.reset();
    watch(other, ends, std::make_shared<Counting>());
  }
  CHECK(task.expired());
}

int main() {
  a_watcher_hears_once_until_it_is_armed_again();
  one_that_wants_all_hears_all();
  a_reused_number_is_not_the_one_before();
  many_threads_watch();
  tasks_run_in_order_on_the_control_thread();
  no_wish_for_a_tick_is_lost();
  stopping_lets_go_of_everything();
  return TEST_RESULT();
}
