// Odd prompt files: their bytes, line ends, sizes and kinds. What each gets is said in
// tests/oddities.md.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/oddities.h"
#include "tests/temp_dir.h"
#include "tests/watchdog.h"

namespace colibri {
namespace {

using Words = std::vector<std::string>;

bool Full() { return std::getenv("COLIBRI_FULL_TESTS") != nullptr; }

std::string Batch(const std::string& id, const std::string& more = "") {
  return R"({"custom_id":")" + id + R"(","body":{"prompt":"The sea")" + more + "}}";
}

struct OddFile {
  std::string oddity;  // its name in the table
  std::string bytes;
  // What the record of each line says: "answered", or its error (… stands for anything).
  std::map<uint64_t, std::string> records;
  std::string plain;             // a file whose answers are the same; "": no line is answered
  std::string name = "prompts";  // of the file: the ending decides the format
};

// The odd files of one case: each is a subcase.
void Check(const std::string& test, const std::vector<OddFile>& files) {
  const std::map<std::string, std::string> table = RowsOf("app_odd_files_test: " + test);
  CHECK(table.size() == files.size());
  for (const OddFile& odd : files) {
    SUBCASE(odd.oddity.c_str()) {
      CHECK_MESSAGE(table.contains(odd.oddity), "no row of this name");
      const TempDir dir;
      const ProgramOutcome outcome = RunOddities({"-i", dir.Write(odd.name, odd.bytes)});
      INFO(outcome.err);
      const std::map<uint64_t, std::string> records = RecordsByLine(outcome.out);
      std::map<uint64_t, std::string> plain;
      if (!odd.plain.empty()) {
        plain = RecordsByLine(RunOddities({"-i", dir.Write("plain-" + odd.name, odd.plain)}).out);
      }
      bool fine = true;
      CHECK(records.size() == odd.records.size());
      for (const auto& row : odd.records) {
        const uint64_t line = row.first;
        const std::string& expected = row.second;
        CAPTURE(line);
        REQUIRE(records.contains(line));
        const std::string said = SaidBy(nlohmann::json::parse(records.at(line)));
        CHECK_MESSAGE(Fits(said, expected), said << " instead of " << expected);
        fine = fine && said == "answered";
        if (said == "answered") {
          REQUIRE(plain.contains(line));
          CHECK(LineBytes(records.at(line)) == LineBytes(plain.at(line)));
        }
      }
      CHECK(outcome.exit_code == (fine ? 0 : 1));
      if (odd.records.empty()) CHECK(Has(outcome.err, "0 prompts"));
    }
  }
}

std::string Utf16(const std::string& ascii) {
  std::string text = "\xff\xfe";
  for (const char c : ascii) text += {c, '\0'};
  return text;
}

// What `gzip` makes of a batch file: no text, line ends here and there.
std::string Gzip(const std::string& text) {
  const TempDir dir;
  const std::string path = dir.Write("text", text);
  REQUIRE(std::system(("gzip -n '" + path + "'").c_str()) == 0);
  return ReadWhole(path + ".gz");
}

std::string BatchLines(size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i)
    text += Batch(fmt::format("line {}", i), ",\"max_tokens\":1") + "\n";
  return text;
}

const std::string kAnswered = "answered";
const std::string kBroken = "400 `invalid_json`: …";

}  // namespace

TEST_CASE("files of plain lines are answered line by line, whatever lies between the lines") {
  const std::string zero("He\0llo", 6);
  Check("files of plain lines are answered line by line, whatever lies between the lines",
        {{"an empty file", "", {}, ""},
         {"only blank lines", "\n\n\n", {}, ""},
         {"only white space", " \t\n\v\f \r\n  ", {}, ""},
         {"blank lines between",
          "\n\nHello\n \t\nHi\n\n",
          {{3, kAnswered}, {5, kAnswered}},
          "x\nx\nHello\nx\nHi\n"},
         {"no line end at the end", "Hello\nHi", {{1, kAnswered}, {2, kAnswered}}, "Hello\nHi\n"},
         {"Windows line ends",
          "Hello\r\n\r\nHi\r\n",
          {{1, kAnswered}, {3, kAnswered}},
          "Hello\nx\nHi\n"},
         {"line ends of old Macs", "Hello\rHi\r", {{1, kAnswered}}, "Hello\rHi\n"},
         {"a byte order mark at the start",
          "\xEF\xBB\xBFHello\nHi\n",
          {{1, kAnswered}, {2, kAnswered}},
          "Hello\nHi\n"},
         {"a byte order mark alone", "\xEF\xBB\xBF", {}, ""},
         {"a byte order mark in a later plain line",
          "Hello\n\xEF\xBB\xBFHi\n",
          {{1, kAnswered}, {2, kAnswered}},
          "Hello\n\xEF\xBB\xBFHi"},
         {"a NUL byte in a plain line",
          "Hello\n" + zero + "\nHi\n",
          {{1, kAnswered}, {2, "400 `invalid_request`: a zero byte at byte 3"}, {3, kAnswered}},
          "Hello\nx\nHi\n"},
         {"broken UTF-8 in a plain line",
          "Hello\nHe\xffllo\nHi\n",
          {{1, kAnswered},
           {2, "400 `invalid_request`: broken UTF-8 at byte 3 (0xff)"},
           {3, kAnswered}},
          "Hello\nx\nHi\n"},
         {"a plain line that ends within a character",
          "Hello\n\xf0\x9f\x99",
          {{1, kAnswered}, {2, "400 `invalid_request`: broken UTF-8 at byte 1 (0xf0)"}},
          "Hello\n"},
         {"other separators within a plain line",
          "a\fb\n\xE2\x80\xA8Hi\n",
          {{1, kAnswered}, {2, kAnswered}},
          "a\fb\r\n\xE2\x80\xA8Hi\r\n"},
         {"control characters in a plain line",
          "\033[31mred\a\nHi\n",
          {{1, kAnswered}, {2, kAnswered}},
          "\033[31mred\a\r\nHi"},
         {"JSON after a first plain line",
          "Hello\n" + Batch("a") + "\n[1]\n",
          {{1, kAnswered}, {2, kAnswered}, {3, kAnswered}},
          "Hello\n" + Batch("a") + "\r\n[1]"},
         {"the same plain line twice",
          "Hello\nHello\n",
          {{1, kAnswered}, {2, kAnswered}},
          "Hello\nHello"},
         {"an over-long plain line",
          "Hello\n" +
              [] {
                std::string text;
                for (int i = 0; i < 5000; ++i) text += "word ";
                return text;
              }() +
              "\nHi\n",
          {{1, kAnswered}, {2, "400 `context_length_exceeded`: …2048…"}, {3, kAnswered}},
          "Hello\nx\nHi\n"},
         {"a file in UTF-16",
          Utf16("Hello\nHi\n"),
          {{1, "400 `invalid_request`: a zero byte at byte 4"},
           {2, "400 `invalid_request`: a zero byte at byte 1"},
           {3, "400 `invalid_request`: a zero byte at byte 1"}},
          ""}});
}

TEST_CASE("batch files are read whatever their name, line ends and marks") {
  const std::string a = Batch("a"), b = Batch("b");
  const std::string both = a + "\n" + b + "\n";
  const std::map<uint64_t, std::string> two = {{1, kAnswered}, {2, kAnswered}};
  Check("batch files are read whatever their name, line ends and marks",
        {{"an empty batch file", "", {}, "", "a.jsonl"},
         {"a batch file without a telling name", both, two, both, "a"},
         {"a batch file with Windows line ends", a + "\r\n" + b + "\r\n", two, both, "a.jsonl"},
         {"a batch file that begins with a byte order mark", "\xEF\xBB\xBF" + both, two, both, "a"},
         {"a batch file without a line end at its end", a + "\n" + b, two, both, "a.jsonl"},
         {"blank lines in a batch file",
          "\n" + a + "\n\n" + b + "\n\n",
          {{2, kAnswered}, {4, kAnswered}},
          "x\n" + a + "\nx\n" + b + "\n",
          "a.jsonl"},
         {"a batch file that begins with `[1]`",
          "[1]\n" + a + "\n",
          {{1, "400 `invalid_request`: the line is a JSON array, an object is expected"},
           {2, kAnswered}},
          "x\n" + a + "\n",
          "a.jsonl"},
         {"a batch file cut in its last line",
          a + "\n" + b.substr(0, 40),
          {{1, kAnswered}, {2, kBroken}},
          both,
          "a.jsonl"},
         {"plain text by the name of a batch file",
          "Hello\nHi\n",
          {{1, kBroken}, {2, kBroken}},
          "",
          "a.jsonl"},
         {"a batch file with errors only",
          "{}\n[1]\nnull\n",
          {{1, "400 `invalid_request` at `custom_id`: …"},
           {2, "400 `invalid_request`: …"},
           {3, "400 `invalid_request`: …"}},
          "",
          "a.jsonl"},
         {"one JSON array over many lines",
          "[\n  " + a + ",\n  " + b + "\n]\n",
          {{1, kBroken}, {2, kBroken}, {3, kAnswered}, {4, kBroken}},
          "x\nx\n" + b + "\n",
          "a.json"},
         {"one JSON array in one line",
          "[" + a + "," + b + "]\n",
          {{1, "400 `invalid_request`: the line is a JSON array, an object is expected"}},
          "",
          "a.json"},
         {"one JSON object over many lines",
          "{\n\"custom_id\": \"a\",\n\"body\": {}\n}\n",
          {{1, kBroken}, {2, kBroken}, {3, kBroken}, {4, kBroken}},
          "",
          "a.json"},
         {"a batch file in UTF-16",
          Utf16(both),
          {{1, "400 `invalid_json`: …a zero byte at byte 4"},
           {2, "400 `invalid_json`: …a zero byte at byte 1"},
           {3, "400 `invalid_json`: …a zero byte at byte 1"}},
          "",
          "a.jsonl"}});
}

TEST_CASE("a compressed file is an error for each of its lines") {
  const TempDir dir;
  std::string noise;  // so that it holds line ends
  for (uint32_t i = 0; i < 3000; ++i) noise += fmt::format("{}\n", i * 2654435761u);
  const std::string bytes = Gzip(noise);
  for (const char* name : {"a.jsonl.gz", "a.jsonl"}) {
    const ProgramOutcome outcome = RunOddities({"-i", dir.Write(name, bytes), "--max-seqs", "8"});
    INFO(outcome.err);
    CHECK(outcome.exit_code == 1);
    const std::map<uint64_t, std::string> records = RecordsByLine(outcome.out);
    CHECK(records.size() > 20);
    size_t failed = 0;
    for (const auto& entry : records)
      failed += SaidBy(nlohmann::json::parse(entry.second)) != kAnswered;
    // Few of its lines are short enough to be text by chance.
    CHECK(failed > records.size() * 9 / 10);
    CHECK(SaidBy(nlohmann::json::parse(records.at(1))) != kAnswered);
  }
}

TEST_CASE("a file that is missing or a folder is refused before the model is read") {
  const TempDir dir;
  for (const std::string& input : {dir.Path("nowhere.jsonl"), dir.Path("")}) {
    SUBCASE(input.ends_with("jsonl") ? "missing" : "a folder") {
      const ProgramOutcome outcome = RunOddities({"-i", input, "-o", dir.Path("out")});
      CHECK(outcome.exit_code == 4);
      CHECK(Has(outcome.err, input));
      CHECK_FALSE(std::filesystem::exists(dir.Path("out")));
    }
  }
}

TEST_CASE("the device that is always empty holds no prompts") {
  const ProgramOutcome outcome = RunOddities({"-i", "/dev/null"});
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.out == "");
  CHECK(Has(outcome.err, "0 prompts"));
}

TEST_CASE("a named pipe is answered as it grows, half a line waits for its rest") {
  const Watchdog watchdog("a named pipe");
  const TempDir dir;
  const std::string path = dir.Path("pipe");
  REQUIRE(mkfifo(path.c_str(), 0600) == 0);
  RunningProgram program("colibri-run", OddityArguments({"-i", path}));
  const int pipe = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  REQUIRE(pipe >= 0);
  const auto put = [pipe](std::string_view text) {
    REQUIRE(write(pipe, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  };
  put("Hello\n\xEF");
  CHECK(program.WaitForOutput("\"line-1\""));
  put("\xBB\xBFGood ");
  put("morning\n");
  CHECK(program.WaitForOutput("\"line-2\""));
  put("The last");
  close(pipe);
  const ProgramOutcome outcome = program.Wait();
  CHECK(outcome.exit_code == 0);
  const ProgramOutcome whole =
      RunOddities({"-i", "-"}, "Hello\n\xEF\xBB\xBFGood morning\nThe last");
  const auto records = RecordsByLine(outcome.out), expected = RecordsByLine(whole.out);
  REQUIRE(records.size() == 3);
  REQUIRE(expected.size() == 3);
  for (const auto& [line, record] : records)
    CHECK(LineBytes(record) == LineBytes(expected.at(line)));
}

TEST_CASE("a signal ends the run while an input without a line is read") {
  RunningProgram program("colibri-run", OddityArguments({"-i", "/dev/zero"}));
  CHECK(program.WaitForErrors("mode:"));
  program.Signal(SIGTERM);
  const ProgramOutcome outcome = program.Wait();
  CHECK(outcome.exit_code == 130);
  CHECK(RecordsByLine(outcome.out).size() <= 1);  // that of the line that is too long
}

TEST_CASE("blank lines without end keep no line from its answer") {
  RunningProgram program("colibri-run", OddityArguments({"-i", "-"}));
  std::thread writer([&program] {
    program.Write("Once upon a time\n");
    const std::string blank(65536, '\n');
    while (program.Write(blank)) {
    }
  });
  CHECK(program.WaitForOutput("completion_tokens"));
  program.Signal(SIGTERM);
  writer.join();
  CHECK(program.Wait().exit_code == 130);
}

TEST_CASE("prompts are not taken for the files that stand beside an output") {
  const TempDir dir;
  const std::string text = Batch("a") + "\n";
  std::filesystem::create_symlink(dir.Write("target", ""), dir.Path("link"));
  const std::vector<std::pair<std::string, std::string>> pairs = {{"out", "out.part"},
                                                                  {"out", "out.manifest.json"},
                                                                  {"out", "out.manifest.json.part"},
                                                                  {"link", "target.part"}};
  for (const auto& [output, input] : pairs) {
    const std::string file = dir.Write(input, text);
    const ProgramOutcome outcome = RunOddities({"-i", file, "-o", dir.Path(output), "--ordered"});
    CHECK(outcome.exit_code == 2);
    CHECK(Has(outcome.err, input + ", which is the file of prompts"));
    CHECK(ReadWhole(file) == text);
    std::filesystem::remove(file);
  }
}

TEST_CASE("a finished file with --resume is left as it is, its failed lines too") {
  const TempDir dir;
  const std::string input = dir.Write("a.jsonl", Batch("a") + "\n[1]\n" + Batch("b") + "\n");
  const std::string out = dir.Path("out.jsonl");
  CHECK(RunOddities({"-i", input, "-o", out}).exit_code == 1);
  const std::string records = ReadWhole(out);
  const ProgramOutcome again = RunOddities({"-i", input, "-o", out, "--resume"});
  CHECK(again.exit_code == 1);
  CHECK(Has(again.err, "nothing left to do"));
  CHECK(ReadWhole(out) == records);
}

TEST_CASE("a finished file that has lost a line or got one is noticed by --resume") {
  const TempDir dir;
  const std::string out = dir.Path("out.jsonl");
  const std::string input = dir.Write("a.jsonl", Batch("a") + "\n" + Batch("b") + "\n");
  CHECK(RunOddities({"-i", input, "-o", out}).exit_code == 0);
  const std::string records = ReadWhole(out);
  dir.Write("a.jsonl", Batch("a") + "\n");
  const ProgramOutcome shorter = RunOddities({"-i", input, "-o", out, "--resume"});
  CHECK(shorter.exit_code == 2);
  CHECK(Has(shorter.err, "line 2 was answered and is no longer in the input"));
  CHECK(ReadWhole(out) == records);
  dir.Write("a.jsonl", Batch("a") + "\n" + Batch("b") + "\n" + Batch("c") + "\n");
  CHECK(RunOddities({"-i", input, "-o", out, "--resume"}).exit_code == 0);
  CHECK(ReadWhole(out).starts_with(records));
  CHECK(RecordsByLine(ReadWhole(out)).size() == 3);
}

TEST_CASE("a line of 10 MB is an error of that line") {
  const TempDir dir;
  const std::string good = Batch("a") + "\n", last = Batch("b") + "\n";
  const std::string path = dir.Write(
      "a.jsonl",
      good + Batch("long", ",\"user\":\"" + std::string(10'000'000, 'x') + "\",\"max_tokens\":0") +
          "\n" + last);
  const ProgramOutcome outcome = RunOddities({"-i", path});
  INFO(outcome.err);
  CHECK(outcome.exit_code == 1);
  const auto records = RecordsByLine(outcome.out);
  REQUIRE(records.size() == 3);
  const auto plain =
      RecordsByLine(RunOddities({"-i", dir.Write("b.jsonl", good + "\n" + last)}).out);
  for (const uint64_t line : {uint64_t{1}, uint64_t{3}})
    CHECK(LineBytes(records.at(line)) == LineBytes(plain.at(line)));
  const std::string said = SaidBy(nlohmann::json::parse(records.at(2)));
  // Which of the two comes first is the cap's: a line below it fails by its max_tokens.
  CHECK_MESSAGE((Fits(said, "400 `line_too_long`…: …line 2…") ||
                 Fits(said, "400 `unsupported_value` at `max_tokens`: …")),
                said);
}

TEST_CASE("many short lines are each answered once") {
  const size_t lines = Full() ? 100'000 : 600;
  const TempDir dir;
  const std::string input = dir.Write("a.jsonl", BatchLines(lines));
  const std::string out = dir.Path("out.jsonl");
  const ProgramOutcome outcome = RunOddities({"-i", input, "-o", out});
  INFO(outcome.err);
  CHECK(outcome.exit_code == 0);
  CHECK(Has(outcome.err, fmt::format("{} lines, 0 failed", lines)));
  const auto records = RecordsByLine(ReadWhole(out));
  REQUIRE(records.size() == lines);
  CHECK(records.begin()->first == 1);
  CHECK(records.rbegin()->first == lines);
}

namespace {

// Peak memory of a run over a file of `megabytes`: between two good lines of 65 kB each, by turns
// one of another shard and one that is no JSON.
uint64_t PeakOf(uint64_t megabytes) {
  const TempDir dir;
  const std::string path = dir.Path("a.jsonl"), out = dir.Path("out.jsonl");
  const std::string padding(65'000, 'x');
  uint64_t lines = 1;
  std::ofstream file(path, std::ios::binary);
  file << Batch("first") << '\n';
  for (uint64_t bytes = 0; bytes < megabytes * 1'000'000; bytes += 2 * padding.size(), lines += 2) {
    file << Batch(fmt::format("other {}", lines), ",\"user\":\"" + padding + "\"") << '\n'
         << R"({"custom_id":"broken)" << padding << '\n';
  }
  file << '\n' << Batch("last") << '\n';
  lines += 2;
  file.close();
  CHECK(std::filesystem::file_size(path) > megabytes * 1'000'000);
  const ProgramOutcome outcome =
      RunOddities({"-i", path, "-o", out, "--max-seqs", "4", "--shard", "0/2"});
  INFO(outcome.err);
  CHECK(outcome.exit_code == 1);
  const auto records = RecordsByLine(ReadWhole(out));
  CHECK(records.size() == (lines + 1) / 2);
  size_t answered = 0;
  for (const auto& entry : records)
    answered += SaidBy(nlohmann::json::parse(entry.second)) == kAnswered;
  CHECK(answered == 2);
  return outcome.peak_bytes;
}

}  // namespace

TEST_CASE("an input of 1 GB is read in the memory of a small one" *
          doctest::skip(kAddressSanitizer)) {
  const uint64_t small = PeakOf(2), large = PeakOf(Full() ? 1000 : 64);
  CHECK(large < small + 8'000'000);
}

}  // namespace colibri
