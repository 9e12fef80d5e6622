// When a choice ends: end tokens, stop strings, the loop stop and max_tokens, applied in this order
// to accepted tokens one at a time, so that neither drafts nor batches move the end.
// Threads: one matcher a choice, one thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "runtime/request.h"

namespace colibri {

class Tokenizer;

// Looks for stop strings in a stream of bytes. What it finds does not depend on how the bytes were
// cut into tokens: the match that ends first counts, of those that end together the longest.
class StopScanner {
 public:
  explicit StopScanner(std::span<const std::string> strings);

  // The number of the string that ends with this byte, -1: none. O(strings) a byte, amortised.
  int Push(char byte);
  // How many of the last bytes may be the beginning of a stop string; they are not shown yet.
  size_t Partial() const;
  size_t Length(int string) const { return patterns_[static_cast<size_t>(string)].text.size(); }

 private:
  struct Pattern {
    std::string text;
    std::vector<size_t> border;  // [n + 1]: longest proper prefix of the first n that ends them
    size_t matched = 0;
  };
  std::vector<Pattern> patterns_;
};

// Finds lines that go round in circles: after `kWindow` or more tokens, some period q <= kMaxPeriod
// with t[j] = t[j - q] for all of the last kWindow - q tokens. Prompt tokens do not count.
class LoopDetector {
 public:
  static constexpr size_t kWindow = 256, kMaxPeriod = 32;
  // True: this token closes such a stretch. O(kMaxPeriod).
  bool Push(int32_t token);

 private:
  std::array<int32_t, kMaxPeriod> recent_{};    // token n at n % kMaxPeriod
  std::array<uint32_t, kMaxPeriod + 1> run_{};  // [q]: for how many tokens t[j] = t[j - q] has held
  size_t count_ = 0;
};

class StopMatcher {
 public:
  // `stop_ids` (ascending, ModelConfig::stop_ids) and the tokenizer outlive the matcher.
  // max_tokens: what the request asks for or the context has room for; at least 1.
  // Stop strings are looked for in the whole generated text, reasoning included; special tokens
  // are no text.
  StopMatcher(const Tokenizer& tokenizer, std::span<const int32_t> stop_ids, const Request& request,
              int32_t max_tokens);

  // The next accepted token, end tokens included. After anything but kNone the choice is over and
  // Push must not be called again.
  StopCause Push(int32_t token);
  // The string that matched, "" unless kStopString was returned.
  const std::string& MatchedStop() const { return matched_; }
  int32_t Tokens() const { return tokens_; }
  // How many more tokens there may be at most.
  int32_t Left() const { return max_tokens_ - tokens_; }

 private:
  const Tokenizer* tokenizer_;
  std::span<const int32_t> stop_ids_;
  std::vector<std::string> strings_;
  StopScanner scanner_;
  LoopDetector loop_;
  bool loop_stop_;
  int32_t max_tokens_;
  int32_t tokens_ = 0;
  std::string matched_;
};

}  // namespace colibri
