// One prompt of 100,000 tokens among 200 short ones: nobody waits for it.
#include <doctest/doctest.h>

#include <cstdint>
#include <map>
#include <set>

#include "tests/scheduler_rig.h"

namespace colibri {
namespace {

constexpr int32_t kContext = 128 << 10;
constexpr int32_t kLong = 100'000, kShort = 20, kAnswer = 40, kCount = 200;
constexpr int32_t kRows = 256;

// As the plan has it: so many positions a row cost what the rest of the row does.
SchedulerOptions LongOptions(int32_t sequences) {
  SchedulerOptions options = Options(sequences, kRows, kContext);
  options.prefill_work = int64_t{kRows} * 8192;
  return options;
}

struct Seen {
  uint64_t sweeps = 0, last_start = 0, last_end = 0;  // of the short ones, in sweeps
  uint64_t long_prefill = 0;                          // sweeps until the long prompt is stored
  bool long_first = false;                            // it decoded before the short ones had ended
};

// Runs to the end; `line_of_long` is the long prompt's.
Seen RunAll(Rig& rig, uint64_t line_of_long) {
  rig.stores = false;
  rig.source.End();
  Seen seen;
  std::map<uint64_t, int32_t> generated;  // of those under way that decode, by line
  std::set<uint64_t> started;
  while (rig.Fill()) {
    ++seen.sweeps;
    const Frame& frame = rig.At(0);
    std::set<uint64_t> placed;
    int64_t work = 0;
    int32_t prefill_rows = 0;
    for (const FrameSequence& place : frame.sequences) {
      const Sequence& s = *place.sequence;
      const uint64_t line = s.line->request.line;
      placed.insert(line);
      if (line != line_of_long && started.insert(line).second) seen.last_start = seen.sweeps;
      if (line == line_of_long && s.stored + place.rows < kLong) {
        REQUIRE(place.rows >= 1);
        seen.long_prefill = seen.sweeps + 1;
      }
      if (s.stored >= s.prompt) continue;
      prefill_rows += place.rows;
      for (int32_t i = 0; i < place.rows; ++i) work += s.stored + i + 1;
    }
    CHECK(frame.rows.size() <= static_cast<size_t>(kRows));
    // A single row may be beyond it, so that a prompt ends at any rate.
    if (prefill_rows > 1) CHECK(work <= int64_t{kRows} * 8192);
    for (const auto& [line, count] : generated) {
      if (!placed.contains(line))
        FAIL("line ", line, " decodes and sits sweep ", seen.sweeps, " out");
    }
    rig.Finish();
    for (const FrameSequence& place : frame.sequences) {
      const Sequence& s = *place.sequence;
      const uint64_t line = s.line->request.line;
      if (s.done) {
        generated.erase(line);
        if (line != line_of_long) seen.last_end = seen.sweeps;
      } else if (s.Generated() > 0) {
        generated[line] = s.Generated();
      }
    }
    rig.CloseAll();
  }
  return seen;
}

void CheckAll(const Rig& rig, uint64_t line_of_long) {
  for (uint64_t line = 1; line <= kCount + 1; ++line) {
    rig.CheckTokens(line, 0, line == line_of_long ? kLong : kShort, kAnswer);
  }
}

}  // namespace

TEST_CASE("a prompt of 100,000 tokens in front of 200 short ones holds up none of them") {
  Rig rig(LongOptions(kCount + 1), kContext / kPageTokens + kCount * 20);
  rig.source.Add(kLong, kAnswer);
  for (int i = 0; i < kCount; ++i) rig.source.Add(kShort, kAnswer);
  const Seen seen = RunAll(rig, 1);
  CHECK(seen.last_start < 80);  // 4,000 rows in half of what those that decode leave
  CHECK(seen.last_end < 130);
  // As many sweeps as its attention fills, 5 * 10^9 positions, and at most as many again.
  CHECK(seen.long_prefill > 2000);
  CHECK(seen.long_prefill < 5000);
  CheckAll(rig, 1);
}

TEST_CASE("a prompt of 100,000 tokens that comes while 200 short ones decode keeps none waiting") {
  Rig rig(LongOptions(64), kContext / kPageTokens + 64 * 20);
  for (int i = 0; i < kCount / 2; ++i) rig.source.Add(kShort, kAnswer);
  rig.source.Add(kLong, kAnswer);
  for (int i = 0; i < kCount / 2; ++i) rig.source.Add(kShort, kAnswer);
  const Seen seen = RunAll(rig, kCount / 2 + 1);
  // Four rounds of 63 beside it, 40 tokens each, with some sweeps for their prompts.
  CHECK(seen.last_end < 4 * 50);
  CheckAll(rig, kCount / 2 + 1);
}

TEST_CASE("beside a prompt of 100,000 tokens that fills the store short ones start and decode") {
  // What the long one leaves holds twelve short ones.
  Rig rig(LongOptions(64), (kLong + kAnswer) / kPageTokens + 12 * 16);
  rig.source.Add(kLong, kAnswer);
  for (int i = 0; i < kCount; ++i) rig.source.Add(kShort, kAnswer);
  const Seen seen = RunAll(rig, 1);
  CHECK(seen.last_end < 1500);
  CHECK(seen.last_end < seen.long_prefill);
  CheckAll(rig, 1);
}

}  // namespace colibri
