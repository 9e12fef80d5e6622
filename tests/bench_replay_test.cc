// Route traces and counts of experts: written, read, refused, replayed.
#include "bench/replay.h"

#include <doctest/doctest.h>

#include <fstream>
#include <functional>
#include <limits>
#include <sstream>

#include "io/error.h"
#include "runtime/usage_file.h"
#include "tests/run_program.h"
#include "tests/shard_files.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

const std::string kModel = COLIBRI_SOURCE_DIR "/apps/demo/model";
const std::string kHead = "colibri-routes 1\nmodel 3 4 2\nlayer 1 100\nlayer 2 100\n";

std::string ErrorOf(const std::function<void()>& body) {
  try {
    body();
  } catch (const IoError& e) {
    return e.what();
  }
  return "";
}

std::string Bytes(const std::string& path) {
  std::ostringstream all;
  all << std::ifstream(path, std::ios::binary).rdbuf();
  return all.str();
}

TEST_CASE("a trace is read as it was written, guesses with the visit they were made for") {
  const TempDir dir;
  const RouteTrace trace = ReadRouteTrace(
      dir.Write("t", kHead + "guess 0 1 state 3 0\nrouted 0 1 1 0:1 3:1\nguess 0 2 input 1\n"
                             "routed 0 2 2 0:2 1:1 2:1\n"));
  CHECK(trace.expert_bytes == std::vector<uint64_t>{0, 100, 100});
  REQUIRE(trace.visits.size() == 2);
  CHECK(trace.visits[0].guesses[static_cast<size_t>(Guess::kState)] == std::vector<uint16_t>{3, 0});
  CHECK_FALSE(trace.visits[1].guessed[static_cast<size_t>(Guess::kState)]);
  CHECK(trace.visits[1].chosen == std::vector<uint32_t>{2, 1, 1});
  const GuessFigures state = ReplayGuess(trace, Guess::kState, true);
  CHECK(state.Recall() == 1);
  CHECK(state.WrongPerRight() == 0);
  const GuessFigures input = ReplayGuess(trace, Guess::kInput, false);
  CHECK(input.Recall() == doctest::Approx(1.0 / 3));
}

TEST_CASE("a malformed trace is refused with its line, what was found and what was expected") {
  const TempDir dir;
  const auto refusal = [&](const std::string& text) {
    return ErrorOf([&] { ReadRouteTrace(dir.Write("t", text)); });
  };
  CHECK(Contains(refusal("colibri-routes 2\n"), "line 1: found \"colibri-routes 2\""));
  CHECK(Contains(refusal(kHead + "routed 0 0 1 0:1\n"), "line 5: found \"layer 0\""));
  CHECK(Contains(refusal(kHead + "routed 0 1 1 4:1\n"), "found \"4\", expected an expert"));
  CHECK(Contains(refusal(kHead + "routed 0 1 1 2:1 2:1\n"), "each expert once"));
  CHECK(Contains(refusal(kHead + "routed 0 1 1 2:1"), "a line end"));
  CHECK(Contains(refusal(kHead + "guess 0 1 luck 2\n"), "found \"luck\""));
  CHECK(Contains(refusal(kHead), "expected at least one `routed`"));
  CHECK(Contains(ErrorOf([&] { ReadRouteTrace(dir.Path("none")); }), "none"));
}

TEST_CASE("in wide frames of large experts a guess of few votes is not sure, else all are read") {
  ModelConfig config;
  config.experts = 64;
  config.top_k = 8;
  const std::vector<uint32_t> votes = {0, 8, 9, 0, 1, 40};
  std::vector<uint16_t> order;
  OrderByVotes(votes, &order);
  CHECK(order == std::vector<uint16_t>{5, 2, 1, 4});
  constexpr uint64_t kLarge = 1 << 20;
  CHECK(SureGuesses(config, kLarge, 7, votes, order) == 4);
  CHECK(SureGuesses(config, kLarge, 8, votes, order) == 2);
  CHECK(SureGuesses(config, kLarge - 1, 8, votes, order) == 4);
  CHECK(SureGuesses(config, kLarge, 8, std::vector<uint32_t>(6), {}) == 0);
}

TEST_CASE("belady is the bound of every policy, and enough slots read every expert once") {
  const TempDir dir;
  std::string text = kHead;
  for (int sweep = 0; sweep < 12; ++sweep) {
    text += sweep % 3 == 0 ? "routed 0 1 2 0:1 1:2 2:1\n" : "routed 0 1 2 1:2 3:2\n";
    text += "routed 0 2 2 0:2 2:1 3:1\n";
  }
  const RouteTrace trace = ReadRouteTrace(dir.Write("t", text));
  for (const double slots : {1.0, 3.0, 5.0}) {
    const uint64_t bound = ReplayPolicy(trace, std::nullopt, slots, false, {}).hits;
    for (const CachePolicyKind kind : kCachePolicies) {
      const ReplayFigures f = ReplayPolicy(trace, kind, slots, false, {});
      CHECK(f.hits <= bound);
      CHECK(f.read_bytes == (f.asked - f.hits) * 100);
    }
  }
  for (const CachePolicyKind kind : kCachePolicies) {
    const ReplayFigures f = ReplayPolicy(trace, kind, 100, true, {});
    CHECK(f.asked - f.hits == 7);
  }
}

TEST_CASE("counts of experts are written and read in the C engine's format") {
  const TempDir dir;
  ExpertUsage usage(78, 256);
  WriteUsage(dir.Path("u"), usage);
  CHECK(Bytes(dir.Path("u")) == "");
  usage.At(3, 7) = 12;
  usage.At(78, 255) = uint64_t{1} << 40;
  WriteUsage(dir.Path("u"), usage);
  CHECK(Bytes(dir.Path("u")) == "-1 78 256\n-2 1 3815245270\n3 7 12\n78 255 4294967295\n");
  const auto read = ReadUsage(dir.Path("u"), 78, 256);
  REQUIRE(read);
  CHECK(read->counts[3 * 256 + 7] == 12);
  CHECK(read->counts[78 * 256 + 255] == std::numeric_limits<uint32_t>::max());
  CHECK_FALSE(ReadUsage(dir.Path("none"), 78, 256));
  const auto old = ReadUsage(dir.Write("old", "0 1 5\n"), 2, 4);  // before there was a header
  REQUIRE(old);
  CHECK(old->counts[1] == 5);
}

TEST_CASE("malformed counts are refused with file, line, what was found and what was expected") {
  const TempDir dir;
  const auto refusal = [&](const std::string& text) {
    return ErrorOf([&] { ReadUsage(dir.Write("u", text), 2, 4); });
  };
  CHECK(Contains(refusal("-1 78 256\n"), "line 1: found \"-1 78 256\", expected -1 2 4"));
  CHECK(Contains(refusal("-1 2 4\n-2 2 3815245270\n"), "line 2"));
  CHECK(Contains(refusal("-1 2 4\n-2 1 1\n"), "line 2"));
  CHECK(Contains(refusal("3 0 1\n"), "a layer, 0 to 2"));
  CHECK(Contains(refusal("0 4 1\n"), "an expert, 0 to 3"));
  CHECK(Contains(refusal("0 1 4294967296\n"), "a count"));
  CHECK(Contains(refusal("IKU1\n"), "three numbers"));
  CHECK(Contains(refusal("0 1\n"), "three numbers"));
}

TEST_CASE("heat is the share of turns, of one row and of many") {
  ExpertUsage usage(1, 4);
  usage.At(0, 0) = 30;
  usage.At(0, 1) = 10;
  const std::vector<float> one = HeatOf(usage, 1, 1);
  CHECK(one[0] == doctest::Approx(0.75));
  CHECK(one[2] == 0);
  CHECK(HeatOf(usage, 1, 2)[1] == doctest::Approx(1 - 0.75 * 0.75));
  CHECK(HeatOf(usage, 2, 1)[0] == 1);
}

TEST_CASE("a run records a trace that replay reads, and keeps counts; its answer stays the same") {
  const TempDir dir;
  const auto run = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = {"-m",           kModel, "-p",      "Once upon a time",
                                    "--max-tokens", "8",    "--slots", "25%"};
    all.insert(all.end(), more.begin(), more.end());
    return RunProgram("colibri-run", all);
  };
  const ProgramOutcome plain = run({"--cache-policy", "lru"});
  REQUIRE(plain.exit_code == 0);
  const std::string usage = dir.Path("usage"), routes = dir.Path("routes");
  for (int i = 0; i < 2; ++i) {  // the second one starts from the first one's counts
    const ProgramOutcome with = run({"--usage", usage, "--route-trace", routes});
    CHECK(with.exit_code == 0);
    CHECK(with.out == plain.out);
  }
  const ProgramOutcome table = RunProgram(
      "colibri-bench", {"replay", routes, "--slots", "4,50%", "--usage", usage, "--csv"});
  CHECK(table.exit_code == 0);
  CHECK(Contains(table.out, "50%,sweep,"));
  CHECK(Contains(table.out, "4,belady,"));
  CHECK(RunProgram("colibri-bench", {"replay", routes, "--guesses", "--json"}).exit_code == 0);
  CHECK(RunProgram("colibri-bench", {"replay", routes, "--policy", "best"}).exit_code == 2);

  dir.Write("usage", "nonsense\n");
  const ProgramOutcome bad = run({"--usage", usage});
  CHECK(bad.exit_code == 0);
  CHECK(bad.out == plain.out);
  CHECK(Contains(bad.err, "usage: line 1: found \"nonsense\""));
  CHECK(Bytes(usage) == "nonsense\n");
  const ProgramOutcome nowhere = run({"--usage", dir.Path("no/folder/usage")});
  CHECK(nowhere.exit_code == 0);
  CHECK(Contains(nowhere.err, "no/folder/usage"));
}

}  // namespace
}  // namespace colibri
