#include "calls.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>

#include "ask.hpp"
#include "interrupt.hpp"
#include "sentence.hpp"
#include "serve.hpp"

namespace kvferry {

namespace {

constexpr std::uint64_t event_token = 0;
constexpr std::uint32_t asks = EPOLLIN | EPOLLRDHUP;
constexpr std::uint32_t ended = EPOLLRDHUP | EPOLLHUP | EPOLLERR;
constexpr std::size_t sent_per_turn = 1 << 20;
constexpr std::size_t most_lanes_of_a_link = 32;  // twice of what a peer keeps, for those that it has reset
constexpr std::int64_t far_ms = INT32_MAX;

}  // namespace

// One connection on which a peer asks.
class CallLane : public Watcher, public std::enable_shared_from_this<CallLane> {
 public:
  CallLane(Calls& calls, Calls::Token token, std::shared_ptr<Link> link, Descriptor descriptor, std::span<const std::uint8_t> read,
           std::function<void(bool used)> lost)
      : link(std::move(link)), calls_(calls), token_(token), descriptor_(std::move(descriptor)), in_(read), lost_(std::move(lost)) {}

  const std::shared_ptr<Link> link;

  void start(std::vector<std::uint8_t> first) {
    const std::lock_guard lock(mutex_);
    try {
      calls_.watch(token_, descriptor_.get(), 0, false);
      if (first.empty()) return go_on();
      in_hand_ = true;  // nothing is read before that is out
      send_later(std::move(first));
    } catch (const Error& error) {
      lose(error.what());
    }
  }

  bool hung_up() const {
    const std::lock_guard lock(mutex_);
    pollfd p{descriptor_.get(), POLLRDHUP, 0};
    return ::poll(&p, 1, 0) > 0;
  }

  void end() noexcept {
    const std::lock_guard lock(mutex_);
    drop();
  }

  // What has come, on the thread of whoever will answer it; nullptr: no whole request.
  std::unique_ptr<Call> receive(std::uint32_t events, bool serving) {
    const std::lock_guard lock(mutex_);
    if (gone_ || in_hand_) return nullptr;
    try {
      switch (in_.read(descriptor_.get())) {
        case MessageReader::State::would_block:
        case MessageReader::State::more: go_on(); return nullptr;
        case MessageReader::State::lost: lose(); return nullptr;
        case MessageReader::State::message: break;
      }
      used_ = true;
      const bool one_way = in_.header.type == wire::Type::tell;
      if (!one_way && in_.header.type != wire::Type::call) throw wire::WireError("not a call");
      if (!one_way && (events & ended) != 0) {  // the asker has given up
        lose();
        return nullptr;
      }
      if (!serving) {
        in_.body = {};
        in_hand_ = true;
        if (one_way)
          go_on();
        else
          send_now(ended_frame(in_.header.operation, {Kind::unsupported, "the code of this peer answers no calls (Node.next_call)", false, true}, 0, Transport::none), {});
        return nullptr;
      }
      link->calls_came.store(true);
      auto call = std::make_unique<Call>(shared_from_this(), link->id, link->peer.same_host, in_.header, std::move(in_.body));
      in_hand_ = true;
      operation_ = in_.header.operation;
      if (one_way) go_on();
      return call;
    } catch (const wire::WireError& error) {
      lose(error.what());
    } catch (const std::bad_alloc&) {
      lose("out of memory for a call");
    }
    return nullptr;
  }

  bool answer(std::uint64_t operation, std::vector<std::uint8_t> frame, std::span<const std::uint8_t> body) {
    const std::lock_guard lock(mutex_);
    if (gone_ || !in_hand_ || operation_ != operation) return false;
    return send_now(std::move(frame), body);
  }

  // The control thread: the socket takes more of what it did not take at once.
  void ready(std::uint32_t) override {
    const std::lock_guard lock(mutex_);
    if (gone_) return;
    for (std::size_t this_turn = 0; out_sent_ < out_.size() && this_turn < sent_per_turn;) {
      const long n = send_some(descriptor_.get(), std::span(out_).subspan(out_sent_));
      if (n < 0) return lose();
      if (n == 0) break;
      out_sent_ += static_cast<std::size_t>(n);
      this_turn += static_cast<std::size_t>(n);
    }
    if (out_sent_ < out_.size()) return calls_.engine_.reactor.rearm(sending_, descriptor_.get(), EPOLLOUT);
    calls_.engine_.reactor.forget(std::exchange(sending_, 0), descriptor_.get());
    out_ = {};
    out_sent_ = 0;
    go_on();
  }

 private:
  // Precondition of all of these: locked.
  void go_on() {
    in_hand_ = false;
    // Writable at once as well: the beginning of the next request has been read, perhaps all of it.
    calls_.watch(token_, descriptor_.get(), in_.ahead() ? asks | EPOLLOUT : asks, true);
  }

  bool send_now(std::vector<std::uint8_t> frame, std::span<const std::uint8_t> body) {
    const iovec iov[2] = {{frame.data(), frame.size()}, {const_cast<std::uint8_t*>(body.data()), body.size()}};
    const long n = send_some(descriptor_.get(), std::span<const iovec>(iov, body.empty() ? 1 : 2));
    if (n < 0) return lose(), false;
    if (static_cast<std::size_t>(n) == frame.size() + body.size()) return go_on(), true;
    try {
      frame.insert(frame.end(), body.begin(), body.end());
      frame.erase(frame.begin(), frame.begin() + n);
      send_later(std::move(frame));
    } catch (const Error& error) {
      return lose(error.what()), false;
    } catch (const std::bad_alloc&) {
      return lose("out of memory for an answer"), false;
    }
    return true;
  }

  void send_later(std::vector<std::uint8_t> bytes) {
    out_ = std::move(bytes);
    sending_ = calls_.engine_.reactor.watch(descriptor_.get(), EPOLLOUT, shared_from_this());
  }

  void lose(const char* why = nullptr) noexcept {
    if (gone_) return;
    if (why != nullptr) calls_.engine_.log.add("warning", "a lane of " + link->label() + " was closed: " + why);
    if (lost_) calls_.engine_.reactor.post([lost = std::move(lost_), used = used_] { lost(used); });
    drop();
  }

  void drop() noexcept {
    if (std::exchange(gone_, true)) return;
    if (sending_ != 0) calls_.engine_.reactor.forget(std::exchange(sending_, 0), descriptor_.get());
    out_ = {};
    in_.body = {};
    ::shutdown(descriptor_.get(), SHUT_RDWR);
    calls_.forget(token_, descriptor_.get());
    descriptor_.reset();
  }

  Calls& calls_;
  const Calls::Token token_;
  mutable std::mutex mutex_;
  Descriptor descriptor_;
  MessageReader in_;
  std::function<void(bool used)> lost_;
  bool in_hand_ = false, used_ = false, gone_ = false;
  std::uint64_t operation_ = 0;
  std::vector<std::uint8_t> out_;
  std::size_t out_sent_ = 0;
  Reactor::Token sending_ = 0;
};

// ---- Call

Call::Call(std::shared_ptr<CallLane> lane, std::uint64_t link, bool on_this_host, const wire::Header& header, Payload bytes)
    : link_id(link),
      same_host(on_this_host),
      one_way(header.type == wire::Type::tell),
      deadline(Deadline::after_ms(one_way ? far_ms : static_cast<std::int64_t>(std::min<std::uint64_t>(header.offset, far_ms)))),
      message(std::move(bytes)),
      lane_(std::move(lane)),
      operation_(header.operation),
      answered_(one_way) {}

Call::~Call() {
  if (generation_ != process_generation()) {  // a forked child: let all be
    new std::shared_ptr<CallLane>(std::move(lane_));
    return;
  }
  if (answered_.exchange(true)) return;
  try {
    lane_->answer(operation_, ended_frame(operation_, {Kind::internal, "this call was not answered: whatever took it has dropped it", false, true}, 0, Transport::none), {});
  } catch (const std::bad_alloc&) {
    lane_->end();
  }
}

bool Call::answer(std::span<const std::uint8_t> bytes) {
  check_message(bytes.size());
  check_not_forked(generation_);
  if (one_way) throw Error(Kind::invalid_argument, "nobody waits for an answer to a message that was sent one way");
  if (answered_.exchange(true)) throw Error(Kind::invalid_argument, "this call has been answered already");
  wire::Header header;
  header.type = wire::Type::answer;
  header.body_bytes = static_cast<std::uint32_t>(bytes.size());
  header.operation = operation_;
  const auto* at = reinterpret_cast<const std::uint8_t*>(&header);
  return lane_->answer(operation_, {at, at + sizeof header}, bytes);
}

// ---- Calls

// The control thread, while nobody answers.
class Calls::Refuser : public Watcher {
 public:
  explicit Refuser(Calls& calls) : calls_(calls) {}
  void ready(std::uint32_t) override { calls_.refuse_all(); }

 private:
  Calls& calls_;
};

Calls::Calls(Engine& engine)
    : engine_(engine), epoll_(::epoll_create1(EPOLL_CLOEXEC)), event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE)) {
  if (!epoll_ || !event_) throw not_to_be_had("an epoll or eventfd", errno);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = event_token;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, event_.get(), &event);
  const std::lock_guard lock(serving_mutex_);
  refuser_ = engine_.reactor.watch(epoll_.get(), EPOLLIN, std::make_shared<Refuser>(*this));
}

void Calls::serve() {
  if (serving_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(serving_mutex_);
  serving_.store(true);
  if (refuser_ != 0) engine_.reactor.forget(std::exchange(refuser_, 0), epoll_.get());
}

void Calls::refuse_all() {
  const std::lock_guard lock(serving_mutex_);  // when serve() has returned, nothing is refused any more
  if (refuser_ == 0) return;
  Token token;
  std::uint32_t events;
  for (int turns = 0; turns < 64 && !closed_.load() && wait(0, token, events) > 0; ++turns)
    if (const auto found = lane(token)) found->receive(events, false);
  if (!closed_.load()) engine_.reactor.rearm(refuser_, epoll_.get(), EPOLLIN);
}

CallEvent Calls::next(const Deadline& until) {
  serve();
  for (;;) {
    if (closed_.load()) throw Error(Kind::closed, "this node is closed");
    Token token = 0;
    std::uint32_t events = 0;
    int n = wait(0, token, events);
    const auto began = n == 0 ? now_ns() : 0;
    if (n == 0 && !until.passed() && !looking_.test_and_set()) {
      spin_.until([&] { return (n = wait(0, token, events)) != 0; });
      looking_.clear();
    }
    if (n == 0) {
      n = wait(std::min<std::int64_t>(Interruptible::sleep_ms(until), far_ms), token, events);
      if (n > 0) spin_.slept(now_ns() - began);
    }
    if (n <= 0) {
      if (n == 0 && until.passed()) return {};
      Interruptible::throw_if_asked();
      continue;
    }
    if (token == event_token) {
      LinkDown down;
      if (!closed_.load() && take_down_message(down)) return down;
      continue;
    }
    if (const auto found = lane(token))
      if (auto call = found->receive(events, true)) return call;
  }
}

int Calls::wait(std::int64_t timeout_ms, Token& token, std::uint32_t& events) noexcept {
  epoll_event event;
  const int n = ::epoll_wait(epoll_.get(), &event, 1, static_cast<int>(timeout_ms));
  if (n > 0) token = event.data.u64, events = event.events;
  return n;
}

bool Calls::take_down_message(LinkDown& down) {
  std::uint64_t one;
  if (::read(event_.get(), &one, sizeof one) != sizeof one) return false;  // another thread was quicker
  const std::lock_guard lock(mutex_);
  if (downs_.empty()) return false;
  down = downs_.front();
  downs_.pop_front();
  return true;
}

std::shared_ptr<CallLane> Calls::lane(Token token) {
  const std::lock_guard lock(mutex_);
  const auto it = lanes_.find(token);
  return it == lanes_.end() ? nullptr : it->second;
}

void Calls::add(std::shared_ptr<Link> link, Descriptor descriptor, std::span<const std::uint8_t> read, std::vector<std::uint8_t> first,
                std::function<void(bool used)> lost) {
  make_room(*link);
  std::shared_ptr<CallLane> made;
  {
    const std::lock_guard lock(mutex_);
    const auto token = ++last_token_;
    made = std::make_shared<CallLane>(*this, token, link, std::move(descriptor), read, std::move(lost));
    lanes_.emplace(token, made);
  }
  made->start(std::move(first));
  if (!link->alive() || closed_.load()) made->end();  // whoever took it down may not have seen this one
}

// A peer that gives up on calls resets their lanes, which nobody looks at while those who answer are busy with other things.
void Calls::make_room(const Link& link) {
  std::vector<std::shared_ptr<CallLane>> its;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [_, one] : lanes_)
      if (one->link.get() == &link) its.push_back(one);
  }
  if (its.size() < most_lanes_of_a_link) return;
  auto left = its.size();
  for (const auto& one : its) {
    if (!one->hung_up()) continue;
    one->end();
    --left;
  }
  if (left >= most_lanes_of_a_link) throw wire::WireError(sentence("more than ", most_lanes_of_a_link, " call lanes of one link"));
}

void Calls::end_lanes_of(const Link& link) {
  std::vector<std::shared_ptr<CallLane>> its;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [_, one] : lanes_)
      if (one->link.get() == &link) its.push_back(one);
  }
  for (const auto& one : its) one->end();
}

void Calls::say_down(LinkDown down) {
  const std::lock_guard lock(mutex_);
  downs_.push_back(down);
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(event_.get(), &one, sizeof one);
}

void Calls::close() {
  if (closed_.exchange(true)) return;
  std::unordered_map<Token, std::shared_ptr<CallLane>> lanes;
  {
    const std::lock_guard lock(mutex_);
    lanes = lanes_;
  }
  for (const auto& [_, one] : lanes) one->end();
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(event_.get(), &one, sizeof one);  // nobody reads it: all who wait see it
}

void Calls::watch(Token token, int fd, std::uint32_t events, bool known) {
  epoll_event event{};
  event.events = events | EPOLLONESHOT;
  event.data.u64 = token;
  if (::epoll_ctl(epoll_.get(), known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event) != 0 && !known)
    throw not_to_be_had("a watch on a connection", errno);
}

void Calls::forget(Token token, int fd) noexcept {
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  std::shared_ptr<CallLane> gone;  // let go of outside the lock
  const std::lock_guard lock(mutex_);
  const auto it = lanes_.find(token);
  if (it == lanes_.end()) return;
  gone = std::move(it->second);
  lanes_.erase(it);
}

}  // namespace kvferry
