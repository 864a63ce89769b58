// What callers write, in every standard that the headers are for. Compiled with warnings as errors, and run by test_api.cpp.
#include <cstdio>
#include <vector>

#include "llm_datadist/llm_datadist.h"

using namespace llm_datadist;

static_assert(LLM_WAIT_PROC_TIMEOUT == LLM_WAIT_PROCESS_TIMEOUT, "two spellings of one status");

// Statuses of all calls, or'ed: 0 when all went well. `peer` has cache 1 of the same sort.
Status forms(LlmDataDist &datadist, uint64_t peer, std::vector<uint64_t> addrs) {
  CacheDesc d{};
  d.data_type = DT_INT32;
  d.shape = {8, 16};
  d.num_tensors = static_cast<uint32_t>(addrs.size());
  int64_t cache_id = -1;
  Status ret = datadist.RegisterKvCache(d, addrs, {}, cache_id);
  Cache cache{};
  cache.cache_id = cache_id;
  cache.cache_desc = d;
  CacheIndex i{7, 1, 0};
  CacheIndex j{7, 1};
  if (j.batch_index != 0 || j.reserved[0] != 0) return LLM_FAILED;
  i.cluster_id = j.cluster_id = peer;
  KvCacheExtParam ext{};
  ret |= datadist.PullKvCache(i, cache, 0);
  ret |= datadist.PushKvCache(cache, i, 0, -1, ext);
  ret |= datadist.PullKvBlocks(i, cache, {0, 1, 2, 3}, {3, 2, 1, 0});
  ret |= datadist.PushKvBlocks(cache, j, {0, 1, 2, 3}, {3, 2, 1, 0}, ext);
  std::printf("%u", ret);
  std::printf("\n");
  return ret;
}
