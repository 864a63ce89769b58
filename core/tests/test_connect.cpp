#include <sys/resource.h>

#include <thread>

#include "stranger.hpp"

using namespace kvferry;
using namespace kvferry::testing;

static const Bytes secret{'s', 'e', 's', 'a', 'm', 'e'};

static NodeOptions with_secret(std::uint64_t id) {
  auto made = options(id);
  made.secret = secret;
  return made;
}

static double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

static void linking_fails_with_a_reason_and_in_time() {
  Node node(options(1));
  const auto link = [&](const std::string& host, std::uint16_t port, int ms) { node.connect(host, port, Deadline::after_ms(ms)); };
  Endpoint nobody;
  {
    const auto listener = listen_tcp("127.0.0.1", 0);
    nobody = local_endpoint(listener.get());
  }
  CHECK_FAILS(Kind::link_failed, "cannot reach", link(nobody.host, nobody.port, 1000));
  CHECK_FAILS(Kind::invalid_argument, "not an address", link("no such host.invalid", 1, 1000));

  Listener silent;
  const auto began = now_ns();
  CHECK_FAILS(Kind::deadline, "", link(silent.at.host, silent.at.port, 60));
  CHECK(now_ns() - began < 1'000'000'000);

  const auto answering = [&](const Bytes& bytes, bool close) {
    Listener listener;
    std::thread other([&] {
      const auto connection = listener.accept();
      receive(connection);
      send(connection, bytes);
      if (!close) closed_by_peer(connection);
    });
    std::string said;
    const auto kind = kind_of([&] { link(listener.at.host, listener.at.port, 1000); }, &said);
    other.join();
    return kind;
  };
  CHECK(answering({}, true) == Kind::link_failed);
  CHECK(answering(Bytes(300, 'x'), false) == Kind::link_failed);
  CHECK(answering(hello::write_welcome(hello::random_token()), false) == Kind::link_failed);
  CHECK(answering(hello::write_refused({Kind::refused, "go away", false, true}), false) == Kind::refused);
  hello::Challenge far;
  far.has_secret = true;
  CHECK(answering(hello::write(far), false) == Kind::refused);
  far.has_secret = false;
  far.local_address = "kvferry-nobody-listens-here";
  CHECK(answering(hello::write(far), false) == Kind::refused);  // over loopback both must have done the local step
  CHECK(node.links().empty());
}

// Both directions work after one side has linked, by TCP alone as well.
static void a_pair_without_a_local_step_moves_bytes_over_tcp() {
  Pair pair(with_secret(1), with_secret(2));
  CHECK(pair.link->peer.same_host && pair.back->peer.same_host);
  for (const unsigned transports : {any_transport, by_socket}) {
    Pair plain(options(1, transports), options(2, by_socket));
    Owned far(plain.there->registry(), {"far", 2, 64, 8192}), near(plain.here->registry(), {"near", 2, 64, 8192});
    fill(*far.cache, 4);
    CHECK_BY(socket, pulled(*plain.here, plain.link, by_name("far"), *near.cache, whole(), by_socket));
    CHECK(holds_all(*near.cache, 4));
    fill(*near.cache, 5);
    CHECK_BY(socket, pulled(*plain.there, plain.back, by_name("near"), *far.cache, whole()));
    CHECK(holds_all(*far.cache, 5));
  }
}

static Result in_vain(Node& node, const std::shared_ptr<Link>& link, const Target& target, const Cache& into) {
  return pulled(node, link, target, into, whole(), by_socket, 1);
}

// A lane that was reset is opened anew, by the side that dialled the link, also if that does not work at once.
static void lanes_come_back_when_their_listener_does() {
  Pair pair(by_socket);
  const auto at = pair.link->peer.endpoint;
  const auto shape = [](std::string name) { return Shape{std::move(name), 4, 64, 32768, 0, Layout::mixed, true}; };
  Owned far(pair.there->registry(), shape("far")), near(pair.here->registry(), shape("near"));
  CHECK_BY(socket, pulled(*pair.there, pair.back, by_name("near"), *far.cache, whole()));
  CHECK_BY(socket, pulled(*pair.here, pair.link, by_name("far"), *near.cache, whole()));
  pair.there->stop_listening();
  for (int i = 0; i < 8; ++i) in_vain(*pair.there, pair.back, by_name("near"), *far.cache);
  const auto resets = pair.there->statistics(*pair.back).resets;
  CHECK(resets > 0);
  const auto cpu = cpu_seconds();
  sleep_ms(200);
  CHECK(cpu_seconds() - cpu < 0.1);  // it does not knock all the time
  pair.there->listen(at.host, at.port);
  fill(*near.cache, 7);
  CHECK_BY(socket, pulled(*pair.there, pair.back, by_name("near"), *far.cache, whole()));
  CHECK(holds_all(*far.cache, 7));
  CHECK(pair.link->alive() && pair.back->alive());
}

// The peer takes the connection of a lane and closes it each time.
static void lanes_that_are_refused_cost_little() {
  Listener listener;
  Node node(with_secret(1));
  std::shared_ptr<Link> link;
  std::thread linking([&] { link = node.connect(listener.at.host, listener.at.port, Deadline::after_ms(2000)); });
  listener.welcome(7, secret);
  linking.join();
  int lanes = 0;
  for (const auto until = Deadline::after_ms(300); !until.passed(); sleep_ms(1)) {
    int error = 0;
    while (accept_on(listener.listener.get(), error)) ++lanes;
  }
  std::printf("%d lanes offered in 300 ms\n", lanes);
  CHECK(lanes >= 3 && lanes < 60 && link->alive());
}

// A node is closed while others link to it and it links to them.
static void closing_while_linking() {
  for (int round = 0; round < 20; ++round) {
    auto node = std::make_unique<Node>(options(1));
    const auto at = node->listen("127.0.0.1", 0);
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (std::uint64_t i = 0; i < 2; ++i)
      threads.emplace_back([&, i] {
        while (!stop) {
          Node other(options(10 + i));
          const auto theirs = other.listen("127.0.0.1", 0);
          kind_of([&] { other.connect(at.host, at.port, Deadline::after_ms(500)); });
          kind_of([&] {
            const auto link = node->connect(theirs.host, theirs.port, Deadline::after_ms(500));
            if (node->closed()) CHECK(eventually([&] { return !link->alive(); }, 1000));
          });
        }
      });
    sleep_ms(round % 5);
    node->close();
    stop = true;
    for (auto& thread : threads) thread.join();
    CHECK(node->links().empty());
  }
}

int main() {
  linking_fails_with_a_reason_and_in_time();
  a_pair_without_a_local_step_moves_bytes_over_tcp();
  lanes_come_back_when_their_listener_does();
  lanes_that_are_refused_cost_little();
  closing_while_linking();
  return TEST_RESULT();
}
