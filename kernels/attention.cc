// Attention over stored latents and the index scores that choose positions. A score's sum runs over
// the stored vector in steps of sixteen, one accumulator a (head, position); a weighted sum takes
// positions one at a time. Register blocks and pages therefore never show in the bits, the softmax
// blocks of kAttentionBlock absolute positions do.
// Owns no memory: scratch is on the stack (about 20 KB). Threads: any.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention.cc"
#include "kernels/targets.h"  // first

#include "hwy/contrib/math/math-inl.h"
#include "kernels/vector-inl.h"
#include "kernels/weights-inl.h"

#include <algorithm>
#include <limits>

#include "kernels/dispatch.h"
#include "kernels/kernels.h"

COLIBRI_BEFORE_NAMESPACE();
namespace colibri {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

using scalar::AttendLatents;
using scalar::IndexScores;

#else

constexpr size_t kBlock = kAttentionBlock;
static_assert(kBlock % kStep == 0);
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Heads scored together, each with four positions at once.
#if HWY_MAX_BYTES == 64
constexpr size_t kScoreHeads = 4;
#elif HWY_MAX_BYTES == 32
constexpr size_t kScoreHeads = 2;
#else
constexpr size_t kScoreHeads = 1;
#endif
constexpr size_t kScorePositions = 4;

// Heads of which one pass over a block's latents takes care; their sums (64 x 512 floats at real
// size) and the block stay in the second-level cache.
constexpr size_t kPassHeads = 64;

// The stored vectors of up to kBlock positions. After the last, it is repeated up to a multiple of
// kScorePositions.
struct StoredBlock {
  const std::byte* vectors[kBlock];
  size_t count = 0;

  HWY_INLINE void Add(const KvView& kv, int64_t position) {
    const int64_t page = position / kv.page_tokens;
    const size_t vector = static_cast<size_t>(position - page * kv.page_tokens);
    vectors[count++] = kv.pages[page] + vector * static_cast<size_t>(kv.width) * KvBytes(kv.type);
  }

  HWY_INLINE void Pad() {
    for (size_t i = count; i % kScorePositions != 0; ++i) vectors[i] = vectors[count - 1];
  }
};

// Up to sixteen values of a stored vector from value i on, zeros where n < 16.
template <KvType kType>
HWY_INLINE Vec16 LoadStored(const std::byte* vector, size_t i, size_t n) {
  const std::byte* from = vector + i * KvBytes(kType);
  std::byte padded[kStep * KvBytes(kType)];
  if (n < kStep) {
    std::memset(padded, 0, sizeof(padded));
    std::memcpy(padded, from, n * KvBytes(kType));
    from = padded;
  }
  if constexpr (kType == KvType::kF32) {
    return Load16(reinterpret_cast<const float*>(from));
  } else {
    return DecodeBF16(from);
  }
}

// sums[h][p] += q[h] . values [begin, begin + n) of vector p.
template <KvType kType, size_t kHeads>
HWY_INLINE void AddDots(const float* q, size_t q_stride, const std::byte* const* vectors,
                        size_t begin, size_t n, Vec16 (&sums)[kHeads][kScorePositions]) {
  for (size_t i = 0; i < n; i += kStep) {
    Vec16 qs[kHeads];
    for (size_t h = 0; h < kHeads; ++h) qs[h] = LoadUpTo(q + h * q_stride + i, n - i);
    for (size_t p = 0; p < kScorePositions; ++p) {
      const Vec16 c = LoadStored<kType>(vectors[p], begin + i, n - i);
      for (size_t h = 0; h < kHeads; ++h) MulAdd16(qs[h], c, sums[h][p]);
    }
  }
}

// A query over two stretches of the stored vector, one of which may be empty.
struct Query {
  const float* head;  // [heads][n]
  size_t n;
  const float* tail;  // [heads][tail_n], for the values after the first n
  size_t tail_n;
};

// scores[h][p] = (q[h] . vector p) * scale for kHeads heads and all positions of the block.
template <KvType kType, size_t kHeads>
HWY_INLINE void Score(const Query& q, const StoredBlock& block, float scale,
                      float (*scores)[kBlock]) {
  const hn::Vec<F32x4> factor = hn::Set(F32x4(), scale);
  for (size_t p = 0; p < block.count; p += kScorePositions) {
    Vec16 sums[kHeads][kScorePositions];
    for (auto& row : sums) {
      for (Vec16& sum : row) sum = Set16(0);
    }
    AddDots<kType>(q.head, q.n, block.vectors + p, 0, q.n, sums);
    AddDots<kType>(q.tail, q.tail_n, block.vectors + p, q.n, q.tail_n, sums);
    for (size_t h = 0; h < kHeads; ++h) {
      hn::StoreU(hn::Mul(SumLanes4(sums[h]), factor), F32x4(), scores[h] + p);
    }
  }
}

// exp that keeps NaN, which Highway's turns to 0 (and is undefined for on the portable target): a
// broken score must reach the output.
HWY_INLINE V ExpOf(V x) {
  const auto is_number = hn::Eq(x, x);
  return hn::IfThenElse(is_number, hn::Exp(F32(), hn::IfThenElseZero(is_number, x)), x);
}

// The running softmax of one head.
struct Softmax {
  float max = kMinusInfinity;
  float sum = 0;

  // Turns the scores of a block into weights and returns what earlier weights shrink by. Scores
  // beyond count may be anything up to a multiple of kScorePositions.
  HWY_INLINE float AddBlock(float* scores, size_t count) {
    const F32 d;
    std::fill(scores + count, scores + kBlock, kMinusInfinity);
    float block_max = scores[0];
    for (size_t i = 1; i < count; ++i) block_max = std::max(block_max, scores[i]);
    const float new_max = std::max(max, block_max);
    for (size_t i = 0; i < count; i += kLanes) {
      hn::StoreU(ExpOf(hn::Sub(hn::LoadU(d, scores + i), hn::Set(d, new_max))), d, scores + i);
    }
    const float shrink = hn::GetLane(ExpOf(hn::Set(d, max - new_max)));
    max = new_max;
    sum *= shrink;
    for (size_t i = 0; i < count; ++i) sum += scores[i];
    return shrink;
  }
};

// out[h] = out[h] * shrink[h] + the weighted sum of the block's vectors, for values
// [begin, begin + kSteps * 16) of the latent, of which n are left. out is [heads][latent].
template <KvType kType, size_t kHeads, size_t kSteps>
HWY_INLINE void AddWeighted(const StoredBlock& block, const float (*weights)[kBlock],
                            const float* shrink, size_t begin, size_t n, size_t latent,
                            float* out) {
  Vec16 sums[kHeads][kSteps];
  for (size_t h = 0; h < kHeads; ++h) {
    for (size_t s = 0; s < kSteps; ++s) {
      const float* from = out + h * latent + begin + s * kStep;
      sums[h][s] = Mul16(LoadUpTo(from, n - s * kStep), Set16(shrink[h]));
    }
  }
  for (size_t p = 0; p < block.count; ++p) {
    Vec16 c[kSteps];
    for (size_t s = 0; s < kSteps; ++s) {
      c[s] = LoadStored<kType>(block.vectors[p], begin + s * kStep, n - s * kStep);
    }
    for (size_t h = 0; h < kHeads; ++h) {
      const Vec16 weight = Set16(weights[h][p]);
      for (size_t s = 0; s < kSteps; ++s) MulAdd16(weight, c[s], sums[h][s]);
    }
  }
  for (size_t h = 0; h < kHeads; ++h) {
    for (size_t s = 0; s < kSteps; ++s) {
      StoreUpTo(sums[h][s], n - s * kStep, out + h * latent + begin + s * kStep);
    }
  }
}

// One block for kHeads heads from `head` on.
template <KvType kType, size_t kHeads>
HWY_NOINLINE void AttendBlock(const LatentAttention& a, size_t head, const StoredBlock& block,
                              Softmax* softmax) {
  const size_t latent = static_cast<size_t>(a.latent);
  const size_t rope = static_cast<size_t>(a.rope);
  const Query q{a.q_latent + head * latent, latent, a.q_rope + head * rope, rope};
  alignas(64) float weights[kHeads][kBlock];
  Score<kType, kHeads>(q, block, a.scale, weights);
  float shrink[kHeads];
  for (size_t h = 0; h < kHeads; ++h) shrink[h] = softmax[h].AddBlock(weights[h], block.count);
  constexpr size_t kSteps = kBlockOutputs;
  float* out = a.out + head * latent;
  size_t i = 0;
  for (; i + kSteps * kStep <= latent; i += kSteps * kStep) {
    AddWeighted<kType, kHeads, kSteps>(block, weights, shrink, i, latent - i, latent, out);
  }
  for (; i < latent; i += kStep) {
    AddWeighted<kType, kHeads, 1>(block, weights, shrink, i, latent - i, latent, out);
  }
}

// Heads [first, last), at most kPassHeads, over all positions.
template <KvType kType>
HWY_INLINE void AttendHeads(const LatentAttention& a, size_t first, size_t last) {
  const size_t latent = static_cast<size_t>(a.latent);
  std::fill(a.out + first * latent, a.out + last * latent, 0.0f);
  Softmax softmax[kPassHeads];
  for (int32_t i = 0; i < a.count;) {
    StoredBlock block;
    const int32_t start = a.positions == nullptr ? i : a.positions[i];
    const int32_t number = start / kAttentionBlock;
    for (; i < a.count; ++i) {
      const int32_t position = a.positions == nullptr ? i : a.positions[i];
      if (position / kAttentionBlock != number) break;
      block.Add(a.kv, position);
    }
    block.Pad();
    size_t h = first;
    for (; h + kScoreHeads <= last; h += kScoreHeads) {
      AttendBlock<kType, kScoreHeads>(a, h, block, softmax + (h - first));
    }
    for (; h < last; ++h) AttendBlock<kType, 1>(a, h, block, softmax + (h - first));
  }
  if (a.count == 0) return;
  for (size_t h = first; h < last; ++h) {
    const V sum = hn::Set(F32(), softmax[h - first].sum);
    for (size_t i = 0; i < latent; i += kStep) {
      Vec16 v = LoadUpTo(a.out + h * latent + i, latent - i);
      for (V& part : v.part) part = hn::Div(part, sum);
      StoreUpTo(v, latent - i, a.out + h * latent + i);
    }
  }
}

void AttendLatents(const LatentAttention& a, int32_t first_head, int32_t last_head) {
  const size_t last = static_cast<size_t>(last_head);
  for (size_t h = static_cast<size_t>(first_head); h < last; h += kPassHeads) {
    const size_t end = std::min(last, h + kPassHeads);
    if (a.kv.type == KvType::kF32) {
      AttendHeads<KvType::kF32>(a, h, end);
    } else {
      AttendHeads<KvType::kBF16>(a, h, end);
    }
  }
}

// totals[p] += w[h] * max(0, score) for kHeads heads, ascending. Not hn::Max, which may hide NaN.
template <size_t kHeads>
HWY_INLINE void AddIndexHeads(const float (*scores)[kBlock], const float* w, float* totals) {
  const F32 d;
  for (size_t i = 0; i < kBlock; i += kLanes) {
    V total = hn::LoadU(d, totals + i);
    for (size_t h = 0; h < kHeads; ++h) {
      const V score = hn::LoadU(d, scores[h] + i);
      const V positive = hn::IfThenElse(hn::Lt(score, hn::Zero(d)), hn::Zero(d), score);
      total = hn::MulAdd(hn::Set(d, w[h]), positive, total);
    }
    hn::StoreU(total, d, totals + i);
  }
}

template <KvType kType>
HWY_INLINE void ScoreIndexBlock(const StoredBlock& block, size_t heads, size_t width,
                                const float* q, const float* w, float scale, float* totals) {
  alignas(64) float scores[kScoreHeads][kBlock] = {};
  size_t h = 0;
  for (; h + kScoreHeads <= heads; h += kScoreHeads) {
    Score<kType, kScoreHeads>({q + h * width, width, nullptr, 0}, block, scale, scores);
    AddIndexHeads<kScoreHeads>(scores, w + h, totals);
  }
  for (; h < heads; ++h) {
    Score<kType, 1>({q + h * width, width, nullptr, 0}, block, scale, scores);
    AddIndexHeads<1>(scores, w + h, totals);
  }
}

void IndexScores(const KvView& keys, int32_t heads, const float* q, const float* w, float scale,
                 int32_t first, int32_t last, float* scores) {
  const size_t width = static_cast<size_t>(keys.width);
  const size_t head_count = static_cast<size_t>(heads);
  for (int64_t begin = first; begin < last; begin += kAttentionBlock) {
    const int64_t end = std::min<int64_t>(last, begin + kAttentionBlock);
    StoredBlock block;
    for (int64_t p = begin; p < end; ++p) block.Add(keys, p);
    block.Pad();
    alignas(64) float totals[kBlock] = {};
    if (keys.type == KvType::kF32) {
      ScoreIndexBlock<KvType::kF32>(block, head_count, width, q, w, scale, totals);
    } else {
      ScoreIndexBlock<KvType::kBF16>(block, head_count, width, q, w, scale, totals);
    }
    std::memcpy(scores + (begin - first), totals, block.count * sizeof(float));
  }
}

#endif  // HWY_TARGET == HWY_SCALAR

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace colibri
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace colibri {

HWY_EXPORT(IndexScores);
HWY_EXPORT(AttendLatents);

void IndexScores(const KvView& keys, int32_t heads, const float* q, const float* w, float scale,
                 int32_t first, int32_t last, float* scores) {
  COLIBRI_DISPATCH(IndexScores)(keys, heads, q, w, scale, first, last, scores);
}

void AttendLatents(const LatentAttention& a, int32_t first_head, int32_t last_head) {
  COLIBRI_DISPATCH(AttendLatents)(a, first_head, last_head);
}

}  // namespace colibri
#endif  // HWY_ONCE
