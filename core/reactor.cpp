#include "reactor.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "clock.hpp"
#include "error.hpp"
#include "thread.hpp"

namespace kvferry {

namespace {
constexpr std::uint64_t event_token = 0;
constexpr int batch = 64;
}  // namespace

Reactor::Reactor(std::function<std::int64_t(std::int64_t)> tick)
    : tick_(std::move(tick)), epoll_(::epoll_create1(EPOLL_CLOEXEC)), event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_ || !event_) throw not_to_be_had("an epoll or eventfd", errno);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = event_token;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, event_.get(), &event);
}

Reactor::~Reactor() { stop(); }

void Reactor::start() {
  thread_ = start_thread("kvferry-control", [this] { run(); });
}

void Reactor::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true);
  wake();
  thread_.join();
  // Let go of outside the lock: the last of one may forget others.
  decltype(watchers_) watchers;
  decltype(posted_) posted;
  const std::lock_guard lock(mutex_);
  watchers.swap(watchers_);
  posted.swap(posted_);
}

void Reactor::abandon() noexcept {
  if (thread_.joinable()) thread_.detach();
}

Reactor::Token Reactor::watch(int fd, std::uint32_t events, std::shared_ptr<Watcher> watcher, Mode mode) {
  Token token;
  {
    const std::lock_guard lock(mutex_);
    token = ++last_token_;
    watchers_.emplace(token, std::move(watcher));
  }
  epoll_event event{};
  event.events = events | (mode == Mode::once ? EPOLLONESHOT : 0u);
  event.data.u64 = token;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    // A lane that is parked again: its descriptor is still known here under the token of the last time.
    if (errno != EEXIST || ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) != 0) {
      const int error = errno;
      const std::lock_guard lock(mutex_);
      watchers_.erase(token);
      throw not_to_be_had("a watch on a connection", error);
    }
  }
  return token;
}

void Reactor::rearm(Token token, int fd, std::uint32_t events, Mode mode) {
  epoll_event event{};
  event.events = events | (mode == Mode::once ? EPOLLONESHOT : 0u);
  event.data.u64 = token;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Reactor::forget(Token token, int fd) {
  if (fd >= 0) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  std::shared_ptr<Watcher> gone;  // let go of outside the lock
  const std::lock_guard lock(mutex_);
  const auto it = watchers_.find(token);
  if (it == watchers_.end()) return;
  gone = std::move(it->second);
  watchers_.erase(it);
}

void Reactor::wake() noexcept {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(event_.get(), &one, sizeof one);
}

void Reactor::wake_at(std::int64_t at_ns) noexcept {
  if (at_ns < next_tick_ns_.load(std::memory_order_acquire)) wake();
}

void Reactor::post(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    posted_.push_back(std::move(task));
  }
  wake();
}

void Reactor::run() {
  epoll_event events[batch];
  bool busy = false;
  while (!stopping_.load()) {
    std::vector<std::function<void()>> posted;
    {
      const std::lock_guard lock(mutex_);
      posted.swap(posted_);
    }
    for (auto& task : posted) task();

    // "Never" while tick() looks around: whoever adds a timer meanwhile wakes us once more than needed, never once less.
    next_tick_ns_.store(INT64_MAX, std::memory_order_release);
    const std::int64_t next = tick_(now_ns());
    next_tick_ns_.store(next, std::memory_order_release);
    const std::int64_t left_ns = std::max<std::int64_t>(0, next - now_ns());
    const int timeout_ms = static_cast<int>(std::min<std::int64_t>((left_ns + 999'999) / 1'000'000, 60'000));

    int n = 0;
    if (busy && timeout_ms > 0) spin_.until([&] { return (n = ::epoll_wait(epoll_.get(), events, batch, 0)) != 0; });
    if (n == 0) n = ::epoll_wait(epoll_.get(), events, batch, timeout_ms);
    busy = n > 0;  // where one request came, another may follow
    for (int i = 0; i < n; ++i) {
      if (events[i].data.u64 == event_token) {
        std::uint64_t count;
        [[maybe_unused]] const auto got = ::read(event_.get(), &count, sizeof count);
        continue;
      }
      std::shared_ptr<Watcher> watcher;
      {
        const std::lock_guard lock(mutex_);
        const auto it = watchers_.find(events[i].data.u64);
        if (it != watchers_.end()) watcher = it->second;
      }
      if (watcher) watcher->ready(events[i].events);
    }
  }
}

}  // namespace kvferry
