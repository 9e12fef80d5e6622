// The options of colibri-run that can change a line's bytes, for the manifest (runtime/manifest.h).
// Threads: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "apps/flags.h"

namespace colibri {

// Name and value of each, in a fixed order, as they take effect: a flag that says what the model's
// generation_config.json says is the same as none. `context`: the plan's, in tokens. All ASCII.
std::vector<std::pair<std::string, std::string>> LineOptions(const RunOptions& options,
                                                             const GenerationDefaults& model,
                                                             int32_t context);

}  // namespace colibri
