// Small files read as a whole, and files that are replaced as a whole or not at all, whatever ends
// the process or the machine: the new bytes go to PATH.part, are synced, take the name, and the
// folder is synced. A leftover PATH.part of a killed process is overwritten by the next one.
// Threads: one at a time a file.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace colibri {

// More than any file that we write and read as a whole has: counts of 75 layers take 0.4 MB.
inline constexpr size_t kMostWholeFile = size_t{64} << 20;

// The file's bytes; nullopt: there is no such file. Throws IoError, also for what is no regular
// file (a pipe would be waited for, a device has no end) and for more than kMostWholeFile bytes.
std::optional<std::string> ReadWholeFile(const std::string& path);

// Writes all of `bytes`, going on after short writes and EINTR. Throws IoError that names `path`.
void WriteAll(int fd, std::string_view bytes, const std::string& path);

// Syncs the file's data and size. Throws IoError.
void SyncFile(int fd, const std::string& path);

// Syncs the folder that holds `path`, so that a name given or taken there survives a power cut.
// File systems that cannot sync a folder are let be. Throws IoError.
void SyncFolderOf(const std::string& path);

class ReplacedFile {
 public:
  // PATH.part
  static std::string PartOf(const std::string& path) { return path + ".part"; }

  // Opens PATH.part, empty, with the permissions of PATH if that exists. Throws IoError.
  explicit ReplacedFile(std::string path);
  // Removes PATH.part unless Commit was called.
  ~ReplacedFile();
  ReplacedFile(const ReplacedFile&) = delete;
  ReplacedFile& operator=(const ReplacedFile&) = delete;

  // Buffered. Throws IoError.
  void Append(std::string_view bytes);
  // Everything appended so far is on the drive: what follows cannot find it full. Throws IoError.
  void Sync();
  // Everything written, synced and named. Throws IoError; PATH is then as it was, unless only the
  // folder's sync failed.
  void Commit();
  // As Commit, and gives the descriptor (read and write, appending) to the caller.
  int CommitAndRelease();
  // Of PATH.part; for a lock that is to be held before the file has its name.
  int Fd() const { return fd_; }

 private:
  void Flush();

  std::string path_, part_;
  int fd_ = -1;
  bool committed_ = false;
  std::string buffer_;
};

}  // namespace colibri
