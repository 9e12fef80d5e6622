// `colibri-bench make-model`: a synthetic model on disk. Owns the report on the terminal; the
// writing is runtime/model_writer.h. Threads: one.
#pragma once

#include <string>

#include "runtime/model_writer.h"

namespace colibri {

struct MakeModelOptions {
  std::string out;
  SyntheticModel model;
  bool quiet = false;
  bool check = true;  // measure what the routing reaches
};

// "tiny" (tens of MB, for tests), "mid" (the published model's expert and attention shapes, 22 GB)
// or "thin" (its attention, experts 256 wide, for many rows). Throws UsageError for other names.
SyntheticModel PresetModel(const std::string& name);

// "int4-g64", "int4-row" or "int8" (also "int8-row"). Throws UsageError for other names.
WeightFormat ParseSyntheticFormat(const std::string& name);

// Writes the model, prints a line a shard and what the routing reaches; returns the exit code 0.
// Throws UsageError, IoError, ModelError (the tokenizer's directory).
int RunMakeModel(const MakeModelOptions& options);

}  // namespace colibri
