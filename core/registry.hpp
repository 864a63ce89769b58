// The table of registered caches of one node: ids, names, keys, windows and their lifetimes. Registering never touches the
// memory. Knows no peers and moves no bytes; the guard table and the pool are its owner's.
//
// Life of a cache: registered (guard alive) -> ended (guard ended first, then waits for whoever is inside, then gone).
// An allocated cache that is deallocated while request keys are still bound lives on, nameless, until the last key is
// pulled or removed.
#pragma once

#include <atomic>
#include <functional>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "clock.hpp"
#include "geometry.hpp"
#include "memory.hpp"

namespace kvferry {

struct Key {
  enum class Space : std::uint8_t { request = 0, prefix = 1, blocks = 2 };
  Space space = Space::request;
  std::uint64_t id = 0;  // request or prefix; 0 for blocks
  std::uint64_t model = 0;
  auto operator<=>(const Key&) const = default;
};

struct Target {  // what a pull or push names on the far side
  enum class By : std::uint8_t { id = 0, name = 1, request = 2, prefix = 3, blocks_key = 4, window = 5, addresses = 6, push = 7 };
  By by = By::id;
  std::uint64_t id = 0;  // cache id, request id, prefix id; the number of a push from the asked side's own memory
  std::uint64_t model = 0;
  std::string name;                     // name, or a window's name (bytes)
  std::vector<std::uint64_t> addresses;  // push only
  std::string label() const;  // "name 'kv'", "request 7 of model 0", "cache 3"
  // By addresses: what lies there, as `units` units of `model` bytes (0: of `other`'s) per tensor.
  Geometry composed(const Geometry& other, std::uint64_t units) const;
  bool operator==(const Target&) const = default;
};

// What uses up a request key of an allocated cache: the pull that names it, any pull of its row (by id or name too), nothing.
enum class KeyUse : std::uint8_t { by_key = 0, by_row = 1, never = 2 };

enum class KeyedBy : std::uint8_t { caller = 0, id = 1 };

enum class Access : std::uint8_t { any = 0, read = 1, write = 2 };  // any: to describe, not to move

// A registered cache. Immutable but for what is atomic; shared with the operations that use it.
struct Cache {
  Geometry geometry;
  KindId kind = host_kind;
  Guard guard;
  bool allocated = false;
  KeyUse key_use = KeyUse::by_key;
  bool reachable = true;  // false: peers reach it through windows only
  std::vector<Place> places;  // allocated caches: what to give back
  std::shared_ptr<const Moves> memory_moves;  // Layout::memory: what will be read or written of it
  // Whether the whole range was found mapped with the needed right, once, at first use (range_mapped).
  std::atomic<bool> readable{false}, writable{false};
  // A mapping of a file: a fault there takes as long as its disk wants, with the copy in the kernel's hands. Never copied
  // one-sided; found at first use too.
  std::atomic<bool> file_backed{false};
  std::atomic<bool> may_shrink{false};  // touched by system calls alone (mapped.hpp); found then as well
  std::atomic<unsigned> held{0};  // operations given up while the kernel still held their copy into it
};

// The memory of this process as one operation uses it: the spans of `moves` alone, on the side that is needed. Registered nowhere.
std::shared_ptr<Cache> memory_of_process(std::shared_ptr<const Moves> moves);

struct Window {
  std::string name;
  std::shared_ptr<Cache> cache;
  Access access = Access::read;
  std::vector<UnitRun> units;  // in the caller's order, neighbours merged
  Guard guard;
  Deadline until;
};

// What a target stands for right now.
struct Resolved {
  std::shared_ptr<Cache> cache;
  std::shared_ptr<Window> window;  // if named by one
  std::vector<Guard> guards;       // of cache and window: all must stand
  std::int64_t key_row = -1;       // the row that a request or prefix key names
  bool consumed_by_pull = false;   // a successful pull uses up a request key of an allocated cache (KeyUse)
  std::uint64_t epoch = 0;         // of the table when resolved
};

class Registry {
 public:
  explicit Registry(GuardTable& guards) : guards_(guards) {}
  ~Registry();

  void create_pool(std::size_t size_bytes, unsigned page_shift, std::size_t segment_bytes);  // once, else Error(exists)
  Pool* pool() noexcept { return pool_.get(); }

  // `geometry.cache_id` is given here: 1, 2, 3 ..., never reused, consumed by failed calls of the range checks too.
  // A taken name is Error(exists). keys[i] names row i; nullopt skips. First registration of a key wins for request and
  // prefix keys, the latest for the blocks key. Returns the cache. By KeyedBy::id it has no such keys, but a blocks key whose
  // model is its id, for peers that can name blocks in no other way.
  std::shared_ptr<Cache> add(Geometry geometry, KindId kind, const std::vector<std::optional<Key>>& keys, bool reachable = true,
                             KeyedBy by = KeyedBy::caller);
  // From the pool. A key already bound or named twice, or more keys than rows, is Error(invalid_argument); without a
  // pool Error(unsupported).
  std::shared_ptr<Cache> allocate(std::string name, Layout layout, std::uint32_t tensors, std::uint64_t unit_bytes,
                                  std::uint64_t count, const std::vector<std::optional<Key>>& keys, KeyUse use = KeyUse::by_key,
                                  KeyedBy by = KeyedBy::caller);
  // Unregisters. False for unknown. Waits for whoever is inside; Error(busy) where the kernel holds a copy there: the cache
  // has ended for everybody, and remove() again says when its memory is free.
  bool remove(std::uint64_t cache_id);
  bool deallocate(std::uint64_t cache_id);  // an allocated cache; bound request keys keep it alive
  bool remove_key(const Key& key);          // of an allocated cache; for others false and nothing happens
  // A pull of tensors [first, first + count) of `cache` by request key or by row succeeded: consumes the key if it is to be
  // (all tensors pulled, over any number of calls). False if it was already gone: the caller's pull came second. True as
  // well where nothing is to be consumed (registered caches, rows that never had a request key, row < 0).
  // May end the cache and wait for whoever is inside: not to be called from inside its guard.
  bool consume(std::uint64_t cache_id, std::int64_t row, std::uint32_t first, std::uint32_t count);

  std::shared_ptr<Cache> find(std::uint64_t cache_id) const;  // nullptr if unknown
  // Throws Error(not_found) naming the target, Error(invalid_argument) for a cache that peers may not reach. By::addresses is
  // not for here. `access`: what a window must allow.
  Resolved resolve(const Target& target, Access access) const;
  // The cache in whose tensor number `tensor` the whole of [address, address + bytes) lies.
  struct ByAddress {
    std::shared_ptr<Cache> cache;
    std::uint32_t tensor = 0;
    std::uint64_t offset = 0;
  };
  std::optional<ByAddress> find_address(std::uint64_t address, std::uint64_t bytes) const;

  // Error(not_found) for an unknown cache, Error(invalid_argument) for units outside it or none.
  std::shared_ptr<Window> open_window(std::uint64_t cache_id, const std::int64_t* units, std::size_t n, Access access,
                                      std::int64_t ttl_ms);
  std::shared_ptr<Window> open_window(std::uint64_t cache_id, std::vector<UnitRun> units, Access access, std::int64_t ttl_ms);
  // Waits for whoever is inside. False if it had ended before (by time, by its cache, by another call) or never was.
  // Error(busy) as remove().
  bool close_window(const std::string& name);
  std::int64_t end_due_windows(std::int64_t now_ns);  // ends those whose time is up; returns when the next is due (or INT64_MAX)

  std::vector<std::uint64_t> cache_ids() const;
  std::size_t window_count() const;
  std::vector<std::shared_ptr<Segment>> segments() const;
  void close();  // ends everything, waits, gives memory back; Error(busy) as remove(): then to be called again

  // Called (outside the lock) when a window was opened whose end is nearer than any other's, so that somebody wakes up.
  std::function<void(std::int64_t at_ns)> window_opened;
  // Called (outside the lock) when memory was given back to the pool, of which whole segments may have gone.
  std::function<void()> memory_released;

 private:
  GuardTable& guards_;

  struct Row {                       // what the registry knows about one row of an allocated cache
    std::optional<Key> request_key;  // bound now
    std::vector<bool> pulled;        // per tensor, since it was bound; empty: none
    bool consumed = false;           // a request key was bound and is gone
  };
  struct Entry {
    std::shared_ptr<Cache> cache;
    std::vector<Key> keys;  // bound to this cache in `keys_`
    std::map<std::uint64_t, Row> rows;
    std::size_t request_keys = 0;
    std::set<std::string> windows;
    bool nameless = false;  // deallocated, kept for its request keys
  };
  struct Bound {
    std::uint64_t cache_id = 0;
    std::int64_t row = -1;
  };
  struct TensorKey {  // any number of caches may lie at one address
    std::uint64_t address = 0, cache_id = 0;
    std::uint32_t tensor = 0;
    auto operator<=>(const TensorKey&) const = default;
  };
  struct Ending {  // a window that is out of the table while somebody may still be inside
    std::shared_ptr<Window> window;
    bool unattended = false;  // nobody waits for it (it ended by time, or was held): end_due_windows() comes back to it
  };
  // What has been taken out of the tables under the lock and is ended after it.
  struct Taken {
    std::shared_ptr<Cache> cache;
    std::vector<std::shared_ptr<Window>> windows;
  };

  std::uint64_t next_id();
  std::shared_ptr<Cache> publish(std::shared_ptr<Cache> cache, const std::vector<std::optional<Key>>& keys);
  void check_fresh_keys_locked(const Geometry& geometry, const std::vector<std::optional<Key>>& keys) const;
  void bind_keys_locked(Entry& entry, const std::vector<std::optional<Key>>& keys);
  void index_tensors_locked(const std::shared_ptr<Cache>& cache);
  void unindex_tensors_locked(const Cache& cache);
  std::shared_ptr<Window> take_window_locked(const std::string& name, bool unattended);
  void take_windows_locked(Entry& entry, Taken& taken);
  void take_ending_windows_locked(Taken& taken);  // those of its cache that nobody waits for
  Taken take_locked(std::map<std::uint64_t, Entry>::iterator entry);
  void unname_locked(Entry& entry);
  Taken unbind_locked(std::map<Key, Bound>::iterator bound);
  bool finish(const Taken& taken);
  bool end_window(const Window& window, std::int64_t patience_ms);  // false: the kernel holds a copy through it
  Resolved resolve_window_locked(const Target& target, Access access) const;
  void check_open_locked() const;

  mutable std::shared_mutex mutex_;
  std::unique_ptr<Pool> pool_;
  bool closed_ = false;
  std::uint64_t last_id_ = 0;
  std::map<std::uint64_t, Entry> caches_;
  std::unordered_map<std::string, std::uint64_t> names_;
  std::map<Key, Bound> keys_;
  std::map<TensorKey, std::shared_ptr<Cache>> tensors_;
  std::uint64_t longest_extent_ = 0;
  std::unordered_map<std::string, std::shared_ptr<Window>> windows_;
  std::set<std::pair<std::int64_t, std::string>> due_;  // every window of the table, by its end
  std::unordered_map<std::string, Ending> ending_windows_;
  std::map<std::uint64_t, std::shared_ptr<Cache>> ending_caches_;
};

}  // namespace kvferry
