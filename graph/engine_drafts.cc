// What the engine does for drafts: a frame that was verified goes through the MTP layer, once for
// each draft of those of its sequences that want most.
#include <algorithm>
#include <chrono>
#include <utility>

#include "graph/engine.h"

namespace colibri {

// What is about to be read for drafts alone. Of the MTP layer all is (TakeDrafts).
void Engine::CountForDrafts(ExpertJob job) {
  const LayerRef at{job.frame, job.layer};
  const Frame& frame = At(at).frame;
  const FrameJob& asked = frame.jobs[job.job];
  const auto first = frame.job_rows.begin() + asked.first;
  const bool alone = !IsMtp(at) && std::all_of(first, first + asked.count, [&](int32_t row) {
    return frame.rows[static_cast<size_t>(row)].draft;
  });
  if (!alone || cache_->IsReady(asked.item)) return;
  At(at).alone_bytes.fetch_add(model_.Expert(asked.item).slot_bytes, std::memory_order_relaxed);
}

uint64_t Engine::TakeDraftBytes(GraphFrame& f) {
  const uint64_t bytes = std::exchange(f.draft_bytes, 0) + f.alone_bytes.exchange(0);
  draft_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  return bytes;
}

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
    governor_->Verified(s.index, place.draft_kind, place.drafts, place.accepted);
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
  if (options_.drafts.most == 0) return false;
  const bool mtp = mtp_ && !noise_ && f.pass.Begin(f.frame);
  if (mtp) GiveUpKeys(f);
  LookUp(f, mtp);
  ChooseDepths(f);
  TakeLookups(f);
  if (mtp) {
    const bool any = WriteKeys(f);
    // Where KV is streamed the MTP layer's pages go to the file with the trip through it.
    if (any || kv_stream_ != nullptr) return true;
    f.pass.End(f.frame);
  }
  ProposeDrafts(f.frame, options_.drafts);
  return false;
}

void Engine::GiveUpKeys(GraphFrame& f) {
  if (!governor_) return;
  const std::lock_guard lock(governor_mutex_);
  for (const FrameSequence& place : f.frame.sequences) {
    Sequence& s = *place.sequence;
    s.keyed = s.keyed && governor_->Keeps(s.index);
  }
}

// Who may have drafts, with what prompt lookup finds for them.
void Engine::LookUp(GraphFrame& f, bool mtp) {
  f.asking.clear();
  f.asking_sequences.clear();
  for (const FrameSequence& place : f.frame.sequences) {
    Sequence& s = *place.sequence;
    if (s.owner != f.frame.id || s.Known() - s.stored != 1) continue;
    DraftAsker asker;
    asker.sequence = s.index;
    asker.mtp = mtp && s.keyed;
    const int32_t most = std::min(options_.drafts.most, s.stop->Left() - 1);
    if (options_.drafts.lookup) asker.lookup = LookupDrafts(s.tokens, most, &s.drafts);
    f.asking.push_back(asker);
    f.asking_sequences.push_back(&s);
  }
}

// The next frame is thought to be like this one.
void Engine::ChooseDepths(GraphFrame& f) {
  if (f.asking.empty()) return;
  if (governor_) {
    const std::lock_guard lock(governor_mutex_);
    governor_->Choose(f.base_rows, f.asking, options_.scheduler.rows - f.base_rows);
    return;
  }
  // Of what a full frame leaves, every sequence that asks gets as much as the others.
  const auto asking = static_cast<int32_t>(f.asking.size());
  const int32_t room = std::max(0, options_.scheduler.rows - asking);
  for (int32_t i = 0; i < asking; ++i) {
    DraftAsker& asker = f.asking[static_cast<size_t>(i)];
    const Sequence& s = *f.asking_sequences[static_cast<size_t>(i)];
    const int32_t wanted = options_.drafts.depth ? options_.drafts.depth(s) : options_.drafts.most;
    asker.depth =
        std::min({wanted, options_.drafts.most, room / asking + (i < room % asking ? 1 : 0)});
    if (!asker.mtp) asker.kind = asker.lookup;
  }
}

void Engine::TakeLookups(GraphFrame& f) {
  for (size_t i = 0; i < f.asking.size(); ++i) {
    const DraftAsker& asker = f.asking[i];
    Sequence& s = *f.asking_sequences[i];
    const bool looked_up = asker.kind != kMtpDrafts && asker.depth > 0;
    const auto depth = static_cast<size_t>(looked_up ? asker.depth : 0);
    if (s.drafts.size() > depth) s.drafts.resize(depth);
    s.draft_kind = asker.kind;
  }
}

bool Engine::WriteKeys(GraphFrame& f) {
  const auto depth = [&f, next = size_t{0}](Sequence&) mutable {
    const DraftAsker& asker = f.asking[next++];
    return asker.kind == kMtpDrafts ? asker.depth : 0;
  };
  const bool any = f.pass.Choose(f.frame, depth, kv_stream_ == nullptr);
  while (f.pass.Keys(f.frame)) stages_.MtpKeys(f.frame, f.pass.Hidden());
  return any;
}

void Engine::CountStep(const GraphFrame& f) {
  if (!governor_) return;
  const std::lock_guard lock(governor_mutex_);
  step_rows_[static_cast<size_t>(f.draft_steps - 1)] += static_cast<int32_t>(f.frame.Rows());
}

LayerRef Engine::Draft(FrameRef ref) noexcept {
  const Profile::Span span(profile_, NodeId::kDraft, ref.frame, 0);
  GraphFrame& f = *frames_[ref.frame];
  if (f.draft_steps++ == 0) f.pass.First(f.frame);
  CountStep(f);
  if (f.frame.Rows() > 0) {
    stages_.MtpInput(f.frame);
    GuessAgain(f, f.frame.layer);
  }
  f.frame.layer = model_.Config().layers;
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
