// Waiting a moment before sleeping. Waking a thread that sleeps on another core costs tens of microseconds where the core
// has to be woken too, more than the answer to a small request takes, and what runs there next finds its caches cold. So
// whoever expects something soon looks for it for a while, and only as long as looking pays: after vain attempts it looks
// more and more rarely. Where what it slept for came soon after all, it looks for longer from then on, with a bow to
// whoever else wants the core; a peer whose program thinks for that long between two requests is met awake.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "clock.hpp"

namespace kvferry {

class Spin {
 public:
  static constexpr std::int64_t near_ns = 50'000, far_ns = 250'000;

  // Calls found() again and again until it is true (then true) or the time is over, unless it does not pay at present.
  template <class Found>
  bool until(Found&& found) {
    if (skip_.load(std::memory_order_relaxed) > 0) {
      skip_.fetch_sub(1, std::memory_order_relaxed);
      return false;
    }
    const auto began = now_ns();
    const auto longest = far_.load(std::memory_order_relaxed) ? far_ns : near_ns;
    for (std::int64_t passed = 0; passed < longest; passed = now_ns() - began) {
      if (passed >= near_ns) std::this_thread::yield();
      if (found()) {
        vain_.store(0, std::memory_order_relaxed);
        return true;
      }
    }
    const int vain = std::min(vain_.load(std::memory_order_relaxed) + 1, 7);
    vain_.store(vain, std::memory_order_relaxed);
    skip_.store((1 << vain) - 1, std::memory_order_relaxed);  // up to 127 times
    return false;
  }

  // It came after a sleep, so long after the wait for it had begun, looking included.
  void slept(std::int64_t waited_ns) noexcept {
    const bool soon = waited_ns < far_ns;
    far_.store(soon, std::memory_order_relaxed);
    if (!soon) return;
    vain_.store(0, std::memory_order_relaxed);
    skip_.store(0, std::memory_order_relaxed);
  }

 private:
  std::atomic<int> vain_{0}, skip_{0};
  std::atomic<bool> far_{false};
};

}  // namespace kvferry
