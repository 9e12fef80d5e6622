// GLM-5.2's chat rendering, byte for byte as its official template gives it (model spec 5.2).
// Threads: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/tokenizer.h"

namespace colibri {

// Why a request cannot be rendered; the line fails with this text.
struct TemplateError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The text would be longer than the caller can use.
struct TextTooLong : TemplateError {
  TextTooLong() : TemplateError("the text is too long") {}
};

// A prompt may be far longer than its line: each of a list of references to a tool is that tool.
struct RenderLimits {
  size_t bytes = SIZE_MAX;   // of the whole text
  size_t values = SIZE_MAX;  // of a tool call's arguments that are given as JSON text
};

// The template's arguments with their defaults.
struct TemplateArguments {
  bool enable_thinking = true;
  std::string reasoning_effort = "max";  // "high" or anything else, as the template has it
  bool clear_thinking = true;
  bool add_generation_prompt = true;
  // Leave the last message, which must be the assistant's and call no tool, open for the model to
  // go on: white space at its end stays (the template would strip it), nothing is added.
  bool continue_final_message = false;
};

// Control: a literal of the template, whose token spellings are control tokens. Text: the user's.
struct PromptPiece {
  std::string text;
  bool control = false;
};

// Applies a JSON object of template arguments (or null: none) to `into`; throws TemplateError
// naming the argument and the known ones if one is unknown or has a value the template cannot
// honour. Any text is an effort to the template, "none" included.
void ApplyTemplateArguments(const nlohmann::ordered_json& arguments, TemplateArguments* into);

// `messages`: an array of messages; `tools`: an array or null. Differs from the template where that
// would print "None" (content null is empty) or raise (arguments of a tool call as JSON text), and
// in refusing with a TemplateError naming the place what the template would print in Python's way.
// As in the template, messages of unknown roles and parts of unknown types are left out.
// Numbers are exact if the values come from ParseJson (runtime/json_text.h). Throws TextTooLong as
// soon as a limit is passed.
std::vector<PromptPiece> RenderChat(const nlohmann::ordered_json& messages,
                                    const nlohmann::ordered_json& tools,
                                    const TemplateArguments& arguments,
                                    const RenderLimits& limits = {});

std::string PiecesText(const std::vector<PromptPiece>& pieces);
// Control pieces with added tokens recognised; neighbouring ordinary text joined, then encoded with
// none recognised, or with all of them if `parse_special`.
// nullopt: they are more than `most` tokens (Tokenizer::EncodeUpTo).
std::optional<std::vector<int32_t>> EncodePieces(const Tokenizer& tokenizer,
                                                 const std::vector<PromptPiece>& pieces,
                                                 bool parse_special, size_t most = SIZE_MAX);

// JSON as Python's json.dumps(ensure_ascii=False) writes it: ", " and ": ", shortest floats. Throws
// TextTooLong soon after `most` bytes.
std::string PythonJson(const nlohmann::ordered_json& value, size_t most = SIZE_MAX);

}  // namespace colibri
