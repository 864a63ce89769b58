// A 64-bit checksum of bytes, against what goes wrong by itself: bits that flip, bytes of another value. No protection
// against whoever may choose the bytes. docs/pool.md has the formula; values live as long as the node that keeps them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

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

}  // namespace kvferry
