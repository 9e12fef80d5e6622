// KV pages on the drive: the lines' bytes are those of a run that keeps all of them in memory,
// whatever is streamed, and a page that fails takes with it the lines that hold it and no other.
#include <doctest/doctest.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/engine_lines.h"
#include "tests/engine_rig.h"
#include "tests/pairwise.h"

namespace colibri {
namespace {

struct Settings {
  std::vector<int32_t> ram_layers = {0, 1, 3};
  std::vector<int32_t> threads = {1, 2, 4};
  std::vector<int32_t> frames = {1, 2};
  std::vector<int32_t> page_tokens = {4, 16, 32};
  std::vector<uint32_t> slots = {1, 4, 0};
  std::vector<int32_t> rows = {5, 64};
  std::vector<int32_t> sequences = {1, 7, 40};
  std::vector<ReaderKind> readers = {ReaderKind::kShuffled, ReaderKind::kUring, ReaderKind::kPread};

  std::vector<size_t> Sizes() const {
    return {ram_layers.size(),
            threads.size(),
            frames.size(),
            page_tokens.size(),
            slots.size(),
            rows.size(),
            readers.size(),
            sequences.size(),
            2 /*shared*/,
            2 /*pauses*/,
            2 /*few pages*/};
  }
  RunConfig Config(const std::vector<size_t>& number) const {
    RunConfig c;
    c.kv_ram_layers = ram_layers[number[0]];
    c.threads = threads[number[1]];
    c.frames = frames[number[2]];
    c.page_tokens = page_tokens[number[3]];
    c.slots = slots[number[4]];
    c.rows = rows[number[5]];
    c.reader = readers[number[6]];
    c.sequences = sequences[number[7]];
    c.share_prefixes = number[8] == 0;
    c.pauses = number[9] == 0;
    // A context and a little more: sequences are preempted.
    if (number[10] == 0) c.kv_pages = (c.context + c.page_tokens - 1) / c.page_tokens + 4;
    return c;
  }
};

// MixedLines, some of which begin with the same 40 tokens, and some longer answers, so that pages
// of every size are filled.
std::vector<TestLine> Lines() {
  std::vector<TestLine> lines = MixedLines(18);
  for (size_t i = 0; i < lines.size(); ++i) {
    Request& r = lines[i].request;
    if (i % 3 == 0) {
      std::vector<int32_t> prompt;
      for (int32_t t = 0; t < 40; ++t) prompt.push_back(100 + t);
      prompt.insert(prompt.end(), r.prompt.begin(), r.prompt.end());
      r.prompt = std::move(prompt);
    }
    if (i % 4 == 1) {
      r.max_tokens = 40;
      r.stop.clear();
    }
  }
  return lines;
}

// A few ways to stream the lines, for faults.
std::vector<RunConfig> FaultConfigs() {
  std::vector<RunConfig> configs;
  for (const int32_t threads : {1, 2, 4}) {
    for (const int32_t ram_layers : {0, 2}) {
      RunConfig c;
      c.threads = threads;
      c.kv_ram_layers = ram_layers;
      c.frames = threads == 2 ? 2 : 1;
      c.slots = threads == 1 ? 1 : 4;
      c.page_tokens = 4;
      c.pauses = ram_layers == 0;
      c.share_prefixes = ram_layers == 0;
      c.sequences = 7;
      c.rows = 32;
      c.seed = static_cast<uint32_t>(10 * threads + ram_layers);
      configs.push_back(c);
    }
  }
  return configs;
}

bool Covers(const ReadJob& job, uint32_t file, uint64_t offset) {
  return std::any_of(job.extents.begin(), job.extents.end(), [&](const Extent& e) {
    return e.file == file && e.offset <= offset && offset < e.offset + e.bytes;
  });
}

// Runs the lines with faults that know the scratch file.
using KvFault = std::function<int(const RunFiles& files, const ReadJob& job)>;
Outcome RunWithFault(const RunConfig& c, const std::vector<TestLine>& lines, const KvFault& fault) {
  RunHooks hooks;
  hooks.reader = [&](const RunFiles& files) {
    return std::make_unique<ShuffledReader>(
        files.Table(), c.seed, [&files, &fault](const ReadJob& job) { return fault(files, job); });
  };
  return RunGraph(SmallModel(), c, lines, hooks);
}

std::vector<uint64_t> FailedOf(const Outcome& outcome) {
  std::vector<uint64_t> failed;
  for (const auto& [line, code] : ErrorsOf(outcome)) {
    CHECK(code == "read_error");
    failed.push_back(line);
  }
  return failed;
}

std::string MessageOf(const Outcome& outcome, uint64_t line) {
  return After(outcome.records.at(line), "\"message\":\"", "\"");
}

// The place of a page's latents in the middle of what is streamed.
uint64_t SomePage(const RunConfig& c, int32_t page) {
  return KvLayoutOf(SmallModel().model, c).FileLatents(3, page);
}

}  // namespace

TEST_CASE("pages on the drive give the bytes of pages in memory in every configuration") {
  const std::vector<TestLine> lines = Lines();
  const Outcome expected = LineByLine(SmallModel(), lines);
  REQUIRE(ErrorsOf(expected).empty());
  const Settings settings;
  uint32_t seed = 0;
  uint64_t read = 0, written = 0;
  for (const auto& number : Pairwise(settings.Sizes())) {
    RunConfig c = settings.Config(number);
    c.seed = ++seed;
    INFO(c.Text());
    const Outcome got = RunGraph(SmallModel(), c, lines);
    CheckSameLines(got, expected);
    CHECK(got.stats.kv.failures == 0);
    read += got.stats.kv.bytes_read;
    written += got.stats.kv.bytes_written;
  }
  CHECK(read > 0);
  CHECK(written > 0);
}

TEST_CASE("answers that grow in step fill more pages at once than may be written, and take turns") {
  std::vector<TestLine> lines = MixedLines(40);
  for (TestLine& line : lines) {
    Request& r = line.request;
    r.prompt.resize(6, 17);
    r.max_tokens = 20;
    r.choices = 1;
    r.stop.clear();
  }
  const Outcome expected = LineByLine(SmallModel(), lines);
  for (const int32_t frames : {1, 2}) {
    RunConfig c;
    c.kv_ram_layers = 1;
    c.threads = frames;
    c.frames = frames;
    c.page_tokens = 4;
    c.rows = 40;
    c.sequences = 40;
    INFO(c.Text());
    REQUIRE(KvLayoutOf(SmallModel().model, c).MostCompleted() < 40);
    CheckSameLines(RunGraph(SmallModel(), c, lines), expected);
  }
}

TEST_CASE("a write or a window that fails once is tried again page by page and fails nobody") {
  const std::vector<TestLine> lines = Lines();
  const Outcome expected = LineByLine(SmallModel(), lines);
  for (const RunConfig& c : FaultConfigs()) {
    INFO(c.Text());
    std::atomic<int> writes{0}, reads{0}, faults{0};
    const Outcome got = RunWithFault(c, lines, [&](const RunFiles& files, const ReadJob& job) {
      if (job.extents.front().file != files.Kv().file || job.read_class == ReadClass::kDemand) {
        return 0;
      }
      if ((job.write ? writes : reads)++ % 3 != 2) return 0;
      ++faults;
      return job.write ? ENOSPC : EIO;
    });
    CheckSameLines(got, expected);
    CHECK(faults > 1);
    CHECK(got.stats.kv.failures == 0);
  }
}

TEST_CASE("a page that cannot be written fails the lines that hold it and no other") {
  const std::vector<TestLine> lines = Lines();
  const Outcome expected = LineByLine(SmallModel(), lines);
  for (const RunConfig& c : FaultConfigs()) {
    INFO(c.Text());
    const uint64_t bad = SomePage(c, 5);
    const Outcome got = RunWithFault(c, lines, [&](const RunFiles& files, const ReadJob& job) {
      return job.write && Covers(job, files.Kv().file, bad) ? ENOSPC : 0;
    });
    const std::vector<uint64_t> failed = FailedOf(got);
    CHECK(got.stats.kv.failures > 0);
    REQUIRE(!failed.empty());
    CHECK(failed.size() < lines.size());
    CheckSameLines(got, expected, failed);
    for (const uint64_t line : failed) {
      const std::string message = MessageOf(got, line);
      CHECK(message.starts_with("KV page 5 of layer 3 could not be written: scratch file in "));
      CHECK(message.ends_with(fmt::format(", offset {}: No space left on device", bad)));
    }
  }
}

TEST_CASE("a page that cannot be read fails the lines that hold it and no other") {
  const std::vector<TestLine> lines = Lines();
  const Outcome expected = LineByLine(SmallModel(), lines);
  for (const RunConfig& c : FaultConfigs()) {
    INFO(c.Text());
    const uint64_t bad = SomePage(c, 5);
    const Outcome got = RunWithFault(c, lines, [&](const RunFiles& files, const ReadJob& job) {
      return !job.write && Covers(job, files.Kv().file, bad) ? EIO : 0;
    });
    const std::vector<uint64_t> failed = FailedOf(got);
    REQUIRE(!failed.empty());
    CHECK(failed.size() < lines.size());
    CheckSameLines(got, expected, failed);
    for (const uint64_t line : failed) {
      const std::string message = MessageOf(got, line);
      CHECK(message.starts_with("KV page 5 of layer 3 could not be read: scratch file in "));
      CHECK(message.ends_with(fmt::format(", offset {}: Input/output error", bad)));
    }
  }
}

TEST_CASE("a torn page is told by its checksum and fails the lines that hold it and no other") {
  const std::vector<TestLine> lines = Lines();
  const Outcome expected = LineByLine(SmallModel(), lines);
  for (const RunConfig& c : FaultConfigs()) {
    INFO(c.Text());
    const uint64_t bad = SomePage(c, 5);
    const Outcome got = RunWithFault(c, lines, [&](const RunFiles& files, const ReadJob& job) {
      if (job.write || !Covers(job, files.Kv().file, bad)) return 0;
      const char torn[16] = "torn";
      const auto at = static_cast<off_t>(bad + 32);
      CHECK(pwrite(files.Table().Fd(files.Kv().file), torn, sizeof torn, at) == sizeof torn);
      return 0;
    });
    const std::vector<uint64_t> failed = FailedOf(got);
    REQUIRE(!failed.empty());
    CHECK(failed.size() < lines.size());
    CheckSameLines(got, expected, failed);
    for (const uint64_t line : failed) {
      const std::string message = MessageOf(got, line);
      CHECK(message.starts_with("KV page 5 of layer 3 could not be read: scratch file in "));
      CHECK(message.ends_with(fmt::format(", offset {}: checksum", bad)));
    }
  }
}

TEST_CASE("on a full drive short lines are answered and the run comes to its end") {
  const std::vector<TestLine> lines = Lines();
  const Outcome expected = LineByLine(SmallModel(), lines);
  for (const RunConfig& c : FaultConfigs()) {
    INFO(c.Text());
    const Outcome got = RunWithFault(
        c, lines, [&](const RunFiles&, const ReadJob& job) { return job.write ? ENOSPC : 0; });
    const std::vector<uint64_t> failed = FailedOf(got);
    CHECK(got.records.size() == lines.size());
    CHECK(failed.size() > lines.size() / 4);
    CHECK(failed.size() < lines.size());
    CheckSameLines(got, expected, failed);
  }
}

}  // namespace colibri
