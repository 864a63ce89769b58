#include "checksum.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace kvferry {
namespace {

// Even, so that x -> x + low half of x * factor is a bijection: the low half is multiplied by an odd number, and the high
// half has something added to it that depends on the low half alone. The high half goes into the low one first; else the
// next word of the lane could undo what a bit in it has changed. A multiplication of halves is what every vector unit has.
constexpr std::uint64_t factor = 0x9E3779B6;
constexpr std::uint64_t stride = 0x9E3779B97F4A7C15;

std::uint64_t mix(std::uint64_t x) noexcept {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}

#ifdef __SSE2__

void add_blocks(std::array<std::uint64_t, Checksum::lanes>& lanes, const std::uint8_t* data, std::size_t count) noexcept {
  const __m128i factors = _mm_set1_epi64x(static_cast<long long>(factor));
  auto* stored = reinterpret_cast<__m128i*>(lanes.data());
  __m128i a = _mm_loadu_si128(stored), b = _mm_loadu_si128(stored + 1), c = _mm_loadu_si128(stored + 2), d = _mm_loadu_si128(stored + 3);
  const auto step = [&factors](__m128i lane, const std::uint8_t* words) {
    lane = _mm_xor_si128(lane, _mm_loadu_si128(reinterpret_cast<const __m128i*>(words)));
    lane = _mm_xor_si128(lane, _mm_srli_epi64(lane, 32));
    return _mm_add_epi64(lane, _mm_mul_epu32(lane, factors));
  };
  // A step waits for the one before it, so that hardly a cache line ahead is asked for by itself: of 128 MiB in memory, on an
  // Intel Xeon, 10.2 GB/s instead of 5.9.
  constexpr std::size_t ahead = 4096;
  for (; count > 0; --count, data += Checksum::block_bytes) {
    _mm_prefetch(reinterpret_cast<const char*>(data) + ahead, _MM_HINT_T0);
    a = step(a, data);
    b = step(b, data + 16);
    c = step(c, data + 32);
    d = step(d, data + 48);
  }
  _mm_storeu_si128(stored, a);
  _mm_storeu_si128(stored + 1, b);
  _mm_storeu_si128(stored + 2, c);
  _mm_storeu_si128(stored + 3, d);
}

#else

std::uint64_t word_at(const std::uint8_t* data) noexcept {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
  if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
  return word;
}

void add_blocks(std::array<std::uint64_t, Checksum::lanes>& lanes, const std::uint8_t* data, std::size_t count) noexcept {
  auto here = lanes;  // in registers
  for (; count > 0; --count, data += Checksum::block_bytes)
    for (std::size_t i = 0; i < Checksum::lanes; ++i) {
      std::uint64_t x = here[i] ^ word_at(data + 8 * i);
      x ^= x >> 32;
      here[i] = x + (x & 0xFFFFFFFF) * factor;
    }
  lanes = here;
}

#endif

}  // namespace

Checksum::Checksum(std::uint64_t seed) noexcept : seed_(seed) {
  for (std::size_t i = 0; i < lanes; ++i) lanes_[i] = mix(seed + (i + 1) * stride);
}

void Checksum::add(const void* data, std::size_t bytes) noexcept {
  if (bytes == 0) return;
  const auto* at = static_cast<const std::uint8_t*>(data);
  const std::size_t begun = bytes_ % block_bytes;
  bytes_ += bytes;
  if (begun != 0) {
    const std::size_t more = std::min(bytes, block_bytes - begun);
    std::memcpy(rest_.data() + begun, at, more);
    at += more;
    bytes -= more;
    if (begun + more < block_bytes) return;
    add_blocks(lanes_, rest_.data(), 1);
  }
  add_blocks(lanes_, at, bytes / block_bytes);
  if (bytes % block_bytes != 0) std::memcpy(rest_.data(), at + bytes / block_bytes * block_bytes, bytes % block_bytes);
}

std::uint64_t Checksum::end() noexcept {
  if (const std::size_t begun = bytes_ % block_bytes; begun != 0) {
    std::fill(rest_.begin() + static_cast<std::ptrdiff_t>(begun), rest_.end(), std::uint8_t{0});
    add_blocks(lanes_, rest_.data(), 1);
  }
  std::uint64_t all = mix(seed_ ^ bytes_);
  for (const std::uint64_t lane : lanes_) all = mix(all ^ lane);
  return all == 0 ? 1 : all;
}

StreamSums::StreamSums(std::vector<std::uint64_t> sizes, std::vector<std::uint64_t> seeds) : sizes_(std::move(sizes)), seeds_(std::move(seeds)) {
  sums_.reserve(sizes_.size());
  open_next();
}

void StreamSums::begin() noexcept {
  const std::lock_guard lock(mutex_);
  sums_.clear();
  position_ = 0;
  open_next();
}

void StreamSums::open_next() noexcept {
  if (sums_.size() == sizes_.size()) return;
  open_ = Checksum(seeds_[sums_.size()]);
  left_ = sizes_[sums_.size()];
}

void StreamSums::add(std::uint64_t position, const void* data, std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  if (position > position_ || position + bytes <= position_) return;
  const auto* at = static_cast<const std::uint8_t*>(data) + (position_ - position);
  for (std::uint64_t more = position + bytes - position_; more > 0 && sums_.size() < sizes_.size();) {
    const auto now = std::min(more, left_);
    open_.add(at, now);
    at += now;
    more -= now;
    left_ -= now;
    position_ += now;
    if (left_ > 0) continue;
    sums_.push_back(open_.end());  // there is room for all of them
    open_next();
  }
}

std::vector<std::uint64_t> StreamSums::taken() const {
  const std::lock_guard lock(mutex_);
  return sums_.size() == sizes_.size() ? sums_ : std::vector<std::uint64_t>{};
}

}  // namespace kvferry
