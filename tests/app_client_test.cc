// Answers in the hands of those who read OpenAI's batches: a batch file as it is written for the
// cloud is answered, and OpenAI's client library reads every record (tests/read_answers.py).
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "runtime/record.h"
#include "runtime/tokenizer.h"
#include "tests/fixture_tokenizer.h"
#include "tests/output_records.h"
#include "tests/run_program.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

using Json = nlohmann::ordered_json;

const char* const kBatch = COLIBRI_SOURCE_DIR "/tests/fixtures/cloud_batch.jsonl";

// The batch's records, as a file.
std::string Answers() {
  const ProgramOutcome outcome = RunProgram(
      "colibri-run", {"-m", COLIBRI_SOURCE_DIR "/apps/demo/model", "-i", kBatch, "--ram", "200MB"});
  INFO(outcome.err);
  REQUIRE(outcome.exit_code == 1);  // some are refused
  return outcome.out;
}

ProgramOutcome ReadByClient(const std::string& prompts, const std::string& answers) {
  return RunProgram("/bin/bash",
                    {"-c",
                     "cd '" COLIBRI_SOURCE_DIR "' && python=$(tests/client_python.sh) && "
                     "exec \"$python\" -B tests/read_answers.py \"$0\" \"$1\"",
                     prompts, answers});
}

// Of a model that calls tools, thinks, and stops for every reason there is; the demo model does
// not.
std::string ScriptedRecords() {
  RecordContext context;
  context.tokenizer = &Tok();
  context.model = "scripted";
  context.run_id = "run-1";
  context.created = 1700000000;
  Request request;
  request.prompt = {1, 2, 3};
  const auto choice = [](const std::string& text, StopCause cause) {
    Choice made;
    made.tokens = Tok().Encode(text, AddedTokens::kRecognise);
    made.cause = cause;
    if (cause == StopCause::kStopToken) made.tokens.push_back(Tok().Find("<|user|>"));
    return made;
  };
  const auto record = [&](const std::string& id, const Choice& made) {
    request.custom_id = id;
    ++request.line;
    return BuildRecord(request, std::vector<Choice>{made}, LineFigures{}, context);
  };
  std::string records = record("stop", choice("Hello.", StopCause::kStopToken)) +
                        record("degenerate", choice("a", StopCause::kDegenerate));
  request.has_tools = true;
  records +=
      record("calls", choice("Let me see.\n<tool_call>f<arg_key>x</arg_key><arg_value>10"
                             "</arg_value></tool_call><tool_call>g</tool_call>",
                             StopCause::kStopToken)) +
      record("a call alone", choice("<tool_call>g</tool_call>", StopCause::kStopToken)) +
      record("a call cut off", choice("<tool_call>g</tool_call><tool_call>h", StopCause::kLength));
  request.starts_in_reasoning = request.thinking = true;
  records += record("reasoning", choice("Well.</think>Yes.", StopCause::kStopToken));
  // Bytes that are no text by themselves.
  request.logprobs = true;
  Choice figures = choice("é", StopCause::kLength);
  for (const int32_t id : figures.tokens) figures.logprobs.Add({id, -1.5f, {}});
  records += record("half a letter", figures);
  request.chat = request.has_tools = request.starts_in_reasoning = false;
  records += record("text", figures);
  return records +
         BuildErrorRecord(9, "overlong", {400, "context_length_exceeded", "too long", ""}, context);
}

}  // namespace

TEST_CASE("a batch file written for the cloud is answered, what no text model can do is refused") {
  const std::map<std::string, std::string> refused = {
      {"json-schema", "unsupported_value response_format"},
      {"forced-tool", "unsupported_value tool_choice"},
      {"bias", "unsupported_value logit_bias"},
      {"penalty", "unsupported_value frequency_penalty"},
      {"stream", "unsupported_value stream"},
      {"medium-effort", "unsupported_value reasoning_effort"},
      {"speech", "unsupported_value modalities"},
      {"web-search", "unknown_field web_search_options"},
      {"two-users", "unknown_field messages[0].name"},
      {"old-functions", "unknown_field functions"},
      {"two-prompts", "unsupported_value prompt"},
      {"insertion", "unknown_field suffix"},
      {"embedding", "unsupported_value url"},
      {"file-part", "invalid_request messages[0].content[0]"}};
  std::istringstream lines(Answers());
  size_t answered = 0, failed = 0;
  for (std::string line; std::getline(lines, line);) {
    const Json record = Json::parse(line);
    const std::string id = record["custom_id"];
    CAPTURE(id);
    const Json& body = record["response"]["body"];
    const auto found = refused.find(id);
    if (found == refused.end()) {
      ++answered;
      CHECK(record["response"]["status_code"] == 200);
      continue;
    }
    ++failed;
    CHECK(record["response"]["status_code"] == 400);
    CHECK(body["error"]["code"].get<std::string>() + ' ' +
              body["error"]["param"].get<std::string>() ==
          found->second);
  }
  CHECK(answered == 19);
  CHECK(failed == refused.size());
}

TEST_CASE("OpenAI's client library and jq read every answer to that batch, by its custom_id") {
  const TempDir dir;
  const std::string answers = dir.Write("answers.jsonl", Answers());
  const ProgramOutcome jq = RunProgram("/usr/bin/jq", {"-c", ".custom_id", answers});
  CHECK(std::count(jq.out.begin(), jq.out.end(), '\n') == 33);
  Has(jq.out, "\"Ünïcode/✓ id\"\n");
  const ProgramOutcome outcome = ReadByClient(kBatch, answers);
  INFO(outcome.err);
  CHECK(outcome.exit_code == 0);
  for (const char* part : {"ChatCompletion=15 Completion=4 ", "logprobs=4 refused=14 "}) {
    Has(outcome.out, part);
  }
}

TEST_CASE("OpenAI's client library reads tool calls, reasoning and every reason to stop") {
  const TempDir dir;
  const ProgramOutcome outcome = ReadByClient("-", dir.Write("answers.jsonl", ScriptedRecords()));
  INFO(outcome.err);
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.out ==
        "ChatCompletion=7 Completion=1 calls=4 length=4 logprobs=2 refused=1 stop=2 "
        "tool_calls=2\n");
}

TEST_CASE("what the client library would not read is told, so that the reading means something") {
  const std::vector<std::pair<std::string, std::string>> changes = {
      {R"("finish_reason":"stop")", R"("finish_reason":"end")"},
      {R"("finish_reason":"length")", R"("finish_reason":null)"},
      {R"("object":"chat.completion")", R"("object":"chat")"},
      {R"("object":"text_completion")", R"("object":"chat.completion")"},
      {R"("logprob":-1.5)", R"("logprob":"-1.5")"},
      {R"("token_logprobs":[-1.5)", R"("token_logprobs":[null)"},
      {R"("created":1700000000)", R"("created":1700000000.5)"},
      {R"("type":"function")", R"("type":"tool")"},
      {R"("arguments":"{}")", R"("arguments":{})"},
      {R"("role":"assistant")", R"("role":"user")"},
      {R"("usage":{"prompt)", R"("usage":{"hits":1,"prompt)"},
      {R"("status_code":400)", R"("status_code":200)"},
      {R"("param":null)", R"("param":0)"},
      {R"("custom_id":"stop")", R"("custom_id":7)"}};
  const std::string records = ScriptedRecords();
  std::string wrong;
  for (const auto& change : changes) {
    CAPTURE(change.second);
    const size_t at = records.find(change.first);
    REQUIRE(at != std::string::npos);
    const size_t begin = records.rfind('\n', at) + 1, end = records.find('\n', at) + 1;
    wrong +=
        records.substr(begin, end - begin).replace(at - begin, change.first.size(), change.second);
  }
  const TempDir dir;
  const ProgramOutcome outcome = ReadByClient("-", dir.Write("answers.jsonl", wrong));
  CHECK(outcome.exit_code == 1);
  for (size_t line = 1; line <= changes.size(); ++line) {
    CAPTURE(changes[line - 1].second);
    Has("\n" + outcome.err, "\nline " + std::to_string(line) + ": ");
  }
  Has(outcome.err, "a custom_id has two records");
  // Every line of the batch, and no record of it.
  const ProgramOutcome empty = ReadByClient(kBatch, dir.Write("answers.jsonl", ""));
  CHECK(empty.exit_code == 1);
  Has(empty.err, "no record of ");
}

}  // namespace colibri
