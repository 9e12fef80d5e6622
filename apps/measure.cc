#include "apps/measure.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <span>
#include <utility>

#include "bench/bench_readers.h"
#include "graph/engine.h"
#include "io/error.h"
#include "runtime/frame.h"
#include "runtime/kv_store.h"
#include "runtime/memory_budget.h"
#include "runtime/sampler.h"

namespace colibri {
namespace {

using Clock = std::chrono::steady_clock;

// A sample has the context of some pages, an answer of it ends within the first.
constexpr int32_t kContext = 64;
constexpr int32_t kMostTokens = 30;
constexpr int32_t kWidths[] = {1, 2, 4, 8, 16, 32, 64, 128, 256};
// Where the sample is not the whole model sweeps take long, and their time hardly bends between
// these.
constexpr int32_t kFewWidths[] = {1, 4, 16, 64, 256};
// One figure's time, and what all may take before wider sweeps are left to be reckoned.
constexpr double kFigureSeconds = 0.02, kMostSeconds = 5;
constexpr int kTimes = 3;
// Of the memory for the sample's weights, its vocabulary's share of that, for slots at least.
constexpr uint64_t kDensePart = 3, kVocabularyPart = 8, kSlotsPart = 4;

uint64_t N(int32_t v) { return static_cast<uint64_t>(v); }

double Since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// One-token prompts, all at once, that draw `tokens` tokens each.
class SampleSource final : public RequestSource {
 public:
  SampleSource(int32_t count, int32_t tokens, int32_t vocab)
      : count_(count), tokens_(tokens), vocab_(vocab) {}
  Next TryNext(Request* request, std::optional<LineError>* /*error*/) override {
    if (next_ == count_) return Next::kEnd;
    request->line = N(++next_);
    request->custom_id = std::to_string(next_);
    request->prompt = {next_ % vocab_};
    request->max_tokens = tokens_;
    request->loop_stop = false;
    return Next::kRequest;
  }
  int Fd() const override { return -1; }
  bool Buffered() const override { return next_ < count_; }

 private:
  const int32_t count_, tokens_, vocab_;
  int32_t next_ = 0;
};

class SampleDelivery final : public Delivery {
 public:
  explicit SampleDelivery(Engine& engine) : engine_(engine) {}
  void Deliver(Sequence& s, const Notice& notice) override {
    failed_ |= s.error.has_value();
    if (notice.final != 0) engine_.Closed(s.index);
  }
  void Refuse(Sequence& /*s*/) override { failed_ = true; }
  bool Failed() const { return failed_; }

 private:
  Engine& engine_;
  bool failed_ = false;
};

// A sample and what its figures are multiplied with to be the whole model's.
struct SampleModel {
  explicit SampleModel(const ComputeRequest& request) : model(request.model) {
    if (request.dense_attention) model.DropIndexer();
    model.SetInt8Activations(!request.f32_activations);
  }
  Model model;
  double layers = 1, draw = 1;
  bool whole = false;
};

double Weights(const PackedMatrix& m) { return static_cast<double>(m.rows) * m.cols; }

// What a row multiplies with in a layer.
double WeightsOfLayer(const Model& model, int32_t layer) {
  const LayerWeights& w = model.Layer(layer);
  const ModelConfig& c = model.Config();
  double sum = Weights(w.ffn.gate) + Weights(w.ffn.up) + Weights(w.ffn.down) + Weights(w.router);
  for (const PackedMatrix* m : {&w.q_a, &w.q_b, &w.kv_a, &w.kv_b, &w.o}) sum += Weights(*m);
  if (c.Sparse(layer)) sum += 3.0 * c.top_k * c.hidden * c.moe_intermediate;
  return sum;
}

// What drawing takes: each thread's lists.
uint64_t DrawBytes(const ModelConfig& c, int32_t threads) {
  return N(threads) * N(c.vocab) * 2 * sizeof(SampleScratch::Entry);
}

// All of the model if it is small, else two sparse layers, or one, and a part of the vocabulary.
// What it takes to open it is no more to be had for the rest.
std::unique_ptr<SampleModel> MakeSample(ComputeRequest* r) {
  const uint64_t before = ResidentBytes();
  auto sample = std::make_unique<SampleModel>(*r);
  const uint64_t opened = ResidentBytes() - std::min(before, ResidentBytes());
  r->memory -= std::min(r->memory, opened);
  const ComputeRequest& request = *r;
  Model& model = sample->model;
  const ModelConfig c = model.Config();
  double all = 0;
  uint64_t experts = 0;
  for (int32_t i = 0; i < c.layers; ++i) all += WeightsOfLayer(model, i);
  for (const Model::ExpertClass& e : model.ExpertClasses()) experts += e.slot_bytes * e.experts;
  if (model.DenseBytes() + experts < request.memory / 2) {
    model.CutToSample(0, c.layers, c.vocab);
    sample->whole = true;
  } else {
    int32_t first = 0;
    while (first < c.layers && !c.Sparse(first)) ++first;
    if (first == c.layers) first = 0;
    const uint64_t token =
        RowBytes(model.Head().format, c.hidden) + RowBytes(model.Embedding().format, c.hidden) + 1;
    const int32_t vocab = static_cast<int32_t>(
        std::clamp<uint64_t>(request.memory / kVocabularyPart / token, 1, N(c.vocab)));
    const double one = WeightsOfLayer(model, first);
    const int32_t layers = std::min(2, c.layers - first);
    model.CutToSample(first, layers, vocab);
    if (layers > 1 && model.DenseBytes() > request.memory / kDensePart) {
      model.CutToSample(0, 1, vocab);
    }
    sample->layers = all / one / model.Config().layers;
    sample->draw = static_cast<double>(c.vocab) / vocab;
  }
  if (model.DenseBytes() > request.memory / 2) {
    throw IoError("too little memory to measure how fast the machine computes");
  }
  model.MakeUpDense();
  return sample;
}

EngineOptions OptionsFor(const ComputeRequest& request, int32_t rows) {
  EngineOptions e;
  e.threads = request.threads;
  e.context = kContext;
  e.kv_type = request.kv_type;
  e.scheduler.sequences = e.scheduler.rows = e.scheduler.prefill_rows = rows;
  e.scheduler.share_prefixes = false;
  e.kv_pages = rows + kContext / e.page_tokens;
  e.prefetch = false;
  return e;
}

// Slots from what the weights and the engine for so many rows leave. False: no width of that kind.
bool SetSlots(const ComputeRequest& request, const Model& model, EngineOptions* e) {
  const FrameShape shape{e->scheduler.rows, kContext, request.threads};
  const uint64_t kv =
      N(e->kv_pages) * KvShapeOf(model, e->page_tokens, request.kv_type).PageBytes();
  const uint64_t tokens = N(e->scheduler.rows) * N(kContext) * sizeof(int32_t);
  const uint64_t taken = model.DenseBytes() + shape.Bytes(model) + kv + tokens +
                         DrawBytes(model.Config(), request.threads);
  if (taken > request.memory - request.memory / kSlotsPart) return false;
  uint64_t all = 0, ones = 0;
  for (const Model::ExpertClass& c : model.ExpertClasses()) {
    all += c.slot_bytes * c.experts;
    ones += c.slot_bytes;
  }
  const uint64_t room = request.memory - taken;
  if (ones > room) return false;
  const double share =
      all > 0 ? std::min(1.0, static_cast<double>(room - ones) / static_cast<double>(all)) : 0;
  e->slots.clear();
  for (const Model::ExpertClass& c : model.ExpertClasses()) {
    const auto count = static_cast<uint32_t>(share * c.experts);
    e->slots.push_back({c.slot_bytes, std::max(1u, std::min(c.experts, count + 1))});
  }
  return true;
}

struct Figure {
  double all_s = 0, draw_s = 0;
};

// Of `sweeps` sweeps with all rows each.
Figure RunSample(const Model& model, const Tokenizer& tokenizer, const EngineOptions& options,
                 int32_t sweeps) {
  SampleSource source(options.scheduler.rows, sweeps, model.Config().vocab);
  Engine engine(model, tokenizer, options, std::make_unique<InstantReader>(), source);
  SampleDelivery delivery(engine);
  engine.Run(delivery);
  if (delivery.Failed()) throw IoError("the sample of the model does not compute");
  uint64_t draw_ns = 0;
  for (const NodeId node : {NodeId::kAdmit, NodeId::kEmbed, NodeId::kHead, NodeId::kVerify}) {
    draw_ns += engine.TheProfile().Node(node).busy_ns;
  }
  return {engine.Stats().seconds, static_cast<double>(draw_ns) / 1e9};
}

void KeepLess(const Figure& one, Figure* least) {
  least->all_s = std::min(least->all_s, one.all_s);
  least->draw_s = std::min(least->draw_s, one.draw_s);
}

// Of one sweep. Where sweeps are short what many take beyond two, so that neither the start of an
// engine nor the first use of an expert counts.
Figure MeasureSweep(const Model& model, const Tokenizer& tokenizer, const EngineOptions& options) {
  const Figure two = RunSample(model, tokenizer, options, 2);
  const double wanted = 2 + kFigureSeconds / std::max(1e-6, two.all_s / 2);
  if (wanted < 6) return {two.all_s / 2, two.draw_s / 2};
  const auto sweeps = static_cast<int32_t>(std::min<double>(wanted, kMostTokens));
  // The quickest of each: whatever else the machine does comes and goes.
  Figure few = two, many{1e9, 1e9};
  for (int i = 0; i < kTimes; ++i) {
    if (i > 0) KeepLess(RunSample(model, tokenizer, options, 2), &few);
    KeepLess(RunSample(model, tokenizer, options, sweeps), &many);
  }
  return {std::max(0.0, many.all_s - few.all_s) / (sweeps - 2),
          std::max(0.0, many.draw_s - few.draw_s) / (sweeps - 2)};
}

// Of one row and position in all of `layers`: heads are spread over all threads.
double PositionSeconds(const ModelConfig& c, const ComputeRequest& request, int32_t layers) {
  constexpr int32_t kPositions = 512;
  const auto width = static_cast<size_t>(c.KvWidth());
  const std::vector<std::byte> stored(kPositions * width * KvBytes(request.kv_type));
  const std::byte* page = stored.data();
  const size_t heads = static_cast<size_t>(c.heads);
  const std::vector<float> q_latent(heads * static_cast<size_t>(c.kv_lora), 0.5F);
  const std::vector<float> q_rope(heads * static_cast<size_t>(c.rope), 0.5F);
  std::vector<float> out(q_latent.size()), scratch(AttentionScratch(c.kv_lora, c.rope));
  const AttentionRow row{q_latent.data(), q_rope.data(), nullptr, kPositions, out.data()};
  const LatentAttention attention{{&page, kPositions, c.KvWidth(), request.kv_type},
                                  c.kv_lora,
                                  c.rope,
                                  0.02F,
                                  &row,
                                  1,
                                  scratch.data()};
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto start = Clock::now();
    AttendLatents(attention, 0, c.heads);
    best = std::min(best, Since(start));
  }
  return best / kPositions * layers / std::min(request.threads, c.heads);
}

// Whatever disturbs makes a figure larger: a wider sweep takes as long at least, and no more for a
// row.
void Smooth(std::vector<Speeds::Sweep>* sweeps) {
  for (double Speeds::Sweep::*figure : {&Speeds::Sweep::layers_s, &Speeds::Sweep::draw_s}) {
    for (size_t i = sweeps->size(); i-- > 1;) {
      double& narrow = (*sweeps)[i - 1].*figure;
      narrow = std::min(narrow, (*sweeps)[i].*figure);
    }
    for (size_t i = 1; i < sweeps->size(); ++i) {
      const Speeds::Sweep &narrow = (*sweeps)[i - 1], &wide = (*sweeps)[i];
      (*sweeps)[i].*figure = std::min(wide.*figure, narrow.*figure * wide.rows / narrow.rows);
    }
  }
}

}  // namespace

Speeds MeasureComputing(const ComputeRequest& asked, const Tokenizer& tokenizer) {
  const auto start = Clock::now();
  ComputeRequest request = asked;
  const std::unique_ptr<SampleModel> sample = MakeSample(&request);
  const Model& model = sample->model;
  Speeds speeds;
  const std::span<const int32_t> widths =
      sample->whole ? std::span<const int32_t>(kWidths) : std::span<const int32_t>(kFewWidths);
  double last = 0;
  for (const int32_t rows : widths) {
    if (request.most_rows > 0 && rows > std::max(request.most_rows, 2)) break;
    EngineOptions options = OptionsFor(request, rows);
    if (!SetSlots(request, model, &options)) break;
    // Rows are likely to cost as much as before at most.
    if (speeds.sweeps.size() > 1 && Since(start) + 8 * last > kMostSeconds) break;
    const Figure figure = MeasureSweep(model, tokenizer, options);
    last = figure.all_s;
    speeds.sweeps.push_back({static_cast<double>(rows),
                             sample->layers * std::max(0.0, figure.all_s - figure.draw_s),
                             sample->draw * figure.draw_s});
  }
  Smooth(&speeds.sweeps);
  if (speeds.sweeps.empty()) {
    throw IoError("too little memory to measure how fast the machine computes");
  }
  speeds.position_s =
      PositionSeconds(model.Config(), request, 1) * (sample->whole ? model.Config().layers : 1);
  return speeds;
}

}  // namespace colibri
