// What every door to the vendor's API needs and kvferry's core must not know: status numbers, option strings, rank tables,
// and the rules of layer ranges, shapes and sizes. Pure functions of plain values: no state, no clock, no threads, and
// nothing of Python or of kvferry. A broken rule is an exception whose sentence names the value and what would be right.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llm_datadist::rules {

struct RuleError : std::runtime_error {  // an argument breaks a rule: LLM_PARAM_INVALID
  using runtime_error::runtime_error;
};
struct OptionError : RuleError {  // an option that cannot be
  using RuleError::RuleError;
};
struct NoNumber : std::invalid_argument {  // a port that is none
  using invalid_argument::invalid_argument;
};

// --- statuses (status.cpp) -------------------------------------------------------------------------------------------

namespace status {
inline constexpr std::uint32_t success = 0x0;
inline constexpr std::uint32_t failed = 0xFFFFFFFF;
inline constexpr std::uint32_t kv_cache_not_exist = 0x5010B002;
inline constexpr std::uint32_t param_invalid = 0x5010B005;
inline constexpr std::uint32_t not_yet_link = 0x5010B007;
inline constexpr std::uint32_t already_link = 0x5010B008;
inline constexpr std::uint32_t link_failed = 0x5010B009;
inline constexpr std::uint32_t unlink_failed = 0x5010B00A;
inline constexpr std::uint32_t exist_link = 0x5010B018;
inline constexpr std::uint32_t feature_not_enabled = 0x5010B019;
inline constexpr std::uint32_t timeout = 0x5010B01A;
inline constexpr std::uint32_t link_busy = 0x5010B01B;
inline constexpr std::uint32_t out_of_memory = 0x5010B01C;
}  // namespace status

// The status for kvferry's error `kind` (its name, "peer_lost") in a `call` of "transfer", "link", "unlink" or any other.
// Total: a kind nobody thought of is `failed`.
std::uint32_t status_of(std::string_view kind, std::string_view call = {});
std::vector<std::string_view> known_kinds();
// Of a call for several clusters, from the status of each: that of the last one that failed. None: `param_invalid`.
std::uint32_t overall(const std::vector<std::uint32_t>& statuses);

// --- addresses (addresses.cpp) ---------------------------------------------------------------------------------------

// IPv4 as the vendor's API writes it, a little-endian number: "127.0.0.1" is 16777343. Short forms work; names and IPv6 are
// std::runtime_error.
std::uint32_t ip_to_int(const std::string& ip);
std::string int_to_ip(std::int64_t number);  // std::invalid_argument for what is no IPv4 address
// "ip:port". Not two parts: OptionError; a port that is no number: NoNumber.
std::pair<std::string, std::uint32_t> parse_listen(std::string_view text);
// The same, or "[ipv6]:port" without the brackets. OptionError for whatever is neither, and for ports that there are not.
std::pair<std::string, std::uint16_t> parse_place(std::string_view text);
// An IPv4 or IPv6 address in its usual spelling. RuleError for what is none.
std::string numeric_host(const std::string& ip);

// --- options (options.cpp) -------------------------------------------------------------------------------------------

using Options = std::map<std::string, std::string>;

namespace option {
inline constexpr const char* role = "llm.Role";
inline constexpr const char* device_id = "ge.exec.deviceId";
inline constexpr const char* graph_memory = "ge.flowGraphMemMaxSize";
inline constexpr const char* cache_manager = "llm.EnableCacheManager";
inline constexpr const char* remote_accessible = "llm.EnableRemoteCacheAccessible";
inline constexpr const char* local_comm_res = "llm.LocalCommRes";
inline constexpr const char* transfer_backend = "llm.TransferBackend";
inline constexpr const char* global_resource = "llm.GlobalResourceConfig";
inline constexpr const char* listen = "llm.listenIpInfo";
inline constexpr const char* listen_ip = "llm.ListenIp";
inline constexpr const char* listen_port = "llm.ListenPort";
inline constexpr const char* sync_timeout = "llm.SyncKvCacheWaitTime";
inline constexpr const char* link_total_time = "llm.LinkTotalTime";
inline constexpr const char* link_retry_count = "llm.LinkRetryCount";
inline constexpr const char* device_pool = "llm.MemPoolConfig";
inline constexpr const char* host_pool = "llm.HostMemPoolConfig";
// Our own, unknown to the vendor: a program gives them with the rest, or the environment has them (with_environment).
inline constexpr const char* secret = "kvferry.secret";
inline constexpr const char* transports = "kvferry.transports";  // "map,cma,socket" or fewer
inline constexpr const char* attach = "kvferry.attach";          // "same" or "any"
inline constexpr const char* rendezvous_port = "kvferry.rendezvous_port";
}  // namespace option

struct Pool {
  std::uint64_t size_bytes = 0;
  std::uint32_t page_shift = 16;
  bool operator==(const Pool&) const = default;
};

struct EngineOptions {  // the options of one initialised instance, as values
  bool remote = false;  // remote caches are addressed by id, without the owner's key table
  bool hixl = false;
  std::optional<std::pair<std::string, std::uint32_t>> listen;
  std::int64_t timeout_ms = 1000;
  std::int64_t link_total_time_s = 120;
  std::int64_t link_retry_count = 1;
  std::string local_comm_res;
  std::optional<Pool> device_pool, host_pool;
  std::optional<std::string> secret;
  std::optional<std::vector<std::string>> transports;
  std::string attach = "same";
  std::uint32_t rendezvous_port = 18517;
};

// A copy with those of our own options that only the environment has: "kvferry.secret" as KVFERRY_SECRET. Empty is unset.
Options with_environment(Options options, const Options& environment);
// A copy with what follows from the options' presence. OptionError; NoNumber for a port that is none.
Options completed(Options options, const std::string& role);
bool is_cache_manager_mode(const Options& options);
// Values of the completed options. OptionError.
EngineOptions parse_options(const Options& options);
// What the C++ API was given, whose keys differ, in the words of completed(): remote caches are always addressed by id there.
// OptionError.
Options from_cpp(const Options& given);
namespace cpp_option {
inline constexpr const char* device_id = "llm.DeviceId";
inline constexpr const char* listen = "llm.ListenIpInfo";
}  // namespace cpp_option
std::optional<std::pair<std::string, std::uint16_t>> cpp_listen(const Options& given);
const char* role_name(std::int64_t role);  // "Prompt" for 1; RuleError for no role

// --- instances (instances.cpp) ---------------------------------------------------------------------------------------

// What a node says its program is, so that sides of different modes find out when they link.
inline constexpr const char* program_name = "llm_datadist";
std::string program_of(bool remote);

// A node has one pool: both placements are host memory and draw on it. None configured: nothing.
std::optional<Pool> pool_of(const EngineOptions& options);
// A pool takes its memory when it is used, so that one too large for the machine would be found out late. Whether the pools
// can never be had where /proc/meminfo says that: what to say then.
std::optional<std::string> pools_too_large(const EngineOptions& options, std::string_view meminfo);

// What one placement may take of the node's pool, and has taken; bytes in whole pages of each tensor. Not for several threads
// at once.
class Share {
 public:
  explicit Share(const Pool& pool) : size_bytes_(pool.size_bytes), page_bytes_(std::uint64_t{1} << pool.page_shift) {}
  // How much a cache takes. TooLittleLeft.
  std::uint64_t wanted(std::uint64_t tensors, std::uint64_t tensor_bytes) const;
  void take(std::uint64_t cache_id, std::uint64_t bytes) { taken_[cache_id] = bytes; }
  bool give_back(std::uint64_t cache_id) { return taken_.erase(cache_id) != 0; }
  bool has(std::uint64_t cache_id) const { return taken_.contains(cache_id); }

 private:
  std::uint64_t size_bytes_, page_bytes_;
  std::map<std::uint64_t, std::uint64_t> taken_;  // by cache
};
struct TooLittleLeft : std::runtime_error {  // LLM_OUT_OF_MEMORY
  using runtime_error::runtime_error;
};

using ListenAt = std::pair<std::string, std::uint32_t>;  // where an instance listens
// What becomes of the listener when the role is switched. Only the port is compared.
enum class ListenerMove { stays, moves, refused_linked, refused_hixl };
ListenerMove listener_move(bool has_links, bool hixl, const std::optional<ListenAt>& before, const std::optional<ListenAt>& wanted);

// What a remote cache's id stands for: itself, or, when it is none, what a peer's table has under the keys that are meant then.
enum class IdMeans { cache, blocks_of_model_0, request_0 };
IdMeans meaning_of_id(std::int64_t cache_id, bool remote, bool pushing);

// --- rank tables (rank_table.cpp) ------------------------------------------------------------------------------------

struct Member {  // one cluster of a communicator
  std::uint64_t cluster_id = 0;
  std::uint32_t rank = 0;
  std::string host;  // its server's address; "" if all members are on one server
  bool operator==(const Member&) const = default;
};

// The members in the order of their ranks, from (cluster, rank) pairs and a rank table: JSON that lists servers, their devices
// and each device's rank. A table without ranks (callers' tests have such) puts everybody on one server. RuleError.
std::vector<Member> members_of(const std::string& rank_table, const std::vector<std::pair<std::uint64_t, std::uint32_t>>& ranks);

// --- layers, shapes and sizes (ranges.cpp) ---------------------------------------------------------------------------

struct Layers {  // [start, stop), step 1; layer L is the tensors [L * n, (L + 1) * n)
  std::int64_t start = 0, stop = 0;
  std::int64_t count() const noexcept { return stop > start ? stop - start : 0; }
  bool operator==(const Layers&) const = default;
};

inline constexpr std::size_t most_dims = 31;

std::vector<std::int64_t> layer_tensors(const std::vector<std::int64_t>& layers, std::int64_t tensors_per_layer);

// Bits of an element of the vendor's type with that number; nothing for numbers of no type, and types without a size.
std::optional<std::uint32_t> element_bits(std::int64_t data_type);

struct UnitGeometry {
  std::uint64_t unit_bytes = 0, count = 0;  // of each tensor: dim 0 counts, whatever the batch dimension is
};
// RuleError also for a type without a size, and for rows that are no whole number of bytes.
UnitGeometry unit_geometry(std::uint64_t num_tensors, const std::vector<std::int64_t>& shape, std::int64_t data_type);

// What a call may say of caches and rows; RuleError.
void check_addresses(std::size_t given, std::uint64_t num_tensors, bool one_is_0);
void check_size(std::int64_t size);
void check_row(std::string_view name, std::uint64_t row, std::uint64_t count);
void check_tensors_per_layer(std::uint32_t tensors_per_layer);
void check_timeout(std::int64_t timeout_ms);
void check_paired(std::size_t sources, std::size_t destinations);  // lists of blocks
void check_numbers(std::string_view name, const std::vector<std::uint64_t>& blocks);  // none beyond what a number of blocks can be

// The two ranges that a pull passes down; nothing given or an empty range: not given. A destination range may be left out if
// the source fills all tensors; a source that is left out is all layers that the far cache has, which must then be as many.
struct PullLayers {
  std::optional<Layers> source, destination;
};
PullLayers pull_layers(std::optional<Layers> source, std::optional<Layers> destination, std::uint32_t num_tensors,
                       std::uint32_t tensors_per_layer);
// The two ranges of a push; one that is left out is all layers of the source. Empty: nothing is to be sent.
std::pair<Layers, Layers> push_layers(std::optional<Layers> source, std::optional<Layers> destination, std::uint32_t num_tensors,
                                      std::uint32_t tensors_per_layer);

// The same from ranges whose ends are both inclusive, as the C++ API has them; one that begins at -1 is left out. A pull counts
// them only if both are given; a push by default sends whole layers, of which there must be some.
struct Inclusive {
  std::int32_t first = -1, last = -1;
};
PullLayers pull_layers(Inclusive source, Inclusive destination, std::uint32_t num_tensors, std::uint32_t tensors_per_layer);
std::pair<Layers, Layers> push_layers(Inclusive source, Inclusive destination, std::uint32_t num_tensors, std::uint32_t tensors_per_layer);

// How many bytes a copy moves that begins `offset` bytes into both rows; size -1: what is left of the source's.
std::uint64_t copied_bytes(std::uint64_t offset, std::int64_t size, std::uint64_t source_row_bytes, std::uint64_t destination_row_bytes);
// Whether a source tensor can go into `listed` blocks of `block_bytes`.
void check_blocks_of_row(std::uint64_t tensor_bytes, std::uint64_t block_bytes, std::uint64_t listed);

}  // namespace llm_datadist::rules
