// What a core can do at best: the yardstick beside which kernels are measured.
#pragma once

#include <cstddef>
#include <cstdint>

namespace colibri {

// Runs `steps` rounds of independent f32 multiply-adds on registers alone, on the SIMD target in
// use, and returns how many multiply-adds that were. Threads: any.
uint64_t RunMulAddLoop(uint64_t steps);

// The same of exact int8 dots, four products a 32-bit lane; returns multiply-adds.
uint64_t RunDotLoop(uint64_t steps);

// Adds up `bytes` bytes, a multiple of 256, in order.
void RunReadLoop(const std::byte* from, size_t bytes);

}  // namespace colibri
