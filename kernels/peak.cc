// The loops that nothing else can beat: multiply-adds and dots on registers, plain reads.
// Threads: any; no state.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/peak.cc"
#include "kernels/targets.h"  // first

#include <cstddef>

#include "kernels/dot_i8-inl.h"
#include "kernels/peak.h"

COLIBRI_BEFORE_NAMESPACE();
namespace colibri {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Twelve chains hide the latency of 4 or 5 cycles at two results a cycle and fit into 16 registers.
uint64_t RunMulAddLoop(uint64_t steps) {
  constexpr size_t kChains = 12;
  const hn::ScalableTag<float> d;
  // Both operands come from memory, and the sums are stored: nothing can be computed beforehand.
  volatile float start = 0.999f;
  const auto factor = hn::Set(d, start);
  const auto term = hn::Set(d, start);
  hn::Vec<decltype(d)> sums[kChains];
  for (size_t k = 0; k < kChains; ++k) sums[k] = hn::Set(d, start * static_cast<float>(k));
  for (uint64_t i = 0; i < steps; ++i) {
    for (auto& sum : sums) sum = hn::MulAdd(sum, factor, term);
  }
  auto all = sums[0];
  for (size_t k = 1; k < kChains; ++k) all = hn::Add(all, sums[k]);
  volatile float sink = hn::GetLane(all);
  static_cast<void>(sink);
  return steps * kChains * hn::Lanes(d);
}

#if HWY_TARGET == HWY_SCALAR

uint64_t RunDotLoop(uint64_t steps) {
  volatile int32_t start = 3;
  int32_t sum = start;
  for (uint64_t i = 0; i < steps; ++i) sum += start * static_cast<int8_t>(sum);
  start = sum;
  return steps;
}

void RunReadLoop(const std::byte* from, size_t bytes) {
  unsigned sum = 0;
  for (size_t i = 0; i < bytes; ++i) sum += static_cast<unsigned>(from[i]);
  volatile unsigned sink = sum;
  static_cast<void>(sink);
}

#else

uint64_t RunDotLoop(uint64_t steps) {
  constexpr size_t kChains = 12;
  volatile uint32_t start = 0x01020304u;
  const VU32 weights = hn::Set(U32s(), start);
  VI32 sums[kChains];
  for (size_t k = 0; k < kChains; ++k) {
    sums[k] = hn::Set(I32s(), static_cast<int32_t>(start + k));
  }
  // The sums are the activations too: else their product would be computed once.
  for (uint64_t i = 0; i < steps; ++i) {
    for (VI32& sum : sums) sum = DotNibbles(sum, weights, hn::BitCast(U32s(), sum));
  }
  VI32 all = sums[0];
  for (size_t k = 1; k < kChains; ++k) all = hn::Add(all, sums[k]);
  volatile int32_t sink = hn::GetLane(all);
  static_cast<void>(sink);
  return steps * kChains * kLanes * 4;
}

void RunReadLoop(const std::byte* from, size_t bytes) {
  const auto* words = reinterpret_cast<const uint32_t*>(from);
  constexpr size_t kVectors = 4;
  VU32 sums[kVectors];
  for (VU32& sum : sums) sum = hn::Zero(U32s());
  for (size_t i = 0; i + kVectors * kLanes <= bytes / 4; i += kVectors * kLanes) {
    for (size_t k = 0; k < kVectors; ++k) {
      sums[k] = hn::Add(sums[k], hn::LoadU(U32s(), words + i + k * kLanes));
    }
  }
  VU32 all = sums[0];
  for (size_t k = 1; k < kVectors; ++k) all = hn::Add(all, sums[k]);
  volatile uint32_t sink = hn::GetLane(all);
  static_cast<void>(sink);
}

#endif  // HWY_TARGET == HWY_SCALAR

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace colibri
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace colibri {

HWY_EXPORT(RunMulAddLoop);
HWY_EXPORT(RunDotLoop);
HWY_EXPORT(RunReadLoop);

uint64_t RunMulAddLoop(uint64_t steps) { return HWY_DYNAMIC_DISPATCH(RunMulAddLoop)(steps); }

uint64_t RunDotLoop(uint64_t steps) { return HWY_DYNAMIC_DISPATCH(RunDotLoop)(steps); }

void RunReadLoop(const std::byte* from, size_t bytes) {
  HWY_DYNAMIC_DISPATCH(RunReadLoop)(from, bytes);
}

}  // namespace colibri
#endif  // HWY_ONCE
