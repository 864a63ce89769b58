// Threads that copy at the same time do so on cores of their own. The kernel may wake a copy thread on the core of whoever
// copies already, because the other one is just being looked on (Spin), and then leaves both there for tens of milliseconds,
// which is the whole of most transfers: on a virtual machine of two cores, half of all copies of 128 MiB ran at half speed so.
#pragma once

#include <sched.h>

#include <array>
#include <atomic>

namespace kvferry {

// What is asked of the kernel; tests put something else there.
struct Cores {
  int (*current)() noexcept;                                // < 0: not known
  bool (*move_off)(const cpu_set_t& taken) noexcept;        // the calling thread, to a core that it may use and is not taken
};
extern const Cores kernel_cores;

// Who copies now, and on which core each was when it last looked.
class Spread {
 public:
  explicit Spread(const Cores& cores = kernel_cores) noexcept : cores_(cores) {
    for (auto& seat : seats_) seat.store(free, std::memory_order_relaxed);
  }

  class Seat {  // the calling thread copies as long as this lives
   public:
    // `stays`: it is somebody else's thread, which others may leave a core to but nobody moves.
    Seat(Spread& spread, bool stays) noexcept;
    ~Seat();
    Seat(const Seat&) = delete;
    Seat& operator=(const Seat&) = delete;
    // Between two pieces: goes elsewhere if somebody copies on this core who was there first, or who stays.
    void look() noexcept;

   private:
    Spread& spread_;
    std::size_t number_;
    bool stays_, stuck_ = false;
  };

 private:
  static constexpr int free = -1;
  static constexpr std::size_t most = 64;  // who comes when all are taken copies where it is
  const Cores& cores_;
  std::array<std::atomic<int>, most> seats_;  // core * 2 + stays
  std::atomic<std::size_t> used_{0};          // seats from here on were never taken
};

}  // namespace kvferry
