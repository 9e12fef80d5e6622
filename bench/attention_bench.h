// Attention and index scores at real sizes beside what the core's multiply-adds allow.
// Threads: one call at a time; measures one thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace colibri {

struct AttentionBenchOptions {
  int32_t heads = 64;
  int32_t latent = 512;
  int32_t rope = 64;
  int32_t index_heads = 32;
  int32_t index_width = 128;
  int32_t positions = 4096;  // of the last row
  int32_t listed = 2048;     // of them, for a row with an index set
  std::vector<int32_t> rows = {1, 16};
  int32_t repetitions = 7;
};

struct AttentionFigure {
  std::string kernel;  // "attention", "attention, listed" or "index scores"
  KvType kv = KvType::kBF16;
  int32_t rows = 0;
  double multiply_adds = 0;  // of one call
  double seconds = 0;        // of the quickest call
  double share = 0;          // of the multiply-add loop beside it, median over the repetitions
};

// Rows are the last ones of one sequence. Takes turns: in a repetition every figure has one call
// between two runs of the multiply-add loop, so that a busy machine slows both.
std::vector<AttentionFigure> MeasureAttention(const AttentionBenchOptions& options);

}  // namespace colibri
