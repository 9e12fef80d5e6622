// Names and forces the SIMD target, and forwards the kernels that need no vectors of ours: they are
// loops the compiler vectorises, or bound by libm.
// Threads: any, but ForceSimdTarget only while no kernel runs.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/dispatch.cc"
#include "kernels/dispatch.h"

#include <algorithm>
#include <stdexcept>

#include "kernels/kernels.h"
#include "kernels/targets.h"

COLIBRI_BEFORE_NAMESPACE();
namespace colibri {
namespace HWY_NAMESPACE {

// Asked of the dispatch table itself: what runs, not what was wished for.
const char* TargetOfTable() { return hwy::TargetName(HWY_TARGET); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace colibri
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace colibri {
namespace {

constexpr const char* kScalar = "SCALAR";

// Best first. Listed once, before the first forcing, which Highway lets the list follow.
const std::vector<int64_t>& HighwayTargets() {
  static const std::vector<int64_t> targets = hwy::SupportedAndGeneratedTargets();
  return targets;
}

// 0 gives back the best target.
void UseHighwayTarget(int64_t target) {
  hwy::SetSupportedTargetsForTest(target);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace

HWY_EXPORT(TargetOfTable);

std::string SimdTarget() {
  return internal::scalar_forced ? kScalar : HWY_DYNAMIC_DISPATCH(TargetOfTable)();
}

std::vector<std::string> SimdTargets() {
  std::vector<std::string> names;
  for (int64_t target : HighwayTargets()) names.emplace_back(hwy::TargetName(target));
  if (std::find(names.begin(), names.end(), kScalar) == names.end()) names.emplace_back(kScalar);
  return names;
}

void ForceSimdTarget(const std::string& name) {
  const auto named = [&](int64_t target) { return name == hwy::TargetName(target); };
  const std::vector<int64_t>& targets = HighwayTargets();
  const auto found = std::find_if(targets.begin(), targets.end(), named);
  if (found == targets.end() && !name.empty() && name != kScalar) {
    throw std::invalid_argument("no SIMD target " + name + " on this machine");
  }
  internal::scalar_forced = name == kScalar;
  UseHighwayTarget(found == targets.end() ? 0 : *found);
}

void StoreKv(const float* x, size_t n, KvType type, std::byte* dst) {
  scalar::StoreKv(x, n, type, dst);
}

bool AllFinite(const float* x, size_t n) { return scalar::AllFinite(x, n); }

double LogSumExp(const float* x, size_t n) { return scalar::LogSumExp(x, n); }

}  // namespace colibri
#endif  // HWY_ONCE
