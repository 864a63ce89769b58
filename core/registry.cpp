#include "registry.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>

#include "error.hpp"
#include "sentence.hpp"

namespace kvferry {
namespace {

constexpr std::int64_t longest_ttl_ms = std::int64_t{10} * 365 * 24 * 3600 * 1000;
constexpr std::int64_t revisit_ns = 20'000'000;  // a window whose time is up while somebody is inside with a piece in hand

std::string hex_of(std::string_view bytes) {
  constexpr char digits[] = "0123456789abcdef";
  std::string out;
  for (const char c : bytes.substr(0, 6)) {
    out += digits[static_cast<unsigned char>(c) >> 4];
    out += digits[static_cast<unsigned char>(c) & 15];
  }
  return out;
}

// Where an operation has been given up already there is nothing to wait for.
std::int64_t patience_ms(const Cache& cache) { return cache.held.load() > 0 ? 0 : GuardTable::patience_ms_normally; }

[[noreturn]] void kernel_holds_a_copy(const Cache& cache, const char* way_out) {
  throw Error({Kind::busy,
               sentence("the kernel holds a copy in the memory of ", cache.geometry.label(), ", which waits for the file or device behind it: ",
                        "the memory must stay as it is; ", way_out, " before it is freed or reused"),
               true, false},
              "", cache.geometry.label(), "");
}

[[noreturn]] void not_found(const Target& target) {
  throw Error(Kind::not_found, sentence(target.label(), " does not exist (any more)"));
}

std::string key_label(const Key& key) {
  switch (key.space) {
    case Key::Space::request: return sentence("request ", key.id, " of model ", key.model);
    case Key::Space::prefix: return sentence("prefix ", key.id, " of model ", key.model);
    case Key::Space::blocks: return sentence("the blocks key of model ", key.model);
  }
  return "a key";
}

std::optional<Key> key_of(const Target& target) {
  switch (target.by) {
    case Target::By::request: return Key{Key::Space::request, target.id, target.model};
    case Target::By::prefix: return Key{Key::Space::prefix, target.id, target.model};
    case Target::By::blocks_key: return Key{Key::Space::blocks, 0, target.model};
    default: return std::nullopt;
  }
}

// 12 random bytes and the slot: never the name of another window of this node, hard to guess, opaque to everybody.
std::string new_window_name(const Guard& guard) {
  std::string name(16, '\0');
  random_bytes(name.data(), 12);
  std::memcpy(name.data() + 12, &guard.slot, 4);
  return name;
}

// Whether bytes [offset, offset + bytes) of a tensor are the tensor's own: not the gaps between its units.
bool covers(const Geometry& geometry, std::uint64_t offset, std::uint64_t bytes) {
  const std::uint64_t extent = geometry.tensor_extent();
  if (offset >= extent || bytes > extent - offset) return false;
  return geometry.stride_bytes == geometry.unit_bytes || offset % geometry.stride_bytes + bytes <= geometry.unit_bytes;
}

// In a window a unit has one place: two would leave open what is read from, or written to, the second.
void check_listed_once(std::vector<UnitRun> runs) {
  std::sort(runs.begin(), runs.end(), [](const UnitRun& a, const UnitRun& b) { return a.first < b.first; });
  for (std::size_t i = 1; i < runs.size(); ++i)
    if (runs[i].first < std::uint64_t{runs[i - 1].first} + runs[i - 1].count)
      throw Error(Kind::invalid_argument, sentence("a window lists each block or row once, and this one lists ", runs[i].first, " twice"));
}

}  // namespace

std::string Target::label() const {
  if (const auto key = key_of(*this)) return key_label(*key);
  switch (by) {
    case By::name: return sentence("name '", shown(name), "'");
    case By::window: return sentence("window ", hex_of(name));
    case By::addresses: return sentence(addresses.size(), " addresses");
    case By::push: return sentence("the source of push ", id);
    default: return sentence("cache ", id);
  }
}

Geometry Target::composed(const Geometry& other, std::uint64_t units) const {
  Geometry geometry;
  geometry.name = "what lies at the addresses given";
  geometry.layout = Layout::mixed;
  geometry.unit_bytes = geometry.stride_bytes = model != 0 ? model : other.unit_bytes;
  geometry.count = std::max<std::uint64_t>(units, 1);
  for (const auto address : addresses) geometry.tensors.push_back({address, 0, 0});
  geometry.check();
  return geometry;
}

std::shared_ptr<Cache> memory_of_process(std::shared_ptr<const Moves> moves) {
  if (moves->form != Moves::Form::spans)
    throw Error(Kind::invalid_argument, "MEMORY has no blocks and no rows: say with spans what is moved");
  auto memory = std::make_shared<Cache>();
  memory->geometry = Geometry::of_memory();
  memory->memory_moves = std::move(moves);
  return memory;
}

Registry::~Registry() { close(); }

void Registry::check_open_locked() const {
  if (closed_) throw Error(Kind::closed, "this node is closed");
}

void Registry::create_pool(std::size_t size_bytes, unsigned page_shift, std::size_t segment_bytes) {
  std::unique_lock lock(mutex_);
  check_open_locked();
  if (pool_) throw Error(Kind::exists, sentence("this node has a pool of ", pool_->size_bytes(), " bytes already"));
  pool_ = std::make_unique<Pool>(size_bytes, page_shift, segment_bytes, 1);
}

// --- registering -----------------------------------------------------------------------------------------------------

namespace {
std::vector<std::optional<Key>> bound(const std::vector<std::optional<Key>>& keys, KeyedBy by, std::uint64_t cache_id) {
  if (by == KeyedBy::caller) return keys;
  return {Key{Key::Space::blocks, 0, cache_id}};
}
}  // namespace

std::shared_ptr<Cache> Registry::add(Geometry geometry, KindId kind, const std::vector<std::optional<Key>>& keys, bool reachable, KeyedBy by) {
  auto cache = std::make_shared<Cache>();
  cache->geometry = std::move(geometry);
  cache->geometry.cache_id = next_id();
  cache->geometry.kind = kind_by_id(kind);
  cache->kind = kind;
  cache->reachable = reachable;
  cache->geometry.check();
  const auto cache_id = cache->geometry.cache_id;
  return publish(std::move(cache), bound(keys, by, cache_id));
}

std::shared_ptr<Cache> Registry::allocate(std::string name, Layout layout, std::uint32_t tensors,
                                          std::uint64_t unit_bytes, std::uint64_t count,
                                          const std::vector<std::optional<Key>>& keys, KeyUse use, KeyedBy by) {
  auto cache = std::make_shared<Cache>();
  Geometry& geometry = cache->geometry;
  geometry.cache_id = next_id();
  geometry.name = std::move(name);
  geometry.layout = layout;
  geometry.unit_bytes = geometry.stride_bytes = unit_bytes;
  geometry.count = count;
  cache->allocated = true;
  cache->key_use = use;
  Pool* pool = nullptr;
  {
    std::shared_lock lock(mutex_);
    pool = pool_.get();
  }
  if (pool == nullptr) {
    throw Error(Kind::unsupported, sentence(geometry.label(), " cannot be allocated: this node has no pool (create one first)"));
  }
  // Each tensor takes a page of its own, and the smallest has 1 KiB.
  if (tensors > pool->size_bytes() / 1024) {
    throw Error(Kind::out_of_memory, sentence(tensors, " tensors do not fit into a pool of ", pool->size_bytes(), " bytes"));
  }
  geometry.tensors.assign(std::min(tensors, 1u), TensorPlace{1, 1, 0});
  geometry.check();  // all but the places
  cache->places = pool->allocate_many(tensors, geometry.tensor_extent());  // before a list of so many is made: is there room?
  const auto give_back = [&] {
    for (const Place& place : cache->places) pool->release(place);
  };
  try {
    geometry.tensors.resize(tensors);
    for (std::uint32_t i = 0; i < tensors; ++i) {
      const Place& place = cache->places[i];
      geometry.tensors[i] = {place.address(), place.segment->id(), place.offset};
    }
    geometry.check();
    cache->readable = cache->writable = true;
    return publish(cache, bound(keys, by, geometry.cache_id));
  } catch (...) {
    give_back();
    throw;
  }
}

std::uint64_t Registry::next_id() {
  std::unique_lock lock(mutex_);
  check_open_locked();
  return ++last_id_;
}

// Nothing of it can be seen before the lock is left, and nothing is left of it if it throws.
std::shared_ptr<Cache> Registry::publish(std::shared_ptr<Cache> cache, const std::vector<std::optional<Key>>& keys) {
  const Geometry& geometry = cache->geometry;
  std::unique_lock lock(mutex_);
  check_open_locked();
  if (geometry.name.size() > longest_name)
    throw Error(Kind::invalid_argument, sentence("a name of ", geometry.name.size(), " bytes: ", longest_name, " are allowed"));
  if (!geometry.name.empty()) {
    if (const auto taken = names_.find(geometry.name); taken != names_.end()) {
      throw Error(Kind::exists, sentence("the name '", shown(geometry.name), "' is taken by cache ", taken->second));
    }
  }
  if (cache->allocated) check_fresh_keys_locked(geometry, keys);
  cache->guard = guards_.open();
  try {
    Entry& entry = caches_[geometry.cache_id];
    entry.cache = cache;
    if (!geometry.name.empty()) names_[geometry.name] = geometry.cache_id;
    bind_keys_locked(entry, keys);
    index_tensors_locked(cache);
  } catch (...) {
    if (const auto entry = caches_.find(geometry.cache_id); entry != caches_.end()) {
      take_locked(entry);
      ending_caches_.erase(geometry.cache_id);
    }
    guards_.end(cache->guard);  // nobody has seen it, so nobody is inside
    throw;
  }
  guards_.bump_epoch();
  return cache;
}

void Registry::check_fresh_keys_locked(const Geometry& geometry, const std::vector<std::optional<Key>>& keys) const {
  if (keys.size() > geometry.count) {
    throw Error(Kind::invalid_argument,
                sentence(geometry.label(), " has ", geometry.count, " rows: ", keys.size(), " keys were given"));
  }
  std::set<Key> given;
  for (const auto& key : keys) {
    if (!key) continue;
    if (!given.insert(*key).second) {
      throw Error(Kind::invalid_argument, sentence(key_label(*key), " is named twice for ", geometry.label()));
    }
    if (const auto bound = keys_.find(*key); bound != keys_.end()) {
      throw Error(Kind::invalid_argument, sentence(key_label(*key), " is bound to cache ", bound->second.cache_id));
    }
  }
}

void Registry::bind_keys_locked(Entry& entry, const std::vector<std::optional<Key>>& keys) {
  const std::uint64_t id = entry.cache->geometry.cache_id;
  for (std::size_t row = 0; row < keys.size(); ++row) {
    if (!keys[row]) continue;
    const Key& key = *keys[row];
    entry.keys.push_back(key);
    if (key.space == Key::Space::blocks) {
      keys_[key] = {id, -1};
      continue;
    }
    if (!keys_.emplace(key, Bound{id, static_cast<std::int64_t>(row)}).second) continue;  // the first one wins
    if (key.space == Key::Space::request && entry.cache->allocated) {
      entry.rows[row].request_key = key;
      ++entry.request_keys;
    }
  }
}

void Registry::index_tensors_locked(const std::shared_ptr<Cache>& cache) {
  longest_extent_ = std::max(longest_extent_, cache->geometry.tensor_extent());
  for (std::size_t i = 0; i < cache->geometry.tensors.size(); ++i) {
    tensors_.emplace(TensorKey{cache->geometry.tensors[i].address, cache->geometry.cache_id, static_cast<std::uint32_t>(i)}, cache);
  }
}

void Registry::unindex_tensors_locked(const Cache& cache) {
  for (std::size_t i = 0; i < cache.geometry.tensors.size(); ++i) {
    tensors_.erase({cache.geometry.tensors[i].address, cache.geometry.cache_id, static_cast<std::uint32_t>(i)});
  }
}

// --- ending ----------------------------------------------------------------------------------------------------------
//
// In two steps: under the lock everything is taken out of the tables, so that nobody finds it any more, and the epoch is
// changed, so that nobody goes on with what he had found before; then, outside the lock, the guards are ended, which
// waits for whoever is inside, and only then is the memory given back.

bool Registry::remove(std::uint64_t cache_id) {
  std::unique_lock lock(mutex_);
  const auto entry = caches_.find(cache_id);
  if (entry == caches_.end()) {
    // Another call is about to end it, or could not: return no sooner than its memory is free.
    const auto ending = ending_caches_.find(cache_id);
    if (ending == ending_caches_.end()) return false;
    Taken taken{ending->second, {}};
    take_ending_windows_locked(taken);
    lock.unlock();
    return finish(taken);
  }
  const Taken taken = take_locked(entry);
  lock.unlock();
  finish(taken);
  return true;
}

bool Registry::deallocate(std::uint64_t cache_id) {
  std::unique_lock lock(mutex_);
  const auto found = caches_.find(cache_id);
  if (found == caches_.end() || !found->second.cache->allocated || found->second.nameless) return false;
  Entry& entry = found->second;
  Taken taken;
  if (entry.request_keys == 0) {
    taken = take_locked(found);
  } else {
    take_windows_locked(entry, taken);
    unname_locked(entry);
    guards_.bump_epoch();
  }
  lock.unlock();
  finish(taken);
  return true;
}

bool Registry::remove_key(const Key& key) {
  std::unique_lock lock(mutex_);
  const auto bound = keys_.find(key);
  if (bound == keys_.end() || !caches_.at(bound->second.cache_id).cache->allocated) return false;
  const Taken taken = unbind_locked(bound);
  lock.unlock();
  finish(taken);
  return true;
}

bool Registry::consume(std::uint64_t cache_id, std::int64_t row, std::uint32_t first, std::uint32_t count) {
  std::unique_lock lock(mutex_);
  const auto found = caches_.find(cache_id);
  if (found == caches_.end()) return false;
  Entry& entry = found->second;
  if (!entry.cache->allocated || row < 0) return true;
  const auto place = entry.rows.find(static_cast<std::uint64_t>(row));
  if (place == entry.rows.end()) return true;
  Row& state = place->second;
  if (!state.request_key) return !state.consumed;
  state.pulled.resize(entry.cache->geometry.tensors.size());
  const std::uint64_t end = std::min<std::uint64_t>(std::uint64_t{first} + count, state.pulled.size());
  for (std::uint64_t i = first; i < end; ++i) state.pulled[i] = true;
  if (std::find(state.pulled.begin(), state.pulled.end(), false) != state.pulled.end()) return true;
  const Taken taken = unbind_locked(keys_.find(*state.request_key));
  lock.unlock();
  finish(taken);
  return true;
}

Registry::Taken Registry::unbind_locked(std::map<Key, Bound>::iterator bound) {
  const Key key = bound->first;
  const auto found = caches_.find(bound->second.cache_id);
  Entry& entry = found->second;
  const std::int64_t row = bound->second.row;
  keys_.erase(bound);
  std::erase(entry.keys, key);
  Taken taken;
  if (key.space == Key::Space::request) {
    Row& state = entry.rows[static_cast<std::uint64_t>(row)];
    state.request_key.reset();
    state.pulled = {};
    state.consumed = true;
    if (--entry.request_keys == 0 && entry.nameless) taken = take_locked(found);
  }
  guards_.bump_epoch();
  return taken;
}

void Registry::unname_locked(Entry& entry) {
  entry.nameless = true;
  names_.erase(entry.cache->geometry.name);
  unindex_tensors_locked(*entry.cache);
}

Registry::Taken Registry::take_locked(std::map<std::uint64_t, Entry>::iterator found) {
  const std::uint64_t id = found->first;
  Entry& entry = found->second;
  Taken taken;
  taken.cache = entry.cache;
  ending_caches_[id] = entry.cache;
  take_windows_locked(entry, taken);
  for (const Key& key : entry.keys) {
    const auto bound = keys_.find(key);
    if (bound != keys_.end() && bound->second.cache_id == id) keys_.erase(bound);
  }
  if (!entry.nameless) unname_locked(entry);
  caches_.erase(found);
  guards_.bump_epoch();
  return taken;
}

void Registry::take_windows_locked(Entry& entry, Taken& taken) {
  for (const std::string& name : std::exchange(entry.windows, {})) {
    taken.windows.push_back(take_window_locked(name, false));
  }
  take_ending_windows_locked(taken);
}

void Registry::take_ending_windows_locked(Taken& taken) {
  for (auto& [name, ending] : ending_windows_) {
    if (ending.window->cache != taken.cache || !ending.unattended) continue;
    ending.unattended = false;
    taken.windows.push_back(ending.window);
  }
}

// True: this call gave the memory back. Every number changes before anything is waited for.
bool Registry::finish(const Taken& taken) {
  for (const auto& window : taken.windows) guards_.end_without_waiting(window->guard);
  if (taken.cache) guards_.end_without_waiting(taken.cache->guard);
  auto patience = taken.cache ? patience_ms(*taken.cache) : GuardTable::patience_ms_normally;
  for (const auto& window : taken.windows)
    if (!end_window(*window, patience)) patience = 0;
  if (!taken.cache) return false;
  if (!guards_.end(taken.cache->guard, patience)) kernel_holds_a_copy(*taken.cache, "unregister it again");
  std::unique_lock lock(mutex_);
  if (ending_caches_.erase(taken.cache->geometry.cache_id) == 0) return false;
  lock.unlock();
  for (const Place& place : taken.cache->places) pool_->release(place);
  if (!taken.cache->places.empty() && memory_released) memory_released();
  return true;
}

void Registry::close() {
  std::vector<Taken> all;
  {
    std::unique_lock lock(mutex_);
    closed_ = true;
    for (const auto& [id, cache] : ending_caches_) all.push_back({cache, {}});
    for (Taken& taken : all) take_ending_windows_locked(taken);
    while (!caches_.empty()) all.push_back(take_locked(caches_.begin()));
  }
  std::optional<Error> busy;
  for (const Taken& taken : all) {
    try {
      finish(taken);
    } catch (const Error& error) {  // the others end all the same
      busy = error;
    }
  }
  if (busy) throw *busy;
}

// --- finding ---------------------------------------------------------------------------------------------------------

std::shared_ptr<Cache> Registry::find(std::uint64_t cache_id) const {
  std::shared_lock lock(mutex_);
  const auto found = caches_.find(cache_id);
  return found == caches_.end() || found->second.nameless ? nullptr : found->second.cache;
}

Resolved Registry::resolve(const Target& target, Access access) const {
  std::shared_lock lock(mutex_);
  // Nothing changes while the lock is shared, so the epoch belongs to what is found here; changes are made, and the epoch
  // after them, under the exclusive lock. Whoever keeps this answer sees another epoch as soon as it is no longer true.
  const std::uint64_t epoch = guards_.epoch();
  if (target.by == Target::By::window) return resolve_window_locked(target, access);

  std::uint64_t id = target.id;
  Resolved out;
  if (const auto key = key_of(target)) {
    const auto bound = keys_.find(*key);
    if (bound == keys_.end()) not_found(target);
    id = bound->second.cache_id;
    out.key_row = bound->second.row;
  } else if (target.by == Target::By::name) {
    const auto named = names_.find(target.name);
    if (named == names_.end()) not_found(target);
    id = named->second;
  } else if (target.by != Target::By::id) {
    throw Error(Kind::invalid_argument, sentence(target.label(), " cannot be named here: give a cache by name, id or key, or a window"));
  }
  const auto found = caches_.find(id);
  if (found == caches_.end()) not_found(target);
  // A deallocated cache is kept for those who still have to pull it, and for nobody else.
  if (found->second.nameless && access == Access::write) not_found(target);
  out.cache = found->second.cache;
  if (!out.cache->reachable) {
    throw Error(Kind::invalid_argument, sentence(out.cache->geometry.label(), " was registered for its own process alone"));
  }
  out.guards = {out.cache->guard};
  const bool by_row = target.by == Target::By::id || target.by == Target::By::name;
  out.consumed_by_pull = out.cache->allocated && out.cache->key_use != KeyUse::never &&
                         (target.by == Target::By::request ||
                          (by_row && out.cache->key_use == KeyUse::by_row && found->second.request_keys > 0));
  out.epoch = epoch;
  return out;
}

Resolved Registry::resolve_window_locked(const Target& target, Access access) const {
  const auto found = windows_.find(target.name);
  if (found == windows_.end() || found->second->until.passed()) not_found(target);
  const std::shared_ptr<Window>& window = found->second;
  if (access != Access::any && window->access != access) {
    throw Error(Kind::not_found, sentence(target.label(), " of ", window->cache->geometry.label(), " is for ",
                                          window->access == Access::read ? "reading" : "writing"));
  }
  Resolved out;
  out.cache = window->cache;
  out.window = window;
  out.guards = {window->cache->guard, window->guard};
  out.epoch = guards_.epoch();
  return out;
}

std::optional<Registry::ByAddress> Registry::find_address(std::uint64_t address, std::uint64_t bytes) const {
  std::shared_lock lock(mutex_);
  // Extents may overlap (keys and values of one layer interleaved in one array), so the nearest start need not be the one.
  for (auto it = tensors_.upper_bound({address, UINT64_MAX, UINT32_MAX}); it != tensors_.begin();) {
    --it;
    const auto& [key, cache] = *it;
    const std::uint64_t offset = address - key.address;
    if (offset >= longest_extent_) break;
    if (cache->reachable && covers(cache->geometry, offset, bytes)) return ByAddress{cache, key.tensor, offset};
  }
  return std::nullopt;
}

std::vector<std::uint64_t> Registry::cache_ids() const {
  std::shared_lock lock(mutex_);
  std::vector<std::uint64_t> ids;
  for (const auto& [id, entry] : caches_) {
    if (!entry.nameless) ids.push_back(id);
  }
  return ids;
}

std::size_t Registry::window_count() const {
  std::shared_lock lock(mutex_);
  return windows_.size();
}

std::vector<std::shared_ptr<Segment>> Registry::segments() const {
  std::shared_lock lock(mutex_);
  return pool_ ? pool_->segments() : std::vector<std::shared_ptr<Segment>>{};
}

// --- windows ---------------------------------------------------------------------------------------------------------

std::shared_ptr<Window> Registry::open_window(std::uint64_t cache_id, const std::int64_t* units, std::size_t n,
                                              Access access, std::int64_t ttl_ms) {
  return open_window(cache_id, merge_units(units, n), access, ttl_ms);
}

std::shared_ptr<Window> Registry::open_window(std::uint64_t cache_id, std::vector<UnitRun> units, Access access, std::int64_t ttl_ms) {
  // One answer names them all to whoever uses it.
  if (constexpr std::size_t most = 8'000'000; units.size() > most)
    throw Error(Kind::invalid_argument, sentence("a window names at most ", most, " runs of neighbouring blocks, and this one has ", units.size(),
                                                 ": open several windows"));
  if (units.empty()) throw Error(Kind::invalid_argument, "a window needs at least one block or row");
  if (ttl_ms <= 0) throw Error(Kind::invalid_argument, sentence("a window of ", ttl_ms, " ms: it must be more than 0"));
  auto window = std::make_shared<Window>();
  window->access = access;
  window->units = std::move(units);
  check_listed_once(window->units);
  bool nearest = false;
  {
    std::unique_lock lock(mutex_);
    check_open_locked();
    const auto found = caches_.find(cache_id);
    if (found == caches_.end() || found->second.nameless) {
      throw Error(Kind::not_found, sentence("cache ", cache_id, " does not exist (any more)"));
    }
    const Geometry& geometry = found->second.cache->geometry;
    for (const UnitRun& run : window->units) {
      const std::uint64_t end = std::uint64_t{run.first} + run.count;
      if (end <= geometry.count) continue;
      throw Error(Kind::invalid_argument,
                  sentence(geometry.layout == Layout::rows ? "row " : "block ",
                           std::max<std::uint64_t>(run.first, geometry.count), " of ", geometry.label(),
                           " does not exist: it has ", geometry.count));
    }
    window->cache = found->second.cache;
    window->guard = guards_.open();
    try {
      window->name = new_window_name(window->guard);
      window->until = Deadline::after_ms(std::min(ttl_ms, longest_ttl_ms));
      windows_.emplace(window->name, window);
      found->second.windows.insert(window->name);
      const auto due = due_.emplace(window->until.at_ns, window->name).first;
      nearest = due == due_.begin();
    } catch (...) {
      windows_.erase(window->name);
      found->second.windows.erase(window->name);
      guards_.end(window->guard);  // nobody has seen it
      throw;
    }
  }
  if (nearest && window_opened) window_opened(window->until.at_ns);
  return window;
}

bool Registry::close_window(const std::string& name) {
  std::unique_lock lock(mutex_);
  std::shared_ptr<Window> window;
  const bool standing = windows_.contains(name);
  if (standing) {
    window = take_window_locked(name, false);
    caches_.at(window->cache->geometry.cache_id).windows.erase(name);
  } else {
    const auto ending = ending_windows_.find(name);
    if (ending == ending_windows_.end()) return false;
    window = ending->second.window;
  }
  lock.unlock();
  if (!end_window(*window, patience_ms(*window->cache))) kernel_holds_a_copy(*window->cache, "close the window again");
  return standing;
}

std::int64_t Registry::end_due_windows(std::int64_t now_ns) {
  std::unique_lock lock(mutex_);
  while (!due_.empty() && due_.begin()->first <= now_ns) {
    const std::string name = due_.begin()->second;
    const auto window = take_window_locked(name, true);
    caches_.at(window->cache->geometry.cache_id).windows.erase(name);
    guards_.end_without_waiting(window->guard);
  }
  bool revisit = false;
  for (auto it = ending_windows_.begin(); it != ending_windows_.end();) {
    const bool settled = it->second.unattended && guards_.end_if_idle(it->second.window->guard);
    revisit |= it->second.unattended && !settled;
    it = settled ? ending_windows_.erase(it) : std::next(it);
  }
  const std::int64_t next = due_.empty() ? std::numeric_limits<std::int64_t>::max() : due_.begin()->first;
  return revisit ? std::min(next, now_ns + revisit_ns) : next;
}

std::shared_ptr<Window> Registry::take_window_locked(const std::string& name, bool unattended) {
  const auto found = windows_.find(name);
  std::shared_ptr<Window> window = found->second;
  ending_windows_.emplace(name, Ending{window, unattended});
  due_.erase({window->until.at_ns, name});
  windows_.erase(found);
  return window;
}

bool Registry::end_window(const Window& window, std::int64_t patience_ms) {
  const bool settled = guards_.end(window.guard, patience_ms);
  std::unique_lock lock(mutex_);
  const auto ending = ending_windows_.find(window.name);
  if (ending == ending_windows_.end()) return true;  // another call has seen its end
  if (settled)
    ending_windows_.erase(ending);
  else
    ending->second.unattended = true;
  return settled;
}

}  // namespace kvferry
