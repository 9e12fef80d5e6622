// The visible text of a choice, put together from its tokens: reasoning apart from content, special
// tokens left out, bytes that may begin a stop string or an unfinished character held back, nothing
// shown from a stop string on. The joined deltas are the final text.
// Threads: one assembler a choice, one thread at a time.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/request.h"
#include "runtime/stop.h"

namespace colibri {

class Tokenizer;

class TextAssembler {
 public:
  struct Delta {
    std::string reasoning, content;
  };

  // The tokenizer outlives the assembler. A completion's text is one piece: its <think> stays.
  TextAssembler(const Tokenizer& tokenizer, const Request& request);

  // The next accepted token; the end token (StopCause::kStopToken) is not text and not pushed.
  Delta Push(int32_t token);
  // No token follows: what was held back. A stop string that is only begun is text.
  Delta Finish();

  // Everything given out so far.
  const std::string& Reasoning() const { return reasoning_; }
  const std::string& Content() const { return content_; }
  // </think> has not come yet.
  bool InReasoning() const { return in_reasoning_; }
  // Tokens before </think>, itself not counted.
  int32_t ReasoningTokens() const { return reasoning_tokens_; }

 private:
  enum class Part : char { kReasoning, kMark, kContent };
  void Release(size_t count, Delta* delta);
  void FlushUnfinished(std::string* text);
  void Add(const Delta& delta);

  const Tokenizer* tokenizer_;
  int32_t think_end_;
  StopScanner scanner_;
  std::string unfinished_;  // bytes of a character whose end has not come
  std::string held_;        // may begin a stop string
  std::string held_parts_;  // the Part of each of its bytes
  bool in_reasoning_, stopped_ = false;
  int32_t reasoning_tokens_ = 0;
  std::string reasoning_, content_;
};

}  // namespace colibri
