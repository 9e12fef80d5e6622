// One line of a prompt file, understood: what to generate from and how. Plain data shared by the
// input reader, the scheduler, the sampler and the record builder.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/draft_counts.h"

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

// Log probabilities of a choice's tokens, in one array of 8 bytes each: 4,096 tokens with 20
// alternatives take 0.7 MB, as vectors of their own they took 1.5 MB.
class LogprobList {
 public:
  struct Token {
    int32_t id = 0;
    float logprob = 0;
    std::span<const std::pair<int32_t, float>> top;  // best first
  };

  LogprobList() = default;
  // Room for `tokens` of them with `top` alternatives each, which is never left.
  void Reserve(int32_t tokens, int32_t top) {
    stride_ = 1 + static_cast<size_t>(top);
    entries_.reserve(static_cast<size_t>(tokens) * stride_);
  }
  // At most `top` alternatives are kept.
  void Add(const TokenLogprob& token) {
    const size_t end = entries_.size() + stride_;
    entries_.emplace_back(token.id, token.logprob);
    const size_t top = std::min(token.top.size(), stride_ - 1);
    entries_.insert(entries_.end(), token.top.begin(),
                    token.top.begin() + static_cast<ptrdiff_t>(top));
    entries_.resize(end, {kNone, 0.0f});
  }
  size_t size() const { return entries_.size() / stride_; }
  bool empty() const { return entries_.empty(); }
  size_t Entries() const { return entries_.size(); }  // tokens and alternatives
  Token operator[](size_t i) const {
    const auto all = std::span(entries_).subspan(i * stride_, stride_);
    size_t top = stride_ - 1;
    while (top > 0 && all[top].first == kNone) --top;
    return {all[0].first, all[0].second, all.subspan(1, top)};
  }

 private:
  static constexpr int32_t kNone = -1;  // an alternative that there is not
  size_t stride_ = 1;
  std::vector<std::pair<int32_t, float>> entries_;  // each token, then its alternatives
};

// A finished choice. `tokens` are the accepted ones, the end token (if any) included last.
struct Choice {
  int32_t index = 0;
  std::vector<int32_t> tokens;
  LogprobList logprobs;  // one a token when asked for
  StopCause cause = StopCause::kNone;
  std::string matched_stop;  // the stop string that ended it
};

// Figures of a finished line for its x_colibri object; not part of the line's bytes.
struct LineFigures {
  double seconds_to_first_token = 0;
  double tokens_per_second = 0;
  uint64_t bytes_read = 0;  // by sweeps the line took part in, divided by their rows
  double hit_rate = 0;
  DraftCounts drafts;
  uint64_t draft_bytes = 0;   // of bytes_read, what drafts alone asked for, the line's share
  int32_t cached_tokens = 0;  // of the prompt, found stored; of several choices the least
};

}  // namespace colibri
