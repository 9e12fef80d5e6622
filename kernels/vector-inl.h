// Vec16: sixteen floats in as many registers as the target needs. Loops over inputs step by
// sixteen on every target and sum lane by lane, so all targets add in one order: those with fused
// multiply-adds agree bit for bit, with each other and with the scalar reference.
#if defined(COLIBRI_KERNELS_VECTOR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef COLIBRI_KERNELS_VECTOR_INL_H_
#undef COLIBRI_KERNELS_VECTOR_INL_H_
#else
#define COLIBRI_KERNELS_VECTOR_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"

#if HWY_TARGET != HWY_SCALAR

COLIBRI_BEFORE_NAMESPACE();
namespace colibri {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using V = hn::Vec<F32>;
constexpr size_t kStep = 16;
constexpr size_t kLanes = HWY_MAX_BYTES / sizeof(float);
constexpr size_t kParts = kStep / kLanes;
static_assert(kParts * kLanes == kStep, "a target with vectors over 512 bits");

struct Vec16 {
  V part[kParts];
};

// Register blocks: kBlockRows x kBlockOutputs sums of sixteen lanes, with the operands, fill the 32
// registers of AVX-512, the 16 of AVX2, or what four registers a sum leave on 128-bit targets.
#if HWY_MAX_BYTES == 64
constexpr size_t kBlockRows = 4;
constexpr size_t kBlockOutputs = 4;
#elif HWY_MAX_BYTES == 32
constexpr size_t kBlockRows = 3;
constexpr size_t kBlockOutputs = 2;
#else
constexpr size_t kBlockRows = 1;
constexpr size_t kBlockOutputs = 2;
#endif

HWY_INLINE Vec16 Set16(float value) {
  Vec16 v;
  for (size_t p = 0; p < kParts; ++p) v.part[p] = hn::Set(F32(), value);
  return v;
}

HWY_INLINE Vec16 Load16(const float* from) {
  Vec16 v;
  for (size_t p = 0; p < kParts; ++p) v.part[p] = hn::LoadU(F32(), from + p * kLanes);
  return v;
}

HWY_INLINE void Store16(const Vec16& v, float* to) {
  for (size_t p = 0; p < kParts; ++p) hn::StoreU(v.part[p], F32(), to + p * kLanes);
}

// The first n <= 16 floats, then zeros. Reads nothing beyond them.
HWY_INLINE Vec16 LoadFirst(const float* from, size_t n) {
  float padded[kStep] = {};
  std::memcpy(padded, from, n * sizeof(float));
  return Load16(padded);
}

HWY_INLINE void StoreFirst(const Vec16& v, size_t n, float* to) {
  float padded[kStep];
  Store16(v, padded);
  std::memcpy(to, padded, n * sizeof(float));
}

// Either of the two above, so that one loop serves whole steps and the tail.
HWY_INLINE Vec16 LoadUpTo(const float* from, size_t n) {
  return n >= kStep ? Load16(from) : LoadFirst(from, n);
}
HWY_INLINE void StoreUpTo(const Vec16& v, size_t n, float* to) {
  if (n >= kStep) {
    Store16(v, to);
  } else {
    StoreFirst(v, n, to);
  }
}

HWY_INLINE Vec16 KeepFirst(const Vec16& v, size_t n) {
  float lanes[kStep] = {};
  StoreFirst(v, n, lanes);
  return Load16(lanes);
}

HWY_INLINE Vec16 Mul16(const Vec16& a, const Vec16& b) {
  Vec16 v;
  for (size_t p = 0; p < kParts; ++p) v.part[p] = hn::Mul(a.part[p], b.part[p]);
  return v;
}

HWY_INLINE Vec16 Add16(const Vec16& a, const Vec16& b) {
  Vec16 v;
  for (size_t p = 0; p < kParts; ++p) v.part[p] = hn::Add(a.part[p], b.part[p]);
  return v;
}

HWY_INLINE Vec16 Sub16(const Vec16& a, const Vec16& b) {
  Vec16 v;
  for (size_t p = 0; p < kParts; ++p) v.part[p] = hn::Sub(a.part[p], b.part[p]);
  return v;
}

HWY_INLINE void MulAdd16(const Vec16& a, const Vec16& b, Vec16& sum) {
  for (size_t p = 0; p < kParts; ++p) {
    sum.part[p] = hn::MulAdd(a.part[p], b.part[p], sum.part[p]);
  }
}

using F32x4 = hn::Full128<float>;

// The sum of the lanes of each of four. With b(k) = (l(4k) + l(4k+2)) + (l(4k+1) + l(4k+3)) it is
// (b(0) + b(2)) + (b(1) + b(3)): shuffles within 128 bits first, as those are cheap everywhere.
HWY_INLINE hn::Vec<F32x4> SumLanes4(const Vec16* v) {
  const F32 d;
  const hn::RepartitionToWide<F32> d64;
  V b[kParts];
  for (size_t p = 0; p < kParts; ++p) {
    const V v01 = hn::Add(hn::InterleaveLower(d, v[0].part[p], v[1].part[p]),
                          hn::InterleaveUpper(d, v[0].part[p], v[1].part[p]));
    const V v23 = hn::Add(hn::InterleaveLower(d, v[2].part[p], v[3].part[p]),
                          hn::InterleaveUpper(d, v[2].part[p], v[3].part[p]));
    const auto w01 = hn::BitCast(d64, v01);
    const auto w23 = hn::BitCast(d64, v23);
    b[p] = hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, w01, w23)),
                   hn::BitCast(d, hn::InterleaveUpper(d64, w01, w23)));
  }
#if HWY_MAX_BYTES == 64
  const hn::Half<F32> d8;
  const auto b8 = hn::Add(hn::LowerHalf(d8, b[0]), hn::UpperHalf(d8, b[0]));
  return hn::Add(hn::LowerHalf(F32x4(), b8), hn::UpperHalf(F32x4(), b8));
#elif HWY_MAX_BYTES == 32
  const V b8 = hn::Add(b[0], b[1]);
  return hn::Add(hn::LowerHalf(F32x4(), b8), hn::UpperHalf(F32x4(), b8));
#else
  return hn::Add(hn::Add(b[0], b[2]), hn::Add(b[1], b[3]));
#endif
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace colibri
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET != HWY_SCALAR
#endif  // per-target toggle
