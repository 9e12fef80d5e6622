// Kernels over one row of activations: norms, rotation, the gated unit, scaled addition. Tails go
// through the same vector instructions as whole steps, so where a row is cut never shows.
// Threads: any; no state.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/activation.cc"
#include "kernels/targets.h"  // first

#include "hwy/contrib/math/math-inl.h"
#include "kernels/vector-inl.h"

#include <algorithm>
#include <cmath>

#include "kernels/dispatch.h"
#include "kernels/kernels.h"

COLIBRI_BEFORE_NAMESPACE();
namespace colibri {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

using scalar::AddScaled;
using scalar::LayerNorm;
using scalar::RmsNorm;
using scalar::Rope;
using scalar::SiluMul;

#else

// Four sums of steps in turn, for their latency.
struct FourSums {
  HWY_INLINE FourSums() {
    for (Vec16& sum : sums) sum = Set16(0);
  }
  HWY_INLINE float Total() const {
    float totals[4];
    hn::StoreU(SumLanes4(sums), F32x4(), totals);
    return (totals[0] + totals[1]) + (totals[2] + totals[3]);
  }
  Vec16 sums[4];
};

HWY_INLINE float SumOfSquares(const float* x, size_t n) {
  FourSums squares;
  for (size_t i = 0; i < n; i += kStep) {
    const Vec16 v = LoadUpTo(x + i, n - i);
    MulAdd16(v, v, squares.sums[i / kStep % 4]);
  }
  return squares.Total();
}

void RmsNorm(const float* x, const float* w, size_t n, float eps, float* y) {
  const float mean = SumOfSquares(x, n) / static_cast<float>(n);
  const Vec16 inverse = Set16(1.0f / std::sqrt(mean + eps));
  for (size_t i = 0; i < n; i += kStep) {
    const Vec16 scaled = Mul16(LoadUpTo(x + i, n - i), inverse);
    StoreUpTo(Mul16(scaled, LoadUpTo(w + i, n - i)), n - i, y + i);
  }
}

void LayerNorm(const float* x, const float* w, const float* b, size_t n, float eps, float* y) {
  FourSums sum;
  for (size_t i = 0; i < n; i += kStep) {
    Vec16& lanes = sum.sums[i / kStep % 4];
    lanes = Add16(lanes, LoadUpTo(x + i, n - i));
  }
  const Vec16 mean = Set16(sum.Total() / static_cast<float>(n));
  FourSums squares;
  for (size_t i = 0; i < n; i += kStep) {
    Vec16 d = Sub16(LoadUpTo(x + i, n - i), mean);
    if (n - i < kStep) d = KeepFirst(d, n - i);
    MulAdd16(d, d, squares.sums[i / kStep % 4]);
  }
  const float variance = squares.Total() / static_cast<float>(n);
  const Vec16 inverse = Set16(1.0f / std::sqrt(variance + eps));
  for (size_t i = 0; i < n; i += kStep) {
    const Vec16 d = Sub16(LoadUpTo(x + i, n - i), mean);
    const Vec16 scaled = Mul16(Mul16(d, inverse), LoadUpTo(w + i, n - i));
    StoreUpTo(Add16(scaled, LoadUpTo(b + i, n - i)), n - i, y + i);
  }
}

// One vector of pairs. No fused multiply-adds: the reference has none either.
HWY_INLINE void RotatePairs(float* x, const float* cos, const float* sin) {
  const F32 d;
  V even, odd;
  hn::LoadInterleaved2(d, x, even, odd);
  const V c = hn::LoadU(d, cos);
  const V s = hn::LoadU(d, sin);
  hn::StoreInterleaved2(hn::Sub(hn::Mul(even, c), hn::Mul(odd, s)),
                        hn::Add(hn::Mul(odd, c), hn::Mul(even, s)), d, x);
}

void Rope(float* x, const float* cos, const float* sin, size_t pairs) {
  size_t j = 0;
  for (; j + kLanes <= pairs; j += kLanes) RotatePairs(x + 2 * j, cos + j, sin + j);
  if (j == pairs) return;
  const size_t n = pairs - j;
  float xs[2 * kLanes] = {}, cs[kLanes] = {}, ss[kLanes] = {};
  std::memcpy(xs, x + 2 * j, 2 * n * sizeof(float));
  std::memcpy(cs, cos + j, n * sizeof(float));
  std::memcpy(ss, sin + j, n * sizeof(float));
  RotatePairs(xs, cs, ss);
  std::memcpy(x + 2 * j, xs, 2 * n * sizeof(float));
}

void SiluMul(const float* gate, const float* up, size_t n, float* y) {
  const F32 d;
  const V one = hn::Set(d, 1.0f);
  // exp is infinite from 88.8 on, as it has to be; beyond 104 Highway's is undefined.
  const V limit = hn::Set(d, 100.0f);
  for (size_t i = 0; i < n; i += kStep) {
    Vec16 g = LoadUpTo(gate + i, n - i);
    for (V& part : g.part) {
      const V e = hn::Exp(d, hn::Min(hn::Neg(part), limit));
      part = hn::Div(part, hn::Add(one, e));
    }
    StoreUpTo(Mul16(g, LoadUpTo(up + i, n - i)), n - i, y + i);
  }
}

void AddScaled(float a, const float* x, size_t n, float* y) {
  const Vec16 scale = Set16(a);
  for (size_t i = 0; i < n; i += kStep) {
    Vec16 sum = LoadUpTo(y + i, n - i);
    MulAdd16(scale, LoadUpTo(x + i, n - i), sum);
    StoreUpTo(sum, n - i, y + i);
  }
}

#endif  // HWY_TARGET == HWY_SCALAR

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace colibri
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace colibri {

HWY_EXPORT(RmsNorm);
HWY_EXPORT(LayerNorm);
HWY_EXPORT(Rope);
HWY_EXPORT(SiluMul);
HWY_EXPORT(AddScaled);

void RmsNorm(const float* x, const float* w, size_t n, float eps, float* y) {
  COLIBRI_DISPATCH(RmsNorm)(x, w, n, eps, y);
}

void LayerNorm(const float* x, const float* w, const float* b, size_t n, float eps, float* y) {
  COLIBRI_DISPATCH(LayerNorm)(x, w, b, n, eps, y);
}

void Rope(float* x, const float* cos, const float* sin, size_t pairs) {
  COLIBRI_DISPATCH(Rope)(x, cos, sin, pairs);
}

void SiluMul(const float* gate, const float* up, size_t n, float* y) {
  COLIBRI_DISPATCH(SiluMul)(gate, up, n, y);
}

void AddScaled(float a, const float* x, size_t n, float* y) {
  COLIBRI_DISPATCH(AddScaled)(a, x, n, y);
}

}  // namespace colibri
#endif  // HWY_ONCE
