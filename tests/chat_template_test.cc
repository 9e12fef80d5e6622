#include "runtime/chat_template.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/json_text.h"

namespace colibri {
namespace {

using Ids = std::vector<int32_t>;
using Json = nlohmann::ordered_json;

const Tokenizer& Fixture() {
  static const Tokenizer tokenizer =
      Tokenizer::Load(COLIBRI_SOURCE_DIR "/tests/fixtures/tokenizer/tokenizer.json");
  return tokenizer;
}

std::vector<Json> Cases() {
  std::ifstream file(COLIBRI_SOURCE_DIR "/tests/fixtures/chat/cases.jsonl");
  std::vector<Json> cases;
  for (std::string line; std::getline(file, line);) cases.push_back(ParseJson(line));
  return cases;
}

std::vector<PromptPiece> RenderCase(const Json& one) {
  TemplateArguments arguments;
  ApplyTemplateArguments(one["arguments"], &arguments);
  arguments.add_generation_prompt = one["add_generation_prompt"].get<bool>();
  return RenderChat(one["messages"], one["tools"], arguments);
}

std::string Rendered(const std::string& messages, const TemplateArguments& arguments = {}) {
  return PiecesText(RenderChat(ParseJson(messages), nullptr, arguments));
}

// The text of the error, or "" if the messages render.
std::string ErrorOf(const std::string& messages, const std::string& tools = "null",
                    const TemplateArguments& arguments = {}) {
  try {
    RenderChat(ParseJson(messages), ParseJson(tools), arguments);
  } catch (const TemplateError& error) {
    return error.what();
  }
  return "";
}

std::string ArgumentError(const std::string& arguments) {
  try {
    TemplateArguments into;
    ApplyTemplateArguments(ParseJson(arguments), &into);
  } catch (const TemplateError& error) {
    return error.what();
  }
  return "";
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

const char* const kHead = "[gMASK]<sop><|system|>Reasoning Effort: Max";

TEST_CASE("all cases of the official template render to its bytes") {
  const std::vector<Json> cases = Cases();
  REQUIRE(cases.size() == 74);
  for (const Json& one : cases) {
    CAPTURE(one["name"]);
    CHECK(PiecesText(RenderCase(one)) == one["rendered"].get<std::string>());
  }
}

TEST_CASE("all cases encode to ids whose control tokens are the template's own") {
  for (const Json& one : Cases()) {
    CAPTURE(one["name"]);
    CHECK(EncodePieces(Fixture(), RenderCase(one), false) == one["ids"].get<Ids>());
  }
}

TEST_CASE("with parse_special the ids are those of the rendered text as a whole") {
  size_t different = 0;
  for (const Json& one : Cases()) {
    CAPTURE(one["name"]);
    const std::vector<PromptPiece> pieces = RenderCase(one);
    const Ids ids = EncodePieces(Fixture(), pieces, true).value();
    CHECK(ids == Fixture().Encode(PiecesText(pieces), AddedTokens::kRecognise));
    if (ids != one["ids"].get<Ids>()) ++different;
  }
  CHECK(different > 5);
}

TEST_CASE("a control piece put together by hand is cut at its tokens") {
  const std::vector<PromptPiece> pieces = {{"[gMASK]<sop>", true}, {"a<sop>", false}, {"b", true}};
  const Ids ids = EncodePieces(Fixture(), pieces, false).value();
  Ids expected = {Fixture().Find("[gMASK]"), Fixture().Find("<sop>")};
  const Ids text = Fixture().Encode("a<sop>b", AddedTokens::kPlain);
  expected.insert(expected.end(), text.begin(), text.end());
  CHECK(ids == expected);
}

TEST_CASE("content that is null or missing is empty, never the word None") {
  for (const char* content : {R"(, "content": null)", "", R"(, "content": [])"}) {
    CAPTURE(content);
    const std::string rest = std::string(content) + "}";
    CHECK(Rendered(R"([{"role": "user")" + rest + R"(, {"role": "assistant")" + rest +
                   R"(, {"role": "tool")" + rest + R"(, {"role": "system")" + rest + "]") ==
          std::string(kHead) +
              "<|user|><|assistant|><think></think><|observation|>"
              "<tool_response></tool_response><|system|><|assistant|><think>");
  }
}

TEST_CASE("arguments of a call as JSON text render like the object they hold") {
  const std::string call =
      R"([{"role": "user", "content": "A"}, {"role": "assistant", "content": null, "tool_calls": [
          {"id": "1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}]}])";
  const auto with = [&](const std::string& arguments) {
    std::string text = call;
    return text.replace(text.find("ARGUMENTS"), 9, arguments);
  };
  const std::string text =
      Rendered(with(R"("{\"z\": [1, 2.50], \"a\": 123456789012345678901234}")"));
  CHECK(text == Rendered(with(R"({"z": [1, 2.5], "a": 123456789012345678901234})")));
  CHECK(Contains(text,
                 "<arg_key>z</arg_key><arg_value>[1, 2.5]</arg_value><arg_key>a</arg_key>"
                 "<arg_value>123456789012345678901234</arg_value></tool_call>"));
  for (const char* bad :
       {R"("")", R"("{")", R"("[1]")", "[1]", "null", "7", R"("{\"a\":1,\"a\":2}")"}) {
    CAPTURE(bad);
    CHECK(Contains(ErrorOf(with(bad)), "messages[1].tool_calls[0].arguments"));
  }
}

TEST_CASE("assistant content is stripped of what Python calls white space") {
  const auto stripped = [](const std::string& content) {
    return Rendered(R"([{"role": "assistant", "content": ")" + content + R"("}])");
  };
  const std::string expected =
      std::string(kHead) + "<|assistant|><think></think>x y<|assistant|><think>";
  CHECK(
      stripped(
          R"(\u001c\u001f\u0085\u00a0\u1680\u2000\u200a\u2028\u202f\u205f\u3000x y\u001d\u3000\u2029\u000b\n)") ==
      expected);
  CHECK(Contains(stripped(R"(\u200bx\u180e)"), "\u200bx\u180e"));
  CHECK(Contains(stripped(R"( \u00e9 )"), "</think>\u00e9<|"));
  CHECK(Contains(stripped(R"( \u3000 )"), "</think><|"));
}

TEST_CASE("a reasoning field leaves the content as it is, think tags included") {
  TemplateArguments arguments;
  arguments.clear_thinking = false;
  CHECK(Contains(Rendered(R"([{"role": "assistant", "reasoning_content": "",
                               "content": "<think>a</think>b"}])",
                          arguments),
                 "<think></think><think>a</think>b"));
}

TEST_CASE("with no user message all reasoning is kept") {
  CHECK(Contains(Rendered(R"([{"role": "assistant", "content": "B", "reasoning_content": "r"}])"),
                 "<think>r</think>B"));
}

TEST_CASE("continuing leaves the last message open, white space at its end included") {
  TemplateArguments arguments;
  arguments.continue_final_message = true;
  CHECK(Rendered(R"([{"role": "user", "content": "A"}, {"role": "assistant", "content": " B "},
                     {"role": "assistant", "content": "  It is  "}])",
                 arguments) ==
        std::string(kHead) +
            "<|user|>A<|assistant|><think></think>B<|assistant|><think></think>It is  ");
  CHECK(Contains(ErrorOf(R"([{"role": "user", "content": "A"}])", "null", arguments),
                 "last message"));
  CHECK(Contains(ErrorOf("[]", "null", arguments), "last message"));
  CHECK(Contains(ErrorOf(R"([{"role": "assistant", "content": "A", "tool_calls": [
                             {"name": "f", "arguments": {}}]}])",
                         "null", arguments),
                 "tool_calls"));
}

TEST_CASE("a referenced tool is shown even if it was deferred, an unknown one is not") {
  const std::string text = PiecesText(RenderChat(
      ParseJson(R"([{"role": "tool", "content": [{"type": "tool_reference", "name": "f"},
                                                 {"type": "tool_reference", "name": "g"}]}])"),
      ParseJson(R"([{"function": {"name": "f", "defer_loading": true, "strict": false}}])"), {}));
  CHECK(Contains(text, "<tools>\n</tools>"));
  CHECK(Contains(text, "<tool_response><tools>\n{\"name\": \"f\"}\n</tools></tool_response>"));
}

TEST_CASE("what cannot be rendered is refused by its place") {
  CHECK(Contains(ErrorOf("{}"), "messages"));
  CHECK(Contains(ErrorOf("null"), "messages"));
  CHECK(Contains(ErrorOf(R"(["x"])"), "messages[0]"));
  CHECK(Contains(ErrorOf(R"([{"content": "x"}])"), "messages[0].role"));
  CHECK(Contains(ErrorOf(R"([{"role": 1, "content": "x"}])"), "messages[0].role"));
  CHECK(Contains(ErrorOf("[]", "{}"), "tools"));
  CHECK(Contains(ErrorOf("[]", "[1]"), "tools[0]"));
  CHECK(Contains(ErrorOf("[]", R"([{"function": "f"}])"), "tools[0].function"));
  for (const char* content : {"1", "{}", "true", "[1]", "[{}]", R"([{"type": "text"}])",
                              R"([{"type": "text", "text": 5}])", "[[]]", "[null]"}) {
    CAPTURE(content);
    for (const char* role : {"user", "system", "assistant", "tool"}) {
      const std::string messages =
          std::string(R"([{"role": ")") + role + R"(", "content": )" + content + "}]";
      CHECK(Contains(ErrorOf(messages), "messages[0].content"));
    }
  }
  for (const char* content : {R"([{"output": 1}])", R"([{"output": "a"}, "b"])",
                              R"([{"output": "a"}, {"type": "tool_reference", "name": "f"}])",
                              R"([{"type": "tool_reference"}])"}) {
    CAPTURE(content);
    CHECK(Contains(ErrorOf(std::string(R"([{"role": "tool", "content": )") + content + "}]"),
                   "messages[0].content"));
  }
  for (const char* calls : {"{}", "[1]", "[{}]", R"([{"function": 1}])", R"([{"name": "f"}])",
                            R"([{"function": {"arguments": {}}}])"}) {
    CAPTURE(calls);
    CHECK(Contains(ErrorOf(std::string(R"([{"role": "assistant", "tool_calls": )") + calls + "}]"),
                   "messages[0].tool_calls"));
  }
  CHECK(Contains(ErrorOf(R"([{"role": "assistant", "reasoning_content": 5}])"),
                 "messages[0].reasoning_content"));
}

TEST_CASE("unknown template arguments and values of the wrong kind are refused by name") {
  CHECK(ArgumentError("null") == "");
  CHECK(ArgumentError(R"({"enable_thinking": 0, "reasoning_effort": null})") == "");
  const std::string unknown = ArgumentError(R"({"thinking": true})");
  CHECK(Contains(unknown, "template argument thinking is unknown"));
  CHECK(Contains(unknown, "enable_thinking"));
  for (const char* name :
       {"enable_thinking", "clear_thinking", "add_generation_prompt", "continue_final_message"}) {
    CAPTURE(name);
    CHECK(Contains(ArgumentError(std::string("{\"") + name + "\": \"false\"}"), name));
  }
  CHECK(Contains(ArgumentError(R"({"reasoning_effort": 3})"), "reasoning_effort"));
  CHECK(Contains(ArgumentError("[]"), "object"));
}

TEST_CASE("numbers are written as Python writes them") {
  const std::pair<const char*, const char*> numbers[] = {
      {"0.0", "0.0"},
      {"-0.0", "-0.0"},
      {"-0", "0"},
      {"1.0", "1.0"},
      {"100.0", "100.0"},
      {"1e2", "100.0"},
      {"0.1", "0.1"},
      {"-2.50", "-2.5"},
      {"0.0001", "0.0001"},
      {"0.00012345", "0.00012345"},
      {"0.00001", "1e-05"},
      {"1.5e-7", "1.5e-07"},
      {"1e15", "1000000000000000.0"},
      {"9999999999999998.0", "9999999999999998.0"},
      {"1e16", "1e+16"},
      {"123456789012345678.0", "1.2345678901234568e+17"},
      {"1e22", "1e+22"},
      {"1.7976931348623157e308", "1.7976931348623157e+308"},
      {"5e-324", "5e-324"},
      {"123.456", "123.456"},
      {"3.141592653589793", "3.141592653589793"},
      {"18446744073709551615", "18446744073709551615"},
      {"-9223372036854775808", "-9223372036854775808"},
      {"123456789012345678901234567890", "123456789012345678901234567890"},
      {"-123456789012345678901234567890", "-123456789012345678901234567890"}};
  for (const auto& number : numbers) {
    CAPTURE(number.first);
    CHECK(PythonJson(ParseJson(number.first)) == number.second);
  }
  CHECK(PythonJson(std::numeric_limits<double>::infinity()) == "Infinity");
  CHECK(PythonJson(-std::numeric_limits<double>::infinity()) == "-Infinity");
  CHECK(PythonJson(std::nan("")) == "NaN");
}

TEST_CASE("only quotes, backslashes and control characters are escaped in JSON") {
  CHECK(
      PythonJson(ParseJson(
          R"({"k\"\\\/": ["\b\f\n\r\t\u0000\u001f\u007f\u00e9\u2028\ud83d\ude00<&>'", {}, [],
                                            true, false, null]})")) ==
      "{\"k\\\"\\\\/\": [\"\\b\\f\\n\\r\\t\\u0000\\u001f\x7f\u00e9\u2028\U0001F600<&>'\", {}, [], "
      "true, false, null]}");
}

TEST_CASE("rendering stops at a limit of bytes, which what is left out does not count for") {
  const auto render = [](const char* messages, size_t bytes) {
    return PiecesText(RenderChat(ParseJson(messages), nullptr, {}, {bytes, SIZE_MAX}));
  };
  const char* text = R"([{"role":"user","content":"0123456789"}])";
  const size_t bytes = render(text, SIZE_MAX).size();
  CHECK(render(text, bytes).size() == bytes);
  CHECK_THROWS_AS(render(text, bytes - 1), TextTooLong);
  const char* dropped =
      R"([{"role":"assistant","content":"a long thought about nothing</think>b"},)"
      R"({"role":"user","content":"c"}])";
  const size_t without = render(dropped, SIZE_MAX).size();
  CHECK(render(dropped, without).size() == without);
  CHECK_THROWS_AS(render(dropped, without - 1), TextTooLong);
}

TEST_CASE("a list of references to one tool does not grow beyond the limit") {
  std::string references = R"({"type":"tool_reference","name":"t"})";
  for (int i = 0; i < 12; ++i) references += "," + references;  // 4,096
  const std::string tool = R"([{"name":"t","description":")" + std::string(20'000, 'd') + R"("}])";
  const std::string messages = R"([{"role":"tool","content":[)" + references + "]}]";
  CHECK_THROWS_AS(RenderChat(ParseJson(messages), ParseJson(tool), {}, {100'000, SIZE_MAX}),
                  TextTooLong);
}

TEST_CASE("arguments of a call as JSON text have a limit of values") {
  const auto render = [](size_t values) {
    return RenderChat(
        ParseJson(R"([{"role":"user","content":"a"},{"role":"assistant","tool_calls":)"
                  R"([{"name":"f","arguments":"{\"x\":[1,2,3]}"}]}])"),
        nullptr, {}, {SIZE_MAX, values});
  };
  CHECK_NOTHROW(render(4));
  CHECK_THROWS_AS(render(2), TextTooLong);
}

TEST_CASE("pieces are encoded up to a number of tokens or not at all") {
  const auto pieces =
      RenderChat(ParseJson(R"([{"role":"user","content":"Tell me a story."}])"), nullptr, {});
  const Ids ids = EncodePieces(Fixture(), pieces, false).value();
  CHECK(EncodePieces(Fixture(), pieces, false, ids.size()) == ids);
  for (size_t most = 0; most < ids.size(); ++most) {
    CHECK_FALSE(EncodePieces(Fixture(), pieces, false, most).has_value());
  }
}

}  // namespace
}  // namespace colibri
