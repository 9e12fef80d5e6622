// What the pipeline's flags come to: a plan, an engine, a reader. Shared by both programs.
// Threads: any; pure but for PlanRequestOf, which asks the drive for its free space, and for
// OpenFiles and OpenReader, which open files and write their notes to stderr.
#pragma once

#include <memory>
#include <string>

#include "apps/flags.h"
#include "graph/engine.h"
#include "runtime/plan.h"

namespace colibri {

// Where KV pages go that are not kept in memory: --kv-dir, else beside the output, else here.
std::string KvDirectory(const RunOptions& options);
// Throws UsageError where --kv-dir cannot be used.
PlanRequest PlanRequestOf(const RunOptions& options);
EngineOptions EngineOptionsOf(const RunOptions& options, const Plan& plan);
// Past the page cache: by --direct, or because not all experts fit into the slots.
bool DirectReads(const RunOptions& options, const Plan& plan);
// How opened files are read: "direct", "buffered" or "partly direct".
std::string ReadsText(const FileTable& files);
// Experts are read on a guess: by --prefetch, or because not all of them fit into the slots. Where
// they do, each is read once, and a wrong guess reads what nobody may ever ask for.
bool Prefetches(const RunOptions& options, const Plan& plan);
// Opens the shards a second time where reads are direct, and the file for KV pages if the plan has
// one. Once, before the reader. Throws IoError.
void OpenFiles(const RunOptions& options, const Plan& plan, Model& model, EngineOptions* engine);
// Throws IoError.
std::unique_ptr<Reader> OpenReader(const RunOptions& options, const Model& model);

}  // namespace colibri
