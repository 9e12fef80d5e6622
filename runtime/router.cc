#include "runtime/router.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace colibri {
namespace {

constexpr float kOut = -std::numeric_limits<float>::infinity();

float Sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Leaves the choices of the kept groups and puts the others at -infinity: masking with 0 instead
// would let dropped experts win where every choice is negative.
void KeepGroups(const ModelConfig& config, std::span<float> choice) {
  const auto groups = static_cast<size_t>(config.groups);
  const size_t size = choice.size() / groups;
  std::vector<float> score(groups);
  for (size_t g = 0; g < groups; ++g) {
    float best = kOut, second = kOut;
    for (float c : choice.subspan(g * size, size)) {
      if (c > best) {
        second = best;
        best = c;
      } else if (c > second) {
        second = c;
      }
    }
    score[g] = best + second;
  }
  std::vector<bool> kept(groups, false);
  for (int32_t n = 0; n < config.top_groups; ++n) {
    size_t best = groups;
    for (size_t g = 0; g < groups; ++g) {
      if (!kept[g] && (best == groups || score[g] > score[best])) best = g;
    }
    kept[best] = true;
  }
  for (size_t g = 0; g < groups; ++g) {
    if (!kept[g]) std::fill_n(choice.begin() + static_cast<std::ptrdiff_t>(g * size), size, kOut);
  }
}

}  // namespace

void FinalWeights(const ModelConfig& config, std::span<float> sigmoids) {
  if (config.norm_top_k) {
    float sum = 0;
    for (float s : sigmoids) sum += s;
    for (float& s : sigmoids) s /= sum + 1e-20f;
  }
  for (float& s : sigmoids) s *= config.routed_scale;
}

void ChooseExperts(const ModelConfig& config, std::span<const float> logits,
                   std::span<const float> bias, std::span<float> choice, std::span<int32_t> experts,
                   std::span<float> weights) {
  for (size_t e = 0; e < logits.size(); ++e) choice[e] = Sigmoid(logits[e]) + bias[e];
  if (config.groups > 1) KeepGroups(config, choice);
  for (size_t n = 0; n < experts.size(); ++n) {
    // A choice of -infinity or NaN loses to all, but some expert is always taken, and none twice.
    int32_t best = -1;
    for (size_t e = 0; e < choice.size(); ++e) {
      const auto id = static_cast<int32_t>(e);
      if (std::find(experts.begin(), experts.begin() + static_cast<std::ptrdiff_t>(n), id) !=
          experts.begin() + static_cast<std::ptrdiff_t>(n)) {
        continue;
      }
      if (best < 0 || choice[e] > choice[static_cast<size_t>(best)] ||
          (std::isnan(choice[static_cast<size_t>(best)]) && !std::isnan(choice[e]))) {
        best = id;
      }
    }
    experts[n] = best;
    weights[n] = Sigmoid(logits[static_cast<size_t>(best)]);
  }
  FinalWeights(config, weights);
}

}  // namespace colibri
