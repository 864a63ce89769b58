// Calls: asked here, answered there by threads of the test, with peers that give up, go away, or keep to no rules.
#include <sys/socket.h>

#include <random>
#include <thread>

#include "ends.hpp"
#include "stranger.hpp"

using namespace kvferry;
using namespace kvferry::testing;

static Bytes some(std::size_t n, std::uint8_t from = 1) {
  Bytes made(n);
  for (std::size_t i = 0; i < n; ++i) made[i] = static_cast<std::uint8_t>(i * 7 + from);
  return made;
}
static Bytes copied(std::span<const std::uint8_t> bytes) { return {bytes.begin(), bytes.end()}; }

static std::unique_ptr<Call> next(Node& node, int within_ms = 5000) {
  auto event = node.next_call(Deadline::after_ms(within_ms));
  auto* call = std::get_if<std::unique_ptr<Call>>(&event);
  return call == nullptr ? nullptr : std::move(*call);
}

// The answer, or how it ended.
static std::pair<Bytes, Kind> asked(Node& node, const std::shared_ptr<Link>& link, std::span<const std::uint8_t> message, int timeout_ms = 5000) {
  const auto ask = node.ask(link, message, Deadline::after_ms(timeout_ms));
  const auto result = ask->run_here();
  return {copied(ask->answer()), result.outcome.kind};
}

// Threads that answer with what they were asked, backwards, until the node is closed.
struct Echo {
  Node& node;
  std::vector<std::thread> threads;
  std::atomic<int> downs{0}, told{0};
  Echo(Node& of, int n = 1) : node(of) {
    node.serve_calls();
    for (int i = 0; i < n; ++i) threads.emplace_back([this] { run(); });
  }
  ~Echo() {
    for (auto& thread : threads) thread.join();
  }
  void run() {
    CHECK_FAILS(Kind::closed, "closed", [&] {
      for (;;) {
        auto event = node.next_call(Deadline::after_ms(60'000));
        if (std::holds_alternative<LinkDown>(event)) ++downs;
        const auto* call = std::get_if<std::unique_ptr<Call>>(&event);
        if (call == nullptr) continue;
        if ((*call)->one_way) {
          ++told;
          continue;
        }
        auto bytes = copied((*call)->message.bytes());
        std::reverse(bytes.begin(), bytes.end());
        (*call)->answer(bytes);
      }
    }());
  }
};

static Bytes reversed(Bytes bytes) {
  std::reverse(bytes.begin(), bytes.end());
  return bytes;
}

static void calls_are_answered_in_both_directions(unsigned transports) {
  Pair pair(transports);
  for (auto [node, link] : {std::pair(pair.here.get(), pair.link), std::pair(pair.there.get(), pair.back)})
    CHECK(asked(*node, link, some(3)).second == Kind::unsupported);
  Echo there(*pair.there), here(*pair.here);
  for (const std::size_t n : {0, 1, 100, 4072, 4073, 5000, 70'000, 1 << 20, (1 << 20) + 1, 3'000'000}) {
    const auto message = some(n);
    CHECK(asked(*pair.here, pair.link, message) == std::pair(reversed(message), Kind::ok));
    CHECK(asked(*pair.there, pair.back, message) == std::pair(reversed(message), Kind::ok));
  }
  std::vector<std::thread> callers;
  for (int i = 0; i < 6; ++i)
    callers.emplace_back([&, i] {
      for (int round = 0; round < 50; ++round) {
        const auto message = some(static_cast<std::size_t>(round * 97), static_cast<std::uint8_t>(i));
        const auto expected = std::pair(reversed(message), Kind::ok);
        CHECK((i % 2 == 0 ? asked(*pair.here, pair.link, message) : asked(*pair.there, pair.back, message)) == expected);
      }
    });
  for (auto& caller : callers) caller.join();
  CHECK(pair.link->lanes.resets() == 0 && pair.back->lanes.resets() == 0);
  for (int i = 0; i < 20; ++i) pair.here->ask(pair.link, Payload(some(10)), Deadline::after_ms(5000), true)->start_here();
  CHECK(eventually([&] { return there.told == 20; }));
  pair.here->unlink(pair.link, Deadline::after_ms(2000), false);
  CHECK(eventually([&] { return there.downs == 1 && here.downs == 1; }));
  pair.there->close(), pair.here->close();
}

static void two_threads_answer_beside_each_other() {
  Pair pair(any_transport, 3);
  pair.there->serve_calls();
  const auto a = some(5), b = some(6);
  const auto first = pair.here->ask(pair.link, Payload(a), Deadline::after_ms(5000), false);
  const auto second = pair.here->ask(pair.link, Payload(b), Deadline::after_ms(5000), false);
  first->start_here(), second->start_here();
  const auto one = next(*pair.there), other = next(*pair.there);  // both at once, over two lanes
  CHECK(one && other && one->same_host && one->link_id == pair.back->id && one->deadline.left_ms() > 4000);
  CHECK(other->answer(other->message.bytes()) && one->answer(one->message.bytes()));
  CHECK(first->wait(Deadline::after_ms(5000)) && second->wait(Deadline::after_ms(5000)));
  CHECK(copied(first->answer()) == a && copied(second->answer()) == b);
  CHECK_FAILS(Kind::invalid_argument, "answered already", one->answer({}));
}

static void what_is_dropped_is_told() {
  Pair pair;
  pair.there->serve_calls();
  const auto ask = pair.here->ask(pair.link, Payload(some(5)), Deadline::after_ms(5000), false);
  ask->start_here();
  next(*pair.there).reset();
  CHECK(ask->wait(Deadline::after_ms(5000)));
  CHECK_ENDS(Kind::internal, "was not answered", ask->result());
  pair.here->ask(pair.link, Payload(some(5)), Deadline::after_ms(5000), true)->start_here();
  const auto told = next(*pair.there);
  CHECK(told && told->one_way && copied(told->message.bytes()) == some(5));
  CHECK_FAILS(Kind::invalid_argument, "one way", told->answer({}));
  CHECK_FAILS(Kind::invalid_argument, "67108865 bytes", told->answer(std::span<const std::uint8_t>(some(1).data(), longest_message + 1)));
  CHECK_FAILS(Kind::invalid_argument, "67108865 bytes", pair.here->ask(pair.link, std::span<const std::uint8_t>(some(1).data(), longest_message + 1), Deadline::after_ms(1)));
  CHECK(pair.link->lanes.resets() == 0);
}

static void who_gives_up_costs_a_lane_and_nothing_else() {
  Pair pair;
  pair.there->serve_calls();
  // Never looked at: it is not handed out any more when somebody comes to answer.
  CHECK(asked(*pair.here, pair.link, some(5), 30).second == Kind::deadline);
  const auto cancelled = pair.here->ask(pair.link, Payload(some(6)), Deadline::after_ms(60'000), false);
  cancelled->start_here();
  cancelled->cancel();
  CHECK(cancelled->wait(Deadline::after_ms(5000)));
  CHECK_ENDS(Kind::cancelled, "call was cancelled", cancelled->result());
  const auto good = pair.here->ask(pair.link, Payload(some(7)), Deadline::after_ms(60'000), false);
  good->start_here();
  const auto call = next(*pair.there);
  CHECK(call && call->message.size() == 7);
  // Looked at too long: the answer comes too late and is dropped.
  CHECK(asked(*pair.here, pair.link, some(8), 30).second == Kind::deadline);
  CHECK(call->answer(some(1)) && good->wait(Deadline::after_ms(5000)) && copied(good->answer()) == some(1));
  const auto late = pair.here->ask(pair.link, Payload(some(9)), Deadline::after_ms(60), false);
  late->start_here();
  const auto taken = next(*pair.there);
  CHECK(taken && taken->message.size() == 9 && late->wait(Deadline::after_ms(5000)) && late->result().outcome.kind == Kind::deadline);
  CHECK(!taken->answer(some(1)));
  CHECK(!next(*pair.there, 20));
  CHECK(pair.link->alive() && pair.link->lanes.resets() == 4);
  // Those who never look do not keep what has been given up.
  const auto open = open_descriptors();
  for (int i = 0; i < 100; ++i) CHECK(asked(*pair.here, pair.link, some(5), 1).second == Kind::deadline);
  CHECK(open_descriptors() < open + 40);
  std::thread answers([&] { next(*pair.there)->answer(some(2)); });
  CHECK(asked(*pair.here, pair.link, some(5)) == std::pair(some(2), Kind::ok));
  answers.join();
}

static void nodes_that_close_let_everybody_go() {
  Pair pair;
  pair.there->serve_calls();
  const auto ask = pair.here->ask(pair.link, Payload(some(5)), Deadline::after_ms(60'000), false);
  ask->start_here();
  const auto in_hand = next(*pair.there);
  CHECK(in_hand != nullptr);
  std::vector<std::thread> waiting;
  for (int i = 0; i < 3; ++i)
    waiting.emplace_back([&] { CHECK_FAILS(Kind::closed, "closed", pair.there->next_call(Deadline::after_ms(60'000))); });
  sleep_ms(20);
  pair.there->close();
  for (auto& thread : waiting) thread.join();
  CHECK(ask->wait(Deadline::after_ms(5000)));
  CHECK_ENDS(Kind::peer_lost, "closed the connection", ask->result());
  CHECK(!in_hand->answer(some(3)));
  CHECK_FAILS(Kind::closed, "closed", pair.there->next_call(Deadline::after_ms(0)));
  CHECK_FAILS(Kind::closed, "closed", pair.there->serve_calls());
}

// ---- strangers

static const Bytes secret{'s', 'e', 's', 'a', 'm', 'e'};
static NodeOptions with_secret() {
  auto made = options(1);
  made.secret = secret;
  return made;
}

struct Host {
  Node node{with_secret()};
  Endpoint at = node.listen("127.0.0.1", 0);
  Dialler peer{at, 8, secret};
  std::shared_ptr<Link> link = node.links().at(0);
};

static Bytes frame(wire::Type type, std::uint64_t operation, const Bytes& body) {
  return wire::Writer(type, operation).raw(body.data(), body.size()).take();
}

static void requests_are_read_one_after_the_other() {
  Host host;
  const auto lane = host.peer.lane(false, LaneUse::call);
  Bytes all;
  for (const auto& one : {frame(wire::Type::tell, 1, some(10)), frame(wire::Type::call, 2, some(20)), frame(wire::Type::tell, 3, some(5000)), frame(wire::Type::call, 4, {})})
    all.insert(all.end(), one.begin(), one.end());
  send(lane, all);
  const auto refused = receive(lane);  // nobody answers yet
  CHECK(refused.header.operation == 2 && read_ended(refused).outcome.kind == Kind::unsupported);
  CHECK(receive(lane).header.operation == 4);
  host.node.serve_calls();
  send(lane, all);
  CHECK(next(host.node)->message.size() == 10);
  {
    const auto call = next(host.node);
    CHECK(call && call->message.size() == 20 && !call->same_host && !next(host.node, 20));  // the next waits for its answer
    CHECK(call->answer(some(3)));
  }
  auto answer = receive(lane);
  CHECK(answer.header.type == wire::Type::answer && answer.header.operation == 2 && answer.body == some(3));
  CHECK(next(host.node)->message.size() == 5000);
  CHECK(next(host.node)->answer({}));
  answer = receive(lane);
  CHECK(answer.header.type == wire::Type::answer && answer.header.operation == 4 && answer.body.empty());
}

// A long message is read in turns; whoever is done with a turn and has all of it does not wait for more.
static void what_ends_with_a_turn_is_whole() {
  Ends ends;
  for (const std::size_t n : {std::size_t{1} << 20, (std::size_t{1} << 20) - 24, std::size_t{3} << 20}) {
    std::thread sends([&] { send(ends.there, frame(wire::Type::call, 7, some(n))); });
    MessageReader reader;
    MessageReader::State state;
    CHECK(eventually([&] { return (state = reader.read(ends.here.get())) == MessageReader::State::message; }));
    sends.join();
    CHECK(reader.header.operation == 7 && copied(reader.body.bytes()) == some(n) && reader.empty());
  }
}

static void garbage_costs_its_lane() {
  Host host;
  host.node.serve_calls();
  wire::Header too_long;
  too_long.type = wire::Type::call;
  too_long.body_bytes = wire::max_request_bytes + 1;
  const auto* at = reinterpret_cast<const std::uint8_t*>(&too_long);
  for (const auto& wrong : {frame(wire::Type::resolve, 1, some(10)), frame(wire::Type::answer, 1, {}), Bytes(at, at + sizeof too_long), Bytes(24, 0xff)}) {
    const auto lane = host.peer.lane(false, LaneUse::call);
    send(lane, wrong);
    CHECK(!next(host.node, 20) && closed_by_peer(lane));
  }
  const auto half = host.peer.lane(false, LaneUse::call);
  auto request = frame(wire::Type::call, 1, some(100'000));
  send(half, std::span(request).first(50'000));
  CHECK(!next(host.node, 20));
  const auto good = host.peer.lane(false, LaneUse::call);
  send(good, frame(wire::Type::call, 5, some(2)));
  CHECK(next(host.node)->answer(some(1)) && receive(good).header.operation == 5);
  send(half, std::span(request).subspan(50'000));
  CHECK(copied(next(host.node)->message.bytes()) == some(100'000) && host.link->alive());
}

// An answer that nobody reads waits by itself, and leaves whole when it is read.
static void who_does_not_read_his_answer_costs_nobody() {
  Host host;
  host.node.serve_calls();
  const auto slow = host.peer.lane(false, LaneUse::call), quick = host.peer.lane(false, LaneUse::call), gone = host.peer.lane(false, LaneUse::call);
  const auto big = some(20'000'000);
  for (const auto* lane : {&slow, &gone}) {
    send(*lane, frame(wire::Type::call, 1, {}));
    CHECK(next(host.node)->answer(big));
  }
  send(quick, frame(wire::Type::call, 2, {}));
  CHECK(next(host.node)->answer(some(1)) && receive(quick).header.operation == 2);
  ::shutdown(gone.get(), SHUT_RDWR);
  const auto answer = receive(slow);  // with nobody in next_call()
  CHECK(answer.body == big);
  send(slow, frame(wire::Type::call, 3, some(4)));
  CHECK(next(host.node)->message.size() == 4);
}

static void a_link_has_so_many_call_lanes() {
  Host host;
  host.node.serve_calls();
  std::vector<Descriptor> lanes;
  for (int i = 0; i < 32; ++i) {
    lanes.push_back(host.peer.lane(false, LaneUse::call));
    send(lanes.back(), frame(wire::Type::tell, 1, {}));
    CHECK(next(host.node) != nullptr);
  }
  const auto too_many = host.peer.lane(false, LaneUse::call);
  CHECK(closed_by_peer(too_many));
  lanes.clear();
  const auto fits = host.peer.lane(false, LaneUse::call);
  send(fits, frame(wire::Type::call, 1, {}));
  CHECK(next(host.node)->answer({}) && receive(fits).header.type == wire::Type::answer);
}

static void answers_that_are_none_are_found() {
  Node node(with_secret());
  Listener listener;
  std::shared_ptr<Link> link;
  std::thread dials([&] { link = node.connect("127.0.0.1", listener.at.port, Deadline::after_ms(5000)); });
  listener.welcome(9, secret);
  dials.join();
  // Lanes of the node for its peer to ask on come first.
  std::map<LaneUse, std::vector<Descriptor>> reverse;
  for (int i = 0; i < 4; ++i) {
    auto lane = listener.accept();
    const auto said = hello::read_lane(receive(lane));
    CHECK(said.reverse);
    reverse[said.use].push_back(std::move(lane));
  }
  CHECK(reverse[LaneUse::call].size() == 1);
  const std::vector<Bytes> wrong = {frame(wire::Type::answer, 99, {}), frame(wire::Type::piece, 1, {}), Bytes(24, 0xff), ended_frame(1, {}, 0, Transport::none), {}};
  for (const auto& one : wrong) {
    const auto ask = node.ask(link, Payload(some(3)), Deadline::after_ms(one.empty() ? 50 : 5000), false);
    ask->start_here();
    const auto lane = listener.accept();
    CHECK(hello::read_lane(receive(lane)).use == LaneUse::call);
    const auto request = receive(lane);
    CHECK(request.header.type == wire::Type::call && request.body == some(3) && request.header.offset > 0 && request.header.offset <= 5000);
    auto reply = one;
    if (reply.size() >= 16 && reply[4] != static_cast<std::uint8_t>(wire::Type::answer)) std::memcpy(reply.data() + 8, &request.header.operation, 8);
    send(lane, reply);
    CHECK(ask->wait(Deadline::after_ms(5000)));
    CHECK(ask->result().outcome.kind == (one.empty() ? Kind::deadline : Kind::peer_lost));
    CHECK(closed_by_peer(lane));
  }
}

int main() {
  calls_are_answered_in_both_directions(any_transport);
  calls_are_answered_in_both_directions(by_socket);
  two_threads_answer_beside_each_other();
  what_is_dropped_is_told();
  who_gives_up_costs_a_lane_and_nothing_else();
  nodes_that_close_let_everybody_go();
  requests_are_read_one_after_the_other();
  what_ends_with_a_turn_is_whole();
  garbage_costs_its_lane();
  who_does_not_read_his_answer_costs_nobody();
  a_link_has_so_many_call_lanes();
  answers_that_are_none_are_found();
  return TEST_RESULT();
}
