// Every method of the API between instances of one process: what moves, and what each call answers.
#include <sys/wait.h>

#include <thread>

#include "forms.cpp"
#include "sides.hpp"

using namespace sides;

namespace {

void the_listed_forms_run() {
  Side a(1), b(2);
  Memory mine(4), theirs(4);
  mine.fill(1);
  theirs.fill(2);
  CHECK_STATUS(LLM_SUCCESS, b.add(theirs));
  CHECK_STATUS(LLM_SUCCESS, a.link(b));
  CHECK_STATUS(LLM_SUCCESS, forms(a.datadist, 2, mine.addresses()));
}

void rows_blocks_and_layers_go_both_ways() {
  Side a(1), b(2);
  Memory mine(4), theirs(4);
  mine.fill(1);
  theirs.fill(2);
  CHECK_STATUS(LLM_SUCCESS, a.add(mine));
  CHECK_STATUS(LLM_SUCCESS, b.add(theirs));
  CHECK(mine.cache.cache_id == 1 && theirs.cache.cache_id == 1);
  CHECK_STATUS(LLM_SUCCESS, a.link(b));

  // A row, and a part of one.
  CHECK_STATUS(LLM_SUCCESS, a.datadist.PullKvCache({2, 1, 3}, mine.cache, 5));
  for (std::size_t t = 0; t < 4; ++t) CHECK(mine.has(t, 5, 2, t, 3) && mine.has(t, 4, 1) && mine.has(t, 6, 1));
  CHECK_STATUS(LLM_SUCCESS, a.datadist.PullKvCache({2, 1, 0}, mine.cache, 6, 4));
  CHECK(mine.tensors[0][6 * 16] == Memory::made(2, 0, 0, 0) && mine.tensors[0][6 * 16 + 1] == Memory::made(1, 0, 6, 1));

  // Blocks in reverse order, by the side that was linked to.
  theirs.fill(2);
  CHECK_STATUS(LLM_SUCCESS, b.datadist.PullKvBlocks({1, 1}, theirs.cache, {0, 1, 2, 3}, {3, 2, 1, 0}));
  for (std::size_t t = 0; t < 4; ++t)
    for (std::size_t u = 0; u < 4; ++u) CHECK(theirs.has(t, 3 - u, 1, t, u));
  for (std::size_t t = 0; t < 4; ++t) CHECK(theirs.has(t, 4, 2));

  // Layer by layer, one at a time, the second pair of tensors to the first.
  mine.fill(1);
  theirs.fill(2);
  KvCacheExtParam ext{};
  ext.src_layer_range = {1, 1};
  ext.dst_layer_range = {0, 0};
  CHECK_STATUS(LLM_SUCCESS, a.datadist.PushKvCache(mine.cache, {2, 1, 7}, 2, -1, ext));
  CHECK(theirs.has(0, 7, 1, 2, 2) && theirs.has(1, 7, 1, 3, 2) && theirs.has(2, 7, 2) && theirs.has(3, 7, 2));
  ext.tensor_num_per_layer = 1;
  for (int32_t layer = 0; layer < 4; ++layer) {
    ext.src_layer_range = ext.dst_layer_range = {layer, layer};
    CHECK_STATUS(LLM_SUCCESS, a.datadist.PushKvBlocks(mine.cache, {2, 1}, {0, 1, 2, 3}, {3, 2, 1, 0}, ext));
    for (std::size_t t = 0; t < 4; ++t) CHECK(theirs.has(t, 3, t <= static_cast<std::size_t>(layer) ? 1 : 2, t, t <= static_cast<std::size_t>(layer) ? 0 : 3));
  }

  // Ranges of a pull count if both are given.
  mine.fill(1);
  theirs.fill(2);
  ext.tensor_num_per_layer = 2;
  ext.src_layer_range = {0, 0};
  ext.dst_layer_range = {1, 1};
  CHECK_STATUS(LLM_SUCCESS, a.datadist.PullKvCache({2, 1, 1}, mine.cache, 1, -1, ext));
  CHECK(mine.has(0, 1, 1) && mine.has(2, 1, 2, 0, 1) && mine.has(3, 1, 2, 1, 1));
  ext.src_layer_range = {-1, -1};
  CHECK_STATUS(LLM_SUCCESS, a.datadist.PullKvCache({2, 1, 1}, mine.cache, 1, -1, ext));
  for (std::size_t t = 0; t < 4; ++t) CHECK(mine.has(t, 1, 2));

  CHECK_STATUS(LLM_SUCCESS, a.unlink(b));
  CHECK_STATUS(LLM_NOT_YET_LINK, a.datadist.PullKvCache({2, 1, 0}, mine.cache));
  CHECK_STATUS(LLM_SUCCESS, a.datadist.UnregisterKvCache(1));
  CHECK_STATUS(LLM_SUCCESS, a.datadist.UnregisterKvCache(1));
}

void layer_ranges_follow_their_rules() {
  Side a(1), b(2);
  Memory mine(10), theirs(10);
  CHECK_STATUS(LLM_SUCCESS, a.add(mine));
  CHECK_STATUS(LLM_SUCCESS, b.add(theirs));
  CHECK_STATUS(LLM_SUCCESS, a.link(b));
  KvCacheExtParam ext{};
  for (const auto &[width, status] : {std::pair<uint8_t, Status>{1, LLM_SUCCESS}, {2, LLM_SUCCESS}, {3, LLM_PARAM_INVALID}, {11, LLM_PARAM_INVALID}, {0, LLM_PARAM_INVALID}}) {
    ext.tensor_num_per_layer = width;
    CHECK_STATUS(status, a.datadist.PushKvCache(mine.cache, {2, 1, 0}, 0, -1, ext));
    CHECK_STATUS(status, a.datadist.PushKvBlocks(mine.cache, {2, 1, 0}, {0}, {0}, ext));
  }
  ext.tensor_num_per_layer = 3;  // whole caches have no layers
  CHECK_STATUS(LLM_SUCCESS, a.datadist.PullKvCache({2, 1, 0}, mine.cache, 0, -1, ext));
  ext.tensor_num_per_layer = 2;
  struct {
    std::pair<int32_t, int32_t> source, destination;
    Status pushed, pulled;
  } cases[] = {
      {{0, 0}, {4, 4}, LLM_SUCCESS, LLM_SUCCESS},       {{0, 4}, {0, 4}, LLM_SUCCESS, LLM_SUCCESS},
      {{0, 1}, {0, 0}, LLM_PARAM_INVALID, LLM_PARAM_INVALID}, {{0, 5}, {0, 5}, LLM_PARAM_INVALID, LLM_PARAM_INVALID},
      {{-2, 0}, {0, 0}, LLM_PARAM_INVALID, LLM_PARAM_INVALID}, {{0, 0}, {0, -2}, LLM_PARAM_INVALID, LLM_PARAM_INVALID},
      {{2, 1}, {2, 1}, LLM_PARAM_INVALID, LLM_PARAM_INVALID}, {{-1, -1}, {0, 0}, LLM_PARAM_INVALID, LLM_SUCCESS},
      {{-1, 3}, {-1, 3}, LLM_SUCCESS, LLM_SUCCESS},
  };
  for (const auto &one : cases) {
    ext.src_layer_range = one.source;
    ext.dst_layer_range = one.destination;
    CHECK_STATUS(one.pushed, a.datadist.PushKvCache(mine.cache, {2, 1, 0}, 0, -1, ext));
    CHECK_STATUS(one.pulled, a.datadist.PullKvCache({2, 1, 0}, mine.cache, 0, -1, ext));
  }
  auto undescribed = mine.cache;
  undescribed.cache_desc = {};
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.PushKvCache(undescribed, {2, 1, 0}));
  CHECK_STATUS(LLM_SUCCESS, a.datadist.PullKvCache({2, 1, 0}, undescribed));  // only the id of a destination is looked at
}

void misuse_is_a_status() {
  LlmDataDist none(1, LlmRole::kMix);
  int64_t id = 0;
  std::vector<Status> rets{LLM_FAILED};
  Cache cache;
  CHECK_STATUS(LLM_FAILED, none.RegisterKvCache({}, {1}, {}, id));
  CHECK_STATUS(LLM_FAILED, none.LinkLlmClusters({cluster(2, 1)}, rets));
  CHECK_STATUS(LLM_FAILED, none.PullKvCache({2, 1}, cache));
  CHECK_STATUS(LLM_FAILED, none.SetRole(LlmRole::kPrompt));
  CHECK_STATUS(LLM_FAILED, none.AllocateCache({}, cache));
  none.Finalize();

  const Options no_device;
  CHECK_STATUS(LLM_PARAM_INVALID, none.Initialize(no_device));
  for (const auto &[name, value] : {std::pair<const char *, const char *>{OPTION_DEVICE_ID, "0;1"}, {OPTION_DEVICE_ID, ""}, {OPTION_DEVICE_ID, "a"},
                                    {OPTION_LISTEN_IP_INFO, "nonsense"}, {OPTION_LISTEN_IP_INFO, "127.0.0.1:http"}, {OPTION_LISTEN_IP_INFO, "127.0.0.1:65536"},
                                    {OPTION_LISTEN_IP_INFO, "::1:7000"}, {OPTION_LISTEN_IP_INFO, ""}, {OPTION_SYNC_CACHE_WAIT_TIME, "0"},
                                    {OPTION_TRANSFER_BACKEND, "other"}, {"llm.MemPoolConfig", "{"}, {"kvferry.transports", "fax"}, {"kvferry.secret", ""}, {"kvferry.secrets", "s"}}) {
    auto given = options();
    given[name] = value;
    CHECK_STATUS(LLM_PARAM_INVALID, none.Initialize(given));
  }
  auto too_large = options();
  too_large["llm.MemPoolConfig"] = "{\"memory_size\": 1125899906842624}";
  CHECK_STATUS(LLM_OUT_OF_MEMORY, none.Initialize(too_large));
  LlmDataDist no_role(1, static_cast<LlmRole>(4));
  CHECK_STATUS(LLM_PARAM_INVALID, no_role.Initialize(options()));

  Side a(1);
  LlmDataDist second(2, LlmRole::kMix);
  CHECK_STATUS(LLM_FAILED, second.Initialize(options(a.port)));  // the port is taken
  CHECK_STATUS(LLM_SUCCESS, a.datadist.Initialize(no_device));    // a second call does nothing
  Memory memory;
  const auto addresses = memory.addresses();
  auto desc = memory.cache.cache_desc;
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.RegisterKvCache(desc, {}, {}, id));
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.RegisterKvCache(desc, {addresses[0]}, {}, id));
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.RegisterKvCache(desc, {addresses[0], addresses[1], addresses[2], 0}, {}, id));
  desc.shape = {8, 0};
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.RegisterKvCache(desc, addresses, {}, id));
  desc.shape = {8, 16};
  desc.data_type = DT_UNDEFINED;
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.RegisterKvCache(desc, addresses, {}, id));
  desc.data_type = DT_INT32;
  desc.placement = static_cast<CachePlacement>(2);
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.RegisterKvCache(desc, addresses, {}, id));
  CHECK(id == 0);
  CHECK_STATUS(LLM_SUCCESS, a.add(memory));
  CHECK_STATUS(LLM_SUCCESS, a.datadist.UnregisterKvCache(-5));

  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.LinkLlmClusters({}, rets));
  CHECK(rets.empty());
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.LinkLlmClusters({cluster(2, 1)}, rets, 0));
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.LinkLlmClusters({cluster(2, 1, "")}, rets));
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.LinkLlmClusters({ClusterInfo{}}, rets));
  CHECK(rets == std::vector<Status>{LLM_PARAM_INVALID});
  CHECK_STATUS(LLM_LINK_FAILED, a.datadist.LinkLlmClusters({cluster(2, free_port())}, rets));
  CHECK_STATUS(LLM_SUCCESS, a.datadist.UnlinkLlmClusters({cluster(2, 1)}, rets));  // nothing to end
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.UnlinkLlmClusters({cluster(2, 1)}, rets, -1));

  CHECK_STATUS(LLM_NOT_YET_LINK, a.datadist.PullKvCache({2, 1}, memory.cache));
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.PullKvCache({1, 1}, memory.cache));  // this cluster itself
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.PullKvCache({2, 1}, memory.cache, 8));
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.PullKvCache({2, 1}, memory.cache, 0, 0));
  CHECK_STATUS(LLM_KV_CACHE_NOT_EXIST, a.datadist.PullKvCache({2, 1}, Cache{}));
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.PullKvBlocks({2, 1, 1}, memory.cache, {0}, {0}));
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.PullKvBlocks({2, 1}, memory.cache, {}, {}));
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.PullKvBlocks({2, 1}, memory.cache, {0, 1}, {0}));
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.PushKvCache(memory.cache, {2, 1}, 0, 4));
  auto on_host = memory.cache;
  on_host.cache_desc.placement = CachePlacement::kHost;
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.PushKvCache(on_host, {2, 1}));
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.PushKvBlocks(on_host, {2, 1}, {0}, {0}));
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.SetRole(static_cast<LlmRole>(0)));
  a.datadist.Finalize();
  CHECK_STATUS(LLM_FAILED, a.datadist.PullKvCache({2, 1}, memory.cache));
  CHECK_STATUS(LLM_SUCCESS, a.datadist.Initialize(options(a.port)));
}

void links_answer_as_they_should() {
  Side a(1), b(2);
  Memory mine, theirs;
  CHECK_STATUS(LLM_SUCCESS, a.add(mine));
  CHECK_STATUS(LLM_SUCCESS, b.add(theirs));
  std::vector<Status> rets;
  CHECK_STATUS(LLM_LINK_FAILED, a.datadist.LinkLlmClusters({cluster(2, b.port), cluster(2, b.port), cluster(3, free_port())}, rets, 5000));
  CHECK(rets.size() == 3 && rets[0] + rets[1] == LLM_ALREADY_LINK && rets[2] == LLM_LINK_FAILED);
  CHECK_STATUS(LLM_ALREADY_LINK, a.link(b));
  CHECK_STATUS(LLM_ALREADY_LINK, b.link(a));
  CHECK_STATUS(LLM_KV_CACHE_NOT_EXIST, a.datadist.PullKvCache({2, 9}, mine.cache));
  CHECK_STATUS(LLM_KV_CACHE_NOT_EXIST, a.datadist.PullKvCache({2, 1, 8}, mine.cache));
  CHECK_STATUS(LLM_KV_CACHE_NOT_EXIST, a.datadist.PullKvCache({2, 0}, mine.cache));
  CHECK_STATUS(LLM_KV_CACHE_NOT_EXIST, a.datadist.PushKvCache(mine.cache, {2, -1}));
  CHECK_STATUS(LLM_EXIST_LINK, a.datadist.SetRole(LlmRole::kPrompt));
  CHECK_STATUS(LLM_SUCCESS, b.unlink(a, true));  // by force, on the side that did not link
  CHECK_STATUS(LLM_SUCCESS, a.unlink(b, true));
  CHECK_STATUS(LLM_SUCCESS, a.link(b));
  b.datadist.Finalize();
  Status gone;
  while ((gone = a.datadist.PullKvCache({2, 1}, mine.cache)) == LLM_SUCCESS) {
  }
  CHECK(gone == LLM_NOT_YET_LINK || gone == LLM_FAILED);
  CHECK_STATUS(LLM_SUCCESS, a.unlink(b, true));
  CHECK_STATUS(LLM_SUCCESS, b.datadist.Initialize(options(b.port)));
  CHECK_STATUS(LLM_SUCCESS, a.link(b));
  CHECK_STATUS(LLM_SUCCESS, a.unlink(b));
  CHECK_STATUS(LLM_SUCCESS, a.datadist.SetRole(LlmRole::kDecoder));  // no listener any more
  CHECK_STATUS(LLM_LINK_FAILED, b.link(a));
  const auto port = free_port();
  CHECK_STATUS(LLM_SUCCESS, a.datadist.SetRole(LlmRole::kPrompt, options(port)));
  CHECK_STATUS(LLM_FAILED, a.datadist.SetRole(LlmRole::kPrompt, options(b.port)));  // taken: the listener stays where it was
  CHECK_STATUS(LLM_SUCCESS, b.datadist.LinkLlmClusters({cluster(1, port)}, rets, 5000));
}

void an_instance_may_link_to_itself_and_not_pull_from_itself() {
  Side a(1);
  Memory mine;
  CHECK_STATUS(LLM_SUCCESS, a.add(mine));
  CHECK_STATUS(LLM_SUCCESS, a.link(a));
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.PullKvCache({1, 1}, mine.cache));
}

void links_go_over_ipv6() {
  LlmDataDist listener(1, LlmRole::kPrompt), dialler(2, LlmRole::kDecoder);
  const auto port = free_port();
  auto given = options();
  given[OPTION_LISTEN_IP_INFO] = ("[::1]:" + std::to_string(port)).c_str();
  if (listener.Initialize(given) != LLM_SUCCESS) return;  // this machine has no IPv6
  CHECK_STATUS(LLM_SUCCESS, dialler.Initialize(options()));
  std::vector<Status> rets;
  CHECK_STATUS(LLM_SUCCESS, dialler.LinkLlmClusters({cluster(1, port, "::1")}, rets, 5000));
}

void caches_can_be_allocated_and_copied() {
  const Options pools{{"llm.MemPoolConfig", "{\"memory_size\": 1048576}"}};
  Side a(1, pools), b(2);
  Cache made, other;
  CHECK_STATUS(LLM_FEATURE_NOT_ENABLED, b.datadist.AllocateCache(Memory().cache.cache_desc, made));
  CHECK_STATUS(LLM_FEATURE_NOT_ENABLED, b.datadist.DeallocateCache(1));
  auto desc = Memory(2).cache.cache_desc;
  CHECK_STATUS(LLM_SUCCESS, a.datadist.AllocateCache(desc, made));
  CHECK(made.cache_id == 1 && made.tensor_addrs.size() == 2 && made.cache_desc.num_tensors == 2);
  CHECK_STATUS(LLM_SUCCESS, a.datadist.AllocateCache(desc, other));
  auto on_host = desc;
  on_host.placement = CachePlacement::kHost;
  Cache untouched;
  CHECK_STATUS(LLM_FEATURE_NOT_ENABLED, a.datadist.AllocateCache(on_host, untouched));
  auto large = desc;
  large.shape = {8, 1 << 20};
  CHECK_STATUS(LLM_OUT_OF_MEMORY, a.datadist.AllocateCache(large, untouched));
  CHECK(untouched.cache_id == -1);

  for (auto address : made.tensor_addrs)
    for (int i = 0; i < 128; ++i) reinterpret_cast<int32_t *>(address)[i] = i + 1;
  const auto at = [](const Cache &cache, int tensor, int unit, int word) { return reinterpret_cast<int32_t *>(cache.tensor_addrs[static_cast<std::size_t>(tensor)])[unit * 16 + word]; };
  CHECK_STATUS(LLM_SUCCESS, a.datadist.CopyKvCache(made, other, 2, 5));
  CHECK(at(other, 1, 5, 0) == 33 && at(other, 1, 5, 15) == 48 && at(other, 1, 4, 15) == 0 && at(other, 1, 6, 0) == 0);
  CHECK_STATUS(LLM_SUCCESS, a.datadist.CopyKvCache(made, other, 0, 0, 8, 4));
  CHECK(at(other, 0, 0, 2) == 3 && at(other, 0, 0, 1) == 0 && at(other, 0, 0, 3) == 0);
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.CopyKvCache(made, other, 0, 0, 64, 4));
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.CopyKvCache(made, other, 8, 0));
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.CopyKvCache(made, other, 0, 0, 0, -2));
  CHECK_STATUS(LLM_KV_CACHE_NOT_EXIST, a.datadist.CopyKvCache(made, untouched));
  CHECK_STATUS(LLM_SUCCESS, a.datadist.CopyKvBlocks(made, made, {0, 1}, {{2, 3}, {6, 7}}));
  CHECK(at(made, 0, 3, 0) == 17 && at(made, 1, 6, 15) == 16 && at(made, 1, 5, 0) == 81);
  CHECK_STATUS(LLM_SUCCESS, a.datadist.CopyKvBlocks(made, other, {1}, {{7}}));
  CHECK(at(other, 0, 7, 0) == 17);
  CHECK_STATUS(LLM_SUCCESS, a.datadist.CopyKvBlocks(made, other, {1}, {}));
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.CopyKvBlocks(made, other, {1}, {{7, 6}}));
  CHECK_STATUS(LLM_PARAM_INVALID, a.datadist.CopyKvBlocks(made, other, {8}, {{7}}));

  // Peers map what was allocated.
  Memory theirs(2);
  CHECK_STATUS(LLM_SUCCESS, b.add(theirs));
  CHECK_STATUS(LLM_SUCCESS, b.link(a));
  CHECK_STATUS(LLM_SUCCESS, b.datadist.PullKvBlocks({1, 1}, theirs.cache, {0, 1, 2, 3, 4, 5, 6, 7}, {0, 1, 2, 3, 4, 5, 6, 7}));
  for (std::size_t k = 0; k < 128; ++k) CHECK(theirs.tensors[1][k] == reinterpret_cast<int32_t *>(made.tensor_addrs[1])[k]);
  CHECK_STATUS(LLM_SUCCESS, a.datadist.DeallocateCache(1));
  CHECK_STATUS(LLM_SUCCESS, a.datadist.DeallocateCache(1));
  CHECK_STATUS(LLM_KV_CACHE_NOT_EXIST, b.datadist.PullKvBlocks({1, 1}, theirs.cache, {0}, {0}));
  large.shape = {6, 16384};  // 384 KiB each: fits, now that the first one is gone
  CHECK_STATUS(LLM_SUCCESS, a.datadist.AllocateCache(large, untouched));
}

void rows_of_no_whole_bytes_are_refused() {
  Side a(1, {{"llm.MemPoolConfig", "{\"memory_size\": 1048576}"}});
  Memory mine(1);
  Cache made;
  for (const auto &shape : std::vector<std::vector<int64_t>>{{4, 3}, {2}, {3, 1, 5}, {4, 6}, {1, 3}}) {
    const Status expected = shape[0] == 1 || shape.back() == 6 ? LLM_SUCCESS : LLM_PARAM_INVALID;
    mine.cache.cache_desc.data_type = DT_INT4;
    mine.cache.cache_desc.shape = shape;
    const auto registered = a.add(mine), allocated = a.datadist.AllocateCache(mine.cache.cache_desc, made);
    CHECK(registered == expected && allocated == expected);
  }
}

void a_forked_child_is_told() {
  Side a(1);
  Memory mine;
  CHECK_STATUS(LLM_SUCCESS, a.add(mine));
  const auto child = fork();
  if (child == 0) {
    const bool told = a.datadist.PullKvCache({2, 1}, mine.cache) == LLM_FAILED && a.datadist.Initialize(options()) == LLM_FAILED;
    a.datadist.Finalize();
    _exit(told ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK_STATUS(LLM_NOT_YET_LINK, a.datadist.PullKvCache({2, 1}, mine.cache));
}

}  // namespace

int main() {
  the_listed_forms_run();
  rows_blocks_and_layers_go_both_ways();
  layer_ranges_follow_their_rules();
  misuse_is_a_status();
  links_answer_as_they_should();
  an_instance_may_link_to_itself_and_not_pull_from_itself();
  links_go_over_ipv6();
  caches_can_be_allocated_and_copied();
  rows_of_no_whole_bytes_are_refused();
  a_forked_child_is_told();
  return sides::failures == 0 ? 0 : 1;
}
