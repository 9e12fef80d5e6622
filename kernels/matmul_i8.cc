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
#include <limits>

#include "kernels/dot_i8-inl.h"
#include "kernels/vector-inl.h"

#include "kernels/dispatch.h"
#include "kernels/kernels.h"

COLIBRI_BEFORE_NAMESPACE();
namespace colibri {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

using scalar::GateUpInt8;
using scalar::MatmulInt8;
using scalar::QuantiseRows;

#else

constexpr size_t kStripOutputs = 16;
constexpr size_t kPanelBytes = 64;  // of a row
constexpr size_t kPanelColumns = kPanelBytes / 4;
constexpr size_t kPanelWords = kPanelColumns * kStripOutputs;

// kRunColumns: panel columns of one run; 0: known at run time only (groups of 16 and 32).
struct Int4Run64 {
  static constexpr bool kNibbles = true;
  static constexpr size_t kRunColumns = 8;
};
struct Int4AnyRun {
  static constexpr bool kNibbles = true;
  static constexpr size_t kRunColumns = 0;
};
struct Int8Run64 {
  static constexpr bool kNibbles = false;
  static constexpr size_t kRunColumns = 16;
};

// Sixteen outputs of a matrix; fewer at its end, where the last is repeated.
class Strip {
 public:
  Strip() = default;
  Strip(const PackedMatrix& w, size_t first, size_t last)
      : outputs_(std::min(kStripOutputs, last - first)),
        row_bytes_(RowBytes(w.format, w.cols)),
        groups_(static_cast<size_t>(ScalesPerRow(w.format, w.cols, w.group))),
        run_(static_cast<size_t>(Int8Run(w))),
        group_(w.format == WeightFormat::kInt4Grouped ? static_cast<size_t>(w.group) : 0),
        data_(w.data + first * row_bytes_),
        scales_(w.scales + first * groups_ * sizeof(float)),
        end_(w.data + last * row_bytes_) {}

  // The panel's first row, the others `*stride` bytes apart: in place where all 16 x 64 bytes are
  // there, else in `scratch`.
  HWY_INLINE const std::byte* Panel(size_t panel, std::byte* scratch, size_t* stride) const {
    const size_t offset = panel * kPanelBytes;
    if (HWY_LIKELY(outputs_ == kStripOutputs && offset + kPanelBytes <= row_bytes_)) {
      *stride = row_bytes_;
      return data_ + offset;
    }
    *stride = kPanelBytes;
    return CopyPanel(offset, scratch);
  }

  // Scales of runs [first, first + n), n <= 16: to[run - first][output].
  void Scales(size_t first, size_t n, float* to) const {
    if (n == 16 && outputs_ == kStripOutputs && group_ == run_) {
      TransposePanel(scales_ + first * sizeof(float), groups_ * sizeof(float),
                     reinterpret_cast<uint32_t*>(to));
      return;
    }
    for (size_t k = 0; k < n; ++k) {
      const size_t group = group_ == 0 ? 0 : (first + k) * run_ / group_;
      for (size_t o = 0; o < kStripOutputs; ++o) {
        const std::byte* row = scales_ + std::min(o, outputs_ - 1) * groups_ * sizeof(float);
        std::memcpy(to + k * kStripOutputs + o, row + group * sizeof(float), sizeof(float));
      }
    }
  }
  // kBytes from `offset` on of the row of output o: in place where they are there.
  HWY_INLINE const std::byte* Run(size_t o, size_t offset, size_t bytes, std::byte* scratch) const {
    const std::byte* from = data_ + std::min(o, outputs_ - 1) * row_bytes_ + offset;
    if (HWY_LIKELY(offset + bytes <= row_bytes_)) return from;
    std::memset(scratch, 0, bytes);
    std::memcpy(scratch, from, row_bytes_ - offset);
    return scratch;
  }
  HWY_INLINE float Scale(size_t o, size_t run) const {
    float scale;
    const size_t group = group_ == 0 ? 0 : run_ == group_ ? run : run * run_ / group_;
    std::memcpy(&scale, scales_ + (std::min(o, outputs_ - 1) * groups_ + group) * sizeof(float),
                sizeof(scale));
    return scale;
  }
  // One scale a row: the same for all runs.
  bool RowScales() const { return groups_ == 1; }
  size_t Outputs() const { return outputs_; }
  const std::byte* Data() const { return data_; }
  const std::byte* ScaleData() const { return scales_; }
  const std::byte* End() const { return end_; }
  size_t Bytes() const { return kStripOutputs * row_bytes_; }
  size_t ScaleRowBytes() const { return groups_ * sizeof(float); }

 private:
  HWY_NOINLINE const std::byte* CopyPanel(size_t offset, std::byte* scratch) const {
    const size_t n = std::min(kPanelBytes, row_bytes_ - offset);
    std::memset(scratch, 0, kStripOutputs * kPanelBytes);
    for (size_t o = 0; o < kStripOutputs; ++o) {
      std::memcpy(scratch + o * kPanelBytes,
                  data_ + std::min(o, outputs_ - 1) * row_bytes_ + offset, n);
    }
    return scratch;
  }

  size_t outputs_ = 0, row_bytes_ = 0, groups_ = 0, run_ = 0, group_ = 0;
  const std::byte* data_ = nullptr;
  const std::byte* scales_ = nullptr;
  const std::byte* end_ = nullptr;  // of the matrix' rows that are wanted
};

// What a product takes of its activations.
struct Activations {
  const QuantisedRows& x;
  const int32_t* index;

  HWY_INLINE size_t Row(size_t r) const {
    return index == nullptr ? r : static_cast<size_t>(index[r]);
  }
};

// kRows rows of activations; beyond the last the last is repeated.
template <size_t kRows>
struct RowBlock {
  RowBlock(const Activations& a, size_t first, size_t rows) {
    for (size_t m = 0; m < kRows; ++m) {
      const size_t row = a.Row(first + std::min(m, rows - 1));
      values[m] = a.x.values + row * a.x.ValueStride();
      scales[m] = a.x.scales + row * a.x.ScaleStride();
      corrections[m] = a.x.corrections + row * a.x.RunStride();
    }
  }
  const int8_t* values[kRows];
  const float* scales[kRows];
  const int32_t* corrections[kRows];
};

struct Vec16i {
  VI32 part[kParts];
};

HWY_INLINE VU32 Broadcast(const int8_t* four) {
  uint32_t word;
  std::memcpy(&word, four, sizeof(word));
  return hn::Set(U32s(), word);
}

// Runs [run, run + runs) of one panel for kRows rows and kStrips strips: sums as at the top.
// `scales`: of those runs, `scale_step` floats apart.
template <class Kind, size_t kRows, size_t kStrips>
HWY_INLINE void AddPanel(const uint32_t* const* panels, const float* const* scales,
                         size_t scale_step, const RowBlock<kRows>& rows, size_t panel, size_t run,
                         size_t runs, size_t run_columns, Vec16 (&sums)[kRows][kStrips]) {
  const U32s d;
  const size_t columns = Kind::kRunColumns > 0 ? Kind::kRunColumns : run_columns;
  for (size_t k = 0; k < runs; ++k) {
    Vec16i dots[kRows][kStrips];
    for (size_t m = 0; m < kRows; ++m) {
      const bool corrected = Kind::kNibbles || kByteZero != 0;
      const VI32 start = hn::Set(I32s(), corrected ? rows.corrections[m][run + k] : 0);
      for (size_t s = 0; s < kStrips; ++s) {
        for (size_t p = 0; p < kParts; ++p) dots[m][s].part[p] = start;
      }
    }
    HWY_UNROLL(8)
    for (size_t c = 0; c < columns; ++c) {
      const size_t column = k * columns + c;
      VU32 low[kStrips][kParts], high[kStrips][kParts];
      for (size_t s = 0; s < kStrips; ++s) {
        for (size_t p = 0; p < kParts; ++p) {
          const VU32 packed = hn::Load(d, panels[s] + column * kStripOutputs + p * kLanes);
          low[s][p] = Kind::kNibbles ? LowNibbles(packed) : ByteWeights(packed);
          if constexpr (Kind::kNibbles) high[s][p] = HighNibbles(packed);
        }
      }
      if constexpr (Kind::kNibbles) {
        const size_t at = panel * 128 + column / 8 * 64 + column % 8 * 4;
        for (size_t m = 0; m < kRows; ++m) {
          const VU32 even = Broadcast(rows.values[m] + at);
          for (size_t s = 0; s < kStrips; ++s) {
            for (size_t p = 0; p < kParts; ++p) {
              dots[m][s].part[p] = DotNibbles(dots[m][s].part[p], low[s][p], even);
            }
          }
        }
        for (size_t m = 0; m < kRows; ++m) {
          const VU32 odd = Broadcast(rows.values[m] + at + 32);
          for (size_t s = 0; s < kStrips; ++s) {
            for (size_t p = 0; p < kParts; ++p) {
              dots[m][s].part[p] = DotNibbles(dots[m][s].part[p], high[s][p], odd);
            }
          }
        }
      } else {
        const size_t at = panel * 64 + column * 4;
        for (size_t m = 0; m < kRows; ++m) {
          const VU32 x = Broadcast(rows.values[m] + at);
          for (size_t s = 0; s < kStrips; ++s) {
            for (size_t p = 0; p < kParts; ++p) {
              dots[m][s].part[p] = DotBytes(dots[m][s].part[p], low[s][p], x);
            }
          }
        }
      }
    }
    // Scales belong to 64 inputs, of which a run has all or some.
    const size_t block = Kind::kRunColumns > 0 ? run + k : (run + k) * columns / 8;
    for (size_t s = 0; s < kStrips; ++s) {
      const Vec16 scale = Load16(scales[s] + k * scale_step);
      for (size_t m = 0; m < kRows; ++m) {
        const Vec16 both = Mul16(scale, Set16(rows.scales[m][block]));
        for (size_t p = 0; p < kParts; ++p) {
          sums[m][s].part[p] = hn::MulAdd(hn::ConvertTo(F32(), dots[m][s].part[p]), both.part[p],
                                          sums[m][s].part[p]);
        }
      }
    }
  }
}

// How the inputs of a product divide.
struct Shape {
  explicit Shape(const QuantisedRows& x)
      : run_columns(static_cast<size_t>(x.run) / (x.even_odd ? 8 : 4)),
        panel_runs(kPanelColumns / run_columns),
        runs((static_cast<size_t>(x.cols) + static_cast<size_t>(x.run) - 1) /
             static_cast<size_t>(x.run)),
        panels((runs + panel_runs - 1) / panel_runs) {}
  size_t run_columns, panel_runs, runs, panels;
};

// A stream of weights is asked for so many bytes ahead, then again at a half and a quarter of it,
// since single prefetches get dropped; linear through memory, so the distance does not depend on
// the length of a row. One row of int4-g64, share of a read loop's GB/s (Zen 4): none 45 % (6,144
// inputs) and 29 % (2,048), twice from 96 KB 85 and 75, three times 81 to 88 and 81 to 88.
constexpr size_t kPrefetchBytes = size_t{96} << 10;
constexpr size_t kPrefetches = 3;

// For what lies `offset` bytes into a strip: the lines of kLines * 64 bytes, and of their scales,
// of which there is a byte for eight of weights where groups are of 64.
template <size_t kLines>
HWY_INLINE void PrefetchWeights(const Strip& strip, size_t offset) {
  const std::byte* at = strip.Data() + offset;
  for (size_t k = 0; k < kPrefetches; ++k) {
    const size_t distance = kPrefetchBytes >> k;
    if (at + distance >= strip.End()) continue;
    for (size_t line = 0; line < kLines; ++line) {
      __builtin_prefetch(at + distance + line * 64, 0, 2);
    }
  }
  if (strip.RowScales()) return;
  for (size_t k = 0; k < 2; ++k) {
    const std::byte* scales = strip.ScaleData() + (offset + (kPrefetchBytes >> k)) / 8;
    for (size_t line = 0; line < kLines; line += 8) __builtin_prefetch(scales + line * 8, 0, 2);
  }
}

// Few rows, one strip: a panel is transposed into registers and L1 and meets all rows at once.
// out[m * out_stride + o].
template <class Kind, size_t kRows>
HWY_NOINLINE void MultiplyFew(const Strip& strip, const Shape& shape, const Activations& a,
                              size_t first, size_t rows, float* out, size_t out_stride) {
  const RowBlock<kRows> block(a, first, rows);
  alignas(64) uint32_t words[kPanelWords];
  alignas(64) float scales[16 * kStripOutputs];
  alignas(64) std::byte scratch[kStripOutputs * kPanelBytes];
  Vec16 sums[kRows][1];
  for (size_t m = 0; m < kRows; ++m) sums[m][0] = Set16(0);
  const bool row_scales = strip.RowScales();
  const size_t step = row_scales ? 0 : kStripOutputs;
  if (row_scales) strip.Scales(0, 1, scales);
  for (size_t panel = 0; panel < shape.panels; ++panel) {
    const size_t run = panel * shape.panel_runs;
    if (!row_scales && run % 16 == 0) {
      strip.Scales(run, std::min<size_t>(16, shape.runs - run), scales);
    }
    size_t stride;
    const std::byte* from = strip.Panel(panel, scratch, &stride);
    PrefetchWeights<kStripOutputs>(strip, panel * kStripOutputs * kPanelBytes);
    TransposePanel(from, stride, words);
    const uint32_t* panels[1] = {words};
    const float* run_scales[1] = {scales + run % 16 * step};
    AddPanel<Kind, kRows, 1>(panels, run_scales, step, block, panel, run,
                             std::min(shape.panel_runs, shape.runs - run), shape.run_columns, sums);
  }
  for (size_t m = 0; m < std::min(kRows, rows); ++m) Store16(sums[m][0], out + m * out_stride);
}

#if HWY_MAX_BYTES == 64

// The sums of lanes 0..7 and of lanes 8..15 of each of sixteen vectors.
HWY_INLINE void AddLanes(const VI32* v, VI32* low, VI32* high) {
  const I32s d;
  const hn::RepartitionToWide<I32s> d64;
  VI32 two[8], four[4];
  for (size_t i = 0; i < 8; ++i) {
    two[i] = hn::Add(hn::InterleaveLower(d, v[2 * i], v[2 * i + 1]),
                     hn::InterleaveUpper(d, v[2 * i], v[2 * i + 1]));
  }
  for (size_t i = 0; i < 4; ++i) {
    const auto a = hn::BitCast(d64, two[2 * i]), b = hn::BitCast(d64, two[2 * i + 1]);
    four[i] = hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, a, b)),
                      hn::BitCast(d, hn::InterleaveUpper(d64, a, b)));
  }
  // Block b of four[i]: rows 4 * i .., a quarter of the lanes.
  const auto blocks = [](VI32 a, VI32 b) HWY_ATTR {
    return hn::Add(VI32{_mm512_shuffle_i32x4(a.raw, b.raw, 0x88)},
                   VI32{_mm512_shuffle_i32x4(a.raw, b.raw, 0xDD)});
  };
  const VI32 first = blocks(four[0], four[1]), second = blocks(four[2], four[3]);
  *low = VI32{_mm512_shuffle_i32x4(first.raw, second.raw, 0x88)};
  *high = VI32{_mm512_shuffle_i32x4(first.raw, second.raw, 0xDD)};
}

// 32 bytes at each of the two places.
HWY_INLINE VU32 LoadHalves(const int8_t* low, const int8_t* high) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high));
  return VU32{_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1)};
}

// One row: sixteen outputs in lockstep, their lanes added up by a tree.
template <class Kind>
HWY_NOINLINE void MultiplyOne(const Strip& strip, const Shape& shape, const Activations& a,
                              size_t row, float* out) {
  static_assert(Kind::kRunColumns > 0);
  const U32s d;
  const RowBlock<1> x(a, row, 1);
  alignas(64) float scales[16 * kStripOutputs];
  alignas(64) std::byte scratch[kStripOutputs * kPanelBytes];
  V sum = hn::Zero(F32());
  const bool row_scales = strip.RowScales();
  const size_t step = row_scales ? 0 : kStripOutputs;
  if (row_scales) strip.Scales(0, 1, scales);
  for (size_t panel = 0; panel < shape.panels; ++panel) {
    const size_t run = panel * shape.panel_runs;
    if (!row_scales && run % 16 == 0) {
      strip.Scales(run, std::min<size_t>(16, shape.runs - run), scales);
    }
    size_t stride;
    const std::byte* from = strip.Panel(panel, scratch, &stride);
    PrefetchWeights<kStripOutputs>(strip, panel * kStripOutputs * kPanelBytes);
    VI32 v[kStripOutputs], dots[2];
    if constexpr (Kind::kNibbles) {
      const int8_t* values = x.values[0] + panel * 128;
      const VU32 even = LoadHalves(values, values + 64), odd = LoadHalves(values + 32, values + 96);
      for (size_t o = 0; o < kStripOutputs; ++o) {
        const VU32 packed = hn::LoadU(d, reinterpret_cast<const uint32_t*>(from + o * stride));
        v[o] = DotNibbles(DotNibbles(hn::Zero(I32s()), LowNibbles(packed), even),
                          HighNibbles(packed), odd);
      }
    } else {
      const VU32 values = hn::LoadU(d, reinterpret_cast<const uint32_t*>(x.values[0] + panel * 64));
      for (size_t o = 0; o < kStripOutputs; ++o) {
        const VU32 packed = hn::LoadU(d, reinterpret_cast<const uint32_t*>(from + o * stride));
        v[o] = DotBytes(hn::Zero(I32s()), ByteWeights(packed), values);
      }
    }
    AddLanes(v, dots, dots + 1);
    if (!Kind::kNibbles) dots[0] = hn::Add(dots[0], dots[1]);
    for (size_t k = 0; k < std::min(shape.panel_runs, shape.runs - run); ++k) {
      const bool corrected = Kind::kNibbles || kByteZero != 0;
      const VI32 start = hn::Set(I32s(), corrected ? x.corrections[0][run + k] : 0);
      const V both = hn::Mul(hn::Load(F32(), scales + (run + k) % 16 * step),
                             hn::Set(F32(), x.scales[0][run + k]));
      sum = hn::MulAdd(hn::ConvertTo(F32(), hn::Add(dots[k], start)), both, sum);
    }
  }
  hn::Store(sum, F32(), out);
}

#endif  // HWY_MAX_BYTES == 64

// Nine to sixteen rows: the rows lie across the lanes and weights are broadcast, so that nothing is
// transposed but the activations, once a call. Share of a dot loop with 16 rows of int4-g64 (Zen
// 4): 66 %, MultiplyFew 59; with 8 rows in 256-bit vectors 45, MultiplyFew 58.
constexpr size_t kLaneRows = 16;
// Inputs whose sixteen rows (256 KB) may lie on the stack; o_proj of the largest model has as many.
constexpr size_t kLaneInputs = 16384;
#if HWY_MAX_BYTES == 64
constexpr size_t kLaneOutputs = 8;
#else
constexpr size_t kLaneOutputs = 4;
#endif

// Activations of sixteen rows as [block of 64 inputs][column][row] words, scales and corrections as
// [block][row]. Beyond the last row it is repeated.
struct LanePack {
  LanePack(const Shape& shape, const Activations& a, size_t first, size_t rows) {
    const RowBlock<kLaneRows> block(a, first, rows);
    alignas(64) std::byte bytes[kLaneRows * 64];
    for (size_t run = 0; run < shape.runs; ++run) {
      for (size_t m = 0; m < kLaneRows; ++m) {
        std::memcpy(bytes + m * 64, block.values[m] + run * 64, 64);
        scales[run * kLaneRows + m] = block.scales[m][run];
        corrections[run * kLaneRows + m] = block.corrections[m][run];
      }
      TransposePanel(bytes, 64, words + run * kPanelColumns * kLaneRows);
    }
  }
  alignas(64) uint32_t words[kLaneInputs / 4 * kLaneRows];
  alignas(64) float scales[kLaneInputs / 64 * kLaneRows];
  alignas(64) int32_t corrections[kLaneInputs / 64 * kLaneRows];
};

// The 64 weights of one run as bytes in the order of the activations.
template <class Kind>
HWY_INLINE void UnpackRun(const std::byte* from, uint32_t* to) {
  const hn::CappedTag<uint32_t, Kind::kNibbles ? 8 : 16> d;
  for (size_t i = 0; i < (Kind::kNibbles ? 8 : 16); i += hn::Lanes(d)) {
    const auto packed = hn::LoadU(d, reinterpret_cast<const uint32_t*>(from) + i);
    if constexpr (Kind::kNibbles) {
      const auto mask = hn::Set(d, 0x0F0F0F0Fu);
      hn::Store(hn::And(packed, mask), d, to + i);
      hn::Store(hn::And(hn::ShiftRight<4>(packed), mask), d, to + 8 + i);
    } else {
      hn::Store(ByteWeights(packed), d, to + i);
    }
  }
}

// Outputs [o, o + kLaneOutputs) of a strip for the rows of the pack: out[m * out_stride + k].
template <class Kind>
HWY_NOINLINE void MultiplyLanes(const Strip& strip, const Shape& shape, size_t o, const LanePack& x,
                                size_t rows, float* out, size_t out_stride) {
  constexpr size_t kRunBytes = Kind::kNibbles ? 32 : 64;
  // Weights are unpacked two runs ahead: broadcast from a line just stored they wait for it (46 %
  // of the dot loop with 16 rows, 66 so).
  constexpr size_t kAhead = 2, kBuffers = 4;
  alignas(64) uint32_t words[kBuffers][kLaneOutputs][kPanelColumns];
  const auto unpack = [&](size_t run) HWY_ATTR {
    if (run >= shape.runs) return;
    for (size_t k = 0; k < kLaneOutputs; ++k) {
      alignas(64) std::byte scratch[64];
      UnpackRun<Kind>(strip.Run(o + k, run * kRunBytes, kRunBytes, scratch),
                      words[run % kBuffers][k]);
    }
  };
  for (size_t run = 0; run < kAhead; ++run) unpack(run);
  Vec16 sums[kLaneOutputs];
  for (Vec16& sum : sums) sum = Set16(0);
  for (size_t run = 0; run < shape.runs; ++run) {
    if (run % (64 / kRunBytes) == 0) {
      PrefetchWeights<kLaneOutputs>(strip, (o * shape.runs + run * kLaneOutputs) * kRunBytes);
    }
    unpack(run + kAhead);
    const auto& weights = words[run % kBuffers];
    Vec16i dots[kLaneOutputs];
    for (size_t p = 0; p < kParts; ++p) {
      const VI32 start = Kind::kNibbles || kByteZero != 0
                             ? hn::Load(I32s(), x.corrections + run * kLaneRows + p * kLanes)
                             : hn::Zero(I32s());
      for (Vec16i& dot : dots) dot.part[p] = start;
    }
    const uint32_t* column = x.words + run * kPanelColumns * kLaneRows;
    HWY_UNROLL(16)
    for (size_t c = 0; c < kPanelColumns; ++c, column += kLaneRows) {
      for (size_t p = 0; p < kParts; ++p) {
        const VU32 values = hn::Load(U32s(), column + p * kLanes);
        for (size_t k = 0; k < kLaneOutputs; ++k) {
          const VU32 weight = hn::Set(U32s(), weights[k][c]);
          dots[k].part[p] = Kind::kNibbles ? DotNibbles(dots[k].part[p], weight, values)
                                           : DotBytes(dots[k].part[p], weight, values);
        }
      }
    }
    const Vec16 scales = Load16(x.scales + run * kLaneRows);
    for (size_t k = 0; k < kLaneOutputs; ++k) {
      const Vec16 both = Mul16(Set16(strip.Scale(o + k, run)), scales);
      for (size_t p = 0; p < kParts; ++p) {
        sums[k].part[p] =
            hn::MulAdd(hn::ConvertTo(F32(), dots[k].part[p]), both.part[p], sums[k].part[p]);
      }
    }
  }
  for (size_t k = 0; k < kLaneOutputs; ++k) {
    alignas(64) float lanes[kLaneRows];
    Store16(sums[k], lanes);
    for (size_t m = 0; m < rows; ++m) out[m * out_stride + k] = lanes[m];
  }
}

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
  const RowBlock<kRows> block(a, first, rows);
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
    for (size_t m = 0; m < rows; m += kManyRows) {
      MultiplyTile<Kind, kManyRows>(tile, shape, panel, panels, step, a, first + m, rows - m,
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
  if (rows > kLaneRows) {
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
    size_t m = 0;
    for (; m + 4 < rows; m += 8) {
      MultiplyFew<Kind, 8>(strips[s], shape, a, first + m, rows - m, to + m * kTileStride,
                           kTileStride);
    }
    for (; m + 1 < rows; m += 4) {
      MultiplyFew<Kind, 4>(strips[s], shape, a, first + m, rows - m, to + m * kTileStride,
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
  each([&](const Strip* strips, size_t count, float* sums) HWY_ATTR {
    for (size_t o = 0; o < count * kStripOutputs; o += kLaneOutputs) {
      MultiplyLanes<Kind>(strips[o / kStripOutputs], shape, o % kStripOutputs, x, rows, sums + o,
                          kTileStride);
    }
  });
}

template <class Kind, class EachStrips>
HWY_INLINE void MultiplyRows(const Shape& shape, const Activations& a, size_t first, size_t rows,
                             const EachStrips& each) {
  if constexpr (Kind::kRunColumns > 0) {
    if (rows >= kPackedRows && rows <= kLaneRows && a.x.ValueStride() <= kLaneInputs) {
      return MultiplyPacked<Kind>(shape, a, first, rows, each);
    }
  }
  each([&](const Strip* strips, size_t count, float* sums)
           HWY_ATTR { MultiplyStrips<Kind>(strips, count, shape, a, first, rows, sums); });
}

// Calls body(Kind()) for what `w` needs.
template <class Body>
HWY_INLINE void WithKind(const PackedMatrix& w, const Body& body) {
  if (w.format == WeightFormat::kInt8Row) return body(Int8Run64());
  if (Int8Run(w) == 64) return body(Int4Run64());
  return body(Int4AnyRun());
}

void MatmulInt8(const PackedMatrix& w, int32_t first, int32_t last, const QuantisedRows& x,
                const int32_t* index, size_t rows, float* y, size_t y_stride) {
  const Activations a{x, index};
  const Shape shape(x);
  const auto end = static_cast<size_t>(last);
  WithKind(w, [&](auto kind) HWY_ATTR {
    for (size_t row = 0; row < rows; row += kRowGroup) {
      const size_t n = std::min(kRowGroup, rows - row);
      MultiplyRows<decltype(kind)>(shape, a, row, n, [&](const auto& multiply) HWY_ATTR {
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
  WithKind(gate, [&](auto kind) HWY_ATTR {
    for (size_t row = 0; row < rows; row += kRowGroup) {
      const size_t n = std::min(kRowGroup, rows - row);
      MultiplyRows<decltype(kind)>(shape, a, row, n, [&](const auto& multiply) HWY_ATTR {
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

// Integers compare as magnitudes do, and what is not finite above all that is.
HWY_INLINE uint32_t LargestMagnitude(const float* x, size_t n) {
  uint32_t largest = 0;
  for (size_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    largest = std::max(largest, bits & 0x7FFFFFFFu);
  }
  return largest;
}

void QuantiseRows(const float* x, size_t x_stride, size_t rows, const QuantisedRows& to) {
  constexpr size_t kBlock = 64;
  constexpr uint32_t kInfinity = 0x7F800000u;
  const auto cols = static_cast<size_t>(to.cols), run = static_cast<size_t>(to.run);
  const int32_t offset = to.even_odd ? -8 : -128;
  for (size_t r = 0; r < rows; ++r) {
    int8_t* values = to.values + r * to.ValueStride();
    int32_t* corrections = to.corrections + r * to.RunStride();
    for (size_t begin = 0; begin < to.ValueStride(); begin += kBlock) {
      alignas(64) float in[kBlock] = {};
      alignas(64) int32_t whole[kBlock];
      const size_t n = begin < cols ? std::min(kBlock, cols - begin) : 0;
      if (n > 0) std::memcpy(in, x + r * x_stride + begin, n * sizeof(float));
      const uint32_t bits = LargestMagnitude(in, kBlock);
      float largest;
      std::memcpy(&largest, &bits, sizeof(largest));
      const bool finite = bits < kInfinity;
      const bool zeros = !finite || largest < 0x1p-110f;
      to.scales[r * to.ScaleStride() + begin / kBlock] =
          !finite ? std::numeric_limits<float>::quiet_NaN()
          : zeros ? 0
                  : largest / 127;
      if (zeros) std::memset(in, 0, sizeof(in));
      const V inverse = hn::Set(F32(), zeros ? 0 : 127 / largest);
      for (size_t i = 0; i < kBlock; i += kLanes) {
        hn::Store(hn::NearestInt(hn::Mul(hn::Load(F32(), in + i), inverse)), I32s(), whole + i);
      }
      for (size_t k = 0; k < kBlock; k += run) {
        int32_t sum = 0;
        for (size_t i = k; i < k + run; ++i) sum += whole[i];
        corrections[(begin + k) / run] = offset * sum;
      }
      int8_t* out = values + begin;
      if (to.even_odd) {
        for (size_t i = 0; i < kBlock / 2; ++i) {
          out[i] = static_cast<int8_t>(whole[2 * i]);
          out[kBlock / 2 + i] = static_cast<int8_t>(whole[2 * i + 1]);
        }
      } else {
        for (size_t i = 0; i < kBlock; ++i) out[i] = static_cast<int8_t>(whole[i]);
      }
    }
  }
}

#endif  // HWY_TARGET == HWY_SCALAR

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace colibri
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace colibri {

HWY_EXPORT(QuantiseRows);
HWY_EXPORT(MatmulInt8);
HWY_EXPORT(GateUpInt8);

void QuantiseRows(const float* x, size_t x_stride, size_t rows, const QuantisedRows& to) {
  COLIBRI_DISPATCH(QuantiseRows)(x, x_stride, rows, to);
}

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
