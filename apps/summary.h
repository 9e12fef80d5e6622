// What a run says when it is over. Threads: pure but for the process's peak memory.
#pragma once

#include <cstdint>
#include <string>

#include "graph/engine.h"
#include "runtime/plan.h"
#include "runtime/tally.h"

namespace colibri {

// Lines and tokens, how answers ended, failures by kind, and, of more than a handful of lines, the
// slowest and the longest. `tokens`: all that were generated, in `seconds`. Several lines of text.
std::string LinesSummary(const Tally& tally, uint64_t tokens, double seconds);

// "predicted 4.52, got 4.31 tokens/s", or nothing.
std::string PredictionSummary(const Plan& plan, uint64_t tokens, double seconds);

// Prompt tokens that were shared, if any, reading, what overlapped, memory against the plan.
std::string MachineSummary(const EngineStats& stats, const Plan& plan);

}  // namespace colibri
