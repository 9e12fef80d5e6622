// Negative controls: each mistake of tests/fixtures/README.md is made in the reference engine, and
// the fixtures must see it. Mistakes are made from outside: in the weights (a permutation of rows
// turns one rotary style into the other), in the configuration or through the stage hook. The
// change of the logits is compared with what the same mistake moves in transformers.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "bench/fixture.h"
#include "kernels/kernels.h"
#include "runtime/parallel.h"
#include "runtime/router.h"
#include "tests/function_hook.h"

namespace colibri {
namespace {

std::string Folder(const std::string& name) { return COLIBRI_SOURCE_DIR "/tests/fixtures/" + name; }

// Matrices rewritten as f32; they live as long as the object.
class Rewriter {
 public:
  // Row i of the result is row `source[i]` of w times `factor[i]` (1 without factors).
  void Rows(PackedMatrix* w, const std::vector<int32_t>& source,
            const std::vector<float>& factor = {}) {
    const auto cols = static_cast<size_t>(w->cols);
    std::vector<float>& rows = buffers_.emplace_back(source.size() * cols);
    for (size_t i = 0; i < source.size(); ++i) {
      float* to = rows.data() + i * cols;
      DequantiseRow(*w, source[i], to);
      for (size_t j = 0; !factor.empty() && j < cols; ++j) to[j] *= factor[i];
    }
    PackedMatrix plain;
    plain.rows = static_cast<int32_t>(source.size());
    plain.cols = w->cols;
    plain.data = reinterpret_cast<const std::byte*>(rows.data());
    *w = plain;
  }
  void Scale(PackedMatrix* w, float factor) {
    std::vector<int32_t> same(static_cast<size_t>(w->rows));
    std::iota(same.begin(), same.end(), 0);
    Rows(w, same, std::vector<float>(same.size(), factor));
  }
  // The same permutation within each of the blocks that make up the rows.
  void Blocks(PackedMatrix* w, const std::vector<int32_t>& within) {
    const auto size = static_cast<int32_t>(within.size());
    REQUIRE(w->rows % size == 0);
    std::vector<int32_t> source;
    for (int32_t first = 0; first < w->rows; first += size) {
      for (const int32_t i : within) source.push_back(first + i);
    }
    Rows(w, source);
  }

 private:
  std::deque<std::vector<float>> buffers_;
};

std::vector<int32_t> Identity(int32_t size) {
  std::vector<int32_t> order(static_cast<size_t>(size));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

// Within rows [first, first + rope): neighbours become what half-split rotation pairs. Both sides
// of every dot product are permuted alike, so only the pairing changes.
std::vector<int32_t> HalfSplit(int32_t size, int32_t first, int32_t rope) {
  std::vector<int32_t> order = Identity(size);
  for (int32_t j = 0; j < rope / 2; ++j) {
    order[static_cast<size_t>(first + 2 * j)] = first + j;
    order[static_cast<size_t>(first + 2 * j + 1)] = first + rope / 2 + j;
  }
  return order;
}

std::vector<float> Permuted(const std::vector<float>& v, const std::vector<int32_t>& order) {
  std::vector<float> result;
  for (const int32_t i : order) result.push_back(v[static_cast<size_t>(i)]);
  return result;
}

void ForEachLayer(Model& model, const std::function<void(LayerWeights&)>& change) {
  for (int32_t i = 0; i < model.LayerCount(); ++i) change(model.MutableLayer(i));
}

// The slots of indexer queries and keys in another order.
void PermuteIndexer(Rewriter& rewriter, LayerWeights& layer, const std::vector<int32_t>& order) {
  if (!layer.indexer) return;
  IndexerWeights& w = *layer.indexer;
  rewriter.Blocks(&w.wq_b, order);
  rewriter.Rows(&w.wk, order);
  w.k_norm_weight = Permuted(w.k_norm_weight, order);
  w.k_norm_bias = Permuted(w.k_norm_bias, order);
}

// What the fixtures say of a run: the largest difference of every tensor that failed.
using Failures = std::map<std::string, double>;

Failures FailuresOf(const std::string& folder, const FixtureOptions& options) {
  Failures failures;
  const FixtureValues values = ComputeFixture(Folder(folder), options);
  for (const TensorDifference& d : CompareFixture(Folder(folder), values, options)) {
    if (!d.passed) failures[d.name] = d.largest;
  }
  return failures;
}

// 0: not beyond the tolerance.
double LogitsOf(const Failures& failures) {
  return failures.contains("logits") ? failures.at("logits") : 0;
}

struct Expectation {
  std::string folder;
  double logits;            // the largest change in transformers
  double precision = 0.03;  // the table has two digits
};

using Change = std::function<void(Model&, Rewriter&)>;

// Makes the mistake in every folder: the logits must move as far as they do in transformers, and
// `also` must fail as well.
void ExpectSeen(const std::vector<Expectation>& expectations, const Change& change,
                StageHook* hook = nullptr, const std::string& also = "final_norm") {
  for (const Expectation& e : expectations) {
    Rewriter rewriter;
    FixtureOptions options;
    options.change_model = [&](Model& model) { change(model, rewriter); };
    options.hook = hook;
    const Failures failures = FailuresOf(e.folder, options);
    CAPTURE(e.folder);
    const double moved = LogitsOf(failures);
    CAPTURE(moved);
    CHECK(std::abs(moved - e.logits) <= e.precision * e.logits);
    CHECK(failures.contains(also));
  }
}

const Change kNoChange = [](Model&, Rewriter&) {};

TEST_CASE("without a mistake nothing fails, rewritten matrices and hooks included") {
  for (const std::string folder : {"tiny", "groups"}) {
    Rewriter rewriter;
    FunctionHook hook([](StagePoint, Frame&, int32_t) {});
    FixtureOptions options;
    options.hook = &hook;
    options.change_model = [&](Model& model) {
      ForEachLayer(model, [&](LayerWeights& w) {
        for (PackedMatrix* m : {&w.q_a, &w.q_b, &w.kv_a, &w.kv_b, &w.o}) {
          rewriter.Rows(m, Identity(m->rows));
        }
        PermuteIndexer(rewriter, w, Identity(model.Config().index_dim));
      });
    };
    CHECK(FailuresOf(folder, options).empty());
  }
}

TEST_CASE("half-split rotation in the indexer is seen") {
  ExpectSeen(
      {{"tiny", 6.3}, {"groups", 6.6}},
      [](Model& model, Rewriter& rewriter) {
        const ModelConfig& c = model.Config();
        const auto order = HalfSplit(c.index_dim, 0, c.rope);
        ForEachLayer(model, [&](LayerWeights& w) { PermuteIndexer(rewriter, w, order); });
      },
      nullptr, "index.0");
}

TEST_CASE("half-split rotation in attention is seen") {
  ExpectSeen(
      {{"tiny", 5.4}, {"groups", 6.3}},
      [](Model& model, Rewriter& rewriter) {
        const ModelConfig& c = model.Config();
        ForEachLayer(model, [&](LayerWeights& w) {
          rewriter.Blocks(&w.q_b, HalfSplit(c.QkHead(), c.nope, c.rope));
          rewriter.Rows(&w.kv_a, HalfSplit(c.KvWidth(), c.kv_lora, c.rope));
        });
      },
      nullptr, "attn.0");
}

// w * relu(s) - w * relu(-s) is w * s: every head a second time with the signs of query and weight
// turned. The scale for the number of heads changes with it, which moves no selection.
TEST_CASE("an indexer without ReLU is seen") {
  ExpectSeen(
      {{"tiny", 6.1}, {"groups", 6.6}},
      [](Model& model, Rewriter& rewriter) {
        const auto twice = [&](PackedMatrix* w) {
          std::vector<int32_t> source = Identity(w->rows);
          std::vector<float> sign(source.size(), 1);
          sign.resize(2 * source.size(), -1);
          source.resize(2 * source.size());
          std::iota(source.begin() + w->rows, source.end(), 0);
          rewriter.Rows(w, source, sign);
        };
        ForEachLayer(model, [&](LayerWeights& w) {
          if (!w.indexer) return;
          twice(&w.indexer->wq_b);
          twice(&w.indexer->weights_proj);
        });
        model.MutableConfig().index_heads *= 2;
      },
      nullptr, "index.0");
}

TEST_CASE("indexer queries of the latent before its norm are seen") {
  const Model* model = nullptr;
  FunctionHook hook([&](StagePoint point, Frame& frame, int32_t layer) {
    if (point != StagePoint::kIndexQueries) return;
    const ModelConfig& c = model->Config();
    const LayerWeights& w = model->Layer(layer);
    SerialParallel serial;
    const size_t rows = frame.Rows(), pairs = static_cast<size_t>(c.rope / 2);
    const auto heads = static_cast<size_t>(c.index_heads), dim = static_cast<size_t>(c.index_dim);
    std::vector<float> latent(rows * static_cast<size_t>(c.q_lora));
    ParallelMatmul(serial, w.q_a, frame.normed, rows, latent.data());
    ParallelMatmul(serial, w.indexer->wq_b, latent.data(), rows, frame.index_q);
    for (size_t i = 0; i < rows * heads; ++i) {
      const size_t angles = i / heads * pairs;
      Rope(frame.index_q + i * dim, frame.rope_cos + angles, frame.rope_sin + angles, pairs);
    }
  });
  ExpectSeen(
      {{"tiny", 5.5}, {"groups", 5.2}}, [&](Model& m, Rewriter&) { model = &m; }, &hook, "index.0");
}

TEST_CASE("indexer slots with the unrotated values first are seen") {
  ExpectSeen(
      {{"tiny", 6.2}, {"groups", 6.3}},
      [](Model& model, Rewriter& rewriter) {
        const ModelConfig& c = model.Config();
        std::vector<int32_t> order = Identity(c.index_dim);
        std::rotate(order.begin(), order.end() - c.rope, order.end());
        ForEachLayer(model, [&](LayerWeights& w) { PermuteIndexer(rewriter, w, order); });
      },
      nullptr, "index.0");
}

TEST_CASE("shared layers that attend to everything are seen") {
  const Model* model = nullptr;
  FunctionHook hook([&](StagePoint point, Frame& frame, int32_t layer) {
    if (point != StagePoint::kIndexSets || model->Config().FullIndexer(layer)) return;
    for (size_t r = 0; r < frame.Rows(); ++r) {
      frame.index_sets[r] = {frame.rows[r].position + 1, false};
    }
  });
  ExpectSeen(
      {{"tiny", 5.3}, {"groups", 4.6}}, [&](Model& m, Rewriter&) { model = &m; }, &hook, "index.2");
}

TEST_CASE("shared layers that run an indexer of their own are seen") {
  ExpectSeen(
      {{"tiny", 5.1}, {"groups", 5.3}},
      [](Model& model, Rewriter&) {
        ModelConfig& c = model.MutableConfig();
        for (int32_t i = 1; i < c.layers; ++i) {
          if (!c.FullIndexer(i)) model.MutableLayer(i).indexer = model.Layer(i - 1).indexer;
        }
        c.full_indexer.assign(c.full_indexer.size(), true);
      },
      nullptr, "index.2");
}

TEST_CASE("dense attention where the indexer chooses is seen") {
  FunctionHook hook([](StagePoint point, Frame& frame, int32_t) {
    if (point != StagePoint::kIndexSets) return;
    for (size_t r = 0; r < frame.Rows(); ++r) {
      frame.index_sets[r] = {frame.rows[r].position + 1, false};
    }
  });
  ExpectSeen({{"tiny", 5.9}, {"groups", 5.5}}, kNoChange, &hook, "index.0");
}

TEST_CASE("an ignored correction bias is seen") {
  ExpectSeen(
      {{"tiny", 5.2}, {"groups", 4.6}},
      [](Model& model, Rewriter&) {
        ForEachLayer(model, [](LayerWeights& w) {
          std::fill(w.router_bias.begin(), w.router_bias.end(), 0.0f);
        });
      },
      nullptr, "router.2.experts");
}

float Sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

TEST_CASE("a correction bias inside the expert weights is seen") {
  const Model* model = nullptr;
  FunctionHook hook([&](StagePoint point, Frame& frame, int32_t layer) {
    if (point != StagePoint::kChosen) return;
    const ModelConfig& c = model->Config();
    const auto k = static_cast<size_t>(c.top_k), experts = static_cast<size_t>(c.experts);
    for (size_t r = 0; r < frame.Rows(); ++r) {
      const std::span<float> weights(frame.weights.data() + r * k, k);
      for (size_t j = 0; j < k; ++j) {
        const auto e = static_cast<size_t>(frame.experts[r * k + j]);
        weights[j] =
            Sigmoid(frame.router_logits[r * experts + e]) + model->Layer(layer).router_bias[e];
      }
      FinalWeights(c, weights);
    }
  });
  ExpectSeen(
      {{"tiny", 3.9}, {"groups", 7.3}}, [&](Model& m, Rewriter&) { model = &m; }, &hook,
      "router.2.weights");
}

TEST_CASE("expert weights that are not renormalised are seen") {
  ExpectSeen(
      {{"tiny", 4.9}, {"groups", 5.5}},
      [](Model& model, Rewriter&) { model.MutableConfig().norm_top_k = false; }, nullptr,
      "router.2.weights");
}

// The row's experts as chosen when dropped groups count as 0 instead of minus infinity.
std::vector<int32_t> ChosenWithZeroMask(const ModelConfig& c, const float* logits,
                                        const std::vector<float>& bias) {
  const auto experts = static_cast<size_t>(c.experts), groups = static_cast<size_t>(c.groups);
  const size_t size = experts / groups;
  std::vector<float> choice(experts), score(groups);
  for (size_t e = 0; e < experts; ++e) choice[e] = Sigmoid(logits[e]) + bias[e];
  for (size_t g = 0; g < groups; ++g) {
    std::vector<float> sorted(choice.begin() + static_cast<std::ptrdiff_t>(g * size),
                              choice.begin() + static_cast<std::ptrdiff_t>((g + 1) * size));
    std::sort(sorted.rbegin(), sorted.rend());
    score[g] = sorted[0] + sorted[1];
  }
  std::vector<int32_t> order = Identity(c.groups);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return score[static_cast<size_t>(a)] > score[static_cast<size_t>(b)];
  });
  for (auto g = static_cast<size_t>(c.top_groups); g < groups; ++g) {
    std::fill_n(choice.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(order[g]) * size),
                size, 0.0f);
  }
  std::vector<int32_t> chosen = Identity(c.experts);
  std::stable_sort(chosen.begin(), chosen.end(), [&](int32_t a, int32_t b) {
    return choice[static_cast<size_t>(a)] > choice[static_cast<size_t>(b)];
  });
  chosen.resize(static_cast<size_t>(c.top_k));
  return chosen;
}

TEST_CASE("dropped groups masked with zero are seen") {
  const Model* model = nullptr;
  FunctionHook hook([&](StagePoint point, Frame& frame, int32_t layer) {
    if (point != StagePoint::kChosen) return;
    const ModelConfig& c = model->Config();
    const auto k = static_cast<size_t>(c.top_k), experts = static_cast<size_t>(c.experts);
    for (size_t r = 0; r < frame.Rows(); ++r) {
      const float* logits = frame.router_logits + r * experts;
      const auto chosen = ChosenWithZeroMask(c, logits, model->Layer(layer).router_bias);
      for (size_t j = 0; j < k; ++j) {
        frame.experts[r * k + j] = chosen[j];
        frame.weights[r * k + j] = Sigmoid(logits[static_cast<size_t>(chosen[j])]);
      }
      FinalWeights(c, {frame.weights.data() + r * k, k});
    }
  });
  ExpectSeen(
      // Dropped experts tie at 0, and torch.topk promises no order among them.
      {{"groups", 5.3, 0.2}}, [&](Model& m, Rewriter&) { model = &m; }, &hook, "router.2.experts");
}

TEST_CASE("ignored groups are seen") {
  ExpectSeen(
      {{"groups", 4.4}}, [](Model& model, Rewriter&) { model.MutableConfig().groups = 1; }, nullptr,
      "router.2.experts");
}

TEST_CASE("keys and values swapped in kv_b are seen") {
  ExpectSeen(
      {{"tiny", 6.5}, {"groups", 7.4}},
      [](Model& model, Rewriter& rewriter) {
        const ModelConfig& c = model.Config();
        // The head's first v_head rows are taken for values, the others for keys.
        std::vector<int32_t> order = Identity(c.nope + c.v_head);
        std::rotate(order.begin(), order.begin() + c.v_head, order.end());
        ForEachLayer(model, [&](LayerWeights& w) { rewriter.Blocks(&w.kv_b, order); });
      },
      nullptr, "attn.0");
}

TEST_CASE("gate and up swapped in the routed experts are seen") {
  ExpectSeen({{"tiny", 5.8}, {"groups", 4.8}}, [](Model& model, Rewriter&) {
    for (uint32_t i = 0; i < model.ExpertCount(); ++i) {
      ExpertLayout& expert = model.MutableExpert(i);
      std::swap(expert.gate, expert.up);
    }
  });
}

TEST_CASE("gate and up swapped in dense layers and shared experts are seen") {
  for (const bool sparse : {false, true}) {
    for (const std::string folder : {"tiny", "groups"}) {
      FixtureOptions options;
      options.change_model = [&](Model& model) {
        for (int32_t i = 0; i < model.LayerCount(); ++i) {
          FfnWeights& ffn = model.MutableLayer(i).ffn;
          if (model.Config().Sparse(i) == sparse) std::swap(ffn.gate, ffn.up);
        }
      };
      CHECK(LogitsOf(FailuresOf(folder, options)) > 1.0);
    }
  }
}

TEST_CASE("an attention scale from the unrotated width is seen") {
  ExpectSeen(
      {{"tiny", 5.1}, {"groups", 5.2}},
      [](Model& model, Rewriter& rewriter) {
        const ModelConfig& c = model.Config();
        const float factor = std::sqrt(static_cast<float>(c.QkHead()) / static_cast<float>(c.nope));
        ForEachLayer(model, [&](LayerWeights& w) { rewriter.Scale(&w.q_b, factor); });
      },
      nullptr, "attn.0");
}

// The smallest of all mistakes: not much above the tolerance of 7e-5.
TEST_CASE("a latent eps of 1e-6 is seen") {
  ExpectSeen(
      {{"tiny", 9.7e-5, 0.15}, {"groups", 1.2e-4, 0.15}, {"long", 1.4e-4, 0.15}},
      [](Model& model, Rewriter&) { model.MutableConfig().latent_eps = 1e-6f; }, nullptr, "logits");
}

TEST_CASE("later drafts with an index set of their own where the first step's is due are seen") {
  const Model* model = nullptr;
  FunctionHook hook([&](StagePoint point, Frame& frame, int32_t layer) {
    if (point != StagePoint::kLayerStart || layer < model->Config().layers) return;
    for (FrameRow& row : frame.rows) row.frozen_index = false;
  });
  for (const std::string folder : {"tiny", "groups"}) {
    FixtureOptions options;
    options.hook = &hook;
    options.change_model = [&](Model& m) { model = &m; };
    const Failures failures = FailuresOf(folder, options);
    CAPTURE(folder);
    REQUIRE(failures.contains("mtp.drafts.shared_index.logits"));
    CHECK(failures.at("mtp.drafts.shared_index.logits") > 3.0);
    CHECK(failures.at("mtp.drafts.shared_index.logits") < 6.0);
    // Nothing else depends on it.
    for (const auto& [name, largest] : failures) CHECK(name.starts_with("mtp.drafts.shared_index"));
  }
}

}  // namespace
}  // namespace colibri
