// Equal prefixes of prompts: computed once, the same bytes, nobody waits for ever.
#include <doctest/doctest.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "tests/engine_lines.h"
#include "tests/engine_rig.h"
#include "tests/pairwise.h"
#include "tests/scheduler_rig.h"

namespace colibri {
namespace {

SchedulerOptions Sharing(int32_t sequences, int32_t rows, int32_t context = 64) {
  SchedulerOptions options = Options(sequences, rows, context);
  options.share_prefixes = true;
  return options;
}

// A prompt of `common` tokens that all of a family begin with and `own` ones of the line's own.
Request Prompt(int32_t common, int32_t own, int32_t number, int32_t max_tokens = 2) {
  Request request;
  request.loop_stop = false;
  for (int32_t i = 0; i < common; ++i) request.prompt.push_back(10 + i % 190);
  for (int32_t i = 0; i < own; ++i) request.prompt.push_back(1000 * (number + 1) + i);
  request.max_tokens = max_tokens;
  return request;
}

// The lines with rows in the frame, in their order.
std::vector<uint64_t> LinesIn(const Frame& frame) {
  std::vector<uint64_t> lines;
  for (const FrameSequence& place : frame.sequences) {
    lines.push_back(place.sequence->line->request.line);
  }
  return lines;
}

using Lines = std::vector<uint64_t>;

TEST_CASE("64 prompts with a common prefix of 800 tokens compute it once") {
  for (const int32_t frames : {1, 2}) {
    for (const int32_t rows : {64, 512, 4096}) {
      SchedulerOptions options = Sharing(64, rows, 1024);
      options.frames = frames;
      Rig rig(options, 64 * 256);
      for (int32_t i = 0; i < 64; ++i) rig.source.Add(Prompt(800, 20 + i % 7, i));
      rig.source.End();
      uint64_t rest = 0;
      for (int32_t i = 0; i < 64; ++i) rest += static_cast<uint64_t>(20 + i % 7);
      // Frames overlap as far as there is work: both are filled before either is computed.
      while (rig.finished.size() < 64) {
        bool any = false;
        std::vector<size_t> filled;
        for (size_t f = 0; f < rig.frames.size(); ++f) {
          if (rig.Fill(f)) filled.push_back(f);
        }
        for (const size_t f : filled) {
          rig.Finish(f);
          any = true;
        }
        rig.CloseAll();
        REQUIRE(any);
      }
      CAPTURE(rows);
      const SchedulerStats stats = rig.scheduler.Stats();
      CHECK(stats.prefill_rows == 800 + rest);
      CHECK(stats.cached_tokens == 63 * 800);
      CHECK(stats.prompt_tokens == 64 * 800 + rest);
      CHECK(stats.preemptions == 0);
      for (uint64_t line = 1; line <= 64; ++line) {
        rig.CheckTokens(line, 0, 820 + static_cast<int32_t>((line - 1) % 7), 2);
      }
      CHECK(rig.kv.FreePages() == rig.kv.Pages());
    }
  }
}

TEST_CASE("those that share wait for the first to have stored it while others start") {
  Rig rig(Sharing(5, 100), 200);
  for (int32_t i = 0; i < 2; ++i) rig.source.Add(Prompt(40, 4, i));
  rig.source.Add(Prompt(0, 10, 2));
  rig.source.Add(Prompt(40, 4, 3));
  REQUIRE(rig.Fill());
  CHECK(LinesIn(rig.At(0)) == Lines{1, 3});
  rig.Finish();
  REQUIRE(rig.Fill());
  CHECK(LinesIn(rig.At(0)) == Lines{1, 3, 2, 4});
  CHECK(rig.At(0).sequences[2].rows == 4);
  CHECK(rig.At(0).sequences[3].rows == 4);
  CHECK(rig.scheduler.At(0).pages.ids[9] == rig.At(0).sequences[3].pages->ids[9]);
  CHECK(rig.scheduler.At(0).pages.ids[10] != rig.At(0).sequences[3].pages->ids[10]);
  rig.Finish();
  rig.RunToEnd();
  CHECK(rig.scheduler.Stats().prefill_rows == 40 + 3 * 4 + 10);
}

TEST_CASE("a first one that shares its prefix leaves rows to those that need none of it") {
  Rig rig(Sharing(4, 16), 200);
  for (int32_t i = 0; i < 2; ++i) rig.source.Add(Prompt(40, 4, i));
  REQUIRE(rig.Fill());
  CHECK(rig.At(0).sequences[0].rows == 16);  // nobody behind it has use for rows
  rig.Finish();
  rig.source.Add(Prompt(0, 5, 2));
  REQUIRE(rig.Fill());
  CHECK(LinesIn(rig.At(0)) == Lines{1, 3});
  CHECK(rig.At(0).sequences[0].rows == 11);
}

TEST_CASE("later lines of a file find what earlier ones have left") {
  Rig rig(Sharing(1, 64), 40);
  for (int32_t i = 0; i < 5; ++i) rig.source.Add(Prompt(40, 4, i));
  rig.RunToEnd();
  CHECK(rig.scheduler.Stats().prefill_rows == 40 + 5 * 4);
  CHECK(rig.scheduler.Stats().cached_tokens == 4 * 40);
}

TEST_CASE("a prompt that is stored whole still computes its last token") {
  for (const int32_t prompt : {1, 3, 4, 5, 8, 9}) {
    Rig rig(Sharing(1, 16), 40);
    for (int32_t i = 0; i < 2; ++i) rig.source.Add(Prompt(prompt, 0, 0));
    rig.RunToEnd();
    const int32_t cached = (prompt - 1) / kPageTokens * kPageTokens;
    CHECK(rig.scheduler.Stats().cached_tokens == static_cast<uint64_t>(cached));
    CHECK(rig.scheduler.Stats().prefill_rows == static_cast<uint64_t>(2 * prompt - cached));
    for (const uint64_t line : {1u, 2u}) rig.CheckTokens(line, 0, prompt, 2);
  }
}

TEST_CASE("choices of a line share its prompt") {
  Rig rig(Sharing(4, 64), 64);
  Request request = Prompt(0, 30, 0, 6);
  request.choices = 4;
  rig.source.Add(std::move(request));
  rig.RunToEnd();
  CHECK(rig.scheduler.Stats().prefill_rows == 30 + 3 * 2);
  for (int32_t c = 0; c < 4; ++c) rig.CheckTokens(1, c, 30, 6);
}

TEST_CASE("when the first one fails those that wait compute the prefix themselves") {
  Rig rig(Sharing(3, 16), 64);
  for (int32_t i = 0; i < 3; ++i) rig.source.Add(Prompt(40, 4, i));
  REQUIRE(rig.Step());  // 16 positions are stored
  REQUIRE(rig.Fill());
  REQUIRE(LinesIn(rig.At(0)) == Lines{1});
  for (FrameRow& row : rig.At(0).rows) row.state = RowState::kNotFinite;
  rig.Finish();
  CHECK(rig.to_close.size() == 1);
  REQUIRE(rig.Fill());
  REQUIRE(LinesIn(rig.At(0)) == Lines{2});
  CHECK(rig.At(0).rows[0].position == 16);  // what failed was not published
  rig.Finish();
  rig.RunToEnd();
  CHECK(rig.Of(1).error);
  for (const uint64_t line : {2u, 3u}) rig.CheckTokens(line, 0, 44, 2);
  CHECK(rig.scheduler.Stats().prefill_rows == 16 + 16 + 24 + 4 + 4);
}

TEST_CASE("pages are not shared before the frame that stores them is released") {
  SchedulerOptions options = Sharing(2, 64);
  options.frames = 2;
  Rig rig(options, 64);
  rig.source.Add(Prompt(40, 4, 0));
  REQUIRE(rig.Fill(0));
  rig.source.Add(Prompt(40, 4, 1));
  CHECK_FALSE(rig.Fill(1));  // it waits for the frame under way
  const std::vector<Notice> notices = rig.Compute(0);
  CHECK(notices.size() == 1);
  CHECK(rig.kv.Find(Prompt(40, 4, 1).prompt).pages == 0);
  rig.scheduler.Release(rig.At(0));
  CHECK(rig.kv.Find(Prompt(40, 4, 1).prompt).pages == 10);
  REQUIRE(rig.Fill(0));
  CHECK(rig.At(0).sequences[1].rows == 4);
}

TEST_CASE("a sequence closed before its frame is released leaves its pages known") {
  SchedulerOptions options = Sharing(2, 64);
  options.frames = 2;
  Rig rig(options, 64);
  rig.source.Add(Prompt(40, 4, 0, 1));
  REQUIRE(rig.Fill(0));
  for (const Notice& n : rig.Compute(0)) rig.to_close.push_back(n.sequence);
  rig.CloseAll();
  CHECK(rig.kv.Find(Prompt(40, 4, 1).prompt).pages == 10);
  rig.scheduler.Release(rig.At(0));
  CHECK(rig.kv.FreePages() == 64);
}

TEST_CASE("who gave its pages back finds those again that nobody has taken since") {
  const auto prefill_rows = [](bool share) {
    SchedulerOptions options = Sharing(3, 12, 24);
    options.share_prefixes = share;
    Rig rig(options, 9);
    for (int32_t i = 0; i < 3; ++i) rig.source.Add(Prompt(0, 4, i, 20));
    rig.RunToEnd();
    CHECK(rig.scheduler.Stats().preemptions > 0);
    CHECK(rig.scheduler.Stats().cached_tokens == 0);  // its own are none
    for (uint64_t line = 1; line <= 3; ++line) rig.CheckTokens(line, 0, 4, 20);
    return rig.scheduler.Stats().prefill_rows;
  };
  CHECK(prefill_rows(true) < prefill_rows(false));
}

TEST_CASE("lines that share a prefix never hold up one that does not for ever") {
  // 12 pages: the long line needs ten and one for each other; the others need one or two of their
  // own beside the seven they share.
  Rig rig(Sharing(4, 16, 40), 12);
  for (int32_t i = 0; i < 2; ++i) rig.source.Add(Prompt(28, 2, i, 4));
  rig.source.Add(Prompt(0, 36, 2, 4));
  for (int32_t i = 3; i < 40; ++i) rig.source.Add(Prompt(28, 2, i, 4));
  rig.RunToEnd();
  CHECK(rig.finished.size() == 40);
  for (size_t i = 0; i < 6; ++i) {
    if (rig.finished[i].line == 3) return;
  }
  FAIL("line 3 came after five younger ones");
}

// Lines of three families with prefixes of their own, some equal to their prefix or a part of it.
std::vector<TestLine> FamilyLines(size_t count) {
  std::vector<TestLine> lines = MixedLines(count);
  for (size_t i = 0; i < count; ++i) {
    std::vector<int32_t>& prompt = lines[i].request.prompt;
    const size_t family = i % 3;
    std::vector<int32_t> tokens(family == 0 ? 50 : 9 + 24 * family);
    std::iota(tokens.begin(), tokens.end(), static_cast<int32_t>(500 * family + 7));
    if (i % 8 == 7) prompt.clear();
    if (i % 8 == 6) tokens.resize(tokens.size() / 2);
    prompt.insert(prompt.begin(), tokens.begin(), tokens.end());
  }
  return lines;
}

uint64_t CachedOf(const Outcome& outcome, uint64_t line) {
  return std::stoull(After(outcome.records.at(line), "\"cached_tokens\":", ",}"));
}

TEST_CASE("shared pages give the bytes of lines run alone, in every configuration") {
  const std::vector<TestLine> lines = FamilyLines(20);
  const Outcome expected = LineByLine(SmallModel(), lines);
  CHECK(ErrorsOf(expected).empty());
  CHECK(expected.stats.scheduler.cached_tokens == 0);
  // page tokens, few pages, frames, sequences, rows, threads
  const std::vector<int32_t> page_tokens = {4, 16, 32}, frames = {1, 2}, sequences = {1, 6, 40},
                             rows = {3, 24, 64}, threads = {1, 3};
  uint64_t preemptions = 0;
  for (const std::vector<size_t>& at : Pairwise(
           {page_tokens.size(), 2, frames.size(), sequences.size(), rows.size(), threads.size()})) {
    RunConfig c;
    c.page_tokens = page_tokens[at[0]];
    c.kv_pages = at[1] == 0 ? 0 : 128 / c.page_tokens + 1;
    c.frames = frames[at[2]];
    c.sequences = sequences[at[3]];
    c.rows = rows[at[4]];
    c.threads = threads[at[5]];
    INFO(c.Text());
    const Outcome got = RunGraph(SmallModel(), c, lines);
    CheckSameLines(got, expected);
    CHECK(got.stats.scheduler.cached_tokens > 0);
    preemptions += got.stats.scheduler.preemptions;
  }
  CHECK(preemptions > 0);
}

TEST_CASE("a record says how many tokens of its prompt were found stored") {
  std::vector<TestLine> lines(3);
  for (size_t i = 0; i < lines.size(); ++i) {
    Request& r = lines[i].request;
    r.line = i + 1;
    r.custom_id = std::to_string(i + 1);
    r.prompt = Prompt(40, 5, static_cast<int32_t>(i)).prompt;
    for (int32_t& id : r.prompt) id %= 4000;
    r.max_tokens = 1;
    r.choices = i == 2 ? 2 : 1;
  }
  RunConfig c;
  c.page_tokens = 16;
  const Outcome got = RunGraph(SmallModel(), c, lines);
  CHECK(CachedOf(got, 1) == 0);
  CHECK(CachedOf(got, 2) == 32);
  CHECK(CachedOf(got, 3) == 32);
  CHECK(got.stats.scheduler.cached_tokens == 32 * 3);
}

}  // namespace
}  // namespace colibri
