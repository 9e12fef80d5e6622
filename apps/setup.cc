#include "apps/setup.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>

#include "apps/say.h"
#include "io/error.h"
#include "io/file.h"

namespace colibri {

bool DirectReads(const RunOptions& o, const Plan& plan) {
  return o.direct == OnOffAuto::kOn ||
         (o.direct == OnOffAuto::kAuto &&
          (plan.slot_total < plan.expert_total || plan.sweep_dense > 0));
}

std::string ReadsText(const FileTable& files) {
  uint32_t direct = 0;
  for (uint32_t file = 0; file < files.Count(); ++file) direct += files.IsDirect(file) ? 1 : 0;
  return direct == 0 ? "buffered" : direct == files.Count() ? "direct" : "partly direct";
}

bool Prefetches(const RunOptions& o, const Plan& plan) {
  return o.prefetch == OnOffAuto::kOn ||
         (o.prefetch == OnOffAuto::kAuto && plan.slot_total < plan.expert_total);
}

namespace {

// Other writers keep a part of what is free.
constexpr uint64_t kSpaceShare = 16;

// Bytes that KV may take of its directory. A file system in memory would take what the plan has not
// counted: it is used only by name.
uint64_t KvSpace(const RunOptions& o) {
  if (o.kv_ram_all) return 0;
  const std::string directory = KvDirectory(o);
  struct statfs info {};
  if (statfs(directory.c_str(), &info) != 0 ||
      faccessat(AT_FDCWD, directory.c_str(), W_OK | X_OK, AT_EACCESS) != 0) {
    if (o.kv_dir.empty()) return 0;
    throw UsageError(fmt::format("--kv-dir {}: {}", directory, std::strerror(errno)));
  }
  if (o.kv_dir.empty() && (info.f_type == TMPFS_MAGIC || info.f_type == RAMFS_MAGIC)) return 0;
  const uint64_t free = static_cast<uint64_t>(info.f_bavail) * static_cast<uint64_t>(info.f_bsize);
  return free - free / kSpaceShare;
}

}  // namespace

std::string KvDirectory(const RunOptions& o) {
  if (!o.kv_dir.empty()) return o.kv_dir;
  std::error_code ignored;
  const std::filesystem::path output = o.output;
  const bool device = std::filesystem::exists(output, ignored) &&
                      !std::filesystem::is_regular_file(output, ignored);
  if (o.output == "-" || device || output.parent_path().empty()) return ".";
  return output.parent_path().string();
}

PlanRequest PlanRequestOf(const RunOptions& o) {
  PlanRequest r;
  r.kv_ram = o.kv_ram;
  r.kv_space = KvSpace(o);
  r.ram = o.ram;
  if (o.slots) {
    (o.slots->percent ? r.slot_share : r.slot_count) =
        o.slots->percent ? o.slots->value / 100 : o.slots->value;
  }
  r.dense = o.resident;
  r.drafts = o.drafts > 0;
  r.weigh_mtp = o.draft_auto;
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
  e.kv_ram_layers = plan.kv_ram_layers;
  e.kv_type = o.f32_kv ? KvType::kF32 : KvType::kBF16;
  e.dense_windows = plan.dense_windows;
  e.slots = plan.slot_classes;
  e.prefetch = Prefetches(o, plan);
  e.drafts.most = o.drafts;
  // The plan knows whether the MTP layer makes any.
  e.drafts.lookup = o.draft_auto || !plan.resident.mtp;
  e.govern_drafts = o.draft_auto;
  e.say = [](const std::string& line) { Say(line); };
  // auto is sweep: it reads the fewest bytes for narrow and for wide frames (bench/README.md).
  if (const auto policy = ParseCachePolicy(o.cache_policy)) e.cache_policy = *policy;
  return e;
}

// Experts that are read again and again are read past the page cache: it holds none of them long
// enough, and takes memory that is slots' (decisions: reading). Those that all stay are read once,
// and the page cache may have them from the last run.
void OpenFiles(const RunOptions& o, const Plan& plan, Model& model, EngineOptions* engine) {
  FileTable& files = model.Files().Files();
  if (DirectReads(o, plan)) {
    const std::string note = files.EnableDirect();
    if (!note.empty() && o.direct == OnOffAuto::kOn) Say(note);
  }
  if (plan.kv_file == 0) return;
  engine->kv_file.file = files.AddScratch(KvDirectory(o), plan.kv_file);
  engine->kv_file.path = files.Path(engine->kv_file.file);
}

std::unique_ptr<Reader> OpenReader(const RunOptions& o, const Model& model) {
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
