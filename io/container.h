// A model directory as a set of safetensors shards without an index file (container spec 1): lists
// the shards, reads and validates their headers, answers where a tensor's bytes are. Knows nothing
// of what the tensors mean.
// Threads: const after construction.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "io/file.h"

namespace colibri {

enum class DType : uint8_t { kF32, kBF16, kF16, kU8, kI8, kI32, kI64, kF8E4M3, kF8E8M0, kOther };

struct TensorEntry {
  uint32_t file = 0;
  uint64_t offset = 0;  // absolute, in the file
  uint64_t bytes = 0;
  DType dtype = DType::kOther;
  std::vector<int64_t> shape;
};

// Throws ModelError: a FIFO would block for ever, and a device gives bytes that are no model.
void CheckRegular(const std::string& path);
// Throws for a file or folder of the model that cannot be opened: ModelError where it is the wrong
// one (not there, not allowed), IoError where machine or drive fail (too many open files, EIO).
// `advice` ends the message.
[[noreturn]] void FailToOpen(const std::string& path, int error, const std::string& advice = "");

class Container {
 public:
  // Reads every *.safetensors of the directories (the first is the model's; further ones extend the
  // search path, the first file of a base name wins), sorted by name. Throws ModelError that names
  // the file and what is wrong: no such directory, not a directory, no shard in it (and what a
  // model directory contains), a header that is no header (empty file, text, Git-LFS pointer, too
  // long), JSON errors, offsets reversed or past the end ("truncated: has N bytes, header says M"),
  // shape and dtype that do not give the byte count, overlong names, contradictory format stamps.
  explicit Container(const std::vector<std::string>& directories);

  // nullptr when absent. On a duplicate name the first shard in sorted order wins.
  const TensorEntry* Find(std::string_view name) const;
  // One line about tensors that lie in two shards; "" when there are none.
  std::string RepeatNote() const;
  // The stamped format of a tensor (metadata "colibri.fmt"), or "".
  std::string_view Stamp(std::string_view name) const;
  const FileTable& Files() const { return files_; }
  FileTable& Files() { return files_; }
  const std::vector<std::string>& Directories() const { return directories_; }
  size_t TensorCount() const { return tensors_.size(); }
  // All names, sorted; for messages and tests.
  std::vector<std::string> Names() const;

 private:
  void ReadHeader(uint32_t file);
  void AddStamps(const std::string& text, const std::string& path);

  std::vector<std::string> directories_;
  FileTable files_;
  std::unordered_map<std::string, TensorEntry> tensors_;
  std::string repeat_;  // the first tensor that is there twice
  size_t repeated_ = 0;
  std::map<std::string, std::string, std::less<>> stamps_;
};

}  // namespace colibri
