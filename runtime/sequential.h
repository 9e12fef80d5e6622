// The sequential engine as a whole: the scheduler, the reference engine's stages and the delivery
// of results, one after another on one thread. No graph, no cache, no parallel loop; whatever the
// graph does in whatever order has to end in the same bytes. Threads: the caller's.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/delivery.h"
#include "runtime/draft.h"
#include "runtime/kv_store.h"
#include "runtime/scheduler.h"
#include "runtime/weights.h"

namespace colibri {

struct SequentialOptions {
  SchedulerOptions scheduler;  // frames must be 1; drafts is set from below
  int32_t kv_pages = 0;        // at least those of one whole context
  int32_t page_tokens = kDefaultPageTokens;
  KvType kv_type = KvType::kBF16;
  DraftOptions drafts;            // by the MTP layer, where the model has one
  std::vector<uint32_t> failing;  // experts whose reads are to fail with EIO, by item
};

// Runs the source to its end; waits for input where the source has a descriptor to wait on. Every
// sequence is closed as soon as `delivery` has returned from its final notice or its refusal, so
// the delivery itself closes none. `model` has its dense weights.
SchedulerStats RunSequential(const Model& model, const Tokenizer& tokenizer,
                             const SequentialOptions& options, RequestSource& source,
                             Delivery& delivery);

}  // namespace colibri
