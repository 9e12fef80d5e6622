// `colibri-bench drafts`: how many drafts the model's own continuations accept, at every position
// of stored ones (teacher-forced: what was drafted before does not matter). Drafts of the MTP layer
// and by prompt lookup side by side. Runs the sequential engine's stages on all threads. Threads:
// one call at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/table.h"
#include "kernels/kernels.h"

namespace colibri {

struct DraftsOptions {
  std::vector<std::string> model;
  std::string file;                // .jsonl: "prompt_ids" and "greedy_ids", perhaps "kind", a line
  std::vector<std::string> kinds;  // only lines of these; none: all
  int32_t depth = 4;
  bool int8 = true;
  KvType kv = KvType::kBF16;
  bool dense_attention = false;
  std::string reference;  // a reference.json with "mtp_prefix_acceptance_by_depth"
  int32_t rows = 64;
  int32_t threads = 0;
  TableFormat format = TableFormat::kText;
};

// Positions with at least [d] further tokens, and those of them whose first d + 1 drafts are these.
struct DraftHits {
  std::vector<int64_t> positions, accepted;  // [depth]
  double Share(size_t d) const {
    return positions[d] == 0 ? 0
                             : static_cast<double>(accepted[d]) / static_cast<double>(positions[d]);
  }
};

struct DraftsResult {
  DraftHits mtp, lookup;
  uint64_t bytes_read = 0;
};

// Throws ModelError (also without an MTP layer), IoError.
DraftsResult MeasureDrafts(const DraftsOptions& options);
int RunDrafts(const DraftsOptions& options);

}  // namespace colibri
