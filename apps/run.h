// What colibri-run does once its command line is understood: open, plan, load, run, report.
// Threads: one call a process (signals, standard streams).
#pragma once

#include <functional>
#include <string>

#include "apps/flags.h"

namespace colibri {

// Returns the exit code: 0 all lines fine, 1 some failed, 130 interrupted, 141 the reader of our
// output went away. Throws UsageError (2), ModelError (3), IoError (4).
int RunPrompts(const RunOptions& options);

// "colibri-run 0.1.0, SIMD target ..., backends ...".
std::string VersionText();

// Runs `body`, turning the exceptions of io/error.h into a message on stderr and an exit code.
int WithExitCodes(const char* program, const std::function<int()>& body);

}  // namespace colibri
