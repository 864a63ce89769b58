// The copy threads: a fixed number per node for any number of links. They take turns at operations and help with pieces
// of one-sided transfers. None of them waits on one peer while there is other work: an idle one may adopt the socket of
// the operation it has just served, and lets go of it as soon as anything is queued.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "clock.hpp"
#include "descriptor.hpp"

namespace kvferry {

class Operation;

class Crew {
 public:
  Crew(unsigned threads, unsigned helpers);
  ~Crew();
  void start();
  void stop();  // after the last operation has ended; joins

  void submit(std::shared_ptr<Operation> operation);
  // Asks up to `hands` copy threads to call operation->help(). Returns how many were asked.
  unsigned ask_for_help(const std::shared_ptr<Operation>& operation, unsigned hands);
  void disturb() noexcept;  // whoever waits for an adopted socket looks for other work
  void submit_background(std::function<void()> task);  // when nothing else is to be done
  // On a thread of its own, which the kernel may hold. Throws Error(busy): there are too many of them, or no more can be had.
  void run_apart(std::function<void()> task);
  bool wait_for_apart(const Deadline& until);  // false: one is still held, and the crew must stay
  static constexpr unsigned apart_at_most = 64;
  unsigned threads() const noexcept { return threads_wanted_; }
  unsigned helpers() const noexcept { return helpers_; }
  // Waits for the descriptor, for other work, or for the deadline; true if the descriptor has something. `wanted` is asked
  // once it can be disturbed: true, and it does not wait.
  bool wait_while_idle(int fd, short events, const Deadline& until, const std::function<bool()>& wanted = {});
  void abandon() noexcept;

 private:
  struct Task {
    std::shared_ptr<Operation> operation;
    bool help = false;
  };
  void run();

  unsigned threads_wanted_, helpers_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<Task> tasks_;
  std::deque<std::function<void()>> background_;
  unsigned apart_ = 0;
  std::condition_variable apart_ended_;
  std::atomic<int> adopters_{0};
  Descriptor event_;
  bool stopping_ = false;
};

}  // namespace kvferry
