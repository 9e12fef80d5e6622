#include "apps/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "apps/say.h"

namespace colibri {
namespace {

constexpr std::chrono::milliseconds kBarInterval{250};
constexpr std::chrono::seconds kPlainInterval{5};

double Rate(double amount, double seconds) { return seconds > 0 ? amount / seconds : 0; }

double HitRate(const CacheStats& c) {
  const uint64_t asked = c.hits + c.joined + c.misses;
  return asked == 0 ? 0 : static_cast<double>(c.hits) / static_cast<double>(asked);
}

uint64_t BytesRead(const CacheStats& c) { return c.bytes_demand + c.bytes_prefetch; }

}  // namespace

Progress::Progress(ProgressFormat format, const Engine& engine, const Deliverer& deliverer,
                   int32_t layers)
    : format_(format), engine_(engine), deliverer_(deliverer), layers_(layers) {
  if (format_ == ProgressFormat::kAuto) {
    format_ = isatty(STDERR_FILENO) != 0 ? ProgressFormat::kBar : ProgressFormat::kPlain;
  }
  if (format_ != ProgressFormat::kOff) thread_ = std::thread([this] { Loop(); });
}

void Progress::Stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Progress::Loop() {
  std::unique_lock lock(mutex_);
  const bool bar = format_ == ProgressFormat::kBar;
  const auto interval = bar ? kBarInterval : std::chrono::milliseconds(kPlainInterval);
  while (!wake_.wait_for(lock, interval, [this] { return stopping_; })) Print(false);
  if (printed_ || format_ == ProgressFormat::kJson) Print(true);
}

void Progress::Print(bool last) {
  const EngineStats stats = engine_.Stats();
  const DeliveryTotals totals = deliverer_.Totals();
  const double seconds = stats.seconds;
  const int32_t layer = std::max(0, engine_.TheProfile().Layer());
  const auto tokens = static_cast<double>(totals.tokens);
  const auto bytes = static_cast<double>(BytesRead(stats.cache));
  // What is left is known only once the input has been read to its end.
  const uint64_t known = stats.scheduler.lines_read;
  const bool all_known = !stats.scheduler.input_open;
  double left = -1;
  // Early on the finished lines are the short ones: they say little about the others.
  const auto running = static_cast<uint64_t>(stats.scheduler.running);
  if (all_known && totals.lines_done > 0 && totals.lines_done >= running) {
    left = seconds / static_cast<double>(totals.lines_done) *
           static_cast<double>(known - std::min(known, totals.lines_done));
  }
  if (format_ == ProgressFormat::kJson) {
    SayPart(fmt::format(
        "{{\"seconds\":{:.3f},\"lines_done\":{},\"lines_failed\":{},\"lines_read\":{},"
        "\"input_open\":{},\"tokens\":{},\"tokens_per_second\":{:.3f},\"bytes_read\":{},"
        "\"gb_per_second\":{:.3f},\"hit_rate\":{:.4f},\"layer\":{},\"layers\":{},"
        "\"seconds_left\":{}}}\n",
        seconds, totals.lines_done, totals.lines_failed, known, !all_known, totals.tokens,
        Rate(tokens, seconds), BytesRead(stats.cache), Rate(bytes, seconds) / 1e9,
        HitRate(stats.cache), layer, layers_, left < 0 ? "null" : fmt::format("{:.1f}", left)));
    return;
  }
  const std::string line = fmt::format(
      "{}/{}{} lines, {} tokens, {:.2f} tokens/s, {:.2f} GB/s, {:.0f} % hits, layer {}/{}{}",
      totals.lines_done, known, all_known ? "" : "+", totals.tokens, Rate(tokens, seconds),
      Rate(bytes, seconds) / 1e9, 100 * HitRate(stats.cache), layer + 1, layers_,
      left < 0 ? "" : fmt::format(", {:.0f} s left", left));
  if (format_ == ProgressFormat::kBar) {
    SayPart(fmt::format("\r\033[K{}{}", line, last ? "\r\033[K" : ""));
  } else if (!last) {
    Say(line);
  }
  printed_ = true;
}

std::string Summary(const EngineStats& stats, const DeliveryTotals& totals, const Plan& plan) {
  const double seconds = stats.seconds;
  const CacheStats& c = stats.cache;
  const OverlapFigures& o = stats.overlap;
  const double total = std::max(1e-9, o.Total());
  const auto per_second = static_cast<uint64_t>(Rate(static_cast<double>(BytesRead(c)), seconds));
  std::string text = fmt::format(
      "{} {}, {} failed; {} prompt and {} generated tokens in {:.1f} s: {:.2f} tokens/s\n",
      totals.lines_done, totals.lines_done == 1 ? "line" : "lines", totals.lines_failed,
      stats.scheduler.prompt_tokens, totals.tokens, seconds,
      Rate(static_cast<double>(totals.tokens), seconds));
  text += fmt::format("{} read, {}/s; experts: {:.1f} % hits of {}; hints {} read, {} used\n",
                      SizeText(BytesRead(c)), SizeText(per_second), 100 * HitRate(c),
                      c.hits + c.joined + c.misses, c.hints_read, c.hints_used);
  text += fmt::format(
      "time: {:.0f} % reading and computing at once, {:.0f} % computing only, {:.0f} % reading "
      "only, {:.0f} % neither\n",
      100 * o.both_s / total, 100 * o.compute_only_s / total, 100 * o.io_only_s / total,
      100 * o.neither_s / total);
  text += fmt::format("memory: peak {} of {} planned, budget {}\n", SizeText(PeakResidentBytes()),
                      SizeText(plan.Total()), SizeText(plan.budget));
  return text;
}

}  // namespace colibri
