// A caller that wants to be gone leaves every wait of the core on its own thread, and no other thread's.

#include "../interrupt.hpp"

#include <sys/socket.h>

#include <thread>

#include "../socket.hpp"
#include "nodes.hpp"

using namespace kvferry;
using namespace kvferry::testing;

static bool yes() { return true; }
static bool no() { return false; }

static void a_wait_asks_and_ends() {
  std::mutex mutex;
  std::condition_variable changed;
  const auto wait = [&](bool (*question)(), std::int64_t ms) {
    const Interruptible here(question);
    std::unique_lock lock(mutex);
    return wait_on(changed, lock, Deadline::after_ms(ms), [] { return false; });
  };
  const auto began = now_ns();
  CHECK_FAILS(Kind::cancelled, "interrupted", wait(yes, 60'000));
  CHECK(now_ns() - began < 30'000'000'000);
  CHECK(!wait(no, 300));       // asked, and went on to the deadline
  CHECK(!wait(nullptr, 300));  // nobody to ask
}

static void the_question_is_the_threads_own_and_ends_with_the_call() {
  CHECK(!Interruptible::asked());
  {
    const Interruptible outer(no);
    {
      const Interruptible inner(yes);
      CHECK(Interruptible::asked());
      CHECK(!Interruptible::asked_now_and_then());  // that was just now
      std::thread([] { CHECK(!Interruptible::asked()); }).join();
    }
    CHECK(!Interruptible::asked());
  }
  CHECK(Interruptible::sleep_ms(Deadline::after_ms(60'000)) > 1000);
  const Interruptible here(no);
  CHECK(Interruptible::sleep_ms(Deadline::after_ms(60'000)) <= 200);
}

static void linking_to_somebody_silent_is_left() {
  const auto silent = listen_tcp("127.0.0.1", 0);  // the kernel connects, nobody answers
  Node node{NodeOptions{}};
  const Interruptible here(yes);
  CHECK_FAILS(Kind::cancelled, "interrupted", node.connect("127.0.0.1", local_endpoint(silent.get()).port, Deadline::after_ms(60'000)));
  CHECK(node.links().empty());
}

int main() {
  a_wait_asks_and_ends();
  the_question_is_the_threads_own_and_ends_with_the_call();
  linking_to_somebody_silent_is_left();
  return TEST_RESULT();
}
