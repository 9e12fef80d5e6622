#include "io/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

#include "io/check.h"
#include "io/error.h"
#include "io/reader.h"

namespace colibri {
namespace {

bool RaiseOpenFileLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return false;
  limit.rlim_cur = limit.rlim_max;
  return setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

// -1 and errno on failure. A model of 150 shards, opened twice, passes a soft limit of 256 (some
// desktops) and comes near 1,024.
int OpenForReading(const std::string& path, int flags) {
  for (bool raised = false;;) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | flags);
    if (fd >= 0 || errno == EINTR) {
      if (fd >= 0) return fd;
    } else if (errno == EMFILE && !raised) {
      raised = true;
      if (!RaiseOpenFileLimit()) {
        errno = EMFILE;
        return -1;
      }
    } else {
      return -1;
    }
  }
}

// Some file systems open with O_DIRECT and then want more than kIoAlign, or report that they
// cannot; kernels before 6.1 do not say, and the first read tells (GiveUpDirect).
bool DirectAlignmentFits([[maybe_unused]] int fd) {
#ifdef STATX_DIOALIGN
  struct statx info {};
  if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) != 0) return true;
  if ((info.stx_mask & STATX_DIOALIGN) == 0) return true;
  return info.stx_dio_offset_align != 0 && info.stx_dio_offset_align <= kIoAlign &&
         info.stx_dio_mem_align <= kIoAlign;
#else
  return true;
#endif
}

}  // namespace

struct FileTable::Entry {
  Entry(std::string path_in, int fd_in, uint64_t size_in, dev_t device_in)
      : path(std::move(path_in)), fd(fd_in), size(size_in), device(device_in) {}
  Entry(Entry&& other) noexcept
      : path(std::move(other.path)),
        fd(std::exchange(other.fd, -1)),
        direct_fd(std::exchange(other.direct_fd, -1)),
        use_direct(other.use_direct.load(std::memory_order_relaxed)),
        size(other.size),
        device(other.device) {}
  Entry& operator=(Entry&&) = delete;
  ~Entry() {
    if (direct_fd >= 0) close(direct_fd);
    if (fd >= 0) close(fd);
  }

  std::string path;
  int fd = -1;
  int direct_fd = -1;
  // Relaxed: a reader that sees the old value gets EINVAL once more and asks again.
  mutable std::atomic<bool> use_direct{false};
  uint64_t size = 0;
  dev_t device = 0;
};

FileTable::FileTable() = default;
FileTable::~FileTable() = default;
FileTable::FileTable(FileTable&&) noexcept = default;
FileTable& FileTable::operator=(FileTable&&) noexcept = default;

uint32_t FileTable::Add(const std::string& path) {
  const auto fail = [&path](int error) {
    throw IoError(fmt::format("cannot open {}: {}", path, std::strerror(error)));
  };
  struct stat info {};
  // Before open: opening a FIFO would block for ever.
  if (stat(path.c_str(), &info) != 0) fail(errno);
  if (!S_ISREG(info.st_mode)) {
    throw IoError(fmt::format("cannot open {}: not a regular file", path));
  }
  const int fd = OpenForReading(path, 0);
  if (fd < 0) fail(errno);
  if (fstat(fd, &info) != 0) {
    const int error = errno;
    close(fd);
    fail(error);
  }
  entries_.emplace_back(path, fd, static_cast<uint64_t>(info.st_size), info.st_dev);
  return static_cast<uint32_t>(entries_.size() - 1);
}

std::string FileTable::EnableDirect() {
  std::string report;
  std::set<dev_t> reported;
  for (Entry& entry : entries_) {
    if (entry.direct_fd >= 0) continue;
    const int fd = OpenForReading(entry.path, O_DIRECT);
    int error = fd < 0 ? errno : 0;
    if (fd >= 0 && !DirectAlignmentFits(fd)) {
      close(fd);
      error = EINVAL;
    }
    if (error == 0) {
      entry.direct_fd = fd;
      entry.use_direct = true;
    } else if (reported.insert(entry.device).second) {
      report += fmt::format("{}no direct reads of {} and its file system ({}): reading buffered",
                            report.empty() ? "" : "\n", entry.path, std::strerror(error));
    }
  }
  return report;
}

uint32_t FileTable::Count() const { return static_cast<uint32_t>(entries_.size()); }

const std::string& FileTable::Path(uint32_t file) const { return entries_[file].path; }

uint64_t FileTable::Size(uint32_t file) const { return entries_[file].size; }

int FileTable::Fd(uint32_t file) const { return entries_[file].fd; }

int FileTable::DirectFd(uint32_t file) const {
  return IsDirect(file) ? entries_[file].direct_fd : entries_[file].fd;
}

bool FileTable::IsDirect(uint32_t file) const {
  return entries_[file].use_direct.load(std::memory_order_relaxed);
}

void FileTable::GiveUpDirect(uint32_t file) const {
  entries_[file].use_direct.store(false, std::memory_order_relaxed);
}

void FileTable::ReadExact(uint32_t file, uint64_t offset, std::span<std::byte> into) const {
  COLIBRI_CHECK(file < entries_.size());
  const Entry& entry = entries_[file];
  size_t done = 0;
  while (done < into.size()) {
    const ssize_t got =
        pread(entry.fd, into.data() + done, into.size() - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw IoError(fmt::format("cannot read {} at offset {}: {}", entry.path, offset + done,
                                std::strerror(errno)));
    }
    if (got == 0) {
      throw IoError(fmt::format("{} is truncated: {} bytes missing of {} at offset {}", entry.path,
                                into.size() - done, into.size(), offset));
    }
    done += static_cast<size_t>(got);
  }
}

}  // namespace colibri
