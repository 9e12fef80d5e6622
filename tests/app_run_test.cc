// colibri-run as a user meets it: the built program, its streams, files, signals and exit codes,
// with the demo model.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "runtime/record.h"
#include "tests/run_program.h"
#include "tests/shard_files.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

const std::string kModel = COLIBRI_SOURCE_DIR "/apps/demo/model";
const std::string kPrompts = COLIBRI_SOURCE_DIR "/apps/demo/prompts.jsonl";

// A small budget, so that little memory has to be populated.
Words With(const Words& more) {
  Words all = {"-m", kModel, "--ram", "200MB"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

ProgramOutcome Run(const Words& arguments, std::string_view input = "",
                   const Words& environment = {}) {
  return RunProgram("colibri-run", arguments, input, environment);
}

std::string Slurp(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// Every line of `text`, which must end with a line end, parsed.
std::vector<Json> Records(const std::string& text) {
  REQUIRE((text.empty() || text.back() == '\n'));
  std::vector<Json> records;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) records.push_back(Json::parse(line));
  return records;
}

std::string Chat(const std::string& id, int32_t max_tokens, const std::string& more = "") {
  return R"({"custom_id":")" + id +
         R"(","method":"POST","url":"/v1/chat/completions","body":{"messages":[{"role":"user",)"
         R"("content":"Tell me a passage from Treasure Island."}],"max_tokens":)" +
         std::to_string(max_tokens) + more + "}}\n";
}

// Lines that keep the model busy for long.
std::string LongLines(int32_t count) {
  std::string text;
  for (int32_t i = 0; i < count; ++i) text += Chat("long-" + std::to_string(i), 1500);
  return text;
}

std::ptrdiff_t LineEnds(const std::string& text) {
  return std::count(text.begin(), text.end(), '\n');
}

}  // namespace

TEST_CASE("a model that is none is refused with its path and what a model folder holds") {
  const TempDir dir;
  std::filesystem::create_directory(dir.Path("empty"));
  for (const std::string& model :
       {dir.Path("nowhere"), dir.Write("story.txt", "Once upon a time\n"), dir.Path("empty")}) {
    const ProgramOutcome outcome = Run({"-m", model, "-p", "Hello"});
    INFO(outcome.err);
    CHECK(outcome.exit_code == 3);
    CHECK(Contains(outcome.err, model));
    CHECK(Contains(outcome.err, "config.json, tokenizer.json and shards"));
    CHECK(outcome.out == "");
  }
}

TEST_CASE("a model without tokenizer is refused by that file's name") {
  const ProgramOutcome outcome = Run({"-m", FixtureModel("tiny"), "-p", "Hello"});
  CHECK(outcome.exit_code == 3);
  CHECK(Contains(outcome.err, "tokenizer.json"));
}

TEST_CASE("an input that is missing or a folder is refused by name before anything is loaded") {
  const TempDir dir;
  for (const std::string& input : {dir.Path("nowhere.jsonl"), dir.Path("")}) {
    const ProgramOutcome outcome = Run(With({"-i", input}));
    CHECK(outcome.exit_code == 4);
    CHECK(Contains(outcome.err, input));
    CHECK(LineEnds(outcome.err) == 1);
  }
}

// The programs' own shell: RunProgram always gives them streams.
int Shell(const std::string& redirection, const std::string& arguments) {
  const std::string command = COLIBRI_BINARY_DIR "/colibri-run -m " + kModel + " --ram 200MB " +
                              arguments + " 2> /dev/null " + redirection;
  return WEXITSTATUS(std::system(command.c_str()));
}

TEST_CASE("a standard stream that is closed is said, no file takes its place") {
  CHECK(Shell("<&-", "-i -") == 4);
  CHECK(Shell(">&-", "-p Hello --max-tokens 2") == 4);
  CHECK(Shell("<&- > /dev/null", "-p Hello --max-tokens 2") == 0);
}

TEST_CASE("no prompts are no error") {
  const TempDir dir;
  for (const char* text : {"", "\n\n  \n\t\r\n"}) {
    const ProgramOutcome outcome = Run(With({"-i", dir.Write("prompts", text)}));
    CHECK(outcome.exit_code == 0);
    CHECK(outcome.out == "");
    CHECK(Contains(outcome.err, "0 prompts"));
  }
}

TEST_CASE("-p prints a readable answer, and notes go elsewhere") {
  const ProgramOutcome outcome =
      Run(With({"-p", "Hello", "--thinking", "off", "--max-tokens", "30"}));
  INFO(outcome.err);
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.out.size() > 30);
  CHECK(outcome.out.back() == '\n');
  for (const char* note : {"plan:", "model:", "tokens/s", "custom_id", "line-1", "<|"}) {
    CHECK_FALSE(Contains(outcome.out, note));
  }
  CHECK(Contains(outcome.err, "1 line, 0 failed"));
  CHECK(LineEnds(outcome.err) <= 11);
}

TEST_CASE("several -p are answered under their prompts") {
  const ProgramOutcome outcome =
      Run(With({"-p", "Hello", "-p", "Good morning", "--thinking", "off", "--max-tokens", "5"}));
  CHECK(outcome.exit_code == 0);
  CHECK(Contains(outcome.out, "## line-1\n> Hello\n"));
  CHECK(Contains(outcome.out, "## line-2\n> Good morning\n"));
}

TEST_CASE("an answer on a pipe is the same however its line ends") {
  std::string expected;
  for (const std::string text : {"Hello", "Hello\n", "Hello\r\n", "\xEF\xBB\xBFHello\n"}) {
    const ProgramOutcome outcome = Run(With({"-i", "-", "--max-tokens", "8"}), text);
    INFO(outcome.err);
    CHECK(outcome.exit_code == 0);
    REQUIRE(Records(outcome.out).size() == 1);
    const std::string bytes = LineBytes(outcome.out);
    if (expected.empty()) expected = bytes;
    CHECK(bytes == expected);
  }
}

TEST_CASE("a line on a pipe is answered while the pipe stays open") {
  RunningProgram program("colibri-run", With({"-i", "-", "--max-tokens", "3"}));
  program.Write("Hello\n");
  CHECK(program.WaitForOutput("\"line-1\""));
  program.Write("Good morning\n");
  CHECK(program.WaitForOutput("\"line-2\""));
  CHECK(program.Wait().exit_code == 0);
}

TEST_CASE("a reader that goes away ends the run with 141 and no flood of messages") {
  const TempDir dir;
  RunningProgram program("colibri-run",
                         With({"-i", dir.Write("a.jsonl", LongLines(20)), "--max-seqs", "2"}));
  CHECK(program.WaitForOutput("\n"));
  program.CloseOutput();
  const ProgramOutcome outcome = program.Wait();
  CHECK(outcome.exit_code == 141);
  CHECK(outcome.signal == 0);
  // The summary has a line more or less by how many answers were written; of the output none.
  CHECK(LineEnds(outcome.err) <= 20);
  for (const char* word : {"pipe", "writing", "output"}) {
    CHECK_MESSAGE(!Contains(outcome.err, word), outcome.err);
  }
}

TEST_CASE("answers come although nobody reads the notes") {
  RunningProgram program("colibri-run", With({"-p", "Hello", "--max-tokens", "20", "--thinking",
                                              "off", "--progress", "json"}));
  program.CloseErrors();
  const ProgramOutcome outcome = program.Wait();
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.out.size() > 20);
}

TEST_CASE("usage errors exit with 2 and help with 0") {
  CHECK(Run({}).exit_code == 2);
  CHECK(Contains(Run({}).err, "usage: colibri-run"));
  const ProgramOutcome unknown = Run(With({"-p", "Hello", "--gpu", "1"}));
  CHECK(unknown.exit_code == 2);
  CHECK(Contains(unknown.err, "--gpu"));
  const ProgramOutcome help = Run({"--help"});
  CHECK(help.exit_code == 0);
  CHECK(help.err == "");
  CHECK(Contains(help.out, "--ctx-size"));
  const ProgramOutcome version = Run({"--version"});
  CHECK(version.exit_code == 0);
  CHECK(Contains(version.out, "SIMD target"));
  CHECK(Contains(version.out, "io_uring"));
}

TEST_CASE("flags whose feature is not there are refused by name, never ignored") {
  const std::vector<Words> flags = {{"--cache-policy", "fixed"}, {"--draft", "9"}};
  for (const Words& flag : flags) {
    Words all = With({"-p", "Hello"});
    all.insert(all.end(), flag.begin(), flag.end());
    const ProgramOutcome outcome = Run(all);
    INFO(outcome.err);
    CHECK(outcome.exit_code == 2);
    CHECK(Contains(outcome.err, flag.front()));
  }
}

TEST_CASE("a context longer than the model's, or a plan that does not fit, is a usage error") {
  const ProgramOutcome context = Run(With({"-p", "Hello", "--ctx-size", "4k"}));
  CHECK(context.exit_code == 2);
  CHECK(Contains(context.err, "--ctx-size 4096: the model has 2048 positions"));
  const ProgramOutcome memory = Run({"-m", kModel, "-p", "Hello", "--ram", "70MB"});
  CHECK(memory.exit_code == 2);
  CHECK(Contains(memory.err, "--ram "));
}

TEST_CASE("--plan prints the table and loads nothing") {
  const ProgramOutcome outcome = Run(With({"--plan"}));
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.err == "");
  for (const char* part : {"budget", "dense weights", "KV", "scratch", "expert slots", "total"}) {
    CHECK(Contains(outcome.out, part));
  }
}

TEST_CASE("the plan holds KV for as many answers as the input can ask for") {
  const TempDir dir;
  const auto plan = [&](const Words& more) {
    Words all = With(more);
    all.push_back("--plan");
    return Run(all).out;
  };
  CHECK(Contains(plan({"-p", "Hello"}), "; 1 sequences"));
  CHECK(Contains(plan({"-p", "Hello", "-p", "there"}), "; 2 sequences"));
  const std::string three =
      dir.Write("three.jsonl", Chat("a", 1) + "\n" + Chat("b", 1) + Chat("c", 1, R"(,"n":1)"));
  CHECK(Contains(plan({"-i", three}), "; 3 sequences"));
  const std::string four = dir.Write("four.jsonl", Chat("a", 1, R"(,"n" : 4)"));
  CHECK_FALSE(Contains(plan({"-i", four}), "; 1 sequences"));
}

TEST_CASE("an output file that holds something is refused and kept byte for byte") {
  const TempDir dir;
  const std::string out = dir.Write("out.jsonl", "precious\n");
  const ProgramOutcome refused =
      Run(With({"-p", "Hello", "--max-tokens", "2", "-o", out, "--output-format", "jsonl"}));
  CHECK(refused.exit_code == 2);
  CHECK(Contains(refused.err, "--overwrite"));
  CHECK(Slurp(out) == "precious\n");
  const ProgramOutcome replaced = Run(With(
      {"-p", "Hello", "--max-tokens", "2", "-o", out, "--output-format", "jsonl", "--overwrite"}));
  CHECK(replaced.exit_code == 0);
  CHECK(replaced.out == "");
  CHECK(Records(Slurp(out)).size() == 1);
}

TEST_CASE("answers are not written over their own prompts, by whatever name") {
  const TempDir dir;
  const std::string text = Chat("a", 2);
  const std::string file = dir.Write("a.jsonl", text);
  std::filesystem::create_symlink(file, dir.Path("b.jsonl"));
  const ProgramOutcome outcome = Run(With({"-i", file, "-o", dir.Path("b.jsonl"), "--overwrite"}));
  CHECK(outcome.exit_code == 2);
  CHECK(Slurp(file) == text);
}

TEST_CASE("an output that cannot be written is an I/O error with its name") {
  const TempDir dir;
  const std::string out = dir.Path("no/such/folder/out.jsonl");
  const ProgramOutcome missing = Run(With({"-p", "Hello", "-o", out}));
  CHECK(missing.exit_code == 4);
  CHECK(Contains(missing.err, out));
  const ProgramOutcome full = Run(With({"-p", "Hello", "--max-tokens", "2", "-o", "/dev/full"}));
  CHECK(full.exit_code == 4);
  CHECK(Contains(full.err, "/dev/full"));
}

TEST_CASE("bad lines get error records, the others are answered, and the exit code is 1") {
  const TempDir dir;
  const std::string input =
      dir.Write("mixed.jsonl", Chat("first", 3) + "{\"custom_id\": \"broken\", \n" +
                                   Chat("odd", 3, R"(,"best_of":3)") + Chat("first", 3) +
                                   Chat("long", 100'000) + "[1, 2]\n" + Chat("last", 3));
  const ProgramOutcome outcome = Run(With({"-i", input}));
  CHECK(outcome.exit_code == 1);
  const std::vector<Json> records = Records(outcome.out);
  REQUIRE(records.size() == 7);
  for (const Json& record : records) {
    const int line = record.at("line").get<int>();
    CAPTURE(record.dump());
    const bool good = line == 1 || line == 7;
    CHECK((record.at("response").at("status_code") == 200) == good);
    CHECK(record.at("error").is_null() == good);
  }
  CHECK(Contains(outcome.out, "best_of"));
  CHECK(Contains(outcome.err, "7 lines, 5 failed"));
}

TEST_CASE("a signal ends the run after the sweep, with 130 and whole records") {
  const TempDir dir;
  const std::string input = dir.Write("a.jsonl", Chat("short", 2) + LongLines(30));
  for (const int signal : {SIGINT, SIGTERM}) {
    RunningProgram program("colibri-run", With({"-i", input, "--no-loop-stop"}));
    REQUIRE(program.WaitForOutput("\n"));
    program.Signal(signal);
    const ProgramOutcome outcome = program.Wait();
    CHECK(outcome.exit_code == 130);
    CHECK(outcome.signal == 0);
    CHECK(Contains(outcome.err, "interrupted"));
    const std::vector<Json> records = Records(outcome.out);
    CHECK(records.size() < 31);
    CHECK(records.front().at("custom_id") == "short");
  }
}

TEST_CASE("a signal while the input is awaited ends the run, and what is written stays") {
  const TempDir dir;
  const std::string out = dir.Path("out.jsonl");
  RunningProgram program("colibri-run", With({"-i", "-", "-o", out, "--max-tokens", "2"}), {},
                         RunningProgram::Screen::kTerminal);
  program.Write("Hello\n");
  REQUIRE(program.WaitForOutput("\033[K1/1"));
  program.Signal(SIGTERM);
  CHECK(program.WaitForOutput("interrupted"));  // Wait ends the input, and so the run, with 0
  CHECK(program.Wait().exit_code == 130);
  CHECK(Records(Slurp(out)).size() == 1);
}

// How SIGHUP is taken by the programs started while it lives.
class Hangup {
 public:
  explicit Hangup(void (*how)(int)) : before_(::signal(SIGHUP, how)) {}
  ~Hangup() { ::signal(SIGHUP, before_); }

 private:
  void (*before_)(int);
};

TEST_CASE("a terminal that closes ends the run after the sweep, however often it is said") {
  const TempDir dir;
  const std::string input = dir.Write("a.jsonl", Chat("short", 2) + LongLines(30));
  const Hangup usual(SIG_DFL);
  RunningProgram program("colibri-run", With({"-i", input, "--no-loop-stop"}));
  REQUIRE(program.WaitForOutput("\n"));
  for (int i = 0; i < 3; ++i) program.Signal(SIGHUP);
  const ProgramOutcome outcome = program.Wait();
  CHECK(outcome.exit_code == 130);
  CHECK(Contains(outcome.err, "interrupted"));
  CHECK(Contains(outcome.err, "tokens/s"));  // it came to its end
  CHECK(Records(outcome.out).front().at("custom_id") == "short");
}

TEST_CASE("under nohup a closed terminal changes nothing") {
  const Hangup ignored(SIG_IGN);
  RunningProgram program("colibri-run", With({"-i", "-", "--max-tokens", "2"}));
  program.Write("Hello\n");
  REQUIRE(program.WaitForOutput("\n"));
  program.Signal(SIGHUP);
  program.Write("Good morning\n");
  const ProgramOutcome outcome = program.Wait();
  CHECK(outcome.exit_code == 0);
  CHECK(Records(outcome.out).size() == 2);
}

TEST_CASE("a signal ends the run at once while lines without end are skipped") {
  const TempDir dir;
  const std::string fifo = dir.Path("lines");
  REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
  RunningProgram program("colibri-run", With({"-i", fifo, "--shard", "999999999/1000000000"}));
  std::thread writer([&fifo] {
    const int fd = open(fifo.c_str(), O_WRONLY | O_CLOEXEC);
    std::string lines;
    for (int i = 0; i < 1000; ++i) lines += "not ours\n";
    while (write(fd, lines.data(), lines.size()) > 0) {
    }
    close(fd);
  });
  CHECK(program.WaitForErrors("mode:"));
  program.Signal(SIGINT);
  const ProgramOutcome outcome = program.Wait();
  writer.join();
  CHECK(outcome.exit_code == 130);
  CHECK(outcome.out == "");
}

TEST_CASE("a name of standard output means what - means, other open files are refused by name") {
  const TempDir dir;
  const std::string file = dir.Write("out", "before\n");
  const std::string run = "-p Hello --max-tokens 2 --output-format jsonl";
  std::filesystem::create_symlink("/dev/stdout", dir.Path("link"));
  for (const std::string& name : {std::string("/dev/stdout"), std::string("/dev/fd/1"),
                                  std::string("/proc/self/fd/1"), dir.Path("link")}) {
    CHECK(Shell(">> " + file, run + " -o " + name) == 0);
  }
  const std::string text = Slurp(file);
  CHECK(text.starts_with("before\n{"));
  CHECK(LineEnds(text) == 5);
  CHECK_FALSE(std::filesystem::exists("/dev/stdout.manifest.json"));
  CHECK(Shell(">> " + file, run + " -o /dev/stdout --resume") == 2);
  CHECK(Shell(">> " + file, run + " -o /dev/stdout --overwrite") == 2);
  CHECK(Shell("3>> " + file, run + " -o /dev/fd/3") == 2);
  CHECK(Shell("3>> " + file, run + " -o /dev/fd/3 --overwrite") == 2);
  CHECK(Slurp(file) == text);
  // What is no regular file keeps its meaning: a shell's >(...).
  CHECK(Shell("3> /dev/null", run + " -o /dev/fd/3") == 0);
}

TEST_CASE("a single answer is streamed, and a signal ends it") {
  RunningProgram program("colibri-run",
                         With({"-p", "Tell me a passage from Treasure Island.", "--thinking", "off",
                               "--no-loop-stop", "--io-limit", "2MB", "--slots", "1"}));
  REQUIRE(program.WaitForOutput(" "));
  program.Signal(SIGINT);
  const ProgramOutcome outcome = program.Wait();
  CHECK(outcome.exit_code == 130);
  CHECK(outcome.out.size() > 2);
}

TEST_CASE("every flag is an environment variable, and the command line wins") {
  const Words environment = {"COLIBRI_MODEL=" + kModel, "COLIBRI_INPUT=-", "COLIBRI_RAM=200MB",
                             "COLIBRI_MAX_TOKENS=3"};
  const auto tokens = [](const ProgramOutcome& outcome) {
    INFO(outcome.err);
    REQUIRE(outcome.exit_code == 0);
    return Records(outcome.out)
        .at(0)
        .at("response")
        .at("body")
        .at("usage")
        .at("completion_tokens")
        .get<int>();
  };
  CHECK(tokens(Run({"--thinking", "off"}, "Hello\n", environment)) == 3);
  CHECK(tokens(Run({"--max-tokens", "2"}, "Hello\n", environment)) == 2);
  const ProgramOutcome bad = Run(With({"-p", "Hello"}), "", {"COLIBRI_THREADS=many"});
  CHECK(bad.exit_code == 2);
  CHECK(Contains(bad.err, "COLIBRI_THREADS"));
  const ProgramOutcome refused = Run(With({"-p", "Hello"}), "", {"COLIBRI_CTX_SIZE=4k"});
  CHECK(refused.exit_code == 2);
  CHECK(Contains(refused.err, "COLIBRI_CTX_SIZE 4096: the model has 2048 positions"));
}

TEST_CASE("on a terminal no progress is drawn between answers") {
  RunningProgram program("colibri-run",
                         With({"-p", "Hello", "-p", "Tell me a story", "-p", "Good morning", "-p",
                               "Continue The Secret Garden", "--thinking", "off", "--max-tokens",
                               "200", "--no-loop-stop"}),
                         {}, RunningProgram::Screen::kTerminal);
  const ProgramOutcome outcome = program.Wait();
  CHECK(outcome.exit_code == 0);
  CHECK(Contains(outcome.out, "## line-4"));
  CHECK_FALSE(Contains(outcome.out, "\033[K"));
}

TEST_CASE("on a terminal answers that go to a file leave room for a bar") {
  const TempDir dir;
  RunningProgram program("colibri-run",
                         With({"-i", "-", "-o", dir.Path("out"), "--max-tokens", "2"}), {},
                         RunningProgram::Screen::kTerminal);
  program.Write("Hello\n");
  CHECK(program.WaitForOutput("\033[K1/1"));
  CHECK(program.Wait().exit_code == 0);
}

TEST_CASE("--progress json is one object a line") {
  const ProgramOutcome outcome =
      Run(With({"-p", "Hello", "--max-tokens", "3", "--progress", "json"}));
  std::istringstream lines(outcome.err);
  Json last;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("{")) last = Json::parse(line);
  }
  CHECK(last.at("lines_done") == 1);
  CHECK(last.at("tokens") == 3);
}

}  // namespace colibri
