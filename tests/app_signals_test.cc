// Signals that end colibri-run, or ask it, and those it leaves alone.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/run_program.h"
#include "tests/shard_files.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

using Words = std::vector<std::string>;

const std::string kModel = COLIBRI_SOURCE_DIR "/apps/demo/model";

Words With(const Words& more) {
  Words all = {"-m", kModel, "--ram", "200MB"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

std::ptrdiff_t LineEnds(const std::string& text) {
  return std::count(text.begin(), text.end(), '\n');
}

}  // namespace

TEST_CASE("signals that were ignored when the program started stay ignored") {
  for (const int signal : {SIGINT, SIGTERM, SIGQUIT}) {
    CAPTURE(signal);
    RunningProgram program("colibri-run", With({"-i", "-", "--max-tokens", "2"}), {},
                           RunningProgram::Screen::kPipes, signal);
    program.Write("Hello\n");
    REQUIRE(program.WaitForOutput("\n"));
    program.Signal(signal);
    program.Signal(signal);
    program.Write("Good morning\n");
    const ProgramOutcome outcome = program.Wait();
    CHECK(outcome.exit_code == 0);
    CHECK(LineEnds(outcome.out) == 2);
    CHECK_FALSE(Contains(outcome.err, "interrupted"));
    CHECK_FALSE(Contains(outcome.err, "frame 0"));
  }
}

TEST_CASE("SIGQUIT says what every node is at, and the run goes on") {
  RunningProgram program("colibri-run", With({"-i", "-", "--max-tokens", "2"}));
  program.Write("Hello\n");
  REQUIRE(program.WaitForOutput("\n"));
  program.Signal(SIGQUIT);
  CHECK(program.WaitForErrors("reads under way: "));
  program.Write("Good morning\n");
  const ProgramOutcome outcome = program.Wait();
  CHECK(outcome.exit_code == 0);
  CHECK(LineEnds(outcome.out) == 2);
  INFO(outcome.err);
  CHECK(Contains(outcome.err, "frame 0: "));
  CHECK(Contains(outcome.err, "frames parked: "));
  for (const char* node : {"admit", "layer_ready", "expert_ffn", "combine", "verify", "deliver"}) {
    CHECK(Contains(outcome.err, fmt::format(" {} ", node)));
  }
}

TEST_CASE("a signal lifts --io-limit: the sweep under way ends") {
  RunningProgram program("colibri-run", With({"-p", "Hello", "--thinking", "off", "--io-limit", "1",
                                              "--slots", "1", "--progress", "plain"}));
  REQUIRE(program.WaitForErrors("mode:"));
  // Until a read waits for the throttle.
  do {
    const size_t from = program.ErrorsSoFar().size();
    program.Signal(SIGQUIT);
    REQUIRE(program.WaitForErrors("state: ", from));
  } while (!Contains(program.ErrorsSoFar(), " s: demand of "));
  program.Signal(SIGINT);
  const ProgramOutcome outcome = program.Wait();
  CHECK(outcome.exit_code == 130);
  CHECK(Contains(outcome.err, "interrupted"));
}

// True once the program waits for SIGINT itself; false if it ended.
bool TakesSignals(pid_t pid) {
  for (;;) {
    std::ifstream status("/proc/" + std::to_string(pid) + "/status");
    std::string word;
    bool zombie = true;
    while (status >> word) {
      if (word == "State:") {
        status >> word;
        zombie = word == "Z";
      }
      if (word != "SigBlk:") continue;
      unsigned long long blocked = 0;
      status >> std::hex >> blocked;
      if ((blocked >> (SIGINT - 1) & 1) != 0) return true;
      break;
    }
    if (zombie) return false;
    std::this_thread::yield();
  }
}

TEST_CASE("a signal ends a run whose notes nobody takes") {
  const TempDir dir;
  const std::string notes = dir.Path("notes");
  REQUIRE(mkfifo(notes.c_str(), 0600) == 0);
  const int fd = open(notes.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
  REQUIRE(fd >= 0);
  const std::string some(4096, '.');
  while (write(fd, some.data(), some.size()) > 0) {
  }
  const std::string command =
      "exec " COLIBRI_BINARY_DIR "/colibri-run -m " + kModel + " --ram 200MB -p Hello 2> " + notes;
  RunningProgram program("/bin/sh", {"-c", command});
  REQUIRE(TakesSignals(program.Pid()));
  program.Signal(SIGQUIT);  // says nothing, and is over in a moment
  program.Signal(SIGINT);
  program.Signal(SIGINT);
  CHECK(program.Wait().exit_code == 130);
  close(fd);
}

}  // namespace colibri
