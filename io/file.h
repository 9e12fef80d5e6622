// The shard files of a model, opened once: buffered for headers and dense weights and, when asked
// for, a second time with O_DIRECT for experts. Scratch files beside them, to write and read back.
// Threads: everything const may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace colibri {

// Raises RLIMIT_NOFILE's soft limit to the hard one; false: it is there already. A model of 150
// shards, opened twice, passes a soft limit of 256 (some desktops) and comes near 1,024.
bool RaiseOpenFileLimit();

class FileTable {
 public:
  FileTable();
  ~FileTable();
  FileTable(FileTable&&) noexcept;
  FileTable& operator=(FileTable&&) noexcept;
  FileTable(const FileTable&) = delete;
  FileTable& operator=(const FileTable&) = delete;

  // Opens `path` read-only (raising RLIMIT_NOFILE's soft limit to the hard one when needed);
  // returns its number, from 0. Throws IoError with path and errno text.
  uint32_t Add(const std::string& path);
  // A file in `directory` that has no name, so that nobody else sees it and it is gone with the
  // table or the process, however that ends (where the file system makes no such files it has a
  // name for a moment; what a kill in it leaves, the next one takes away). Its `bytes`, rounded up
  // to kIoAlign, are reserved on the drive (where the file system can) and read as zeros until they
  // are written. Throws IoError with directory, bytes wanted and free. After EnableDirect it is
  // opened for direct use too, where it can be (IsDirect tells).
  uint32_t AddScratch(const std::string& directory, uint64_t bytes);
  // Opens every file a second time with O_DIRECT; one line a file system that refuses, else "".
  // A refused file keeps reading buffered.
  std::string EnableDirect();

  uint32_t Count() const;
  const std::string& Path(uint32_t file) const;  // "scratch file in DIR" of one without a name
  uint64_t Size(uint32_t file) const;            // when it was opened
  int Fd(uint32_t file) const;                   // buffered
  int DirectFd(uint32_t file) const;  // O_DIRECT, or the buffered one where there is none
  bool IsDirect(uint32_t file) const;
  // The first direct use of a file system that lies about O_DIRECT fails with EINVAL: from then on
  // the file is used buffered. Any thread.
  void GiveUpDirect(uint32_t file) const;

  // Blocking, buffered, whole: loops over short reads and EINTR. Throws IoError that names file,
  // offset, errno, or how many bytes the truncated file lacks.
  void ReadExact(uint32_t file, uint64_t offset, std::span<std::byte> into) const;

 private:
  struct Entry;
  // 0 or the errno of why not.
  static int OpenDirect(Entry& entry);

  std::vector<Entry> entries_;
  bool direct_ = false;  // EnableDirect was called
};

}  // namespace colibri
