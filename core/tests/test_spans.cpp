// Transfers by spans: between caches, and between a cache and memory that nobody has registered.
#include <cstdlib>
#include <random>

#include "nodes.hpp"

using namespace kvferry;
using namespace kvferry::testing;

using Memory = std::vector<std::uint8_t>;
using Listed = std::vector<Run>;

static std::uint64_t at(const void* address) { return reinterpret_cast<std::uint64_t>(address); }

static std::shared_ptr<const Moves> spans(const Listed& listed) {
  static_assert(sizeof(Run) == 3 * sizeof(std::uint64_t));
  return Moves::make_spans(reinterpret_cast<const std::uint64_t*>(listed.data()), listed.size());
}

// The same spans where one side is counted from an address.
static Listed moved(Listed listed, std::uint64_t source, std::uint64_t destination) {
  for (auto& run : listed) run.source += source, run.destination += destination;
  return listed;
}

// Disjoint at the destination, in any order, some of them neighbours on both sides.
static Listed scattered(std::mt19937& random, std::size_t n, std::size_t source_bytes, std::size_t destination_bytes) {
  Listed listed;
  const auto room = destination_bytes / n;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t bytes = random() % (room - 1) + 1, into = i * room + random() % (room - bytes);
    const std::uint64_t from = random() % (source_bytes - bytes);
    if (bytes > 2 && random() % 4 == 0) {
      const auto cut = random() % (bytes - 1) + 1;
      listed.push_back({from, into, cut});
      listed.push_back({from + cut, into + cut, bytes - cut});
    } else {
      listed.push_back({from, into, bytes});
    }
  }
  if (random() % 2 == 0) std::shuffle(listed.begin(), listed.end(), random);
  return listed;
}

static Memory noise(std::mt19937& random, std::size_t bytes) {
  Memory memory(bytes);
  for (auto& byte : memory) byte = static_cast<std::uint8_t>(random());
  return memory;
}

static Memory modelled(const Memory& source, Memory destination, const Listed& listed) {
  for (const auto& run : listed) std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(run.source), run.bytes, destination.begin() + static_cast<std::ptrdiff_t>(run.destination));
  return destination;
}

static Memory bytes_of(const Cache& cache) {
  Memory bytes(cache.geometry.tensor_extent());
  if (cache.kind == host_kind)
    std::memcpy(bytes.data(), reinterpret_cast<const void*>(cache.geometry.tensors[0].address), bytes.size());
  else
    test_kind_read(bytes.data(), cache.geometry.tensors[0].address, bytes.size());
  return bytes;
}

static void set_bytes(const Cache& cache, const Memory& bytes) {
  if (cache.kind == host_kind)
    std::memcpy(reinterpret_cast<void*>(cache.geometry.tensors[0].address), bytes.data(), bytes.size());
  else
    test_kind_write(cache.geometry.tensors[0].address, bytes.data(), bytes.size());
}

static std::shared_ptr<Pull> pull_to_memory(Pair& pair, Target target, const Listed& listed, unsigned transports = any_transport, int timeout_ms = 5000) {
  return pair.here->pull(pair.link, std::move(target), std::nullopt, spans(listed), Deadline::after_ms(timeout_ms), transports);
}

static std::shared_ptr<Push> push_memory(Pair& pair, Target target, const Listed& listed, unsigned transports = any_transport, int timeout_ms = 5000) {
  return pair.here->push(pair.link, std::nullopt, std::move(target), spans(listed), Deadline::after_ms(timeout_ms), transports);
}

// --- every byte ------------------------------------------------------------------------------------------------------

static void the_listed_bytes_arrive_and_no_others_change() {
  Pair pair;
  pair.make_pools();
  constexpr std::size_t bytes = 1 << 20;
  const auto pool = allocated(pair.there->registry(), {"pool", 1, 256, 4096});
  Owned owned(pair.there->registry(), {"owned", 1, 4096, 256, 0, Layout::rows});
  enable_test_kind();
  Owned special(pair.there->registry(), {"special", 1, 256, 4096}, {}, test_kind), mine_special(pair.here->registry(), {"", 1, 256, 4096}, {}, test_kind);
  Owned mine(pair.here->registry(), {"", 1, 8192, 128});
  const auto mine_pool = allocated(pair.here->registry(), {"mine", 1, 256, 4096});
  Memory memory(bytes);
  std::mt19937 random(7);
  const auto one_round = [&](const std::shared_ptr<Cache>& far, const std::shared_ptr<Cache>& near, unsigned transports, bool push, std::size_t n) {
    const auto there = noise(random, bytes), here = noise(random, bytes);
    set_bytes(*far, there);
    if (near)
      set_bytes(*near, here);
    else
      std::copy(here.begin(), here.end(), memory.begin());
    const auto listed = scattered(random, n, bytes, bytes);
    const auto target = random() % 2 == 0 ? by_name(far->geometry.name) : by_id(far->geometry.cache_id);
    const auto start = near ? std::uint64_t{0} : at(memory.data());
    const auto moves = spans(push ? moved(listed, start, 0) : moved(listed, 0, start));
    const auto own = near ? std::optional(near->geometry.cache_id) : std::nullopt;
    const std::shared_ptr<Operation> operation =
        push ? std::shared_ptr<Operation>(pair.here->push(pair.link, own, target, moves, Deadline::after_ms(5000), transports))
             : std::shared_ptr<Operation>(pair.here->pull(pair.link, target, own, moves, Deadline::after_ms(5000), transports));
    if (random() % 2 == 0) {
      operation->run_here();
    } else {
      operation->start();
      CHECK(operation->wait(Deadline::after_ms(6000)));
    }
    if (!operation->result().outcome.ok()) CHECK_ENDS(Kind::ok, "", operation->result());
    CHECK(static_cast<unsigned>(operation->result().transport) == transports);
    std::uint64_t total = 0;
    for (const auto& run : listed) total += run.bytes;
    CHECK(operation->result().bytes == total);
    const auto now_here = near ? bytes_of(*near) : memory;
    CHECK(bytes_of(*far) == (push ? modelled(here, there, listed) : there));
    CHECK(now_here == (push ? here : modelled(there, here, listed)));
  };
  for (const std::size_t n : {1, 3, 200, 5000}) {
    for (const auto& near : {std::shared_ptr<Cache>(), mine.cache, mine_pool, mine_special.cache}) {
      one_round(pool, near, by_map, false, n);
      one_round(owned.cache, near, by_cma, false, n);
      one_round(owned.cache, near, by_socket, false, n);
      one_round(special.cache, near, by_socket, false, n);
    }
    for (const auto& far : {pool, owned.cache, special.cache}) {
      one_round(far, nullptr, by_cma, true, n);
      one_round(far, nullptr, by_socket, true, n);
      one_round(far, mine.cache, by_cma, true, n);
      one_round(far, mine_pool, by_map, true, n);
      one_round(far, mine_special.cache, by_socket, true, n);
    }
  }
  CHECK(pair.here->statistics().slots_open == 3 && pair.there->statistics().slots_open == 3);  // of the caches
}

// --- what is refused -------------------------------------------------------------------------------------------------

static void what_is_wrong_is_said_before_the_first_byte() {
  Pair pair;
  Owned two(pair.there->registry(), {"two"}), gaps(pair.there->registry(), {"gaps", 1, 8, 4096, 64}), far(pair.there->registry(), {"far", 1, 8, 4096});
  fill(*far.cache, 3);
  Memory memory(8192, 9);
  const auto start = at(memory.data());
  for (const unsigned transports : {by_cma, by_socket}) {
    const auto wrong = [&](Kind kind, const char* words, const Result& result) {
      CHECK_ENDS(kind, words, result);
      CHECK(!result.outcome.touched && result.outcome.settled);
    };
    for (const auto* name : {"two", "gaps"}) {
      const auto* words = *name == 't' ? "has 2 tensors" : "has gaps";
      wrong(Kind::invalid_argument, words, pull_to_memory(pair, by_name(name), {{0, start, 8}}, transports)->run_here());
      wrong(Kind::invalid_argument, words, push_memory(pair, by_name(name), {{start, 0, 8}}, transports)->run_here());
    }
    wrong(Kind::invalid_argument, "span 1", pull_to_memory(pair, by_name("far"), {{0, start, 8}, {8 * 4096 - 7, start, 8}}, transports)->run_here());
    wrong(Kind::invalid_argument, "span 1", push_memory(pair, by_name("far"), {{start, 0, 8}, {start, 8 * 4096 - 7, 8}}, transports)->run_here());
    wrong(Kind::not_found, "none", pull_to_memory(pair, by_name("none"), {{0, start, 8}}, transports)->run_here());
    wrong(Kind::not_found, "none", push_memory(pair, by_name("none"), {{start, 0, 8}}, transports)->run_here());
    wrong(Kind::invalid_argument, "by addresses", push_memory(pair, by_addresses({address_of(*far.cache, 0, 0)}), {{start, 0, 8}}, transports)->run_here());
  }
  CHECK_ENDS(Kind::unsupported, "allow cma or socket", push_memory(pair, by_name("far"), {{start, 0, 8}}, by_map)->run_here());
  CHECK_FAILS(Kind::invalid_argument, "MEMORY has no blocks", pair.here->pull(pair.link, by_name("far"), std::nullopt, whole(), Deadline::after_ms(10), any_transport));
  CHECK_FAILS(Kind::invalid_argument, "MEMORY has no blocks", pair.here->push(pair.link, std::nullopt, by_name("far"), whole(), Deadline::after_ms(10), any_transport));
  CHECK_FAILS(Kind::invalid_argument, "not within one", pair.there->copy(far.id(), far.id(), *spans({{0, 100, 8}})));
  CHECK(memory == Memory(8192, 9) && holds_all(*far.cache, 3));
}

static void memory_that_is_not_there_is_named_and_nothing_moves() {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  Pair pair;
  Owned far(pair.there->registry(), {"far", 1, 8, 4096});
  fill(*far.cache, 3);
  auto* memory = static_cast<char*>(mmap(nullptr, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  const auto start = at(memory);
  mprotect(memory + page, page, PROT_READ);
  mprotect(memory + 2 * page, page, PROT_NONE);
  munmap(memory + 3 * page, page);
  for (const unsigned transports : {by_cma, by_socket})
    for (const bool read : {true, false}) {
      const auto ends = [&](const char* words, std::uint64_t address) {
        const auto pulled = read ? Result{} : pull_to_memory(pair, by_name("far"), {{0, start, 64}, {64, address, 64}}, transports)->run_here();
        const auto result = read ? push_memory(pair, by_name("far"), {{start, 0, 64}, {address, 64, 64}}, transports)->run_here() : pulled;
        CHECK_ENDS(*words == 'o' ? Kind::ok : Kind::invalid_argument, *words == 'o' ? "" : words, result);
        CHECK(result.outcome.ok() || (!result.outcome.touched && result.outcome.settled));
      };
      char at_page[64];
      std::snprintf(at_page, sizeof at_page, "at 0x%llx", static_cast<unsigned long long>(start + 2 * page));
      ends(read ? "ok" : "span 1 (64 bytes at", start + page);
      ends(read ? "is not readable" : "is not writable", start + 2 * page + 8);
      ends(read ? at_page : "span 1", start + 2 * page - 8);
      unsigned char there;
      if (mincore(memory + 3 * page, page, &there) != 0) ends("span 1", start + 3 * page);  // unless another thread has taken it
      ends("span 1", 8);
      ends("span 1", (std::uint64_t{1} << 63) - 100);
    }
  for (std::size_t i = 0; i < page; ++i) CHECK(memory[i] == 0);
  munmap(memory, 3 * page);
}

// Where the kernel may have to wait for a disk, a stream is used, on a thread of its own.
static void memory_of_a_file_goes_by_stream() {
  Pair pair;
  Owned far(pair.there->registry(), {"far", 1, 8, 4096});
  fill(*far.cache, 3);
  char path[] = "/tmp/kvferry-test-XXXXXX";
  const int fd = mkstemp(path);
  unlink(path);
  CHECK(ftruncate(fd, 4096) == 0);
  auto* mapped = static_cast<char*>(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  for (int round = 0; round < 2; ++round) {
    std::memset(mapped, 0, 4096);
    CHECK_BY(socket, pull_to_memory(pair, by_name("far"), {{0, at(mapped), 4096}})->run_here());
    CHECK(std::memcmp(mapped, reinterpret_cast<void*>(address_of(*far.cache, 0, 0)), 4096) == 0);
    CHECK_BY(socket, push_memory(pair, by_name("far"), {{at(mapped), 4096, 4096}})->run_here());
    CHECK(holds(*far.cache, 0, 1, 3, 0, 0));
  }
  CHECK_ENDS(Kind::unsupported, "", pull_to_memory(pair, by_name("far"), {{0, at(mapped), 4096}}, by_cma)->run_here());
  munmap(mapped, 4096);
  close(fd);
}

// --- windows and ends ------------------------------------------------------------------------------------------------

static void a_window_is_the_edge_of_every_span() {
  Pair pair;
  pair.make_pools();
  const auto pool = allocated(pair.there->registry(), {"pool", 1, 64, 64});
  Owned owned(pair.there->registry(), {"owned", 1, 64, 64});
  Memory memory(4096, 9);
  const auto start = at(memory.data());
  auto& registry = pair.there->registry();
  const Numbers units{10, 11, 12, 40};  // bytes 640 to 832, and 2560 to 2624
  for (const unsigned transports : {by_map, by_cma, by_socket}) {
    const auto& cache = transports == by_map ? pool : owned.cache;
    fill(*cache, 3);
    const auto readable = registry.open_window(cache->geometry.cache_id, units.data(), units.size(), Access::read, 60'000);
    const auto writable = registry.open_window(cache->geometry.cache_id, units.data(), units.size(), Access::write, 60'000);
    const auto read = [&](std::uint64_t offset, std::uint64_t bytes) { return pull_to_memory(pair, by_window(readable->name), {{2560, start, 64}, {offset, start + 64, bytes}}, transports)->run_here(); };
    CHECK(read(640, 192).outcome.ok() && read(831, 1).outcome.ok() && read(2600, 24).outcome.ok());
    CHECK(std::memcmp(memory.data() + 64, reinterpret_cast<void*>(address_of(*cache, 0, 0) + 2600), 24) == 0);
    const auto before = memory;
    for (const auto& [offset, bytes] : {std::pair{639, 2}, {831, 2}, {0, 1}, {640, 1984}, {2624, 1}}) {
      const auto result = read(static_cast<std::uint64_t>(offset), static_cast<std::uint64_t>(bytes));
      CHECK_ENDS(Kind::not_found, "span 1", result);
      CHECK(!result.outcome.touched && memory == before);
    }
    const unsigned push_by = transports == by_map ? by_cma : transports;
    const auto write = [&](std::uint64_t offset, std::uint64_t bytes) { return push_memory(pair, by_window(writable->name), {{start, 2560, 64}, {start + 64, offset, bytes}}, push_by)->run_here(); };
    const auto far_before = bytes_of(*cache);
    for (const auto& [offset, bytes] : {std::pair{639, 2}, {831, 2}, {0, 1}, {640, 1984}, {2624, 1}}) {
      const auto result = write(static_cast<std::uint64_t>(offset), static_cast<std::uint64_t>(bytes));
      CHECK_ENDS(Kind::not_found, "span 1", result);
      CHECK(!result.outcome.touched && bytes_of(*cache) == far_before);
    }
    CHECK(write(640, 192).outcome.ok() && bytes_of(*cache) == modelled(memory, far_before, {{0, 2560, 64}, {64, 640, 192}}));
    CHECK_ENDS(Kind::not_found, "for writing", pull_to_memory(pair, by_window(writable->name), {{640, start, 1}}, transports)->run_here());
    CHECK_ENDS(Kind::not_found, "for reading", push_memory(pair, by_window(readable->name), {{start, 640, 1}}, push_by)->run_here());
    CHECK(registry.close_window(readable->name) && registry.close_window(writable->name));
    CHECK_ENDS(Kind::not_found, "", read(640, 1));
    CHECK_ENDS(Kind::not_found, "", write(640, 1));
  }
}

// A push of memory that ends early is over: nothing more of it is read, and nobody can ask for it.
static void a_push_of_memory_ends_when_its_pusher_says_so() {
  Pair pair;
  constexpr std::size_t bytes = 32 << 20;
  Owned far(pair.there->registry(), {"far", 1, bytes / 4096, 4096, 0, Layout::mixed, true});
  const Twice memory(bytes);
  Listed listed;
  for (std::size_t i = 0; i < bytes / 4096; ++i) listed.push_back({memory.address() + i * 4096, (bytes / 4096 - 1 - i) * 4096, 4096});
  std::mt19937 random(3);
  int cancelled = 0;
  for (int round = 0; round < 20; ++round) {
    const unsigned transports = round % 2 == 0 ? by_cma : by_socket;
    const auto push = push_memory(pair, by_name("far"), listed, transports);
    push->start();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 8000));
    push->cancel();
    CHECK(push->wait(Deadline::after_ms(5000)));
    CHECK(push->result().outcome.ok() || push->result().outcome.kind == Kind::cancelled);
    cancelled += push->result().outcome.kind == Kind::cancelled;
    CHECK(!pair.link->offered(push->number()));
  }
  std::printf("%d of 20 pushes were cancelled in time\n", cancelled);
  CHECK_BY(cma, push_memory(pair, by_name("far"), listed)->run_here());
  CHECK(pair.here->statistics().slots_open == 0 && pair.there->statistics().slots_open == 1);
  const auto late = push_memory(pair, by_name("far"), listed, any_transport, 0)->run_here();
  CHECK(late.outcome.kind == Kind::deadline);
}

// Nobody names what is not his: the number of a push is good for its own stream, on its own link, while it lasts.
static void the_memory_of_a_process_cannot_be_named() {
  Pair pair;
  Owned mine(pair.here->registry(), {"mine", 1, 8, 4096}), far(pair.there->registry(), {"far", 1, 8, 4096});
  Target target;
  target.by = Target::By::push;
  for (const std::uint64_t number : {0, 1, 2, 3}) {
    target.id = number;
    for (const unsigned transports : {any_transport, by_socket}) {
      const auto kind = pulled(*pair.here, pair.link, target, *mine.cache, spans({{0, 0, 8}}), transports).outcome.kind;
      CHECK(kind == (transports == by_socket ? Kind::not_found : Kind::invalid_argument));
      CHECK_ENDS(Kind::invalid_argument, "cannot be named here", pushed(*pair.here, pair.link, *mine.cache, target, spans({{0, 0, 8}}), transports));
    }
  }
}

static void a_closing_node_ends_what_moves_its_memory() {
  for (const unsigned transports : {by_cma, by_socket})
    for (const bool push : {true, false}) {
      Pair pair;
      constexpr std::size_t bytes = 32 << 20;
      Owned far(pair.there->registry(), {"far", 1, bytes / 4096, 4096, 0, Layout::mixed, true});
      const Twice memory(bytes);
      Listed listed;
      for (std::size_t i = 0; i < bytes / 4096; ++i) {
        const auto here = memory.address() + i * 4096, there = (bytes / 4096 - 1 - i) * 4096;
        listed.push_back(push ? Run{here, there, 4096} : Run{there, here, 4096});
      }
      const auto operation = push ? std::shared_ptr<Operation>(push_memory(pair, by_name("far"), listed, transports))
                                  : std::shared_ptr<Operation>(pull_to_memory(pair, by_name("far"), listed, transports));
      operation->start();
      std::this_thread::sleep_for(std::chrono::microseconds(500));
      pair.here->close();
      CHECK(operation->done());
      CHECK(operation->result().outcome.ok() || operation->result().outcome.kind == Kind::closed);
    }
}

static void a_hundred_thousand_spans_are_one_transfer() {
  Pair pair;
  pair.make_pools();
  constexpr std::size_t n = 100'000;
  const auto pool = allocated(pair.there->registry(), {"pool", 1, 6400, 4096});
  Owned owned(pair.there->registry(), {"owned", 1, 6400, 4096});
  std::mt19937 random(4);
  Memory memory(26 << 20);
  const auto content = noise(random, 6400 * 4096);
  set_bytes(*pool, content), set_bytes(*owned.cache, content);
  for (const auto& [name, transports] : {std::pair{"pool", by_map}, {"owned", by_cma}, {"owned", by_socket}}) {
    const auto before = noise(random, memory.size());
    std::copy(before.begin(), before.end(), memory.begin());
    auto listed = scattered(random, n, content.size(), memory.size());
    const auto begun = now_ns();
    const auto operation = pull_to_memory(pair, by_name(name), moved(listed, 0, at(memory.data())), transports, 20'000);
    CHECK(operation->run_here().outcome.ok() && static_cast<unsigned>(operation->result().transport) == transports);
    const auto took = now_ns() - begun;
    std::printf("%zu spans by %s: %.1f ms\n", listed.size(), std::string(transport_name(operation->result().transport)).c_str(), static_cast<double>(took) / 1e6);
    CHECK(memory == modelled(content, before, listed));
  }
}

int main() {
  the_listed_bytes_arrive_and_no_others_change();
  what_is_wrong_is_said_before_the_first_byte();
  memory_that_is_not_there_is_named_and_nothing_moves();
  memory_of_a_file_goes_by_stream();
  a_window_is_the_edge_of_every_span();
  a_push_of_memory_ends_when_its_pusher_says_so();
  the_memory_of_a_process_cannot_be_named();
  a_closing_node_ends_what_moves_its_memory();
  a_hundred_thousand_spans_are_one_transfer();
  return TEST_RESULT();
}
