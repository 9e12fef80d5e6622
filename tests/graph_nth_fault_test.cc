// Every read and write of a run goes wrong once, one run each, in every way there is: error, short,
// torn, rotten, slow, last in order, never. Whatever it was, each line has its bytes or an error
// that names the place, the line after them has its bytes, and nothing is held at the end (the
// engine checks pins, waiters, slots and KV pages itself).
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine_lines.h"
#include "tests/engine_rig.h"
#include "tests/faulty_reader.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

// Some lines, and one that is there when all of those have their records.
class LastLater final : public RequestSource {
 public:
  explicit LastLater(std::vector<TestLine> lines) : lines_(std::move(lines)) {}
  Next TryNext(Request* request, std::optional<LineError>* error) override {
    if (next_ == lines_.size()) return Next::kEnd;
    if (next_ + 1 == lines_.size() && !open_) return Next::kAgain;
    *request = lines_[next_].request;
    *error = lines_[next_].error;
    ++next_;
    return Next::kRequest;
  }
  int Fd() const override { return -1; }
  bool Buffered() const override { return false; }
  void Open() { open_ = true; }

 private:
  const std::vector<TestLine> lines_;
  size_t next_ = 0;
  std::atomic<bool> open_{false};
};

// Few rows and short prompts, so that some experts are some lines' alone; and again one of them.
std::vector<TestLine> Lines() {
  std::vector<TestLine> lines = MixedLines(6);
  for (TestLine& line : lines) {
    Request& r = line.request;
    if (r.prompt.size() > 9) r.prompt.resize(9);
    r.max_tokens = std::min(r.max_tokens, 3);
  }
  lines.push_back(lines[2]);
  lines.back().request.line = 7;
  lines.back().request.custom_id = "again";
  return lines;
}

// The small model with nothing in memory that need not be.
const TestModel& StreamedModel() {
  static const TempDir folder;
  static const auto model = [] {
    WriteSmallModel(folder.Path("model"));
    return std::make_unique<TestModel>(
        folder.Path("model"),
        DenseResidents{.layers = 0, .embedding = false, .mtp = false, .head = false});
  }();
  return *model;
}

struct Way {
  const char* name;
  const TestModel* model;
  RunConfig config;
};

// Experts alone, with guesses; everything streamed, by two frames; with drafts.
std::vector<Way> Ways() {
  RunConfig experts;
  experts.threads = 2;
  experts.slots = 4;
  experts.sequences = 4;
  experts.rows = 16;
  experts.pauses = true;
  RunConfig streamed = experts;
  streamed.slots = 1;
  streamed.frames = 2;
  streamed.page_tokens = 4;
  streamed.kv_ram_layers = 1;
  RunConfig drafts = experts;
  drafts.threads = 1;
  drafts.slots = 0;
  drafts.drafts = 2;
  return {{"experts", &SmallModel(), experts},
          {"streamed", &StreamedModel(), streamed},
          {"drafts", &SmallModel(), drafts}};
}

struct Hit {
  Outcome outcome;
  uint64_t jobs = 0;
  bool fired = false;
  bool late = false;  // when the last line was under way
};

Hit RunWithFault(const Way& way, const std::vector<TestLine>& lines, Fault fault) {
  FaultyReader::Report report;
  RunHooks hooks;
  Engine* engine = nullptr;
  LastLater source(lines);
  Hit hit;
  const FileTable* table = nullptr;
  std::string state;
  std::string stuck;
  if (fault.kind == FaultKind::kNever) {
    fault.on_stuck = [&](const ReadJob& job) {
      stuck = fmt::format("{}, offset {}, ", table->Path(job.extents.front().file),
                          job.extents.front().offset);
      state = engine->StateText();
    };
  }
  hooks.reader = [&](const RunFiles& files) {
    table = &files.Table();
    if (fault.kind == FaultKind::kRotten) fault.scratch = files.Kv().file;
    return std::make_unique<FaultyReader>(files.Table(), fault, &report, way.config.seed,
                                          fault.n % 2 == 0);
  };
  hooks.before_run = [&](Engine& made) { engine = &made; };
  hooks.written = [&](Engine&, size_t count) {
    if (count + 1 != lines.size()) return;
    hit.late = !report.fired;
    source.Open();
  };
  hit.outcome = RunGraph(*way.model, way.config, source, hooks);
  hit.jobs = report.jobs;
  hit.fired = report.fired;
  hit.late = hit.late && hit.fired;
  if (!stuck.empty()) {
    // Whoever looks at the run finds what it waits for.
    CHECK_MESSAGE(state.find(stuck) != std::string::npos, "state without ", stuck, ": ", state);
    CHECK(state.find("frame 0: ") != std::string::npos);
  }
  return hit;
}

void CheckErrors(const Hit& hit) {
  for (const auto& [line, code] : ErrorsOf(hit.outcome)) {
    CHECK(code == "read_error");
    const nlohmann::json json = nlohmann::json::parse(hit.outcome.records.at(line));
    const std::string message = json.at("error").at("message");
    CHECK_MESSAGE(message.find(", offset ") != std::string::npos, message);
  }
}

// Every one of the first, then fewer and fewer.
uint64_t NextPlace(uint64_t n) { return FullTests() || n < 6 ? n + 1 : n + n / 2; }

// Lets the n-th job of a run go wrong, for every n until the run has fewer; returns how many lines
// failed in all.
size_t EveryJob(const Way& way, FaultKind kind, const Outcome& expected,
                const std::vector<TestLine>& lines) {
  size_t failed_lines = 0, runs = 0;
  for (uint64_t n = 1;; n = NextPlace(n)) {
    const std::string what = fmt::format("{}: {} at job {}", way.name, NameOf(kind), n);
    CAPTURE(what);
    const Hit hit = RunWithFault(way, lines, {kind, n, UINT32_MAX, nullptr});
    std::vector<uint64_t> failed;
    for (const auto& [line, code] : ErrorsOf(hit.outcome)) failed.push_back(line);
    if (kind == FaultKind::kSlow || kind == FaultKind::kNever) CHECK(failed.empty());
    CheckErrors(hit);
    CheckSameLines(hit.outcome, expected, failed);
    // The line that came afterwards is not among them.
    if (!hit.late) CHECK(std::find(failed.begin(), failed.end(), lines.size()) == failed.end());
    failed_lines += failed.size();
    if (!hit.fired) break;
    REQUIRE(++runs < 100'000);
  }
  CHECK(runs > 8);
  const std::string sum =
      fmt::format("{}, {}: {} runs, {} lines failed", way.name, NameOf(kind), runs, failed_lines);
  MESSAGE(sum);
  return failed_lines;
}

// kinds[i] are tried in way i; with COLIBRI_FULL_TESTS all of them in every way.
void EveryJobInEveryWay(const std::vector<std::vector<FaultKind>>& kinds, bool fails) {
  const std::vector<TestLine> lines = Lines();
  const Outcome expected = LineByLine(SmallModel(), lines);
  REQUIRE(ErrorsOf(expected).empty());
  const std::vector<Way> ways = Ways();
  for (size_t i = 0; i < ways.size(); ++i) {
    size_t failed = 0;
    for (size_t k = 0; k < kinds.size(); ++k) {
      if (k != i && !FullTests()) continue;
      for (const FaultKind kind : kinds[k]) failed += EveryJob(ways[i], kind, expected, lines);
    }
    CHECK((failed > 0) == fails);
  }
}

}  // namespace

TEST_CASE("a job that fails costs the lines that need it, at any place of a run") {
  EveryJobInEveryWay(
      {{FaultKind::kTorn}, {FaultKind::kError, FaultKind::kShort}, {FaultKind::kTorn}}, true);
}

TEST_CASE("a job that comes last or only when it is let go costs no line, at any place of a run") {
  EveryJobInEveryWay({{FaultKind::kSlow}, {FaultKind::kNever}, {FaultKind::kNever}}, false);
}

TEST_CASE("a KV page that comes back wrong costs the lines that hold it, at any place of a run") {
  const std::vector<TestLine> lines = Lines();
  const Outcome expected = LineByLine(SmallModel(), lines);
  CHECK(EveryJob(Ways()[1], FaultKind::kRotten, expected, lines) > 0);
}

}  // namespace colibri
