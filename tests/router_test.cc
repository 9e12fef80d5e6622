// The router's choice for one row: ties, biases of real models, groups, broken logits.
#include "runtime/router.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace colibri {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

ModelConfig Config(int32_t experts, int32_t top_k, int32_t groups = 1, int32_t top_groups = 1) {
  ModelConfig c;
  c.experts = experts;
  c.top_k = top_k;
  c.groups = groups;
  c.top_groups = top_groups;
  c.norm_top_k = true;
  c.routed_scale = 2.5f;
  return c;
}

struct Choice {
  std::vector<int32_t> experts;
  std::vector<float> weights;
};

Choice Choose(const ModelConfig& c, const std::vector<float>& logits, std::vector<float> bias) {
  bias.resize(logits.size());
  std::vector<float> scratch(logits.size());
  Choice choice;
  choice.experts.resize(static_cast<size_t>(c.top_k));
  choice.weights.resize(static_cast<size_t>(c.top_k));
  ChooseExperts(c, logits, bias, scratch, choice.experts, choice.weights);
  return choice;
}

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

using Experts = std::vector<int32_t>;

TEST_CASE("equal choices go to the lower expert, best choice first") {
  CHECK(Choose(Config(6, 3), {0, 0, 0, 0, 0, 0}, {}).experts == Experts{0, 1, 2});
  CHECK(Choose(Config(6, 3), {1, 2, 1, 2, 1, 2}, {}).experts == Experts{1, 3, 5});
  CHECK(Choose(Config(6, 4), {1, 2, 1, 2, 1, 1}, {}).experts == Experts{1, 3, 0, 2});
}

TEST_CASE("sigmoids that saturate tie, and the lower expert wins") {
  // 1 / (1 + e^-40) and 1 / (1 + e^-90) are both 1 in f32, e^200 is infinite.
  CHECK(Choose(Config(4, 2), {-200, 40, 90, 40}, {}).experts == Experts{1, 2});
  CHECK(Choose(Config(4, 2), {-200, -300, -250, -400}, {}).experts == Experts{0, 1});
}

TEST_CASE("the bias chooses and stays out of the weights") {
  const Choice c = Choose(Config(4, 2), {2, 1, 0, -1}, {0, 0, 0, 3});
  CHECK(c.experts == Experts{3, 0});
  const double a = Sigmoid(-1), b = Sigmoid(2);
  CHECK(c.weights[0] == doctest::Approx(2.5 * a / (a + b)).epsilon(1e-6));
  CHECK(c.weights[1] == doctest::Approx(2.5 * b / (a + b)).epsilon(1e-6));
}

// Real models have biases of 12 to 35. The weights are the plain sigmoids: (s + b) - b would lose
// all but 19 bits of s, and small ones become 0.
TEST_CASE("biases of 12 to 35 leave small weights exact") {
  std::vector<float> bias(8), logits(8);
  for (size_t i = 0; i < 8; ++i) {
    bias[i] = i % 2 == 0 ? 35.0f : 12.0f;
    logits[i] = -14.0f - static_cast<float>(i);
  }
  const Choice c = Choose(Config(8, 4), logits, bias);
  std::vector<int32_t> sorted = c.experts;
  std::sort(sorted.begin(), sorted.end());
  CHECK(sorted == Experts{0, 2, 4, 6});
  double sum = 0;
  for (const int32_t e : c.experts) sum += Sigmoid(static_cast<double>(logits[size_t(e)]));
  for (size_t j = 0; j < 4; ++j) {
    const double s = Sigmoid(static_cast<double>(logits[static_cast<size_t>(c.experts[j])]));
    CHECK(c.weights[j] == doctest::Approx(2.5 * s / sum).epsilon(1e-5));
    CHECK(c.weights[j] > 0);
  }
}

TEST_CASE("choices that a large bias makes equal go to the lower expert") {
  // The sigmoids differ by less than half an ulp of 35.
  const Choice c = Choose(Config(4, 1), {-15.0f, -14.5f, -14.0f, -15.5f}, {35, 35, 35, 35});
  CHECK(c.experts == Experts{0});
}

TEST_CASE("weights are renormalised only when the config says so") {
  ModelConfig config = Config(4, 2);
  config.norm_top_k = false;
  const Choice c = Choose(config, {0, 1, 2, 3}, {});
  CHECK(c.weights[0] == doctest::Approx(2.5 * Sigmoid(3)).epsilon(1e-6));
  CHECK(c.weights[1] == doctest::Approx(2.5 * Sigmoid(2)).epsilon(1e-6));
}

TEST_CASE("weights of sigmoids that are all zero are zero, not NaN") {
  const Choice c = Choose(Config(4, 2), {-200, -200, -200, -200}, {});
  CHECK(c.weights == std::vector<float>{0, 0});
}

TEST_CASE("a group counts by the sum of its two best choices") {
  // Group 0 has the best expert, group 1 the best pair.
  const Choice c = Choose(Config(6, 2, 2, 1), {5, -5, -5, 1, 1, -9}, {});
  CHECK(c.experts == Experts{3, 4});
}

TEST_CASE("equal groups: the lower one is kept") {
  CHECK(Choose(Config(8, 2, 4, 1), {0, 0, 0, 0, 0, 0, 0, 0}, {}).experts == Experts{0, 1});
  CHECK(Choose(Config(8, 4, 4, 2), {0, 0, 1, 1, 0, 0, 1, 1}, {}).experts == Experts{2, 3, 6, 7});
}

TEST_CASE("experts of dropped groups lose even where every choice is negative") {
  const Choice c = Choose(Config(4, 2, 2, 1), {0, 0, 1, 1}, {-9, -9, -8, -8});
  CHECK(c.experts == Experts{2, 3});
  CHECK(c.weights[0] == doctest::Approx(1.25));
}

TEST_CASE("logits that are not finite still give distinct experts") {
  for (const std::vector<float>& logits :
       {std::vector<float>{kNaN, kNaN, kNaN, kNaN}, std::vector<float>{kNaN, 1, kNaN, 0},
        std::vector<float>{kInfinity, -kInfinity, kNaN, kInfinity},
        std::vector<float>{-kInfinity, -kInfinity, -kInfinity, -kInfinity}}) {
    for (const int32_t groups : {1, 2}) {
      Choice c = Choose(Config(4, 2, groups, 1), logits, {});
      for (const int32_t e : c.experts) CHECK((e >= 0 && e < 4));
      CHECK(c.experts[0] != c.experts[1]);
    }
  }
  CHECK(Choose(Config(4, 2), {kNaN, 1, kNaN, 0}, {}).experts == Experts{1, 3});
}

TEST_CASE("as many experts as there are come out in order of choice") {
  CHECK(Choose(Config(3, 3), {1, 3, 2}, {}).experts == Experts{1, 2, 0});
}

}  // namespace
}  // namespace colibri
