// How long a run still takes, from the sweeps so far: how long one takes now, times how many are
// still needed. Honest rather than early: unknown until a sweep has ended and while the number of
// prompts is unknown. Threads: pure functions; an object one thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/scheduler.h"

namespace colibri {

// How far an input of known size has been taken in.
struct InputTaken {
  uint64_t size = 0, bytes = 0, lines = 0;  // of all lines, whoever runs them
  uint64_t records_left = 0;                // lines further on that have their record
  uint64_t shards = 1;
};
// Lines still to be run, as if the rest were like what was read; nullopt: nothing was read yet.
std::optional<double> GuessUnread(const InputTaken& input);

// What a run still has to do, as far as it is known.
struct WorkLeft {
  std::vector<SequenceLeft> under_way;
  std::optional<double> unread;  // lines still to be taken in that will be run; nullopt: unknown
  // Of the lines taken in so far: how many, the sequences they became, those that ended, and sums
  // over all of them of prompt tokens to compute, generated tokens and the most they may generate.
  uint64_t lines = 0, started = 0, ended = 0;
  uint64_t prompt_tokens = 0, generated_tokens = 0, limits = 0;
  int32_t sequences = 1, rows = 1, prefill_rows = 1, frames = 1;  // of the plan
};

struct SweepsLeft {
  double sweeps = 0;
  bool at_most = false;  // no answer has ended yet: only max_tokens bounds them
};
// An answer is expected to be as long as all tokens so far, those of answers under way too, divided
// by the answers that ended: the short ones end first, and would else make the rest look short.
// One that is longer already is expected to go on for half of that. nullopt: unknown.
std::optional<SweepsLeft> SweepsStillNeeded(const WorkLeft& work);

// Figures of the last sweeps, the last five counting most, or those of the last five seconds where
// sweeps are short: warm-up is soon forgotten.
class SweepPace {
 public:
  // Totals at a moment; nothing changes until a further sweep has ended.
  void Add(double seconds, uint64_t sweeps, uint64_t tokens, uint64_t bytes);

  // nullopt until the first sweep has ended.
  std::optional<double> SecondsASweep() const;
  std::optional<double> TokensASecond() const { return Ratio(tokens_, seconds_); }
  std::optional<double> BytesASecond() const { return Ratio(bytes_, seconds_); }
  // Until `sweeps` more have ended, seen at `now`, within the first of them.
  std::optional<double> SecondsLeft(double now, double sweeps) const;

 private:
  static std::optional<double> Ratio(double a, double b) {
    return b > 0 ? std::optional(a / b) : std::nullopt;
  }
  // Totals when the last sweep was seen to end.
  double last_seconds_ = 0;
  uint64_t last_sweeps_ = 0, last_tokens_ = 0, last_bytes_ = 0;
  // Decaying sums.
  double seconds_ = 0, sweeps_ = 0, tokens_ = 0, bytes_ = 0;
};

// "45 s", "12 min", "2 h 05 min", "3 d 4 h".
std::string DurationText(double seconds);

}  // namespace colibri
