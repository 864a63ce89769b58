#include "../room.hpp"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "../memory.hpp"
#include "check.hpp"

using namespace kvferry;
namespace fs = std::filesystem;

// A file system with what the kernel says in it.
struct Tree {
  std::string root = (fs::temp_directory_path() / ("kvferry-room-" + std::to_string(::getpid()))).string();
  Tree() { write("/proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"); }
  ~Tree() { fs::remove_all(root); }
  void write(const std::string& path, const std::string& text) const {
    fs::create_directories(fs::path(root + path).parent_path());
    std::ofstream(root + path) << text;
  }
  Room room() const { return memory_room(root); }
};

static void without_cgroups_the_machine_is_asked() {
  const Tree tree;
  CHECK(tree.room().bytes == 8000 * 1024 && tree.room().of == "this machine");
  tree.write("/proc/meminfo", "MemAvailable: 8000 kB\nSwapFree: 100 kB\n");
  CHECK(tree.room().bytes == 8100 * 1024);
  CHECK(memory_room(tree.root, false).bytes == 8000 * 1024);
  CHECK(memory_room("/nowhere").bytes == UINT64_MAX && memory_room("/nowhere").of.empty());
}

static void the_tightest_of_all_groups_above_counts() {
  const Tree tree;
  tree.write("/proc/self/cgroup", "0::/a/b\n");
  tree.write("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw\n");
  CHECK(tree.room().of == "this machine");
  const std::string group = "/sys/fs/cgroup/a";
  tree.write(group + "/memory.max", "500000\n");
  tree.write(group + "/memory.current", "200000\n");
  CHECK(tree.room().bytes == 300000 && tree.room().of == "the memory cgroup /sys/fs/cgroup/a");
  tree.write(group + "/memory.stat", "anon 1\ninactive_file 1000\n");  // given back under pressure
  CHECK(tree.room().bytes == 301000);
  tree.write(group + "/b/memory.max", "max\n");
  tree.write(group + "/b/memory.current", "200000\n");
  CHECK(tree.room().bytes == 301000);
  tree.write(group + "/b/memory.max", "100000\n");  // it has more than it may
  CHECK(tree.room().bytes == 0 && tree.room().of == "the memory cgroup /sys/fs/cgroup/a/b");
}

static void swap_counts_as_far_as_the_group_may_use_it() {
  const Tree tree;
  tree.write("/proc/meminfo", "MemAvailable: 8000 kB\nSwapFree: 1000 kB\n");
  tree.write("/proc/self/cgroup", "0::/a\n");
  tree.write("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  tree.write("/sys/fs/cgroup/a/memory.max", "500000\n");
  tree.write("/sys/fs/cgroup/a/memory.current", "200000\n");
  CHECK(tree.room().bytes == 300000 + 1000 * 1024);
  CHECK(memory_room(tree.root, false).bytes == 300000);
  tree.write("/sys/fs/cgroup/a/memory.swap.max", "0\n");
  tree.write("/sys/fs/cgroup/a/memory.swap.current", "0\n");
  CHECK(tree.room().bytes == 300000);
}

static void the_older_version_of_cgroups_is_understood() {
  const Tree tree;
  tree.write("/proc/self/cgroup", "5:devices:/\n4:cpu,memory:/docker/a\n0::/\n");
  tree.write("/proc/self/mountinfo",
             "32 31 0:32 / /sys/fs/cgroup/cpuacct rw - cgroup cgroup rw,cpuacct\n"
             "33 31 0:33 /docker /sys/fs/cgroup/memory rw - cgroup cgroup rw,cpu,memory\n");
  tree.write("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "500000\n");
  tree.write("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", "100000\n");
  CHECK(tree.room().bytes == 400000 && tree.room().of == "the memory cgroup /sys/fs/cgroup/memory/a");
  tree.write("/sys/fs/cgroup/memory/a/memory.memsw.limit_in_bytes", "500000\n");
  tree.write("/sys/fs/cgroup/memory/a/memory.memsw.usage_in_bytes", "200000\n");
  CHECK(tree.room().bytes == 300000);
}

static void a_pool_gives_no_more_than_there_is() {
  const auto left = memory_room();
  CHECK(left.bytes != UINT64_MAX && !left.of.empty());
  const std::size_t more = (left.bytes / (1 << 20) + 1024) << 20;
  Pool pool(4 * more, 16, 1 << 20, 1);
  CHECK_FAILS(Kind::out_of_memory, "has room for", pool.allocate(more));
  CHECK(pool.used_bytes() == 0 && pool.segments().empty());
  const std::size_t half = more / 2 >> 16 << 16;
  const auto first = pool.allocate(half);  // what is given out and not touched yet counts as well
  CHECK_FAILS(Kind::out_of_memory, left.of, pool.allocate(more - half + (std::size_t{1} << 30)));
  pool.release(first);
}

int main() {
  without_cgroups_the_machine_is_asked();
  the_tightest_of_all_groups_above_counts();
  swap_counts_as_far_as_the_group_may_use_it();
  the_older_version_of_cgroups_is_understood();
  a_pool_gives_no_more_than_there_is();
  return TEST_RESULT();
}
