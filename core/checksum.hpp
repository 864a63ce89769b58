// A 64-bit checksum of bytes, against what goes wrong by itself: bits that flip, bytes of another value. No protection
// against whoever may choose the bytes. docs/pool.md has the formula; values live as long as the node that keeps them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace kvferry {

// Of a stream: how it is cut into calls of `add` makes no difference. Faster than a copy of the same bytes.
class Checksum {
 public:
  static constexpr std::size_t lanes = 8;
  static constexpr std::size_t block_bytes = 8 * lanes;

  explicit Checksum(std::uint64_t seed) noexcept;
  void add(const void* data, std::size_t bytes) noexcept;
  std::uint64_t end() noexcept;  // never 0, which stands for "none"; to be asked once

 private:
  std::array<std::uint64_t, lanes> lanes_;
  std::array<std::uint8_t, block_bytes> rest_;  // of the last block, if it is not whole yet
  std::uint64_t seed_;
  std::uint64_t bytes_ = 0;
};

// Checksums of values that lie one behind the other in a stream: taken by whoever sends it, while the bytes are in the
// processor's caches anyway. A stream may be sent anew, or twice at once.
class StreamSums : public std::enable_shared_from_this<StreamSums> {
 public:
  StreamSums(std::vector<std::uint64_t> sizes, std::vector<std::uint64_t> seeds);  // one of each for every value
  void begin() noexcept;
  // The bytes at `position` of the stream. Those that were added are passed over, and so is what does not follow them.
  void add(std::uint64_t position, const void* data, std::size_t bytes) noexcept;
  std::vector<std::uint64_t> taken() const;  // of all values, if every byte of them has come; else empty

 private:
  void open_next() noexcept;
  const std::vector<std::uint64_t> sizes_, seeds_;
  mutable std::mutex mutex_;
  std::vector<std::uint64_t> sums_;
  Checksum open_{0};  // of the value after these
  std::uint64_t position_ = 0, left_ = 0;
};

}  // namespace kvferry
