// Copiers: the only code that touches bytes of a memory kind. A kind without a copier is refused at registration, by name.
//
// `host` memory is reached directly by everyone. Any other kind is reached through its copier alone, from or to host
// buffers; `test:0` is such a kind, whose pages are PROT_NONE except inside its copier, so that a byte that went past the
// copier is a crash in the tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvferry {

using KindId = std::uint16_t;  // index of a memory kind in this process; 0 is host
inline constexpr KindId host_kind = 0;
inline constexpr KindId test_kind = 1;

class Copier {
 public:
  virtual ~Copier() = default;
  virtual bool read(void* to_host, std::uint64_t from, std::size_t bytes) noexcept = 0;   // false: not this kind's memory
  virtual bool write(std::uint64_t to, const void* from_host, std::size_t bytes) noexcept = 0;
};

// Throws Error(unsupported) naming the kind and the way out ("cuda:0": copy it to host memory first ...).
KindId kind_by_name(std::string_view name);
std::string_view kind_by_id(KindId kind) noexcept;
Copier* copier_of(KindId kind) noexcept;  // nullptr for host (direct) and for unknown kinds

void enable_test_kind();
std::uint64_t test_kind_allocate(std::size_t bytes);            // page aligned, PROT_NONE; lives until the process ends
bool test_kind_read(void* to, std::uint64_t from, std::size_t bytes);
bool test_kind_write(std::uint64_t to, const void* from, std::size_t bytes);

// Plain copies between host memory. `stream` uses non-temporal stores where the machine has them: for big transfers,
// whose destination will not be read while still in the cache.
void copy_bytes(void* to, const void* from, std::size_t bytes, bool stream) noexcept;

// The same by the kernel: false where memory is not there, such as a page of a file that has become shorter, where a plain
// copy would be a SIGBUS.
bool copy_bytes_by_kernel(void* to, const void* from, std::size_t bytes) noexcept;

// A hint, for scattered runs: the next copy will be this one. Brings its first lines and both address translations near
// while the current copy is still running (scattered 4 KiB runs: 7.2 -> 9.6 GB/s). Any address is allowed.
inline void expect_copy(const void* to, const void* from, std::size_t bytes) noexcept {
  const auto* line = static_cast<const char*>(from);
  for (std::size_t at = 0; at < bytes && at < 1024; at += 64) __builtin_prefetch(line + at, 0, 0);
  __builtin_prefetch(to, 1, 0);
}

}  // namespace kvferry
