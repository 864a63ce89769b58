// Waiting a moment before sleeping. Waking a thread that sleeps on another core costs tens of microseconds where the core
// has to be woken too, more than the answer to a small request takes. So whoever expects something within microseconds
// looks for it for a while, at most 50 µs, and only as long as looking pays: after vain attempts it looks more and more
// rarely.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "clock.hpp"

namespace kvferry {

class Spin {
 public:
  static constexpr std::int64_t longest_ns = 50'000;

  // Calls found() again and again until it is true (then true) or the time is over, unless it does not pay at present.
  template <class Found>
  bool until(Found&& found) {
    if (skip_.load(std::memory_order_relaxed) > 0) {
      skip_.fetch_sub(1, std::memory_order_relaxed);
      return false;
    }
    const auto end = now_ns() + longest_ns;
    do {
      if (found()) {
        vain_.store(0, std::memory_order_relaxed);
        return true;
      }
    } while (now_ns() < end);
    const int vain = std::min(vain_.load(std::memory_order_relaxed) + 1, 7);
    vain_.store(vain, std::memory_order_relaxed);
    skip_.store((1 << vain) - 1, std::memory_order_relaxed);  // up to 127 times
    return false;
  }

 private:
  std::atomic<int> vain_{0}, skip_{0};
};

}  // namespace kvferry
