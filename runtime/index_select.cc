#include "runtime/index_select.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace colibri {
namespace {

float Ordered(float score) {
  return std::isnan(score) ? -std::numeric_limits<float>::infinity() : score;
}

}  // namespace

int32_t SelectPositions(std::span<const float> scores, int32_t keep, std::span<float> scratch,
                        std::span<int32_t> chosen) {
  const auto n = scores.size();
  const auto k = static_cast<size_t>(keep);
  if (n <= k) {
    for (size_t i = 0; i < n; ++i) chosen[i] = static_cast<int32_t>(i);
    return static_cast<int32_t>(n);
  }
  std::transform(scores.begin(), scores.end(), scratch.begin(), Ordered);
  const auto nth = scratch.begin() + static_cast<std::ptrdiff_t>(k - 1);
  std::nth_element(scratch.begin(), nth, scratch.begin() + static_cast<std::ptrdiff_t>(n),
                   std::greater<>());
  const float threshold = *nth;
  // Everything above the threshold is in; of those equal to it the lowest positions fill the rest.
  auto ties = static_cast<size_t>(
      k - static_cast<size_t>(
              std::count_if(scratch.begin(), nth, [&](float score) { return score > threshold; })));
  int32_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    const float score = Ordered(scores[i]);
    if (score > threshold || (score == threshold && ties > 0)) {
      if (score == threshold) --ties;
      chosen[static_cast<size_t>(count++)] = static_cast<int32_t>(i);
    }
  }
  return count;
}

}  // namespace colibri
