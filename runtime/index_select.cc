#include "runtime/index_select.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

namespace colibri {
namespace {

// Ascends with the score; -0.0 and 0.0 are equal, NaN is -infinity.
uint32_t KeyOf(float score) {
  if (std::isnan(score)) score = -std::numeric_limits<float>::infinity();
  const auto bits = std::bit_cast<uint32_t>(score + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

}  // namespace

int32_t SelectPositions(std::span<const float> scores, int32_t keep, std::span<int32_t> chosen) {
  const auto n = scores.size();
  const auto k = static_cast<size_t>(keep);
  if (n <= k || k == 0) {
    for (size_t i = 0; i < std::min(n, k); ++i) chosen[i] = static_cast<int32_t>(i);
    return static_cast<int32_t>(std::min(n, k));
  }
  // The k-th highest key, eleven bits at a time from the top: a count of the keys that share what
  // is known of it tells its next digit.
  uint32_t threshold = 0, known = 0;
  size_t rank = k;  // among the keys that share the known bits, counted from the highest
  for (int shift : {21, 10, 0}) {
    const uint32_t digits = shift == 0 ? 1024 : 2048;
    std::array<uint32_t, 2048> counts{};
    for (float score : scores) {
      const uint32_t key = KeyOf(score);
      if ((key & known) == threshold) ++counts[(key >> shift) & (digits - 1)];
    }
    uint32_t digit = digits - 1;
    for (; counts[digit] < rank; --digit) rank -= counts[digit];
    threshold |= digit << shift;
    known |= (digits - 1) << shift;
  }
  // Everything above the threshold is in; of those equal to it the lowest positions fill the rest.
  int32_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t key = KeyOf(scores[i]);
    if (key < threshold || (key == threshold && rank == 0)) continue;
    if (key == threshold) --rank;
    chosen[static_cast<size_t>(count++)] = static_cast<int32_t>(i);
  }
  return count;
}

}  // namespace colibri
