// colibri-run under the limits a machine sets: open files, locked and addressable memory, file
// sizes, a sandbox without io_uring, folders that cannot be written, shards on two drives, a drive
// that does not come to its end. A run gives the bytes it always gives, or says in a line what was
// in its way; nothing ends it without a word.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "apps/setup.h"
#include "io/file.h"
#include "runtime/record.h"
#include "tests/deny_uring.h"
#include "tests/output_records.h"
#include "tests/run_program.h"
#include "tests/shard_files.h"
#include "tests/temp_dir.h"
#include "tests/watchdog.h"

namespace colibri {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

const std::string kModel = COLIBRI_SOURCE_DIR "/apps/demo/model";
constexpr const char* kInput = "Hello\nThe sea\nGood morning\n";

Words Joined(Words all, const Words& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

// A run that reads most experts again and again. Its lines are kInput's.
Words With(const Words& more, const Words& models = {kModel}) {
  Words all = {"-i", "-", "--max-tokens", "3", "--ram", "200MB", "--slots", "25%"};
  for (const std::string& model : models) all.insert(all.end(), {"-m", model});
  return Joined(all, more);
}

// What a shell sets before it becomes the program.
ProgramOutcome Under(const std::string& limits, const Words& arguments) {
  return RunProgram(
      "/bin/sh",
      Joined({"-c", limits + " && exec \"$@\"", "sh", COLIBRI_BINARY_DIR "/colibri-run"},
             arguments),
      kInput);
}

// On a thread that has been restricted, as is what it starts. False: it cannot be here.
bool InSandbox(bool (*restrict)(), const std::function<void()>& body) {
  bool restricted = false;
  std::thread sandbox([&] {
    restricted = restrict();
    if (restricted) body();
  });
  sandbox.join();
  if (!restricted) MESSAGE("the sandbox cannot be made here: not tested");
  return restricted;
}

// Root loses what it has beyond other users when it starts the next program. Others have no such
// right to lose.
bool DropPrivileges() {
  for (const int right : {CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_IPC_LOCK}) {
    if (prctl(PR_CAPBSET_READ, right, 0, 0, 0) != 1) continue;
    if (prctl(PR_CAPBSET_DROP, right, 0, 0, 0) != 0 && geteuid() == 0) return false;
  }
  return true;
}

Words LinesIn(const std::string& text) {
  Words lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// The bytes of the lines of a run's records, without what may differ from run to run.
std::set<std::string> LinesOf(const std::string& records) {
  std::set<std::string> lines;
  for (const std::string& record : LinesIn(records)) lines.insert(LineBytes(record));
  return lines;
}

const std::set<std::string>& Expected() {
  static const std::set<std::string> lines = [] {
    const ProgramOutcome outcome = RunProgram("colibri-run", With({}), kInput);
    REQUIRE(outcome.exit_code == 0);
    return LinesOf(outcome.out);
  }();
  REQUIRE(lines.size() == 3);
  return lines;
}

void CheckAnswered(const ProgramOutcome& outcome) {
  INFO(outcome.err);
  CHECK(outcome.exit_code == 0);
  CHECK(LinesOf(outcome.out) == Expected());
}

// Ended by itself, with one of the documented codes, without an answer, and the last line says why.
void CheckRefused(const ProgramOutcome& outcome, const std::string& reason) {
  INFO(outcome.err);
  CHECK(outcome.signal == 0);
  CHECK(outcome.exit_code >= 2);
  CHECK(outcome.exit_code <= 4);
  CHECK(outcome.out == "");
  const Words lines = LinesIn(outcome.err);
  REQUIRE(lines.size() > 0);
  CHECK(lines.back().starts_with("colibri-run: "));
  CHECK_MESSAGE(Contains(lines.back(), reason), lines.back());
}

int Shell(const std::string& command) {
  return WEXITSTATUS(std::system(("cd " COLIBRI_BINARY_DIR " && " + command).c_str()));
}

// The demo model with its shards in a second folder: in memory where there is a file system there,
// so that the two differ in what they can do.
class TwoDrives {
 public:
  TwoDrives() {
    second_ = fs::is_directory("/dev/shm") ? "/dev/shm/colibri-test-XXXXXX"
                                           : dir_.Path("colibri-test-XXXXXX");
    REQUIRE(mkdtemp(second_.data()) != nullptr);
    fs::create_directory(First());
    for (const auto& file : fs::directory_iterator(kModel)) {
      const std::string name = file.path().filename();
      const bool there = name == "out-00001.safetensors" || name.starts_with("out-mtp-");
      fs::copy_file(file.path(), fs::path(there ? Second() : First()) / name);
    }
  }
  ~TwoDrives() {
    std::error_code ignored;
    fs::remove_all(second_, ignored);
  }
  TwoDrives(const TwoDrives&) = delete;
  TwoDrives& operator=(const TwoDrives&) = delete;
  std::string First() const { return dir_.Path("first"); }
  const std::string& Second() const { return second_; }

 private:
  TempDir dir_;
  std::string second_;
};

}  // namespace

TEST_CASE("however few files may be open, a run answers as always or says what it cannot open") {
  const TempDir dir;
  int32_t refused = 0;
  // Shards twice, KV file, output, lock, ring, events.
  for (int32_t files = 6; files <= 32; ++files) {
    CAPTURE(files);
    const ProgramOutcome outcome =
        Under("ulimit -n " + std::to_string(files),
              With({"--direct", "on", "--kv-ram", "20MB", "--kv-dir", dir.Path("")}));
    if (outcome.exit_code == 0) {
      CheckAnswered(outcome);
    } else {
      CheckRefused(outcome, "Too many open files (ulimit -n is " + std::to_string(files) + ")");
      ++refused;
    }
    CHECK((outcome.exit_code == 0 || files < 32));
  }
  CHECK(refused > 0);
  CHECK(fs::is_empty(dir.Path("")));
}

TEST_CASE("a low soft limit of open files is raised as far as the hard one goes") {
  CheckAnswered(Under("ulimit -Sn 6", With({"--direct", "on"})));
}

TEST_CASE("a low soft limit of the stack is raised, and a hard one that is too low is said") {
  CheckAnswered(Under("ulimit -Ss 128", With({})));
  CheckAnswered(Under("ulimit -s 1024", With({})));
  CheckRefused(Under("ulimit -s 512", With({})), "the stack limit is 512 kB, 1024 at least");
  CheckRefused(Under("ulimit -s 128", With({})), "the stack limit is 128 kB, 1024 at least");
}

TEST_CASE("without memory that may be locked a run answers as always") {
  ProgramOutcome outcome;
  if (InSandbox(DropPrivileges, [&] { outcome = Under("ulimit -l 0", With({})); })) {
    CheckAnswered(outcome);
  }
}

TEST_CASE("where io_uring is denied a run says so in a line and reads with pread") {
  ProgramOutcome fallen, refused;
  if (!InSandbox(DenyUring, [&] {
        fallen = RunProgram("colibri-run", With({"--io", "auto"}), kInput);
        refused = RunProgram("colibri-run", With({"--io", "uring"}), kInput);
      })) {
    return;
  }
  CheckAnswered(fallen);
  int32_t said = 0;
  for (const std::string& line : LinesIn(fallen.err)) {
    if (!Contains(line, "io_uring")) continue;
    ++said;
    CHECK(line.starts_with("io_uring cannot be used (io_uring_setup: Operation not permitted"));
    CHECK(Contains(line, "reading with pread"));
  }
  CHECK(said == 1);
  CHECK(Contains(fallen.err, ", pread x8, "));
  CheckRefused(refused, "io_uring_setup: Operation not permitted");
}

// Threads' stacks and the allocator's arenas count too, so that the limit is met anywhere.
TEST_CASE("however little may be addressed, a run answers as always or says what it lacks" *
          doctest::skip(kAddressSanitizer)) {
  int32_t refused = 0, answered = 0;
  for (int32_t megabytes = 20; megabytes <= 260 && answered < 3; megabytes += 8) {
    CAPTURE(megabytes);
    const ProgramOutcome outcome =
        Under("ulimit -v " + std::to_string(megabytes * 1000), With({"--threads", "2"}));
    if (outcome.exit_code == 127) continue;  // not even the libraries have room
    if (outcome.exit_code == 0) {
      CheckAnswered(outcome);
      ++answered;
    } else {
      CheckRefused(outcome, "");
      ++refused;
    }
  }
  CHECK(refused > 0);
  CHECK(answered == 3);
}

TEST_CASE("an output that reaches the largest file allowed ends with advice, and is gone on with") {
  const TempDir dir;
  const std::string out = dir.Path("out.jsonl");
  const Words arguments = With({"-o", out});
  // dash counts in blocks of 512 bytes: room for one record, not for three.
  const ProgramOutcome cut = Under("ulimit -f 3", arguments);
  INFO(cut.err);
  CHECK(cut.signal == 0);
  CHECK(cut.exit_code == 4);
  CHECK(Contains(cut.err, "File too large"));
  CHECK(Contains(cut.err, "--resume goes on"));
  const std::string before = ReadWhole(out);
  CHECK((before.empty() || before.back() == '\n'));
  CHECK(LinesOf(before).size() < 3);
  const ProgramOutcome resumed = RunProgram("colibri-run", Joined(arguments, {"--resume"}), kInput);
  CHECK(resumed.exit_code == 0);
  CHECK(ReadWhole(out).starts_with(before));
  CHECK(LinesOf(ReadWhole(out)) == Expected());
}

TEST_CASE("a model folder that cannot be written is read, and its usage counts stay as they are") {
  const TempDir dir;
  const fs::path model = dir.Path("model");
  fs::copy(kModel, model);
  const std::string counts = "2 0 5\n";
  std::ofstream(model / ".coli_usage") << counts;
  std::set<std::string> names;
  for (const auto& file : fs::directory_iterator(model)) {
    names.insert(file.path());
    fs::permissions(file.path(), fs::perms(0444));
  }
  fs::permissions(model, fs::perms(0555));
  ProgramOutcome outcome, unreadable;
  const bool tested = InSandbox(DropPrivileges, [&] {
    outcome = RunProgram("colibri-run", With({}, {model}), kInput);
    chmod((model / "out-00001.safetensors").c_str(), 0);
    unreadable = RunProgram("colibri-run", With({}, {model}), kInput);
  });
  fs::permissions(model, fs::perms(0755));
  if (!tested) return;
  CheckAnswered(outcome);
  CHECK(Contains(outcome.err, "counts of chosen experts are not kept"));
  CHECK(ReadWhole(model / ".coli_usage") == counts);
  std::set<std::string> after;
  for (const auto& file : fs::directory_iterator(model)) after.insert(file.path());
  CHECK(after == names);
  CheckRefused(unreadable, "out-00001.safetensors: Permission denied");
}

TEST_CASE("where nothing can be written beside the answers KV stays in memory, or says where") {
  const TempDir dir;
  const std::string run =
      COLIBRI_BINARY_DIR "/colibri-run -m " + kModel + " -p Hello --ram 200MB --max-tokens 3";
  fs::permissions(dir.Path(""), fs::perms(0555));
  int automatic = -1, given = -1;
  InSandbox(DropPrivileges, [&] {
    const std::string here = "cd " + dir.Path("") + " && " + run + " --ctx-size 2048";
    automatic = Shell(here + " --kv-ram 20MB > /dev/null 2>&1");
    given = Shell(run + " --kv-ram 20MB --kv-dir " + dir.Path("") + " > /dev/null 2>&1");
  });
  fs::permissions(dir.Path(""), fs::perms(0755));
  CHECK(automatic == 0);
  CHECK(given == 2);
}

TEST_CASE("a model on two drives gives the answers of one folder, and goes on with its runs") {
  const TwoDrives drives;
  const TempDir dir;
  const Words both = {drives.First(), drives.Second()};
  CheckAnswered(RunProgram("colibri-run", With({"--direct", "on"}, both), kInput));
  const ProgramOutcome buffered =
      RunProgram("colibri-run", With({"--direct", "off", "--io", "pread"}, both), kInput);
  CheckAnswered(buffered);
  CHECK(Contains(buffered.err, "buffered reads"));
  // What is in neither is named; the order counts where the first has no config.
  const ProgramOutcome lacking = RunProgram("colibri-run", With({}, {drives.First()}), kInput);
  CHECK(lacking.exit_code == 3);
  CHECK(Contains(lacking.err, "is a shard missing? not there: out-00001.safetensors"));
  CheckRefused(RunProgram("colibri-run", With({}, {drives.Second(), drives.First()}), kInput),
               drives.Second());
  // The output knows the model wherever it lies.
  const std::string out = dir.Path("out.jsonl");
  const Words one = With({"-o", out, "--resume"}), two = With({"-o", out, "--resume"}, both);
  CHECK(RunProgram("colibri-run", one, "Hello\n").exit_code == 0);
  CHECK(RunProgram("colibri-run", two, kInput).exit_code == 0);
  CHECK(LinesOf(ReadWhole(out)) == Expected());
}

TEST_CASE("how files are read is told as it is") {
  const TempDir dir;
  FileTable files;
  files.Add(dir.Write("a", std::string(8192, 'a')));
  files.Add(dir.Write("b", std::string(8192, 'b')));
  CHECK(ReadsText(files) == "buffered");
  if (!files.EnableDirect().empty()) return;  // a file system without direct reads
  CHECK(ReadsText(files) == "direct");
  files.GiveUpDirect(1);
  CHECK(ReadsText(files) == "partly direct");
  files.GiveUpDirect(0);
  CHECK(ReadsText(files) == "buffered");
}

TEST_CASE("a slow drive changes no answer") {
  CheckAnswered(RunProgram("colibri-run", With({"--io-limit", "40MB"}), kInput));
}

TEST_CASE("two signals end a run at once while its drive stands nearly still") {
  const Watchdog watchdog("a drive of ten bytes a second");
  const TempDir dir;
  const std::string out = dir.Path("out.jsonl"), input = dir.Write("in", kInput);
  const Words arguments = {"-m",  kModel, "--ram", "200MB",        "--slots", "1",       "-i",
                           input, "-o",   out,     "--max-tokens", "3",       "--resume"};
  for (const auto& [first, second] :
       {std::pair(SIGINT, SIGINT), std::pair(SIGTERM, SIGTERM), std::pair(SIGINT, SIGTERM)}) {
    RunningProgram program("colibri-run", Joined(arguments, {"--io-limit", "10"}));
    REQUIRE(program.WaitForErrors("input: lines"));  // it runs
    program.Signal(first);
    REQUIRE(program.WaitForErrors("interrupted"));
    program.Signal(second);
    const ProgramOutcome outcome = program.Wait();
    CHECK(outcome.exit_code == 130);
    CHECK(outcome.signal == 0);
    CHECK(ReadWhole(out) == "");
  }
  CHECK(RunProgram("colibri-run", arguments).exit_code == 0);
  CHECK(LinesOf(ReadWhole(out)).size() == 3);
}

TEST_CASE("a named pipe as output whose reader goes away ends the run with 141") {
  const Watchdog watchdog("a pipe without reader");
  const TempDir dir;
  const std::string fifo = dir.Path("answers");
  REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
  RunningProgram program("colibri-run", With({"-o", fifo, "--max-seqs", "1"}));
  program.Write("Hello\n");
  {
    std::ifstream reader(fifo);  // waits for the program to open it
    std::string record;
    CHECK(std::getline(reader, record));
  }
  program.Write("The sea\n");
  const ProgramOutcome outcome = program.Wait();
  CHECK(outcome.exit_code == 141);
  CHECK(outcome.signal == 0);
}

TEST_CASE("notes that have nowhere to go are not written into the answers") {
  const TempDir dir;
  const std::string out = dir.Path("out.jsonl");
  CHECK(Shell("printf 'Hello\\nThe sea\\nGood morning\\n' | ./colibri-run -i - -m " + kModel +
              " --ram 200MB --slots 25% --max-tokens 3 -o " + out + " 2>&-") == 0);
  CHECK(LinesOf(ReadWhole(out)) == Expected());
}

TEST_CASE("colibri-bench says that it cannot print, and no file takes standard output's place") {
  const TempDir dir;
  const std::string model = dir.Path("model");
  const std::string make = "./colibri-bench make-model " + model +
                           " --layers 3 --experts 8 --hidden 64 --moe-intermediate 64 --quiet "
                           "--tokenizer-from " +
                           kModel + " 2> /dev/null ";
  CHECK(Shell(make + ">&-") == 4);
  CHECK_FALSE(fs::exists(model));
  CHECK(Shell("./colibri-bench graph --dump dot 2> /dev/null > /dev/full") == 4);
  CHECK(Shell(make + "> /dev/null") == 0);
}

}  // namespace colibri
