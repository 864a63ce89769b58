// The frames that nodes exchange (docs/wire.md): a fixed header, a body of little-endian fields. Decoders are pure
// functions over bytes that check every length and range and throw WireError; they know no sockets.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "geometry.hpp"
#include "registry.hpp"

namespace kvferry::wire {

static_assert(std::endian::native == std::endian::little, "the wire format is written for little-endian machines");

inline constexpr std::uint16_t version = 3;
inline constexpr std::size_t max_piece_bytes = 1 << 20;
inline constexpr std::size_t max_hello_bytes = 4096;
inline constexpr std::size_t max_control_bytes = 64 << 10;
inline constexpr std::size_t most_sums = 4096;  // so that they fit in an answer
inline constexpr std::size_t max_request_bytes = 64 << 20;

enum class Type : std::uint16_t {
  // before there is a link
  hello = 1, challenge = 2, auth = 3, welcome = 4, refused = 5, lane = 6, local = 7, local_answer = 8,
  // control connection
  heartbeat = 16, unlink = 17, unlinked = 18, unlink_heard = 19, segment_gone = 20,
  // lanes: requests of the lane's client, answers of its server
  resolve = 32, geometry = 33, pull = 34, piece = 35, ended = 36, push = 37, consume = 38, fetch_segment = 39, segment = 40,
  segment_made = 41,
  // call lanes
  call = 42, answer = 43, tell = 44,
};

struct Header {
  std::uint32_t body_bytes = 0;
  Type type{};
  std::uint16_t flags = 0;
  std::uint64_t operation = 0;
  std::uint64_t offset = 0;  // piece: position in the operation's stream; call: time left in ms
};
static_assert(sizeof(Header) == 24);
inline constexpr std::uint16_t flag_consume = 1;     // geometry, ended: the key is consumed by a successful pull
inline constexpr std::uint16_t flag_descriptor = 2;  // one descriptor came with it (Unix sockets)

class WireError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Writer {
 public:
  Writer(Type type, std::uint64_t operation, std::uint16_t flags = 0) {
    bytes_.reserve(256);  // most frames: one allocation
    bytes_.resize(sizeof(Header));
    header_.type = type;
    header_.operation = operation;
    header_.flags = flags;
  }
  template <class T>
    requires std::is_integral_v<T> || std::is_enum_v<T>
  Writer& put(T value) {
    const auto at = bytes_.size();
    bytes_.resize(at + sizeof(T));
    std::memcpy(bytes_.data() + at, &value, sizeof(T));
    return *this;
  }
  Writer& raw(const void* data, std::size_t n) {
    const auto* p = static_cast<const std::uint8_t*>(data);
    bytes_.insert(bytes_.end(), p, p + n);
    return *this;
  }
  Writer& text(std::string_view s) {  // at most 65,535 bytes are kept
    const auto n = static_cast<std::uint16_t>(std::min<std::size_t>(s.size(), 0xffff));
    return put(n).raw(s.data(), n);
  }
  std::size_t body_bytes() const noexcept { return bytes_.size() - sizeof(Header); }
  std::span<const std::uint8_t> body() const noexcept { return std::span(bytes_).subspan(sizeof(Header)); }
  std::vector<std::uint8_t> take() {
    header_.body_bytes = static_cast<std::uint32_t>(body_bytes());
    std::memcpy(bytes_.data(), &header_, sizeof header_);
    return std::move(bytes_);
  }

 private:
  Header header_;
  std::vector<std::uint8_t> bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::uint8_t> body) noexcept : left_(body) {}
  template <class T>
    requires std::is_integral_v<T> || std::is_enum_v<T>
  T get() {
    T value;
    std::memcpy(&value, need(sizeof(T)), sizeof(T));
    return value;
  }
  void raw(void* out, std::size_t n) {
    const auto* from = need(n);
    if (n > 0) std::memcpy(out, from, n);  // of an empty list there is no address
  }
  std::string text() {
    const auto n = get<std::uint16_t>();
    const auto* p = need(n);
    return {reinterpret_cast<const char*>(p), n};
  }
  // A count of items that take `item_bytes` each on the wire: refused at once if the body cannot hold them.
  std::size_t count(std::size_t item_bytes) {
    const auto n = get<std::uint32_t>();
    if (n > left_.size() / item_bytes) throw WireError("a list is longer than its frame");
    return n;
  }
  std::size_t left() const noexcept { return left_.size(); }

 private:
  const std::uint8_t* need(std::size_t n) {
    if (n > left_.size()) throw WireError("a frame ends early");
    const auto* p = left_.data();
    left_ = left_.subspan(n);
    return p;
  }
  std::span<const std::uint8_t> left_;
};

void put_guards(Writer&, const std::vector<Guard>&);
std::vector<Guard> get_guards(Reader&);
void put_runs(Writer&, const std::vector<UnitRun>&);
std::vector<UnitRun> get_runs(Reader&);
void put_target(Writer&, const Target&);
Target get_target(Reader&);
void put_geometry(Writer&, const Geometry&);
Geometry get_geometry(Reader&);  // checked: Geometry::check() holds, and it is a cache's
Geometry get_push_source(Reader&);  // the same, or the memory of the process that pushes
void put_select(Writer&, const SourceSelect&);
SourceSelect get_select(Reader&);
void put_moves(Writer&, const Moves&);
void put_moves(Writer&, const Moves&, const TensorRange& source, const TensorRange& destination);  // with other tensors
std::shared_ptr<const Moves> get_moves(Reader&);
void put_words(Writer&, const std::vector<std::uint64_t>&);
std::vector<std::uint64_t> get_words(Reader&);
void put_sums(Writer&, const ValueSums*);  // none, if they are too many for an answer
std::shared_ptr<ValueSums> get_sums(Reader&);
void put_outcome(Writer&, const Outcome&);
Outcome get_outcome(Reader&);

}  // namespace kvferry::wire
