// The complete list of kernels. Everything a forward pass multiplies, normalises or attends with
// goes through here; runtime/ says when. Each kernel has a plain scalar reference of the same name
// in namespace colibri::scalar with the same signature.
//
// Contract of all of them: the value of one output depends on its own inputs alone, never on how
// many rows are passed, how a range of outputs or heads is cut, or where a pointer is aligned. So
// results are equal bit for bit within a SIMD target; across targets they agree to rounding.
// Threads: any; no state, no allocation. Inputs and outputs do not overlap unless said. Strides
// count floats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/weight_format.h"

namespace colibri {

enum class KvType : uint8_t { kF32, kBF16 };

constexpr size_t KvBytes(KvType t) { return t == KvType::kF32 ? 4 : 2; }

// Stored vectors of one layer and sequence, in pages: position p is vector p % page_tokens of page
// p / page_tokens. A page holds page_tokens x width values.
struct KvView {
  const std::byte* const* pages = nullptr;
  int32_t page_tokens = 0;
  int32_t width = 0;
  KvType type = KvType::kF32;
};

// Softmax runs over blocks of this many positions, aligned to absolute positions (decisions: bits
// may depend on this block, never on the page).
inline constexpr int32_t kAttentionBlock = 64;

// Heads times rows that pass over a block together; their queries and sums (4.4 KB each at real
// size) and the block stay in the second-level cache.
inline constexpr size_t kAttentionPass = 128;

// One row's queries and the positions it attends to.
struct AttentionRow {
  const float* q_latent = nullptr;     // [heads][latent]
  const float* q_rope = nullptr;       // [heads][rope]
  const int32_t* positions = nullptr;  // ascending; nullptr: 0 .. count-1
  int32_t count = 0;                   // 0 gives zeros
  float* out = nullptr;                // [heads][latent]
};

// Rows of activations as int8, one scale for each block of 64 inputs, in the order in which the
// dots of one weight format want them. `run`: inputs of one exact integer dot, min(group, 64).
// `even_odd` (int4): within a block the 32 even inputs, then the odd ones, so that the nibbles of
// a weight byte meet their inputs without a shuffle. Owns nothing; Place() lays the parts out.
// Two planes make 15 bits: value = 128 * first + second (second -64 .. 63), for runs of 64.
struct QuantisedRows {
  int32_t cols = 0;
  int32_t run = 64;
  bool even_odd = true;
  int32_t planes = 1;
  int8_t* values = nullptr;  // [rows][planes][ValueStride()], zeros beyond cols
  float* scales = nullptr;   // [rows][ScaleStride()]; NaN: an input was not finite
  // [rows][RunStride()]: what weights stored with an offset add too much, -8 (int4) or -128 (int8)
  // times the sum of the run's values.
  int32_t* corrections = nullptr;

  constexpr size_t ValueStride() const { return (static_cast<size_t>(cols) + 127) / 128 * 128; }
  constexpr size_t ScaleStride() const { return ValueStride() / 64; }
  constexpr size_t RunStride() const { return ValueStride() / static_cast<size_t>(run); }
  constexpr size_t RowValues() const { return static_cast<size_t>(planes) * ValueStride(); }
  constexpr size_t RowBytes() const { return RowValues() + 4 * (ScaleStride() + RunStride()); }
  // Bytes that Place needs at most for one plane, for any weight format (runs of 16). From 64
  // inputs on, as all such matrices have, no more than the rows take as floats; nor do two planes.
  static constexpr size_t MaxBytes(size_t rows, int32_t cols, int32_t planes = 1) {
    return rows * QuantisedRows{cols, planes == 1 ? 16 : 64, true, planes}.RowBytes();
  }
  // Lays rows for multiplication with matrices like `w` out in `memory`, aligned to 4.
  static QuantisedRows Place(const PackedMatrix& w, std::byte* memory, size_t rows,
                             int32_t planes = 1);
};

// Attention of rows of one sequence over its latents (absorbed MLA, model spec 3.4): for each row
// and head score = (q_latent . c + q_rope . k_rope) * scale over the row's positions, softmax, and
// out = sum of p * c. A stored vector is the latent (latent values), then the rope key (rope).
struct LatentAttention {
  KvView kv;
  int32_t latent = 0;
  int32_t rope = 0;
  float scale = 0;
  const AttentionRow* rows = nullptr;
  size_t row_count = 0;
  float* scratch = nullptr;  // AttentionScratch floats, the caller's alone during the call
};

// One row's index queries and where its scores go.
struct IndexRow {
  const float* q = nullptr;  // [heads][width]
  const float* w = nullptr;  // [heads]
  int32_t count = 0;         // positions from here on are not scored
  float* scores = nullptr;   // [count]
};

// Index scores of rows of one sequence (model spec 3.5): scores[p] = sum over heads h, ascending,
// of w[h] * max(0, (q[h] . k_p) * scale).
struct IndexScoring {
  KvView keys;
  int32_t heads = 0;
  float scale = 0;
  const IndexRow* rows = nullptr;
  size_t row_count = 0;
  float* scratch = nullptr;  // IndexScratch floats, the caller's alone during the call
};

// Rows whose index queries (16 KB each at real size) stay in the first- or second-level cache.
inline constexpr size_t kIndexPass = 4;

// Vectors in scratch are whole steps of sixteen floats, aligned to 64 bytes.
constexpr size_t PaddedFloats(int32_t n) { return (static_cast<size_t>(n) + 15) / 16 * 16; }

// A block's vectors, a pass's queries and its sums.
constexpr size_t AttentionScratch(int32_t latent, int32_t rope) {
  const size_t width = PaddedFloats(latent) + PaddedFloats(rope);
  return kAttentionBlock * width + kAttentionPass * (width + PaddedFloats(latent)) + 16;
}

// A block's keys and a pass's queries.
constexpr size_t IndexScratch(int32_t heads, int32_t width) {
  return (kAttentionBlock + kIndexPass * PaddedFloats(heads)) * PaddedFloats(width) + 16;
}

#define COLIBRI_KERNELS                                                                            \
  /* y[r][o] = sum over i of w[o][i] * x[r][i], for o in [first, last), f32 activations. The    */ \
  /* weight is dequantised to f32 (rounded once: (q - 8) * scale) and multiplied by fma.        */ \
  void Matmul(const PackedMatrix& w, int32_t first, int32_t last, const float* x, size_t x_stride, \
              size_t rows, float* y, size_t y_stride);                                             \
  /* x as int8: scale = max|x| / 127 of each 64 inputs, value = x * (127 / max|x|) to nearest */   \
  /* even; with two planes 16,319 in place of 127. Blocks whose largest magnitude is below      */ \
  /* 2^-110 become zeros.                                                                       */ \
  void QuantiseRows(const float* x, size_t x_stride, size_t rows, const QuantisedRows& to);        \
  /* Matmul with int8 activations, for matrices with TakesInt8: for each run an exact int32 dot,*/ \
  /* then acc = fma(float(dot), weight scale * input scale, acc), ascending (decisions: integer */ \
  /* matmuls). Row r of the product takes row index[r] of x; index nullptr: row r.              */ \
  void MatmulInt8(const PackedMatrix& w, int32_t first, int32_t last, const QuantisedRows& x,      \
                  const int32_t* index, size_t rows, float* y, size_t y_stride);                   \
  /* y = SiluMul of the two products, in one pass over x; both matrices of one format.          */ \
  void GateUpInt8(const PackedMatrix& gate, const PackedMatrix& up, int32_t first, int32_t last,   \
                  const QuantisedRows& x, const int32_t* index, size_t rows, float* y,             \
                  size_t y_stride);                                                                \
  /* y[r][i] = sum over o in [first, last) of x[r][o - first] * w[o][i], for all inputs i;      */ \
  /* ascending o, one fma each, starting from 0 (absorption of the K half of kv_b).             */ \
  void MatmulTransposed(const PackedMatrix& w, int32_t first, int32_t last, const float* x,        \
                        size_t x_stride, size_t rows, float* y, size_t y_stride);                  \
  /* One row of w as floats: y[cols]. */                                                           \
  void DequantiseRow(const PackedMatrix& w, int32_t row, float* y);                                \
  /* y = x * (1 / sqrt(mean(x^2) + eps)) * w; y may be x. Mean summed in f32 lanes or double.   */ \
  void RmsNorm(const float* x, const float* w, size_t n, float eps, float* y);                     \
  /* y = (x - mean) / sqrt(var + eps) * w + b; y may be x. */                                      \
  void LayerNorm(const float* x, const float* w, const float* b, size_t n, float eps, float* y);   \
  /* Rotates the pairs (x[2j], x[2j+1]) by the angle whose cosine and sine are given, j < pairs,*/ \
  /* in place (interleaved form, model spec 3.3).                                               */ \
  void Rope(float* x, const float* cos, const float* sin, size_t pairs);                           \
  /* y = gate / (1 + exp(-gate)) * up; y may be gate or up. */                                     \
  void SiluMul(const float* gate, const float* up, size_t n, float* y);                            \
  /* y += a * x, one fma each. */                                                                  \
  void AddScaled(float a, const float* x, size_t n, float* y);                                     \
  /* Rounds to the stored type, to nearest even (NaN stays NaN): dst has n * KvBytes(type). */     \
  void StoreKv(const float* x, size_t n, KvType type, std::byte* dst);                             \
  /* The scores of positions [first, last), as far as a row has them. A score depends on its   */  \
  /* position and row alone.                                                                    */ \
  void IndexScores(const IndexScoring& a, int32_t first, int32_t last);                            \
  /* Heads [first_head, last_head) of all rows. Within a head positions are added one at a     */  \
  /* time, ascending, softmax streaming over blocks; others are never multiplied by zero.       */ \
  void AttendLatents(const LatentAttention& a, int32_t first_head, int32_t last_head);             \
  /* True if every value is finite. */                                                             \
  bool AllFinite(const float* x, size_t n);                                                        \
  /* log of the sum of exp(x), in double, ascending. */                                            \
  double LogSumExp(const float* x, size_t n);

COLIBRI_KERNELS
namespace scalar {
COLIBRI_KERNELS
}  // namespace scalar

// The SIMD target in use ("AVX3_DL", "AVX2", ... or "SCALAR"), part of every record.
std::string SimdTarget();
// Targets compiled in and supported by this machine, best first. Tests force each in turn.
std::vector<std::string> SimdTargets();
// Forces one target of SimdTargets(), or "" for the best. Not while kernels run.
void ForceSimdTarget(const std::string& name);

}  // namespace colibri
