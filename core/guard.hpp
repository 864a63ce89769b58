// Guard slots: 64-bit numbers that stand for something that can end (a cache, a window, a push in flight, later a lease).
//
// The slots live in the node's control page, a sealed memfd that peers on the same host map read-only. An odd number is
// alive, an even one has ended; a slot's number only grows, so it never stands twice for different things.
//   Owner's threads   enter() a guard for each piece they write or send under it, and leave() it.
//   Ending            end() changes the number first, fences, then waits until nobody is inside, then returns.
//   One-sided readers read the number, copy, fence, read again (PeerPage::alive); they can never block the owner.
// GuardTable does not know what its slots stand for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "descriptor.hpp"

namespace kvferry {

struct Guard {
  std::uint32_t slot = 0;
  std::uint64_t number = 0;  // 0: no guard

  bool operator==(const Guard&) const = default;
};

// The layout that both sides see (docs/wire.md). All fields are written by the owner only.
struct ControlPage {
  static constexpr std::uint64_t magic_value = 0x314547415045464bULL;
  static constexpr std::uint32_t version_value = 1;
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t slot_count;
  std::uint64_t nonce[2];             // equals what the owner said in the local step, or this is another page
  std::atomic<std::uint64_t> epoch;   // changed by every register, unregister and key change
  std::uint64_t reserved[3];
  std::atomic<std::uint64_t> slots[];  // slot_count of them
};
static_assert(sizeof(ControlPage) == 64);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

class GuardTable {
 public:
  explicit GuardTable(std::uint32_t slot_count);  // throws Error(out_of_memory)
  ~GuardTable();
  GuardTable(const GuardTable&) = delete;
  GuardTable& operator=(const GuardTable&) = delete;

  Guard open();                              // throws Error(busy) when every slot is taken
  bool enter(const Guard&) noexcept;         // false: ended, do not touch
  void leave(const Guard&) noexcept;
  bool alive(const Guard&) const noexcept;
  // Any number of times, from any thread that is not inside. True: nobody is inside and nobody will be. False: after
  // `patience_ms` of waiting somebody still was, so the kernel holds a copy there; the guard has ended all the same, and
  // the slot stays taken until a later end() that says true.
  bool end(const Guard&, std::int64_t patience_ms = patience_ms_normally) noexcept;
  void end_without_waiting(const Guard&) noexcept;  // the number changes; a later end() waits and frees the slot
  bool end_if_idle(const Guard&) noexcept;  // ends; true: settled, slot freed. false: somebody is inside, come again

  std::uint64_t epoch() const noexcept;
  void bump_epoch() noexcept;

  int page_descriptor() const noexcept { return fd_.get(); }
  std::size_t page_bytes() const noexcept { return bytes_; }
  const ControlPage& page() const noexcept { return *page_; }
  std::uint32_t open_count() const noexcept;

  static constexpr std::int64_t patience_ms_normally = 3000;  // a piece in hand takes less than a millisecond

 private:
  bool known(const Guard&) const noexcept;
  struct Private {  // what peers must not see
    std::atomic<std::uint32_t> inside{0};
    std::atomic<std::uint64_t> settled{0};  // highest ended number nobody is inside of any more
    std::atomic<std::uint64_t> claimed{0};  // highest ended number that somebody has undertaken to settle
  };
  bool change_number(const Guard&) noexcept;
  bool claim(const Guard&) noexcept;
  void unclaim(const Guard&) noexcept;
  void settle(const Guard&) noexcept;

  Descriptor fd_;
  std::size_t bytes_ = 0;
  ControlPage* page_ = nullptr;
  std::unique_ptr<Private[]> private_;
  mutable std::mutex free_mutex_;
  std::vector<std::uint32_t> free_;
  std::uint32_t slot_count_ = 0;
  const std::uint32_t generation_ = process_generation();
};

// Several guards entered together (cache, window, push): all or none.
class Entered {
 public:
  Entered(GuardTable& table, const std::vector<Guard>& guards) noexcept;
  ~Entered();
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  explicit operator bool() const noexcept { return inside_; }

 private:
  GuardTable& table_;
  const std::vector<Guard>& guards_;
  bool inside_ = false;
};

// A peer's control page, mapped read-only. Throws Error(refused) if it is not what its owner announced.
class PeerPage {
 public:
  PeerPage(int fd, const std::uint64_t nonce[2]);  // does not keep fd; checks magic, version, size and seals
  ~PeerPage();
  PeerPage(const PeerPage&) = delete;
  PeerPage& operator=(const PeerPage&) = delete;

  bool alive(const Guard&) const noexcept;  // acquire; false for a slot outside the page
  std::uint64_t epoch() const noexcept;

 private:
  const ControlPage* page_ = nullptr;
  std::size_t bytes_ = 0;
  std::uint32_t slot_count_ = 0;
};

}  // namespace kvferry
