// The prompts of a run as the scheduler pulls them: lines of a file or pipe, or those of the
// command line, each parsed when it is needed. Threads: TryNext under the scheduler's lock;
// TakenSoFar any time; the other getters after the run, Fd and Buffered also on the engine thread
// while the graph is idle.
#pragma once

#include <atomic>
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
  // How far the input has been taken in, for a guess at what is to come; any thread, any time.
  struct Taken {
    uint64_t bytes = 0, lines = 0;  // of the descriptor; lines that are not run too, no blank ones
    uint64_t records = 0;           // of the filter's, those that were passed
  };
  Taken TakenSoFar() const { return {bytes_, taken_, records_}; }
  // Reading the input failed: what happened; else "".
  const std::string& Error() const { return error_; }

 private:
  bool Skipped(uint64_t number, uint64_t line_hash, const std::string* line);
  void Count();
  Next End();
  Next Parsed(ParsedLine line, Request* request, std::optional<LineError>* error);

  Options options_;
  RequestParser& parser_;
  LineSource lines_;
  size_t next_prompt_ = 0;
  uint32_t empty_portions_ = 0;
  bool told_model_ = false, ended_ = false;
  std::atomic<uint64_t> bytes_{0}, taken_{0}, records_{0};
  std::string line_;
  std::string error_;
};

}  // namespace colibri
