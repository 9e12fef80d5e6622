// Runs the sampled sequences in one frame and counts, at two points of every layer, what its router
// chose and what the next layer's would choose.
#include "bench/routing_check.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "graph/engine.h"
#include "graph/tbb_parallel.h"
#include "kernels/kernels.h"
#include "runtime/reference.h"
#include "runtime/router.h"

namespace colibri {
namespace {

size_t S(int32_t v) { return static_cast<size_t>(v); }

// Before the sequences are measured: attention has something to look at.
constexpr int32_t kPromptTokens = 4;

struct Share {
  uint64_t of = 0, all = 0;
  double Value() const { return all == 0 ? 0 : static_cast<double>(of) / static_cast<double>(all); }
};

class Counter final : public StageHook {
 public:
  explicit Counter(const Model& model)
      : model_(model),
        choice_(S(model.Config().experts)),
        logits_(S(model.Config().experts)),
        weights_(S(model.Config().top_k)),
        normed_(S(model.Config().hidden)),
        before_(S(model.Config().layers)) {}

  // The frame to come has one row for each sequence, and rows before it whose choices were seen.
  bool counting = false;
  Share recall, overlap;

  void At(StagePoint point, Frame& frame, int32_t layer) override {
    const ModelConfig& c = model_.Config();
    if (layer >= c.layers || !counting) return;
    const size_t k = S(c.top_k);
    if (point == StagePoint::kAttention && layer + 1 < c.layers && c.Sparse(layer + 1)) {
      Predict(frame, layer + 1);
    } else if (point == StagePoint::kChosen) {
      if (!predicted_.empty()) Compare(frame.experts, predicted_, k, &recall);
      Compare(frame.experts, before_[S(layer)], k, &overlap);
      before_[S(layer)].assign(
          frame.experts.begin(),
          frame.experts.begin() + static_cast<std::ptrdiff_t>(frame.Rows() * k));
      predicted_.swap(next_);
      next_.clear();
    }
  }

  // The experts that the router of `layer` chooses for a residual stream.
  void Choose(int32_t layer, const float* x, int32_t* experts) {
    const ModelConfig& c = model_.Config();
    const LayerWeights& w = model_.Layer(layer);
    RmsNorm(x, w.post_norm.data(), S(c.hidden), c.rms_eps, normed_.data());
    Matmul(w.router, 0, c.experts, normed_.data(), S(c.hidden), 1, logits_.data(), S(c.experts));
    ChooseExperts(c, logits_, w.router_bias, choice_, {experts, S(c.top_k)}, weights_);
  }

 private:
  // After attention, before its output is added: the state that Stages::Predict looks at.
  void Predict(const Frame& frame, int32_t layer) {
    const ModelConfig& c = model_.Config();
    const size_t hidden = S(c.hidden), k = S(c.top_k);
    std::vector<int32_t>& to = c.Sparse(layer - 1) ? next_ : predicted_;
    to.resize(frame.Rows() * k);
    std::vector<float> x(hidden);
    for (size_t r = 0; r < frame.Rows(); ++r) {
      for (size_t i = 0; i < hidden; ++i) {
        x[i] = frame.x[r * hidden + i] + frame.attention_out[r * hidden + i];
      }
      Choose(layer, x.data(), to.data() + r * k);
    }
  }
  static void Compare(std::span<const int32_t> chosen, std::span<const int32_t> expected, size_t k,
                      Share* share) {
    for (size_t i = 0; i < expected.size(); ++i) {
      const auto row = chosen.subspan(i / k * k, k);
      share->of += std::find(row.begin(), row.end(), expected[i]) != row.end() ? 1 : 0;
    }
    share->all += expected.size();
  }

  const Model& model_;
  std::vector<float> choice_, logits_, weights_, normed_;
  std::vector<std::vector<int32_t>> before_;  // by layer, row by row
  std::vector<int32_t> predicted_, next_;     // for the layer at hand; for the one after it
};

// Keeps the chances of the tokens of the main rows; of MTP rows the token most likely.
class Draws final : public LogitsSink {
 public:
  Draws(size_t rows, size_t vocab, int32_t layers, float temperature)
      : chances(rows, std::vector<double>(vocab)),
        best_draft(rows),
        layers_(layers),
        t_(temperature) {}

  void Row(Frame& frame, size_t row, std::span<float> logits) override {
    const auto top = std::max_element(logits.begin(), logits.end());
    const auto s = S(frame.rows[row].sequence);
    if (frame.layer >= layers_) {
      best_draft[s] = static_cast<int32_t>(top - logits.begin());
      return;
    }
    double sum = 0;
    for (size_t i = 0; i < logits.size(); ++i) {
      sum += chances[s][i] = std::exp(static_cast<double>(logits[i] - *top) / t_);
    }
    for (double& chance : chances[s]) chance /= sum;
  }
  std::vector<std::vector<double>> chances;  // by sequence
  std::vector<int32_t> best_draft;

 private:
  int32_t layers_;
  double t_;
};

double HotQuarter(const Model& model, Counter* counter, const RoutingCheckOptions& options) {
  const ModelConfig& c = model.Config();
  std::vector<float> x(S(c.hidden));
  std::vector<int32_t> experts(S(c.top_k));
  Share share;
  const int32_t tokens = std::min(options.quarter_tokens, c.vocab);
  std::vector<std::vector<uint64_t>> uses(S(c.layers), std::vector<uint64_t>(S(c.experts)));
  for (int32_t i = 0; i < tokens; ++i) {
    const auto token = static_cast<int32_t>(int64_t{i} * c.vocab / tokens);
    DequantiseRow(model.Embedding(), token, x.data());
    for (int32_t layer = 0; layer < c.layers; ++layer) {
      if (!c.Sparse(layer)) continue;
      counter->Choose(layer, x.data(), experts.data());
      for (const int32_t e : experts) ++uses[S(layer)][S(e)];
    }
  }
  for (std::vector<uint64_t>& layer : uses) {
    std::sort(layer.begin(), layer.end(), std::greater<>());
    share.all += std::accumulate(layer.begin(), layer.end(), uint64_t{0});
    share.of += std::accumulate(layer.begin(), layer.begin() + (c.experts + 3) / 4, uint64_t{0});
  }
  return share.Value();
}

// One frame of the sequences' tokens from position `first` on.
void Fill(Frame* frame, const std::vector<std::vector<int32_t>>& tokens,
          const std::vector<KvPages>& pages, int32_t first) {
  const int32_t rows = static_cast<int32_t>(tokens[0].size()) - first;
  frame->rows.clear();
  frame->sequences.assign(pages.size(), {});
  for (size_t s = 0; s < pages.size(); ++s) {
    frame->sequences[s].pages = &pages[s];
    frame->sequences[s].first_row = static_cast<int32_t>(s) * rows;
    frame->sequences[s].rows = rows;
    for (int32_t i = 0; i < rows; ++i) {
      FrameRow row;
      row.sequence = static_cast<int32_t>(s);
      row.position = first + i;
      row.token = tokens[s][S(first + i)];
      row.wants_logits = i + 1 == rows;
      frame->rows.push_back(row);
    }
  }
}

int32_t Draw(const std::vector<double>& chances, std::mt19937_64* random) {
  double left = static_cast<double>((*random)() >> 11) * 0x1p-53;
  size_t token = 0;
  while (token + 1 < chances.size() && left >= chances[token]) left -= chances[token++];
  return static_cast<int32_t>(token);
}

}  // namespace

RoutingFigures MeasureRouting(const Model& model, const RoutingCheckOptions& options) {
  const ModelConfig& c = model.Config();
  const int32_t threads = ThreadsOfMachine();
  oneapi::tbb::task_arena arena(threads);
  TbbParallel parallel(threads);
  const int32_t context = kPromptTokens + options.steps;
  KvStore kv(KvShapeOf(model, kDefaultPageTokens, KvType::kBF16),
             options.sequences * ((context + kDefaultPageTokens - 1) / kDefaultPageTokens));
  Counter counter(model);
  ReferenceEngine engine(model, kv, &counter, &parallel);
  Frame frame(model, {options.sequences * kPromptTokens, context, threads});
  Draws draws(S(options.sequences), S(c.vocab), c.layers, options.temperature);
  std::mt19937_64 random(options.seed);
  std::vector<KvPages> pages(S(options.sequences));
  std::vector<std::vector<int32_t>> tokens(pages.size());
  for (size_t s = 0; s < pages.size(); ++s) {
    kv.Grow(&pages[s], context);
    for (int32_t i = 0; i < kPromptTokens; ++i) {
      tokens[s].push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(c.vocab)));
    }
  }
  double accepted = 0;
  int32_t first = 0;
  for (int32_t step = 0; step < options.steps; ++step) {
    Fill(&frame, tokens, pages, first);
    counter.counting = step > 0;
    arena.execute([&] { engine.Run(frame, draws); });
    for (size_t s = 0; s < pages.size(); ++s) {
      // The draft of the step before was for the token that is drawn now.
      if (step > 0 && model.HasMtp()) accepted += draws.chances[s][S(draws.best_draft[s])];
      tokens[s].push_back(Draw(draws.chances[s], &random));
    }
    first = static_cast<int32_t>(tokens[0].size()) - 1;
    if (!model.HasMtp()) continue;
    for (FrameRow& row : frame.rows) row.token = tokens[S(row.sequence)][S(row.position + 1)];
    arena.execute([&] { engine.RunMtp(frame, draws); });
  }
  RoutingFigures figures;
  figures.recall = counter.recall.Value();
  figures.overlap = counter.overlap.Value();
  figures.hot_quarter = HotQuarter(model, &counter, options);
  figures.mtp = model.HasMtp();
  figures.accepted = accepted / (options.sequences * std::max(options.steps - 1, 1));
  return figures;
}

}  // namespace colibri
