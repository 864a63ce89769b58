// A link: a live peer, what was learned about it in the hello, its lanes, its mapped segments and kept resolutions.
//
// Life: up (alive) -> down, once, for one reason. Going down shuts its sockets and pokes its operations; each of them
// ends after the piece in hand. While an unlink waits for those that have begun, it is up and takes no new ones (Parting).
// Knows no frames but its own LANE; the node drives hello, heartbeats and death.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine.hpp"
#include "socket.hpp"

namespace kvferry {

// What a lane is for. A push holds its lane until the receiver has pulled, for which that needs a lane in the other
// direction: if pushes took the lanes of pulls, two nodes that push to each other would wait for each other.
// Calls have lanes of their own because code answers them, when it comes to that.
enum class LaneUse : std::uint8_t { bulk = 0, small = 1, push = 2, call = 3 };

// One connection on which this side is the client: it asks, the peer answers, one operation at a time.
struct Lane {
  Descriptor descriptor;
  LaneUse use = LaneUse::bulk;
  std::vector<std::uint8_t> preface;   // of a lane just dialled: goes first
};

class LanePool {
 public:
  // `dial` opens a new lane, or returns nullptr (the side that did not connect: it waits for the peer to open one).
  LanePool(unsigned lanes, std::function<std::unique_ptr<Lane>(LaneUse)> dial) : lanes_(lanes), dial_(std::move(dial)) {}

  void add(std::unique_ptr<Lane> lane);
  std::unique_ptr<Lane> take(LaneUse use, Operation& operation);  // nullptr: it was put in the queue, schedule() follows
  void give(std::unique_ptr<Lane> lane);
  void lost(std::unique_ptr<Lane> lane);  // broken: closed, and opened anew
  void forget(const Lane& lane);          // lost, but whoever has it cannot give it back yet: opened anew
  void leave(Operation& operation);       // out of the queue; a lane granted meanwhile goes on to the next
  void close();
  unsigned open_lanes() const;
  bool missing_some() const;  // this side could not open a lane that it wanted
  std::uint64_t resets() const noexcept { return resets_.load(); }

 private:
  struct Waiter {
    std::shared_ptr<Operation> operation;
    LaneUse use;
  };
  unsigned for_pulls() const noexcept { return static_cast<unsigned>(open_.size()) - (push_open_ ? 1 : 0) - calls_open_; }
  bool wanted(LaneUse use) const noexcept;
  bool fits(const Lane& lane, LaneUse use) const noexcept;
  void note_open(const Lane& lane);
  bool note_closed(const Lane& lane);  // false: it was noted before
  void replace(const Lane& lane, std::unique_ptr<Lane> to_close);
  void leave_queue(Operation& operation);
  void hand_out(std::unique_ptr<Lane> lane, std::vector<std::shared_ptr<Operation>>& to_schedule);
  void open_missing(std::unique_lock<std::mutex>& lock, LaneUse use);

  mutable std::mutex mutex_;
  const unsigned lanes_;  // for pulls; one more for pushes, and up to as many, opened when they are needed, for calls
  std::function<std::unique_ptr<Lane>(LaneUse)> dial_;
  std::vector<std::unique_ptr<Lane>> idle_;
  std::unordered_set<int> open_;  // descriptors of all lanes, idle or in use
  bool small_open_ = false, push_open_ = false;
  unsigned calls_open_ = 0;
  std::deque<Waiter> waiters_;
  bool closed_ = false;
  bool dial_failed_ = false;  // the last time
  std::atomic<std::uint64_t> resets_{0};
};

// A segment of the peer's memory, mapped read-only. Pages that the owner never touched are read with pread, which does
// not allocate them in the owner's memory; whatever has been found present is copied straight from the mapping.
class PeerSegment {
 public:
  PeerSegment(Descriptor fd);  // throws Error(refused) if it is not sealed against shrinking
  ~PeerSegment();
  PeerSegment(const PeerSegment&) = delete;
  PeerSegment& operator=(const PeerSegment&) = delete;
  std::size_t bytes() const noexcept { return bytes_; }
  const std::byte* data() const noexcept { return data_; }
  bool present(std::uint64_t offset, std::uint64_t bytes);  // and notes it
  enum class Copied : std::uint8_t { all, outside, not_there };  // outside the segment; `to` is not (writable) memory
  // `by_kernel`: by system calls alone, so that memory which is not there is an answer and no signal.
  Copied copy(void* to, std::uint64_t offset, std::uint64_t bytes, bool stream, bool by_kernel = false);
  Copied read_into(void* to, std::uint64_t offset, std::uint64_t bytes);  // by pread
  struct Populated {
    std::uint64_t from = 0, hole = 0;  // [from, hole) is present and not mapped yet
  };
  bool populate_some(Populated& progress);  // maps the present pages of one stretch; false: at the end

 private:
  static constexpr unsigned chunk_shift = 18;  // 256 KiB: what is asked about at a time
  bool chunk_present(std::uint64_t chunk);
  void note_present(std::uint64_t begin, std::uint64_t end);
  Descriptor fd_;
  const std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::unique_ptr<std::atomic<std::uint8_t>[]> present_;  // per chunk
};

// A target at the peer, resolved: everything a one-sided copy needs. Immutable.
struct Source {
  Geometry geometry;
  std::vector<Guard> guards;
  std::uint64_t epoch = 0;
  bool by_epoch = false;   // named by name or key: good only while the peer's table epoch stands
  std::int64_t key_row = -1;
  bool consume = false;
  bool file_backed = false;
  bool windowed = false;
  std::vector<UnitRun> window;
  std::vector<std::shared_ptr<PeerSegment>> segments;  // per tensor, when mapped
};

struct TargetHash {
  std::size_t operator()(const Target& target) const noexcept;
};

struct PeerFacts {  // what the hello taught
  std::uint64_t node_id = 0;
  std::array<std::uint8_t, 16> instance{};
  std::string program;        // what it says that its program is
  Endpoint endpoint;          // of the TCP connection
  bool same_host = false;     // the local step was done
  Credentials credentials;    // as the kernel sees them
  Descriptor pidfd;
  std::unique_ptr<PeerPage> page;
  std::uint64_t identity_address = 0, identity_value = 0;
  bool map_ok = false, cma_ok = false;
  std::string map_reason = "not on this host", cma_reason = "not on this host";
};

class ServerLane;

class Link : public std::enable_shared_from_this<Link> {
 public:
  Link(Engine& engine, std::uint64_t id, PeerFacts facts, bool outgoing, std::array<std::uint8_t, 16> token,
       std::function<std::unique_ptr<Lane>(LaneUse)> dial);

  const std::uint64_t id;
  PeerFacts peer;
  const bool outgoing;
  const std::array<std::uint8_t, 16> token;  // who shows it may open lanes
  LanePool lanes;

  std::string label() const;  // "node 7 at 127.0.0.1:7000"
  bool alive() const noexcept { return (state_.load(std::memory_order_acquire) & down) == 0; }
  Outcome death() const;      // why it went down
  bool peer_process_ended() const noexcept;

  // Transports that may be used at all, out of `wanted`; map and cma only where the local step allows them.
  unsigned transports(unsigned wanted) const noexcept;
  void give_up_cma(std::string reason);
  void give_up_map(std::string reason);
  std::pair<std::string, std::string> reasons() const;  // map, cma; "" where ok

  std::shared_ptr<PeerSegment> segment(std::uint32_t id) const;
  std::shared_ptr<PeerSegment> add_segment(std::uint32_t id, Descriptor fd);
  // The same for what a peer has sent. False: it cannot be mapped, now or (a warning has said why) ever.
  bool take_segment(std::uint32_t id, Descriptor fd);
  void forget_segment(std::uint32_t id);  // its owner has released it: unmapped when the last copy from it has ended

  void announce(std::uint32_t segment_id);  // the peer gets the descriptor, and is to be told when the segment is gone
  // The same ahead of a push; true: it is to be sent. An answer with it, on its way on another lane, may come later than the push.
  bool announce_ahead(std::uint32_t segment_id);
  void forget_announcement(std::uint32_t segment_id);
  std::vector<std::uint32_t> announced() const;

  // What a push of this side's own memory lets the peer ask for while it lasts, by the push's number.
  struct Offer {
    std::shared_ptr<Cache> memory;
    Guard guard;
  };
  void offer(std::uint64_t push, Offer offer);
  void withdraw(std::uint64_t push) noexcept;
  std::optional<Offer> offered(std::uint64_t push) const;

  std::shared_ptr<const Source> kept(const Target& target);  // nullptr: resolve anew
  void keep(const Target& target, std::shared_ptr<const Source> source);
  bool stands(const Source& source) const noexcept;  // its guards, and its epoch if that matters

  // Stands round what takes microseconds and waits for nobody: it is counted, and not known one by one. A link that is down
  // is quiet only when all of these are over.
  class Brief {
   public:
    explicit Brief(Link& link) noexcept : link_(link) { link_.brief_.fetch_add(1, std::memory_order_seq_cst); }
    ~Brief() { link_.brief_.fetch_sub(1, std::memory_order_release); }
    Brief(const Brief&) = delete;
    Brief& operator=(const Brief&) = delete;
    // Whether it may go on. Crosswise with take_down() and wait_until_quiet(), as GuardTable's enter() and end() are: one of the
    // two sees the other.
    explicit operator bool() const noexcept { return link_.state_.load(std::memory_order_seq_cst) == 0; }

   private:
    Link& link_;
  };
  // Stands round an unlink that waits: operations that have not begun are refused meanwhile, on behalf of the peer too, so that
  // the waiting has an end. Afterwards the link is down, or takes them as before.
  class Parting {
   public:
    explicit Parting(Link& link) noexcept : link_(link) { link_.state_.fetch_add(1, std::memory_order_seq_cst); }
    ~Parting() { link_.state_.fetch_sub(1, std::memory_order_seq_cst); }
    Parting(const Parting&) = delete;
    Parting& operator=(const Parting&) = delete;

   private:
    Link& link_;
  };
  // Throws Error if down, or if it is being unlinked and `operation` is no part of one that has begun already.
  void begin(const std::shared_ptr<Operation>& operation, bool part_of_another);
  void end(Operation& operation) noexcept;
  void add_server_lane(const std::shared_ptr<ServerLane>& lane);
  bool take_down(Outcome reason);  // true: this call did it. Shuts, pokes; does not wait
  bool wait_until_quiet(const Deadline& until);  // no operation in flight
  std::size_t operations() const;

  std::atomic<std::uint64_t> pulls{0}, pushes{0}, bytes_pulled{0}, bytes_pushed{0}, failures{0};
  std::atomic<std::int64_t> last_heard_ns{0};
  std::atomic<bool> needs_tcp{true};  // until a lane has come over the Unix socket
  std::atomic<bool> calls_came{false};  // code of this side has answered the peer
  Spin spin;  // of callers that wait for answers

 private:
  Engine& engine_;
  mutable std::mutex mutex_;
  static constexpr unsigned down = 1u << 31;
  std::atomic<unsigned> state_{0};  // how many unlinks wait, and `down`: one look says whether an operation may begin
  std::atomic<unsigned> brief_{0};
  std::atomic<bool> map_ok_, cma_ok_;
  Outcome death_;
  std::unordered_map<std::uint32_t, std::shared_ptr<PeerSegment>> segments_;
  std::unordered_map<std::uint32_t, bool> announced_;  // whether ahead of a push
  std::unordered_set<std::uint32_t> gone_;  // their descriptors may still be on their way
  std::unordered_map<Target, std::shared_ptr<const Source>, TargetHash> kept_;
  std::unordered_map<std::uint64_t, Offer> offers_;
  std::unordered_map<Operation*, std::weak_ptr<Operation>> operations_;
  std::vector<std::weak_ptr<ServerLane>> server_lanes_;
  std::condition_variable quiet_;
};

}  // namespace kvferry
