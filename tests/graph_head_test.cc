// A head that is read in parts: the bytes are those of a resident one, each part is used for all
// rows of the frame before it goes, and one that cannot be read costs the rows that want tokens.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "tests/engine_lines.h"
#include "tests/engine_rig.h"
#include "tests/pairwise.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

// Nothing else is streamed; all layers are; the last one is.
const std::vector<DenseResidents> kResidents = {
    {.mtp = false, .head = false},
    {.layers = 0, .embedding = false, .mtp = false, .head = false},
    {.layers = 4, .mtp = false, .head = false}};

const TestModel& HeadlessModel(size_t number) {
  static const TempDir folder;
  static const std::vector<std::unique_ptr<TestModel>> models = [] {
    WriteSmallModel(folder.Path("model"));
    std::vector<std::unique_ptr<TestModel>> all;
    for (const DenseResidents& residents : kResidents) {
      all.push_back(std::make_unique<TestModel>(folder.Path("model"), residents));
    }
    return all;
  }();
  return *models[number];
}

bool ReadsPart(const ReadJob& job, const Model& model, int32_t part) {
  const std::vector<Extent>& block = model.HeadBlock(part).extents;
  return std::equal(job.extents.begin(), job.extents.end(), block.begin(), block.end());
}

bool ReadsHead(const ReadJob& job, const Model& model) {
  for (int32_t part = 0; part < model.HeadParts(); ++part) {
    if (ReadsPart(job, model, part)) return true;
  }
  return false;
}

uint64_t HeadBytes(const Model& model) {
  uint64_t bytes = 0;
  for (int32_t part = 0; part < model.HeadParts(); ++part) bytes += model.HeadBlock(part).bytes;
  return bytes;
}

// A line with a prompt of so many tokens.
TestLine LongLine(uint64_t number, size_t prompt, int32_t answer) {
  TestLine line = MixedLine(number);
  line.request.prompt.resize(prompt);
  for (size_t i = 0; i < prompt; ++i) line.request.prompt[i] = static_cast<int32_t>(7 + 13 * i);
  line.request.max_tokens = answer;
  line.request.choices = 1;
  line.request.stop.clear();
  return line;
}

}  // namespace

TEST_CASE("a head read in parts gives the bytes of a resident one") {
  const std::vector<TestLine> lines = MixedLines(24);
  const Outcome expected = LineByLine(SmallModel(), lines);
  CHECK(ErrorsOf(expected).empty());
  const std::vector<int32_t> threads = {1, 2, 4}, frames = {1, 2, 3}, windows = {1, 0, 3};
  const std::vector<int32_t> rows = {1, 7, 64}, sequences = {5, 60};
  const std::vector<ReaderKind> readers = {ReaderKind::kShuffled, ReaderKind::kUring};
  uint32_t seed = 0;
  for (const auto& n :
       Pairwise({kResidents.size(), threads.size(), frames.size(), windows.size(), rows.size(),
                 sequences.size(), readers.size(), 2 /*pauses*/, 2 /*one slot*/})) {
    const TestModel& m = HeadlessModel(n[0]);
    REQUIRE(m.model.HeadParts() >= 8);
    RunConfig c;
    c.threads = threads[n[1]];
    c.frames = frames[n[2]];
    c.dense_windows = windows[n[3]];
    c.rows = rows[n[4]];
    c.sequences = sequences[n[5]];
    c.reader = readers[n[6]];
    c.pauses = n[7] != 0;
    c.slots = n[8] != 0 ? 1 : 0;
    c.seed = ++seed;
    INFO("residents ", n[0], " ", c.Text());
    const Outcome got = RunGraph(m, c, lines);
    CheckSameLines(got, expected);
    CHECK(got.stats.dense.failures == 0);
    CHECK(got.stats.dense.Bytes() >= HeadBytes(m.model));
  }
}

TEST_CASE("a part of the head is read once for all rows of a frame") {
  const TestModel& m = HeadlessModel(0);
  std::vector<TestLine> lines;
  for (uint64_t i = 1; i <= 40; ++i) lines.push_back(LongLine(i, 1, 6));
  RunConfig c;
  c.rows = c.sequences = 40;
  const Outcome got = RunGraph(m, c, lines);
  CHECK(got.stats.scheduler.sweeps == 6);
  const uint64_t once = 6 * HeadBytes(m.model);
  CHECK(got.stats.dense.Bytes() >= once);
  // The next sweep's first are read ahead, though none comes.
  CHECK(got.stats.dense.Bytes() <= once + 2 * m.model.HeadBlock(0).bytes);
}

TEST_CASE("a frame of prompts that go on reads nothing of the head") {
  for (const size_t residents : {size_t{0}, size_t{1}, size_t{2}}) {
    const TestModel& m = HeadlessModel(residents);
    RunConfig c;
    c.rows = 5;
    RunHooks hooks;
    std::atomic<int32_t> parts{0};
    hooks.fault = [&](const ReadJob& job) {
      parts += ReadsHead(job, m.model) ? 1 : 0;
      return 0;
    };
    const Outcome got = RunGraph(m, c, {LongLine(1, 40, 1)}, hooks);
    CHECK(got.stats.scheduler.sweeps == 8);
    // The last sweep draws; alone the head's first parts are read ahead of one more.
    CHECK(parts >= m.model.HeadParts());
    CHECK(parts <= m.model.HeadParts() + 2);
  }
}

TEST_CASE("a part of the head that can never be read fails every line, and the engine ends") {
  const std::vector<TestLine> lines = MixedLines(9);
  for (const int32_t threads : {1, 2, 4}) {
    for (const int32_t frames : {1, 2}) {
      const TestModel& m = HeadlessModel(static_cast<size_t>(frames));
      RunConfig c;
      c.threads = threads;
      c.frames = frames;
      c.slots = 1;
      c.rows = 5;
      c.pauses = true;
      INFO(c.Text());
      RunHooks hooks;
      hooks.fault = [&](const ReadJob& job) { return ReadsPart(job, m.model, 3) ? EIO : 0; };
      const Outcome got = RunGraph(m, c, lines, hooks);
      CHECK(ErrorsOf(got).size() == lines.size());
      const Extent& where = m.model.HeadBlock(3).extents.front();
      const std::string text = fmt::format("the head could not be read: {}, offset {}: ",
                                           m.model.Files().Files().Path(where.file), where.offset);
      for (const auto& [line, record] : got.records) {
        CHECK(record.find(text) != std::string::npos);
      }
    }
  }
}

TEST_CASE("a part that cannot be read for a while fails the rows that want tokens, and no other") {
  // The first line draws in the first sweep, the prompt of the second goes on for six.
  const std::vector<TestLine> lines = {LongLine(1, 2, 8), LongLine(2, 40, 8)};
  const Outcome expected = LineByLine(SmallModel(), lines);
  for (const size_t residents : {size_t{0}, size_t{1}, size_t{2}}) {
    for (const int32_t threads : {1, 2, 4}) {
      const TestModel& m = HeadlessModel(residents);
      for (const int32_t part : {0, 2, m.model.HeadParts() - 1}) {
        RunConfig c;
        c.threads = threads;
        c.rows = 8;
        c.pauses = threads == 2;
        INFO("residents ", residents, " part ", part, " ", c.Text());
        RunHooks hooks;
        // All that is read ahead of the first frame that waits, and what is read for that one.
        std::atomic<bool> over{false};
        hooks.fault = [&](const ReadJob& job) {
          if (over || !ReadsPart(job, m.model, part)) return 0;
          over = job.read_class == ReadClass::kDemand;
          return EIO;
        };
        const Outcome got = RunGraph(m, c, lines, hooks);
        const auto errors = ErrorsOf(got);
        CHECK(errors.size() == 1);
        CHECK(errors.count(1) == 1);
        CheckSameLines(got, expected, {1});
      }
    }
  }
}

TEST_CASE("a failed read of a part that nobody waited for yet fails no line") {
  const std::vector<TestLine> lines = MixedLines(8);
  const TestModel& m = HeadlessModel(1);
  RunConfig c;
  c.threads = 2;
  RunHooks hooks;
  std::atomic<int> failures{0};
  hooks.fault = [&](const ReadJob& job) {
    if (job.read_class != ReadClass::kAhead || !ReadsHead(job, m.model)) return 0;
    ++failures;
    return EIO;
  };
  CheckSameLines(RunGraph(m, c, lines, hooks), LineByLine(SmallModel(), lines));
  CHECK(failures > 0);
}

TEST_CASE("guesses of others than the MTP layer are verified with a head read in parts") {
  const TempDir folder;
  WriteSmallModel(folder.Path("model"), false);
  const TestModel whole(folder.Path("model"));
  const TestModel headless(folder.Path("model"), {.mtp = false, .head = false});
  const std::vector<TestLine> lines = MixedLines(12);
  const Outcome expected = LineByLine(whole, lines);
  const Answers answers = AnswersOf(whole, lines);
  for (const int32_t frames : {1, 2}) {
    RunConfig c;
    c.threads = 2;
    c.frames = frames;
    c.drafts = 3;
    c.answers = &answers;
    INFO(c.Text());
    const Outcome got = RunGraph(headless, c, lines);
    CheckSameLines(got, expected);
    CHECK(got.stats.scheduler.mtp_drafts.Accepted() > 0);
  }
}

}  // namespace colibri
