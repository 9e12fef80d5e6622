// What memory the process has and may have: from /proc and its cgroups.
// Threads: pure, but for what it asks of the machine.
#pragma once

#include <cstdint>
#include <string>

namespace colibri {

// What is resident now, and the most there ever was, in bytes.
uint64_t ResidentBytes();
uint64_t PeakResidentBytes();

// The memory a process may take: the least of MemAvailable less a reserve and of what its cgroups,
// v1 or v2, and their parents leave. `root` replaces "/" in tests.
struct MemoryBudget {
  uint64_t bytes = 0;
  std::string source;
};
MemoryBudget AvailableMemory(const std::string& root = "");

}  // namespace colibri
