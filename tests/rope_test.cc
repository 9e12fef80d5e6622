// Rotary frequencies and angles against the reference's own f32 values up to position 1,048,575.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "io/container.h"
#include "kernels/kernels.h"
#include "runtime/stages.h"

namespace colibri {
namespace {

constexpr int32_t kWidth = 64;
constexpr size_t kPairs = kWidth / 2;
constexpr float kTheta = 8e6f;

template <class T>
std::vector<T> Read(const Container& file, const std::string& name) {
  const TensorEntry* entry = file.Find(name);
  REQUIRE(entry != nullptr);
  std::vector<T> values(entry->bytes / sizeof(T));
  file.Files().ReadExact(entry->file, entry->offset, std::as_writable_bytes(std::span(values)));
  return values;
}

Container Expected() { return Container({COLIBRI_SOURCE_DIR "/tests/fixtures"}); }

TEST_CASE("rotary frequencies are bit-equal to the reference's") {
  const auto want = Read<float>(Expected(), "inv_freq");
  REQUIRE(want.size() == kPairs);
  std::array<float, kPairs> got{};
  RopeFrequencies(kTheta, kWidth, got.data());
  for (size_t j = 0; j < kPairs; ++j) {
    CAPTURE(j);
    CHECK(std::memcmp(&got[j], &want[j], sizeof(float)) == 0);
  }
}

TEST_CASE("cosines and sines are the reference's up to a million positions") {
  const Container file = Expected();
  const auto positions = Read<int32_t>(file, "positions");
  const auto freq = Read<float>(file, "inv_freq");
  const auto want_cos = Read<float>(file, "cos"), want_sin = Read<float>(file, "sin");
  REQUIRE(positions.size() == 24);
  CHECK(positions.back() == 1'048'575);
  std::array<float, kPairs> cos{}, sin{};
  for (size_t p = 0; p < positions.size(); ++p) {
    RopeAngles(kTheta, kWidth, positions[p], cos.data(), sin.data());
    for (size_t j = 0; j < kPairs; ++j) {
      double tolerance = 1e-6;
      if (positions[p] >= 4096) {
        const float angle = static_cast<float>(positions[p]) * freq[j];
        const float ulp = std::nextafter(angle, std::numeric_limits<float>::infinity()) - angle;
        tolerance = std::max(tolerance, 2.0 * static_cast<double>(ulp));
      }
      CAPTURE(positions[p]);
      CAPTURE(j);
      const size_t at = p * kPairs + j;
      CHECK(std::abs(static_cast<double>(cos[j]) - static_cast<double>(want_cos[at])) <= tolerance);
      CHECK(std::abs(static_cast<double>(sin[j]) - static_cast<double>(want_sin[at])) <= tolerance);
    }
  }
}

// The frequency and the product belong in f32: exact arithmetic is a different model far out.
TEST_CASE("angles computed in double would be off by hundredths at a million positions") {
  const Container file = Expected();
  const auto positions = Read<int32_t>(file, "positions");
  const auto cos = Read<float>(file, "cos"), sin = Read<float>(file, "sin");
  double largest = 0;
  for (size_t i = 0; i < cos.size(); ++i) {
    const double freq = std::pow(8e6, -2.0 * static_cast<double>(i % kPairs) / kWidth);
    const double angle = positions[i / kPairs] * freq;
    largest = std::max({largest, std::abs(std::cos(angle) - static_cast<double>(cos[i])),
                        std::abs(std::sin(angle) - static_cast<double>(sin[i]))});
  }
  CHECK(largest > 0.02);
}

TEST_CASE("rotation turns neighbours into each other, not halves") {
  std::array<float, 4> x{1, 0, 0, 2};
  const std::array<float, 2> cos{0, 0}, sin{1, 1};
  Rope(x.data(), cos.data(), sin.data(), 2);
  CHECK(x == std::array<float, 4>{0, 1, -2, 0});
}

TEST_CASE("position zero rotates nothing") {
  std::array<float, kPairs> cos{}, sin{};
  RopeAngles(kTheta, kWidth, 0, cos.data(), sin.data());
  for (size_t j = 0; j < kPairs; ++j) {
    CHECK(cos[j] == 1.0f);
    CHECK(sin[j] == 0.0f);
  }
}

}  // namespace
}  // namespace colibri
