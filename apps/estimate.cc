#include "apps/estimate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace colibri {
namespace {

constexpr double kSweepsKept = 5, kSecondsKept = 5;

double Mean(uint64_t sum, uint64_t count) {
  return static_cast<double>(sum) / static_cast<double>(count);
}

}  // namespace

std::optional<double> GuessUnread(const InputTaken& input) {
  if (input.bytes >= input.size) return 0.0;
  if (input.bytes == 0) return std::nullopt;
  const double further =
      static_cast<double>(input.size - input.bytes) * Mean(input.lines, input.bytes);
  return std::max(
      0.0, further / static_cast<double>(input.shards) - static_cast<double>(input.records_left));
}

std::optional<SweepsLeft> SweepsStillNeeded(const WorkLeft& work) {
  if (!work.unread || (*work.unread > 0 && work.started == 0)) return std::nullopt;
  const bool at_most = work.ended == 0;
  const double length = at_most ? 0 : Mean(work.generated_tokens, work.ended);
  const double prefill_rows = work.prefill_rows;
  // Sequences of a sweep: the frames share them out.
  const double width =
      std::min<double>(work.rows, std::max(1.0, static_cast<double>(work.sequences) / work.frames));

  double decoding = 0, starting = 0, steps = 0, prefill = 0;
  for (const SequenceLeft& s : work.under_way) {
    double left = s.limit - s.generated;
    if (!at_most) left = std::min(left, std::max(length - s.generated, length / 2));
    steps += left;
    prefill += s.prefill;
    double& longest = s.prefill > 0 ? starting : decoding;
    longest = std::max(longest, left);
  }
  // The sweep that ends a prefill draws the first token.
  double longest = decoding;
  if (prefill > 0) {
    longest = std::max(longest, std::ceil(prefill / prefill_rows) + std::max(0.0, starting - 1));
  }
  longest *= work.frames;

  double tail = 0;
  if (*work.unread > 0) {
    const double sequences = *work.unread * Mean(work.started, std::max<uint64_t>(1, work.lines));
    const double most = Mean(work.limits, work.started);
    const double prompt = Mean(work.prompt_tokens, work.started);
    const double each =
        std::ceil(prompt / prefill_rows) - 1 + (at_most ? most : std::min(length, most));
    steps += sequences * each;
    prefill += sequences * prompt;
    // The last answers do not end together: they leave on average half of the width unused while
    // one answer runs, at worst all but one.
    tail = each * (1 - 1 / width) * (at_most ? 1 : 0.5);
  }
  const double sweeps = std::max(
      {longest, steps / width + tail, prefill / prefill_rows, (steps + prefill) / work.rows});
  return SweepsLeft{std::ceil(sweeps), at_most && sweeps > 0};
}

void SweepPace::Add(double seconds, uint64_t sweeps, uint64_t tokens, uint64_t bytes) {
  const double took = seconds - last_seconds_;
  if (sweeps <= last_sweeps_ || took <= 0) return;
  const auto count = static_cast<double>(sweeps - last_sweeps_);
  const double keep = std::exp(-std::min(count / kSweepsKept, took / kSecondsKept));
  seconds_ = seconds_ * keep + took;
  sweeps_ = sweeps_ * keep + count;
  tokens_ = tokens_ * keep + static_cast<double>(tokens - last_tokens_);
  bytes_ = bytes_ * keep + static_cast<double>(bytes - last_bytes_);
  last_seconds_ = seconds;
  last_sweeps_ = sweeps;
  last_tokens_ = tokens;
  last_bytes_ = bytes;
}

std::optional<double> SweepPace::SecondsASweep() const { return Ratio(seconds_, sweeps_); }

std::optional<double> SweepPace::SecondsLeft(double now, double sweeps) const {
  const auto pace = SecondsASweep();
  if (!pace) return std::nullopt;
  if (sweeps <= 0) return 0.0;
  // A sweep that takes longer than expected may end any moment.
  return *pace * (sweeps - 1) + std::max(0.0, *pace - (now - last_seconds_));
}

std::string DurationText(double seconds) {
  const double rounded = std::round(seconds);
  if (rounded < 120) return fmt::format("{:.0f} s", rounded);
  const auto minutes = static_cast<int64_t>(std::min(std::round(seconds / 60), 1e12));
  if (minutes < 120) return fmt::format("{} min", minutes);
  if (minutes < 48 * 60) return fmt::format("{} h {:02} min", minutes / 60, minutes % 60);
  const int64_t hours = (minutes + 30) / 60;
  return fmt::format("{} d {} h", hours / 24, hours % 24);
}

}  // namespace colibri
