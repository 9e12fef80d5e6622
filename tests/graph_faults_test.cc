// Reads that fail under the flow graph: only the lines that need them fail, with a record that says
// what was read, and no other line changes by a byte.
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "tests/engine_lines.h"
#include "tests/engine_rig.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

// Short lines, so that an expert is needed by some and not by all.
std::vector<TestLine> ShortLines() {
  std::vector<TestLine> lines = MixedLines(20);
  for (TestLine& line : lines) {
    Request& r = line.request;
    if (r.prompt.size() > 4) r.prompt.resize(4);
    r.max_tokens = std::min(r.max_tokens, 3);
  }
  return lines;
}

struct Broken {
  uint32_t item = 0;
  Outcome expected;                        // of the sequential engine with the same fault
  std::map<uint64_t, std::string> errors;  // by line
};

// An expert that some of the lines need and some do not, found by trying.
Broken BreakAnExpert(const TestModel& m, const std::vector<TestLine>& lines, uint32_t first) {
  for (uint32_t item = first; item < m.model.ExpertCount(); ++item) {
    Broken broken{item, LineByLine(m, lines, {item}), {}};
    broken.errors = ErrorsOf(broken.expected);
    if (broken.errors.size() > 1 && broken.errors.size() < lines.size() / 2) return broken;
  }
  FAIL("every expert is needed by all lines or by none");
  return {};
}

// By all extents: small experts share their first page with neighbours.
bool Reads(const ReadJob& job, const std::vector<Extent>& extents) {
  return std::equal(job.extents.begin(), job.extents.end(), extents.begin(), extents.end());
}

std::string MessageOf(const std::string& record) {
  return nlohmann::json::parse(record).at("error").at("message").get<std::string>();
}

void CheckErrorRecord(const std::string& record, const std::string& path) {
  const nlohmann::json json = nlohmann::json::parse(record);
  CHECK(json.at("response").at("status_code") == 500);
  CHECK(json["error"].at("code") == "read_error");
  const nlohmann::json& body = json["response"].at("body");
  CHECK_FALSE(body.contains("choices"));  // no partial text
  CHECK(json["error"].at("message").get<std::string>().find(path) != std::string::npos);
}

// The configurations a fault is tried in: narrow, wide, starved, two frames.
std::vector<RunConfig> FaultConfigs() {
  std::vector<RunConfig> configs;
  for (const int32_t threads : {1, 2, 4}) {
    for (const uint32_t slots : {1u, 4u, 0u}) {
      RunConfig c;
      c.threads = threads;
      c.slots = slots;
      c.frames = threads == 4 ? 2 : 1 + static_cast<int32_t>(slots % 2);
      c.rows = threads == 1 ? 5 : 64;
      c.sequences = threads == 2 ? 40 : 6;
      c.pauses = slots != 4;
      c.seed = static_cast<uint32_t>(threads) * 10 + slots;
      configs.push_back(c);
    }
  }
  return configs;
}

}  // namespace

TEST_CASE("an expert that can never be read fails the lines that need it and no other") {
  const TestModel& m = SmallModel();
  const std::vector<TestLine> lines = ShortLines();
  const Outcome whole = LineByLine(m, lines);
  REQUIRE(ErrorsOf(whole).empty());
  const uint32_t middle = m.model.ExpertItem(2, 0);
  const Broken broken = BreakAnExpert(m, lines, middle);
  const std::vector<Extent>& extents = m.model.Expert(broken.item).extents;
  const Extent& where = extents.front();
  std::vector<uint64_t> failed;
  for (const auto& [line, code] : broken.errors) failed.push_back(line);
  CheckSameLines(broken.expected, whole, failed);
  for (RunConfig c : FaultConfigs()) {
    INFO(c.Text());
    RunHooks hooks;
    hooks.fault = [&](const ReadJob& job) { return Reads(job, extents) ? EIO : 0; };
    const Outcome got = RunGraph(m, c, lines, hooks);
    CHECK(ErrorsOf(got) == broken.errors);
    CheckSameLines(got, whole, failed);
    for (const uint64_t line : failed) {
      CheckErrorRecord(got.records.at(line), m.model.Files().Files().Path(where.file));
      CHECK(MessageOf(got.records.at(line)) == MessageOf(broken.expected.records.at(line)));
      CHECK(MessageOf(got.records.at(line)).find(fmt::format("offset {}", where.offset)) !=
            std::string::npos);
    }
  }
}

TEST_CASE("when no expert can be read every line fails and the engine comes to its end") {
  const std::vector<TestLine> lines = ShortLines();
  for (RunConfig c : FaultConfigs()) {
    INFO(c.Text());
    RunHooks hooks;
    hooks.fault = [](const ReadJob&) { return EIO; };
    const Outcome got = RunGraph(SmallModel(), c, lines, hooks);
    CHECK(got.records.size() == lines.size());
    CHECK(ErrorsOf(got).size() == lines.size());
  }
}

TEST_CASE("of a line whose first choice has failed the others do not run") {
  std::vector<TestLine> lines = ShortLines();
  lines.resize(3);
  for (TestLine& line : lines) line.request.choices = 12;
  std::vector<uint32_t> all(SmallModel().model.ExpertCount());
  std::iota(all.begin(), all.end(), 0u);
  const Outcome alone = LineByLine(SmallModel(), lines, all);
  CHECK(ErrorsOf(alone).size() == lines.size());
  CHECK(alone.stats.scheduler.started == lines.size());
  for (RunConfig c : FaultConfigs()) {
    for (const int32_t sequences : {1, 2, 5}) {
      c.sequences = sequences;
      INFO(c.Text());
      RunHooks hooks;
      hooks.fault = [](const ReadJob&) { return EIO; };
      const Outcome got = RunGraph(SmallModel(), c, lines, hooks);
      CHECK(ErrorsOf(got) == ErrorsOf(alone));
      // Those that had a sequence by then.
      CHECK(got.stats.scheduler.started <= lines.size() * static_cast<uint64_t>(sequences));
      CHECK(got.stats.scheduler.started == got.stats.scheduler.ended);
    }
  }
}

TEST_CASE("a prefetch that fails is read again on demand and fails nobody") {
  const std::vector<TestLine> lines = ShortLines();
  const Outcome whole = LineByLine(SmallModel(), lines);
  size_t faults = 0;
  for (RunConfig c : FaultConfigs()) {
    INFO(c.Text());
    RunHooks hooks;
    // The first guess at each expert fails, also where a demand has joined it meanwhile.
    std::set<const Extent*> tried;  // an expert's extents have one address
    hooks.fault = [&](const ReadJob& job) {
      if (job.read_class != ReadClass::kPrefetch) return 0;
      if (!tried.insert(job.extents.data()).second) return 0;
      ++faults;
      return EIO;
    };
    const Outcome got = RunGraph(SmallModel(), c, lines, hooks);
    CHECK(ErrorsOf(got).empty());
    CheckSameLines(got, whole);
  }
  CHECK(faults > 0);
}

TEST_CASE("a shard cut short under a running engine fails the lines that need its end") {
  const std::vector<TestLine> lines = ShortLines();
  const Outcome whole = LineByLine(SmallModel(), lines);
  TempDir folder;
  WriteSmallModel(folder.Path("model"));
  const TestModel m(folder.Path("model"));
  // The end of the first shard that holds experts of main layers.
  const uint32_t file = m.model.Expert(0).extents.front().file;
  uint64_t last = 0;
  for (uint32_t i = 0; i < m.model.ExpertCount(); ++i) {
    for (const Extent& e : m.model.Expert(i).extents) {
      if (e.file == file) last = std::max(last, e.offset);
    }
  }
  const std::string path = m.model.Files().Files().Path(file);
  REQUIRE(truncate(path.c_str(), static_cast<off_t>(last)) == 0);
  const Outcome expected = LineByLine(m, lines);
  const std::map<uint64_t, std::string> errors = ErrorsOf(expected);
  REQUIRE(errors.size() > 0);
  REQUIRE(errors.size() < lines.size());
  std::vector<uint64_t> failed;
  for (const auto& [line, code] : errors) failed.push_back(line);
  for (const ReaderKind reader : {ReaderKind::kUring, ReaderKind::kPread}) {
    for (RunConfig c : FaultConfigs()) {
      if (c.slots == 4 && !FullTests()) continue;
      c.reader = reader;
      INFO(c.Text());
      const Outcome got = RunGraph(m, c, lines);
      CHECK(ErrorsOf(got) == errors);
      CheckSameLines(got, whole, failed);
      for (const uint64_t line : failed) CheckErrorRecord(got.records.at(line), path);
    }
  }
}

}  // namespace colibri
