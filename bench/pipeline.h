// `colibri-bench pipeline`: runs prompts through the engine and shows where the time goes: every
// node, reading and computing and both at once, bytes, hits, hints, memory against the plan, and
// the ideal time beside the real one. The figures are those the progress line uses. Threads: one
// call at a time.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/table.h"
#include "graph/engine.h"
#include "runtime/plan.h"

namespace colibri {

struct PipelineOptions {
  std::vector<std::vector<int32_t>> prompts;  // token ids
  int32_t tokens = 32;                        // generated for each prompt: end tokens do not end it
  // Runs of so many of the prompts, all at once, one after the other, each with an engine of its
  // own: a table with a line for each. Empty: one run of all prompts, every figure of it.
  std::vector<int32_t> sequences;
  // Each run is made twice on the same engine and the second one is shown.
  bool warm = false;
  // Each run is made once more without reading anything, for the time of computing alone.
  bool compute_alone = true;
  EngineOptions engine;
  Plan plan;
  std::function<std::unique_ptr<Reader>()> open_reader;
  std::string trace;   // Chrome trace file; "": none
  std::string routes;  // route trace file, of the measured run; "": none
  TableFormat format = TableFormat::kText;
};

// `model` has its dense weights. Returns 0, or 1 when a prompt failed.
int RunPipeline(const Model& model, const Tokenizer& tokenizer, const PipelineOptions& options);

// `colibri-bench graph --dump mermaid|dot`.
std::string GraphPicture(const std::string& format);

}  // namespace colibri
