// Instances of one process, linked over loopback, with caches whose elements say where they are from; and the one check that
// the test programs need.
#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "llm_datadist/llm_datadist.h"

namespace sides {

using namespace llm_datadist;

inline std::atomic<int> failures{0};

#define CHECK(...)                                                           \
  do {                                                                       \
    if (!(__VA_ARGS__)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
      ++sides::failures;                                                     \
    }                                                                        \
  } while (false)

#define CHECK_STATUS(expected, ...)                                                                          \
  do {                                                                                                       \
    const auto got_ = (__VA_ARGS__);                                                                         \
    if (got_ != (expected)) {                                                                                \
      std::fprintf(stderr, "%s:%d: %s is 0x%X, not %s\n", __FILE__, __LINE__, #__VA_ARGS__, got_, #expected); \
      ++sides::failures;                                                                                     \
    }                                                                                                        \
  } while (false)

// A port that is free at this moment: the API takes none for "any".
inline uint16_t free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  CHECK(::bind(fd, reinterpret_cast<sockaddr *>(&address), size) == 0 && ::getsockname(fd, reinterpret_cast<sockaddr *>(&address), &size) == 0);
  ::close(fd);
  return ntohs(address.sin_port);
}

using Options = std::map<AscendString, AscendString>;

inline Options options(uint16_t port = 0, Options more = {}) {
  more.emplace(OPTION_DEVICE_ID, "0");
  more.emplace(OPTION_SYNC_CACHE_WAIT_TIME, "10000");
  if (port != 0) more.emplace(OPTION_LISTEN_IP_INFO, ("127.0.0.1:" + std::to_string(port)).c_str());
  return more;
}

inline ClusterInfo cluster(uint64_t id, uint16_t port, const char *ip = "127.0.0.1") {
  ClusterInfo info;
  info.remote_cluster_id = id;
  info.remote_ip_infos.resize(1);
  info.remote_ip_infos[0].ip = ip;
  info.remote_ip_infos[0].port = port;
  return info;
}

// Tensors of int32 of shape {8, 16}; element k of tensor t is tag * 1000000 + t * 1000 + k + 1.
struct Memory {
  static constexpr std::size_t units = 8, words = 16;
  std::vector<std::vector<int32_t>> tensors;
  Cache cache;

  explicit Memory(std::size_t count = 4) : tensors(count, std::vector<int32_t>(units * words)) {
    cache.cache_desc.num_tensors = static_cast<uint32_t>(count);
    cache.cache_desc.data_type = DT_INT32;
    cache.cache_desc.shape = {units, words};
  }
  std::vector<uint64_t> addresses() const {
    std::vector<uint64_t> out;
    for (const auto &tensor : tensors) out.push_back(reinterpret_cast<uint64_t>(tensor.data()));
    return out;
  }
  static int32_t made(int tag, std::size_t tensor, std::size_t unit, std::size_t word) {
    return tag == 0 ? 0 : static_cast<int32_t>(tag * 1000000 + static_cast<int>(tensor * 1000 + unit * words + word) + 1);
  }
  void fill(int tag) {
    for (std::size_t t = 0; t < tensors.size(); ++t)
      for (std::size_t u = 0; u < units; ++u)
        for (std::size_t w = 0; w < words; ++w) tensors[t][u * words + w] = made(tag, t, u, w);
  }
  // Whether a unit holds what fill(tag) has written into unit `from` of tensor `of`.
  bool has(std::size_t tensor, std::size_t unit, int tag, std::size_t of, std::size_t from) const {
    for (std::size_t w = 0; w < words; ++w)
      if (tensors[tensor][unit * words + w] != made(tag, of, from, w)) return false;
    return true;
  }
  bool has(std::size_t tensor, std::size_t unit, int tag) const { return has(tensor, unit, tag, tensor, unit); }
};

struct Side {
  uint64_t id;
  uint16_t port = free_port();
  LlmDataDist datadist;

  explicit Side(uint64_t cluster_id, Options more = {}) : id(cluster_id), datadist(cluster_id, LlmRole::kMix) {
    CHECK_STATUS(LLM_SUCCESS, datadist.Initialize(options(port, std::move(more))));
  }
  Status add(Memory &memory) { return datadist.RegisterKvCache(memory.cache.cache_desc, memory.addresses(), {}, memory.cache.cache_id); }
  Status link(const Side &other) {
    std::vector<Status> rets;
    return datadist.LinkLlmClusters({cluster(other.id, other.port)}, rets, 5000);
  }
  Status unlink(const Side &other, bool force = false) {
    std::vector<Status> rets;
    return datadist.UnlinkLlmClusters({cluster(other.id, other.port)}, rets, 5000, force);
  }
};

}  // namespace sides
