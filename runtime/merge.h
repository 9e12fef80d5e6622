// --merge: the outputs of several processes put together in the order of the input. Needs no model.
// Threads: one call at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/line_source.h"
#include "runtime/manifest.h"

namespace colibri {

struct MergeRequest {
  std::string input;                  // a file
  std::optional<InputFormat> format;  // nullopt: by the first line, as in a run
  std::vector<std::string> outputs;   // of the processes, each with its manifest beside it
  bool mixed_targets = false;         // outputs of different SIMD targets are let through
};

struct MergeReport {
  Manifest manifest;   // of the whole: the shard is 0/1, so that a later run may do what is missing
  uint64_t lines = 0;  // of the input, blank ones not counted
  uint64_t records = 0;     // written
  uint64_t failed = 0;      // of those, records of failed lines
  uint64_t duplicates = 0;  // second records of a line, equal in bytes (runtime/record.h)
  uint64_t missing = 0;
  std::vector<uint64_t> first_missing;  // at most kMaxMissing line numbers
  std::vector<std::string> notes;       // torn ends that were left out
  std::string MissingText() const;      // "3 lines have no record: 4, 7 and 9"; "" if none
};

inline constexpr size_t kMaxMissing = 20;

// Checks everything, then gives every record with its line feed to `write`, in order. 40 bytes a
// record. The outputs are locked against runs, and not changed. Throws UsageError: a manifest is
// missing or differs (named), a record is of a line that is not in the input or was changed, two
// records of a line differ; IoError: an output is damaged, still being written, or cannot be read.
MergeReport MergeOutputs(const MergeRequest& request,
                         const std::function<void(std::string_view)>& write);

// The same into a file, whole or not at all, with its manifest beside it. Throws UsageError also if
// `path` is one of the outputs, or is not empty and `overwrite` is false.
MergeReport MergeIntoFile(const MergeRequest& request, const std::string& path, bool overwrite);

}  // namespace colibri
