// The prompts of a run as the scheduler pulls them: lines of a file or pipe, or those of the
// command line, each parsed when it is needed. Threads: TryNext under the scheduler's lock; the
// getters after the run, Fd and Buffered also on the engine thread while the graph is idle.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime/line_limits.h"
#include "runtime/line_source.h"
#include "runtime/request_parser.h"
#include "runtime/resume.h"
#include "runtime/scheduler.h"

namespace colibri {

// What the prompts from the position of `fd` on can ask for; the position stays. `context`: of the
// run, for its limits of lines. Where it cannot be told cheaply (a pipe, a file of more than 16
// MiB) they may ask for anything.
struct InputSurvey {
  std::optional<uint64_t> answers;  // nullopt: not known, as with n > 1
  bool logprobs = true;
};
InputSurvey SurveyInput(int fd, int32_t context);

class PromptSource final : public RequestSource {
 public:
  struct Options {
    int fd = -1;                        // of the file or pipe; -1: `prompts`
    std::optional<InputFormat> format;  // nullopt: the first line decides
    std::vector<std::string> prompts;
    // Told once each: the format that the first line decided; a `model` that is not `our_model`.
    std::function<void(InputFormat)> on_format;
    std::function<void(const std::string& asked)> on_other_model;
    std::string our_model;
    // Told of each line that gets a request or an error, before it is run.
    std::function<void(uint64_t line)> on_taken;
    // Lines that are not run get no request; nullptr: all are run. Outlives the source.
    LineFilter* filter = nullptr;
  };

  PromptSource(Options options, RequestParser& parser)
      : options_(std::move(options)),
        parser_(parser),
        lines_(options_.fd, MaxLineBytes(parser.Context())) {}

  Next TryNext(Request* request, std::optional<LineError>* error) override;
  int Fd() const override { return options_.fd; }
  bool Buffered() const override;
  // Reading the input failed: what happened; else "".
  const std::string& Error() const { return error_; }

 private:
  bool Skipped(uint64_t number, uint64_t line_hash, const std::string* line);
  Next End();
  Next Parsed(ParsedLine line, Request* request, std::optional<LineError>* error);

  Options options_;
  RequestParser& parser_;
  LineSource lines_;
  size_t next_prompt_ = 0;
  bool told_model_ = false, ended_ = false;
  std::string line_;
  std::string error_;
};

}  // namespace colibri
