// Which positions a row attends to: ties, signed zeros, broken scores.
#include "runtime/index_select.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace colibri {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<int32_t> Select(const std::vector<float>& scores, int32_t keep) {
  std::vector<int32_t> chosen(std::min(static_cast<size_t>(keep), scores.size()), -1);
  const int32_t count = SelectPositions(scores, keep, chosen);
  chosen.resize(static_cast<size_t>(count));
  return chosen;
}

using Positions = std::vector<int32_t>;

TEST_CASE("the highest scores are kept, in order of position") {
  CHECK(Select({3, 1, 5, 2, 4}, 3) == Positions{0, 2, 4});
  CHECK(Select({-3, -1, -5}, 1) == Positions{1});
}

TEST_CASE("of equal scores the lower positions are kept") {
  CHECK(Select({0, 0, 0, 0}, 2) == Positions{0, 1});
  CHECK(Select({1, 2, 1, 2, 1}, 3) == Positions{0, 1, 3});
  CHECK(Select({0, 7, 0, 0, 7}, 3) == Positions{0, 1, 4});
}

TEST_CASE("minus zero ties with zero on either side of the boundary") {
  CHECK(Select({-0.0f, 0.0f, 0.0f}, 1) == Positions{0});
  CHECK(Select({0.0f, -0.0f, -0.0f}, 2) == Positions{0, 1});
  CHECK(Select({-1.0f, -0.0f, 0.0f, -0.0f, 0.0f}, 2) == Positions{1, 2});
  CHECK(Select({-0.0f, 5.0f, 0.0f, -0.0f}, 2) == Positions{0, 1});
}

TEST_CASE("zeros beat negative scores") {
  CHECK(Select({-1, 0, -2, 0}, 2) == Positions{1, 3});
  CHECK(Select({-1e-38f, -0.0f}, 1) == Positions{1});
}

TEST_CASE("no more positions than asked for means all of them") {
  CHECK(Select({}, 3).empty());
  CHECK(Select({kNaN}, 1) == Positions{0});
  CHECK(Select({2, 1, 3}, 3) == Positions{0, 1, 2});
  CHECK(Select({2, 1}, 8) == Positions{0, 1});
}

TEST_CASE("scores that are not finite neither crash nor shorten the selection") {
  CHECK(Select({kNaN, 1, kNaN, -5}, 2) == Positions{1, 3});
  CHECK(Select({kNaN, kNaN, kNaN}, 2) == Positions{0, 1});
  CHECK(Select({1, kInfinity, -kInfinity, 2}, 3) == Positions{0, 1, 3});
  CHECK(Select({kNaN, 3, kNaN, kNaN}, 3) == Positions{0, 1, 2});
  CHECK(Select({-kInfinity, kNaN, -kInfinity}, 2) == Positions{0, 1});
}

// Few distinct values, so that nearly every boundary falls among ties; numbers of any size; numbers
// that differ in their last bits alone.
TEST_CASE("a selection equals the head of a stable sort") {
  std::mt19937 random(7);
  for (int round = 0; round < 900; ++round) {
    const size_t n = 1 + random() % 200;
    const auto keep = static_cast<int32_t>(1 + random() % 80);
    std::vector<float> scores(n);
    const float values[] = {-2.0f, -0.0f, 0.0f, 1.5f, 1e-40f};
    for (float& s : scores) {
      if (round % 3 == 0) s = values[random() % (2 + random() % 4)];
      if (round % 3 == 1) s = std::bit_cast<float>(static_cast<uint32_t>(random()));
      if (round % 3 == 2)
        s = std::bit_cast<float>(static_cast<uint32_t>(0xC1200000u + random() % 64));
      if (std::isnan(s)) s = kInfinity;
    }
    Positions order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
    });
    order.resize(std::min(n, static_cast<size_t>(keep)));
    std::sort(order.begin(), order.end());
    REQUIRE(Select(scores, keep) == order);
  }
}

}  // namespace
}  // namespace colibri
