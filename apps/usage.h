// The counts of chosen experts that a run starts from and brings up to date (--usage). They say
// what stays in memory, never what is answered, so nothing about them ends a run.
// Threads: one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "apps/flags.h"
#include "graph/engine.h"
#include "runtime/usage_file.h"
#include "runtime/weights.h"

namespace colibri {

class UsageCounts {
 public:
  // Says one line where a file cannot be used; it is then left as it is. `model` outlives the
  // object.
  UsageCounts(const RunOptions& options, const Model& model);

  // EngineOptions::heat for frames of `rows` rows; empty: nothing is known.
  std::vector<float> Heat(int32_t rows) const;
  // Adds what the engine's routers chose and writes the file. Says one line if that fails.
  void Save(const Engine& engine);

 private:
  const Model& model_;
  std::string path_;                   // "": no file is kept
  std::optional<ExpertUsage> before_;  // as it was read
};

}  // namespace colibri
