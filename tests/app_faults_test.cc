// colibri-run where the n-th call to the kernel fails, for every n: reads of the model, and all
// that concerns its output. A run ends by name or its lines have errors, whatever it was; a second
// one goes on from what the first left and comes to the bytes of one without faults.
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/mount.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/run_program.h"
#include "tests/syscall_faults.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

const std::string kModel = COLIBRI_SOURCE_DIR "/apps/demo/model";

bool FullTests() { return std::getenv("COLIBRI_FULL_TESTS") != nullptr; }

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string Slurp(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// False, and said, where the kernel or a sandbox forbids it.
bool CanFault() {
  static const bool can = SyscallFaults::Possible();
  if (!can) MESSAGE("skipped: no seccomp filter with a listener can be made here");
  return can;
}

// Runs colibri-run while `decide` answers the calls.
ProgramOutcome RunFaulty(const Words& arguments, const std::vector<int>& calls,
                         const SyscallFaults::Decide& decide) {
  ProgramOutcome outcome;
  const SyscallFaults faults(calls, decide,
                             [&] { outcome = RunProgram("colibri-run", arguments, ""); });
  return outcome;
}

// Answers of 2 tokens, the first line's of `first`.
std::string Prompts(int32_t lines, int32_t first = 2) {
  std::string text;
  for (int32_t i = 0; i < lines; ++i) {
    text += fmt::format(
        R"({{"custom_id":"{}","body":{{"messages":[{{"role":"user","content":"Page {}"}}],)"
        R"("max_tokens":{}}}}})",
        i, i, i == 0 ? first : 2);
    text += "\n";
  }
  return text;
}

// What depends on the line alone, by its id: the answer, or its error's message after "!".
std::map<std::string, std::string> Answers(const std::string& records) {
  std::map<std::string, std::string> answers;
  std::istringstream lines(records);
  for (std::string line; std::getline(lines, line);) {
    const Json json = Json::parse(line);
    std::string& answer = answers[json.at("custom_id")];
    CHECK_MESSAGE(answer.empty(), "two records of one line: ", line);
    if (json.at("error").is_null()) {
      const Json& body = json.at("response").at("body");
      answer = body.at("choices").dump() + body.at("usage").dump();
    } else {
      answer = "!" + json.at("error").at("message").get<std::string>();
    }
  }
  return answers;
}

// Without a slash at its end, as an open folder is called.
std::string Folder(const TempDir& dir) {
  return std::filesystem::path(dir.Path("x")).parent_path().string();
}

// Every one of the first, then fewer and fewer.
uint64_t NextPlace(uint64_t n) { return FullTests() || n < 6 ? n + 1 : n + n / 2; }

std::string LastLine(const std::string& text) {
  if (text.size() < 2) return text;
  const size_t end = text.find_last_not_of('\n');
  const size_t begin = text.rfind('\n', end);
  return text.substr(begin + 1, end - begin);
}

// A run that did not end as it should have said why, in its last line, with a file below `folder`.
void CheckNamed(const ProgramOutcome& outcome, const std::string& folder) {
  const std::string last = LastLine(outcome.err);
  CHECK_MESSAGE(last.starts_with("colibri-run: "), outcome.err);
  CHECK_MESSAGE(Contains(last, folder), outcome.err);
}

const Words kSmall = {"-m",         kModel, "--ram",     "200MB", "--slots", "1",
                      "--thinking", "off",  "--threads", "2",     "--io",    "pread"};

Words With(const Words& more) {
  Words all = kSmall;
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

const std::vector<int> kReads = {SYS_openat, SYS_read, SYS_pread64};
const std::vector<int> kOutputCalls = {SYS_openat, SYS_write,     SYS_fsync,    SYS_fdatasync,
                                       SYS_rename, SYS_ftruncate, SYS_pwrite64, SYS_fallocate};

// One run for each n whose n-th read of the model is answered with `answer`.
void EveryRead(const std::vector<int>& calls, const CallAnswer& answer, const std::string& why) {
  const TempDir dir;
  const std::string input = dir.Write("in.jsonl", Prompts(3));
  const Words words = With({"-i", input, "--output-format", "jsonl"});
  const ProgramOutcome whole = RunProgram("colibri-run", words, "");
  REQUIRE(whole.exit_code == 0);
  const auto expected = Answers(whole.out);
  std::map<int, int> ends;
  for (uint64_t n = 1;; n = NextPlace(n)) {
    CAPTURE(n);
    NthCall fault{calls, kModel, n, answer, 0, {}};
    const ProgramOutcome outcome = RunFaulty(words, calls, std::ref(fault));
    ++ends[outcome.exit_code];
    INFO(fault.hit.path, ": ", outcome.err);
    CHECK(outcome.signal == 0);
    if (outcome.exit_code == 3 || outcome.exit_code == 4) {
      CheckNamed(outcome, kModel);
      CHECK(outcome.out == "");
      if (!why.empty()) CHECK(Contains(outcome.err, why));
      if (!why.empty()) CHECK(outcome.exit_code == 4);
    } else {
      const auto answers = Answers(outcome.out);
      CHECK(answers.size() == expected.size());
      bool failed = false;
      for (const auto& entry : answers) {
        const std::string& text = entry.second;  // clang 14 captures no structured binding
        if (text == expected.at(entry.first)) continue;
        failed = true;
        CHECK_MESSAGE(text.starts_with("!"), text);
        CHECK_MESSAGE(Contains(text, kModel), text);
      }
      CHECK(outcome.exit_code == (failed ? 1 : 0));
    }
    if (!fault.Fired()) {
      CHECK(outcome.exit_code == 0);
      break;
    }
  }
  CHECK(ends[1] > 0);            // while experts were read
  CHECK(ends[3] + ends[4] > 4);  // before
  const std::string sum = fmt::format("{} runs unharmed, {} with lines that failed, {} refused",
                                      ends[0], ends[1], ends[3] + ends[4]);
  MESSAGE(sum);
}

// What an output is written by: options beside it. `retry`: there is one already, with a line that
// failed and fails again.
struct Mode {
  const char* name;
  Words words;
  bool retry = false;
  uint64_t first = 1, step = 1;  // every call is hit in some mode
  int32_t longest = 2;           // tokens of the first answer; 30 fill a page, and come last
};

const std::string kBadLine = R"({"custom_id":"bad","body":{"messages":[],"max_tokens":2}})"
                             "\n";

// Only these are in the folder, and nothing that another run would trip over.
void CheckFolder(const std::string& folder, const std::set<std::string>& names) {
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    const std::string name = file.path().filename();
    CHECK_MESSAGE(names.count(name) == 1, name);
  }
}

// One run for each n whose n-th call about the output's folder fails; then one that goes on.
void EveryOutputCall(const Mode& mode, int error) {
  const TempDir in;
  const std::string input =
      in.Write("in.jsonl", (mode.retry ? kBadLine : "") + Prompts(4, mode.longest));
  const int well = mode.retry ? 1 : 0;
  std::filesystem::create_directory(in.Path("before"));
  const std::string before = in.Path("before/out.jsonl");
  REQUIRE(RunProgram("colibri-run", With({"-i", input, "-o", before}), "").exit_code == well);
  const auto expected = Answers(Slurp(before));
  int refused = 0, unharmed = 0;
  std::set<int> numbers;
  const uint64_t step = FullTests() ? 1 : mode.step;
  for (uint64_t n = FullTests() ? 1 : mode.first;; n += step) {
    const TempDir dir;
    const std::string out = dir.Path("out.jsonl");
    if (mode.retry) {
      std::filesystem::copy(in.Path("before"), Folder(dir));
    }
    Words words = With({"-i", input, "-o", out, "--kv-dir", dir.Path(""), "--resume"});
    words.insert(words.end(), mode.words.begin(), mode.words.end());
    NthCall fault{kOutputCalls, Folder(dir), n, CallAnswer::Fail(error), 0, {}};
    const ProgramOutcome outcome = RunFaulty(words, kOutputCalls, std::ref(fault));
    const std::string what =
        fmt::format("{}, call {}: {} of {}", mode.name, n, fault.hit.number, fault.hit.path);
    INFO(what, ": ", outcome.err);
    if (fault.Fired()) numbers.insert(fault.hit.number);
    CHECK(outcome.signal == 0);
    if (outcome.exit_code == 4) {
      ++refused;
      CheckNamed(outcome, Folder(dir));
      CHECK(Contains(outcome.err, std::strerror(error)));
      const ProgramOutcome second = RunProgram("colibri-run", words, "");
      INFO(second.err);
      CHECK(second.exit_code == well);
    } else {
      CHECK(outcome.exit_code == well);
      ++unharmed;
    }
    CHECK(Answers(Slurp(out)) == expected);
    CheckFolder(dir.Path(""), {"out.jsonl", "out.jsonl.manifest.json"});
    if (!fault.Fired()) break;
  }
  CHECK(refused > 3);
  std::string sum =
      fmt::format("{}: {} runs ended with 4 and were gone on from, {} unharmed; calls", mode.name,
                  refused, unharmed);
  for (const int number : numbers) sum += fmt::format(" {}", number);
  MESSAGE(sum);
}

}  // namespace

TEST_CASE("any read of the model that fails ends the run by name or fails the lines that need it") {
  if (!CanFault()) return;
  EveryRead(kReads, CallAnswer::Fail(EIO), "Input/output error");
}

TEST_CASE("a model file that ends early at any read ends the run or fails lines, by name") {
  if (!CanFault()) return;
  EveryRead({SYS_read, SYS_pread64}, CallAnswer::Return(0), "");
}

TEST_CASE("any call about the output that fails loses no line: the next run goes on") {
  if (!CanFault()) return;
  EveryOutputCall({"in order of completion", {}, false, 2, 2}, ENOSPC);
  EveryOutputCall({"sorted, KV on the drive", {"--ordered", "--kv-ram", "3MB"}, false, 1, 2, 30},
                  EIO);
  EveryOutputCall({"failed lines once more", {"--retry-errors"}, true, 1, 2}, ENOSPC);
}

TEST_CASE("a merge of which any call fails leaves a whole output or none") {
  if (!CanFault()) return;
  const TempDir in;
  const std::string input = in.Write("in.jsonl", Prompts(4));
  for (const std::string shard : {"0", "1"}) {
    REQUIRE(RunProgram("colibri-run",
                       With({"-i", input, "-o", in.Path(shard), "--shard", shard + "/2"}), "")
                .exit_code == 0);
  }
  int refused = 0;
  for (uint64_t n = 1;; ++n) {
    const TempDir dir;
    const std::string out = dir.Path("out.jsonl");
    NthCall fault{kOutputCalls, Folder(dir), n, CallAnswer::Fail(EIO), 0, {}};
    const ProgramOutcome outcome =
        RunFaulty({"--merge", "-i", input, "-o", out, in.Path("0"), in.Path("1")}, kOutputCalls,
                  std::ref(fault));
    INFO(fault.hit.number, " of ", fault.hit.path, ": ", outcome.err);
    CheckFolder(dir.Path(""), {"out.jsonl", "out.jsonl.manifest.json"});
    if (outcome.exit_code != 0) {
      ++refused;
      CHECK(outcome.exit_code == 4);
      CheckNamed(outcome, Folder(dir));
      // Another try is not refused for what this one left.
      CHECK(RunProgram(
                "colibri-run",
                {"--merge", "-i", input, "-o", out, "--overwrite", in.Path("0"), in.Path("1")}, "")
                .exit_code == 0);
    }
    CHECK(Answers(Slurp(out)).size() == 4);
    if (!fault.Fired()) break;
  }
  CHECK(refused > 3);
}

TEST_CASE("what a run writes beside its answers costs none of them") {
  if (!CanFault()) return;
  const TempDir in;
  const std::string input = in.Write("in.jsonl", Prompts(3));
  const Words plain = With({"-i", input, "--output-format", "jsonl"});
  const auto expected = Answers(RunProgram("colibri-run", plain, "").out);
  REQUIRE(expected.size() == 3);
  int unharmed = 0;
  for (uint64_t n = 1;; ++n) {
    const TempDir dir;
    Words words = plain;
    words.insert(words.end(), {"--usage", dir.Path("usage"), "--route-trace", dir.Path("trace")});
    NthCall fault{kOutputCalls, Folder(dir), n, CallAnswer::Fail(ENOSPC), 0, {}};
    const ProgramOutcome outcome = RunFaulty(words, kOutputCalls, std::ref(fault));
    INFO(fault.hit.number, " of ", fault.hit.path, ": ", outcome.err);
    if (outcome.exit_code == 4) {  // before the first sweep
      CheckNamed(outcome, Folder(dir));
      CHECK(outcome.out == "");
    } else {
      CHECK(outcome.exit_code == 0);
      CHECK(Answers(outcome.out) == expected);
      if (fault.Fired()) {
        ++unharmed;
        CHECK(Contains(outcome.err, Folder(dir)));
      }
    }
    if (!fault.Fired()) break;
  }
  CHECK(unharmed > 2);
}

TEST_CASE("a file that may not be opened, or when too many are, is an I/O error, whichever") {
  if (!CanFault()) return;
  const TempDir dir;
  const Words words = With({"-i", dir.Write("in", "Hello\n"), "-o", dir.Path("out.jsonl"),
                            "--max-tokens", "2", "--overwrite"});
  struct Refusal {
    std::string folder;
    int error;
  };
  for (const Refusal& refusal :
       {Refusal{kModel, EMFILE}, Refusal{Folder(dir), EMFILE}, Refusal{Folder(dir), EACCES}}) {
    for (uint64_t n = 1;; ++n) {
      NthCall fault{{SYS_openat}, refusal.folder, n, CallAnswer::Fail(refusal.error), 0, {}};
      const ProgramOutcome outcome = RunFaulty(words, {SYS_openat}, std::ref(fault));
      INFO(fault.hit.path, ": ", outcome.err);
      if (!fault.Fired()) {
        CHECK(outcome.exit_code == 0);
        CHECK(n > 2);
        break;
      }
      if (outcome.exit_code == 0) continue;  // it is done without: direct reads, a folder's sync
      CHECK(outcome.exit_code == 4);
      CheckNamed(outcome, refusal.folder);
      CHECK(Contains(outcome.err, std::strerror(refusal.error)));
    }
  }
}

TEST_CASE("a read that never ends keeps nobody from ending the run") {
  if (!CanFault()) return;
  const TempDir dir;
  const std::string out = dir.Path("out.jsonl");
  const Words words = With({"-i", dir.Write("in.jsonl", Prompts(2)), "-o", out, "--resume"});
  // The first read there is, one of dense weights, one of an expert.
  for (const char* when : {"at once", "loading", "running"}) {
    CAPTURE(when);
    const bool running = std::strcmp(when, "running") == 0;
    std::promise<void> held;
    bool holds = false, told = false, interrupted = false;
    const auto decide = [&](const SystemCall& call) {
      if (!call.path.starts_with(kModel)) return CallAnswer::GoOn();
      if (!holds && *when == 'l' && !std::filesystem::exists(out)) return CallAnswer::GoOn();
      // Experts are read in whole pages to whole pages.
      const bool expert = call.arguments[2] % 4096 == 0 && call.arguments[3] % 4096 == 0 &&
                          call.arguments[1] % 4096 == 0;
      if (running && !expert) return CallAnswer::GoOn();
      if (!std::exchange(holds, true)) held.set_value();
      return CallAnswer::Never();
    };
    ProgramOutcome outcome;
    const SyscallFaults faults({SYS_pread64}, decide, [&] {
      RunningProgram program("colibri-run", words);
      held.get_future().wait();
      if (running) {
        program.Signal(SIGQUIT);
        told = program.WaitForErrors(" of " + kModel);
        program.Signal(SIGINT);
        interrupted = program.WaitForErrors("interrupted");
      }
      program.Signal(SIGINT);
      outcome = program.Wait();
    });
    INFO(outcome.err);
    CHECK(told == running);
    CHECK(interrupted == running);
    // Before there is anything to be finished the signal ends the program in the usual way.
    CHECK((outcome.exit_code == 130 || (*when == 'a' && outcome.signal == SIGINT)));
    CHECK(Slurp(out) == "");
  }
  // Its lines are run by the next.
  CHECK(RunProgram("colibri-run", words, "").exit_code == 0);
  CHECK(Answers(Slurp(out)).size() == 2);
}

// A file system in memory of some bytes, if the test may mount one.
class SmallDrive {
 public:
  SmallDrive(const std::string& path, const std::string& options) : path_(path) {
    std::filesystem::create_directory(path);
    mounted_ = mount("tmpfs", path.c_str(), "tmpfs", 0, options.c_str()) == 0;
  }
  ~SmallDrive() {
    if (mounted_) umount2(path_.c_str(), MNT_DETACH);
  }
  SmallDrive(const SmallDrive&) = delete;
  SmallDrive& operator=(const SmallDrive&) = delete;
  bool Mounted() const { return mounted_; }
  void Grow(const std::string& options) const {
    CHECK(mount("tmpfs", path_.c_str(), "tmpfs", MS_REMOUNT, options.c_str()) == 0);
  }

 private:
  const std::string path_;
  bool mounted_ = false;
};

TEST_CASE("on a drive of any size that is too small no line is lost") {
  const TempDir dir;
  const std::string input = dir.Write("in.jsonl", Prompts(12, 6));
  const Words words = With({"-i", input, "--output-format", "jsonl"});
  const auto expected = Answers(RunProgram("colibri-run", words, "").out);
  REQUIRE(expected.size() == 12);
  for (const std::string unit : {"nr_blocks", "nr_inodes"}) {
    int full = 0;
    for (int32_t n = 1;; ++n) {
      const SmallDrive drive(dir.Path("drive"), fmt::format("{}={}", unit, n));
      if (!drive.Mounted()) {
        MESSAGE("skipped: no file system can be mounted here: ", std::strerror(errno));
        return;
      }
      const std::string out = dir.Path("drive/out.jsonl");
      Words run = words;
      run.insert(run.end(), {"-o", out, "--resume", "--ordered"});
      const ProgramOutcome outcome = RunProgram("colibri-run", run, "");
      INFO(unit, " ", n, ": ", outcome.err);
      if (outcome.exit_code == 0) {
        CHECK(Answers(Slurp(out)) == expected);
        break;
      }
      ++full;
      CHECK(outcome.exit_code == 4);
      CheckNamed(outcome, dir.Path("drive"));
      CHECK(Contains(outcome.err, "No space left on device"));
      drive.Grow("nr_blocks=1000,nr_inodes=1000");
      const ProgramOutcome second = RunProgram("colibri-run", run, "");
      INFO(second.err);
      CHECK(second.exit_code == 0);
      CHECK(Answers(Slurp(out)) == expected);
      REQUIRE(n < 50);
    }
    CHECK(full > 0);
  }
}

}  // namespace colibri
