// What the integer products share: strips of sixteen outputs, rows of activations, and the step
// that adds one panel of weights to the sums of some rows.
#if defined(COLIBRI_KERNELS_STRIP_I8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef COLIBRI_KERNELS_STRIP_I8_INL_H_
#undef COLIBRI_KERNELS_STRIP_I8_INL_H_
#else
#define COLIBRI_KERNELS_STRIP_I8_INL_H_
#endif

#include <algorithm>

#include "kernels/dot_i8-inl.h"
#include "kernels/kernels.h"
#include "kernels/vector-inl.h"

#if HWY_TARGET != HWY_SCALAR

COLIBRI_BEFORE_NAMESPACE();
namespace colibri {
namespace HWY_NAMESPACE {

constexpr size_t kStripOutputs = 16;
constexpr size_t kPanelBytes = 64;  // of a row
constexpr size_t kPanelColumns = kPanelBytes / 4;
constexpr size_t kPanelWords = kPanelColumns * kStripOutputs;

// kRunColumns: panel columns of one run; 0: known at run time only (groups of 16 and 32).
// kPlanes: of the activations, of which each is a row of its own until its dots are put together.
template <size_t kOf>
struct Int4Run64 {
  static constexpr size_t kPlanes = kOf;
  static constexpr bool kNibbles = true;
  static constexpr size_t kRunColumns = 8;
};
struct Int4AnyRun {
  static constexpr size_t kPlanes = 1;
  static constexpr bool kNibbles = true;
  static constexpr size_t kRunColumns = 0;
};
template <size_t kOf>
struct Int8Run64 {
  static constexpr size_t kPlanes = kOf;
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
    if (offset < row_bytes_) std::memcpy(scratch, from, row_bytes_ - offset);
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
template <size_t kRows, size_t kPlanes>
struct RowBlock {
  RowBlock(const Activations& a, size_t first, size_t rows) {
    for (size_t m = 0; m < kRows; ++m) {
      const size_t row = a.Row(first + std::min(m, rows - 1));
      for (size_t p = 0; p < kPlanes; ++p) {
        values[m * kPlanes + p] = a.x.values + row * a.x.RowValues() + p * a.x.ValueStride();
      }
      scales[m] = a.x.scales + row * a.x.ScaleStride();
      corrections[m] = a.x.corrections + row * a.x.RunStride();
    }
  }
  const int8_t* values[kRows * kPlanes];
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
// `scales`: of those runs, `scale_step` floats apart. between(quarter): called before each quarter
// of the panel's columns.
struct Nothing {
  void operator()(size_t) const {}
};
template <class Kind, size_t kRows, size_t kStrips, class Between = Nothing>
HWY_INLINE void AddPanel(const uint32_t* const* panels, const float* const* scales,
                         size_t scale_step, const RowBlock<kRows, Kind::kPlanes>& rows,
                         size_t panel, size_t run, size_t runs, size_t run_columns,
                         Vec16 (&sums)[kRows][kStrips], const Between& between = Between()) {
  const U32s d;
  const size_t columns = Kind::kRunColumns > 0 ? Kind::kRunColumns : run_columns;
  constexpr size_t kPlanes = Kind::kPlanes, kPlaneRows = kRows * kPlanes;
  for (size_t k = 0; k < runs; ++k) {
    Vec16i dots[kPlaneRows][kStrips];
    for (size_t m = 0; m < kPlaneRows; ++m) {
      // Of all planes together, so one of them gets it.
      const bool corrected = (Kind::kNibbles || kByteZero != 0) && (m + 1) % kPlanes == 0;
      const VI32 start = hn::Set(I32s(), corrected ? rows.corrections[m / kPlanes][run + k] : 0);
      for (size_t s = 0; s < kStrips; ++s) {
        for (size_t p = 0; p < kParts; ++p) dots[m][s].part[p] = start;
      }
    }
    COLIBRI_UNROLL(8)
    for (size_t c = 0; c < columns; ++c) {
      const size_t column = k * columns + c;
      if (column % 4 == 0) between(column / 4);
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
        for (size_t m = 0; m < kPlaneRows; ++m) {
          const VU32 even = Broadcast(rows.values[m] + at);
          for (size_t s = 0; s < kStrips; ++s) {
            for (size_t p = 0; p < kParts; ++p) {
              dots[m][s].part[p] = DotNibbles(dots[m][s].part[p], low[s][p], even);
            }
          }
        }
        for (size_t m = 0; m < kPlaneRows; ++m) {
          const VU32 odd = Broadcast(rows.values[m] + at + 32);
          for (size_t s = 0; s < kStrips; ++s) {
            for (size_t p = 0; p < kParts; ++p) {
              dots[m][s].part[p] = DotNibbles(dots[m][s].part[p], high[s][p], odd);
            }
          }
        }
      } else {
        const size_t at = panel * 64 + column * 4;
        for (size_t m = 0; m < kPlaneRows; ++m) {
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
          VI32 dot = dots[m * kPlanes][s].part[p];
          if constexpr (kPlanes == 2) {
            dot = hn::Add(hn::ShiftLeft<7>(dot), dots[m * kPlanes + 1][s].part[p]);
          }
          sums[m][s].part[p] =
              hn::MulAdd(hn::ConvertTo(F32(), dot), both.part[p], sums[m][s].part[p]);
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
// the length of a row. One row of int4-g64 when sixteen outputs went in lockstep, share of a read
// loop's GB/s (Zen 4): none 45 % (6,144 inputs) and 29 % (2,048), twice from 96 KB 85 and 75, three
// times 81 to 88 and 81 to 88.
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

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace colibri
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET != HWY_SCALAR
#endif  // per-target toggle
