#include "runtime/chat_messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string_view>

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
      Refuse(here, "a string or an object with a type is expected");
    }
    const std::string& name = type->get_ref<const std::string&>();
    if (std::find(kParts.begin(), kParts.end(), name) == kParts.end()) {
      Refuse(here, fmt::format("parts of type \"{}\" are not known", name));
    }
    const auto text = part.find("text");
    if (name == "text" && (text == part.end() || !text->is_string())) {
      Refuse(here, "a text part needs a string text");
    }
  }
}

void NormaliseCalls(Json* calls, const std::string& place) {
  if (!calls->is_array()) Refuse(place, "an array is expected");
  for (size_t i = 0; i < calls->size(); ++i) {
    Json& call = (*calls)[i];
    const std::string here = fmt::format("{}[{}]", place, i);
    if (!call.is_object()) Refuse(here, "an object is expected");
    Json& function = call.contains("function") ? call["function"] : call;
    if (!function.is_object() || !function.contains("name") || !function["name"].is_string()) {
      Refuse(here, "a function with a name is expected");
    }
    Json& arguments = function["arguments"];
    if (arguments.is_null()) arguments = Json::object();
    if (arguments.is_string()) {
      try {
        const std::string text = arguments.get<std::string>();
        arguments = text.empty() ? Json::object() : ParseJson(text);
      } catch (const std::invalid_argument& error) {
        Refuse(here, fmt::format("its arguments are no valid JSON: {}", error.what()));
      }
    }
    if (!arguments.is_object()) Refuse(here, "its arguments are no JSON object");
  }
}

bool KnownField(std::string_view role, std::string_view field) {
  if (field == "role" || field == "content") return true;
  if (role == "assistant") return field == "reasoning_content" || field == "tool_calls";
  // Results follow each other in order; the ids and names in them are not rendered.
  if (role == "tool") return field == "tool_call_id" || field == "name";
  return false;
}

void NormaliseMessage(Json* message, const std::string& place) {
  if (!message->is_object()) Refuse(place, "an object is expected");
  const auto role_at = message->find("role");
  if (role_at == message->end() || !role_at->is_string())
    Refuse(place, "a string role is expected");
  const std::string role = role_at->get<std::string>();
  if (role != "system" && role != "user" && role != "assistant" && role != "tool") {
    Refuse(place, fmt::format("the role \"{}\" is not known to the model: system, user, assistant "
                              "and tool are",
                              role));
  }
  Json kept = Json::object();
  for (auto& [field, value] : message->items()) {
    if (value.is_null()) continue;
    if (!KnownField(role, field)) {
      throw LineRefusal("unknown_field", place + "." + field,
                        fmt::format("{}: \"{}\" of a message with role {} would not be rendered",
                                    place, field, role));
    }
    kept[field] = std::move(value);
  }
  *message = std::move(kept);
  if (role == "assistant") {
    if (!message->contains("content")) (*message)["content"] = "";
    if (message->contains("reasoning_content") && !(*message)["reasoning_content"].is_string()) {
      Refuse(place, "reasoning_content must be a string");
    }
    if (message->contains("tool_calls")) {
      NormaliseCalls(&(*message)["tool_calls"], place + ".tool_calls");
    }
  }
  const auto content = message->find("content");
  if (content == message->end()) Refuse(place, "it has no content");
  if (content->is_array()) {
    // A tool's list may hold outputs and references instead of parts: the template sorts them out.
    if (role != "tool") CheckParts(*content, place);
  } else if (!content->is_string()) {
    Refuse(place, "content must be a string or an array of parts");
  }
}

}  // namespace

void NormaliseMessages(Json* messages) {
  if (!messages->is_array() || messages->empty()) {
    throw LineRefusal("invalid_request", "messages",
                      "the body needs messages: an array with at least one message");
  }
  for (size_t i = 0; i < messages->size(); ++i) {
    NormaliseMessage(&(*messages)[i], fmt::format("messages[{}]", i));
  }
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
