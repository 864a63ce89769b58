// What the two examples share: memory whose elements say where they are from, waiting with an end, and the steps that are the
// same in both: start, link, and the end, good or bad.
#ifndef KVFERRY_EXAMPLES_STEPS_H_
#define KVFERRY_EXAMPLES_STEPS_H_

#include <poll.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "llm_datadist/llm_datadist.h"

namespace steps {

using namespace llm_datadist;

constexpr uint64_t kPromptCluster = 1;
constexpr uint64_t kDecoderCluster = 2;
constexpr int64_t kUnits = 8;   // rows, or blocks
constexpr int64_t kWords = 16;  // int32 in each
constexpr uint32_t kTensors = 4;  // two layers: K and V of each
constexpr int kWaitSeconds = 30;

// Four tensors of int32 of shape {8, 16}. Every element says whose it is and where.
struct Memory {
  std::vector<std::vector<int32_t>> tensors;

  explicit Memory(uint64_t cluster) : tensors(kTensors, std::vector<int32_t>(kUnits * kWords)) {
    for (uint32_t t = 0; t < kTensors; ++t)
      for (int64_t unit = 0; unit < kUnits; ++unit)
        for (int64_t word = 0; word < kWords; ++word) tensors[t][unit * kWords + word] = Made(cluster, t, unit, word);
  }
  static int32_t Made(uint64_t cluster, uint32_t tensor, int64_t unit, int64_t word) {
    return static_cast<int32_t>(cluster * 10000 + tensor * 1000 + unit * kWords + word + 1);
  }
  std::vector<uint64_t> Addresses() const {
    std::vector<uint64_t> addresses;
    for (const auto &tensor : tensors) addresses.push_back(reinterpret_cast<uint64_t>(tensor.data()));
    return addresses;
  }
  // Whether `unit` of a tensor holds what `cluster` has had in its unit `from`. Another process may be writing there.
  bool Holds(uint32_t tensor, int64_t unit, uint64_t cluster, int64_t from) const {
    for (int64_t word = 0; word < kWords; ++word) {
      const volatile int32_t *at = &tensors[tensor][unit * kWords + word];
      if (*at != Made(cluster, tensor, from, word)) return false;
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    return true;
  }
  bool WaitFor(uint32_t tensor, int64_t unit, uint64_t cluster, int64_t from) const {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(kWaitSeconds);
    while (!Holds(tensor, unit, cluster, from)) {
      if (std::chrono::steady_clock::now() > until) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }
};

// Says what was done, and whether it went well.
inline bool Did(const char *what, Status status) {
  std::printf("%s: %s", what, status == LLM_SUCCESS ? "ok\n" : "failed");
  if (status != LLM_SUCCESS) std::printf(" with %u\n", status);
  std::fflush(stdout);
  return status == LLM_SUCCESS;
}
inline bool Found(const char *what, bool right) {
  std::printf("%s: %s\n", what, right ? "ok" : "WRONG");
  std::fflush(stdout);
  return right;
}

struct Arguments {
  bool is_prompt = false;
  std::string ip;
  uint16_t port = 0;
};

inline Arguments Parse(int argc, char **argv) {
  Arguments arguments;
  const char *colon = argc == 3 ? std::strrchr(argv[2], ':') : nullptr;
  if (colon == nullptr || (std::strcmp(argv[1], "prompt") != 0 && std::strcmp(argv[1], "decoder") != 0)) {
    std::fprintf(stderr, "usage: %s prompt LISTEN_IP:PORT | decoder PROMPT_IP:PORT\n", argv[0]);
    std::exit(2);
  }
  arguments.is_prompt = std::strcmp(argv[1], "prompt") == 0;
  arguments.ip.assign(argv[2], static_cast<std::size_t>(colon - argv[2]));
  arguments.port = static_cast<uint16_t>(std::atoi(colon + 1));
  return arguments;
}

inline bool Start(LlmDataDist &datadist, const Arguments &arguments) {
  std::map<AscendString, AscendString> options;
  options[OPTION_DEVICE_ID] = "0";
  options[OPTION_SYNC_CACHE_WAIT_TIME] = "5000";
  if (arguments.is_prompt) options[OPTION_LISTEN_IP_INFO] = (arguments.ip + ":" + std::to_string(arguments.port)).c_str();
  return Did("initialize", datadist.Initialize(options));
}

inline bool Register(LlmDataDist &datadist, const Memory &memory, Cache &cache) {
  CacheDesc desc{};
  desc.num_tensors = kTensors;
  desc.data_type = DT_INT32;
  desc.shape = {kUnits, kWords};
  cache.cache_desc = desc;
  return Did("register", datadist.RegisterKvCache(desc, memory.Addresses(), {}, cache.cache_id));
}

inline std::vector<ClusterInfo> Prompt(const Arguments &arguments) {
  IpInfo ip;
  ip.ip = arguments.ip.c_str();
  ip.port = arguments.port;
  ClusterInfo cluster;
  cluster.remote_cluster_id = kPromptCluster;
  cluster.remote_ip_infos.push_back(ip);
  return {cluster};
}

inline bool Link(LlmDataDist &datadist, const Arguments &arguments) {
  std::vector<Status> rets;
  return Did("link", datadist.LinkLlmClusters(Prompt(arguments), rets, 5000));
}

inline bool Unlink(LlmDataDist &datadist, const Arguments &arguments) {
  std::vector<Status> rets;
  return Did("unlink", datadist.UnlinkLlmClusters(Prompt(arguments), rets, 5000));
}

// The prompt stays as long as somebody may want its cache: until its stdin ends, or has a line.
inline void WaitForEnd() {
  std::printf("stays until its input ends\n");
  std::fflush(stdout);
  pollfd input = {0, POLLIN, 0};
  poll(&input, 1, kWaitSeconds * 1000);
}

// Whatever has happened: what was registered is unregistered, and the instance is finalized. The program's exit status.
inline int End(LlmDataDist &datadist, const Cache &cache, bool well) {
  if (!well) std::printf("an error: cleaning up\n");
  if (cache.cache_id > 0) well &= Did("unregister", datadist.UnregisterKvCache(cache.cache_id));
  datadist.Finalize();
  std::printf("finalized\n");
  return well ? 0 : 1;
}

}  // namespace steps

#endif  // KVFERRY_EXAMPLES_STEPS_H_
