#include "memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "error.hpp"
#include "room.hpp"
#include "sentence.hpp"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace kvferry {
namespace {

std::size_t machine_page() noexcept {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

std::size_t round_up(std::size_t bytes, std::size_t to) {  // `to` is a power of two
  std::size_t out = 0;
  if (__builtin_add_overflow(bytes, to - 1, &out)) {
    throw Error(Kind::out_of_memory, sentence(bytes, " bytes are more than can be addressed"));
  }
  return out & ~(to - 1);
}

std::string why(int error) { return sentence(std::strerror(error), " (errno ", error, ")"); }

int create_memfd(const char* name) noexcept {
  constexpr unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  const int fd = memfd_create(name, flags | MFD_NOEXEC_SEAL);
  if (fd >= 0 || errno != EINVAL) return fd;
  return memfd_create(name, flags);  // kernels before 6.3
}

}  // namespace

// --- sealed memory ---------------------------------------------------------------------------------------------------

SealedMapping map_sealed(const char* name, std::size_t bytes) {
  SealedMapping out;
  out.bytes = round_up(std::max<std::size_t>(bytes, 1), machine_page());
  const auto fail = [&](const char* step) {
    const int error = errno;
    if (out.data != nullptr) munmap(out.data, out.bytes);
    const auto what = sentence("shared memory of ", out.bytes, " bytes");
    if (error == EMFILE || error == ENFILE) throw not_to_be_had(what, error);
    throw Error(Kind::out_of_memory, sentence(what, ": ", step, ": ", why(error)));
  };
  out.fd = Descriptor(create_memfd(name));
  if (!out.fd) fail("memfd_create");
  if (ftruncate(out.fd.get(), static_cast<off_t>(out.bytes)) != 0) fail("ftruncate");
  void* data = mmap(nullptr, out.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, out.fd.get(), 0);
  if (data == MAP_FAILED) fail("mmap");
  out.data = static_cast<std::byte*>(data);
  // From here on no descriptor of it, however it travels, gives a writable mapping: FUTURE_WRITE spares the one above.
  // Linux before 5.1 has no such seal; there a node uses sockets alone, and no descriptor leaves it.
  constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (fcntl(out.fd.get(), F_ADD_SEALS, seals | F_SEAL_FUTURE_WRITE) != 0 && fcntl(out.fd.get(), F_ADD_SEALS, seals) != 0) fail("sealing");
  return out;
}

Segment::Segment(std::uint32_t id, std::size_t bytes) : id_(id) {
  SealedMapping mapping = map_sealed("kvferry-segment", bytes);
  fd_ = std::move(mapping.fd);
  data_ = mapping.data;
  bytes_ = mapping.bytes;
}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

std::size_t Segment::present_bytes() const noexcept {
  struct stat found{};
  if (fstat(fd_.get(), &found) != 0) return 0;
  return static_cast<std::size_t>(found.st_blocks) * 512;  // st_blocks has units of its own, whatever the file system's are
}

std::uint64_t Place::address() const noexcept { return reinterpret_cast<std::uint64_t>(segment->data() + offset); }

// --- Pool ------------------------------------------------------------------------------------------------------------

Pool::Pool(std::size_t size_bytes, unsigned page_shift, std::size_t segment_bytes, std::uint32_t first_segment_id)
    : next_id_(first_segment_id) {
  if (page_shift < 12 || page_shift > 30) {
    throw Error(Kind::invalid_argument, sentence("page shift ", page_shift, " of a pool: it must be from 12 to 30"));
  }
  page_bytes_ = std::max(std::size_t{1} << page_shift, machine_page());
  if (size_bytes == 0 || segment_bytes == 0) {
    throw Error(Kind::invalid_argument, "a pool and its segments need more than 0 bytes");
  }
  size_bytes_ = round_up(size_bytes, page_bytes_);
  segment_bytes_ = round_up(segment_bytes, page_bytes_);
}

std::optional<Place> Pool::allocate_locked(std::size_t bytes) {
  for (Shelf& shelf : shelves_) {
    for (auto it = shelf.free.begin(); it != shelf.free.end(); ++it) {
      if (it->second < bytes) continue;
      const auto [offset, size] = *it;
      shelf.free.erase(it);
      if (size > bytes) shelf.free.emplace(offset + bytes, size - bytes);
      shelf.used += bytes;
      used_bytes_ += bytes;
      return Place{shelf.segment, offset, bytes};
    }
  }
  const std::size_t room = size_bytes_ - reserved_bytes_;
  if (bytes > room) return std::nullopt;
  const std::size_t size = std::max(bytes, std::min(segment_bytes_, room));
  Shelf shelf{std::make_shared<Segment>(next_id_, size), {}, bytes};
  if (size > bytes) shelf.free.emplace(bytes, size - bytes);
  Place place{shelf.segment, 0, bytes};
  shelves_.push_back(std::move(shelf));
  ++next_id_;
  reserved_bytes_ += size;
  used_bytes_ += bytes;
  return place;
}

void Pool::release_locked(const Place& place) {
  const auto shelf = std::find_if(shelves_.begin(), shelves_.end(),
                                  [&](const Shelf& candidate) { return candidate.segment == place.segment; });
  if (shelf == shelves_.end()) throw Error(Kind::internal, "memory was given back to a pool that it is not from");
  const auto after = shelf->free.upper_bound(place.offset);
  const auto before = after == shelf->free.begin() ? shelf->free.end() : std::prev(after);
  const std::size_t end = place.offset + place.bytes;
  if (end > place.segment->bytes() || (after != shelf->free.end() && after->first < end) ||
      (before != shelf->free.end() && before->first + before->second > place.offset)) {
    throw Error(Kind::internal, "memory was given back to its pool twice");
  }
  used_bytes_ -= place.bytes;
  shelf->used -= place.bytes;
  if (shelf->used == 0) {  // released whole; unmapped when the last Place that names it is gone
    reserved_bytes_ -= shelf->segment->bytes();
    shelves_.erase(shelf);
    return;
  }
  std::size_t first = place.offset, last = end;
  if (after != shelf->free.end() && after->first == end) {
    last = after->first + after->second;
    shelf->free.erase(after);
  }
  if (before != shelf->free.end() && before->first + before->second == place.offset) {
    before->second = last - before->first;
    return;
  }
  shelf->free.emplace(first, last - first);
}

Place Pool::allocate(std::size_t bytes) { return allocate_many(1, bytes).front(); }

std::vector<Place> Pool::allocate_many(std::size_t count, std::size_t bytes) {
  if (count == 0 || bytes == 0) throw Error(Kind::invalid_argument, "0 bytes were asked of a pool");
  const std::size_t size = round_up(bytes, page_bytes_);
  std::lock_guard lock(mutex_);
  check_room_locked(count, size);
  std::vector<Place> places;
  const auto give_back = [&] {
    for (const Place& place : places) release_locked(place);
  };
  try {
    const bool possible = count <= size_bytes_ / size;
    if (possible) places.reserve(count);
    while (possible && places.size() < count) {
      auto place = allocate_locked(size);
      if (!place) break;
      places.push_back(std::move(*place));
    }
  } catch (...) {
    give_back();
    throw;
  }
  if (places.size() == count) return places;
  give_back();
  std::size_t largest = size_bytes_ - reserved_bytes_;
  for (const Shelf& shelf : shelves_) {
    for (const auto& [offset, free] : shelf.free) largest = std::max(largest, free);
  }
  throw Error(Kind::out_of_memory,
              sentence("the pool of ", size_bytes_, " bytes cannot give ", count, " times ", size, " bytes: ",
                       size_bytes_ - used_bytes_, " are free, the largest piece has ", largest));
}

// Pages come when they are first written, by whoever has got them: too late to say that there are none, the kernel kills
// somebody then. What has been given out before and not been written counts too.
void Pool::check_room_locked(std::size_t count, std::size_t bytes) const {
  std::size_t wanted = 0;
  if (__builtin_mul_overflow(count, bytes, &wanted) || wanted > size_bytes_) return;  // more than the pool has: said better there
  wanted += used_bytes_;
  for (const Shelf& shelf : shelves_) wanted -= std::min(wanted, shelf.segment->present_bytes());
  const auto room = memory_room();
  if (wanted <= room.bytes) return;
  throw Error(Kind::out_of_memory, sentence("the pool of ", size_bytes_, " bytes cannot give ", count, " times ", bytes, " bytes: ", room.of,
                                            " has room for ", room.bytes, ", and with what was given out before ", wanted, " are needed"));
}

void Pool::release(const Place& place) {
  std::lock_guard lock(mutex_);
  release_locked(place);
}

std::size_t Pool::used_bytes() const {
  std::lock_guard lock(mutex_);
  return used_bytes_;
}

std::vector<std::shared_ptr<Segment>> Pool::segments() const {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Segment>> out;
  for (const Shelf& shelf : shelves_) out.push_back(shelf.segment);
  return out;
}

// --- IdentityWord ----------------------------------------------------------------------------------------------------

IdentityWord::IdentityWord() {
  void* page = mmap(nullptr, machine_page(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) throw Error(Kind::out_of_memory, sentence("a page for the identity word: ", why(errno)));
  word_ = static_cast<std::uint64_t*>(page);
  // A forked child must not pass for its parent. Without this promise there is no proof, so there is no word.
  if (madvise(page, machine_page(), MADV_WIPEONFORK) != 0) {
    const int error = errno;
    munmap(page, machine_page());
    throw Error(Kind::unsupported, sentence("MADV_WIPEONFORK: ", why(error)));
  }
  madvise(page, machine_page(), MADV_DONTDUMP);
  try {
    while (*word_ == 0) random_bytes(word_, sizeof *word_);
  } catch (...) {
    munmap(page, machine_page());
    throw;
  }
}

IdentityWord::~IdentityWord() {
  if (word_ != nullptr) munmap(word_, machine_page());
}

std::uint64_t IdentityWord::address() const noexcept { return reinterpret_cast<std::uint64_t>(word_); }
std::uint64_t IdentityWord::value() const noexcept { return *word_; }

void random_bytes(void* out, std::size_t n) {
  auto* at = static_cast<unsigned char*>(out);
  while (n > 0) {
    const ssize_t got = getrandom(at, n, 0);
    if (got < 0) {
      if (errno == EINTR) continue;
      throw Error(Kind::internal, sentence("getrandom: ", why(errno)));
    }
    at += got;
    n -= static_cast<std::size_t>(got);
  }
}

}  // namespace kvferry
