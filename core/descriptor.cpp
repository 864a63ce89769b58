#include "descriptor.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <mutex>

namespace kvferry {
namespace {

// One bit per descriptor number; numbers beyond the ledger are simply not closed in a child.
constexpr int ledger_size = 1 << 20;
std::atomic<std::uint64_t> ledger[ledger_size / 64];
std::atomic<std::uint32_t> generation{0};

void note(int fd, bool open) noexcept {
  if (fd < 0 || fd >= ledger_size) return;
  const std::uint64_t bit = std::uint64_t{1} << (fd % 64);
  if (open)
    ledger[fd / 64].fetch_or(bit, std::memory_order_relaxed);
  else
    ledger[fd / 64].fetch_and(~bit, std::memory_order_relaxed);
}

// Runs in the child, where only this thread exists and any lock may be held by one that does not: no locks, no allocation.
void in_child() {
  generation.fetch_add(1, std::memory_order_relaxed);
  for (int word = 0; word < ledger_size / 64; ++word) {
    std::uint64_t bits = ledger[word].exchange(0, std::memory_order_relaxed);
    while (bits != 0) {
      ::close(word * 64 + __builtin_ctzll(bits));
      bits &= bits - 1;
    }
  }
}

}  // namespace

// The numbers of the standard streams are not for us, also where a program has closed them: what it, or we, then write to
// "stderr" would be sent to a peer.
static int beyond_standard_streams(int fd) noexcept {
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const int moved = ::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  if (moved < 0) return fd;
  ::close(fd);
  return moved;
}

Descriptor::Descriptor(int fd) noexcept : fd_(beyond_standard_streams(fd)) { note(fd_, true); }

void Descriptor::reset() noexcept {
  if (fd_ < 0) return;
  // Cleared before the close: another thread may get the same number at once.
  const bool ours = fd_ >= ledger_size ||
                    (ledger[fd_ / 64].load(std::memory_order_relaxed) & (std::uint64_t{1} << (fd_ % 64))) != 0;
  note(fd_, false);
  if (ours) ::close(fd_);  // else the child handler has closed it, and the number may be somebody else's by now
  fd_ = -1;
}

std::uint32_t process_generation() noexcept { return generation.load(std::memory_order_relaxed); }

std::size_t open_descriptors() noexcept {
  std::size_t n = 0;
  for (const auto& word : ledger) n += static_cast<std::size_t>(__builtin_popcountll(word.load(std::memory_order_relaxed)));
  return n;
}

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, in_child); });
}

}  // namespace kvferry
