// The values of the llm_datadist C++ API: plain data, and stand-ins for the few types that the API borrows from its vendor's
// graph engine. C++14 and later; no header but the standard library's.
#ifndef LLM_DATADIST_LLM_ENGINE_TYPES_H_
#define LLM_DATADIST_LLM_ENGINE_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace llm_datadist {

using Status = uint32_t;

// --- stand-ins -----------------------------------------------------------------------------------------------------------

// A string: made from a C string, read as one.
class AscendString {
 public:
  AscendString() = default;
  AscendString(const char *text) : text_(text == nullptr ? "" : text) {}
  AscendString(const char *text, std::size_t length) : text_(text == nullptr ? std::string() : std::string(text, length)) {}

  const char *GetString() const { return text_.c_str(); }
  std::size_t GetLength() const { return text_.size(); }
  std::size_t Find(const AscendString &part) const { return text_.find(part.text_); }
  std::size_t Hash() const { return std::hash<std::string>()(text_); }

  friend bool operator==(const AscendString &a, const AscendString &b) { return a.text_ == b.text_; }
  friend bool operator!=(const AscendString &a, const AscendString &b) { return a.text_ != b.text_; }
  friend bool operator<(const AscendString &a, const AscendString &b) { return a.text_ < b.text_; }
  friend bool operator>(const AscendString &a, const AscendString &b) { return a.text_ > b.text_; }
  friend bool operator<=(const AscendString &a, const AscendString &b) { return a.text_ <= b.text_; }
  friend bool operator>=(const AscendString &a, const AscendString &b) { return a.text_ >= b.text_; }
  friend std::ostream &operator<<(std::ostream &out, const AscendString &string) { return out << string.text_; }

 private:
  std::string text_;
};

// Element types. Caches are moved as bytes: the type only says how many of them an element has.
enum DataType : int32_t {
  DT_FLOAT = 0,
  DT_FLOAT16 = 1,
  DT_INT8 = 2,
  DT_INT32 = 3,
  DT_UINT8 = 4,
  DT_INT16 = 6,
  DT_UINT16 = 7,
  DT_UINT32 = 8,
  DT_INT64 = 9,
  DT_UINT64 = 10,
  DT_DOUBLE = 11,
  DT_BOOL = 12,
  DT_STRING = 13,
  DT_COMPLEX64 = 16,
  DT_COMPLEX128 = 17,
  DT_BF16 = 27,
  DT_UNDEFINED = 28,
  DT_INT4 = 29,  // two in a byte
  DT_COMPLEX32 = 33,
  DT_HIFLOAT8 = 34,
  DT_FLOAT8_E5M2 = 35,
  DT_FLOAT8_E4M3FN = 36
};

// --- instances and links -------------------------------------------------------------------------------------------------

enum class LlmRole : int32_t { kPrompt = 1, kDecoder = 2, kMix = 3, kEnd };

struct IpInfo {
  AscendString ip;
  uint16_t port = 0;
  uint8_t reserved[128] = {0};
};

struct ClusterInfo {
  uint64_t remote_cluster_id = 0;
  int32_t remote_role_type = 0;
  std::vector<IpInfo> local_ip_infos;
  std::vector<IpInfo> remote_ip_infos;
  uint8_t reserved[128] = {0};
};

// --- caches --------------------------------------------------------------------------------------------------------------

enum class CachePlacement : uint32_t { kHost = 0, kDevice = 1 };

// A cache of another cluster by the id that it has there, and a row of it.
struct CacheIndex {
  uint64_t cluster_id = 0;
  int64_t cache_id = 0;
  uint32_t batch_index = 0;
  uint8_t reserved[128] = {0};
};

// How many tensors, of which shape and type; dim 0 counts rows or blocks.
struct CacheDesc {
  CachePlacement placement = CachePlacement::kDevice;
  uint32_t num_tensors = 0;
  DataType data_type = DT_UNDEFINED;
  std::vector<int64_t> shape;
  uint8_t reserved[128] = {0};
};

struct Cache {
  int64_t cache_id = -1;
  std::vector<uintptr_t> tensor_addrs;
  CacheDesc cache_desc;
  uint8_t reserved[128] = {0};
};

// Which layers, both ends inclusive; layer L is the tensors [L * n, (L + 1) * n). {-1, -1}: all of them.
struct KvCacheExtParam {
  std::pair<int32_t, int32_t> src_layer_range = {-1, -1};
  std::pair<int32_t, int32_t> dst_layer_range = {-1, -1};
  uint8_t tensor_num_per_layer = 2;
  uint8_t reserved[127] = {0};
};

struct RegisterCfg {
  uint8_t reserved[128] = {0};
};

// --- options of Initialize -----------------------------------------------------------------------------------------------

constexpr const char OPTION_LISTEN_IP_INFO[] = "llm.ListenIpInfo";  // "ip:port" or "[ipv6]:port"
constexpr const char OPTION_DEVICE_ID[] = "llm.DeviceId";           // required
constexpr const char OPTION_SYNC_CACHE_WAIT_TIME[] = "llm.SyncKvCacheWaitTime";  // of each transfer, in ms; 1000
constexpr const char OPTION_BUF_POOL_CFG[] = "llm.BufPoolCfg";
constexpr const char OPTION_ENABLE_SET_ROLE[] = "llm.EnableSwitchRole";
constexpr const char OPTION_LOCAL_COMM_RES[] = "llm.LocalCommRes";
constexpr const char OPTION_TRANSFER_BACKEND[] = "llm.TransferBackend";
constexpr const char OPTION_GLOBAL_RESOURCE_CONFIG[] = "llm.GlobalResourceConfig";

}  // namespace llm_datadist

#endif  // LLM_DATADIST_LLM_ENGINE_TYPES_H_
