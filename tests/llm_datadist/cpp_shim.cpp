// The llm_datadist C++ API as plain C functions, for tests that call it from Python. Compiled against the installed package.
#include <cstring>
#include <map>
#include <vector>

#include "llm_datadist/llm_datadist.h"

using namespace llm_datadist;

namespace {

std::map<AscendString, AscendString> options_of(int n, const char **names, const char **values) {
  std::map<AscendString, AscendString> options;
  for (int i = 0; i < n; ++i) options[names[i]] = values[i];
  return options;
}

std::vector<ClusterInfo> clusters_of(int n, const uint64_t *ids, const char **ips, const uint16_t *ports) {
  std::vector<ClusterInfo> clusters(static_cast<std::size_t>(n));
  for (int i = 0; i < n; ++i) {
    auto &cluster = clusters[static_cast<std::size_t>(i)];
    cluster.remote_cluster_id = ids[i];
    if (ips[i] == nullptr) continue;
    cluster.remote_ip_infos.resize(1);
    cluster.remote_ip_infos[0].ip = ips[i];
    cluster.remote_ip_infos[0].port = ports[i];
  }
  return clusters;
}

KvCacheExtParam layers_of(const int32_t *layers) {
  KvCacheExtParam ext;
  if (layers == nullptr) return ext;
  ext.src_layer_range = {layers[0], layers[1]};
  ext.dst_layer_range = {layers[2], layers[3]};
  ext.tensor_num_per_layer = static_cast<uint8_t>(layers[4]);
  return ext;
}

CacheDesc desc_of(uint32_t tensors, int data_type, const int64_t *shape, int dims, uint32_t placement) {
  CacheDesc desc;
  desc.num_tensors = tensors;
  desc.data_type = static_cast<DataType>(data_type);
  desc.shape.assign(shape, shape + dims);
  desc.placement = static_cast<CachePlacement>(placement);
  return desc;
}

Cache cache_of(int64_t id, uint32_t tensors = 0, uint32_t placement = 1) {
  Cache cache;
  cache.cache_id = id;
  cache.cache_desc.num_tensors = tensors;
  cache.cache_desc.placement = static_cast<CachePlacement>(placement);
  return cache;
}

CacheIndex index_of(uint64_t cluster, int64_t id, uint32_t row) {
  CacheIndex index{};
  index.cluster_id = cluster;
  index.cache_id = id;
  index.batch_index = row;
  return index;
}

std::vector<uint64_t> list(const uint64_t *numbers, int n) { return {numbers, numbers + n}; }

}  // namespace

extern "C" {

LlmDataDist *door_make(uint64_t cluster, int role) { return new LlmDataDist(cluster, static_cast<LlmRole>(role)); }
void door_drop(LlmDataDist *door) { delete door; }
uint32_t door_initialize(LlmDataDist *door, int n, const char **names, const char **values) { return door->Initialize(options_of(n, names, values)); }
void door_finalize(LlmDataDist *door) { door->Finalize(); }
uint32_t door_set_role(LlmDataDist *door, int role, int n, const char **names, const char **values) {
  return door->SetRole(static_cast<LlmRole>(role), options_of(n, names, values));
}

// rets: as many as clusters; those that the call did not fill stay as they are.
uint32_t door_link(LlmDataDist *door, int n, const uint64_t *ids, const char **ips, const uint16_t *ports, int timeout, uint32_t *rets) {
  std::vector<Status> found;
  const auto status = door->LinkLlmClusters(clusters_of(n, ids, ips, ports), found, timeout);
  if (!found.empty()) std::memcpy(rets, found.data(), found.size() * sizeof *rets);
  return status;
}
uint32_t door_unlink(LlmDataDist *door, int n, const uint64_t *ids, const char **ips, const uint16_t *ports, int timeout, int force, uint32_t *rets) {
  std::vector<Status> found;
  const auto status = door->UnlinkLlmClusters(clusters_of(n, ids, ips, ports), found, timeout, force != 0);
  if (!found.empty()) std::memcpy(rets, found.data(), found.size() * sizeof *rets);
  return status;
}

uint32_t door_register(LlmDataDist *door, uint32_t tensors, int data_type, const int64_t *shape, int dims, uint32_t placement, const uint64_t *addrs,
                       int n, int64_t *id) {
  return door->RegisterKvCache(desc_of(tensors, data_type, shape, dims, placement), list(addrs, n), {}, *id);
}
uint32_t door_unregister(LlmDataDist *door, int64_t id) { return door->UnregisterKvCache(id); }
uint32_t door_allocate(LlmDataDist *door, uint32_t tensors, int data_type, const int64_t *shape, int dims, uint32_t placement, int64_t *id, uint64_t *addrs) {
  Cache cache;
  const auto status = door->AllocateCache(desc_of(tensors, data_type, shape, dims, placement), cache);
  *id = cache.cache_id;
  for (std::size_t i = 0; i < cache.tensor_addrs.size(); ++i) addrs[i] = cache.tensor_addrs[i];
  return status;
}
uint32_t door_deallocate(LlmDataDist *door, int64_t id) { return door->DeallocateCache(id); }

uint32_t door_pull_cache(LlmDataDist *door, uint64_t cluster, int64_t id, uint32_t row, int64_t into, uint32_t into_row, int64_t size, const int32_t *layers) {
  return door->PullKvCache(index_of(cluster, id, row), cache_of(into), into_row, size, layers_of(layers));
}
uint32_t door_pull_blocks(LlmDataDist *door, uint64_t cluster, int64_t id, uint32_t row, int64_t into, const uint64_t *from, int n, const uint64_t *to, int m,
                          const int32_t *layers) {
  return door->PullKvBlocks(index_of(cluster, id, row), cache_of(into), list(from, n), list(to, m), layers_of(layers));
}
uint32_t door_push_cache(LlmDataDist *door, int64_t from, uint32_t tensors, uint32_t placement, uint64_t cluster, int64_t id, uint32_t into_row, uint32_t row,
                         int64_t size, const int32_t *layers) {
  return door->PushKvCache(cache_of(from, tensors, placement), index_of(cluster, id, into_row), row, size, layers_of(layers));
}
uint32_t door_push_blocks(LlmDataDist *door, int64_t from, uint32_t tensors, uint32_t placement, uint64_t cluster, int64_t id, uint32_t into_row,
                          const uint64_t *blocks, int n, const uint64_t *to, int m, const int32_t *layers) {
  return door->PushKvBlocks(cache_of(from, tensors, placement), index_of(cluster, id, into_row), list(blocks, n), list(to, m), layers_of(layers));
}
uint32_t door_copy_cache(LlmDataDist *door, int64_t from, int64_t to, uint32_t row, uint32_t into_row, uint64_t offset, int64_t size) {
  return door->CopyKvCache(cache_of(from), cache_of(to), row, into_row, offset, size);
}
// One list of destinations for each of `lists`, each as long as the sources.
uint32_t door_copy_blocks(LlmDataDist *door, int64_t from, int64_t to, const uint64_t *blocks, int n, const uint64_t *into, int lists) {
  std::vector<std::vector<uint64_t>> listed;
  for (int i = 0; i < lists; ++i) listed.push_back(list(into + i * n, n));
  return door->CopyKvBlocks(cache_of(from), cache_of(to), list(blocks, n), listed);
}

}  // extern "C"
