// One side of the benchmark of the C++ API (cpp.py drives it, line by line): an owner of caches, or a puller that times calls, of the
// API and of the core below it (whose library is linked in).
//
//   cpp_driver owner PORT            answers "PID ADDRESS…" of its caches, and stays until its input ends
//   cpp_driver puller PORT TRANSPORTS PID ADDRESS…
//
// Caches, alike on both sides: 1 and 2 of 4 KiB blocks, 3 and 4 of one row. Those of odd ids are registered, the others
// allocated. The puller's lines: "raw CALLS", "prepared CACHE CALLS" (the core's prepared pulls) and "pull CACHE CALLS" (the API)
// give the p50 and p99 of one block, in ns; "bulk CACHE" and "rawbulk" the ns of a whole row. Before each, the destination is overwritten; after it, all of it is compared.
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "llm_datadist/llm_datadist.h"
#include "node.hpp"

using namespace llm_datadist;

namespace {

constexpr std::size_t kBlock = 4096, kSmall = std::size_t{64} << 20, kBig = std::size_t{256} << 20;
constexpr int kTurns = 64;  // different blocks, one after the other
constexpr uint64_t kOwner = 1, kPuller = 2, kCore = 3;
constexpr int64_t kTimeoutMs = 20000;

int64_t Now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1000000000 + t.tv_nsec;
}

void Must(Status status, const char *what) {
  if (status == LLM_SUCCESS) return;
  std::fprintf(stderr, "%s: %u\n", what, status);
  std::exit(1);
}

uint64_t Made(uint64_t cache, std::size_t word) {
  uint64_t x = word * 0x9E3779B97F4A7C15u + cache;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  return x ^ (x >> 27);
}

// In huge pages where the system gives any, as the Python puller has its memory.
uint64_t *Mapped(std::size_t bytes) {
  void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::exit(1);
  madvise(memory, bytes, MADV_HUGEPAGE);
  return static_cast<uint64_t *>(memory);
}

struct Caches {
  uint64_t *registered_small = Mapped(kSmall), *registered_big = Mapped(kBig);
  std::map<int64_t, Cache> caches;

  explicit Caches(LlmDataDist &datadist) {
    for (int64_t id = 1; id <= 4; ++id) {
      const bool small = id <= 2;
      CacheDesc desc{};
      desc.num_tensors = 1;
      desc.data_type = DT_UINT8;
      desc.shape = {small ? static_cast<int64_t>(kSmall / kBlock) : 1, static_cast<int64_t>(small ? kBlock : kBig)};
      Cache &cache = caches[id];
      if (id % 2 == 0) {
        Must(datadist.AllocateCache(desc, cache), "allocate");
      } else {
        uint64_t *memory = small ? registered_small : registered_big;
        cache.tensor_addrs = {reinterpret_cast<uintptr_t>(memory)};
        cache.cache_desc = desc;
        Must(datadist.RegisterKvCache(desc, {reinterpret_cast<uint64_t>(memory)}, {}, cache.cache_id), "register");
      }
      if (cache.cache_id != id) std::exit(1);
    }
  }
  uint64_t *At(int64_t id) { return reinterpret_cast<uint64_t *>(caches[id].tensor_addrs[0]); }
  static std::size_t Words(int64_t id) { return (id <= 2 ? kSmall : kBig) / 8; }
};

std::map<AscendString, AscendString> Options() {
  std::map<AscendString, AscendString> options;
  options[OPTION_DEVICE_ID] = "0";
  options[OPTION_SYNC_CACHE_WAIT_TIME] = "20000";
  options["llm.MemPoolConfig"] = "{\"memory_size\": 536870912}";
  return options;
}

int Own(const char *port) {
  auto options = Options();
  options[OPTION_LISTEN_IP_INFO] = (std::string("127.0.0.1:") + port).c_str();
  LlmDataDist datadist(kOwner, LlmRole::kPrompt);
  Must(datadist.Initialize(options), "initialize");
  Caches caches(datadist);
  std::printf("%d", static_cast<int>(getpid()));
  for (int64_t id = 1; id <= 4; ++id) {
    for (std::size_t word = 0; word < Caches::Words(id); ++word) caches.At(id)[word] = Made(static_cast<uint64_t>(id), word);
    std::printf(" %llu", static_cast<unsigned long long>(caches.caches[id].tensor_addrs[0]));
  }
  std::printf("\n");
  std::fflush(stdout);
  while (std::getchar() != EOF) {
  }
  return 0;
}

std::size_t Source(int turn) { return static_cast<std::size_t>(turn * 7919) % (kSmall / kBlock); }
std::size_t Destination(int turn) { return static_cast<std::size_t>(turn * 104729 + 11) % (kSmall / kBlock); }

// Runs `call(turn)` often and prints p50 and p99 in ns; then looks at every block that was moved from cache `source`.
template <class Call>
void Time(Caches &caches, int64_t cache, int64_t source, int calls, Call &&call) {
  std::memset(caches.At(cache), 0xA5, kSmall);
  std::vector<int64_t> took(static_cast<std::size_t>(calls));
  for (int i = 0; i < calls; ++i) {
    const auto began = Now();
    call(i % kTurns);
    took[static_cast<std::size_t>(i)] = Now() - began;
  }
  for (int turn = 0; turn < std::min(kTurns, calls); ++turn)
    for (std::size_t word = 0; word < kBlock / 8; ++word)
      if (caches.At(cache)[Destination(turn) * (kBlock / 8) + word] != Made(static_cast<uint64_t>(source), Source(turn) * (kBlock / 8) + word)) {
        std::fprintf(stderr, "wrong bytes\n");
        std::exit(1);
      }
  std::sort(took.begin(), took.end());
  std::printf("%lld %lld\n", static_cast<long long>(took[took.size() / 2]), static_cast<long long>(took[took.size() * 99 / 100]));
}

template <class Call>
void TimeRow(Caches &caches, int64_t cache, int64_t source, Call &&call) {
  std::memset(caches.At(cache), 0xA5, kBig);
  const auto began = Now();
  call();
  const auto took = Now() - began;
  for (std::size_t word = 0; word < kBig / 8; ++word)
    if (caches.At(cache)[word] != Made(static_cast<uint64_t>(source), word)) {
      std::fprintf(stderr, "wrong bytes\n");
      std::exit(1);
    }
  std::printf("%lld\n", static_cast<long long>(took));
}

void Read(pid_t pid, void *to, uint64_t from, std::size_t bytes) {
  auto *at = static_cast<char *>(to);
  while (bytes > 0) {
    const iovec local{at, bytes}, remote{reinterpret_cast<void *>(from), bytes};
    const auto n = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (n <= 0) {
      std::perror("process_vm_readv");
      std::exit(1);
    }
    at += n, from += static_cast<uint64_t>(n), bytes -= static_cast<std::size_t>(n);
  }
}

// The core alone, beside the API in one process, over the same memory: one prepared pull for each turn.
class Core {
 public:
  Core(uint16_t port, const uint64_t *memory) : node_(Options()) {
    kvferry::Geometry geometry;
    geometry.unit_bytes = geometry.stride_bytes = kBlock;
    geometry.count = kSmall / kBlock;
    geometry.tensors = {{reinterpret_cast<uint64_t>(memory), 0, 0}};
    into_ = node_.registry().add(geometry, kvferry::host_kind, {})->geometry.cache_id;
    link_ = node_.connect("127.0.0.1", port, kvferry::Deadline::after_ms(kTimeoutMs));
  }
  void Prepare(uint64_t cache) {
    prepared_.clear();
    kvferry::Target target;
    target.id = cache;
    for (int turn = 0; turn < kTurns; ++turn) {
      const auto from = static_cast<int64_t>(Source(turn)), to = static_cast<int64_t>(Destination(turn));
      prepared_.push_back(node_.prepare(link_, target, into_, kvferry::Moves::make_blocks(&from, 1, &to, 1, {}, {}), kvferry::Deadline::after_ms(kTimeoutMs), 7));
    }
  }
  void Run(int turn) {
    const auto result = prepared_[static_cast<std::size_t>(turn)]->run_here(kvferry::Deadline::after_ms(kTimeoutMs));
    if (result.outcome.ok()) return;
    std::fprintf(stderr, "a prepared pull: %s\n", result.outcome.sentence.c_str());
    std::exit(1);
  }

 private:
  static kvferry::NodeOptions Options() {
    kvferry::NodeOptions options;
    options.node_id = kCore;
    return options;
  }
  kvferry::Node node_;
  uint64_t into_ = 0;
  std::shared_ptr<kvferry::Link> link_;
  std::vector<std::shared_ptr<kvferry::PreparedPull>> prepared_;
};

int Pull(char **arguments) {
  auto options = Options();
  options["kvferry.transports"] = arguments[1];
  const auto pid = static_cast<pid_t>(std::atoi(arguments[2]));
  uint64_t theirs[5] = {};
  for (int id = 1; id <= 4; ++id) theirs[id] = std::strtoull(arguments[2 + id], nullptr, 10);
  LlmDataDist datadist(kPuller, LlmRole::kDecoder);
  Must(datadist.Initialize(options), "initialize");
  Caches caches(datadist);
  ClusterInfo owner;
  owner.remote_cluster_id = kOwner;
  owner.remote_ip_infos.resize(1);
  owner.remote_ip_infos[0].ip = "127.0.0.1";
  owner.remote_ip_infos[0].port = static_cast<uint16_t>(std::atoi(arguments[0]));
  std::vector<Status> rets;
  Must(datadist.LinkLlmClusters({owner}, rets, 5000), "link");
  Core core(owner.remote_ip_infos[0].port, caches.registered_small);
  std::printf("ready\n");
  std::vector<uint64_t> from(1), to(1);
  for (std::string line; std::fflush(stdout), std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string verb;
    int64_t cache = 0;
    int calls = 0;
    words >> verb;
    if (verb == "raw") {
      words >> calls;
      Time(caches, 1, 1, calls, [&](int turn) { Read(pid, caches.At(1) + Destination(turn) * (kBlock / 8), theirs[1] + Source(turn) * kBlock, kBlock); });
    } else if (verb == "prepared") {
      words >> cache >> calls;
      core.Prepare(static_cast<uint64_t>(cache));
      Time(caches, 1, cache, calls, [&](int turn) { core.Run(turn); });
    } else if (verb == "pull") {
      words >> cache >> calls;
      const CacheIndex index{kOwner, cache};
      Time(caches, 1, cache, calls, [&](int turn) {
        from[0] = Source(turn);
        to[0] = Destination(turn);
        Must(datadist.PullKvBlocks(index, caches.caches[1], from, to), "pull");
      });
    } else if (verb == "bulk") {
      words >> cache;
      TimeRow(caches, 3, cache, [&] { Must(datadist.PullKvCache({kOwner, cache}, caches.caches[3]), "pull"); });
    } else if (verb == "rawbulk") {
      TimeRow(caches, 3, 3, [&] { Read(pid, caches.At(3), theirs[3], kBig); });
    } else {
      return 2;
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char **argv) {
  if (argc == 3 && std::strcmp(argv[1], "owner") == 0) return Own(argv[2]);
  if (argc == 9 && std::strcmp(argv[1], "puller") == 0) return Pull(argv + 2);
  return 2;
}
