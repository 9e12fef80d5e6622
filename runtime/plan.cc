// Length: what a width gets depends on all other parts; one search over all of them.
#include "runtime/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <utility>

#include "io/error.h"
#include "runtime/dense_stream.h"
#include "runtime/draft.h"
#include "runtime/embedding_rows.h"
#include "runtime/frame.h"
#include "runtime/line_limits.h"
#include "runtime/plan_prediction.h"
#include "runtime/sampler.h"

namespace colibri {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kMargin = 64'000'000;
// Stacks, TBB's pools, the output queue: measured at 9 MiB with two threads, generously rounded.
constexpr uint64_t kBaseExtra = 16 * kMiB;
constexpr uint64_t kBasePerThread = 2 * kMiB;
// Widths in the order in which they are tried. 256 rows touch 99.97 % of 256 experts at 8 a token;
// wider ones share the same reads among more rows. Another one than 256 has to gain something, a
// narrower one more: what the prompts need may be less than is guessed, and then width helps.
constexpr int32_t kWidths[] = {256, 128, 64, 32, 16, 8, 4, 2, 1, 512, 1024};
constexpr double kWiderGain = 0.97, kNarrowerGain = 0.9;
// A row's arithmetic takes as long as reading a 32nd of the experts that a row alone asks for: on
// paper a 12th to a 35th, from two cores beside a drive of 3 GB/s to 16 beside 14 GB/s. Narrow
// frames fetch weights from memory for few rows: a single row costs nine times as much.
constexpr double kRowArithmetic = 1.0 / 32;
constexpr double kNarrowRows = 8;
// Pages are tried in so many steps from none to all that is left, resident layers likewise.
constexpr int32_t kSplits = 16;
constexpr int32_t kDefaultContext = 4096;
// Lines that wait for a sequence: some thousand usual ones. They only shorten the end of a run: not
// where memory is short.
constexpr uint64_t kAheadBytes = 2 * kMiB;
constexpr uint64_t kAheadBudget = 192'000'000;

uint64_t N(int32_t v) { return static_cast<uint64_t>(v); }

// Everything but KV pages and slots, for frames of `rows` rows, with what is resident in `p`.
uint64_t Scratch(const Model& model, const PlanRequest& r, const Plan& p, int32_t rows,
                 int32_t sequences, int32_t context) {
  const FrameShape shape{rows, context, r.threads, !p.resident.head};
  const uint64_t sampling = N(r.threads) * N(model.Config().vocab) * 2 *
                            sizeof(SampleScratch::Entry) *
                            (p.resident.mtp ? 2 : 1);  // tokens and drafts
  const uint64_t tokens = N(sequences) * N(context) * sizeof(int32_t);
  const uint64_t waiting =
      p.resident.mtp ? N(sequences) * N(kWaitingKeys) * N(model.Config().hidden) * sizeof(float)
                     : 0;  // for their keys in the MTP layer
  const uint64_t embedding = p.resident.embedding ? 0 : EmbeddingRows::Bytes(model, r.frames, rows);
  return N(r.frames) * shape.Bytes(model) + sampling + tokens + waiting + embedding;
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
  p->ahead = r.reads_ahead && p->budget >= kAheadBudget ? kAheadBytes : 0;
  // The last of them may go beyond by what one holds.
  const uint64_t one = p->ahead > 0 ? MaxLineBytes(p->context) : 0;
  p->lines = LineReadBytes(p->context, r.token_bytes) + p->line_pool + p->held_back + p->ahead +
             one + TokenLists(p->sequences, p->context);
}

uint64_t SlotBytes(const std::vector<SlotClass>& classes) {
  uint64_t bytes = 0;
  for (const SlotClass& c : classes) bytes += c.bytes * c.count;
  return bytes;
}

// By the MTP layer.
bool Drafts(const Model& model, const PlanRequest& r) {
  return r.drafts && r.mtp && model.HasMtp();
}

// Without drafts nothing asks for the experts of the MTP layer.
bool Used(const Model& model, const PlanRequest& r, const Model::ExpertClass& c) {
  return c.first_layer < model.Config().layers || Drafts(model, r);
}

// By hand, or what fits into `room`: one slot of each class, then to every class its share.
std::vector<SlotClass> SlotsFor(const Model& model, const PlanRequest& r, uint64_t room) {
  std::vector<SlotClass> classes;
  double ones = 0, more = 0;
  for (const Model::ExpertClass& c : model.ExpertClasses()) {
    const auto bytes = static_cast<double>(c.slot_bytes);
    ones += bytes;
    if (Used(model, r, c)) more += bytes * (c.experts - 1);
  }
  const double rest = std::max(0.0, static_cast<double>(room) - ones);
  const double share = more > 0 ? std::min(1.0, rest / more) : 0;
  for (const Model::ExpertClass& c : model.ExpertClasses()) {
    double count = 1;
    if (r.slot_count) {
      count = *r.slot_count;
    } else if (r.slot_share) {
      count = std::ceil(*r.slot_share * c.experts);
    } else if (Used(model, r, c)) {
      count = 1 + std::floor(share * (c.experts - 1));
    }
    count = std::clamp(count, 1.0, static_cast<double>(c.experts));
    classes.push_back({c.slot_bytes, static_cast<uint32_t>(count)});
  }
  return classes;
}

// As --ram takes it, rounded up.
std::string RamFlag(uint64_t bytes) { return fmt::format("--ram {}MB", bytes / 1'000'000 + 1); }

uint64_t Pages(int64_t tokens, int32_t page_tokens) {
  return static_cast<uint64_t>((tokens + page_tokens - 1) / page_tokens);
}

// Tokens of the longest answer with its prompt, as far as is known.
int32_t MostTokens(const PlanRequest& r, int32_t context) {
  return r.most_tokens > 0 ? std::min(r.most_tokens, context) : context;
}

// Rows that the input can fill at once: all of a prompt, one for each answer under way.
uint64_t UsableRows(const PlanRequest& r, int32_t context) {
  uint64_t answers = r.answers.value_or(uint64_t{1} << 30);
  if (r.sequences > 0) answers = std::min(answers, N(r.sequences));
  uint64_t rows = std::max<uint64_t>(1, answers) * N(MostTokens(r, context));
  const uint64_t decode = answers * (r.drafts ? 1 + kMaxDrafts : 1);
  if (r.prompt_tokens > 0) rows = std::min(rows, std::max(r.prompt_tokens, decode));
  return rows;
}

// A row alone reads so many bytes of experts, all rows together what they choose of them.
double BytesAlone(const Model& model) {
  double bytes = 0;
  for (const Model::ExpertClass& c : model.ExpertClasses()) {
    bytes += static_cast<double>(c.slot_bytes) * LayerExperts(model, c);
  }
  return bytes * model.Config().top_k / std::max(1, model.Config().experts);
}

// Pages that an answer holds on average.
uint64_t HeldPages(const PlanRequest& r, const Plan& p) {
  return Pages(std::max(1, HeldTokens(r, p)), p.page_tokens);
}

// Dense weights that a sweep reads.
uint64_t SweepDense(const Model& model, const Plan& p) {
  uint64_t bytes = 0;
  for (int32_t i = p.resident.layers; i < model.Config().layers; ++i) bytes += model.Block(i).bytes;
  for (int32_t i = 0; !p.resident.head && i < model.HeadParts(); ++i) {
    bytes += model.HeadBlock(i).bytes;
  }
  if (p.resident.embedding) return bytes;
  return bytes + EmbeddingRows::Bytes(model, 1, static_cast<int32_t>(p.filled_rows));
}

void Estimate(const Model& model, const PlanRequest& r, Plan* p) {
  const auto pages = static_cast<double>(HeldPages(r, *p));
  p->together = std::clamp(p->kv_pages / pages, 1.0, static_cast<double>(p->sequences));
  // Answers that all start together have no prompts beside them: sweeps are full of prompts first,
  // then they have a row for each answer; what counts is rows a sweep over both.
  const bool replaced = r.answers.value_or(UINT64_MAX) > N(p->sequences);
  const double of_each = r.rows_per_token;
  const double apart = of_each / ((of_each - 1) / p->rows + 1 / p->together);
  p->filled_rows = std::min<double>(p->rows, replaced ? p->together * of_each : apart);
  p->union_share = UnionShare(model, p->filled_rows);
  double all = 0, resident = 0;
  for (size_t i = 0; i < p->slot_classes.size(); ++i) {
    const Model::ExpertClass& e = model.ExpertClasses()[i];
    const double bytes = static_cast<double>(e.slot_bytes) * LayerExperts(model, e);
    all += bytes;
    resident += bytes * p->slot_classes[i].count / e.experts;
  }
  p->resident_share = all > 0 ? resident / all : 1;
  p->sweep_bytes = static_cast<uint64_t>(p->union_share * (all - resident));
  // Every page that is held is read, and as many are written as the rows fill.
  const double used = std::min<double>(p->kv_pages, p->together * pages);
  const double on_drive = static_cast<double>(p->kv_file) / std::max(1, p->kv_pages);
  p->kv_sweep_bytes = static_cast<uint64_t>(on_drive * (used + p->filled_rows / p->page_tokens));
  p->sweep_bytes += p->kv_sweep_bytes;
  p->sweep_dense = SweepDense(model, *p);
  p->sweep_bytes += p->sweep_dense;
}

// Seconds a row, where speeds are known; else bytes a row: what it reads, or what its arithmetic
// takes if that is more.
double PlainRowCost(const Model& model, const PlanRequest& r, const Plan& p) {
  if (r.speeds) return SecondsARow(model, r, p);
  const double reads = static_cast<double>(p.sweep_bytes) / p.filled_rows;
  return std::max(reads, BytesAlone(model) * kRowArithmetic * (1 + kNarrowRows / p.filled_rows));
}

// Where the MTP layer makes drafts one stands behind each answer's row, if there is room and it
// pays: its row counts as far as it is accepted, and making it takes one more layer.
double RowCost(const Model& model, const PlanRequest& r, const Plan& p) {
  const double plain = PlainRowCost(model, r, p);
  if (!p.drafts) return plain;
  const double drafts = std::min(p.rows - p.filled_rows, p.together);
  const auto experts = static_cast<double>(p.sweep_bytes - p.kv_sweep_bytes - p.sweep_dense);
  const double wider = UnionShare(model, p.filled_rows + kDraftNewExperts * drafts);
  Plan with = p;
  with.sweep_bytes += static_cast<uint64_t>(experts * (wider / p.union_share - 1));
  with.filled_rows += drafts;
  with.together += drafts;
  const double worth = p.filled_rows + kUsualMtpShare * drafts;
  const double layer = 1.0 / model.Config().layers;
  return std::min(plain, PlainRowCost(model, r, with) * with.filled_rows / worth * (1 + layer));
}

void SetPages(const Model& model, const PlanRequest& r, uint64_t pages, Plan* p) {
  p->kv_pages = static_cast<int32_t>(std::min<uint64_t>(pages, 1u << 24));
  const KvLayout layout(
      KvShapeOf(model, r.page_tokens, r.kv_type), p->kv_pages,
      KvStreamingOf(model, p->kv_ram_layers, r.frames, p->rows, p->sequences, p->context));
  p->kv = layout.MemoryBytes();
  p->kv_file = layout.FileBytes();
}

// The pages of as many layers in memory as `room` holds.
void SetStreamedPages(const Model& model, const PlanRequest& r, uint64_t pages, uint64_t room,
                      Plan* p) {
  p->kv_ram_layers = model.Config().layers - 1;
  SetPages(model, r, pages, p);
  while (p->kv > room && p->kv_ram_layers > 0) {
    --p->kv_ram_layers;
    SetPages(model, r, pages, p);
  }
}

uint64_t LimitOf(const Plan& p) { return p.budget > p.margin ? p.budget - p.margin : 0; }

// The least for frames of `rows` rows: pages for one context, a slot of each class.
void SetWidth(const Model& model, const PlanRequest& r, int32_t rows, Plan* p) {
  p->rows = rows;
  p->prefill_rows = r.prefill_rows > 0 ? std::min(r.prefill_rows, rows) : rows;
  const uint64_t answers = std::max<uint64_t>(1, r.answers.value_or(1u << 30));
  p->sequences = static_cast<int32_t>(std::min(N(r.sequences > 0 ? r.sequences : rows), answers));
  p->scratch = Scratch(model, r, *p, rows, p->sequences, p->context);
  SetLines(r, p);
  p->kv_ram_layers = INT32_MAX;
  SetPages(model, r, Pages(p->context, r.page_tokens), p);
  p->slot_classes = SlotsFor(model, r, 0);
  p->slots = SlotBytes(p->slot_classes);
  if (p->Total() <= LimitOf(*p) || r.kv_space == 0) return;
  Plan streamed = *p;
  SetStreamedPages(model, r, N(p->kv_pages), 0, &streamed);
  if (streamed.kv < p->kv && streamed.kv_file <= r.kv_space) *p = std::move(streamed);
}

// Pages of some layers on the drive: what all sequences hold on average, a quarter more, or less
// where that costs less. The first layers' stay in memory as far as it goes: a byte of them that is
// held is one that no sweep reads, a byte of slots saves a share of that. `room`: for pages,
// `both`: for pages and slots.
std::optional<Plan> Streamed(const Model& model, const PlanRequest& r, const Plan& least,
                             uint64_t room, uint64_t both, uint64_t most) {
  std::optional<Plan> best;
  const uint64_t first = N(least.kv_pages);
  const uint64_t last =
      std::clamp(N(least.sequences) * HeldPages(r, least) * 5 / 4, first, std::max(first, most));
  for (uint64_t i = 0; i <= kSplits; ++i) {
    Plan tried = least;
    SetStreamedPages(model, r, first + (last - first) * i / kSplits, room, &tried);
    if (tried.kv > room || tried.kv_file > r.kv_space) continue;
    tried.slot_classes = SlotsFor(model, r, both - tried.kv);
    tried.slots = SlotBytes(tried.slot_classes);
    Estimate(model, r, &tried);
    if (!best || RowCost(model, r, tried) < RowCost(model, r, *best)) best = std::move(tried);
  }
  return best;
}

// Shares out what is left between pages, all of them in memory, and slots. Whatever the pages gain,
// `streaming` bytes of slots are kept.
void ShareInMemory(const Model& model, const PlanRequest& r, uint64_t streaming, Plan* p) {
  const uint64_t limit = LimitOf(*p), rest = limit - p->Total();
  const uint64_t page = p->kv / N(p->kv_pages), least = N(p->kv_pages);
  const uint64_t most =
      std::max(least, N(p->sequences) * Pages(MostTokens(r, p->context), r.page_tokens));
  const auto with_pages = [&](uint64_t room) {
    Plan tried = *p;
    SetPages(model, r, std::min(least + room / page, most), &tried);
    tried.slot_classes = SlotsFor(model, r, limit - (tried.Total() - tried.slots));
    tried.slots = SlotBytes(tried.slot_classes);
    Estimate(model, r, &tried);
    return tried;
  };
  if (r.slot_count || r.slot_share) {
    *p = with_pages(rest);
    return;
  }
  const uint64_t room = rest - std::min(streaming, rest / 4);
  Plan best = with_pages(0);
  for (uint64_t i = 1; i <= kSplits; ++i) {
    Plan tried = with_pages(room / kSplits * i);
    if (RowCost(model, r, tried) < RowCost(model, r, best)) best = std::move(tried);
  }
  // What slots leave goes to pages.
  const uint64_t pages = N(best.kv_pages) + (limit - best.Total()) / page;
  SetPages(model, r, std::min(pages, most), &best);
  Estimate(model, r, &best);
  *p = std::move(best);
}

// Pages go to the drive where not all that the sequences may need are in memory and a row costs
// less that way, or where --kv-ram or the budget has no room for them.
void ShareOut(const Model& model, const PlanRequest& r, Plan* p) {
  // Of slots a quarter of a layer is kept, so that reading goes on while attention computes.
  uint64_t streaming = 0;
  for (const Model::ExpertClass& c : model.ExpertClasses()) {
    if (Used(model, r, c))
      streaming = std::max(streaming, c.slot_bytes * N(model.Config().experts / 4));
  }
  const Plan least = *p;
  const bool fits = p->kv_file == 0;
  if (fits) ShareInMemory(model, r, streaming, p);
  const uint64_t most = N(p->sequences) * Pages(MostTokens(r, p->context), r.page_tokens);
  const bool must = !fits || p->kv > r.kv_ram.value_or(UINT64_MAX);
  if (r.kv_space == 0 || (!must && N(p->kv_pages) >= most)) return;
  const uint64_t both = LimitOf(least) - (least.Total() - least.kv - least.slots);
  uint64_t kept = least.slots;
  if (!r.slot_count && !r.slot_share) {
    kept = std::max(kept, std::min(streaming, (both - kept) / 4));
  }
  // What has been found to fit is tried at any rate.
  const uint64_t room =
      std::max(std::min(both - kept, r.kv_ram.value_or(UINT64_MAX)), fits ? uint64_t{0} : least.kv);
  std::optional<Plan> streamed = Streamed(model, r, least, room, both, most);
  if (!streamed) return;
  if (must || RowCost(model, r, *streamed) < kWiderGain * RowCost(model, r, *p)) *p = *streamed;
}

// Without drafts nothing of the MTP layer is needed; its input are rows of the embedding, and each
// draft step goes through the head once more.
void SetResident(const Model& model, const PlanRequest& r, const DenseResidents& residents,
                 Plan* p) {
  const bool drafts = Drafts(model, r);
  p->resident = {residents.layers, residents.embedding || drafts, drafts, residents.head || drafts};
  p->drafts = drafts;
  p->streamed_layers = std::max(0, model.Config().layers - residents.layers);
  p->dense_windows = DenseStream::Windows(model, p->resident, p->frames);
  p->dense = model.DenseBytes(p->resident) +
             N(p->dense_windows) * DenseStream::WindowBytes(model, p->resident);
}

Plan NoneResident(const Model& model, const PlanRequest& r, Plan p) {
  SetResident(model, r, {0, false, false, false}, &p);
  return p;
}

[[noreturn]] void DoesNotFit(const Model& model, const PlanRequest& r, const Plan& p) {
  const uint64_t page = p.kv / N(p.kv_pages);
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
       page * Pages(half, p.page_tokens) + Scratch(model, r, p, p.rows, p.sequences, half) +
           shorter.lines);
  Plan narrow = p;
  narrow.sequences = r.sequences > 0 ? p.sequences : 1;
  SetLines(r, &narrow);
  gain("--max-rows 1", p.scratch + p.lines,
       Scratch(model, r, p, 1, narrow.sequences, p.context) + narrow.lines);
  PlanRequest one = r;
  one.frames = 1;
  gain("--frames 1", p.scratch, Scratch(model, one, p, p.rows, p.sequences, p.context));
  gain("--resident none", p.dense, NoneResident(model, r, p).dense);
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

// Settings beyond what the input can use, cut to it.
PlanRequest CutToUse(const PlanRequest& asked, int32_t context) {
  PlanRequest r = asked;
  const uint64_t usable = UsableRows(r, context);
  if (r.rows > 0) r.rows = static_cast<int32_t>(std::min(N(r.rows), usable));
  // A sequence is in one frame at a time.
  uint64_t answers = std::max<uint64_t>(1, r.answers.value_or(N(r.frames)));
  if (r.sequences > 0) answers = std::min(answers, N(r.sequences));
  r.frames = static_cast<int32_t>(std::min(N(r.frames), answers));
  return r;
}

// The width whose rows cost least. Wider ones than asked for are not tried, nor those whose
// scratch, with the lists of their sequences' tokens, is more than an eighth of what is left beside
// the dense weights and the lines.
Plan Best(const Model& model, const PlanRequest& r, const Plan& empty) {
  if (r.rows > 0) {
    Plan p = empty;
    SetWidth(model, r, r.rows, &p);
    if (p.Total() > LimitOf(p)) DoesNotFit(model, r, p);
    ShareOut(model, r, &p);
    return p;
  }
  std::optional<Plan> best;
  const uint64_t usable = UsableRows(r, empty.context);
  for (const int32_t width : kWidths) {
    Plan p = empty;
    SetWidth(model, r, static_cast<int32_t>(std::min(N(width), usable)), &p);
    if (p.Total() > LimitOf(p)) {
      if (width == 1 && !best) DoesNotFit(model, r, p);
      continue;
    }
    const uint64_t lists = TokenLists(p.sequences, p.context);
    const uint64_t fixed = p.base + p.dense + p.lines - lists;
    if (width > 1 && p.scratch + lists > (LimitOf(p) - fixed) / 8) continue;
    ShareOut(model, r, &p);
    const double gain = best && p.rows > best->rows ? kWiderGain : kNarrowerGain;
    const auto within = [&r](const Plan& one) { return one.kv <= r.kv_ram.value_or(UINT64_MAX); };
    if (best && within(p) != within(*best)) {
      if (within(p)) best = std::move(p);
      continue;
    }
    if (!best || RowCost(model, r, p) < gain * RowCost(model, r, *best)) best = std::move(p);
  }
  return *best;
}

// The least plan of narrow frames is within the budget.
bool Fits(const Model& model, const PlanRequest& r, Plan p) {
  SetWidth(model, r, r.rows > 0 ? r.rows : 1, &p);
  return p.Total() <= LimitOf(p);
}

// The best plan over what of the dense weights stays in memory: all of it unless something else
// makes a row cheaper, or as much as --resident allows.
Plan BestResident(const Model& model, const PlanRequest& r, const Plan& empty) {
  const int32_t layers = model.Config().layers;
  std::vector<Plan> tried;
  const auto add = [&](int32_t resident, bool embedding, bool head) {
    tried.push_back(empty);
    SetResident(model, r, {resident, embedding, false, head}, &tried.back());
  };
  // What saves least of a sweep's reading goes first: of the embedding it is a few rows. A byte of
  // the head saves one, as a byte of a layer, but not in a sweep that draws no token, and its
  // windows are smaller.
  add(layers, true, true);
  add(layers, false, true);
  const int32_t step = r.dense ? 1 : std::max(1, layers / kSplits);
  for (int32_t resident = layers; resident > 0; resident -= step) add(resident, false, false);
  add(0, false, false);
  if (r.dense) {
    const auto first = std::find_if(tried.begin(), tried.end() - 1,
                                    [&](const Plan& p) { return p.dense <= *r.dense; });
    return Best(model, r, *first);
  }
  std::optional<Plan> best;
  for (const Plan& p : tried) {
    if (!Fits(model, r, p)) continue;
    Plan got = Best(model, r, p);
    if (!best && got.sweep_bytes == 0) return got;  // nothing is read
    if (!best || RowCost(model, r, got) < kWiderGain * RowCost(model, r, *best))
      best = std::move(got);
  }
  return best ? *best : Best(model, r, tried.back());
}

// The same, with the MTP layer if it is thought to gain what its memory costs.
Plan WeighMtp(const Model& model, PlanRequest* r, const Plan& empty) {
  if (!Drafts(model, *r) || !r->weigh_mtp) return BestResident(model, *r, empty);
  PlanRequest with = *r;
  r->mtp = false;
  Plan p = BestResident(model, *r, empty);
  p.mtp_outweighed = true;
  try {
    Plan drafting = BestResident(model, with, empty);
    if (RowCost(model, with, drafting) < kWiderGain * RowCost(model, *r, p)) {
      *r = with;
      return drafting;
    }
  } catch (const UsageError&) {
    // It does not fit.
  }
  return p;
}

// The same within --kv-ram: windows of the pages on the drive grow with the answers at once, so
// fewer of them are tried where their number is not given.
Plan WithinKvRam(const Model& model, PlanRequest* r, const Plan& empty) {
  const uint64_t most = r->kv_ram.value_or(UINT64_MAX);
  const PlanRequest given = *r;
  Plan p = WeighMtp(model, r, empty);
  while (p.kv > most && given.sequences == 0 && p.sequences > 1) {
    *r = given;
    r->sequences = p.sequences / 2;
    p = WeighMtp(model, r, empty);
  }
  if (p.kv <= most) return p;
  Plan smallest = p;
  if (r->kv_space > 0) SetStreamedPages(model, *r, Pages(p.context, p.page_tokens), 0, &smallest);
  // Rounded up, so that it does what it says.
  const uint64_t least = std::min(p.kv, smallest.kv);
  throw UsageError(fmt::format(
      "--kv-ram {}: KV takes {} at least{}{}; --kv-ram {}kB would do{}", SizeText(*r->kv_ram),
      SizeText(least), p.sequences > 1 ? fmt::format(" with {} answers at once", p.sequences) : "",
      r->kv_space == 0 ? ", without a file (--kv-dir)" : "", least / 1000 + 1,
      p.sequences > 1 ? ", or a lower --max-seqs" : ""));
}

using Note = std::function<void(const std::string& flag, const std::string& why, uint64_t bytes)>;

// What was asked for beyond what the input can use: cut, or, for the context, which answers depend
// on, only said.
void NoteCuts(const Model& model, const PlanRequest& asked, const Plan& p, const Note& note) {
  const PlanRequest r = CutToUse(asked, p.context);
  const auto scratch = [&](const PlanRequest& how, int32_t rows, int32_t sequences) {
    return Scratch(model, how, p, rows, sequences, p.context) + TokenLists(sequences, p.context);
  };
  const uint64_t now = scratch(r, p.rows, p.sequences);
  if (asked.rows > p.rows) {
    note(fmt::format("--max-rows {}", asked.rows),
         fmt::format("the prompts fill {} at most; scratch is smaller by", p.rows),
         scratch(r, asked.rows, p.sequences) - now);
  }
  if (asked.sequences > p.sequences) {
    note(fmt::format("--max-seqs {}", asked.sequences),
         fmt::format("the prompts ask for {}; lists of tokens are smaller by", p.sequences),
         scratch(r, p.rows, asked.sequences) - now);
  }
  if (asked.frames > p.frames) {
    note(fmt::format("--frames {}", asked.frames),
         fmt::format("the prompts fill {} at most; scratch is smaller by", p.frames),
         scratch(asked, p.rows, p.sequences) - now);
  }
  const int32_t most = (MostTokens(r, p.context) + 63) / 64 * 64;
  if (asked.context <= most) return;
  Plan longer = p, shorter = p;
  shorter.context = most;
  SetWidth(model, r, p.rows, &longer);
  SetWidth(model, r, p.rows, &shorter);
  note(fmt::format("--ctx-size {}", asked.context),
       fmt::format("prompts and answers take {} at most; --ctx-size {} gains", most, most),
       longer.Total() - shorter.Total());
}

// What --slots and --ram by hand leave without use.
void NoteUnused(const Model& model, const PlanRequest& asked, const Plan& p, const Note& note) {
  const bool by_hand = asked.slot_count || asked.slot_share;
  uint64_t beyond = 0;
  for (size_t i = 0; by_hand && i < p.slot_classes.size(); ++i) {
    const SlotClass& slots = p.slot_classes[i];
    const double more = asked.slot_count.value_or(0) - slots.count;
    if (more > 0) beyond += static_cast<uint64_t>(more * static_cast<double>(slots.bytes));
    if (Used(model, asked, model.ExpertClasses()[i])) continue;
    note(
        "--slots",
        fmt::format("{} are for experts of the MTP layer, which nothing asks for; all but one take",
                    slots.count),
        slots.bytes * (slots.count - 1));
  }
  if (beyond > 0) {
    note(fmt::format("--slots {:.0f}", *asked.slot_count),
         fmt::format("the model has {} experts; slots are smaller by", p.expert_total), beyond);
  }
  const uint64_t unused = LimitOf(p) - p.Total();
  if (unused <= p.budget / 50) return;
  if (asked.dense && p.sweep_dense > 0) {
    note("--resident", "without it more dense weights would stay in memory; no use is made of",
         unused);
    return;
  }
  if (by_hand && p.slot_total < p.expert_total) {
    note("--slots", "without it more experts would stay in memory; no use is made of", unused);
  } else if (asked.ram) {
    note(fmt::format("--ram {}", SizeText(*asked.ram)), "no use is made of", unused);
  }
}

}  // namespace

int32_t DefaultContext(const ModelConfig& config) {
  return std::min(kDefaultContext, config.max_positions);
}

uint64_t ProcessBytes(int32_t threads) {
  return ResidentBytes() + kBaseExtra + N(threads) * kBasePerThread;
}

uint64_t MarginOf(uint64_t budget) { return std::max(budget / 100 * 3, kMargin); }

int64_t Plan::PrefillWork() const { return int64_t{prefill_rows} * positions_a_row; }

Plan MakePlan(const Model& model, const PlanRequest& asked) {
  Plan p;
  const MemoryBudget machine = asked.ram ? MemoryBudget{*asked.ram, "--ram"} : AvailableMemory();
  p.budget = machine.bytes;
  p.budget_source = machine.source;
  // The process's own memory is not part of what the machine has left.
  if (!asked.ram) p.budget += ResidentBytes();
  p.margin = MarginOf(p.budget);
  p.measuring = asked.measuring;
  p.threads = asked.threads;
  p.context = asked.context > 0 ? asked.context : DefaultContext(model.Config());
  p.page_tokens = asked.page_tokens;
  p.base = ProcessBytes(asked.threads);
  PlanRequest r = CutToUse(asked, p.context);
  p.frames = r.frames;
  p = WithinKvRam(model, &r, p);
  p.positions_a_row = PositionsARow(r, p);
  if (r.speeds) p.prediction = PredictionOf(model, r, p);
  for (const SlotClass& s : p.slot_classes) p.slot_total += s.count;
  for (const Model::ExpertClass& e : model.ExpertClasses()) {
    p.expert_total += Used(model, r, e) || r.slot_count || r.slot_share ? e.experts : 1;
  }
  const Note note = [&p](const std::string& flag, const std::string& why, uint64_t bytes) {
    if (bytes >= kMiB) p.wasted.push_back(fmt::format("{}: {} {}", flag, why, SizeText(bytes)));
  };
  PlanRequest decided = asked;
  decided.mtp = r.mtp;
  NoteCuts(model, decided, p, note);
  NoteUnused(model, decided, p, note);
  return p;
}

}  // namespace colibri
