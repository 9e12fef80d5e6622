// Products with int8 activations split over threads, for the classes of matrices that take them
// (decisions: routed and shared experts, dense FFN, o_proj, lm_head), or two planes of them (the
// projections into attention and index, eh_proj). The choice depends on the
// matrix and the model's setting alone, never on the number of rows.
// Threads: as Stages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"
#include "runtime/parallel.h"

namespace colibri {

// Rows index[0 .. rows) of x, or the first ones without an index, laid out for `w` in `memory` (at
// least `rows` rows of floats, aligned to 4).
QuantisedRows ParallelQuantise(Parallel& parallel, const PackedMatrix& w, const float* x,
                               const int32_t* index, size_t rows, float* memory,
                               int32_t planes = 1);

// True if `x`, laid out for another matrix, serves `w` too.
bool ServesToo(const QuantisedRows& x, const PackedMatrix& w, int32_t planes = 1);

// y[r][o], tight or with rows of `stride` floats; row r of the product takes row index[r] of x, or
// r without an index.
void ParallelMatmulInt8(Parallel& parallel, const PackedMatrix& w, const QuantisedRows& x,
                        const int32_t* index, size_t rows, float* y, size_t stride = 0);
void ParallelGateUpInt8(Parallel& parallel, const PackedMatrix& gate, const PackedMatrix& up,
                        const QuantisedRows& x, const int32_t* index, size_t rows, float* y);

}  // namespace colibri
