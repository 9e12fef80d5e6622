// What fixtures cannot hold: rows beside other rows, failing reads, activations that are not finite
// or all zero, draft rows.
// Length: the frames of one small model serve every case.
#include "runtime/stages.h"

#include <doctest/doctest.h>
#include <errno.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "runtime/draft.h"
#include "runtime/reference.h"
#include "tests/stage_bench.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::string ModelFolder(const std::string& name) {
  return COLIBRI_SOURCE_DIR "/tests/fixtures/" + name + "/model";
}

Model Loaded(const std::string& directory) {
  Model model({directory});
  model.LoadDense();
  return model;
}

const Model& Tiny() {
  static const Model model = Loaded(ModelFolder("tiny"));
  return model;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

bool AllFiniteIn(const Logits& logits) {
  return std::all_of(logits.of.begin(), logits.of.end(), [](const auto& row) {
    return std::all_of(row.second.begin(), row.second.end(),
                       [](float v) { return std::isfinite(v); });
  });
}

TEST_CASE("a row's bits do not depend on the rows and sequences beside it") {
  for (const char* folder : {"tiny", "quant-int4-row"}) {
    const Model model = Loaded(ModelFolder(folder));
    // Three sequences of different lengths, each alone first.
    std::map<int32_t, std::vector<std::vector<float>>> alone;
    for (const auto& [number, count] : {std::pair{1, 21}, {2, 1}, {3, 12}}) {
      Bench bench(model);
      if (number == 2) {
        bench.Add(2, 0, 30);
        bench.Run();
        bench.Clear();
      }
      bench.Add(number, number == 2 ? 30 : 0, count);
      for (auto& [row, values] : bench.Run().of) alone[number].push_back(values);
    }
    Bench bench(model);
    bench.Add(2, 0, 30);
    bench.Run();
    bench.Clear();
    bench.Add(3, 0, 12);
    bench.Add(2, 30, 1);
    bench.Add(1, 0, 21);
    Logits together = bench.Run();
    REQUIRE(together.of.size() == 34);
    for (size_t r = 0; r < 12; ++r) CHECK(SameBits(together.of[r], alone[3][r]));
    CHECK(SameBits(together.of[12], alone[2][0]));
    for (size_t r = 0; r < 21; ++r) CHECK(SameBits(together.of[13 + r], alone[1][r]));
  }
}

TEST_CASE("an activation that is not finite marks its sequence's rows and no others") {
  Bench clean(Tiny());
  clean.Add(1, 0, 12);
  clean.Add(2, 0, 12);
  Logits want = clean.Run();
  for (const float bad : {kNaN, kInfinity, -kInfinity}) {
    for (const StagePoint at : {StagePoint::kLayerStart, StagePoint::kAttention}) {
      Bench bench(Tiny(), [&](StagePoint point, Frame& frame, int32_t layer) {
        if (point != at || layer != 3) return;
        (at == StagePoint::kLayerStart ? frame.x : frame.attention_out)[5 * frame.HiddenSize()] =
            bad;
      });
      bench.Add(1, 0, 12);
      bench.Add(2, 0, 12);
      Logits got = bench.Run();
      for (size_t r = 0; r < 12; ++r) {
        CHECK(bench.frame.rows[r].state == RowState::kNotFinite);
        CHECK(bench.frame.rows[r].failed_layer == 3);
        CHECK_FALSE(got.of.contains(r));
      }
      CHECK(bench.Live(1) == 12);
      for (size_t r = 12; r < 24; ++r) CHECK(SameBits(got.of[r], want.of[r]));
    }
  }
}

TEST_CASE("an overflow in the residual stream is caught where it happens") {
  Bench bench(Tiny(), [](StagePoint point, Frame& frame, int32_t layer) {
    if (point != StagePoint::kAttention || layer != 2) return;
    frame.x[0] = std::numeric_limits<float>::max();
    frame.attention_out[0] = std::numeric_limits<float>::max();
  });
  bench.Add(1, 0, 2);
  bench.Add(2, 0, 2);
  bench.Run();
  CHECK(bench.frame.rows[0].state == RowState::kNotFinite);
  CHECK(bench.frame.rows[0].failed_layer == 2);
  CHECK(bench.Live(0) == 0);
  CHECK(bench.Live(1) == 2);
}

TEST_CASE("rows that are not finite are routed nowhere") {
  size_t jobs_with_bad_row = 0;
  Bench bench(Tiny(), [&](StagePoint point, Frame& frame, int32_t layer) {
    if (point == StagePoint::kLayerStart && layer == 2) frame.x[0] = kNaN;
    if (point == StagePoint::kLayerStart && layer > 2) {
      for (int32_t row : frame.job_rows) jobs_with_bad_row += row < 3;
      CHECK(frame.job_rows.size() == 4 * 2);
    }
  });
  bench.Add(1, 0, 3);
  bench.Add(2, 0, 4);
  bench.Run();
  CHECK(jobs_with_bad_row == 0);
}

TEST_CASE("a failed read fails the sequences with a row routed to it, the others keep their bits") {
  const int32_t layers[] = {2, 4, 6};
  Bench clean(Tiny());
  for (int32_t s = 0; s < 6; ++s) clean.Add(s, 0, 1);
  Logits want = clean.Run();
  for (const int32_t at : layers) {
    // Who is routed to the expert is known when it is chosen.
    std::vector<int32_t> routed;
    int32_t victim = -1;
    Bench bench(Tiny(), [&](StagePoint point, Frame& frame, int32_t layer) {
      if (point != StagePoint::kChosen || layer != at) return;
      victim = frame.experts[0];
      for (size_t r = 0; r < frame.Rows(); ++r) {
        if (frame.experts[2 * r] == victim || frame.experts[2 * r + 1] == victim) {
          routed.push_back(static_cast<int32_t>(r));
        }
      }
    });
    for (int32_t s = 0; s < 6; ++s) bench.Add(s, 0, 1);
    Logits got =
        bench.Run([&](int32_t layer, int32_t expert) { return layer == at && expert == victim; });
    REQUIRE(!routed.empty());
    REQUIRE(routed.size() < 6);
    for (int32_t s = 0; s < 6; ++s) {
      const auto row = static_cast<size_t>(s);
      if (std::find(routed.begin(), routed.end(), s) == routed.end()) {
        CHECK(bench.frame.rows[row].state == RowState::kLive);
        CHECK(SameBits(got.of[row], want.of[row]));
        continue;
      }
      CHECK(bench.frame.rows[row].state == RowState::kReadFailed);
      CHECK(bench.frame.rows[row].failed_layer == at);
      CHECK(bench.frame.sequences[row].error.error == EIO);
      CHECK(bench.frame.sequences[row].error.offset ==
            Tiny().Expert(Tiny().ExpertItem(at, victim)).extents[0].offset);
      CHECK_FALSE(got.of.contains(row));
    }
  }
}

TEST_CASE("a failed read of any row of a prompt fails all of them") {
  int32_t victim = -1;
  Bench bench(Tiny(), [&](StagePoint point, Frame& frame, int32_t layer) {
    if (point == StagePoint::kChosen && layer == 3) victim = frame.experts[2 * (frame.Rows() - 1)];
  });
  bench.Add(1, 0, 9);
  bench.Run([&](int32_t layer, int32_t expert) { return layer == 3 && expert == victim; });
  CHECK(bench.Live(0) == 0);
}

TEST_CASE("a failed draft row rejects itself and the drafts after it, never the rows before it") {
  Bench clean(Tiny());
  clean.Add(1, 0, 10, 3);
  clean.Add(2, 0, 3);
  Logits want = clean.Run();
  Bench bench(Tiny(), [](StagePoint point, Frame& frame, int32_t layer) {
    if (point == StagePoint::kLayerStart && layer == 4) frame.x[8 * frame.HiddenSize()] = kNaN;
  });
  bench.Add(1, 0, 10, 3);
  bench.Add(2, 0, 3);
  Logits got = bench.Run();
  for (size_t r = 0; r < 13; ++r) {
    const bool failed = r == 8 || r == 9;
    CHECK((bench.frame.rows[r].state == RowState::kNotFinite) == failed);
    CHECK(got.of.contains(r) == !failed);
    if (!failed) CHECK(SameBits(got.of[r], want.of[r]));
  }
}

TEST_CASE("a failed read of a draft row alone leaves its sequence going") {
  int32_t victim = -1;
  Bench bench(Tiny(), [&](StagePoint point, Frame& frame, int32_t layer) {
    if (point != StagePoint::kChosen || layer != 2) return;
    // An expert that the last draft has and the base rows have not.
    for (size_t j = 0; j < 2; ++j) {
      const int32_t e = frame.experts[2 * (frame.Rows() - 1) + j];
      const auto base = frame.experts.begin() + 2 * 2;
      if (std::find(frame.experts.begin(), base, e) == base) victim = e;
    }
  });
  bench.Add(1, 0, 5, 3);
  bench.Run([&](int32_t layer, int32_t expert) { return layer == 2 && expert == victim; });
  REQUIRE(victim >= 0);
  CHECK(bench.frame.rows[0].state == RowState::kLive);
  CHECK(bench.frame.rows[1].state == RowState::kLive);
  CHECK(bench.frame.rows[4].state == RowState::kReadFailed);
}

TEST_CASE("all-zero activations give finite results") {
  for (const char* folder : {"tiny", "groups", "quant-mixed", "odd-int4-row"}) {
    const Model model = Loaded(ModelFolder(folder));
    for (const int32_t from : {0, 3, 6}) {
      Bench bench(model, [&](StagePoint point, Frame& frame, int32_t layer) {
        if (point != StagePoint::kLayerStart || layer < from) return;
        std::memset(frame.x, 0, frame.Rows() * frame.HiddenSize() * sizeof(float));
      });
      bench.Add(1, 0, 12);
      bench.Add(2, 0, 1);
      const Logits logits = bench.Run();
      CHECK(logits.of.size() == 13);
      CHECK(AllFiniteIn(logits));
      CHECK(bench.Live(0) == 12);
      CHECK(bench.Live(1) == 1);
    }
  }
}

// Every index score is 0 for zero queries: the lowest positions are chosen, -0.0 included.
TEST_CASE("index scores that all tie choose the lowest positions") {
  std::vector<int32_t> chosen;
  Bench bench(Tiny(), [&](StagePoint point, Frame& frame, int32_t layer) {
    if (layer != 3) return;
    const ModelConfig& c = Tiny().Config();
    if (point == StagePoint::kIndexQueries) {
      const auto n = frame.Rows() * static_cast<size_t>(c.index_heads);
      std::fill_n(frame.index_q, n * static_cast<size_t>(c.index_dim), 0.0f);
      for (size_t i = 0; i < n; ++i) frame.index_w[i] = i % 2 == 0 ? -1.0f : 1.0f;
    }
    if (point == StagePoint::kIndexSets) {
      const IndexSet& set = frame.index_sets[frame.Rows() - 1];
      REQUIRE(set.listed);
      const int32_t* list = frame.IndexList(frame.Rows() - 1);
      chosen.assign(list, list + set.count);
    }
  });
  bench.Add(1, 0, 20);
  bench.Run();
  CHECK(chosen == std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7});
}

TEST_CASE("index scores that are not finite fail nothing by themselves") {
  Bench bench(Tiny(), [](StagePoint point, Frame& frame, int32_t layer) {
    if (point == StagePoint::kIndexQueries && layer == 3) {
      frame.index_q[(frame.Rows() - 1) * 6 * 32] = kNaN;
      frame.index_w[(frame.Rows() - 2) * 6] = kInfinity;
    }
    if (point == StagePoint::kIndexSets) {
      for (size_t r = 0; r < frame.Rows(); ++r) {
        const IndexSet& set = frame.index_sets[r];
        REQUIRE(set.count == std::min(frame.rows[r].position + 1, 8));
        for (int32_t i = 0; set.listed && i < set.count; ++i) {
          CHECK((frame.IndexList(r)[i] >= 0 && frame.IndexList(r)[i] <= frame.rows[r].position));
        }
      }
    }
  });
  bench.Add(1, 0, 20);
  const Logits logits = bench.Run();
  CHECK(logits.of.size() == 20);
  CHECK(AllFiniteIn(logits));
}

TEST_CASE("the union has each expert once, in file order, with exactly the rows that chose it") {
  Bench bench(Tiny(), [&](StagePoint point, Frame& frame, int32_t layer) {
    if (point != StagePoint::kLayerStart || layer < 3) return;
    // What the layer before left; experts and jobs are still there.
    std::map<int32_t, std::vector<std::pair<int32_t, int32_t>>> want;
    for (size_t i = 0; i < 2 * frame.Rows(); ++i) {
      want[frame.experts[i]].emplace_back(static_cast<int32_t>(i / 2), static_cast<int32_t>(i % 2));
    }
    CHECK(frame.jobs.size() == want.size());
    std::pair<uint32_t, uint64_t> before{0, 0};
    for (const FrameJob& job : frame.jobs) {
      const Extent& extent = Tiny().Expert(job.item).extents.front();
      CHECK(std::pair(extent.file, extent.offset) >= before);
      before = {extent.file, extent.offset};
      CHECK(job.item == Tiny().ExpertItem(layer - 1, job.expert));
      std::vector<std::pair<int32_t, int32_t>> rows;
      for (int32_t i = job.first; i < job.first + job.count; ++i) {
        const int32_t row = frame.job_rows[static_cast<size_t>(i)];
        const int32_t rank = frame.place[static_cast<size_t>(row * 2)] == i ? 0 : 1;
        CHECK(frame.place[static_cast<size_t>(row * 2 + rank)] == i);
        rows.emplace_back(row, rank);
      }
      CHECK(rows == want[job.expert]);
    }
  });
  bench.Add(1, 0, 9);
  bench.Add(2, 0, 1);
  bench.Run();
}

TEST_CASE("a failed MTP row ends its sequence's drafts and leaves the others their bits") {
  const auto run = [](bool fail) {
    Bench bench(Tiny(), [fail](StagePoint point, Frame& frame, int32_t layer) {
      if (fail && point == StagePoint::kLayerStart && layer == 7) frame.x[0] = kNaN;
    });
    // The draft rows need no further page: 10 and 9 tokens end inside one of 4.
    bench.Add(1, 0, 10);
    bench.Add(2, 0, 9);
    bench.Run();
    bench.RunMtp();
    CHECK(bench.Live(0) == (fail ? 0 : 10));
    const std::vector<int32_t> drafts{5, 6};
    NextDraftStep(bench.frame, drafts, true);
    REQUIRE(bench.frame.Rows() == 2);
    CHECK((bench.frame.rows[0].state == RowState::kLive) == !fail);
    CHECK(bench.frame.rows[1].position == 9);
    CHECK(bench.frame.rows[1].token == 6);
    return bench.RunMtp();
  };
  Logits want = run(false), got = run(true);
  CHECK(want.of.size() == 2);
  CHECK(got.of.size() == 1);
  CHECK(SameBits(want.of[1], got.of[1]));
}

TEST_CASE("a shard that shrinks under the reference engine fails rows, not the process") {
  const TempDir dir;
  std::filesystem::copy(ModelFolder("tiny"), dir.Path("model"));
  const Model model = Loaded(dir.Path("model"));
  const uint32_t last = model.ExpertItem(6, 7);
  const uint32_t file = model.Expert(last).extents[0].file;
  std::filesystem::resize_file(model.Files().Files().Path(file), 4096);
  KvStore kv(KvShapeOf(model, 4, KvType::kF32), 8);
  KvPages pages;
  REQUIRE(kv.Grow(&pages, 20));
  ReferenceEngine engine(model, kv);
  Frame frame(model, {20, 20, 1});
  frame.sequences.assign(1, {});
  frame.sequences[0].pages = &pages;
  frame.sequences[0].rows = 20;
  for (int32_t i = 0; i < 20; ++i) {
    FrameRow row;
    row.position = i;
    row.token = 3 * i;
    row.wants_logits = true;
    frame.rows.push_back(row);
  }
  Logits logits;
  engine.Run(frame, logits);
  CHECK(logits.of.empty());
  CHECK(frame.rows[19].state == RowState::kReadFailed);
  CHECK(frame.sequences[0].error.error == EIO);
  CHECK(frame.sequences[0].error.file == file);
}

TEST_CASE("the router's choices of a layer are what a prediction from its input names") {
  std::vector<uint32_t> chosen(8, 0);
  const Model& model = Tiny();
  Bench bench(model, [&](StagePoint point, Frame& frame, int32_t layer) {
    if (point != StagePoint::kChosen || layer != 4) return;
    for (size_t i = 0; i < 2 * frame.Rows(); ++i) {
      chosen[static_cast<size_t>(frame.experts[i])] += i % 2 == 0 ? 2 : 1;  // top 2
    }
    // x is the post-attention state of this very layer here, so the prediction must be right.
    std::vector<float> scratch(Stages::PredictScratch(model.Config()));
    std::vector<uint32_t> votes(8, 0);
    SerialParallel serial;
    KvStore kv(KvShapeOf(model, 4, KvType::kF32), 1);
    Stages(model, kv, serial).Predict(frame, 4, false, scratch, votes);
    CHECK(votes == chosen);
  });
  bench.Add(1, 0, 2);
  bench.Run();
  CHECK(std::count(chosen.begin(), chosen.end(), 0) < 7);
}

}  // namespace
}  // namespace colibri
