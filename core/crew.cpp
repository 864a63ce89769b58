#include "crew.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>

#include "operation.hpp"
#include "sentence.hpp"
#include "thread.hpp"

namespace kvferry {

Crew::Crew(unsigned threads, unsigned helpers)
    : threads_wanted_(threads), helpers_(helpers), event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_) throw not_to_be_had("an eventfd", errno);
}

Crew::~Crew() { stop(); }

void Crew::start() {
  threads_.reserve(threads_wanted_);
  for (unsigned i = 0; i < threads_wanted_; ++i)
    threads_.push_back(start_thread("kvferry-copy" + std::to_string(i), [this] { run(); }));
}

void Crew::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    work_.notify_all();
  }
  disturb();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
  tasks_.clear();
  background_.clear();
}

void Crew::abandon() noexcept {
  for (auto& thread : threads_) thread.detach();
  threads_.clear();
}

void Crew::submit(std::shared_ptr<Operation> operation) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back({std::move(operation), false});
    work_.notify_one();
  }
  disturb();
}

void Crew::disturb() noexcept {
  if (adopters_.load(std::memory_order_seq_cst) == 0) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(event_.get(), &one, sizeof one);
}

unsigned Crew::ask_for_help(const std::shared_ptr<Operation>& operation, unsigned hands) {
  hands = std::min(hands, helpers_);
  if (hands == 0) return 0;
  {
    const std::lock_guard lock(mutex_);
    for (unsigned i = 0; i < hands; ++i) {
      tasks_.push_front({operation, true});  // it is running already: before what has not begun
      work_.notify_one();
    }
  }
  disturb();
  return hands;
}

void Crew::submit_background(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  background_.push_back(std::move(task));
  work_.notify_one();
}

void Crew::run_apart(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  if (apart_ == apart_at_most)
    throw Error(Kind::busy, sentence(apart_at_most, " operations that read or write memory mapped from files are in flight already: try again when some have ended"));
  start_thread("kvferry-apart", [this, task = std::move(task)]() mutable {
    task();
    task = nullptr;
    const std::lock_guard ended(mutex_);
    --apart_;
    apart_ended_.notify_all();
  }).detach();
  ++apart_;
}

bool Crew::wait_for_apart(const Deadline& until) {
  std::unique_lock lock(mutex_);
  return apart_ended_.wait_for(lock, std::chrono::milliseconds(until.left_ms()), [this] { return apart_ == 0; });
}

bool Crew::wait_while_idle(int fd, short events, const Deadline& until, const std::function<bool()>& wanted) {
  adopters_.fetch_add(1, std::memory_order_seq_cst);
  bool ready = false;
  bool idle;
  {
    // After the count above: whoever queues from now on also writes the event.
    const std::lock_guard lock(mutex_);
    idle = tasks_.empty() && !stopping_;
  }
  idle = idle && !(wanted && wanted());
  if (idle) {
    pollfd p[2] = {{fd, events, 0}, {event_.get(), POLLIN, 0}};
    const int n = ::poll(p, 2, static_cast<int>(std::min<std::int64_t>(until.left_ms(), 1000)));
    ready = n > 0 && p[0].revents != 0;
    if (n > 0 && p[1].revents != 0) {
      std::uint64_t count;
      [[maybe_unused]] const auto got = ::read(event_.get(), &count, sizeof count);
    }
  }
  adopters_.fetch_sub(1, std::memory_order_seq_cst);
  return ready;
}

void Crew::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (!tasks_.empty()) {
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      if (task.help)
        task.operation->help();
      else
        task.operation->step_on_crew();
      task.operation.reset();
      lock.lock();
    } else if (stopping_) {
      return;
    } else if (!background_.empty()) {
      auto task = std::move(background_.front());
      background_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    } else {
      work_.wait(lock);
    }
  }
}

}  // namespace kvferry
