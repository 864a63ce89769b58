// What every operation of one node shares: its table, its guards, its threads, its settings, its log.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "crew.hpp"
#include "guard.hpp"
#include "mapped.hpp"
#include "operation.hpp"
#include "reactor.hpp"
#include "registry.hpp"
#include "spread.hpp"

namespace kvferry {

inline constexpr std::size_t longest_program = 128;  // in bytes

struct NodeOptions {
  std::uint64_t node_id = 0;
  std::vector<std::uint8_t> secret;
  unsigned transports = 7;
  unsigned copy_threads = 0;  // with the caller's; 0: cores, at most 4
  unsigned lanes = 2;
  std::int64_t heartbeat_ms = 1000;
  std::int64_t heartbeat_timeout_ms = 10000;
  bool attach_any = false;
  std::string program;  // what peers are told that this node's program is; nothing is done with it here
};

// Lines for the caller's log. The core never calls out; somebody takes them.
class EventLog {
 public:
  void add(const char* level, std::string sentence);
  std::optional<std::pair<std::string, std::string>> take(std::int64_t timeout_ms);
  void close();

 private:
  static constexpr std::size_t kept = 1000;  // the oldest go first
  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<std::pair<std::string, std::string>> lines_;
  bool closed_ = false;
};

struct Engine {
  NodeOptions options;
  GuardTable guards;
  Registry registry;
  IdentityWord identity;
  KnownMemory memory;  // of this process, that operations have used by spans
  std::atomic<unsigned> memory_held{0};  // of those, given up while the kernel still held their copy
  Timers timers;
  EventLog log;
  Reactor reactor;
  Crew crew;
  Spread spread;
  std::atomic<std::uint64_t> last_operation{0};

  Engine(NodeOptions options, unsigned threads, unsigned helpers, std::function<std::int64_t(std::int64_t)> tick);

  // At first use of caller-owned memory: its whole range must be mapped with the right needed, once per cache. Throws
  // Error(invalid_argument) naming cache and tensor, before the first byte; of a process's memory, naming span and address.
  void check_readable(Cache& cache);
  void check_writable(Cache& cache);
  // Of a process's memory, whatever was found there earlier: other memory may lie there by now.
  void look_anew(Cache& memory, bool writable);
  std::atomic<unsigned>& held_of(Cache& cache) { return cache.geometry.layout == Layout::memory ? memory_held : cache.held; }
};

inline constexpr std::uint64_t one_sided_inline_bytes = 256 << 10;  // up to here on the calling thread alone
inline constexpr std::uint64_t piece_bytes = 1 << 20;               // between two looks at guards and deadline
inline constexpr std::uint64_t stream_from_bytes = 4 << 20;         // transfers from here on bypass the cache

}  // namespace kvferry
