// Drafts change how many sweeps a line takes and none of its bytes: in the sequential engine and in
// the flow graph, whoever makes them and however many.
#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "tests/engine_lines.h"
#include "tests/engine_rig.h"
#include "tests/pairwise.h"

namespace colibri {
namespace {

uint64_t Drafted(const Outcome& o) {
  return o.stats.scheduler.mtp_drafts.Offered() + o.stats.scheduler.looked_up.Offered();
}

uint64_t Accepted(const Outcome& o) {
  return o.stats.scheduler.mtp_drafts.Accepted() + o.stats.scheduler.looked_up.Accepted();
}

// MixedLines, some with answers long enough for drafts to matter.
std::vector<TestLine> Lines() {
  std::vector<TestLine> lines = MixedLines(18);
  for (size_t i = 1; i < lines.size(); i += 4) {
    lines[i].request.max_tokens = 40;
    lines[i].request.stop.clear();
  }
  return lines;
}

}  // namespace

TEST_CASE("the sequential engine gives the same bytes with drafts of any depth, right and wrong") {
  const std::vector<TestLine> lines = Lines();
  const Outcome expected = LineByLine(SmallModel(), lines);
  const Answers answers = AnswersOf(SmallModel(), lines);
  uint64_t accepted = 0, preemptions = 0;
  uint32_t seed = 0;
  const std::vector<int32_t> depths = {1, 2, 4}, rows = {5, 64}, sequences = {1, 7, 40};
  const std::vector<int32_t> pages = {4, 16, 32};
  for (const auto& n :
       Pairwise({depths.size(), rows.size(), sequences.size(), pages.size(), 2, 2, 2, 2})) {
    RunConfig c;
    c.seed = ++seed;
    c.drafts = depths[n[0]];
    c.rows = rows[n[1]];
    c.sequences = sequences[n[2]];
    c.page_tokens = pages[n[3]];
    c.random_depth = n[4] == 0;
    if (n[5] == 0) c.answers = &answers;
    c.share_prefixes = n[6] == 0;
    if (n[7] == 0) c.kv_pages = (c.context + c.page_tokens - 1) / c.page_tokens + 4;
    INFO(c.Text());
    const Outcome got = RunSequentially(SmallModel(), c, lines);
    CheckSameLines(got, expected);
    CHECK(Drafted(got) > 0);
    accepted += Accepted(got);
    preemptions += got.stats.scheduler.preemptions;
  }
  CHECK(accepted > 100);
  CHECK(preemptions > 0);
}

TEST_CASE("the graph gives the bytes of a run without drafts in every configuration") {
  const std::vector<TestLine> lines = Lines();
  const Outcome expected = LineByLine(SmallModel(), lines);
  const Answers answers = AnswersOf(SmallModel(), lines);
  const std::vector<int32_t> depths = {0, 1, 4}, threads = {1, 2, 4}, frames = {1, 2};
  const std::vector<uint32_t> slots = {1, 4, 0};
  const std::vector<int32_t> ram_layers = {0, 2, INT32_MAX}, rows = {5, 64}, pages = {4, 16, 32};
  const std::vector<int32_t> sequences = {1, 7, 40};
  uint64_t accepted = 0, written = 0;
  uint32_t seed = 0;
  for (const auto& n :
       Pairwise({depths.size(), threads.size(), frames.size(), slots.size(), ram_layers.size(),
                 rows.size(), pages.size(), sequences.size(), 3, 2, 2, 2, 2, 2})) {
    RunConfig c;
    c.seed = ++seed;
    c.drafts = depths[n[0]];
    c.threads = threads[n[1]];
    c.frames = frames[n[2]];
    c.slots = slots[n[3]];
    c.kv_ram_layers = ram_layers[n[4]];
    c.rows = rows[n[5]];
    c.page_tokens = pages[n[6]];
    c.sequences = sequences[n[7]];
    c.random_depth = n[8] == 0;
    if (n[9] == 0) c.answers = &answers;
    c.share_prefixes = n[10] == 0;
    if (n[11] == 0) c.kv_pages = (c.context + c.page_tokens - 1) / c.page_tokens + 4;
    c.pauses = n[12] == 0;
    c.prefetch = n[13] == 0;
    c.governed = n[8] == 2;
    c.lookup = n[12] == 1;
    INFO(c.Text());
    const Outcome got = RunGraph(SmallModel(), c, lines);
    CheckSameLines(got, expected);
    if (!c.governed) CHECK((Drafted(got) > 0) == (c.drafts > 0));
    if (c.drafts > 0) accepted += Accepted(got);
    if (c.drafts > 0) written += got.stats.kv.bytes_written;
  }
  CHECK(accepted > 100);
  CHECK(written > 0);
}

TEST_CASE("drafts beside dense weights on the drive give the same bytes") {
  const TempDir folder;
  WriteSmallModel(folder.Path("model"));
  const std::vector<TestLine> lines = Lines();
  const Outcome expected = LineByLine(SmallModel(), lines);
  const Answers answers = AnswersOf(SmallModel(), lines);
  for (const int32_t layers : {0, 2}) {
    const TestModel m(folder.Path("model"), {layers, true, true});
    for (const int32_t frames : {1, 2}) {
      RunConfig c;
      c.threads = 2;
      c.frames = frames;
      c.slots = 4;
      c.kv_ram_layers = 1;
      c.page_tokens = 4;
      c.dense_windows = layers == 0 ? 1 : 0;
      c.drafts = 4;
      c.random_depth = true;
      c.answers = &answers;
      c.pauses = true;
      INFO(c.Text());
      const Outcome got = RunGraph(m, c, lines);
      CheckSameLines(got, expected);
      CHECK(Accepted(got) > 0);
      CHECK(got.stats.dense.Bytes() > 0);
    }
  }
}

TEST_CASE("drafts by prompt lookup want no MTP layer and give the same bytes") {
  const TempDir folder;
  WriteSmallModel(folder.Path("model"));
  // Prompts that repeat themselves, so that something is found.
  std::vector<TestLine> lines = Lines();
  for (TestLine& line : lines) {
    std::vector<int32_t>& prompt = line.request.prompt;
    prompt.resize(std::min<size_t>(prompt.size(), 12));
    for (size_t i = 0; i < 12; ++i) prompt.push_back(prompt[i % 4]);
  }
  const Outcome expected = LineByLine(SmallModel(), lines);
  const TestModel without(folder.Path("model"), {INT32_MAX, true, false});
  for (const int32_t frames : {1, 2}) {
    for (const bool governed : {false, true}) {
      RunConfig c;
      c.threads = frames;
      c.frames = frames;
      c.kv_ram_layers = frames == 1 ? INT32_MAX : 1;
      c.page_tokens = 4;
      c.drafts = 4;
      c.lookup = true;
      c.governed = governed;
      c.pauses = true;
      INFO(c.Text());
      const Outcome got = RunGraph(without, c, lines);
      CheckSameLines(got, expected);
      if (!governed) CHECK(Drafted(got) > 0);
    }
  }
}

TEST_CASE("sequences are preempted for rows of others and come back, with drafts and without") {
  // Answers much longer than prompts: who started when there was room is in the way later.
  std::vector<TestLine> lines = MixedLines(16);
  for (TestLine& line : lines) {
    Request& r = line.request;
    if (r.prompt.size() > 8) r.prompt.resize(8);
    r.max_tokens = 24 + static_cast<int32_t>(r.line);
    r.stop.clear();
  }
  const Outcome expected = LineByLine(SmallModel(), lines);
  const Answers answers = AnswersOf(SmallModel(), lines);
  for (const int32_t frames : {1, 2}) {
    for (const int32_t ram_layers : {1, INT32_MAX}) {
      RunConfig c;
      c.threads = 3 - frames;
      c.frames = frames;
      c.context = 64;
      c.page_tokens = 4;
      c.kv_pages = 17;
      c.sequences = 12;
      c.rows = 32;
      c.pauses = true;
      c.drafts = 4;
      c.answers = &answers;
      c.kv_ram_layers = ram_layers;
      INFO(c.Text());
      const Outcome got = RunGraph(SmallModel(), c, lines);
      CHECK(got.stats.scheduler.preemptions > 0);
      CHECK(Accepted(got) > 0);
      CheckSameLines(got, expected);
    }
  }
}

TEST_CASE("the graph drafts what the sequential engine drafts") {
  for (const TestModel* m : {&SmallModel(), &DemoModel()}) {
    std::vector<TestLine> lines = MixedLines(8);
    for (TestLine& line : lines) line.request.max_tokens = 24;
    RunConfig c;
    c.drafts = 4;
    c.share_prefixes = false;  // when a page is known depends on when its frame is released
    const Outcome expected = RunSequentially(*m, c, lines);
    c.threads = 2;
    c.slots = 4;
    const Outcome got = RunGraph(*m, c, lines);
    CheckSameLines(got, expected);
    CHECK(got.stats.scheduler.mtp_drafts == expected.stats.scheduler.mtp_drafts);
    if (m == &DemoModel()) CHECK(Accepted(got) > 0);
  }
}

TEST_CASE("experts of the MTP layer that cannot be read end drafts and fail no line") {
  const TestModel& m = SmallModel();
  const std::vector<TestLine> lines = Lines();
  const Outcome expected = LineByLine(m, lines);
  const uint32_t first = m.model.ExpertItem(m.model.Config().layers, 0);
  uint64_t before = UINT64_MAX;
  for (const uint32_t readable : {16u, 0u}) {
    std::set<std::vector<uint64_t>> broken;
    const auto key = [](std::span<const Extent> extents) {
      std::vector<uint64_t> all;  // small experts share their first page with neighbours
      for (const Extent& e : extents) all.insert(all.end(), {e.file, e.offset, e.bytes});
      return all;
    };
    for (uint32_t item = first + readable; item < m.model.ExpertCount(); ++item) {
      broken.insert(key(m.model.Expert(item).extents));
    }
    for (const int32_t threads : {1, 2}) {
      RunConfig c;
      c.threads = threads;
      c.frames = threads;
      c.drafts = 4;
      c.pauses = true;
      c.slots = 4;
      INFO(c.Text());
      RunHooks hooks;
      hooks.fault = [&](const ReadJob& job) { return broken.contains(key(job.extents)) ? EIO : 0; };
      const Outcome got = RunGraph(m, c, lines, hooks);
      CheckSameLines(got, expected);
      CHECK((Drafted(got) > 0) == (readable > 0));
      CHECK(Drafted(got) < before);
    }
    before = readable > 0 ? 1 : before;
  }
}

TEST_CASE("an expert that cannot be read fails the lines that need it, and none for a draft") {
  const TestModel& m = SmallModel();
  std::vector<TestLine> lines = Lines();
  for (TestLine& line : lines) {
    line.request.prompt.resize(std::min<size_t>(line.request.prompt.size(), 3));
    line.request.max_tokens = std::min(line.request.max_tokens, 5);
  }
  const Outcome whole = LineByLine(m, lines);
  const Answers answers = AnswersOf(m, lines);
  std::map<uint64_t, std::string> errors;
  uint32_t item = m.model.ExpertItem(2, 0);
  while (errors.empty() || errors.size() > lines.size() / 2) {
    errors = ErrorsOf(LineByLine(m, lines, {++item}));
    REQUIRE(item < m.model.ExpertCount());
  }
  std::vector<uint64_t> failed;
  for (const auto& [line, code] : errors) failed.push_back(line);
  const std::vector<Extent>& extents = m.model.Expert(item).extents;
  for (const int32_t threads : {1, 2, 4}) {
    RunConfig c;
    c.threads = threads;
    c.frames = threads == 2 ? 2 : 1;
    c.drafts = 4;
    c.answers = &answers;
    c.pauses = true;
    c.slots = 4;
    INFO(c.Text());
    RunHooks hooks;
    hooks.fault = [&](const ReadJob& job) {
      const bool same =
          std::equal(job.extents.begin(), job.extents.end(), extents.begin(), extents.end());
      return same ? EIO : 0;
    };
    const Outcome got = RunGraph(m, c, lines, hooks);
    CHECK(ErrorsOf(got) == errors);
    CheckSameLines(got, whole, failed);
    CHECK(Accepted(got) > 0);
  }
}

TEST_CASE("right drafts save sweeps") {
  const std::vector<TestLine> lines = Lines();
  const Answers answers = AnswersOf(SmallModel(), lines);
  RunConfig c;
  const Outcome without = RunSequentially(SmallModel(), c, lines);
  c.drafts = 4;
  c.answers = &answers;
  const Outcome with = RunSequentially(SmallModel(), c, lines);
  CHECK(Accepted(with) > 0);
  CHECK(with.stats.scheduler.sweeps < without.stats.scheduler.sweeps);
}

}  // namespace colibri
