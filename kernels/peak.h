// What a core can do at best: the yardstick beside which kernels are measured.
#pragma once

#include <cstdint>

namespace colibri {

// Runs `steps` rounds of independent f32 multiply-adds on registers alone, on the SIMD target in
// use, and returns how many multiply-adds that were. Threads: any.
uint64_t RunMulAddLoop(uint64_t steps);

}  // namespace colibri
