// What a plan says of itself.
#include <fmt/format.h>

#include <iterator>
#include <string>
#include <string_view>

#include "runtime/plan.h"
#include "runtime/plan_prediction.h"

namespace colibri {
namespace {

// What stays in memory and what is read with every sweep.
std::string DenseNote(const Plan& p) {
  if (p.sweep_dense == 0) return "attention, shared experts, dense layers, head, embedding";
  std::string note = "routers, norms";
  if (p.resident.head) note += ", head";
  if (p.resident.embedding) note += ", embedding";
  if (p.drafts) note += " (both for drafts)";
  if (p.streamed_layers == 0) {
    note += ", all layers";
  } else if (p.resident.layers > 0) {
    note += fmt::format(", the first {} layers", p.resident.layers);
  }
  if (p.dense_windows > 0) note += fmt::format(", {} windows", p.dense_windows);
  note += fmt::format("; a sweep reads {}", SizeText(p.sweep_dense));
  if (p.streamed_layers > 0) note += fmt::format(", {} layers", p.streamed_layers);
  if (!p.resident.head) note += ", the head";
  if (!p.resident.embedding) note += ", rows of the embedding";
  return note;
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

std::string Plan::Line() const {
  std::string text = fmt::format(
      "plan: {} of {} ({}): dense {}, KV {} for {} tokens, scratch {}, lines {}, {} of {} experts "
      "{}; {} rows, {} answer{} at once, {} thread{}",
      SizeText(Total()), SizeText(budget), budget_source, SizeText(dense), SizeText(kv),
      int64_t{kv_pages} * page_tokens, SizeText(scratch), SizeText(lines), slot_total, expert_total,
      SizeText(slots), rows, sequences, sequences == 1 ? "" : "s", threads,
      threads == 1 ? "" : "s");
  if (kv_file > 0) text += fmt::format("; KV file {}", SizeText(kv_file));
  if (sweep_bytes > 0) text += fmt::format("; a sweep reads {}", SizeText(sweep_bytes));
  if (sweep_dense > 0) text += fmt::format(", {} of it dense weights", SizeText(sweep_dense));
  if (prediction) text += fmt::format("; predicted: {}", PredictionText(*prediction));
  return text;
}

std::string Plan::Table() const {
  std::string text;
  const auto row = [&](std::string_view what, std::string_view figure, const std::string& note) {
    text += fmt::format("{:<16}{:>12}  {}\n", what, figure, note);
  };
  const auto size = [&](std::string_view what, uint64_t bytes, const std::string& note) {
    row(what, SizeText(bytes), note);
  };
  size("budget", budget, budget_source);
  size("process", base, "program, headers, tokenizer, threads");
  size("dense weights", dense, DenseNote(*this));
  size("KV", kv,
       fmt::format("{} pages of {} tokens; --ctx-size {}", kv_pages, page_tokens, context));
  if (kv_file > 0) {
    size("KV file", kv_file,
         fmt::format("pages of the layers from {} on; a sweep reads and writes {}", kv_ram_layers,
                     SizeText(kv_sweep_bytes)));
  }
  size("scratch", scratch,
       fmt::format("{} frame(s) of {} rows, {} of them prefill; {} sequences", frames, rows,
                   prefill_rows, sequences));
  size("lines", lines,
       fmt::format("a prompt line being read, tokens of those under way, {} for what they ask for",
                   SizeText(line_pool)));
  for (const SlotClass& s : slot_classes) {
    size("expert slots", s.bytes * s.count,
         fmt::format("{} slots of {}", s.count, SizeText(s.bytes)));
  }
  if (measuring > Total()) {
    size("measuring", measuring, "before, and given back: how fast the machine is");
  }
  size("total", Total(), fmt::format("{} kept free", SizeText(margin)));
  row("resident", fmt::format("{:.1f} %", 100 * resident_share),
      fmt::format("of the experts: {} of {}", slot_total, expert_total));
  size("a sweep reads", sweep_bytes,
       fmt::format("{:.0f} rows of {:.0f} answers choose {:.1f} % of the experts", filled_rows,
                   together, 100 * union_share));
  size("a row reads", static_cast<uint64_t>(static_cast<double>(sweep_bytes) / filled_rows),
       "with its share of the sweep");
  if (prediction) {
    row("predicted", fmt::format("{:.2f}/s", prediction->tokens_a_second),
        PredictionNote(*prediction));
  }
  for (const std::string& one : wasted) text += one + "\n";
  return text;
}

}  // namespace colibri
