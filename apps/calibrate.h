// What the machine does with a model: the drive by a moment of random reads of its experts, the
// processor by sweeps of an engine over a sample of the model whose weights are made up. Measured
// once and remembered (runtime/speeds_file.h). Nothing of it changes an answer. Threads: one call
// at a time; measuring has threads of its own, all ended when it returns.
#pragma once

#include <cstdint>
#include <optional>

#include "apps/flags.h"
#include "runtime/plan.h"
#include "runtime/tokenizer.h"
#include "runtime/weights.h"

namespace colibri {

// Remembered, given (--drive-speed) or measured now; the process stays within the budget meanwhile,
// and takes a quarter of it, or 768 MB, more at most. nullopt, and one line says why: measuring
// failed or is not wanted. `model` has no weights yet and stays as it is.
std::optional<Speeds> SpeedsOf(const RunOptions& options, const Model& model,
                               const Tokenizer& tokenizer, const PlanRequest& request);

}  // namespace colibri
