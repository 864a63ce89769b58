#include "inner.hpp"

#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "host.hpp"
#include "interrupt.hpp"
#include "sentence.hpp"

#ifndef PR_SET_PTRACER
#define PR_SET_PTRACER 0x59616d61
#endif

namespace kvferry {
namespace {

unsigned wanted_threads(const NodeOptions& options) {
  if (options.copy_threads != 0) return std::min(options.copy_threads, 64u);
  const long cores = ::sysconf(_SC_NPROCESSORS_ONLN);
  return static_cast<unsigned>(std::clamp(cores, 1L, 4L));
}

class PeerProcess : public Watcher {
 public:
  PeerProcess(NodeInner& node, std::weak_ptr<Link> link) : node_(node), link_(std::move(link)) {}
  void ready(std::uint32_t) override {
    if (const auto link = link_.lock())
      node_.take_down(link, {Kind::peer_lost, "the process of " + link->label() + " has ended", false, true});
  }

 private:
  NodeInner& node_;
  std::weak_ptr<Link> link_;
};

}  // namespace

NodeInner::NodeInner(NodeOptions options)
    // As many copy threads of ours as share a copy: what comes from a peer, and what runs beside its caller, has no other.
    // Whoever runs an operation, a caller that waits or one of them, is helped by the rest.
    : engine(options, wanted_threads(options), wanted_threads(options) - 1, [this](std::int64_t now) { return tick(now); }) {
  threads = wanted_threads(options) + 1;
  if (const auto host = why_sockets_only(); !host.empty()) {
    engine.options.transports &= static_cast<unsigned>(Transport::socket);
    if (engine.options.transports == 0) throw Error(Kind::unsupported, host + ", and socket is not among this node's transports");
    engine.log.add("warning", host + ": this node uses sockets alone");
  }
  range_mapped(engine.identity.address(), sizeof(std::uint64_t), true);  // keeps a descriptor open, which may be hard to get later
  if (options.attach_any) ::prctl(PR_SET_PTRACER, -1UL, 0, 0, 0);
  engine.registry.window_opened = [this](std::int64_t at_ns) { engine.reactor.wake_at(at_ns); };
  engine.registry.memory_released = [this] {
    if (!released_.exchange(true)) engine.reactor.wake();
  };
}

std::shared_ptr<Link> NodeInner::new_link(PeerFacts facts, bool outgoing, const hello::Token& token,
                                          std::function<std::unique_ptr<Lane>(LaneUse)> dial) {
  std::uint64_t id;
  {
    const std::lock_guard lock(mutex_);
    id = ++last_link_;
  }
  return std::make_shared<Link>(engine, id, std::move(facts), outgoing, token, std::move(dial));
}

void NodeInner::bring_up(const std::shared_ptr<Link>& link, Descriptor connection, bool replace_stale, std::vector<std::uint8_t> first) {
  const auto control = std::make_shared<Control>(*this, link, std::move(connection));
  std::vector<std::shared_ptr<Link>> stale;
  {
    const std::lock_guard lock(mutex_);
    if (closed.load()) throw Error(Kind::closed, "this node is closed");  // close() has taken down all that were here
    for (const auto& [_, up] : links_)
      if (replace_stale && !up.link->outgoing && up.link->peer.node_id == link->peer.node_id) stale.push_back(up.link);
    Up up{link, control};
    if (link->peer.pidfd)
      up.pidfd_token = engine.reactor.watch(link->peer.pidfd.get(), EPOLLIN, std::make_shared<PeerProcess>(*this, link));
    links_.emplace(link->id, std::move(up));
  }
  for (const auto& old : stale) {
    if (const auto its_control = control_of(*old)) its_control->say_unlinked();  // in case it is the same peer that links twice
    take_down(old, {Kind::peer_lost, "node " + std::to_string(old->peer.node_id) + " has linked anew: this link is the old one", false, true});
  }
  control->start(std::move(first));
  const auto [map, cma] = link->reasons();
  engine.log.add("info", "link to " + link->label() + " is up; map: " + (map.empty() ? "ok" : map) + "; cma: " + (cma.empty() ? "ok" : cma));
}

void NodeInner::take_down(const std::shared_ptr<Link>& link, Outcome reason) {
  const auto sentence = reason.sentence;
  const bool expected = reason.kind == Kind::not_linked || reason.kind == Kind::closed;
  if (!link->take_down(std::move(reason))) return;
  Up up;
  {
    const std::lock_guard lock(mutex_);
    const auto it = links_.find(link->id);
    if (it != links_.end()) {
      up = std::move(it->second);
      links_.erase(it);
    }
  }
  if (up.pidfd_token != 0) engine.reactor.forget(up.pidfd_token, link->peer.pidfd.get());
  if (up.control) up.control->close();
  forget_calls_of(link);
  engine.log.add(expected ? "info" : "warning", "link to " + link->label() + " is down: " + sentence);
  needs_of_listeners_changed();
}

void NodeInner::forget_calls_of(const std::shared_ptr<Link>& link) {
  calls.end_lanes_of(*link);
  if (!link->calls_came.load()) return;
  const bool ended = link->peer_process_ended();
  if (ended || !link->peer.pidfd) return calls.say_down({link->id, ended});
  // A process closes its connections a moment before it has ended.
  constexpr std::int64_t moment_ns = 20'000'000;
  run_at(now_ns() + moment_ns, [this, link] { calls.say_down({link->id, link->peer_process_ended()}); });
}

std::shared_ptr<Control> NodeInner::control_of(const Link& link) const {
  const std::lock_guard lock(mutex_);
  const auto it = links_.find(link.id);
  return it == links_.end() ? nullptr : it->second.control;
}

std::shared_ptr<Link> NodeInner::link_by_token(const hello::Token& token) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [_, up] : links_)
    if (equal_in_constant_time(up.link->token, token)) return up.link;
  return nullptr;
}

std::vector<std::shared_ptr<Link>> NodeInner::links() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Link>> all;
  for (const auto& [_, up] : links_)
    if (up.link->alive()) all.push_back(up.link);
  return all;
}

std::vector<NodeInner::Up> NodeInner::all_up() const {
  const std::lock_guard lock(mutex_);
  std::vector<Up> all;
  for (const auto& [_, up] : links_) all.push_back(up);
  return all;
}

std::int64_t NodeInner::tick(std::int64_t now) {
  std::int64_t next = engine.registry.end_due_windows(now);
  for (const auto& operation : engine.timers.due(now, next)) operation->timer_came();
  next = std::min(next, run_due(now));

  if (now >= next_heartbeat_ns_) {
    // After a time in which this process stood still, what peers said meanwhile is not read yet, or they stood still too. The first
    // turn may come late as well.
    if (now - next_heartbeat_ns_ > engine.options.heartbeat_timeout_ms * 500'000) awake_since_ns_ = now;
    next_heartbeat_ns_ = now + engine.options.heartbeat_ms * 1'000'000;
    for (const auto& up : all_up()) {
      const auto silent_ms = (now - std::max(up.link->last_heard_ns.load(), awake_since_ns_)) / 1'000'000;
      if (silent_ms > engine.options.heartbeat_timeout_ms) {
        take_down(up.link, {Kind::peer_lost, sentence("nothing was heard from ", up.link->label(), " for ", silent_ms, " ms"), false, true});
        continue;
      }
      up.control->heartbeat();
    }
    released_ = true;  // also what could not be told before
  }
  if (released_.exchange(false))
    for (const auto& up : all_up()) tell_of_released_segments(up);
  std::erase_if(expected_, [&](const std::weak_ptr<Incoming>& weak) {
    const auto connection = weak.lock();
    if (!connection) return true;
    if (!connection->overdue(now)) return false;
    engine.log.add("warning", "a connection was dropped: it has not said in time what it is for");
    connection->drop();
    return true;
  });
  if (!expected_.empty()) next = std::min(next, now + 250'000'000);
  if (now >= listen_again_ns_) {
    listen_again_ns_ = INT64_MAX;
    const std::lock_guard lock(listen_mutex);
    for (const auto& listener : {tcp_listener, unix_listener})
      if (listener) listener->arm();
    for (const auto& listener : retired_listeners) listener->arm();
  }
  if (any_retired) stop_retired_listeners();
  return std::min({next, next_heartbeat_ns_, listen_again_ns_});
}

// Their memory is given back when the last peer that has mapped them lets go.
void NodeInner::tell_of_released_segments(const Up& up) {
  const auto announced = up.link->announced();
  if (announced.empty()) return;
  const auto live = engine.registry.segments();
  for (const auto id : announced) {
    if (std::any_of(live.begin(), live.end(), [&](const auto& segment) { return segment->id() == id; })) continue;
    if (!up.control->segment_gone(id)) return;
    up.link->forget_announcement(id);
  }
}

// A restarted peer takes the place of its former self, and who links twice replaces its first link. But two that live
// and bear one id would drive each other out again and again.
void NodeInner::refuse_namesake(const hello::Hello& said) const {
  const auto recent_ns = 2 * engine.options.heartbeat_ms * 1'000'000;
  const std::lock_guard lock(mutex_);
  for (const auto& [_, up] : links_) {
    const auto& link = *up.link;
    if (link.outgoing || link.peer.node_id != said.node_id || link.peer.instance == said.instance) continue;
    if (now_ns() - link.last_heard_ns.load() > recent_ns || link.peer_process_ended()) continue;
    const auto where = link.peer.credentials.pid > 0 ? sentence("process ", link.peer.credentials.pid) : link.peer.endpoint.text();
    throw Error(Kind::already_linked, sentence("another node that calls itself ", said.node_id, " is linked and alive (", where,
                                               "): give each a node_id of its own, or close the other one first"));
  }
}

NodeInner::SoleDialler::SoleDialler(NodeInner& node, const hello::Challenge& peer, const Deadline& deadline) : node_(node), peer_(peer.instance) {
  std::unique_lock lock(node.mutex_);
  if (!wait_on(node.dialled_, lock, deadline, [&] { return !node.dialled_alone_.contains(peer_); }))
    throw Error(Kind::deadline, "another call that links to the same peer has not ended in time");
  for (const auto& [_, up] : node.links_)
    if (up.link->outgoing && up.link->peer.instance == peer_ && up.link->alive())
      throw Error({Kind::already_linked, "this node is linked there already, to " + up.link->label() + ", and that link is not to be replaced", false, true},
                  up.link->label(), "", "");
  node.dialled_alone_.insert(peer_);
}

NodeInner::SoleDialler::~SoleDialler() {
  const std::lock_guard lock(node_.mutex_);
  node_.dialled_alone_.erase(peer_);
  node_.dialled_.notify_all();
}

void NodeInner::stop_retired_listeners() {
  const std::lock_guard lock(listen_mutex);
  if (!retired_listeners.empty()) {
    if (incoming.load() > 0) return;  // one of these may become a link, or a lane
    const std::lock_guard links_lock(mutex_);
    for (const auto& [_, up] : links_)
      if (!up.link->outgoing && up.link->needs_tcp) return;
  }
  for (const auto& listener : retired_listeners) listener->stop();
  retired_listeners.clear();
  any_retired = false;
}

// Also from where listen_mutex is held: a connection ends as well when another needs its place.
void NodeInner::needs_of_listeners_changed() {
  if (any_retired) engine.reactor.wake();
}

void NodeInner::expect_soon(std::weak_ptr<Incoming> connection) { expected_.push_back(std::move(connection)); }

void NodeInner::run_at(std::int64_t at_ns, std::function<void()> task) {
  {
    const std::lock_guard lock(later_mutex_);
    later_.emplace(at_ns, std::move(task));
  }
  engine.reactor.wake_at(at_ns);
}

std::int64_t NodeInner::run_due(std::int64_t now) {
  for (;;) {
    std::function<void()> task;
    {
      const std::lock_guard lock(later_mutex_);
      if (later_.empty()) return INT64_MAX;
      if (later_.begin()->first > now) return later_.begin()->first;
      task = std::move(later_.extract(later_.begin()).mapped());
    }
    task();
  }
}

void NodeInner::drop_oldest() {
  for (auto it = expected_.begin(); it != expected_.end();) {
    const auto connection = it->lock();
    it = expected_.erase(it);
    if (!connection) continue;
    connection->drop();
    return;
  }
}

void NodeInner::pause_listeners() { listen_again_ns_ = now_ns() + 100'000'000; }

PeerFacts NodeInner::facts_of(const hello::Hello& said, std::optional<PeerFacts> local, const Endpoint& endpoint) const {
  PeerFacts facts = local ? std::move(*local) : PeerFacts{};
  facts.node_id = said.node_id;
  facts.instance = said.instance;
  facts.program = said.program;
  facts.endpoint = endpoint;
  if (!local && said.boot_id == boot_id)
    facts.map_reason = facts.cma_reason = "on this host, but its Unix socket is in another network namespace";
  return facts;
}

hello::Local NodeInner::local_facts(const hello::Token& token) const {
  hello::Local local;
  local.token = token;
  local.identity_address = engine.identity.address();
  local.identity_value = engine.identity.value();
  local.page_nonce[0] = engine.guards.page().nonce[0];
  local.page_nonce[1] = engine.guards.page().nonce[1];
  return local;
}

std::string NodeInner::default_refusal(const Endpoint& endpoint, const std::optional<Credentials>& credentials) const {
  if (!engine.options.secret.empty() || !endpoint.loopback) return {};
  if (!credentials)
    return "without a shared secret a process of this host must show under which user it runs, and its Unix socket could not be reached: "
           "configure the same secret on both nodes";
  if (credentials->uid != ::geteuid())
    return sentence("without a shared secret two processes of one host must run under one user, and these run under uid ", ::geteuid(),
                    " and uid ", credentials->uid, ": configure the same secret on both nodes");
  return {};
}

// ---- Control

Control::Control(NodeInner& node, std::shared_ptr<Link> link, Descriptor descriptor)
    : node_(node), link_(std::move(link)), descriptor_(std::move(descriptor)), in_(wire::max_control_bytes) {}

void Control::start(std::vector<std::uint8_t> first) {
  if (!first.empty()) send(std::move(first));
  const std::lock_guard lock(mutex_);  // the first event may come before watch() has returned
  if (!closed_) token_ = node_.engine.reactor.watch(descriptor_.get(), EPOLLIN, shared_from_this());
}

void Control::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    answered_.notify_all();
  }
  node_.engine.reactor.forget(token_, descriptor_.get());
  ::shutdown(descriptor_.get(), SHUT_RDWR);
}

bool Control::send(std::vector<std::uint8_t> frame) {
  const std::lock_guard lock(mutex_);
  if (closed_) return false;
  constexpr std::size_t most_waiting = 4096;  // a peer that reads nothing for that long is lost by its silence soon
  if (out_.size() + frame.size() > most_waiting) return false;
  out_.insert(out_.end(), frame.begin(), frame.end());
  const long n = send_some(descriptor_.get(), out_);
  if (n > 0) out_.erase(out_.begin(), out_.begin() + n);
  return true;
}

void Control::heartbeat() { send(wire::Writer(wire::Type::heartbeat, 0).take()); }

// Asking first commits nobody: a peer that hears of it too late finds no UNLINKED behind it, and both sides stay linked.
bool Control::ask_to_unlink(const Deadline& deadline) {
  {
    const std::lock_guard lock(mutex_);
    heard_ = false;  // that was an answer to somebody who had given up
  }
  send(wire::Writer(wire::Type::unlink, 0).take());
  std::unique_lock lock(mutex_);
  wait_on(answered_, lock, deadline, [this] { return heard_ || closed_; });
  if (!heard_) return false;
  leaving_ = true;
  lock.unlock();
  say_unlinked();
  lock.lock();
  // By the peer's end. It is decided, so nobody may break off here, and a peer that has just answered takes no time.
  const auto wait_ms = std::min<std::int64_t>(deadline.left_ms(), 1000);
  answered_.wait_for(lock, std::chrono::milliseconds(wait_ms), [this] { return closed_; });
  return true;
}

void Control::say_unlinked() { send(wire::Writer(wire::Type::unlinked, 0).take()); }

bool Control::leaving() {
  const std::lock_guard lock(mutex_);
  return leaving_;
}

bool Control::segment_gone(std::uint32_t id) { return send(wire::Writer(wire::Type::segment_gone, 0).put(id).take()); }

void Control::ready(std::uint32_t) {
  Reactor::Token token;
  {
    const std::lock_guard lock(mutex_);
    token = token_;
  }
  try {
    Frame frame;
    for (;;) {
      switch (in_.read(descriptor_.get(), frame)) {
        case FrameBuffer::State::would_block:
          node_.engine.reactor.rearm(token, descriptor_.get(), EPOLLIN);
          return;
        case FrameBuffer::State::lost:
          node_.take_down(link_, leaving() ? Outcome{Kind::not_linked, "this link was unlinked", false, true}
                                         : Outcome{Kind::peer_lost, link_->label() + " closed the connection", false, true});
          return;
        case FrameBuffer::State::frame: break;
      }
      link_->last_heard_ns.store(now_ns(), std::memory_order_relaxed);
      switch (frame.header.type) {
        case wire::Type::heartbeat: break;
        case wire::Type::unlink: send(wire::Writer(wire::Type::unlink_heard, 0).take()); break;
        case wire::Type::unlink_heard: {
          const std::lock_guard lock(mutex_);
          heard_ = true;
          answered_.notify_all();
          break;
        }
        case wire::Type::unlinked:
          node_.take_down(link_, {Kind::not_linked, link_->label() + " has unlinked, or a newer link to it from here has taken the place of this one", false, true});
          return;
        case wire::Type::segment_gone: link_->forget_segment(wire::Reader(frame.body).get<std::uint32_t>()); break;
        default: throw wire::WireError("an unknown frame on the control connection");
      }
    }
  } catch (const wire::WireError& error) {
    node_.take_down(link_, {Kind::peer_lost, link_->label() + " sent something that is not kvferry's protocol: " + error.what(), false, true});
  }
}

}  // namespace kvferry
