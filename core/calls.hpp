// Answering calls: messages of peers that code of this node's owner answers, on whatever threads it brings.
//
// Call lanes are in an epoll of their own. Whoever calls next() waits there and reads the request himself, so that a call
// wakes one thread, the one that will answer it. While nobody has ever come to answer, the control thread looks after that
// epoll and says Unsupported. What a socket does not take of an answer the control thread sends on when it does.
//
// A lane carries one call at a time: idle (watched for the next request) -> in hand (nothing is read) -> idle, or gone.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <variant>

#include "link.hpp"
#include "message.hpp"

namespace kvferry {

class CallLane;
class Calls;

// One request. Dropped without an answer, its asker is told so.
class Call {
 public:
  Call(std::shared_ptr<CallLane> lane, std::uint64_t link_id, bool same_host, const wire::Header& header, Payload message);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const std::uint64_t link_id;
  const bool same_host;  // the asker is a process of this host, known by the local step
  const bool one_way;    // nobody waits for an answer
  const Deadline deadline;  // the asker's; of a one-way message none
  Payload message;

  // From any thread; does not wait. False: the asker is gone, or has given up. Throws Error(invalid_argument), and the call
  // may still be answered, for more than longest_message bytes, for a second answer, and where nobody waits for one.
  bool answer(std::span<const std::uint8_t> bytes);

 private:
  std::shared_ptr<CallLane> lane_;
  const std::uint64_t operation_;
  const std::uint32_t generation_ = process_generation();
  std::atomic<bool> answered_;
};

// A link on which calls had come is down.
struct LinkDown {
  std::uint64_t link_id = 0;
  bool process_ended = false;  // known for processes of this host alone
};

using CallEvent = std::variant<std::monostate, std::unique_ptr<Call>, LinkDown>;

class Calls {
 public:
  explicit Calls(Engine& engine);

  void serve();  // from now on somebody answers
  // Serves. Nothing: the time is up. Throws Error(closed), Error(cancelled) when the caller wants to be gone.
  CallEvent next(const Deadline& until);

  // A lane on which the peer asks. `read`: what has come on it already; `first`: goes out before anything else; `lost` as for
  // ServerLane.
  void add(std::shared_ptr<Link> link, Descriptor descriptor, std::span<const std::uint8_t> read, std::vector<std::uint8_t> first = {},
           std::function<void(bool used)> lost = {});
  void end_lanes_of(const Link& link);
  void say_down(LinkDown down);
  void close();

 private:
  friend class CallLane;
  class Refuser;
  using Token = std::uint64_t;

  int wait(std::int64_t timeout_ms, Token& token, std::uint32_t& events) noexcept;
  bool take_down_message(LinkDown& down);
  std::shared_ptr<CallLane> lane(Token token);
  void refuse_all();
  void make_room(const Link& link);
  void watch(Token token, int fd, std::uint32_t events, bool known);
  void forget(Token token, int fd) noexcept;

  Engine& engine_;
  Descriptor epoll_;
  Descriptor event_;  // a semaphore: one for each message in downs_, and one more when it closes
  std::mutex mutex_;
  std::unordered_map<Token, std::shared_ptr<CallLane>> lanes_;
  Token last_token_ = 0;
  std::deque<LinkDown> downs_;
  std::mutex serving_mutex_;
  Reactor::Token refuser_ = 0;  // the control thread watches epoll_; serving_mutex_
  std::atomic<bool> serving_{false}, closed_{false};
  std::atomic_flag looking_ = ATOMIC_FLAG_INIT;  // somebody looks for a moment before he sleeps, which is enough
  Spin spin_;
};

}  // namespace kvferry
