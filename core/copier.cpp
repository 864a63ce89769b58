#include "copier.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "descriptor.hpp"
#include "error.hpp"
#include "sentence.hpp"

namespace kvferry {

// --- host to host ----------------------------------------------------------------------------------------------------

namespace {

#if defined(__x86_64__)

// Below this the calls cost more than the cache lines that streaming spares.
constexpr std::size_t stream_from = 1024;

// How far ahead of the copy the source is asked for. Long runs want more than short ones, of whose length the distance
// takes a part. Measured on a Zen 4, 256 MiB, GB/s: 1 MiB pieces 18.9 (memcpy 9 to 13), scattered 32 KiB 13.5 (8.6),
// scattered 4 KiB 7.9 (5.5), scattered 1 KiB 5.4 (3.4).
constexpr std::size_t long_run = 256 * 1024;
std::size_t distance_for(std::size_t bytes) { return bytes >= long_run ? 1024 : 256; }

struct Streams {  // what is left of a copy once the destination is aligned to a cache line
  char* to;
  const char* from;
  std::size_t bytes;
  std::size_t ahead;

  Streams(void* destination, const void* source, std::size_t n)
      : to(static_cast<char*>(destination)), from(static_cast<const char*>(source)), bytes(n), ahead(distance_for(n)) {
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) & 63;  // n >= stream_from > head
    std::memcpy(to, from, head);
    step(head);
  }
  void step(std::size_t n) {
    to += n;
    from += n;
    bytes -= n;
  }
  void tail() {
    std::memcpy(to, from, bytes);
    _mm_sfence();  // streaming stores are weakly ordered: make them visible before anybody hears that the copy is done
  }
};

__attribute__((target("avx512f"))) inline void four_lines_avx512(const Streams& at) {
  const __m512i a = _mm512_loadu_si512(at.from), b = _mm512_loadu_si512(at.from + 64);
  const __m512i c = _mm512_loadu_si512(at.from + 128), d = _mm512_loadu_si512(at.from + 192);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(at.to), a);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(at.to + 64), b);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(at.to + 128), c);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(at.to + 192), d);
}

__attribute__((target("avx512f"))) void stream_avx512(void* to, const void* from, std::size_t bytes) {
  Streams at(to, from, bytes);
  for (; at.bytes >= 256 + at.ahead; at.step(256)) {
    for (std::size_t line = 0; line < 256; line += 64) _mm_prefetch(at.from + at.ahead + line, _MM_HINT_NTA);
    four_lines_avx512(at);
  }
  for (; at.bytes >= 256; at.step(256)) four_lines_avx512(at);  // nothing beyond the end is asked for
  at.tail();
}

__attribute__((target("avx2"))) inline void two_lines_avx2(const Streams& at) {
  const auto* from = reinterpret_cast<const __m256i*>(at.from);
  auto* to = reinterpret_cast<__m256i*>(at.to);
  const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
  const __m256i c = _mm256_loadu_si256(from + 2), d = _mm256_loadu_si256(from + 3);
  _mm256_stream_si256(to, a);
  _mm256_stream_si256(to + 1, b);
  _mm256_stream_si256(to + 2, c);
  _mm256_stream_si256(to + 3, d);
}

__attribute__((target("avx2"))) void stream_avx2(void* to, const void* from, std::size_t bytes) {
  Streams at(to, from, bytes);
  for (; at.bytes >= 128 + at.ahead; at.step(128)) {
    _mm_prefetch(at.from + at.ahead, _MM_HINT_NTA);
    _mm_prefetch(at.from + at.ahead + 64, _MM_HINT_NTA);
    two_lines_avx2(at);
  }
  for (; at.bytes >= 128; at.step(128)) two_lines_avx2(at);
  at.tail();
}

inline void one_line_sse2(char* to, const char* from) {
  const auto* in = reinterpret_cast<const __m128i*>(from);
  auto* out = reinterpret_cast<__m128i*>(to);
  const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
  const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
  _mm_stream_si128(out, a);
  _mm_stream_si128(out + 1, b);
  _mm_stream_si128(out + 2, c);
  _mm_stream_si128(out + 3, d);
}

void stream_sse2(void* to, const void* from, std::size_t bytes) {
  Streams at(to, from, bytes);
  for (; at.bytes >= 64 + at.ahead; at.step(64)) {
    _mm_prefetch(at.from + at.ahead, _MM_HINT_NTA);
    one_line_sse2(at.to, at.from);
  }
  for (; at.bytes >= 64; at.step(64)) one_line_sse2(at.to, at.from);
  at.tail();
}

// A line of each of four pages in turn. On an Intel Xeon (Sapphire Rapids) one thread has 10 GB/s so, two have 17, where memcpy
// and streaming line after line have 5.4 and 10; of less than 32 KiB it gains nothing.
constexpr std::size_t four_pages_from = 32 * 1024;

void stream_four_pages(void* to, const void* from, std::size_t bytes) {
  constexpr std::size_t page = 4096, pages = 4 * page, ahead = 256;
  Streams at(to, from, bytes);
  for (; at.bytes >= pages; at.step(pages)) {
    const bool last = at.bytes < 2 * pages;  // nothing beyond the end is asked for
    for (std::size_t line = 0; line < page; line += 64) {
      const std::size_t next = line + ahead < page ? ahead : last ? 0 : pages - page + ahead;
      for (std::size_t first = 0; first < pages; first += page) {
        const std::size_t place = first + line;
        _mm_prefetch(at.from + place + next, _MM_HINT_T0);
        one_line_sse2(at.to + place, at.from + place);
      }
    }
  }
  at.tail();
}

using StreamCopy = void (*)(void*, const void*, std::size_t);

StreamCopy choose_stream_copy() noexcept {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return stream_avx512;
  if (__builtin_cpu_supports("avx2")) return stream_avx2;
  return stream_sse2;
}

StreamCopy choose_long_stream_copy() noexcept {
  __builtin_cpu_init();
  return __builtin_cpu_is("intel") ? stream_four_pages : choose_stream_copy();
}

#endif

}  // namespace

namespace {

// Where process_vm_readv may not be called (seccomp). A pipe takes and gives 4096 bytes whole.
bool copy_bytes_by_pipe(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return false;
  const Descriptor out(ends[0]), in(ends[1]);
  constexpr std::size_t most = 4096;
  while (bytes > 0) {
    const auto n = std::min(bytes, most);
    if (::write(in.get(), from, n) != static_cast<ssize_t>(n) || ::read(out.get(), to, n) != static_cast<ssize_t>(n)) return false;
    to += n;
    from += n;
    bytes -= n;
  }
  return true;
}

}  // namespace

bool copy_bytes_by_kernel(void* to, const void* from, std::size_t bytes) noexcept {
  auto* out = static_cast<std::byte*>(to);
  const auto* in = static_cast<const std::byte*>(from);
  const auto self = ::getpid();
  while (bytes > 0) {
    const iovec local{out, bytes}, remote{const_cast<std::byte*>(in), bytes};
    const auto n = ::process_vm_readv(self, &local, 1, &remote, 1, 0);
    if (n < 0 && (errno == EPERM || errno == ENOSYS)) return copy_bytes_by_pipe(out, in, bytes);
    if (n <= 0) return false;
    out += n;
    in += n;
    bytes -= static_cast<std::size_t>(n);
  }
  return true;
}

void copy_bytes(void* to, const void* from, std::size_t bytes, bool stream) noexcept {
  if (bytes == 0 || to == from) return;
#if defined(__x86_64__)
  if (stream && bytes >= stream_from) {
    static const StreamCopy short_copy = choose_stream_copy(), long_copy = choose_long_stream_copy();
    (bytes >= four_pages_from ? long_copy : short_copy)(to, from, bytes);
    return;
  }
#else
  (void)stream;  // the memcpy of other machines streams by itself
#endif
  std::memcpy(to, from, bytes);
}

// --- the kind of the tests -------------------------------------------------------------------------------------------

namespace {

class TestCopier final : public Copier {
 public:
  bool read(void* to_host, std::uint64_t from, std::size_t bytes) noexcept override {
    return with_pages(from, bytes, PROT_READ, [&](void* memory) { std::memcpy(to_host, memory, bytes); });
  }
  bool write(std::uint64_t to, const void* from_host, std::size_t bytes) noexcept override {
    return with_pages(to, bytes, PROT_READ | PROT_WRITE, [&](void* memory) { std::memcpy(memory, from_host, bytes); });
  }

  std::uint64_t allocate(std::size_t bytes) {
    const std::size_t size = (std::max<std::size_t>(bytes, 1) + page() - 1) / page() * page();
    void* memory = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw Error(Kind::out_of_memory, sentence(bytes, " bytes of test:0 memory"));
    const auto address = reinterpret_cast<std::uint64_t>(memory);
    std::lock_guard lock(mutex_);
    ranges_[address] = size;
    return address;
  }

 private:
  static std::size_t page() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

  template <class Copy>
  bool with_pages(std::uint64_t address, std::size_t bytes, int rights, Copy&& copy) noexcept {
    std::lock_guard lock(mutex_);  // also: two users of one page must not close it to each other
    if (bytes == 0) return true;
    auto range = ranges_.upper_bound(address);
    if (range == ranges_.begin()) return false;
    --range;
    const std::uint64_t offset = address - range->first;
    if (offset > range->second || bytes > range->second - offset) return false;
    const std::uint64_t first = address / page() * page();
    const std::uint64_t size = (address + bytes + page() - 1) / page() * page() - first;
    void* pages = reinterpret_cast<void*>(first);
    if (mprotect(pages, size, rights) != 0) return false;
    copy(reinterpret_cast<void*>(address));
    mprotect(pages, size, PROT_NONE);
    return true;
  }

  std::mutex mutex_;
  std::map<std::uint64_t, std::size_t> ranges_;  // address -> bytes; they live until the process ends
};

std::atomic<bool> test_kind_enabled{false};

TestCopier& test_copier() {
  alignas(TestCopier) static std::byte storage[sizeof(TestCopier)];  // never destroyed: copies may outlive main()
  static TestCopier* const copier = new (storage) TestCopier;
  return *copier;
}

void need_test_kind() {
  if (!test_kind_enabled) throw Error(Kind::unsupported, "memory kind 'test:0' is known only after enable_test_kind()");
}

}  // namespace

void enable_test_kind() {
  test_copier();
  test_kind_enabled = true;
}

std::uint64_t test_kind_allocate(std::size_t bytes) {
  need_test_kind();
  return test_copier().allocate(bytes);
}

bool test_kind_read(void* to, std::uint64_t from, std::size_t bytes) {
  need_test_kind();
  return test_copier().read(to, from, bytes);
}

bool test_kind_write(std::uint64_t to, const void* from, std::size_t bytes) {
  need_test_kind();
  return test_copier().write(to, from, bytes);
}

// --- kinds -----------------------------------------------------------------------------------------------------------

KindId kind_by_name(std::string_view name) {
  if (name == "host") return host_kind;
  if (name == "test:0" && test_kind_enabled) return test_kind;
  const bool device = name.starts_with("cuda") || name.starts_with("npu") || name.starts_with("xpu");
  throw Error(Kind::unsupported,
              sentence("memory of kind '", name, "' has no copier here, so its bytes cannot be reached: ",
                       device ? "copy the tensors to host memory first (tensor.cpu()) and register those"
                              : "register memory of kind 'host'"));
}

std::string_view kind_by_id(KindId kind) noexcept {
  switch (kind) {
    case host_kind: return "host";
    case test_kind: return "test:0";
    default: return "unknown";
  }
}

Copier* copier_of(KindId kind) noexcept {
  if (kind == test_kind && test_kind_enabled) return &test_copier();
  return nullptr;
}

}  // namespace kvferry
