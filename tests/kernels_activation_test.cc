// Norms, rotation, the gated unit, scaled addition, rounding to the stored type and the checks of
// logits, on every SIMD target.
#include <doctest/doctest.h>

#include <stdexcept>

#include "tests/kernel_inputs.h"

namespace colibri {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

double Distance(const std::vector<float>& a, const std::vector<float>& b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(double{a[i]} - b[i]));
  return worst;
}

TEST_CASE("RMSNorm agrees with the reference at every length and works in place") {
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    for (size_t n = 1; n <= 70; ++n) {
      CAPTURE(n);
      const std::vector<float> x = Random(1).Floats(n), w = Random(2).Floats(n);
      std::vector<float> y(n + 1, 42.0f), expected(n + 1, 42.0f), in_place = x;
      RmsNorm(x.data(), w.data(), n, 1e-5f, y.data());
      scalar::RmsNorm(x.data(), w.data(), n, 1e-5f, expected.data());
      RmsNorm(in_place.data(), w.data(), n, 1e-5f, in_place.data());
      // |y| <= sqrt(n): a few roundings of the sum and four of the value.
      CHECK(Distance(y, expected) <= std::sqrt(static_cast<double>(n)) * 8 * kEpsilon);
      CHECK(std::memcmp(in_place.data(), y.data(), n * 4) == 0);
      CHECK(y[n] == 42.0f);
    }
  });
}

TEST_CASE("RMSNorm of a wide row stays within rounding of double arithmetic") {
  const size_t n = 6144;
  const std::vector<float> x = Random(1).Floats(n), w(n, 1.0f);
  double squares = 0;
  for (float v : x) squares += double{v} * double{v};
  const double inverse = 1 / std::sqrt(squares / n + 1e-5);
  ForEachTarget([&](const std::string& target) {
    CAPTURE(target);
    std::vector<float> y(n);
    RmsNorm(x.data(), w.data(), n, 1e-5f, y.data());
    double worst = 0;
    for (size_t i = 0; i < n; ++i) worst = std::max(worst, std::abs(y[i] - x[i] * inverse));
    CHECK(worst <= 2 * 16 * kEpsilon);  // |y| < 2; 96 additions a lane, halved by the square root
  });
}

TEST_CASE("LayerNorm agrees with the reference at every length and works in place") {
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    for (size_t n = 2; n <= 140; ++n) {
      CAPTURE(n);
      std::vector<float> x = Random(1).Floats(n);
      const std::vector<float> w = Random(2).Floats(n), b = Random(3).Floats(n);
      for (float& v : x) v += 0.5f;  // a mean to remove
      std::vector<float> y(n + 1, 42.0f), expected(n + 1, 42.0f), in_place = x;
      LayerNorm(x.data(), w.data(), b.data(), n, 1e-6f, y.data());
      scalar::LayerNorm(x.data(), w.data(), b.data(), n, 1e-6f, expected.data());
      LayerNorm(in_place.data(), w.data(), b.data(), n, 1e-6f, in_place.data());
      // Rounding of the mean (below 1.5) and of the scaled value.
      double spread = 0;
      for (size_t i = 0; i < n; ++i) spread = std::max(spread, std::abs(double{expected[i]}));
      CHECK(Distance(y, expected) <= (spread + 12) * 16 * kEpsilon);
      CHECK(std::memcmp(in_place.data(), y.data(), n * 4) == 0);
      CHECK(y[n] == 42.0f);
    }
  });
}

TEST_CASE("rotation turns interleaved pairs with the reference's bits") {
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    float two[] = {1, 0, 0, 1};
    const float quarter_cos[] = {0, 0}, quarter_sin[] = {1, 1};
    Rope(two, quarter_cos, quarter_sin, 2);
    CHECK(std::vector<float>(two, two + 4) == std::vector<float>{0, 1, -1, 0});
    for (size_t pairs = 0; pairs <= 40; ++pairs) {
      std::vector<float> x = Random(1).Floats(2 * pairs + 1), expected = x;
      const std::vector<float> cos = Random(2).Floats(pairs), sin = Random(3).Floats(pairs);
      Rope(x.data(), cos.data(), sin.data(), pairs);
      scalar::Rope(expected.data(), cos.data(), sin.data(), pairs);
      CHECK(SameBits(x, expected));
    }
  });
}

TEST_CASE("the gated unit is within a few roundings of double arithmetic, large gates included") {
  std::vector<float> gate;
  for (float g = -30; g <= 30; g += 0.0371f) gate.push_back(g);
  for (float g : {0.0f, -0.0f, 1e-41f, -1e-30f, 87.0f, -87.0f, 89.0f, -88.5f, -95.0f, 1e30f}) {
    gate.push_back(g);
  }
  const std::vector<float> up(gate.size(), 1.5f);
  ForEachTarget([&](const std::string& target) {
    CAPTURE(target);
    std::vector<float> y(gate.size());
    SiluMul(gate.data(), up.data(), gate.size(), y.data());
    double worst = 0;
    for (size_t i = 0; i < gate.size(); ++i) {
      const double g = double{gate[i]};
      const double exact = g / (1 + std::exp(-g)) * 1.5;
      worst = std::max(worst, (std::abs(y[i] - exact) - 1e-36) / (std::abs(exact) + 1e-300));
    }
    CHECK(worst <= 6 * kEpsilon);
  });
}

TEST_CASE("the gated unit keeps the ends of the range and NaN") {
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    const std::vector<float> gate{-1e4f, -3e38f, -kInfinity, kNaN, 3e38f, -105.0f, 1.0f};
    const std::vector<float> up{1, 1, 1, 1, 1, 1, kInfinity};
    std::vector<float> y(gate.size());
    SiluMul(gate.data(), up.data(), gate.size(), y.data());
    CHECK(y[0] == 0.0f);
    CHECK(y[1] == 0.0f);
    CHECK(std::isnan(y[2]));  // infinity over infinity, as in the reference
    CHECK(std::isnan(y[3]));
    CHECK(y[4] == 3e38f);
    CHECK(y[5] == 0.0f);
    CHECK(y[6] == kInfinity);
  });
}

TEST_CASE("elementwise kernels give a value the same bits in any lane, tail or stretch") {
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    const std::vector<float> gate = Random(1).Floats(67), up = Random(2).Floats(67);
    std::vector<float> silu(67), sum = up;
    SiluMul(gate.data(), up.data(), 67, silu.data());
    AddScaled(0.7f, gate.data(), 67, sum.data());
    for (size_t begin = 0; begin < 67; ++begin) {
      for (size_t n : {size_t{1}, size_t{9}, 67 - begin}) {
        if (begin + n > 67) continue;
        std::vector<float> y(n), in_place(up.begin() + static_cast<ptrdiff_t>(begin), up.end());
        SiluMul(gate.data() + begin, up.data() + begin, n, y.data());
        CHECK(std::memcmp(y.data(), silu.data() + begin, n * 4) == 0);
        AddScaled(0.7f, gate.data() + begin, n, in_place.data());
        CHECK(std::memcmp(in_place.data(), sum.data() + begin, n * 4) == 0);
        std::vector<float> over_gate = gate, over_up = up;
        SiluMul(gate.data() + begin, over_up.data() + begin, n, over_up.data() + begin);
        SiluMul(over_gate.data() + begin, up.data() + begin, n, over_gate.data() + begin);
        CHECK(std::memcmp(over_up.data() + begin, y.data(), n * 4) == 0);
        CHECK(std::memcmp(over_gate.data() + begin, y.data(), n * 4) == 0);
      }
    }
  });
}

TEST_CASE("scaled addition is one fused multiply-add and stops at its length") {
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    for (size_t n = 0; n <= 40; ++n) {
      const std::vector<float> x = Random(1).Floats(n);
      std::vector<float> y = Random(2).Floats(n + 1), expected = y;
      AddScaled(-1.3f, x.data(), n, y.data());
      scalar::AddScaled(-1.3f, x.data(), n, expected.data());
      CHECK(y[n] == expected[n]);
      if (FusesMultiplyAdd(target)) {
        CHECK(SameBits(y, expected));
      } else {
        CHECK(Distance(y, expected) <= 3 * kEpsilon);
      }
    }
  });
}

uint16_t StoredBits(float x) {
  uint16_t bits;
  StoreKv(&x, 1, KvType::kBF16, reinterpret_cast<std::byte*>(&bits));
  return bits;
}

TEST_CASE("stored values round to nearest even, overflow to infinity and keep NaN") {
  CHECK(StoredBits(1.0f) == 0x3F80);
  CHECK(StoredBits(-2.0f) == 0xC000);
  CHECK(StoredBits(0x1.01p0f) == 0x3F80);        // half way: down to even
  CHECK(StoredBits(0x1.03p0f) == 0x3F82);        // half way: up to even
  CHECK(StoredBits(0x1.010002p0f) == 0x3F81);    // just above half
  CHECK(StoredBits(0x1.00fffep0f) == 0x3F80);    // just below
  CHECK(StoredBits(0x1.fffffep127f) == 0x7F80);  // the largest float
  CHECK(StoredBits(-0x1.fffffep127f) == 0xFF80);
  CHECK(StoredBits(0x1.fep127f) == 0x7F7F);  // the largest stored number
  CHECK(StoredBits(kInfinity) == 0x7F80);
  CHECK(StoredBits(-0.0f) == 0x8000);
  CHECK(StoredBits(0x1p-149f) == 0x0000);
  CHECK(StoredBits(0x1p-133f) == 0x0001);  // the smallest stored denormal
  for (uint32_t payload : {0x7F800001u, 0xFF800001u, 0x7FFFFFFFu, 0x7FC00000u, 0x7F80FFFFu}) {
    float nan;
    std::memcpy(&nan, &payload, 4);
    CHECK((StoredBits(nan) & 0x7F80) == 0x7F80);
    CHECK((StoredBits(nan) & 0x007F) != 0);
  }
}

TEST_CASE("plain storage copies and both types write their bytes only") {
  const std::vector<float> x = Random(1).Floats(9);
  OddBytes plain(36), rounded(19);
  StoreKv(x.data(), 9, KvType::kF32, plain.data());
  CHECK(std::memcmp(plain.data(), x.data(), 36) == 0);
  rounded.data()[18] = std::byte{7};
  StoreKv(x.data(), 9, KvType::kBF16, rounded.data());
  CHECK(rounded.data()[18] == std::byte{7});
  StoreKv(nullptr, 0, KvType::kF32, nullptr);
}

TEST_CASE("one infinity or NaN anywhere is found, the largest numbers are not") {
  for (size_t n : {1u, 15u, 16u, 17u, 100u}) {
    std::vector<float> x(n, 0x1.fffffep127f);
    x[0] = -0x1.fffffep127f;
    x[n / 2] = 1e-45f;
    CHECK(AllFinite(x.data(), n));
    for (size_t at = 0; at < n; ++at) {
      for (float bad : {kInfinity, -kInfinity, kNaN, -kNaN}) {
        std::vector<float> broken = x;
        broken[at] = bad;
        CHECK_FALSE(AllFinite(broken.data(), n));
      }
    }
  }
  CHECK(AllFinite(nullptr, 0));
}

TEST_CASE("the log of summed exponentials survives large logits and masks") {
  const std::vector<float> x{1000.0f, 1000.0f, -kInfinity, 999.0f};
  CHECK(LogSumExp(x.data(), 4) ==
        doctest::Approx(1000 + std::log(2 + std::exp(-1.0))).epsilon(1e-14));
  const std::vector<float> one{-3.25f};
  CHECK(LogSumExp(one.data(), 1) == -3.25);
  const std::vector<float> masked(3, -kInfinity);
  CHECK(LogSumExp(masked.data(), 3) == -std::numeric_limits<double>::infinity());
  const std::vector<float> broken{0.0f, kNaN, 1.0f};
  CHECK(std::isnan(LogSumExp(broken.data(), 3)));
  std::vector<float> many = Random(1).Floats(1000);
  double sum = 0;
  for (float v : many) sum += std::exp(double{v});
  CHECK(LogSumExp(many.data(), 1000) == doctest::Approx(std::log(sum)).epsilon(1e-13));
}

TEST_CASE("every listed target can be forced and says its name, an unknown one is refused") {
  const std::vector<std::string> targets = SimdTargets();
  CHECK(targets.back() == "SCALAR");
  for (const std::string& name : targets) {
    ForceSimdTarget(name);
    CHECK(SimdTarget() == name);
    CHECK(SimdTargets() == targets);
  }
  ForceSimdTarget("");
  CHECK(SimdTarget() == targets.front());
  CHECK_THROWS_AS(ForceSimdTarget("MMX"), std::invalid_argument);
  CHECK(SimdTarget() == targets.front());
}

}  // namespace
}  // namespace colibri
