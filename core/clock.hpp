// Deadlines on the monotonic clock. A deadline travels between processes as time left and counts from receipt.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ctime>

namespace kvferry {

inline std::int64_t now_ns() noexcept {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return std::int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

struct Deadline {
  std::int64_t at_ns = 0;

  static Deadline after_ms(std::int64_t ms) noexcept { return {now_ns() + ms * 1'000'000}; }
  bool passed() const noexcept { return now_ns() >= at_ns; }
  std::int64_t left_ms() const noexcept {  // rounded up, never negative: fit for poll()
    return std::max<std::int64_t>(0, (at_ns - now_ns() + 999'999) / 1'000'000);
  }
};

}  // namespace kvferry
