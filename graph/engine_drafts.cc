// What the engine does for drafts: a frame that was verified goes through the MTP layer, once for
// each draft of those of its sequences that want most.
#include <algorithm>
#include <chrono>
#include <utility>

#include "graph/engine.h"

namespace colibri {

void Engine::CountRows(const Frame& frame, std::vector<uint32_t>* votes) {
  std::fill(votes->begin(), votes->end(), 0);
  for (const FrameJob& job : frame.jobs) {
    (*votes)[static_cast<size_t>(job.expert)] = static_cast<uint32_t>(job.count);
  }
}

// What the frame was like, which its sequences still show: nobody is told of them yet.
void Engine::TellGovernor(GraphFrame& f) {
  if (!governor_) return;
  const OverlapFigures now = profile_.Overlap(), &then = f.start.overlap;
  SweepFigures sweep;
  sweep.rows = static_cast<int32_t>(f.frame.Rows());
  f.verified = Clock::now();
  sweep.seconds = std::chrono::duration<double>(f.verified - f.start.time).count();
  sweep.read_seconds = now.both_s + now.io_only_s - then.both_s - then.io_only_s;
  sweep.compute_seconds = now.both_s + now.compute_only_s - then.both_s - then.compute_only_s;
  const std::lock_guard lock(governor_mutex_);
  for (const FrameSequence& place : f.frame.sequences) {
    const Sequence& s = *place.sequence;
    if (s.sweeps == 1) governor_->Started(s.index);
    governor_->Verified(s.index, place.drafts, place.accepted);
    sweep.drafts += place.drafts;
    sweep.accepted += place.accepted;
  }
  f.base_rows = sweep.rows - sweep.drafts;
  sweep.draft_rows = std::exchange(step_rows_, {});
  sweep.draft_seconds = std::exchange(step_seconds_, 0);
  governor_->Swept(sweep);
  const std::string notice = governor_->TakeNotice();
  if (notice.empty()) return;
  noise_ = true;
  if (options_.say) options_.say(notice);
}

bool Engine::BeginDrafts(GraphFrame& f) {
  f.draft_steps = 0;
  if (drafts_ && !noise_ && f.pass.Begin(f.frame)) return true;
  if (options_.drafts.most > 0) ProposeDrafts(f.frame, options_.drafts);
  return false;
}

// The next frame is thought to be like this one.
void Engine::ChooseDepths(GraphFrame& f) {
  f.depths.clear();
  f.asking.clear();
  for (const FrameSequence& place : f.frame.sequences) {
    const Sequence& s = *place.sequence;
    if (s.Known() - s.stored != 1) continue;
    f.asking.push_back(s.index);
    f.depths.push_back(options_.drafts.depth ? options_.drafts.depth(s) : options_.drafts.most);
  }
  if (f.asking.empty()) return;
  if (governor_) {
    const std::lock_guard lock(governor_mutex_);
    governor_->Choose(f.base_rows, f.asking, options_.scheduler.rows - f.base_rows, f.depths);
    return;
  }
  // Of what a full frame leaves, every sequence that asks gets as much as the others.
  const auto asking = static_cast<int32_t>(f.asking.size());
  const int32_t room = std::max(0, options_.scheduler.rows - asking);
  for (int32_t i = 0; i < asking; ++i) {
    int32_t& depth = f.depths[static_cast<size_t>(i)];
    depth = std::min({depth, options_.drafts.most, room / asking + (i < room % asking ? 1 : 0)});
  }
}

void Engine::CountStep(const GraphFrame& f) {
  if (!governor_) return;
  const std::lock_guard lock(governor_mutex_);
  step_rows_[static_cast<size_t>(f.draft_steps - 1)] += static_cast<int32_t>(f.frame.Rows());
}

LayerRef Engine::Draft(FrameRef ref) noexcept {
  const Profile::Span span(profile_, NodeId::kDraft, ref.frame, 0);
  GraphFrame& f = *frames_[ref.frame];
  if (f.draft_steps++ == 0) {
    stages_.MtpKeys(f.frame);
    ChooseDepths(f);
    f.pass.First(f.frame, [&f, next = size_t{0}](Sequence&) mutable { return f.depths[next++]; });
  }
  CountStep(f);
  if (f.frame.Rows() > 0) {
    stages_.MtpInput(f.frame);
    GuessAgain(f, f.frame.layer);
  }
  return {ref.frame, static_cast<uint16_t>(f.frame.layer)};
}

bool Engine::TakeDrafts(GraphFrame& f) {
  if (f.pass.Next(f.frame)) return true;
  f.pass.End(f.frame);
  f.draft_bytes = BytesRead(cache_->Stats()) - f.bytes_before;
  ProposeDrafts(f.frame, options_.drafts);
  if (!governor_) return false;
  const std::lock_guard lock(governor_mutex_);
  step_seconds_ += std::chrono::duration<double>(Clock::now() - f.verified).count();
  return false;
}

}  // namespace colibri
