#include "instance.hpp"

#include <algorithm>
#include <atomic>
#include <fstream>
#include <sstream>

#include "log.hpp"
#include "sentence.hpp"
#include "socket.hpp"
#include "thread.hpp"

namespace llm_datadist {

using kvferry::Kind;
using rules::Answer;
using rules::said;

namespace {

constexpr std::size_t links_at_a_time = 16;  // that one call builds
constexpr unsigned any_transport = 7;

std::string contents(const char* path) {
  std::ostringstream out;
  out << std::ifstream(path).rdbuf();
  return out.str();
}

unsigned transports_of(const rules::EngineOptions& options) {
  if (!options.transports) return any_transport;
  unsigned bits = 0;
  for (const auto& name : *options.transports) {
    unsigned bit = 0;
    for (const auto transport : {kvferry::Transport::map, kvferry::Transport::cma, kvferry::Transport::socket})
      if (name == kvferry::transport_name(transport)) bit = static_cast<unsigned>(transport);
    if (bit == 0) throw rules::OptionError(said(rules::option::transports, " has '", name, "': there are map, cma and socket"));
    bits |= bit;
  }
  return bits;
}

kvferry::NodeOptions node_options(std::uint64_t cluster_id, const rules::EngineOptions& options) {
  if (const auto why = rules::pools_too_large(options, contents("/proc/meminfo"))) throw Refused(rules::status::out_of_memory, *why);
  kvferry::NodeOptions out;
  out.node_id = cluster_id;
  out.transports = transports_of(options);
  out.attach_any = options.attach == "any";
  out.program = rules::program_of(options.remote);
  if (options.secret) {
    if (options.secret->empty()) throw rules::OptionError(said(rules::option::secret, " is empty: leave it out to link without one"));
    out.secret.assign(options.secret->begin(), options.secret->end());
  }
  return out;
}

const std::int64_t* numbers(std::string_view name, const std::vector<std::uint64_t>& blocks) {
  rules::check_numbers(name, blocks);
  return reinterpret_cast<const std::int64_t*>(blocks.data());
}

kvferry::TensorRange tensors_of(const rules::Layers& layers, std::uint32_t tensors_per_layer) {
  if (layers.stop * tensors_per_layer > UINT32_MAX) throw rules::RuleError(said("layers up to ", layers.stop, " go far beyond what any cache has"));
  return {static_cast<std::uint32_t>(layers.start * tensors_per_layer), layers.count() * tensors_per_layer};
}

rules::Inclusive inclusive(const std::pair<std::int32_t, std::int32_t>& range) { return {range.first, range.second}; }

struct Ranges {
  kvferry::TensorRange source, destination;
};

Ranges pulled(const KvCacheExtParam& layers, std::size_t num_tensors) {
  const auto width = layers.tensor_num_per_layer;
  const auto ranges = rules::pull_layers(inclusive(layers.src_layer_range), inclusive(layers.dst_layer_range), static_cast<std::uint32_t>(num_tensors), width);
  if (!ranges.destination) return {};
  return {tensors_of(*ranges.source, width), tensors_of(*ranges.destination, width)};
}

// Layers that are named are the cache's own; by default as many are sent as the caller's description counts tensors for.
Ranges pushed(const KvCacheExtParam& layers, std::uint32_t described, std::size_t registered) {
  const auto width = layers.tensor_num_per_layer;
  const auto num_tensors = layers.src_layer_range.first < 0 ? described : static_cast<std::uint32_t>(registered);
  const auto [source, destination] = rules::push_layers(inclusive(layers.src_layer_range), inclusive(layers.dst_layer_range), num_tensors, width);
  return {tensors_of(source, width), tensors_of(destination, width)};
}

std::shared_ptr<const kvferry::Moves> blocks_of(const std::vector<std::uint64_t>& from, const std::vector<std::uint64_t>& to, const Ranges& ranges) {
  return kvferry::Moves::make_blocks(numbers("src_blocks", from), from.size(), numbers("dst_blocks", to), to.size(), ranges.source, ranges.destination);
}

// What `work` gives; what it throws, as an answer: for threads, where nobody else would catch it.
template <class Work>
Answer answered(std::string_view call, Work&& work) {
  try {
    return work();
  } catch (const kvferry::Error& error) {
    return {status_of(error, call), sentence_of(error)};
  } catch (const rules::RuleError& error) {
    return {rules::status::param_invalid, error.what()};
  } catch (const std::exception& error) {
    return {rules::status::failed, error.what()};
  }
}

// The outcome of each, in order; several are worked on at a time, as many as there are threads to be had for it.
template <class Work>
std::vector<Answer> for_each(const std::vector<Cluster>& clusters, Work&& work) {
  std::vector<Answer> answers(clusters.size());
  std::atomic<std::size_t> next{0};
  const auto work_on_some = [&] {
    for (std::size_t i = next++; i < clusters.size(); i = next++) answers[i] = work(clusters[i]);
  };
  std::vector<std::thread> helpers;
  try {
    while (helpers.size() + 1 < std::min(clusters.size(), links_at_a_time)) helpers.push_back(kvferry::start_thread("kvferry-link", work_on_some));
  } catch (const kvferry::Error&) {  // no more threads to be had: those that there are do it, this one among them
  }
  work_on_some();
  for (auto& helper : helpers) helper.join();
  return answers;
}

}  // namespace

Status status_of(const kvferry::Error& error, std::string_view call) { return rules::status_of(kvferry::kind_name(error.outcome().kind), call); }

std::string sentence_of(const kvferry::Error& error) {
  std::string out;
  for (const auto* part : {&error.peer, &error.cache})
    if (!part->empty()) out += *part + ": ";
  return out + error.what();
}

// --- life

Instance::Instance(std::uint64_t cluster_id, const rules::EngineOptions& options)
    : options_(options), node_(node_options(cluster_id, options)), book_(cluster_id, options, false) {
  if (const auto pool = rules::pool_of(options)) node_.registry().create_pool(pool->size_bytes, pool->page_shift, std::size_t{256} << 20);
  if (options.device_pool) device_share_.emplace(*options.device_pool);
  if (options.host_pool) host_share_.emplace(*options.host_pool);
  if (options.listen) {
    try {
      listen(*options.listen);
    } catch (const kvferry::Error& error) {
      throw Refused(status_of(error, "listen"), sentence_of(error));
    }
  }
  if (log_level() > Level::warning) return;  // what the core has to say are warnings
  log_ = kvferry::start_thread("kvferry-log", [this] {
    while (!node_.closed())
      if (const auto line = node_.next_event(1000)) log_line(Level::warning, "node", line->second);
  });
}

void Instance::end_transfers() noexcept {
  try {
    node_.close();
  } catch (const kvferry::Error&) {  // the kernel holds a copy: the destructor closes once more, and says it
  }
}

Instance::~Instance() {
  {
    const std::lock_guard lock(mutex_);
    book_.clear();
  }
  try {
    node_.close();
  } catch (const kvferry::Error& error) {
    log_line(Level::error, "Finalize", sentence_of(error));
  }
  if (log_.joinable()) log_.join();
}

void Instance::listen(const rules::ListenAt& place) {
  if (place.second > UINT16_MAX) throw kvferry::Error(Kind::invalid_argument, said(place.second, " is no port"));
  node_.listen(place.first, static_cast<std::uint16_t>(place.second));
  listens_ = place;
  book_.listens(place);
}

void Instance::move_listener(const std::optional<rules::ListenAt>& wanted) {
  const std::lock_guard lock(mutex_);
  bool has_links = false;
  for (const auto& link : node_.links()) has_links |= link->alive();
  switch (rules::listener_move(has_links, options_.hixl, listens_, wanted)) {
    case rules::ListenerMove::stays: return;
    case rules::ListenerMove::refused_linked: throw Refused(rules::status::exist_link, "there are links; unlink them first");
    case rules::ListenerMove::refused_hixl: throw Refused(rules::status::feature_not_enabled, "the hixl backend keeps its port");
    case rules::ListenerMove::moves: break;
  }
  const auto before = listens_;
  node_.stop_listening();
  listens_.reset();
  book_.listens({});
  if (!wanted) return;
  try {
    listen(*wanted);
  } catch (const kvferry::Error& error) {
    if (before) listen(*before);
    throw Refused(status_of(error, "listen"), sentence_of(error));
  }
}

// --- links

Instance::Link Instance::link_to(std::uint64_t cluster_id) {
  const std::lock_guard lock(mutex_);
  if (node_.closed()) throw kvferry::Error(Kind::closed, "llm datadist is being finalized");
  if (auto link = book_.known(cluster_id)) return *std::move(link);
  auto found = book_.to(cluster_id, node_.links());
  if (!found.answer.ok()) throw Refused(found.answer.status, found.answer.why);
  return *std::move(found.link);
}

std::shared_ptr<std::mutex> Instance::dial_lock(std::uint64_t cluster_id) {
  const std::lock_guard lock(mutex_);
  auto& one = dialling_[cluster_id];
  if (!one) one = std::make_shared<std::mutex>();
  return one;
}

std::vector<Answer> Instance::link(const std::vector<Cluster>& clusters, std::int64_t timeout_ms) {
  return for_each(clusters, [&](const Cluster& cluster) {
    return answered("link", [&] {
      const auto dialling = dial_lock(cluster.id);
      const std::lock_guard one_at_a_time(*dialling);
      return link_one(cluster, timeout_ms);
    });
  });
}

Answer Instance::link_one(const Cluster& cluster, std::int64_t timeout_ms) {
  {
    const std::lock_guard lock(mutex_);
    if (auto answer = book_.may_dial(cluster.id, cluster.local_addresses, cluster.remote.size(), node_.links()); !answer.ok()) return answer;
  }
  const auto& [host, port] = cluster.remote.front();
  Link link;
  try {
    // Whoever answers there may be linked under another id than was asked for: that link must not suffer.
    link = node_.connect(host, port, kvferry::Deadline::after_ms(timeout_ms), false);
  } catch (const kvferry::Error& error) {
    if (error.outcome().kind != Kind::already_linked) throw;
    const std::lock_guard lock(mutex_);
    if (book_.adopt(cluster.id, node_.links())) return {};
    throw;
  }
  Answer answer;
  {
    const std::lock_guard lock(mutex_);
    answer = book_.dialled(link, host, port);
  }
  if (answer.ok()) return answer;
  try {
    node_.unlink(link, kvferry::Deadline::after_ms(1000), false);
  } catch (const kvferry::Error&) {
    node_.unlink(link, kvferry::Deadline::after_ms(1000), true);
  }
  return answer;
}

std::vector<Answer> Instance::unlink(const std::vector<Cluster>& clusters, std::int64_t timeout_ms, bool force) {
  return for_each(clusters, [&](const Cluster& cluster) { return answered("unlink", [&] { return unlink_one(cluster, timeout_ms, force); }); });
}

Answer Instance::unlink_one(const Cluster& cluster, std::int64_t timeout_ms, bool force) {
  rules::LinkBook<Link, Facts>::Parting parting;
  {
    const std::lock_guard lock(mutex_);
    parting = book_.parting(cluster.id, cluster.remote.size(), force, node_.links());
  }
  auto answer = std::move(parting.answer);
  if (parting.links.empty()) return answer;
  const auto until = kvferry::Deadline::after_ms(timeout_ms);
  bool lost = false;
  for (const auto& link : parting.links) lost |= !link->alive() && link->death().kind == Kind::peer_lost;
  if (parting.tell_if_lost && lost) {
    // The peer did not take leave, so it is told; if it cannot be, the local entry stays until it is forced.
    try {
      const auto& [host, port] = cluster.remote.front();
      kvferry::dial_tcp(host, port, until);
    } catch (const kvferry::Error& error) {
      answer = {status_of(error, "unlink"), sentence_of(error) + "; unlink by force"};
    }
  }
  for (const auto& link : parting.links) {
    auto ended = answered("unlink", [&] {
      node_.unlink(link, until, force);
      return Answer{};
    });
    if (!ended.ok()) answer = std::move(ended);
  }
  if (answer.ok()) {
    const std::lock_guard lock(mutex_);
    book_.parted(cluster.id);
  }
  return answer;
}

// --- caches

namespace {

rules::UnitGeometry geometry_of(const CacheDesc& desc) {
  if (desc.placement != CachePlacement::kHost && desc.placement != CachePlacement::kDevice)
    throw rules::RuleError(said(static_cast<std::uint32_t>(desc.placement), " is no placement"));
  return rules::unit_geometry(desc.num_tensors, desc.shape, static_cast<std::int64_t>(desc.data_type));
}

}  // namespace

std::int64_t Instance::register_cache(const CacheDesc& desc, const std::vector<std::uint64_t>& addresses) {
  rules::check_addresses(addresses.size(), desc.num_tensors, std::ranges::find(addresses, 0u) != addresses.end());
  const auto units = geometry_of(desc);
  kvferry::Geometry geometry;
  geometry.layout = kvferry::Layout::mixed;
  geometry.unit_bytes = geometry.stride_bytes = units.unit_bytes;
  geometry.count = units.count;
  for (const auto address : addresses) geometry.tensors.push_back({address, 0, 0});
  return static_cast<std::int64_t>(node_.registry().add(std::move(geometry), kvferry::host_kind, {}, true, kvferry::KeyedBy::id)->geometry.cache_id);
}

void Instance::unregister_cache(std::int64_t cache_id) {
  if (cache_id <= 0) return;
  const auto id = static_cast<std::uint64_t>(cache_id);
  // One that was allocated is not known under the ids of what was registered, as one that was registered is not to deallocate().
  if (const auto cache = node_.registry().find(id); cache && cache->allocated) return;
  node_.registry().remove(id);
}

rules::Share* Instance::share_of(CachePlacement placement) {
  auto& share = placement == CachePlacement::kHost ? host_share_ : device_share_;
  return share ? &*share : nullptr;
}

Cache Instance::allocate(const CacheDesc& desc) {
  const auto units = geometry_of(desc);
  const std::lock_guard lock(shares_mutex_);
  auto* const share = share_of(desc.placement);
  if (share == nullptr)
    throw Refused(rules::status::feature_not_enabled,
                  said("no memory pool is configured: give Initialize the option ", desc.placement == CachePlacement::kHost ? rules::option::host_pool : rules::option::device_pool));
  const auto bytes = share->wanted(desc.num_tensors, units.unit_bytes * units.count);
  const auto cache = node_.registry().allocate("", kvferry::Layout::mixed, desc.num_tensors, units.unit_bytes, units.count, {}, kvferry::KeyUse::never,
                                                 kvferry::KeyedBy::id);
  share->take(cache->geometry.cache_id, bytes);
  Cache out;
  out.cache_id = static_cast<std::int64_t>(cache->geometry.cache_id);
  for (const auto& tensor : cache->geometry.tensors) out.tensor_addrs.push_back(static_cast<std::uintptr_t>(tensor.address));
  out.cache_desc = desc;
  return out;
}

void Instance::deallocate(std::int64_t cache_id) {
  {
    const std::lock_guard lock(shares_mutex_);
    if (!device_share_ && !host_share_) throw Refused(rules::status::feature_not_enabled, "no memory pool is configured");
  }
  if (cache_id <= 0) return;
  node_.registry().deallocate(static_cast<std::uint64_t>(cache_id));
  forget(cache_id);
}

void Instance::forget(std::int64_t cache_id) {
  const std::lock_guard lock(shares_mutex_);
  for (auto* share : {&device_share_, &host_share_})
    if (*share) (*share)->give_back(static_cast<std::uint64_t>(cache_id));
}

std::shared_ptr<kvferry::Cache> Instance::own(std::int64_t cache_id) {
  auto cache = cache_id > 0 ? node_.registry().find(static_cast<std::uint64_t>(cache_id)) : nullptr;
  if (!cache) throw Refused(rules::status::kv_cache_not_exist, said("cache ", cache_id, " does not exist here"));
  return cache;
}

// --- transfers

kvferry::Target Instance::target(const Link& link, const CacheIndex& index, bool pushing) {
  kvferry::Target target;
  switch (rules::meaning_of_id(index.cache_id, options_.remote, pushing)) {
    case rules::IdMeans::cache: target.id = static_cast<std::uint64_t>(index.cache_id); break;
    case rules::IdMeans::blocks_of_model_0: target.by = kvferry::Target::By::blocks_key; break;
    case rules::IdMeans::request_0:  // any row of that cache, not only the one that the key names
      target.by = kvferry::Target::By::request;
      target.id = node_.describe(link, target, deadline()).first->geometry.cache_id;
      target.by = kvferry::Target::By::id;
      break;
  }
  return target;
}

template <class MakeMoves>
void Instance::pull(const CacheIndex& source, const kvferry::Cache& into, MakeMoves&& make_moves) {
  const auto link = link_to(source.cluster_id);
  auto from = target(link, source, false);
  node_.pull_now(link, std::move(from), into.geometry.cache_id, make_moves(), deadline(), any_transport);
}

template <class MakeMoves>
void Instance::push(const Cache& source, const CacheIndex& into, MakeMoves&& make_moves) {
  const auto link = link_to(into.cluster_id);
  auto to = target(link, into, true);
  const auto operation = node_.push(link, static_cast<std::uint64_t>(source.cache_id), std::move(to), make_moves(), deadline(), any_transport);
  kvferry::checked(*operation, operation->run_here());
}

void Instance::pull_row(const CacheIndex& source, std::int64_t into, std::uint32_t row, std::int64_t size_bytes, const KvCacheExtParam& layers) {
  rules::check_size(size_bytes);
  const auto mine = own(into);
  const auto ranges = pulled(layers, mine->geometry.tensors.size());
  rules::check_row("batch_index", row, mine->geometry.count);
  pull(source, *mine, [&] { return kvferry::Moves::make_row(source.batch_index, row, size_bytes, ranges.source, ranges.destination); });
}

void Instance::pull_blocks(const CacheIndex& source, std::int64_t into, const std::vector<std::uint64_t>& from, const std::vector<std::uint64_t>& to,
                           const KvCacheExtParam& layers) {
  rules::check_paired(from.size(), to.size());
  if (source.batch_index != 0) throw rules::RuleError(said("batch_index of the source must be 0 for blocks, but is ", source.batch_index));
  const auto mine = own(into);
  const auto ranges = pulled(layers, mine->geometry.tensors.size());
  pull(source, *mine, [&] { return blocks_of(from, to, ranges); });
}

namespace {
void check_pusher(const Cache& source) {
  if (source.cache_desc.placement != CachePlacement::kDevice) throw rules::RuleError("placement of the source of a push must be kDevice");
}
}  // namespace

void Instance::push_row(const Cache& source, const CacheIndex& into, std::uint32_t row, const KvCacheExtParam& layers) {
  check_pusher(source);
  const auto mine = own(source.cache_id);
  const auto ranges = pushed(layers, source.cache_desc.num_tensors, mine->geometry.tensors.size());
  rules::check_row("src_batch_index", row, mine->geometry.count);
  push(source, into, [&] { return kvferry::Moves::make_row(row, into.batch_index, -1, ranges.source, ranges.destination); });
}

void Instance::push_blocks(const Cache& source, const CacheIndex& into, const std::vector<std::uint64_t>& from, const std::vector<std::uint64_t>& to,
                           const KvCacheExtParam& layers) {
  check_pusher(source);
  rules::check_paired(from.size(), to.size());
  if (into.batch_index != 0) throw rules::RuleError(said("batch_index of the destination must be 0 for blocks, but is ", into.batch_index));
  const auto ranges = pushed(layers, source.cache_desc.num_tensors, own(source.cache_id)->geometry.tensors.size());
  push(source, into, [&] { return blocks_of(from, to, ranges); });
}

// --- within this instance

void Instance::copy_row(std::int64_t source, std::int64_t into, std::uint32_t source_row, std::uint32_t row, std::uint64_t offset, std::int64_t size) {
  rules::check_size(size);
  const auto from = own(source), to = own(into);
  const auto bytes = rules::copied_bytes(offset, size, from->geometry.unit_bytes, to->geometry.unit_bytes);
  rules::check_row("src_batch_index", source_row, from->geometry.count);
  rules::check_row("dst_batch_index", row, to->geometry.count);
  kvferry::Target there, here;
  there.id = from->geometry.cache_id;
  here.id = to->geometry.cache_id;
  node_.copy(there, here, *kvferry::Moves::make_row(source_row, row, static_cast<std::int64_t>(bytes), {}, {}), offset);
}

void Instance::copy_blocks(std::int64_t source, std::int64_t into, const std::vector<std::uint64_t>& from, const std::vector<std::vector<std::uint64_t>>& to) {
  std::vector<std::uint64_t> sources, destinations;
  for (const auto& list : to) {
    if (!from.empty() || !list.empty()) rules::check_paired(from.size(), list.size());
    sources.insert(sources.end(), from.begin(), from.end());
    destinations.insert(destinations.end(), list.begin(), list.end());
  }
  if (sources.empty()) return;
  const auto there = own(source), here = own(into);
  // Within one cache a later pair may read what an earlier one has written.
  const auto moves = kvferry::Moves::make_blocks(numbers("src_blocks", sources), sources.size(), numbers("dst_blocks", destinations), destinations.size(), {}, {},
                                                 source == into);
  node_.copy(there->geometry.cache_id, here->geometry.cache_id, *moves);
}

}  // namespace llm_datadist
