// `colibri-bench pipeline`: runs prompts through the engine and shows where the time goes: every
// node, reading and computing and both at once, bytes, hits, hints, memory against the plan, and
// the ideal time beside the real one. The figures are those the progress line uses. Threads: one
// call at a time.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "graph/engine.h"
#include "runtime/plan.h"

namespace colibri {

struct PipelineOptions {
  std::vector<std::vector<int32_t>> prompts;  // token ids
  int32_t tokens = 32;                        // generated for each prompt: end tokens do not end it
  EngineOptions engine;
  Plan plan;
  std::function<std::unique_ptr<Reader>()> open_reader;
  std::string trace;  // Chrome trace file; "": none
  enum class Format : uint8_t { kTable, kJson, kCsv, kMarkdown };
  Format format = Format::kTable;
};

// `model` has its dense weights. Returns 0, or 1 when a prompt failed.
int RunPipeline(const Model& model, const Tokenizer& tokenizer, const PipelineOptions& options);

// `colibri-bench graph --dump mermaid|dot`.
std::string GraphPicture(const std::string& format);

}  // namespace colibri
