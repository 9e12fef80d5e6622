// One line of a prompt file, understood: what to generate from and how. Plain data shared by the
// input reader, the scheduler, the sampler and the record builder.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace colibri {

// Why a line fails, as it stands in its error record.
struct LineError {
  int status = 400;
  std::string code;  // "invalid_request", "context_length_exceeded", "read_error", ...
  std::string message;
  std::string param;  // the body field, or ""
};

struct Sampling {
  float temperature = 1;  // 0: argmax
  float top_p = 1;
  float min_p = 0;
  int32_t top_k = 0;  // 0: off
  uint64_t seed = 0;
};

struct Request {
  uint64_t line = 0;       // physical line, from 1
  uint64_t line_hash = 0;  // HashText of the line; 0 for one too long to be read
  std::string custom_id;
  bool chat = true;       // chat.completion, else text_completion
  bool loop_stop = true;  // end a line that repeats itself
  std::vector<int32_t> prompt;
  int32_t max_tokens = 0;  // 0: the room left in the context
  int32_t choices = 1;     // n
  Sampling sampling;
  std::vector<std::string> stop;
  bool logprobs = false;
  int32_t top_logprobs = 0;
  bool thinking = false;             // effective mode
  std::string effort;                // effective effort: "max", "high" or "none"
  bool starts_in_reasoning = false;  // the prompt ends inside <think>
  bool has_tools = false;
  // (tool, argument) pairs whose schema says string: their values are never read as JSON.
  std::vector<std::pair<std::string, std::string>> string_arguments;
  std::vector<std::string> warnings;  // what its record says beside the answer's own warnings
  std::string prompt_text;            // for the text output of several prompts; "" otherwise
};

// Why a choice ended.
enum class StopCause : uint8_t { kNone, kStopToken, kStopString, kLength, kDegenerate };

struct TokenLogprob {
  int32_t id = 0;
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top;  // best first
};

// A finished choice. `tokens` are the accepted ones, the end token (if any) included last.
struct Choice {
  int32_t index = 0;
  std::vector<int32_t> tokens;
  std::vector<TokenLogprob> logprobs;  // one a token when asked for
  StopCause cause = StopCause::kNone;
  std::string matched_stop;  // the stop string that ended it
};

// Figures of a finished line for its x_colibri object; not part of the line's bytes.
struct LineFigures {
  double seconds_to_first_token = 0;
  double tokens_per_second = 0;
  uint64_t bytes_read = 0;  // by sweeps the line took part in, divided by their rows
  double hit_rate = 0;
  int32_t drafts_accepted = 0;
  int32_t cached_tokens = 0;
};

}  // namespace colibri
