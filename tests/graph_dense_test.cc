// Dense weights that are read with every sweep: the bytes are those of resident ones, whatever
// stays in memory and however few windows there are; a block that cannot be read costs the lines
// that needed it.
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

// Nothing; the first layers; everything but the embedding; everything but one layer.
const std::vector<DenseResidents> kResidents = {
    {.layers = 0, .embedding = false, .mtp = false, .head = false},
    {.layers = 2, .embedding = true, .mtp = false},
    {.embedding = false},
    {.layers = 4, .embedding = false}};

// The small model, loaded in each of these ways.
const TestModel& StreamedModel(size_t number) {
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

uint64_t StreamedBytes(const Model& model) {
  uint64_t bytes = 0;
  for (int32_t layer = 0; layer < model.Config().layers; ++layer) {
    if (model.Streams(layer)) bytes += model.Block(layer).bytes;
  }
  return bytes;
}

bool ReadsBlock(const ReadJob& job, const Model& model, int32_t layer) {
  const std::vector<Extent>& block = model.Block(layer).extents;
  return std::equal(job.extents.begin(), job.extents.end(), block.begin(), block.end());
}

}  // namespace

TEST_CASE("dense weights read with every sweep give the bytes of resident ones") {
  const std::vector<TestLine> lines = MixedLines(14);
  const Outcome expected = LineByLine(SmallModel(), lines);
  CHECK(ErrorsOf(expected).empty());
  const std::vector<int32_t> threads = {1, 2, 4}, frames = {1, 2}, windows = {1, 0, 3};
  const std::vector<int32_t> rows = {1, 5, 64}, sequences = {7, 40};
  const std::vector<uint32_t> slots = {1, 4, 0};
  const std::vector<ReaderKind> readers = {ReaderKind::kUring, ReaderKind::kPread,
                                           ReaderKind::kShuffled};
  const std::vector<int32_t> kv_layers = {INT32_MAX, 0, 3};
  uint32_t seed = 0;
  for (const auto& n : Pairwise({kResidents.size(), threads.size(), frames.size(), windows.size(),
                                 rows.size(), sequences.size(), slots.size(), readers.size(),
                                 2 /*pauses*/, 2 /*prefetch*/, kv_layers.size()})) {
    const TestModel& m = StreamedModel(n[0]);
    RunConfig c;
    c.threads = threads[n[1]];
    c.frames = frames[n[2]];
    c.dense_windows = windows[n[3]];
    c.rows = rows[n[4]];
    c.sequences = sequences[n[5]];
    c.slots = slots[n[6]];
    c.reader = readers[n[7]];
    c.pauses = n[8] != 0;
    c.prefetch = n[9] == 0;
    c.kv_ram_layers = kv_layers[n[10]];
    c.seed = ++seed;
    INFO("residents ", n[0], " ", c.Text());
    const Outcome got = RunGraph(m, c, lines);
    CheckSameLines(got, expected);
    CHECK(got.stats.dense.Bytes() > 0);
    CHECK(got.stats.dense.failures == 0);
  }
}

TEST_CASE("one thread, one slot and one window are enough") {
  const std::vector<TestLine> lines = MixedLines(6);
  const Outcome expected = LineByLine(SmallModel(), lines);
  for (const int32_t frames : {1, 2, 3}) {
    RunConfig c;
    c.slots = 1;
    c.dense_windows = 1;
    c.frames = frames;
    c.rows = 2;
    c.pauses = true;
    INFO(c.Text());
    CheckSameLines(RunGraph(StreamedModel(0), c, lines), expected);
  }
}

TEST_CASE("every format gives the same bytes from windows as from memory") {
  const std::string tokenizer = COLIBRI_SOURCE_DIR "/apps/demo/model/tokenizer.json";
  std::vector<TestLine> lines = MixedLines(4);
  for (TestLine& line : lines) {
    for (int32_t& id : line.request.prompt) id %= 300;
    line.request.max_tokens = std::min(line.request.max_tokens, 4);
  }
  for (const char* name : {"tiny", "long", "groups", "quant-int4-row", "quant-int4-g64",
                           "quant-int4-g32", "quant-int8-row", "quant-mixed", "odd-int4-row"}) {
    CAPTURE(name);
    const std::string directory =
        fmt::format("{}/tests/fixtures/{}/model", COLIBRI_SOURCE_DIR, name);
    const TestModel whole(directory, {}, tokenizer);
    const Outcome expected = LineByLine(whole, lines);
    CHECK(ErrorsOf(expected).empty());
    for (const int32_t layers : {0, 4}) {
      const TestModel streamed(directory, {layers, layers > 0, false, false}, tokenizer);
      RunConfig c;
      c.threads = 2;
      CheckSameLines(RunGraph(streamed, c, lines), expected);
    }
  }
}

TEST_CASE("a frame alone reads each streamed block once a sweep") {
  for (const int32_t windows : {1, 2}) {
    const TestModel& m = StreamedModel(1);
    RunConfig c;
    c.dense_windows = windows;
    const Outcome got = RunGraph(m, c, MixedLines(6));
    const uint64_t blocks = got.stats.scheduler.sweeps * StreamedBytes(m.model);
    CHECK(got.stats.dense.Bytes() >= blocks);
    // The next sweep's first are read ahead, though none may come.
    CHECK(got.stats.dense.Bytes() <= blocks + 2 * m.model.Block(2).bytes);
  }
}

TEST_CASE("a block that can never be read fails every line, and the engine comes to its end") {
  const std::vector<TestLine> lines = MixedLines(9);
  for (const int32_t threads : {1, 2, 4}) {
    for (const int32_t frames : {1, 2}) {
      const TestModel& m = StreamedModel(0);
      RunConfig c;
      c.threads = threads;
      c.frames = frames;
      c.slots = 1;
      c.rows = 5;
      c.pauses = true;
      INFO(c.Text());
      RunHooks hooks;
      hooks.fault = [&](const ReadJob& job) { return ReadsBlock(job, m.model, 3) ? EIO : 0; };
      const Outcome got = RunGraph(m, c, lines, hooks);
      CHECK(ErrorsOf(got).size() == lines.size());
      const Extent& where = m.model.Block(3).extents.front();
      const std::string text =
          fmt::format("the dense weights of layer 3 could not be read: {}, offset {}: ",
                      m.model.Files().Files().Path(where.file), where.offset);
      for (const auto& [line, record] : got.records) {
        CHECK(record.find(text) != std::string::npos);
      }
    }
  }
}

TEST_CASE("a block that cannot be read for a while fails the frame's lines, later ones go well") {
  const std::vector<TestLine> lines = MixedLines(12);
  const Outcome expected = LineByLine(SmallModel(), lines);
  for (const int32_t threads : {1, 2, 4}) {
    for (const int32_t frames : {1, 2}) {
      const TestModel& m = StreamedModel(static_cast<size_t>(frames) - 1);
      RunConfig c;
      c.threads = threads;
      c.frames = frames;
      c.rows = 5;
      c.sequences = 2 * frames;
      c.pauses = threads == 2;
      c.seed = static_cast<uint32_t>(threads);
      INFO(c.Text());
      RunHooks hooks;
      // As often as one frame asks in a sweep: ahead, and once more when it waits.
      std::atomic<int> left{2};
      hooks.fault = [&](const ReadJob& job) {
        return ReadsBlock(job, m.model, 3) && left.fetch_sub(1) > 0 ? EIO : 0;
      };
      const Outcome got = RunGraph(m, c, lines, hooks);
      std::vector<uint64_t> failed;
      for (const auto& [line, code] : ErrorsOf(got)) {
        failed.push_back(line);
        CHECK(code == "read_error");
      }
      CHECK(failed.size() < lines.size());
      if (frames == 1) CHECK(!failed.empty());  // two may take one failure each, and try again
      CheckSameLines(got, expected, failed);
    }
  }
}

TEST_CASE("a failed read of a block that nobody waited for yet fails no line") {
  const std::vector<TestLine> lines = MixedLines(8);
  const TestModel& m = StreamedModel(0);
  RunConfig c;
  c.threads = 2;
  RunHooks hooks;
  std::atomic<int> failures{0};
  hooks.fault = [&](const ReadJob& job) {
    if (job.read_class != ReadClass::kAhead) return 0;
    ++failures;
    return EIO;
  };
  CheckSameLines(RunGraph(m, c, lines, hooks), LineByLine(SmallModel(), lines));
  CHECK(failures > 0);
}

TEST_CASE("a token whose embedding cannot be read fails its lines alone") {
  const TestModel& m = StreamedModel(2);
  std::vector<TestLine> lines = MixedLines(10);
  constexpr int32_t kToken = 4095;  // no other line has it
  lines[3].request.prompt.back() = kToken;
  const Outcome expected = LineByLine(SmallModel(), lines);
  const PackedMatrix& table = m.model.Embedding();
  const TensorEntry& entry = *m.model.Files().Find("model.embed_tokens.weight");
  const uint64_t at = entry.offset + RowBytes(table.format, table.cols) * kToken;
  RunConfig c;
  c.threads = 2;
  c.frames = 2;
  RunHooks hooks;
  hooks.fault = [&](const ReadJob& job) {
    const Extent& e = job.extents.front();
    const bool token = job.extents.size() == 1 && e.bytes <= 2 * kIoAlign && e.file == entry.file &&
                       e.offset <= at && at < e.offset + e.bytes;
    return token ? EIO : 0;
  };
  const Outcome got = RunGraph(m, c, lines, hooks);
  const auto errors = ErrorsOf(got);
  // Rows that share its page fail too: an error of the drive has no finer grain.
  CHECK(errors.count(4) == 1);
  std::vector<uint64_t> failed;
  for (const auto& [line, code] : errors) failed.push_back(line);
  CHECK(failed.size() < lines.size() / 2);
  CheckSameLines(got, expected, failed);
  CHECK(got.records.at(4).find("the embedding of a token could not be read") != std::string::npos);
}

}  // namespace colibri
