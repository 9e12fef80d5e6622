#include "runtime/request_parser.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include "io/error.h"
#include "runtime/chat_messages.h"
#include "runtime/chat_template.h"
#include "runtime/field_values.h"
#include "runtime/json_text.h"
#include "runtime/line_id.h"
#include "runtime/line_limits.h"
#include "runtime/text_hash.h"
#include "runtime/tokenizer.h"
#include "runtime/tool_calls.h"
#include "runtime/utf8.h"

namespace colibri {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kChatUrl = "/v1/chat/completions";
constexpr std::string_view kCompletionUrl = "/v1/completions";
constexpr std::string_view kPrefix = "[gMASK]<sop>";

const char* TypeName(const Json& value) {
  return IsBigInteger(value) ? "number" : value.type_name();
}

enum class Where : uint8_t { kBoth, kChat, kText };

// A field that changes nothing at one value, or, of those meant for a service, at any.
struct Neutral {
  const char* field;
  Where where;
  Json value;             // null: any
  const char* otherwise;  // why no other value is taken
};

// True: `field` is one of them. At a value that would change something it is refused.
bool IsNeutral(const std::string& field, const Json& value, bool chat, bool has_tools) {
  using enum Where;
  static const std::vector<Neutral> kFields = {
      {"user", kBoth, nullptr, ""},
      {"safety_identifier", kBoth, nullptr, ""},
      {"metadata", kBoth, nullptr, ""},
      {"store", kBoth, nullptr, ""},
      {"service_tier", kBoth, nullptr, ""},
      {"prompt_cache_key", kBoth, nullptr, ""},
      {"prompt_cache_retention", kBoth, nullptr, ""},
      {"parallel_tool_calls", kChat, nullptr, ""},
      {"stream", kBoth, false, "a batch line is answered as a whole: only false is supported"},
      {"presence_penalty", kBoth, 0, "penalties are not supported: only 0 is"},
      {"frequency_penalty", kBoth, 0, "penalties are not supported: only 0 is"},
      {"repetition_penalty", kBoth, 1, "penalties are not supported: only 1 is"},
      {"logit_bias", kBoth, Json::object(), "biases are not supported: only {} is"},
      {"response_format", kBoth, Json({{"type", "text"}}),
       "only {\"type\": \"text\"} is supported"},
      {"tool_choice", kChat, "auto", "the model chooses: only \"auto\" is supported"},
      {"modalities", kChat, Json::array({"text"}), "only [\"text\"] is supported"},
      {"verbosity", kChat, "medium", "only \"medium\" is supported"},
      {"echo", kText, false, "only false is supported"},
      {"best_of", kText, 1, "only 1 is supported"}};
  if (chat && field == "tool_choice" && value == "none" && !has_tools) return true;
  for (const Neutral& neutral : kFields) {
    if (field != neutral.field || neutral.where == (chat ? kText : kChat)) continue;
    if (neutral.value.is_null() || value == neutral.value) return true;
    BadValue(field, value, neutral.otherwise);
  }
  return false;
}

// Reads one body into one Request.
class BodyReader {
 public:
  BodyReader(const Tokenizer& tokenizer, int32_t vocab, int32_t context,
             const RequestDefaults& defaults)
      : tokenizer_(tokenizer), vocab_(vocab), context_(context), defaults_(defaults) {
    arguments_.enable_thinking = defaults.thinking;
    arguments_.reasoning_effort = defaults.effort;
    request_.sampling = defaults.sampling;
    request_.max_tokens = defaults.max_tokens;
    request_.stop = defaults.stop;
    request_.loop_stop = defaults.loop_stop;
  }

  // Takes the messages out of `body`.
  Request Read(Json& body, bool chat) {
    request_.chat = chat;
    const auto tools = body.find("tools");
    request_.has_tools = chat && tools != body.end() && tools->is_array() && !tools->empty();
    for (const auto& [field, value] : body.items()) {
      if (value.is_null() || field == "model") continue;
      if (!CommonField(field, value) &&
          !(chat ? ChatField(field, value) : TextField(field, value)) &&
          !IsNeutral(field, value, chat, request_.has_tools)) {
        throw LineRefusal("unknown_field", field,
                          fmt::format("\"{}\" is not a field of {} that is known here", field,
                                      chat ? kChatUrl : kCompletionUrl));
      }
    }
    if (chat) {
      FinishChat(body);
    } else {
      FinishCompletion(body);
    }
    return std::move(request_);
  }

  Request ReadText(std::string_view prompt) {
    if (defaults_.raw) {
      request_.chat = false;
      CompletionText(prompt);
    } else {
      Json message = {{"role", "user"}};
      message["content"] = std::string(prompt);
      Json messages = Json::array();
      messages.push_back(std::move(message));
      Render(messages, Json());
    }
    if (defaults_.keep_prompt_text) request_.prompt_text = std::string(prompt);
    return std::move(request_);
  }

 private:
  bool CommonField(const std::string& field, const Json& value) {
    constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
    Sampling& sampling = request_.sampling;
    if (field == "temperature") {
      sampling.temperature = FloatField(field, value, 0, 2, false);
    } else if (field == "top_p") {
      sampling.top_p = FloatField(field, value, 0, 1, true);
    } else if (field == "min_p") {
      sampling.min_p = FloatField(field, value, 0, 1, false);
    } else if (field == "top_k") {
      sampling.top_k =
          static_cast<int32_t>(std::max<int64_t>(IntField(field, value, -1, kMaxInt), 0));
    } else if (field == "seed") {
      // Negative seeds are seeds of their own, as clients that hold them in int64 mean them.
      if (!value.is_number_integer()) BadValue(field, value, "an integer of 64 bits is expected");
      sampling.seed = value.is_number_unsigned() ? value.get<uint64_t>()
                                                 : static_cast<uint64_t>(value.get<int64_t>());
    } else if (field == "stop") {
      request_.stop = StopField(value);
    } else if (field == "n") {
      request_.choices = static_cast<int32_t>(IntField(field, value, 1, 128));
    } else if (field == "max_tokens" || (request_.chat && field == "max_completion_tokens")) {
      const auto tokens = static_cast<int32_t>(IntField(field, value, 1, kMaxInt));
      if (max_tokens_said_ && tokens != request_.max_tokens) {
        BadValue(field, value, "max_tokens and max_completion_tokens differ");
      }
      request_.max_tokens = tokens;
      max_tokens_said_ = true;
    } else {
      return false;
    }
    return true;
  }

  bool ChatField(const std::string& field, const Json& value) {
    if (field == "messages" || field == "tools") return true;  // FinishChat
    if (field == "logprobs") {
      request_.logprobs = BoolField(field, value);
    } else if (field == "top_logprobs") {
      request_.top_logprobs = static_cast<int32_t>(IntField(field, value, 0, 20));
    } else if (field == "reasoning_effort") {
      SetEffort(field, EffortField(field, value));
    } else if (field == "chat_template_kwargs") {
      TemplateKwargs(value);
    } else if (field == "add_generation_prompt") {
      generation_prompt_ = BoolField(field, value);
    } else if (field == "continue_final_message") {
      continue_ = BoolField(field, value);
    } else {
      return false;
    }
    return true;
  }

  bool TextField(const std::string& field, const Json& value) {
    if (field == "prompt") return true;  // FinishCompletion
    if (field != "logprobs") return false;
    request_.top_logprobs = static_cast<int32_t>(IntField(field, value, 0, 5));
    request_.logprobs = true;
    return true;
  }

  void SetEffort(const std::string& field, const std::string& effort) {
    if (!effort_.empty() && effort_ != effort) {
      throw LineRefusal(
          "unsupported_value", field,
          fmt::format("reasoning_effort is given twice, as {} and {}", effort_, effort));
    }
    effort_ = effort;
  }

  void TemplateKwargs(const Json& value) {
    if (!value.is_object()) BadValue("chat_template_kwargs", value, "an object is expected");
    Json others = Json::object();
    for (const auto& [name, argument] : value.items()) {
      if (name == "reasoning_effort") {
        if (argument.is_null()) continue;
        const std::string field = "chat_template_kwargs.reasoning_effort";
        SetEffort(field, EffortField(field, argument));
      } else if (name == "add_generation_prompt") {
        if (!argument.is_null()) generation_prompt_ = BoolField(name, argument);
      } else if (name == "continue_final_message") {
        if (!argument.is_null()) continue_ = BoolField(name, argument);
      } else {
        // The template would take null for false; in a request it means that nothing was said.
        if (argument.is_null() && (name == "enable_thinking" || name == "clear_thinking")) continue;
        thinking_said_ = thinking_said_ || name == "enable_thinking";
        others[name] = argument;
      }
    }
    try {
      ApplyTemplateArguments(others, &arguments_);
    } catch (const TemplateError& error) {
      throw LineRefusal("unsupported_value", "chat_template_kwargs", error.what());
    }
  }

  void FinishChat(Json& body) {
    if (request_.top_logprobs > 0 && !request_.logprobs) {
      throw LineRefusal("unsupported_value", "top_logprobs", "top_logprobs needs logprobs: true");
    }
    if (!effort_.empty()) {
      const bool thinks = effort_ != "none";
      if (thinking_said_ && thinks != arguments_.enable_thinking) {
        throw LineRefusal("unsupported_value", "reasoning_effort",
                          fmt::format("reasoning_effort {} contradicts enable_thinking {}", effort_,
                                      arguments_.enable_thinking));
      }
      arguments_.enable_thinking = thinks;
      if (thinks) arguments_.reasoning_effort = effort_;
    }
    const auto found = body.find("messages");
    const Json none;
    // Moved, as they may be nearly all of a line.
    const Json messages = CheckedMessages(found == body.end() ? Json() : std::move(*found));
    request_.warnings = MediaWarnings(messages);
    if (continue_) {
      if (generation_prompt_.value_or(false)) {
        throw LineRefusal("unsupported_value", "continue_final_message",
                          "continue_final_message contradicts add_generation_prompt");
      }
    }
    arguments_.continue_final_message = continue_;
    arguments_.add_generation_prompt = generation_prompt_.value_or(!continue_);
    const auto tools = body.find("tools");
    if (tools != body.end() && !tools->is_null()) {
      CheckTools(*tools);
    }
    Render(messages, request_.has_tools ? *tools : none);
    // After it: the tools are now known to be no longer than a prompt.
    if (request_.has_tools) request_.string_arguments = StringArguments(*tools);
    if (defaults_.keep_prompt_text) request_.prompt_text = LastUserText(messages);
  }

  void Render(const Json& messages, const Json& tools) {
    const auto most = static_cast<size_t>(context_);
    try {
      auto ids =
          EncodePieces(tokenizer_,
                       RenderChat(messages, tools, arguments_,
                                  {std::min(tokenizer_.MostBytes(most), MaxLineBytes(context_)),
                                   MaxLineValues(context_)}),
                       defaults_.parse_special, most);
      if (!ids) PromptTooLong();
      request_.prompt = std::move(*ids);
    } catch (const TextTooLong&) {
      PromptTooLong();
    } catch (const TemplateError& error) {
      throw LineRefusal("invalid_request", "messages", error.what());
    }
    request_.thinking = arguments_.enable_thinking;
    request_.effort = request_.thinking ? arguments_.reasoning_effort : "none";
    // Users' spellings of the marks are plain text, so these ids are the template's own.
    const int32_t begin = tokenizer_.Find("<think>"), end = tokenizer_.Find("</think>");
    const auto last = std::find_if(request_.prompt.rbegin(), request_.prompt.rend(),
                                   [&](int32_t id) { return id == begin || id == end; });
    request_.starts_in_reasoning = begin >= 0 && last != request_.prompt.rend() && *last == begin;
  }

  void FinishCompletion(const Json& body) {
    const auto found = body.find("prompt");
    if (found == body.end() || found->is_null()) {
      BadNeed("prompt", body, "a string or an array of ids");
    }
    const Json* prompt = &*found;
    // A list of prompts that holds one is that one.
    if (prompt->is_array() && prompt->size() == 1 &&
        (prompt->front().is_string() || prompt->front().is_array())) {
      prompt = &prompt->front();
    }
    if (prompt->is_string()) {
      CompletionText(prompt->get_ref<const std::string&>());
      if (defaults_.keep_prompt_text) request_.prompt_text = prompt->get<std::string>();
      return;
    }
    if (!prompt->is_array()) BadValue("prompt", *prompt, "a string or an array of ids is expected");
    if (prompt->empty()) throw LineRefusal("invalid_request", "prompt", "the prompt is empty");
    request_.prompt.reserve(prompt->size());
    for (const Json& entry : *prompt) {
      if (entry.is_string() || entry.is_array()) {
        throw LineRefusal("unsupported_value", "prompt",
                          "several prompts in one line are not supported: give each its own line");
      }
      const auto id = static_cast<int32_t>(IntField("prompt", entry, 0, int64_t{vocab_} - 1));
      if (!tokenizer_.Has(id)) BadValue("prompt", entry, "the tokenizer has no such id");
      request_.prompt.push_back(id);
    }
    if (defaults_.keep_prompt_text) {
      request_.prompt_text = tokenizer_.Decode(request_.prompt, SpecialTokens::kKeep);
    }
  }

  [[noreturn]] void PromptTooLong() const {
    LineError error =
        ContextError(fmt::format("more than {}", context_), request_.max_tokens, context_);
    throw LineRefusal(std::move(error.code), "", std::move(error.message));
  }

  // The model's prefix once, also when the text spells it itself.
  void CompletionText(std::string_view text) {
    if (text.starts_with(kPrefix)) text.remove_prefix(kPrefix.size());
    if (text.empty()) throw LineRefusal("invalid_request", "prompt", "the prompt is empty");
    request_.prompt = {tokenizer_.Find("[gMASK]"), tokenizer_.Find("<sop>")};
    const auto ids = tokenizer_.EncodeUpTo(
        text, defaults_.parse_special ? AddedTokens::kRecognise : AddedTokens::kPlain,
        static_cast<size_t>(std::max(context_ - 2, 0)));
    if (!ids) PromptTooLong();
    request_.prompt.insert(request_.prompt.end(), ids->begin(), ids->end());
    request_.effort = "none";
  }

  const Tokenizer& tokenizer_;
  int32_t vocab_, context_;
  const RequestDefaults& defaults_;
  Request request_;
  TemplateArguments arguments_;
  std::string effort_;  // as the line says it; "": it does not
  bool thinking_said_ = false, max_tokens_said_ = false, continue_ = false;
  std::optional<bool> generation_prompt_;
};

// The envelope's url, or what the body looks like without one. True: chat.
bool IsChat(const Json& root, const Json& body) {
  const auto url = root.find("url");
  if (url == root.end() || url->is_null()) return body.contains("messages");
  const std::string text = StringField("url", *url);
  if (text == kChatUrl) return true;
  if (text == kCompletionUrl) return false;
  BadValue("url", *url, fmt::format("{} and {} are served", kChatUrl, kCompletionUrl));
}

void CheckEnvelope(const Json& root) {
  for (const auto& [field, value] : root.items()) {
    if (field == "method") {
      if (!value.is_null() && value != "POST") BadValue(field, value, "only POST is served");
    } else if (field != "custom_id" && field != "url" && field != "body" && !value.is_null()) {
      throw LineRefusal("unknown_field", field,
                        fmt::format("\"{}\" is not a field of a batch line: custom_id, method, url "
                                    "and body are",
                                    field));
    }
  }
}

}  // namespace

RequestParser::RequestParser(const Tokenizer& tokenizer, int32_t vocab, int32_t context,
                             RequestDefaults defaults)
    : tokenizer_(&tokenizer), vocab_(vocab), context_(context), defaults_(std::move(defaults)) {
  for (const char* token : {"[gMASK]", "<sop>"}) {
    if (tokenizer.Find(token) < 0) {
      throw ModelError(
          fmt::format("the tokenizer has no {}, with which every prompt begins", token));
    }
  }
}

ParsedLine RequestParser::Parse(std::string_view line, uint64_t number) {
  ParsedLine out;
  out.line = number;
  out.line_hash = HashText(line);
  try {
    Json root;
    bool left_out = false;
    try {
      root = ParseJsonUpTo(line, MaxLineValues(context_), &left_out);
    } catch (const std::invalid_argument& error) {
      throw LineRefusal("invalid_json", "",
                        fmt::format("the line is no valid JSON object: {}", error.what()));
    }
    if (!root.is_object()) {
      throw LineRefusal(
          "invalid_request", "",
          fmt::format("the line is a JSON {}, an object is expected", TypeName(root)));
    }
    out.custom_id = CustomIdOf(root);
    if (out.custom_id.empty()) {
      BadNeed("custom_id", root,
              fmt::format("a string that is not empty and has at most {} bytes", kMaxIdBytes));
    }
    if (!ids_.Insert(out.custom_id)) {
      throw LineRefusal("duplicate_custom_id", "custom_id",
                        "an earlier line has the same custom_id, " + ShownJson(out.custom_id));
    }
    if (left_out) {
      throw LineRefusal("context_length_exceeded", "",
                        fmt::format("the line has more than {} JSON values, the most for a context "
                                    "of {} tokens: --ctx-size raises it",
                                    MaxLineValues(context_), context_));
    }
    CheckEnvelope(root);
    const auto body = root.find("body");
    if (body == root.end() || !body->is_object()) {
      BadNeed("body", root, "an object");
    }
    const auto model = body->find("model");
    if (model != body->end() && !model->is_null()) out.model = StringField("model", *model);
    out.request =
        BodyReader(*tokenizer_, vocab_, context_, defaults_).Read(*body, IsChat(root, *body));
    out.request->line = number;
    out.request->line_hash = out.line_hash;
    out.request->custom_id = out.custom_id;
  } catch (const LineRefusal& refusal) {
    out.error = refusal.error;
  }
  return out;
}

ParsedLine RequestParser::ParseText(std::string_view prompt, uint64_t number) {
  ParsedLine out;
  out.line = number;
  out.line_hash = HashText(prompt);
  out.custom_id = fmt::format("line-{}", number);
  try {
    if (prompt.empty()) throw LineRefusal("invalid_request", "", "the prompt is empty");
    if (const size_t zero = prompt.find('\0'); zero != std::string_view::npos) {
      throw LineRefusal("invalid_request", "", fmt::format("a zero byte at byte {}", zero + 1));
    }
    if (const size_t broken = ValidPrefix(prompt); broken != prompt.size()) {
      throw LineRefusal("invalid_request", "",
                        fmt::format("broken UTF-8 at byte {} (0x{:02x})", broken + 1,
                                    static_cast<unsigned char>(prompt[broken])));
    }
    out.request = BodyReader(*tokenizer_, vocab_, context_, defaults_).ReadText(prompt);
    out.request->line = number;
    out.request->line_hash = out.line_hash;
    out.request->custom_id = out.custom_id;
  } catch (const LineRefusal& refusal) {
    out.error = refusal.error;
  }
  return out;
}

}  // namespace colibri
