#include "apps/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>
#include <vector>

#include "apps/say.h"

namespace colibri {
namespace {

constexpr std::chrono::milliseconds kBarInterval{250};
constexpr std::chrono::milliseconds kPlainInterval{5000};
constexpr int32_t kUsualColumns = 80;

int32_t TerminalColumns() {
  winsize size{};
  const bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : kUsualColumns;
}

double Rate(double amount, double seconds) { return seconds > 0 ? amount / seconds : 0; }

double AverageTokens(const ProgressFigures& f) {
  return Rate(static_cast<double>(f.tokens), f.seconds);
}

// "12/48 lines (1 failed)"; "~48" is a guess, "12+": there may be more.
std::string LinesText(const ProgressFigures& f) {
  std::string text = fmt::format("{}/", f.lines_done);
  if (f.lines_total) {
    text += fmt::format("{}{:.0f}", f.total_guessed ? "~" : "", *f.lines_total);
  } else {
    text += fmt::format("{}+", f.lines_read);
  }
  text += " lines";
  if (f.lines_failed > 0) text += fmt::format(" ({} failed)", f.lines_failed);
  return text;
}

std::string LeftText(const ProgressFigures& f) {
  if (!f.seconds_left) return "time left unknown";
  const bool at_most = f.sweeps_left && f.sweeps_left->at_most;
  return fmt::format("{} {} left", at_most ? "at most" : "about", DurationText(*f.seconds_left));
}

// Ten cells of the run's time.
std::string Cells(const ProgressFigures& f) {
  const double total = f.seconds + f.seconds_left.value_or(0);
  if (!f.seconds_left || total <= 0) return {};
  const auto full = static_cast<size_t>(std::clamp(10 * f.seconds / total, 0.0, 10.0));
  return fmt::format(" [{}{}]", std::string(full, '#'), std::string(10 - full, '-'));
}

std::string Optional(const std::optional<double>& value, int decimals) {
  if (!value || !std::isfinite(*value)) return "null";
  return fmt::format("{:.{}f}", *value, decimals);
}

}  // namespace

std::string BarText(const ProgressFigures& f, int32_t columns) {
  std::vector<std::string> parts;
  if (f.tokens_a_second) parts.push_back(fmt::format("{:.2f} tokens/s", *f.tokens_a_second));
  parts.push_back(LeftText(f));
  parts.push_back(fmt::format("layer {}/{}", f.layer, f.layers));
  if (f.bytes_a_second) parts.push_back(fmt::format("{:.2f} GB/s", *f.bytes_a_second / 1e9));
  parts.push_back(fmt::format("{:.0f} % hits", 100 * f.hit_rate));
  parts.push_back(fmt::format("{} tokens", f.tokens));
  const size_t room = static_cast<size_t>(std::max(columns, 2)) - 1;
  std::string text = LinesText(f);
  // The cells only where the parts that matter most stand beside them.
  const std::string cells = Cells(f);
  if (text.size() + cells.size() + parts[0].size() + parts[1].size() + 4 <= room) text += cells;
  for (const std::string& part : parts) {
    if (text.size() + 2 + part.size() > room) break;
    text += ", " + part;
  }
  text.resize(std::min(text.size(), room));
  return text;
}

std::string PlainText(const ProgressFigures& f) {
  std::string text = fmt::format("{}, {} tokens", LinesText(f), f.tokens);
  if (f.tokens_a_second) {
    text += fmt::format(", {:.2f} tokens/s (average {:.2f})", *f.tokens_a_second, AverageTokens(f));
  }
  if (f.bytes_a_second) text += fmt::format(", {:.2f} GB/s", *f.bytes_a_second / 1e9);
  return text + fmt::format(", {:.0f} % hits, sweep {}, layer {}/{}, {}", 100 * f.hit_rate,
                            f.sweeps + 1, f.layer, f.layers, LeftText(f));
}

std::string JsonText(const ProgressFigures& f) {
  const auto bytes = static_cast<double>(f.bytes_read);
  std::optional<double> sweeps_left;
  if (f.sweeps_left) sweeps_left = f.sweeps_left->sweeps;
  const std::optional<double> gigabytes =
      f.bytes_a_second ? std::optional(*f.bytes_a_second / 1e9) : std::nullopt;
  return fmt::format(
      "{{\"seconds\":{:.3f},\"lines_done\":{},\"lines_failed\":{},\"lines_read\":{},"
      "\"lines_total\":{},\"lines_total_guessed\":{},\"lines_under_way\":{},\"input_open\":{},"
      "\"tokens\":{},\"tokens_per_second\":{:.3f},\"recent_tokens_per_second\":{},"
      "\"predicted_tokens_per_second\":{},"
      "\"bytes_read\":{},\"gb_per_second\":{:.3f},\"recent_gb_per_second\":{},\"hit_rate\":{:.4f},"
      "\"layer\":{},\"layers\":{},\"sweeps\":{},\"seconds_per_sweep\":{},\"sweeps_left\":{},"
      "\"seconds_left\":{},\"seconds_left_at_most\":{}}}",
      f.seconds, f.lines_done, f.lines_failed, f.lines_read, Optional(f.lines_total, 0),
      f.total_guessed, f.lines_under_way, f.input_open, f.tokens, AverageTokens(f),
      Optional(f.tokens_a_second, 3), Optional(f.predicted, 3), f.bytes_read,
      Rate(bytes, f.seconds) / 1e9, Optional(gigabytes, 3), f.hit_rate, f.layer - 1, f.layers,
      f.sweeps, Optional(f.seconds_a_sweep, 4), Optional(sweeps_left, 0),
      Optional(f.seconds_left, 1), f.sweeps_left && f.sweeps_left->at_most);
}

Progress::Progress(ProgressFormat format, Sources sources)
    : format_(format), sources_(std::move(sources)) {
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
  const auto interval = format_ == ProgressFormat::kBar ? kBarInterval : kPlainInterval;
  while (!wake_.wait_for(lock, interval, [this] { return stopping_; })) Print();
  if (format_ == ProgressFormat::kJson) Print();
  if (format_ == ProgressFormat::kBar) ShowStatus("");
}

ProgressFigures Progress::Look() {
  const EngineStats stats = sources_.engine.Stats();
  const SchedulerStats& s = stats.scheduler;
  ProgressFigures f;
  f.seconds = stats.seconds;
  const auto [done, failed] = sources_.written();
  f.lines_done = done;
  f.lines_failed = failed;
  f.lines_read = s.lines_read;
  f.input_open = s.input_open;
  f.tokens = sources_.deliverer.Tokens();
  f.sweeps = s.sweeps;
  f.bytes_read = stats.cache.BytesRead() + stats.kv.bytes_read + stats.dense.Bytes();
  f.hit_rate = stats.cache.HitRate();
  f.layer = std::max(0, sources_.engine.TheProfile().Layer()) + 1;
  f.layers = sources_.layers;
  pace_.Add(f.seconds, f.sweeps, f.tokens, f.bytes_read);
  f.tokens_a_second = pace_.TokensASecond();
  f.bytes_a_second = pace_.BytesASecond();
  f.seconds_a_sweep = pace_.SecondsASweep();

  const Plan& plan = sources_.plan;
  if (plan.prediction) f.predicted = plan.prediction->tokens_a_second;
  WorkLeft work;
  work.under_way = sources_.engine.Left();
  const std::optional<double> unread = f.input_open ? sources_.unread(s.lines_read) : 0;
  const auto ahead = static_cast<double>(s.lines_ahead);
  if (unread) work.unread = *unread + ahead;
  work.lines = s.lines_read - s.lines_ahead;
  work.started = s.started;
  work.ended = s.ended;
  work.prompt_tokens = s.prompt_tokens - s.cached_tokens;
  work.generated_tokens = s.generated_tokens;
  for (const SequenceLeft& left : work.under_way) {
    work.generated_tokens += static_cast<uint64_t>(left.generated);
  }
  work.limits = s.limits;
  work.sequences = plan.sequences;
  work.rows = plan.rows;
  work.prefill_rows = plan.prefill_rows;
  work.frames = plan.frames;
  f.lines_under_way = work.under_way.size();
  f.total_guessed = f.input_open && sources_.guessed;
  if (unread) f.lines_total = static_cast<double>(s.lines_read) + *unread;
  f.sweeps_left = SweepsStillNeeded(work);
  if (f.sweeps_left) f.seconds_left = pace_.SecondsLeft(f.seconds, f.sweeps_left->sweeps);
  return f;
}

void Progress::Print() {
  const ProgressFigures figures = Look();
  switch (format_) {
    case ProgressFormat::kBar:
      return ShowStatus(BarText(figures, TerminalColumns()));
    case ProgressFormat::kJson:
      return Say(JsonText(figures));
    default:
      return Say(PlainText(figures));
  }
}

}  // namespace colibri
