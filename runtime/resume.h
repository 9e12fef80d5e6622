// Which lines of an input a process runs: those of its shard that have no record yet. A record
// belongs to a line if its number, its custom_id and the hash of its bytes agree; where they do
// not, the input was changed under the output, and that is said, never guessed. Threads: one at a
// time an object.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "runtime/finished_lines.h"
#include "runtime/line_source.h"
#include "runtime/manifest.h"

namespace colibri {

// A line as it was read: kTooLong has neither hash nor custom_id.
struct SeenLine {
  uint64_t number = 0;
  uint64_t line_hash = 0;
  std::string_view custom_id;  // "" when there is none that can be read
};
bool Matches(const FinishedLines::Entry& entry, const SeenLine& line);

struct ChangedLine {
  uint64_t line = 0;
  std::string what;  // "line 7 was changed since it was answered"
};

// What a look at all prompts before the model is loaded tells.
struct PromptSurvey {
  // The first line whose record is of another one; nothing else counts then. Lines added at the end
  // are no change.
  std::optional<ChangedLine> changed;
  uint64_t lines = 0;     // of the shard, without a record: those to be run
  bool several = false;   // one of them may ask for several answers
  bool logprobs = false;  // one of them may ask for log probabilities
  bool whole = false;     // false: there may be more lines
  // Bytes of those lines, of the longest, and of how many a number says what they may generate:
  // the sum of these numbers, and the largest. Seen in a prompt's text too.
  uint64_t bytes = 0, longest = 0, limited = 0, limits = 0, largest_limit = 0;

  // nullopt: it cannot be told.
  std::optional<uint64_t> Answers() const {
    return whole && !several ? std::optional(lines) : std::nullopt;
  }
};
// Reads an input file from the position of `fd`, which stays, to the last line that has a record
// and 16 MiB further. `format`: nullopt as in PromptSource. `context`: of the run, for its limits
// of lines. Regular files only. Throws IoError.
PromptSurvey SurveyLines(int fd, std::optional<InputFormat> format, const LineShard& shard,
                         const FinishedLines& finished, int32_t context);
PromptSurvey SurveyPrompts(std::span<const std::string> prompts, const LineShard& shard,
                           const FinishedLines& finished);

// The same for lines as they arrive, for any input; asked once a line, in ascending order.
class LineFilter {
 public:
  // `changed` is told of each record that is of another line than the one now read: the record
  // stays, the line is not run. Forgets finished lines as they pass.
  LineFilter(LineShard shard, FinishedLines finished,
             std::function<void(const ChangedLine&)> changed)
      : shard_(shard), finished_(std::move(finished)), changed_(std::move(changed)) {}

  // The answer needs the line's custom_id only if this is true: it has a record, or another process
  // runs it (then for the ids that are taken).
  bool MaySkip(uint64_t line) const;
  // False: not to be run.
  bool Runs(const SeenLine& line);
  // The input ended: records of lines beyond it are changed too. Once.
  void AtEnd();

  uint64_t Skipped() const { return skipped_; }  // finished before
  uint64_t Changed() const { return changes_; }

 private:
  void Change(uint64_t line, const char* what);

  LineShard shard_;
  FinishedLines finished_;
  std::function<void(const ChangedLine&)> changed_;
  uint64_t skipped_ = 0, changes_ = 0;
};

}  // namespace colibri
