// What the scheduler tells of its work: totals, and what sequences may still need.
#include <fmt/format.h>

#include "io/lock_soon.h"
#include "runtime/scheduler.h"

namespace colibri {

std::string DraftsText(const DraftCounts& counts) {
  std::string shares;
  for (size_t i = 0; i < kMaxDrafts && counts.offered[i] > 0; ++i) {
    shares += fmt::format(
        "{}{:.0f}", i > 0 ? ", " : "",
        100 * static_cast<double>(counts.accepted[i]) / static_cast<double>(counts.offered[i]));
  }
  if (shares.empty()) return "";
  return fmt::format("{} of {} accepted ({:.2f} a row; {} % of those at each position)",
                     counts.Accepted(), counts.Offered(), counts.MeanLength(), shares);
}

void Scheduler::CountDrafts(const FrameSequence& place) {
  const bool mtp = place.draft_kind == kMtpDrafts;
  (mtp ? stats_.mtp_drafts : stats_.looked_up).Add(place.drafts, place.accepted);
}

SchedulerStats Scheduler::Stats() const {
  const std::lock_guard lock(mutex_);
  SchedulerStats stats = stats_;
  stats.running = options_.sequences - static_cast<int32_t>(free_.size());
  stats.input_open = open_;
  stats.lines_ahead = ahead_.size();
  return stats;
}

std::string Scheduler::StateText() const {
  const auto lock = LockSoon(mutex_);
  if (!lock.owns_lock()) return "scheduler: busy\n";
  int32_t in_frames = 0, delivered = 0, waiting = 0;
  for (const Sequence& s : table_) {
    if (s.line == nullptr) continue;
    const int32_t owner = s.owner;
    ++(owner >= 0 ? in_frames : owner == Sequence::kDeliver ? delivered : waiting);
  }
  std::string parked;
  for (const int32_t frame : parked_) parked += fmt::format(" {}", frame);
  return fmt::format(
      "frames parked:{} of {}{}\n"
      "sequences: {} in frames, {} waiting, {} at deliver or output, {} free; {} lines ahead{}\n"
      "input: {}, {} lines read\nKV pages: {} of {} free\n",
      parked.empty() ? " none" : parked, options_.frames, stopped_ ? "; told to stop" : "",
      in_frames, waiting, delivered, free_.size(), ahead_.size(),
      pending_ != nullptr ? ", one with choices to start" : "", open_ ? "open" : "at its end",
      stats_.lines_read, kv_.FreePages(), kv_.Pages());
}

std::vector<SequenceLeft> Scheduler::Left() const {
  const std::lock_guard lock(mutex_);
  std::vector<SequenceLeft> left;
  for (const SequenceLeft& one : left_) {
    if (one.limit > 0) left.push_back(one);
  }
  return left;
}

}  // namespace colibri
