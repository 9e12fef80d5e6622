// Drafts in the scheduler: where their rows and pages come from, and that they only ever change how
// many sweeps a line takes.
#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "tests/scheduler_rig.h"

namespace colibri {
namespace {

SchedulerOptions WithDrafts(SchedulerOptions options, int32_t drafts = kMaxDrafts) {
  options.drafts = drafts;
  return options;
}

// The first `right` of the tokens to come, then wrong ones, `count` altogether.
void Propose(Sequence& s, int32_t right, int32_t count) {
  s.drafts.clear();
  for (int32_t i = 0; i < std::min(count, s.stop->Left() - 1); ++i) {
    s.drafts.push_back(TokenOf(s.line->request.line, s.choice, s.Known() + i));
    if (i >= right) s.drafts.back() -= 100;
  }
}

std::vector<int32_t> DraftsOf(const Frame& frame) {
  std::vector<int32_t> drafts;
  for (const FrameSequence& place : frame.sequences) drafts.push_back(place.drafts);
  return drafts;
}

// Lines of many lengths, in a frame or two, with few pages or many; the sweeps they took.
uint64_t RunLines(SchedulerOptions options, int32_t pages, uint32_t seed, bool propose,
                  SchedulerStats* stats) {
  Rig rig(options, pages);
  std::mt19937 random(seed);
  const auto below = [&](uint32_t n) { return static_cast<int32_t>(random() % n); };
  std::vector<std::pair<int32_t, int32_t>> lines;
  for (int i = 0; i < 12; ++i) {
    lines.emplace_back(1 + below(20), 1 + below(30));
    rig.source.Add(lines.back().first, lines.back().second);
  }
  std::mt19937 guesses(seed + 1);
  if (propose) {
    rig.propose = [&](Sequence& s) {
      Propose(s, static_cast<int32_t>(guesses() % 5), static_cast<int32_t>(guesses() % 5));
    };
  }
  rig.RunToEnd();
  for (size_t i = 0; i < lines.size(); ++i) {
    rig.CheckTokens(i + 1, 0, lines[i].first, lines[i].second);
  }
  CHECK(rig.kv.FreePages() == rig.kv.Pages());
  *stats = rig.scheduler.Stats();
  return stats->sweeps;
}

}  // namespace

TEST_CASE("drafts stand behind the row of their sequence, in rows that nobody else has use for") {
  Rig rig(WithDrafts(Options(3, 12)), 64);
  for (int i = 0; i < 3; ++i) rig.source.Add(3, 20);
  REQUIRE(rig.Fill());
  CHECK(DraftsOf(rig.At(0)) == std::vector<int32_t>{0, 0, 0});
  int32_t most = 3;
  rig.propose = [&](Sequence& s) { Propose(s, 2, most--); };
  rig.Finish();
  REQUIRE(rig.Fill());
  const Frame& frame = rig.At(0);
  CHECK(DraftsOf(frame) == std::vector<int32_t>{3, 2, 1});
  REQUIRE(frame.rows.size() == 9);
  for (size_t i = 0; i < frame.sequences.size(); ++i) {
    const FrameSequence& place = frame.sequences[i];
    CHECK(place.rows == 1 + place.drafts);
    for (int32_t r = 0; r < place.rows; ++r) {
      const FrameRow& row = frame.rows[static_cast<size_t>(place.first_row + r)];
      CHECK(row.sequence == static_cast<int32_t>(i));
      CHECK(row.position == 3 + r);
      CHECK(row.draft == (r > 0));
      CHECK(row.wants_logits);
      if (r > 0) CHECK(row.token == place.sequence->drafts[static_cast<size_t>(r - 1)]);
    }
  }
  rig.propose = nullptr;
  rig.Finish();
  const DraftCounts expected{{3, 2, 1, 0}, {3, 2, 0, 0}};
  CHECK(rig.scheduler.Stats().mtp_drafts == expected);
  for (const FrameSequence& place : frame.sequences) CHECK(place.sequence->drafts.empty());
}

TEST_CASE("first drafts go before second ones, and prompts and decoding rows before all drafts") {
  Rig rig(WithDrafts(Options(3, 8)), 64);
  rig.source.Add(2, 20);
  rig.source.Add(2, 20);
  rig.propose = [&](Sequence& s) { Propose(s, 0, 4); };
  REQUIRE(rig.Step());
  REQUIRE(rig.Fill());
  CHECK(DraftsOf(rig.At(0)) == std::vector<int32_t>{3, 3});
  rig.Finish();
  rig.source.Add(5, 20);
  REQUIRE(rig.Fill());
  CHECK(DraftsOf(rig.At(0)) == std::vector<int32_t>{1, 0, 0});
  CHECK(rig.At(0).rows.size() == 8);
}

TEST_CASE("a sequence has no more drafts than the option says") {
  Rig rig(WithDrafts(Options(1, 8), 2), 64);
  rig.source.Add(2, 20);
  rig.propose = [&](Sequence& s) { Propose(s, 0, 4); };
  REQUIRE(rig.Step());
  REQUIRE(rig.Fill());
  CHECK(DraftsOf(rig.At(0)) == std::vector<int32_t>{2});
}

TEST_CASE("drafts take free pages, and leave the others theirs") {
  // Pages of four. Two sequences of three positions each: one page each is all there is but one.
  Rig rig(WithDrafts(Options(2, 16)), 3);
  rig.source.Add(3, 4);
  rig.source.Add(3, 4);
  rig.propose = [&](Sequence& s) { Propose(s, 0, 4); };
  REQUIRE(rig.Step());
  REQUIRE(rig.Fill());
  // The base row is the fourth position: the draft behind it begins a page.
  CHECK(DraftsOf(rig.At(0)) == std::vector<int32_t>{2, 0});
  CHECK(rig.kv.FreePages() == 0);
  rig.Finish();
  CHECK(rig.kv.FreePages() == 1);  // what rejected drafts had is back
  rig.RunToEnd();
  CHECK(rig.scheduler.Stats().preemptions == 0);
  rig.CheckTokens(1, 0, 3, 4);
  rig.CheckTokens(2, 0, 3, 4);
}

TEST_CASE("drafts never change a token, right or wrong, whatever the rows, pages and sharing") {
  uint64_t accepted = 0, preemptions = 0;
  for (uint32_t seed = 0; seed < 60; ++seed) {
    SchedulerOptions options = Options(1 + static_cast<int32_t>(seed % 5), 3 + (seed % 3) * 9);
    options.share_prefixes = seed % 2 == 0;
    const int32_t pages = seed % 4 < 2 ? 17 : 80;
    INFO("seed ", seed);
    SchedulerStats off, on;
    const uint64_t without = RunLines(options, pages, seed, false, &off);
    const uint64_t with = RunLines(WithDrafts(options), pages, seed, true, &on);
    const DraftCounts& counts = on.mtp_drafts;
    CHECK(off.mtp_drafts.Offered() == 0);
    if (counts.Accepted() > 20 && pages == 80) CHECK(with < without);
    CHECK(counts.Accepted() <= counts.Offered());
    accepted += counts.Accepted();
    preemptions += on.preemptions;
  }
  CHECK(accepted > 0);
  CHECK(preemptions > 0);
}

}  // namespace colibri
