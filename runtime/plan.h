// How a run's memory is laid out before anything large is allocated: dense weights, KV pages, frame
// scratch, slots; and how wide frames are. Peak resident memory stays within the budget.
//
// Width, KV and slots follow from what a sweep costs a row. With B rows, k of E experts a row and
// the share r of the experts resident, it reads the layers' unions, E (1 - (1 - k/E)^B) experts
// each, less r of them, for B rows together; a row's arithmetic, as the bytes that the drive brings
// meanwhile, is the floor (with speeds known: the longer of the two in seconds). So memory goes to
// pages, which make B larger, until reading costs no more than computing; where all experts fit,
// slots come first. Threads: pure, but for what it asks of the machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/slot_pool.h"
#include "runtime/kv_store.h"
#include "runtime/memory_budget.h"
#include "runtime/prediction.h"
#include "runtime/weights.h"

namespace colibri {

struct PlanRequest {
  std::optional<uint64_t> ram;  // --ram; nullopt: what the machine and its cgroup have
  // --slots: a number, or a share, of the experts of each class.
  std::optional<double> slot_count, slot_share;
  // --resident: what dense weights may take at most; UINT64_MAX: all stay; nullopt: what pays.
  std::optional<uint64_t> dense;
  int32_t threads = 1, frames = 1;
  int32_t rows = 0, sequences = 0, prefill_rows = 0;  // 0: as wide as the plan allows
  // Answers the input can ask for, if known: KV for more sequences than that would never be used.
  std::optional<uint64_t> answers;
  // What they ask for, in tokens, as far as it can be told; 0: unknown. All prompts together; what
  // an answer with its prompt takes at most, and how much of that it holds on average over time.
  uint64_t prompt_tokens = 0;
  int32_t most_tokens = 0, held_tokens = 0;
  double rows_per_token = 2;  // of prompts and answers, for each token of an answer
  // For the prediction: tokens of a prompt and of an answer on average, of the longest answer; 0:
  // unknown. And what the machine does; nullopt: unknown, nothing is predicted.
  double prompt_mean = 0, answer_mean = 0, answer_longest = 0;
  std::optional<Speeds> speeds;
  int32_t context = 0;       // 0: DefaultContext of the model
  size_t token_bytes = 16;   // the longest token's: Tokenizer::MostBytes(1)
  bool logprobs = true;      // lines may ask for them
  bool held_back = false;    // records wait in memory for their turn
  bool drafts = false;       // sequences bring drafts
  bool mtp = true;           // of the MTP layer, where there is one
  bool weigh_mtp = false;    // but only if its memory is thought to gain more than slots and pages
  bool reads_ahead = false;  // lines are read before there is a sequence for them
  int32_t page_tokens = kDefaultPageTokens;
  KvType kv_type = KvType::kBF16;
  // --kv-ram SIZE: most memory for KV. What the pages of some layers would take beyond it, or where
  // it is not given what the plan gains by it, is on the drive, if that has room.
  std::optional<uint64_t> kv_ram;
  uint64_t kv_space = 0;   // bytes that KV may take of the drive; 0: all pages stay in memory
  uint64_t measuring = 0;  // the process's peak while speeds were measured; 0: they were known
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
  uint64_t ahead = 0;      // of it, lines that wait for a sequence (SchedulerOptions)
  uint64_t Total() const { return base + dense + kv + scratch + lines + slots; }

  int32_t threads = 1, frames = 1, rows = 0, sequences = 0, prefill_rows = 0, context = 0;
  int32_t kv_pages = 0, page_tokens = 0;
  int32_t kv_ram_layers = INT32_MAX;  // of later layers the pages are on the drive
  uint64_t kv_file = 0;               // and take so much of it
  uint64_t kv_sweep_bytes = 0;        // of sweep_bytes, those of KV
  // Most rows x context of a frame's prompts (SchedulerOptions): so many positions a row.
  int64_t PrefillWork() const;
  int32_t positions_a_row = 0;
  DenseResidents resident;              // `dense` is what they take, with windows for the others
  int32_t dense_windows = 0;            // EngineOptions
  int32_t streamed_layers = 0;          // not resident
  bool drafts = false;                  // the MTP layer makes some: embedding and head stay for it
  bool mtp_outweighed = false;          // it would, but does not gain what its memory costs
  std::vector<SlotClass> slot_classes;  // as Model::ExpertClasses()
  uint32_t slot_total = 0, expert_total = 0;  // equal: everything that is used is resident

  // What a full sweep is expected to do: sequences that take part, rows, the share of a layer's
  // experts that they choose, the share of those that is resident, bytes that are read; of those,
  // dense weights.
  double together = 0, filled_rows = 0, union_share = 0, resident_share = 0;
  uint64_t sweep_bytes = 0, sweep_dense = 0;
  std::optional<Prediction> prediction;

  uint64_t measuring = 0;  // PlanRequest; it has been given back
  // Settings by hand that ask for memory which nothing can use: the flag, why, and the bytes.
  std::vector<std::string> wasted;

  std::string Line() const;   // one line
  std::string Table() const;  // --plan
};

// Tokens of prompt and answer together where nothing is said: the lesser of 4096 and the model's.
int32_t DefaultContext(const ModelConfig& config);

// Three digits and a unit of 1,000s: "98.3 kB", "12.0 MB", "1.25 GB".
std::string SizeText(uint64_t bytes);

// What the process takes without weights, KV and scratch: as it is now, and what threads will add.
uint64_t ProcessBytes(int32_t threads);

// What is kept free below a budget: max(3 %, 64 MB).
uint64_t MarginOf(uint64_t budget);

// Throws UsageError when it does not fit, saying which flag gains how much.
Plan MakePlan(const Model& model, const PlanRequest& request);

}  // namespace colibri
