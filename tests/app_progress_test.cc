// How long a run takes, what it shows meanwhile and what it says at its end.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "apps/estimate.h"
#include "apps/progress.h"
#include "apps/summary.h"
#include "tests/output_records.h"
#include "tests/run_program.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;
using doctest::Approx;

WorkLeft Plain(int32_t sequences, int32_t rows) {
  WorkLeft work;
  work.unread = 0;
  work.sequences = sequences;
  work.rows = work.prefill_rows = rows;
  return work;
}

double Sweeps(const WorkLeft& work) {
  const auto left = SweepsStillNeeded(work);
  REQUIRE(left.has_value());
  return left->sweeps;
}

bool AtMost(const WorkLeft& work) { return SweepsStillNeeded(work)->at_most; }

TEST_CASE("nothing under way and nothing unread needs no sweep") {
  const WorkLeft work = Plain(4, 8);
  CHECK(Sweeps(work) == 0);
  CHECK_FALSE(AtMost(work));
}

TEST_CASE("before an answer has ended max_tokens bounds the sweeps, and that is said") {
  WorkLeft work = Plain(4, 8);
  work.lines = work.started = 2;
  work.under_way = {{0, 3, 10}, {0, 1, 5}};
  work.generated_tokens = 4;
  CHECK(Sweeps(work) == 7);
  CHECK(AtMost(work));
  // A prefill of 17 rows takes three sweeps, whose last draws the first of five tokens.
  work.under_way = {{0, 3, 6}, {17, 0, 5}};
  CHECK(Sweeps(work) == 7);
}

TEST_CASE("once answers have ended the others are expected to be as long") {
  WorkLeft work = Plain(4, 8);
  work.lines = work.started = 3;
  work.ended = 2;
  work.generated_tokens = 20;  // 10 for each that ended
  work.under_way = {{0, 4, 100}};
  CHECK(Sweeps(work) == 6);
  CHECK_FALSE(AtMost(work));
  work.under_way = {{0, 40, 100}};  // longer than expected already
  CHECK(Sweeps(work) == 5);
  work.under_way = {{0, 40, 42}};  // but not beyond its max_tokens
  CHECK(Sweeps(work) == 2);
}

TEST_CASE("unread lines share the sequences with those under way") {
  WorkLeft work = Plain(2, 8);
  work.lines = work.started = 4;
  work.ended = 2;
  work.generated_tokens = 20;
  work.limits = 400;
  work.prompt_tokens = 16;  // 4 a line: no sweep of its own
  work.under_way = {{0, 5, 100}, {0, 5, 100}};
  work.unread = 10;
  // 2 x 5 + 10 x 10 steps on two sequences, and a quarter of an answer because the last two do not
  // end together.
  CHECK(Sweeps(work) == 58);
  work.unread.reset();
  CHECK_FALSE(SweepsStillNeeded(work));
}

TEST_CASE("lines with several answers, short limits and long prompts count as what they are") {
  WorkLeft work = Plain(1, 8);
  work.lines = 2;
  work.started = work.ended = 4;  // two answers a line
  work.generated_tokens = 40;
  work.limits = 40;
  work.prompt_tokens = 4;
  work.unread = 3;
  CHECK(Sweeps(work) == 60);
  work.limits = 20;  // five tokens an answer at most
  CHECK(Sweeps(work) == 30);
  work.prompt_tokens = 4 * 17;  // three sweeps of prefill, the last of which draws
  CHECK(Sweeps(work) == 42);
}

TEST_CASE("frames take turns, and rows and prefill bound the sweeps too") {
  WorkLeft work = Plain(4, 8);
  work.lines = work.started = 4;
  work.frames = 2;
  work.under_way = {{0, 0, 10}, {0, 0, 10}};
  CHECK(Sweeps(work) == 20);
  work.frames = 1;
  work.rows = 1;
  CHECK(Sweeps(work) == 20);  // one row a sweep for two answers
  work.rows = 8;
  work.prefill_rows = 2;
  work.under_way = {{200, 0, 1}};
  CHECK(Sweeps(work) == 100);
}

TEST_CASE("nothing is guessed of unread lines before a line was taken in and started") {
  WorkLeft work = Plain(1, 1);
  work.unread = 5;
  CHECK_FALSE(SweepsStillNeeded(work));
  work.lines = 3;  // all of them refused
  CHECK_FALSE(SweepsStillNeeded(work));
}

TEST_CASE("unread lines are guessed from the bytes read, less other shards' and finished ones") {
  CHECK_FALSE(GuessUnread({1000, 0, 0, 0, 1}));
  CHECK(GuessUnread({1000, 100, 5, 0, 1}) == Approx(45));
  CHECK(GuessUnread({1000, 100, 5, 5, 3}) == Approx(10));
  CHECK(GuessUnread({1000, 100, 5, 500, 1}) == 0);
  CHECK(GuessUnread({1000, 1000, 5, 0, 1}) == 0);
  CHECK(GuessUnread({1000, 2000, 5, 0, 1}) == 0);
  CHECK(GuessUnread({0, 0, 0, 0, 1}) == 0);
}

TEST_CASE("the pace of sweeps is unknown until one has ended, then that of the last ones") {
  SweepPace pace;
  pace.Add(0.5, 0, 0, 100);
  CHECK_FALSE(pace.SecondsASweep());
  CHECK_FALSE(pace.TokensASecond());
  CHECK_FALSE(pace.SecondsLeft(1, 3));
  pace.Add(60, 1, 30, 600);  // a slow first sweep
  CHECK(pace.SecondsASweep() == Approx(60));
  CHECK(pace.TokensASecond() == Approx(0.5));
  CHECK(pace.BytesASecond() == Approx(10));
  pace.Add(61, 1, 30, 900);  // still in the second
  CHECK(pace.SecondsASweep() == Approx(60));
  for (uint64_t i = 0; i < 30; ++i) {
    pace.Add(static_cast<double>(70 + 10 * i), 2 + i, 60 + 30 * i, 0);
  }
  CHECK(pace.SecondsASweep().value() == Approx(10).epsilon(0.02));
  CHECK(pace.TokensASecond().value() == Approx(3).epsilon(0.02));
}

TEST_CASE("the pace of short sweeps is that of some seconds") {
  SweepPace pace;
  for (uint64_t i = 1; i <= 40; ++i) pace.Add(0.25 * static_cast<double>(i), 250 * i, 0, 0);
  CHECK(pace.SecondsASweep() == Approx(0.001));
  pace.Add(10.25, 10'001, 0, 0);  // a hiccup of one sample is no tenfold pace
  CHECK(pace.SecondsASweep().value() < 0.002);
}

TEST_CASE("time left runs down within a sweep and waits for one that takes long") {
  SweepPace pace;
  pace.Add(10, 1, 0, 0);
  CHECK(pace.SecondsLeft(10, 3) == Approx(30));
  CHECK(pace.SecondsLeft(14, 3) == Approx(26));
  CHECK(pace.SecondsLeft(25, 3) == Approx(20));
  CHECK(pace.SecondsLeft(14, 0) == Approx(0));
}

TEST_CASE("durations are short and readable") {
  CHECK(DurationText(0) == "0 s");
  CHECK(DurationText(119.4) == "119 s");
  CHECK(DurationText(119.6) == "2 min");
  CHECK(DurationText(119 * 60) == "119 min");
  CHECK(DurationText(7500) == "2 h 05 min");
  CHECK(DurationText(100 * 3600) == "4 d 4 h");
  CHECK(DurationText(1e30).size() < 30);
}

ProgressFigures Figures() {
  ProgressFigures f;
  f.seconds = 100;
  f.lines_done = 12;
  f.lines_read = 20;
  f.lines_under_way = 8;
  f.lines_total = 48;
  f.tokens = 1234;
  f.sweeps = 37;
  f.bytes_read = 150'000'000'000;
  f.tokens_a_second = 13.5;
  f.bytes_a_second = 1.25e9;
  f.seconds_a_sweep = 2.7;
  f.hit_rate = 0.456;
  f.layer = 3;
  f.layers = 92;
  f.sweeps_left = SweepsLeft{100, false};
  f.seconds_left = 300;
  return f;
}

TEST_CASE("the bar shows what matters and never wraps") {
  ProgressFigures f = Figures();
  CHECK(BarText(f, 200) ==
        "12/48 lines [##--------], 13.50 tokens/s, about 5 min left, layer 3/92, 1.25 GB/s, 46 % "
        "hits, 1234 tokens");
  for (int32_t columns = 0; columns < 120; ++columns) {
    const std::string bar = BarText(f, columns);
    CHECK(static_cast<int32_t>(bar.size()) < std::max(columns, 2));
    CHECK(BarText(f, 200).starts_with(bar.substr(0, 5)));
  }
  CHECK(BarText(f, 45) == "12/48 lines, 13.50 tokens/s");
  f.lines_failed = 2;
  f.sweeps_left->at_most = true;
  CHECK(BarText(f, 80).starts_with(
      "12/48 lines (2 failed) [##--------], 13.50 tokens/s, at most 5 min left"));
}

TEST_CASE("what is unknown is said to be, and a guess is marked") {
  ProgressFigures f = Figures();
  f.lines_total.reset();
  f.sweeps_left.reset();
  f.seconds_left.reset();
  f.tokens_a_second.reset();
  f.bytes_a_second.reset();
  CHECK(BarText(f, 200) == "12/20+ lines, time left unknown, layer 3/92, 46 % hits, 1234 tokens");
  CHECK(PlainText(f) ==
        "12/20+ lines, 1234 tokens, 46 % hits, sweep 38, layer 3/92, time left unknown");
  f = Figures();
  f.lines_total = 4812.4;
  f.total_guessed = true;
  CHECK(PlainText(f) ==
        "12/~4812 lines, 1234 tokens, 13.50 tokens/s (average 12.34), 1.25 GB/s, 46 % hits, sweep "
        "38, layer 3/92, about 5 min left");
}

TEST_CASE("the json line is valid whatever is unknown") {
  const Json all = Json::parse(JsonText(Figures()));
  CHECK(all.at("seconds_left") == 300);
  CHECK(all.at("lines_total") == 48);
  CHECK(all.at("tokens_per_second") == Approx(12.34));
  CHECK(all.at("recent_tokens_per_second") == 13.5);
  CHECK(all.at("sweeps_left") == 100);
  CHECK(all.at("layer") == 2);  // from 0, as ever
  const Json none = Json::parse(JsonText({}));
  for (const char* key :
       {"lines_total", "recent_tokens_per_second", "recent_gb_per_second",
        "predicted_tokens_per_second", "seconds_per_sweep", "sweeps_left", "seconds_left"}) {
    CHECK(none.at(key).is_null());
  }
  CHECK(none.at("tokens_per_second") == 0);
  CHECK(none.at("gb_per_second") == 0);
}

LineOutcome Outcome(uint64_t line, const std::string& id, double seconds, uint64_t tokens) {
  LineOutcome outcome;
  outcome.line = line;
  outcome.id = id;
  outcome.seconds = seconds;
  outcome.generated_tokens = tokens;
  outcome.ends.length = 1;
  return outcome;
}

TEST_CASE("the summary names failures by kind, ends, and of many lines the slowest and longest") {
  Tally tally;
  tally.Add(Outcome(1, "line-1", 1.5, 10));
  CHECK(LinesSummary(tally, 10, 2) ==
        "1 line, 0 failed; 0 prompt and 10 generated tokens, in 2.0 s: 5.00 tokens/s\n"
        "ends: 1 length\n");
  tally.Add(Outcome(2, "a\x1b[2J\"\xff", 9, 20));
  tally.Add(Outcome(3, std::string(50, 'x'), 1, 30));
  LineOutcome cut = Outcome(4, "d", 0.5, 5);
  cut.ends = {0, 0, 1, 0};
  cut.reasoning_tokens = 4;
  tally.Add(cut);
  for (const uint64_t line : {7u, 6u}) {
    LineOutcome bad;
    bad.line = line;
    bad.error = "invalid_json";
    tally.Add(bad);
  }
  CHECK(LinesSummary(tally, 70, 10) ==
        "6 lines, 2 failed; 0 prompt and 65 generated tokens (4 reasoning), 5 more for lines "
        "without a record, in 10.0 s: 7.00 tokens/s\n"
        "ends: 3 length, 1 degenerate (cut for repeating)\n"
        "failed: 2 invalid_json (first: line 6)\n"
        "slowest: line 2 \"a\\u001b[2J\\\"\" 9.0 s, line 1 1.5 s, line 3 \"" +
            std::string(40, 'x') +
            "...\" 1.0 s\n"
            "longest: line 3 \"" +
            std::string(40, 'x') +
            "...\" 30 tokens, line 2 \"a\\u001b[2J\\\"\" 20 tokens, line 1 10 tokens\n");
}

TEST_CASE("the summary tells of prompt tokens that were shared, where there are some") {
  EngineStats stats;
  stats.scheduler.prompt_tokens = 900;
  CHECK(MachineSummary(stats, Plan()).find("prompts:") == std::string::npos);
  stats.scheduler.cached_tokens = 640;
  CHECK(MachineSummary(stats, Plan())
            .starts_with("prompts: 640 of 900 tokens shared with others before them\n"));
}

Words With(const Words& more) {
  Words all = {"-m", COLIBRI_SOURCE_DIR "/apps/demo/model", "--ram", "200MB", "--max-seqs", "2"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

std::string Chat(const std::string& id, int32_t max_tokens) {
  return R"({"custom_id":")" + id + R"(","body":{"messages":[{"role":"user","content":"Hello"}],)" +
         R"("max_tokens":)" + std::to_string(max_tokens) + "}}\n";
}

TEST_CASE("a run sums up what it wrote") {
  const TempDir dir;
  std::string text = "{broken\n";
  for (int i = 1; i < 7; ++i) text += Chat("q" + std::to_string(i), i);
  const ProgramOutcome outcome =
      RunProgram("colibri-run", With({"-i", dir.Write("in.jsonl", text), "--progress", "json"}));
  CHECK(outcome.exit_code == 1);
  Has(outcome.err, "7 lines, 1 failed");
  Has(outcome.err, "and 21 generated tokens");
  Has(outcome.err, "ends: 6 length\n");
  Has(outcome.err, "failed: 1 invalid_json (first: line 1)\n");
  Has(outcome.err, "slowest: line ");
  Has(outcome.err, "longest: line 7 \"q6\" 6 tokens, line 6 \"q5\" 5 tokens");
  size_t objects = 0;
  std::istringstream lines(outcome.err);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("{")) continue;
    const Json json = Json::parse(line);
    CHECK(json.at("lines_total") == 7);
    ++objects;
  }
  CHECK(objects > 0);
}

TEST_CASE("records that a full drive lost are not counted as done") {
  const TempDir dir;
  std::string text;
  for (int i = 1; i < 7; ++i) text += Chat("q" + std::to_string(i), 2);
  const std::string input = dir.Write("in.jsonl", text), out = dir.Path("out.jsonl");
  ProgramOutcome outcome;
  {
    const FileSizeLimit full(2500);  // of some 900 bytes a record
    outcome = RunProgram("colibri-run", With({"-i", input, "-o", out}));
  }
  CHECK(outcome.exit_code == 4);
  const std::string records = ReadWhole(out);
  const auto written = std::count(records.begin(), records.end(), '\n');
  REQUIRE(written > 1);
  REQUIRE(written < 6);
  Has(outcome.err, std::to_string(written) + " lines, 0 failed");
}

TEST_CASE("the bar is taken away before the summary and after a message is drawn again") {
  const TempDir dir;
  RunningProgram program("colibri-run",
                         With({"-i", "-", "-o", dir.Path("out"), "--max-tokens", "2"}), {},
                         RunningProgram::Screen::kTerminal);
  program.Write("Hello\n");
  REQUIRE(program.WaitForOutput("\r\033[K1/1+ lines"));
  program.Signal(SIGINT);
  // Before the input ends, which would end the run as well.
  REQUIRE(program.WaitForOutput("interrupted: "));
  const ProgramOutcome outcome = program.Wait();
  CHECK(outcome.exit_code == 130);
  // The message begins at a cleared line, and the bar stands below it.
  Has(outcome.out, "\r\033[Kinterrupted: ");
  const size_t said = outcome.out.find("interrupted: ");
  const size_t end = outcome.out.find('\n', said);
  CHECK(outcome.out.substr(end + 1).starts_with("1/1+ lines"));
  Has(outcome.out, "\r\033[K1 line, 0 failed");
}

}  // namespace
}  // namespace colibri
