// What the routing of a synthetic model reaches, measured with the model itself: the sequential
// stages over a few sampled sequences. Threads: one caller, which the stages' loops spread.
#pragma once

#include <cstdint>

#include "runtime/weights.h"

namespace colibri {

struct RoutingCheckOptions {
  int32_t sequences = 4;
  int32_t steps = 48;             // tokens drawn in each
  float temperature = 0.8F;       // of the draws, as in `colibri-bench pipeline`
  int32_t quarter_tokens = 1024;  // token ids whose embeddings the routers choose for
  uint64_t seed = 1;
};

// Shares from 0 to 1.
struct RoutingFigures {
  double recall = 0;       // of a layer's experts by its router on the state one layer before
  double overlap = 0;      // of a token's experts with its predecessor's, same layer
  double hot_quarter = 0;  // of all choices that go to a layer's quarter of most chosen experts
  double accepted = 0;     // chance that a greedy draft of depth 1 is the token then drawn
  bool mtp = false;        // `accepted` was measured
};

// What real routers were seen to do, and what the presets are made for.
struct ShareRange {
  double low, high;
  bool Holds(double share) const { return low <= share && share <= high; }
};
inline constexpr ShareRange kRecallRange{0.70, 0.82};
inline constexpr ShareRange kOverlapRange{0.35, 0.45};
inline constexpr ShareRange kHotQuarterRange{0.50, 0.58};
inline constexpr ShareRange kAcceptedRange{0.60, 0.80};

// `model` has its dense weights and at least two neighbouring layers of which the second is sparse.
RoutingFigures MeasureRouting(const Model& model, const RoutingCheckOptions& options);

}  // namespace colibri
