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

// Lanes that are reset are opened anew at the port that takes no new links any more, and that is free when nobody needs it.
static void links_go_on_when_their_listener_takes_no_more() {
  Pair pair(by_socket);
  const auto at = pair.link->peer.endpoint;
  const auto shape = [](std::string name) { return Shape{std::move(name), 4, 64, 32768, 0, Layout::mixed, true}; };
  Owned far(pair.there->registry(), shape("far")), near(pair.here->registry(), shape("near"));
  // Of what was given up something may still be read for a moment: nobody else writes there.
  Owned read_there(pair.there->registry(), shape("read there")), read_here(pair.here->registry(), shape("read here"));
  Owned into_there(pair.there->registry(), shape("into there")), into_here(pair.here->registry(), shape("into here"));
  CHECK_BY(socket, pulled(*pair.there, pair.back, by_name("near"), *far.cache, whole()));
  CHECK_BY(socket, pulled(*pair.here, pair.link, by_name("far"), *near.cache, whole()));
  pair.there->stop_listening();
  for (int i = 0; i < 8; ++i) in_vain(*pair.there, pair.back, by_name("read here"), *into_there.cache);
  for (int i = 0; i < 8; ++i) in_vain(*pair.here, pair.link, by_name("read there"), *into_here.cache);
  CHECK(pair.there->statistics(*pair.back).resets > 0 && pair.here->statistics(*pair.link).resets > 0);
  fill(*near.cache, 7);
  CHECK_BY(socket, pulled(*pair.there, pair.back, by_name("near"), *far.cache, whole()));
  CHECK_BY(socket, pushed(*pair.here, pair.link, *near.cache, by_name("far"), whole()));
  CHECK(holds_all(*far.cache, 7) && pair.link->alive() && pair.back->alive());

  Node third(options(3, by_socket));
  CHECK_FAILS(Kind::link_failed, "no new links", third.connect(at.host, at.port, Deadline::after_ms(1000)));
  CHECK_FAILS(Kind::address_in_use, "", third.listen(at.host, at.port));
  pair.there->listen(at.host, at.port);  // the node itself may have it again
  third.connect(at.host, at.port, Deadline::after_ms(1000));
  pair.there->stop_listening();
  const auto other = pair.there->listen("127.0.0.1", 0);  // beside the one that the links need
  third.connect(other.host, other.port, Deadline::after_ms(1000));
  for (int i = 0; i < 8; ++i) in_vain(*pair.there, pair.back, by_name("read here"), *into_there.cache);
  CHECK_BY(socket, pulled(*pair.there, pair.back, by_name("near"), *far.cache, whole()));
  pair.here->unlink(pair.link, Deadline::after_ms(2000), false);
  for (const auto& link : third.links()) third.unlink(link, Deadline::after_ms(2000), false);
  CHECK(eventually([&] { return kind_of([&] { third.listen(at.host, at.port); }) == Kind::ok; }));
}

// Over the Unix socket there is nothing to keep the port for.
static void a_port_that_links_do_not_need_is_free_at_once() {
  Pair pair;
  Owned far(pair.there->registry(), {"far"}), near(pair.here->registry(), {"near"});
  CHECK_BY(socket, pulled(*pair.here, pair.link, by_name("far"), *near.cache, whole(), by_socket));
  const auto at = pair.link->peer.endpoint;
  CHECK(eventually([&] { return pair.back->lanes.open_lanes() == 2; }));
  pair.there->stop_listening();
  Node third(options(3));
  CHECK(eventually([&] { return kind_of([&] { third.listen(at.host, at.port); }) == Kind::ok; }, 1000));
  CHECK_BY(socket, pulled(*pair.here, pair.link, by_name("far"), *near.cache, whole(), by_socket));
  CHECK(pair.link->alive());
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

// A node that has linked to a stranger, and the stranger's end of its lanes.
struct Lanes {
  Listener listener;
  Node node;
  Owned mine;
  std::shared_ptr<Link> link;
  std::vector<Descriptor> reverse;  // on which the stranger might ask

  Lanes() : node(with_secret(1)), mine(node.registry(), {"kv", 1, 4, 64}) {
    std::thread linking([&] { link = node.connect(listener.at.host, listener.at.port, Deadline::after_ms(2000)); });
    listener.welcome(7, secret);
    linking.join();
  }
  // The next lane on which the node asks; none in time: an empty one.
  Descriptor next(LaneUse use, int within_ms = 5000) {
    for (const auto until = Deadline::after_ms(within_ms);;) {
      Descriptor lane;
      int error = 0;
      if (!eventually([&] { return static_cast<bool>(lane = accept_on(listener.listener.get(), error)); }, static_cast<int>(until.left_ms()))) return {};
      const auto said = hello::read_lane(receive(lane));
      if (!said.reverse && said.use == use) return lane;
      reverse.push_back(std::move(lane));
    }
  }
  std::shared_ptr<Operation> pull() {
    auto pull = node.pull(link, by_name("kv"), mine.id(), whole(), Deadline::after_ms(5000), by_socket);
    pull->start();
    return pull;
  }
  std::shared_ptr<Operation> push(std::int64_t timeout_ms = 5000) {
    auto push = node.push(link, mine.id(), by_name("kv"), whole(), Deadline::after_ms(timeout_ms), by_socket);
    push->start();
    return push;
  }
  static void answer(const Descriptor& lane, const Frame& request, bool consumed = false) {
    if (request.header.type == wire::Type::pull) {
      const Bytes bytes(256, 9);
      send(lane, wire::Writer(wire::Type::piece, request.header.operation).raw(bytes.data(), bytes.size()).take());
    }
    send(lane, ended_frame(request.header.operation, {}, 256, Transport::socket, consumed ? wire::flag_consume : 0));
  }
  void served(const Descriptor& lane, const std::shared_ptr<Operation>& operation) {
    answer(lane, receive(lane));
    CHECK(operation->wait(Deadline::after_ms(3000)) && operation->result().outcome.ok());
  }
};

static void a_lane_that_was_closed_while_it_lay_idle_costs_no_operation() {
  Lanes lanes;
  auto pulling = lanes.pull();
  auto small = lanes.next(LaneUse::small), bulk = lanes.next(LaneUse::bulk);  // says at once what it is, unused as it is
  lanes.served(small, pulling);
  auto pushing = lanes.push();
  auto push = lanes.next(LaneUse::push);
  lanes.served(push, pushing);
  for (const bool hard : {false, true}) {
    for (auto* lane : {&small, &bulk, &push}) hard ? reset(std::move(*lane)) : lane->reset();
    sleep_ms(20);  // until the node's kernel knows
    pulling = lanes.pull();
    lanes.served(small = lanes.next(LaneUse::small), pulling);
    bulk = lanes.next(LaneUse::bulk);  // the other one was found closed on that occasion
    pushing = lanes.push();
    lanes.served(push = lanes.next(LaneUse::push), pushing);
  }
  // In the moment in which it is asked: a pull is asked again. It was read, and not a byte of an answer came.
  pulling = lanes.pull();
  receive(small);
  small.reset();
  lanes.served(small = lanes.next(LaneUse::small), pulling);
  CHECK(lanes.link->alive() && lanes.link->failures.load() == 0);
}

// Else its word that it has stopped comes after the pusher has given up, who then knows of nothing.
static void a_receiver_is_told_less_time_than_the_pusher_has() {
  Lanes lanes;
  auto pushing = lanes.push();
  auto push = lanes.next(LaneUse::push);
  lanes.served(push, pushing);
  for (const std::uint32_t timeout_ms : {5000u, 300u, 20u, 9u, 4u}) {
    pushing = lanes.push(timeout_ms);
    Frame request;
    try {
      request = receive(push, wire::max_request_bytes, 1000);
    } catch (const Error&) {  // time was up before it could be sent: the lane is as good as before
      continue;
    }
    CHECK(request.header.type == wire::Type::push);
    const auto told = wire::Reader(request.body).get<std::uint32_t>();
    CHECK(told >= 1 && told <= timeout_ms - std::min(std::max(std::min(timeout_ms / 10, 50u), 3u), timeout_ms / 2) && (timeout_ms < 300 || told > timeout_ms / 2));
    pushing->cancel();
    CHECK(pushing->wait(Deadline::after_ms(3000)));
    push = lanes.next(LaneUse::push);  // its lane was broken with it
  }
}

static void what_may_have_been_carried_out_is_not_asked_twice() {
  Lanes lanes;
  auto pushing = lanes.push();
  auto push = lanes.next(LaneUse::push);
  receive(push);
  push.reset();
  CHECK(pushing->wait(Deadline::after_ms(3000)));
  CHECK(pushing->result().outcome.kind == Kind::peer_lost && pushing->result().outcome.touched && !pushing->result().outcome.settled);
  push = lanes.next(LaneUse::push);  // opened in its place
  std::uint8_t byte;
  CHECK(receive_some(push.get(), {&byte, 1}) == 0);  // and nothing is asked on it

  const auto pulling = lanes.pull();
  auto small = lanes.next(LaneUse::small);
  Lanes::answer(small, receive(small), true);
  CHECK(receive(small).header.type == wire::Type::consume);
  small.reset();
  CHECK(pulling->wait(Deadline::after_ms(3000)) && pulling->result().outcome.kind == Kind::peer_lost && pulling->result().outcome.touched);
  small = lanes.next(LaneUse::small);
  CHECK(receive_some(small.get(), {&byte, 1}) == 0);
}

// A peer that cannot be reached for a while is knocked at more and more rarely, and has its lanes when it is back.
static void lanes_come_back_when_their_listener_does() {
  Lanes lanes;
  CHECK(eventually([&] { return !lanes.next(LaneUse::small, 50); }, 1000));  // four on which the peer might ask
  CHECK(lanes.reverse.size() == 4);
  lanes.listener.listener.reset();
  lanes.reverse.clear();
  const auto cpu = cpu_seconds();
  sleep_ms(200);
  CHECK(cpu_seconds() - cpu < 0.1);
  lanes.listener.listener = listen_tcp(lanes.listener.at.host, lanes.listener.at.port);
  CHECK(eventually([&] { return !lanes.next(LaneUse::small, 500) && lanes.reverse.size() == 4; }));
  CHECK(lanes.link->alive());
}

static void a_peer_that_closes_every_lane_is_not_asked_for_ever() {
  Lanes lanes;
  const auto pulling = lanes.pull();
  int asked = 0;
  while (!pulling->done() && asked < 10)
    if (const auto small = lanes.next(LaneUse::small, 200)) {
      try {
        receive(small, wire::max_request_bytes, 200);
        ++asked;
      } catch (const Error&) {  // opened in place of the last one that was asked on
      }
    }
  CHECK(pulling->wait(Deadline::after_ms(3000)) && pulling->result().outcome.kind == Kind::peer_lost && asked == 3);
  CHECK(lanes.link->alive());
}

// A node is closed while others link to it and it links to them.
// Two threads of one node that may not replace a link, to one peer by two ways: one gets it, the other hears of that; and a
// link that is there stays.
static void a_link_that_is_not_to_be_replaced_stays() {
  for (int round = 0; round < 20; ++round) {
    Node here(options(1)), there(options(2));
    const auto at = there.listen("127.0.0.1", 0);
    std::atomic<int> linked{0}, refused{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&] {
        const auto kind = kind_of([&] { here.connect(at.host, at.port, Deadline::after_ms(5000), false); });
        linked += kind == Kind::ok;
        refused += kind == Kind::already_linked;
      });
    for (auto& thread : threads) thread.join();
    CHECK(linked == 1 && refused == 3);
    const auto link = here.links().at(0);
    CHECK_FAILS(Kind::already_linked, "linked there already", here.connect("localhost", at.port, Deadline::after_ms(5000), false));
    CHECK(link->alive() && there.links().size() == 1 && there.links().at(0)->alive());
    const auto again = here.connect(at.host, at.port, Deadline::after_ms(5000));
    CHECK(again->alive() && eventually([&] { return !link->alive(); }));
    // One that the peer has opened, or that is down, is in nobody's way.
    const auto mine = here.listen("127.0.0.1", 0);
    const auto back = there.connect(mine.host, mine.port, Deadline::after_ms(5000), false);
    here.unlink(again, Deadline::after_ms(5000), false);
    CHECK(here.connect(at.host, at.port, Deadline::after_ms(5000), false)->alive() && back->alive());
  }
}

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
  links_go_on_when_their_listener_takes_no_more();
  a_port_that_links_do_not_need_is_free_at_once();
  lanes_come_back_when_their_listener_does();
  lanes_that_are_refused_cost_little();
  a_lane_that_was_closed_while_it_lay_idle_costs_no_operation();
  a_receiver_is_told_less_time_than_the_pusher_has();
  what_may_have_been_carried_out_is_not_asked_twice();
  a_peer_that_closes_every_lane_is_not_asked_for_ever();
  a_link_that_is_not_to_be_replaced_stays();
  closing_while_linking();
  return TEST_RESULT();
}
