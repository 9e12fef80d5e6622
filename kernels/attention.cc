// Attention over stored latents and the index scores that choose positions. A block of stored
// vectors is decoded once, into scratch of the caller, for all rows and heads of a pass; its
// products with a pass's queries then run in register blocks of four by four vectors. A score's sum
// runs over the vector in steps of sixteen, one accumulator a (head, position); a weighted sum
// takes positions one at a time. Register blocks, passes and pages therefore never show in the
// bits, the softmax blocks of kAttentionBlock absolute positions do.
// Owns no memory; 9 KB of stack. Threads: any.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention.cc"
#include "kernels/targets.h"  // first

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
// Vectors on each side of a register block of products; counts are padded to it.
constexpr size_t kSide = 4;
// Of one side, those whose sums are in registers at once.
#if HWY_MAX_BYTES == 64 || HWY_ARCH_ARM_A64
constexpr size_t kRows = 4;  // 32 registers
#else
constexpr size_t kRows = 2;
#endif
// Heads of a row whose softmax runs in the lanes of a Vec16.
constexpr size_t kUnit = kStep;
static_assert(kBlock % kUnit == 0 && kUnit % kSide == 0);
constexpr size_t kPassUnits = kAttentionPass / kUnit;

constexpr size_t Padded(size_t n, size_t step) { return (n + step - 1) / step * step; }

float* Aligned(float* scratch) {
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) & ~uintptr_t{63});
}

template <KvType kType>
HWY_INLINE Vec16 LoadStored(const std::byte* from) {
  if constexpr (kType == KvType::kF32) {
    return Load16(reinterpret_cast<const float*>(from));
  } else {
    return DecodeBF16(from);
  }
}

// The n values at `from` as floats, then zeros up to a multiple of sixteen.
template <KvType kType>
HWY_INLINE void Decode(const std::byte* from, size_t n, float* to) {
  constexpr size_t kBytes = KvBytes(kType);
  size_t i = 0;
  for (; i + kStep <= n; i += kStep) Store16(LoadStored<kType>(from + i * kBytes), to + i);
  if (i == n) return;
  std::byte last[kStep * kBytes] = {};
  std::memcpy(last, from + i * kBytes, (n - i) * kBytes);
  Store16(LoadStored<kType>(last), to + i);
}

HWY_INLINE void CopyPadded(const float* from, size_t n, float* to) {
  Decode<KvType::kF32>(reinterpret_cast<const std::byte*>(from), n, to);
}

// A stored vector of two stretches of `first` and `second` values, each padded on its own.
HWY_INLINE void DecodeVector(const KvView& kv, int32_t position, size_t first, size_t second,
                             float* to) {
  const int32_t page = position / kv.page_tokens;
  const size_t vector = static_cast<size_t>(position - page * kv.page_tokens);
  const size_t bytes = KvBytes(kv.type);
  const std::byte* from = kv.pages[page] + vector * static_cast<size_t>(kv.width) * bytes;
  float* to_second = to + Padded(first, kStep);
  if (kv.type == KvType::kF32) {
    Decode<KvType::kF32>(from, first, to);
    Decode<KvType::kF32>(from + first * bytes, second, to_second);
  } else {
    Decode<KvType::kBF16>(from, first, to);
    Decode<KvType::kBF16>(from + first * bytes, second, to_second);
  }
}

// out[i][j] = (a[i] . b[j]) * scale for kSide vectors each, `stride` floats from one to the next.
// Lanes are separate sums, so registers narrower than sixteen floats take one part after another.
HWY_INLINE void Products(const float* a, const float* b, size_t stride, float scale, float* out,
                         size_t out_stride) {
  const F32 d;
  Vec16 sums[kSide][kSide];
  for (size_t part = 0; part < kParts; ++part) {
    for (size_t first = 0; first < kSide; first += kRows) {
      V s[kRows][kSide];
      for (auto& row : s) {
        for (V& sum : row) sum = hn::Zero(d);
      }
      for (size_t i = part * kLanes; i < stride; i += kStep) {
        V bs[kSide];
        for (size_t j = 0; j < kSide; ++j) bs[j] = hn::Load(d, b + j * stride + i);
        for (size_t k = 0; k < kRows; ++k) {
          const V as = hn::Load(d, a + (first + k) * stride + i);
          for (size_t j = 0; j < kSide; ++j) s[k][j] = hn::MulAdd(as, bs[j], s[k][j]);
        }
      }
      for (size_t k = 0; k < kRows; ++k) {
        for (size_t j = 0; j < kSide; ++j) sums[first + k][j].part[part] = s[k][j];
      }
    }
  }
  const hn::Vec<F32x4> factor = hn::Set(F32x4(), scale);
  for (size_t k = 0; k < kSide; ++k) {
    hn::StoreU(hn::Mul(SumLanes4(sums[k]), factor), F32x4(), out + k * out_stride);
  }
}

// scalar.cc says how and why.
HWY_INLINE V ExpNegative(V x) {
  const F32 d;
  const I32 di;
  const V magic = hn::Set(d, 0x1.8p23f);
  const V low = hn::Set(d, -104.0f);
  x = hn::IfThenElse(hn::Lt(x, low), low, x);
  const V shifted = hn::MulAdd(x, hn::Set(d, 0x1.715476p0f), magic);
  const V n = hn::Sub(shifted, magic);
  const V rest =
      hn::NegMulAdd(n, hn::Set(d, -0x1.05c61p-29f), hn::NegMulAdd(n, hn::Set(d, 0x1.62e43p-1f), x));
  V y = hn::Set(d, 1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    y = hn::MulAdd(y, rest, hn::Set(d, c));
  }
  const auto exponent = hn::Sub(hn::BitCast(di, shifted), hn::BitCast(di, magic));
  const auto half = hn::ShiftRight<1>(exponent);
  const auto bias = hn::Set(di, 127);
  const V power = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const V rest_power = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(exponent, half), bias)));
  return hn::Mul(hn::Mul(y, power), rest_power);
}

// Up to kBlock decoded vectors in ascending order, cut where a softmax block of absolute positions
// ends.
struct Tile {
  float* vectors;
  size_t count = 0;
  size_t cuts = 0;
  size_t cut[kBlock];  // ends of the pieces, the last is `count`
};

// Up to kUnit heads of one row with their queries, running sums and softmax state.
struct Unit {
  const AttentionRow* row;
  size_t first_head;
  size_t heads;
  float* queries;  // [heads, padded to kSide][width]
  float* sums;     // [heads, padded to kSide][latent]
  alignas(64) float max[kUnit];
  alignas(64) float total[kUnit];
};

// Padded sizes of vectors.
struct Widths {
  size_t latent;
  size_t all;
};

// Turns scores [positions][kUnit] into weights and gives what earlier weights shrink by at the
// begin of each piece. Not hn::Max, whose choice between a number and NaN differs by target.
HWY_INLINE void Soften(const Tile& tile, Unit* unit, float (*scores)[kUnit],
                       float (*shrinks)[kUnit]) {
  const F32 d;
  for (size_t lane = 0; lane < kUnit; lane += kLanes) {
    V max = hn::Load(d, unit->max + lane);
    V total = hn::Load(d, unit->total + lane);
    size_t p = 0;
    for (size_t c = 0; c < tile.cuts; ++c) {
      const V old = max;
      for (size_t i = p; i < tile.cut[c]; ++i) {
        const V score = hn::Load(d, scores[i] + lane);
        max = hn::IfThenElse(hn::Lt(max, score), score, max);
      }
      const V shrink = ExpNegative(hn::Sub(old, max));
      hn::Store(shrink, d, shrinks[c] + lane);
      total = hn::Mul(total, shrink);
      for (; p < tile.cut[c]; ++p) {
        const V weight = ExpNegative(hn::Sub(hn::Load(d, scores[p] + lane), max));
        hn::Store(weight, d, scores[p] + lane);
        total = hn::Add(total, weight);
      }
    }
    hn::Store(max, d, unit->max + lane);
    hn::Store(total, d, unit->total + lane);
  }
}

// Adds the tile's weighted vectors to the sums of kSide heads, for kVectors registers of the
// latent. weights and shrinks are those of the first head.
template <size_t kVectors>
HWY_INLINE void AddWeighted(const Tile& tile, const Widths& w, const float* vectors,
                            const float* weights, const float* shrinks, float* sums) {
  const F32 d;
  V s[kSide][kVectors];
  for (size_t h = 0; h < kSide; ++h) {
    for (size_t v = 0; v < kVectors; ++v) s[h][v] = hn::Load(d, sums + h * w.latent + v * kLanes);
  }
  size_t p = 0;
  for (size_t c = 0; c < tile.cuts; ++c) {
    for (size_t h = 0; h < kSide; ++h) {
      const V shrink = hn::Set(d, shrinks[c * kUnit + h]);
      for (size_t v = 0; v < kVectors; ++v) s[h][v] = hn::Mul(s[h][v], shrink);
    }
    for (; p < tile.cut[c]; ++p) {
      V x[kVectors];
      for (size_t v = 0; v < kVectors; ++v) x[v] = hn::Load(d, vectors + p * w.all + v * kLanes);
      for (size_t h = 0; h < kSide; ++h) {
        const V weight = hn::Set(d, weights[p * kUnit + h]);
        for (size_t v = 0; v < kVectors; ++v) s[h][v] = hn::MulAdd(weight, x[v], s[h][v]);
      }
    }
  }
  for (size_t h = 0; h < kSide; ++h) {
    for (size_t v = 0; v < kVectors; ++v) hn::Store(s[h][v], d, sums + h * w.latent + v * kLanes);
  }
}

// One tile for one unit.
HWY_NOINLINE void AttendTile(const Tile& tile, const Widths& w, float scale, Unit* unit) {
  alignas(64) float scores[kBlock][kUnit];
  alignas(64) float shrinks[kBlock][kUnit];
  const size_t heads = Padded(unit->heads, kSide);
  if (heads < kUnit) std::memset(scores, 0, sizeof(scores));
  // Eight heads' queries (18 KB at real size) stay in the first-level cache.
  constexpr size_t kNear = 2 * kSide;
  for (size_t near = 0; near < heads; near += kNear) {
    for (size_t p = 0; p < tile.count; p += kSide) {
      for (size_t h = near; h < std::min(heads, near + kNear); h += kSide) {
        Products(tile.vectors + p * w.all, unit->queries + h * w.all, w.all, scale, scores[p] + h,
                 kUnit);
      }
    }
  }
  Soften(tile, unit, scores, shrinks);
  constexpr size_t kVectors = kRows;
  size_t i = 0;
  for (; i + kVectors * kLanes <= w.latent; i += kVectors * kLanes) {
    for (size_t h = 0; h < heads; h += kSide) {
      AddWeighted<kVectors>(tile, w, tile.vectors + i, scores[0] + h, shrinks[0] + h,
                            unit->sums + h * w.latent + i);
    }
  }
  for (; i < w.latent; i += kLanes) {
    for (size_t h = 0; h < heads; h += kSide) {
      AddWeighted<1>(tile, w, tile.vectors + i, scores[0] + h, shrinks[0] + h,
                     unit->sums + h * w.latent + i);
    }
  }
}

// The units of a pass and the scratch they share with the tile.
class AttentionPass {
 public:
  explicit AttentionPass(const LatentAttention& a)
      : a_(a),
        latent_(static_cast<size_t>(a.latent)),
        rope_(static_cast<size_t>(a.rope)),
        w_{Padded(latent_, kStep), Padded(latent_, kStep) + Padded(rope_, kStep)} {
    tile_.vectors = Aligned(a.scratch);
  }

  // Heads [first, last) of a row.
  void Add(const AttentionRow& row, size_t first, size_t last) {
    for (size_t h = first; h < last; h += kUnit) AddUnit(row, h, std::min(kUnit, last - h));
  }

  // All rows attend to their first positions, block by block.
  void AttendFirst() {
    int32_t longest = 0;
    for (size_t u = 0; u < count_; ++u) longest = std::max(longest, units_[u].row->count);
    for (int32_t begin = 0; begin < longest; begin += kAttentionBlock) {
      Clear();
      for (int32_t p = begin; p < std::min(longest, begin + kAttentionBlock); ++p) Decode(p);
      Pad();
      for (size_t u = 0; u < count_; ++u) {
        const int32_t left = units_[u].row->count - begin;
        if (left <= 0) continue;
        // Vectors beyond the row's last are scored at most, to fill a register block.
        tile_.count = static_cast<size_t>(std::min(left, kAttentionBlock));
        tile_.cuts = 1;
        tile_.cut[0] = tile_.count;
        AttendTile(tile_, w_, a_.scale, &units_[u]);
      }
    }
    Finish();
  }

  // The one row attends to its listed positions: whole softmax blocks share a tile, so that a
  // sparse list does not move the sums to and fro for every position.
  void AttendListed(const AttentionRow& row) {
    Clear();
    for (int32_t i = 0; i < row.count;) {
      const int32_t block = row.positions[i] / kAttentionBlock;
      int32_t end = i + 1;
      while (end < row.count && row.positions[end] / kAttentionBlock == block) ++end;
      if (tile_.count + static_cast<size_t>(end - i) > kBlock) {
        AttendAll();
        Clear();
      }
      for (; i < end; ++i) Decode(row.positions[i]);
      tile_.cut[tile_.cuts++] = tile_.count;
    }
    if (tile_.count > 0) AttendAll();
    Finish();
  }

 private:
  // Copies the row's queries; sums and softmax start afresh.
  void AddUnit(const AttentionRow& row, size_t first_head, size_t heads) {
    Unit& unit = units_[count_];
    unit.row = &row;
    unit.first_head = first_head;
    unit.heads = heads;
    unit.queries = tile_.vectors + (kBlock + count_ * kUnit) * w_.all;
    unit.sums = tile_.vectors + (kBlock + kAttentionPass) * w_.all + count_ * kUnit * w_.latent;
    for (size_t h = 0; h < heads; ++h) {
      float* to = unit.queries + h * w_.all;
      CopyPadded(row.q_latent + (first_head + h) * latent_, latent_, to);
      CopyPadded(row.q_rope + (first_head + h) * rope_, rope_, to + w_.latent);
    }
    std::fill(unit.queries + heads * w_.all, unit.queries + Padded(heads, kSide) * w_.all, 0.0f);
    std::fill(unit.sums, unit.sums + Padded(heads, kSide) * w_.latent, 0.0f);
    std::fill(unit.max, unit.max + kUnit, -std::numeric_limits<float>::infinity());
    std::fill(unit.total, unit.total + kUnit, 0.0f);
    ++count_;
  }

  void Clear() { tile_.count = tile_.cuts = 0; }

  void Decode(int32_t position) {
    DecodeVector(a_.kv, position, latent_, rope_, tile_.vectors + tile_.count++ * w_.all);
  }

  void Pad() {
    std::fill(tile_.vectors + tile_.count * w_.all,
              tile_.vectors + Padded(tile_.count, kSide) * w_.all, 0.0f);
  }

  void AttendAll() {
    Pad();
    for (size_t u = 0; u < count_; ++u) AttendTile(tile_, w_, a_.scale, &units_[u]);
  }

  void Finish() {
    for (size_t u = 0; u < count_; ++u) {
      const Unit& unit = units_[u];
      for (size_t h = 0; h < unit.heads; ++h) {
        float* out = unit.row->out + (unit.first_head + h) * latent_;
        const V total = hn::Set(F32(), unit.row->count == 0 ? 1.0f : unit.total[h]);
        for (size_t i = 0; i < latent_; i += kStep) {
          Vec16 v = Load16(unit.sums + h * w_.latent + i);
          for (V& part : v.part) part = hn::Div(part, total);
          StoreUpTo(v, latent_ - i, out + i);
        }
      }
    }
    count_ = 0;
  }

  const LatentAttention& a_;
  const size_t latent_;
  const size_t rope_;
  const Widths w_;
  Tile tile_;
  Unit units_[kPassUnits];
  size_t count_ = 0;
};

void AttendLatents(const LatentAttention& a, int32_t first_head, int32_t last_head) {
  if (first_head >= last_head) return;
  const size_t first = static_cast<size_t>(first_head), last = static_cast<size_t>(last_head);
  const size_t row_units = Padded(last - first, kUnit) / kUnit;
  const size_t units = std::min(kPassUnits, row_units);
  const size_t rows = kPassUnits / units;  // in a pass
  AttentionPass pass(a);
  for (size_t begin = first; begin < last; begin += units * kUnit) {
    const size_t end = std::min(last, begin + units * kUnit);
    size_t waiting = 0;
    for (size_t r = 0; r < a.row_count; ++r) {
      if (a.rows[r].positions != nullptr) continue;
      pass.Add(a.rows[r], begin, end);
      if (++waiting < rows) continue;
      pass.AttendFirst();
      waiting = 0;
    }
    pass.AttendFirst();
    // Lists differ from row to row: each is decoded for its row alone, 2.5 % of the row's work.
    for (size_t r = 0; r < a.row_count; ++r) {
      if (a.rows[r].positions == nullptr) continue;
      pass.Add(a.rows[r], begin, end);
      pass.AttendListed(a.rows[r]);
    }
  }
}

// totals[p] += w[h] * max(0, score) for the heads, ascending. Not hn::Max, which may hide NaN.
HWY_INLINE void AddIndexHeads(const float (*scores)[kBlock], const float* w, size_t heads,
                              float* totals) {
  const F32 d;
  for (size_t i = 0; i < kBlock; i += kLanes) {
    V total = hn::Load(d, totals + i);
    for (size_t h = 0; h < heads; ++h) {
      const V score = hn::Load(d, scores[h] + i);
      const V positive = hn::IfThenElse(hn::Lt(score, hn::Zero(d)), hn::Zero(d), score);
      total = hn::MulAdd(hn::Set(d, w[h]), positive, total);
    }
    hn::Store(total, d, totals + i);
  }
}

// Rows [0, count) of at most kIndexPass over all positions.
void ScorePass(const IndexScoring& a, const IndexRow* rows, size_t count, int32_t first,
               int32_t last) {
  const size_t width = static_cast<size_t>(a.keys.width), stride = Padded(width, kStep);
  const size_t heads = static_cast<size_t>(a.heads), padded_heads = Padded(heads, kSide);
  float* const keys = Aligned(a.scratch);
  float* const queries = keys + kBlock * stride;  // [count][padded heads][stride]
  int32_t longest = 0;
  for (size_t r = 0; r < count; ++r) {
    longest = std::max(longest, rows[r].count);
    float* to = queries + r * padded_heads * stride;
    for (size_t h = 0; h < heads; ++h) CopyPadded(rows[r].q + h * width, width, to + h * stride);
    std::fill(to + heads * stride, to + padded_heads * stride, 0.0f);
  }
  const int32_t stop = std::min(last, longest);
  for (int32_t begin = first; begin < stop; begin += kAttentionBlock) {
    const size_t n = static_cast<size_t>(std::min(stop - begin, kAttentionBlock));
    for (size_t p = 0; p < n; ++p) {
      DecodeVector(a.keys, begin + static_cast<int32_t>(p), width, 0, keys + p * stride);
    }
    std::fill(keys + n * stride, keys + Padded(n, kSide) * stride, 0.0f);
    for (size_t r = 0; r < count; ++r) {
      if (rows[r].count <= begin) continue;
      const size_t wanted = std::min(n, static_cast<size_t>(rows[r].count - begin));
      const float* q = queries + r * padded_heads * stride;
      alignas(64) float totals[kBlock] = {};
      alignas(64) float scores[kSide][kBlock] = {};
      for (size_t h = 0; h < heads; h += kSide) {
        for (size_t p = 0; p < wanted; p += kSide) {
          Products(q + h * stride, keys + p * stride, stride, a.scale, scores[0] + p, kBlock);
        }
        AddIndexHeads(scores, rows[r].w + h, std::min(kSide, heads - h), totals);
      }
      std::copy(totals, totals + wanted, rows[r].scores + begin);
    }
  }
}

void IndexScores(const IndexScoring& a, int32_t first, int32_t last) {
  for (size_t r = 0; r < a.row_count; r += kIndexPass) {
    ScorePass(a, a.rows + r, std::min(kIndexPass, a.row_count - r), first, last);
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

void IndexScores(const IndexScoring& a, int32_t first, int32_t last) {
  COLIBRI_DISPATCH(IndexScores)(a, first, last);
}

void AttendLatents(const LatentAttention& a, int32_t first_head, int32_t last_head) {
  COLIBRI_DISPATCH(AttendLatents)(a, first_head, last_head);
}

}  // namespace colibri
#endif  // HWY_ONCE
