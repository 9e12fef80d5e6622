// Seconds of computing at some widths, measured with an engine over a sample of a model: as many of
// its layers as fit into the memory given, weights made up, experts that are "read" at once.
// Threads: one call at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/prediction.h"
#include "runtime/tokenizer.h"

namespace colibri {

struct ComputeRequest {
  std::vector<std::string> model;  // directories
  int32_t threads = 1;
  bool f32_activations = false, dense_attention = false;
  KvType kv_type = KvType::kBF16;
  int32_t most_rows = 0;  // 0: as wide as is usual
  uint64_t memory = 0;    // bytes, the sample's own headers and tables among them
};

// The drive apart. Throws ModelError, IoError, and IoError where the memory is too little.
Speeds MeasureComputing(const ComputeRequest& request, const Tokenizer& tokenizer);

}  // namespace colibri
