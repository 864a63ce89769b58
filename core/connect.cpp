// Dialling: the hello from the side that links, on its caller's thread, and the lanes that this side opens for both.

#include <unistd.h>

#include "inner.hpp"
#include "sentence.hpp"

namespace kvferry {
namespace {

// How this side opens lanes of one link, for itself and for the peer.
struct Dialler {
  NodeInner* node;
  hello::Token token;
  std::string unix_name;  // "" : as the link was dialled
  Endpoint endpoint;

  Descriptor dial(LaneUse use, bool reverse, std::vector<std::uint8_t>& first) const {
    Descriptor descriptor;
    try {
      descriptor = !unix_name.empty()     ? dial_abstract(unix_name, Deadline{0})
                   : endpoint.path.empty() ? start_dial_tcp(endpoint.host, endpoint.port)
                                           : dial_unix(endpoint.path, Deadline{0});
    } catch (const Error&) {  // no descriptor: whoever needs the lane tries again, and its deadline says when to stop
    }
    if (descriptor) tune_lane(descriptor.get());
    hello::LaneHello lane{token, reverse, use};
    first = hello::write(lane);
    return descriptor;
  }

  std::unique_ptr<Lane> operator()(LaneUse use) const {
    auto lane = std::make_unique<Lane>();
    lane->descriptor = dial(use, false, lane->preface);
    lane->use = use;
    if (!lane->descriptor) return nullptr;
    // At once, if it is connected: a connection that says nothing for long is closed at the other side.
    const long n = send_some(lane->descriptor.get(), lane->preface);
    if (n > 0) lane->preface.erase(lane->preface.begin(), lane->preface.begin() + n);
    return lane;  // also if that failed: whoever takes it says so
  }
};

// A lane on which the peer asks and this side serves. When it is lost while the link is up, the peer has reset it after
// an operation that ended early, and a new one is opened in its place; at once, unless nothing was ever asked on it: then
// the peer does not take it at present, and is asked more and more rarely, `vain` times so far.
void open_for_peer(const Dialler& dialler, const std::shared_ptr<Link>& link, LaneUse use, unsigned vain = 0) {
  const auto again = [dialler, weak = std::weak_ptr(link), use](unsigned times) {
    const auto open = [dialler, weak, use, times] {
      const auto alive = weak.lock();
      if (alive && alive->alive()) open_for_peer(dialler, alive, use, times);
    };
    if (times == 0) return open();
    const auto wait_ms = std::int64_t{1} << std::min(times, 10u);
    dialler.node->run_at(now_ns() + wait_ms * 1'000'000, open);
  };
  std::vector<std::uint8_t> first;
  auto descriptor = dialler.dial(use, true, first);
  if (!descriptor) return again(vain + 1);
  auto lost = [again, vain](bool used) { again(used ? 0 : vain + 1); };
  if (use == LaneUse::call) return dialler.node->calls.add(link, std::move(descriptor), {}, std::move(first), std::move(lost));
  const auto lane = std::make_shared<ServerLane>(dialler.node->engine, link, std::move(descriptor), std::move(first), std::move(lost));
  link->add_server_lane(lane);
  lane->start();
}

Frame answer_of(int fd, const Deadline& deadline) {
  auto frame = receive_frame(fd, wire::max_hello_bytes, deadline);
  hello::throw_if_refused(frame);
  return frame;
}

struct LocalStep {
  Descriptor connection;
  std::optional<PeerFacts> facts;
  std::string why_not;
};

LocalStep do_local_step(NodeInner& node, const hello::Challenge& challenge, const Deadline& deadline) {
  LocalStep step;
  if (challenge.local_address.empty()) return step;
  try {
    auto connection = dial_abstract(challenge.local_address, deadline);
    const auto credentials = peer_credentials(connection.get());
    const bool same_user = credentials && credentials->uid == ::geteuid();
    const int page = node.engine.guards.page_descriptor();
    send_all(connection.get(), hello::write(node.local_facts(challenge.local_token), false, same_user), deadline,
             same_user ? std::span<const int>(&page, 1) : std::span<const int>());
    auto frame = answer_of(connection.get(), deadline);
    if (frame.header.type != wire::Type::local_answer) throw wire::WireError("another frame than the hello asks for");
    const auto said = hello::read_local(frame);
    step.facts = hello::examine_local_peer(connection.get(), said, frame.descriptors, node.engine.options.transports);
    step.connection = std::move(connection);
  } catch (const Error& error) {
    const auto kind = error.outcome().kind;
    if (kind == Kind::deadline || kind == Kind::cancelled || kind == Kind::busy) throw;
    step.why_not = error.what();
  }
  return step;
}

std::shared_ptr<Link> converse(NodeInner& node, Descriptor tcp, const Endpoint& at, const Deadline& deadline, bool replace) {
  const auto& options = node.engine.options;
  auto endpoint = peer_endpoint(tcp.get());
  if (!at.path.empty()) endpoint.path = at.path;  // its listener may know it by another one
  tune_lane(tcp.get());
  hello::Hello said;
  said.node_id = options.node_id;
  said.instance = node.instance;
  said.boot_id = node.boot_id;
  said.nonce = hello::random_nonce();
  said.has_secret = !options.secret.empty();
  said.program = options.program;
  send_all(tcp.get(), hello::write(said), deadline);
  const auto challenge = hello::read_challenge(answer_of(tcp.get(), deadline));
  if (challenge.has_secret != said.has_secret) throw Error(Kind::refused, "one of the two nodes has a secret, the other has none");
  if (said.has_secret && !equal_in_constant_time(challenge.proof, hello::proof(options.secret, "kvferry listener", said, challenge)))
    throw Error(Kind::refused, "the secrets of the two nodes differ");
  std::optional<NodeInner::SoleDialler> sole;
  if (!replace) sole.emplace(node, challenge, deadline);

  auto step = do_local_step(node, challenge, deadline);
  const auto credentials = step.facts ? step.facts->credentials : peer_credentials(tcp.get());
  if (const auto refusal = node.default_refusal(endpoint, credentials); !refusal.empty())
    throw Error(Kind::refused, refusal + (step.why_not.empty() ? "" : " (" + step.why_not + ")"));
  hello::Auth auth;
  auth.local_done = step.facts.has_value();
  if (said.has_secret) auth.proof = hello::proof(options.secret, "kvferry dialler", said, challenge);
  send_all(tcp.get(), hello::write(auth), deadline);
  const auto token = hello::read_welcome(answer_of(tcp.get(), deadline));

  hello::Hello peer;
  peer.node_id = challenge.node_id;
  peer.instance = challenge.instance;
  peer.program = challenge.program;
  if (!challenge.local_address.empty()) peer.boot_id = node.boot_id;
  auto facts = node.facts_of(peer, std::move(step.facts), endpoint);
  // Lanes of a pair that may use nothing but sockets are real ones: TCP, as between hosts.
  const bool unix_lanes = step.connection && (options.transports & ~static_cast<unsigned>(Transport::socket)) != 0;
  const Dialler dialler{&node, token, unix_lanes ? challenge.local_address : "", endpoint};
  auto link = node.new_link(std::move(facts), true, token, dialler);
  node.bring_up(link, step.connection ? std::move(step.connection) : std::move(tcp), false);
  for (unsigned i = 0; i < options.lanes; ++i) open_for_peer(dialler, link, i == 0 ? LaneUse::small : LaneUse::bulk);
  for (const auto use : {LaneUse::push, LaneUse::call}) open_for_peer(dialler, link, use);
  return link;
}

}  // namespace

std::shared_ptr<Link> dial_link(NodeInner& node, const Endpoint& at, const Deadline& deadline, bool replace) {
  const auto where = at.path.empty() ? at.host + ":" + std::to_string(at.port) : at.text();
  try {
    return converse(node, at.path.empty() ? dial_tcp(at.host, at.port, deadline) : dial_unix(at.path, deadline), at, deadline, replace);
  } catch (const wire::WireError& error) {
    throw Error({Kind::link_failed, where + " does not speak kvferry's protocol: " + error.what(), false, true}, where, "", "link");
  } catch (const Error& error) {
    auto outcome = error.outcome();
    if (outcome.kind == Kind::peer_lost) outcome.kind = Kind::link_failed;
    throw Error(std::move(outcome), where, "", "link");
  }
}

}  // namespace kvferry
