// The control thread: one epoll for listeners, hellos, control connections, idle lanes and parked operations, and timers.
//
// Nothing here waits on one peer. Watchers are called on the control thread; watch(), rearm() and forget() may be called
// from any thread. A watcher is armed for one event at a time (EPOLLONESHOT) and rearmed when it wants the next, unless it
// asks for more.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "descriptor.hpp"
#include "spin.hpp"

namespace kvferry {

class Watcher {
 public:
  virtual ~Watcher() = default;
  virtual void ready(std::uint32_t events) = 0;
};

class Reactor {
 public:
  // `tick(now_ns)` runs on the control thread after each batch of events and returns when it wants to run next.
  explicit Reactor(std::function<std::int64_t(std::int64_t)> tick);
  ~Reactor();

  void start();
  void stop();  // joins; not from the control thread

  using Token = std::uint64_t;
  enum class Mode { once, always };  // always: until rearmed otherwise, for what is nearly always answered at once
  Token watch(int fd, std::uint32_t events, std::shared_ptr<Watcher> watcher, Mode mode = Mode::once);
  void rearm(Token token, int fd, std::uint32_t events, Mode mode = Mode::once);
  void forget(Token token, int fd);
  void wake() noexcept;                    // tick again now
  void wake_at(std::int64_t at_ns) noexcept;  // tick at that time at the latest
  void post(std::function<void()> task);   // on the control thread
  bool on_control_thread() const noexcept { return std::this_thread::get_id() == thread_.get_id(); }
  void abandon() noexcept;                 // in a forked child: the thread does not exist

 private:
  void run();

  std::function<std::int64_t(std::int64_t)> tick_;
  Descriptor epoll_, event_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  std::atomic<std::int64_t> next_tick_ns_{0};
  std::mutex mutex_;
  std::unordered_map<Token, std::shared_ptr<Watcher>> watchers_;
  std::vector<std::function<void()>> posted_;
  Token last_token_ = 0;
  Spin spin_;
};

}  // namespace kvferry
