// A peer that is not a node: it speaks the hello by hand, and after it whatever the test wants to see answered.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../hello.hpp"
#include "nodes.hpp"

namespace kvferry::testing {

using Bytes = std::vector<std::uint8_t>;

inline Descriptor dialled(const Endpoint& at) { return dial_tcp(at.host, at.port, Deadline::after_ms(5000)); }

inline void send(const Descriptor& to, std::span<const std::uint8_t> bytes) { send_all(to.get(), bytes, Deadline::after_ms(5000)); }

inline Frame receive(const Descriptor& from, std::size_t most = wire::max_request_bytes, int within_ms = 5000) {
  return receive_frame(from.get(), most, Deadline::after_ms(within_ms));
}

// Whether the other end has closed, or closes in time.
inline bool closed_by_peer(const Descriptor& connection, int within_ms = 5000) {
  std::uint8_t bytes[4096];
  return eventually([&] { return receive_some(connection.get(), bytes) < 0; }, within_ms);
}

// Closes so that the other end gets a reset instead of an end.
inline void reset(Descriptor connection) {
  const linger hard{1, 0};
  setsockopt(connection.get(), SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
}

inline hello::Hello hello_of(std::uint64_t node_id, bool has_secret) {
  hello::Hello said;
  said.node_id = node_id;
  said.instance = hello::random_token();
  said.nonce = hello::random_nonce();
  said.has_secret = has_secret;
  return said;
}

// Links to a node with a secret as if from another host: no local step, TCP alone.
struct Dialler {
  Endpoint at;
  Descriptor control;
  hello::Token token{};

  Dialler(const Endpoint& node, std::uint64_t node_id, const Bytes& secret) : at(node), control(dialled(node)) {
    const auto said = hello_of(node_id, true);
    send(control, hello::write(said));
    const auto challenge = hello::read_challenge(receive(control));
    hello::Auth auth;
    auth.proof = hello::proof(secret, "kvferry dialler", said, challenge);
    send(control, hello::write(auth));
    const auto answer = receive(control);
    hello::throw_if_refused(answer);
    token = hello::read_welcome(answer);
  }
  // A lane on which this side asks (or, in reverse, is asked).
  Descriptor lane(bool reverse = false, LaneUse use = LaneUse::small) const {
    auto connection = dialled(at);
    send(connection, hello::write(hello::LaneHello{token, reverse, use}));
    return connection;
  }
};

// Listens as a node with a secret would, for one link.
struct Listener {
  Descriptor listener = listen_tcp("127.0.0.1", 0);
  Endpoint at = local_endpoint(listener.get());
  Descriptor control;
  hello::Token token = hello::random_token();

  Descriptor accept(int within_ms = 5000) {
    Descriptor connection;
    int error = 0;
    CHECK(eventually([&] { return static_cast<bool>(connection = accept_on(listener.get(), error)); }, within_ms));
    return connection;
  }
  void welcome(std::uint64_t node_id, const Bytes& secret) {
    control = accept();
    const auto said = hello::read_hello(receive(control));
    hello::Challenge challenge;
    challenge.node_id = node_id;
    challenge.instance = hello::random_token();
    challenge.nonce = hello::random_nonce();
    challenge.has_secret = true;
    challenge.proof = hello::proof(secret, "kvferry listener", said, challenge);
    send(control, hello::write(challenge));
    hello::read_auth(receive(control));
    send(control, hello::write_welcome(token));
  }
};

}  // namespace kvferry::testing
