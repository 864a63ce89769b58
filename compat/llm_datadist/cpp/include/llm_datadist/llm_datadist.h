// llm_datadist: moving the KV caches of large language models between processes, as its vendor's C++ API has it, on hosts
// without the vendor's devices. Caches lie in host memory, whatever their placement says.
//
// Every method answers with a status (llm_error_codes.h) and writes one line to stderr when that is not LLM_SUCCESS; none
// throws. All but Initialize and Finalize may be called from any number of threads. docs/cpp.md has the rest.
#ifndef LLM_DATADIST_LLM_DATADIST_H_
#define LLM_DATADIST_LLM_DATADIST_H_

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "llm_datadist/llm_engine_types.h"
#include "llm_datadist/llm_error_codes.h"

#define LLM_DATADIST_API __attribute__((visibility("default")))

namespace llm_datadist {

// One cluster: caches, a listener, links. A process may have several.
class LLM_DATADIST_API LlmDataDist {
 public:
  LlmDataDist(uint64_t cluster_id, LlmRole role);
  ~LlmDataDist();  // finalizes
  LlmDataDist(const LlmDataDist &) = delete;
  LlmDataDist &operator=(const LlmDataDist &) = delete;

  // Starts the instance, with OPTION_DEVICE_ID at least. A second call does nothing and succeeds.
  Status Initialize(const std::map<AscendString, AscendString> &options);
  // Ends links and caches, and transfers of other threads, which answer LLM_FAILED; when it returns nobody's bytes move in
  // registered memory any more. Initialize may follow.
  void Finalize();
  // Role is a label; the listener moves to where OPTION_LISTEN_IP_INFO says, and closes without it.
  Status SetRole(LlmRole role, const std::map<AscendString, AscendString> &options = {});

  // `rets`: the outcome of each cluster, in order. The status is that of the last one that failed. The timeout is that of each
  // link; 16 are made at a time.
  Status LinkLlmClusters(const std::vector<ClusterInfo> &clusters, std::vector<Status> &rets, int32_t timeout_in_millis = 1000);
  // Together with the peer, or by `force_flag` on this side alone. Transfers in flight are waited for, or ended if forced.
  Status UnlinkLlmClusters(const std::vector<ClusterInfo> &clusters, std::vector<Status> &rets, int32_t timeout_in_millis = 1000,
                           bool force_flag = false);

  // Memory of the caller's, one address for each tensor, usable by rows and by blocks. Only transfers touch it.
  Status RegisterKvCache(const CacheDesc &cache_desc, const std::vector<uint64_t> &addrs, const RegisterCfg &cfg, int64_t &cache_id);
  // When it returns nobody's bytes move there any more. An unknown id is fine, and so is that of an allocated cache: nothing happens.
  Status UnregisterKvCache(int64_t cache_id);
  // Memory of the pool that option "llm.MemPoolConfig" (kHost: "llm.HostMemPoolConfig") has made, which peers on this host map.
  Status AllocateCache(const CacheDesc &cache_desc, Cache &cache);
  // Gives the memory back. An unknown id is fine, and so is that of a registered cache: nothing happens.
  Status DeallocateCache(int64_t cache_id);

  // A row of the cache at `src_cache_index` into row `batch_index`: its first `size` bytes of each tensor, -1: as many as a
  // row of `dst_cache` has, of which theirs may have more and not less.
  Status PullKvCache(const CacheIndex &src_cache_index, const Cache &dst_cache, uint32_t batch_index = 0, int64_t size = -1,
                     const KvCacheExtParam &ext_param = {});
  // Block src_blocks[i] into block dst_blocks[i].
  Status PullKvBlocks(const CacheIndex &src_cache_index, const Cache &dst_cache, const std::vector<uint64_t> &src_blocks,
                      const std::vector<uint64_t> &dst_blocks, const KvCacheExtParam &ext_param = {});
  // Row `src_batch_index` into the row that `dst_cache_index` names. `size` is -1.
  Status PushKvCache(const Cache &src_cache, const CacheIndex &dst_cache_index, uint32_t src_batch_index = 0, int64_t size = -1,
                     const KvCacheExtParam &ext_param = {});
  Status PushKvBlocks(const Cache &src_cache, const CacheIndex &dst_cache_index, const std::vector<uint64_t> &src_blocks,
                      const std::vector<uint64_t> &dst_blocks, const KvCacheExtParam &ext_param = {});

  // Within this instance: `size` bytes of a row into a row, both from `offset` on; -1: the rest of the source's row.
  Status CopyKvCache(const Cache &src_cache, const Cache &dst_cache, uint32_t src_batch_index = 0, uint32_t dst_batch_index = 0,
                     uint64_t offset = 0, int64_t size = -1);
  // Block src_blocks[i] into block list[i] of each list, one list after the other.
  Status CopyKvBlocks(const Cache &src_cache, const Cache &dst_cache, const std::vector<uint64_t> &src_blocks,
                      const std::vector<std::vector<uint64_t>> &dst_blocks_list);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace llm_datadist

#endif  // LLM_DATADIST_LLM_DATADIST_H_
