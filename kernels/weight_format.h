// The packed weight formats that kernels multiply with, as they lie on disk: sizes, nibble order,
// scale layout. Pure description; no SIMD, no model.
#pragma once

#include <cstddef>
#include <cstdint>

namespace colibri {

// int4: two columns a byte, the even one in the low nibble, value nibble - 8; rows start on a byte.
// int8: two's complement. Scales are f32, one a row or one a group of `group` inputs (the last
// group of a row may be short), row-major [rows][groups]. Plain formats have no scales.
enum class WeightFormat : uint8_t { kF32, kBF16, kF16, kInt8Row, kInt4Row, kInt4Grouped };

// A view of one matrix [rows (outputs) x cols (inputs)]. Neither pointer need be aligned: both may
// point into an expert slot that mirrors unaligned file offsets. Owns nothing.
struct PackedMatrix {
  WeightFormat format = WeightFormat::kF32;
  int32_t rows = 0;
  int32_t cols = 0;
  int32_t group = 0;  // inputs a scale covers (kInt4Grouped); 0 for the others
  const std::byte* data = nullptr;
  const std::byte* scales = nullptr;
};

constexpr bool HasScales(WeightFormat f) {
  return f == WeightFormat::kInt8Row || f == WeightFormat::kInt4Row ||
         f == WeightFormat::kInt4Grouped;
}

constexpr uint64_t RowBytes(WeightFormat f, int64_t cols) {
  switch (f) {
    case WeightFormat::kF32:
      return static_cast<uint64_t>(cols) * 4;
    case WeightFormat::kBF16:
    case WeightFormat::kF16:
      return static_cast<uint64_t>(cols) * 2;
    case WeightFormat::kInt8Row:
      return static_cast<uint64_t>(cols);
    case WeightFormat::kInt4Row:
    case WeightFormat::kInt4Grouped:
      return static_cast<uint64_t>((cols + 1) / 2);
  }
  return 0;
}

constexpr int64_t ScalesPerRow(WeightFormat f, int64_t cols, int64_t group) {
  if (!HasScales(f)) return 0;
  return f == WeightFormat::kInt4Grouped ? (cols + group - 1) / group : 1;
}

// Inputs of one exact integer dot where activations are int8; 0 for matrices that have no integer
// kernel: other formats, groups other than 16, 32, multiples of 64 or whole rows (decisions), and
// rows shorter than the 64 inputs that share an activation scale.
constexpr int32_t Int8Run(const PackedMatrix& m) {
  if (m.cols < 64) return 0;
  if (m.format == WeightFormat::kInt8Row || m.format == WeightFormat::kInt4Row) return 64;
  if (m.format != WeightFormat::kInt4Grouped) return 0;
  if (m.group >= m.cols || m.group % 64 == 0) return 64;
  return m.group == 16 || m.group == 32 ? m.group : 0;
}
// The largest magnitude of a quantised activation: int8's, and two planes' 127 * 128 + 63.
inline constexpr float kOnePlaneSteps = 127;
inline constexpr float kTwoPlaneSteps = 16319;
constexpr bool TakesInt8(const PackedMatrix& m) { return Int8Run(m) > 0; }

// Whether two planes of activations can be multiplied with it: runs of 64.
constexpr bool TakesTwoPlanes(const PackedMatrix& m) { return Int8Run(m) == 64; }

constexpr uint64_t DataBytes(const PackedMatrix& m) {
  return RowBytes(m.format, m.cols) * static_cast<uint64_t>(m.rows);
}
constexpr uint64_t ScaleBytes(const PackedMatrix& m) {
  return static_cast<uint64_t>(ScalesPerRow(m.format, m.cols, m.group)) *
         static_cast<uint64_t>(m.rows) * 4;
}

}  // namespace colibri
