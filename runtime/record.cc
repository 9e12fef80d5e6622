#include "runtime/record.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "runtime/line_limits.h"
#include "runtime/text_assembler.h"
#include "runtime/text_hash.h"
#include "runtime/tokenizer.h"
#include "runtime/tool_calls.h"
#include "runtime/utf8.h"

namespace colibri {
namespace {

using Json = nlohmann::ordered_json;

// Text is valid UTF-8 by now; should some of it not be, the record still is.
std::string Text(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// An object's text without its closing brace: what follows is written behind it, since log
// probabilities as values would take five times their text.
std::string OpenText(const Json& object) {
  std::string text = Text(object);
  text.pop_back();
  return text;
}

// The shortest decimal that reads back as the same float, instead of a double's 17 digits.
Json Number(float value) {
  if (!std::isfinite(value)) return nullptr;
  return std::strtod(fmt::format("{}", value).c_str(), nullptr);
}
Json Number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

// 16 hex digits from texts; each goes in with its length, so that no two lists give the same bytes.
std::string HashHex(std::initializer_list<std::string_view> texts) {
  std::string bytes;
  for (const std::string_view text : texts) {
    bytes += fmt::format("{}:", text.size());
    bytes += text;
  }
  return HexOf(HashText(bytes));
}

std::string TokenText(const Tokenizer& tokenizer, int32_t id) {
  const std::string_view bytes = tokenizer.Bytes(id);
  if (ValidPrefix(bytes) == bytes.size()) return std::string(bytes);
  std::string text = "bytes:";
  for (const char c : bytes) text += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
  return text;
}

Json ChatToken(const Tokenizer& tokenizer, int32_t id, float logprob) {
  Json bytes = Json::array();
  for (const char c : tokenizer.Bytes(id)) bytes.push_back(static_cast<unsigned char>(c));
  return {{"token", TokenText(tokenizer, id)},
          {"logprob", Number(logprob)},
          {"bytes", std::move(bytes)}};
}

void AppendChatLogprobs(const Tokenizer& tokenizer, const Choice& choice, std::string* out) {
  *out += "{\"content\":[";
  for (size_t i = 0; i < choice.logprobs.size(); ++i) {
    const LogprobList::Token token = choice.logprobs[i];
    Json entry = ChatToken(tokenizer, token.id, token.logprob);
    Json top = Json::array();
    for (const auto& [id, logprob] : token.top) top.push_back(ChatToken(tokenizer, id, logprob));
    entry["top_logprobs"] = std::move(top);
    if (i > 0) *out += ',';
    *out += Text(entry);
  }
  *out += "]}";
}

size_t CountCharacters(std::string_view utf8) {
  size_t count = 0;
  for (const char c : utf8) count += (static_cast<unsigned char>(c) & 0xC0) != 0x80 ? 1 : 0;
  return count;
}

// `"name":[...]` with a value for each token.
template <typename Value>
void AppendList(const char* name, const LogprobList& tokens, const Value& value, std::string* out) {
  *out += fmt::format("\"{}\":[", name);
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i > 0) *out += ',';
    *out += Text(value(tokens[i]));
  }
  *out += ']';
}

// text_offset: characters of the choice's text before the token; tokens cut off by a stop string
// stand at its end.
void AppendCompletionLogprobs(const Tokenizer& tokenizer, const Request& request,
                              const Choice& choice, std::string_view text, std::string* out) {
  using Token = LogprobList::Token;
  const LogprobList& tokens = choice.logprobs;
  *out += '{';
  AppendList(
      "tokens", tokens, [&](const Token& t) { return Json(TokenText(tokenizer, t.id)); }, out);
  *out += ',';
  AppendList(
      "token_logprobs", tokens, [](const Token& t) { return Number(t.logprob); }, out);
  *out += ',';
  if (request.top_logprobs > 0) {
    const auto best_of = [&](const Token& t) {
      Json best = Json::object();
      for (const auto& [id, logprob] : t.top) best[TokenText(tokenizer, id)] = Number(logprob);
      return best;
    };
    AppendList("top_logprobs", tokens, best_of, out);
  } else {
    *out += "\"top_logprobs\":null";
  }
  *out += ',';
  const size_t end = CountCharacters(text);
  std::string unfinished;
  size_t offset = 0;
  const auto next_offset = [&](const Token& t) {
    const size_t here = std::min(offset, end);
    if (!tokenizer.IsSpecial(t.id)) {
      std::string characters;
      unfinished += tokenizer.Bytes(t.id);
      unfinished.erase(0, AppendRepaired(unfinished, &characters));
      offset += CountCharacters(characters);
    }
    return Json(here);
  };
  AppendList("text_offset", tokens, next_offset, out);
  *out += '}';
}

Json FinishReason(const Choice& choice, bool calls) {
  switch (choice.cause) {
    case StopCause::kNone:
      return nullptr;
    case StopCause::kStopToken:
    case StopCause::kStopString:
      return calls ? "tool_calls" : "stop";
    case StopCause::kLength:
    case StopCause::kDegenerate:
      return "length";
  }
  return nullptr;
}

Json Message(const Request& request, const Choice& choice, const ChoiceText& text,
             const ParsedContent& parsed) {
  Json message;
  message["role"] = "assistant";
  message["content"] =
      parsed.text.empty() && !parsed.calls.empty() ? Json(nullptr) : Json(parsed.text);
  message["reasoning_content"] = request.starts_in_reasoning ? Json(text.reasoning) : Json(nullptr);
  if (parsed.calls.empty()) return message;
  Json calls = Json::array();
  for (const ToolCall& call : parsed.calls) {
    const std::string id = HashHex(
        {request.custom_id, fmt::format("{}", choice.index), fmt::format("{}", calls.size())});
    calls.push_back({{"id", "call_" + id},
                     {"type", "function"},
                     {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
  }
  message["tool_calls"] = std::move(calls);
  return message;
}

struct BuiltChoices {
  Json causes = Json::array(), matched = Json::array(), warnings = Json::array();
  int64_t tokens = 0, reasoning_tokens = 0;
  int32_t calling = 0;
};

void AddChoice(const Request& request, const Choice& choice, const Tokenizer& tokenizer,
               BuiltChoices* out, std::string* record) {
  const ChoiceText text = TextOf(request, choice, tokenizer);
  out->tokens += static_cast<int64_t>(choice.tokens.size());
  out->reasoning_tokens += text.reasoning_tokens;
  out->causes.push_back(StopCauseName(choice.cause));
  out->matched.push_back(choice.cause == StopCause::kStopString ? Json(choice.matched_stop)
                                                                : Json(nullptr));
  Json entry;
  entry["index"] = choice.index;
  bool calls = false;
  if (request.chat) {
    ParsedContent parsed;
    if (request.has_tools) {
      parsed = ParseToolCalls(text.content, request.string_arguments);
    } else {
      parsed.text = text.content;
    }
    calls = !parsed.calls.empty();
    if (parsed.malformed) {
      out->warnings.push_back(
          fmt::format("choice {}: a tool call could not be read and stays text", choice.index));
    }
    entry["message"] = Message(request, choice, text, parsed);
  } else {
    entry["text"] = text.content;
  }
  if (text.ended_in_reasoning) {
    out->warnings.push_back(fmt::format("choice {}: ended inside its reasoning", choice.index));
  }
  *record += OpenText(entry) + ",\"logprobs\":";
  if (!request.logprobs) {
    *record += "null";
  } else if (request.chat) {
    AppendChatLogprobs(tokenizer, choice, record);
  } else {
    AppendCompletionLogprobs(tokenizer, request, choice, text.content, record);
  }
  const Json reason = FinishReason(choice, calls);
  if (reason == "tool_calls") ++out->calling;
  *record += ",\"finish_reason\":" + Text(reason) + "}";
}

// As many as there were positions.
Json AcceptedByPosition(const DraftCounts& drafts) {
  Json list = Json::array();
  for (size_t i = 0; i < kMaxDrafts && drafts.offered[i] > 0; ++i) {
    list.push_back(drafts.accepted[i]);
  }
  return list;
}

Json Figures(const Request& request, const LineFigures& figures, const RecordContext& context,
             BuiltChoices* built) {
  return {{"stop_causes", std::move(built->causes)},
          {"matched_stops", std::move(built->matched)},
          {"thinking", request.thinking},
          {"effort", request.effort},
          {"seconds_to_first_token", Number(figures.seconds_to_first_token)},
          {"tokens_per_second", Number(figures.tokens_per_second)},
          {"bytes_read", figures.bytes_read},
          {"hit_rate", Number(figures.hit_rate)},
          {"drafts_offered", figures.drafts.Offered()},
          {"drafts_accepted", figures.drafts.Accepted()},
          {"drafts_accepted_by_position", AcceptedByPosition(figures.drafts)},
          {"draft_bytes_read", figures.draft_bytes},
          {"cached_tokens", figures.cached_tokens},
          {"warnings", std::move(built->warnings)},
          {"simd", context.simd_target},
          {"engine", context.engine_version}};
}

}  // namespace

ChoiceText TextOf(const Request& request, const Choice& choice, const Tokenizer& tokenizer) {
  TextAssembler assembler(tokenizer, request);
  const size_t count =
      choice.tokens.size() - (choice.cause == StopCause::kStopToken && !choice.tokens.empty());
  for (size_t i = 0; i < count; ++i) assembler.Push(choice.tokens[i]);
  assembler.Finish();
  return {assembler.Content(), assembler.Reasoning(), assembler.InReasoning(),
          assembler.ReasoningTokens()};
}

const char* StopCauseName(StopCause cause) {
  switch (cause) {
    case StopCause::kNone:
      return "none";
    case StopCause::kStopToken:
      return "stop_token";
    case StopCause::kStopString:
      return "stop_string";
    case StopCause::kLength:
      return "length";
    case StopCause::kDegenerate:
      return "degenerate";
  }
  return "none";
}

std::string BuildRecord(const Request& request, std::span<const Choice> choices,
                        const LineFigures& figures, const RecordContext& context,
                        RecordTotals* totals) {
  BuiltChoices built;
  for (const std::string& warning : request.warnings) built.warnings.push_back(warning);
  const int64_t prompt = static_cast<int64_t>(request.prompt.size());
  const std::string id = HashHex({context.run_id, request.custom_id});
  std::string record;
  // Growing would hold the log probabilities twice.
  uint64_t logprobs = 0;
  for (const Choice& choice : choices) logprobs += choice.logprobs.Entries();
  if (logprobs > 0) record.reserve((size_t{64} << 10) + logprobs * kLogprobTextBytes);
  record += OpenText({{"id", "batch_req_" + id},
                      {"custom_id", request.custom_id},
                      {"line", request.line},
                      {"line_hash", HexOf(request.line_hash)}});
  record += ",\"response\":" + OpenText({{"status_code", 200}, {"request_id", "req_" + id}});
  record +=
      ",\"body\":" + OpenText({{"id", (request.chat ? "chatcmpl-" : "cmpl-") + id},
                               {"object", request.chat ? "chat.completion" : "text_completion"},
                               {"created", context.created},
                               {"model", context.model}});
  record += ",\"choices\":[";
  for (size_t i = 0; i < choices.size(); ++i) {
    if (i > 0) record += ',';
    AddChoice(request, choices[i], *context.tokenizer, &built, &record);
  }
  if (totals != nullptr) *totals = {built.reasoning_tokens, built.calling};
  record += "],\"usage\":" + Text({{"prompt_tokens", prompt},
                                   {"completion_tokens", built.tokens},
                                   {"total_tokens", prompt + built.tokens},
                                   {"reasoning_tokens", built.reasoning_tokens}});
  record +=
      "}},\"error\":null,\"x_colibri\":" + Text(Figures(request, figures, context, &built)) + "}\n";
  return record;
}

std::string BuildErrorRecord(uint64_t line, const std::string& custom_id, const LineError& error,
                             const RecordContext& context, uint64_t line_hash) {
  // A line without an id is known by its number.
  const std::string id = custom_id.empty()
                             ? HashHex({context.run_id, "line", fmt::format("{}", line)})
                             : HashHex({context.run_id, custom_id, fmt::format("{}", line)});
  const Json param = error.param.empty() ? Json(nullptr) : Json(error.param);
  const Json body = {{"error",
                      {{"message", error.message},
                       {"type", error.status >= 500 ? "server_error" : "invalid_request_error"},
                       {"param", param},
                       {"code", error.code}}}};
  return Text(
             {{"id", "batch_req_" + id},
              {"custom_id", custom_id.empty() ? Json(nullptr) : Json(custom_id)},
              {"line", line},
              {"line_hash", HexOf(line_hash)},
              {"response",
               {{"status_code", error.status}, {"request_id", "req_" + id}, {"body", body}}},
              {"error", {{"code", error.code}, {"message", error.message}}},
              {"x_colibri", {{"simd", context.simd_target}, {"engine", context.engine_version}}}}) +
         "\n";
}

std::string LineBytes(const std::string& record) {
  const Json all = Json::parse(record);
  const Json& response = all.at("response");
  Json bytes;
  bytes["custom_id"] = all.at("custom_id");
  bytes["status"] = response.at("status_code");
  const Json& body = response.at("body");
  if (body.contains("choices")) bytes["choices"] = body["choices"];
  if (body.contains("usage")) bytes["usage"] = body["usage"];
  return bytes.dump();
}

}  // namespace colibri
