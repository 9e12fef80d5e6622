#include "runtime/output_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <optional>
#include <utility>

#include "io/error.h"
#include "io/whole_file.h"
#include "runtime/record_reader.h"

namespace colibri {
namespace {

[[noreturn]] void Fail(const char* action, const std::string& path, int error) {
  throw IoError(fmt::format("{} {} failed: {}", action, path, Reason(error)));
}

// "process 123", from the kernel's list of locks; without it "another process".
std::string LockHolder(const struct stat& info) {
  const std::string key = fmt::format("{:02x}:{:02x}:{}", major(info.st_dev), minor(info.st_dev),
                                      static_cast<uint64_t>(info.st_ino));
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    char kind[16] = "", device[64] = "";
    long pid = 0;
    if (std::sscanf(line.c_str(), "%*s %15s %*s %*s %ld %63s", kind, &pid, device) == 3 &&
        std::strcmp(kind, "FLOCK") == 0 && key == device && pid > 0) {
      return fmt::format("process {}", pid);
    }
  }
  return "another process";
}

// 0, or errno.
int TryLock(int fd) {
  while (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

bool SameFile(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

}  // namespace

OutputFile::OutputFile(std::string path) : path_(std::move(path)) {
  struct stat info {};
  if (stat(path_.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    fd_ = open(path_.c_str(), O_WRONLY | O_CLOEXEC);
    if (fd_ < 0) Fail("opening", path_, errno);
    return;
  }
  // A handful: each other try means that a run rewrote the file and ended just now.
  for (int tries = 0;; ++tries) {
    if (tries == 10) throw IoError(fmt::format("{} changes all the time", path_));
    created_ = stat(path_.c_str(), &info) != 0;
    fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd_ < 0) Fail("opening", path_, errno);
    const int error = TryLock(fd_);
    struct stat named {};
    if (fstat(fd_, &info) != 0) Fail("examining", path_, errno);
    if (error == EWOULDBLOCK) {
      const std::string holder = LockHolder(info);
      close(fd_);
      throw IoError(fmt::format("{} is being written by {}: one run at a time", path_, holder));
    }
    if (error != 0) {
      note_ = fmt::format("{}: cannot be locked ({}); let no other run write it", path_,
                          std::strerror(error));
    }
    // Its owner may have replaced the file between open and lock: the name counts.
    if (stat(path_.c_str(), &named) == 0 && SameFile(info, named)) break;
    close(fd_);
  }
  regular_ = S_ISREG(info.st_mode);
}

OutputFile::~OutputFile() {
  if (fd_ >= 0) close(fd_);
}

uint64_t OutputFile::Size() const {
  struct stat info {};
  if (!regular_ || fstat(fd_, &info) != 0) return 0;
  return static_cast<uint64_t>(info.st_size);
}

OutputScan OutputFile::Scan() const {
  OutputScan scan;
  scan.end =
      ForEachRecord(fd_, path_, [&](const RecordReader::Line& line, const RecordFacts& facts) {
        if (scan.finished.Add(facts)) return;
        throw IoError(
            fmt::format("{}: line {} is the record of an input line with the impossible "
                        "number {}",
                        path_, line.number, facts.line));
      });
  if (const auto twice = scan.finished.Settle()) {
    throw IoError(
        fmt::format("{}: holds records of input line {} that differ in custom_id or line "
                    "hash: answers to two inputs are mixed in it",
                    path_, *twice));
  }
  return scan;
}

void OutputFile::Mend(const OutputScan& scan) {
  if (scan.end.cut_bytes == 0 && !scan.end.missing_feed) return;
  if (ftruncate(fd_, static_cast<off_t>(scan.end.whole_bytes)) != 0) {
    Fail("shortening", path_, errno);
  }
  if (scan.end.missing_feed) WriteAll(fd_, "\n", path_);
  SyncFile(fd_, path_);
}

void OutputFile::Discard() {
  if (!created_ || Size() > 0) return;
  unlink(path_.c_str());
  created_ = false;
}

void OutputFile::Empty() {
  if (!regular_) return;
  if (ftruncate(fd_, 0) != 0) Fail("emptying", path_, errno);
  SyncFile(fd_, path_);
}

std::string OutputFile::KeepNamed() {
  struct stat ours {
  }, named{};
  if (!regular_ || fstat(fd_, &ours) != 0) return {};
  const bool taken = stat(path_.c_str(), &named) == 0;
  if (taken && SameFile(ours, named)) return {};
  if (ours.st_nlink > 0) {
    std::error_code error;
    const auto now = std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", fd_), error);
    throw IoError(fmt::format("{} was renamed while it was written: its records are in {}", path_,
                              error ? "another file" : now.string()));
  }
  const std::string name = taken ? fmt::format("{}.{}", path_, getpid()) : path_;
  ReplacedFile copy(name);
  (void)TryLock(copy.Fd());
  std::string part;
  const auto size = static_cast<uint64_t>(ours.st_size);
  for (uint64_t at = 0; at < size; at += part.size()) {
    ReadAt(fd_, path_, at, std::min<uint64_t>(size - at, 1 << 20), &part);
    copy.Append(part);
  }
  const int fd = copy.CommitAndRelease();
  close(fd_);
  fd_ = fd;
  if (taken) {
    throw IoError(fmt::format(
        "another file has taken the name {} while it was written: the records are in {}", path_,
        name));
  }
  return fmt::format("{} was removed while it was written: written again", path_);
}

// The lock belongs to the file, not to its name: the new one is locked before it takes the name.
void OutputFile::Replace(const std::function<void(const Append&)>& write,
                         const std::function<void()>& before_named) {
  // A link is followed, so that the file it points to is replaced and not the link.
  std::error_code error;
  const std::string target = std::filesystem::canonical(path_, error).string();
  if (error) Fail("resolving", path_, error.value());
  struct stat ours {
  }, named{};
  if (fstat(fd_, &ours) != 0 || stat(target.c_str(), &named) != 0 || !SameFile(ours, named)) {
    throw IoError(fmt::format("{} is another file than the one that was opened", path_));
  }
  ReplacedFile file(target);
  if (const int failed = TryLock(file.Fd()); failed != 0 && note_.empty()) {
    Fail("locking", ReplacedFile::PartOf(target), failed);
  }
  write([&file](std::string_view bytes) { file.Append(bytes); });
  if (before_named) {
    file.Sync();
    before_named();
  }
  const int fd = file.CommitAndRelease();
  close(fd_);
  fd_ = fd;
}

void OutputFile::DropFailed() {
  Replace([this](const Append& append) {
    ForEachRecord(fd_, path_, [&](const RecordReader::Line& line, const RecordFacts& facts) {
      if (facts.failed) return;
      append(line.text);
      append("\n");
    });
  });
}

void OutputFile::SortByLine() {
  struct Place {
    uint64_t line, begin, bytes;
  };
  std::deque<Place> places;
  bool sorted = true;
  ForEachRecord(fd_, path_, [&](const RecordReader::Line& line, const RecordFacts& facts) {
    if (!places.empty() && places.back().line > facts.line) sorted = false;
    places.push_back({facts.line, line.begin, line.text.size()});
  });
  if (sorted) return;
  // Begin breaks ties: records of one line stay as they stood.
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return a.line != b.line ? a.line < b.line : a.begin < b.begin;
  });
  Replace([&](const Append& append) {
    std::string record;
    for (const Place& place : places) {
      ReadAt(fd_, path_, place.begin, place.bytes, &record);
      append(record);
      append("\n");
    }
  });
}

}  // namespace colibri
