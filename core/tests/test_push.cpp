#include <cstring>
#include <random>
#include <thread>

#include "alone.hpp"

using namespace kvferry;
using namespace kvferry::testing;

// The first thing that happens on a fresh link is a push, by each transport that fits the pusher's memory.
static void a_push_is_the_first_thing_on_a_link() {
  for (int round = 0; round < 10; ++round) {
    Pair pair;
    pair.make_pools();
    Owned to(pair.there->registry(), {"to"});
    const auto pool = allocated(pair.here->registry(), {"pool"});
    fill(*pool, 3);
    CHECK_BY(map, pushed(*pair.here, pair.link, *pool, by_name("to"), whole()));
    CHECK(holds_all(*to.cache, 3));
  }
  Pair pair;
  Owned to(pair.there->registry(), {"to"}), from(pair.here->registry(), {"from"});
  fill(*from.cache, 4);
  CHECK_BY(cma, pushed(*pair.here, pair.link, *from.cache, by_name("to"), whole()));
  CHECK(holds_all(*to.cache, 4));
  fill(*from.cache, 5);
  CHECK_BY(socket, pushed(*pair.here, pair.link, *from.cache, by_name("to"), whole(), by_socket));
  CHECK(holds_all(*to.cache, 5));
}

static void every_form_arrives() {
  Pair pair;
  pair.make_pools();
  Owned wide_owned(pair.there->registry(), {"wide", 2, 16, 4096, 1024}), rows_owned(pair.there->registry(), {"rows", 2, 4, 3 * 4096});
  const Cache &wide = *wide_owned.cache, &rows = *rows_owned.cache;
  const auto pool = allocated(pair.here->registry(), {"a", 2, 16, 4096});
  const auto pool_rows = allocated(pair.here->registry(), {"b", 2, 4, 3 * 4096});
  Owned owned(pair.here->registry(), {"c", 2, 16, 4096, 512}), owned_rows(pair.here->registry(), {"d", 2, 4, 3 * 4096});
  for (const Cache* cache : {pool.get(), pool_rows.get(), owned.cache.get(), owned_rows.cache.get()}) fill(*cache, 6);
  for (const unsigned transports : {by_map, by_cma, by_socket}) {
    const Cache& blocks_from = transports == by_cma ? *owned.cache : *pool;
    const Cache& rows_from = transports == by_cma ? *owned_rows.cache : *pool_rows;
    const auto push = [&](const Cache& from, Target target, std::shared_ptr<const Moves> moves) {
      const auto result = pushed(*pair.here, pair.link, from, std::move(target), std::move(moves), transports);
      if (!result.outcome.ok()) CHECK_ENDS(Kind::ok, "", result);
      CHECK(static_cast<unsigned>(result.transport) == transports);
      return result.bytes;
    };
    fill(wide, 1), fill(rows, 2);
    CHECK(push(blocks_from, by_name("wide"), whole()) == 2 * 16 * 4096 && holds_all(wide, 6));
    fill(wide, 1);
    CHECK(push(blocks_from, by_id(wide.geometry.cache_id), blocks({3, 4, 9}, {0, 1, 1}, {1, 1}, {0, 1})) == 2 * 4096);
    CHECK(holds(wide, 0, 0, 6, 1, 3) && holds(wide, 0, 1, 6, 1, 9) && holds(wide, 0, 2, 1, 0, 2) && holds(wide, 1, 0, 1, 1, 0));
    CHECK(push(rows_from, by_name("rows"), row(3, 1)) == 2 * 3 * 4096 && holds(rows, 1, 1, 6, 1, 3) && holds(rows, 1, 0, 2, 1, 0));
    CHECK(push(rows_from, by_name("wide"), row_to_blocks(2, {15, 7, 8})) == 2 * 3 * 4096);
    CHECK(holds(wide, 1, 15, 6, 1, 2, 4096) && holds(wide, 1, 8, 6, 1, 2, 4096, 8192));
    // A window of the receiver's.
    const Numbers units{4, 5};
    auto& registry = pair.there->registry();
    const auto window = registry.open_window(wide.geometry.cache_id, units.data(), units.size(), Access::write, 60'000);
    CHECK(push(blocks_from, by_window(window->name), blocks({0, 1}, {5, 4})) == 2 * 2 * 4096 && holds(wide, 1, 4, 6, 1, 1));
    CHECK_ENDS(Kind::not_found, "block 6", pushed(*pair.here, pair.link, blocks_from, by_window(window->name), blocks({0, 1}, {5, 6}), transports));
    CHECK(registry.close_window(window->name));
    CHECK_ENDS(Kind::not_found, "", pushed(*pair.here, pair.link, blocks_from, by_window(window->name), blocks({0}, {5}), transports));
    const auto readable = registry.open_window(wide.geometry.cache_id, units.data(), units.size(), Access::read, 60'000);
    CHECK_ENDS(Kind::not_found, "for reading", pushed(*pair.here, pair.link, blocks_from, by_window(readable->name), blocks({0}, {5}), transports));
    registry.close_window(readable->name);
    // And what is wrong, before the first byte.
    fill(wide, 1);
    const auto wrong = pushed(*pair.here, pair.link, blocks_from, by_name("wide"), blocks({0, 1}, {0, 16}), transports);
    CHECK_ENDS(Kind::invalid_argument, "block 16", wrong);
    CHECK(!wrong.outcome.touched && wrong.outcome.settled && holds_all(wide, 1));
    CHECK_ENDS(Kind::not_found, "none", pushed(*pair.here, pair.link, blocks_from, by_name("none"), whole(), transports));
  }
  CHECK_FAILS(Kind::not_found, "no cache 99", pair.here->push(pair.link, 99, by_name("wide"), whole(), Deadline::after_ms(10), any_transport));
  CHECK(pair.here->statistics().slots_open == 4 && pair.there->statistics().slots_open == 2);
}

// Addresses are names: each is looked up, and not one byte beyond what was found is written.
static void a_block_that_is_not_there_is_refused_also_where_another_overwrites_it() {
  Pair pair;
  Owned from(pair.here->registry(), {"from"}), to(pair.there->registry(), {"to"});
  fill(*to.cache, 1);
  for (const unsigned transports : {by_cma, by_socket}) {
    const auto ends = [&](std::shared_ptr<const Moves> moves) {
      const auto result = pushed(*pair.here, pair.link, *from.cache, by_name("to"), std::move(moves), transports);
      CHECK(!result.outcome.touched && result.outcome.settled);
      return result;
    };
    CHECK_ENDS(Kind::invalid_argument, "source block 9 of cache 1 'from'", ends(blocks({9, 1}, {5, 5})));
    CHECK_ENDS(Kind::invalid_argument, "block 9", ends(blocks({1, 1}, {9, 9})));
    const auto layers = pair.here->push_layers(pair.link, from.id(), by_name("to"), blocks({9, 1}, {5, 5}), {0}, {0}, 2, 5000, transports);
    layers->start();
    layers->layer_ready(0);
    CHECK(layers->wait(Deadline::after_ms(5000)));
    CHECK_ENDS(Kind::invalid_argument, "source block 9 of cache 1 'from'", layers->result());
  }
  CHECK(holds_all(*to.cache, 1));
}

// The receiver unlinks right after its answer, and the end of the link is seen first. An answer that has come counts.
static void an_answer_counts_that_came_before_the_end_of_the_link() {
  for (const bool answered : {true, false}) {
    Alone alone;
    Owned from(alone.engine.registry, {"from"});
    PushAsk ask;
    ask.source = from.cache;
    ask.target = by_id(1);
    ask.moves = blocks({0}, {0});
    const auto push = std::make_shared<Push>(alone.engine, alone.link, Deadline::after_ms(20'000), std::move(ask));
    std::atomic<bool> asleep{false}, go_on{false};
    alone.engine.reactor.post([&] { asleep = true; while (!go_on) sleep_ms(1); });  // the answer is not looked for
    CHECK(eventually([&] { return asleep.load(); }));
    push->start_here();
    const auto frame = ended_frame(push->number(), {}, 4096, Transport::socket);
    if (answered) CHECK(send_some(alone.far_ends.back().get(), frame) == static_cast<long>(frame.size()));
    alone.link->take_down({Kind::not_linked, "the peer has unlinked", false, true});
    CHECK(push->wait(Deadline::after_ms(5000)));
    go_on = true;
    if (answered) {
      CHECK_BY(socket, push->result());
      CHECK(push->result().bytes == 4096);
    } else {
      CHECK_ENDS(Kind::not_linked, "the peer has unlinked", push->result());
      CHECK(!push->result().outcome.settled);
    }
  }
}

static void addresses_are_looked_up() {
  Pair pair;
  Owned to(pair.there->registry(), {"to", 2, 8, 4096}), from(pair.here->registry(), {"from", 2, 8, 4096});
  Owned row_from(pair.here->registry(), {"row", 2, 2, 2 * 4096 + 2048});
  fill(*from.cache, 3), fill(*row_from.cache, 5);
  const auto at = [&](std::size_t tensor, std::size_t unit) { return address_of(*to.cache, tensor, unit); };
  for (const unsigned transports : {by_cma, by_socket}) {
    const auto push = [&](const Cache& source, std::vector<std::uint64_t> addresses, std::shared_ptr<const Moves> moves) {
      return pushed(*pair.here, pair.link, source, by_addresses(std::move(addresses)), std::move(moves), transports);
    };
    fill(*to.cache, 1);
    CHECK(push(*from.cache, {at(0, 0), at(1, 0)}, whole()).outcome.ok() && holds_all(*to.cache, 3));
    fill(*to.cache, 1);
    CHECK(push(*from.cache, {at(1, 2), at(0, 1)}, blocks({5, 6}, {1, 0})).outcome.ok());
    CHECK(holds(*to.cache, 1, 3, 3, 0, 5) && holds(*to.cache, 0, 1, 3, 1, 6) && holds(*to.cache, 0, 0, 1, 0, 0));
    CHECK(push(*from.cache, {at(0, 7), at(1, 7)}, row(4, 0)).outcome.ok() && holds(*to.cache, 1, 7, 3, 1, 4));
    fill(*to.cache, 1);
    for (const auto& outside : {std::vector{at(0, 1), at(1, 0)}, {at(0, 0) - 8, at(1, 0)}, {std::uint64_t{4096}, at(1, 0)}, {at(0, 0), at(0, 7) + 8}}) {
      const auto refused = push(*from.cache, outside, whole());
      CHECK_ENDS(Kind::invalid_argument, "address number", refused);
      CHECK(!refused.outcome.touched);
    }
    CHECK_ENDS(Kind::invalid_argument, "", push(*from.cache, {at(0, 0)}, whole()));
    CHECK_ENDS(Kind::invalid_argument, "address number 0", push(*from.cache, {at(0, 6), at(1, 6)}, blocks({0, 1}, {0, 2})));
    CHECK(holds_all(*to.cache, 1));

    // A row of two and a half blocks over the blocks at an address. Three fit whole; the third gets its half.
    const auto spread = [&](const Numbers& listed, std::size_t first) {
      auto target = by_addresses({at(0, first), at(1, first)});
      target.model = 4096;  // the unit at the destination
      return pushed(*pair.here, pair.link, *row_from.cache, target, row_to_blocks(1, listed), transports);
    };
    CHECK(spread({0, 1, 2}, 5).outcome.ok());
    CHECK(holds(*to.cache, 1, 7, 5, 1, 1, 2048, 8192));
    CHECK_ENDS(Kind::invalid_argument, "address number 0", spread({0, 1, 2}, 6));
    CHECK(spread({0, 1}, 6).outcome.ok() && holds(*to.cache, 1, 7, 5, 1, 1, 4096, 4096));
    CHECK(spread({2, 0, 1}, 5).outcome.ok() && holds(*to.cache, 0, 7, 5, 0, 1, 4096));
  }
  CHECK(pair.there->registry().remove(to.id()));
  CHECK_ENDS(Kind::invalid_argument, "address number 0", pushed(*pair.here, pair.link, *from.cache, by_addresses({at(0, 0), at(1, 0)}), whole()));
}

// What is written must lie inside what was looked up, whatever the list looks like: here the span that was found ends
// half a block before the block that is written last.
static void a_short_list_writes_no_further_than_what_was_looked_up() {
  Pair pair;
  std::vector<std::uint64_t> memory(3 * 4096 / 8, 1);
  Geometry geometry;
  geometry.layout = Layout::mixed;
  geometry.unit_bytes = geometry.stride_bytes = 512;
  geometry.count = 15;  // 7,680 bytes: less than two whole blocks of 4,096
  geometry.tensors = {{reinterpret_cast<std::uint64_t>(memory.data()), 0, 0}};
  pair.there->registry().add(geometry, host_kind, {});
  Owned from(pair.here->registry(), {"from", 1, 1, 2 * 4096 + 2048});
  fill(*from.cache, 7);
  auto target = by_addresses({geometry.tensors[0].address});
  target.model = 4096;
  for (const unsigned transports : {by_cma, by_socket}) {
    CHECK_ENDS(Kind::invalid_argument, "address number 0", pushed(*pair.here, pair.link, *from.cache, target, row_to_blocks(0, {0, 1}), transports));
    for (const auto word : memory) CHECK(word == 1);
  }
}

static void a_push_to_itself() {
  LinkedToItself self;
  for (const auto& [transports, expected] : {std::pair{by_map, Transport::map}, {by_cma, Transport::cma}, {by_socket, Transport::socket}}) {
    fill(*self.a, 3), fill(*self.b.cache, 1);
    const auto result = pushed(self.node, self.link, *self.a, by_name("b"), whole(), transports);
    CHECK(result.outcome.ok() && result.transport == expected && holds_all(*self.b.cache, 3));
  }
  CHECK_BY(map, pushed(self.node, self.link, *self.a, by_name("b"), whole()));
}

// Two nodes that push to each other at the same time, big and small: none waits for the other's lane.
static void two_nodes_push_to_each_other() {
  for (const unsigned lanes : {1u, 2u, 3u}) {
    Pair pair(any_transport, lanes);
    const auto push_all = [&](Node& node, const std::shared_ptr<Link>& link, Node& other, std::uint64_t tag, int pushes) {
      const Shape shape{"", 2, 128, tag % 2 == 0 ? 8192u : 512u};
      Owned from(node.registry(), shape), to(other.registry(), shape);
      fill(*from.cache, tag);
      for (int i = 0; i < pushes; ++i) {
        fill(*to.cache, 1);
        CHECK_BY(socket, pushed(node, link, *from.cache, by_id(to.id()), whole(), by_socket, 4000));
        CHECK(holds_all(*to.cache, tag));
      }
    };
    std::vector<std::thread> threads;
    for (std::uint64_t tag = 2; tag < 6; ++tag) {
      threads.emplace_back([&, tag] { push_all(*pair.here, pair.link, *pair.there, tag, 8); });
      threads.emplace_back([&, tag] { push_all(*pair.there, pair.back, *pair.here, tag + 10, 8); });
    }
    for (auto& thread : threads) thread.join();
  }
}

static void layers_leave_in_the_order_of_the_list_and_never_early() {
  Pair pair;
  pair.make_pools();
  const Shape shape{"", 8, 6, 4096};
  const auto pool = allocated(pair.here->registry(), shape);
  Owned owned(pair.here->registry(), {"", 8, 6, 4096, 0, Layout::mixed, true}), to(pair.there->registry(), {"to", 8, 6, 4096});
  for (const auto& [from, transports] : {std::pair{pool, by_map}, {owned.cache, by_cma}, {owned.cache, by_socket}}) {
    fill(*to.cache, 1), fill(*from, 2);
    const auto push = pair.here->push_layers(pair.link, from->geometry.cache_id, by_name("to"), blocks({0, 3}, {5, 1}), {2, 0, 3}, {1, 3, 2}, 2,
                                             2000, transports);
    push->start();
    CHECK_FAILS(Kind::invalid_argument, "layer 1", push->layer_ready(1));
    push->layer_ready(0);  // it waits for layer 2
    sleep_ms(5);
    CHECK(holds_all(*to.cache, 1) && !push->done());
    for (const std::size_t layer : {2, 0, 3}) {
      for (const std::size_t tensor : {2 * layer, 2 * layer + 1})
        for (const std::size_t unit : {0, 3}) write_unit(*from, tensor, unit, 8 + layer);
      push->layer_ready(static_cast<std::uint32_t>(layer));
    }
    CHECK(push->wait(Deadline::after_ms(5000)));
    CHECK(push->result().outcome.ok() && push->result().bytes == 3 * 2 * 2 * 4096);
    CHECK(static_cast<unsigned>(push->result().transport) == transports);
    CHECK(holds(*to.cache, 2, 5, 10, 4, 0) && holds(*to.cache, 3, 1, 10, 5, 3) && holds(*to.cache, 5, 1, 11, 7, 3));
    CHECK(holds(*to.cache, 7, 5, 8, 1, 0) || holds(*to.cache, 7, 5, 2, 1, 0));  // declared ready before it was written again
    CHECK(holds(*to.cache, 0, 5, 1, 0, 5));
    push->layer_ready(3);  // again, and after the end: nothing happens
  }
  CHECK_FAILS(Kind::invalid_argument, "layer 4", pair.here->push_layers(pair.link, owned.id(), by_name("to"), whole(), {4}, {0}, 2, 100, by_cma));
  CHECK_FAILS(Kind::invalid_argument, "2 source layers",
              pair.here->push_layers(pair.link, owned.id(), by_name("to"), whole(), {1, 2}, {0}, 2, 100, by_cma));
  CHECK_FAILS(Kind::invalid_argument, "at least one tensor",
              pair.here->push_layers(pair.link, owned.id(), by_name("to"), whole(), {1}, {0}, 0, 100, by_cma));
  const auto to_nowhere = pair.here->push_layers(pair.link, owned.id(), by_name("to"), blocks({0}, {0}), {1}, {900'000'000}, 2, 500, by_cma);
  to_nowhere->start();
  to_nowhere->layer_ready(1);
  CHECK(to_nowhere->wait(Deadline::after_ms(3000)));
  CHECK_ENDS(Kind::invalid_argument, "tensors", to_nowhere->result());
}

static void layers_by_addresses() {
  Pair pair;
  const Shape shape{"", 4, 3, 4096};
  Owned from(pair.here->registry(), shape), to(pair.there->registry(), shape);
  fill(*from.cache, 4), fill(*to.cache, 1);
  std::vector<std::uint64_t> addresses;
  for (const std::size_t tensor : {2, 3, 0, 1}) addresses.push_back(address_of(*to.cache, tensor, 0));
  const auto push = pair.here->push_layers(pair.link, from.id(), by_addresses(addresses), blocks({0, 1, 2}, {0, 1, 2}), {0, 1}, {0, 0}, 2, 2000, by_cma);
  push->start();
  push->layer_ready(0), push->layer_ready(1);
  CHECK(push->wait(Deadline::after_ms(5000)) && push->result().outcome.ok());
  CHECK(holds(*to.cache, 2, 1, 4, 0, 1) && holds(*to.cache, 1, 2, 4, 3, 2));
}

static void a_cancelled_layer_push_writes_no_more() {
  Pair pair;
  const Shape shape{"", 4, 3, 4096, 0, Layout::mixed, true};
  Owned from(pair.here->registry(), shape), to(pair.there->registry(), shape);
  fill(*from.cache, 4), fill(*to.cache, 1);
  const auto push = pair.here->push_layers(pair.link, from.id(), by_id(to.id()), whole(), {0, 1}, {0, 1}, 2, 2000, any_transport);
  push->start();
  push->layer_ready(0);
  CHECK(eventually([&] { return holds(*to.cache, 1, 2, 4, 1, 2); }));
  push->cancel();
  CHECK(push->wait(Deadline::after_ms(1000)));
  CHECK(push->result().outcome.kind == Kind::cancelled && push->result().outcome.touched);
  push->layer_ready(1);
  sleep_ms(5);
  CHECK(holds(*to.cache, 2, 0, 1, 2, 0));
}

// A layer that is declared ready and does not arrive in time ends the push, however long it had waited for its layers.
static void the_time_of_a_layer_counts_from_when_it_is_ready() {
  Pair pair;
  const Shape shape{"", 4, 3, 4096};
  Owned from(pair.here->registry(), shape), to(pair.there->registry(), shape);
  const auto push = pair.here->push_layers(pair.link, from.id(), by_id(to.id()), whole(), {0, 1}, {0, 1}, 2, 1000, any_transport);
  push->start();
  sleep_ms(1100);
  push->layer_ready(0);
  sleep_ms(1100);
  CHECK(!push->done());
  push->layer_ready(1);
  CHECK(push->wait(Deadline::after_ms(5000)) && push->result().outcome.ok());
}

// A push that nobody has started, and one that has ended, may be forgotten after their node.
static void a_push_may_outlive_its_node() {
  std::shared_ptr<Push> ended, running;
  {
    Pair pair;
    Owned from(pair.here->registry(), {"from"}), to(pair.there->registry(), {"to"});
    ended = pair.here->push(pair.link, from.id(), by_name("to"), whole(), Deadline::after_ms(1000), any_transport);
    CHECK(ended->run_here().outcome.ok());
    const auto layers = pair.here->push_layers(pair.link, from.id(), by_name("to"), whole(), {0}, {0}, 2, 1000, any_transport);
    layers->start();
    running = layers;
  }
  CHECK(running->done() && !running->result().outcome.ok());
}

int main() {
  a_push_is_the_first_thing_on_a_link();
  every_form_arrives();
  a_block_that_is_not_there_is_refused_also_where_another_overwrites_it();
  an_answer_counts_that_came_before_the_end_of_the_link();
  addresses_are_looked_up();
  a_short_list_writes_no_further_than_what_was_looked_up();
  a_push_to_itself();
  two_nodes_push_to_each_other();
  layers_leave_in_the_order_of_the_list_and_never_early();
  layers_by_addresses();
  a_cancelled_layer_push_writes_no_more();
  the_time_of_a_layer_counts_from_when_it_is_ready();
  a_push_may_outlive_its_node();
  return TEST_RESULT();
}
