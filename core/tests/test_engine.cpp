#include "../engine.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "../link.hpp"
#include "check.hpp"

using namespace kvferry;

static std::int64_t never(std::int64_t) { return INT64_MAX; }

static std::shared_ptr<Cache> cache_at(Engine& engine, std::vector<void*> addresses, std::size_t bytes) {
  Geometry geometry;
  geometry.name = "kv";
  geometry.unit_bytes = geometry.stride_bytes = bytes;
  geometry.count = 1;
  for (void* address : addresses) geometry.tensors.push_back({reinterpret_cast<std::uint64_t>(address), 0, 0});
  const auto cache = engine.registry.add(geometry, host_kind, {});
  return cache;
}

static void memory_is_looked_at_once_and_named_when_it_is_missing() {
  NodeOptions plain;
  Engine engine(plain, 1, 1, never);
  const std::size_t bytes = 8192;
  void* good = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  void* readable = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const auto cache = cache_at(engine, {good, readable}, bytes);
  engine.check_readable(*cache);
  CHECK_FAILS(Kind::invalid_argument, "tensor 1 of cache 1 'kv' is not writable", engine.check_writable(*cache));
  mprotect(readable, bytes, PROT_READ | PROT_WRITE);
  engine.registry.remove(cache->geometry.cache_id);
  engine.check_writable(*cache);  // a failure is not remembered, a success is
  munmap(readable, bytes);
  engine.check_writable(*cache);
  const auto again = cache_at(engine, {good, readable}, bytes);
  CHECK_FAILS(Kind::invalid_argument, "tensor 1", engine.check_readable(*again));
  engine.registry.remove(again->geometry.cache_id);
  try {
    engine.check_readable(*cache_at(engine, {reinterpret_cast<void*>(1)}, 100));
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.cache.find("'kv'") != std::string::npos && !error.outcome().touched);
  }
  munmap(good, bytes);
}

static void a_files_memory_is_known_for_what_it_is() {
  NodeOptions plain;
  Engine engine(plain, 1, 1, never);
  char path[] = "/tmp/kvferry-test-XXXXXX";
  const int fd = mkstemp(path);
  unlink(path);
  CHECK(ftruncate(fd, 4096) == 0);
  void* mapped = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const auto cache = cache_at(engine, {mapped}, 4096);
  CHECK(!cache->file_backed);
  engine.check_readable(*cache);
  CHECK(cache->file_backed);
  munmap(mapped, 4096);
  close(fd);
}

static void lines_are_kept_for_whoever_takes_them() {
  EventLog log;
  CHECK(!log.take(1));
  for (int i = 0; i < 1500; ++i) log.add("info", std::to_string(i));
  const auto oldest = log.take(0);
  CHECK(oldest && oldest->first == "info" && oldest->second == "500");  // the first 500 have gone
  std::thread closing([&] { log.close(); });
  int lines = 0;
  while (log.take(5000)) ++lines;  // what is left, and then no waiting any more
  closing.join();
  CHECK(lines == 999 && !log.take(5000));
}

int main() {
  memory_is_looked_at_once_and_named_when_it_is_missing();
  a_files_memory_is_known_for_what_it_is();
  lines_are_kept_for_whoever_takes_them();
  return TEST_RESULT();
}
