// Memory: sealed segments that peers may map, the node's pool made of them, and the word that proves whose memory a
// one-sided read has hit. Knows no caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "descriptor.hpp"

namespace kvferry {

// A new memfd of `bytes` (rounded up to whole pages of the machine) zeros, mapped for writing here and sealed for everybody
// else. Throws Error(out_of_memory). The caller owns descriptor and mapping.
struct SealedMapping {
  Descriptor fd;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};
SealedMapping map_sealed(const char* name, std::size_t bytes);

// A memfd: mapped by its owner, then sealed (SHRINK, GROW, FUTURE_WRITE) before its descriptor can leave the process.
class Segment {
 public:
  Segment(std::uint32_t id, std::size_t bytes);  // throws Error(out_of_memory)
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::uint32_t id() const noexcept { return id_; }
  int descriptor() const noexcept { return fd_.get(); }
  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  std::size_t present_bytes() const noexcept;  // pages that somebody has written, and that exist therefore

 private:
  std::uint32_t id_;
  Descriptor fd_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// A piece of a segment.
struct Place {
  std::shared_ptr<Segment> segment;
  std::size_t offset = 0;
  std::size_t bytes = 0;  // rounded up to the page size of the pool

  std::uint64_t address() const noexcept;
};

// The node's pool: `size_bytes` in all, handed out in pages of 1 << page_shift from segments of `segment_bytes` (a larger
// request gets a segment of its own). Segments are made when first needed and released whole when empty.
// First fit over a sorted free list per segment, neighbours merged. Thread-safe.
class Pool {
 public:
  Pool(std::size_t size_bytes, unsigned page_shift, std::size_t segment_bytes, std::uint32_t first_segment_id);
  // Throws Error(out_of_memory) saying how much was asked, is free, and is the largest free piece, or that the machine or a
  // memory cgroup has no room for that much (room.hpp); nothing is kept then.
  Place allocate(std::size_t bytes);
  std::vector<Place> allocate_many(std::size_t count, std::size_t bytes);  // all or nothing
  void release(const Place& place);

  std::size_t size_bytes() const noexcept { return size_bytes_; }
  std::size_t used_bytes() const;
  std::vector<std::shared_ptr<Segment>> segments() const;

 private:
  struct Shelf {
    std::shared_ptr<Segment> segment;
    std::map<std::size_t, std::size_t> free;  // offset -> bytes
    std::size_t used = 0;
  };
  std::optional<Place> allocate_locked(std::size_t bytes);
  void release_locked(const Place& place);
  void check_room_locked(std::size_t count, std::size_t bytes) const;

  mutable std::mutex mutex_;
  std::size_t size_bytes_;
  std::size_t page_bytes_;
  std::size_t segment_bytes_;
  std::size_t reserved_bytes_ = 0;  // sum of the segments' sizes
  std::size_t used_bytes_ = 0;
  std::uint32_t next_id_;
  std::vector<Shelf> shelves_;
};

// The random words that prove whose memory a read has hit: private, wiped in a forked child, gone after exec.
class IdentityWord {
 public:
  IdentityWord();
  ~IdentityWord();
  IdentityWord(const IdentityWord&) = delete;
  IdentityWord& operator=(const IdentityWord&) = delete;
  std::uint64_t address() const noexcept;
  std::uint64_t value() const noexcept;  // never 0

 private:
  std::uint64_t* word_ = nullptr;
};

void random_bytes(void* out, std::size_t n);  // getrandom; throws Error(internal)

}  // namespace kvferry
