// The presets of `colibri-bench make-model`, and what their routing reaches.
#include <doctest/doctest.h>

#include "bench/make_model.h"
#include "bench/routing_check.h"
#include "io/error.h"
#include "runtime/weights.h"
#include "tests/run_program.h"
#include "tests/shard_files.h"

namespace colibri {
namespace {

const std::string kDemo = COLIBRI_SOURCE_DIR "/apps/demo/model";

TEST_CASE("the routing and the drafts of the preset tiny are those of real routers") {
  const TempDir dir;
  WriteSyntheticModel(PresetModel("tiny"), dir.Path("model"));
  Model model({dir.Path("model")});
  model.LoadDense();
  RoutingCheckOptions options;
  options.steps = 24;
  const RoutingFigures figures = MeasureRouting(model, options);
  INFO(figures.recall, " ", figures.overlap, " ", figures.hot_quarter, " ", figures.accepted);
  CHECK(kRecallRange.Holds(figures.recall));
  CHECK(kOverlapRange.Holds(figures.overlap));
  CHECK(kHotQuarterRange.Holds(figures.hot_quarter));
  CHECK(figures.mtp);
  CHECK(kAcceptedRange.Holds(figures.accepted));
}

TEST_CASE("tokens drawn without regard to the head share few experts with those before them") {
  const TempDir dir;
  SyntheticModel m = PresetModel("tiny");
  m.layers = 2;
  m.mtp = false;
  WriteSyntheticModel(m, dir.Path("model"));
  Model model({dir.Path("model")});
  model.LoadDense();
  RoutingCheckOptions options;
  options.steps = 8;
  options.temperature = 1000;  // any token follows any
  const RoutingFigures figures = MeasureRouting(model, options);
  CHECK(figures.overlap < 0.25);
  CHECK_FALSE(figures.mtp);
  CHECK(figures.accepted == 0);
}

TEST_CASE("the presets mid and thin have the published model's attention, mid its experts too") {
  for (const char* name : {"mid", "thin"}) {
    const SyntheticModel m = PresetModel(name);
    CHECK(m.hidden == 6144);
    CHECK(m.heads == 64);
    CHECK(m.q_lora == 2048);
    CHECK(m.kv_lora == 512);
    CHECK(m.nope == 192);
    CHECK(m.rope == 64);
    CHECK(m.v_head == 256);
    CHECK(m.index_heads == 32);
    CHECK(m.index_dim == 128);
    CHECK(m.index_top_k == 2048);
    CHECK(m.experts == 128);
    CHECK(m.top_k == 8);
    CHECK(m.mtp);
  }
  CHECK(PresetModel("mid").layers == 7);
  CHECK(PresetModel("mid").moe_intermediate == 2048);
  CHECK(PresetModel("thin").moe_intermediate == 256);
  CHECK_THROWS_AS(PresetModel("huge"), UsageError);
}

TEST_CASE("flags before and after --preset override it, and what was reached is printed") {
  const TempDir dir;
  const ProgramOutcome made =
      RunProgram("colibri-bench", {"make-model", dir.Path("made"), "--layers", "2", "--preset",
                                   "tiny", "--experts", "16", "--tokenizer-from", kDemo});
  INFO(made.err);
  REQUIRE(made.exit_code == 0);
  CHECK(Contains(made.out, "next layer's experts foreseen"));
  CHECK(Contains(made.out, "70 to 82 %"));
  CHECK(Contains(made.out, "drafts accepted at depth 1"));
  // Half of 16 experts are chosen for any token: no range of 128 can hold.
  CHECK(Contains(made.out, "MISSED"));
  const Model model({dir.Path("made")});
  CHECK(model.Config().layers == 2);
  CHECK(model.Config().experts == 16);
  CHECK(model.Config().hidden == 512);
  const ProgramOutcome silent =
      RunProgram("colibri-bench", {"make-model", dir.Path("other"), "--preset", "tiny", "--layers",
                                   "2", "--no-check", "--tokenizer-from", kDemo});
  CHECK(silent.exit_code == 0);
  CHECK_FALSE(Contains(silent.out, "foreseen"));
}

}  // namespace
}  // namespace colibri
