#include "apps/setup.h"

#include <string>

#include "apps/say.h"
#include "io/file.h"

namespace colibri {

bool DirectReads(const RunOptions& o, const Plan& plan) {
  return o.direct == OnOffAuto::kOn ||
         (o.direct == OnOffAuto::kAuto && plan.slot_total < plan.expert_total);
}

bool Prefetches(const RunOptions& o, const Plan& plan) {
  return o.prefetch == OnOffAuto::kOn ||
         (o.prefetch == OnOffAuto::kAuto && plan.slot_total < plan.expert_total);
}

PlanRequest PlanRequestOf(const RunOptions& o) {
  PlanRequest r;
  r.ram = o.ram;
  if (o.slots) {
    (o.slots->percent ? r.slot_share : r.slot_count) =
        o.slots->percent ? o.slots->value / 100 : o.slots->value;
  }
  r.threads = o.threads > 0 ? o.threads : ThreadsOfMachine();
  r.frames = o.frames;
  r.rows = o.max_rows;
  r.sequences = o.max_seqs;
  r.prefill_rows = o.prefill_rows;
  r.context = o.ctx_size;
  r.kv_type = o.f32_kv ? KvType::kF32 : KvType::kBF16;
  return r;
}

EngineOptions EngineOptionsOf(const RunOptions& o, const Plan& plan) {
  EngineOptions e;
  e.threads = plan.threads;
  e.context = plan.context;
  e.scheduler.sequences = plan.sequences;
  e.scheduler.rows = plan.rows;
  e.scheduler.prefill_rows = plan.prefill_rows;
  e.scheduler.frames = plan.frames;
  e.scheduler.prefill_work = plan.PrefillWork();
  e.scheduler.line_pool = plan.line_pool;
  // One line for each sequence takes 4 to 13 % of 200 lines' sweeps away, four of them no more; and
  // many long answers side by side would be short of KV.
  if (plan.ahead > 0) e.scheduler.ahead = 8 + static_cast<size_t>(plan.sequences);
  e.scheduler.ahead_bytes = plan.ahead;
  e.kv_pages = plan.kv_pages;
  e.page_tokens = plan.page_tokens;
  e.kv_type = o.f32_kv ? KvType::kF32 : KvType::kBF16;
  e.slots = plan.slot_classes;
  e.prefetch = Prefetches(o, plan);
  // auto is sweep: it reads the fewest bytes for narrow and for wide frames (bench/README.md).
  if (const auto policy = ParseCachePolicy(o.cache_policy)) e.cache_policy = *policy;
  return e;
}

// Experts that are read again and again are read past the page cache: it holds none of them long
// enough, and takes memory that is slots' (decisions: reading). Those that all stay are read once,
// and the page cache may have them from the last run.
std::unique_ptr<Reader> OpenReader(const RunOptions& o, const Plan& plan, Model& model) {
  if (DirectReads(o, plan)) {
    const std::string note = model.Files().Files().EnableDirect();
    if (!note.empty() && o.direct == OnOffAuto::kOn) Say(note);
  }
  ReaderOptions options;
  if (o.io_depth > 0) options.depth = o.io_depth;
  if (o.prefetch_depth > 0) options.prefetch_depth = o.prefetch_depth;
  options.bytes_per_second = o.io_limit;
  IoBackend backend = IoBackend::kAuto;
  if (o.io == IoChoice::kUring) backend = IoBackend::kUring;
  if (o.io == IoChoice::kPread) backend = IoBackend::kPread;
  std::string note;
  auto reader = MakeReader(backend, model.Files().Files(), options, &note);
  if (!note.empty()) Say(note);
  return reader;
}

}  // namespace colibri
