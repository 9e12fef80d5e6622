// Waits for records in an output that a program is writing. Threads: one object, one thread.
#pragma once

#include <doctest/doctest.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>

#include "tests/output_records.h"

namespace colibri {

inline std::ptrdiff_t RecordsIn(const std::string& path) {
  const std::string text = ReadWhole(path);
  return std::count(text.begin(), text.end(), '\n');
}

// Sees what is written into a folder, without looking at a clock.
class FolderWatch {
 public:
  explicit FolderWatch(const std::string& folder) : fd_(inotify_init1(IN_CLOEXEC)) {
    REQUIRE(inotify_add_watch(fd_, folder.c_str(), IN_MODIFY | IN_MOVED_TO) >= 0);
  }
  ~FolderWatch() { close(fd_); }
  FolderWatch(const FolderWatch&) = delete;
  FolderWatch& operator=(const FolderWatch&) = delete;

  void WaitForRecords(const std::string& path, std::ptrdiff_t count) const {
    std::array<char, 4096> events;
    while (RecordsIn(path) < count) REQUIRE(read(fd_, events.data(), events.size()) > 0);
  }

 private:
  int fd_;
};

}  // namespace colibri
