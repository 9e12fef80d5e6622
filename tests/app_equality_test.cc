// The bytes of a line are its own: the built program gives them whatever runs beside the line and
// however the pipeline is set.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "runtime/record.h"
#include "tests/folder_watch.h"
#include "tests/output_records.h"
#include "tests/run_program.h"
#include "tests/temp_dir.h"
#include "tests/watchdog.h"

namespace colibri {
namespace {

using Words = std::vector<std::string>;
using Answers = std::map<std::string, std::string>;  // custom_id -> bytes of the line

std::string Line(const std::string& id, const std::string& url, const std::string& body) {
  return R"({"custom_id":")" + id + R"(","method":"POST","url":"/v1/)" + url + R"(","body":{)" +
         body + "}}\n";
}

std::string User(const std::string& text) {
  return R"("messages":[{"role":"user","content":")" + text + R"("}])";
}

// Greedy and drawn, short and long, several choices, log probabilities, a line that is refused.
const Words& Lines() {
  static const Words kLines = {
      Line("greedy", "chat/completions",
           User("Tell me a passage from Treasure Island.") + R"(,"temperature":0,"max_tokens":24)"),
      Line("drawn", "chat/completions",
           User("Continue The Secret Garden.") + R"(,"temperature":0.9,"max_tokens":30)"),
      Line("several", "chat/completions",
           User("Hello") + R"(,"n":3,"seed":7,"top_p":0.9,"max_tokens":12)"),
      Line("figures", "chat/completions",
           User("Good morning") + R"(,"logprobs":true,"top_logprobs":3,"max_tokens":6)"),
      Line("plain", "completions",
           R"("prompt":"It was late in the autumn, and the road over the moor had been washed )"
           R"(away, so that the carrier, who came but once a week in any weather, had put up his )"
           R"(horse at the inn and sat","temperature":0.7,"max_tokens":16)"),
      Line("refused", "chat/completions", User("Hello") + R"(,"max_tokens":0)")};
  return kLines;
}

Words With(const std::string& input, const Words& more) {
  Words all = {"-m", COLIBRI_SOURCE_DIR "/apps/demo/model", "-i", input, "--ram", "200MB"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

// No line twice.
Answers AnswersIn(const std::string& records) {
  Answers answers;
  std::istringstream lines(records);
  for (std::string line; std::getline(lines, line);) {
    const std::string bytes = LineBytes(line);
    const size_t at = bytes.find("\"custom_id\":\"") + 13;
    CHECK(answers.emplace(bytes.substr(at, bytes.find('"', at) - at), bytes).second);
  }
  return answers;
}

Answers Run(const std::string& input, const Words& more) {
  const ProgramOutcome outcome = RunProgram("colibri-run", With(input, more));
  INFO(outcome.err);
  CHECK((outcome.exit_code == 0 || outcome.exit_code == 1));
  return AnswersIn(outcome.out);
}

std::string Joined(const Words& lines) {
  std::string text;
  for (const std::string& line : lines) text += line;
  return text;
}

// All lines in one file, with the program's own settings.
const Answers& Expected() {
  static const Answers kExpected = [] {
    const TempDir dir;
    return Run(dir.Write("all.jsonl", Joined(Lines())), {});
  }();
  return kExpected;
}

// Short prompts: chats and completions, greedy and drawn, some with two choices, log probabilities
// or a stop string.
Words Crowd(int count) {
  static const Words kWords = {"ship", "garden", "winter", "river", "lantern", "the", "a",  "old",
                               "and",  "Alice",  "went",   "to",    "under",   "saw", "my", "sea"};
  std::mt19937 random(1000);
  const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random()) % n; };
  Words lines;
  for (int i = 0; i < count; ++i) {
    std::string text = "Once";
    for (uint32_t words = 1 + below(9); words > 0; --words) text += ' ' + kWords[below(16)];
    const bool chat = below(2) == 0;
    std::string body = chat ? User(text) : R"("prompt":")" + text + '"';
    body += R"(,"max_tokens":)" + std::to_string(4 + below(5));
    static const Words kSampling = {R"(,"temperature":0)", R"(,"temperature":0.9)",
                                    R"(,"temperature":1.3,"top_p":0.8,"seed":11)"};
    body += kSampling[below(3)];
    if (below(8) == 0) body += R"(,"n":2)";
    if (below(8) == 0) body += chat ? R"(,"logprobs":true,"top_logprobs":2)" : R"(,"logprobs":2)";
    if (below(8) == 0) body += R"(,"stop":"e")";
    lines.push_back(Line("q" + std::to_string(i), chat ? "chat/completions" : "completions", body));
  }
  return lines;
}

// The answers of a run that is killed while half of its lines are still to come, and goes on.
Answers RunKilledAndResumed(const Words& lines, const Words& setting) {
  const Watchdog watchdog("a run that is killed and goes on", std::chrono::seconds(500));
  const TempDir dir;
  const std::string out = dir.Path("answers.jsonl");
  Words more = setting;
  more.insert(more.end(), {"-o", out, "--resume", "--input-format", "jsonl"});
  const Words half(lines.begin(), lines.begin() + static_cast<std::ptrdiff_t>(lines.size() / 2));
  const FolderWatch watch(dir.Path(""));
  RunningProgram program("colibri-run", With("-", more));
  program.Write(Joined(half));
  watch.WaitForRecords(out, 1);
  program.Signal(SIGKILL);
  CHECK(program.Wait().signal == SIGKILL);
  CHECK(RecordsIn(out) <= static_cast<std::ptrdiff_t>(half.size()));
  CHECK(Run(dir.Write("all.jsonl", Joined(lines)), more).empty());  // they are in the file
  return AnswersIn(ReadWhole(out));
}

}  // namespace

TEST_CASE("every line of the comparisons below has an answer of its own") {
  REQUIRE(Expected().size() == Lines().size());
  for (const auto& line : Expected()) {
    CAPTURE(line.first);
    const bool answered = line.second.find("\"choices\":[{") != std::string::npos;
    CHECK(answered == (line.first != "refused"));
  }
}

TEST_CASE("a line alone has the bytes it has among others") {
  const TempDir dir;
  for (const std::string& line : Lines()) {
    const Answers alone = Run(dir.Write("one.jsonl", line), {});
    REQUIRE(alone.size() == 1);
    CHECK(alone.begin()->second == Expected().at(alone.begin()->first));
  }
}

TEST_CASE("the order of lines does not matter") {
  const TempDir dir;
  const Words reversed(Lines().rbegin(), Lines().rend());
  CHECK(Run(dir.Write("all.jsonl", Joined(reversed)), {}) == Expected());
}

// A pipe's lines start as they come; of a file the longest start first, as a whole file is at hand.
TEST_CASE("lines that start in another order than that of the input have the same bytes") {
  const TempDir dir;
  const std::string text = Joined(Lines());
  const auto order_of = [](const std::string& records) {
    Words ids;
    std::istringstream lines(records);
    for (std::string line; std::getline(lines, line);) {
      const size_t at = line.find("\"custom_id\":\"") + 13;
      ids.push_back(line.substr(at, line.find('"', at) - at));
    }
    return ids;
  };
  const Words one = {"--max-seqs", "1"};
  const ProgramOutcome file = RunProgram("colibri-run", With(dir.Write("all.jsonl", text), one));
  Words piped = one;
  piped.insert(piped.end(), {"--input-format", "jsonl"});
  const ProgramOutcome pipe = RunProgram("colibri-run", With("-", piped), text);
  CHECK(order_of(pipe.out) == Words{"greedy", "drawn", "several", "figures", "plain", "refused"});
  CHECK(order_of(file.out) == Words{"refused", "drawn", "greedy", "plain", "several", "figures"});
  CHECK(AnswersIn(file.out) == Expected());
  CHECK(AnswersIn(pipe.out) == Expected());
}

TEST_CASE("no setting of the pipeline changes a line") {
  const TempDir dir;
  const std::string input = dir.Write("all.jsonl", Joined(Lines()));
  const std::vector<Words> settings = {
      {"--threads", "1"},
      {"--threads", "2"},
      {"--slots", "1"},
      {"--slots", "25%", "--io", "pread"},
      {"--slots", "100%", "--direct", "off"},
      {"--slots", "3", "--direct", "on"},
      {"--slots", "25%", "--io", "uring", "--direct", "on", "--io-depth", "1"},
      {"--slots", "25%", "--prefetch", "off"},
      {"--draft", "auto", "--slots", "25%"},
      {"--draft", "1", "--kv-ram", "4MB", "--max-seqs", "3"},
      {"--draft", "4", "--frames", "2", "--threads", "2"},
      {"--slots", "25%", "--prefetch", "on"},
      {"--max-rows", "1"},
      {"--max-rows", "7"},
      {"--max-rows", "64", "--prefill-rows", "5"},
      {"--frames", "1"},
      {"--frames", "2", "--slots", "2", "--max-rows", "7"},
      {"--max-seqs", "1"},
      {"--ctx-size", "160", "--frames", "2"}};
  for (const Words& setting : settings) {
    CAPTURE(setting.front());
    CAPTURE(setting[1]);
    CHECK(Run(input, setting) == Expected());
  }
}

// A thousand lines with COLIBRI_FULL_TESTS.
TEST_CASE("a crowd has the same bytes at any batch size, in any order, resumed or not") {
  const bool full = std::getenv("COLIBRI_FULL_TESTS") != nullptr;
  Words lines = Crowd(full ? 1000 : 100);
  std::mt19937 random(1);
  Answers expected;
  for (const std::string& size : full ? Words{"256", "64", "7", "1"} : Words{"64", "7", "1"}) {
    CAPTURE(size);
    const TempDir dir;
    const Words setting = {"--thinking", "off", "--ctx-size", "128",
                           "--max-seqs", size,  "--max-rows", size};
    const Answers whole = Run(dir.Write("all.jsonl", Joined(lines)), setting);
    if (expected.empty()) expected = whole;
    CHECK(whole == expected);
    std::shuffle(lines.begin(), lines.end(), random);
    CHECK(RunKilledAndResumed(lines, setting) == expected);
    std::shuffle(lines.begin(), lines.end(), random);
  }
  CHECK(expected.size() == lines.size());
}

TEST_CASE("another seed does change a line, so that the comparisons mean something") {
  const TempDir dir;
  const Answers other = Run(dir.Write("all.jsonl", Joined(Lines())), {"--seed", "5"});
  CHECK(other.at("drawn") != Expected().at("drawn"));
  CHECK(other.at("greedy") == Expected().at("greedy"));
}

}  // namespace colibri
