// What the engine does for drafts: a frame that was verified goes through the MTP layer, once for
// each draft of those of its sequences that want most.
#include <algorithm>

#include "graph/engine.h"

namespace colibri {

void Engine::CountRows(const Frame& frame, std::vector<uint32_t>* votes) {
  std::fill(votes->begin(), votes->end(), 0);
  for (const FrameJob& job : frame.jobs) {
    (*votes)[static_cast<size_t>(job.expert)] = static_cast<uint32_t>(job.count);
  }
}

bool Engine::BeginDrafts(GraphFrame& f) {
  f.draft_steps = 0;
  if (drafts_ && f.pass.Begin(f.frame)) return true;
  if (options_.drafts.most > 0) ProposeDrafts(f.frame, options_.drafts);
  return false;
}

// Of what a full frame leaves, every sequence that asks gets as much as the others.
void Engine::ChooseDepths(GraphFrame& f) {
  f.depths.clear();
  for (const FrameSequence& place : f.frame.sequences) {
    const Sequence& s = *place.sequence;
    if (s.Known() - s.stored != 1) continue;
    f.depths.push_back(options_.drafts.depth ? options_.drafts.depth(s) : options_.drafts.most);
  }
  if (f.depths.empty()) return;
  const auto asking = static_cast<int32_t>(f.depths.size());
  const int32_t room = std::max(0, options_.scheduler.rows - asking);
  for (int32_t i = 0; i < asking; ++i) {
    int32_t& depth = f.depths[static_cast<size_t>(i)];
    depth = std::min({depth, options_.drafts.most, room / asking + (i < room % asking ? 1 : 0)});
  }
}

LayerRef Engine::Draft(FrameRef ref) noexcept {
  const Profile::Span span(profile_, NodeId::kDraft, ref.frame, 0);
  GraphFrame& f = *frames_[ref.frame];
  if (f.draft_steps++ == 0) {
    stages_.MtpKeys(f.frame);
    ChooseDepths(f);
    f.pass.First(f.frame, [&f, next = size_t{0}](Sequence&) mutable { return f.depths[next++]; });
  }
  if (f.frame.Rows() > 0) stages_.MtpInput(f.frame);
  return {ref.frame, static_cast<uint16_t>(f.frame.layer)};
}

bool Engine::TakeDrafts(GraphFrame& f) {
  if (f.pass.Next(f.frame)) return true;
  f.pass.End(f.frame);
  f.draft_bytes = BytesRead(cache_->Stats()) - f.bytes_before;
  ProposeDrafts(f.frame, options_.drafts);
  return false;
}

}  // namespace colibri
