#include "runtime/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>

#include "io/error.h"
#include "runtime/frame.h"
#include "runtime/line_limits.h"
#include "runtime/sampler.h"

namespace colibri {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kMargin = 64'000'000;
// Stacks, TBB's pools, the output queue: measured at 9 MiB with two threads, generously rounded.
constexpr uint64_t kBaseExtra = 16 * kMiB;
constexpr uint64_t kBasePerThread = 2 * kMiB;
// Wider frames gain little: 256 rows touch 99.97 % of 256 experts at 8 a token.
constexpr int32_t kDefaultRows = 256;
constexpr int32_t kDefaultContext = 4096;

std::optional<uint64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (!(file >> value)) return std::nullopt;
  return value;
}

// "Name:   123 kB" lines of /proc files.
std::optional<uint64_t> ReadKilobytes(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind(name + ":", 0) != 0) continue;
    return std::strtoull(line.c_str() + name.size() + 1, nullptr, 10) * 1024;
  }
  return std::nullopt;
}

std::map<std::string, uint64_t> ReadStats(const std::string& path) {
  std::ifstream file(path);
  std::map<std::string, uint64_t> stats;
  std::string key;
  for (uint64_t value = 0; file >> key >> value;) stats[key] = value;
  return stats;
}

// What the cgroup in `folder` leaves: its limit less what is in use, page cache apart, which gives
// way to whoever asks for memory. nullopt: no limit.
std::optional<uint64_t> FolderRoom(const std::string& folder, bool v2) {
  const std::map<std::string, uint64_t> stats = ReadStats(folder + "memory.stat");
  const auto stat = [&stats](const std::string& name) {
    const auto found = stats.find(name);
    return found == stats.end() ? 0 : found->second;
  };
  uint64_t limit = UINT64_MAX;
  if (v2) {
    // Beyond memory.high nothing is killed, but every allocation is held up.
    for (const char* name : {"memory.max", "memory.high"}) {
      limit = std::min(limit, ReadNumber(folder + name).value_or(UINT64_MAX));
    }
  } else {
    limit = ReadNumber(folder + "memory.limit_in_bytes").value_or(UINT64_MAX);
    // Of its ancestors too, which a container may not see.
    const uint64_t all = stat("hierarchical_memory_limit");
    if (all > 0) limit = std::min(limit, all);
  }
  if (limit >= uint64_t{1} << 60) return std::nullopt;
  const uint64_t usage =
      ReadNumber(folder + (v2 ? "memory.current" : "memory.usage_in_bytes")).value_or(0);
  const uint64_t cache = v2 ? stat("inactive_file") + stat("active_file")
                            : stat("total_inactive_file") + stat("total_active_file");
  const uint64_t used = usage - std::min(usage, cache);
  return limit - std::min(limit, used);
}

// The least that the process's cgroups and their parents leave.
std::optional<uint64_t> CgroupRoom(const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  std::optional<uint64_t> least;
  std::string line;
  while (std::getline(file, line)) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first, second - first) + ",";
    const bool v2 = controllers == ":,";
    if (!v2 && controllers.find("memory,") == std::string::npos) continue;
    const std::string mount = root + (v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
    // A parent's limit binds too; inside a container the path may not exist below the mount.
    for (std::string path = line.substr(second + 1);; path = path.substr(0, path.rfind('/'))) {
      if (path == "/") path.clear();
      const auto room = FolderRoom(mount + path + "/", v2);
      if (room && (!least || *room < *least)) least = room;
      if (path.empty() || path.find('/') == std::string::npos) break;
    }
  }
  return least;
}

uint64_t N(int32_t v) { return static_cast<uint64_t>(v); }

// Everything but KV pages and slots, for frames of `rows` rows.
uint64_t Scratch(const Model& model, const PlanRequest& r, int32_t rows, int32_t sequences,
                 int32_t context) {
  const FrameShape shape{rows, context, r.threads};
  const uint64_t sampling =
      N(r.threads) * N(model.Config().vocab) * 2 * sizeof(SampleScratch::Entry);
  const uint64_t tokens = N(sequences) * N(context) * sizeof(int32_t);
  return N(r.frames) * shape.Bytes(model) + sampling + tokens;
}

// Where nobody asks for log probabilities it holds names of tools and, for readable output,
// prompts.
constexpr uint64_t kSmallPool = 4 * kMiB;

// Lists of tokens besides the sequences' own: a line's prompt, its finished choices. A line's
// choices end at about the same time, since the lines before it are served first.
uint64_t TokenLists(int32_t sequences, int32_t context) {
  return 2 * N(sequences) * N(context) * sizeof(int32_t);
}

// Sets what lines take. All but the lists depends on the context and the budget alone.
void SetLines(const PlanRequest& r, Plan* p) {
  p->line_pool = r.logprobs ? std::max(kMaxLogprobBytes, p->budget / 64) : kSmallPool;
  p->held_back = r.held_back ? p->line_pool : 0;
  p->lines = LineReadBytes(p->context, r.token_bytes) + p->line_pool + p->held_back +
             TokenLists(p->sequences, p->context);
}

uint64_t SlotBytes(const std::vector<SlotClass>& classes) {
  uint64_t bytes = 0;
  for (const SlotClass& c : classes) bytes += c.bytes * c.count;
  return bytes;
}

// Without drafts nothing asks for the experts of the MTP layer.
bool Used(const Model& model, const Model::ExpertClass& c) {
  return c.first_layer < model.Config().layers;
}

// By hand, or what fits into `room`: one slot of each class, then to every class its share.
std::vector<SlotClass> SlotsFor(const Model& model, const PlanRequest& r, uint64_t room) {
  std::vector<SlotClass> classes;
  double ones = 0, more = 0;
  for (const Model::ExpertClass& c : model.ExpertClasses()) {
    const auto bytes = static_cast<double>(c.slot_bytes);
    ones += bytes;
    if (Used(model, c)) more += bytes * (c.experts - 1);
  }
  const double rest = std::max(0.0, static_cast<double>(room) - ones);
  const double share = more > 0 ? std::min(1.0, rest / more) : 0;
  for (const Model::ExpertClass& c : model.ExpertClasses()) {
    double count = 1;
    if (r.slot_count) {
      count = *r.slot_count;
    } else if (r.slot_share) {
      count = std::ceil(*r.slot_share * c.experts);
    } else if (Used(model, c)) {
      count = 1 + std::floor(share * (c.experts - 1));
    }
    count = std::clamp(count, 1.0, static_cast<double>(c.experts));
    classes.push_back({c.slot_bytes, static_cast<uint32_t>(count)});
  }
  return classes;
}

// As --ram takes it, rounded up.
std::string RamFlag(uint64_t bytes) { return fmt::format("--ram {}MB", bytes / 1'000'000 + 1); }

// The margin that a budget keeps free.
uint64_t Margin(uint64_t budget) { return std::max(budget / 100 * 3, kMargin); }

uint64_t Pages(int64_t tokens, int32_t page_tokens) {
  return static_cast<uint64_t>((tokens + page_tokens - 1) / page_tokens);
}

[[noreturn]] void DoesNotFit(const Model& model, const PlanRequest& r, const Plan& p,
                             uint64_t page) {
  std::string text = fmt::format(
      "the plan does not fit: it takes {}, the budget ({}) is {} and {} of it stay free\n"
      "  process {}, dense weights {}, KV {}, scratch {}, prompt lines {}, expert slots "
      "{}",
      SizeText(p.Total()), p.budget_source, SizeText(p.budget), SizeText(p.margin),
      SizeText(p.base), SizeText(p.dense), SizeText(p.kv), SizeText(p.scratch), SizeText(p.lines),
      SizeText(p.slots));
  const auto gain = [&](const std::string& flag, uint64_t before, uint64_t after) {
    if (after < before) text += fmt::format("\n  {} gains {}", flag, SizeText(before - after));
  };
  const int32_t half = p.context / 2;
  Plan shorter = p;
  shorter.context = half;
  SetLines(r, &shorter);
  gain(fmt::format("--ctx-size {}", half), p.kv + p.scratch + p.lines,
       page * Pages(half, p.page_tokens) + Scratch(model, r, p.rows, p.sequences, half) +
           shorter.lines);
  Plan narrow = p;
  narrow.sequences = r.sequences > 0 ? p.sequences : 1;
  SetLines(r, &narrow);
  gain("--max-rows 1", p.scratch + p.lines,
       Scratch(model, r, 1, narrow.sequences, p.context) + narrow.lines);
  PlanRequest one = r;
  one.frames = 1;
  gain("--frames 1", p.scratch, Scratch(model, one, p.rows, p.sequences, p.context));
  one.slot_share.reset();
  one.slot_count = 1;
  gain("--slots 1", p.slots, SlotBytes(SlotsFor(model, one, 0)));
  if (r.kv_type == KvType::kF32) gain("--kv bf16", p.kv, p.kv / 2);
  // The margin is 64 MB or 3 % of the budget, whichever is more.
  uint64_t enough = 0;
  for (Plan larger = p;; SetLines(r, &larger)) {
    larger.budget = std::max(larger.Total() + kMargin, larger.Total() / 96 * 100);
    if (larger.budget <= enough) break;
    enough = larger.budget;
  }
  text += fmt::format("\n  {} would do", RamFlag(enough));
  throw UsageError(text);
}

}  // namespace

std::string SizeText(uint64_t bytes) {
  constexpr const char* kUnits[] = {"kB", "MB", "GB", "TB"};
  double value = static_cast<double>(bytes) / 1e3;
  size_t unit = 0;
  // 999.5 would be printed as 1000.
  for (; value >= 999.5 && unit + 1 < std::size(kUnits); ++unit) value /= 1e3;
  const int decimals = value >= 99.95 || unit == 0 ? 0 : value >= 9.995 ? 1 : 2;
  return fmt::format("{:.{}f} {}", value, decimals, kUnits[unit]);
}

uint64_t ResidentBytes() { return ReadKilobytes("/proc/self/status", "VmRSS").value_or(0); }
uint64_t PeakResidentBytes() { return ReadKilobytes("/proc/self/status", "VmHWM").value_or(0); }

int32_t DefaultContext(const ModelConfig& config) {
  return std::min(kDefaultContext, config.max_positions);
}

MemoryBudget AvailableMemory(const std::string& root) {
  const uint64_t available =
      ReadKilobytes(root + "/proc/meminfo", "MemAvailable").value_or(uint64_t{4} << 30);
  // The rest of the machine and the page cache of headers: 5 %, at least 512 MiB.
  const uint64_t reserve = std::max(available / 20, 512 * kMiB);
  MemoryBudget budget{available > reserve ? available - reserve : available / 2,
                      "memory available"};
  if (const auto room = CgroupRoom(root); room && *room < budget.bytes) {
    budget = {*room, "cgroup limit"};
  }
  return budget;
}

Plan MakePlan(const Model& model, const PlanRequest& r) {
  Plan p;
  const MemoryBudget machine = r.ram ? MemoryBudget{*r.ram, "--ram"} : AvailableMemory();
  p.budget = machine.bytes;
  p.budget_source = machine.source;
  // The process's own memory is not part of what the machine has left.
  if (!r.ram) p.budget += ResidentBytes();
  p.margin = Margin(p.budget);
  p.threads = r.threads;
  p.frames = r.frames;
  p.context = r.context > 0 ? r.context : DefaultContext(model.Config());
  p.page_tokens = r.page_tokens;
  p.base = ResidentBytes() + kBaseExtra + N(r.threads) * kBasePerThread;
  p.dense = model.DenseBytes();
  const uint64_t page = KvShapeOf(model, r.page_tokens, r.kv_type).PageBytes();
  const uint64_t context_pages = Pages(p.context, r.page_tokens);
  const uint64_t limit = p.budget > p.margin ? p.budget - p.margin : 0;
  const uint64_t answers = std::max<uint64_t>(1, r.answers.value_or(1u << 30));
  // Rows: as asked, else the widest frame whose scratch, with the lists of its sequences' tokens,
  // is no more than an eighth of what is left beside the dense weights and the lines.
  for (p.rows = r.rows > 0 ? r.rows : kDefaultRows;; p.rows /= 2) {
    const auto most = static_cast<uint64_t>(r.sequences > 0 ? r.sequences : p.rows);
    p.sequences = static_cast<int32_t>(std::min(most, answers));
    p.scratch = Scratch(model, r, p.rows, p.sequences, p.context);
    SetLines(r, &p);
    const uint64_t lists = TokenLists(p.sequences, p.context);
    const uint64_t fixed = p.base + p.dense + p.lines - lists;
    if (r.rows > 0 || p.rows == 1 || (limit > fixed && p.scratch + lists <= (limit - fixed) / 8)) {
      break;
    }
  }
  p.prefill_rows = r.prefill_rows > 0 ? std::min(r.prefill_rows, p.rows) : p.rows;
  const auto set_pages = [&](uint64_t pages) {
    p.kv_pages = static_cast<int32_t>(std::min<uint64_t>(pages, 1u << 30));
    p.kv = N(p.kv_pages) * page;
  };
  set_pages(context_pages);
  p.slot_classes = SlotsFor(model, r, 0);
  p.slots = SlotBytes(p.slot_classes);
  if (p.Total() > limit) DoesNotFit(model, r, p, page);
  // What is left: a third for more sequences' pages, as far as they can use it, then slots up to
  // all experts, then pages again.
  const uint64_t most_pages = N(p.sequences) * context_pages;
  const auto grow_kv = [&](uint64_t room) {
    set_pages(std::min(N(p.kv_pages) + room / page, most_pages));
  };
  const bool by_hand = r.slot_count || r.slot_share;
  grow_kv(by_hand ? limit - p.Total() : (limit - p.Total()) / 3);
  p.slot_classes = SlotsFor(model, r, limit - (p.Total() - p.slots));
  p.slots = SlotBytes(p.slot_classes);
  if (p.Total() > limit) DoesNotFit(model, r, p, page);
  grow_kv(limit - p.Total());
  for (const SlotClass& s : p.slot_classes) p.slot_total += s.count;
  for (const Model::ExpertClass& e : model.ExpertClasses()) {
    p.expert_total += Used(model, e) || by_hand ? e.experts : 1;
  }
  return p;
}

std::string Plan::Line() const {
  return fmt::format(
      "plan: {} of {} ({}): dense {}, KV {} for {} tokens, scratch {}, lines {}, {} of {} experts "
      "{}; "
      "{} rows, {} answers at once, {} threads",
      SizeText(Total()), SizeText(budget), budget_source, SizeText(dense), SizeText(kv),
      N(kv_pages) * N(page_tokens), SizeText(scratch), SizeText(lines), slot_total, expert_total,
      SizeText(slots), rows, sequences, threads);
}

std::string Plan::Table() const {
  std::string text;
  const auto row = [&](std::string_view what, uint64_t bytes, const std::string& note) {
    text += fmt::format("{:<16}{:>12}  {}\n", what, SizeText(bytes), note);
  };
  row("budget", budget, budget_source);
  row("process", base, "program, headers, tokenizer, threads");
  row("dense weights", dense, "attention, shared experts, dense layers, head, embedding");
  row("KV", kv,
      fmt::format("{} pages of {} tokens; --ctx-size {}", kv_pages, page_tokens, context));
  row("scratch", scratch,
      fmt::format("{} frame(s) of {} rows, {} of them prefill; {} sequences", frames, rows,
                  prefill_rows, sequences));
  row("lines", lines,
      fmt::format("a prompt line being read, tokens of those under way, {} for what they ask for",
                  SizeText(line_pool)));
  for (const SlotClass& s : slot_classes) {
    row("expert slots", s.bytes * s.count,
        fmt::format("{} slots of {}", s.count, SizeText(s.bytes)));
  }
  row("total", Total(), fmt::format("{} kept free", SizeText(margin)));
  return text;
}

}  // namespace colibri
