// Which positions a row attends to (model spec 3.5): the `keep` highest index scores, equal scores
// by lower position, -0.0 equal to 0.0. Threads: pure.
#pragma once

#include <cstdint>
#include <span>

namespace colibri {

// Writes the chosen positions, ascending, to `chosen` (at least min(keep, scores.size()) long) and
// returns how many. NaN counts as -infinity. A few passes over the scores whatever their order.
int32_t SelectPositions(std::span<const float> scores, int32_t keep, std::span<int32_t> chosen);

}  // namespace colibri
