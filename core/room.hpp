// How much more memory this process may use before somebody is killed for it: what the machine has left, and every memory
// cgroup that the process is in. Knows no pool; nothing is allocated to find out.
#pragma once

#include <cstdint>
#include <string>

namespace kvferry {

struct Room {
  std::uint64_t bytes = UINT64_MAX;  // nothing is known of a limit
  std::string of;                    // whose: "this machine", "the memory cgroup /sys/fs/cgroup/a"
};

// `root` stands before every path that is read: a test has a tree of its own there. Without swap only what can be had
// without pushing anybody's pages out counts.
Room memory_room(const std::string& root = "", bool with_swap = true);

}  // namespace kvferry
