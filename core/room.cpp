#include "room.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>
#include <vector>

namespace kvferry {
namespace {

// Nothing for a file that is not there, and for "max".
std::optional<std::uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  std::uint64_t number = 0;
  if (!(file >> word)) return std::nullopt;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
  if (error != std::errc{} || end != word.data() + word.size()) return std::nullopt;
  return number;
}

// Of a file of lines "name number …" (memory.stat, /proc/meminfo).
std::optional<std::uint64_t> named_in(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (line.compare(0, name.size(), name) != 0) continue;
    std::uint64_t number = 0;
    const auto begin = line.find_first_of("0123456789", name.size());
    if (begin == std::string::npos) return std::nullopt;
    std::from_chars(line.data() + begin, line.data() + line.size(), number);
    return number;
  }
  return std::nullopt;
}

std::uint64_t left_of(std::optional<std::uint64_t> most, std::optional<std::uint64_t> used) {
  if (!most || !used) return UINT64_MAX;
  return *most - std::min(*most, *used);
}

std::uint64_t sum(std::uint64_t a, std::uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }

struct Hierarchy {
  bool second = false;      // version 2 of cgroups
  std::string mount, path;  // where it is mounted, and where in it this process is
};

// What of a hierarchy is mounted may begin below its root, as in a container: then only that part can be asked.
std::string below(const std::string& path, const std::string& mounted_root) {
  if (mounted_root == "/") return path == "/" ? "" : path;
  if (path.compare(0, mounted_root.size(), mounted_root) == 0) return path.substr(mounted_root.size());
  return "";
}

bool is_among(const std::string& list, const std::string& word) {
  std::istringstream words(list);
  for (std::string one; std::getline(words, one, ',');)
    if (one == word) return true;
  return false;
}

std::vector<Hierarchy> hierarchies(const std::string& root) {
  std::string first_path, second_path;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "4:memory:/a/b", "0::/a/b"
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const auto controllers = line.substr(first + 1, second - first - 1);
    if (controllers.empty()) second_path = line.substr(second + 1);
    if (is_among(controllers, "memory")) first_path = line.substr(second + 1);
  }
  std::vector<Hierarchy> found;
  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {  // "32 31 0:29 /root /mount/point rw … - cgroup cgroup rw,memory"
    std::istringstream words(line);
    std::string skipped, mounted_root, point, type, super;
    words >> skipped >> skipped >> skipped >> mounted_root >> point;
    while (words >> skipped && skipped != "-") {
    }
    words >> type >> skipped >> super;
    if (type == "cgroup" && is_among(super, "memory") && !first_path.empty())
      found.push_back({false, root + point, below(first_path, mounted_root)});
    if (type == "cgroup2" && !second_path.empty()) found.push_back({true, root + point, below(second_path, mounted_root)});
  }
  return found;
}

// What one cgroup has left, with what it would give back under pressure.
std::uint64_t left_in(const Hierarchy& hierarchy, const std::string& folder, std::uint64_t swap_free) {
  const auto at = [&](const char* name) { return folder + "/" + name; };
  if (hierarchy.second) {
    const auto left = left_of(number_in(at("memory.max")), number_in(at("memory.current")));
    const auto swap = std::min(left_of(number_in(at("memory.swap.max")), number_in(at("memory.swap.current"))), swap_free);
    return sum(sum(left, swap), named_in(at("memory.stat"), "inactive_file ").value_or(0));
  }
  const auto left = left_of(number_in(at("memory.limit_in_bytes")), number_in(at("memory.usage_in_bytes")));
  const auto with_swap = left_of(number_in(at("memory.memsw.limit_in_bytes")), number_in(at("memory.memsw.usage_in_bytes")));
  return sum(std::min(sum(left, swap_free), with_swap), named_in(at("memory.stat"), "total_inactive_file ").value_or(0));
}

}  // namespace

Room memory_room(const std::string& root, bool with_swap) {
  const auto meminfo = root + "/proc/meminfo";
  const auto swap_free = with_swap ? named_in(meminfo, "SwapFree:").value_or(0) * 1024 : 0;
  Room room;
  if (const auto available = named_in(meminfo, "MemAvailable:")) room = {*available * 1024 + swap_free, "this machine"};
  for (const auto& hierarchy : hierarchies(root)) {
    for (auto path = hierarchy.path;; path.erase(path.rfind('/'))) {  // the limits of all that are above it hold as well
      const auto folder = hierarchy.mount + path;
      const auto left = left_in(hierarchy, folder, swap_free);
      if (left < room.bytes) room = {left, "the memory cgroup " + folder.substr(root.size())};
      if (path.rfind('/') == std::string::npos) break;
    }
  }
  return room;
}

}  // namespace kvferry
