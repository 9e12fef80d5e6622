#include "io/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <set>
#include <string_view>
#include <utility>

#include "io/check.h"
#include "io/error.h"
#include "io/reader.h"

namespace colibri {

bool RaiseOpenFileLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return false;
  limit.rlim_cur = limit.rlim_max;
  return setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

namespace {

// -1 and errno on failure.
int Open(const std::string& path, int flags) {
  for (bool raised = false;;) {
    const int fd = open(path.c_str(), O_CLOEXEC | flags, S_IRUSR | S_IWUSR);
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

constexpr std::string_view kScratchName = "colibri-scratch-";

// A process that is killed between making such a file and taking its name away leaves it, empty.
// One that is younger than a minute may be a living process's.
void RemoveLeftovers(const std::string& directory) {
  const std::unique_ptr<DIR, int (*)(DIR*)> dir(opendir(directory.c_str()), closedir);
  if (dir == nullptr) return;
  const time_t now = time(nullptr);
  while (const dirent* entry = readdir(dir.get())) {
    struct stat info {};
    if (!std::string_view(entry->d_name).starts_with(kScratchName) ||
        fstatat(dirfd(dir.get()), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) {
      continue;
    }
    if (S_ISREG(info.st_mode) && info.st_size == 0 && info.st_uid == geteuid() &&
        now - info.st_mtime > 60) {
      unlinkat(dirfd(dir.get()), entry->d_name, 0);
    }
  }
}

// -1 and errno on failure.
int OpenNameless(const std::string& directory) {
  // O_EXCL: it can never be given a name either.
  const int fd = Open(directory, O_TMPFILE | O_EXCL | O_RDWR);
  if (fd >= 0) return fd;
  // Whatever the reason, not a list of errnos: file systems without O_TMPFILE differ in theirs.
  RemoveLeftovers(directory);
  std::string name = fmt::format("{}/{}XXXXXX", directory, kScratchName);
  const int named = mkostemp(name.data(), O_CLOEXEC);
  if (named < 0 || unlink(name.c_str()) == 0) return named;
  const int error = errno;
  close(named);
  errno = error;
  return -1;
}

// 0 or an errno. Asks what is free first: a file system may fill the drive before it finds out.
int Reserve(int fd, uint64_t bytes, uint64_t* free) {
  struct statvfs info {};
  if (fstatvfs(fd, &info) == 0 && info.f_blocks > 0) {
    *free = uint64_t{info.f_bavail} * info.f_frsize;
    if (bytes > *free) return ENOSPC;
  }
  int result = 0;
  do {
    result = fallocate(fd, 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return 0;
  // Not posix_fallocate, which would write every block where the file system cannot reserve.
  if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
  return ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
}

}  // namespace

struct FileTable::Entry {
  Entry(std::string path_in, int fd_in, uint64_t size_in, dev_t device_in, bool scratch_in = false)
      : path(std::move(path_in)),
        scratch(scratch_in),
        fd(fd_in),
        size(size_in),
        device(device_in) {}
  Entry(Entry&& other) noexcept
      : path(std::move(other.path)),
        scratch(other.scratch),
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
  bool scratch = false;
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
    throw IoError(fmt::format("cannot open {}: {}", path, Reason(error)));
  };
  struct stat info {};
  // Before open: opening a FIFO would block for ever.
  if (stat(path.c_str(), &info) != 0) fail(errno);
  if (!S_ISREG(info.st_mode)) {
    throw IoError(fmt::format("cannot open {}: not a regular file", path));
  }
  const int fd = Open(path, O_RDONLY);
  if (fd < 0) fail(errno);
  if (fstat(fd, &info) != 0) {
    const int error = errno;
    close(fd);
    fail(error);
  }
  entries_.emplace_back(path, fd, static_cast<uint64_t>(info.st_size), info.st_dev);
  return static_cast<uint32_t>(entries_.size() - 1);
}

uint32_t FileTable::AddScratch(const std::string& directory, uint64_t bytes) {
  const int fd = OpenNameless(directory);
  if (fd < 0) {
    throw IoError(fmt::format("cannot make a scratch file in {}: {}", directory, Reason(errno)));
  }
  // No file system holds 2^62 bytes, and sums of them do not overflow.
  const uint64_t size =
      (std::clamp<uint64_t>(bytes, 1, uint64_t{1} << 62) + kIoAlign - 1) / kIoAlign * kIoAlign;
  struct stat info {};
  uint64_t free = 0;
  int error = fstat(fd, &info) == 0 ? 0 : errno;
  if (error == 0) error = Reserve(fd, size, &free);
  if (error != 0) {
    close(fd);
    throw IoError(fmt::format("no room for a scratch file in {}: {} bytes wanted, {} free: {}",
                              directory, bytes, free, std::strerror(error)));
  }
  entries_.emplace_back("scratch file in " + directory, fd, size, info.st_dev, true);
  if (direct_) OpenDirect(entries_.back());
  return static_cast<uint32_t>(entries_.size() - 1);
}

int FileTable::OpenDirect(Entry& entry) {
  // A file without a name is reached through its descriptor.
  const int fd = entry.scratch ? Open(fmt::format("/proc/self/fd/{}", entry.fd), O_RDWR | O_DIRECT)
                               : Open(entry.path, O_RDONLY | O_DIRECT);
  if (fd < 0) return errno;
  if (!DirectAlignmentFits(fd)) {
    close(fd);
    return EINVAL;
  }
  entry.direct_fd = fd;
  entry.use_direct = true;
  return 0;
}

std::string FileTable::EnableDirect() {
  direct_ = true;
  std::string report;
  std::set<dev_t> reported;
  for (Entry& entry : entries_) {
    if (entry.direct_fd >= 0) continue;
    const int error = OpenDirect(entry);
    if (error != 0 && reported.insert(entry.device).second) {
      report += fmt::format("{}no direct reads of {} and its file system ({}): reading buffered",
                            report.empty() ? "" : "\n", entry.path, Reason(error));
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
