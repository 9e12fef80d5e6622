// What is foreseen of a run from given speeds, what the plan makes of them, and how speeds are
// remembered.
#include "runtime/prediction.h"

#include <doctest/doctest.h>
#include <stdlib.h>

#include <cmath>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "io/error.h"
#include "runtime/frame.h"
#include "runtime/model_writer.h"
#include "runtime/plan.h"
#include "runtime/speeds_file.h"
#include "runtime/stages.h"
#include "tests/real_size_model.h"
#include "tests/run_program.h"
#include "tests/shard_files.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

// Layers take 1 s and 10 ms a row, a drawn token 1 ms.
Speeds Machine(double drive) {
  Speeds s;
  s.drive = drive;
  s.sweeps = {{1, 1.01, 0.001}, {100, 2, 0.1}};
  return s;
}

// A hundred experts of 1 GB, four a token.
SweepModel HundredExperts() {
  SweepModel m;
  m.expert_bytes = 100e9;
  m.chosen = 0.04;
  return m;
}

RunModel Answers(uint64_t count, double together) {
  RunModel run;
  run.answers = count;
  run.prompt = 1;
  run.answer = run.longest = 50;
  run.together = together;
  run.rows = run.prefill_rows = 256;
  return run;
}

// Two cores of 2024 with real-size weights, `times` as fast.
Speeds RealSpeeds(double drive, double times) {
  Speeds s;
  s.drive = drive;
  for (const double rows : {1.0, 4.0, 16.0, 64.0, 256.0}) {
    s.sweeps.push_back({rows, (0.5 + 0.3 * rows) / times, (0.05 + 0.002 * rows) / times});
  }
  s.position_s = 5e-5 / times;
  return s;
}

Plan RealPlan(const std::optional<Speeds>& speeds, uint64_t gigabytes = 32) {
  PlanRequest r;
  r.ram = gigabytes * 1'000'000'000;
  r.threads = 8;
  r.speeds = speeds;
  return MakePlan(RealSize(), r);
}

}  // namespace

TEST_CASE("seconds of computing lie between the measured widths and go on beyond them") {
  const Speeds s = Machine(1);
  CHECK(s.LayersSeconds(1) == doctest::Approx(1.01));
  CHECK(s.LayersSeconds(50.5) == doctest::Approx(1.505));
  CHECK(s.LayersSeconds(300) == doctest::Approx(4));
  CHECK(s.LayersSeconds(0.5) == doctest::Approx(1.01));
  CHECK(s.DrawSeconds(0) == 0);
  Speeds one;
  one.sweeps = {{4, 2, 0}};
  CHECK(one.LayersSeconds(2) == doctest::Approx(2));
  CHECK(one.LayersSeconds(8) == doctest::Approx(4));
}

TEST_CASE("a sweep takes the longer of reading and computing and a small part of the other") {
  const Speeds s = Machine(1e9);
  const SweepModel m = HundredExperts();
  const SweepRows row{1, 1, 0};
  const double computing = ComputeSeconds(s, m, row);
  CHECK(SweepSeconds(s, m, row, 0) == doctest::Approx(computing));
  const double reading = SweepSeconds(s, m, row, 50e9);
  CHECK(reading >= 50);
  CHECK(reading < 50 + computing / 10);
}

TEST_CASE("rows attend to no more positions than the index selects") {
  Speeds s = Machine(1e9);
  s.position_s = 1e-3;
  SweepModel m = HundredExperts();
  const double all = ComputeSeconds(s, m, {10, 10, 5000});
  CHECK(all == doctest::Approx(ComputeSeconds(s, m, {10, 10, 0}) + 50));
  m.most_positions = 2000;
  CHECK(ComputeSeconds(s, m, {10, 10, 5000}) == doctest::Approx(all - 30));
}

TEST_CASE(
    "a union is a row's choice at first, all experts at last, and smaller where some are hot") {
  SweepModel m = HundredExperts();
  CHECK(m.Union(0) == doctest::Approx(0));
  CHECK(m.Union(1) == doctest::Approx(0.04));
  CHECK(m.Union(24) < 1 - std::pow(0.96, 24));
  CHECK(m.Union(24) > 0.8 * (1 - std::pow(0.96, 24)));
  CHECK(m.Union(1000) > 0.999);
  m.skew = 0;  // experts that are as likely
  CHECK(m.Union(24) == doctest::Approx(1 - std::pow(0.96, 24)));
}

TEST_CASE("one row finds more of the held experts than a wide union does") {
  const SweepModel m = HundredExperts();
  CHECK(m.Hits(1, 0.25) > 0.4);
  CHECK(m.Hits(1, 0.25) < 0.7);
  CHECK(m.Hits(1000, 0.25) == doctest::Approx(0.25).epsilon(0.1));
  CHECK(m.Hits(1, 0) == 0);
  CHECK(m.Hits(7, 1) == 1);
}

TEST_CASE("what is read ahead for the next layer takes slots from what is held") {
  SweepModel m = HundredExperts();
  m.layers = 5;  // so a layer's union is a fifth of all
  CHECK(m.Hits(1000, 0.6, 0) == doctest::Approx(0.6).epsilon(0.1));
  CHECK(m.Hits(1000, 0.6, 1) == doctest::Approx(0.5).epsilon(0.1));
  CHECK(m.Hits(1000, 0.19, 1) == 0);
  CHECK(m.Hits(1000, 1, 1) == 1);
  // Nothing gets ahead where the drive limits.
  Speeds s = Machine(1e9);
  m.resident = 0.19;
  RunModel run = Answers(64, 64);
  const double limited = Predict(s, m, run).bytes_a_token;
  s.drive = 1e12;
  CHECK(Predict(s, m, run).bytes_a_token > 1.1 * limited);
}

TEST_CASE("where the drive limits, tokens a second are rows over the time of their union") {
  Speeds s = Machine(1e9);
  s.sweeps = {{1, 1e-6, 0}, {100, 1e-6, 0}};
  const SweepModel m = HundredExperts();
  const Prediction p = Predict(s, m, Answers(64, 64));
  const double sweep = 100 * m.Union(64);
  CHECK(p.tokens_a_second == doctest::Approx(64 / sweep).epsilon(0.01));
  CHECK(p.bytes_a_token == doctest::Approx(1e9 * sweep / 64).epsilon(0.01));
  CHECK(p.sweeps == 50);
  CHECK(p.seconds == doctest::Approx(50 * sweep).epsilon(0.01));
}

TEST_CASE("what is resident is read once, and then computing limits") {
  SweepModel m = HundredExperts();
  m.resident = 1;
  RunModel run = Answers(100, 100);
  const Prediction p = Predict(Machine(1e9), m, run);
  // 100 GB at first, then 2.1 s a sweep.
  CHECK(p.seconds == doctest::Approx(100 + 50 * 2.1).epsilon(0.05));
  run.answers.reset();
  CHECK(Predict(Machine(1e9), m, run).tokens_a_second == doctest::Approx(100 / 2.1).epsilon(0.02));
}

TEST_CASE("prompts take sweeps before their answers, and the longest answer a tail") {
  SweepModel m = HundredExperts();
  m.resident = 1;
  RunModel run = Answers(10, 10);
  const double plain = Predict(Machine(1e12), m, run).sweeps;
  CHECK(plain == 50);
  run.prompt = 2560;  // each ten sweeps
  CHECK(Predict(Machine(1e12), m, run).sweeps > plain + 90);
  run.prompt = 1;
  run.longest = 90;
  const Prediction tail = Predict(Machine(1e12), m, run);
  CHECK(tail.sweeps == 90);
}

TEST_CASE("more answers than fit at once take turns") {
  SweepModel m = HundredExperts();
  m.resident = 1;
  CHECK(Predict(Machine(1e12), m, Answers(100, 10)).sweeps == doctest::Approx(500).epsilon(0.05));
}

TEST_CASE("few slots of small experts leave the drive without work") {
  SweepModel m = HundredExperts();
  m.expert_bytes = 100e5;
  m.read_bytes = 1e5;
  const SweepRows row{1, 1, 0};
  Speeds s = Machine(1e9);
  s.sweeps = {{1, 1e-6, 0}};
  m.slots = 1000;
  const double many = SweepSeconds(s, m, row, 100e5);
  m.slots = 4;
  CHECK(SweepSeconds(s, m, row, 100e5) > 2 * many);
}

TEST_CASE("what is streamed in every sweep and KV on the drive count as reading") {
  SweepModel m = HundredExperts();
  m.resident = 1;
  const Prediction plain = Predict(Machine(1e9), m, Answers(10, 10));
  m.streamed_bytes = 5e9;
  const Prediction dense = Predict(Machine(1e9), m, Answers(10, 10));
  CHECK(dense.bytes_a_token == doctest::Approx(plain.bytes_a_token + 0.5e9));
  m.streamed_bytes = 0;
  m.position_bytes = 1e6;
  const Prediction kv = Predict(Machine(1e9), m, Answers(10, 10));
  // On average 25 positions held and one stored.
  CHECK(kv.bytes_a_token == doctest::Approx(plain.bytes_a_token + 26e6).epsilon(0.05));
}

TEST_CASE("a plan with speeds says what it predicts, one without says nothing") {
  const Plan without = RealPlan({});
  CHECK_FALSE(without.prediction);
  CHECK_FALSE(Contains(without.Line(), "predicted"));
  CHECK_FALSE(Contains(without.Table(), "predicted"));
  const Plan with = RealPlan(RealSpeeds(7e9, 4));
  REQUIRE(with.prediction);
  CHECK(with.prediction->tokens_a_second > 1);
  CHECK(with.prediction->tokens_a_second < 20);
  CHECK(Contains(with.Line(), "; predicted: "));
  CHECK(Contains(with.Line(), " tokens/s, "));
  CHECK(Contains(with.Table(), "predicted"));
  CHECK_FALSE(Contains(with.Line(), "\n"));
}

TEST_CASE("a faster drive or processor predicts more tokens a second") {
  const double slow = RealPlan(RealSpeeds(3e9, 2)).prediction->tokens_a_second;
  CHECK(RealPlan(RealSpeeds(6e9, 2)).prediction->tokens_a_second > 1.2 * slow);
  CHECK(RealPlan(RealSpeeds(6e9, 8)).prediction->tokens_a_second > 1.8 * slow);
}

TEST_CASE("a slow processor wants no wider sweeps than it can compute while the drive reads") {
  const Plan fast = RealPlan(RealSpeeds(3e9, 100), 128);
  const Plan slow = RealPlan(RealSpeeds(30e9, 0.2), 128);
  CHECK(fast.rows >= 512);
  CHECK(slow.rows <= 256);
  CHECK(fast.kv > slow.kv);
}

TEST_CASE("every plan with speeds stays below its budget and the same speeds give the same plan") {
  for (const uint64_t gigabytes : {16u, 25u, 64u, 600u}) {
    for (const double drive : {0.5e9, 3e9, 30e9}) {
      const Plan p = RealPlan(RealSpeeds(drive, 3), gigabytes);
      CHECK(p.Total() <= p.budget - p.margin);
      const Plan again = RealPlan(RealSpeeds(drive, 3), gigabytes);
      CHECK(again.rows == p.rows);
      // What the process itself holds is a part of the plan, and grows under ASan.
      if (!kAddressSanitizer) CHECK(again.kv_pages == p.kv_pages);
    }
  }
}

TEST_CASE("prompts get as many positions a row as attention takes the time of the rest") {
  CHECK(RealPlan({}).positions_a_row == 8192);
  const Plan p = RealPlan(RealSpeeds(3e9, 2));
  const double row = RealSpeeds(3e9, 2).LayersSeconds(p.rows) / p.rows;
  CHECK(p.positions_a_row == doctest::Approx(row / 2.5e-5).epsilon(0.01));
  CHECK(p.PrefillWork() == int64_t{p.prefill_rows} * p.positions_a_row);
}

TEST_CASE("speeds are remembered by what they depend on, and again measured ones replace them") {
  const TempDir dir;
  const std::string path = dir.Path("cache/colibri/speeds.json");
  CHECK_FALSE(ReadSpeeds(path, "drive", "cpu").drive);
  RememberSpeeds(path, "drive", "cpu", {2e9, Machine(0)});
  const RememberedSpeeds known = ReadSpeeds(path, "drive", "cpu");
  REQUIRE(known.drive);
  CHECK(*known.drive == 2e9);
  REQUIRE(known.computing);
  CHECK(known.computing->sweeps.size() == 2);
  CHECK(known.computing->LayersSeconds(50.5) == doctest::Approx(1.505));
  CHECK_FALSE(ReadSpeeds(path, "other drive", "cpu").drive);
  CHECK_FALSE(ReadSpeeds(path, "drive", "other cpu").computing);
  RememberSpeeds(path, "drive", "cpu", {3e9, {}});
  CHECK(*ReadSpeeds(path, "drive", "cpu").drive == 3e9);
  CHECK(ReadSpeeds(path, "drive", "cpu").computing);
}

TEST_CASE("a file of speeds that is no such file counts as empty and is replaced") {
  const TempDir dir;
  const std::string path = dir.Path("speeds.json");
  for (const char* text :
       {"", "{", "[]", "{\"version\":2,\"drives\":[],\"computing\":[]}", "{\"version\":\"1\"}",
        "{\"version\":1,\"drives\":3,\"computing\":[]}",
        "{\"version\":1,\"drives\":[1,{\"of\":\"d\"}],\"computing\":[{\"of\":\"c\",\"sweeps\":1}]}",
        "{\"version\":1,\"drives\":[{\"of\":\"d\",\"bytes_per_second\":-1}],\"computing\":[]}",
        "{\"version\":1,\"drives\":[{\"of\":\"d\",\"bytes_per_second\":\"x\"}],\"computing\":[]"
        "}"}) {
    CAPTURE(text);
    dir.Write("speeds.json", text);
    const RememberedSpeeds known = ReadSpeeds(path, "d", "c");
    CHECK_FALSE(known.drive);
    CHECK_FALSE(known.computing);
    RememberSpeeds(path, "d", "c", {1e9, Machine(0)});
    CHECK(ReadSpeeds(path, "d", "c").drive);
  }
}

TEST_CASE("of many remembered speeds the oldest are forgotten") {
  const TempDir dir;
  const std::string path = dir.Path("speeds.json");
  for (int i = 0; i < 70; ++i) RememberSpeeds(path, "drive " + std::to_string(i), "", {1e9, {}});
  CHECK_FALSE(ReadSpeeds(path, "drive 0", "").drive);
  CHECK(ReadSpeeds(path, "drive 69", "").drive);
}

TEST_CASE("where nothing can be written remembering is an error that names the file") {
  const TempDir dir;
  dir.Write("file", "");
  const std::string path = dir.Path("file/colibri/speeds.json");
  CHECK(Contains(MessageOf<IoError>([&] { RememberSpeeds(path, "d", "c", {1e9, {}}); }), "file"));
}

TEST_CASE("a sample of a model keeps the layers and tokens it is cut to") {
  Model model({COLIBRI_SOURCE_DIR "/apps/demo/model"});
  const Model whole({COLIBRI_SOURCE_DIR "/apps/demo/model"});
  const uint64_t dense = model.DenseBytes();
  model.CutToSample(2, 3, 100);
  CHECK(model.LayerCount() == 3);
  CHECK(model.Config().layers == 3);
  CHECK(model.ExpertCount() == 3u * 32);
  CHECK(model.ExpertLayer(model.ExpertItem(1, 5)) == 1);
  CHECK(model.Expert(model.ExpertItem(1, 5)).extents.front().offset ==
        whole.Expert(whole.ExpertItem(3, 5)).extents.front().offset);
  CHECK_FALSE(model.HasMtp());
  CHECK(model.DenseBytes() < dense);
  model.MakeUpDense();
  CHECK(model.Layer(1).q_a.data != nullptr);
  CHECK(model.Embedding().rows == 100);
}

}  // namespace colibri
