// Waiting a moment before sleeping. Waking a thread that sleeps on another core costs tens of microseconds where the core
// has to be woken too, more than the answer to a small request takes, and what runs there next finds its caches cold. So
// whoever expects something soon looks for it for a while, and only as long as looking pays: after vain attempts it looks
// more and more rarely. Where it slept and what it waited for came soon after all, it looks for longer, so that a peer whose
// program thinks for a while between two requests is met awake; if that is in vain, as on a core that both ends share, it
// tries again after more and more of such waits.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "clock.hpp"

namespace kvferry {

class Spin {
 public:
  static constexpr std::int64_t near_ns = 50'000, far_ns = 250'000;

  // Calls found() again and again until it is true (then true) or the time is over, unless it does not pay at present.
  // `clock` gives the time in nanoseconds.
  template <class Found, class Clock = std::int64_t (*)()>
  bool until(Found&& found, Clock&& clock = now_ns) {
    if (passes_over(skip_)) return false;
    const bool far = far_.load(std::memory_order_relaxed);
    const std::int64_t began = clock();
    for (std::int64_t passed = 0; passed < (far ? far_ns : near_ns); passed = clock() - began) {
      if (!found()) continue;
      vain_.store(0, std::memory_order_relaxed);
      if (passed >= near_ns) far_vain_.store(0, std::memory_order_relaxed);
      return true;
    }
    in_vain(vain_, skip_);
    if (far) {
      far_.store(false, std::memory_order_relaxed);
      in_vain(far_vain_, far_skip_);
    }
    return false;
  }

  // What was waited for came after a sleep, and so long after the wait had begun, looking included.
  void slept(std::int64_t waited_ns) noexcept {
    if (waited_ns >= far_ns || passes_over(far_skip_)) return;
    far_.store(true, std::memory_order_relaxed);
    skip_.store(0, std::memory_order_relaxed);
  }

 private:
  using Count = std::atomic<int>;

  static bool passes_over(Count& skip) noexcept {
    if (skip.load(std::memory_order_relaxed) <= 0) return false;
    skip.fetch_sub(1, std::memory_order_relaxed);
    return true;
  }
  static void in_vain(Count& vain, Count& skip) noexcept {
    const int times = std::min(vain.load(std::memory_order_relaxed) + 1, 7);
    vain.store(times, std::memory_order_relaxed);
    skip.store((1 << times) - 1, std::memory_order_relaxed);  // up to 127 times
  }

  Count vain_{0}, skip_{0};          // of looking at all
  Count far_vain_{0}, far_skip_{0};  // of looking for long
  std::atomic<bool> far_{false};
};

}  // namespace kvferry
