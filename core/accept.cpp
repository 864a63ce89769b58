// Accepting: the listeners, and what a connection may be that a peer has opened (a hello, a local step, a lane).

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "inner.hpp"
#include "sentence.hpp"

namespace kvferry {

void ListeningSocket::start() {
  // Armed only when the token is known, which ready() needs.
  token_ = node_.engine.reactor.watch(descriptor_.get(), 0, shared_from_this());
  arm();
}

void ListeningSocket::arm() { node_.engine.reactor.rearm(token_, descriptor_.get(), EPOLLIN); }

void ListeningSocket::stop() noexcept {
  node_.engine.reactor.forget(token_, descriptor_.get());
  descriptor_.reset();
  file_.reset();
}

void ListeningSocket::ready(std::uint32_t) {
  const std::lock_guard lock(node_.listen_mutex);  // while it accepts nobody may stop it, and reuse the number
  if (!descriptor_) return;                        // stopped meanwhile
  for (int i = 0; i < 64; ++i) {
    int error = 0;
    auto connection = accept_on(descriptor_.get(), error);
    if (!connection) {
      if (error == EINTR || error == ECONNABORTED) continue;
      if (error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM) {
        node_.engine.log.add("warning", std::string("a connection cannot be accepted: ") + std::strerror(error));
        node_.pause_listeners();  // it stays in the backlog, and the listener readable: this would spin
        return;
      }
      break;
    }
    if (node_.incoming.load() >= most_incoming) node_.drop_oldest();  // too many that have not said what they want
    try {
      const auto incoming = std::make_shared<Incoming>(node_, std::move(connection), shared_from_this());
      incoming->start();
    } catch (const Error& failure) {
      node_.engine.log.add("warning", std::string("a connection was dropped: ") + failure.what());
    }
  }
  arm();
}

Endpoint start_listening(NodeInner& node, const Endpoint& at) {
  const std::lock_guard lock(node.listen_mutex);
  if (node.tcp_listener) throw Error(Kind::invalid_argument, "this node listens already, on " + node.tcp_listener->endpoint().text());
  const auto retired = std::find_if(node.retired_listeners.begin(), node.retired_listeners.end(),
                                    [&](const auto& one) {
                                      const auto there = one->endpoint();
                                      return at.path.empty() ? at.port != 0 && one->host == at.host && there.port == at.port : there.path == at.path;
                                    });
  std::shared_ptr<ListeningSocket> tcp;
  if (retired != node.retired_listeners.end()) {  // it is there still, for the lanes of links
    tcp = std::move(*retired);
    node.retired_listeners.erase(retired);
  } else {
    tcp = std::make_shared<ListeningSocket>(node, at.path.empty() ? listen_tcp(at.host, at.port) : listen_unix(at.path), false, at.host);
  }
  if (!node.unix_listener) {
    std::string name = "kvferry-";
    for (const auto byte : hello::random_token()) {
      constexpr char digits[] = "0123456789abcdef";
      name += digits[byte >> 4];
      name += digits[byte & 15];
    }
    node.unix_listener = std::make_shared<ListeningSocket>(node, listen_abstract(name), true);
    node.unix_name = name;
    node.unix_listener->start();
  }
  tcp->takes_links = true;
  node.tcp_listener = std::move(tcp);
  if (!node.tcp_listener->started()) node.tcp_listener->start();
  const auto endpoint = node.tcp_listener->endpoint();
  if (!endpoint.loopback && node.engine.options.secret.empty())
    node.engine.log.add("warning", "listening on " + endpoint.text() + " without a secret: whoever can reach this address may read and write the registered caches");
  return endpoint;
}

void stop_listening(NodeInner& node) {
  {
    const std::lock_guard lock(node.listen_mutex);
    if (!node.tcp_listener) return;
    node.tcp_listener->takes_links = false;
    node.retired_listeners.push_back(std::move(node.tcp_listener));
    node.any_retired = true;
  }
  node.stop_retired_listeners();
  // The Unix listener stays until the node is closed: links that exist open their lanes there.
}

// ---- Incoming

Incoming::Incoming(NodeInner& node, Descriptor descriptor, std::shared_ptr<const ListeningSocket> from)
    : node_(node), descriptor_(std::move(descriptor)), from_(std::move(from)), deadline_(Deadline::after_ms(hello_timeout_ms)) {
  node_.incoming.fetch_add(1);
}

Incoming::~Incoming() {
  if (node_.incoming.fetch_sub(1) == 1) node_.needs_of_listeners_changed();
}

void Incoming::start() {
  token_ = node_.engine.reactor.watch(descriptor_.get(), EPOLLIN, shared_from_this());
  node_.expect_soon(shared_from_this());
}

void Incoming::drop() noexcept {
  if (std::exchange(gone_, true)) return;
  const auto self = shared_from_this();
  if (pending_) {
    const std::lock_guard lock(node_.pending_mutex);
    node_.pending.erase(pending_->challenge.local_token);
  }
  if (descriptor_) {
    node_.engine.reactor.forget(token_, descriptor_.get());
    descriptor_.reset();
  }
}

void Incoming::ready(std::uint32_t) {
  if (gone_) return;
  try {
    Frame frame;
    for (;;) {
      switch (in_.read(descriptor_.get(), frame)) {
        case FrameBuffer::State::would_block: node_.engine.reactor.rearm(token_, descriptor_.get(), EPOLLIN); return;
        case FrameBuffer::State::lost:
          if (pending_ && !node_.engine.options.secret.empty())  // it looks at this side's proof first, and goes
            node_.engine.log.add("warning", "a link was refused: " + pending_->endpoint.text() + " went away when it had heard this node's proof: it has another secret, or is linked already");
          drop();
          return;
        case FrameBuffer::State::frame: break;
      }
      if (!handle(frame)) {
        drop();
        return;
      }
    }
  } catch (const wire::WireError& error) {
    node_.engine.log.add("warning", "a connection from " + (peer_endpoint(descriptor_.get()).host.empty() ? "this host" : peer_endpoint(descriptor_.get()).text()) + " was closed: " + error.what());
  } catch (const Error& error) {
    refuse(error.outcome());
  }
  drop();
}

void Incoming::refuse(const Outcome& outcome) {
  send_some(descriptor_.get(), hello::write_refused(outcome));  // it is closed next, whether it has heard that or not
  node_.engine.log.add("warning", "a link was refused: " + outcome.sentence);
}

void Incoming::reply(const std::vector<std::uint8_t>& frame, int attached) {
  const long n = send_some(descriptor_.get(), frame, attached >= 0 ? std::span<const int>(&attached, 1) : std::span<const int>());
  // A hello's frames fit into any fresh socket's buffer; one that does not take them is not a peer to talk to.
  if (n != static_cast<long>(frame.size())) throw wire::WireError("it does not read what it is told");
}

bool Incoming::handle(Frame& frame) {
  switch (frame.header.type) {
    case wire::Type::hello: return !pending_ && !from_->is_unix ? on_hello(frame) : throw wire::WireError("a second hello");
    case wire::Type::auth: return pending_ ? on_auth(frame) : throw wire::WireError("a proof before a hello");
    case wire::Type::local: return from_->is_unix ? on_local(frame) : throw wire::WireError("a local step over TCP");
    case wire::Type::lane: return on_lane(frame);
    default: throw wire::WireError("not a hello");
  }
}

bool Incoming::on_hello(const Frame& frame) {
  const auto said = hello::read_hello(frame);
  const auto& options = node_.engine.options;
  check_takes_links();
  if (said.version != wire::version)
    throw Error(Kind::refused, sentence("the peer speaks version ", said.version, " of the wire, this node version ", wire::version, ": run the same kvferry on both"));
  if (said.has_secret != !options.secret.empty())
    throw Error(Kind::refused, said.has_secret ? "the listening node has no secret, the linking one has: configure the same on both"
                                               : "the listening node has a secret, the linking one has none: configure the same on both");
  pending_ = std::make_shared<Pending>();
  pending_->hello = said;
  const auto here = from_->endpoint();
  pending_->endpoint = here.path.empty() ? peer_endpoint(descriptor_.get()) : here;  // who dials a path has none itself
  auto& challenge = pending_->challenge;
  challenge.node_id = options.node_id;
  challenge.instance = node_.instance;
  challenge.nonce = hello::random_nonce();
  challenge.has_secret = !options.secret.empty();
  challenge.program = options.program;
  challenge.local_token = hello::random_token();
  if (said.boot_id == node_.boot_id) challenge.local_address = node_.unix_name;
  if (challenge.has_secret) challenge.proof = hello::proof(options.secret, "kvferry listener", said, challenge);
  {
    const std::lock_guard lock(node_.pending_mutex);
    node_.pending.emplace(challenge.local_token, pending_);
  }
  reply(hello::write(challenge));
  return true;
}

void Incoming::check_takes_links() const {
  if (!from_->takes_links) throw Error(Kind::link_failed, "this node takes no new links any more: it listens here for those alone that it has");
}

bool Incoming::on_local(Frame& frame) {
  const auto said = hello::read_local(frame);
  std::shared_ptr<Pending> pending;
  {
    const std::lock_guard lock(node_.pending_mutex);
    const auto it = node_.pending.find(said.token);
    if (it != node_.pending.end()) {
      pending = it->second;
      node_.pending.erase(it);  // the token is good for one connection
    }
  }
  if (!pending) throw wire::WireError("a local step with a token that was not given out");
  auto facts = hello::examine_local_peer(descriptor_.get(), said, frame.descriptors, node_.engine.options.transports);
  const bool same_user = facts.credentials.uid == ::geteuid();
  reply(hello::write(node_.local_facts(said.token), true, same_user), same_user ? node_.engine.guards.page_descriptor() : -1);
  pending->local = std::move(facts);
  node_.engine.reactor.forget(token_, descriptor_.get());
  pending->local_connection = std::move(descriptor_);
  return false;
}

bool Incoming::on_auth(const Frame& frame) {
  const auto said = hello::read_auth(frame);
  const auto& options = node_.engine.options;
  if (!options.secret.empty() && !equal_in_constant_time(said.proof, hello::proof(options.secret, "kvferry dialler", pending_->hello, pending_->challenge)))
    throw Error(Kind::refused, "the secrets of the two nodes differ");
  const bool local_done = said.local_done && pending_->local.has_value();
  const auto credentials = local_done ? pending_->local->credentials : peer_credentials(descriptor_.get());
  if (const auto refusal = node_.default_refusal(pending_->endpoint, credentials); !refusal.empty()) throw Error(Kind::refused, refusal);
  check_takes_links();
  node_.refuse_namesake(pending_->hello);
  if (!local_done) pending_->local.reset();
  auto facts = node_.facts_of(pending_->hello, std::move(pending_->local), pending_->endpoint);
  const auto token = hello::random_token();
  const auto link = node_.new_link(std::move(facts), false, token, nullptr);
  // The peer hears of the link when it is up here, so that whoever dialled finds it on both sides at once.
  if (local_done) {
    node_.bring_up(link, std::move(pending_->local_connection), true);
    reply(hello::write_welcome(token));
    return false;
  }
  node_.engine.reactor.forget(token_, descriptor_.get());
  node_.bring_up(link, std::move(descriptor_), true, hello::write_welcome(token));
  return false;
}

bool Incoming::on_lane(const Frame& frame) {
  const auto said = hello::read_lane(frame);
  const auto link = node_.link_by_token(said.link);
  if (!link) throw wire::WireError("a lane for a link that is not up");
  if (from_->is_unix) link->needs_tcp = false;
  node_.engine.reactor.forget(token_, descriptor_.get());
  tune_lane(descriptor_.get());
  if (said.reverse) {
    auto lane = std::make_unique<Lane>();
    lane->descriptor = std::move(descriptor_);
    lane->use = said.use;
    link->lanes.add(std::move(lane));
  } else if (said.use == LaneUse::call) {
    node_.calls.add(link, std::move(descriptor_), in_.ahead());
  } else {
    const auto lane = std::make_shared<ServerLane>(node_.engine, link, std::move(descriptor_), std::move(in_));
    link->add_server_lane(lane);
    lane->start();
  }
  return false;
}

}  // namespace kvferry
