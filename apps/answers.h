// Where a run's answers go and which prompts still lack one: opens OUT so that a crash at any point
// leaves something to go on in, and compares it with the prompts before a model is loaded. Also
// --strict and --merge, which need no engine. Threads: one.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "apps/flags.h"
#include "runtime/request_parser.h"
#include "runtime/resume.h"
#include "runtime/run_output.h"

namespace colibri {

struct Answers {
  RunOutput run;               // run.file: nullptr for standard output
  bool records = false;        // a regular file of records: can be resumed and sorted
  uint64_t failed_before = 0;  // records of failed lines that stay
  uint64_t done_before = 0;    // records that stay
  int Fd() const;
};

// The format of the input as far as the command line tells it.
std::optional<InputFormat> GivenFormat(const RunOptions& options);

// Opens the output and says what was found there. `manifest` is asked for only if the output is to
// have one. Throws as OpenRunOutput does.
Answers OpenAnswers(const RunOptions& options, bool text,
                    const std::function<Manifest()>& manifest);

// Throws UsageError if -i (open as `input`, or -1) and -o are the same file by whatever name.
void RefuseSameFile(const RunOptions& options, int input);

// Which prompts are to be run. nullopt: they cannot be read twice, or there are none; on a pipe the
// LineFilter notices what was changed. `context`: of the run, for its limits of lines. Throws
// UsageError if a prompt that has an answer was changed.
std::optional<PromptSurvey> Survey(const RunOptions& options, int input,
                                   const FinishedLines& finished, int32_t context);

// --resume and --overwrite where the answers go to standard output: throws UsageError.
void RefuseForStandardOutput(const RunOptions& options);

// `path` as -o takes it: "-" for a name of standard output such as /dev/stdout, which would else be
// opened a second time, from its beginning, with a manifest in /dev. Throws UsageError if it is a
// regular file that is open under another number: its own name is needed.
std::string OutputName(const std::string& path);

// --ordered: an output file of records is put in the order of the prompts. Throws IoError that says
// how it is done later, when the drive has no room for both, say.
void SortAnswers(const RunOptions& options, Answers& answers);

// --strict. Throws UsageError: lines that cannot be answered, or a pipe.
void CheckStrictly(const RunOptions& options, int input, RequestParser& parser);

// --merge. Returns the exit code: 0, or 1 if a line is missing or failed. Throws as MergeOutputs.
int Merge(const RunOptions& options);

}  // namespace colibri
