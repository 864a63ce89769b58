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
  static constexpr std::size_t lanes = 16;
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

// Checksums of the values of one transfer, which lie one behind the other: taken by whoever sends or copies them, while the
// bytes are in the processor's caches anyway. A stream may be sent anew, or twice at once.
class ValueSums : public std::enable_shared_from_this<ValueSums> {
 public:
  // One of each for every value. Throws Error(invalid_argument) for unequal numbers of them, a size of 0 and more than 2^64-1 bytes.
  ValueSums(std::vector<std::uint64_t> sizes, std::vector<std::uint64_t> seeds);

  // Those of the values from number `first` on, by one thread, while others take those of others.
  class Part {
   public:
    Part(ValueSums& all, std::size_t first) noexcept : all_(&all), number_(first) { open(); }
    void add(const void* data, std::size_t bytes) noexcept;  // which follow what was added; beyond the last value nothing is

   private:
    void open() noexcept;
    ValueSums* all_;
    std::size_t number_;
    Checksum sum_{0};
    std::uint64_t left_ = 0;
  };

  void begin() noexcept;
  // The bytes at `position` of the stream. Those that were added are passed over, and so is what does not follow them.
  void add(std::uint64_t position, const void* data, std::size_t bytes) noexcept;
  void take(const std::vector<std::uint64_t>& sums) noexcept;  // from whoever has copied the bytes; of all values, or nothing
  std::vector<std::uint64_t> taken() const;                    // of all values, if every byte of them has come; else empty
  const std::vector<std::uint64_t>& sizes() const noexcept { return sizes_; }
  const std::vector<std::uint64_t>& seeds() const noexcept { return seeds_; }
  std::uint64_t total() const noexcept { return total_; }

 private:
  const std::vector<std::uint64_t> sizes_, seeds_;
  const std::uint64_t total_;
  mutable std::mutex mutex_;
  std::vector<std::uint64_t> sums_;  // 0: not taken
  Part stream_;
  std::uint64_t position_ = 0;
};

}  // namespace kvferry
