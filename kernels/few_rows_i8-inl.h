// Integer products of one to sixteen rows, which read weights once as a stream: one row adds lanes
// up (AVX-512), few rows meet a panel transposed in L1, more lie across the lanes themselves.
#if defined(COLIBRI_KERNELS_FEW_ROWS_I8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef COLIBRI_KERNELS_FEW_ROWS_I8_INL_H_
#undef COLIBRI_KERNELS_FEW_ROWS_I8_INL_H_
#else
#define COLIBRI_KERNELS_FEW_ROWS_I8_INL_H_
#endif

#include <algorithm>

#include "kernels/strip_i8-inl.h"

#if HWY_TARGET != HWY_SCALAR

COLIBRI_BEFORE_NAMESPACE();
namespace colibri {
namespace HWY_NAMESPACE {

// Few rows, one strip: a panel is transposed into registers and L1 and meets all rows at once.
// out[m * out_stride + o].
template <class Kind, size_t kRows>
HWY_NOINLINE void MultiplyFew(const Strip& strip, const Shape& shape, const Activations& a,
                              size_t first, size_t rows, float* out, size_t out_stride) {
  const RowBlock<kRows, Kind::kPlanes> block(a, first, rows);
  // A panel of int4 is transposed between the dots of the one before, which hides its loads (with
  // 8 rows 60 % of the dot loop at once, 63 so). Rows of int8 share so few sets of L1 that lines
  // would be read four times and buffers pushed out (50 % at once, 35 to 44 ahead).
  constexpr size_t kAhead = Kind::kNibbles ? 1 : 0;
  alignas(64) uint32_t words[1 + kAhead][kPanelWords];
  alignas(64) float scales[16 * kStripOutputs];
  alignas(64) std::byte scratch[kStripOutputs * kPanelBytes];
  Vec16 sums[kRows][1];
  for (size_t m = 0; m < kRows; ++m) sums[m][0] = Set16(0);
  const bool row_scales = strip.RowScales();
  const size_t step = row_scales ? 0 : kStripOutputs;
  if (row_scales) strip.Scales(0, 1, scales);
  size_t stride;
  const std::byte* from = strip.Panel(0, scratch, &stride);
  if constexpr (kAhead > 0) TransposePanel(from, stride, words[0]);
  for (size_t panel = 0; panel < shape.panels; ++panel) {
    const size_t run = panel * shape.panel_runs;
    if (!row_scales && run % 16 == 0) {
      strip.Scales(run, std::min<size_t>(16, shape.runs - run), scales);
    }
    from = strip.Panel(std::min(panel + kAhead, shape.panels - 1), scratch, &stride);
    PrefetchWeights<kStripOutputs>(strip, panel * kStripOutputs * kPanelBytes);
    if constexpr (kAhead == 0) TransposePanel(from, stride, words[0]);
    const auto between = [&](size_t quarter) COLIBRI_ATTR {
      if constexpr (kAhead > 0) TransposeQuarter(from, stride, quarter, words[(panel + 1) % 2]);
    };
    const uint32_t* panels[1] = {words[panel % (1 + kAhead)]};
    const float* run_scales[1] = {scales + run % 16 * step};
    AddPanel<Kind, kRows, 1>(panels, run_scales, step, block, panel, run,
                             std::min(shape.panel_runs, shape.runs - run), shape.run_columns, sums,
                             between);
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
  const auto blocks = [](VI32 a, VI32 b) COLIBRI_ATTR {
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

// What lanes 0..7 and lanes 8..15 have too much.
template <class Kind>
HWY_INLINE VI32 CorrectionHalves(int32_t low, int32_t high) {
  if (!Kind::kNibbles && kByteZero == 0) return hn::Zero(I32s());
  return hn::ConcatLowerLower(I32s(), hn::Set(I32s(), high), hn::Set(I32s(), low));
}

// The dots of 64 bytes of packed weights of one output; the lanes are added up later.
template <class Kind>
HWY_INLINE VI32 DotPanel(VU32 packed, const VU32 (&values)[2][Kind::kPlanes]) {
  VI32 dots = hn::Zero(I32s());
  for (size_t p = 0; p < Kind::kPlanes; ++p) {
    if (p > 0) dots = hn::ShiftLeft<7>(dots);
    if constexpr (Kind::kNibbles) {
      dots = DotNibbles(dots, LowNibbles(packed), values[0][p]);
      dots = DotNibbles(dots, HighNibbles(packed), values[1][p]);
    } else {
      dots = DotBytes(dots, ByteWeights(packed), values[0][p]);
    }
  }
  return dots;
}

// One row: eight outputs and two panels of each in lockstep, their lanes added up by a tree. Share
// of the read loop with 6,144 inputs: sixteen outputs 81 to 85 % (int4) and 78 % (int8, whose rows
// of whole KBs then fill two sets of the first-level cache), eight 90 and 94 %, four 76 % (int4).
template <class Kind>
HWY_NOINLINE void MultiplyOne(const Strip& strip, const Shape& shape, const Activations& a,
                              size_t row, float* out) {
  constexpr size_t kOutputs = 8, kPlanes = Kind::kPlanes;
  constexpr size_t kPanelRuns = kPanelColumns / Kind::kRunColumns;  // int4: 2
  const U32s d;
  const hn::Half<F32> half;
  const RowBlock<1, kPlanes> x(a, row, 1);
  alignas(64) float scales[16 * kStripOutputs];
  const bool row_scales = strip.RowScales();
  const size_t step = row_scales ? 0 : kStripOutputs;
  if (row_scales) strip.Scales(0, 1, scales);
  for (size_t first = 0; first < kStripOutputs; first += kOutputs) {
    auto sum = hn::Zero(half);
    for (size_t panel = 0; panel < shape.panels; panel += 2) {
      const size_t run = panel * kPanelRuns;
      if (!row_scales && run % 16 == 0) {
        strip.Scales(run, std::min<size_t>(16, shape.runs - run), scales);
      }
      PrefetchWeights<kStripOutputs>(strip, (first * shape.panels + panel * kOutputs) * 64);
      // Behind the last panel the weights are zeros.
      const size_t places[2] = {panel, std::min(panel + 1, shape.panels - 1)};
      VI32 v[2 * kOutputs], dots[2];
      for (size_t k = 0; k < 2; ++k) {
        VU32 values[2][kPlanes];
        for (size_t p = 0; p < kPlanes; ++p) {
          const int8_t* from = x.values[p] + places[k] * kPanelRuns * 64;
          if constexpr (Kind::kNibbles) {
            values[0][p] = LoadHalves(from, from + 64);
            values[1][p] = LoadHalves(from + 32, from + 96);
          } else {
            values[0][p] = hn::LoadU(d, reinterpret_cast<const uint32_t*>(from));
          }
        }
        for (size_t o = 0; o < kOutputs; ++o) {
          alignas(64) std::byte scratch[kPanelBytes];
          const std::byte* from =
              strip.Run(first + o, (panel + k) * kPanelBytes, kPanelBytes, scratch);
          v[k * kOutputs + o] =
              DotPanel<Kind>(hn::LoadU(d, reinterpret_cast<const uint32_t*>(from)), values);
        }
      }
      AddLanes(v, dots, dots + 1);
      if constexpr (kPanelRuns == 1) dots[0] = hn::Add(dots[0], dots[1]);
      V floats[kPanelRuns];
      for (size_t h = 0; h < kPanelRuns; ++h) {
        const VI32 corrections =
            CorrectionHalves<Kind>(x.corrections[0][places[0] * kPanelRuns + h],
                                   x.corrections[0][places[1] * kPanelRuns + h]);
        floats[h] = hn::ConvertTo(F32(), hn::Add(dots[h], corrections));
      }
      for (size_t k = 0; k < 2 * kPanelRuns; ++k) {
        if (run + k >= shape.runs) break;
        const V& of_run = floats[k % kPanelRuns];
        const auto both = hn::Mul(hn::Load(half, scales + (run + k) % 16 * step + first),
                                  hn::Set(half, x.scales[0][run + k]));
        sum = hn::MulAdd(k < kPanelRuns ? hn::LowerHalf(half, of_run) : hn::UpperHalf(half, of_run),
                         both, sum);
      }
    }
    hn::Store(sum, half, out + first);
  }
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
    const RowBlock<kLaneRows, 1> block(a, first, rows);
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
  const auto unpack = [&](size_t run) COLIBRI_ATTR {
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
    COLIBRI_UNROLL(16)
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

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace colibri
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET != HWY_SCALAR
#endif  // per-target toggle
