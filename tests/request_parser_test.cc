// Lines of a batch file and plain lines to requests, and why a line is refused.
// Length: each rule of a line has a case here.
#include "runtime/request_parser.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "runtime/id_set.h"
#include "runtime/tokenizer.h"
#include "tests/fixture_tokenizer.h"

using colibri::AddedTokens;
using colibri::ParsedLine;
using colibri::RequestDefaults;
using colibri::RequestParser;
using colibri::SpecialTokens;
using colibri::Tok;
using colibri::Tokenizer;

namespace {

constexpr int32_t kContext = 512;

RequestParser Parser(const RequestDefaults& defaults = {}) {
  return RequestParser(Tok(), Tok().Size() + 24, kContext, defaults);
}

std::string ChatLine(const std::string& more_fields, const std::string& id = "a") {
  return R"({"custom_id": ")" + id +
         R"(", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", )"
         R"("messages": [{"role": "user", "content": "Hi"}])" +
         (more_fields.empty() ? "" : ", " + more_fields) + "}}";
}

std::string CompletionLine(const std::string& fields) {
  return R"({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {)" + fields +
         "}}";
}

ParsedLine ParseOne(const std::string& line, const RequestDefaults& defaults = {}) {
  return Parser(defaults).Parse(line, 1);
}

colibri::Request Good(const std::string& line, const RequestDefaults& defaults = {}) {
  const ParsedLine parsed = ParseOne(line, defaults);
  INFO(line);
  INFO(parsed.error.message);
  REQUIRE(parsed.request.has_value());
  return *parsed.request;
}

// The error's "code param", so that one comparison says what was refused.
std::string Refused(const std::string& line) {
  const ParsedLine parsed = ParseOne(line);
  INFO(line);
  CHECK_FALSE(parsed.request.has_value());
  CHECK(parsed.error.status == 400);
  CHECK_FALSE(parsed.error.message.empty());
  return parsed.error.code + " " + parsed.error.param;
}

std::string Text(const colibri::Request& request) {
  return Tok().Decode(request.prompt, SpecialTokens::kKeep);
}

}  // namespace

TEST_CASE("a chat line becomes a request with the rendered prompt and the defaults") {
  RequestDefaults defaults;
  defaults.sampling.temperature = 0.75f;
  defaults.sampling.top_p = 0.5f;
  defaults.sampling.seed = 11;
  defaults.max_tokens = 77;
  defaults.stop = {"x"};
  const ParsedLine parsed = Parser(defaults).Parse(ChatLine(""), 5);
  REQUIRE(parsed.request.has_value());
  CHECK(parsed.line == 5);
  CHECK(parsed.custom_id == "a");
  CHECK(parsed.model == "m");
  const auto& request = *parsed.request;
  CHECK(request.line == 5);
  CHECK(request.custom_id == "a");
  CHECK(request.chat);
  CHECK(Text(request) ==
        "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Hi<|assistant|><think>");
  CHECK(request.prompt[0] == Tok().Find("[gMASK]"));
  CHECK(request.sampling.temperature == 0.75f);
  CHECK(request.sampling.top_p == 0.5f);
  CHECK(request.sampling.seed == 11);
  CHECK(request.max_tokens == 77);
  CHECK(request.stop == std::vector<std::string>{"x"});
  CHECK(request.choices == 1);
  CHECK(request.thinking);
  CHECK(request.effort == "max");
  CHECK(request.starts_in_reasoning);
  CHECK_FALSE(request.logprobs);
}

TEST_CASE("every sampling field of a line is honoured") {
  const auto request = Good(ChatLine(
      R"("temperature": 0.25, "top_p": 0.5, "min_p": 0.125, "top_k": 40, "seed": 123, "n": 3,
         "stop": ["a", "b"], "max_tokens": 9, "logprobs": true, "top_logprobs": 4)"));
  CHECK(request.sampling.temperature == 0.25f);
  CHECK(request.sampling.top_p == 0.5f);
  CHECK(request.sampling.min_p == 0.125f);
  CHECK(request.sampling.top_k == 40);
  CHECK(request.sampling.seed == 123);
  CHECK(request.choices == 3);
  CHECK(request.stop == std::vector<std::string>{"a", "b"});
  CHECK(request.max_tokens == 9);
  CHECK(request.logprobs);
  CHECK(request.top_logprobs == 4);
  CHECK(Good(ChatLine(R"("max_completion_tokens": 5)")).max_tokens == 5);
  CHECK(Good(ChatLine(R"("stop": "one")")).stop == std::vector<std::string>{"one"});
  CHECK(Good(ChatLine(R"("stop": [])"),
             [] {
               RequestDefaults defaults;
               defaults.stop = {"x"};
               return defaults;
             }())
            .stop.empty());
  CHECK(Good(ChatLine(R"("top_k": -1)")).sampling.top_k == 0);
  CHECK(Good(ChatLine(R"("seed": -1)")).sampling.seed == ~uint64_t{0});
  CHECK(Good(ChatLine(R"("seed": 18446744073709551615)")).sampling.seed == ~uint64_t{0});
  CHECK(Good(ChatLine(R"("temperature": 2)")).sampling.temperature == 2.0f);
  CHECK(Good(ChatLine(R"("top_p": 1e-300)")).sampling.top_p > 0);
}

TEST_CASE("values out of range or of the wrong type are refused with their field") {
  for (const std::string field : {R"("temperature": 2.5)", R"("temperature": -1)",
                                  R"("temperature": "1")", R"("temperature": true)"}) {
    CHECK(Refused(ChatLine(field)) == "unsupported_value temperature");
  }
  CHECK(Refused(ChatLine(R"("top_p": 0)")) == "unsupported_value top_p");
  CHECK(Refused(ChatLine(R"("top_p": 1.01)")) == "unsupported_value top_p");
  CHECK(Refused(ChatLine(R"("min_p": -0.1)")) == "unsupported_value min_p");
  CHECK(Refused(ChatLine(R"("top_k": -2)")) == "unsupported_value top_k");
  CHECK(Refused(ChatLine(R"("top_k": 1.5)")) == "unsupported_value top_k");
  CHECK(Refused(ChatLine(R"("n": 0)")) == "unsupported_value n");
  CHECK(Refused(ChatLine(R"("n": 129)")) == "unsupported_value n");
  CHECK(Refused(ChatLine(R"("max_tokens": 0)")) == "unsupported_value max_tokens");
  CHECK(Refused(ChatLine(R"("max_tokens": 3000000000)")) == "unsupported_value max_tokens");
  CHECK(Refused(ChatLine(R"("max_tokens": 18446744073709551615)")) ==
        "unsupported_value max_tokens");
  CHECK(Refused(ChatLine(R"("max_tokens": 1000000000000000000000000)")) ==
        "unsupported_value max_tokens");
  CHECK(Refused(ChatLine(R"("max_tokens": 5, "max_completion_tokens": 6)")) ==
        "unsupported_value max_completion_tokens");
  CHECK(Refused(ChatLine(R"("seed": 1.5)")) == "unsupported_value seed");
  CHECK(Refused(ChatLine(R"("seed": 18446744073709551616)")) == "unsupported_value seed");
  CHECK(Refused(ChatLine(R"("stop": ["a","b","c","d","e"])")) == "unsupported_value stop");
  CHECK(Refused(ChatLine(R"("stop": "")")) == "unsupported_value stop");
  CHECK(Refused(ChatLine(R"("stop": [1])")) == "unsupported_value stop");
  CHECK(Refused(ChatLine(R"("logprobs": 5)")) == "unsupported_value logprobs");
  CHECK(Refused(ChatLine(R"("logprobs": true, "top_logprobs": 21)")) ==
        "unsupported_value top_logprobs");
  CHECK(Refused(ChatLine(R"("top_logprobs": 2)")) == "unsupported_value top_logprobs");
}

TEST_CASE("fields without effect are accepted in their neutral values") {
  Good(ChatLine(R"("stream": false, "presence_penalty": 0, "frequency_penalty": 0.0,
      "repetition_penalty": 1.0, "logit_bias": {}, "user": "u", "metadata": {"a": "b"},
      "store": true, "service_tier": "auto", "parallel_tool_calls": true, "tool_choice": "auto",
      "response_format": {"type": "text"}, "temperature": null, "stop": null, "tools": null,
      "n": null, "seed": null, "functions": null, "messages_extra": null,
      "modalities": ["text"], "verbosity": "medium", "safety_identifier": "s",
      "prompt_cache_key": "k", "prompt_cache_retention": "24h")"));
  Good(ChatLine(R"("tool_choice": "none")"));
  Good(CompletionLine(R"("prompt": "a", "echo": false, "best_of": 1, "suffix": null)"));
}

TEST_CASE("fields that would change the answer are refused by name") {
  CHECK(Refused(ChatLine(R"("stream": true)")) == "unsupported_value stream");
  CHECK(Refused(ChatLine(R"("presence_penalty": 0.5)")) == "unsupported_value presence_penalty");
  CHECK(Refused(ChatLine(R"("frequency_penalty": -1)")) == "unsupported_value frequency_penalty");
  CHECK(Refused(ChatLine(R"("logit_bias": {"5": 1})")) == "unsupported_value logit_bias");
  CHECK(Refused(ChatLine(R"("response_format": {"type": "json_object"})")) ==
        "unsupported_value response_format");
  CHECK(Refused(ChatLine(R"("tool_choice": "required")")) == "unsupported_value tool_choice");
  CHECK(Refused(ChatLine(R"("modalities": ["text", "audio"])")) == "unsupported_value modalities");
  CHECK(Refused(ChatLine(R"("verbosity": "low")")) == "unsupported_value verbosity");
  CHECK(Refused(ChatLine(R"("max_tokns": 5)")) == "unknown_field max_tokns");
  CHECK(Refused(ChatLine(R"("prompt": "x")")) == "unknown_field prompt");
  CHECK(Refused(ChatLine(R"("echo": false)")) == "unknown_field echo");
  CHECK(Refused(CompletionLine(R"("prompt": "a", "messages": [])")) == "unknown_field messages");
  CHECK(Refused(CompletionLine(R"("prompt": "a", "max_completion_tokens": 4)")) ==
        "unknown_field max_completion_tokens");
  CHECK(Refused(CompletionLine(R"("prompt": "a", "echo": true)")) == "unsupported_value echo");
  CHECK(Refused(CompletionLine(R"("prompt": "a", "verbosity": "medium")")) ==
        "unknown_field verbosity");
}

TEST_CASE("thinking and effort follow the line, and contradictions are refused") {
  const std::string off = "[gMASK]<sop><|user|>Hi<|assistant|><think></think>";
  for (const std::string fields :
       {R"("reasoning_effort": "none")", R"("chat_template_kwargs": {"enable_thinking": false})",
        R"("chat_template_kwargs": {"reasoning_effort": "none"})"}) {
    const auto request = Good(ChatLine(fields));
    CHECK(Text(request) == off);
    CHECK_FALSE(request.thinking);
    CHECK(request.effort == "none");
    CHECK_FALSE(request.starts_in_reasoning);
  }
  const auto high = Good(ChatLine(R"("reasoning_effort": "high")"));
  CHECK(Text(high) == "[gMASK]<sop><|system|>Reasoning Effort: High<|user|>Hi<|assistant|><think>");
  CHECK(high.effort == "high");

  RequestDefaults quiet;
  quiet.thinking = false;
  quiet.effort = "high";
  CHECK(Text(Good(ChatLine(""), quiet)) == off);
  const auto asked = Good(ChatLine(R"("chat_template_kwargs": {"enable_thinking": true})"), quiet);
  CHECK(asked.thinking);
  CHECK(asked.effort == "high");
  CHECK(Good(ChatLine(R"("reasoning_effort": "max")"), quiet).effort == "max");

  CHECK(Refused(ChatLine(R"("reasoning_effort": "medium")")) ==
        "unsupported_value reasoning_effort");
  CHECK(Refused(ChatLine(R"("chat_template_kwargs": {"reasoning_effort": "low"})")) ==
        "unsupported_value chat_template_kwargs.reasoning_effort");
  CHECK(Refused(ChatLine(R"("reasoning_effort": "high",
                            "chat_template_kwargs": {"enable_thinking": false})")) ==
        "unsupported_value reasoning_effort");
  CHECK(Refused(ChatLine(R"("reasoning_effort": "none",
                            "chat_template_kwargs": {"enable_thinking": true})")) ==
        "unsupported_value reasoning_effort");
  CHECK(Refused(ChatLine(R"("reasoning_effort": "high",
                            "chat_template_kwargs": {"reasoning_effort": "max"})")) ==
        "unsupported_value chat_template_kwargs.reasoning_effort");
}

TEST_CASE("enable_thinking null is as good as left out") {
  const std::string null = R"("chat_template_kwargs": {"enable_thinking": null})";
  RequestDefaults quiet;
  quiet.thinking = false;
  for (const RequestDefaults& defaults : {RequestDefaults{}, quiet}) {
    const auto request = Good(ChatLine(null), defaults);
    CHECK(request.thinking == defaults.thinking);
    CHECK(Text(request) == Text(Good(ChatLine(""), defaults)));
  }
  // It contradicts no effort either.
  CHECK(Good(ChatLine(R"("reasoning_effort": "high", )" + null)).effort == "high");
  CHECK(Good(ChatLine(R"("reasoning_effort": "none", )" + null)).effort == "none");
}

TEST_CASE("an unknown template argument is refused by name") {
  const ParsedLine parsed = ParseOne(ChatLine(R"("chat_template_kwargs": {"thinking": false})"));
  CHECK(parsed.error.param == "chat_template_kwargs");
  CHECK(parsed.error.message.find("thinking") != std::string::npos);
  CHECK(parsed.error.message.find("enable_thinking") != std::string::npos);
}

TEST_CASE("the last message can be continued") {
  const std::string line =
      R"({"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}],
        "continue_final_message": true, "chat_template_kwargs": {"enable_thinking": false})";
  const auto request = Good(line + "}}");
  CHECK(Text(request) == "[gMASK]<sop><|user|>Hi<|assistant|><think></think>Well,");
  CHECK_FALSE(request.starts_in_reasoning);
  CHECK(Refused(line + R"(, "add_generation_prompt": true}})") ==
        "unsupported_value continue_final_message");
  CHECK(Refused(ChatLine(R"("continue_final_message": true)")) == "invalid_request messages");
  CHECK(Text(Good(ChatLine(R"("add_generation_prompt": false)"))) ==
        "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Hi");
}

TEST_CASE("what the template would leave out of messages is refused with its place") {
  const auto with = [](const std::string& messages) {
    return R"({"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": )" + messages +
           "}}";
  };
  CHECK(Refused(with("[]")) == "invalid_request messages");
  CHECK(Refused(with("\"Hi\"")) == "invalid_request messages");
  CHECK(Refused(with("null")) == "invalid_request messages");
  CHECK(Refused(with("[1]")) == "invalid_request messages[0]");
  CHECK(
      Refused(with(R"([{"role": "user", "content": "a"}, {"role": "critic", "content": "b"}])")) ==
      "invalid_request messages[1]");
  CHECK(Refused(with(R"([{"content": "a"}])")) == "invalid_request messages[0]");
  CHECK(Refused(with(R"([{"role": "user"}])")) == "invalid_request messages[0]");
  CHECK(Refused(with(R"([{"role": "user", "content": null}])")) == "invalid_request messages[0]");
  CHECK(Refused(with(R"([{"role": "user", "content": 5}])")) ==
        "invalid_request messages[0].content");
  CHECK(Refused(with(R"([{"role": "user", "content": "a", "name": "Bob"}])")) ==
        "unknown_field messages[0].name");
  CHECK(Refused(with(R"([{"role": "user", "content": [{"type": "file"}]}])")) ==
        "invalid_request messages[0].content[0]");
  CHECK(Refused(with(R"([{"role": "user", "content": ["a", {"type": "text"}]}])")) ==
        "invalid_request messages[0].content[1]");
  CHECK(Refused(with(
            R"([{"role": "user", "content": [{"type": "text", "text": "a", "cache": 1}]}])")) ==
        "unknown_field messages[0].content[0].cache");
  Good(with(R"([{"role": "user", "content": "a", "name": null},
                {"role": "assistant", "content": null, "refusal": null, "annotations": [],
                  "tool_calls": [{"id": "c",
                  "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
                {"role": "tool", "tool_call_id": "c", "content": "ok"}])"));
}

TEST_CASE("parts that the model cannot take in are warned of") {
  const std::string line =
      R"({"custom_id": "a", "body": {"messages": [{"role": "user", "content": "x"},
         {"role": "user", "content": ["x", {"type": "text", "text": "y"}, {"type": "image_url"},
                                      {"type": "video"}]}]}})";
  CHECK(Good(line).warnings ==
        std::vector<std::string>{"messages[1].content[2]: the model sees no image_url, the prompt "
                                 "tells it that there was one"});
  CHECK(Good(ChatLine("")).warnings.empty());
}

TEST_CASE("a refusal says what was found and what was expected") {
  const auto message = [](const std::string& line) {
    return Parser().Parse(line, 1).error.message;
  };
  CHECK(message(R"({"custom_id": 7})") ==
        "custom_id: 7 is given, a string that is not empty and has at most 4096 bytes is expected");
  CHECK(message("{}") ==
        "custom_id: none is given, a string that is not empty and has at most 4096 bytes is "
        "expected");
  CHECK(message(R"({"custom_id": "a", "body": {"messages": "Hi"}})") ==
        "messages: \"Hi\" is given, an array of at least one message is expected");
  // The parser counts lines of its text, which a reader would take for those of the file.
  CHECK(message("{]").find("parse error at byte 2: ") != std::string::npos);
}

TEST_CASE("the role developer is another word for system") {
  const auto with = [](const std::string& role) {
    return Text(Good(R"({"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": [
        {"role": ")" +
                     role + R"(", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}})"));
  };
  CHECK(with("developer") == with("system"));
}

TEST_CASE("tools reach the prompt, and their string arguments are remembered") {
  const auto request = Good(ChatLine(R"("tools": [{"type": "function", "function": {"name": "f",
      "parameters": {"type": "object", "properties": {"x": {"type": "integer"},
      "s": {"type": "string"}, "e": {"enum": ["a", "b"]}}}}}])"));
  CHECK(request.has_tools);
  CHECK(Text(request).find("\n# Tools\n") != std::string::npos);
  CHECK(request.string_arguments ==
        std::vector<std::pair<std::string, std::string>>{{"f", "s"}, {"f", "e"}});
  CHECK_FALSE(Good(ChatLine(R"("tools": [])")).has_tools);
  CHECK(Refused(ChatLine(R"("tools": {})")) == "invalid_request tools");
  CHECK(Refused(ChatLine(R"("tools": [{"type": "web_search"}])")) == "invalid_request tools[0]");
  CHECK(Refused(ChatLine(R"("tools": [{"type": "function", "function": {}}])")) ==
        "invalid_request tools[0]");
}

TEST_CASE("a completion gets the model's prefix exactly once") {
  const std::vector<int32_t> prefix = {Tok().Find("[gMASK]"), Tok().Find("<sop>")};
  auto expected = Tok().Encode("Once upon", AddedTokens::kPlain);
  expected.insert(expected.begin(), prefix.begin(), prefix.end());
  for (const std::string text : {"Once upon", "[gMASK]<sop>Once upon"}) {
    const auto request = Good(CompletionLine(R"("prompt": ")" + text + '"'));
    CHECK(request.prompt == expected);
    CHECK_FALSE(request.chat);
    CHECK_FALSE(request.thinking);
    CHECK_FALSE(request.starts_in_reasoning);
  }
  RequestDefaults special;
  special.parse_special = true;
  CHECK(Good(CompletionLine(R"("prompt": "[gMASK]<sop>Once upon")"), special).prompt == expected);
}

TEST_CASE("spellings of control tokens are text unless they are asked for") {
  const std::string line = CompletionLine(R"("prompt": "a<|user|>b")");
  const int32_t user = Tok().Find("<|user|>");
  const auto plain = Good(line).prompt;
  CHECK(std::find(plain.begin(), plain.end(), user) == plain.end());
  RequestDefaults special;
  special.parse_special = true;
  const auto parsed = Good(line, special).prompt;
  CHECK(std::find(parsed.begin(), parsed.end(), user) != parsed.end());
  // A user who spells the reasoning mark does not open the reasoning.
  CHECK_FALSE(Good(R"({"custom_id": "a", "body": {"reasoning_effort": "none", "messages":
                      [{"role": "user", "content": "<think>"}]}})")
                  .starts_in_reasoning);
}

TEST_CASE("prompts of ids are taken as they are, and checked") {
  CHECK(Good(CompletionLine(R"("prompt": [5, 0, 4095])")).prompt ==
        std::vector<int32_t>{5, 0, 4095});
  CHECK(Refused(CompletionLine(R"("prompt": [])")) == "invalid_request prompt");
  CHECK(Refused(CompletionLine(R"("prompt": "")")) == "invalid_request prompt");
  CHECK(Refused(CompletionLine(R"("prompt": "[gMASK]<sop>")")) == "invalid_request prompt");
  CHECK(Refused(CompletionLine(R"("max_tokens": 5)")) == "invalid_request prompt");
  CHECK(Refused(CompletionLine(R"("prompt": [-1])")) == "unsupported_value prompt");
  CHECK(Refused(CompletionLine(R"("prompt": [1.5])")) == "unsupported_value prompt");
  CHECK(Refused(CompletionLine(R"("prompt": [1000000])")) == "unsupported_value prompt");
  // Below the embedding's rows, but the tokenizer has no such id.
  CHECK(Refused(CompletionLine(R"("prompt": [4096])")) == "unsupported_value prompt");
  CHECK(Refused(CompletionLine(R"("prompt": ["a", "b"])")) == "unsupported_value prompt");
  CHECK(Refused(CompletionLine(R"("prompt": [[1], [2]])")) == "unsupported_value prompt");
  CHECK(Refused(CompletionLine(R"("prompt": 5)")) == "unsupported_value prompt");
  CHECK(Good(CompletionLine(R"("prompt": [[5, 0, 4095]])")).prompt ==
        std::vector<int32_t>{5, 0, 4095});
  CHECK(Good(CompletionLine(R"("prompt": ["Once"])")).prompt ==
        Good(CompletionLine(R"("prompt": "Once")")).prompt);
  CHECK(Refused(CompletionLine(R"("prompt": [[]])")) == "invalid_request prompt");
  CHECK(Refused(CompletionLine(R"("prompt": [[["a"]]])")) == "unsupported_value prompt");
}

TEST_CASE("logprobs of a completion are a number") {
  const auto request = Good(CompletionLine(R"("prompt": "a", "logprobs": 0)"));
  CHECK(request.logprobs);
  CHECK(request.top_logprobs == 0);
  CHECK(Good(CompletionLine(R"("prompt": "a", "logprobs": 5)")).top_logprobs == 5);
  CHECK(Refused(CompletionLine(R"("prompt": "a", "logprobs": 6)")) == "unsupported_value logprobs");
  CHECK(Refused(CompletionLine(R"("prompt": "a", "logprobs": true)")) ==
        "unsupported_value logprobs");
}

TEST_CASE("without a url the body decides") {
  CHECK(Good(R"({"custom_id": "a", "body": {"prompt": "x"}})").chat == false);
  CHECK(
      Good(R"({"custom_id": "a", "body": {"messages": [{"role": "user", "content": "x"}]}})").chat);
}

TEST_CASE("a damaged envelope is refused with what is wrong") {
  CHECK(Refused("[1]") == "invalid_request ");
  CHECK(Refused("null") == "invalid_request ");
  CHECK(Refused("12345678901234567890123") == "invalid_request ");
  CHECK(Refused("{}") == "invalid_request custom_id");
  CHECK(Refused(R"({"custom_id": ""})") == "invalid_request custom_id");
  CHECK(Refused(R"({"custom_id": 5})") == "invalid_request custom_id");
  CHECK(Refused(R"({"custom_id": "a"})") == "invalid_request body");
  CHECK(Refused(R"({"custom_id": "a", "body": []})") == "invalid_request body");
  CHECK(Refused(R"({"custom_id": "a", "body": {"prompt": "x"}, "method": "GET"})") ==
        "unsupported_value method");
  CHECK(Refused(R"({"custom_id": "a", "body": {"prompt": "x"}, "url": "/v1/embeddings"})") ==
        "unsupported_value url");
  CHECK(Refused(R"({"custom_id": "a", "body": {"prompt": "x"}, "priority": 1})") ==
        "unknown_field priority");
  CHECK(Refused(R"({"custom_id": "a", "body": {"prompt": "x", "model": 5}})") ==
        "unsupported_value model");
}

TEST_CASE("broken JSON, broken UTF-8 and zero bytes are errors of their line") {
  for (const std::string& line :
       {std::string("{"), std::string(R"({"custom_id": "a")"), std::string("{} {}"),
        std::string("{\"custom_id\": \"\xff\"}"), std::string("{\"custom_id\": \"\xed\xa0\x80\"}"),
        std::string(R"({"custom_id": "\ud800"})"), std::string("{\"custom_id\": \"a\0b\"}", 20),
        std::string(R"({"custom_id": "a", "custom_id": "b"})"), std::string(R"({"a": 1e999})"),
        std::string(R"({"a": NaN})"), std::string(100000, '['), std::string("not JSON")}) {
    CHECK(Refused(line) == "invalid_json ");
  }
}

TEST_CASE("a line that fails keeps the custom_id it has") {
  const ParsedLine parsed = Parser().Parse(R"({"custom_id": "q", "body": 1})", 8);
  CHECK(parsed.custom_id == "q");
  CHECK(parsed.line == 8);
}

TEST_CASE("a second use of a custom_id is an error, also after a line that failed") {
  RequestParser parser = Parser();
  CHECK(parser.Parse(ChatLine("", "a"), 1).request.has_value());
  CHECK(parser.Parse(ChatLine("", "b"), 2).request.has_value());
  const ParsedLine again = parser.Parse(ChatLine("", "a"), 3);
  CHECK_FALSE(again.request.has_value());
  CHECK(again.error.code == "duplicate_custom_id");
  CHECK(again.custom_id == "a");
  CHECK_FALSE(parser.Parse(ChatLine(R"("n": 0)", "c"), 4).request.has_value());
  CHECK(parser.Parse(ChatLine("", "c"), 5).error.code == "duplicate_custom_id");
}

TEST_CASE("an id costs at most 32 bytes") {
  colibri::IdSet ids;
  for (int i = 0; i < 300000; ++i) REQUIRE(ids.Insert("request-" + std::to_string(i)));
  CHECK(ids.Count() == 300000);
  CHECK(ids.Bytes() <= 32 * ids.Count());
  for (int i = 0; i < 300000; i += 1000) CHECK_FALSE(ids.Insert("request-" + std::to_string(i)));
  CHECK(ids.Count() == 300000);
}

TEST_CASE("a plain line is one user turn, named after its number") {
  const ParsedLine parsed = Parser().ParseText("Tell me <|user|> {\"a\"}", 12);
  REQUIRE(parsed.request.has_value());
  CHECK(parsed.custom_id == "line-12");
  CHECK(parsed.request->custom_id == "line-12");
  CHECK(parsed.request->chat);
  CHECK(Text(*parsed.request) ==
        "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Tell me <|user|> {\"a\"}"
        "<|assistant|><think>");
}

TEST_CASE("a raw plain line is a completion") {
  RequestDefaults raw;
  raw.raw = true;
  raw.keep_prompt_text = true;
  const ParsedLine parsed = Parser(raw).ParseText("Once", 1);
  REQUIRE(parsed.request.has_value());
  CHECK_FALSE(parsed.request->chat);
  CHECK(Text(*parsed.request) == "[gMASK]<sop>Once");
  CHECK(parsed.request->prompt_text == "Once");
}

TEST_CASE("a plain line that is no text is an error with the place") {
  CHECK(Parser().ParseText("", 1).error.message == "the prompt is empty");
  CHECK(Parser().ParseText("ab\xE6\xAD", 1).error.message == "broken UTF-8 at byte 3 (0xe6)");
  CHECK(Parser().ParseText(std::string("a\0b", 3), 1).error.message == "a zero byte at byte 2");
}

TEST_CASE("the prompt's text is kept when it will be shown") {
  RequestDefaults keep;
  keep.keep_prompt_text = true;
  CHECK(Good(ChatLine(""), keep).prompt_text == "Hi");
  CHECK(Good(ChatLine("")).prompt_text.empty());
  CHECK(Good(CompletionLine(R"("prompt": "x y")"), keep).prompt_text == "x y");
}

TEST_CASE("the demo's prompts are all accepted") {
  std::ifstream file(COLIBRI_SOURCE_DIR "/apps/demo/prompts.jsonl");
  RequestParser parser = Parser();
  std::string line;
  uint64_t number = 0;
  int chats = 0;
  while (std::getline(file, line)) {
    const ParsedLine parsed = parser.Parse(line, ++number);
    INFO(parsed.error.message);
    REQUIRE(parsed.request.has_value());
    chats += parsed.request->chat ? 1 : 0;
  }
  CHECK(number == 24);
  CHECK(chats == 16);
}
