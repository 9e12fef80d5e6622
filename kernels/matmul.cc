// Matrix products with packed weights. Sums run over inputs in ascending steps of sixteen, one
// accumulator a (row, output) whatever the block it is computed in, so the number of rows and the
// cut of outputs never show in the bits.
// Owns no memory: tiles live on the stack (about 100 KB). Threads: any.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/matmul.cc"
#include "kernels/targets.h"  // first

#include "kernels/vector-inl.h"
#include "kernels/weights-inl.h"

#include "kernels/dispatch.h"
#include "kernels/kernels.h"

COLIBRI_BEFORE_NAMESPACE();
namespace colibri {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

using scalar::DequantiseRow;
using scalar::Matmul;
using scalar::MatmulTransposed;

#else

// DequantiseSpan of a format. A pointer, not a template argument, where a call is worth many
// weights: the tile loops are then compiled once a target, not once a format.
using Dequantise = decltype(&DequantiseSpan<WeightFormat::kF32>);

// The arguments of Matmul and MatmulTransposed.
struct Product {
  Dequantise dequantise;
  const PackedMatrix& w;
  size_t first;
  size_t last;
  const float* x;
  size_t x_stride;
  size_t rows;
  float* y;
  size_t y_stride;
};

// One row of x: weights go from memory through registers into the sums of four outputs at once,
// which hides the latency of the multiply-adds. Beyond the last output the last one is repeated.
template <WeightFormat kFormat>
HWY_NOINLINE void MultiplyRow(const Product& a) {
  const float* x = a.x;
  float* y = a.y;
  constexpr size_t kOutputs = 4;
  const size_t cols = static_cast<size_t>(a.w.cols);
  const size_t whole = cols - cols % kStep;
  const size_t group = GroupInputs<kFormat>(a.w);
  for (size_t o = a.first; o < a.last; o += kOutputs) {
    RowReader<kFormat> weights[kOutputs];
    Vec16 sums[kOutputs];
    for (size_t k = 0; k < kOutputs; ++k) {
      weights[k].SetRow(a.w, std::min(o + k, a.last - 1));
      sums[k] = Set16(0);
    }
    for (size_t i = 0; i < cols;) {
      const size_t g = i / group;
      const size_t end = std::min(cols, (g + 1) * group);
      for (size_t k = 0; k < kOutputs; ++k) weights[k].SetGroup(g);
      for (const size_t stop = std::min(end, whole); i < stop; i += kStep) {
        const Vec16 xs = Load16(x + i);
        for (size_t k = 0; k < kOutputs; ++k) MulAdd16(weights[k].At(i), xs, sums[k]);
      }
      if (i < end) {
        const Vec16 xs = LoadFirst(x + i, end - i);
        for (size_t k = 0; k < kOutputs; ++k) {
          float tail[kStep];
          DequantiseSpan<kFormat>(a.w, std::min(o + k, a.last - 1), i, end, tail);
          MulAdd16(Load16(tail), xs, sums[k]);
        }
        i = end;
      }
    }
    float totals[kOutputs];
    hn::StoreU(SumLanes4(sums), F32x4(), totals);
    std::memcpy(y + o, totals, std::min(kOutputs, a.last - o) * sizeof(float));
  }
}

// Several rows: a tile of weights (32 KB) is dequantised once for up to 64 rows. It and the 8 KB of
// one block of rows fit the first-level cache, the sums (64 KB) the second.
constexpr size_t kTileInputs = 512;
constexpr size_t kTileOutputs = 16;
constexpr size_t kTileRows = 64;

// sums[r][o] += w[o] * x[r] over `steps` steps of sixteen, for one register block.
template <size_t kRows, size_t kOutputs>
HWY_NOINLINE void MultiplyBlock(const float* w, const float* x, size_t x_stride, size_t steps,
                                float* sums) {
  Vec16 block[kRows][kOutputs];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t o = 0; o < kOutputs; ++o) {
      block[r][o] = Load16(sums + (r * kTileOutputs + o) * kStep);
    }
  }
  for (size_t i = 0; i < steps * kStep; i += kStep) {
    Vec16 ws[kOutputs];
    for (size_t o = 0; o < kOutputs; ++o) ws[o] = Load16(w + o * kTileInputs + i);
    for (size_t r = 0; r < kRows; ++r) {
      const Vec16 xs = Load16(x + r * x_stride + i);
      for (size_t o = 0; o < kOutputs; ++o) MulAdd16(ws[o], xs, block[r][o]);
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t o = 0; o < kOutputs; ++o) {
      Store16(block[r][o], sums + (r * kTileOutputs + o) * kStep);
    }
  }
}

// The same for kRows rows and all outputs, a multiple of kBlockOutputs, of a tile.
template <size_t kRows>
HWY_INLINE void MultiplyTileRows(const float* w, size_t outputs, const float* x, size_t x_stride,
                                 size_t steps, float* sums) {
  for (size_t o = 0; o < outputs; o += kBlockOutputs) {
    MultiplyBlock<kRows, kBlockOutputs>(w + o * kTileInputs, x, x_stride, steps, sums + o * kStep);
  }
}

HWY_NOINLINE void MultiplyTile(const float* w, size_t outputs, const float* x, size_t x_stride,
                               size_t rows, size_t steps, float* sums) {
  size_t r = 0;
  for (; r + kBlockRows <= rows; r += kBlockRows) {
    MultiplyTileRows<kBlockRows>(w, outputs, x + r * x_stride, x_stride, steps,
                                 sums + r * kTileOutputs * kStep);
  }
  for (; r < rows; ++r) {
    MultiplyTileRows<1>(w, outputs, x + r * x_stride, x_stride, steps,
                        sums + r * kTileOutputs * kStep);
  }
}

// Rows [row, row + rows) and outputs [o, o + outputs), each at most a tile.
HWY_NOINLINE void MultiplyTiles(const Product& a, size_t row, size_t rows, size_t o,
                                size_t outputs) {
  alignas(64) float tile[kTileOutputs * kTileInputs];
  alignas(64) float sums[kTileRows * kTileOutputs * kStep];
  // SumLanes4 takes sums in fours: those beyond the last output repeat it.
  const size_t padded = (outputs + 3) / 4 * 4;
  std::memset(sums, 0, rows * kTileOutputs * kStep * sizeof(float));
  const size_t cols = static_cast<size_t>(a.w.cols);
  const float* x = a.x + row * a.x_stride;
  for (size_t begin = 0; begin < cols; begin += kTileInputs) {
    const size_t end = std::min(cols, begin + kTileInputs);
    for (size_t k = 0; k < padded; ++k) {
      a.dequantise(a.w, o + std::min(k, outputs - 1), begin, end, tile + k * kTileInputs);
    }
    const size_t steps = (end - begin) / kStep;
    MultiplyTile(tile, padded, x + begin, a.x_stride, rows, steps, sums);
    const size_t rest = (end - begin) % kStep;
    if (rest == 0) continue;
    alignas(64) float tails[kTileRows * kStep];
    for (size_t r = 0; r < rows; ++r) {
      Store16(LoadFirst(x + r * a.x_stride + end - rest, rest), tails + r * kStep);
    }
    MultiplyTile(tile + steps * kStep, padded, tails, kStep, rows, 1, sums);
  }
  for (size_t r = 0; r < rows; ++r) {
    for (size_t k = 0; k < outputs; k += 4) {
      Vec16 four[4];
      for (size_t j = 0; j < 4; ++j) {
        four[j] = Load16(sums + (r * kTileOutputs + k + j) * kStep);
      }
      float totals[4];
      hn::StoreU(SumLanes4(four), F32x4(), totals);
      std::memcpy(a.y + (row + r) * a.y_stride + o + k, totals,
                  std::min<size_t>(4, outputs - k) * sizeof(float));
    }
  }
}

// MatmulTransposed: a tile is kTransposedOutputs x kTransposedInputs weights, 16 KB.
constexpr size_t kTransposedInputs = 64;
constexpr size_t kTransposedOutputs = 64;

// y[r][i] += x[r][o] * w[o][i] for one register block: kRows rows, kSteps * 16 inputs.
template <size_t kRows, size_t kSteps>
HWY_NOINLINE void MultiplyTransposedBlock(const float* w, size_t outputs, const float* x,
                                          size_t x_stride, float* y) {
  Vec16 block[kRows][kSteps];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t s = 0; s < kSteps; ++s) {
      block[r][s] = Load16(y + r * kTransposedInputs + s * kStep);
    }
  }
  for (size_t o = 0; o < outputs; ++o) {
    Vec16 ws[kSteps];
    for (size_t s = 0; s < kSteps; ++s) ws[s] = Load16(w + o * kTransposedInputs + s * kStep);
    for (size_t r = 0; r < kRows; ++r) {
      const Vec16 xs = Set16(x[r * x_stride + o]);
      for (size_t s = 0; s < kSteps; ++s) MulAdd16(xs, ws[s], block[r][s]);
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t s = 0; s < kSteps; ++s) {
      Store16(block[r][s], y + r * kTransposedInputs + s * kStep);
    }
  }
}

// Inputs [begin, end) of all outputs, for at most kTileRows rows.
HWY_NOINLINE void MultiplyTransposedTiles(const Product& a, size_t row, size_t rows, size_t begin,
                                          size_t end) {
  alignas(64) float tile[kTransposedOutputs * kTransposedInputs];
  alignas(64) float sums[kTileRows * kTransposedInputs];
  std::memset(sums, 0, rows * kTransposedInputs * sizeof(float));
  constexpr size_t kBlockInputs = kBlockOutputs * kStep;
  for (size_t o = a.first; o < a.last; o += kTransposedOutputs) {
    const size_t outputs = std::min(kTransposedOutputs, a.last - o);
    for (size_t k = 0; k < outputs; ++k) {
      a.dequantise(a.w, o + k, begin, end, tile + k * kTransposedInputs);
    }
    const float* x = a.x + row * a.x_stride + (o - a.first);
    for (size_t i = 0; i < end - begin; i += kBlockInputs) {
      size_t r = 0;
      for (; r + kBlockRows <= rows; r += kBlockRows) {
        MultiplyTransposedBlock<kBlockRows, kBlockOutputs>(
            tile + i, outputs, x + r * a.x_stride, a.x_stride, sums + r * kTransposedInputs + i);
      }
      for (; r < rows; ++r) {
        MultiplyTransposedBlock<1, kBlockOutputs>(tile + i, outputs, x + r * a.x_stride, a.x_stride,
                                                  sums + r * kTransposedInputs + i);
      }
    }
  }
  for (size_t r = 0; r < rows; ++r) {
    std::memcpy(a.y + (row + r) * a.y_stride + begin, sums + r * kTransposedInputs,
                (end - begin) * sizeof(float));
  }
}

Dequantise DequantiseOf(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
      return &DequantiseSpan<WeightFormat::kF32>;
    case WeightFormat::kBF16:
      return &DequantiseSpan<WeightFormat::kBF16>;
    case WeightFormat::kF16:
      return &DequantiseSpan<WeightFormat::kF16>;
    case WeightFormat::kInt8Row:
      return &DequantiseSpan<WeightFormat::kInt8Row>;
    case WeightFormat::kInt4Row:
      return &DequantiseSpan<WeightFormat::kInt4Row>;
    case WeightFormat::kInt4Grouped:
      return &DequantiseSpan<WeightFormat::kInt4Grouped>;
  }
  return nullptr;
}

void MultiplyOneRow(const Product& a) {
  switch (a.w.format) {
    case WeightFormat::kF32:
      return MultiplyRow<WeightFormat::kF32>(a);
    case WeightFormat::kBF16:
      return MultiplyRow<WeightFormat::kBF16>(a);
    case WeightFormat::kF16:
      return MultiplyRow<WeightFormat::kF16>(a);
    case WeightFormat::kInt8Row:
      return MultiplyRow<WeightFormat::kInt8Row>(a);
    case WeightFormat::kInt4Row:
      return MultiplyRow<WeightFormat::kInt4Row>(a);
    case WeightFormat::kInt4Grouped:
      return MultiplyRow<WeightFormat::kInt4Grouped>(a);
  }
}

Product ProductOf(const PackedMatrix& w, int32_t first, int32_t last, const float* x,
                  size_t x_stride, size_t rows, float* y, size_t y_stride) {
  return {DequantiseOf(w.format),
          w,
          static_cast<size_t>(first),
          static_cast<size_t>(last),
          x,
          x_stride,
          rows,
          y,
          y_stride};
}

void Matmul(const PackedMatrix& w, int32_t first, int32_t last, const float* x, size_t x_stride,
            size_t rows, float* y, size_t y_stride) {
  const Product a = ProductOf(w, first, last, x, x_stride, rows, y, y_stride);
  if (rows == 1 && StepsShareScale(w)) return MultiplyOneRow(a);
  for (size_t row = 0; row < rows; row += kTileRows) {
    const size_t tile_rows = std::min(kTileRows, rows - row);
    for (size_t o = a.first; o < a.last; o += kTileOutputs) {
      MultiplyTiles(a, row, tile_rows, o, std::min(kTileOutputs, a.last - o));
    }
  }
}

void MatmulTransposed(const PackedMatrix& w, int32_t first, int32_t last, const float* x,
                      size_t x_stride, size_t rows, float* y, size_t y_stride) {
  const Product a = ProductOf(w, first, last, x, x_stride, rows, y, y_stride);
  const size_t cols = static_cast<size_t>(w.cols);
  for (size_t row = 0; row < rows; row += kTileRows) {
    const size_t tile_rows = std::min(kTileRows, rows - row);
    for (size_t begin = 0; begin < cols; begin += kTransposedInputs) {
      MultiplyTransposedTiles(a, row, tile_rows, begin, std::min(cols, begin + kTransposedInputs));
    }
  }
}

void DequantiseRow(const PackedMatrix& w, int32_t row, float* y) {
  const size_t cols = static_cast<size_t>(w.cols);
  const Dequantise dequantise = DequantiseOf(w.format);
  for (size_t begin = 0; begin < cols; begin += kTileInputs) {
    alignas(64) float span[kTileInputs];
    const size_t end = std::min(cols, begin + kTileInputs);
    dequantise(w, static_cast<size_t>(row), begin, end, span);
    std::memcpy(y + begin, span, (end - begin) * sizeof(float));
  }
}

#endif  // HWY_TARGET == HWY_SCALAR

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace colibri
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace colibri {

HWY_EXPORT(Matmul);
HWY_EXPORT(MatmulTransposed);
HWY_EXPORT(DequantiseRow);

void Matmul(const PackedMatrix& w, int32_t first, int32_t last, const float* x, size_t x_stride,
            size_t rows, float* y, size_t y_stride) {
  COLIBRI_DISPATCH(Matmul)(w, first, last, x, x_stride, rows, y, y_stride);
}

void MatmulTransposed(const PackedMatrix& w, int32_t first, int32_t last, const float* x,
                      size_t x_stride, size_t rows, float* y, size_t y_stride) {
  COLIBRI_DISPATCH(MatmulTransposed)(w, first, last, x, x_stride, rows, y, y_stride);
}

void DequantiseRow(const PackedMatrix& w, int32_t row, float* y) {
  COLIBRI_DISPATCH(DequantiseRow)(w, row, y);
}

}  // namespace colibri
#endif  // HWY_ONCE
