// What the scheduler tells of its work: totals, and what sequences may still need.
#include "runtime/scheduler.h"

namespace colibri {

void Scheduler::CountDrafts(const FrameSequence& place) {
  for (int32_t d = 0; d < place.drafts; ++d) {
    ++stats_.drafted[static_cast<size_t>(d)];
    stats_.accepted[static_cast<size_t>(d)] += d < place.accepted ? 1 : 0;
  }
}

SchedulerStats Scheduler::Stats() const {
  const std::lock_guard lock(mutex_);
  SchedulerStats stats = stats_;
  stats.running = options_.sequences - static_cast<int32_t>(free_.size());
  stats.input_open = open_;
  stats.lines_ahead = ahead_.size();
  return stats;
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
