// What is mapped at this process's addresses, and with which rights: from the kernel, and remembered. Knows no caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <vector>

namespace kvferry {

// Addresses [begin, end). `file_backed`: a mapping of a file other than a memfd, where a fault may wait for a disk.
// `may_shrink`: of a file or of a memfd that is not this library's own (those are sealed). It stays mapped when somebody makes
// that shorter, and touching it is a SIGBUS then: only system calls may, which answer EFAULT.
struct MemoryRange {
  std::uint64_t begin = 0, end = 0;
  bool file_backed = false, may_shrink = false;
};

struct Mapped {
  bool ok = false;
  std::uint64_t hole = 0;  // on failure: the first address that is not mapped with the needed right
  bool file_backed = false, may_shrink = false;
};
// Whether all of `ranges` is mapped with the needed right (read or write), by one walk. They ascend and do not overlap.
// `found` receives what was found mapped up to there, cut where one kind of memory ends and another begins.
Mapped ranges_mapped(std::span<const MemoryRange> ranges, bool writable, std::vector<MemoryRange>* found = nullptr);
Mapped range_mapped(std::uint64_t address, std::uint64_t bytes, bool writable);
// Whether the first and the last byte of a range are there now, with the needed right: what is left of a file counts only. To be
// asked after something has failed.
bool still_there(std::uint64_t address, std::uint64_t bytes, bool writable) noexcept;

// Memory that has been found good is not looked at again until somebody says so: whoever names it keeps it mapped as it was.
// Thread-safe.
class KnownMemory {
 public:
  struct Look {
    bool ok = true;
    std::size_t range = 0;   // which of them is not (all) mapped as needed
    std::uint64_t hole = 0;  // and where
    bool file_backed = false, may_shrink = false;
  };
  // In any order, overlapping or not. What is not known yet is looked up together.
  Look look(std::span<const MemoryRange> ranges, bool writable);
  void forget(std::span<const MemoryRange> ranges);

 private:
  static constexpr std::size_t most = 64 << 10;  // of either kind; then all are forgotten
  using Known = std::map<std::uint64_t, MemoryRange>;  // by begin; disjoint, whole pages
  static void remember(Known& known, MemoryRange range);
  std::mutex mutex_;
  Known readable_, writable_;
};

}  // namespace kvferry
