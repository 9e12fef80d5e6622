#include "runtime/chat_template.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "runtime/json_text.h"
#include "runtime/utf8.h"

namespace colibri {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kToolsBefore =
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n";
constexpr std::string_view kToolsAfter =
    "</tools>\n\nFor each function call, output the function name and arguments within the "
    "following XML format:\n<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>"
    "{arg-value-1}</arg_value><arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>"
    "...</tool_call>";

const Json& Member(const Json& object, const char* key) {
  static const Json kNull;
  const auto found = object.find(key);
  return found == object.end() ? kNull : *found;
}

// Jinja's truth of the values that JSON has.
bool Truthy(const Json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number()) return value.get<double>() != 0;
  if (value.is_string()) return !value.get_ref<const std::string&>().empty();
  return IsBigInteger(value) || ((value.is_array() || value.is_object()) && !value.empty());
}

// What str.strip() takes: White_Space and, unlike it, the separators U+001C to U+001F.
bool IsPythonSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
         c == 0x205F || c == 0x3000;
}

std::string_view StripLeft(std::string_view text) {
  while (!text.empty()) {
    const Utf8Sequence first = FirstSequence(text);
    if (first.kind != Utf8Kind::kWhole || !IsPythonSpace(first.value)) break;
    text.remove_prefix(first.length);
  }
  return text;
}

std::string_view StripRight(std::string_view text) {
  while (!text.empty()) {
    size_t begin = text.size() - 1;
    while (begin > 0 && (static_cast<uint8_t>(text[begin]) & 0xC0) == 0x80) --begin;
    const Utf8Sequence last = FirstSequence(text.substr(begin));
    if (last.kind != Utf8Kind::kWhole || begin + last.length != text.size() ||
        !IsPythonSpace(last.value)) {
      break;
    }
    text.remove_suffix(last.length);
  }
  return text;
}

// The function of a tool or call, whose wrapper may be missing.
const Json& Unwrap(const Json& item, std::string_view where) {
  if (!item.is_object()) throw TemplateError(fmt::format("{}: an object expected", where));
  const Json& function = Member(item, "function");
  if (function.is_null()) return item;
  if (!function.is_object()) {
    throw TemplateError(fmt::format("{}.function: an object expected", where));
  }
  return function;
}

class ChatRenderer {
 public:
  ChatRenderer(const Json& messages, const Json& tools, const TemplateArguments& arguments,
               const RenderLimits& limits)
      : messages_(messages), tools_(tools), arguments_(arguments), limits_(limits) {}

  std::vector<PromptPiece> Run() {
    Check();
    Control("[gMASK]<sop>");
    if (arguments_.enable_thinking) {
      Control("<|system|>Reasoning Effort: ");
      Control(arguments_.reasoning_effort == "high" ? "High" : "Max");
    }
    if (!tools_.empty()) ToolsBlock();
    for (size_t i = 0; i < messages_.size(); ++i) Message(i);
    if (arguments_.add_generation_prompt && !arguments_.continue_final_message) {
      Control("<|assistant|><think>");
      if (!arguments_.enable_thinking) Control("</think>");
    }
    return std::move(pieces_);
  }

 private:
  void Check() {
    if (!messages_.is_array()) throw TemplateError("messages: a list expected");
    if (!tools_.is_null() && !tools_.is_array()) throw TemplateError("tools: a list expected");
    for (size_t i = 0; i < messages_.size(); ++i) {
      if (!messages_[i].is_object())
        throw TemplateError(fmt::format("{}: an object expected", At(i)));
      if (!Member(messages_[i], "role").is_string()) {
        throw TemplateError(fmt::format("{}.role: a text expected", At(i)));
      }
      if (Role(i) == "user") last_user_ = i;
    }
    for (size_t i = 0; i < tools_.size(); ++i) Unwrap(tools_[i], fmt::format("tools[{}]", i));
    if (!arguments_.continue_final_message) return;
    if (messages_.empty() || Role(messages_.size() - 1) != "assistant") {
      throw TemplateError("continue_final_message: the last message must be the assistant's");
    }
    if (!Member(messages_.back(), "tool_calls").empty()) {
      throw TemplateError("continue_final_message: the last message has tool_calls");
    }
  }

  static std::string At(size_t i) { return fmt::format("messages[{}]", i); }
  const std::string& Role(size_t i) const {
    return Member(messages_[i], "role").get_ref<const std::string&>();
  }

  void Control(std::string_view text) { Add(text, true); }
  void Text(std::string_view text) { Add(text, false); }
  void Add(std::string_view text, bool control) {
    if (text.empty()) return;
    bytes_ += text.size();
    if (bytes_ > limits_.bytes) throw TextTooLong();
    if (pieces_.empty() || pieces_.back().control != control) pieces_.push_back({"", control});
    pieces_.back().text.append(text);
  }

  void ToolLine(const Json& function) {
    std::string shown;
    for (const auto& [key, value] : function.get_ref<const Json::object_t&>()) {
      if (key == "strict" || key == "defer_loading") continue;
      shown += shown.empty() ? "{" : ", ";
      shown += PythonJson(key) + ": ";
      shown += PythonJson(value, limits_.bytes);
      if (shown.size() > limits_.bytes) throw TextTooLong();
    }
    Text(shown.empty() ? "{}" : shown + "}");
    Control("\n");
  }

  void ToolsBlock() {
    Control(kToolsBefore);
    for (const Json& tool : tools_) {
      const Json& function = Unwrap(tool, "tools");
      if (!Truthy(Member(function, "defer_loading"))) ToolLine(function);
    }
    Control(kToolsAfter);
  }

  void Message(size_t i) {
    const std::string& role = Role(i);
    if (role == "system" || role == "user") {
      Control(role == "system" ? "<|system|>" : "<|user|>");
      Content(Member(messages_[i], "content"), At(i) + ".content");
    } else if (role == "assistant") {
      Assistant(i);
    } else if (role == "tool") {
      if (i == 0 || Role(i - 1) != "tool") Control("<|observation|>");
      ToolResult(Member(messages_[i], "content"), At(i) + ".content");
    }
  }

  // Adds strings, text parts and, for other media, the template's reminder.
  void Content(const Json& content, const std::string& where) {
    if (content.is_null()) return;
    if (content.is_string()) return Text(content.get_ref<const std::string&>());
    if (!content.is_array()) {
      throw TemplateError(where + ": a text, a list of parts or null expected");
    }
    for (size_t i = 0; i < content.size(); ++i) Part(content[i], fmt::format("{}[{}]", where, i));
  }

  void Part(const Json& part, const std::string& where) {
    if (part.is_string()) return Text(part.get_ref<const std::string&>());
    if (!part.is_object() || !Member(part, "type").is_string()) {
      throw TemplateError(where + ": a text or an object with a type expected");
    }
    const auto& type = Member(part, "type").get_ref<const std::string&>();
    if (type == "text") {
      const Json& text = Member(part, "text");
      if (!text.is_string()) throw TemplateError(where + ".text: a text expected");
      return Text(text.get_ref<const std::string&>());
    }
    const char* kind = type == "image" || type == "image_url"                            ? "image"
                       : type == "video" || type == "video_url"                          ? "video"
                       : type == "audio" || type == "audio_url" || type == "input_audio" ? "audio"
                                                                                         : nullptr;
    if (kind == nullptr) return;
    Control("<reminder>You are unable to process this ");
    Control(kind);
    Control(" because you don't have multi-modal input ability. Try different methods.</reminder>");
  }

  // The content as one string, reminders included: an assistant's is taken apart further.
  std::string ContentText(const Json& content, const std::string& where) {
    std::vector<PromptPiece> before = std::exchange(pieces_, {});
    // Some of it may be left out of the prompt: what gets there is counted there.
    const size_t bytes_before = bytes_, limit = std::exchange(limits_.bytes, SIZE_MAX);
    Content(content, where);
    bytes_ = bytes_before;
    limits_.bytes = limit;
    return PiecesText(std::exchange(pieces_, std::move(before)));
  }

  void Assistant(size_t i) {
    const Json& message = messages_[i];
    const std::string whole = ContentText(Member(message, "content"), At(i) + ".content");
    std::string_view content = whole;
    std::string_view reasoning;
    const Json& field = Member(message, "reasoning_content");
    if (field.is_string()) {
      reasoning = field.get_ref<const std::string&>();
    } else if (!field.is_null()) {
      throw TemplateError(At(i) + ".reasoning_content: a text expected");
    } else if (const size_t close = content.find("</think>"); close != content.npos) {
      constexpr std::string_view kOpen = "<think>", kClose = "</think>";
      reasoning = content.substr(0, close);
      if (const size_t open = reasoning.rfind(kOpen); open != reasoning.npos) {
        reasoning.remove_prefix(open + kOpen.size());
      }
      content.remove_prefix(content.rfind(kClose) + kClose.size());
    }
    const bool kept = !arguments_.clear_thinking || !last_user_ || i > *last_user_;
    Control("<|assistant|><think>");
    if (kept) Text(reasoning);
    Control("</think>");
    content = StripLeft(content);
    const bool open = arguments_.continue_final_message && i + 1 == messages_.size();
    Text(open ? content : StripRight(content));
    ToolCalls(Member(message, "tool_calls"), At(i) + ".tool_calls");
  }

  void ToolCalls(const Json& calls, const std::string& where) {
    if (calls.is_null()) return;
    if (!calls.is_array()) throw TemplateError(where + ": a list expected");
    for (size_t i = 0; i < calls.size(); ++i) {
      const std::string at = fmt::format("{}[{}]", where, i);
      const Json& call = Unwrap(calls[i], at);
      const Json& name = Member(call, "name");
      if (!name.is_string()) throw TemplateError(at + ": a name expected");
      Control("<tool_call>");
      Text(name.get_ref<const std::string&>());
      Json parsed;
      const Json& arguments = Arguments(Member(call, "arguments"), at + ".arguments", &parsed);
      for (const auto& [key, value] : arguments.get_ref<const Json::object_t&>()) {
        Control("<arg_key>");
        Text(key);
        Control("</arg_key><arg_value>");
        Text(value.is_string() ? value.get_ref<const std::string&>()
                               : PythonJson(value, limits_.bytes));
        Control("</arg_value>");
      }
      Control("</tool_call>");
    }
  }

  // The template takes objects only; OpenAI's clients send the JSON text of one.
  // `*parsed` holds what is parsed.
  const Json& Arguments(const Json& given, const std::string& where, Json* parsed) const {
    bool left_out = false;
    if (given.is_string()) {
      try {
        *parsed = ParseJsonUpTo(given.get_ref<const std::string&>(), limits_.values, &left_out);
      } catch (const std::invalid_argument& error) {
        throw TemplateError(fmt::format("{}: {}", where, error.what()));
      }
    }
    if (left_out) throw TextTooLong();
    const Json& arguments = given.is_string() ? *parsed : given;
    if (!arguments.is_object()) {
      throw TemplateError(where + ": an object or the JSON text of one expected");
    }
    return arguments;
  }

  void ToolResult(const Json& content, const std::string& where) {
    size_t outputs = 0, references = 0;
    if (content.is_array()) {
      for (const Json& entry : content) {
        if (!entry.is_object()) continue;
        outputs += entry.contains("output") ? 1 : 0;
        references += Member(entry, "type") == "tool_reference" ? 1 : 0;
      }
      if (outputs + references != 0 && std::max(outputs, references) != content.size()) {
        throw TemplateError(where + ": outputs, tool references and other parts are mixed");
      }
    }
    if (references > 0) return References(content, where);
    if (outputs == 0) {
      Control("<tool_response>");
      Content(content, where);
      Control("</tool_response>");
      return;
    }
    for (size_t i = 0; i < content.size(); ++i) {
      const Json& output = Member(content[i], "output");
      if (!output.is_string()) {
        throw TemplateError(fmt::format("{}[{}].output: a text expected", where, i));
      }
      Control("<tool_response>");
      Text(output.get_ref<const std::string&>());
      Control("</tool_response>");
    }
  }

  // Tools that were found by searching: all of one list share a response.
  void References(const Json& list, const std::string& where) {
    Control("<tool_response><tools>\n");
    for (const Json& reference : list) {
      if (!Member(reference, "name").is_string()) throw TemplateError(where + ": a name expected");
      for (const Json& tool : tools_) {
        const Json& function = Unwrap(tool, "tools");
        if (Member(function, "name") == Member(reference, "name")) ToolLine(function);
      }
    }
    Control("</tools></tool_response>");
  }

  const Json& messages_;
  const Json& tools_;
  const TemplateArguments& arguments_;
  std::optional<size_t> last_user_;
  std::vector<PromptPiece> pieces_;
  RenderLimits limits_;
  size_t bytes_ = 0;  // of pieces_
};

bool BooleanArgument(const std::string& name, const Json& value) {
  if (!value.is_boolean()) {
    throw TemplateError(fmt::format("template argument {}: true or false expected", name));
  }
  return value.get<bool>();
}

}  // namespace

void ApplyTemplateArguments(const Json& arguments, TemplateArguments* into) {
  if (arguments.is_null()) return;
  if (!arguments.is_object()) throw TemplateError("template arguments: an object expected");
  for (const auto& [name, value] : arguments.get_ref<const Json::object_t&>()) {
    if (name == "enable_thinking") {
      // A text would be true to the template, "false" as well.
      if (!value.is_boolean() && !value.is_number() && !value.is_null()) {
        throw TemplateError("template argument enable_thinking: true or false expected");
      }
      into->enable_thinking = Truthy(value);
    } else if (name == "reasoning_effort") {
      if (!value.is_string() && !value.is_null()) {
        throw TemplateError("template argument reasoning_effort: a text expected");
      }
      into->reasoning_effort = value.is_null() ? "max" : value.get<std::string>();
    } else if (name == "clear_thinking") {
      into->clear_thinking = BooleanArgument(name, value);
    } else if (name == "add_generation_prompt") {
      into->add_generation_prompt = BooleanArgument(name, value);
    } else if (name == "continue_final_message") {
      into->continue_final_message = BooleanArgument(name, value);
    } else {
      throw TemplateError(
          fmt::format("template argument {} is unknown; known are enable_thinking, "
                      "reasoning_effort, clear_thinking, add_generation_prompt and "
                      "continue_final_message",
                      name));
    }
  }
}

std::vector<PromptPiece> RenderChat(const Json& messages, const Json& tools,
                                    const TemplateArguments& arguments,
                                    const RenderLimits& limits) {
  return ChatRenderer(messages, tools, arguments, limits).Run();
}

std::string PiecesText(const std::vector<PromptPiece>& pieces) {
  std::string text;
  for (const PromptPiece& piece : pieces) text += piece.text;
  return text;
}

std::optional<std::vector<int32_t>> EncodePieces(const Tokenizer& tokenizer,
                                                 const std::vector<PromptPiece>& pieces,
                                                 bool parse_special, size_t most) {
  const AddedTokens added = parse_special ? AddedTokens::kRecognise : AddedTokens::kPlain;
  std::vector<int32_t> ids;
  std::string ordinary;
  bool fits = true;
  const auto flush = [&] {
    const auto encoded = tokenizer.EncodeUpTo(ordinary, added, most - ids.size());
    fits = encoded.has_value();
    if (fits) ids.insert(ids.end(), encoded->begin(), encoded->end());
    ordinary.clear();
  };
  for (const PromptPiece& piece : pieces) {
    if (!piece.control) {
      ordinary += piece.text;
      continue;
    }
    for (const TextPart& part : tokenizer.SplitAdded(piece.text)) {
      if (part.id < 0) {
        ordinary += part.text;
        continue;
      }
      flush();
      if (!fits || ids.size() == most) return {};
      ids.push_back(part.id);
    }
  }
  flush();
  if (!fits) return {};
  return ids;
}

}  // namespace colibri
