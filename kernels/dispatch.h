// What the kernel sources share to choose between Highway's targets and the scalar reference.
// Private to kernels/. Threads: any; the flag changes only while no kernel runs.
#pragma once

#include <atomic>

namespace colibri::internal {

// Highway has no SCALAR target where it offers EMU128, so this choice is ours.
inline std::atomic<bool> scalar_forced{false};

}  // namespace colibri::internal

// The function that HWY_EXPORT(name) or scalar::name gives, in namespace colibri.
#define COLIBRI_DISPATCH(name)                                             \
  (internal::scalar_forced.load(std::memory_order_relaxed) ? &scalar::name \
                                                           : &HWY_DYNAMIC_DISPATCH(name))
