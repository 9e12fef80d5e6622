#include "runtime/chat_messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "runtime/utf8.h"

#include "runtime/json_text.h"

namespace colibri {
namespace {

using Json = nlohmann::ordered_json;

[[noreturn]] void Refuse(const std::string& place, std::string_view why) {
  throw LineRefusal("invalid_request", place, fmt::format("{}: {}", place, why));
}

// Parts the template renders: text as it is, the others as its reminder that they cannot be seen.
constexpr std::array<std::string_view, 8> kParts = {
    "text", "image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio"};

void CheckParts(const Json& content, const std::string& place) {
  for (size_t i = 0; i < content.size(); ++i) {
    const Json& part = content[i];
    if (part.is_string()) continue;
    const std::string here = fmt::format("{}.content[{}]", place, i);
    const auto type = part.is_object() ? part.find("type") : part.end();
    if (!part.is_object() || type == part.end() || !type->is_string()) {
      Refuse(here, fmt::format("{} is given, a string or an object with a type is expected",
                               ShownJson(part)));
    }
    const std::string& name = type->get_ref<const std::string&>();
    if (std::find(kParts.begin(), kParts.end(), name) == kParts.end()) {
      Refuse(here, fmt::format("parts of type \"{}\" are not known", name));
    }
    if (name != "text") continue;
    if (!part.contains("text") || !part["text"].is_string()) {
      Refuse(here, fmt::format("{} is given, a text part needs a string text", ShownJson(part)));
    }
    for (const auto& [field, value] : part.items()) {
      if (value.is_null() || field == "type" || field == "text") continue;
      throw LineRefusal(
          "unknown_field", here + "." + field,
          fmt::format("{}: \"{}\" of a text part would not be rendered", here, field));
    }
  }
}

bool IsRole(std::string_view role) {
  return role == "system" || role == "developer" || role == "user" || role == "assistant" ||
         role == "tool";
}

bool KnownField(std::string_view role, std::string_view field) {
  if (field == "role" || field == "content") return true;
  if (role == "assistant") return field == "reasoning_content" || field == "tool_calls";
  // Results follow each other in order; the ids and names in them are not rendered.
  if (role == "tool") return field == "tool_call_id" || field == "name";
  return false;
}

void CheckMessage(const Json& message, const std::string& place) {
  if (!message.is_object()) {
    Refuse(place, fmt::format("{} is given, an object is expected", ShownJson(message)));
  }
  const auto role_at = message.find("role");
  if (role_at == message.end() || !role_at->is_string()) {
    Refuse(place, fmt::format("the role {} is given, a string is expected",
                              role_at == message.end() ? "none" : ShownJson(*role_at)));
  }
  const std::string& role = role_at->get_ref<const std::string&>();
  if (!IsRole(role)) {
    Refuse(place, fmt::format("the role \"{}\" is not known to the model: system, developer (the "
                              "same), user, assistant and tool are",
                              role));
  }
  for (const auto& [field, value] : message.items()) {
    if (value.is_null() || KnownField(role, field)) continue;
    // OpenAI's answers have an empty list of them; they come back as a conversation goes on.
    if (role == "assistant" && field == "annotations" && value.is_array() && value.empty())
      continue;
    throw LineRefusal("unknown_field", place + "." + field,
                      fmt::format("{}: \"{}\" of a message with role {} would not be rendered",
                                  place, field, role));
  }
  const auto content = message.find("content");
  if (role != "assistant" && (content == message.end() || content->is_null())) {
    Refuse(place, "it has no content: a string or an array of parts is expected");
  }
  if (content == message.end() || content->is_null() || content->is_string()) return;
  if (!content->is_array()) {
    const std::string here = place + ".content";
    Refuse(here, fmt::format("{} is given, a string or an array of parts is expected",
                             ShownJson(*content)));
  }
  // A tool's list may hold outputs and references instead of parts: the template sorts them out.
  if (role != "tool") CheckParts(*content, place);
}

// At most LineRefusal::kMaxText bytes of valid UTF-8.
std::string Cut(std::string text) {
  if (text.size() <= LineRefusal::kMaxText) return text;
  text.resize(LineRefusal::kMaxText - 3);
  text.resize(ValidPrefix(text));
  return text + "...";
}

}  // namespace

LineRefusal::LineRefusal(std::string code, std::string param, std::string message)
    : error{400, std::move(code), Cut(std::move(message)), Cut(std::move(param))} {}

Json CheckedMessages(Json messages) {
  if (!messages.is_array() || messages.empty()) {
    throw LineRefusal("invalid_request", "messages",
                      fmt::format("messages: {} is given, an array of at least one message is "
                                  "expected",
                                  messages.is_null() ? "none" : ShownJson(messages)));
  }
  for (size_t i = 0; i < messages.size(); ++i) {
    CheckMessage(messages[i], fmt::format("messages[{}]", i));
    if (messages[i]["role"] == "developer") messages[i]["role"] = "system";
  }
  return messages;
}

void CheckTools(const Json& tools) {
  if (!tools.is_array()) Refuse("tools", "an array is expected");
  for (size_t i = 0; i < tools.size(); ++i) {
    const std::string here = fmt::format("tools[{}]", i);
    const Json& tool = tools[i];
    if (!tool.is_object()) Refuse(here, "an object is expected");
    const auto type = tool.find("type");
    if (type != tool.end() && *type != "function") Refuse(here, "only functions are supported");
    const Json& function = tool.contains("function") ? tool["function"] : tool;
    if (!function.is_object() || !function.contains("name") || !function["name"].is_string()) {
      Refuse(here, "a function with a name is expected");
    }
  }
}

std::vector<std::string> MediaWarnings(const Json& messages) {
  std::vector<std::string> warnings;
  for (size_t i = 0; i < messages.size(); ++i) {
    const auto content = messages[i].find("content");
    if (content == messages[i].end() || !content->is_array()) continue;
    for (size_t k = 0; k < content->size(); ++k) {
      const Json& part = (*content)[k];
      if (!part.is_object() || !part.contains("type") || !part["type"].is_string()) continue;
      const std::string& type = part["type"].get_ref<const std::string&>();
      if (type == "text" || std::find(kParts.begin(), kParts.end(), type) == kParts.end()) continue;
      warnings.push_back(
          fmt::format("messages[{}].content[{}]: the model sees no {}, the prompt tells it that "
                      "there was one",
                      i, k, type));
      break;
    }
  }
  return warnings;
}

std::string LastUserText(const Json& messages) {
  for (size_t i = messages.size(); i-- > 0;) {
    const Json& message = messages[i];
    if (message["role"] != "user") continue;
    const Json& content = message["content"];
    if (content.is_string()) return content.get<std::string>();
    std::string text;
    for (const Json& part : content) {
      if (part.is_string()) {
        text += part.get_ref<const std::string&>();
      } else if (part["type"] == "text") {
        text += part["text"].get_ref<const std::string&>();
      }
    }
    return text;
  }
  return "";
}

}  // namespace colibri
