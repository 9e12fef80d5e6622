// --strict: every line of a prompt file is parsed before the model is loaded, so that a file with
// one bad line costs seconds and not a night. Threads: one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/line_source.h"
#include "runtime/request_parser.h"

namespace colibri {

struct StrictReport {
  uint64_t lines = 0, bad = 0;
  std::vector<std::string> problems;  // "line N: ...", the first kMaxProblems
  // All of it as a message; for a UsageError.
  std::string Text() const;
};

inline constexpr size_t kMaxProblems = 20;

// Reads the file from the position of `fd`, which stays, to its end. `parser` remembers the ids:
// the run itself needs another one. `format`: nullopt as in PromptSource. Throws UsageError for
// what cannot be read twice (a pipe), IoError.
StrictReport CheckAllLines(int fd, std::optional<InputFormat> format, RequestParser& parser);

}  // namespace colibri
