// The scalar reference of the integer kernels.
// Threads: any; no state.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/kernels.h"

namespace colibri::scalar {
namespace {

constexpr size_t kBlock = 64;

// Where input i of a row lies in its values.
size_t PlaceOf(const QuantisedRows& q, size_t i) {
  if (!q.even_odd) return i;
  const size_t in_block = i % kBlock;
  return i - in_block + in_block / 2 + (in_block % 2) * (kBlock / 2);
}

void QuantiseBlock(const float* x, size_t n, size_t begin, const QuantisedRows& to, int8_t* values,
                   float* scale) {
  const float steps = to.planes == 2 ? kTwoPlaneSteps : kOnePlaneSteps;
  float largest = 0;
  bool finite = true;
  for (size_t i = 0; i < n; ++i) {
    finite = finite && std::isfinite(x[i]);
    largest = std::max(largest, std::fabs(x[i]));
  }
  const bool zeros = !finite || largest < 0x1p-110f;
  *scale = !finite ? std::numeric_limits<float>::quiet_NaN() : zeros ? 0 : largest / steps;
  const float inverse = zeros ? 0 : steps / largest;
  for (size_t i = 0; i < kBlock; ++i) {
    const auto value = zeros || i >= n ? 0 : static_cast<int32_t>(std::nearbyint(x[i] * inverse));
    const int32_t high = to.planes == 2 ? (value + 64) >> 7 : value;
    values[PlaceOf(to, begin + i)] = static_cast<int8_t>(high);
    if (to.planes == 2) {
      values[to.ValueStride() + PlaceOf(to, begin + i)] = static_cast<int8_t>(value - 128 * high);
    }
  }
}

// The whole value of input i.
int32_t ValueAt(const QuantisedRows& q, const int8_t* values, size_t i) {
  const size_t place = PlaceOf(q, i);
  return q.planes == 2 ? 128 * values[place] + values[q.ValueStride() + place] : values[place];
}

int32_t WeightAt(const PackedMatrix& w, size_t row, size_t col) {
  const std::byte* data = w.data + row * RowBytes(w.format, w.cols);
  if (w.format == WeightFormat::kInt8Row) return static_cast<int8_t>(data[col]);
  const int byte = static_cast<uint8_t>(data[col / 2]);
  return (col % 2 == 0 ? byte & 15 : byte >> 4) - 8;
}

float ScaleOf(const PackedMatrix& w, size_t row, size_t col) {
  const size_t group =
      w.format == WeightFormat::kInt4Grouped ? col / static_cast<size_t>(w.group) : 0;
  const auto groups = static_cast<size_t>(ScalesPerRow(w.format, w.cols, w.group));
  float scale;
  std::memcpy(&scale, w.scales + (row * groups + group) * sizeof(scale), sizeof(scale));
  return scale;
}

float DotRow(const PackedMatrix& w, size_t output, const QuantisedRows& x, size_t row) {
  const int8_t* values = x.values + row * x.RowValues();
  const float* scales = x.scales + row * x.ScaleStride();
  const auto cols = static_cast<size_t>(x.cols), run = static_cast<size_t>(x.run);
  float sum = 0;
  for (size_t begin = 0; begin < cols; begin += run) {
    int32_t dot = 0;
    for (size_t i = begin; i < std::min(cols, begin + run); ++i) {
      dot += WeightAt(w, output, i) * ValueAt(x, values, i);
    }
    const float scale = ScaleOf(w, output, begin) * scales[begin / kBlock];
    sum = std::fma(static_cast<float>(dot), scale, sum);
  }
  return sum;
}

}  // namespace

void QuantiseRows(const float* x, size_t x_stride, size_t rows, const QuantisedRows& to) {
  const auto cols = static_cast<size_t>(to.cols), run = static_cast<size_t>(to.run);
  for (size_t r = 0; r < rows; ++r) {
    int8_t* values = to.values + r * to.RowValues();
    for (size_t begin = 0; begin < to.ValueStride(); begin += kBlock) {
      const size_t n = begin < cols ? std::min(kBlock, cols - begin) : 0;
      QuantiseBlock(x + r * x_stride + begin, n, begin, to, values,
                    to.scales + r * to.ScaleStride() + begin / kBlock);
    }
    for (size_t k = 0; k < to.RunStride(); ++k) {
      int32_t sum = 0;
      for (size_t i = k * run; i < (k + 1) * run; ++i) sum += ValueAt(to, values, i);
      to.corrections[r * to.RunStride() + k] = (to.even_odd ? -8 : -128) * sum;
    }
  }
}

void MatmulInt8(const PackedMatrix& w, int32_t first, int32_t last, const QuantisedRows& x,
                const int32_t* index, size_t rows, float* y, size_t y_stride) {
  for (size_t r = 0; r < rows; ++r) {
    const size_t row = index == nullptr ? r : static_cast<size_t>(index[r]);
    for (auto o = static_cast<size_t>(first); o < static_cast<size_t>(last); ++o) {
      y[r * y_stride + o] = DotRow(w, o, x, row);
    }
  }
}

void GateUpInt8(const PackedMatrix& gate, const PackedMatrix& up, int32_t first, int32_t last,
                const QuantisedRows& x, const int32_t* index, size_t rows, float* y,
                size_t y_stride) {
  for (size_t r = 0; r < rows; ++r) {
    const size_t row = index == nullptr ? r : static_cast<size_t>(index[r]);
    for (auto o = static_cast<size_t>(first); o < static_cast<size_t>(last); ++o) {
      const float g = DotRow(gate, o, x, row), u = DotRow(up, o, x, row);
      SiluMul(&g, &u, 1, y + r * y_stride + o);
    }
  }
}

}  // namespace colibri::scalar
