// How a run's memory is laid out before anything large is allocated: dense weights, KV pages, frame
// scratch, slots; and how wide frames are. Peak resident memory stays within the budget.
// Threads: pure, but for what it asks of the machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/slot_pool.h"
#include "runtime/kv_store.h"
#include "runtime/weights.h"

namespace colibri {

struct PlanRequest {
  std::optional<uint64_t> ram;  // --ram; nullopt: what the machine and its cgroup have
  // --slots: a number, or a share, of the experts of each class.
  std::optional<double> slot_count, slot_share;
  int32_t threads = 1, frames = 1;
  int32_t rows = 0, sequences = 0, prefill_rows = 0;  // 0: as wide as the plan allows
  // Answers the input can ask for, if known: KV for more sequences than that would never be used.
  std::optional<uint64_t> answers;
  int32_t context = 0;      // 0: DefaultContext of the model
  size_t token_bytes = 16;  // the longest token's: Tokenizer::MostBytes(1)
  bool logprobs = true;     // lines may ask for them
  bool held_back = false;   // records wait in memory for their turn
  int32_t page_tokens = kDefaultPageTokens;
  KvType kv_type = KvType::kBF16;
};

struct Plan {
  uint64_t budget = 0;
  std::string budget_source;  // "--ram", "memory available", "cgroup limit"
  uint64_t margin = 0;        // kept free below the budget: max(3 %, 64 MB)
  uint64_t base = 0;          // the process as it is: program, headers, tokenizer, threads
  uint64_t dense = 0, kv = 0, scratch = 0, slots = 0;
  uint64_t lines = 0;      // a prompt line being read, those under way, their log probabilities
  uint64_t line_pool = 0;  // of it, what lines under way may hold besides tokens (SchedulerOptions)
  uint64_t held_back = 0;  // of it, records that wait for their turn
  uint64_t Total() const { return base + dense + kv + scratch + lines + slots; }

  int32_t threads = 1, frames = 1, rows = 0, sequences = 0, prefill_rows = 0, context = 0;
  int32_t kv_pages = 0, page_tokens = 0;
  std::vector<SlotClass> slot_classes;        // as Model::ExpertClasses()
  uint32_t slot_total = 0, expert_total = 0;  // equal: everything that is used is resident

  std::string Line() const;   // one line
  std::string Table() const;  // --plan
};

// Tokens of prompt and answer together where nothing is said: the lesser of 4096 and the model's.
int32_t DefaultContext(const ModelConfig& config);

// Three digits and a unit of 1,000s: "98.3 kB", "12.0 MB", "1.25 GB".
std::string SizeText(uint64_t bytes);

// What is resident now, and the most there ever was, in bytes.
uint64_t ResidentBytes();
uint64_t PeakResidentBytes();

// The memory a process may take: the least of MemAvailable less a reserve and the cgroup's limit
// less what is used (v1 and v2). `root` replaces "/" in tests.
struct MemoryBudget {
  uint64_t bytes = 0;
  std::string source;
};
MemoryBudget AvailableMemory(const std::string& root = "");

// Throws UsageError when it does not fit, saying which flag gains how much.
Plan MakePlan(const Model& model, const PlanRequest& request);

}  // namespace colibri
