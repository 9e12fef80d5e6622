// What became of the lines of a run, for its summary: counted when their records are written, so
// that a record which a full drive or a closed pipe lost counts as nothing.
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace colibri {

// How answers ended, each choice counted.
struct Ends {
  uint64_t stop = 0;        // an end token or a stop string
  uint64_t length = 0;      // max_tokens or the context's end
  uint64_t degenerate = 0;  // cut for repeating itself
  uint64_t tool_calls = 0;  // stopped, with calls in it

  uint64_t Total() const { return stop + length + degenerate + tool_calls; }
};

// A line whose record is made.
struct LineOutcome {
  uint64_t line = 0;
  std::string id;      // custom_id, "" when it has none that can be read
  std::string error;   // its code; "": it was answered
  double seconds = 0;  // from its first choice's start to its last one's end
  // Summed over the choices.
  uint64_t prompt_tokens = 0, generated_tokens = 0, reasoning_tokens = 0;
  Ends ends;
};

class Tally {
 public:
  static constexpr size_t kNamed = 3;  // lines named as slowest and as longest

  struct Failure {
    std::string code;
    uint64_t count = 0, first_line = 0;
  };

  void Add(const LineOutcome& line);

  uint64_t Lines() const { return lines_; }
  uint64_t Failed() const { return failed_; }
  uint64_t PromptTokens() const { return prompt_tokens_; }
  uint64_t GeneratedTokens() const { return generated_tokens_; }
  uint64_t ReasoningTokens() const { return reasoning_tokens_; }
  const Ends& HowEnded() const { return ends_; }
  // The commonest first.
  std::vector<Failure> Failures() const;
  // At most kNamed, by seconds and by generated tokens; of equal ones the lower line first.
  const std::vector<LineOutcome>& Slowest() const { return slowest_; }
  const std::vector<LineOutcome>& Longest() const { return longest_; }

 private:
  uint64_t lines_ = 0, failed_ = 0;
  uint64_t prompt_tokens_ = 0, generated_tokens_ = 0, reasoning_tokens_ = 0;
  Ends ends_;
  std::vector<Failure> failures_;  // as many as there are codes: a dozen
  std::vector<LineOutcome> slowest_, longest_;
};

}  // namespace colibri
