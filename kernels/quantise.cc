// Activations as int8: how quantised rows are laid out and filled.
// Threads: any; no state.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/quantise.cc"
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

using scalar::QuantiseRows;

#else

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

constexpr size_t kBlock = 64;

// Values of one block as bytes in the order of the weights.
HWY_INLINE void StoreBlock(const int32_t* from, bool even_odd, int8_t* to) {
  if (even_odd) {
    for (size_t i = 0; i < kBlock / 2; ++i) {
      to[i] = static_cast<int8_t>(from[2 * i]);
      to[kBlock / 2 + i] = static_cast<int8_t>(from[2 * i + 1]);
    }
  } else {
    for (size_t i = 0; i < kBlock; ++i) to[i] = static_cast<int8_t>(from[i]);
  }
}

void QuantiseRows(const float* x, size_t x_stride, size_t rows, const QuantisedRows& to) {
  constexpr uint32_t kInfinity = 0x7F800000u;
  const auto cols = static_cast<size_t>(to.cols), run = static_cast<size_t>(to.run);
  const int32_t offset = to.even_odd ? -8 : -128;
  const float steps = to.planes == 2 ? kTwoPlaneSteps : kOnePlaneSteps;
  for (size_t r = 0; r < rows; ++r) {
    int8_t* values = to.values + r * to.RowValues();
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
                  : largest / steps;
      if (zeros) std::memset(in, 0, sizeof(in));
      const V inverse = hn::Set(F32(), zeros ? 0 : steps / largest);
      for (size_t i = 0; i < kBlock; i += kLanes) {
        hn::Store(hn::NearestInt(hn::Mul(hn::Load(F32(), in + i), inverse)), I32s(), whole + i);
      }
      for (size_t k = 0; k < kBlock; k += run) {
        int32_t sum = 0;
        for (size_t i = k; i < k + run; ++i) sum += whole[i];
        corrections[(begin + k) / run] = offset * sum;
      }
      if (to.planes == 2) {
        alignas(64) int32_t low[kBlock];
        for (size_t i = 0; i < kBlock; ++i) {
          const int32_t high = (whole[i] + 64) >> 7;
          low[i] = whole[i] - 128 * high;
          whole[i] = high;
        }
        StoreBlock(low, to.even_odd, values + to.ValueStride() + begin);
      }
      StoreBlock(whole, to.even_odd, values + begin);
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

QuantisedRows QuantisedRows::Place(const PackedMatrix& w, std::byte* memory, size_t rows,
                                   int32_t planes) {
  QuantisedRows q;
  q.cols = w.cols;
  q.run = Int8Run(w);
  q.planes = planes;
  q.even_odd = w.format != WeightFormat::kInt8Row;
  q.scales = reinterpret_cast<float*>(memory);
  q.corrections = reinterpret_cast<int32_t*>(memory + rows * q.ScaleStride() * 4);
  q.values = reinterpret_cast<int8_t*>(memory + rows * (q.ScaleStride() + q.RunStride()) * 4);
  return q;
}

void QuantiseRows(const float* x, size_t x_stride, size_t rows, const QuantisedRows& to) {
  COLIBRI_DISPATCH(QuantiseRows)(x, x_stride, rows, to);
}

}  // namespace colibri
#endif  // HWY_ONCE
