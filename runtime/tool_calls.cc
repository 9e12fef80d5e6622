#include "runtime/tool_calls.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

namespace colibri {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kOpen = "<tool_call>", kClose = "</tool_call>";
constexpr std::string_view kKeyOpen = "<arg_key>", kKeyClose = "</arg_key>";
constexpr std::string_view kValueOpen = "<arg_value>", kValueClose = "</arg_value>";
constexpr std::string_view kSpace = " \t\r\n";

std::string_view Trim(std::string_view text) {
  const size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) + 1 - first);
}

std::string Quote(std::string_view text) {
  return Json(std::string(text)).dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Takes `open` ... `close` off the front of `rest`, white space before it skipped.
std::optional<std::string_view> TakeElement(std::string_view* rest, std::string_view open,
                                            std::string_view close) {
  const size_t first = rest->find_first_not_of(kSpace);
  if (first == std::string_view::npos || !rest->substr(first).starts_with(open)) return {};
  const size_t begin = first + open.size();
  const size_t end = rest->find(close, begin);
  if (end == std::string_view::npos) return {};
  const std::string_view inside = rest->substr(begin, end - begin);
  rest->remove_prefix(end + close.size());
  return inside;
}

std::string ValueText(std::string_view value, bool is_string) {
  const std::string_view trimmed = Trim(value);
  if (!is_string && !trimmed.empty() && trimmed[0] != '"' && Json::accept(trimmed)) {
    return std::string(trimmed);
  }
  return Quote(value);
}

// The call that `rest` begins with (after <tool_call>); moves it past </tool_call>.
std::optional<ToolCall> TakeCall(
    std::string_view* rest, std::span<const std::pair<std::string, std::string>> string_arguments) {
  std::string_view text = *rest;
  // A line break between the name and its arguments is optional, and the markup may follow at once.
  const size_t name_end = std::min(text.find(kKeyOpen), text.find(kClose));
  if (name_end == std::string_view::npos) return {};
  ToolCall call;
  call.name = std::string(Trim(text.substr(0, name_end)));
  if (call.name.empty() || call.name.find('<') != std::string::npos) return {};
  text.remove_prefix(name_end);
  std::vector<std::string> keys;
  while (const auto key_text = TakeElement(&text, kKeyOpen, kKeyClose)) {
    const auto value = TakeElement(&text, kValueOpen, kValueClose);
    const std::string key(Trim(*key_text));
    if (!value || std::find(keys.begin(), keys.end(), key) != keys.end()) return {};
    const bool is_string = std::find(string_arguments.begin(), string_arguments.end(),
                                     std::pair(call.name, key)) != string_arguments.end();
    call.arguments += keys.empty() ? "{" : ", ";
    call.arguments += Quote(key) + ": " + ValueText(*value, is_string);
    keys.push_back(key);
  }
  call.arguments += keys.empty() ? "{}" : "}";
  const size_t next = text.find_first_not_of(kSpace);
  if (next == std::string_view::npos || !text.substr(next).starts_with(kClose)) return {};
  text.remove_prefix(next + kClose.size());
  *rest = text;
  return call;
}

bool SaysString(const Json& schema) {
  if (!schema.is_object()) return false;
  const auto type = schema.find("type");
  if (type != schema.end()) return *type == "string";
  const auto values = schema.find("enum");
  return values != schema.end() && values->is_array() && !values->empty() &&
         std::all_of(values->begin(), values->end(), [](const Json& v) { return v.is_string(); });
}

}  // namespace

std::vector<std::pair<std::string, std::string>> StringArguments(const Json& tools) {
  std::vector<std::pair<std::string, std::string>> pairs;
  if (!tools.is_array()) return pairs;
  for (const Json& tool : tools) {
    if (!tool.is_object()) continue;
    const auto wrapped = tool.find("function");
    const Json& function = wrapped != tool.end() && wrapped->is_object() ? *wrapped : tool;
    const auto name = function.find("name");
    const auto parameters = function.find("parameters");
    if (name == function.end() || !name->is_string()) continue;
    if (parameters == function.end() || !parameters->is_object()) continue;
    const auto properties = parameters->find("properties");
    if (properties == parameters->end() || !properties->is_object()) continue;
    for (const auto& [key, schema] : properties->items()) {
      if (SaysString(schema)) pairs.emplace_back(name->get<std::string>(), key);
    }
  }
  return pairs;
}

ParsedContent ParseToolCalls(
    std::string_view content,
    std::span<const std::pair<std::string, std::string>> string_arguments) {
  ParsedContent parsed;
  while (!content.empty()) {
    const size_t open = content.find(kOpen);
    if (open == std::string_view::npos) break;
    std::string_view rest = content.substr(open + kOpen.size());
    if (auto call = TakeCall(&rest, string_arguments)) {
      parsed.text += content.substr(0, open);
      parsed.calls.push_back(std::move(*call));
    } else {
      parsed.text += content.substr(0, open + kOpen.size());
      parsed.malformed = true;
    }
    content = rest;
  }
  parsed.text += content;
  if (!parsed.calls.empty()) {
    const size_t last = parsed.text.find_last_not_of(kSpace);
    parsed.text.resize(last == std::string::npos ? 0 : last + 1);
  }
  return parsed;
}

}  // namespace colibri
