// Products with int8 activations: against the scalar reference bit for bit, in every format, group
// size and number of rows, and against the same product in f32.
#include <doctest/doctest.h>

#include <cmath>

#include "tests/kernel_inputs.h"

namespace colibri {
namespace {

size_t S(int32_t v) { return static_cast<size_t>(v); }

// Rows of activations for `w`, quantised by the target in use.
struct Activations {
  Activations(const PackedMatrix& w, const std::vector<float>& x, size_t rows, int32_t planes = 1)
      : memory(QuantisedRows::MaxBytes(rows, w.cols, planes)),
        q(QuantisedRows::Place(w, memory.data(), rows, planes)) {
    QuantiseRows(x.data(), S(w.cols), rows, q);
  }
  std::vector<std::byte> memory;
  QuantisedRows q;
};

struct Variant {
  WeightFormat format;
  int32_t group;
  int32_t planes = 1;
};
constexpr Variant kVariants[] = {
    {WeightFormat::kInt4Grouped, 64},  {WeightFormat::kInt4Grouped, 16},
    {WeightFormat::kInt4Grouped, 32},  {WeightFormat::kInt4Grouped, 128},
    {WeightFormat::kInt4Grouped, 192}, {WeightFormat::kInt4Row, 0},
    {WeightFormat::kInt8Row, 0},       {WeightFormat::kInt4Grouped, 64, 2},
    {WeightFormat::kInt4Row, 0, 2},    {WeightFormat::kInt8Row, 0, 2}};

std::vector<float> Multiply(const PackedMatrix& w, const QuantisedRows& x, size_t rows) {
  std::vector<float> y(rows * S(w.rows), NAN);
  MatmulInt8(w, 0, w.rows, x, nullptr, rows, y.data(), S(w.rows));
  return y;
}

std::vector<float> MultiplyScalar(const PackedMatrix& w, const QuantisedRows& x, size_t rows) {
  std::vector<float> y(rows * S(w.rows), NAN);
  scalar::MatmulInt8(w, 0, w.rows, x, nullptr, rows, y.data(), S(w.rows));
  return y;
}

std::vector<float> Rows(const std::vector<float>& x, size_t first, size_t rows, size_t width) {
  return {x.begin() + static_cast<std::ptrdiff_t>(first * width),
          x.begin() + static_cast<std::ptrdiff_t>((first + rows) * width)};
}

TEST_CASE("int8 products equal the scalar reference in every format at every length") {
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    for (const Variant& v : kVariants) {
      for (int32_t cols : {63, 64, 65, 96, 127, 128, 130, 191, 192, 320, 1030}) {
        const RandomMatrix w(v.format, 19, cols, v.group, static_cast<uint32_t>(cols));
        if (!TakesInt8(w.matrix)) continue;
        CAPTURE(NameOf(v.format));
        CAPTURE(v.group);
        CAPTURE(cols);
        for (size_t rows : {1u, 3u, 11u, 18u}) {
          const std::vector<float> x = Random(7).Floats(rows * S(cols));
          const Activations a(w.matrix, x, rows, v.planes);
          const std::vector<float> y = Multiply(w.matrix, a.q, rows);
          const std::vector<float> expected = MultiplyScalar(w.matrix, a.q, rows);
          if (FusesMultiplyAdd(target)) {
            CHECK(SameBits(y, expected));
          } else {
            for (size_t i = 0; i < y.size(); ++i) {
              CHECK(y[i] == doctest::Approx(expected[i]).epsilon(1e-5));
            }
          }
        }
      }
    }
  });
}

TEST_CASE("a row of an int8 product has the same bits among any number of rows") {
  constexpr size_t kRows = 300;
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    for (const Variant& v : kVariants) {
      CAPTURE(NameOf(v.format));
      CAPTURE(v.group);
      const RandomMatrix w(v.format, 40, 384, v.group, 3);
      const size_t in = S(w.matrix.cols), out = S(w.matrix.rows);
      const std::vector<float> x = Random(5).Floats(kRows * in);
      const Activations all(w.matrix, x, kRows, v.planes);
      const std::vector<float> expected = Multiply(w.matrix, all.q, kRows);
      for (size_t rows : {1u, 2u, 3u, 5u, 8u, 9u, 16u, 17u, 64u}) {
        CAPTURE(rows);
        for (size_t first : {size_t{0}, kRows - rows}) {
          const Activations some(w.matrix, Rows(x, first, rows, in), rows, v.planes);
          CHECK(SameBits(Multiply(w.matrix, some.q, rows), Rows(expected, first, rows, out)));
        }
      }
    }
  });
}

TEST_CASE("the cut of outputs and the choice of rows never show in an int8 product") {
  const RandomMatrix w(WeightFormat::kInt4Grouped, 70, 256, 64, 9);
  const std::vector<float> x = Random(5).Floats(20 * 256);
  const std::vector<int32_t> index = {19, 0, 7, 7, 3, 12, 1, 2, 18, 5, 6, 4, 9, 8, 10, 11, 13, 14};
  ForEachTarget([&](const std::string& target) {
    CAPTURE(target);
    const Activations a(w.matrix, x, 20);
    const std::vector<float> expected = Multiply(w.matrix, a.q, 20);
    for (size_t rows : {size_t{1}, size_t{4}, size_t{10}, index.size()}) {
      for (int32_t cut : {1, 15, 16, 17, 33, 69}) {
        std::vector<float> y(rows * 70, NAN);
        MatmulInt8(w.matrix, 0, cut, a.q, index.data(), rows, y.data(), 70);
        MatmulInt8(w.matrix, cut, 70, a.q, index.data(), rows, y.data(), 70);
        for (size_t r = 0; r < rows; ++r) {
          CHECK(SameBits(Rows(y, r, 1, 70), Rows(expected, S(index[r]), 1, 70)));
        }
      }
    }
  });
}

TEST_CASE("gate and up in one pass equal the two products and their SiluMul") {
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    for (const Variant& v : kVariants) {
      const RandomMatrix gate(v.format, 37, 200, v.group, 1), up(v.format, 37, 200, v.group, 2);
      if (!TakesInt8(gate.matrix)) continue;
      for (size_t rows : {1u, 4u, 12u, 21u}) {
        const std::vector<float> x = Random(5).Floats(rows * 200);
        const Activations a(gate.matrix, x, rows, v.planes);
        const std::vector<float> g = Multiply(gate.matrix, a.q, rows);
        const std::vector<float> u = Multiply(up.matrix, a.q, rows);
        std::vector<float> expected(g.size()), y(g.size(), NAN);
        SiluMul(g.data(), u.data(), g.size(), expected.data());
        GateUpInt8(gate.matrix, up.matrix, 0, 20, a.q, nullptr, rows, y.data(), 37);
        GateUpInt8(gate.matrix, up.matrix, 20, 37, a.q, nullptr, rows, y.data(), 37);
        CHECK(SameBits(y, expected));
      }
    }
  });
}

TEST_CASE("quantised rows equal the scalar reference on every target") {
  std::vector<float> x = Random(11).Floats(3 * 200);
  for (size_t i = 64; i < 128; ++i) x[i] = 0;            // a block of zeros
  for (size_t i = 128; i < 192; ++i) x[i] *= 0x1p-120f;  // too small for a scale
  for (size_t i = 200; i < 264; ++i) x[i] *= 1e37f;      // near the largest
  x[270] = INFINITY;
  x[400] = NAN;
  for (const Variant& v : kVariants) {
    const RandomMatrix w(v.format, 1, 200, v.group, 1);
    if (!TakesInt8(w.matrix)) continue;
    std::vector<std::byte> expected(QuantisedRows::MaxBytes(3, 200, v.planes));
    scalar::QuantiseRows(x.data(), 200, 3,
                         QuantisedRows::Place(w.matrix, expected.data(), 3, v.planes));
    ForEachTarget([&](const std::string& target) {
      CAPTURE(target);
      const Activations a(w.matrix, x, 3, v.planes);
      CHECK(a.memory == expected);
    });
  }
}

TEST_CASE("an activation that is not finite makes every output of its row not finite") {
  const RandomMatrix w(WeightFormat::kInt4Grouped, 20, 128, 64, 1);
  for (float bad : {INFINITY, -INFINITY, float{NAN}}) {
    std::vector<float> x = Random(1).Floats(2 * 128);
    x[128 + 77] = bad;
    const Activations a(w.matrix, x, 2);
    const std::vector<float> y = Multiply(w.matrix, a.q, 2);
    CHECK(AllFinite(y.data(), 20));
    for (size_t o = 20; o < 40; ++o) CHECK(std::isnan(y[o]));
  }
}

TEST_CASE("the largest weights and activations do not overflow a dot") {
  for (const Variant& v : kVariants) {
    RandomMatrix w(v.format, 16, 128, v.group, 1);
    if (!TakesInt8(w.matrix)) continue;
    for (int extreme : {0x00, 0xFF, 0x80, 0x7F}) {
      std::memset(w.data.data(), extreme, w.data.size());
      for (float sign : {1.0f, -1.0f}) {
        const std::vector<float> x(20 * 128, sign);
        ForEachTarget([&](const std::string& target) {
          CAPTURE(target);
          const Activations a(w.matrix, x, 20, v.planes);
          for (size_t rows : {1u, 4u, 16u, 20u}) {
            const std::vector<float> y = Multiply(w.matrix, a.q, rows);
            const std::vector<float> expected = MultiplyScalar(w.matrix, a.q, rows);
            for (size_t i = 0; i < y.size(); ++i) CHECK(y[i] == doctest::Approx(expected[i]));
          }
        });
      }
    }
  }
}

TEST_CASE("an int8 product errs from the f32 product by no more than half a step an input") {
  const RandomMatrix w(WeightFormat::kInt4Grouped, 8, 512, 64, 1);
  const std::vector<float> x = Random(5).Floats(512);
  const Activations a(w.matrix, x, 1);
  const std::vector<float> y = Multiply(w.matrix, a.q, 1);
  std::vector<float> exact(8), weights(512);
  Matmul(w.matrix, 0, 8, x.data(), 512, 1, exact.data(), 8);
  for (int32_t o = 0; o < 8; ++o) {
    DequantiseRow(w.matrix, o, weights.data());
    double bound = 1e-3;
    for (size_t i = 0; i < 512; ++i) bound += std::abs(weights[i]) * 0.5 * a.q.scales[i / 64];
    CHECK(std::abs(y[S(o)] - exact[S(o)]) <= bound);
    CHECK(y[S(o)] != exact[S(o)]);
  }
}

TEST_CASE("quantised rows take no more room than the rows they come from") {
  for (int32_t cols = 64; cols < 2000; ++cols) {
    CHECK(QuantisedRows::MaxBytes(1, cols) <= 4 * S(cols));
    CHECK(QuantisedRows::MaxBytes(1, cols, 2) <= 4 * S((cols + 127) / 128 * 128));
  }
}

TEST_CASE("two planes err from the f32 product 30 times less than one") {
  for (const Variant& v : kVariants) {
    if (v.planes == 1) continue;
    const RandomMatrix w(v.format, 8, 512, v.group, 1);
    const std::vector<float> x = Random(5).Floats(512);
    const Activations one(w.matrix, x, 1), two(w.matrix, x, 1, 2);
    std::vector<float> exact(8);
    Matmul(w.matrix, 0, 8, x.data(), 512, 1, exact.data(), 8);
    const auto error = [&](const std::vector<float>& y) {
      double sum = 0;
      for (size_t o = 0; o < 8; ++o) sum += std::abs(double{y[o]} - exact[o]);
      return sum;
    };
    const double of_one = error(Multiply(w.matrix, one.q, 1));
    CHECK(error(Multiply(w.matrix, two.q, 1)) < of_one / 30);
    CHECK(of_one > 0);
  }
}

TEST_CASE("groups of 48 and 96, rows below 64 inputs and plain weights have no integer product") {
  for (int32_t group : {48, 96}) {
    CHECK_FALSE(TakesInt8(RandomMatrix(WeightFormat::kInt4Grouped, 1, 192, group, 1).matrix));
  }
  CHECK(TakesInt8(RandomMatrix(WeightFormat::kInt4Grouped, 1, 90, 96, 1).matrix));
  CHECK_FALSE(TakesInt8(RandomMatrix(WeightFormat::kInt8Row, 1, 63, 0, 1).matrix));
  for (WeightFormat format : {WeightFormat::kF32, WeightFormat::kBF16, WeightFormat::kF16}) {
    CHECK_FALSE(TakesInt8(RandomMatrix(format, 1, 64, 0, 1).matrix));
  }
}

}  // namespace
}  // namespace colibri
