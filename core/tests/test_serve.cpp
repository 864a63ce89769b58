// Lanes with somebody at the other end who does not keep to the rules, as server and as client.
#include <random>
#include <thread>

#include "stranger.hpp"

using namespace kvferry;
using namespace kvferry::testing;

static const Bytes secret{'s', 'e', 's', 'a', 'm', 'e'};

struct Host {
  Node node;
  Endpoint at;
  std::unique_ptr<Dialler> peer;
  std::shared_ptr<Link> link;

  Host() : node(with_secret()), at(node.listen("127.0.0.1", 0)), peer(std::make_unique<Dialler>(at, 8, secret)), link(node.links().at(0)) {}
  static NodeOptions with_secret() {
    auto made = options(1);
    made.secret = secret;
    return made;
  }
};

static Bytes resolve(std::uint64_t operation, const Target& target) {
  wire::Writer out(wire::Type::resolve, operation);
  wire::put_target(out, target);
  return out.put(std::uint8_t{0}).take();
}

static Bytes pull(std::uint64_t operation, const Target& target, const std::vector<UnitRun>& units, std::uint32_t left_ms = 2000,
                  const std::vector<Guard>& guards = {}) {
  SourceSelect select;
  select.tensor_count = 2, select.unit_bytes = 4096, select.units = units;
  wire::Writer out(wire::Type::pull, operation);
  out.put(left_ms);
  wire::put_guards(out, guards);
  wire::put_target(out, target);
  wire::put_select(out, select);
  return out.take();
}

static Geometry far_geometry() {
  Geometry made;
  made.cache_id = 3;
  made.layout = Layout::mixed;
  made.unit_bytes = made.stride_bytes = 4096;
  made.count = 8;
  made.tensors = {{1 << 20, 0, 0}, {2 << 20, 0, 0}};
  return made;
}

static Bytes push(std::uint64_t operation, const Target& target, const Moves& moves, const Geometry& source = far_geometry(),
                  unsigned transports = any_transport, std::uint32_t left_ms = 2000) {
  wire::Writer out(wire::Type::push, operation);
  out.put(left_ms).put(static_cast<std::uint8_t>(transports));
  wire::put_target(out, target);
  out.put(std::uint8_t{0});
  wire::put_guards(out, {{1, 1}});
  wire::put_geometry(out, source);
  wire::put_moves(out, moves);
  wire::put_words(out, {});
  wire::put_sums(out, moves.sums.get());
  return out.take();
}

static Bytes consume(std::uint64_t operation, const Target& target) {
  wire::Writer out(wire::Type::consume, operation);
  wire::put_target(out, target);
  return out.put(std::int64_t{0}).put(std::uint32_t{0}).put(std::uint32_t{1}).take();
}

static Kind answered(const Descriptor& lane, std::uint64_t operation) {
  const auto frame = receive(lane);
  CHECK(frame.header.operation == operation);
  if (frame.header.type != wire::Type::ended) return Kind::ok;
  const auto ended = read_ended(frame);
  CHECK(!ended.outcome.ok() || ended.bytes > 0 || ended.outcome.sentence.empty());
  return ended.outcome.kind;
}

// The stream of a pull: its bytes, or how it ended.
static std::pair<Bytes, Kind> streamed(const Descriptor& lane, std::uint64_t operation) {
  Bytes all;
  for (;;) {
    const auto frame = receive(lane);
    CHECK(frame.header.operation == operation);
    if (frame.header.type == wire::Type::ended) return {all, read_ended(frame).outcome.kind};
    CHECK(frame.header.type == wire::Type::piece && frame.header.offset == all.size());
    all.insert(all.end(), frame.body.begin(), frame.body.end());
  }
}

static void requests_are_answered_in_their_order() {
  Host host;
  Owned kv(host.node.registry(), {"kv"});
  fill(*kv.cache, 3);
  const auto lane = host.peer->lane();
  // All at once, together with what opened the lane.
  Bytes all;
  for (const auto& one : {resolve(1, by_name("kv")), pull(2, by_name("kv"), {{0, 8}}), resolve(3, by_name("none")), pull(4, by_id(9), {{0, 1}}),
                          pull(5, by_name("kv"), {{7, 1}}), consume(6, by_name("kv")), pull(7, by_name("kv"), {})})
    all.insert(all.end(), one.begin(), one.end());
  send(lane, all);
  CHECK(receive(lane).header.type == wire::Type::geometry);
  const auto [bytes, kind] = streamed(lane, 2);
  CHECK(kind == Kind::ok && bytes.size() == 2 * 8 * 4096);
  for (std::size_t i = 0; i < bytes.size(); i += 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes.data() + i, 8);
    CHECK(word == word_of(3, i / (8 * 4096), i / 4096 % 8, i % 4096 / 8));
  }
  CHECK(answered(lane, 3) == Kind::not_found && answered(lane, 4) == Kind::not_found);
  CHECK(streamed(lane, 5).first.size() == 2 * 4096);
  CHECK(answered(lane, 6) == Kind::ok && streamed(lane, 7) == std::pair(Bytes{}, Kind::ok));
  for (const auto& wrong : {pull(8, by_name("kv"), {{7, 2}}), pull(8, by_name("kv"), {{0, 1}}, 2000, {{5, 77}}), push(8, by_name("none"), *whole()),
                            push(8, by_addresses({1, 2}), *whole()), push(8, by_name("kv"), *blocks({0}, {8}))}) {
    send(lane, wrong);
    CHECK(answered(lane, 8) != Kind::ok);
  }
  wire::Writer segment(wire::Type::fetch_segment, 9);
  send(lane, segment.put(std::uint32_t{1}).take());
  CHECK(answered(lane, 9) == Kind::not_found);  // it is not on this host
  CHECK(holds_all(*kv.cache, 3));
}

// A stream whose cache ends in its middle is filled up and ends with an error, and the lane goes on.
static void a_stream_whose_cache_ends_stays_whole() {
  Host host;
  Owned kv(host.node.registry(), {"kv", 2, 2048, 4096});
  Owned other(host.node.registry(), {"other"});
  const auto lane = host.peer->lane();
  send(lane, pull(1, by_name("kv"), {{0, 2048}}, 10'000));
  auto first = receive(lane);  // more than fits in the buffers: the rest waits
  CHECK(first.header.type == wire::Type::piece);
  CHECK(host.node.registry().remove(kv.id()));
  std::uint64_t at = first.body.size();
  for (;;) {
    const auto frame = receive(lane);
    if (frame.header.type == wire::Type::ended) {
      CHECK(read_ended(frame).outcome.kind == Kind::not_found);
      break;
    }
    CHECK(frame.header.offset == at);
    at += frame.body.size();
  }
  CHECK(at < 2 * 2048 * 4096);
  send(lane, pull(2, by_name("other"), {{0, 8}}));
  CHECK(streamed(lane, 2).second == Kind::ok);
}

static void a_client_that_reads_nothing_costs_its_deadline() {
  Host host;
  Owned kv(host.node.registry(), {"kv", 2, 2048, 4096});
  std::vector<Descriptor> lanes;
  for (std::uint64_t i = 0; i < 4; ++i) {
    lanes.push_back(host.peer->lane());
    send(lanes.back(), pull(i, by_name("kv"), {{0, 2048}}, i == 3 ? 10'000 : 50));
  }
  CHECK(eventually([&] { return host.link->operations() == 4; }));
  CHECK(eventually([&] { return host.link->operations() == 1; }));
  // The three lanes are at an end in the middle of a piece.
  std::uint8_t bytes[65536];
  for (std::size_t i = 0; i < 3; ++i) CHECK(eventually([&] { return receive_some(lanes[i].get(), bytes) < 0; }));
  lanes.clear();  // the client of the last one is gone
  CHECK(eventually([&] { return host.link->operations() == 0; }));
  const auto began = now_ns();
  CHECK(host.node.registry().remove(kv.id()));
  CHECK(now_ns() - began < 500'000'000);
}

// A pusher that is gone has cancelled: the receiver does not go on for nobody.
static void a_pusher_that_leaves_has_cancelled() {
  Host host;
  Owned kv(host.node.registry(), {"kv"});
  fill(*kv.cache, 2);
  std::vector<Descriptor> reverse;
  reverse.push_back(host.peer->lane(true, LaneUse::small));
  reverse.push_back(host.peer->lane(true, LaneUse::bulk));
  {
    const auto lane = host.peer->lane(false, LaneUse::push);
    send(lane, push(5, by_name("kv"), *whole()));
    const auto asked = receive(reverse[0]);  // the node asks for the stream, and gets nothing
    CHECK(asked.header.type == wire::Type::pull);
    CHECK(host.link->operations() == 1);
  }
  CHECK(eventually([&] { return host.link->operations() == 0; }, 1000));
  CHECK(holds_all(*kv.cache, 2));
}

static void lanes_with_garbage_are_closed_and_nothing_else() {
  Host host;
  Owned kv(host.node.registry(), {"kv", 2, 8});
  fill(*kv.cache, 3);
  const auto good = host.peer->lane();
  const std::vector<Bytes> requests = {resolve(1, by_name("kv")),        pull(1, by_name("kv"), {{0, 4}, {6, 1}}, 50), push(1, by_name("kv"), *blocks({0, 1}, {3, 4}), far_geometry(), any_transport, 20),
                                       consume(1, by_request(5)),        push(1, by_addresses({address_of(*kv.cache, 0, 0), address_of(*kv.cache, 1, 0)}), *whole(), far_geometry(), any_transport, 20),
                                       push(1, by_name("kv"), *row_to_blocks(0, {3}), far_geometry(), any_transport, 20)};
  std::mt19937 random(31);
  for (int round = 0; round < 1500; ++round) {
    auto bytes = requests[random() % requests.size()];
    for (unsigned k = 0; k <= random() % 4; ++k) {
      const auto at = random() % 4 == 0 ? random() % bytes.size() : 24 + random() % (bytes.size() - 24);
      bytes[at] = random() % 2 == 0 ? static_cast<std::uint8_t>(random() % 9) : static_cast<std::uint8_t>(random());
    }
    if (random() % 8 == 0) bytes.resize(random() % bytes.size());
    const auto lane = host.peer->lane(false, static_cast<LaneUse>(random() % 3));
    try {
      send(lane, bytes);
    } catch (const Error&) {  // closed before the last byte
    }
    if (round % 100 == 0) {
      send(good, resolve(7, by_name("kv")));
      CHECK(receive(good).header.type == wire::Type::geometry);
    }
  }
  CHECK(eventually([&] { return host.link->operations() == 0; }));
  CHECK(host.link->alive() && holds_all(*kv.cache, 3));  // nothing was pushed, for the stranger sends nothing
  CHECK(pulled(host.node, host.link, by_name("x"), *kv.cache, whole(), by_socket, 20).outcome.kind == Kind::deadline);
  for (const auto type : {wire::Type::hello, wire::Type::piece, wire::Type::heartbeat, wire::Type::geometry, static_cast<wire::Type>(999)}) {
    const auto lane = host.peer->lane();
    send(lane, wire::Writer(type, 1).take());
    CHECK(closed_by_peer(lane));
  }
  wire::Header header;
  header.type = wire::Type::resolve;
  header.body_bytes = wire::max_request_bytes + 1;
  const auto lane = host.peer->lane();
  send(lane, {reinterpret_cast<const std::uint8_t*>(&header), sizeof header});
  CHECK(closed_by_peer(lane));
}

// The node pulls from somebody who answers as he likes.
static void answers_that_are_none_end_the_pull_and_not_the_node() {
  const auto piece = [](std::uint64_t operation, std::uint64_t offset, std::size_t bytes) {
    wire::Writer out(wire::Type::piece, operation);
    const Bytes payload(bytes, 9);
    out.raw(payload.data(), bytes);
    auto frame = out.take();
    std::memcpy(frame.data() + 16, &offset, sizeof offset);
    return frame;
  };
  const auto join = [](std::initializer_list<Bytes> parts) {
    Bytes all;
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  };
  const auto fine = [](std::uint64_t operation) { return ended_frame(operation, {}, 1, Transport::socket); };
  const auto ends = [&](auto answer, std::shared_ptr<const Moves> moves = blocks({0, 1}, {2, 3}), bool close = false) {
    Host host;
    Owned kv(host.node.registry(), {"kv"});
    fill(*kv.cache, 4);
    const auto lane = host.peer->lane(true, LaneUse::small);
    std::thread server([&] {
      const auto asked = receive(lane);
      try {
        send(lane, answer(asked.header.operation));
      } catch (const Error&) {  // it has heard enough
      }
      if (close) ::shutdown(lane.get(), SHUT_RDWR);
    });
    const auto result = pulled(host.node, host.link, by_name("far"), *kv.cache, std::move(moves), by_socket, 300);
    server.join();
    for (const std::size_t unit : {0, 1, 4, 7}) CHECK(holds(*kv.cache, 1, unit, 4, 1, unit));  // outside its spans nothing changed
    CHECK(host.link->alive() && host.link->operations() == 0);
    return result;
  };
  using N = std::uint64_t;
  CHECK(ends([&](N n) { return join({piece(n, 0, 16384), fine(n)}); }).outcome.ok());
  CHECK(ends([&](N n) { return join({piece(n, 0, 1), piece(n, 1, 16383), fine(n)}); }).outcome.ok());
  CHECK_ENDS(Kind::peer_lost, "an end before", ends([&](N n) { return fine(n); }));
  CHECK_ENDS(Kind::peer_lost, "an end before", ends([&](N n) { return join({piece(n, 0, 16383), fine(n)}); }));
  CHECK_ENDS(Kind::peer_lost, "not asked for", ends([&](N n) { return piece(n, 0, 16385); }));
  CHECK_ENDS(Kind::peer_lost, "not asked for", ends([&](N n) { return piece(n, 1, 100); }));
  CHECK_ENDS(Kind::peer_lost, "not asked for", ends([&](N n) { return piece(n, 0, 0); }));
  CHECK_ENDS(Kind::peer_lost, "another operation", ends([&](N n) { return piece(n + 1, 0, 100); }));
  CHECK_ENDS(Kind::peer_lost, "neither", ends([&](N n) { return wire::Writer(wire::Type::welcome, n).take(); }));
  CHECK_ENDS(Kind::busy, "not now", ends([&](N n) { return ended_frame(n, Outcome::fail(Kind::busy, "not now"), 0, Transport::none); }));
  CHECK_ENDS(Kind::peer_lost, "closed", ends([&](N n) { return piece(n, 0, 8000); }, blocks({0, 1}, {2, 3}), true));
  CHECK_ENDS(Kind::deadline, "time", ends([&](N n) { return piece(n, 0, 8000); }));
  CHECK_ENDS(Kind::peer_lost, "protocol", ends([&](N n) { return wire::Writer(wire::Type::ended, n).take(); }));
  // A row spread over blocks is resolved first.
  const auto spread = row_to_blocks(0, {2, 3});
  const auto described = [&](N n, Geometry geometry) {
    wire::Writer out(wire::Type::geometry, n);
    out.put(std::uint64_t{1}).put(std::int64_t{-1}).put(std::uint8_t{0}).put(std::uint8_t{0});
    wire::put_runs(out, {});
    wire::put_guards(out, {});
    wire::put_geometry(out, geometry);
    return out.take();
  };
  auto thin = far_geometry();
  thin.unit_bytes = 100;
  CHECK_ENDS(Kind::invalid_argument, "blocks", ends([&](N n) { return described(n, thin); }, spread));
  CHECK_ENDS(Kind::peer_lost, "protocol", ends([&](N n) { return wire::Writer(wire::Type::geometry, n).take(); }, spread));
  CHECK_ENDS(Kind::peer_lost, "another kind", ends([&](N n) { return wire::Writer(wire::Type::segment, n).take(); }, spread));
  CHECK_ENDS(Kind::internal, "resolved nothing", ends([&](N n) { return fine(n); }, spread));
  std::mt19937 random(41);
  for (int round = 0; round < 300; ++round) {
    const bool row = round % 2 == 0;
    const auto result = ends(
        [&](N n) {
          auto bytes = row ? described(n, far_geometry()) : join({piece(n, 0, 100), piece(n, 100, 16284), fine(n)});
          for (unsigned k = 0; k <= random() % 3; ++k) {
            const auto at = random() % (row ? bytes.size() : 24);
            bytes[at] = static_cast<std::uint8_t>(random());
          }
          return bytes;
        },
        row ? spread : blocks({0, 1}, {2, 3}), true);
    CHECK(result.outcome.kind != Kind::internal);
  }
}

int main() {
  requests_are_answered_in_their_order();
  a_stream_whose_cache_ends_stays_whole();
  a_client_that_reads_nothing_costs_its_deadline();
  a_pusher_that_leaves_has_cancelled();
  lanes_with_garbage_are_closed_and_nothing_else();
  answers_that_are_none_end_the_pull_and_not_the_node();
  return TEST_RESULT();
}
