#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <random>

#include "../mapped.hpp"
#include "../memory.hpp"
#include "check.hpp"

using namespace kvferry;

static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
static std::uint64_t at(const void* address) { return reinterpret_cast<std::uint64_t>(address); }

static char* map_pages(std::size_t pages) {
  return static_cast<char*>(mmap(nullptr, pages * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
}

static MemoryRange range(const char* from, std::size_t bytes) { return {at(from), at(from) + bytes, false}; }

static void a_range_may_span_mappings_and_a_hole_is_found() {
  auto* memory = static_cast<char*>(mmap(nullptr, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  CHECK(mprotect(memory + page, page, PROT_READ) == 0);  // now three mappings
  const Mapped all = range_mapped(at(memory), 4 * page, false);
  CHECK(all.ok && !all.file_backed);
  const Mapped write = range_mapped(at(memory) + 10, 4 * page - 10, true);
  CHECK(!write.ok && write.hole == at(memory) + page);
  munmap(memory + 2 * page, page);
  const Mapped hole = range_mapped(at(memory), 4 * page, false);
  CHECK(!hole.ok && hole.hole == at(memory) + 2 * page);
  CHECK(range_mapped(at(memory), 2 * page, false).ok);
  CHECK(!range_mapped(8, 1, false).ok);
  CHECK(!range_mapped(~std::uint64_t{0} - 5, 100, false).ok);
  munmap(memory, 4 * page);
}

static void only_named_files_count_as_file_backed() {
  const Segment segment(1, page);
  CHECK(range_mapped(at(segment.data()), page, true).ok && !range_mapped(at(segment.data()), page, true).file_backed);
  void* shared = mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(range_mapped(at(shared), page, true).ok && !range_mapped(at(shared), page, true).file_backed);
  munmap(shared, page);
  int on_the_stack = 0;
  CHECK(range_mapped(at(&on_the_stack), sizeof on_the_stack, true).ok);
  char path[] = "/tmp/kvferry test XXXXXX";  // with blanks, as paths may have
  const int fd = mkstemp(path);
  CHECK(ftruncate(fd, page) == 0);
  void* file = mmap(nullptr, page, PROT_READ, MAP_PRIVATE, fd, 0);
  unlink(path);
  const Mapped mapped = range_mapped(at(file), page, false);
  CHECK(mapped.ok && mapped.file_backed && mapped.may_shrink);
  munmap(file, page);
  close(fd);
}

// A memfd waits for no disk, but whoever has its descriptor may make it shorter, unless it is a segment: those are sealed.
static void a_memfd_may_shrink_and_a_segment_may_not() {
  const Segment segment(1, page);
  char* memory = map_pages(1);
  for (const void* plain : {static_cast<const void*>(segment.data()), static_cast<const void*>(memory)})
    CHECK(range_mapped(at(plain), page, true).ok && !range_mapped(at(plain), page, true).may_shrink);
  CHECK(still_there(at(memory), page, true) && mprotect(memory, page, PROT_READ) == 0);
  CHECK(!still_there(at(memory), page, true) && still_there(at(memory), page, false));
  munmap(memory, page);
  CHECK(!still_there(at(memory), page, false));
  const Descriptor fd(memfd_create("somebody's", MFD_CLOEXEC));
  CHECK(ftruncate(fd.get(), static_cast<off_t>(2 * page)) == 0);
  char* both = map_pages(4);
  CHECK(mmap(both + page, 2 * page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd.get(), 0) != MAP_FAILED);
  const Mapped mapped = range_mapped(at(both), 4 * page, true);
  CHECK(mapped.ok && mapped.may_shrink && !mapped.file_backed);
  KnownMemory known;
  const MemoryRange all[] = {range(both, 4 * page)}, plain[] = {range(both, page), range(both + 3 * page, 8)}, shared[] = {range(both + page, 8)};
  for (int round = 0; round < 3; ++round) {
    CHECK(known.look(all, true).may_shrink && known.look(shared, true).may_shrink && !known.look(all, true).file_backed);
    CHECK(known.look(plain, true).ok && !known.look(plain, true).may_shrink);
  }
  CHECK(still_there(at(both), 4 * page, true) && ftruncate(fd.get(), static_cast<off_t>(page)) == 0);
  CHECK(range_mapped(at(both), 4 * page, true).ok && still_there(at(both), 2 * page, true) && !still_there(at(both) + page, 2 * page, true));
  munmap(both, 4 * page);
}

// Many ranges by one walk, and what was found comes cut by kind.
static void several_ranges_are_looked_up_together() {
  char* memory = map_pages(8);
  CHECK(mprotect(memory + 2 * page, page, PROT_READ) == 0);
  munmap(memory + 5 * page, page);
  const MemoryRange good[] = {range(memory + 8, page), range(memory + 3 * page, 2 * page), range(memory + 7 * page, page)};
  std::vector<MemoryRange> found;
  CHECK(ranges_mapped(good, true, &found).ok && found.size() == 3 && found[1].begin == good[1].begin && found[1].end == good[1].end);
  const MemoryRange bad[] = {range(memory, 10), range(memory + 4 * page, 2 * page)};
  const auto holed = ranges_mapped(bad, true);
  CHECK(!holed.ok && holed.hole == at(memory) + 5 * page);
  const MemoryRange read_only[] = {range(memory, 3 * page)};
  CHECK(ranges_mapped(read_only, false).ok && ranges_mapped(read_only, true).hole == at(memory) + 2 * page);
  CHECK(ranges_mapped({}, true).ok);
  munmap(memory, 8 * page);
}

static void what_was_found_good_is_not_looked_at_again() {
  char* memory = map_pages(9);
  munmap(memory + 8 * page, page);
  KnownMemory known;
  const MemoryRange first[] = {range(memory + page + 5, 10), range(memory + 3 * page, 100), range(memory + page, 20)};
  CHECK(known.look(first, true).ok);
  munmap(memory + page, page);
  CHECK(known.look(first, true).ok);                                  // by its word
  const MemoryRange same_page[] = {range(memory + page + 1000, 10)};  // rights are whole pages'
  CHECK(known.look(same_page, true).ok);
  CHECK(!known.look(same_page, false).ok);  // another right is another question
  const MemoryRange other[] = {range(memory + 3 * page, 8), range(memory + 4 * page, page), range(memory + 6 * page - 4, 8)};
  CHECK(known.look(other, true).ok);
  munmap(memory + 3 * page, 3 * page);
  const MemoryRange joined[] = {range(memory + 3 * page + 7, 3 * page - 20)};
  CHECK(known.look(joined, true).ok);  // neighbours are known as one
  const MemoryRange mixed[] = {range(memory, 8), range(memory + 7 * page, 10), range(memory + 7 * page + 90, page)};
  const auto look = known.look(mixed, true);
  CHECK(!look.ok && look.range == 2 && look.hole == at(memory) + 8 * page);
  CHECK(known.look({mixed, 2}, true).ok);
  const MemoryRange null[] = {range(memory, 8), {0, 1, false}};
  CHECK(!known.look(null, false).ok && known.look(null, false).range == 1);
  munmap(memory, 8 * page);
}

static void files_stay_known_as_files() {
  char path[] = "/tmp/kvferry-test-XXXXXX";
  const int fd = mkstemp(path);
  unlink(path);
  CHECK(ftruncate(fd, static_cast<off_t>(page)) == 0);
  char* memory = map_pages(3);
  CHECK(mmap(memory + page, page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED);
  KnownMemory known;
  const MemoryRange all[] = {range(memory, 3 * page)};
  const MemoryRange plain[] = {range(memory, page), range(memory + 2 * page, 8)};
  const MemoryRange file[] = {range(memory + page + 8, 8)};
  for (int round = 0; round < 3; ++round) {
    CHECK(known.look(all, true).ok && known.look(all, true).file_backed);
    CHECK(known.look(plain, true).ok && !known.look(plain, true).file_backed);
    CHECK(known.look(file, true).ok && known.look(file, true).file_backed);
  }
  munmap(memory, 3 * page);
  close(fd);
}

// Whatever is asked in whatever order, the answer is that of the pages.
static void any_ranges_are_answered_as_their_pages_are() {
  constexpr std::size_t pages = 64;
  char* memory = map_pages(pages);
  std::mt19937 random(5);
  std::vector<bool> writable(pages, true);
  for (std::size_t i = 0; i < pages; ++i)
    if (random() % 8 == 0) writable[i] = mprotect(memory + i * page, page, PROT_READ) != 0;
  KnownMemory known;
  int good = 0;
  for (int round = 0; round < 2000; ++round) {
    std::vector<MemoryRange> ranges;
    bool ok = true;
    for (unsigned k = 0; k <= random() % 5; ++k) {
      const auto begin = random() % (pages * page - 3 * page), bytes = random() % (2 * page) + 1;
      ranges.push_back(range(memory + begin, bytes));
      for (auto i = begin / page; i <= (begin + bytes - 1) / page; ++i) ok &= writable[i];
    }
    const auto look = known.look(ranges, true);
    CHECK(look.ok == ok);
    if (!look.ok) {
      CHECK(ranges[look.range].begin <= look.hole && look.hole < ranges[look.range].end && !writable[(look.hole - at(memory)) / page]);
    }
    good += look.ok;
  }
  CHECK(good > 100 && good < 1900);
  munmap(memory, pages * page);
}

int main() {
  a_range_may_span_mappings_and_a_hole_is_found();
  only_named_files_count_as_file_backed();
  a_memfd_may_shrink_and_a_segment_may_not();
  several_ranges_are_looked_up_together();
  what_was_found_good_is_not_looked_at_again();
  files_stay_known_as_files();
  any_ranges_are_answered_as_their_pages_are();
  return TEST_RESULT();
}
