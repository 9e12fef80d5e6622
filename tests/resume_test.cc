#include "runtime/resume.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "io/error.h"
#include "runtime/prompt_source.h"
#include "runtime/run_output.h"
#include "runtime/strict_check.h"
#include "runtime/tokenizer.h"
#include "tests/fixture_tokenizer.h"
#include "tests/output_records.h"
#include "tests/temp_dir.h"

using colibri::ChangedLine;
using colibri::CheckAllLines;
using colibri::FinishedLines;
using colibri::HashText;
using colibri::InputFormat;
using colibri::IoError;
using colibri::LineError;
using colibri::LineFilter;
using colibri::LineShard;
using colibri::Manifest;
using colibri::OpenRunOutput;
using colibri::PromptSource;
using colibri::PromptSurvey;
using colibri::ReadWhole;
using colibri::Request;
using colibri::RequestParser;
using colibri::RunOutput;
using colibri::RunOutputOptions;
using colibri::SurveyLines;
using colibri::SurveyPrompts;
using colibri::TempDir;
using colibri::TestManifest;
using colibri::TestRecord;
using colibri::Tok;
using colibri::Tokenizer;
using colibri::UsageError;

namespace fs = std::filesystem;

namespace {

using Words = std::vector<std::string>;

class Descriptor {
 public:
  explicit Descriptor(const std::string& path) : fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    REQUIRE(fd_ >= 0);
  }
  ~Descriptor() { close(fd_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int Fd() const { return fd_; }

 private:
  int fd_;
};

RequestParser Parser(int32_t context = 4096) {
  return RequestParser(Tok(), Tok().Size() + 24, context, {});
}

std::string Chat(const std::string& id, const std::string& text = "Hi") {
  return R"({"custom_id": ")" + id + R"(", "body": {"messages": [{"role": "user", "content": ")" +
         text + "\"}]}}";
}

FinishedLines Finished(
    const std::vector<std::pair<uint64_t, std::pair<std::string, std::string>>>& lines) {
  FinishedLines finished;
  for (const auto& [line, text] : lines) {
    finished.Add({line, HashText(text.first), HashText(text.second), false});
  }
  REQUIRE_FALSE(finished.Settle().has_value());
  return finished;
}

std::string Changed(const std::string& input, const FinishedLines& finished,
                    std::optional<InputFormat> format = {}) {
  const TempDir dir;
  const Descriptor file(dir.Write("in", input));
  const auto changed = SurveyLines(file.Fd(), format, {}, finished, 4096).changed;
  CHECK(lseek(file.Fd(), 0, SEEK_CUR) == 0);
  return changed ? changed->what : "";
}

// "LINE custom_id" of what the source gives, " error CODE" behind it for lines that fail.
struct Given {
  Words lines;
  Words changes;
};
Given Run(const std::string& input, LineShard shard, FinishedLines finished) {
  const TempDir dir;
  const Descriptor file(dir.Write("in", input));
  Given given;
  LineFilter filter(shard, std::move(finished),
                    [&](const ChangedLine& changed) { given.changes.push_back(changed.what); });
  RequestParser parser = Parser();
  PromptSource::Options options;
  options.fd = file.Fd();
  options.filter = &filter;
  PromptSource source(std::move(options), parser);
  for (;;) {
    Request request;
    std::optional<LineError> error;
    if (source.TryNext(&request, &error) != PromptSource::Next::kRequest) break;
    given.lines.push_back(std::to_string(request.line) + " " + request.custom_id +
                          (error ? " error " + error->code : ""));
  }
  Request request;
  std::optional<LineError> error;
  CHECK(source.TryNext(&request, &error) == PromptSource::Next::kEnd);
  return given;
}

const std::string kA = Chat("a"), kB = Chat("b"), kC = Chat("c");

}  // namespace

TEST_CASE("an input that is as it was, or longer, is not changed") {
  const FinishedLines finished = Finished({{1, {kA, "a"}}, {4, {kC, "c"}}});
  CHECK(Changed(kA + "\n" + kB + "\n\n" + kC + "\n", finished) == "");
  CHECK(Changed("\xEF\xBB\xBF" + kA + "\r\n" + kB + "\r\n\r\n" + kC, finished) == "");
  CHECK(Changed(kA + "\nnew\n\n" + kC + "\n" + kB + "\n", finished) == "");
  CHECK(Changed("anything", Finished({})) == "");
}

TEST_CASE("the first changed line is found with its number") {
  const FinishedLines finished = Finished({{1, {kA, "a"}}, {2, {kB, "b"}}, {4, {kC, "c"}}});
  const std::string was = "was changed since it was answered";
  const std::string gone = "was answered and is no longer in the input";
  CHECK(Changed(kA + "\n" + kB + " \n\n" + kC, finished) == "line 2 " + was);
  CHECK(Changed(kB + "\n" + kA + "\n\n" + kC, finished) == "line 1 " + was);
  CHECK(Changed(kA + "\n\n" + kB + "\n" + kC, finished) == "line 2 " + gone);
  CHECK(Changed(kA + "\n" + kB + "\n\n\n" + kC, finished) == "line 4 " + gone);
  CHECK(Changed(kA + "\n" + kB, finished) == "line 4 " + gone);
  CHECK(Changed("", finished) == "line 1 " + gone);
}

TEST_CASE("a record whose custom_id is not the line's is of another line") {
  CHECK(Changed(kA, Finished({{1, {kA, "b"}}})) == "line 1 was changed since it was answered");
}

TEST_CASE("plain lines and lines that cannot be parsed are compared too") {
  CHECK(Changed("hello\nworld\n", Finished({{2, {"world", "line-2"}}})) == "");
  CHECK(Changed("hello\nworld\n", Finished({{2, {"world", ""}}})) != "");
  CHECK(Changed("{broken\n" + kB, Finished({{1, {"{broken", ""}}, {2, {kB, "b"}}})) == "");
  CHECK(Changed(kA, Finished({{1, {kA, "line-1"}}}), InputFormat::kLines) == "");
}

TEST_CASE("a pipe cannot be read twice") {
  int fds[2];
  REQUIRE(pipe2(fds, O_CLOEXEC) == 0);
  CHECK_THROWS_AS(SurveyLines(fds[0], {}, {}, Finished({}), 4096), IoError);
  RequestParser parser = Parser();
  CHECK_THROWS_AS(CheckAllLines(fds[0], {}, parser), UsageError);
  close(fds[0]);
  close(fds[1]);
}

TEST_CASE("finished lines are not run again, and their ids are still taken") {
  const std::string input = kA + "\n" + kB + "\n" + kA + "\n" + kC + "\n";
  CHECK(Run(input, {}, Finished({})).lines ==
        Words{"1 a", "2 b", "3 a error duplicate_custom_id", "4 c"});
  const Given given = Run(input, {}, Finished({{1, {kA, "a"}}, {4, {kC, "c"}}}));
  CHECK(given.lines == Words{"2 b", "3 a error duplicate_custom_id"});
  CHECK(given.changes.empty());
  CHECK(Run(input, {}, Finished({{1, {kA, "a"}}, {2, {kB, "b"}}, {3, {kA, "a"}}, {4, {kC, "c"}}}))
            .lines.empty());
}

TEST_CASE("changed lines are told as they arrive, keep their record and are not run") {
  const Given given =
      Run(kA + "\n\n" + kB + "\n" + kC + "\n", {},
          Finished({{1, {kB, "b"}}, {2, {kB, "b"}}, {4, {kC, "c"}}, {9, {kA, "a"}}}));
  CHECK(given.lines == Words{"3 b"});
  CHECK(given.changes == Words{"line 1 was changed since it was answered",
                               "line 2 was answered and is no longer in the input",
                               "line 9 was answered and is no longer in the input"});
}

TEST_CASE("shards share the lines out and see the ids of all") {
  const std::string input = kA + "\n" + kB + "\n\n" + kA + "\n" + kC + "\n" + kC + "\n";
  CHECK(Run(input, {0, 2}, Finished({})).lines == Words{"1 a", "5 c"});
  CHECK(Run(input, {1, 2}, Finished({})).lines ==
        Words{"2 b", "4 a error duplicate_custom_id", "6 c error duplicate_custom_id"});
  CHECK(Run(input, {1, 2}, Finished({{2, {kB, "b"}}})).lines.size() == 2);
  CHECK(Run(input, {6, 7}, Finished({})).lines.empty());
}

TEST_CASE("a survey counts the lines to be run and leaves the input where it stood") {
  const TempDir dir;
  const Descriptor file(dir.Write("in", "x\n" + kA + "\n\n" + kB + "\n{bad\n" + kC + "\n"));
  REQUIRE(lseek(file.Fd(), 2, SEEK_SET) == 2);
  const auto survey = [&](LineShard shard, const FinishedLines& finished) {
    const PromptSurvey found = SurveyLines(file.Fd(), {}, shard, finished, 4096);
    CHECK(lseek(file.Fd(), 0, SEEK_CUR) == 2);
    CHECK(found.whole);
    CHECK_FALSE(found.changed);
    CHECK(found.Answers() == found.lines);
    return found.lines;
  };
  CHECK(survey({}, Finished({})) == 4);
  CHECK(survey({0, 2}, Finished({})) == 3);
  CHECK(survey({0, 2}, Finished({{3, {kB, "b"}}})) == 2);
  CHECK(survey({}, Finished({{1, {kA, "a"}}, {3, {kB, "b"}}, {4, {"{bad", ""}}})) == 1);
  const FinishedLines all =
      Finished({{1, {kA, "a"}}, {3, {kB, "b"}}, {4, {"{bad", ""}}, {5, {kC, "c"}}});
  CHECK(survey({}, all) == 0);
}

TEST_CASE("a survey tells how long the lines are and what they may generate") {
  const TempDir dir;
  const std::string limited = R"({"custom_id": "l", "body": {"max_tokens": 300}})";
  const std::string chat = R"({"custom_id": "m", "body": {"max_completion_tokens":7}})";
  const std::string none = R"({"custom_id": "n", "body": {"max_tokens": null}})";
  const Descriptor file(dir.Write("in", limited + "\n" + chat + "\n" + none + "\n"));
  const PromptSurvey survey = SurveyLines(file.Fd(), InputFormat::kJsonl, {}, Finished({}), 4096);
  CHECK(survey.bytes == limited.size() + chat.size() + none.size());
  CHECK(survey.longest == chat.size());
  CHECK(survey.limited == 2);
  CHECK(survey.limits == 307);
  CHECK(survey.largest_limit == 300);
  const PromptSurvey lines = SurveyLines(file.Fd(), InputFormat::kLines, {}, Finished({}), 4096);
  CHECK(lines.bytes == survey.bytes);
  CHECK(lines.limited == 0);
}

TEST_CASE("a survey knows no number of answers where lines ask for several or are too many") {
  const TempDir dir;
  const std::string several = R"({"custom_id": "s", "body": {"n": 3}})";
  const Descriptor file(dir.Write("in", kA + "\n" + several + "\n"));
  CHECK(SurveyLines(file.Fd(), {}, {}, Finished({}), 4096).several);
  CHECK_FALSE(SurveyLines(file.Fd(), {}, {}, Finished({}), 4096).Answers());
  CHECK_FALSE(SurveyLines(file.Fd(), {}, {0, 2}, Finished({}), 4096).several);
  CHECK_FALSE(SurveyLines(file.Fd(), InputFormat::kLines, {}, Finished({}), 4096).several);
  CHECK(SurveyLines(file.Fd(), {}, {}, Finished({{2, {several, "s"}}}), 4096).Answers() == 1);

  CHECK_FALSE(SurveyLines(file.Fd(), {}, {}, Finished({}), 4096).logprobs);
  for (const char* key : {"logprobs", "top_logprobs", "\\u006cogprobs"}) {
    const std::string asks = R"({"custom_id": "s", "body": {")" + std::string(key) + R"(": 1}})";
    const Descriptor asking(dir.Write("asking", kA + "\n" + asks + "\n"));
    CHECK(SurveyLines(asking.Fd(), {}, {}, Finished({}), 4096).logprobs);
    CHECK_FALSE(SurveyLines(asking.Fd(), {}, {0, 2}, Finished({}), 4096).logprobs);
    CHECK_FALSE(SurveyLines(asking.Fd(), InputFormat::kLines, {}, Finished({}), 4096).logprobs);
  }

  const std::string mebibyte = std::string(size_t{1} << 20, 'x') + "\n";
  std::string many;
  for (int i = 0; i < 18; ++i) many += mebibyte;
  const Descriptor large(dir.Write("large", many));
  const PromptSurvey survey = SurveyLines(large.Fd(), {}, {}, Finished({}), 4096);
  CHECK_FALSE(survey.whole);
  CHECK(survey.lines == 16);
  // What has a record is read whatever its size.
  const std::string line(size_t{1} << 20, 'x');
  CHECK(SurveyLines(large.Fd(), {}, {}, Finished({{3, {line, "line-3"}}}), 4096).whole);
}

TEST_CASE("a survey of the command line's prompts counts and compares them") {
  const Words prompts = {"one", "", "three"};
  CHECK(SurveyPrompts(prompts, {}, Finished({})).Answers() == 3);
  CHECK(SurveyPrompts(prompts, {1, 2}, Finished({})).lines == 1);
  CHECK(SurveyPrompts(prompts, {}, Finished({{2, {"", "line-2"}}})).lines == 2);
  CHECK(SurveyPrompts(prompts, {}, Finished({{2, {"two", "line-2"}}})).changed->line == 2);
  CHECK(SurveyPrompts(prompts, {}, Finished({{4, {"four", "line-4"}}})).changed->line == 4);
}

TEST_CASE("lines that are not run are passed in portions") {
  constexpr int kLines = 5000;
  const TempDir dir;
  std::string text;
  for (int i = 1; i < kLines; ++i) text += "line\n\n";
  const Descriptor file(dir.Write("in", text + "last\n"));
  LineFilter filter({2 * (kLines - 1), 2 * kLines}, {}, nullptr);
  RequestParser parser = Parser();
  PromptSource::Options options;
  options.fd = file.Fd();
  options.filter = &filter;
  PromptSource source(std::move(options), parser);
  Request request;
  std::optional<LineError> error;
  int calls = 1;
  for (; source.TryNext(&request, &error) == PromptSource::Next::kSkipped; ++calls) {
    const PromptSource::Taken taken = source.TakenSoFar();
    CHECK(taken.lines <= static_cast<uint64_t>(calls) * 1100);
    CHECK(taken.bytes + 1 == 6 * taken.lines);  // the blank line behind it not yet
    CHECK(source.Buffered());
  }
  CHECK(request.line == 2 * kLines - 1);
  CHECK(source.TakenSoFar().bytes == text.size() + 5);
  CHECK(calls >= 5);
}

TEST_CASE("prompts of the command line are finished under their numbers") {
  LineFilter filter({}, Finished({{2, {"two", "line-2"}}, {3, {"", "line-3"}}}), nullptr);
  RequestParser parser = Parser();
  PromptSource::Options options;
  options.prompts = {"one", "two", "", "four"};
  options.filter = &filter;
  PromptSource source(std::move(options), parser);
  Words lines;
  Request request;
  std::optional<LineError> error;
  while (source.TryNext(&request, &error) == PromptSource::Next::kRequest) {
    lines.push_back(request.custom_id);
    CHECK(request.line_hash == HashText(request.line == 1 ? "one" : "four"));
  }
  CHECK(lines == Words{"line-1", "line-4"});
  CHECK(filter.Skipped() == 2);
  CHECK(filter.Changed() == 0);
}

TEST_CASE("requests and refused lines carry the hash of their bytes") {
  const TempDir dir;
  const Descriptor file(dir.Write("in", "\xEF\xBB\xBF" + kA + "\r\n{broken\r\n"));
  RequestParser parser = Parser();
  PromptSource::Options options;
  options.fd = file.Fd();
  PromptSource source(std::move(options), parser);
  Request request;
  std::optional<LineError> error;
  REQUIRE(source.TryNext(&request, &error) == PromptSource::Next::kRequest);
  CHECK(request.line_hash == HashText(kA));
  REQUIRE(source.TryNext(&request, &error) == PromptSource::Next::kRequest);
  CHECK(error.has_value());
  CHECK(request.line_hash == HashText("{broken"));
}

TEST_CASE("a strict check names the first bad lines and leaves the file at its beginning") {
  const TempDir dir;
  std::string input = kA + "\n\n";
  for (int i = 0; i < 30; ++i) input += "{bad\n";
  input += kA + "\n" + Chat("long", std::string(20000, 'x')) + "\n" + kB + "\n";
  const Descriptor file(dir.Write("in.jsonl", input));
  RequestParser parser = Parser();
  const colibri::StrictReport report = CheckAllLines(file.Fd(), {}, parser);
  CHECK(report.lines == 34);
  CHECK(report.bad == 32);
  REQUIRE(report.problems.size() == 20);
  CHECK(report.problems[0].starts_with("line 3: the line is no valid JSON"));
  CHECK(report.Text().starts_with("32 of 34 lines cannot be answered\n  line 3: "));
  CHECK(report.Text().ends_with("\n  and 12 more"));
  CHECK(lseek(file.Fd(), 0, SEEK_CUR) == 0);
  const Descriptor good(dir.Write("good.jsonl", kA + "\n" + kB + "\n"));
  RequestParser second = Parser();
  CHECK(CheckAllLines(good.Fd(), {}, second).bad == 0);
}

TEST_CASE("a strict check begins where the run will, and leaves the file there") {
  const TempDir dir;
  const std::string begun = "{bad\n";
  const Descriptor file(dir.Write("in.jsonl", begun + kA + "\n" + kB + "\n"));
  const auto start = static_cast<off_t>(begun.size());
  REQUIRE(lseek(file.Fd(), start, SEEK_SET) == start);
  RequestParser parser = Parser();
  const colibri::StrictReport report = CheckAllLines(file.Fd(), {}, parser);
  CHECK(report.lines == 2);
  CHECK(report.bad == 0);
  CHECK(lseek(file.Fd(), 0, SEEK_CUR) == start);
}

TEST_CASE("a strict check finds the second use of an id and a prompt beyond the context") {
  const TempDir dir;
  const Descriptor file(dir.Write("in", kA + "\n" + kA + "\n" + kB + "\n"));
  RequestParser parser = Parser();
  CHECK(CheckAllLines(file.Fd(), {}, parser).problems ==
        Words{"line 2: an earlier line has the same custom_id, \"a\""});
  RequestParser second = Parser(2);
  CHECK(CheckAllLines(file.Fd(), {}, second).bad == 3);
}

namespace {

std::string Refused(const std::string& path, const RunOutputOptions& options,
                    const Manifest& manifest = TestManifest()) {
  try {
    OpenRunOutput(path, options, manifest);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

const RunOutputOptions kResume{true, false, false}, kOverwrite{false, true, false},
    kRetry{true, false, true};

}  // namespace

TEST_CASE("a new output gets its manifest before anything is written to it") {
  const TempDir dir;
  for (const RunOutputOptions& options : {RunOutputOptions{}, kResume, kOverwrite}) {
    const RunOutput out = OpenRunOutput(dir.Path("out"), options, TestManifest());
    CHECK(out.file->Size() == 0);
    CHECK(out.finished.Empty());
    CHECK(out.run_id == "run-1");
    CHECK(colibri::ReadManifest(dir.Path("out.manifest.json")).has_value());
  }
}

TEST_CASE("an output with answers is neither emptied nor extended unless told so") {
  const TempDir dir;
  const std::string path = dir.Write("out", TestRecord(1, kA, "a"));
  CHECK(Refused(path, {}).find("--resume goes on in it, --overwrite empties it") !=
        std::string::npos);
  CHECK(Refused(path, kResume).find("out.manifest.json is not there") != std::string::npos);
  CHECK(ReadWhole(path) == TestRecord(1, kA, "a"));
  CHECK_FALSE(fs::exists(path + ".manifest.json"));
  CHECK(OpenRunOutput(path, kOverwrite, TestManifest()).file->Size() == 0);
}

TEST_CASE("a run goes on under its first id, with the torn end cut off") {
  const TempDir dir;
  const std::string path = dir.Path("out");
  const std::string record = TestRecord(1, kA, "a");
  OpenRunOutput(path, {}, TestManifest());
  dir.Write("out", record + record.substr(0, 30));
  Manifest second = TestManifest();
  second.run_id = "run-2";
  const RunOutput out = OpenRunOutput(path, kResume, second);
  CHECK(out.run_id == "run-1");
  CHECK(out.finished.Count() == 1);
  CHECK(out.notes == Words{path + ": a torn end of 30 bytes was cut off"});
  CHECK(ReadWhole(path) == record);
}

TEST_CASE("another manifest is refused by name and value, and nothing is changed") {
  const TempDir dir;
  const std::string path = dir.Path("out");
  OpenRunOutput(path, {}, TestManifest());
  const std::string text = TestRecord(1, kA, "a") + "torn";
  dir.Write("out", text);
  Manifest other = TestManifest();
  other.options[0].second = "0.5";
  CHECK(Refused(path, kResume, other) ==
        path + " cannot be resumed: its lines were answered with\n  temperature: was 1, is 0.5");
  CHECK(ReadWhole(path) == text);
  CHECK(colibri::ReadManifest(path + ".manifest.json")->options == TestManifest().options);
}

TEST_CASE("an output without a whole record starts afresh with any manifest") {
  const TempDir dir;
  const std::string path = dir.Path("out");
  OpenRunOutput(path, {}, TestManifest());
  dir.Write("out", TestRecord(1, kA, "a").substr(0, 50));
  Manifest other = TestManifest();
  other.options[0].second = "0.5";
  const RunOutput out = OpenRunOutput(path, kResume, other);
  CHECK(out.file->Size() == 0);
  CHECK(out.finished.Empty());
  CHECK(colibri::ReadManifest(path + ".manifest.json")->options == other.options);
}

TEST_CASE("failed lines are finished unless they are to be tried again") {
  const TempDir dir;
  const std::string path = dir.Path("out");
  OpenRunOutput(path, {}, TestManifest());
  const std::string good = TestRecord(2, kB, "b");
  dir.Write("out", TestRecord(1, kA, "a", 500) + good);
  CHECK(OpenRunOutput(path, kResume, TestManifest()).finished.Count() == 2);
  const RunOutput out = OpenRunOutput(path, kRetry, TestManifest());
  REQUIRE(out.finished.Count() == 1);
  CHECK(out.finished.At(0).line == 2);
  CHECK(out.notes == Words{"1 failed lines are run again"});
  CHECK(ReadWhole(path) == good);
}

TEST_CASE("a device gets no manifest and cannot be resumed") {
  CHECK_FALSE(OpenRunOutput("/dev/null", {}, TestManifest()).file->Regular());
  CHECK_FALSE(fs::exists("/dev/null.manifest.json"));
  CHECK(Refused("/dev/null", kResume) == "--resume: /dev/null is no regular file");
}

TEST_CASE("a manifest that cannot be written leaves no empty output behind") {
  const TempDir dir;
  {
    const colibri::FileSizeLimit full(10);
    CHECK_THROWS_AS(OpenRunOutput(dir.Path("out"), {}, TestManifest()), IoError);
  }
  CHECK(fs::is_empty(dir.Path("")));
}
