// Drafts change how many sweeps a line takes and none of its bytes: in the sequential engine and in
// the flow graph, whoever makes them and however many.
#include <doctest/doctest.h>

#include <numeric>
#include <string>
#include <vector>

#include "tests/engine_lines.h"
#include "tests/engine_rig.h"
#include "tests/pairwise.h"

namespace colibri {
namespace {

uint64_t Drafted(const Outcome& o) {
  const auto& counts = o.stats.scheduler.drafted;
  return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
}

uint64_t Accepted(const Outcome& o) {
  const auto& counts = o.stats.scheduler.accepted;
  return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
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
