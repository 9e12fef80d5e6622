// One line of a prompt file to a Request, or to the error that its record will state. Every field
// of a line is honoured, known to be without effect, or refused by name: nothing is dropped.
// Threads: one at a time (ids of earlier lines are remembered).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/id_set.h"
#include "runtime/request.h"

namespace colibri {

class Tokenizer;

// What a line gets that says nothing itself: the command line's values over those of
// generation_config.json.
struct RequestDefaults {
  Sampling sampling;
  int32_t max_tokens = 0;         // 0: the room left in the context
  std::vector<std::string> stop;  // a line's own `stop` replaces them
  bool thinking = true;
  std::string effort = "max";  // "max" or "high"; what a line that thinks gets
  bool loop_stop = true;
  bool raw = false;               // plain lines are completions, not user turns
  bool parse_special = false;     // spellings of control tokens in prompts become them
  bool keep_prompt_text = false;  // fill Request::prompt_text
};

struct ParsedLine {
  uint64_t line = 0;
  uint64_t line_hash = 0;          // HashText of the line; 0: it was not read
  std::string custom_id;           // "" when the line has none that can be read
  std::string model;               // what the body asks for; any name is served
  std::optional<Request> request;  // nullopt: `error` says why
  LineError error;
};

class RequestParser {
 public:
  // The tokenizer outlives the parser. Ids of token-id prompts must be below `vocab` and known to
  // the tokenizer. Prompts of more than `context` tokens are refused without being tokenised to
  // their end. Throws ModelError if the tokenizer lacks [gMASK] or <sop>.
  RequestParser(const Tokenizer& tokenizer, int32_t vocab, int32_t context,
                RequestDefaults defaults);
  int32_t Context() const { return context_; }

  // A line of an OpenAI batch file: custom_id, method (POST), url (/v1/chat/completions or
  // /v1/completions; without it the body's messages or prompt decide) and body.
  //   messages | prompt (string or array of ids), tools, max_tokens, max_completion_tokens (chat),
  //   temperature 0..2, top_p (0, 1], min_p 0..1, top_k (-1 or 0: off), seed, stop (up to 4),
  //   n 1..128, logprobs (chat: bool with top_logprobs 0..20; completions: 0..5),
  //   reasoning_effort high | max | none, chat_template_kwargs, add_generation_prompt,
  //   continue_final_message
  // are honoured. An effort of high or max turns thinking on, none turns it off; enable_thinking
  // that says otherwise in the same line is an error. Without effect, and accepted: null, model,
  // user, metadata, store, service_tier, parallel_tool_calls, and the neutral values of stream,
  // penalties, logit_bias, response_format, tool_choice, echo and best_of.
  // The room for max_tokens is not checked here (AdmissionError of runtime/scheduler.h). Lines are
  // limited as runtime/line_limits.h says. Throws nothing but bad_alloc.
  ParsedLine Parse(std::string_view line, uint64_t number);

  // A plain line or -p: one user turn through the chat template, or with `raw` a completion.
  // custom_id is line-N.
  ParsedLine ParseText(std::string_view prompt, uint64_t number);

  // An earlier line's custom_id that was not parsed here (its line is finished, or another process
  // runs it): a later use of it is a second one. Lines are given in the order of the file.
  void Remember(std::string_view custom_id) {
    if (!custom_id.empty()) ids_.Insert(custom_id);
  }

 private:
  const Tokenizer* tokenizer_;
  int32_t vocab_, context_;
  RequestDefaults defaults_;
  IdSet ids_;
};

}  // namespace colibri
