// One operation in flight: a pull, a push, or the serving of a peer's request.
//
// An operation is a state machine that one thread at a time drives by step(). Three drivers exist: the caller's own thread
// (run_here, which may wait), the crew with the control thread (start, where nothing waits on one peer: an operation that
// needs its socket or a lane is put aside until that comes), and a thread of its own for an operation whose copies the
// kernel may hold (may_be_held). The last is watched by the control thread, which gives it up when it has to stop and the
// kernel does not let go of it.
//
// States: new -> driven (queued | running | put aside) -> finished. Only finish() ends it, once, after which no byte of a
// destination is written on its behalf.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "clock.hpp"
#include "error.hpp"
#include "reactor.hpp"

namespace kvferry {

struct Engine;
class Link;
class Operation;
struct Lane;
enum class LaneUse : std::uint8_t;

// Where asyncio (or any poll loop) hears of ends: an eventfd and the tokens of what has ended.
class Notifier {
 public:
  Notifier();
  int descriptor() const noexcept { return event_.get(); }
  void add(std::uint64_t token);
  std::vector<std::uint64_t> take();

 private:
  Descriptor event_;
  std::mutex mutex_;
  std::vector<std::uint64_t> tokens_;
};

enum class Transport : std::uint8_t { none = 0, map = 1, cma = 2, socket = 4, local = 8 };
std::string_view transport_name(Transport transport) noexcept;

struct Result {
  Outcome outcome;
  std::uint64_t bytes = 0;
  std::int64_t nanoseconds = 0;
  Transport transport = Transport::none;
};

// What a step needs before the next one makes sense.
enum class Need : std::uint8_t { done, readable, writable, lane, nothing_yet };

// Deadlines of operations that nobody drives at the moment.
class Timers {
 public:
  struct Key {
    std::int64_t at_ns = 0;
    std::uint64_t number = 0;
    auto operator<=>(const Key&) const = default;
  };
  void add(const Key& key, std::weak_ptr<Operation> operation);
  void remove(const Key& key);
  std::vector<std::shared_ptr<Operation>> due(std::int64_t now_ns, std::int64_t& next_ns);  // taken out

 private:
  std::mutex mutex_;
  std::map<Key, std::weak_ptr<Operation>> entries_;
};

// Throws Error(closed) in a forked child of the process whose generation that is: what lived there has no threads here, and
// any of its locks may be held for ever.
void check_not_forked(std::uint32_t generation);

class Operation : public std::enable_shared_from_this<Operation> {
 public:
  Operation(Engine& engine, std::shared_ptr<Link> link, Deadline deadline, const char* verb);
  virtual ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // On the caller's thread, to the end. A caller that wants to be gone (interrupt.hpp) cancels it.
  Result run_here();
  void start();       // asynchronously, on the crew
  void start_here();  // asynchronously, the first turn on this thread (which may not wait)
  void schedule();    // something it may wait for has come: step again soon (from any thread)
  void timer_came();  // on the control thread
  virtual void help() {}  // a copy thread lends a hand

  bool done() const noexcept { return finished_.load(std::memory_order_acquire); }
  // Until it has ended these throw Error(closed) in a forked child.
  bool wait(const Deadline& until);  // true: done; throws Error(cancelled), and it goes on, when the caller wants to be gone
  const Result& result() const noexcept { return result_; }  // once done
  void cancel();
  bool notify(std::shared_ptr<Notifier> notifier, std::uint64_t token);  // false: done already

  const std::shared_ptr<Link>& link() const noexcept { return link_; }
  const char* verb() const noexcept { return verb_; }
  std::uint64_t number() const noexcept { return number_; }
  const Deadline& deadline() const noexcept { return deadline_; }
  virtual std::string subject() const { return {}; }  // "cache 3 'kv'", for errors

 protected:
  // Called by one thread at a time. Throws Error to end with it.
  virtual Need step() = 0;
  virtual void ended() noexcept {}  // once, after the result stands and before anybody hears of it
  virtual bool goes_on_alone() const noexcept { return true; }  // asynchronous, when nobody holds it any more
  // Whether it is done on behalf of an operation that has begun on this link: then it may begin while that is being unlinked.
  virtual bool part_of_another() const noexcept { return false; }
  // Whether it reads or writes memory where the kernel may hold a copy for as long as a disk wants. Asked once, before the
  // first step; may throw what that step would.
  virtual bool may_be_held() { return false; }
  virtual void given_up() noexcept {}   // while the kernel holds a copy: on the control thread, before the end is heard of
  virtual void let_go() noexcept {}     // and has let go of it: on the thread that was held
  virtual void put_aside(Need need);  // until its descriptor is readable or writable: then schedule()
  virtual int descriptor() const noexcept;
  void finish(Outcome outcome, std::uint64_t bytes, Transport transport);
  // For one that nobody shares and that was never begun: nothing is left of it anywhere.
  void finish_unshared() noexcept { finished_.store(true, std::memory_order_relaxed); }

  // The lane in use, if any; what step() waits for by readable/writable.
  bool take_lane(LaneUse use);  // false: return Need::lane
  void give_lane() noexcept;   // whole, for the next one
  void break_lane() noexcept;  // something is left in it: close it
  // The request on the lane it has taken, behind whatever a lane just dialled sends first. Lost: the peer has closed the lane
  // before the request had gone out whole.
  enum class Sent : std::uint8_t { all, later, lost };
  void set_request(std::vector<std::uint8_t> bytes);
  bool request_set() const noexcept { return !request_.empty(); }
  bool request_sent() const noexcept { return request_set() && request_sent_ == request_.size(); }
  Sent send_request();
  virtual bool before_request() { return true; }  // just before its first byte; false: lost
  // The peer has closed the lane in use, which may have happened while it lay idle, and says nothing about the link. True:
  // what may be asked (again) may be asked over another lane. False, a few times over or where there is none: lane_closed().
  bool change_lane() noexcept;
  Outcome lane_closed() const;
  // Why it must stop now, if it must: cancelled, link lost, deadline. ok: go on.
  Outcome stop_reason() const;
  void set_deadline(Deadline deadline) { deadline_ = deadline; }  // by step(): for what is done next
  bool must_stop() const noexcept;
  // Whether it must for nothing but the end of the link. A peer that has done what it was asked for and then unlinks has answered
  // first, so what has come is read to its end before this operation is.
  bool only_link_ended() const noexcept;

  Engine& engine_;
  std::shared_ptr<Link> link_;
  Deadline deadline_;
  bool apart() const noexcept { return apart_; }
  std::uint32_t generation() const noexcept { return generation_; }

  std::unique_ptr<Lane> lane_;
  bool touched_ = false;  // bytes of the destination may have changed
  mutable std::atomic<bool> cancelled_{false};  // also by must_stop(), when the caller wants to be gone

  // Stands round every system call or access to memory in which the kernel may hold this thread.
  class InKernel {
   public:
    explicit InKernel(Operation& operation) noexcept : operation_(operation) {
      if (operation_.apart_) operation_.where_.store(Where::in_kernel, std::memory_order_release);
    }
    ~InKernel() {
      if (operation_.apart_) operation_.back_from_kernel();
    }
    InKernel(const InKernel&) = delete;
    InKernel& operator=(const InKernel&) = delete;

   private:
    Operation& operation_;
  };

 private:
  friend class LanePool;
  friend class Crew;
  class Parked;

  enum class Where : std::uint8_t { here, in_kernel, given_up };

  void begin();
  void become_asynchronous();
  bool go_apart();
  void watch_again();
  void drive();
  void back_from_kernel() noexcept;
  void give_up_if_held();
  void conclude(Outcome outcome, std::uint64_t bytes, Transport transport);
  Need guarded_step();
  void step_on_crew() { take_turn(true); }
  void take_turn(bool may_adopt);
  void set_timer(Need need);
  void forget_descriptor() noexcept;

  const char* verb_;
  std::uint64_t number_;
  std::int64_t started_ns_;
  const std::uint32_t generation_ = process_generation();
  std::vector<std::uint8_t> request_;
  std::size_t request_sent_ = 0;
  bool asynchronous_ = false;
  bool apart_ = false;    // a thread of its own drives it; set before that thread exists
  bool overdue_ = false;  // control thread: had to stop already when the timer came last
  std::atomic<Where> where_{Where::here};
  std::shared_ptr<Operation> self_;  // of an asynchronous one, until it has ended
  std::mutex mutex_;
  std::condition_variable changed_;
  bool queued_ = false, running_ = false, again_ = false;  // asynchronous; again_ also wakes a waiting caller
  std::atomic<bool> finished_{false};
  Result result_;
  std::vector<std::pair<std::weak_ptr<Notifier>, std::uint64_t>> notifiers_;
  std::unique_ptr<Lane> granted_;  // under the lane pool's mutex, as is:
  bool waits_for_lane_ = false;
  unsigned lanes_changed_ = 0;
  Timers::Key timer_;  // at_ns 0: none
  Reactor::Token token_ = 0;  // of the descriptor, while the reactor knows it
};

}  // namespace kvferry
