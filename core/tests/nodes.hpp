// Nodes of one process, linked over loopback, and caches whose bytes say where they are from.
//
// Every word of a cache is a number made from a tag, the tensor, the unit and the word's place, so that a byte in the
// wrong place is found whatever came there.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../inner.hpp"
#include "../node.hpp"
#include "check.hpp"

namespace kvferry::testing {

constexpr unsigned by_map = static_cast<unsigned>(Transport::map);
constexpr unsigned by_cma = static_cast<unsigned>(Transport::cma);
constexpr unsigned by_socket = static_cast<unsigned>(Transport::socket);
constexpr unsigned any_transport = by_map | by_cma | by_socket;

inline NodeOptions options(std::uint64_t id, unsigned transports = any_transport, unsigned lanes = 2) {
  NodeOptions made;
  made.node_id = id;
  made.transports = transports;
  made.lanes = lanes;
  made.copy_threads = 3;  // as on a bigger machine
  return made;
}

// --- targets ---------------------------------------------------------------------------------------------------------

inline Target by_id(std::uint64_t id) {
  Target target;
  target.id = id;
  return target;
}
inline Target by_name(std::string name) {
  Target target;
  target.by = Target::By::name;
  target.name = std::move(name);
  return target;
}
inline Target by_window(std::string name) {
  auto target = by_name(std::move(name));
  target.by = Target::By::window;
  return target;
}
inline Target by_key(Target::By by, std::uint64_t id, std::uint64_t model = 0) {
  Target target;
  target.by = by;
  target.id = id;
  target.model = model;
  return target;
}
inline Target by_request(std::uint64_t id) { return by_key(Target::By::request, id); }
inline Target by_addresses(std::vector<std::uint64_t> addresses) {
  Target target;
  target.by = Target::By::addresses;
  target.addresses = std::move(addresses);
  return target;
}

// --- caches ----------------------------------------------------------------------------------------------------------

using Keys = std::vector<std::optional<Key>>;



struct Shape {
  std::string name;
  std::size_t tensors = 2, count = 8, unit_bytes = 4096, gap_bytes = 0;
  Layout layout = Layout::mixed;
  bool raced = false;  // the test writes and reads while nodes do: see Twice
};

// Memory that is mapped twice. The node has it at one address, the test looks at it at another, so that the thread
// sanitizer is not told of bytes that may change while they are copied, which the design allows.
class Twice {
 public:
  explicit Twice(std::size_t bytes) : bytes_(bytes) {
    const Descriptor memory(memfd_create("kvferry-segment of a test", MFD_CLOEXEC));  // that nobody makes shorter: copied plainly
    CHECK(ftruncate(memory.get(), static_cast<off_t>(bytes)) == 0);
    for (auto* at : {&node_, &test_}) *at = static_cast<std::byte*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0));
    const std::lock_guard lock(mutex());
    all()[address()] = this;
  }
  ~Twice() {
    const std::lock_guard lock(mutex());
    all().erase(address());
    munmap(node_, bytes_);
    munmap(test_, bytes_);
  }
  Twice(const Twice&) = delete;
  Twice& operator=(const Twice&) = delete;
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(node_); }

  // Where the test finds what a node has at `address`.
  static void* seen(std::uint64_t address) {
    const std::lock_guard lock(mutex());
    auto it = all().upper_bound(address);
    if (it != all().begin() && address - (--it)->first < it->second->bytes_) return it->second->test_ + (address - it->first);
    return reinterpret_cast<void*>(address);
  }

 private:
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  static std::map<std::uint64_t, Twice*>& all() {
    static std::map<std::uint64_t, Twice*> one;
    return one;
  }
  std::size_t bytes_;
  std::byte *node_ = nullptr, *test_ = nullptr;
};

// Memory that its caller owns, registered.
struct Owned {
  Registry& registry;
  std::vector<std::vector<std::uint64_t>> memory;
  std::vector<std::unique_ptr<Twice>> twice;
  std::shared_ptr<Cache> cache;

  Owned(Registry& of_node, const Shape& shape, const Keys& keys = {}, KindId kind = host_kind) : registry(of_node) {
    Geometry geometry;
    geometry.name = shape.name;
    geometry.layout = shape.layout;
    geometry.unit_bytes = shape.unit_bytes;
    geometry.stride_bytes = shape.unit_bytes + shape.gap_bytes;
    geometry.count = shape.count;
    const auto bytes = geometry.stride_bytes * shape.count;
    for (std::size_t i = 0; i < shape.tensors; ++i) {
      if (kind != host_kind) {
        geometry.tensors.push_back({test_kind_allocate(bytes), 0, 0});
        continue;
      }
      if (shape.raced) {
        twice.push_back(std::make_unique<Twice>(bytes));
        geometry.tensors.push_back({twice.back()->address(), 0, 0});
        continue;
      }
      memory.emplace_back(bytes / 8);
      geometry.tensors.push_back({reinterpret_cast<std::uint64_t>(memory.back().data()), 0, 0});
    }
    cache = registry.add(geometry, kind, keys);
  }
  ~Owned() { registry.remove(id()); }  // before its memory goes, as everybody must
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  std::uint64_t id() const { return cache->geometry.cache_id; }
};

inline std::shared_ptr<Cache> allocated(Registry& registry, const Shape& shape, const Keys& keys = {}) {
  return registry.allocate(shape.name, shape.layout, static_cast<std::uint32_t>(shape.tensors), shape.unit_bytes, shape.count, keys);
}

inline std::uint64_t word_of(std::uint64_t tag, std::uint64_t tensor, std::uint64_t unit, std::uint64_t place) {
  return (tag << 56) ^ (tensor << 48) ^ (unit << 24) ^ place ^ 0x0080'0000'0000'0000ULL;
}

// Two loops over words of the test's own, which the sanitizers need not look at.
__attribute__((no_sanitize("thread", "address"))) inline void make_words(std::uint64_t* words, std::size_t n, std::uint64_t tag,
                                                                          std::uint64_t tensor, std::uint64_t unit) {
  for (std::size_t i = 0; i < n; ++i) words[i] = word_of(tag, tensor, unit, i);
}
__attribute__((no_sanitize("thread", "address"))) inline bool are_words(const std::uint64_t* words, std::size_t n, std::uint64_t tag,
                                                                         std::uint64_t tensor, std::uint64_t unit, std::size_t first) {
  for (std::size_t i = 0; i < n; ++i)
    if (words[i] != word_of(tag, tensor, unit, i + first)) return false;
  return true;
}

inline std::uint64_t address_of(const Cache& cache, std::size_t tensor, std::size_t unit) {
  return cache.geometry.tensors[tensor].address + unit * cache.geometry.stride_bytes;
}

inline void write_unit(const Cache& cache, std::size_t tensor, std::size_t unit, std::uint64_t tag) {
  std::vector<std::uint64_t> words(cache.geometry.unit_bytes / 8);
  make_words(words.data(), words.size(), tag, tensor, unit);
  if (cache.kind == host_kind)
    std::memcpy(Twice::seen(address_of(cache, tensor, unit)), words.data(), words.size() * 8);
  else
    test_kind_write(address_of(cache, tensor, unit), words.data(), words.size() * 8);
}

inline void fill(const Cache& cache, std::uint64_t tag) {
  for (std::size_t tensor = 0; tensor < cache.geometry.tensors.size(); ++tensor)
    for (std::size_t unit = 0; unit < cache.geometry.count; ++unit) write_unit(cache, tensor, unit, tag);
}

// Whether bytes [0, bytes) of a unit are those that `tag` was filled with in (from_tensor, from_unit), from byte `offset` on.
inline bool holds(const Cache& cache, std::size_t tensor, std::size_t unit, std::uint64_t tag, std::size_t from_tensor,
                  std::size_t from_unit, std::size_t bytes = 0, std::size_t offset = 0) {
  std::vector<std::uint64_t> words((bytes == 0 ? cache.geometry.unit_bytes : bytes) / 8);
  if (cache.kind == host_kind)
    std::memcpy(words.data(), Twice::seen(address_of(cache, tensor, unit)), words.size() * 8);
  else
    test_kind_read(words.data(), address_of(cache, tensor, unit), words.size() * 8);
  return are_words(words.data(), words.size(), tag, from_tensor, from_unit, offset / 8);
}

inline bool holds_all(const Cache& cache, std::uint64_t tag) {
  for (std::size_t tensor = 0; tensor < cache.geometry.tensors.size(); ++tensor)
    for (std::size_t unit = 0; unit < cache.geometry.count; ++unit)
      if (!holds(cache, tensor, unit, tag, tensor, unit)) return false;
  return true;
}

// --- moves -----------------------------------------------------------------------------------------------------------

using Numbers = std::vector<std::int64_t>;

inline std::shared_ptr<const Moves> whole(TensorRange source = {}, TensorRange destination = {}) {
  return Moves::make_whole(source, destination);
}
inline std::shared_ptr<const Moves> blocks(const Numbers& from, const Numbers& to, TensorRange source = {}, TensorRange destination = {}) {
  return Moves::make_blocks(from.data(), from.size(), to.data(), to.size(), source, destination);
}
inline std::shared_ptr<const Moves> row(std::int64_t from, std::uint32_t to, std::int64_t size_bytes = -1) {
  return Moves::make_row(from, to, size_bytes, {}, {});
}
inline std::shared_ptr<const Moves> row_to_blocks(std::int64_t from, const Numbers& to) {
  return Moves::make_row_to_blocks(from, to.data(), to.size(), {}, {});
}

// --- nodes -----------------------------------------------------------------------------------------------------------

// Two nodes and the link between them as each of them sees it. `here` has dialled.
struct Pair {
  std::unique_ptr<Node> here, there;
  std::shared_ptr<Link> link, back;

  explicit Pair(unsigned transports = any_transport, unsigned lanes = 2) : Pair(options(1, transports, lanes), options(2, transports, lanes)) {}
  Pair(NodeOptions mine, NodeOptions other) : here(std::make_unique<Node>(mine)), there(std::make_unique<Node>(other)) {
    const auto at = there->listen("127.0.0.1", 0);
    link = here->connect(at.host, at.port, Deadline::after_ms(5000));
    CHECK(eventually([&] { return !there->links().empty(); }));
    back = there->links().at(0);
  }
  void make_pools(std::size_t bytes = 64 << 20) {
    here->registry().create_pool(bytes, 12, 1 << 20);
    there->registry().create_pool(bytes, 12, 1 << 20);
  }
};

// A node that is linked to itself, with a cache "a" in its pool and a cache "b" in memory that its caller owns.
struct LinkedToItself {
  Node node{options(5)};
  Owned b{node.registry(), {"b"}};
  std::shared_ptr<Cache> a;
  std::shared_ptr<Link> link;

  LinkedToItself() {
    node.registry().create_pool(8 << 20, 12, 1 << 20);
    a = allocated(node.registry(), {"a"});
    const auto at = node.listen("127.0.0.1", 0);
    link = node.connect(at.host, at.port, Deadline::after_ms(5000));
  }
};

inline Result pulled(Node& node, const std::shared_ptr<Link>& link, Target target, const Cache& into, std::shared_ptr<const Moves> moves,
                     unsigned transports = any_transport, int timeout_ms = 5000) {
  return node.pull(link, std::move(target), into.geometry.cache_id, std::move(moves), Deadline::after_ms(timeout_ms), transports)->run_here();
}
inline Result pushed(Node& node, const std::shared_ptr<Link>& link, const Cache& from, Target target, std::shared_ptr<const Moves> moves,
                     unsigned transports = any_transport, int timeout_ms = 5000) {
  return node.push(link, from.geometry.cache_id, std::move(target), std::move(moves), Deadline::after_ms(timeout_ms), transports)->run_here();
}

// The operation ended well, by this transport.
#define CHECK_BY(transport_, ...)                                                                                        \
  do {                                                                                                                   \
    const ::kvferry::Result result_ = (__VA_ARGS__);                                                                     \
    if (!result_.outcome.ok() || result_.transport != ::kvferry::Transport::transport_)                                  \
      ::kvferry::testing::failed(__FILE__, __LINE__,                                                                     \
                                 #__VA_ARGS__ " ended with " + std::string(::kvferry::kind_name(result_.outcome.kind)) + \
                                     " by " + std::string(::kvferry::transport_name(result_.transport)) + ": " +         \
                                     result_.outcome.sentence);                                                          \
  } while (false)

// The operation ended with this kind, and said these words.
#define CHECK_ENDS(expected, words, ...)                                                                                  \
  do {                                                                                                                    \
    const ::kvferry::Result result_ = (__VA_ARGS__);                                                                      \
    if (result_.outcome.kind != (expected) || result_.outcome.sentence.find(words) == std::string::npos)                  \
      ::kvferry::testing::failed(__FILE__, __LINE__,                                                                      \
                                 #__VA_ARGS__ " ended with " + std::string(::kvferry::kind_name(result_.outcome.kind)) +  \
                                     ": " + result_.outcome.sentence);                                                    \
  } while (false)

}  // namespace kvferry::testing
