// Matrix products with int8 activations. Whatever the kernel (one row, few rows, a tile for many),
// an output is the same chain: an exact int32 dot for each run, then one fused multiply-add with
// the product of the two scales, runs ascending. So rows, cuts and targets never show in the bits.
//
// Outputs are worked on in strips of sixteen, which lie across the vector lanes: weights are
// transposed in panels of 64 bytes a output, once for all rows. One row on AVX-512 is bound by
// memory instead and adds its lanes up.
// Owns no memory: tiles and sums live on the stack (about 200 KB). Threads: any.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/matmul_i8.cc"
#include "kernels/targets.h"  // first

#include <algorithm>

#include "kernels/few_rows_i8-inl.h"
#include "kernels/strip_i8-inl.h"

#include "kernels/dispatch.h"
#include "kernels/kernels.h"

COLIBRI_BEFORE_NAMESPACE();
namespace colibri {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

using scalar::GateUpInt8;
using scalar::MatmulInt8;

#else

// Many rows: a tile of two strips is transposed once and stays in L2.
constexpr size_t kTilePanels = 48;  // 6,144 inputs of int4: 48 KB a strip
constexpr size_t kTileRuns = kTilePanels * 8;
constexpr size_t kTileStrips = 2;
constexpr size_t kTileStride = kTileStrips * kStripOutputs;  // of sums
#if HWY_MAX_BYTES == 64
constexpr size_t kManyRows = 8;
#elif HWY_MAX_BYTES == 32
constexpr size_t kManyRows = 2;
#else
constexpr size_t kManyRows = 1;
#endif

struct Tile {
  alignas(64) uint32_t words[kTileStrips][kTilePanels * kPanelWords];
  alignas(64) float scales[kTileStrips][kTileRuns * kStripOutputs];
};

// Fills strip s of the tile with panels [first, first + panels).
HWY_NOINLINE void FillTile(const Strip& strip, const Shape& shape, size_t first, size_t panels,
                           size_t s, Tile* tile) {
  alignas(64) std::byte scratch[kStripOutputs * kPanelBytes];
  for (size_t k = 0; k < panels; ++k) {
    size_t stride;
    const std::byte* from = strip.Panel(first + k, scratch, &stride);
    PrefetchWeights<kStripOutputs>(strip, (first + k) * kStripOutputs * kPanelBytes);
    TransposePanel(from, stride, tile->words[s] + k * kPanelWords);
  }
  if (strip.RowScales()) return strip.Scales(0, 1, tile->scales[s]);
  const size_t begin = first * shape.panel_runs;
  const size_t end = std::min(shape.runs, begin + panels * shape.panel_runs);
  for (size_t run = begin; run < end; run += 16) {
    strip.Scales(run, std::min<size_t>(16, end - run),
                 tile->scales[s] + (run - begin) * kStripOutputs);
  }
}

// sums += the tile for rows [first, first + rows), at most kRows.
template <class Kind, size_t kRows>
HWY_NOINLINE void MultiplyTile(const Tile& tile, const Shape& shape, size_t first_panel,
                               size_t panels, size_t scale_step, const Activations& a, size_t first,
                               size_t rows, float* out) {
  const RowBlock<kRows, Kind::kPlanes> block(a, first, rows);
  const size_t valid = std::min(kRows, rows);
  Vec16 sums[kRows][kTileStrips];
  for (size_t m = 0; m < kRows; ++m) {
    const float* from = out + std::min(m, valid - 1) * kTileStride;
    for (size_t s = 0; s < kTileStrips; ++s) sums[m][s] = Load16(from + s * kStripOutputs);
  }
  for (size_t k = 0; k < panels; ++k) {
    const size_t run = (first_panel + k) * shape.panel_runs;
    const uint32_t* words[kTileStrips];
    const float* scales[kTileStrips];
    for (size_t s = 0; s < kTileStrips; ++s) {
      words[s] = tile.words[s] + k * kPanelWords;
      scales[s] = tile.scales[s] + k * shape.panel_runs * scale_step;
    }
    AddPanel<Kind, kRows, kTileStrips>(words, scales, scale_step, block, first_panel + k, run,
                                       std::min(shape.panel_runs, shape.runs - run),
                                       shape.run_columns, sums);
  }
  for (size_t m = 0; m < valid; ++m) {
    for (size_t s = 0; s < kTileStrips; ++s) {
      Store16(sums[m][s], out + m * kTileStride + s * kStripOutputs);
    }
  }
}

template <class Kind>
HWY_NOINLINE void MultiplyMany(const Strip* strips, const Shape& shape, const Activations& a,
                               size_t first, size_t rows, float* out) {
  Tile tile;
  std::memset(out, 0, rows * kTileStride * sizeof(float));
  const size_t step = strips[0].RowScales() ? 0 : kStripOutputs;
  for (size_t panel = 0; panel < shape.panels; panel += kTilePanels) {
    const size_t panels = std::min(kTilePanels, shape.panels - panel);
    for (size_t s = 0; s < kTileStrips; ++s) FillTile(strips[s], shape, panel, panels, s, &tile);
    // As many rows of either kind fill the registers.
    constexpr size_t kRows = std::max<size_t>(1, kManyRows / Kind::kPlanes);
    for (size_t m = 0; m < rows; m += kRows) {
      MultiplyTile<Kind, kRows>(tile, shape, panel, panels, step, a, first + m, rows - m,
                                out + m * kTileStride);
    }
  }
}

// From so many rows on activations are packed; above sixteen a tile of weights pays.
constexpr size_t kPackedRows = 9;
// Rows whose sums are held at once.
constexpr size_t kRowGroup = 256;

// Both strips' sums of rows [first, first + rows): out[r * kTileStride + s * 16 + o].
template <class Kind>
HWY_INLINE void MultiplyStrips(const Strip* strips, size_t count, const Shape& shape,
                               const Activations& a, size_t first, size_t rows, float* out) {
  if (rows * Kind::kPlanes > kLaneRows) {
    const Strip both[kTileStrips] = {strips[0], strips[count - 1]};
    return MultiplyMany<Kind>(both, shape, a, first, rows, out);
  }
  for (size_t s = 0; s < count; ++s) {
    float* to = out + s * kStripOutputs;
#if HWY_MAX_BYTES == 64
    if constexpr (Kind::kRunColumns > 0) {
      if (rows == 1) {
        MultiplyOne<Kind>(strips[s], shape, a, first, to);
        continue;
      }
    }
#endif
    constexpr size_t kMost = 8 / Kind::kPlanes, kSome = 4 / Kind::kPlanes;
    size_t m = 0;
    for (; m + kSome < rows; m += kMost) {
      MultiplyFew<Kind, kMost>(strips[s], shape, a, first + m, rows - m, to + m * kTileStride,
                               kTileStride);
    }
    for (; m + 1 < rows; m += kSome) {
      MultiplyFew<Kind, kSome>(strips[s], shape, a, first + m, rows - m, to + m * kTileStride,
                               kTileStride);
    }
    for (; m < rows; ++m) {
      MultiplyFew<Kind, 1>(strips[s], shape, a, first + m, 1, to + m * kTileStride, kTileStride);
    }
  }
}

// Rows [first, first + rows) by MultiplyLanes: each(body) calls body for all strips.
template <class Kind, class EachStrips>
HWY_NOINLINE void MultiplyPacked(const Shape& shape, const Activations& a, size_t first,
                                 size_t rows, const EachStrips& each) {
  const LanePack x(shape, a, first, rows);
  each([&](const Strip* strips, size_t count, float* sums) COLIBRI_ATTR {
    for (size_t o = 0; o < count * kStripOutputs; o += kLaneOutputs) {
      MultiplyLanes<Kind>(strips[o / kStripOutputs], shape, o % kStripOutputs, x, rows, sums + o,
                          kTileStride);
    }
  });
}

template <class Kind, class EachStrips>
HWY_INLINE void MultiplyRows(const Shape& shape, const Activations& a, size_t first, size_t rows,
                             const EachStrips& each) {
  if constexpr (Kind::kRunColumns > 0 && Kind::kPlanes == 1) {
    if (rows >= kPackedRows && rows <= kLaneRows && a.x.ValueStride() <= kLaneInputs) {
      return MultiplyPacked<Kind>(shape, a, first, rows, each);
    }
  }
  each([&](const Strip* strips, size_t count, float* sums)
           COLIBRI_ATTR { MultiplyStrips<Kind>(strips, count, shape, a, first, rows, sums); });
}

// Calls body(Kind()) for what `w` needs.
template <class Body>
HWY_INLINE void WithKind(const PackedMatrix& w, int32_t planes, const Body& body) {
  const bool two = planes == 2;
  if (w.format == WeightFormat::kInt8Row) {
    return two ? body(Int8Run64<2>()) : body(Int8Run64<1>());
  }
  if (Int8Run(w) == 64) return two ? body(Int4Run64<2>()) : body(Int4Run64<1>());
  return body(Int4AnyRun());
}

void MatmulInt8(const PackedMatrix& w, int32_t first, int32_t last, const QuantisedRows& x,
                const int32_t* index, size_t rows, float* y, size_t y_stride) {
  const Activations a{x, index};
  const Shape shape(x);
  const auto end = static_cast<size_t>(last);
  WithKind(w, x.planes, [&](auto kind) COLIBRI_ATTR {
    for (size_t row = 0; row < rows; row += kRowGroup) {
      const size_t n = std::min(kRowGroup, rows - row);
      MultiplyRows<decltype(kind)>(shape, a, row, n, [&](const auto& multiply) COLIBRI_ATTR {
        alignas(64) float sums[kRowGroup * kTileStride];
        for (auto o = static_cast<size_t>(first); o < end; o += kTileStride) {
          Strip strips[kTileStrips] = {Strip(w, o, end), Strip()};
          size_t count = 1;
          if (o + kStripOutputs < end) strips[count++] = Strip(w, o + kStripOutputs, end);
          multiply(strips, count, sums);
          const size_t outputs = std::min(kTileStride, end - o);
          for (size_t m = 0; m < n; ++m) {
            std::memcpy(y + (row + m) * y_stride + o, sums + m * kTileStride,
                        outputs * sizeof(float));
          }
        }
      });
    }
  });
}

void GateUpInt8(const PackedMatrix& gate, const PackedMatrix& up, int32_t first, int32_t last,
                const QuantisedRows& x, const int32_t* index, size_t rows, float* y,
                size_t y_stride) {
  const Activations a{x, index};
  const Shape shape(x);
  const auto end = static_cast<size_t>(last);
  WithKind(gate, x.planes, [&](auto kind) COLIBRI_ATTR {
    for (size_t row = 0; row < rows; row += kRowGroup) {
      const size_t n = std::min(kRowGroup, rows - row);
      MultiplyRows<decltype(kind)>(shape, a, row, n, [&](const auto& multiply) COLIBRI_ATTR {
        alignas(64) float sums[kRowGroup * kTileStride];
        for (auto o = static_cast<size_t>(first); o < end; o += kStripOutputs) {
          const Strip strips[kTileStrips] = {Strip(gate, o, end), Strip(up, o, end)};
          multiply(strips, kTileStrips, sums);
          for (size_t m = 0; m < n; ++m) {
            const float* sum = sums + m * kTileStride;
            colibri::SiluMul(sum, sum + kStripOutputs, strips[0].Outputs(),
                             y + (row + m) * y_stride + o);
          }
        }
      });
    }
  });
}

#endif  // HWY_TARGET == HWY_SCALAR

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace colibri
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace colibri {

HWY_EXPORT(MatmulInt8);
HWY_EXPORT(GateUpInt8);

void MatmulInt8(const PackedMatrix& w, int32_t first, int32_t last, const QuantisedRows& x,
                const int32_t* index, size_t rows, float* y, size_t y_stride) {
  COLIBRI_DISPATCH(MatmulInt8)(w, first, last, x, index, rows, y, y_stride);
}

void GateUpInt8(const PackedMatrix& gate, const PackedMatrix& up, int32_t first, int32_t last,
                const QuantisedRows& x, const int32_t* index, size_t rows, float* y,
                size_t y_stride) {
  COLIBRI_DISPATCH(GateUpInt8)(gate, up, first, last, x, index, rows, y, y_stride);
}

}  // namespace colibri
#endif  // HWY_ONCE
