#include "guard.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "clock.hpp"
#include "error.hpp"
#include "memory.hpp"
#include "sentence.hpp"

namespace kvferry {
namespace {

constexpr std::int64_t spin_ns = 50'000;
constexpr std::int64_t first_sleep_ns = 50'000;
constexpr std::int64_t longest_sleep_ns = 1'000'000;

// Waits for what other threads of this process finish by themselves: a piece in hand, mostly well below a millisecond.
// Sleeping in growing steps keeps leave() free of any wake-up call, and no wake-up can be missed. What counts as patience
// is time slept, not time passed: of a process that was stopped the other threads have had no time either.
template <class Condition>
bool wait_until(std::int64_t patience_ms, Condition&& condition) noexcept {
  const std::int64_t spin_until = now_ns() + spin_ns;
  while (!condition()) {
    if (now_ns() < spin_until) {
      std::this_thread::yield();
      continue;
    }
    std::int64_t left = patience_ms * 1'000'000;
    for (std::int64_t sleep = first_sleep_ns; !condition(); sleep = std::min(2 * sleep, longest_sleep_ns)) {
      if (left <= 0) return false;
      const timespec t{0, static_cast<long>(sleep)};
      nanosleep(&t, nullptr);
      left -= sleep;
    }
  }
  return true;
}

// The thread sanitizer does not model fences and says so; they are needed all the same (see end() and PeerPage::alive()).
inline void fence(std::memory_order order) noexcept {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wtsan"
  std::atomic_thread_fence(order);
#pragma GCC diagnostic pop
}

bool is_alive_number(std::uint64_t number) noexcept { return number % 2 == 1; }

}  // namespace

// --- GuardTable ------------------------------------------------------------------------------------------------------

GuardTable::GuardTable(std::uint32_t slot_count) : slot_count_(slot_count) {
  private_ = std::make_unique<Private[]>(slot_count);
  free_.reserve(slot_count);  // so that end() never allocates
  for (std::uint32_t slot = slot_count; slot-- > 0;) free_.push_back(slot);

  std::uint64_t nonce[2];
  random_bytes(nonce, sizeof nonce);
  SealedMapping mapping = map_sealed("kvferry-control", sizeof(ControlPage) + std::size_t{slot_count} * 8);
  fd_ = std::move(mapping.fd);
  bytes_ = mapping.bytes;
  page_ = reinterpret_cast<ControlPage*>(mapping.data);  // fresh pages: every slot and the epoch are 0
  page_->magic = ControlPage::magic_value;
  page_->version = ControlPage::version_value;
  page_->slot_count = slot_count;
  page_->nonce[0] = nonce[0];
  page_->nonce[1] = nonce[1];
}

GuardTable::~GuardTable() {
  if (page_ != nullptr) munmap(page_, bytes_);
}

Guard GuardTable::open() {
  std::uint32_t slot;
  {
    std::lock_guard lock(free_mutex_);
    if (free_.empty()) throw Error(Kind::busy, sentence("all ", slot_count_, " guard slots of this node are in use: each cache, open window and push in flight has one; end some, or make another node"));
    slot = free_.back();
    free_.pop_back();
  }
  // Only the thread that took the slot from the free list changes an even number.
  const std::uint64_t number = page_->slots[slot].load(std::memory_order_relaxed) + 1;
  page_->slots[slot].store(number, std::memory_order_seq_cst);
  return {slot, number};
}

// In a forked child no guard is alive, and nothing that the child ends (its destructors, say) reaches the page, which is
// the parent's.
bool GuardTable::known(const Guard& guard) const noexcept {
  return guard.slot < slot_count_ && is_alive_number(guard.number) && generation_ == process_generation();
}

// enter() and end() are a store and a load each, crosswise: enter() writes `inside` and reads the number, end() writes the
// number and reads `inside`. With all four sequentially consistent, at least one of the two sees the other: either enter()
// finds the number changed and turns back, or end() finds somebody inside and waits. Anything weaker lets both miss.
bool GuardTable::enter(const Guard& guard) noexcept {
  if (!known(guard)) return false;
  std::atomic<std::uint32_t>& inside = private_[guard.slot].inside;
  inside.fetch_add(1, std::memory_order_seq_cst);
  if (page_->slots[guard.slot].load(std::memory_order_seq_cst) == guard.number) return true;
  inside.fetch_sub(1, std::memory_order_release);
  return false;
}

void GuardTable::leave(const Guard& guard) noexcept {
  // Release: what was done inside has happened before end() returns.
  private_[guard.slot].inside.fetch_sub(1, std::memory_order_release);
}

bool GuardTable::alive(const Guard& guard) const noexcept {
  return known(guard) && page_->slots[guard.slot].load(std::memory_order_acquire) == guard.number;
}

// The number goes from alive to ended exactly once. False: this guard was never given out by this table.
bool GuardTable::change_number(const Guard& guard) noexcept {
  if (!known(guard)) return false;
  std::uint64_t seen = guard.number;
  if (page_->slots[guard.slot].compare_exchange_strong(seen, guard.number + 1, std::memory_order_seq_cst)) {
    // For one-sided readers in other processes: what the caller writes into the memory after end() must not be visible
    // before the new number is. A read-modify-write alone does not hold back later stores on every machine.
    fence(std::memory_order_seq_cst);
    return true;
  }
  return seen > guard.number;
}

// Of all that end one guard, the one that moves `claimed` on waits and frees the slot; the others wait for `settled`. The
// slot is not in the free list before that, so it cannot be given out while anybody still waits for the old number.
bool GuardTable::claim(const Guard& guard) noexcept {
  std::uint64_t previous = guard.number - 1;
  return private_[guard.slot].claimed.compare_exchange_strong(previous, guard.number + 1, std::memory_order_seq_cst);
}

void GuardTable::unclaim(const Guard& guard) noexcept {
  private_[guard.slot].claimed.store(guard.number - 1, std::memory_order_seq_cst);
}

void GuardTable::settle(const Guard& guard) noexcept {
  private_[guard.slot].settled.store(guard.number + 1, std::memory_order_release);
  std::lock_guard lock(free_mutex_);
  free_.push_back(guard.slot);
}

bool GuardTable::end(const Guard& guard, std::int64_t patience_ms) noexcept {
  if (!change_number(guard)) return true;
  Private& slot = private_[guard.slot];
  if (!claim(guard))
    return wait_until(patience_ms, [&] { return slot.settled.load(std::memory_order_acquire) >= guard.number + 1; });
  const bool empty = wait_until(patience_ms, [&] { return slot.inside.load(std::memory_order_seq_cst) == 0; });
  empty ? settle(guard) : unclaim(guard);
  return empty;
}

void GuardTable::end_without_waiting(const Guard& guard) noexcept { change_number(guard); }

bool GuardTable::end_if_idle(const Guard& guard) noexcept {
  if (!change_number(guard)) return true;
  Private& slot = private_[guard.slot];
  if (slot.settled.load(std::memory_order_acquire) >= guard.number + 1) return true;
  if (slot.inside.load(std::memory_order_seq_cst) != 0) return false;
  // The number has changed and nobody was inside after that, so nobody will be.
  if (!claim(guard)) return false;  // an end() is about to settle it
  settle(guard);
  return true;
}

std::uint64_t GuardTable::epoch() const noexcept { return page_->epoch.load(std::memory_order_acquire); }

void GuardTable::bump_epoch() noexcept {
  page_->epoch.fetch_add(1, std::memory_order_seq_cst);
  fence(std::memory_order_seq_cst);  // as in change_number(): what follows must not overtake it
}

std::uint32_t GuardTable::open_count() const noexcept {
  std::lock_guard lock(free_mutex_);
  return slot_count_ - static_cast<std::uint32_t>(free_.size());
}

// --- Entered ---------------------------------------------------------------------------------------------------------

Entered::Entered(GuardTable& table, const std::vector<Guard>& guards) noexcept : table_(table), guards_(guards) {
  std::size_t entered = 0;
  while (entered < guards.size() && table.enter(guards[entered])) ++entered;
  inside_ = entered == guards.size();
  if (inside_) return;
  while (entered-- > 0) table.leave(guards[entered]);
}

Entered::~Entered() {
  if (!inside_) return;
  for (const Guard& guard : guards_) table_.leave(guard);
}

// --- PeerPage --------------------------------------------------------------------------------------------------------

PeerPage::PeerPage(int fd, const std::uint64_t nonce[2]) {
  const auto refuse = [](auto... words) { throw Error(Kind::refused, sentence("the peer's control page ", words...)); };
  // The seals make the page's size final: nobody can shrink it below what is mapped here.
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) refuse("is not a sealed memfd");
  struct stat status{};
  if (fstat(fd, &status) != 0) refuse("cannot be examined: errno ", errno);
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (size < sizeof(ControlPage)) refuse("has only ", size, " bytes");
  void* data = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) refuse("cannot be mapped: errno ", errno);
  const auto* page = static_cast<const ControlPage*>(data);
  const std::uint64_t slots = page->slot_count;  // read once: the owner can change it at any time
  const bool as_announced = page->magic == ControlPage::magic_value && page->version == ControlPage::version_value &&
                            page->nonce[0] == nonce[0] && page->nonce[1] == nonce[1] &&
                            slots <= (size - sizeof(ControlPage)) / 8;
  if (!as_announced) {
    munmap(data, size);
    refuse("is not the one that was announced");
  }
  page_ = page;
  bytes_ = size;
  slot_count_ = static_cast<std::uint32_t>(slots);
}

PeerPage::~PeerPage() {
  if (page_ != nullptr) munmap(const_cast<ControlPage*>(page_), bytes_);
}

// The second look of a one-sided read: the fence keeps the loads of the copy before this load of the number (an acquire
// load alone holds back only what comes after it), the acquire keeps those of the next piece behind it.
bool PeerPage::alive(const Guard& guard) const noexcept {
  if (guard.slot >= slot_count_ || !is_alive_number(guard.number)) return false;
  fence(std::memory_order_acquire);
  return page_->slots[guard.slot].load(std::memory_order_acquire) == guard.number;
}

std::uint64_t PeerPage::epoch() const noexcept {
  fence(std::memory_order_acquire);
  return page_->epoch.load(std::memory_order_acquire);
}

}  // namespace kvferry
