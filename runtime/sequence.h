// A choice being generated: its tokens, its stored positions, when it ends. One of a fixed table of
// objects, reused line after line.
// Ownership passes from hand to hand: the scheduler (runnable), one frame, the deliverer (done),
// the output thread, the scheduler again. Whoever holds it may write; `owner` lets debug builds
// check.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "runtime/kv_store.h"
#include "runtime/request.h"
#include "runtime/stop.h"

namespace colibri {

using Clock = std::chrono::steady_clock;

// What the choices of one line share. `finished`, `error`, `admitted`, `cached` and the drafts
// belong to the deliverer alone, until no choice is open any more.
struct LineState {
  Request request;
  std::vector<Choice> finished;
  std::optional<LineError> error;  // of the first choice that failed
  // A choice has failed, and the line with it: the others that run end with their sweep, those that
  // do not yet run never do.
  std::atomic<bool> failed{false};
  std::atomic<int32_t> open_choices{0};  // whoever ends the last has the record written
  uint64_t charge = 0;  // taken from the scheduler's pool until the last sequence is closed
  Clock::time_point admitted = Clock::time_point::max();  // of the finished choices, the earliest
  int32_t cached = INT32_MAX;                             // likewise the least
  DraftCounts drafts;                                     // and their sums
  uint64_t draft_bytes = 0;
};

struct Sequence {
  static constexpr int32_t kNobody = -1, kDeliver = -2;

  uint32_t index = 0;  // in the scheduler's table
  std::shared_ptr<LineState> line;
  int32_t choice = 0;
  // Prompt, then accepted tokens; reserved to its longest at admission and never reallocated, so
  // that the deliverer may read the tokens it was told of while new ones are appended.
  std::vector<int32_t> tokens;
  LogprobList logprobs;  // of accepted tokens, reserved likewise
  // Guesses at the tokens behind them, for its next frame to verify.
  std::vector<int32_t> drafts;
  int32_t draft_kind = 0;  // of these (runtime/draft.h)
  // The MTP layer is given the keys of its positions; false: no more, so it makes no drafts.
  bool keyed = true;
  // The last stored positions whose keys wait, and their hidden states (DraftPass).
  int32_t unkeyed = 0;
  std::vector<float> unkeyed_hidden;
  int32_t prompt = 0;  // of tokens, those of the prompt
  int32_t stored = 0;  // positions whose latents are stored
  KvPages pages;
  int32_t placed = 0;  // the scheduler's: where the rows of its last frame begin
  int32_t waits = 0;   // and how often it let another store what it needs too
  std::optional<StopMatcher> stop;
  uint64_t age = 0;  // order of admission
  StopCause cause = StopCause::kNone;
  std::optional<LineError> error;
  bool done = false;
  std::atomic<int32_t> owner{kNobody};  // a frame's id, kNobody or kDeliver

  // Figures for the record.
  Clock::time_point admitted, first_token;
  uint64_t bytes_read = 0;
  double hit_sum = 0;
  int32_t sweeps = 0;
  DraftCounts draft_counts;
  uint64_t draft_bytes = 0;
  int32_t cached = -1;  // prompt positions it found stored at its first start; -1 before that

  int32_t Known() const { return static_cast<int32_t>(tokens.size()); }
  int32_t Generated() const { return Known() - prompt; }
};

}  // namespace colibri
