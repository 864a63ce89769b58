// Whether a caller wants to be gone (Ctrl-C), asked by whatever waits on its own thread.
//
// The core knows no signals. Who calls it may leave a question with the thread for the length of the call; waits and long
// copies on that thread ask it about five times a second, and at once when a signal has woken them. A yes ends them as a
// cancellation does. The core's own threads have no question.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "clock.hpp"
#include "error.hpp"

namespace kvferry {

class Interruptible {
 public:
  explicit Interruptible(bool (*question)()) noexcept
      : before_(std::exchange(question_, question)), before_due_ns_(std::exchange(due_ns_, now_ns() + stretch_ns)) {}
  ~Interruptible() {
    question_ = before_;
    due_ns_ = before_due_ns_;
  }
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  static bool asked() {
    if (question_ == nullptr) return false;
    due_ns_ = now_ns() + stretch_ns;
    return question_();
  }
  // For loops that come by often: asking costs whatever it costs the caller.
  static bool asked_now_and_then() { return question_ != nullptr && now_ns() >= due_ns_ && asked(); }
  static void throw_if_asked() {
    if (asked()) throw Error(Kind::cancelled, "interrupted while waiting");
  }
  // How long a wait may sleep before it asks; fit for poll().
  static std::int64_t sleep_ms(const Deadline& until) noexcept {
    return std::min<std::int64_t>(until.left_ms(), question_ == nullptr ? 3'600'000 : stretch_ns / 1'000'000);
  }

 private:
  static constexpr std::int64_t stretch_ns = 200'000'000;
  inline static thread_local bool (*question_)() = nullptr;
  inline static thread_local std::int64_t due_ns_ = 0;
  bool (*before_)();
  std::int64_t before_due_ns_;
};

// False: the deadline has passed. Throws Error(cancelled) when the caller wants to be gone. The lock is not held while it is
// asked, because whoever answers may hold what others want who wait for the lock.
template <typename Reached>
bool wait_on(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, const Deadline& until, Reached reached) {
  for (;;) {
    if (changed.wait_for(lock, std::chrono::milliseconds(Interruptible::sleep_ms(until)), reached)) return true;
    if (until.passed()) return false;
    lock.unlock();
    Interruptible::throw_if_asked();
    lock.lock();
  }
}

}  // namespace kvferry
