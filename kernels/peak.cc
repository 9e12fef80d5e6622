// The loop of multiply-adds on registers that nothing else can beat.
// Threads: any; no state.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/peak.cc"
#include "kernels/targets.h"  // first

#include <cstddef>

#include "kernels/peak.h"

COLIBRI_BEFORE_NAMESPACE();
namespace colibri {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Twelve chains hide the latency of 4 or 5 cycles at two results a cycle and fit into 16 registers.
uint64_t RunMulAddLoop(uint64_t steps) {
  constexpr size_t kChains = 12;
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  // Both operands come from memory, and the sums are stored: nothing can be computed beforehand.
  volatile float start = 0.999f;
  const V factor = hn::Set(d, start);
  const V term = hn::Set(d, start);
  V sums[kChains];
  for (size_t k = 0; k < kChains; ++k) sums[k] = hn::Set(d, start * static_cast<float>(k));
  for (uint64_t i = 0; i < steps; ++i) {
    for (V& sum : sums) sum = hn::MulAdd(sum, factor, term);
  }
  V all = sums[0];
  for (size_t k = 1; k < kChains; ++k) all = hn::Add(all, sums[k]);
  volatile float sink = hn::GetLane(all);
  static_cast<void>(sink);
  return steps * kChains * hn::Lanes(d);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace colibri
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace colibri {

HWY_EXPORT(RunMulAddLoop);

uint64_t RunMulAddLoop(uint64_t steps) { return HWY_DYNAMIC_DISPATCH(RunMulAddLoop)(steps); }

}  // namespace colibri
#endif  // HWY_ONCE
