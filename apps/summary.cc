#include "apps/summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

namespace colibri {
namespace {

constexpr uint64_t kHandful = 5;
constexpr size_t kLongestId = 40;  // characters of a custom_id that are shown

double Rate(double amount, double seconds) { return seconds > 0 ? amount / seconds : 0; }

// "line 12" and its id, unless that is only the number again; nothing in it moves a cursor.
std::string NameOf(const LineOutcome& line) {
  const std::string name = fmt::format("line {}", line.line);
  if (line.id.empty() || line.id == fmt::format("line-{}", line.line)) return name;
  const nlohmann::json id =
      line.id.size() <= kLongestId ? line.id : line.id.substr(0, kLongestId) + "...";
  return name + " " + id.dump(-1, ' ', true, nlohmann::json::error_handler_t::ignore);
}

void Append(std::string* list, const std::string& entry) {
  *list += (list->empty() ? "" : ", ") + entry;
}

std::string EndsText(const Ends& ends) {
  std::string list;
  const auto add = [&list](uint64_t count, std::string_view name) {
    if (count > 0) Append(&list, fmt::format("{} {}", count, name));
  };
  add(ends.stop, "stop");
  add(ends.length, "length");
  add(ends.degenerate, "degenerate (cut for repeating)");
  add(ends.tool_calls, "tool_calls");
  return list.empty() ? "" : "ends: " + list + "\n";
}

std::string LinesText(std::string_view what, const std::vector<LineOutcome>& lines,
                      const std::function<std::string(const LineOutcome&)>& figure) {
  std::string list;
  for (const LineOutcome& line : lines) Append(&list, NameOf(line) + " " + figure(line));
  return list.empty() ? "" : fmt::format("{}: {}\n", what, list);
}

// One line, or nothing.
std::string DraftsSummary(const EngineStats& stats) {
  const DraftCounts &mtp = stats.scheduler.mtp_drafts, &found = stats.scheduler.looked_up;
  std::string text;
  if (mtp.Offered() > 0) Append(&text, "by the MTP layer " + DraftsText(mtp));
  if (found.Offered() > 0) Append(&text, "by prompt lookup " + DraftsText(found));
  if (text.empty()) return text;
  if (stats.draft_bytes > 0) {
    const uint64_t accepted = std::max<uint64_t>(1, mtp.Accepted() + found.Accepted());
    Append(&text, fmt::format("{} read for them alone, {} for each accepted",
                              SizeText(stats.draft_bytes), SizeText(stats.draft_bytes / accepted)));
  }
  return fmt::format("drafts: {}\n", text);
}

}  // namespace

std::string LinesSummary(const Tally& tally, uint64_t tokens, double seconds) {
  std::string text = fmt::format("{} {}, {} failed; {} prompt and {} generated tokens",
                                 tally.Lines(), tally.Lines() == 1 ? "line" : "lines",
                                 tally.Failed(), tally.PromptTokens(), tally.GeneratedTokens());
  if (tally.ReasoningTokens() > 0) text += fmt::format(" ({} reasoning)", tally.ReasoningTokens());
  if (tokens > tally.GeneratedTokens()) {
    text += fmt::format(", {} more for lines without a record", tokens - tally.GeneratedTokens());
  }
  text += fmt::format(", in {:.1f} s: {:.2f} tokens/s\n", seconds,
                      Rate(static_cast<double>(tokens), seconds));
  text += EndsText(tally.HowEnded());
  std::string failures;
  for (const Tally::Failure& f : tally.Failures()) {
    Append(&failures, fmt::format("{} {} (first: line {})", f.count, f.code, f.first_line));
  }
  if (!failures.empty()) text += fmt::format("failed: {}\n", failures);
  if (tally.Lines() <= kHandful) return text;
  text += LinesText("slowest", tally.Slowest(),
                    [](const LineOutcome& line) { return fmt::format("{:.1f} s", line.seconds); });
  return text + LinesText("longest", tally.Longest(), [](const LineOutcome& line) {
           return fmt::format("{} tokens", line.generated_tokens);
         });
}

std::string PredictionSummary(const Plan& plan, uint64_t tokens, double seconds) {
  if (!plan.prediction || tokens == 0) return {};
  return fmt::format("predicted {:.2f}, got {:.2f} tokens/s\n", plan.prediction->tokens_a_second,
                     Rate(static_cast<double>(tokens), seconds));
}

std::string MachineSummary(const EngineStats& stats, const Plan& plan) {
  const CacheStats& c = stats.cache;
  const OverlapFigures& o = stats.overlap;
  const double total = std::max(1e-9, o.Total());
  const uint64_t read = c.BytesRead() + stats.kv.bytes_read + stats.dense.Bytes();
  const double a_second = Rate(static_cast<double>(read), stats.seconds);
  std::string text;
  const SchedulerStats& lines = stats.scheduler;
  if (lines.cached_tokens > 0) {
    text = fmt::format("prompts: {} of {} tokens shared with others before them\n",
                       lines.cached_tokens, lines.prompt_tokens);
  }
  text += DraftsSummary(stats);
  text += fmt::format("{} read, {}/s; experts: {:.1f} % hits of {}; hints {} read, {} used\n",
                      SizeText(read), SizeText(static_cast<uint64_t>(a_second)), 100 * c.HitRate(),
                      c.Asked(), c.hints_read, c.hints_used);
  if (stats.kv.bytes_read + stats.kv.bytes_written > 0) {
    text += fmt::format("KV pages: {} read, {} written\n", SizeText(stats.kv.bytes_read),
                        SizeText(stats.kv.bytes_written));
  }
  if (stats.dense.Bytes() > 0) {
    text += fmt::format("dense weights: {} of it, {:.0f} % there before they were needed\n",
                        SizeText(stats.dense.Bytes()),
                        100 * static_cast<double>(stats.dense.bytes_ahead) /
                            static_cast<double>(stats.dense.Bytes()));
  }
  text += fmt::format(
      "time: {:.0f} % reading and computing at once, {:.0f} % computing only, {:.0f} % reading "
      "only, {:.0f} % neither\n",
      100 * o.both_s / total, 100 * o.compute_only_s / total, 100 * o.io_only_s / total,
      100 * o.neither_s / total);
  text += fmt::format("memory: peak {} of {} planned", SizeText(PeakResidentBytes()),
                      SizeText(plan.Total()));
  if (plan.measuring > plan.Total()) {
    text += fmt::format(" and {} to measure speeds", SizeText(plan.measuring));
  }
  return text + fmt::format(", budget {}\n", SizeText(plan.budget));
}

}  // namespace colibri
