// A night of colibri-run and what may go wrong in it: the program is killed, the drive fills up,
// several machines share the prompts; the answers are those of a quiet night. With the demo model.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "runtime/record.h"
#include "runtime/record_reader.h"
#include "tests/folder_watch.h"
#include "tests/output_records.h"
#include "tests/run_program.h"
#include "tests/temp_dir.h"
#include "tests/watchdog.h"

namespace colibri {
namespace {

using Words = std::vector<std::string>;
using Answers = std::map<uint64_t, std::string>;  // line -> its bytes

std::string Chat(const std::string& id, const std::string& text, int32_t max_tokens) {
  return R"({"custom_id":")" + id +
         R"(","method":"POST","url":"/v1/chat/completions","body":{"messages":[{"role":"user",)"
         R"("content":")" +
         text + R"("}],"temperature":0.9,"max_tokens":)" + std::to_string(max_tokens) + "}}\n";
}

// 18 lines of different lengths, so that they end out of order; one is blank, one fails.
constexpr size_t kRecords = 17;
std::string Prompts() {
  static const std::vector<int32_t> kLengths = {40, 3, 9, 1, 25, 4, 12, 2};
  std::string text;
  for (size_t i = 0; i < 16; ++i) {
    if (i == 4) text += "\n";
    if (i == 9) text += Chat("refused", "Hello", 0);
    text += Chat("line " + std::to_string(i), "Tell me story number " + std::to_string(i) + ".",
                 kLengths[i % kLengths.size()]);
  }
  return text;
}

Words With(const Words& more) {
  // Few answers at once, so that records come one after the other.
  Words all = {"-m",         COLIBRI_SOURCE_DIR "/apps/demo/model",
               "--ram",      "200MB",
               "--max-seqs", "3",
               "--thinking", "off"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

ProgramOutcome Run(const Words& more, std::string_view input = "") {
  return RunProgram("colibri-run", With(more), input);
}

bool Contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

std::vector<uint64_t> LineNumbers(const std::string& records) {
  std::vector<uint64_t> numbers;
  std::istringstream lines(records);
  for (std::string line; std::getline(lines, line);) {
    const auto facts = ReadRecordFacts(line);
    REQUIRE(facts.has_value());
    numbers.push_back(facts->line);
  }
  return numbers;
}

// No line twice.
Answers AnswersIn(const std::string& records) {
  REQUIRE((records.empty() || records.back() == '\n'));
  Answers answers;
  std::istringstream lines(records);
  for (std::string line; std::getline(lines, line);) {
    const auto facts = ReadRecordFacts(line);
    REQUIRE(facts.has_value());
    CHECK(answers.emplace(facts->line, LineBytes(line)).second);
  }
  return answers;
}

// Of a run that nothing disturbs.
const Answers& Expected() {
  static const Answers kExpected = [] {
    const TempDir dir;
    const ProgramOutcome outcome = Run({"-i", dir.Write("prompts.jsonl", Prompts())});
    INFO(outcome.err);
    REQUIRE(outcome.exit_code == 1);  // one line is refused
    return AnswersIn(outcome.out);
  }();
  return kExpected;
}

int Rounds(int usual, int full) {
  return std::getenv("COLIBRI_FULL_TESTS") != nullptr ? full : usual;
}

// A run that `signal` ends at a moment of the generator's choice: while it starts, or when some
// more records are there. Returns false if the output was whole already.
bool InterruptedRun(const Words& arguments, const std::string& out, int signal,
                    std::mt19937& random) {
  const std::ptrdiff_t have = RecordsIn(out);
  const std::ptrdiff_t left = static_cast<std::ptrdiff_t>(kRecords) - have;
  if (left <= 0) return false;
  const FolderWatch watch(std::filesystem::path(out).parent_path().string());
  RunningProgram program("colibri-run", With(arguments));
  switch (const auto moment = static_cast<std::ptrdiff_t>(random() % 8); moment) {
    case 0:
      program.WaitForErrors("model:");
      break;
    case 1:
      program.WaitForErrors("mode:");
      break;
    default:
      watch.WaitForRecords(out, have + 1 + static_cast<std::ptrdiff_t>(random()) % left);
  }
  program.Signal(signal);
  const ProgramOutcome outcome = program.Wait();
  INFO(outcome.err);
  // The last record may have been written before the signal came.
  const bool ended = outcome.exit_code == 1 && RecordsIn(out) == kRecords;
  const bool stopped = signal == SIGKILL ? outcome.signal == SIGKILL : outcome.exit_code == 130;
  CHECK((ended || stopped));
  return true;
}

void CheckRounds(int signal, int rounds) {
  const Answers& expected = Expected();
  std::mt19937 random(static_cast<uint32_t>(signal));
  for (int round = 0; round < rounds; ++round) {
    CAPTURE(round);
    const Watchdog watchdog("a round of a run that is interrupted");
    const TempDir dir;
    const std::string out = dir.Path("answers.jsonl");
    const Words arguments = {"-i", dir.Write("prompts.jsonl", Prompts()), "-o", out, "--resume"};
    for (auto kills = 1 + random() % 2; kills > 0; --kills) {
      InterruptedRun(arguments, out, signal, random);
      // A crash of the machine may leave a part of a record.
      if (signal == SIGKILL && random() % 2 == 0 && RecordsIn(out) > 0) {
        const std::string text = ReadWhole(out);
        std::ofstream(out, std::ios::app) << text.substr(0, 1 + random() % text.find('\n'));
      }
    }
    const ProgramOutcome last = Run(arguments);
    INFO(last.err);
    CHECK(last.exit_code == 1);
    const std::string whole = ReadWhole(out);
    CHECK(AnswersIn(whole) == expected);
  }
}

}  // namespace

TEST_CASE("the undisturbed run answers every line, some of them out of order") {
  CHECK(Expected().size() == kRecords);
}

TEST_CASE("kill -9 at any moment loses no line, doubles none and changes none") {
  CheckRounds(SIGKILL, Rounds(12, 200));
}

TEST_CASE("SIGTERM at any moment loses no line, doubles none and changes none") {
  CheckRounds(SIGTERM, Rounds(4, 200));
}

TEST_CASE("a full drive ends the run with advice, and what was written goes on") {
  const TempDir dir;
  const std::string out = dir.Path("answers.jsonl");
  const Words arguments = {"-i", dir.Write("prompts.jsonl", Prompts()), "-o", out, "--resume"};
  {
    const FileSizeLimit limit(7000);
    const ProgramOutcome full = Run(arguments);
    INFO(full.err);
    CHECK(full.exit_code == 4);
    CHECK(Contains(full.err, out));
    CHECK(Contains(full.err, "--resume goes on"));
  }
  const std::ptrdiff_t before = RecordsIn(out);
  CHECK(before > 0);
  CHECK(before < static_cast<std::ptrdiff_t>(kRecords));
  CHECK(Run(arguments).exit_code == 1);
  CHECK(AnswersIn(ReadWhole(out)) == Expected());
}

TEST_CASE("an output that is removed while the run writes it is there in the end") {
  const TempDir dir;
  const std::string out = dir.Path("out.jsonl");
  RunningProgram program("colibri-run", With({"-i", "-", "-o", out}));
  CHECK(program.WaitForErrors("mode:"));
  std::filesystem::remove(out);
  program.Write(Chat("a", "Hello", 2));
  const ProgramOutcome outcome = program.Wait();
  CHECK(outcome.exit_code == 0);
  CHECK(Contains(outcome.err, "was removed while it was written"));
  CHECK(LineNumbers(ReadWhole(out)) == std::vector<uint64_t>{1});
}

TEST_CASE("resuming a job that is done exits with 0 and changes nothing") {
  const TempDir dir;
  const std::string input = dir.Write("prompts", "Hello\nGood morning\n");
  const std::string out = dir.Path("answers.jsonl");
  REQUIRE(Run({"-i", input, "-o", out, "--max-tokens", "3"}).exit_code == 0);
  const std::string records = ReadWhole(out), manifest = ReadWhole(out + ".manifest.json");
  CHECK(manifest.size() > 10);
  const ProgramOutcome again = Run({"-i", input, "-o", out, "--max-tokens", "3", "--resume"});
  CHECK(again.exit_code == 0);
  CHECK(Contains(again.err, "nothing left to do"));
  CHECK_FALSE(Contains(again.err, "mode:"));  // the model was not loaded
  CHECK(ReadWhole(out) == records);
  CHECK(ReadWhole(out + ".manifest.json") == manifest);
  const ProgramOutcome shard = Run({"-i", input, "--shard", "5/6"});
  CHECK(shard.exit_code == 0);
  CHECK(Contains(shard.err, "0 prompts"));
  CHECK_FALSE(Contains(shard.err, "mode:"));
}

TEST_CASE("a run that goes on says which shard was written since it had begun") {
  const TempDir dir;
  const std::string model = dir.Path("model"), shard = model + "/out-00001.safetensors";
  std::filesystem::copy(COLIBRI_SOURCE_DIR "/apps/demo/model", model);
  const Words words = {"-m", model,           "--ram",        "200MB", "-i",      "-",
                       "-o", dir.Path("out"), "--max-tokens", "2",     "--resume"};
  REQUIRE(RunProgram("colibri-run", words, "Hello\n").exit_code == 0);
  const ProgramOutcome same = RunProgram("colibri-run", words, "Hello\nThe sea\n");
  CHECK(same.exit_code == 0);
  CHECK_FALSE(Contains(same.err, "was written after"));
  std::filesystem::last_write_time(shard,
                                   std::filesystem::last_write_time(shard) + std::chrono::hours(1));
  const ProgramOutcome newer = RunProgram("colibri-run", words, "Hello\nThe sea\nGood night\n");
  CHECK(newer.exit_code == 0);
  CHECK(Contains(newer.err, shard + " was written after this run had begun"));
}

TEST_CASE("resuming a job that is done but for failed lines says so and exits with 1") {
  const TempDir dir;
  const std::string out = dir.Path("answers.jsonl");
  const std::string input =
      dir.Write("prompts.jsonl", Chat("b", "Hello", 3) + Chat("refused", "Hello", 0));
  REQUIRE(Run({"-i", input, "-o", out}).exit_code == 1);
  const std::string records = ReadWhole(out);
  const ProgramOutcome again = Run({"-i", input, "-o", out, "--resume"});
  CHECK(again.exit_code == 1);
  CHECK(Contains(again.err, "nothing left to do"));
  CHECK(Contains(again.err, "1 of them failed"));
  CHECK_FALSE(Contains(again.err, "mode:"));
  CHECK(ReadWhole(out) == records);
  // The refused line came first; the order is made good without the model.
  CHECK(LineNumbers(records) == std::vector<uint64_t>{2, 1});
  CHECK(Run({"-i", input, "-o", out, "--resume", "--ordered"}).exit_code == 1);
  CHECK(LineNumbers(ReadWhole(out)) == std::vector<uint64_t>{1, 2});
}

TEST_CASE("a run that goes on plans memory for the answers that are left") {
  const TempDir dir;
  const std::string out = dir.Path("answers.jsonl");
  std::string text = "Hello\nGood morning\n";
  const Words words = {"-i",      dir.Write("prompts", text), "-o", out, "--max-tokens", "2",
                       "--resume"};
  const ProgramOutcome first = Run(words);
  REQUIRE(first.exit_code == 0);
  CHECK(Contains(first.err, "2 answers at once"));
  dir.Write("prompts", text + "Good evening\n");
  const ProgramOutcome second = Run(words);
  CHECK(second.exit_code == 0);
  CHECK(Contains(second.err, "1 answer at once"));
  CHECK(LineNumbers(ReadWhole(out)) == std::vector<uint64_t>{1, 2, 3});
}

TEST_CASE("an output that holds something is refused without a flag, both flags are named") {
  const TempDir dir;
  const std::string out = dir.Write("answers.jsonl", "precious\n");
  const ProgramOutcome outcome = Run({"-i", dir.Write("prompts.jsonl", Prompts()), "-o", out});
  CHECK(outcome.exit_code == 2);
  CHECK(Contains(outcome.err, "--resume"));
  CHECK(Contains(outcome.err, "--overwrite"));
  CHECK(ReadWhole(out) == "precious\n");
}

TEST_CASE("an option that would change answers is named when a run goes on without it") {
  const TempDir dir;
  const std::string input = dir.Write("prompts", "Hello\n");
  const std::string out = dir.Path("answers.jsonl");
  REQUIRE(Run({"-i", input, "-o", out, "--max-tokens", "3"}).exit_code == 0);
  const std::string records = ReadWhole(out);
  const ProgramOutcome seed =
      Run({"-i", input, "-o", out, "--max-tokens", "3", "--resume", "--seed", "5"});
  CHECK(seed.exit_code == 2);
  CHECK(Contains(seed.err, "seed: was 0, is 5"));
  const ProgramOutcome shard =
      Run({"-i", input, "-o", out, "--max-tokens", "3", "--resume", "--shard", "1/2"});
  CHECK(shard.exit_code == 2);
  CHECK(Contains(shard.err, "shard"));
  CHECK(ReadWhole(out) == records);
}

TEST_CASE("text output cannot be resumed and says so") {
  const TempDir dir;
  const ProgramOutcome outcome = Run({"-p", "Hello", "-o", dir.Path("answers.txt"), "--resume"});
  CHECK(outcome.exit_code == 2);
  CHECK(Contains(outcome.err, "text output cannot be resumed"));
  CHECK_FALSE(std::filesystem::exists(dir.Path("answers.txt")));
}

TEST_CASE("a prompt changed since it was answered is refused in a file, and kept from a pipe") {
  const TempDir dir;
  const std::string out = dir.Path("answers.jsonl");
  const Words file = {"-i",
                      dir.Write("prompts", "Hello\nGood morning\n"),
                      "-o",
                      out,
                      "--max-tokens",
                      "3",
                      "--input-format",
                      "lines"};
  const Words pipe = {"-i",    "-",       "-o", out, "--max-tokens", "3", "--input-format",
                      "lines", "--resume"};
  REQUIRE(Run(file).exit_code == 0);
  const std::string records = ReadWhole(out);
  dir.Write("prompts", "Hello\nGood evening\n");
  Words again = file;
  again.push_back("--resume");
  const ProgramOutcome refused = Run(again);
  CHECK(refused.exit_code == 2);
  CHECK(Contains(refused.err, "line 2 was changed"));
  CHECK(ReadWhole(out) == records);
  const ProgramOutcome kept = Run(pipe, "Hello\nGood evening\nAnother\n");
  INFO(kept.err);
  CHECK(kept.exit_code == 1);
  CHECK(Contains(kept.err, "line 2 was changed"));
  CHECK(ReadWhole(out).starts_with(records));
  CHECK(LineNumbers(ReadWhole(out)).size() == 3);
  const ProgramOutcome gone = Run(pipe, "");
  CHECK(gone.exit_code == 1);
  CHECK(Contains(gone.err, "3 lines were changed"));
  CHECK_FALSE(Contains(gone.err, "every line has its record"));
}

TEST_CASE("--retry-errors runs failed lines again and no other") {
  const TempDir dir;
  const std::string input = dir.Write("prompts.jsonl", Prompts());
  const std::string out = dir.Path("answers.jsonl");
  CHECK(Run({"-i", input, "-o", out}).exit_code == 1);
  const std::string before = ReadWhole(out);
  const ProgramOutcome kept = Run({"-i", input, "-o", out, "--resume"});
  CHECK(kept.exit_code == 1);
  CHECK(Contains(kept.err, "--retry-errors"));
  CHECK(ReadWhole(out) == before);
  const ProgramOutcome again = Run({"-i", input, "-o", out, "--resume", "--retry-errors"});
  INFO(again.err);
  CHECK(Contains(again.err, "1 line, 1 failed"));
  CHECK(AnswersIn(ReadWhole(out)) == Expected());
  // The failed line's new record is the last one.
  CHECK(LineNumbers(ReadWhole(out)).back() == 11);
}

TEST_CASE("--ordered puts the answers of a file and of standard output in the prompts' order") {
  const TempDir dir;
  const std::string input = dir.Write("prompts.jsonl", Prompts());
  const std::string out = dir.Path("answers.jsonl");
  CHECK(Run({"-i", input, "-o", out, "--ordered"}).exit_code == 1);
  const ProgramOutcome printed = Run({"-i", input, "--ordered"});
  const ProgramOutcome unordered = Run({"-i", input});
  for (const std::string& records : {ReadWhole(out), printed.out}) {
    const std::vector<uint64_t> numbers = LineNumbers(records);
    CHECK(std::is_sorted(numbers.begin(), numbers.end()));
    CHECK(AnswersIn(records) == Expected());
  }
  const std::vector<uint64_t> numbers = LineNumbers(unordered.out);
  CHECK_FALSE(std::is_sorted(numbers.begin(), numbers.end()));
}

TEST_CASE("answers that cannot be sorted are all there, and sorted by the next run") {
  const TempDir dir;
  const std::string input = dir.Write("in.jsonl", Prompts()), out = dir.Path("out.jsonl");
  // Nothing can be written under the name of a folder.
  std::filesystem::create_directory(out + ".part");
  const Words arguments = {"-i", input, "-o", out, "--resume", "--ordered"};
  const ProgramOutcome unsorted = Run(arguments);
  CHECK(unsorted.exit_code == 4);
  CHECK(Contains(unsorted.err, "out.jsonl has every answer"));
  CHECK(AnswersIn(ReadWhole(out)) == Expected());
  std::filesystem::remove(out + ".part");
  CHECK(Run(arguments).exit_code == 1);  // one line fails
  const std::vector<uint64_t> numbers = LineNumbers(ReadWhole(out));
  CHECK(std::is_sorted(numbers.begin(), numbers.end()));
  CHECK(AnswersIn(ReadWhole(out)) == Expected());
}

TEST_CASE("--ordered holds for text as well") {
  const TempDir dir;
  const std::string input = dir.Write("prompts.jsonl", Prompts());
  const std::string out = dir.Path("answers.txt");
  CHECK(Run({"-i", input, "-o", out, "--output-format", "text", "--ordered"}).exit_code == 1);
  const std::string text = ReadWhole(out);
  size_t at = 0;
  for (size_t i = 0; i < 16 && at != std::string::npos; ++i) {
    CAPTURE(i);
    at = text.find("## line " + std::to_string(i) + "\n", at);
    CHECK(at != std::string::npos);
  }
  CHECK_FALSE(std::filesystem::exists(out + ".manifest.json"));
}

TEST_CASE("prompts of the command line and of a growing file are gone on with") {
  const TempDir dir;
  const std::string out = dir.Path("answers.jsonl");
  Words words = {"-p", "Hello", "-o", out, "--output-format", "jsonl", "--max-tokens", "3"};
  REQUIRE(Run(words).exit_code == 0);
  words.insert(words.end(), {"-p", "Good morning", "--resume"});
  CHECK(Run(words).exit_code == 0);
  CHECK(LineNumbers(ReadWhole(out)) == std::vector<uint64_t>{1, 2});

  const std::string input = dir.Write("prompts", "Hello");
  const Words file = {"-i", input, "-o", dir.Path("more.jsonl"), "--max-tokens", "3", "--resume"};
  REQUIRE(Run(file).exit_code == 0);
  dir.Write("prompts", "Hello\n\nGood morning\n");
  CHECK(Run(file).exit_code == 0);
  CHECK(LineNumbers(ReadWhole(dir.Path("more.jsonl"))) == std::vector<uint64_t>{1, 3});
}

TEST_CASE("--strict refuses a file with a bad line by its number, before there is an output") {
  const TempDir dir;
  const std::string out = dir.Path("answers.jsonl");
  const ProgramOutcome bad =
      Run({"-i", dir.Write("prompts.jsonl", Prompts()), "-o", out, "--strict"});
  INFO(bad.err);
  CHECK(bad.exit_code == 2);
  CHECK(Contains(bad.err, "line 11:"));
  CHECK_FALSE(std::filesystem::exists(out));
  const ProgramOutcome good =
      Run({"-i", dir.Write("good.jsonl", Chat("a", "Hello", 2)), "-o", out, "--strict"});
  CHECK(good.exit_code == 0);
  CHECK(LineNumbers(ReadWhole(out)).size() == 1);
}

TEST_CASE("three processes with a shard each, merged, give what one process gives") {
  const TempDir dir;
  const std::string input = dir.Write("prompts.jsonl", Prompts());
  Words outputs;
  std::vector<std::unique_ptr<RunningProgram>> programs;
  for (const std::string shard : {"0", "1", "2"}) {
    outputs.push_back(dir.Path("answers." + shard + ".jsonl"));
    programs.push_back(std::make_unique<RunningProgram>(
        "colibri-run", With({"-i", input, "-o", outputs.back(), "--shard", shard + "/3"})));
  }
  for (const auto& program : programs) {
    const ProgramOutcome outcome = program->Wait();
    INFO(outcome.err);
    CHECK((outcome.exit_code == 0 || outcome.exit_code == 1));
  }
  Words merge = {"--merge", "-i", input};
  merge.insert(merge.end(), outputs.begin(), outputs.end());
  const ProgramOutcome printed = RunProgram("colibri-run", merge);
  INFO(printed.err);
  CHECK(printed.exit_code == 1);  // one line is refused
  CHECK(AnswersIn(printed.out) == Expected());
  const std::vector<uint64_t> numbers = LineNumbers(printed.out);
  CHECK(std::is_sorted(numbers.begin(), numbers.end()));

  // Without one of them its lines are missing, and a run that goes on in the whole adds them.
  const std::string out = dir.Path("answers.jsonl");
  merge.pop_back();
  merge.insert(merge.end(), {"-o", out});
  const ProgramOutcome part = RunProgram("colibri-run", merge);
  INFO(part.err);
  CHECK(part.exit_code == 1);
  CHECK(Contains(part.err, "have no record: 3, 6, 9"));
  CHECK(Run({"-i", input, "-o", out, "--resume", "--ordered"}).exit_code == 1);
  CHECK(AnswersIn(ReadWhole(out)) == Expected());
}

}  // namespace colibri
