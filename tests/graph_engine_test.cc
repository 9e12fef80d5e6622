// The flow graph gives the bytes of the sequential engine whatever the threads, slots, frames,
// rows, pages, readers and neighbours.
#include "graph/engine.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "tests/engine_lines.h"
#include "tests/engine_rig.h"
#include "tests/pairwise.h"

namespace colibri {
namespace {

constexpr size_t kLines = 24;

// The values of each setting; Pairwise chooses by number.
struct Settings {
  std::vector<int32_t> threads = {1, 2, 4};
  std::vector<uint32_t> slots;
  std::vector<int32_t> frames = {1, 2};
  std::vector<int32_t> rows = {1, 5, 64};
  std::vector<int32_t> page_tokens = {4, 16, 32};
  std::vector<ReaderKind> readers = {ReaderKind::kUring, ReaderKind::kPread, ReaderKind::kShuffled};
  std::vector<int32_t> sequences = {1, 7, 40};

  std::vector<size_t> Sizes() const {
    return {threads.size(), slots.size(), frames.size(),  rows.size(),      page_tokens.size(),
            2 /*prefetch*/, 2 /*pauses*/, readers.size(), sequences.size(), 2 /*slow output*/};
  }
  RunConfig Config(const std::vector<size_t>& number) const {
    RunConfig c;
    c.threads = threads[number[0]];
    c.slots = slots[number[1]];
    c.frames = frames[number[2]];
    c.rows = rows[number[3]];
    c.page_tokens = page_tokens[number[4]];
    c.prefetch = number[5] == 0;
    c.pauses = number[6] == 0;
    c.reader = readers[number[7]];
    c.sequences = sequences[number[8]];
    c.slow_output = number[9] != 0;
    return c;
  }
};

// Every combination of the first five settings; the others take turns.
std::vector<std::vector<size_t>> AllCombinations(const std::vector<size_t>& sizes) {
  constexpr size_t kCrossed = 5;
  std::vector<std::vector<size_t>> rows = {{}};
  for (size_t s = 0; s < sizes.size(); ++s) {
    std::vector<std::vector<size_t>> longer;
    for (size_t r = 0; r < rows.size(); ++r) {
      for (size_t i = 0; i < (s < kCrossed ? sizes[s] : 1); ++i) {
        longer.push_back(rows[r]);
        longer.back().push_back(s < kCrossed ? i : (r * 7 + r / sizes[s]) % sizes[s]);
      }
    }
    rows = std::move(longer);
  }
  return rows;
}

void CheckAllSettings(const TestModel& m, const Settings& settings,
                      const std::vector<TestLine>& lines, const Outcome& expected) {
  const std::vector<size_t> sizes = settings.Sizes();
  uint32_t seed = 0;
  for (const auto& number : FullTests() ? AllCombinations(sizes) : Pairwise(sizes)) {
    RunConfig config = settings.Config(number);
    config.seed = ++seed;
    INFO(config.Text());
    CheckSameLines(RunGraph(m, config, lines), expected);
  }
}

}  // namespace

TEST_CASE("a random model gives the sequential engine's bytes in every configuration") {
  const std::vector<TestLine> lines = MixedLines(kLines);
  const Outcome expected = LineByLine(SmallModel(), lines);
  CHECK(ErrorsOf(expected).empty());
  // The lines are worth comparing: some end by a stop string, some by length.
  size_t stopped = 0;
  for (const auto& [line, record] : expected.records) {
    stopped += record.find("\"stop_string\"") != std::string::npos;
  }
  CHECK(stopped > 0);
  CHECK(stopped < kLines);
  Settings settings;
  settings.slots = {1, 2, 0};  // one, top_k, all
  CheckAllSettings(SmallModel(), settings, lines, expected);
}

TEST_CASE("the demo model gives the sequential engine's bytes in every configuration") {
  std::vector<TestLine> lines = MixedLines(5);
  for (TestLine& line : lines) line.request.max_tokens = std::min(line.request.max_tokens, 6);
  Settings settings;
  settings.slots = {1, 4, 0};
  if (!FullTests()) settings.rows = {5, 64};
  CheckAllSettings(DemoModel(), settings, lines, LineByLine(DemoModel(), lines));
}

TEST_CASE("the sequential engine gives the same bytes for any rows, pages and sequences") {
  const std::vector<TestLine> lines = MixedLines(kLines);
  const Outcome expected = LineByLine(SmallModel(), lines);
  for (const auto& [rows, sequences, page] :
       {std::tuple(5, 7, 4), std::tuple(64, 40, 16), std::tuple(64, 1, 32)}) {
    RunConfig c;
    c.rows = rows;
    c.sequences = sequences;
    c.page_tokens = page;
    INFO(c.Text());
    CheckSameLines(RunSequentially(SmallModel(), c, lines), expected);
  }
}

TEST_CASE("a line alone in the graph gives the bytes it has in the batch") {
  const std::vector<TestLine> lines = MixedLines(kLines);
  RunConfig batch;
  batch.threads = 2;
  batch.sequences = 40;
  const Outcome together = RunGraph(SmallModel(), batch, lines);
  RunConfig alone;
  alone.threads = 2;
  alone.slots = 3;
  for (const TestLine& line : lines) {
    const Outcome one = RunGraph(SmallModel(), alone, std::vector<TestLine>{line});
    REQUIRE(one.records.size() == 1);
    CHECK(LineBytes(one.records.at(line.request.line)) ==
          LineBytes(together.records.at(line.request.line)));
  }
}

TEST_CASE("the order of the lines in the file changes none of them") {
  std::vector<TestLine> lines = MixedLines(kLines);
  const Outcome expected = LineByLine(SmallModel(), lines);
  std::mt19937 random(5);
  for (int i = 0; i < 3; ++i) {
    std::shuffle(lines.begin(), lines.end(), random);
    RunConfig c;
    c.threads = 2;
    c.frames = 1 + i % 2;
    c.slots = 5;
    c.sequences = 4 + 5 * i;
    c.rows = 16;
    CheckSameLines(RunGraph(SmallModel(), c, lines), expected);
  }
}

TEST_CASE("one thread with one slot a class and two frames comes to an end") {
  const std::vector<TestLine> lines = MixedLines(kLines);
  const Outcome expected = LineByLine(SmallModel(), lines);
  for (const ReaderKind reader : {ReaderKind::kUring, ReaderKind::kPread, ReaderKind::kShuffled}) {
    for (const bool pauses : {false, true}) {
      RunConfig c;
      c.slots = 1;
      c.frames = 2;
      c.rows = 6;
      c.reader = reader;
      c.pauses = pauses;
      INFO(c.Text());
      CheckSameLines(RunGraph(SmallModel(), c, lines), expected);
    }
  }
}

TEST_CASE("running out of pages preempts sequences and changes no byte") {
  // Answers much longer than prompts: who started when there was room is in the way later.
  std::vector<TestLine> lines = MixedLines(16);
  for (TestLine& line : lines) {
    Request& r = line.request;
    if (r.prompt.size() > 8) r.prompt.resize(8);
    r.max_tokens = 24 + static_cast<int32_t>(r.line);
    r.stop.clear();
  }
  const Outcome expected = LineByLine(SmallModel(), lines);
  for (const int32_t frames : {1, 2}) {
    for (const int32_t threads : {1, 2}) {
      RunConfig c;
      c.threads = threads;
      c.frames = frames;
      c.context = 64;
      c.page_tokens = 4;
      c.kv_pages = 17;
      c.sequences = 12;
      c.rows = 32;
      c.pauses = true;
      INFO(c.Text());
      const Outcome got = RunGraph(SmallModel(), c, lines);
      CHECK(got.stats.scheduler.preemptions > 0);
      CheckSameLines(got, expected);
    }
  }
}

TEST_CASE("a run without lines ends at once") {
  CHECK(RunGraph(SmallModel(), {}, std::vector<TestLine>{}).records.empty());
}

}  // namespace colibri
