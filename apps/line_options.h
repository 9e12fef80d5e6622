// What the command line means for lines: the defaults they get, and for the manifest
// (runtime/manifest.h) the options that can change their bytes.
// Threads: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "apps/flags.h"
#include "runtime/config.h"
#include "runtime/request_parser.h"

namespace colibri {

// What lines get that say nothing themselves.
RequestDefaults MakeRequestDefaults(const RunOptions& options, const GenerationDefaults& model);
// "temperature 1 (model), top-p 0.95 (model), ..." for the banner.
std::string DescribeSampling(const RunOptions& options, const GenerationDefaults& model);

// Name and value of each, in a fixed order, as they take effect: a flag that says what the model's
// generation_config.json says is the same as none. `context`: the plan's, in tokens. All ASCII.
std::vector<std::pair<std::string, std::string>> LineOptions(const RunOptions& options,
                                                             const GenerationDefaults& model,
                                                             int32_t context);

}  // namespace colibri
