#include "mapped.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "copier.hpp"
#include "descriptor.hpp"
#include "error.hpp"
#include "sentence.hpp"

namespace kvferry {
namespace {

struct Mapping {
  std::uint64_t start = 0, end = 0;
  bool readable = false, writable = false, file_backed = false, may_shrink = false;
};

std::string_view take_word(std::string_view& line) {
  line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
  const std::string_view word = line.substr(0, line.find(' '));
  line.remove_prefix(word.size());
  return word;
}

bool take_number(std::string_view text, int base, std::uint64_t& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out, base);
  return error == std::errc{} && end == text.data() + text.size();
}

// Memory that the kernel backs with a nameless file of its own is as good as anonymous memory: nobody can make a read of it
// wait for a disk, nor truncate it, except a memfd. Segments are sealed against that, and known by their name (memory.cpp).
void note_backing(Mapping& mapping, std::uint64_t inode, std::string_view path) {
  if (inode == 0) return;
  for (std::string_view nameless : {"/dev/zero", "/SYSV", "/anon_hugepage", "/memfd:kvferry-segment"}) {
    if (path.starts_with(nameless)) return;
  }
  mapping.may_shrink = true;
  mapping.file_backed = !path.starts_with("/memfd:");
}

// A line of /proc/self/maps: "start-end rwxp offset major:minor inode   path"
std::optional<Mapping> parse_map_line(std::string_view line) {
  Mapping out;
  const std::string_view range = take_word(line);
  const std::size_t dash = range.find('-');
  if (dash == std::string_view::npos || !take_number(range.substr(0, dash), 16, out.start) ||
      !take_number(range.substr(dash + 1), 16, out.end)) {
    return std::nullopt;
  }
  const std::string_view rights = take_word(line);
  if (rights.size() < 4) return std::nullopt;
  out.readable = rights[0] == 'r';
  out.writable = rights[1] == 'w';
  take_word(line);  // offset
  take_word(line);  // device
  std::uint64_t inode = 0;
  if (!take_number(take_word(line), 10, inode)) return std::nullopt;
  line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
  note_backing(out, inode, line);
  return out;
}

// PROCMAP_QUERY of Linux 6.11 (include/uapi/linux/fs.h there): one mapping by address, without the text of all of them,
// which takes hundreds of microseconds in a process with many. Spelled out here for older headers.
struct MapQuery {
  std::uint64_t size, flags, address;                                   // in
  std::uint64_t start, end, rights, page_bytes, offset, inode;          // out
  std::uint32_t device_major, device_minor;                             // out
  std::uint32_t name_bytes, build_id_bytes;                             // in, out
  std::uint64_t name, build_id;                                         // in
};
constexpr unsigned long map_query_request = _IOWR('f', 17, MapQuery);
static_assert(sizeof(MapQuery) == 104);

std::string read_own_maps() {
  std::string text;
  const int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) throw not_to_be_had("a look at /proc/self/maps", errno);
    throw Error(Kind::internal, sentence("/proc/self/maps cannot be opened: ", std::strerror(errno), " (errno ", errno, ")"));
  }
  std::size_t used = 0;
  for (;;) {
    if (text.size() - used < 32768) text.resize(text.size() + 65536);
    const ssize_t n = read(fd, text.data() + used, text.size() - used);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    used += static_cast<std::size_t>(n);
  }
  close(fd);
  text.resize(used);
  return text;
}

// This process's mappings, asked for by ascending addresses.
class OwnMappings {
 public:
  // The mapping that covers `address`; nothing if none does.
  std::optional<Mapping> at(std::uint64_t address) {
    if (text_.empty()) {
      bool answered = false;
      const auto asked = ask_the_kernel(address, answered);
      if (answered) return asked;
      text_ = read_own_maps();
      rest_ = text_;
    }
    while (last_.end <= address && !rest_.empty()) {
      const std::string_view raw = rest_.substr(0, rest_.find('\n'));
      rest_.remove_prefix(std::min(raw.size() + 1, rest_.size()));
      if (const auto line = parse_map_line(raw)) last_ = *line;
    }
    if (last_.start > address || last_.end <= address) return std::nullopt;
    return last_;
  }

 private:
  // `answered` false: the kernel cannot be asked like that.
  static std::optional<Mapping> ask_the_kernel(std::uint64_t address, bool& answered) {
    // Opened once: opening it takes longer than asking. A forked child, in which it is closed, has no open node to ask for.
    static const Descriptor maps(open("/proc/self/maps", O_RDONLY | O_CLOEXEC));
    static const std::uint32_t generation = process_generation();
    const int fd = maps.get();
    if (fd < 0 || generation != process_generation()) return std::nullopt;
    char name[64] = "";  // enough to tell whose file it is; a longer name is cut off by an error, and asked for without
    MapQuery query{};
    query.size = sizeof query;
    query.address = address;
    query.name = reinterpret_cast<std::uint64_t>(name);
    query.name_bytes = sizeof name;
    int rc = ioctl(fd, map_query_request, &query);
    if (rc != 0 && errno == ENAMETOOLONG) {
      query.name = query.name_bytes = 0;
      rc = ioctl(fd, map_query_request, &query);
    }
    answered = rc == 0 || errno == ENOENT;
    if (rc != 0) return std::nullopt;
    constexpr std::uint64_t may_read = 1, may_write = 2;
    Mapping found{query.start, query.end, (query.rights & may_read) != 0, (query.rights & may_write) != 0};
    note_backing(found, query.inode, name);
    return found;
  }

  std::string text_;
  std::string_view rest_;
  Mapping last_;
};

std::uint64_t machine_page() noexcept {
  static const auto bytes = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

constexpr std::uint64_t highest = std::uint64_t{1} << 63;  // no process has memory from here on

// Rights are those of whole pages.
MemoryRange whole_pages(const MemoryRange& range) {
  const auto page = machine_page();
  return {range.begin & ~(page - 1), range.end >= highest ? range.end : (range.end + page - 1) & ~(page - 1)};
}

bool same_backing(const MemoryRange& one, const MemoryRange& other) noexcept {
  return one.file_backed == other.file_backed && one.may_shrink == other.may_shrink;
}

}  // namespace

Mapped ranges_mapped(std::span<const MemoryRange> ranges, bool writable, std::vector<MemoryRange>* found) {
  Mapped out;
  OwnMappings mappings;
  std::optional<Mapping> here;
  for (const auto& range : ranges) {
    for (std::uint64_t need = range.begin; need < range.end;) {
      if (!here || need < here->start || need >= here->end) here = mappings.at(need);
      if (!here || !(writable ? here->writable : here->readable)) {
        out.hole = need;
        return out;
      }
      const auto end = std::min(here->end, range.end);
      out.file_backed |= here->file_backed;
      out.may_shrink |= here->may_shrink;
      if (found != nullptr) {
        const MemoryRange part{need, end, here->file_backed, here->may_shrink};
        if (!found->empty() && found->back().end == need && same_backing(found->back(), part))
          found->back().end = end;
        else
          found->push_back(part);
      }
      need = end;
    }
  }
  out.ok = true;
  return out;
}

Mapped range_mapped(std::uint64_t address, std::uint64_t bytes, bool writable) {
  MemoryRange range{address, 0};
  if (__builtin_add_overflow(address, bytes, &range.end)) return {false, address};
  return ranges_mapped({&range, 1}, writable);
}

bool still_there(std::uint64_t address, std::uint64_t bytes, bool writable) noexcept {
  try {
    if (!range_mapped(address, bytes, writable).ok) return false;
  } catch (const Error&) {  // it cannot be known
    return true;
  }
  std::byte read;
  return copy_bytes_by_kernel(&read, reinterpret_cast<const void*>(address), 1) &&
         copy_bytes_by_kernel(&read, reinterpret_cast<const void*>(address + bytes - 1), 1);
}

KnownMemory::Look KnownMemory::look(std::span<const MemoryRange> ranges, bool writable) {
  Look out;
  Known& known = writable ? writable_ : readable_;
  std::vector<MemoryRange> missing;
  {
    const std::lock_guard lock(mutex_);
    const MemoryRange* last = nullptr;  // neighbours in the list are often neighbours in memory
    for (const auto& range : ranges) {
      if (last == nullptr || range.begin < last->begin || range.end > last->end) {
        const auto behind = known.upper_bound(range.begin);
        last = behind == known.begin() ? nullptr : &std::prev(behind)->second;
        if (last != nullptr && range.end > last->end) last = nullptr;
      }
      if (last == nullptr) {
        missing.push_back(whole_pages(range));
        continue;
      }
      out.file_backed |= last->file_backed;
      out.may_shrink |= last->may_shrink;
    }
  }
  if (missing.empty()) return out;

  std::sort(missing.begin(), missing.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  std::size_t kept = 0;
  for (const auto& range : missing) {
    if (kept > 0 && range.begin <= missing[kept - 1].end)
      missing[kept - 1].end = std::max(missing[kept - 1].end, range.end);
    else
      missing[kept++] = range;
  }
  missing.resize(kept);
  std::vector<MemoryRange> found;
  const auto mapped = ranges_mapped(missing, writable, &found);
  out.ok = mapped.ok;
  out.file_backed |= mapped.file_backed;
  out.may_shrink |= mapped.may_shrink;
  if (!mapped.ok) {
    const auto bad = std::find_if(ranges.begin(), ranges.end(), [&](const MemoryRange& range) {
      const auto pages = whole_pages(range);
      return pages.begin <= mapped.hole && mapped.hole < pages.end;
    });
    out.range = static_cast<std::size_t>(bad - ranges.begin());
    out.hole = std::max(mapped.hole, bad->begin);
    return out;
  }
  const std::lock_guard lock(mutex_);
  if (known.size() + found.size() > most) known.clear();
  for (const auto& range : found) remember(known, range);
  return out;
}

void KnownMemory::forget(std::span<const MemoryRange> ranges) {
  const std::lock_guard lock(mutex_);
  for (Known* known : {&readable_, &writable_})
    for (const auto& range : ranges) {
      auto it = known->upper_bound(range.begin);
      if (it != known->begin() && std::prev(it)->second.end > range.begin) --it;
      while (it != known->end() && it->second.begin < range.end) it = known->erase(it);
    }
}

void KnownMemory::remember(Known& known, MemoryRange range) {
  auto it = known.upper_bound(range.begin);
  if (it != known.begin() && std::prev(it)->second.end >= range.begin) --it;
  while (it != known.end() && it->second.begin <= range.end) {
    const auto old = it->second;
    if (same_backing(old, range)) {
      range.begin = std::min(range.begin, old.begin);
      range.end = std::max(range.end, old.end);
    } else if (old.begin == range.end || old.end == range.begin) {  // side by side
      ++it;
      continue;
    }  // else it is other memory by now, of which this much is known
    it = known.erase(it);
  }
  known.emplace(range.begin, range);
}

}  // namespace kvferry
