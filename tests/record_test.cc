#include "runtime/record.h"

#include <doctest/doctest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "runtime/tokenizer.h"
#include "runtime/tool_calls.h"
#include "tests/fixture_tokenizer.h"

using colibri::AddedTokens;
using colibri::BuildErrorRecord;
using colibri::BuildRecord;
using colibri::Choice;
using colibri::LineBytes;
using colibri::LineError;
using colibri::LineFigures;
using colibri::ParseToolCalls;
using colibri::RecordContext;
using colibri::Request;
using colibri::StopCause;
using colibri::Tok;
using colibri::Tokenizer;
using Json = nlohmann::ordered_json;

namespace {

RecordContext Context() {
  RecordContext context;
  context.tokenizer = &Tok();
  context.model = "glm-test";
  context.run_id = "run-1";
  context.created = 1700000000;
  context.simd_target = "AVX2";
  context.engine_version = "0.1.0";
  return context;
}

Request ChatRequest() {
  Request request;
  request.line = 7;
  request.line_hash = 0xab;
  request.custom_id = "q-7";
  request.prompt = {1, 2, 3};
  request.effort = "none";
  return request;
}

Choice MakeChoice(const std::string& text, StopCause cause) {
  Choice choice;
  choice.tokens = Tok().Encode(text, AddedTokens::kRecognise);
  choice.cause = cause;
  if (cause == StopCause::kStopToken) choice.tokens.push_back(Tok().Find("<|user|>"));
  return choice;
}

Json Parse(const std::string& record) {
  REQUIRE(record.back() == '\n');
  REQUIRE(record.find('\n') == record.size() - 1);
  return Json::parse(record);
}

Json Record(const Request& request, const std::vector<Choice>& choices) {
  return Parse(BuildRecord(request, choices, LineFigures{}, Context()));
}

std::vector<std::string> Keys(const Json& object) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : object.items()) keys.push_back(key);
  return keys;
}

using Words = std::vector<std::string>;

}  // namespace

TEST_CASE("a record has OpenAI's batch shape, its keys in a fixed order") {
  const Json record = Record(ChatRequest(), {MakeChoice("Hello.", StopCause::kStopToken)});
  CHECK(Keys(record) ==
        Words{"id", "custom_id", "line", "line_hash", "response", "error", "x_colibri"});
  CHECK(Keys(record["response"]) == Words{"status_code", "request_id", "body"});
  const Json& body = record["response"]["body"];
  CHECK(Keys(body) == Words{"id", "object", "created", "model", "choices", "usage"});
  CHECK(Keys(body["choices"][0]) == Words{"index", "message", "logprobs", "finish_reason"});
  CHECK(Keys(body["choices"][0]["message"]) == Words{"role", "content", "reasoning_content"});
  CHECK(Keys(body["usage"]) ==
        Words{"prompt_tokens", "completion_tokens", "total_tokens", "reasoning_tokens"});
  CHECK(record["custom_id"] == "q-7");
  CHECK(record["line"] == 7);
  CHECK(record["line_hash"] == "00000000000000ab");
  CHECK(record["error"].is_null());
  CHECK(record["response"]["status_code"] == 200);
  CHECK(body["object"] == "chat.completion");
  CHECK(body["created"] == 1700000000);
  CHECK(body["model"] == "glm-test");
  CHECK(body["choices"][0]["message"]["role"] == "assistant");
  CHECK(body["choices"][0]["message"]["content"] == "Hello.");
  CHECK(body["choices"][0]["message"]["reasoning_content"].is_null());
  CHECK(body["choices"][0]["logprobs"].is_null());
  CHECK(body["choices"][0]["finish_reason"] == "stop");
}

TEST_CASE("usage counts end tokens and sums over the choices") {
  const Choice stopped = MakeChoice("Hello.", StopCause::kStopToken);
  const Choice cut = MakeChoice("Hello there", StopCause::kLength);
  const Json usage = Record(ChatRequest(), {stopped, cut})["response"]["body"]["usage"];
  CHECK(usage["prompt_tokens"] == 3);
  CHECK(usage["completion_tokens"] == stopped.tokens.size() + cut.tokens.size());
  CHECK(usage["total_tokens"] == 3 + stopped.tokens.size() + cut.tokens.size());
  CHECK(usage["reasoning_tokens"] == 0);
}

TEST_CASE("each cause has its finish reason and its name") {
  const std::vector<std::pair<StopCause, std::pair<std::string, std::string>>> cases = {
      {StopCause::kStopToken, {"stop", "stop_token"}},
      {StopCause::kStopString, {"stop", "stop_string"}},
      {StopCause::kLength, {"length", "length"}},
      {StopCause::kDegenerate, {"length", "degenerate"}}};
  for (const auto& [cause, names] : cases) {
    const Json record = Record(ChatRequest(), {MakeChoice("a", cause)});
    CHECK(record["response"]["body"]["choices"][0]["finish_reason"] == names.first);
    CHECK(record["x_colibri"]["stop_causes"][0] == names.second);
  }
}

TEST_CASE("a stop string is cut off and named") {
  Request request = ChatRequest();
  request.stop = {"END"};
  Choice choice = MakeChoice("text END", StopCause::kStopString);
  choice.matched_stop = "END";
  const Json record = Record(request, {choice});
  CHECK(record["response"]["body"]["choices"][0]["message"]["content"] == "text ");
  CHECK(record["x_colibri"]["matched_stops"][0] == "END");
}

TEST_CASE("reasoning stands apart from content") {
  Request request = ChatRequest();
  request.thinking = request.starts_in_reasoning = true;
  request.effort = "high";
  const Json record = Record(request, {MakeChoice("Well.</think>Yes.", StopCause::kStopToken)});
  const Json& message = record["response"]["body"]["choices"][0]["message"];
  CHECK(message["content"] == "Yes.");
  CHECK(message["reasoning_content"] == "Well.");
  CHECK(record["response"]["body"]["usage"]["reasoning_tokens"] ==
        Tok().Encode("Well.", AddedTokens::kPlain).size());
  CHECK(record["x_colibri"]["thinking"] == true);
  CHECK(record["x_colibri"]["effort"] == "high");
  CHECK(record["x_colibri"]["warnings"].empty());
}

TEST_CASE("an answer that ends inside its reasoning has empty content and says so") {
  Request request = ChatRequest();
  request.thinking = request.starts_in_reasoning = true;
  const Json record = Record(request, {MakeChoice("Well, let me", StopCause::kLength)});
  const Json& choice = record["response"]["body"]["choices"][0];
  CHECK(choice["message"]["content"] == "");
  CHECK(choice["message"]["reasoning_content"] == "Well, let me");
  CHECK(choice["finish_reason"] == "length");
  CHECK(record["x_colibri"]["warnings"][0] == "choice 0: ended inside its reasoning");
}

TEST_CASE("a completion has text and keeps its marks") {
  Request request = ChatRequest();
  request.chat = false;
  const Json record = Record(request, {MakeChoice("a</think>b", StopCause::kLength)});
  const Json& body = record["response"]["body"];
  CHECK(body["object"] == "text_completion");
  CHECK(Keys(body["choices"][0]) == Words{"index", "text", "logprobs", "finish_reason"});
  CHECK(body["choices"][0]["text"] == "a</think>b");
}

TEST_CASE("tool calls become OpenAI's, and the text around them stays") {
  Request request = ChatRequest();
  request.has_tools = true;
  request.string_arguments = {{"f", "s"}};
  const Json record = Record(
      request, {MakeChoice("Let me see.\n<tool_call>f<arg_key>x</arg_key><arg_value>10</arg_value>"
                           "<arg_key>s</arg_key><arg_value>10</arg_value></tool_call>"
                           "<tool_call>g</tool_call>",
                           StopCause::kStopToken)});
  const Json& choice = record["response"]["body"]["choices"][0];
  CHECK(choice["finish_reason"] == "tool_calls");
  CHECK(choice["message"]["content"] == "Let me see.");
  const Json& calls = choice["message"]["tool_calls"];
  REQUIRE(calls.size() == 2);
  CHECK(Keys(calls[0]) == Words{"id", "type", "function"});
  CHECK(calls[0]["type"] == "function");
  CHECK(calls[0]["function"]["name"] == "f");
  CHECK(calls[0]["function"]["arguments"] == R"({"x": 10, "s": "10"})");
  CHECK(calls[1]["function"]["name"] == "g");
  CHECK(calls[1]["function"]["arguments"] == "{}");
  CHECK(calls[0]["id"] != calls[1]["id"]);
}

TEST_CASE("calls without text have content null, cut off ones end as length") {
  Request request = ChatRequest();
  request.has_tools = true;
  const std::string call = "<tool_call>g</tool_call>";
  const Json whole = Record(request, {MakeChoice(call, StopCause::kStopToken)});
  CHECK(whole["response"]["body"]["choices"][0]["message"]["content"].is_null());
  const Json cut = Record(request, {MakeChoice(call + "<tool_call>h", StopCause::kLength)});
  const Json& choice = cut["response"]["body"]["choices"][0];
  CHECK(choice["finish_reason"] == "length");
  CHECK(choice["message"]["content"] == "<tool_call>h");
  CHECK(cut["x_colibri"]["warnings"].size() == 1);
}

TEST_CASE("without tools the markup is text") {
  const Json record =
      Record(ChatRequest(), {MakeChoice("<tool_call>g</tool_call>", StopCause::kStopToken)});
  const Json& choice = record["response"]["body"]["choices"][0];
  CHECK(choice["message"]["content"] == "<tool_call>g</tool_call>");
  CHECK_FALSE(choice["message"].contains("tool_calls"));
  CHECK(choice["finish_reason"] == "stop");
}

TEST_CASE("values of a call are JSON as a whole or strings") {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"true", "true"},
      {" [1, 2] ", "[1, 2]"},
      {"{\"a\": 1}", "{\"a\": 1}"},
      {"null", "null"},
      {"12345678901234567890123", "12345678901234567890123"},
      {"10 apples", "\"10 apples\""},
      {"\"x\"", "\"\\\"x\\\"\""},
      {"", "\"\""},
      {"line\nbreak ", "\"line\\nbreak \""},
      {"NaN", "\"NaN\""},
      {"[1,", "\"[1,\""}};
  for (const auto& [value, expected] : cases) {
    const auto parsed = ParseToolCalls(
        "<tool_call>f<arg_key>k</arg_key><arg_value>" + value + "</arg_value></tool_call>", {});
    REQUIRE(parsed.calls.size() == 1);
    CHECK(parsed.calls[0].arguments == "{\"k\": " + expected + "}");
    CHECK(Json::accept(parsed.calls[0].arguments));
  }
}

TEST_CASE("line breaks in a call are tolerated and never reach the name") {
  const auto parsed = ParseToolCalls(
      "<tool_call>\nf\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n", {});
  REQUIRE(parsed.calls.size() == 1);
  CHECK(parsed.calls[0].name == "f");
  CHECK(parsed.calls[0].arguments == "{\"a\": 1}");
  CHECK(parsed.text.empty());
}

TEST_CASE("what is no whole call stays text") {
  for (const std::string text :
       {"<tool_call>", "<tool_call></tool_call>", "<tool_call>f<arg_key>a</arg_key></tool_call>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>", "<tool_call>f",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>x</tool_call>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key>"
        "<arg_value>2</arg_value></tool_call>"}) {
    const auto parsed = ParseToolCalls(text, {});
    CHECK(parsed.calls.empty());
    CHECK(parsed.malformed);
    CHECK(parsed.text == text);
  }
  const auto second = ParseToolCalls("<tool_call>bad<tool_call>g</tool_call>", {});
  REQUIRE(second.calls.size() == 1);
  CHECK(second.calls[0].name == "g");
  CHECK(second.text == "<tool_call>bad");
}

TEST_CASE("chat log probabilities list every token with its bytes") {
  Request request = ChatRequest();
  request.logprobs = true;
  request.top_logprobs = 2;
  Choice choice = MakeChoice("Hi", StopCause::kLength);
  REQUIRE(choice.tokens.size() == 2);
  choice.logprobs.Reserve(2, 2);
  choice.logprobs.Add(
      {choice.tokens[0], -0.1f, {{choice.tokens[0], -0.1f}, {choice.tokens[1], -3}}});
  choice.logprobs.Add({choice.tokens[1], -2.5f, {}});
  const Json record = Record(request, {choice});
  const Json& content = record["response"]["body"]["choices"][0]["logprobs"]["content"];
  REQUIRE(content.size() == 2);
  CHECK(
      content[0].dump() ==
      R"({"token":"H","logprob":-0.1,"bytes":[72],"top_logprobs":[)"
      R"({"token":"H","logprob":-0.1,"bytes":[72]},{"token":"i","logprob":-3.0,"bytes":[105]}]})");
  CHECK(content[1]["top_logprobs"].empty());
}

TEST_CASE("completion log probabilities have their four lists") {
  Request request = ChatRequest();
  request.chat = false;
  request.logprobs = true;
  request.top_logprobs = 1;
  Choice choice;
  choice.cause = StopCause::kLength;
  choice.logprobs.Reserve(5, 1);
  // U+1F600 in single bytes, then a letter.
  for (const char c : std::string("\xF0\x9F\x98\x80!")) {
    const auto id = Tok().Encode(std::string_view(&c, 1), AddedTokens::kPlain);
    REQUIRE(id.size() == 1);
    choice.tokens.push_back(id[0]);
    choice.logprobs.Add({id[0], -1.5f, {{id[0], -1.5f}}});
  }
  const Json record = Record(request, {choice});
  const Json& entry = record["response"]["body"]["choices"][0];
  CHECK(entry["text"] == "\xF0\x9F\x98\x80!");
  const Json& logprobs = entry["logprobs"];
  CHECK(Keys(logprobs) == Words{"tokens", "token_logprobs", "top_logprobs", "text_offset"});
  CHECK(logprobs["tokens"] ==
        Json({"bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "!"}));
  CHECK(logprobs["token_logprobs"][4] == -1.5);
  CHECK(logprobs["top_logprobs"][4].dump() == R"({"!":-1.5})");
  CHECK(logprobs["text_offset"] == Json({0, 0, 0, 0, 1}));
  request.top_logprobs = 0;
  CHECK(Record(request, {choice})["response"]["body"]["choices"][0]["logprobs"]["top_logprobs"]
            .is_null());
}

TEST_CASE("no number is NaN or infinite") {
  LineFigures figures;
  figures.seconds_to_first_token = std::numeric_limits<double>::quiet_NaN();
  figures.tokens_per_second = std::numeric_limits<double>::infinity();
  Request request = ChatRequest();
  request.logprobs = true;
  Choice choice = MakeChoice("H", StopCause::kLength);
  choice.logprobs.Add({choice.tokens[0], std::numeric_limits<float>::quiet_NaN(), {}});
  const std::string record = BuildRecord(request, std::vector<Choice>{choice}, figures, Context());
  const Json parsed = Parse(record);
  CHECK(parsed["x_colibri"]["seconds_to_first_token"].is_null());
  CHECK(parsed["x_colibri"]["tokens_per_second"].is_null());
  CHECK(parsed["response"]["body"]["choices"][0]["logprobs"]["content"][0]["logprob"].is_null());
}

TEST_CASE("figures and effective modes are in x_colibri") {
  LineFigures figures{1.5, 2.25, 4096, 0.5, {}, 512, 8};
  figures.drafts.Add(3, 2);
  figures.drafts.Add(2, 1);
  const Json x =
      Parse(BuildRecord(ChatRequest(), std::vector<Choice>{}, figures, Context()))["x_colibri"];
  CHECK(Keys(x) == Words{"stop_causes", "matched_stops", "thinking", "effort",
                         "seconds_to_first_token", "tokens_per_second", "bytes_read", "hit_rate",
                         "drafts_offered", "drafts_accepted", "drafts_accepted_by_position",
                         "draft_bytes_read", "cached_tokens", "warnings", "simd", "engine"});
  CHECK(x["seconds_to_first_token"] == 1.5);
  CHECK(x["tokens_per_second"] == 2.25);
  CHECK(x["bytes_read"] == 4096);
  CHECK(x["hit_rate"] == 0.5);
  CHECK(x["drafts_offered"] == 5);
  CHECK(x["drafts_accepted"] == 3);
  CHECK(x["drafts_accepted_by_position"] == Json::array({2, 1, 0}));
  CHECK(x["draft_bytes_read"] == 512);
  CHECK(x["cached_tokens"] == 8);
  CHECK(x["simd"] == "AVX2");
}

TEST_CASE("the bytes of a line depend on the request and the tokens alone") {
  Request request = ChatRequest();
  request.has_tools = true;
  const std::vector<Choice> choices = {
      MakeChoice("<tool_call>g</tool_call>", StopCause::kStopToken)};
  const std::string here = BuildRecord(request, choices, LineFigures{}, Context());
  RecordContext other = Context();
  other.run_id = "run-2";
  other.created = 1;
  other.simd_target = "SSE4";
  other.model = "else";
  LineFigures figures{1, 2, 3, 0.5, {}, 4, 5};
  figures.drafts.Add(4, 4);
  const std::string there = BuildRecord(request, choices, figures, other);
  CHECK(here != there);
  CHECK(LineBytes(here) == LineBytes(there));
  CHECK(Keys(Json::parse(LineBytes(here))) == Words{"custom_id", "status", "choices", "usage"});
  CHECK(LineBytes(here) !=
        LineBytes(BuildRecord(request, std::vector<Choice>{MakeChoice("x", StopCause::kLength)},
                              LineFigures{}, Context())));
}

TEST_CASE("ids are a hash of run and custom_id") {
  const std::vector<Choice> choices = {MakeChoice("a", StopCause::kLength)};
  Request other = ChatRequest();
  other.custom_id = "q-8";
  RecordContext run = Context();
  run.run_id = "run-2";
  const Json a = Record(ChatRequest(), choices);
  CHECK(a["id"] == Record(ChatRequest(), choices)["id"]);
  CHECK(a["id"] != Record(other, choices)["id"]);
  CHECK(a["id"] != Parse(BuildRecord(ChatRequest(), choices, LineFigures{}, run))["id"]);
  CHECK(a["id"].get<std::string>().starts_with("batch_req_"));
}

TEST_CASE("a failed line has its status, an error body and the error beside it") {
  const LineError error{400, "unknown_field", "\"foo\" is \xC3\xA4 not known", "foo"};
  const Json record = Parse(BuildErrorRecord(12, "q-12", error, Context(), 0xab));
  CHECK(Keys(record) ==
        Words{"id", "custom_id", "line", "line_hash", "response", "error", "x_colibri"});
  CHECK(record["line_hash"] == "00000000000000ab");
  CHECK(record["custom_id"] == "q-12");
  CHECK(record["line"] == 12);
  CHECK(record["response"]["status_code"] == 400);
  const Json& body = record["response"]["body"]["error"];
  CHECK(Keys(body) == Words{"message", "type", "param", "code"});
  CHECK(body["message"] == error.message);
  CHECK(body["type"] == "invalid_request_error");
  CHECK(body["param"] == "foo");
  CHECK(record["error"].dump() ==
        Json({{"code", "unknown_field"}, {"message", error.message}}).dump());
  CHECK(LineBytes(BuildErrorRecord(12, "q-12", error, Context())) ==
        R"({"custom_id":"q-12","status":400})");
}

TEST_CASE("a line without an id fails under its number, and broken bytes do not break the record") {
  const LineError error{500, "read_error", "shard \xff could not be read", ""};
  const Json first = Parse(BuildErrorRecord(3, "", error, Context()));
  CHECK(first["custom_id"].is_null());
  CHECK(first["response"]["body"]["error"]["type"] == "server_error");
  CHECK(first["response"]["body"]["error"]["param"].is_null());
  CHECK(first["id"] != Parse(BuildErrorRecord(4, "", error, Context()))["id"]);
}
