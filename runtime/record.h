// The output record of a line: one JSON object and a line feed, in the shape of OpenAI's batch
// output, keys always in the same order. What contract 2 calls the bytes of a line (custom_id,
// status, choices, usage) comes from the request and its tokens alone; ids, times and figures are
// kept outside of it.
// Threads: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "runtime/request.h"

namespace colibri {

class Tokenizer;

// What the records of a run have in common. The tokenizer outlives the calls.
struct RecordContext {
  const Tokenizer* tokenizer = nullptr;
  std::string model;    // our name for it, whatever the lines ask for
  std::string run_id;   // part of every id
  int64_t created = 0;  // seconds since 1970
  std::string simd_target;
  std::string engine_version;
};

// The text of one finished choice.
struct ChoiceText {
  std::string content;    // a completion's whole text
  std::string reasoning;  // chat only
  bool ended_in_reasoning = false;
  int32_t reasoning_tokens = 0;  // before </think>, itself not counted
};
ChoiceText TextOf(const Request& request, const Choice& choice, const Tokenizer& tokenizer);

// "stop_token", "stop_string", "length", "degenerate"; "none" for a choice that has not ended.
const char* StopCauseName(StopCause cause);

// The record of a line that ended well, '\n' included. `line_hash` is HexOf the request's. In
// `choices`: OpenAI's message (content, reasoning_content, null unless the prompt ended inside
// <think>; tool_calls when there are any; content null beside calls without text) or a completion's
// text; finish_reason stop, length or tool_calls; logprobs when asked for, one entry a token, the
// end token included. usage counts end tokens too, as completion_tokens is what was generated; it
// sums over the choices. A token whose bytes are no UTF-8 is written "bytes:\xNN..." in logprobs.
// No number is NaN or infinite: null.
// `totals`: what was found on the way, or nullptr.
struct RecordTotals {
  int64_t reasoning_tokens = 0;
  int32_t calling = 0;  // choices whose finish_reason is tool_calls
};
std::string BuildRecord(const Request& request, std::span<const Choice> choices,
                        const LineFigures& figures, const RecordContext& context,
                        RecordTotals* totals = nullptr);

// The record of a line that failed: status and error object in the response, code and message in
// `error` as well, since readers look at either. custom_id "" becomes null.
std::string BuildErrorRecord(uint64_t line, const std::string& custom_id, const LineError& error,
                             const RecordContext& context, uint64_t line_hash = 0);

// The part of a record that is the bytes of its line, as one JSON text; for comparisons.
std::string LineBytes(const std::string& record);

}  // namespace colibri
