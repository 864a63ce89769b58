#include <poll.h>
#include <sys/wait.h>

#include <algorithm>
#include <thread>

#include "ends.hpp"
#include "stranger.hpp"

using namespace kvferry;
using namespace kvferry::testing;

static const Bytes secret{'s', 'e', 's', 'a', 'm', 'e'};

static std::shared_ptr<Pull> slow_pull(Node& node, const std::shared_ptr<Link>& link, const Cache& into, int timeout_ms = 10'000) {
  return node.pull(link, by_name("kv"), into.geometry.cache_id, whole(), Deadline::after_ms(timeout_ms), by_socket);
}

// A peer that links and then answers nothing.
struct Frozen {
  Node node;
  Endpoint at;
  std::unique_ptr<Dialler> peer;
  std::shared_ptr<Link> link;
  std::vector<Descriptor> lanes;

  explicit Frozen(std::int64_t heartbeat_timeout_ms = 10'000) : node(made(heartbeat_timeout_ms)), at(node.listen("127.0.0.1", 0)) {
    peer = std::make_unique<Dialler>(at, 8, secret);
    lanes.push_back(peer->lane(true, LaneUse::small));
    lanes.push_back(peer->lane(true, LaneUse::bulk));
    lanes.push_back(peer->lane(true, LaneUse::push));
    link = node.links().at(0);
    CHECK(eventually([&] { return link->lanes.open_lanes() == 2; }));
  }
  static NodeOptions made(std::int64_t heartbeat_timeout_ms) {
    auto made = options(1);
    made.secret = secret;
    made.heartbeat_ms = 10;
    made.heartbeat_timeout_ms = heartbeat_timeout_ms;
    return made;
  }
};

static void options_are_checked() {
  const auto with = [](auto change) {
    auto made = options(1);
    change(made);
    Node node(made);
  };
  CHECK_FAILS(Kind::invalid_argument, "lanes", with([](auto& o) { o.lanes = 0; }));
  CHECK_FAILS(Kind::invalid_argument, "lanes", with([](auto& o) { o.lanes = 17; }));
  CHECK_FAILS(Kind::invalid_argument, "heartbeat", with([](auto& o) { o.heartbeat_ms = 0; }));
  CHECK_FAILS(Kind::invalid_argument, "heartbeat", with([](auto& o) { o.heartbeat_timeout_ms = 1; }));
  CHECK_FAILS(Kind::invalid_argument, "transport", with([](auto& o) { o.transports = 8; }));
}

static void a_closed_node_says_so_and_leaves_nothing() {
  int any = 0;
  range_mapped(reinterpret_cast<std::uint64_t>(&any), sizeof any, true);  // what is looked at from now on stays open
  const auto before = open_descriptors();
  {
    Pair pair;
    pair.make_pools();
    Owned from(pair.there->registry(), {"kv"}), to(pair.here->registry(), {"to"});
    CHECK(pulled(*pair.here, pair.link, by_name("kv"), *to.cache, whole(), by_socket).outcome.ok());
    const auto prepared = pair.here->prepare(pair.link, by_name("kv"), to.id(), whole(), Deadline::after_ms(1000), any_transport);
    const auto late = slow_pull(*pair.here, pair.link, *to.cache);
    pair.here->close();
    pair.here->close();
    CHECK(pair.here->closed() && !pair.link->alive());
    CHECK(eventually([&] { return !pair.back->alive(); }));
    CHECK(pair.back->death().kind == Kind::peer_lost);
    CHECK_FAILS(Kind::closed, "", late->run_here());
    CHECK_FAILS(Kind::closed, "", late->start());
    CHECK_FAILS(Kind::closed, "", prepared->operation(Deadline::after_ms(100))->run_here());
    CHECK_FAILS(Kind::closed, "", pair.here->registry());
    CHECK_FAILS(Kind::closed, "", slow_pull(*pair.here, pair.link, *to.cache));
    CHECK_FAILS(Kind::closed, "", pair.here->connect("127.0.0.1", 1, Deadline::after_ms(10)));
    CHECK_FAILS(Kind::closed, "", pair.here->listen("127.0.0.1", 0));
    CHECK(pair.here->links().empty() && pair.here->statistics().links == 0);
    pair.here->unlink(pair.link, Deadline::after_ms(10), false);
    CHECK(!pair.here->statistics(*pair.link).alive);
    while (pair.here->next_event(0)) {
    }
  }
  CHECK(eventually([&] { return open_descriptors() == before; }));
}

static void unlinking_is_seen_on_both_sides_and_links_can_be_made_again() {
  Pair pair;
  Owned from(pair.there->registry(), {"kv"}), to(pair.here->registry(), {"to"});
  const auto at = pair.link->peer.endpoint;
  for (int i = 0; i < 10; ++i) {
    fill(*from.cache, 2 + i % 5);
    CHECK(pulled(*pair.here, pair.link, by_name("kv"), *to.cache, whole()).outcome.ok() && holds_all(*to.cache, 2 + i % 5));
    // From either side, politely or not.
    if (i % 2 == 0)
      pair.here->unlink(pair.link, Deadline::after_ms(1000), i % 4 == 0);
    else
      pair.there->unlink(pair.back, Deadline::after_ms(1000), i % 4 == 1);
    CHECK(eventually([&] { return !pair.link->alive() && !pair.back->alive(); }));
    CHECK(pair.link->operations() == 0 && pair.back->operations() == 0);
    CHECK(kind_of([&] { pulled(*pair.here, pair.link, by_name("kv"), *to.cache, whole()); }) == pair.link->death().kind);
    CHECK(pair.link->death().kind == (i % 4 == 1 ? Kind::peer_lost : Kind::not_linked));
    CHECK(eventually([&] { return pair.here->links().empty() && pair.there->links().empty(); }));
    pair.link = pair.here->connect(at.host, at.port, Deadline::after_ms(1000));
    pair.back = pair.there->links().at(0);
  }
}

static void both_sides_may_unlink_at_the_same_time() {
  Pair pair;
  const auto at = pair.link->peer.endpoint;
  for (int i = 0; i < 30; ++i) {
    std::thread other([&] { CHECK(kind_of([&] { pair.there->unlink(pair.back, Deadline::after_ms(2000), false); }) == Kind::ok); });
    CHECK(kind_of([&] { pair.here->unlink(pair.link, Deadline::after_ms(2000), false); }) == Kind::ok);
    other.join();
    CHECK(!pair.link->alive() && !pair.back->alive());
    pair.link = pair.here->connect(at.host, at.port, Deadline::after_ms(1000));
    CHECK(eventually([&] { return !pair.there->links().empty(); }));
    pair.back = pair.there->links().at(0);
  }
}

// An unlink that waits for its operations gives up in time and leaves the link as it was; one by force ends them.
static void unlinking_while_operations_run() {
  Frozen frozen;
  Owned to(frozen.node.registry(), {"to"});
  const auto waiting = slow_pull(frozen.node, frozen.link, *to.cache);
  waiting->start();
  CHECK_FAILS(Kind::deadline, "1 operations", frozen.node.unlink(frozen.link, Deadline::after_ms(30), false));
  CHECK(frozen.link->alive() && !waiting->done());
  waiting->cancel();
  CHECK(waiting->wait(Deadline::after_ms(300)) && waiting->result().outcome.kind == Kind::cancelled);
  CHECK_FAILS(Kind::deadline, "confirm", frozen.node.unlink(frozen.link, Deadline::after_ms(30), false));
  CHECK(frozen.link->alive());
  const auto again = slow_pull(frozen.node, frozen.link, *to.cache);
  std::thread here([&] { CHECK_ENDS(Kind::not_linked, "unlinked", slow_pull(frozen.node, frozen.link, *to.cache)->run_here()); });
  again->start();
  CHECK(eventually([&] { return frozen.link->operations() == 2; }));
  const auto began = now_ns();
  frozen.node.unlink(frozen.link, Deadline::after_ms(5000), true);
  CHECK(now_ns() - began < 500'000'000);
  CHECK(again->done() && again->result().outcome.kind == Kind::not_linked);
  here.join();
  CHECK(closed_by_peer(frozen.peer->control) && closed_by_peer(frozen.lanes[0]) && closed_by_peer(frozen.lanes[2]));
}

static void closing_while_operations_run() {
  for (const bool asynchronous : {false, true}) {
    std::vector<std::shared_ptr<Operation>> operations;  // they outlive their node
    Frozen frozen;
    Owned to(frozen.node.registry(), {"to"}), from(frozen.node.registry(), {"from"});
    std::vector<std::thread> threads;
    for (int i = 0; i < 6; ++i) {
      if (i % 2 == 0)
        operations.push_back(slow_pull(frozen.node, frozen.link, *to.cache));
      else
        operations.push_back(frozen.node.push(frozen.link, from.id(), by_name("x"), whole(), Deadline::after_ms(10'000), any_transport));
      if (asynchronous)
        operations.back()->start();
      else
        threads.emplace_back([operation = operations.back()] { operation->run_here(); });
    }
    CHECK(eventually([&] { return frozen.link->operations() == 6; }));
    const auto began = now_ns();
    frozen.node.close();
    CHECK(now_ns() - began < 500'000'000);
    for (auto& thread : threads) thread.join();
    for (const auto& operation : operations) {
      CHECK(operation->done() && operation->result().outcome.kind == Kind::closed);
      CHECK(operation->result().outcome.sentence.find("closed") != std::string::npos);
    }
  }
}

static void a_frozen_peer_costs_the_deadline_and_no_more() {
  Frozen frozen;
  Owned to(frozen.node.registry(), {"to"}), from(frozen.node.registry(), {"from"});
  const auto timed = [&](const std::shared_ptr<Operation>& operation, bool asynchronous) {
    const auto began = now_ns();
    if (asynchronous) {
      operation->start();
      CHECK(operation->wait(Deadline::after_ms(3000)));
    } else {
      operation->run_here();
    }
    const auto ms = (now_ns() - began) / 1'000'000;
    CHECK(operation->result().outcome.kind == Kind::deadline && ms >= 39 && ms < 300);
    return operation->result().outcome;
  };
  for (const bool asynchronous : {false, true}) {
    CHECK(timed(slow_pull(frozen.node, frozen.link, *to.cache, 40), asynchronous).settled);
    // Without an answer nobody knows what the receiver does.
    const auto outcome =
        timed(frozen.node.push(frozen.link, from.id(), by_name("x"), whole(), Deadline::after_ms(40), any_transport), asynchronous);
    CHECK(!outcome.settled && outcome.touched);
    // More than there are lanes: the last ones never get one, and end in time all the same. Each lane that is reset comes
    // back only when its dialler opens it anew.
    for (const auto use : {LaneUse::small, LaneUse::bulk, LaneUse::push}) frozen.lanes.push_back(frozen.peer->lane(true, use));
    std::vector<std::shared_ptr<Pull>> many;
    const auto began = now_ns();
    for (int i = 0; i < 10; ++i) many.push_back(slow_pull(frozen.node, frozen.link, *to.cache, 40));
    for (const auto& one : many) one->start();
    for (const auto& one : many) CHECK(one->wait(Deadline::after_ms(1000)) && one->result().outcome.kind == Kind::deadline);
    CHECK(now_ns() - began < 300'000'000);
    for (const auto use : {LaneUse::small, LaneUse::bulk, LaneUse::push}) frozen.lanes.push_back(frozen.peer->lane(true, use));
    sleep_ms(10);
  }
  CHECK(frozen.link->alive() && frozen.link->operations() == 0);
}

// Many cancels of operations that copy threads are waiting with: each ends soon.
static void a_cancelled_operation_ends_soon() {
  Frozen frozen;
  Owned to(frozen.node.registry(), {"to"});
  for (int i = 0; i < 20; ++i) {
    const auto pull = slow_pull(frozen.node, frozen.link, *to.cache);
    pull->start();
    if (i % 2 == 0) sleep_ms(2);
    const auto began = now_ns();
    pull->cancel();
    CHECK(pull->wait(Deadline::after_ms(2000)) && pull->result().outcome.kind == Kind::cancelled);
    CHECK(now_ns() - began < 100'000'000);
    frozen.lanes.push_back(frozen.peer->lane(true, i % 2 == 0 ? LaneUse::bulk : LaneUse::small));
  }
  const auto before_it_began = slow_pull(frozen.node, frozen.link, *to.cache);
  before_it_began->cancel();
  CHECK_ENDS(Kind::cancelled, "cancelled", before_it_began->run_here());
}

static void a_silent_peer_is_lost_after_the_heartbeat_timeout() {
  Frozen frozen(100);
  Owned to(frozen.node.registry(), {"to"});
  const auto began = now_ns();
  CHECK_ENDS(Kind::peer_lost, "nothing was heard", slow_pull(frozen.node, frozen.link, *to.cache)->run_here());
  const auto ms = (now_ns() - began) / 1'000'000;
  CHECK(ms > 50 && ms < 600 && !frozen.link->alive());
  CHECK(closed_by_peer(frozen.peer->control));
  // One that beats stays, although it says nothing else.
  Frozen beating(100);
  for (int i = 0; i < 12; ++i) {
    send(beating.peer->control, wire::Writer(wire::Type::heartbeat, 0).take());
    sleep_ms(20);
  }
  CHECK(beating.link->alive());
  // One that sends something else is not a peer.
  send(beating.peer->control, wire::Writer(wire::Type::resolve, 0).take());
  CHECK(eventually([&] { return !beating.link->alive(); }));
  CHECK(beating.link->death().sentence.find("protocol") != std::string::npos);
}

static void a_restarted_peer_replaces_its_stale_link() {
  Frozen frozen;
  Owned to(frozen.node.registry(), {"to"});
  const auto pull = slow_pull(frozen.node, frozen.link, *to.cache);
  pull->start();
  sleep_ms(30);  // more than two heartbeats: nobody is there
  Dialler anew(frozen.at, 8, secret);
  CHECK(pull->wait(Deadline::after_ms(1000)) && pull->result().outcome.kind == Kind::peer_lost);
  CHECK(pull->result().outcome.sentence.find("linked anew") != std::string::npos);
  CHECK(!frozen.link->alive() && frozen.node.links().size() == 1);
  Dialler somebody_else(frozen.at, 9, secret);
  CHECK(frozen.node.links().size() == 2);
}

static void of_two_live_peers_with_one_id_the_second_is_refused() {
  auto patient = Frozen::made(60'000);
  patient.heartbeat_ms = 20'000;  // the first one, which beats never, is heard recently for twice as long
  Node node(patient);
  const auto at = node.listen("127.0.0.1", 0);
  auto first = std::make_unique<Dialler>(at, 8, secret);
  CHECK_FAILS(Kind::already_linked, "node_id", Dialler(at, 8, secret));
  CHECK(node.links().size() == 1 && node.links()[0]->alive());
  first.reset();  // ended
  CHECK(eventually([&] { return node.links().empty(); }));
  Dialler second(at, 8, secret);
  CHECK(node.links().size() == 1);
  // One and the same may link as often as it likes; the last link counts.
  auto made = Frozen::made(10'000);
  made.node_id = 9;
  Node twice(made);
  const auto old = twice.connect(at.host, at.port, Deadline::after_ms(1000));
  const auto now = twice.connect(at.host, at.port, Deadline::after_ms(1000));
  CHECK(eventually([&] { return !old->alive(); }) && now->alive());
}

// A process that stood still for longer than the heartbeat allows reads what was said to it before it calls anybody silent.
static void who_stood_still_does_not_drop_its_links() {
  auto mine = options(1), other = options(2);
  mine.heartbeat_ms = other.heartbeat_ms = 10;
  mine.heartbeat_timeout_ms = 100;
  Pair pair(mine, other);
  for (int i = 0; i < 3; ++i) {
    std::atomic<bool> awake{false};
    pair.here->engine().reactor.post([&] { sleep_ms(300), awake = true; });
    CHECK(eventually([&] { return awake.load(); }));
    sleep_ms(30);
    CHECK(pair.link->alive() && pair.back->alive());
  }
}

// So does one whose control thread had not had its first turn: here it has none at all, and the time is the test's.
static void who_had_no_turn_yet_does_not_drop_its_links() {
  auto made = options(1);
  made.heartbeat_ms = 10;
  made.heartbeat_timeout_ms = 100;
  const auto node = std::make_shared<NodeInner>(made);
  Ends ends;
  const auto link = node->new_link({}, true, {}, nullptr);
  node->bring_up(link, std::move(ends.here), false);
  const auto first = link->last_heard_ns.load() + 300'000'000;
  node->tick(first);
  CHECK(link->alive());
  for (int ms = 10; ms <= 120; ms += 10) {
    CHECK(link->alive() == (ms <= 110));  // silent from here on
    node->tick(first + ms * 1'000'000);
  }
  CHECK(!link->alive() && link->death().sentence.find("nothing was heard") != std::string::npos);
}

// Asking to unlink commits nobody: who hears of it too late stays linked.
static void an_unlink_that_came_too_late_changes_nothing() {
  Pair pair;
  for (int i = 0; i < 2; ++i) {
    std::atomic<bool> asleep{false}, awake{false};
    pair.there->engine().reactor.post([&] { asleep = true, sleep_ms(100), awake = true; });
    CHECK(eventually([&] { return asleep.load(); }));
    CHECK_FAILS(Kind::deadline, "stays", pair.here->unlink(pair.link, Deadline::after_ms(30), false));
    CHECK(eventually([&] { return awake.load(); }));
    sleep_ms(30);
    CHECK(pair.link->alive() && pair.back->alive());
  }
  pair.here->unlink(pair.link, Deadline::after_ms(2000), false);
  CHECK(!pair.link->alive() && !pair.back->alive() && pair.back->death().kind == Kind::not_linked && pair.link->death().kind == Kind::not_linked);
}

// An asynchronous operation goes on when nobody holds it any more, and its link knows when it has ended.
static void an_operation_that_was_let_go_ends_by_itself() {
  {
    Pair pair;
    Owned from(pair.there->registry(), {"kv", 2, 50}), to(pair.here->registry(), {"to", 2, 50});
    fill(*from.cache, 3);
    for (int i = 0; i < 50; ++i)
      pair.here->pull(pair.link, by_name("kv"), to.id(), blocks({i}, {i}), Deadline::after_ms(5000), by_socket)->start();
    CHECK(eventually([&] { return pair.link->operations() == 0; }));
    CHECK(holds_all(*to.cache, 3) && pair.here->statistics(*pair.link).pulls == 50);
  }
  auto frozen = std::make_unique<Frozen>();
  Owned to(frozen->node.registry(), {"to"}), from(frozen->node.registry(), {"from"});
  for (int i = 0; i < 5; ++i) slow_pull(frozen->node, frozen->link, *to.cache, i < 3 ? 30 : 10'000)->start();
  CHECK(eventually([&] { return frozen->link->operations() == 2; }));
  const auto slots = frozen->node.statistics().slots_open;
  for (const bool ready : {false, true}) {
    const auto push = frozen->node.push_layers(frozen->link, from.id(), by_name("x"), whole(), {0}, {0}, 2, 10'000, any_transport);
    push->start();
    if (ready) push->layer_ready(0);
  }
  CHECK(eventually([&] { return frozen->link->operations() == 2 && frozen->node.statistics().slots_open == slots; }));
  const auto began = now_ns();
  frozen->node.close();
  CHECK(now_ns() - began < 500'000'000);
}

static void a_notifier_hears_of_every_end() {
  Pair pair;
  Owned from(pair.there->registry(), {"kv", 2, 64, 16384}), to(pair.here->registry(), {"to", 2, 64, 16384});
  const auto notifier = std::make_shared<Notifier>();
  std::vector<std::shared_ptr<Pull>> pulls;
  std::vector<std::uint64_t> heard;
  std::size_t missed = 0;
  for (std::uint64_t i = 0; i < 100; ++i) {
    pulls.push_back(pair.here->pull(pair.link, by_name("kv"), to.id(), blocks({1}, {static_cast<std::int64_t>(i % 64)}), Deadline::after_ms(5000),
                                    i % 2 == 0 ? by_socket : any_transport));
    pulls.back()->start();
    missed += !pulls.back()->notify(notifier, i);
  }
  while (heard.size() + missed < 100) {
    pollfd p{notifier->descriptor(), POLLIN, 0};
    CHECK(::poll(&p, 1, 5000) == 1);
    for (const auto token : notifier->take()) heard.push_back(token);
  }
  std::sort(heard.begin(), heard.end());
  CHECK(std::adjacent_find(heard.begin(), heard.end()) == heard.end());
  for (const auto& pull : pulls) CHECK(pull->done() && pull->result().outcome.ok());
  CHECK(!pulls[0]->notify(notifier, 1000) && notifier->take().empty());
}

static void statistics_and_events_say_what_happened() {
  Pair pair(options(1), options(2, by_socket));
  Owned from(pair.there->registry(), {"kv"}), to(pair.here->registry(), {"to"});
  pulled(*pair.here, pair.link, by_name("kv"), *to.cache, whole());
  pulled(*pair.here, pair.link, by_name("none"), *to.cache, whole());
  pushed(*pair.here, pair.link, *to.cache, by_name("kv"), blocks({0}, {0}));
  const auto s = pair.here->statistics(*pair.link);
  CHECK(s.pulls == 1 && s.pushes == 1 && s.failures == 1 && s.bytes_pulled == 2 * 8 * 4096 && s.bytes_pushed == 2 * 4096);
  CHECK(s.alive && s.outgoing && s.same_host && s.peer_id == 2 && s.socket == "ok" && s.operations == 0 && s.resets == 0 && s.lanes == 2);
  CHECK(pair.there->statistics(*pair.back).map.find("transports") != std::string::npos);
  const auto n = pair.here->statistics();
  CHECK(n.node_id == 1 && n.caches == 1 && n.links == 1 && n.windows == 0 && n.threads == 4);
  const auto line = pair.here->next_event(1000);
  CHECK(line && line->first == "info" && line->second.find("link to node 2") != std::string::npos);
  CHECK(!pair.here->next_event(1));
}

static void copies_within_one_node_keep_the_given_order() {
  Node node(options(1));
  Owned a(node.registry(), {"a", 2, 8, 4096, 512}), b(node.registry(), {"b", 2, 8, 4096});
  fill(*a.cache, 3), fill(*b.cache, 4);
  CHECK(node.copy(a.id(), b.id(), *whole()).transport == Transport::local && holds_all(*b.cache, 3));
  const Numbers from{0, 1, 2}, to{1, 2, 3};  // one after the other: block 0 everywhere
  node.copy(a.id(), a.id(), *Moves::make_blocks(from.data(), 3, to.data(), 3, {}, {}, true));
  CHECK(holds(*a.cache, 1, 3, 3, 1, 0) && holds(*a.cache, 0, 1, 3, 0, 0) && holds(*a.cache, 0, 4, 3, 0, 4));
  CHECK_FAILS(Kind::not_found, "no cache 9", node.copy(9, a.id(), *whole()));
  CHECK_FAILS(Kind::invalid_argument, "block 8", node.copy(a.id(), b.id(), *blocks({8}, {0})));
}

static void one_side_of_a_copy_may_be_addresses() {
  Node node(options(1));
  Owned a(node.registry(), {"a", 2, 8, 4096, 512});
  fill(*a.cache, 3);
  std::vector<std::vector<std::uint64_t>> bare(2, std::vector<std::uint64_t>(8 * 512));
  const auto there = by_addresses({reinterpret_cast<std::uint64_t>(bare[0].data()), reinterpret_cast<std::uint64_t>(bare[1].data())});
  node.copy(by_id(a.id()), there, *blocks({1}, {7}));
  CHECK(std::memcmp(&bare[1][7 * 512], reinterpret_cast<const void*>(address_of(*a.cache, 1, 1)), 4096) == 0);
  node.copy(there, by_id(a.id()), *blocks({7}, {0}));
  CHECK(holds(*a.cache, 1, 0, 3, 1, 1));
  CHECK_FAILS(Kind::invalid_argument, "between its caches", node.copy(there, there, *blocks({0}, {0})));
  CHECK_FAILS(Kind::invalid_argument, "1 tensors", node.copy(by_addresses({there.addresses[0]}), by_id(a.id()), *blocks({0}, {0})));
  CHECK_FAILS(Kind::invalid_argument, "not readable", node.copy(by_addresses({1, 1}), by_id(a.id()), *blocks({0}, {0})));
}

static void rows_are_copied_from_an_offset_on() {
  Node node(options(1));
  Owned a(node.registry(), {"a", 1, 4, 4096, 512, Layout::rows}), b(node.registry(), {"b", 1, 4, 2048, 0, Layout::rows});
  fill(*a.cache, 3), fill(*b.cache, 4);
  const auto row = [](std::int64_t size) { return Moves::make_row(2, 1, size, {}, {}); };
  node.copy(by_id(a.id()), by_id(b.id()), *row(64), 1024);
  const auto at = [](const Cache& cache, std::size_t row, std::size_t offset) {
    return reinterpret_cast<const std::byte*>(address_of(cache, 0, row) + offset);
  };
  CHECK(std::memcmp(at(*b.cache, 1, 1024), at(*a.cache, 2, 1024), 64) == 0 && holds(*b.cache, 0, 1, 4, 0, 1, 1024));
  CHECK(std::memcmp(at(*b.cache, 1, 1088), at(*a.cache, 2, 1088), 8) != 0);
  CHECK(node.copy(by_id(a.id()), by_id(b.id()), *row(-1), 1024).bytes == 1024);
  for (const auto& [size, offset] : {std::pair{1025, 1024}, std::pair{-1, 2048}, std::pair{1, 4096}})
    CHECK_FAILS(Kind::invalid_argument, "offset", node.copy(by_id(a.id()), by_id(b.id()), *row(size), static_cast<std::uint64_t>(offset)));
  CHECK_FAILS(Kind::invalid_argument, "no row", node.copy(by_id(a.id()), by_id(a.id()), *blocks({0}, {1}), 8));
}

// In a forked child the node is closed; in the parent nothing has changed.
static void a_forked_child_sees_a_closed_node() {
  Pair pair;
  pair.make_pools();
  Owned from(pair.there->registry(), {"kv"}), to(pair.here->registry(), {"to"});
  const auto cache = allocated(pair.here->registry(), {"pool"});
  CHECK(pulled(*pair.here, pair.link, by_name("kv"), *to.cache, whole()).outcome.ok());
  Frozen frozen;
  Owned into(frozen.node.registry(), {"into"});
  const auto waiting = slow_pull(frozen.node, frozen.link, *into.cache);
  waiting->start();
  const pid_t child = fork();
  if (child == 0) {
    bool good = pair.here->closed() && open_descriptors() == 0;
    good &= kind_of([&] { pair.here->registry(); }) == Kind::closed;
    good &= kind_of([&] { pair.here->listen("127.0.0.1", 0); }) == Kind::closed;
    pair.here->close();
    pair.here.reset();  // and the destructors harm nobody
    _exit(good ? 0 : 1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  fill(*from.cache, 6);
  CHECK(pulled(*pair.here, pair.link, by_name("kv"), *to.cache, whole(), by_socket).outcome.ok() && holds_all(*to.cache, 6));
  CHECK(pair.link->alive() && frozen.link->alive());
  waiting->cancel();
  CHECK(waiting->wait(Deadline::after_ms(1000)));
  CHECK(pair.here->registry().deallocate(cache->geometry.cache_id));
}

int main() {
  options_are_checked();
  a_closed_node_says_so_and_leaves_nothing();
  unlinking_is_seen_on_both_sides_and_links_can_be_made_again();
  both_sides_may_unlink_at_the_same_time();
  unlinking_while_operations_run();
  closing_while_operations_run();
  a_frozen_peer_costs_the_deadline_and_no_more();
  a_cancelled_operation_ends_soon();
  a_silent_peer_is_lost_after_the_heartbeat_timeout();
  a_restarted_peer_replaces_its_stale_link();
  of_two_live_peers_with_one_id_the_second_is_refused();
  who_stood_still_does_not_drop_its_links();
  who_had_no_turn_yet_does_not_drop_its_links();
  an_unlink_that_came_too_late_changes_nothing();
  an_operation_that_was_let_go_ends_by_itself();
  a_notifier_hears_of_every_end();
  statistics_and_events_say_what_happened();
  copies_within_one_node_keep_the_given_order();
  one_side_of_a_copy_may_be_addresses();
  rows_are_copied_from_an_offset_on();
  a_forked_child_sees_a_closed_node();
  return TEST_RESULT();
}
