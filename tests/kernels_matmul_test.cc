// Products with packed weights: against double arithmetic and the scalar reference, in every
// format and at every length, and the promise that rows, cuts and addresses never show in the bits.
#include <doctest/doctest.h>

#include "tests/kernel_inputs.h"

namespace colibri {
namespace {

constexpr WeightFormat kFormats[] = {WeightFormat::kF32,     WeightFormat::kBF16,
                                     WeightFormat::kF16,     WeightFormat::kInt8Row,
                                     WeightFormat::kInt4Row, WeightFormat::kInt4Grouped};

std::vector<float> Multiply(const PackedMatrix& w, const std::vector<float>& x, size_t rows) {
  std::vector<float> y(rows * static_cast<size_t>(w.rows), NAN);
  Matmul(w, 0, w.rows, x.data(), static_cast<size_t>(w.cols), rows, y.data(),
         static_cast<size_t>(w.rows));
  return y;
}

std::vector<float> MultiplyScalar(const PackedMatrix& w, const std::vector<float>& x, size_t rows) {
  std::vector<float> y(rows * static_cast<size_t>(w.rows), NAN);
  scalar::Matmul(w, 0, w.rows, x.data(), static_cast<size_t>(w.cols), rows, y.data(),
                 static_cast<size_t>(w.rows));
  return y;
}

// Largest |y - exact| in units of epsilon * sum of |w * x|, exact in double. Sixteen lanes of
// cols / 16 sums each may err by that many units, and a few for the reduction.
double ErrorUnits(const PackedMatrix& w, const std::vector<float>& x, size_t rows,
                  const std::vector<float>& y) {
  const size_t cols = static_cast<size_t>(w.cols);
  const size_t outputs = static_cast<size_t>(w.rows);
  std::vector<float> weights(cols);
  double worst = 0;
  for (size_t o = 0; o < outputs; ++o) {
    scalar::DequantiseRow(w, static_cast<int32_t>(o), weights.data());
    for (size_t r = 0; r < rows; ++r) {
      double sum = 0, norm = 1e-30;
      for (size_t i = 0; i < cols; ++i) {
        const double product = double{weights[i]} * double{x[r * cols + i]};
        sum += product;
        norm += std::abs(product);
      }
      const double error = std::abs(double{y[r * outputs + o]} - sum);
      worst = std::max(worst, error / (norm * kEpsilon));
    }
  }
  return worst;
}

void CheckProduct(const RandomMatrix& w, size_t rows, const std::string& target) {
  const PackedMatrix& m = w.matrix;
  CAPTURE(target);
  CAPTURE(NameOf(m.format));
  CAPTURE(m.cols);
  CAPTURE(m.group);
  CAPTURE(rows);
  const std::vector<float> x = Random(7).Floats(rows * static_cast<size_t>(m.cols));
  const std::vector<float> y = Multiply(m, x, rows);
  CHECK(ErrorUnits(m, x, rows, y) <= m.cols / 16 + 6);
  if (FusesMultiplyAdd(target)) CHECK(SameBits(y, MultiplyScalar(m, x, rows)));
}

TEST_CASE("every format and group size gives the product at every length") {
  ForEachTarget([](const std::string& target) {
    for (WeightFormat format : kFormats) {
      const bool grouped = format == WeightFormat::kInt4Grouped;
      for (int32_t group : {16, 32, 48, 64, 96, 128, 192, 256}) {
        if (!grouped && group != 16) continue;
        for (int32_t cols = 1; cols <= 2 * 16 + 3; ++cols) {
          const RandomMatrix w(format, 5, cols, group, static_cast<uint32_t>(cols));
          for (size_t rows : {1u, 2u, 5u}) CheckProduct(w, rows, target);
        }
        for (int32_t cols : {63, 64, 65, 127, 160, 257, 288, 511, 512, 513, 600, 1040}) {
          const RandomMatrix w(format, 3, cols, group, static_cast<uint32_t>(cols));
          for (size_t rows : {1u, 3u}) CheckProduct(w, rows, target);
        }
      }
    }
  });
}

TEST_CASE("groups that sixteen does not divide still give the product") {
  ForEachTarget([](const std::string& target) {
    for (int32_t group : {1, 7, 8, 20, 40}) {
      for (int32_t cols : {1, 15, 41, 64, 600}) {
        const RandomMatrix w(WeightFormat::kInt4Grouped, 5, cols, group, 3);
        for (size_t rows : {1u, 5u}) CheckProduct(w, rows, target);
      }
    }
  });
}

TEST_CASE("a row of a product has the same bits whatever the rows beside it") {
  ForEachTarget([](const std::string& target) {
    for (WeightFormat format : kFormats) {
      for (int32_t cols : {33, 71, 192, 1041}) {
        const RandomMatrix w(format, 37, cols, 48, 11);
        const size_t stride = static_cast<size_t>(cols);
        const size_t most = cols == 192 ? 300 : 70;
        const std::vector<float> x = Random(5).Floats(most * stride);
        const std::vector<float> all = Multiply(w.matrix, x, most);
        for (size_t rows : {1u, 2u, 3u, 5u, 8u, 64u}) {
          for (size_t first : {size_t{0}, most - rows}) {
            const std::vector<float> part(x.begin() + static_cast<ptrdiff_t>(first * stride),
                                          x.end());
            const std::vector<float> y = Multiply(w.matrix, part, rows);
            CAPTURE(target);
            CAPTURE(NameOf(format));
            CAPTURE(cols);
            CAPTURE(rows);
            CHECK(std::memcmp(y.data(), all.data() + first * 37, rows * 37 * 4) == 0);
          }
        }
      }
    }
  });
}

TEST_CASE("a cut of the outputs writes its own outputs only, with the same bits") {
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    for (WeightFormat format : kFormats) {
      CAPTURE(NameOf(format));
      const RandomMatrix w(format, 70, 211, 32, 13);
      for (size_t rows : {1u, 3u, 9u}) {
        const std::vector<float> x = Random(5).Floats(rows * 211);
        const std::vector<float> all = Multiply(w.matrix, x, rows);
        for (const auto& cuts : std::vector<std::vector<int32_t>>{
                 {0, 1, 2, 5, 70}, {0, 33, 70}, {0, 31, 32, 64, 69, 70}, {0, 0, 70, 70}}) {
          std::vector<float> y(all.size(), NAN);
          for (size_t c = 0; c + 1 < cuts.size(); ++c) {
            Matmul(w.matrix, cuts[c], cuts[c + 1], x.data(), 211, rows, y.data(), 70);
          }
          CHECK(SameBits(y, all));
        }
        std::vector<float> y(all.size(), 42.0f);
        Matmul(w.matrix, 7, 12, x.data(), 211, rows, y.data(), 70);
        for (size_t i = 0; i < y.size(); ++i) {
          const bool asked = i % 70 >= 7 && i % 70 < 12;
          CHECK(y[i] == (asked ? all[i] : 42.0f));
        }
      }
    }
  });
}

TEST_CASE("strides wider than the rows and other addresses leave the bits alone") {
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    for (WeightFormat format : kFormats) {
      const RandomMatrix w(format, 6, 93, 32, 17);
      const std::vector<float> x = Random(5).Floats(4 * 93);
      for (size_t rows : {1u, 4u}) {
        const std::vector<float> packed = Multiply(w.matrix, x, rows);
        for (size_t shift : {1u, 2u, 3u, 5u}) {
          std::vector<float> spread(shift + 4 * 101, NAN);
          for (size_t r = 0; r < rows; ++r) {
            std::memcpy(spread.data() + shift + r * 101, x.data() + r * 93, 93 * 4);
          }
          // The same matrix at an address that differs by one byte.
          std::vector<std::byte> moved(w.data.size() + 8), moved_scales(w.scales.size() + 8);
          std::memcpy(moved.data() + shift, w.data.data(), w.data.size());
          std::memcpy(moved_scales.data() + shift, w.scales.data(), w.scales.size());
          PackedMatrix copy = w.matrix;
          copy.data = moved.data() + shift;
          if (HasScales(format)) copy.scales = moved_scales.data() + shift;
          std::vector<float> y(4 * 11, NAN);
          Matmul(copy, 0, 6, spread.data() + shift, 101, rows, y.data(), 11);
          for (size_t r = 0; r < rows; ++r) {
            CHECK(std::memcmp(y.data() + r * 11, packed.data() + r * 6, 6 * 4) == 0);
            CHECK(std::isnan(y[r * 11 + 6]));
          }
        }
      }
    }
  });
}

TEST_CASE("extreme weights, scales and activations multiply as the reference does") {
  const float denormal = 1e-41f;
  ForEachTarget([&](const std::string& target) {
    CAPTURE(target);
    for (std::byte fill : {std::byte{0x88}, std::byte{0x00}, std::byte{0xFF}, std::byte{0x80}}) {
      for (float scale : {0.0f, 1.0f, denormal, 1e30f}) {
        for (WeightFormat format : {WeightFormat::kInt4Grouped, WeightFormat::kInt8Row}) {
          RandomMatrix w(format, 2, 75, 32, 1);
          std::memset(w.data.data(), static_cast<int>(fill), w.data.size());
          for (size_t i = 0; i < w.scales.size() / 4; ++i)
            RandomMatrix::PutFloat(&w.scales, i, scale);
          for (float value : {1.0f, denormal, -1e-38f, 1e5f}) {
            const std::vector<float> x(3 * 75, value);
            const std::vector<float> y = Multiply(w.matrix, x, 3);
            const std::vector<float> expected = MultiplyScalar(w.matrix, x, 3);
            if (FusesMultiplyAdd(target)) {
              CHECK(y == expected);
            } else {
              // Equal terms: at most 75 roundings of a sum no larger than the result, each of
              // which may also lose a denormal.
              const double bound = 75 * (kEpsilon * std::abs(expected[0]) + 2e-45);
              CHECK((y[0] == expected[0] || std::abs(double{y[0]} - expected[0]) <= bound));
            }
            if (format == WeightFormat::kInt4Grouped && fill == std::byte{0x88}) CHECK(y[0] == 0);
            if (format == WeightFormat::kInt4Grouped && fill == std::byte{0} && scale == 1.0f &&
                value == 1.0f) {
              CHECK(y[0] == -8.0f * 75);
            }
          }
        }
      }
    }
  });
}

TEST_CASE("a row dequantises to the very values of the reference") {
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    for (WeightFormat format : kFormats) {
      CAPTURE(NameOf(format));
      for (int32_t group : {16, 20, 48, 64}) {
        for (int32_t cols : {1, 15, 16, 17, 31, 33, 513, 1031}) {
          const RandomMatrix w(format, 3, cols, group, 23);
          for (int32_t row = 0; row < 3; ++row) {
            std::vector<float> y(static_cast<size_t>(cols) + 1, 42.0f), expected = y;
            DequantiseRow(w.matrix, row, y.data());
            scalar::DequantiseRow(w.matrix, row, expected.data());
            CHECK(SameBits(y, expected));
            CHECK(y.back() == 42.0f);
          }
        }
      }
    }
  });
}

TEST_CASE("nibbles, signed bytes and halves mean what the format says") {
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    RandomMatrix w(WeightFormat::kInt4Row, 1, 3, 0, 1);
    w.data.data()[0] = std::byte{0xF0};  // -8, 7
    w.data.data()[1] = std::byte{0x09};  // 1, and nothing in the upper half
    RandomMatrix::PutFloat(&w.scales, 0, 0.5f);
    float y[3];
    DequantiseRow(w.matrix, 0, y);
    CHECK(std::vector<float>(y, y + 3) == std::vector<float>{-4.0f, 3.5f, 0.5f});

    RandomMatrix bytes(WeightFormat::kInt8Row, 1, 3, 0, 1);
    bytes.data.data()[0] = std::byte{0x80};
    bytes.data.data()[1] = std::byte{0x7F};
    bytes.data.data()[2] = std::byte{0xFF};
    RandomMatrix::PutFloat(&bytes.scales, 0, 2.0f);
    DequantiseRow(bytes.matrix, 0, y);
    CHECK(std::vector<float>(y, y + 3) == std::vector<float>{-256.0f, 254.0f, -2.0f});

    // 1, the smallest denormal, the largest number, the largest denormal, infinities and NaN.
    const uint16_t halves[] = {0x3C00, 0x0001, 0x7BFF, 0x83FF, 0x7C00, 0xFC00, 0x7E01};
    RandomMatrix f16(WeightFormat::kF16, 1, 7, 0, 1);
    for (size_t i = 0; i < 7; ++i) RandomMatrix::PutHalf(&f16.data, i, halves[i]);
    float z[7];
    DequantiseRow(f16.matrix, 0, z);
    CHECK(std::vector<float>(z, z + 4) ==
          std::vector<float>{1.0f, 0x1p-24f, 65504.0f, -1023 * 0x1p-24f});
    CHECK(z[4] == std::numeric_limits<float>::infinity());
    CHECK(z[5] == -std::numeric_limits<float>::infinity());
    CHECK(std::isnan(z[6]));
  });
}

TEST_CASE("every half-precision number is read exactly") {
  RandomMatrix w(WeightFormat::kF16, 1, 65536, 0, 1);
  for (size_t i = 0; i < 65536; ++i) RandomMatrix::PutHalf(&w.data, i, static_cast<uint16_t>(i));
  std::vector<float> expected(65536);
  scalar::DequantiseRow(w.matrix, 0, expected.data());
  ForEachTarget([&](const std::string& target) {
    CAPTURE(target);
    std::vector<float> y(65536);
    DequantiseRow(w.matrix, 0, y.data());
    size_t wrong = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      const bool nan = std::isnan(expected[i]);
      if (nan ? !std::isnan(y[i]) : std::memcmp(&y[i], &expected[i], 4) != 0) ++wrong;
    }
    CHECK(wrong == 0);
  });
}

TEST_CASE("the transposed product adds outputs in order, with the reference's bits") {
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    for (WeightFormat format : kFormats) {
      CAPTURE(NameOf(format));
      for (int32_t cols : {1, 7, 16, 33, 64, 65, 130, 512}) {
        CAPTURE(cols);
        const RandomMatrix w(format, 80, cols, 48, 29);
        const size_t stride = static_cast<size_t>(cols) + 2;
        for (const auto& [first, last] :
             std::vector<std::pair<int32_t, int32_t>>{{0, 80}, {3, 4}, {10, 75}, {5, 5}}) {
          const size_t outputs = static_cast<size_t>(last - first);
          const std::vector<float> x = Random(5).Floats(7 * (outputs + 3));
          std::vector<float> one_by_one(7 * stride, NAN), expected = one_by_one;
          for (size_t r = 0; r < 7; ++r) {
            MatmulTransposed(w.matrix, first, last, x.data() + r * (outputs + 3), outputs + 3, 1,
                             one_by_one.data() + r * stride, stride);
          }
          std::vector<float> together(7 * stride, NAN);
          MatmulTransposed(w.matrix, first, last, x.data(), outputs + 3, 7, together.data(),
                           stride);
          CHECK(SameBits(together, one_by_one));
          scalar::MatmulTransposed(w.matrix, first, last, x.data(), outputs + 3, 7, expected.data(),
                                   stride);
          if (FusesMultiplyAdd(target)) {
            CHECK(SameBits(together, expected));
            continue;
          }
          for (size_t i = 0; i < together.size(); ++i) {
            if (std::isnan(expected[i])) continue;
            // |w| < 2.6 and |x| < 1: each of the sums may err by epsilon times what it has reached.
            CHECK(std::abs(together[i] - expected[i]) <= 80 * 80 * 2.6 * kEpsilon);
          }
        }
      }
    }
  });
}

TEST_CASE("a transposed product over many rows equals its rows one at a time") {
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    const RandomMatrix w(WeightFormat::kInt4Grouped, 20, 90, 64, 31);
    const std::vector<float> x = Random(5).Floats(130 * 20);
    std::vector<float> together(130 * 90), one(90);
    MatmulTransposed(w.matrix, 0, 20, x.data(), 20, 130, together.data(), 90);
    for (size_t r = 0; r < 130; ++r) {
      MatmulTransposed(w.matrix, 0, 20, x.data() + r * 20, 20, 1, one.data(), 90);
      CHECK(std::memcmp(one.data(), together.data() + r * 90, 90 * 4) == 0);
    }
  });
}

}  // namespace
}  // namespace colibri
