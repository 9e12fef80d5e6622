#include "runtime/memory_budget.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <optional>

namespace colibri {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

std::optional<uint64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (!(file >> value)) return std::nullopt;
  return value;
}

// "Name:   123 kB" lines of /proc files.
std::optional<uint64_t> ReadKilobytes(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind(name + ":", 0) != 0) continue;
    return std::strtoull(line.c_str() + name.size() + 1, nullptr, 10) * 1024;
  }
  return std::nullopt;
}

std::map<std::string, uint64_t> ReadStats(const std::string& path) {
  std::ifstream file(path);
  std::map<std::string, uint64_t> stats;
  std::string key;
  for (uint64_t value = 0; file >> key >> value;) stats[key] = value;
  return stats;
}

// What the cgroup in `folder` leaves: its limit less what is in use, page cache apart, which gives
// way to whoever asks for memory. nullopt: no limit.
std::optional<uint64_t> FolderRoom(const std::string& folder, bool v2) {
  const std::map<std::string, uint64_t> stats = ReadStats(folder + "memory.stat");
  const auto stat = [&stats](const std::string& name) {
    const auto found = stats.find(name);
    return found == stats.end() ? 0 : found->second;
  };
  uint64_t limit = UINT64_MAX;
  if (v2) {
    // Beyond memory.high nothing is killed, but every allocation is held up.
    for (const char* name : {"memory.max", "memory.high"}) {
      limit = std::min(limit, ReadNumber(folder + name).value_or(UINT64_MAX));
    }
  } else {
    limit = ReadNumber(folder + "memory.limit_in_bytes").value_or(UINT64_MAX);
    // Of its ancestors too, which a container may not see.
    const uint64_t all = stat("hierarchical_memory_limit");
    if (all > 0) limit = std::min(limit, all);
  }
  if (limit >= uint64_t{1} << 60) return std::nullopt;
  const uint64_t usage =
      ReadNumber(folder + (v2 ? "memory.current" : "memory.usage_in_bytes")).value_or(0);
  const uint64_t cache = v2 ? stat("inactive_file") + stat("active_file")
                            : stat("total_inactive_file") + stat("total_active_file");
  const uint64_t used = usage - std::min(usage, cache);
  return limit - std::min(limit, used);
}

// The least that the process's cgroups and their parents leave.
std::optional<uint64_t> CgroupRoom(const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  std::optional<uint64_t> least;
  std::string line;
  while (std::getline(file, line)) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first, second - first) + ",";
    const bool v2 = controllers == ":,";
    if (!v2 && controllers.find("memory,") == std::string::npos) continue;
    const std::string mount = root + (v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
    // A parent's limit binds too; inside a container the path may not exist below the mount.
    for (std::string path = line.substr(second + 1);; path = path.substr(0, path.rfind('/'))) {
      if (path == "/") path.clear();
      const auto room = FolderRoom(mount + path + "/", v2);
      if (room && (!least || *room < *least)) least = room;
      if (path.empty() || path.find('/') == std::string::npos) break;
    }
  }
  return least;
}

}  // namespace

uint64_t ResidentBytes() { return ReadKilobytes("/proc/self/status", "VmRSS").value_or(0); }
uint64_t PeakResidentBytes() { return ReadKilobytes("/proc/self/status", "VmHWM").value_or(0); }

MemoryBudget AvailableMemory(const std::string& root) {
  const uint64_t available =
      ReadKilobytes(root + "/proc/meminfo", "MemAvailable").value_or(uint64_t{4} << 30);
  // The rest of the machine and the page cache of headers: 5 %, at least 512 MiB.
  const uint64_t reserve = std::max(available / 20, 512 * kMiB);
  MemoryBudget budget{available > reserve ? available - reserve : available / 2,
                      "memory available"};
  if (const auto room = CgroupRoom(root); room && *room < budget.bytes) {
    budget = {*room, "cgroup limit"};
  }
  return budget;
}

}  // namespace colibri
