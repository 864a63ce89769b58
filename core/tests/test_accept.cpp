#include <arpa/inet.h>
#include <sys/un.h>

#include <random>

#include "stranger.hpp"

using namespace kvferry;
using namespace kvferry::testing;

static const Bytes secret{'s', 'e', 's', 'a', 'm', 'e'};

static NodeOptions with_secret(std::uint64_t id, Bytes words = secret) {
  auto made = options(id);
  made.secret = std::move(words);
  return made;
}

// Whether the node still links and moves bytes.
static void check_alive(Node& node, const Endpoint& at, const NodeOptions& like) {
  auto mine = like;
  mine.node_id = 900;
  Node other(mine);
  Owned from(node.registry(), {"alive"}), to(other.registry(), {"to"});
  fill(*from.cache, 6);
  const auto link = other.connect(at.host, at.port, Deadline::after_ms(5000));
  CHECK(pulled(other, link, by_name("alive"), *to.cache, whole()).outcome.ok() && holds_all(*to.cache, 6));
  CHECK(node.registry().remove(from.id()));
}

static void a_secret_must_be_the_same_on_both_sides() {
  Node node(with_secret(1));
  const auto at = node.listen("127.0.0.1", 0);
  const auto link = [&](const NodeOptions& mine) {
    Node other(mine);
    other.connect(at.host, at.port, Deadline::after_ms(2000));
  };
  CHECK_FAILS(Kind::refused, "differ", link(with_secret(2, {'o', 'p', 'e', 'n'})));
  CHECK_FAILS(Kind::refused, "secret", link(options(2)));
  CHECK(node.links().empty());
  link(with_secret(2));
  Node open(options(3));
  const auto open_at = open.listen("127.0.0.1", 0);
  CHECK_FAILS(Kind::refused, "secret", Node(with_secret(4)).connect(open_at.host, open_at.port, Deadline::after_ms(2000)));
}

static void a_proof_that_is_no_proof_is_refused() {
  Node node(with_secret(1));
  const auto at = node.listen("127.0.0.1", 0);
  const auto said = hello_of(5, true);
  {  // any bytes
    const auto connection = dialled(at);
    send(connection, hello::write(said));
    hello::read_challenge(receive(connection));
    send(connection, hello::write(hello::Auth{}));
    CHECK_FAILS(Kind::refused, "differ", hello::throw_if_refused(receive(connection)));
    CHECK(closed_by_peer(connection));
  }
  {  // the listener's own proof, sent back
    const auto connection = dialled(at);
    send(connection, hello::write(said));
    hello::Auth auth;
    auth.proof = hello::read_challenge(receive(connection)).proof;
    send(connection, hello::write(auth));
    CHECK_FAILS(Kind::refused, "differ", hello::throw_if_refused(receive(connection)));
  }
  {  // one that was good for another challenge
    hello::Auth auth;
    for (int i = 0; i < 2; ++i) {
      const auto connection = dialled(at);
      send(connection, hello::write(said));
      const auto challenge = hello::read_challenge(receive(connection));
      if (i == 0) auth.proof = hello::proof(secret, "kvferry dialler", said, challenge);
      if (i == 1) send(connection, hello::write(auth));
      if (i == 1) CHECK_FAILS(Kind::refused, "differ", hello::throw_if_refused(receive(connection)));
    }
  }
  Dialler good(at, 5, secret);
  CHECK(node.links().size() == 1 && !node.links()[0]->peer.same_host);
}

static void without_a_secret_a_process_of_this_host_must_show_itself() {
  Node node(options(1));
  const auto at = node.listen("127.0.0.1", 0);
  const auto connection = dialled(at);
  send(connection, hello::write(hello_of(5, false)));
  hello::read_challenge(receive(connection));
  send(connection, hello::write(hello::Auth{{}, true}));  // says so, and has not done it
  CHECK_FAILS(Kind::refused, "Unix socket", hello::throw_if_refused(receive(connection)));
  CHECK(closed_by_peer(connection) && node.links().empty());
}

static void another_version_is_refused() {
  Node node(options(1));
  const auto at = node.listen("127.0.0.1", 0);
  auto said = hello_of(5, false);
  said.version = wire::version + 1;
  const auto connection = dialled(at);
  send(connection, hello::write(said));
  CHECK_FAILS(Kind::refused, "version", hello::throw_if_refused(receive(connection)));
  CHECK(closed_by_peer(connection));
}

// Who is gone before he can be told that he is refused.
static void a_refused_peer_that_does_not_wait_for_the_answer_harms_nobody() {
  Node node(options(1));
  const auto at = node.listen("127.0.0.1", 0);
  auto foreign = hello_of(5, false);
  foreign.version = 99;
  for (int i = 0; i < 300; ++i) {
    auto connection = dialled(at);
    send(connection, hello::write(foreign));
    reset(std::move(connection));
  }
  check_alive(node, at, options(0));
}

static void garbage_is_closed() {
  for (const auto& like : {options(1), with_secret(1)}) {
    Node node(like);
    const auto at = node.listen("127.0.0.1", 0);
    std::mt19937 random(7);
    const auto good = hello::write(hello_of(5, !like.secret.empty()));
    for (int i = 0; i < 150; ++i) {
      const auto connection = dialled(at);
      Bytes bytes(random() % 200);
      for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
      if (i % 3 == 0) {  // a hello with something wrong in it
        bytes = good;
        for (int k = 0; k < 2; ++k) bytes[random() % bytes.size()] = static_cast<std::uint8_t>(random());
      } else if (i % 3 == 1 && bytes.size() >= 24) {  // a frame of some type
        wire::Header header;
        header.type = static_cast<wire::Type>(random() % 45);
        header.body_bytes = static_cast<std::uint32_t>(bytes.size() - 24);
        std::memcpy(bytes.data(), &header, sizeof header);
      }
      try {
        send(connection, bytes);
      } catch (const Error&) {  // closed already
      }
      ::shutdown(connection.get(), SHUT_WR);
      CHECK(closed_by_peer(connection));
    }
    {  // a frame that says that it is big
      wire::Header header;
      header.type = wire::Type::hello;
      header.body_bytes = 0xffffffff;
      const auto connection = dialled(at);
      send(connection, {reinterpret_cast<const std::uint8_t*>(&header), sizeof header});
      CHECK(closed_by_peer(connection));
    }
    {  // a second hello
      const auto connection = dialled(at);
      send(connection, good);
      send(connection, good);
      CHECK(closed_by_peer(connection));
    }
    {  // a lane of no link
      const auto connection = dialled(at);
      send(connection, hello::write(hello::LaneHello{hello::random_token(), false, LaneUse::small}));
      CHECK(closed_by_peer(connection));
    }
    check_alive(node, at, like);
    CHECK(eventually([&] { return node.links().empty(); }));
  }
}

// On the Unix socket anybody of this host may knock, and hand over descriptors that nobody wants.
static void descriptors_that_nobody_asked_for_are_closed() {
  Node node(options(1));
  const auto at = node.listen("127.0.0.1", 0);
  auto said = hello_of(5, false);
  said.boot_id = hello::boot_id();
  const auto connection = dialled(at);
  send(connection, hello::write(said));
  const auto challenge = hello::read_challenge(receive(connection));
  CHECK(!challenge.local_address.empty());
  const auto before = open_descriptors();
  const Descriptor unix_connection = dial_abstract(challenge.local_address, Deadline::after_ms(1000));
  const auto frame = hello::write(hello::Local{}, false, true);
  const std::vector<int> many(10, STDERR_FILENO);
  try {
    for (std::size_t i = 0; i < frame.size(); ++i) send_all(unix_connection.get(), std::span(frame).subspan(i, 1), Deadline::after_ms(1000), many);
  } catch (const Error&) {  // closed before the last byte
  }
  CHECK(closed_by_peer(unix_connection));
  CHECK(eventually([&] { return open_descriptors() <= before + 1; }));
  check_alive(node, at, options(0));
}

static void who_says_nothing_is_closed_and_does_not_keep_others_out() {
  Node node(options(1));
  const auto at = node.listen("127.0.0.1", 0);
  Node early(options(3));
  Owned from(node.registry(), {"from"}), to(early.registry(), {"to"});
  const auto link = early.connect(at.host, at.port, Deadline::after_ms(2000));
  std::vector<Descriptor> silent;
  for (int i = 0; i < 600; ++i) silent.push_back(dialled(at));
  for (std::size_t i = 0; i < 100; ++i) {  // one byte now and then
    try {
      send(silent[i], Bytes{0});
    } catch (const Error&) {
    }
  }
  CHECK(pulled(early, link, by_name("from"), *to.cache, whole()).outcome.ok());
  CHECK(eventually([&] {  // accepting may still be under way
    std::size_t closed = 0;
    for (const auto& connection : silent) {
      std::uint8_t byte;
      closed += receive_some(connection.get(), {&byte, 1}) < 0;
    }
    return closed >= 600 - most_incoming;
  }));
  std::uint8_t byte;
  CHECK(receive_some(silent.back().get(), {&byte, 1}) == 0);  // the oldest made room
  for (std::size_t i = 0; i < 300; ++i) silent.pop_back();  // the others stay silent
  CHECK(eventually([&] { return node.engine().registry.find(from.id()) != nullptr; }));
  CHECK(eventually([&] {
    Node late(options(4));
    return kind_of([&] { late.connect(at.host, at.port, Deadline::after_ms(2000)); }) == Kind::ok;
  }));
}

static void listening_can_be_stopped_and_begun_again_while_others_knock() {
  Node node(options(1));
  auto at = node.listen("127.0.0.1", 0);
  CHECK_FAILS(Kind::invalid_argument, "listens already", node.listen("127.0.0.1", 0));
  std::atomic<bool> stop{false};
  std::atomic<int> port{at.port};
  std::thread knocking([&] {
    while (!stop) kind_of([&] { dial_tcp("127.0.0.1", static_cast<std::uint16_t>(port), Deadline::after_ms(100)); });
  });
  for (int i = 0; i < 100; ++i) {
    node.stop_listening();
    node.stop_listening();
    at = node.listen("127.0.0.1", 0);
    port = at.port;
  }
  stop = true;
  knocking.join();
  check_alive(node, at, options(0));
  Node second(options(2));
  CHECK_FAILS(Kind::address_in_use, "", second.listen("127.0.0.1", at.port));
  CHECK_FAILS(Kind::invalid_argument, "", second.listen("not an address", 0));
  node.stop_listening();
  CHECK(eventually([&] { return kind_of([&] { second.listen("127.0.0.1", at.port); }) == Kind::ok; }));  // once all who knocked are gone
}

int main() {
  a_secret_must_be_the_same_on_both_sides();
  a_proof_that_is_no_proof_is_refused();
  without_a_secret_a_process_of_this_host_must_show_itself();
  another_version_is_refused();
  a_refused_peer_that_does_not_wait_for_the_answer_harms_nobody();
  garbage_is_closed();
  descriptors_that_nobody_asked_for_are_closed();
  who_says_nothing_is_closed_and_does_not_keep_others_out();
  listening_can_be_stopped_and_begun_again_while_others_knock();
  return TEST_RESULT();
}
