#include "operation.hpp"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>

#include "engine.hpp"
#include "interrupt.hpp"
#include "link.hpp"
#include "sentence.hpp"

namespace kvferry {

namespace {
constexpr std::int64_t slow_ns = 1'000'000'000;  // worth a line in the log
constexpr std::int64_t watch_ns = 50'000'000;    // between two looks at an operation that the kernel may hold
}

Notifier::Notifier() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_) throw not_to_be_had("an eventfd", errno);
}

void Notifier::add(std::uint64_t token) {
  const std::lock_guard lock(mutex_);
  tokens_.push_back(token);
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(event_.get(), &one, sizeof one);
}

std::vector<std::uint64_t> Notifier::take() {
  const std::lock_guard lock(mutex_);
  std::uint64_t count;
  [[maybe_unused]] const auto n = ::read(event_.get(), &count, sizeof count);
  return std::exchange(tokens_, {});
}

std::string_view transport_name(Transport transport) noexcept {
  switch (transport) {
    case Transport::map: return "map";
    case Transport::cma: return "cma";
    case Transport::socket: return "socket";
    case Transport::local: return "local";
    case Transport::none: break;
  }
  return "none";
}

void Timers::add(const Key& key, std::weak_ptr<Operation> operation) {
  const std::lock_guard lock(mutex_);
  entries_[key] = std::move(operation);
}

void Timers::remove(const Key& key) {
  const std::lock_guard lock(mutex_);
  entries_.erase(key);
}

std::vector<std::shared_ptr<Operation>> Timers::due(std::int64_t now_ns, std::int64_t& next_ns) {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Operation>> operations;
  while (!entries_.empty() && entries_.begin()->first.at_ns <= now_ns) {
    if (auto operation = entries_.begin()->second.lock()) operations.push_back(std::move(operation));
    entries_.erase(entries_.begin());
  }
  if (!entries_.empty()) next_ns = std::min(next_ns, entries_.begin()->first.at_ns);
  return operations;
}

// Called by the reactor when the descriptor of an operation that was put aside has something.
class Operation::Parked : public Watcher {
 public:
  explicit Parked(std::weak_ptr<Operation> operation) : operation_(std::move(operation)) {}
  void ready(std::uint32_t) override {
    if (const auto operation = operation_.lock()) operation->schedule();
  }

 private:
  std::weak_ptr<Operation> operation_;
};

Operation::Operation(Engine& engine, std::shared_ptr<Link> link, Deadline deadline, const char* verb)
    : engine_(engine),
      link_(std::move(link)),
      deadline_(deadline),
      verb_(verb),
      number_(engine.last_operation.fetch_add(1, std::memory_order_relaxed) + 1),
      started_ns_(now_ns()) {}

// One that has not ended is given up: nobody can reach it any more, and nobody is driving it. Of one that has ended
// nothing is left anywhere, and its node may be gone.
Operation::~Operation() {
  if (finished_.load()) return;
  if (process_generation() != generation_) {  // a forked child: let all be
    [[maybe_unused]] auto* leaked = lane_.release();
    return;
  }
  break_lane();
  if (timer_.at_ns != 0) engine_.timers.remove(timer_);
  if (link_) link_->end(*this);
}

Result Operation::run_here() {
  if (go_apart()) {
    // Not wait(), which leaves an operation to go on by itself: this one has to have ended before its caller is told anything.
    for (std::unique_lock lock(mutex_); !finished_.load();) {
      changed_.wait_for(lock, std::chrono::milliseconds(Interruptible::sleep_ms(Deadline::after_ms(INT32_MAX))));
      lock.unlock();
      if (Interruptible::asked_now_and_then()) cancel();
      lock.lock();
    }
    return result_;
  }
  begin();
  drive();
  return result_;
}

// Of a link that is down, or is being unlinked, the error names peer, cache and operation like that of an operation that has begun.
void Operation::begin() {
  try {
    link_->begin(shared_from_this(), part_of_another());
  } catch (const Error& error) {
    throw Error(error.outcome(), link_->label(), subject(), verb_);
  }
}

// To its end, on this thread, which may wait.
void Operation::drive() {
  for (;;) {
    Need need = guarded_step();
    const auto began = need == Need::readable ? now_ns() : 0;
    if (need == Need::readable) link_->spin.until([&] { return (need = guarded_step()) != Need::readable; });
    if (need == Need::done) return;
    if (Interruptible::asked_now_and_then()) cancelled_.store(true);
    const auto wait_ms = Interruptible::sleep_ms(deadline_);
    if (need == Need::lane || need == Need::nothing_yet) {
      std::unique_lock lock(mutex_);
      // A granted lane, the link's death and a cancel all come through schedule().
      changed_.wait_for(lock, std::chrono::milliseconds(wait_ms),
                        [this] { return again_; });
      again_ = false;
      continue;
    }
    pollfd p{descriptor(), static_cast<short>(need == Need::readable ? POLLIN : POLLOUT), 0};
    const int n = ::poll(&p, 1, static_cast<int>(wait_ms));
    if (n < 0 && Interruptible::asked()) cancelled_.store(true);
    if (n > 0 && need == Need::readable && began != 0) link_->spin.slept(now_ns() - began);
  }
}

void Operation::start() {
  if (go_apart()) return;
  become_asynchronous();
  schedule();
}

void Operation::start_here() {
  become_asynchronous();
  take_turn(false);
}

// False: the kernel will not hold it.
bool Operation::go_apart() {
  try {
    if (!may_be_held()) return false;
  } catch (const Error&) {  // said by the first step
    return false;
  }
  begin();
  apart_ = true;
  watch_again();
  try {
    engine_.crew.run_apart([self = shared_from_this()] { self->drive(); });
  } catch (const Error& error) {
    finish(error.outcome(), 0, Transport::none);
  }
  return true;
}

void Operation::timer_came() {
  if (!apart_) return schedule();
  if (finished_.load()) return;
  if (std::exchange(overdue_, must_stop())) give_up_if_held();
  watch_again();
}

void Operation::watch_again() {
  const Timers::Key at{now_ns() + watch_ns, number_};
  engine_.timers.add(at, weak_from_this());
  engine_.reactor.wake_at(at.at_ns);
}

// On the control thread, beside the thread that drives it: what that one may be changing is left alone.
void Operation::give_up_if_held() {
  auto expected = Where::in_kernel;
  if (!where_.compare_exchange_strong(expected, Where::given_up, std::memory_order_acq_rel)) return;
  auto why = stop_reason();
  why.sentence += ", and the kernel still holds its copy, which waits for the file or device behind the memory";
  why.touched = true;
  why.settled = false;
  given_up();
  if (lane_) {
    ::shutdown(lane_->descriptor.get(), SHUT_RDWR);
    link_->lanes.forget(*lane_);
  }
  conclude(std::move(why), 0, Transport::none);
}

void Operation::back_from_kernel() noexcept {
  auto expected = Where::in_kernel;
  if (where_.compare_exchange_strong(expected, Where::here, std::memory_order_acq_rel)) return;
  wait(Deadline::after_ms(INT32_MAX));  // the control thread is about to have ended it
  let_go();
}

// Whoever takes the link down may schedule it as soon as the link knows it.
void Operation::become_asynchronous() {
  begin();
  const std::lock_guard lock(mutex_);
  asynchronous_ = true;
  if (goes_on_alone()) self_ = shared_from_this();
}

void Operation::schedule() {
  const std::lock_guard lock(mutex_);
  if (finished_.load()) return;
  if (!asynchronous_) {
    again_ = true;
    changed_.notify_all();
    return;
  }
  if (queued_) return;
  if (running_) {
    again_ = true;
    engine_.crew.disturb();  // its driver may be waiting for the socket
    return;
  }
  queued_ = true;
  engine_.crew.submit(shared_from_this());
}

void Operation::take_turn(bool may_adopt) {
  {
    const std::lock_guard lock(mutex_);
    queued_ = false;
    if (running_) {  // scheduled between start_here()'s first lines: one driver at a time
      again_ = true;
      return;
    }
    running_ = true;
  }
  for (;;) {
    const Need need = guarded_step();
    if (need == Need::done) break;
    const bool on_descriptor = need == Need::readable || need == Need::writable;
    const short events = need == Need::readable ? POLLIN : POLLOUT;
    // An idle copy thread waits for the socket it has just served, until there is other work.
    const auto scheduled = [this] {
      const std::lock_guard lock(mutex_);
      return again_;
    };
    if (on_descriptor && may_adopt && engine_.crew.wait_while_idle(descriptor(), events, deadline_, scheduled)) continue;
    set_timer(need);
    try {
      if (on_descriptor) put_aside(need);
    } catch (const Error& error) {
      finish(error.outcome(), 0, Transport::none);
    }
    break;
  }
  const std::lock_guard lock(mutex_);
  running_ = false;
  if (again_ && !finished_.load()) {
    again_ = false;
    queued_ = true;
    engine_.crew.submit(shared_from_this());
  }
}

void Operation::set_timer(Need need) {
  constexpr std::int64_t dial_again_ns = 100'000'000;
  const auto now = now_ns();
  // Where a lane could not be opened nobody else brings one: it asks again itself.
  const bool soon = need == Need::lane && link_->lanes.missing_some();
  const auto at = soon ? std::min(deadline_.at_ns, now + dial_again_ns) : deadline_.at_ns;
  if (timer_.at_ns == at && at > now) return;  // still set
  if (timer_.at_ns != 0) engine_.timers.remove(timer_);
  // Past its deadline an operation that still waits (for a step that sees it) is asked again before long.
  timer_ = {std::max(at, now + 1'000'000), number_};
  engine_.timers.add(timer_, weak_from_this());
  engine_.reactor.wake_at(timer_.at_ns);
}

int Operation::descriptor() const noexcept { return lane_->descriptor.get(); }

void Operation::put_aside(Need need) {
  const std::uint32_t events = need == Need::readable ? EPOLLIN : EPOLLOUT;
  if (token_ == 0)
    token_ = engine_.reactor.watch(descriptor(), events, std::make_shared<Parked>(weak_from_this()));
  else
    engine_.reactor.rearm(token_, descriptor(), events);
}

void Operation::forget_descriptor() noexcept {
  if (lane_ && token_ != 0) engine_.reactor.forget(token_, lane_->descriptor.get());
  token_ = 0;
}

Need Operation::guarded_step() {
  if (finished_.load()) return Need::done;
  try {
    return step();
  } catch (const Error& error) {
    Outcome outcome = error.outcome();
    outcome.touched |= touched_;
    finish(std::move(outcome), 0, Transport::none);
  } catch (const wire::WireError& error) {
    finish({Kind::peer_lost, std::string("the peer sent something that is not kvferry's protocol: ") + error.what(), touched_, true},
           0, Transport::none);
  } catch (const std::bad_alloc&) {
    finish({Kind::out_of_memory, "out of memory", touched_, true}, 0, Transport::none);
  }
  return Need::done;
}

void Operation::finish(Outcome outcome, std::uint64_t bytes, Transport transport) {
  if (lane_) break_lane();  // a step that ended well has given it back already
  if (!finished_.load()) conclude(std::move(outcome), bytes, transport);
}

void Operation::conclude(Outcome outcome, std::uint64_t bytes, Transport transport) {
  const auto self = std::move(self_);  // released last
  if (outcome.kind == Kind::peer_lost && link_ && !link_->alive()) {
    // Its lane was shut because the link went down: that is the reason to tell.
    auto why = link_->death();
    outcome.kind = why.kind;
    outcome.sentence = std::move(why.sentence);
  }
  if (link_) link_->lanes.leave(*this);
  if (timer_.at_ns != 0) engine_.timers.remove(timer_);
  result_ = {std::move(outcome), bytes, now_ns() - started_ns_, transport};
  if (result_.nanoseconds > slow_ns && result_.outcome.ok() && link_ && !subject().empty())
    engine_.log.add("info", std::string("a slow ") + verb_ + ": " + std::to_string(result_.nanoseconds / 1'000'000) + " ms for " +
                                std::to_string(bytes) + " bytes of " + subject() + " by " + std::string(transport_name(transport)) + ", link to " + link_->label());
  ended();
  decltype(notifiers_) notifiers;
  {
    const std::lock_guard lock(mutex_);
    finished_.store(true, std::memory_order_release);
    notifiers.swap(notifiers_);
    changed_.notify_all();
  }
  for (auto& [notifier, token] : notifiers)
    if (const auto one = notifier.lock()) one->add(token);
  if (link_) link_->end(*this);
}

bool Operation::wait(const Deadline& until) {
  if (done()) return true;
  check_not_forked(generation_);
  std::unique_lock lock(mutex_);
  return wait_on(changed_, lock, until, [this] { return finished_.load(); });
}

void check_not_forked(std::uint32_t generation) {
  if (generation != process_generation())
    throw Error(Kind::closed, "this node belongs to the parent process and is closed in its forked child: make a node of its own");
}

void Operation::cancel() {
  if (!done()) check_not_forked(generation_);
  cancelled_.store(true, std::memory_order_release);
  schedule();
}

bool Operation::notify(std::shared_ptr<Notifier> notifier, std::uint64_t token) {
  if (done()) return false;
  check_not_forked(generation_);
  const std::lock_guard lock(mutex_);
  if (finished_.load()) return false;
  notifiers_.emplace_back(std::move(notifier), token);
  return true;
}

bool Operation::take_lane(LaneUse use) {
  if (lane_) return true;
  lane_ = link_->lanes.take(use, *this);
  return lane_ != nullptr;
}

void Operation::give_lane() noexcept {
  if (!lane_) return;
  forget_descriptor();
  link_->lanes.give(std::move(lane_));
}

void Operation::break_lane() noexcept {
  if (!lane_) return;
  forget_descriptor();
  link_->lanes.lost(std::move(lane_));
}

bool Operation::change_lane() noexcept {
  constexpr unsigned most = 2;  // lost() has looked after the other idle ones
  if (must_stop() || lanes_changed_ == most || link_->peer_process_ended()) return false;
  ++lanes_changed_;
  break_lane();
  return !link_->lanes.missing_some();
}

// The peer was told the same deadline: it may be the first to see it pass, and closes the lane then.
Outcome Operation::lane_closed() const {
  if (must_stop()) return stop_reason();
  return {Kind::peer_lost, link_->label() + " closed the lane of this " + verb_, touched_, true};
}

void Operation::set_request(std::vector<std::uint8_t> bytes) {
  request_ = std::move(bytes);
  request_sent_ = 0;
}

Operation::Sent Operation::send_request() {
  while (!lane_->preface.empty() || request_sent_ < request_.size()) {
    const bool preface = !lane_->preface.empty();
    if (!preface && request_sent_ == 0 && !before_request()) return Sent::lost;
    const long n = send_some(lane_->descriptor.get(),
                             preface ? std::span<const std::uint8_t>(lane_->preface) : std::span<const std::uint8_t>(request_).subspan(request_sent_));
    if (n < 0) return Sent::lost;
    if (n == 0) return Sent::later;
    if (preface)
      lane_->preface.erase(lane_->preface.begin(), lane_->preface.begin() + n);
    else
      request_sent_ += static_cast<std::size_t>(n);
  }
  return Sent::all;
}

bool Operation::must_stop() const noexcept {
  if (Interruptible::asked_now_and_then()) cancelled_.store(true);  // the caller's own thread, in a long copy
  return cancelled_.load(std::memory_order_relaxed) || !link_->alive() || deadline_.passed();
}

bool Operation::only_link_ended() const noexcept {
  return !link_->alive() && !cancelled_.load(std::memory_order_relaxed) && !deadline_.passed();
}

Outcome Operation::stop_reason() const {
  if (cancelled_.load(std::memory_order_acquire)) return {Kind::cancelled, std::string(verb_) + " was cancelled", touched_, true};
  if (!link_->alive()) {
    Outcome outcome = link_->death();
    outcome.touched = touched_;
    outcome.settled = true;
    return outcome;
  }
  if (!deadline_.passed()) return {};
  const bool never_begun = !lane_ && !touched_ && link_->lanes.missing_some();
  return {Kind::deadline, std::string("time was up for this ") + verb_ +
          (never_begun ? ": no connection could be opened for it; has this process, or its peer, no descriptors left?" : ""), touched_, true};
}

}  // namespace kvferry
