#include "runtime/int8_products.h"

#include <algorithm>

namespace colibri {
namespace {

// Outputs that the kernels take at once.
constexpr size_t kOutputs = 32;
// Multiply-adds of one piece of a parallel loop, some 50 to 100 us of one core (Zen 4, 230 GMAC/s
// with many rows): a task costs a microsecond, and an arrived expert shall not wait long. Two
// threads against one, 2,048 x 6,144: 1 row 1.3 times (memory), 8 rows 1.6, 40 rows 1.8.
constexpr uint64_t kPieceWork = uint64_t{1} << 23;
// One row is bound by memory and takes as long as four do.
constexpr uint64_t kLeastRows = 4;
// Inputs quantised by one piece, about 50 us.
constexpr size_t kQuantiseInputs = size_t{1} << 17;

size_t S(int32_t v) { return static_cast<size_t>(v); }

// Calls body(first, last) on pieces of the outputs of `w`.
template <class Body>
void ForOutputs(Parallel& parallel, const PackedMatrix& w, uint64_t rows, const Body& body) {
  const size_t out = S(w.rows);
  const uint64_t work = std::max(rows, kLeastRows) * S(w.cols) * kOutputs;
  const auto grain = static_cast<size_t>(std::max<uint64_t>(1, kPieceWork / work));
  parallel.For((out + kOutputs - 1) / kOutputs, grain, [&](size_t begin, size_t end) {
    body(static_cast<int32_t>(begin * kOutputs),
         static_cast<int32_t>(std::min(out, end * kOutputs)));
  });
}

}  // namespace

QuantisedRows ParallelQuantise(Parallel& parallel, const PackedMatrix& w, const float* x,
                               const int32_t* index, size_t rows, float* memory, int32_t planes) {
  const QuantisedRows q =
      QuantisedRows::Place(w, reinterpret_cast<std::byte*>(memory), rows, planes);
  const size_t in = S(w.cols);
  parallel.For(rows, std::max<size_t>(1, kQuantiseInputs / in), [&](size_t begin, size_t end) {
    QuantisedRows row = q;
    for (size_t r = begin; r < end; ++r) {
      row.values = q.values + r * q.RowValues();
      row.scales = q.scales + r * q.ScaleStride();
      row.corrections = q.corrections + r * q.RunStride();
      QuantiseRows(x + (index == nullptr ? r : S(index[r])) * in, in, 1, row);
    }
  });
  return q;
}

bool ServesToo(const QuantisedRows& x, const PackedMatrix& w, int32_t planes) {
  return x.values != nullptr && x.cols == w.cols && x.planes == planes && x.run == Int8Run(w) &&
         x.even_odd == (w.format != WeightFormat::kInt8Row);
}

void ParallelMatmulInt8(Parallel& parallel, const PackedMatrix& w, const QuantisedRows& x,
                        const int32_t* index, size_t rows, float* y, size_t stride) {
  ForOutputs(parallel, w, rows * static_cast<size_t>(x.planes), [&](int32_t first, int32_t last) {
    MatmulInt8(w, first, last, x, index, rows, y, stride > 0 ? stride : S(w.rows));
  });
}

void ParallelGateUpInt8(Parallel& parallel, const PackedMatrix& gate, const PackedMatrix& up,
                        const QuantisedRows& x, const int32_t* index, size_t rows, float* y) {
  ForOutputs(parallel, gate, 2 * rows, [&](int32_t first, int32_t last) {
    GateUpInt8(gate, up, first, last, x, index, rows, y, S(gate.rows));
  });
}

}  // namespace colibri
