// Attention of a layer: latent projections, keys, index sets, absorbed attention (model spec
// 3.2 - 3.5), and the rotary angles.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "io/check.h"
#include "kernels/kernels.h"
#include "runtime/index_select.h"
#include "runtime/stages.h"

namespace colibri {
namespace {

// Multiply-adds of one piece of a parallel loop: about 100 us of one core's f32 work, well above
// the microsecond a task costs and short enough that an arrived expert does not wait long.
constexpr uint64_t kPieceWork = uint64_t{1} << 21;
// Rows multiplied together by one call: their inputs stay in L2 while weights stream past.
constexpr size_t kRowBlock = 64;

size_t S(int32_t v) { return static_cast<size_t>(v); }

size_t Grain(uint64_t work_per_item) {
  return static_cast<size_t>(
      std::max<uint64_t>(1, kPieceWork / std::max<uint64_t>(1, work_per_item)));
}

// Rows of one sequence that a kernel takes together, with the number of pieces they fall into.
template <class Row>
struct RowGroup {
  std::vector<Row> rows;
  size_t sequence = 0;
  size_t pieces = 0;
};

// Runs body(group, begin, end) over the pieces of all groups, neighbours of a group at once.
// `work`: multiply-adds of all of them.
template <class Row, class Body>
void ForEachPiece(Parallel& parallel, const std::vector<RowGroup<Row>>& groups, uint64_t work,
                  const Body& body) {
  size_t all = 0;
  for (const RowGroup<Row>& group : groups) all += group.pieces;
  if (all == 0) return;
  parallel.For(all, Grain(work / all), [&](size_t begin, size_t end) {
    size_t first = 0;
    for (const RowGroup<Row>& group : groups) {
      const size_t from = std::max(begin, first), to = std::min(end, first + group.pieces);
      if (from < to) body(group, from - first, to - first);
      first += group.pieces;
    }
  });
}

// Page pointers of a frame's sequences in one layer, as kernels walk them.
class PagePointers {
 public:
  template <class PageAt>
  PagePointers(const Frame& frame, const PageAt& page_at) {
    for (const FrameSequence& s : frame.sequences) {
      first_.push_back(pointers_.size());
      for (size_t i = 0; i < s.pages->ids.size(); ++i) {
        pointers_.push_back(page_at(frame.Place(s, i)));
      }
    }
  }
  const std::byte* const* Of(size_t sequence) const { return pointers_.data() + first_[sequence]; }

 private:
  std::vector<const std::byte*> pointers_;
  std::vector<size_t> first_;
};

}  // namespace

PackedMatrix RowsOf(const PackedMatrix& w, int64_t first, int32_t count) {
  PackedMatrix part = w;
  part.rows = count;
  part.data += RowBytes(w.format, w.cols) * static_cast<uint64_t>(first);
  if (part.scales != nullptr) {
    part.scales += static_cast<uint64_t>(ScalesPerRow(w.format, w.cols, w.group) * first) * 4;
  }
  return part;
}

void ParallelMatmul(Parallel& parallel, const PackedMatrix& w, const float* x, size_t rows,
                    float* y, size_t stride) {
  const size_t in = S(w.cols), out = S(w.rows);
  if (stride == 0) stride = out;
  for (size_t first = 0; first < rows; first += kRowBlock) {
    const size_t n = std::min(kRowBlock, rows - first);
    // Pieces of whole groups of eight outputs, which the kernels take at once.
    const size_t groups = (out + 7) / 8;
    parallel.For(groups, Grain(8 * in * n), [&](size_t begin, size_t end) {
      const auto o = static_cast<int32_t>(begin * 8);
      const auto last = static_cast<int32_t>(std::min(out, end * 8));
      Matmul(w, o, last, x + first * in, in, n, y + first * stride, stride);
    });
  }
}

void RopeFrequencies(float theta, int32_t width, float* inv_freq) {
  for (int32_t j = 0; j < width / 2; ++j) {
    // The power is rounded to f32 before the division: powf of glibc is correctly rounded in all
    // but a few cases in 10^8, a double's power rounded once always.
    const auto power = static_cast<float>(
        std::pow(static_cast<double>(theta),
                 static_cast<double>(2.0f * static_cast<float>(j) / static_cast<float>(width))));
    inv_freq[j] = 1.0f / power;
  }
}

void RopeAngles(float theta, int32_t width, int32_t position, float* cos, float* sin) {
  RopeFrequencies(theta, width, cos);
  for (int32_t j = 0; j < width / 2; ++j) {
    const float angle = static_cast<float>(position) * cos[j];
    cos[j] = std::cos(angle);
    sin[j] = std::sin(angle);
  }
}

void Stages::Angles(Frame& frame) const {
  const ModelConfig& c = model_.Config();
  const size_t pairs = S(c.rope / 2);
  parallel_.For(frame.Rows(), 16, [&](size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) {
      RopeAngles(c.rope_theta, c.rope, frame.rows[r].position, frame.rope_cos + r * pairs,
                 frame.rope_sin + r * pairs);
    }
  });
}

void Stages::NormRows(const Frame& frame, const float* x, const std::vector<float>& weight,
                      float* out) const {
  const size_t n = weight.size();
  parallel_.For(frame.Rows(), Grain(4 * n), [&](size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) {
      RmsNorm(x + r * n, weight.data(), n, model_.Config().rms_eps, out + r * n);
    }
  });
}

void Stages::MatmulRows(const PackedMatrix& w, const float* x, size_t rows, float* out) const {
  ParallelMatmul(parallel_, w, x, rows, out);
}

void Stages::Queries(Frame& frame, const LayerWeights& w) const {
  const ModelConfig& c = model_.Config();
  const size_t rows = frame.Rows(), heads = S(c.heads), lora = S(c.q_lora);
  const size_t nope = S(c.nope), rope = S(c.rope), head = S(c.QkHead()), latent = S(c.kv_lora);
  WideProduct(w.q_a, frame.normed, rows, frame.q_latent, &frame.normed8, frame.normed8_memory);
  parallel_.For(rows, Grain(4 * lora), [&](size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) {
      float* q = frame.q_latent + r * lora;
      RmsNorm(q, w.q_a_norm.data(), lora, c.latent_eps, q);
    }
  });
  WideProduct(w.q_b, frame.q_latent, rows, frame.q, &frame.q_latent8, frame.q_latent8_memory);
  parallel_.For(rows, Grain(heads * rope), [&](size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) {
      for (size_t h = 0; h < heads; ++h) {
        float* to = frame.q_rope + (r * heads + h) * rope;
        std::memcpy(to, frame.q + (r * heads + h) * head + nope, rope * sizeof(float));
        Rope(to, frame.rope_cos + r * rope / 2, frame.rope_sin + r * rope / 2, rope / 2);
      }
    }
  });
  // Absorption: the query meets the latent through the K half of kv_b, head by head.
  const int64_t per_head = c.nope + c.v_head;
  parallel_.For(heads, Grain(rows * nope * latent), [&](size_t begin, size_t end) {
    for (size_t h = begin; h < end; ++h) {
      const PackedMatrix k = RowsOf(w.kv_b, static_cast<int64_t>(h) * per_head, c.nope);
      MatmulTransposed(k, 0, c.nope, frame.q + h * head, heads * head, rows,
                       frame.q_absorbed + h * latent, heads * latent);
    }
  });
}

void Stages::StoreKeys(Frame& frame, const LayerWeights& w, int32_t layer) const {
  const ModelConfig& c = model_.Config();
  const size_t rows = frame.Rows(), width = S(c.KvWidth()), latent = S(c.kv_lora);
  const size_t rope = S(c.rope), dim = S(c.index_dim);
  const KvType type = kv_.Shape().type;
  WideProduct(w.kv_a, frame.normed, rows, frame.kv, &frame.normed8, frame.normed8_memory);
  if (w.indexer)
    WideProduct(w.indexer->wk, frame.normed, rows, frame.index_k, &frame.normed8,
                frame.normed8_memory);
  parallel_.For(rows, Grain(4 * width), [&](size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) {
      const FrameRow& row = frame.rows[r];
      const KvPlace at =
          frame.Place(frame.sequences[S(row.sequence)], S(row.position / kv_.Shape().page_tokens));
      const float* cos = frame.rope_cos + r * rope / 2;
      const float* sin = frame.rope_sin + r * rope / 2;
      float* kv = frame.kv + r * width;
      RmsNorm(kv, w.kv_a_norm.data(), latent, c.latent_eps, kv);
      Rope(kv + latent, cos, sin, rope / 2);
      StoreKv(kv, width, type, kv_.Latents(layer, frame.view, at) + kv_.LatentOffset(row.position));
      if (!w.indexer) continue;
      // True LayerNorm with its own eps; rope on the first values, unlike attention.
      constexpr float kIndexNormEps = 1e-6f;
      float* k = frame.index_k + r * dim;
      LayerNorm(k, w.indexer->k_norm_weight.data(), w.indexer->k_norm_bias.data(), dim,
                kIndexNormEps, k);
      Rope(k, cos, sin, rope / 2);
      StoreKv(k, dim, type,
              kv_.IndexKeys(layer, frame.view, at) + kv_.IndexKeyOffset(row.position));
    }
  });
}

void Stages::MtpKeys(Frame& frame, std::span<const float* const> hidden) const {
  MtpInput(frame, hidden);
  const LayerWeights& w = model_.Layer(frame.layer);
  NormRows(frame, frame.x, w.input_norm, frame.normed);
  frame.normed8 = {};
  StoreKeys(frame, w, frame.layer);
}

void Stages::ScoreRows(Frame& frame, std::span<const int32_t> rows, int32_t layer) const {
  const ModelConfig& c = model_.Config();
  const size_t query = S(c.index_heads) * S(c.index_dim), context = S(frame.shape.context);
  const KvShape& shape = kv_.Shape();
  const PagePointers pages(frame, [&](KvPlace at) { return kv_.IndexKeys(layer, frame.view, at); });
  // Pieces are blocks of positions, so that one row of a long context fills all threads too.
  std::vector<RowGroup<IndexRow>> groups;
  uint64_t work = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const size_t r = S(rows[i]), sequence = S(frame.rows[r].sequence);
    const int32_t count = frame.rows[r].position + 1;
    if (groups.empty() || groups.back().sequence != sequence ||
        groups.back().rows.size() == kIndexPass) {
      groups.push_back({{}, sequence, 0});
    }
    groups.back().rows.push_back({frame.index_q + r * query, frame.index_w + r * S(c.index_heads),
                                  count, frame.index_scores + i * context});
    groups.back().pieces = S((count + kAttentionBlock - 1) / kAttentionBlock);
    work += S(count) * query;
  }
  ForEachPiece(parallel_, groups, work,
               [&](const RowGroup<IndexRow>& group, size_t begin, size_t end) {
                 const IndexScoring a{
                     {pages.Of(group.sequence), shape.page_tokens, shape.index_width, shape.type},
                     c.index_heads,
                     1.0f / std::sqrt(static_cast<float>(c.index_dim)),
                     group.rows.data(),
                     group.rows.size(),
                     frame.KernelScratch(parallel_.ThreadIndex())};
                 IndexScores(a, static_cast<int32_t>(begin) * kAttentionBlock,
                             static_cast<int32_t>(end) * kAttentionBlock);
               });
  parallel_.For(rows.size(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const size_t r = S(rows[i]);
      const std::span<const float> scores(frame.index_scores + i * context,
                                          S(frame.rows[r].position + 1));
      const int32_t chosen =
          SelectPositions(scores, c.index_top_k, {frame.IndexList(r), S(c.index_top_k)});
      frame.index_sets[r] = {chosen, true};
    }
  });
}

void Stages::ChooseIndexSets(Frame& frame, const LayerWeights& w, int32_t layer) const {
  const ModelConfig& c = model_.Config();
  const size_t rows = frame.Rows(), heads = S(c.index_heads), dim = S(c.index_dim);
  if (!model_.HasIndexer()) {
    for (size_t r = 0; r < rows; ++r) {
      if (!frame.rows[r].frozen_index) frame.index_sets[r] = {frame.rows[r].position + 1, false};
    }
    return;
  }
  if (!w.indexer) return;  // a shared layer reuses what the last full layer left
  bool scored = false;
  for (size_t r = 0; r < rows; ++r) {
    if (frame.rows[r].frozen_index) continue;
    frame.index_sets[r] = {frame.rows[r].position + 1, false};
    scored |= frame.rows[r].position + 1 > c.index_top_k;
  }
  if (!scored) return;  // everything is selected
  WideProduct(w.indexer->wq_b, frame.q_latent, rows, frame.index_q, &frame.q_latent8,
              frame.q_latent8_memory);
  MatmulRows(w.indexer->weights_proj, frame.normed, rows, frame.index_w);
  const float head_scale = 1.0f / std::sqrt(static_cast<float>(c.index_heads));
  const size_t pairs = S(c.rope / 2);
  parallel_.For(rows, 1, [&](size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) {
      for (size_t h = 0; h < heads; ++h) {
        Rope(frame.index_q + (r * heads + h) * dim, frame.rope_cos + r * pairs,
             frame.rope_sin + r * pairs, pairs);
        frame.index_w[r * heads + h] *= head_scale;
      }
    }
  });
  At(StagePoint::kIndexQueries, frame, layer);
  std::vector<int32_t> wanted;
  for (size_t r = 0; r < rows; ++r) {
    const FrameRow& row = frame.rows[r];
    if (!row.frozen_index && row.state == RowState::kLive && row.position + 1 > c.index_top_k) {
      wanted.push_back(static_cast<int32_t>(r));
    }
  }
  const size_t together = S(frame.shape.IndexRows());
  for (size_t i = 0; i < wanted.size(); i += together) {
    ScoreRows(frame, std::span(wanted).subspan(i, std::min(together, wanted.size() - i)), layer);
  }
}

void Stages::Attend(Frame& frame, int32_t layer) const {
  const ModelConfig& c = model_.Config();
  const size_t heads = S(c.heads), latent = S(c.kv_lora), rope = S(c.rope);
  const KvShape& shape = kv_.Shape();
  const PagePointers pages(frame, [&](KvPlace at) { return kv_.Latents(layer, frame.view, at); });
  // Eight rows with sixteen heads each, the lanes of the softmax, are one pass of the kernel. Rows
  // with lists share nothing: each is a group, so that a thread's share of it is many heads.
  constexpr size_t kPieceHeads = 16;
  constexpr size_t kGroupRows = kAttentionPass / kPieceHeads;
  std::vector<RowGroup<AttentionRow>> groups;
  uint64_t work = 0;
  for (size_t r = 0; r < frame.Rows(); ++r) {
    if (frame.rows[r].state != RowState::kLive) continue;
    const size_t sequence = S(frame.rows[r].sequence);
    const IndexSet& set = frame.index_sets[r];
    if (groups.empty() || groups.back().sequence != sequence || set.listed ||
        groups.back().rows.back().positions != nullptr || groups.back().rows.size() == kGroupRows) {
      groups.push_back({{}, sequence, 0});
    }
    groups.back().rows.push_back({frame.q_absorbed + r * heads * latent,
                                  frame.q_rope + r * heads * rope,
                                  set.listed ? frame.IndexList(r) : nullptr, set.count,
                                  frame.attended + r * heads * latent});
    work += S(set.count) * heads * (2 * latent + rope);
  }
  // Where that leaves threads without work, as with a single row, fewer heads: each piece decodes
  // the latents for itself (64 heads over 4096 positions took 5.8 ms of one thread in one piece,
  // 6.7, 7.4 and 9.0 in pieces of 16, 8 and 4).
  size_t piece = kPieceHeads;
  const auto pieces = [&] { return (heads + piece - 1) / piece; };
  while (piece > 4 && groups.size() * pieces() < S(parallel_.Threads())) piece /= 2;
  for (RowGroup<AttentionRow>& group : groups) group.pieces = pieces();
  ForEachPiece(parallel_, groups, work,
               [&](const RowGroup<AttentionRow>& group, size_t begin, size_t end) {
                 const LatentAttention a{
                     {pages.Of(group.sequence), shape.page_tokens, shape.latent_width, shape.type},
                     c.kv_lora,
                     c.rope,
                     1.0f / std::sqrt(static_cast<float>(c.QkHead())),
                     group.rows.data(),
                     group.rows.size(),
                     frame.KernelScratch(parallel_.ThreadIndex())};
                 AttendLatents(a, static_cast<int32_t>(begin * kPieceHeads),
                               static_cast<int32_t>(std::min(heads, end * kPieceHeads)));
               });
}

void Stages::MarkNotFinite(Frame& frame, int32_t layer) const {
  const size_t hidden = S(model_.Config().hidden);
  for (size_t r = 0; r < frame.Rows(); ++r) {
    if (frame.rows[r].state == RowState::kLive && !AllFinite(frame.x + r * hidden, hidden)) {
      MarkFailed(frame, r, RowState::kNotFinite, layer);
    }
  }
}

void Stages::Attention(Frame& frame, int32_t layer) const {
  const ModelConfig& c = model_.Config();
  const LayerWeights& w = model_.Layer(layer);
  const size_t rows = frame.Rows(), heads = S(c.heads), latent = S(c.kv_lora), v = S(c.v_head);
  if (!frame.AnyLive()) return;
  At(StagePoint::kLayerStart, frame, layer);
  NormRows(frame, frame.x, w.input_norm, frame.normed);
  frame.normed8 = frame.q_latent8 = {};
  Queries(frame, w);
  StoreKeys(frame, w, layer);
  ChooseIndexSets(frame, w, layer);
  At(StagePoint::kIndexSets, frame, layer);
  Attend(frame, layer);
  // Each head's values: the V half of kv_b applied to what the head gathered.
  const int64_t per_head = c.nope + c.v_head;
  parallel_.For(heads, Grain(rows * v * latent), [&](size_t begin, size_t end) {
    for (size_t h = begin; h < end; ++h) {
      const PackedMatrix part =
          RowsOf(w.kv_b, static_cast<int64_t>(h) * per_head + c.nope, c.v_head);
      Matmul(part, 0, c.v_head, frame.attended + h * latent, heads * latent, rows,
             frame.values + h * v, heads * v);
    }
  });
  Product(w.o, frame.values, nullptr, rows, frame.attention_out, frame.attended);
  At(StagePoint::kAttention, frame, layer);
  const size_t hidden = S(c.hidden);
  parallel_.For(rows, Grain(hidden), [&](size_t begin, size_t end) {
    AddScaled(1.0f, frame.attention_out + begin * hidden, (end - begin) * hidden,
              frame.x + begin * hidden);
  });
  MarkNotFinite(frame, layer);
}

}  // namespace colibri
