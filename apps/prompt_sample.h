// What the first prompts of an input ask for, in tokens: for the prediction. Threads: one.
#pragma once

#include <cstdint>
#include <optional>

#include "apps/flags.h"
#include "runtime/request_parser.h"

namespace colibri {

struct PromptSample {
  uint64_t lines = 0;  // that can be answered
  double prompt = 0;   // tokens of a prompt, on average
  double answer = 0;   // most tokens of an answer, on average; a quarter of the context unsaid
  double longest = 0;  // the most that a line asks for
};

// Reads some lines from the position of `input`, a regular file (-1: the command line's prompts),
// which stays. `parser` remembers the ids: the run itself needs another one. nullopt: none of them
// can be answered, or the input cannot be read twice.
std::optional<PromptSample> SamplePrompts(const RunOptions& options, int input,
                                          RequestParser& parser);

}  // namespace colibri
