// How the choices of a line get their sequences: one at a time, when the pool has room for the
// line, and none any more once one of them has failed.
#include <algorithm>
#include <utility>

#include "runtime/line_limits.h"
#include "runtime/scheduler.h"

namespace colibri {

// False: the line at hand waits for those under way to end. Without a line under way the pool is
// whole, so that this comes to an end.
bool Scheduler::TakePool() {
  if (next_choice_ > 0 || pending_->error) return true;
  const Request& request = pending_->request;
  if (AdmissionError(request, options_.context)) return true;  // refused at once
  const uint64_t charge = LineCharge(request, options_.context);
  const uint64_t left = options_.line_pool - std::min(pool_taken_, options_.line_pool);
  if (pool_taken_ > 0 && charge > left) return false;
  pending_->charge = charge;
  pool_taken_ += charge;
  return true;
}

// False: no line or no sequence is free, or the line waits for the pool.
bool Scheduler::StartChoice() {
  if (free_.empty() || (pending_ == nullptr && ahead_.empty())) return false;
  if (pending_ == nullptr) ChooseLine();
  if (!TakePool()) return false;
  if (pending_->failed) {
    DropChoices();
    return true;
  }
  Sequence& s = table_[free_.back()];
  free_.pop_back();
  s.line = pending_;
  s.choice = next_choice_++;
  if (next_choice_ >= pending_choices_) pending_.reset();
  Admit(s);
  return true;
}

// A choice of the line at hand has failed: those without a sequence are not run.
void Scheduler::DropChoices() {
  const std::shared_ptr<LineState> line = std::exchange(pending_, nullptr);
  const int32_t rest = pending_choices_ - next_choice_;
  // As long as one of them runs, the last that ends has the record written.
  if (line->open_choices.fetch_sub(rest) > rest) return;
  Sequence& s = table_[free_.back()];
  free_.pop_back();
  s.line = line;
  s.choice = next_choice_;
  Reset(s);
  s.error = line->error;
  s.done = true;
  s.owner = Sequence::kDeliver;
  refused_(s);
}

}  // namespace colibri
