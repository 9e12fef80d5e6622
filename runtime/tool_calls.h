// Tool calls in generated text: <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...
// </tool_call> (model spec 5.2) to OpenAI's name and arguments. Tolerant: what is not a whole call
// stays text.
// Threads: pure functions.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace colibri {

struct ToolCall {
  std::string name;
  std::string arguments;  // text of a JSON object
};

struct ParsedContent {
  std::string text;  // outside the calls; trailing white space goes when there are calls
  std::vector<ToolCall> calls;
  bool malformed = false;  // a <tool_call> that is no call was left in the text
};

// The (tool, argument) pairs of a request's `tools` whose schema says type string or lists strings
// only. The markup has no types: without the schema a string "10" would become a number.
std::vector<std::pair<std::string, std::string>> StringArguments(
    const nlohmann::ordered_json& tools);

// A value is raw JSON if it is, as a whole, one valid JSON value other than a string and no pair of
// `string_arguments` forbids it; its digits are kept as they stand. Otherwise it is a string.
ParsedContent ParseToolCalls(std::string_view content,
                             std::span<const std::pair<std::string, std::string>> string_arguments);

}  // namespace colibri
