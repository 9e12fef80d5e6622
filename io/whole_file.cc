#include "io/whole_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>

#include "io/error.h"

namespace colibri {
namespace {

constexpr size_t kBuffer = size_t{1} << 20;

[[noreturn]] void Fail(const char* action, const std::string& path, int error) {
  throw IoError(fmt::format("{} {} failed: {}", action, path, Reason(error)));
}

}  // namespace

std::optional<std::string> ReadWholeFile(const std::string& path) {
  // A pipe that nobody writes to would not be opened otherwise.
  const int fd = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0 && errno == ENOENT) return {};
  if (fd < 0) Fail("opening", path, errno);
  struct stat info {};
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(fd);
    throw IoError(fmt::format("{}: not a regular file", path));
  }
  std::string text;
  for (;;) {
    if (text.size() > kMostWholeFile) {
      close(fd);
      throw IoError(fmt::format("{}: longer than {} bytes", path, kMostWholeFile));
    }
    const size_t old = text.size();
    text.resize(old + kBuffer);
    const ssize_t got = read(fd, text.data() + old, kBuffer);
    const int error = errno;
    text.resize(old + static_cast<size_t>(got > 0 ? got : 0));
    if (got > 0 || (got < 0 && error == EINTR)) continue;
    close(fd);
    if (got < 0) Fail("reading", path, error);
    return text;
  }
}

void WriteAll(int fd, std::string_view bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t wrote = write(fd, bytes.data(), bytes.size());
    if (wrote >= 0) {
      bytes.remove_prefix(static_cast<size_t>(wrote));
    } else if (errno != EINTR) {
      Fail("writing", path, errno);
    }
  }
}

void SyncFile(int fd, const std::string& path) {
  while (fsync(fd) != 0) {
    if (errno != EINTR) Fail("syncing", path, errno);
  }
}

void SyncFolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  // A folder that may be written but not read (mode 0333) cannot be opened.
  if (fd < 0 && errno == EACCES) return;
  if (fd < 0) Fail("opening", folder, errno);
  int error = 0;
  while (fsync(fd) != 0) {
    error = errno;
    if (error != EINTR) break;
    error = 0;
  }
  close(fd);
  if (error != 0 && error != EINVAL && error != EROFS && error != ENOTSUP) {
    Fail("syncing", folder, error);
  }
}

ReplacedFile::ReplacedFile(std::string path) : path_(std::move(path)), part_(PartOf(path_)) {
  // Not through a link that someone left there.
  unlink(part_.c_str());
  fd_ = open(part_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
  if (fd_ < 0) Fail("opening", part_, errno);
  struct stat old {};
  // Best effort: a file system without permissions refuses.
  if (stat(path_.c_str(), &old) == 0) (void)!fchmod(fd_, old.st_mode & 07777);
}

ReplacedFile::~ReplacedFile() {
  if (fd_ >= 0) close(fd_);
  if (!committed_) unlink(part_.c_str());
}

void ReplacedFile::Append(std::string_view bytes) {
  buffer_ += bytes;
  if (buffer_.size() >= kBuffer) Flush();
}

void ReplacedFile::Flush() {
  WriteAll(fd_, buffer_, part_);
  buffer_.clear();
}

void ReplacedFile::Sync() {
  Flush();
  SyncFile(fd_, part_);
}

void ReplacedFile::Commit() {
  Sync();
  if (rename(part_.c_str(), path_.c_str()) != 0) Fail("renaming", part_, errno);
  committed_ = true;
  SyncFolderOf(path_);
}

int ReplacedFile::CommitAndRelease() {
  Commit();
  return std::exchange(fd_, -1);
}

}  // namespace colibri
