// What a line of a prompt file may take: the limits that make its memory plannable, and the pool
// that lines with log probabilities share.
#include "runtime/line_limits.h"

#include <doctest/doctest.h>

#include <string>
#include <utility>
#include <vector>

#include "runtime/request_parser.h"
#include "tests/scheduler_rig.h"

namespace colibri {
namespace {

constexpr int32_t kContext = 512;

RequestParser Parser(const RequestDefaults& defaults = {}) {
  return RequestParser(TheTokenizer(), TheTokenizer().Size(), kContext, defaults);
}

ParsedLine ParseOne(const std::string& line) { return Parser().Parse(line, 1); }

std::string ChatLine(const std::string& field, const std::string& id = "a") {
  return R"({"custom_id": ")" + id +
         R"(", "body": {"messages": [{"role": "user", "content": "Hi"}])" +
         (field.empty() ? "" : ", " + field) + "}}";
}

std::string CompletionLine(const std::string& fields) {
  return R"({"custom_id": "a", "body": {)" + fields + "}}";
}

TEST_CASE("a prompt beyond the context is refused with the code it has when it is counted") {
  const std::string text(40'000, 'q');
  const std::string words = [] {
    std::string many;
    for (int i = 0; i < 600; ++i) many += "a b ";
    return many;
  }();
  for (const std::string& prompt : {text, words}) {
    const ParsedLine chat =
        ParseOne(R"({"custom_id": "a", "body": {"max_tokens": 3, "messages": [{"role": "user", )"
                 R"("content": ")" +
                 prompt + R"("}]}})");
    CHECK(chat.error.code == "context_length_exceeded");
    CHECK(chat.error.message ==
          "the prompt has more than 512 tokens and max_tokens is 3: together more than the context "
          "of 512");
    CHECK(chat.custom_id == "a");
    CHECK(ParseOne(CompletionLine(R"("prompt": ")" + prompt + "\"")).error.code ==
          "context_length_exceeded");
    CHECK(Parser().ParseText(prompt, 1).error.code == "context_length_exceeded");
  }
}

TEST_CASE("a prompt of as many tokens as the context has is parsed, one more is not") {
  RequestDefaults raw;
  raw.raw = true;
  const auto parse = [&](int tokens) {
    std::string prompt;
    for (int i = 2; i < tokens; ++i) prompt += "\x01";  // control characters do not merge
    return Parser(raw).ParseText(prompt, 1);
  };
  REQUIRE(parse(kContext).request.has_value());
  CHECK(parse(kContext).request->prompt.size() == static_cast<size_t>(kContext));
  CHECK(parse(kContext + 1).error.code == "context_length_exceeded");
}

TEST_CASE("a line of more values than its context can use is refused, and keeps its id") {
  std::string values = "0";
  for (size_t i = 0; i < MaxLineValues(kContext); ++i) values += ",0";
  for (const std::string& field :
       {"\"metadata\": [" + values + "]", "\"user\": {\"a\": [" + values + "]}"}) {
    const ParsedLine parsed = ParseOne(ChatLine(field));
    CHECK(parsed.error.code == "context_length_exceeded");
    CHECK(parsed.error.message.find("--ctx-size") != std::string::npos);
    CHECK(parsed.custom_id == "a");
  }
  const ParsedLine ids = ParseOne(CompletionLine("\"prompt\": [" + values + "]"));
  CHECK(ids.error.code == "context_length_exceeded");
  CHECK(ids.custom_id == "a");
}

TEST_CASE("ids and stop strings have a longest length") {
  const auto id = [](size_t bytes) { return ParseOne(ChatLine("", std::string(bytes, 'i'))); };
  CHECK(id(kMaxIdBytes).request.has_value());
  CHECK(id(kMaxIdBytes + 1).error.param == "custom_id");
  CHECK(id(kMaxIdBytes + 1).custom_id.empty());
  const auto stop = [](size_t bytes) {
    return ChatLine(R"("stop": [")" + std::string(bytes, 's') + "\"]");
  };
  CHECK(ParseOne(stop(kMaxStopBytes)).request.has_value());
  CHECK(ParseOne(stop(kMaxStopBytes + 1)).error.param == "stop");
}

TEST_CASE("an error repeats little of a line, whatever is wrong with it") {
  const std::string much(100'000, 'm');
  for (const std::string& field :
       {"\"" + much + "\": 1", "\"temperature\": \"" + much + "\"",
        "\"temperature\": [[\"" + much + "\"], {\"a\": \"" + much + "\"}]",
        "\"reasoning_effort\": \"" + much + "\"", "\"" + much + "\": 1, \"" + much + "\": 2",
        "\"chat_template_kwargs\": {\"" + much + "\": 1}"}) {
    const ParsedLine parsed = ParseOne(ChatLine(field));
    CHECK_FALSE(parsed.request.has_value());
    CHECK(parsed.error.message.size() <= 1000);
    CHECK(parsed.error.param.size() <= 1000);
  }
  // As much of it as before.
  const ParsedLine shown =
      ParseOne(ChatLine(R"("temperature": ["a", {"b": [1, null], "c": "d"}])"));
  CHECK(shown.error.message.starts_with(R"(temperature: ["a",{"b":[1,null],"c":"d"}] is given)"));
}

// A line of two tokens with log probabilities: 4 tokens x 2, or n times as many.
void AddLogprobs(Rig& rig, int32_t choices = 1) {
  Request request;
  request.prompt = {10, 11};
  request.max_tokens = 4;
  request.choices = choices;
  request.loop_stop = false;
  request.logprobs = true;
  request.top_logprobs = 1;
  rig.source.Add(std::move(request));
}

TEST_CASE("lines with log probabilities wait until those under way leave room, in order") {
  SchedulerOptions options = Options(8, 8);
  options.line_pool = 2 * 8 * kLogprobBytes;
  Rig rig(options, 64);
  for (int i = 0; i < 3; ++i) AddLogprobs(rig);
  rig.source.Add(2, 4);  // asks for none, and still waits its turn
  REQUIRE(rig.Step());
  CHECK(rig.scheduler.Stats().running == 2);
  CHECK(rig.scheduler.Stats().lines_read == 3);
  while (rig.Step()) {
  }
  // Finished, but their records have not been taken.
  int32_t wake = -1;
  bool poll = true;
  CHECK(rig.scheduler.Drained(&wake, &poll) == Scheduler::After::kBlock);
  CHECK_FALSE(poll);  // input cannot help
  CHECK(rig.scheduler.Gather());
  rig.CloseAll();
  CHECK(rig.scheduler.Drained(&wake, &poll) == Scheduler::After::kWake);
  CHECK(rig.scheduler.Stats().running == 2);
}

TEST_CASE("a line larger than the pool runs alone, and every one comes to its end") {
  for (const int32_t sequences : {1, 2, 5}) {
    SchedulerOptions options = Options(sequences, 4);
    options.line_pool = 3 * 8 * kLogprobBytes;
    Rig rig(options, 64);
    AddLogprobs(rig, 3);
    AddLogprobs(rig, 9);  // more than the pool
    AddLogprobs(rig);
    rig.source.AddError({400, "invalid_request", "no", ""});
    rig.source.Add(60, 60);  // refused
    AddLogprobs(rig, 2);
    rig.source.Add(2, 3, 2);
    rig.source.End();
    rig.RunToEnd();
    CAPTURE(sequences);
    CHECK(rig.finished.size() == 3 + 9 + 1 + 1 + 1 + 2 + 2);
    CHECK(rig.scheduler.Stats().lines_read == 7);
  }
}

TEST_CASE("room for a token's log probabilities is there from the start and never moves") {
  LogprobList list;
  list.Reserve(3, 2);
  list.Add({7, -1.0f, {{7, -1.0f}, {8, -2.0f}}});
  const auto* first = list[0].top.data();
  list.Add({9, -3.0f, {}});
  list.Add({5, -0.5f, {{5, -0.5f}, {6, -1.5f}, {4, -2.5f}}});  // one more than asked for
  CHECK(list[0].top.data() == first);
  REQUIRE(list.size() == 3);
  CHECK(list.Entries() == 9);
  CHECK(list[0].top.size() == 2);
  CHECK(list[1].id == 9);
  CHECK(list[1].top.empty());
  CHECK(list[2].top.size() == 2);
  CHECK(list[2].top[1] == std::pair<int32_t, float>(6, -1.5f));
}

TEST_CASE("a line may have as many log probabilities as the bound, whatever it leaves unsaid") {
  Request request;
  request.prompt = {1, 2};
  request.logprobs = true;
  request.top_logprobs = 20;
  request.max_tokens = 4096;
  request.choices = 3;
  CHECK_FALSE(AdmissionError(request, 5000).has_value());
  request.choices = 4;
  const auto error = AdmissionError(request, 5000);
  REQUIRE(error.has_value());
  CHECK(error->status == 400);
  CHECK(error->code == "too_many_logprobs");
  CHECK(error->param == "top_logprobs");
  CHECK(
      error->message ==
      "n 4 x max_tokens 4096 x (1 + top_logprobs 20) are 344064 log probabilities: a line may have "
      "262144");
  // Without max_tokens the room in the context counts.
  request.choices = 1;
  request.max_tokens = 0;
  CHECK_FALSE(AdmissionError(request, 12'000).has_value());
  CHECK(AdmissionError(request, 13'000).has_value());
  request.logprobs = false;
  CHECK_FALSE(AdmissionError(request, 13'000).has_value());
}

}  // namespace
}  // namespace colibri
