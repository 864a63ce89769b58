#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <set>

#include "../memory.hpp"
#include "check.hpp"

using namespace kvferry;

constexpr std::size_t page = 4096;

static void a_segment_can_be_written_by_its_owner_alone() {
  Segment segment(3, 100);
  CHECK(segment.id() == 3 && segment.bytes() == static_cast<std::size_t>(sysconf(_SC_PAGESIZE)));
  segment.data()[99] = std::byte{7};
  CHECK(mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_SHARED, segment.descriptor(), 0) == MAP_FAILED);
  CHECK(ftruncate(segment.descriptor(), 0) != 0 && ftruncate(segment.descriptor(), 1 << 20) != 0);
  CHECK(pwrite(segment.descriptor(), "x", 1, 0) < 0);
  CHECK(fcntl(segment.descriptor(), F_ADD_SEALS, F_SEAL_WRITE) != 0);
  CHECK((fcntl(segment.descriptor(), F_GETFD) & FD_CLOEXEC) != 0);
  void* seen = mmap(nullptr, page, PROT_READ, MAP_SHARED, segment.descriptor(), 0);
  CHECK(seen != MAP_FAILED && static_cast<std::byte*>(seen)[99] == std::byte{7});
  CHECK(mprotect(seen, page, PROT_READ | PROT_WRITE) != 0);
  munmap(seen, page);
}

static void a_pool_hands_out_pages_and_takes_them_back_whole() {
  Pool pool(1 << 20, 12, 256 << 10, 5);
  CHECK(pool.size_bytes() == 1 << 20 && pool.used_bytes() == 0 && pool.segments().empty());
  const Place a = pool.allocate(1), b = pool.allocate(5000), c = pool.allocate(page);
  CHECK(a.bytes == page && b.bytes == 2 * page && pool.used_bytes() == 4 * page);
  CHECK(a.segment->id() == 5 && b.offset == page && c.offset == 3 * page && pool.segments().size() == 1);
  std::memset(reinterpret_cast<void*>(b.address()), 1, b.bytes);
  pool.release(a);
  pool.release(c);
  pool.release(b);
  CHECK(pool.used_bytes() == 0 && pool.segments().empty());
  CHECK(pool.allocate(page).segment->id() == 6);
}

static void neighbours_in_the_free_list_are_merged() {
  Pool pool(16 * page, 12, 16 * page, 1);
  auto places = pool.allocate_many(16, page);
  for (const int i : {3, 5, 4, 0, 1, 2}) pool.release(places[static_cast<std::size_t>(i)]);
  const Place six = pool.allocate(6 * page);
  CHECK(six.offset == 0 && pool.used_bytes() == 16 * page);
}

static void a_large_request_gets_a_segment_of_its_own() {
  Pool pool(64 * page, 12, 8 * page, 1);
  const Place big = pool.allocate(40 * page);
  CHECK(big.segment->bytes() == 40 * page);
  CHECK(pool.allocate(page).segment->id() == 2);
}

static void a_full_pool_says_what_is_left_and_keeps_nothing() {
  Pool pool(10 * page, 12, 4 * page, 1);
  const auto kept = pool.allocate_many(2, 3 * page);
  CHECK_FAILS(Kind::out_of_memory, "16384 are free, the largest piece has 8192", pool.allocate_many(4, 2 * page));
  CHECK(pool.used_bytes() == 6 * page && pool.segments().size() == 2);
  CHECK_FAILS(Kind::out_of_memory, "", pool.allocate(1 << 30));
  CHECK_FAILS(Kind::out_of_memory, "", pool.allocate(~std::size_t{0}));
  CHECK_FAILS(Kind::invalid_argument, "", pool.allocate(0));
}

static void memory_is_given_back_once_and_to_its_own_pool() {
  Pool one(2 * page, 12, 2 * page, 1), two(page, 12, page, 1);
  const Place kept = one.allocate(1), place = one.allocate(1);
  CHECK_FAILS(Kind::internal, "not from", two.release(place));
  one.release(place);
  CHECK_FAILS(Kind::internal, "twice", one.release(place));
  CHECK(one.used_bytes() == kept.bytes);
}

// Random steps against a plain model: no two places overlap, the books are right, and everything comes back.
static void any_order_of_allocating_and_releasing_works() {
  std::srand(11);
  Pool pool(256 * page, 12, 32 * page, 1);
  std::vector<Place> held;
  std::size_t used = 0;
  for (int step = 0; step < 3000; ++step) {
    if (std::rand() % 2 == 0 && !held.empty()) {
      const std::size_t i = static_cast<std::size_t>(std::rand()) % held.size();
      used -= held[i].bytes;
      pool.release(held[i]);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      try {
        held.push_back(pool.allocate(static_cast<std::size_t>(std::rand()) % (12 * page) + 1));
        used += held.back().bytes;
        const Place& fresh = held.back();
        for (std::size_t i = 0; i + 1 < held.size(); ++i) {
          CHECK(held[i].segment != fresh.segment || held[i].offset + held[i].bytes <= fresh.offset ||
                fresh.offset + fresh.bytes <= held[i].offset);
        }
      } catch (const Error& error) {
        CHECK(error.outcome().kind == Kind::out_of_memory);
      }
    }
    CHECK(pool.used_bytes() == used);
  }
  for (const Place& place : held) pool.release(place);
  CHECK(pool.used_bytes() == 0 && pool.segments().empty());
}

static void an_identity_word_is_not_inherited() {
  const IdentityWord word, other;
  CHECK(word.value() != 0 && word.value() != other.value());
  CHECK(*reinterpret_cast<const std::uint64_t*>(word.address()) == word.value());
  const pid_t child = fork();
  if (child == 0) _exit(word.value() == 0 ? 0 : 1);
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void random_bytes_fill_all_they_are_given() {
  std::set<std::uint64_t> words;
  for (int i = 0; i < 100; ++i) {
    std::uint64_t word = 0;
    random_bytes(&word, sizeof word);
    words.insert(word);
  }
  CHECK(words.size() == 100);
}

int main() {
  a_segment_can_be_written_by_its_owner_alone();
  a_pool_hands_out_pages_and_takes_them_back_whole();
  neighbours_in_the_free_list_are_merged();
  a_large_request_gets_a_segment_of_its_own();
  a_full_pool_says_what_is_left_and_keeps_nothing();
  memory_is_given_back_once_and_to_its_own_pool();
  any_order_of_allocating_and_releasing_works();
  an_identity_word_is_not_inherited();
  random_bytes_fill_all_they_are_given();
  return TEST_RESULT();
}
