// Copies that the kernel holds. The memory is that of a file in shared memory whose pages do not come until the test lets
// them (userfaultfd), where the user and the kernel allow it.
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "nodes.hpp"

using namespace kvferry;
using namespace kvferry::testing;

namespace {

constexpr std::size_t units = 16;

class Held {
 public:
  explicit Held(std::size_t bytes) : bytes_(bytes) {
    pages_ = static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC));
    char path[] = "/dev/shm/kvferry-test-XXXXXX";
    const int file = ::mkstemp(path);
    if (file < 0) return;
    ::unlink(path);
    CHECK(::ftruncate(file, static_cast<off_t>(bytes)) == 0);
    data_ = static_cast<std::byte*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    ::close(file);
    if (pages_ < 0) return;
    uffdio_api api{};
    api.api = UFFD_API;
    uffdio_register range{};
    range.range = {reinterpret_cast<std::uint64_t>(data_), bytes};
    range.mode = UFFDIO_REGISTER_MODE_MISSING;
    usable_ = ::ioctl(pages_, UFFDIO_API, &api) == 0 && ::ioctl(pages_, UFFDIO_REGISTER, &range) == 0;
  }
  ~Held() {
    let_go();
    if (data_ != nullptr) ::munmap(data_, bytes_);
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  bool usable() const { return usable_; }
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  void let_go() {
    if (pages_ >= 0) ::close(pages_);
    pages_ = -1;
  }

 private:
  std::size_t bytes_;
  int pages_ = -1;
  std::byte* data_ = nullptr;
  bool usable_ = false;
};

std::shared_ptr<Cache> registered(Registry& registry, const Held& memory, std::uint64_t unit_bytes) {
  Geometry geometry;
  geometry.name = "held";
  geometry.unit_bytes = geometry.stride_bytes = unit_bytes;
  geometry.count = memory.bytes() / unit_bytes;
  geometry.tensors = {{reinterpret_cast<std::uint64_t>(memory.data()), 0, 0}};
  return registry.add(geometry, host_kind, {});
}

template <class Call>
Kind refusal(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.outcome().kind;
  }
  return Kind::ok;
}

void check_given_up(const Result& result) {
  CHECK(result.outcome.kind == Kind::deadline);
  CHECK(result.outcome.touched && !result.outcome.settled);
}

void a_destination_that_is_held_is_quarantined(std::uint64_t unit_bytes) {
  Pair pair;
  Owned source(pair.there->registry(), {"a", 1, units, unit_bytes});
  fill(*source.cache, 3);
  Held memory(units * unit_bytes);
  const auto mine = registered(pair.here->registry(), memory, unit_bytes);
  Owned other(pair.here->registry(), {"other", 1, units, unit_bytes});
  check_given_up(pulled(*pair.here, pair.link, by_name("a"), *mine, whole(), any_transport, 200));
  CHECK(mine->held.load() == 1);
  CHECK(pulled(*pair.here, pair.link, by_name("a"), *mine, whole()).outcome.kind == Kind::busy);
  for (int i = 0; i < 3; ++i) CHECK_BY(socket, pulled(*pair.here, pair.link, by_name("a"), *other.cache, whole(), by_socket));
  CHECK(holds_all(*other.cache, 3));
  CHECK(refusal([&] { pair.here->registry().remove(mine->geometry.cache_id); }) == Kind::busy);
  CHECK(refusal([&] { pair.here->close(); }) == Kind::busy);
  memory.let_go();
  CHECK(eventually([&] { return refusal([&] { pair.here->close(); }) == Kind::ok; }));
  CHECK(mine->held.load() == 0);
}

void so_is_that_of_a_push(std::uint64_t unit_bytes) {
  Pair pair;
  Owned source(pair.here->registry(), {"a", 1, units, unit_bytes});
  fill(*source.cache, 3);
  Held memory(units * unit_bytes);
  const auto far = registered(pair.there->registry(), memory, unit_bytes);
  check_given_up(pushed(*pair.here, pair.link, *source.cache, by_name("held"), whole(), any_transport, 200));
  CHECK(eventually([&] { return far->held.load() == 1; }));
  CHECK(pushed(*pair.here, pair.link, *source.cache, by_name("held"), whole()).outcome.kind == Kind::busy);
  CHECK(refusal([&] { pair.there->registry().remove(far->geometry.cache_id); }) == Kind::busy);
  memory.let_go();
  CHECK(eventually([&] { return refusal([&] { pair.there->registry().remove(far->geometry.cache_id); }) == Kind::ok; }));
}

void a_source_that_is_held_costs_its_puller_the_deadline(std::uint64_t unit_bytes) {
  Pair pair;
  Held memory(units * unit_bytes);
  const auto far = registered(pair.there->registry(), memory, unit_bytes);
  Owned into(pair.here->registry(), {"into", 1, units, unit_bytes});
  Owned free(pair.there->registry(), {"free", 1, units, unit_bytes});
  fill(*free.cache, 5);
  for (int i = 0; i < 5; ++i) {
    const auto result = pulled(*pair.here, pair.link, by_name("held"), *into.cache, whole(), any_transport, 100);
    CHECK(result.outcome.kind == Kind::deadline && result.outcome.settled);
  }
  CHECK_BY(socket, pulled(*pair.here, pair.link, by_name("free"), *into.cache, whole(), by_socket));
  CHECK(holds_all(*into.cache, 5));
  CHECK(refusal([&] { pair.there->registry().remove(far->geometry.cache_id); }) == Kind::busy);
  memory.let_go();
  CHECK(eventually([&] { return refusal([&] { pair.there->registry().remove(far->geometry.cache_id); }) == Kind::ok; }));
}

std::shared_ptr<const Moves> one_span(std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
  const std::uint64_t listed[] = {from, to, bytes};
  return Moves::make_spans(listed, 1);
}

// Memory that is no cache has no guard that could say so: its node does.
void memory_of_a_process_that_is_held_is_said_by_its_node(std::uint64_t unit_bytes) {
  Pair pair;
  Owned far(pair.there->registry(), {"a", 1, units, unit_bytes});
  fill(*far.cache, 3);
  Held memory(units * unit_bytes);
  const auto at = reinterpret_cast<std::uint64_t>(memory.data());
  const auto pull = [&](std::uint64_t into, int timeout_ms) {
    return pair.here->pull(pair.link, by_name("a"), std::nullopt, one_span(0, into, units * unit_bytes), Deadline::after_ms(timeout_ms), any_transport)->run_here();
  };
  check_given_up(pull(at, 200));
  CHECK(pull(at, 2000).outcome.kind == Kind::busy);
  std::vector<std::byte> plain(units * unit_bytes);
  CHECK_BY(cma, pull(reinterpret_cast<std::uint64_t>(plain.data()), 2000));
  CHECK(refusal([&] { pair.here->close(); }) == Kind::busy);
  memory.let_go();
  CHECK(eventually([&] { return refusal([&] { pair.here->close(); }) == Kind::ok; }));
}

void a_held_source_of_a_push_is_its_pushers(std::uint64_t unit_bytes) {
  Pair pair;
  Owned far(pair.there->registry(), {"a", 1, units, unit_bytes});
  fill(*far.cache, 3);
  Held memory(units * unit_bytes);
  const auto at = reinterpret_cast<std::uint64_t>(memory.data());
  const auto push = pair.here->push(pair.link, std::nullopt, by_name("a"), one_span(at, 0, units * unit_bytes), Deadline::after_ms(200), any_transport);
  CHECK(push->run_here().outcome.kind == Kind::deadline);
  Owned other(pair.here->registry(), {"b", 1, units, unit_bytes});
  CHECK_BY(cma, pulled(*pair.there, pair.back, by_name("b"), *far.cache, whole()));  // nobody else waits for it
  CHECK(eventually([&] { return pair.here->engine().memory_held.load() == 1; }));
  CHECK(refusal([&] { pair.here->close(); }) == Kind::busy);
  memory.let_go();
  CHECK(eventually([&] { return refusal([&] { pair.here->close(); }) == Kind::ok; }));
}

void more_than_may_be_held_at_once_are_refused() {
  Pair pair;
  Owned source(pair.there->registry(), {"a", 1, units, 4096});
  Held memory((Crew::apart_at_most + 1) * 4096);
  const auto mine = registered(pair.here->registry(), memory, 4096);
  std::vector<std::shared_ptr<Pull>> pulls;
  for (unsigned i = 0; i < Crew::apart_at_most + 1; ++i) {
    pulls.push_back(pair.here->pull(pair.link, by_name("a"), mine->geometry.cache_id, blocks({0}, {i}), Deadline::after_ms(5000), any_transport));
    pulls.back()->start();
  }
  CHECK(pulls.back()->wait(Deadline::after_ms(5000)) && pulls.back()->result().outcome.kind == Kind::busy);
  memory.let_go();
  for (const auto& pull : pulls) CHECK(pull->wait(Deadline::after_ms(10'000)));
  for (unsigned i = 0; i < Crew::apart_at_most; ++i) CHECK(pulls[i]->result().outcome.ok());
  CHECK(pair.here->registry().remove(mine->geometry.cache_id));
}

}  // namespace

int main() {
  if (!Held(4096).usable()) {
    std::printf("skipped: pages cannot be held here (userfaultfd needs root or vm.unprivileged_userfaultfd=1)\n");
    return 0;
  }
  for (const std::uint64_t unit_bytes : {512u, 64u << 10}) {
    a_destination_that_is_held_is_quarantined(unit_bytes);
    so_is_that_of_a_push(unit_bytes);
    a_source_that_is_held_costs_its_puller_the_deadline(unit_bytes);
    memory_of_a_process_that_is_held_is_said_by_its_node(unit_bytes);
    a_held_source_of_a_push_is_its_pushers(unit_bytes);
  }
  more_than_may_be_held_at_once_are_refused();
  return TEST_RESULT();
}
