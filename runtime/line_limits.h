// What one line of a prompt file may take, so that memory can be planned whatever a file holds. All
// of it follows from the context, which the manifest has, and nothing from the memory at hand: a
// line is refused everywhere or nowhere.
// Threads: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "runtime/request.h"

namespace colibri {

// The longest line in bytes. 128 a token of context are 30 times what text takes, and five times
// text of which every byte is escaped (\u00e9); 1 MiB for tools, metadata and short contexts.
constexpr size_t MaxLineBytes(int32_t context) {
  return (size_t{1} << 20) + 128 * static_cast<size_t>(context);
}

// The most JSON values of a line that are kept (runtime/json_text.h). What reaches a prompt costs
// at least a token for each 4 of them (a part of one letter is an object and two strings); the rest
// is for what does not reach it.
constexpr size_t MaxLineValues(int32_t context) { return 16384 + 4 * static_cast<size_t>(context); }

// The longest custom_id and stop string. Every line under way holds its own, the stop strings with
// 16 bytes more for each of theirs.
inline constexpr size_t kMaxIdBytes = 4096;
inline constexpr size_t kMaxStopBytes = 1024;

// The most log probabilities of a line: n * max_tokens * (1 + top_logprobs). 262,144 let 3 choices
// of 4,096 tokens with 20 alternatives pass.
inline constexpr uint64_t kMaxLineLogprobs = uint64_t{1} << 18;

// Bytes of one log probability in the record: the token, its bytes as numbers and the logarithm.
// Over a vocabulary of 4,000 tokens of 4.8 bytes they are 67 on average and at most 111; 128 are
// enough as long as a line's tokens have 17 bytes on average. And with the 8 that it takes until
// then.
inline constexpr uint64_t kLogprobTextBytes = 128;
inline constexpr uint64_t kLogprobBytes = kLogprobTextBytes + 8;

// The largest charge of a line for its log probabilities.
inline constexpr uint64_t kMaxLogprobBytes = kMaxLineLogprobs * kLogprobBytes;

// The error of a prompt of so many tokens (as text, since it may not have been counted to its end).
// max_tokens 0: what there is room for.
LineError ContextError(const std::string& prompt, int32_t max_tokens, int32_t context);

// The error of a line that the context, or the room for log probabilities, is too small for;
// nullopt: it fits.
std::optional<LineError> AdmissionError(const Request& request, int32_t context);

// Tokens that a line which fits may generate.
int32_t TokenLimit(const Request& request, int32_t context);

// Log probabilities of a line that fits.
uint64_t LogprobsOf(const Request& request, int32_t context);

// What a line under way holds besides its tokens, in bytes: log probabilities with their record,
// names of tools, a prompt's text.
uint64_t LineCharge(const Request& request, int32_t context);

// What a line holds that was read and waits for a sequence, in bytes.
uint64_t RequestBytes(const Request& request);

// Bytes to read a line at its cap, parse it, render and tokenise its prompt. `token_bytes`: of the
// longest token (Tokenizer::MostBytes). For a context of 2,048 these are 14 times the cap, of which
// the worst of the lines in tests/app_memory_test.cc takes 6.5: the line twice, its parse, which
// keeps MaxLineValues of at most 192 bytes, and the JSON text of a call's arguments, parsed too.
uint64_t LineReadBytes(int32_t context, uint64_t token_bytes);

}  // namespace colibri
