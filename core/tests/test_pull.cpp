#include <sys/mman.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "alone.hpp"

using namespace kvferry;
using namespace kvferry::testing;


// Every way to name the source and every form of move, by each transport that fits the source's memory.
static void every_form_arrives(bool pool, unsigned transports, Transport expected) {
  Pair pair;
  pair.make_pools();
  const Shape wide{"wide", 4, 12, 4096, pool ? 0u : 512u};
  const Shape rows{"rows", 4, 3, 4 * 4096};
  std::vector<std::unique_ptr<Owned>> owned;
  const auto cache_at = [&](Node& node, const Shape& shape, std::uint64_t tag, const Keys& keys = {}) {
    std::shared_ptr<Cache> cache;
    if (pool) {
      cache = allocated(node.registry(), shape, keys);
    } else {
      owned.push_back(std::make_unique<Owned>(node.registry(), shape, keys));
      cache = owned.back()->cache;
    }
    fill(*cache, tag);
    return cache;
  };
  const auto source = cache_at(*pair.there, wide, 7, {std::nullopt, Key{Key::Space::prefix, 40, 1}});
  const auto source_rows = cache_at(*pair.there, rows, 9, {std::nullopt, Key{Key::Space::prefix, 50, 0}});
  const auto into = cache_at(*pair.here, wide, 1);
  const auto into_rows = cache_at(*pair.here, rows, 2);
  const auto pull = [&](Target target, const Cache& to, std::shared_ptr<const Moves> moves) {
    const auto result = pulled(*pair.here, pair.link, std::move(target), to, std::move(moves), transports);
    CHECK(!result.outcome.ok() || result.transport == expected);
    if (!result.outcome.ok()) std::fprintf(stderr, "%s\n", result.outcome.sentence.c_str());
    return result.outcome.ok() ? result.bytes : 0;
  };

  for (const auto& target : {by_id(source->geometry.cache_id), by_name("wide")}) {
    fill(*into, 1);
    CHECK(pull(target, *into, whole()) == 4 * 12 * 4096 && holds_all(*into, 7));
  }
  // Blocks, a destination named twice keeps its last writer, the rest stays as it was; some tensors only.
  fill(*into, 1);
  CHECK(pull(by_name("wide"), *into, blocks({0, 1, 5, 2, 11}, {3, 4, 0, 4, 9}, {1, 2}, {2, 2})) == 2 * 4 * 4096);
  for (std::size_t tensor = 0; tensor < 4; ++tensor) {
    for (std::size_t unit = 0; unit < 12; ++unit) {
      const std::size_t from = unit == 3 ? 0 : unit == 4 ? 2 : unit == 0 ? 5 : unit == 9 ? 11 : 99;
      CHECK(tensor >= 2 && from != 99 ? holds(*into, tensor, unit, 7, tensor - 1, from) : holds(*into, tensor, unit, 1, tensor, unit));
    }
  }
  // A row, a part of one, the row that a key names, and a row spread over blocks.
  fill(*into_rows, 2);
  CHECK(pull(by_name("rows"), *into_rows, row(2, 0)) == 4 * 4 * 4096);
  CHECK(holds(*into_rows, 3, 0, 9, 3, 2) && holds(*into_rows, 3, 1, 2, 3, 1));
  CHECK(pull(by_name("rows"), *into_rows, row(0, 2, 4096)) == 4 * 4096);
  CHECK(holds(*into_rows, 1, 2, 9, 1, 0, 4096));
  CHECK(pull(by_key(Target::By::prefix, 50), *into_rows, row(-1, 1)) == 4 * 4 * 4096);
  CHECK(holds(*into_rows, 0, 1, 9, 0, 1));
  fill(*into, 1);
  CHECK(pull(by_name("rows"), *into, row_to_blocks(1, {8, 2, 0})) == 4 * 3 * 4096);
  CHECK(holds(*into, 2, 8, 9, 2, 1, 4096) && holds(*into, 2, 2, 9, 2, 1, 4096, 4096) && holds(*into, 2, 0, 9, 2, 1, 4096, 8192));
  CHECK(holds(*into, 2, 1, 1, 2, 1));

  // Nothing to do is done.
  CHECK(pulled(*pair.here, pair.link, by_name("wide"), *into, blocks({}, {}), transports).outcome.ok());
  CHECK(pair.here->statistics(*pair.link).operations == 0);
  CHECK(eventually([&] { return pair.there->statistics(*pair.back).operations == 0; }));
}

static void the_transport_follows_memory_and_wish() {
  every_form_arrives(true, any_transport, Transport::map);
  every_form_arrives(true, by_cma, Transport::cma);
  every_form_arrives(true, by_socket, Transport::socket);
  every_form_arrives(false, any_transport, Transport::cma);
  every_form_arrives(false, by_socket, Transport::socket);
}

static void a_node_pulls_from_itself() {
  LinkedToItself self;
  for (const auto& [transports, expected] : {std::pair{by_map, Transport::map}, {by_cma, Transport::cma}, {by_socket, Transport::socket}}) {
    fill(*self.a, 3), fill(*self.b.cache, 1);
    const auto result = pulled(self.node, self.link, by_name("a"), *self.b.cache, whole(), transports);
    CHECK(result.outcome.ok() && result.transport == expected && holds_all(*self.b.cache, 3));
  }
}

static void one_lane_carries_everything() {
  Pair pair(any_transport, 1);
  Owned source(pair.there->registry(), {"big", 2, 64, 16384});
  Owned into(pair.here->registry(), {"into", 2, 64, 16384});
  fill(*source.cache, 4);
  CHECK_BY(socket, pulled(*pair.here, pair.link, by_name("big"), *into.cache, whole(), by_socket));
  CHECK(holds_all(*into.cache, 4));
  fill(*into.cache, 6);
  CHECK_BY(socket, pulled(*pair.there, pair.back, by_name("into"), *source.cache, whole(), by_socket));
  CHECK(holds_all(*source.cache, 6));
}

// The side that did not dial waits for lanes that the other opens, however many each of them wants.
static void the_two_sides_may_want_different_numbers_of_lanes() {
  for (const auto& [mine, other] : {std::pair{1u, 3u}, {3u, 1u}}) {
    Pair pair(options(1, any_transport, mine), options(2, any_transport, other));
    Owned far(pair.there->registry(), {"far", 1, 64, 16384});
    Owned near(pair.here->registry(), {"near", 1, 64, 16384});
    fill(*far.cache, 4);
    CHECK_BY(socket, pulled(*pair.here, pair.link, by_name("far"), *near.cache, whole(), by_socket, 2000));
    CHECK(holds_all(*near.cache, 4));
    fill(*near.cache, 5);
    CHECK_BY(socket, pulled(*pair.there, pair.back, by_name("near"), *far.cache, whole(), by_socket, 2000));
    CHECK(holds_all(*far.cache, 5));
  }
}

static void what_is_wrong_is_said_before_the_first_byte() {
  Pair pair;
  pair.make_pools();
  Owned source(pair.there->registry(), {"kv", 2, 8, 4096, 0, Layout::blocks});
  Owned into(pair.here->registry(), {"mine", 2, 8, 4096, 0, Layout::blocks});
  Owned narrow(pair.here->registry(), {"narrow", 2, 8, 2048, 0, Layout::blocks});
  fill(*into.cache, 1);
  for (const unsigned transports : {any_transport, by_socket}) {
    const auto ends = [&](Target target, const Cache& to, std::shared_ptr<const Moves> moves) {
      const auto result = pulled(*pair.here, pair.link, std::move(target), to, std::move(moves), transports);
      CHECK(!result.outcome.touched && result.outcome.settled && result.bytes == 0);
      return result;
    };
    CHECK_ENDS(Kind::not_found, "name 'none'", ends(by_name("none"), *into.cache, whole()));
    CHECK_ENDS(Kind::not_found, "cache 77", ends(by_id(77), *into.cache, whole()));
    CHECK_ENDS(Kind::not_found, "request 3", ends(by_request(3), *into.cache, blocks({0}, {0})));
    CHECK_ENDS(Kind::not_found, "window", ends(by_window("nobody's window!"), *into.cache, blocks({0}, {0})));
    CHECK_ENDS(Kind::invalid_argument, "block 8", ends(by_name("kv"), *into.cache, blocks({8}, {0})));
    CHECK_ENDS(Kind::invalid_argument, "block 8", ends(by_name("kv"), *into.cache, blocks({0}, {8})));
    CHECK_ENDS(Kind::invalid_argument, "source block 9 of cache 1", ends(by_name("kv"), *into.cache, blocks({9, 1}, {5, 5})));  // overwritten
    CHECK_ENDS(Kind::invalid_argument, "2048", ends(by_name("kv"), *narrow.cache, blocks({0}, {0})));
    CHECK_ENDS(Kind::invalid_argument, "layout", ends(by_name("kv"), *into.cache, row(0, 0)));
    CHECK_ENDS(Kind::invalid_argument, "tensor", ends(by_name("kv"), *into.cache, whole({1, 2}, {0, 2})));
    CHECK(holds_all(*into.cache, 1));
    const Numbers units{1, 2};
    const auto window = pair.there->registry().open_window(source.id(), units.data(), 2, Access::read, 10'000);
    CHECK_ENDS(Kind::not_found, "block 3 of cache 1 'kv' is not in the window", ends(by_window(window->name), *into.cache, blocks({3, 1}, {5, 5})));
    CHECK(pulled(*pair.here, pair.link, by_name("kv"), *into.cache, blocks({7, 1}, {1, 1}), transports).outcome.ok());
    CHECK(pulled(*pair.here, pair.link, by_window(window->name), *into.cache, blocks({2, 1}, {1, 1}), transports).outcome.ok());
    fill(*into.cache, 1);
  }
  CHECK_FAILS(Kind::not_found, "no cache 99", pair.here->pull(pair.link, by_name("kv"), 99, whole(), Deadline::after_ms(10), any_transport));
  CHECK_FAILS(Kind::invalid_argument, "addresses",
              pair.here->pull(pair.link, by_addresses({4096}), into.id(), whole(), Deadline::after_ms(10), any_transport));
  // A cache by map alone, whose memory is its caller's.
  CHECK_ENDS(Kind::unsupported, "allow cma or socket", pulled(*pair.here, pair.link, by_name("kv"), *into.cache, whole(), by_map));
  CHECK_FAILS(Kind::not_found, "", pair.here->describe(pair.link, by_name("none"), Deadline::after_ms(1000)));
  const auto [described, transport] = pair.here->describe(pair.link, by_name("kv"), Deadline::after_ms(1000));
  CHECK(described->geometry.name == "kv" && described->geometry.count == 8 && transport == Transport::cma);
}

static void memory_that_is_not_there_is_an_error_and_no_crash() {
  Pair pair;
  Geometry nowhere;
  nowhere.name = "nowhere";
  nowhere.layout = Layout::mixed;
  nowhere.unit_bytes = nowhere.stride_bytes = 4096;
  nowhere.count = 8;
  nowhere.tensors = {{1, 0, 0}, {4096, 0, 0}};
  const auto far = pair.there->registry().add(nowhere, host_kind, {});
  const auto near = pair.here->registry().add(nowhere, host_kind, {});
  Owned source(pair.there->registry(), {"kv"});
  Owned into(pair.here->registry(), {"mine"});
  for (const unsigned transports : {any_transport, by_socket}) {
    CHECK_ENDS(Kind::invalid_argument, "tensor 0", pulled(*pair.here, pair.link, by_name("nowhere"), *into.cache, whole(), transports));
    CHECK_ENDS(Kind::invalid_argument, "tensor 0", pulled(*pair.here, pair.link, by_name("kv"), *near, whole(), transports));
    CHECK_ENDS(Kind::invalid_argument, "tensor 0", pushed(*pair.here, pair.link, *near, by_name("kv"), whole(), transports));
    CHECK_ENDS(Kind::invalid_argument, "tensor 0", pushed(*pair.here, pair.link, *into.cache, by_name("nowhere"), whole(), transports));
  }
  CHECK(far->geometry.cache_id > 0);

  // Unmapped after its first use: the kernel says so.
  const std::size_t bytes = 8 * 4096;
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  Geometry gone = nowhere;
  gone.name = "gone";
  gone.tensors = {{reinterpret_cast<std::uint64_t>(pages), 0, 0}};
  const auto cache = pair.there->registry().add(gone, host_kind, {});
  Owned one(pair.here->registry(), {"one", 1});
  CHECK_BY(cma, pulled(*pair.here, pair.link, by_name("gone"), *one.cache, whole()));
  munmap(pages, bytes);
  CHECK_ENDS(Kind::invalid_argument, "not mapped", pulled(*pair.here, pair.link, by_name("gone"), *one.cache, whole()));
  CHECK_ENDS(Kind::invalid_argument, "not mapped", pulled(*pair.here, pair.link, by_name("gone"), *one.cache, whole(), by_socket));
  CHECK_BY(socket, pulled(*pair.here, pair.link, by_name("kv"), *into.cache, whole(), by_socket));
}

static void a_window_is_good_until_it_is_closed() {
  Pair pair;
  pair.make_pools();
  Owned mine(pair.there->registry(), {"owned"});
  const auto theirs = allocated(pair.there->registry(), {"allocated"});
  Owned into(pair.here->registry(), {"into"});
  fill(*mine.cache, 3), fill(*theirs, 3);
  for (const auto* source : {mine.cache.get(), theirs.get()}) {
    for (const unsigned transports : {any_transport, by_cma, by_socket}) {
      const Numbers units{5, 2, 3};
      auto& registry = pair.there->registry();
      const auto window = registry.open_window(source->geometry.cache_id, units.data(), units.size(), Access::read, 60'000);
      const auto pull = [&](std::shared_ptr<const Moves> moves) {
        return pulled(*pair.here, pair.link, by_window(window->name), *into.cache, std::move(moves), transports);
      };
      CHECK(pull(blocks({2, 5}, {0, 1})).outcome.ok() && holds(*into.cache, 1, 1, 3, 1, 5));
      CHECK(pull(row(3, 0)).outcome.ok());
      CHECK_ENDS(Kind::not_found, "block 4", pull(blocks({2, 4}, {0, 1})));
      CHECK_ENDS(Kind::not_found, "block 0", pull(whole()));
      CHECK_ENDS(Kind::not_found, "block 1", pull(row(1, 0)));
      const auto prepared = pair.here->prepare(pair.link, by_window(window->name), into.id(), blocks({5}, {0}), Deadline::after_ms(1000), transports);
      CHECK(prepared->operation(Deadline::after_ms(1000))->run_here().outcome.ok());
      CHECK(registry.close_window(window->name));
      CHECK_ENDS(Kind::not_found, "", pull(blocks({2, 5}, {0, 1})));
      CHECK_ENDS(Kind::not_found, "", prepared->operation(Deadline::after_ms(1000))->run_here());
      const auto writable = registry.open_window(source->geometry.cache_id, units.data(), units.size(), Access::write, 60'000);
      CHECK_ENDS(Kind::not_found, "for writing", pulled(*pair.here, pair.link, by_window(writable->name), *into.cache, blocks({2}, {0}), transports));
      const auto brief = registry.open_window(source->geometry.cache_id, units.data(), units.size(), Access::read, 20);
      const auto name = brief->name;
      CHECK(eventually([&] { return pair.there->statistics().windows == 1; }));
      CHECK_ENDS(Kind::not_found, "", pulled(*pair.here, pair.link, by_window(name), *into.cache, blocks({2}, {0}), transports));
      CHECK(registry.close_window(writable->name));
    }
  }
  CHECK(pair.there->statistics().windows == 0);
}

static void a_request_key_of_an_allocated_cache_is_pulled_once() {
  Pair pair;
  pair.make_pools();
  Owned into(pair.here->registry(), {"into", 2, 8, 4096, 0, Layout::rows});
  auto& registry = pair.there->registry();
  for (const unsigned transports : {by_map, by_cma, by_socket}) {
    const auto open_before = pair.there->statistics().slots_open;
    const auto cache = allocated(registry, {"", 2, 2, 4096, 0, Layout::rows}, {Key{Key::Space::request, 70, 0}, Key{Key::Space::request, 71, 0}});
    fill(*cache, 8);
    CHECK(registry.deallocate(cache->geometry.cache_id));  // lives on for its keys
    const auto pull = [&](std::uint64_t request, TensorRange tensors = {}) {
      return pulled(*pair.here, pair.link, by_request(request), *into.cache, Moves::make_row(-1, 0, -1, tensors, tensors), transports);
    };
    CHECK(pull(70).outcome.ok() && holds(*into.cache, 1, 0, 8, 1, 0));
    CHECK_ENDS(Kind::not_found, "request 70", pull(70));
    // In two parts: gone after the second.
    CHECK(pull(71, {0, 1}).outcome.ok());
    CHECK(pull(71, {1, 1}).outcome.ok() && holds(*into.cache, 1, 0, 8, 1, 1));
    CHECK_ENDS(Kind::not_found, "request 71", pull(71));
    CHECK(pair.there->statistics().slots_open == open_before);
  }
  CHECK(pair.there->statistics().pool_used_bytes == 0);
}

// Of many that pull one key at the same time one gets it. The bytes of the others are an error.
static void of_many_pulls_of_one_key_one_succeeds() {
  Pair pair;
  pair.make_pools();
  auto& registry = pair.there->registry();
  for (const unsigned transports : {by_map, by_socket}) {
    for (int round = 0; round < 10; ++round) {
      const auto cache = allocated(registry, {"", 2, 1, 4096, 0, Layout::rows}, {Key{Key::Space::request, 5, 0}});
      std::atomic<int> good{0}, gone{0};
      std::vector<std::thread> threads;
      for (int i = 0; i < 4; ++i)
        threads.emplace_back([&] {
          Owned into(pair.here->registry(), {"", 2, 1, 4096, 0, Layout::rows});
          const auto result = pulled(*pair.here, pair.link, by_request(5), *into.cache, row(-1, 0), transports);
          good += result.outcome.ok();
          gone += result.outcome.kind == Kind::not_found;
          pair.here->registry().remove(into.id());
        });
      for (auto& thread : threads) thread.join();
      CHECK(good == 1 && gone == 3);
      registry.deallocate(cache->geometry.cache_id);
    }
  }
}

static void a_prepared_pull_follows_its_target() {
  Pair pair;
  pair.make_pools();
  Owned into(pair.here->registry(), {"into"});
  auto& registry = pair.there->registry();
  for (const unsigned transports : {by_map, by_cma, by_socket}) {
    auto first = allocated(registry, {"kv"});
    fill(*first, 3);
    const auto by_its_id = by_id(first->geometry.cache_id);
    const auto named = pair.here->prepare(pair.link, by_name("kv"), into.id(), blocks({1}, {2}), Deadline::after_ms(1000), transports);
    const auto numbered = pair.here->prepare(pair.link, by_its_id, into.id(), blocks({1}, {2}), Deadline::after_ms(1000), transports);
    const auto run = [](PreparedPull& prepared) { return prepared.run_here(Deadline::after_ms(1000)); };
    const auto expected = transports == by_map ? Transport::map : transports == by_cma ? Transport::cma : Transport::socket;
    for (int i = 0; i < 20; ++i) {
      fill(*into.cache, 9);
      const auto pulls = pair.link->pulls.load(), bytes = pair.link->bytes_pulled.load();
      const auto result = run(*named);
      CHECK(result.outcome.ok() && holds(*into.cache, 1, 2, 3, 1, 1) && holds(*into.cache, 1, 3, 9, 1, 3));
      CHECK(result.bytes == 2 * 4096 && result.nanoseconds > 0 && result.transport == expected);
      CHECK(pair.link->pulls.load() == pulls + 1 && pair.link->bytes_pulled.load() == bytes + 2 * 4096 && pair.link->operations() == 0);
      CHECK(run(*numbered).outcome.ok());
    }
    bool touched = false;
    CHECK(numbered->run_at_once(Deadline::after_ms(1000), touched).has_value() == (transports != by_socket) && touched == (transports != by_socket));
    touched = false;
    CHECK(!numbered->run_at_once(Deadline::after_ms(0), touched) && !touched);
    CHECK_ENDS(Kind::deadline, "time was up", numbered->run_here(Deadline::after_ms(0)));
    const auto late = numbered->operation(Deadline::after_ms(1000));  // made before the end, run after it
    CHECK(registry.deallocate(first->geometry.cache_id));
    CHECK_ENDS(Kind::not_found, "", late->run_here());
    CHECK_ENDS(Kind::not_found, "", run(*named));
    auto second = allocated(registry, {"kv"});
    fill(*second, 4);
    CHECK(run(*named).outcome.ok() && holds(*into.cache, 1, 2, 4, 1, 1));
    CHECK_ENDS(Kind::not_found, "", run(*numbered));
    CHECK(registry.deallocate(second->geometry.cache_id));
  }
  CHECK_FAILS(Kind::not_found, "", pair.here->prepare(pair.link, by_name("kv"), into.id(), whole(), Deadline::after_ms(1000), any_transport));
  const auto kept = allocated(registry, {"kv"});
  Owned another(pair.here->registry(), {"another"});
  const auto prepared = pair.here->prepare(pair.link, by_name("kv"), into.id(), blocks({0}, {0}), Deadline::after_ms(1000), any_transport);
  const auto of_all = pair.here->prepare(pair.link, by_name("kv"), into.id(), whole(), Deadline::after_ms(1000), any_transport);
  const auto lasting = pair.here->prepare(pair.link, by_name("kv"), another.id(), blocks({0}, {0}), Deadline::after_ms(1000), any_transport);
  pair.here->registry().remove(into.id());
  for (auto* const one : {prepared.get(), of_all.get()}) {
    const auto result = one->run_here(Deadline::after_ms(1000));
    CHECK_ENDS(Kind::not_found, "unregistered", result);
    CHECK(!result.outcome.touched);
  }
  // A transport that was given up in the meantime is another one's turn.
  CHECK_BY(map, lasting->run_here(Deadline::after_ms(1000)));
  pair.link->give_up_map("no more");
  CHECK_BY(cma, lasting->run_here(Deadline::after_ms(1000)));
  pair.link->give_up_cma("no more");
  CHECK_BY(socket, lasting->run_here(Deadline::after_ms(1000)));
  pair.here->unlink(pair.link, Deadline::after_ms(1000), false);
  CHECK_FAILS(Kind::not_linked, "unlinked", lasting->run_here(Deadline::after_ms(1000)));
}

static void a_small_pull_goes_at_once_and_says_the_same_when_it_cannot() {
  Pair pair;
  pair.make_pools();
  Owned into(pair.here->registry(), {"into"});
  auto& registry = pair.there->registry();
  for (const unsigned transports : {by_map, by_cma, by_socket}) {
    const auto source = allocated(registry, {"kv"});
    fill(*source, 3);
    const auto pull = [&](std::shared_ptr<const Moves> moves) {
      pair.here->pull_now(pair.link, by_id(source->geometry.cache_id), into.id(), std::move(moves), Deadline::after_ms(5000), transports);
    };
    const auto pulls = pair.link->pulls.load(), bytes = pair.link->bytes_pulled.load();
    for (std::uint32_t i = 0; i < 20; ++i) {
      fill(*into.cache, 9);
      pull(blocks({1}, {i % 8}));
      CHECK(holds(*into.cache, 0, i % 8, 3, 0, 1) && holds(*into.cache, 1, i % 8, 3, 1, 1) && holds(*into.cache, 1, (i + 1) % 8, 9, 1, (i + 1) % 8));
    }
    CHECK(pair.link->pulls.load() == pulls + 20 && pair.link->bytes_pulled.load() == bytes + std::uint64_t{20} * 2 * 4096 && pair.link->operations() == 0);
    CHECK_FAILS(Kind::invalid_argument, "block 99", pull(blocks({1}, {99})));
    CHECK_FAILS(Kind::not_found, "row 99", pull(row(99, 0)));
    pull(whole());
    CHECK(registry.deallocate(source->geometry.cache_id));
    CHECK_FAILS(Kind::not_found, "", pull(blocks({1}, {2})));
  }
  const auto source = allocated(registry, {"kv"});
  const auto pull = [&](std::int64_t timeout_ms) {
    pair.here->pull_now(pair.link, by_id(source->geometry.cache_id), into.id(), blocks({1}, {2}), Deadline::after_ms(timeout_ms), any_transport);
  };
  pull(1000);
  CHECK_FAILS(Kind::deadline, "time was up", pull(-1));
  pair.here->registry().remove(into.id());
  CHECK_FAILS(Kind::not_found, "no cache", pull(1000));
  Owned again(pair.here->registry(), {"again"});
  pair.here->unlink(pair.link, Deadline::after_ms(1000), false);
  CHECK_FAILS(Kind::not_linked, "", pair.here->pull_now(pair.link, by_id(source->geometry.cache_id), again.id(), blocks({1}, {2}), Deadline::after_ms(1000), any_transport));
}

// Just as much as may go at once, by bytes and by spans, and a little more: nothing of that is seen from outside.
static void pulls_about_the_size_that_goes_at_once_are_whole() {
  Pair pair;
  pair.make_pools();
  Owned into(pair.here->registry(), {"into", 1, 160, 1024}), memory(pair.there->registry(), {"memory", 1, 160, 1024});
  const auto pool = allocated(pair.there->registry(), {"pool", 1, 160, 1024});
  for (const Cache* const source : {static_cast<const Cache*>(memory.cache.get()), static_cast<const Cache*>(pool.get())}) {
    fill(*source, 3);
    for (const std::int64_t count : {63, 64, 65}) {
      for (const std::int64_t step : {1, 2}) {  // one span, or one for each block
        Numbers from, to;
        for (std::int64_t i = 0; i < count; ++i) from.push_back(i * step), to.push_back(159 - i);
        if (step == 1) to = from;
        for (const bool prepared : {false, true}) {
          fill(*into.cache, 9);
          const auto target = by_id(source->geometry.cache_id);
          const auto deadline = Deadline::after_ms(5000);
          if (prepared)
            CHECK(pair.here->prepare(pair.link, target, into.id(), blocks(from, to), deadline, any_transport)->run_here(deadline).outcome.ok());
          else
            pair.here->pull_now(pair.link, target, into.id(), blocks(from, to), deadline, any_transport);
          for (std::size_t i = 0; i < from.size(); ++i)
            CHECK(holds(*into.cache, 0, static_cast<std::size_t>(to[i]), 3, 0, static_cast<std::size_t>(from[i])));
          CHECK(holds(*into.cache, 0, 80, 9, 0, 80));
        }
      }
    }
  }
}

static bool pull_asked_on(int fd) {
  char byte;
  return ::recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 1;
}

// The owner has sent all of it and unlinks, and the end of the link is seen first: what has come counts if it is all.
static void a_stream_counts_that_came_before_the_end_of_the_link() {
  for (const std::int64_t count : {1, 8}) {  // read in one piece and copied on, or straight into its place
    for (const bool all : {true, false}) {
      Alone alone;
      Owned into(alone.engine.registry, {"into", 1, 8, 4096});
      Numbers units;
      for (std::int64_t i = 0; i < count; ++i) units.push_back(i);
      PullAsk ask;
      ask.target = by_id(1);
      ask.destination = destination_cache(alone.engine, into.id());
      ask.moves = blocks(units, units);
      const auto pull = std::make_shared<Pull>(alone.engine, alone.link, Deadline::after_ms(20'000), std::move(ask));
      std::atomic<bool> asleep{false}, go_on{false};
      alone.engine.reactor.post([&] { asleep = true; while (!go_on) sleep_ms(1); });  // what comes is not looked for
      CHECK(eventually([&] { return asleep.load(); }));
      pull->start_here();
      const auto bytes = static_cast<std::size_t>(count) * 4096;
      wire::Writer piece(wire::Type::piece, pull->number());
      std::vector<std::uint64_t> words(bytes / 8, 7);
      auto sent = piece.raw(words.data(), bytes).take();
      const auto end = ended_frame(pull->number(), {}, bytes, Transport::socket);
      sent.insert(sent.end(), end.begin(), end.end());
      if (!all) sent.resize(sent.size() - end.size() - 8);
      bool gone = false;
      for (const auto& far : alone.far_ends) gone |= pull_asked_on(far.get()) && send_some(far.get(), sent) == static_cast<long>(sent.size());
      CHECK(gone);
      alone.link->take_down({Kind::not_linked, "the peer has unlinked", false, true});
      CHECK(pull->wait(Deadline::after_ms(5000)));
      go_on = true;
      if (all) {
        CHECK_BY(socket, pull->result());
        const auto* const here = reinterpret_cast<const std::uint64_t*>(address_of(*into.cache, 0, 0));
        CHECK(std::all_of(here, here + words.size(), [](std::uint64_t word) { return word == 7; }));
      } else {
        CHECK_ENDS(Kind::not_linked, "the peer has unlinked", pull->result());
        CHECK(pull->result().outcome.touched && pull->result().outcome.settled);
      }
    }
  }
}

// Threads go on with small pulls while their link goes down and their caches end: no byte is written after that.
static void small_pulls_end_with_their_link_and_their_cache() {
  for (int turn = 0; turn < 20; ++turn) {
    Pair pair;
    const Shape raced{"kv", 2, 8, 4096, 0, Layout::mixed, true};
    Owned from(pair.there->registry(), raced), into(pair.here->registry(), raced);
    fill(*from.cache, 3);
    std::atomic<int> pulled{0};
    std::vector<std::thread> threads;
    for (int number = 0; number < 2; ++number)
      threads.emplace_back([&, number] {
        try {
          for (;;) {
            pair.here->pull_now(pair.link, by_id(from.id()), into.id(), blocks({1}, {number}), Deadline::after_ms(5000), any_transport);
            ++pulled;
          }
        } catch (const Error& error) {
          const auto kind = error.outcome().kind;
          CHECK(kind == Kind::not_linked || kind == Kind::not_found);
        }
      });
    while (pulled.load() < 10) std::this_thread::yield();
    if (turn % 2 == 0)
      pair.here->unlink(pair.link, Deadline::after_ms(5000), true);
    else
      CHECK(pair.here->registry().remove(into.id()));
    fill(*into.cache, 9);
    for (auto& thread : threads) thread.join();
    for (std::uint32_t unit = 0; unit < 2; ++unit) CHECK(holds(*into.cache, 1, unit, 9, 1, unit));
  }
}

static void memory_of_another_kind_goes_through_its_copier() {
  enable_test_kind();
  Pair pair;
  pair.make_pools();
  const Shape shape{"far", 2, 40, 12'288, 4096};
  Owned far(pair.there->registry(), shape, {}, test_kind);
  Owned near(pair.here->registry(), shape, {}, test_kind);
  const auto pool = allocated(pair.there->registry(), {"pool", 2, 40, 12'288});
  Owned plain(pair.there->registry(), {"plain", 2, 40, 12'288});
  fill(*far.cache, 3), fill(*pool, 4), fill(*plain.cache, 5);
  CHECK_BY(socket, pulled(*pair.here, pair.link, by_name("far"), *near.cache, whole()));
  CHECK(holds_all(*near.cache, 3));
  CHECK_BY(map, pulled(*pair.here, pair.link, by_name("pool"), *near.cache, whole()));
  CHECK(holds_all(*near.cache, 4));
  CHECK_BY(cma, pulled(*pair.here, pair.link, by_name("plain"), *near.cache, whole()));
  CHECK(holds_all(*near.cache, 5));
  CHECK_BY(socket, pulled(*pair.here, pair.link, by_name("plain"), *near.cache, blocks({1}, {0}), by_socket));
  CHECK(holds(*near.cache, 1, 0, 5, 1, 1));
  CHECK_BY(socket, pushed(*pair.here, pair.link, *near.cache, by_name("plain"), blocks({0}, {39})));
  CHECK(holds(*plain.cache, 1, 39, 5, 1, 1));
  CHECK_BY(socket, pushed(*pair.here, pair.link, *near.cache, by_name("far"), blocks({5}, {7})));
  CHECK(holds(*far.cache, 0, 7, 5, 0, 5));
}

// While other caches of the owner's pool come and go, with their segments, the link keeps its transports.
static void segments_that_come_and_go_cost_no_transport() {
  Pair pair;
  pair.there->registry().create_pool(64 << 20, 12, 64 << 10);
  std::atomic<bool> stop{false};
  std::thread churning([&] {
    while (!stop) {
      const auto cache = allocated(pair.there->registry(), {"kv", 2, 8, 8192});
      fill(*cache, 7);
      std::this_thread::yield();
      pair.there->registry().deallocate(cache->geometry.cache_id);
    }
  });
  Owned into(pair.here->registry(), {"into", 2, 8, 8192});
  int good = 0;
  for (const auto until = Deadline::after_ms(500); !until.passed();) {
    const auto result = pulled(*pair.here, pair.link, by_name("kv"), *into.cache, whole());
    if (!result.outcome.ok()) CHECK_ENDS(Kind::not_found, "", result);
    good += result.outcome.ok();
  }
  stop = true;
  churning.join();
  std::printf("%d pulls while caches came and went\n", good);
  CHECK(pair.here->statistics(*pair.link).map == "ok");
}

int main() {
  the_transport_follows_memory_and_wish();
  a_node_pulls_from_itself();
  one_lane_carries_everything();
  the_two_sides_may_want_different_numbers_of_lanes();
  what_is_wrong_is_said_before_the_first_byte();
  memory_that_is_not_there_is_an_error_and_no_crash();
  a_window_is_good_until_it_is_closed();
  a_request_key_of_an_allocated_cache_is_pulled_once();
  of_many_pulls_of_one_key_one_succeeds();
  a_prepared_pull_follows_its_target();
  a_small_pull_goes_at_once_and_says_the_same_when_it_cannot();
  pulls_about_the_size_that_goes_at_once_are_whole();
  a_stream_counts_that_came_before_the_end_of_the_link();
  small_pulls_end_with_their_link_and_their_cache();
  memory_of_another_kind_goes_through_its_copier();
  segments_that_come_and_go_cost_no_transport();
  return TEST_RESULT();
}
