#include <atomic>
#include <limits>
#include <thread>
#include <vector>

#include "../registry.hpp"
#include "check.hpp"

using namespace kvferry;

using Keys = std::vector<std::optional<Key>>;
constexpr std::size_t page = 4096;

static Key request(std::uint64_t id, std::uint64_t model = 0) { return {Key::Space::request, id, model}; }
static Key prefix(std::uint64_t id) { return {Key::Space::prefix, id, 0}; }
static Key blocks_key(std::uint64_t model) { return {Key::Space::blocks, 0, model}; }
static Target target(Target::By by, std::uint64_t id = 0, std::string name = {}) {
  Target out;
  out.by = by;
  out.id = id;
  out.name = std::move(name);
  return out;
}
static Target by_id(std::uint64_t id) { return target(Target::By::id, id); }
static Target by_name(std::string name) { return target(Target::By::name, 0, std::move(name)); }
static Target by_request(std::uint64_t id) { return target(Target::By::request, id); }
static Target by_prefix(std::uint64_t id) { return target(Target::By::prefix, id); }
static Target by_window(std::string name) { return target(Target::By::window, 0, std::move(name)); }
static Target by_blocks_key(std::uint64_t model) {
  Target out = target(Target::By::blocks_key);
  out.model = model;
  return out;
}

struct Table {
  GuardTable guards{64};
  Registry registry{guards};

  explicit Table(bool pool = false) {
    if (pool) registry.create_pool(1 << 20, 12, 1 << 18);
  }
  std::shared_ptr<Cache> add(std::string name = "", const Keys& keys = {}, std::uint64_t address = 0x10000,
                             std::size_t tensors = 2) {
    Geometry geometry;
    geometry.name = std::move(name);
    geometry.unit_bytes = 100;
    geometry.stride_bytes = 100;
    geometry.count = 8;
    for (std::size_t i = 0; i < tensors; ++i) geometry.tensors.push_back({address + i * 1000, 0, 0});
    return registry.add(geometry, host_kind, keys);
  }
  std::shared_ptr<Cache> allocate(std::string name, const Keys& keys, std::uint32_t tensors = 2) {
    return registry.allocate(std::move(name), Layout::rows, tensors, 100, 4, keys);
  }
  Kind resolving(const Target& target, Access access = Access::read) {
    return testing::kind_of([&] { registry.resolve(target, access); });
  }
  std::shared_ptr<Window> window(std::uint64_t id, std::vector<std::int64_t> units, Access access = Access::read,
                                 std::int64_t ttl_ms = 10'000) {
    return registry.open_window(id, units.data(), units.size(), access, ttl_ms);
  }
};

// --- caches ----------------------------------------------------------------------------------------------------------

static void a_cache_is_found_by_id_and_name_until_it_is_removed() {
  Table table;
  const auto cache = table.add("kv");
  CHECK(cache->geometry.cache_id == 1 && cache->geometry.kind == "host" && table.guards.alive(cache->guard));
  const Resolved found = table.registry.resolve(by_name("kv"), Access::read);
  CHECK(found.cache == cache && found.key_row == -1 && !found.consumed_by_pull && found.guards.size() == 1);
  CHECK(table.registry.resolve(by_id(1), Access::write).cache == cache && table.registry.find(1) == cache);
  CHECK(table.registry.remove(1) && !table.registry.remove(1));
  CHECK(!table.guards.alive(cache->guard) && table.registry.find(1) == nullptr);
  CHECK_FAILS(Kind::not_found, "name 'kv' does not exist", table.registry.resolve(by_name("kv"), Access::read));
  CHECK_FAILS(Kind::not_found, "cache 1 does not exist", table.registry.resolve(by_id(1), Access::read));
  CHECK(table.guards.open_count() == 0);
}

static void ids_are_never_reused_even_by_failed_calls() {
  Table table;
  table.add("kv");
  CHECK_FAILS(Kind::exists, "'kv' is taken by cache 1", table.add("kv"));
  CHECK_FAILS(Kind::invalid_argument, "no tensors", table.registry.add({}, host_kind, {}));
  CHECK(table.add()->geometry.cache_id == 4 && table.guards.open_count() == 2);
  CHECK(table.registry.cache_ids() == (std::vector<std::uint64_t>{1, 4}));
}

static void every_change_changes_the_epoch() {
  Table table(true);
  std::uint64_t last = table.guards.epoch();
  const auto changed = [&] { return std::exchange(last, table.guards.epoch()) != last; };
  const auto cache = table.allocate("kv", {request(1), request(2), prefix(3)});
  CHECK(changed());
  CHECK(table.registry.resolve(by_id(1), Access::read).epoch == last && !changed());
  CHECK(table.registry.remove_key(request(1)) && changed());
  CHECK(table.registry.consume(1, 1, 0, 2) && changed());
  CHECK(table.registry.remove_key(prefix(3)) && changed());
  CHECK(!table.registry.remove_key(prefix(3)) && !changed());
  CHECK(table.registry.deallocate(1) && changed());
}

static void addresses_lead_to_their_tensor() {
  Table table;
  const auto cache = table.add("kv");  // 800 bytes at 0x10000 and 0x10000 + 1000
  const auto found = table.registry.find_address(0x10000 + 1000 + 250, 550);
  CHECK(found && found->cache == cache && found->tensor == 1 && found->offset == 250);
  CHECK(!table.registry.find_address(0x10000 + 250, 551));
  CHECK(!table.registry.find_address(0x10000 + 800, 1) && !table.registry.find_address(0xffff, 1));
  CHECK(!table.registry.find_address(~std::uint64_t{0}, 5));
  table.registry.remove(1);
  CHECK(!table.registry.find_address(0x10000, 1));
}

static void addresses_of_interleaved_tensors_are_told_apart() {
  Table table;
  Geometry geometry;
  geometry.unit_bytes = 100;
  geometry.stride_bytes = 200;
  geometry.count = 8;
  geometry.tensors = {{0x10000, 0, 0}, {0x10000 + 100, 0, 0}};
  table.registry.add(geometry, host_kind, {});
  const auto first = table.registry.find_address(0x10000 + 400, 100);
  CHECK(first && first->tensor == 0 && first->offset == 400);
  const auto second = table.registry.find_address(0x10000 + 510, 90);
  CHECK(second && second->tensor == 1 && second->offset == 410);
  CHECK(!table.registry.find_address(0x10000 + 510, 91));
}

// --- keys ------------------------------------------------------------------------------------------------------------

static void keys_name_rows() {
  Table table;
  table.add("kv", {request(7), std::nullopt, prefix(7)});
  CHECK(table.registry.resolve(by_request(7), Access::read).key_row == 0);
  CHECK(table.registry.resolve(by_prefix(7), Access::read).key_row == 2);
  CHECK(!table.registry.resolve(by_request(7), Access::read).consumed_by_pull);
  CHECK_FAILS(Kind::not_found, "request 8 of model 0", table.registry.resolve(by_request(8), Access::read));
  CHECK_FAILS(Kind::not_found, "blocks key of model 5", table.registry.resolve(by_blocks_key(5), Access::read));
}

static void a_cache_may_be_keyed_by_its_id() {
  Table table(true);
  table.add();
  Geometry geometry;
  geometry.layout = Layout::mixed;
  geometry.unit_bytes = geometry.stride_bytes = 100;
  geometry.count = 4;
  geometry.tensors.push_back({0x10000, 0, 0});
  const auto registered = table.registry.add(geometry, host_kind, {}, true, KeyedBy::id);
  const auto allocated = table.registry.allocate("", Layout::mixed, 1, 100, 4, {}, KeyUse::never, KeyedBy::id);
  CHECK(registered->geometry.cache_id == 2 && allocated->geometry.cache_id == 3);
  CHECK(table.registry.resolve(by_blocks_key(2), Access::read).cache == registered && table.registry.resolve(by_blocks_key(3), Access::read).cache == allocated);
  CHECK(table.resolving(by_blocks_key(1)) == Kind::not_found && table.resolving(by_blocks_key(0)) == Kind::not_found);
  CHECK(table.registry.deallocate(3) && table.registry.remove(2) && table.resolving(by_blocks_key(3)) == Kind::not_found && table.resolving(by_blocks_key(2)) == Kind::not_found);
}

static void of_registered_keys_the_first_wins_and_of_blocks_keys_the_latest() {
  Table table;
  table.add("", {request(7), blocks_key(1)});
  table.add("", {request(7), blocks_key(1)});
  CHECK(table.registry.resolve(by_request(7), Access::read).cache->geometry.cache_id == 1);
  const Resolved blocks = table.registry.resolve(by_blocks_key(1), Access::read);
  CHECK(blocks.cache->geometry.cache_id == 2 && blocks.key_row == -1);
  table.registry.remove(1);  // takes its own keys along, not those of others
  CHECK(table.resolving(by_request(7)) == Kind::not_found && table.resolving(by_blocks_key(1)) == Kind::ok);
  table.registry.remove(2);
  CHECK(table.resolving(by_blocks_key(1)) == Kind::not_found);
}

static void keys_of_registered_caches_are_neither_removed_nor_consumed() {
  Table table;
  table.add("", {request(7)});
  CHECK(!table.registry.remove_key(request(7)) && !table.registry.remove_key(request(8)));
  CHECK(table.registry.consume(1, 0, 0, 2) && table.registry.consume(1, 0, 0, 2));
  CHECK(table.resolving(by_request(7)) == Kind::ok);
  CHECK(!table.registry.deallocate(1));
}

static void allocated_keys_must_be_fresh() {
  Table table(true);
  table.allocate("a", {request(1)});
  CHECK_FAILS(Kind::invalid_argument, "request 1 of model 0 is bound to cache 1", table.allocate("b", {request(1)}));
  CHECK_FAILS(Kind::invalid_argument, "request 2 of model 0 is named twice", table.allocate("b", {request(2), request(2)}));
  CHECK_FAILS(Kind::invalid_argument, "has 4 rows: 5 keys", table.allocate("b", Keys(5)));
  CHECK_FAILS(Kind::exists, "'a'", table.allocate("a", {}));
  CHECK_FAILS(Kind::out_of_memory, "pool of 1048576", table.allocate("c", {}, 1000));
  CHECK(table.registry.pool()->used_bytes() == 2 * page && table.guards.open_count() == 1);
  CHECK_FAILS(Kind::exists, "has a pool", table.registry.create_pool(1, 12, 1));
  Table vast;
  vast.registry.create_pool(std::size_t{1} << 62, 16, std::size_t{256} << 20);  // promised, not there
  CHECK_FAILS(Kind::out_of_memory, "cannot give 4294967295 times", vast.registry.allocate("c", Layout::blocks, UINT32_MAX, 1, 1, {}));
  CHECK_FAILS(Kind::out_of_memory, "cannot give 4294967295 times", vast.registry.allocate("c", Layout::blocks, UINT32_MAX, std::uint64_t{1} << 40, 1, {}));
  Table without;
  CHECK_FAILS(Kind::unsupported, "no pool", without.allocate("a", {}));
}

static void an_allocated_cache_can_be_mapped_and_used_at_once() {
  Table table(true);
  const auto cache = table.allocate("kv", {});
  CHECK(cache->geometry.mappable() && cache->readable && cache->writable && cache->allocated);
  const TensorPlace& second = cache->geometry.tensors[1];
  CHECK(second.offset == page && second.address == cache->places[1].address());
  CHECK(table.registry.segments().size() == 1 && table.registry.segments()[0]->id() == second.segment);
  CHECK(table.registry.remove(1));
  CHECK(table.registry.pool()->used_bytes() == 0 && table.registry.segments().empty());
}

static void a_request_key_is_consumed_once_all_tensors_were_pulled() {
  Table table(true);
  table.allocate("kv", {request(1), request(2), prefix(9)}, 4);
  CHECK(table.registry.resolve(by_request(1), Access::read).consumed_by_pull);
  CHECK(!table.registry.resolve(by_prefix(9), Access::read).consumed_by_pull);
  CHECK(table.registry.consume(1, 0, 0, 2));
  CHECK(table.registry.consume(1, 1, 2, 2));  // the other row counts for itself
  CHECK(table.resolving(by_request(1)) == Kind::ok && table.resolving(by_request(2)) == Kind::ok);
  CHECK(table.registry.consume(1, 0, 1, 3));
  CHECK(table.resolving(by_request(1)) == Kind::not_found && table.resolving(by_request(2)) == Kind::ok);
  CHECK(!table.registry.consume(1, 0, 0, 4));  // the second pull came too late
  CHECK(table.registry.consume(1, 2, 0, 4) && table.resolving(by_prefix(9)) == Kind::ok);
  CHECK(table.registry.consume(1, 3, 0, 4) && table.registry.consume(1, -1, 0, 4));
  CHECK(!table.registry.consume(99, 0, 0, 4));
}

static void the_owner_says_what_uses_its_keys_up() {
  Table table(true);
  const auto flagged = [&](const Target& target) { return table.registry.resolve(target, Access::read).consumed_by_pull; };
  table.registry.allocate("by row", Layout::rows, 2, 100, 4, {request(1), prefix(9)}, KeyUse::by_row);
  table.registry.allocate("never", Layout::rows, 2, 100, 4, {request(2)}, KeyUse::never);
  table.allocate("by key", {request(3)});
  CHECK(flagged(by_request(1)) && flagged(by_id(1)) && flagged(by_name("by row")) && !flagged(by_prefix(9)));
  CHECK(!flagged(by_request(2)) && !flagged(by_id(2)) && flagged(by_request(3)) && !flagged(by_id(3)));
  CHECK(table.registry.consume(1, 0, 0, 2) && table.resolving(by_request(1)) == Kind::not_found);
  CHECK(!flagged(by_id(1)));  // no key is left that could be used up
}

static void a_cache_for_its_own_process_is_reached_through_windows_alone() {
  Table table;
  Geometry geometry;
  geometry.name = "own";
  geometry.unit_bytes = geometry.stride_bytes = 100;
  geometry.count = 8;
  geometry.tensors = {{0x10000, 0, 0}};
  table.registry.add(geometry, host_kind, {}, false);
  for (const auto& named : {by_id(1), by_name("own")})
    for (const auto access : {Access::read, Access::write, Access::any})
      CHECK_FAILS(Kind::invalid_argument, "for its own process alone", table.registry.resolve(named, access));
  CHECK(!table.registry.find_address(0x10000, 10) && table.registry.find(1));
  CHECK(table.resolving(by_window(table.window(1, {3})->name)) == Kind::ok);
}

static void a_deallocated_cache_lives_until_its_last_request_key_is_gone() {
  Table table(true);
  const auto cache = table.allocate("kv", {request(1), request(2), prefix(3)});
  const auto window = table.window(1, {0});
  CHECK(table.registry.deallocate(1) && !table.registry.deallocate(1));
  CHECK(table.registry.find(1) == nullptr && table.registry.cache_ids().empty());
  CHECK(table.resolving(by_name("kv")) == Kind::not_found && !table.guards.alive(window->guard));
  CHECK(!table.registry.find_address(cache->geometry.tensors[0].address, 1));
  CHECK(table.resolving(by_request(1)) == Kind::ok && table.resolving(by_prefix(3)) == Kind::ok);
  CHECK(table.resolving(by_request(1), Access::write) == Kind::not_found);
  CHECK_FAILS(Kind::not_found, "cache 1", table.window(1, {0}));
  CHECK(table.allocate("kv", {})->geometry.cache_id == 2);  // the name is free
  CHECK(table.registry.consume(1, 0, 0, 2) && table.guards.alive(cache->guard));
  CHECK(table.registry.remove_key(request(2)) && !table.guards.alive(cache->guard));
  CHECK(table.resolving(by_prefix(3)) == Kind::not_found);
  CHECK(table.registry.pool()->used_bytes() == 2 * page);
  CHECK(table.registry.deallocate(2) && table.registry.pool()->used_bytes() == 0);
}

// --- windows ---------------------------------------------------------------------------------------------------------

static void a_window_stands_in_the_caches_place_until_closed() {
  Table table;
  const auto cache = table.add("kv");
  const auto window = table.window(1, {3, 4, 5, 1}, Access::write);
  CHECK(window->name.size() == 16 && (window->units == std::vector<UnitRun>{{3, 3}, {1, 1}}));
  const Resolved found = table.registry.resolve(by_window(window->name), Access::write);
  CHECK(found.cache == cache && found.window == window && found.guards == (std::vector{cache->guard, window->guard}));
  CHECK_FAILS(Kind::not_found, "is for writing", table.registry.resolve(by_window(window->name), Access::read));
  CHECK(table.registry.window_count() == 1 && table.registry.close_window(window->name));
  CHECK(!table.registry.close_window(window->name) && !table.guards.alive(window->guard));
  CHECK_FAILS(Kind::not_found, "window ", table.registry.resolve(by_window(window->name), Access::write));
  CHECK(table.guards.open_count() == 1 && table.registry.window_count() == 0);
}

static void windows_are_checked_when_opened() {
  Table table;
  table.add("kv");
  CHECK_FAILS(Kind::invalid_argument, "lists 3 twice", table.window(1, {3, 1, 3}));
  CHECK_FAILS(Kind::invalid_argument, "lists 1 twice", table.window(1, {1, 2, 0, 1}));
  CHECK_FAILS(Kind::not_found, "cache 9", table.window(9, {0}));
  CHECK_FAILS(Kind::invalid_argument, "at least one", table.window(1, {}));
  CHECK_FAILS(Kind::invalid_argument, "block 8 of cache 1 'kv' does not exist: it has 8", table.window(1, {7, 8}));
  CHECK_FAILS(Kind::invalid_argument, "-1", table.window(1, {-1}));
  CHECK_FAILS(Kind::invalid_argument, "0 ms", table.window(1, {0}, Access::read, 0));
  CHECK_FAILS(Kind::invalid_argument, "at most 8000000 runs", table.registry.open_window(1, std::vector<UnitRun>(8'000'001, {0, 1}), Access::read, 1000));
  CHECK(table.guards.open_count() == 1);
}

static void a_window_ends_when_its_time_is_up() {
  Table table;
  table.add("kv");
  int woken = 0;
  table.registry.window_opened = [&](std::int64_t) { ++woken; };
  const auto late = table.window(1, {0}, Access::read, 50'000);
  const auto soon = table.window(1, {1}, Access::read, 10'000);
  const auto later = table.window(1, {1}, Access::read, std::numeric_limits<std::int64_t>::max());
  CHECK(woken == 2);
  CHECK(table.registry.end_due_windows(now_ns()) == soon->until.at_ns);
  CHECK(table.registry.end_due_windows(soon->until.at_ns) == late->until.at_ns);
  CHECK(!table.guards.alive(soon->guard) && table.guards.alive(late->guard) && table.registry.window_count() == 2);
  CHECK(table.guards.open_count() == 3);  // the slot came back although nobody closed the window
  CHECK(!table.registry.close_window(soon->name));
  CHECK(table.registry.end_due_windows(std::numeric_limits<std::int64_t>::max()) == std::numeric_limits<std::int64_t>::max());
  CHECK(!table.guards.alive(later->guard) && table.guards.open_count() == 1);
}

static void time_does_not_wait_for_whoever_is_inside_but_close_does() {
  Table table;
  table.add("kv");
  const auto window = table.window(1, {0});
  const std::int64_t due = window->until.at_ns;
  CHECK(table.guards.enter(window->guard));
  CHECK(table.registry.end_due_windows(due) < std::numeric_limits<std::int64_t>::max());  // to be seen to again
  CHECK(!table.guards.alive(window->guard) && table.guards.open_count() == 2);
  std::atomic<bool> left{false};
  std::thread closer([&] {
    CHECK(!table.registry.close_window(window->name));
    CHECK(left);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  left = true;
  table.guards.leave(window->guard);
  closer.join();
  CHECK(table.registry.end_due_windows(due) == std::numeric_limits<std::int64_t>::max());
  CHECK(table.guards.open_count() == 1);

  const auto unattended = table.window(1, {0});
  CHECK(table.guards.enter(unattended->guard));
  table.registry.end_due_windows(unattended->until.at_ns);
  table.guards.leave(unattended->guard);
  CHECK(table.registry.end_due_windows(due) == std::numeric_limits<std::int64_t>::max());
  CHECK(table.guards.open_count() == 1);
}

static void a_window_past_its_time_is_not_found_even_before_anybody_ended_it() {
  Table table;
  table.add("kv");
  const auto window = table.window(1, {0}, Access::read, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(3));
  CHECK(table.resolving(by_window(window->name)) == Kind::not_found);
}

static void windows_end_with_their_cache() {
  Table table;
  table.add("kv");
  const auto window = table.window(1, {0}), expired = table.window(1, {1});
  CHECK(table.guards.enter(expired->guard));
  table.registry.end_due_windows(now_ns() - 1);
  table.guards.leave(expired->guard);
  CHECK(table.registry.remove(1) && !table.guards.alive(window->guard) && !table.registry.close_window(window->name));
  CHECK(table.registry.window_count() == 0 && table.guards.open_count() == 0);
}

// --- many at once ----------------------------------------------------------------------------------------------------

static void removing_waits_for_whoever_is_inside_and_a_second_call_too() {
  Table table(true);
  const auto cache = table.allocate("kv", {});
  CHECK(table.guards.enter(cache->guard));
  std::atomic<bool> left{false};
  std::vector<std::thread> threads;
  std::atomic<int> removed{0};
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      removed += table.registry.remove(1) ? 1 : 0;
      CHECK(left);
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(table.registry.pool()->used_bytes() == 2 * page);  // not given back under somebody's hands
  CHECK(table.resolving(by_id(1)) == Kind::not_found);
  left = true;
  table.guards.leave(cache->guard);
  for (std::thread& thread : threads) thread.join();
  CHECK(removed == 1 && table.registry.pool()->used_bytes() == 0);
}

static void closing_ends_everything_and_refuses_the_rest() {
  Table table(true);
  const auto cache = table.allocate("kv", {request(1)});
  table.registry.deallocate(1);
  const auto second = table.add("b");
  const auto window = table.window(2, {0});
  table.registry.close();
  table.registry.close();
  CHECK(!table.guards.alive(cache->guard) && !table.guards.alive(second->guard) && !table.guards.alive(window->guard));
  CHECK(table.guards.open_count() == 0 && table.registry.pool()->used_bytes() == 0);
  CHECK_FAILS(Kind::closed, "closed", table.add("c"));
  CHECK_FAILS(Kind::closed, "closed", table.window(2, {0}));
  CHECK(table.resolving(by_id(2)) == Kind::not_found);
}

// An answer of resolve() is good as long as its epoch is the table's: whoever checks after the fact never mistakes.
static void threads_register_resolve_and_remove_without_leaks() {
  Table table(true);
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 150; ++i) {
        const auto key = request(static_cast<std::uint64_t>(t * 1000 + i));
        const auto cache = table.allocate("", {key});
        const std::uint64_t id = cache->geometry.cache_id;
        const Resolved found = table.registry.resolve(by_request(key.id), Access::read);
        CHECK(found.cache == cache);
        if (table.guards.epoch() == found.epoch) CHECK(table.guards.alive(found.guards[0]));
        const auto window = table.window(id, {i % 4}, Access::read, 1 + i % 3);
        if (table.guards.enter(window->guard)) {
          table.registry.end_due_windows(now_ns());
          table.guards.leave(window->guard);
        }
        if (i % 3 == 0) table.registry.close_window(window->name);
        if (i % 2 == 0) {
          CHECK(table.registry.deallocate(id) && table.registry.consume(id, 0, 0, 2));
        } else {
          CHECK(table.registry.remove(id));
        }
        CHECK(table.resolving(by_id(id)) == Kind::not_found);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  table.registry.end_due_windows(std::numeric_limits<std::int64_t>::max());
  CHECK(table.guards.open_count() == 0 && table.registry.pool()->used_bytes() == 0);
}

static void a_target_says_what_it_is() {
  CHECK(by_name("kv").label() == "name 'kv'" && by_id(3).label() == "cache 3");
  CHECK(by_request(7).label() == "request 7 of model 0" && by_prefix(7).label() == "prefix 7 of model 0");
  CHECK(by_window(std::string("\x01\xff\x02", 3)).label() == "window 01ff02");
  Target addresses = target(Target::By::addresses);
  addresses.addresses = {1, 2};
  CHECK(addresses.label() == "2 addresses");
  Table table;
  CHECK_FAILS(Kind::invalid_argument, "cannot be named here", table.registry.resolve(addresses, Access::write));
}

int main() {
  a_cache_is_found_by_id_and_name_until_it_is_removed();
  ids_are_never_reused_even_by_failed_calls();
  every_change_changes_the_epoch();
  addresses_lead_to_their_tensor();
  addresses_of_interleaved_tensors_are_told_apart();
  keys_name_rows();
  a_cache_may_be_keyed_by_its_id();
  of_registered_keys_the_first_wins_and_of_blocks_keys_the_latest();
  keys_of_registered_caches_are_neither_removed_nor_consumed();
  allocated_keys_must_be_fresh();
  an_allocated_cache_can_be_mapped_and_used_at_once();
  a_request_key_is_consumed_once_all_tensors_were_pulled();
  the_owner_says_what_uses_its_keys_up();
  a_cache_for_its_own_process_is_reached_through_windows_alone();
  a_deallocated_cache_lives_until_its_last_request_key_is_gone();
  a_window_stands_in_the_caches_place_until_closed();
  windows_are_checked_when_opened();
  a_window_ends_when_its_time_is_up();
  time_does_not_wait_for_whoever_is_inside_but_close_does();
  a_window_past_its_time_is_not_found_even_before_anybody_ended_it();
  windows_end_with_their_cache();
  removing_waits_for_whoever_is_inside_and_a_second_call_too();
  closing_ends_everything_and_refuses_the_rest();
  threads_register_resolve_and_remove_without_leaks();
  a_target_says_what_it_is();
  return TEST_RESULT();
}
