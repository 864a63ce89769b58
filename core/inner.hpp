// The inside of a node: engine, listeners, links, and the connections that are not links yet. Shared by the files that
// accept, dial and keep links; nobody else includes it.
#pragma once

#include <set>
#include <unordered_map>

#include "calls.hpp"
#include "hello.hpp"
#include "node.hpp"
#include "serve.hpp"

namespace kvferry {

class Control;
class Incoming;
class NodeInner;

// A socket that peers dial, for links or for the lanes of links. Control thread, and under listen_mutex.
class ListeningSocket : public Watcher, public std::enable_shared_from_this<ListeningSocket> {
 public:
  ListeningSocket(NodeInner& node, Descriptor descriptor, bool unix_socket, std::string asked_host = {})
      : is_unix(unix_socket), host(std::move(asked_host)), node_(node), descriptor_(std::move(descriptor)) {
    if (const auto path = endpoint().path; !path.empty()) file_.emplace(path);
  }
  void start();
  void arm();
  void stop() noexcept;
  void ready(std::uint32_t events) override;
  bool started() const noexcept { return token_ != 0; }
  Endpoint endpoint() const { return local_endpoint(descriptor_.get()); }

  const bool is_unix;                  // the abstract one, for local steps and lanes alone
  const std::string host;              // as it was asked for
  std::atomic<bool> takes_links{true};  // else only lanes of links that are up

 private:
  NodeInner& node_;
  Descriptor descriptor_;
  std::optional<SocketFile> file_;
  Reactor::Token token_ = 0;
};

// A hello that has got as far as its challenge, waiting for the local step or the proof.
struct Pending {
  hello::Hello hello;
  hello::Challenge challenge;
  Endpoint endpoint;
  std::optional<PeerFacts> local;  // set by the local step
  Descriptor local_connection;
};

class NodeInner : public std::enable_shared_from_this<NodeInner> {
 public:
  explicit NodeInner(NodeOptions options);

  struct Up {
    std::shared_ptr<Link> link;
    std::shared_ptr<Control> control;
    Reactor::Token pidfd_token = 0;
  };

  std::shared_ptr<Link> new_link(PeerFacts facts, bool outgoing, const hello::Token& token,
                                 std::function<std::unique_ptr<Lane>(LaneUse)> dial);
  void refuse_namesake(const hello::Hello& said) const;  // throws Error(already_linked)
  // Of those that may not replace a link, one at a time dials a peer: nobody finds no link and drives out another's that way.
  // Throws Error(already_linked) if this node has opened one to it.
  class SoleDialler {
   public:
    SoleDialler(NodeInner& node, const hello::Challenge& peer, const Deadline& deadline);
    ~SoleDialler();
    SoleDialler(const SoleDialler&) = delete;
    SoleDialler& operator=(const SoleDialler&) = delete;

   private:
    NodeInner& node_;
    const hello::Token peer_;
  };
  // Makes it live: heartbeats, the watch on the peer's process, a line in the log. Replaces stale links from that node id.
  void bring_up(const std::shared_ptr<Link>& link, Descriptor control, bool replace_stale, std::vector<std::uint8_t> first = {});
  void take_down(const std::shared_ptr<Link>& link, Outcome reason);  // from any thread; does not wait
  std::shared_ptr<Control> control_of(const Link& link) const;
  std::shared_ptr<Link> link_by_token(const hello::Token& token) const;
  std::vector<std::shared_ptr<Link>> links() const;
  std::int64_t tick(std::int64_t now);
  PeerFacts facts_of(const hello::Hello& hello, std::optional<PeerFacts> local, const Endpoint& endpoint) const;
  hello::Local local_facts(const hello::Token& token) const;
  std::string default_refusal(const Endpoint& endpoint, const std::optional<Credentials>& credentials) const;  // "" if allowed

  void forget_calls_of(const std::shared_ptr<Link>& link);  // it is down

  Engine engine;
  Calls calls{engine};
  const hello::Token instance = hello::random_token();
  const hello::Token boot_id = hello::boot_id();
  std::atomic<bool> closed{false};
  std::mutex closing;  // one close() at a time
  unsigned threads = 0, helpers = 0;

  std::mutex listen_mutex;
  std::shared_ptr<ListeningSocket> tcp_listener, unix_listener;  // the first may be a socket in the file system
  std::vector<std::shared_ptr<ListeningSocket>> retired_listeners;  // links that are up open their lanes there
  std::atomic<bool> any_retired{false};
  std::string unix_name;
  void stop_retired_listeners();      // those that nobody needs any more
  void needs_of_listeners_changed();  // from any thread: the control thread looks after them
  std::mutex pending_mutex;
  std::map<hello::Token, std::shared_ptr<Pending>> pending;  // by local token
  std::atomic<int> incoming{0};
  void expect_soon(std::weak_ptr<Incoming> connection);  // control thread: dropped if it says nothing in time
  void drop_oldest();                                    // control thread: of those; who means it has spoken long ago
  void run_at(std::int64_t at_ns, std::function<void()> task);  // from any thread; the task runs on the control thread
  void pause_listeners();                                // control thread: out of descriptors, try again before long

 private:
  mutable std::mutex mutex_;
  std::map<std::uint64_t, Up> links_;
  std::uint64_t last_link_ = 0;
  std::set<hello::Token> dialled_alone_;  // instances, each by a SoleDialler
  std::condition_variable dialled_;
  std::vector<Up> all_up() const;
  void tell_of_released_segments(const Up& up);
  std::atomic<bool> released_{false};  // memory, to the pool: peers may have to let go of segments
  std::int64_t next_heartbeat_ns_ = 0, awake_since_ns_ = 0;  // control thread
  std::vector<std::weak_ptr<Incoming>> expected_;  // control thread; the oldest first
  std::int64_t listen_again_ns_ = INT64_MAX;       // control thread
  std::int64_t run_due(std::int64_t now);  // of later_; returns when the next is
  std::mutex later_mutex_;
  std::multimap<std::int64_t, std::function<void()>> later_;  // by time
};

// The control connection of a link: heartbeats and the unlinking.
class Control : public Watcher, public std::enable_shared_from_this<Control> {
 public:
  Control(NodeInner& node, std::shared_ptr<Link> link, Descriptor descriptor);
  void start(std::vector<std::uint8_t> first);  // which goes out before any heartbeat
  void close() noexcept;
  void ready(std::uint32_t events) override;
  void heartbeat();
  bool ask_to_unlink(const Deadline& deadline);  // true: the peer has heard, and drops its side. False: nothing has changed
  void say_unlinked();                           // this side drops the link now
  bool segment_gone(std::uint32_t id);           // false: not now
 private:
  bool send(std::vector<std::uint8_t> frame);  // false: it would have to wait behind too much
  bool leaving();  // the peer ends the connection because it was asked to

  NodeInner& node_;
  const std::shared_ptr<Link> link_;
  Descriptor descriptor_;
  Reactor::Token token_ = 0;
  FrameBuffer in_;
  std::mutex mutex_;
  std::condition_variable answered_;
  std::vector<std::uint8_t> out_;
  bool heard_ = false, leaving_ = false, closed_ = false;
};

// A connection that a peer has opened and that has not said yet what it is for.
class Incoming : public Watcher, public std::enable_shared_from_this<Incoming> {
 public:
  Incoming(NodeInner& node, Descriptor descriptor, std::shared_ptr<const ListeningSocket> from);
  ~Incoming() override;
  void start();
  void ready(std::uint32_t events) override;
  bool overdue(std::int64_t now) const noexcept { return deadline_.at_ns <= now; }
  void drop() noexcept;

 private:
  bool handle(Frame& frame);  // false: done with it here
  bool on_hello(const Frame& frame);
  bool on_auth(const Frame& frame);
  bool on_local(Frame& frame);
  bool on_lane(const Frame& frame);
  void check_takes_links() const;  // throws Error(link_failed)
  void refuse(const Outcome& outcome);
  void reply(const std::vector<std::uint8_t>& frame, int attached = -1);

  NodeInner& node_;
  Descriptor descriptor_;
  const std::shared_ptr<const ListeningSocket> from_;
  Reactor::Token token_ = 0;
  FrameBuffer in_{wire::max_hello_bytes};
  const Deadline deadline_;
  std::shared_ptr<Pending> pending_;
  bool gone_ = false;
};

inline constexpr std::int64_t hello_timeout_ms = 5000;
inline constexpr int most_incoming = 512;

// `at`: host and port, or a path.
Endpoint start_listening(NodeInner& node, const Endpoint& at);
void stop_listening(NodeInner& node);
// `replace`: else a link that is up, opened by this node to the very process that answers there, stays, and Error(already_linked)
// is thrown.
std::shared_ptr<Link> dial_link(NodeInner& node, const Endpoint& at, const Deadline& deadline, bool replace);

}  // namespace kvferry
