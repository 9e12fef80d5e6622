// Which positions a row attends to (model spec 3.5): the `keep` highest index scores, equal scores
// by lower position, -0.0 equal to 0.0. Threads: pure; the caller's scratch.
#pragma once

#include <cstdint>
#include <span>

namespace colibri {

// Writes the chosen positions, ascending, to `chosen` (at least min(keep, scores.size()) long) and
// returns how many. `scratch` is as long as `scores`. NaN counts as -infinity.
int32_t SelectPositions(std::span<const float> scores, int32_t keep, std::span<float> scratch,
                        std::span<int32_t> chosen);

}  // namespace colibri
