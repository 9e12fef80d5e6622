// Everything of the forward pass but attention: embedding, router and union, experts, shared and
// dense FFN, combination, head, and the entry of the MTP layer.
#include "runtime/stages.h"

#include <algorithm>
#include <cstring>

#include "io/check.h"
#include "kernels/kernels.h"
#include "runtime/int8_products.h"
#include "runtime/router.h"

namespace colibri {
namespace {

size_t S(int32_t v) { return static_cast<size_t>(v); }

}  // namespace

void MarkFailed(Frame& frame, size_t row, RowState state, int32_t layer) {
  const FrameRow& failed = frame.rows[row];
  const FrameSequence& sequence = frame.sequences[S(failed.sequence)];
  const size_t first = failed.draft ? row : S(sequence.first_row);
  const size_t last = S(sequence.first_row + sequence.rows);
  for (size_t r = first; r < last; ++r) {
    if (frame.rows[r].state != RowState::kLive) continue;
    frame.rows[r].state = state;
    frame.rows[r].failed_layer = layer;
  }
}

void Stages::Embed(Frame& frame) const {
  const size_t hidden = S(model_.Config().hidden);
  frame.layer = 0;
  Angles(frame);
  if (model_.Embedding().data == nullptr) return;
  parallel_.For(frame.Rows(), 16, [&](size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) {
      DequantiseRow(model_.Embedding(), frame.rows[r].token, frame.x + r * hidden);
    }
  });
}

void Stages::MtpInput(Frame& frame, std::span<const float* const> hidden_of) const {
  const ModelConfig& c = model_.Config();
  const MtpWeights& w = model_.Mtp();
  const size_t hidden = S(c.hidden);
  frame.layer = c.layers;
  Angles(frame);
  // [embedding | hidden] of each row, embedding first; the experts' output has room for it.
  float* both = frame.expert_out;
  parallel_.For(frame.Rows(), 4, [&](size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) {
      float* to = both + r * 2 * hidden;
      DequantiseRow(model_.Embedding(), frame.rows[r].token, to);
      RmsNorm(to, w.enorm.data(), hidden, c.rms_eps, to);
      const float* from = hidden_of.empty() ? frame.final + r * hidden : hidden_of[r];
      RmsNorm(from, w.hnorm.data(), hidden, c.rms_eps, to + hidden);
    }
  });
  frame.normed8 = {};
  WideProduct(w.eh_proj, both, frame.Rows(), frame.x, &frame.normed8, frame.normed8_memory);
}

void Stages::Route(Frame& frame, int32_t layer) const {
  const ModelConfig& c = model_.Config();
  const LayerWeights& w = model_.Layer(layer);
  const size_t rows = frame.Rows(), k = S(c.top_k), experts = S(c.experts);
  NormRows(frame, frame.x, w.post_norm, frame.normed);
  QuantiseNormed(frame, layer);
  frame.jobs.clear();
  frame.job_rows.clear();
  if (!c.Sparse(layer)) return;
  MatmulRows(w.router, frame.normed, rows, frame.router_logits);
  parallel_.For(rows, 8, [&](size_t begin, size_t end) {
    float* choice = frame.router_scratch + S(parallel_.ThreadIndex()) * experts;
    for (size_t r = begin; r < end; ++r) {
      ChooseExperts(c, {frame.router_logits + r * experts, experts}, w.router_bias,
                    {choice, experts}, {frame.experts.data() + r * k, k},
                    {frame.weights.data() + r * k, k});
    }
  });
  At(StagePoint::kChosen, frame, layer);
  FormUnion(frame, layer);
}

void Stages::FormUnion(Frame& frame, int32_t layer) const {
  const ModelConfig& c = model_.Config();
  const size_t k = S(c.top_k);
  std::vector<int32_t> count(S(c.experts), 0);
  for (size_t r = 0; r < frame.Rows(); ++r) {
    if (frame.rows[r].state != RowState::kLive) continue;
    for (size_t j = 0; j < k; ++j) ++count[S(frame.experts[r * k + j])];
  }
  // `count` becomes each expert's next place in job_rows.
  int32_t next = 0;
  for (int32_t e = 0; e < c.experts; ++e) {
    const int32_t n = count[S(e)];
    count[S(e)] = next;
    if (n > 0) frame.jobs.push_back({e, model_.ExpertItem(layer, e), next, n, false, {}});
    next += n;
  }
  frame.job_rows.resize(S(next));
  for (size_t r = 0; r < frame.Rows(); ++r) {
    for (size_t j = 0; j < k; ++j) {
      if (frame.rows[r].state != RowState::kLive) {
        frame.place[r * k + j] = -1;
        continue;
      }
      const int32_t at = count[S(frame.experts[r * k + j])]++;
      frame.place[r * k + j] = at;
      frame.job_rows[S(at)] = static_cast<int32_t>(r);
    }
  }
  // File order, so that a wide sweep reads its shards from front to back.
  std::sort(frame.jobs.begin(), frame.jobs.end(), [&](const FrameJob& a, const FrameJob& b) {
    const Extent& ea = model_.Expert(a.item).extents.front();
    const Extent& eb = model_.Expert(b.item).extents.front();
    return std::pair(ea.file, ea.offset) < std::pair(eb.file, eb.offset);
  });
}

void Stages::Product(const PackedMatrix& w, const float* x, const int32_t* index, size_t rows,
                     float* y, float* scratch) const {
  if (model_.Int8Activations() && TakesInt8(w)) {
    const QuantisedRows q = ParallelQuantise(parallel_, w, x, index, rows, scratch);
    return ParallelMatmulInt8(parallel_, w, q, nullptr, rows, y);
  }
  const size_t in = S(w.cols);
  for (size_t i = 0; index != nullptr && i < rows; ++i) {
    std::memcpy(scratch + i * in, x + S(index[i]) * in, in * sizeof(float));
  }
  MatmulRows(w, index == nullptr ? x : scratch, rows, y);
}

void Stages::WideProduct(const PackedMatrix& w, const float* x, size_t rows, float* y,
                         QuantisedRows* ready, float* memory) const {
  if (!model_.Int8Activations() || !TakesTwoPlanes(w)) return MatmulRows(w, x, rows, y);
  if (!ServesToo(*ready, w, 2)) {
    *ready = ParallelQuantise(parallel_, w, x, nullptr, rows, memory, 2);
  }
  ParallelMatmulInt8(parallel_, w, *ready, nullptr, rows, y);
}

void Stages::QuantiseNormed(Frame& frame, int32_t layer) const {
  frame.normed8 = {};
  const PackedMatrix& gate = model_.Config().Sparse(layer)
                                 ? model_.Expert(model_.ExpertItem(layer, 0)).gate.shape
                                 : model_.Layer(layer).ffn.gate;
  if (!model_.Int8Activations() || !TakesInt8(gate)) return;
  frame.normed8 =
      ParallelQuantise(parallel_, gate, frame.normed, nullptr, frame.Rows(), frame.normed8_memory);
}

void Stages::Ffn(const FfnWeights& w, const Frame& frame, const int32_t* index, size_t rows,
                 const FfnBuffers& to) const {
  if (model_.Int8Activations() && TakesInt8(w.gate) && w.gate.format == w.up.format &&
      Int8Run(w.gate) == Int8Run(w.up)) {
    if (ServesToo(frame.normed8, w.gate)) {
      ParallelGateUpInt8(parallel_, w.gate, w.up, frame.normed8, index, rows, to.gate);
    } else {
      const QuantisedRows q =
          ParallelQuantise(parallel_, w.gate, frame.normed, index, rows, to.out);
      ParallelGateUpInt8(parallel_, w.gate, w.up, q, nullptr, rows, to.gate);
    }
  } else {
    const size_t inner = S(w.gate.rows);
    Product(w.gate, frame.normed, index, rows, to.gate, to.out);
    Product(w.up, frame.normed, index, rows, to.up, to.out);
    parallel_.For(rows, 4, [&](size_t begin, size_t end) {
      SiluMul(to.gate + begin * inner, to.up + begin * inner, (end - begin) * inner,
              to.gate + begin * inner);
    });
  }
  Product(w.down, to.gate, nullptr, rows, to.out, to.up);
}

void Stages::RunExpert(Frame& frame, const FrameJob& job, const FfnWeights& weights) const {
  const ModelConfig& c = model_.Config();
  const size_t hidden = S(c.hidden), inner = S(c.moe_intermediate), first = S(job.first);
  Ffn(weights, frame, frame.job_rows.data() + first, S(job.count),
      {frame.expert_gate + first * inner, frame.expert_up + first * inner,
       frame.expert_out + first * hidden});
}

void Stages::SharedFfn(Frame& frame, int32_t layer) const {
  const FfnWeights& w = model_.Layer(layer).ffn;
  if (w.gate.rows == 0 || !frame.AnyLive()) return;
  Ffn(w, frame, nullptr, frame.Rows(), {frame.ffn_gate, frame.ffn_up, frame.ffn_out});
}

void Stages::Combine(Frame& frame, int32_t layer) const {
  const ModelConfig& c = model_.Config();
  const size_t hidden = S(c.hidden), k = S(c.top_k);
  for (const FrameJob& job : frame.jobs) {
    if (!job.failed) continue;
    for (int32_t i = job.first; i < job.first + job.count; ++i) {
      const auto row = S(frame.job_rows[S(i)]);
      FrameSequence& sequence = frame.sequences[S(frame.rows[row].sequence)];
      if (!frame.rows[row].draft) {  // why a draft was rejected is never told
        sequence.error = job.error;
        sequence.failed = FailedRead::kExpert;
      }
      MarkFailed(frame, row, RowState::kReadFailed, layer);
    }
  }
  const bool sparse = c.Sparse(layer);
  const bool shared = model_.Layer(layer).ffn.gate.rows > 0;
  parallel_.For(frame.Rows(), 8, [&](size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) {
      if (frame.rows[r].state != RowState::kLive) continue;
      float* sum = frame.attention_out + r * hidden;  // free by now
      std::memset(sum, 0, hidden * sizeof(float));
      for (size_t j = 0; sparse && j < k; ++j) {
        AddScaled(frame.weights[r * k + j], frame.expert_out + S(frame.place[r * k + j]) * hidden,
                  hidden, sum);
      }
      if (shared) AddScaled(1.0f, frame.ffn_out + r * hidden, hidden, sum);
      AddScaled(1.0f, sum, hidden, frame.x + r * hidden);
    }
  });
  MarkNotFinite(frame, layer);
}

void Stages::FinalRows(Frame& frame) const {
  const bool mtp = frame.layer >= model_.Config().layers;
  NormRows(frame, frame.x, mtp ? model_.Mtp().head_norm : model_.FinalNorm(), frame.final);
  frame.head_rows.clear();
  for (size_t r = 0; r < frame.Rows(); ++r) {
    const FrameRow& row = frame.rows[r];
    if (row.wants_logits && row.state == RowState::kLive) {
      frame.head_rows.push_back(static_cast<uint32_t>(r));
    }
  }
}

void Stages::Draw(Frame& frame, std::span<const uint32_t> rows, LogitsSink& sink) const {
  const size_t vocab = S(model_.Config().vocab);
  parallel_.For(rows.size(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (frame.rows[rows[i]].state != RowState::kLive) continue;
      sink.Row(frame, rows[i], {frame.logits + i * vocab, vocab});
    }
  });
}

void Stages::Head(Frame& frame, LogitsSink& sink) const {
  COLIBRI_CHECK(!model_.StreamsHead());
  FinalRows(frame);
  const size_t hidden = frame.HiddenSize();
  const size_t block = S(std::min(FrameShape::kHeadRows, frame.shape.rows));
  std::span<const uint32_t> wanted = frame.head_rows;
  while (!wanted.empty()) {
    const std::span<const uint32_t> rows = wanted.first(std::min(block, wanted.size()));
    wanted = wanted.subspan(rows.size());
    // The rows' final vectors side by side; attention_out is free and wide enough.
    for (size_t i = 0; i < rows.size(); ++i) {
      std::memcpy(frame.attention_out + i * hidden, frame.final + rows[i] * hidden,
                  hidden * sizeof(float));
    }
    Product(model_.Head(), frame.attention_out, nullptr, rows.size(), frame.logits, frame.ffn_out);
    Draw(frame, rows, sink);
  }
}

void Stages::BeginHead(Frame& frame) const {
  COLIBRI_CHECK(frame.shape.streamed_head);
  FinalRows(frame);
  const size_t hidden = frame.HiddenSize(), rows = frame.head_rows.size();
  for (size_t i = 0; i < rows; ++i) {
    std::memcpy(frame.attention_out + i * hidden, frame.final + frame.head_rows[i] * hidden,
                hidden * sizeof(float));
  }
  frame.head8 = {};
  if (rows == 0 || !model_.Int8Activations() || !TakesInt8(model_.Head())) return;
  frame.head8 =
      ParallelQuantise(parallel_, model_.Head(), frame.attention_out, nullptr, rows, frame.ffn_out);
}

void Stages::HeadPart(Frame& frame, int32_t part) const {
  const PackedMatrix w = model_.HeadPart(part);
  const size_t vocab = S(model_.Config().vocab), rows = frame.head_rows.size();
  float* y = frame.logits + model_.HeadOutput(part);
  if (frame.head8.values != nullptr) {
    return ParallelMatmulInt8(parallel_, w, frame.head8, nullptr, rows, y, vocab);
  }
  ParallelMatmul(parallel_, w, frame.attention_out, rows, y, vocab);
}

void Stages::EndHead(Frame& frame, LogitsSink& sink) const { Draw(frame, frame.head_rows, sink); }

// Rows that go through the router together.
constexpr size_t kPredictRows = 16;

uint64_t Stages::PredictScratch(const ModelConfig& config) {
  return kPredictRows * (S(config.hidden) + S(config.experts)) + S(config.hidden) +
         S(config.experts) + 2 * S(config.top_k);
}

void Stages::Predict(const Frame& frame, int32_t layer, bool with_shared, std::span<float> scratch,
                     std::span<uint32_t> votes) const {
  const ModelConfig& c = model_.Config();
  const LayerWeights& w = model_.Layer(layer);
  const size_t hidden = S(c.hidden), experts = S(c.experts), k = S(c.top_k);
  float* sum = scratch.data();
  float* normed = sum + hidden;
  float* logits = normed + kPredictRows * hidden;
  float* choice = logits + kPredictRows * experts;
  float* weights = choice + experts;
  auto* chosen = reinterpret_cast<int32_t*>(weights + k);
  for (size_t r = 0; r < frame.Rows();) {
    size_t rows = 0;
    for (; rows < kPredictRows && r < frame.Rows(); ++r) {
      if (frame.rows[r].state != RowState::kLive) continue;
      const float* x = frame.x + r * hidden;
      if (with_shared) {
        std::memcpy(sum, x, hidden * sizeof(float));
        AddScaled(1.0f, frame.ffn_out + r * hidden, hidden, sum);
        x = sum;
      }
      RmsNorm(x, w.post_norm.data(), hidden, c.rms_eps, normed + rows++ * hidden);
    }
    Matmul(w.router, 0, c.experts, normed, hidden, rows, logits, experts);
    for (size_t m = 0; m < rows; ++m) {
      ChooseExperts(c, {logits + m * experts, experts}, w.router_bias, {choice, experts},
                    {chosen, k}, {weights, k});
      for (size_t j = 0; j < k; ++j) votes[S(chosen[j])] += static_cast<uint32_t>(k - j);
    }
  }
}

}  // namespace colibri
