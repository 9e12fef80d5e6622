// `colibri-bench kernels`: products with packed weights at real expert shape, beside what the same
// machine reads and multiplies in plain loops in the same run; attention likewise.
// Threads: one call at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/table.h"
#include "kernels/kernels.h"

namespace colibri {

struct KernelsOptions {
  std::vector<std::string> formats = {"int4-g64", "int4-row", "int8-row"};
  // int8x2: two planes of int8, of which each costs a dot.
  std::vector<std::string> activations = {"int8", "int8x2", "f32"};
  std::vector<std::string> targets;  // none: the best of the machine
  std::vector<int32_t> rows = {1, 2, 4, 8, 16, 64, 256};
  std::vector<std::string> shapes = {"2048x6144", "6144x2048"};  // outputs x inputs
  int32_t threads = 1;
  int32_t repetitions = 5;
  uint64_t bytes = uint64_t{512} << 20;  // of weights that take turns
  bool attention = true;
  TableFormat format = TableFormat::kText;
};

// Throws UsageError for unknown names, IoError for want of memory.
int RunKernels(const KernelsOptions& options);

}  // namespace colibri
