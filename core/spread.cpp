#include "spread.hpp"

namespace kvferry {

namespace {

// Of the cores that this thread may use it is allowed the free ones alone, which moves it at once, and then all of them again.
// What somebody else sets in these microseconds is lost.
bool move_off(const cpu_set_t& taken) noexcept {
  cpu_set_t allowed, left;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;  // a machine of more than 1,024 cores, or a sandbox
  CPU_AND(&left, &allowed, &taken);
  CPU_XOR(&left, &left, &allowed);
  if (CPU_COUNT(&left) == 0 || ::sched_setaffinity(0, sizeof left, &left) != 0) return false;
  static_cast<void>(::sched_setaffinity(0, sizeof allowed, &allowed));
  return true;
}

}  // namespace

const Cores kernel_cores{[]() noexcept { return ::sched_getcpu(); }, move_off};

Spread::Seat::Seat(Spread& spread, bool stays) noexcept : spread_(spread), number_(most), stays_(stays) {
  const int core = spread_.cores_.current();
  if (core < 0 || core >= CPU_SETSIZE) return;
  for (std::size_t i = 0; i < most; ++i) {
    int none = free;
    if (!spread_.seats_[i].compare_exchange_strong(none, core * 2 + stays_, std::memory_order_relaxed)) continue;
    number_ = i;
    for (auto used = spread_.used_.load(std::memory_order_relaxed);
         used <= i && !spread_.used_.compare_exchange_weak(used, i + 1, std::memory_order_relaxed);) {
    }
    return;
  }
}

Spread::Seat::~Seat() {
  if (number_ < most) spread_.seats_[number_].store(free, std::memory_order_relaxed);
}

void Spread::Seat::look() noexcept {
  if (number_ == most || stuck_) return;
  const int core = spread_.cores_.current();
  auto& mine = spread_.seats_[number_];
  if (mine.load(std::memory_order_relaxed) != core * 2 + stays_) mine.store(core * 2 + stays_, std::memory_order_relaxed);
  if (stays_) return;
  bool crowded = false;
  cpu_set_t taken;
  CPU_ZERO(&taken);
  const auto used = spread_.used_.load(std::memory_order_relaxed);
  for (std::size_t i = 0; i < used; ++i) {
    const int other = i == number_ ? free : spread_.seats_[i].load(std::memory_order_relaxed);
    if (other == free) continue;
    CPU_SET(other / 2, &taken);
    crowded |= other / 2 == core && (i < number_ || other % 2 != 0);
  }
  if (!crowded) return;
  if (spread_.cores_.move_off(taken))
    mine.store(spread_.cores_.current() * 2, std::memory_order_relaxed);
  else
    stuck_ = true;  // more threads than cores: not asked again for this copy
}

}  // namespace kvferry
