// Where a frame's drafts go: behind the rows of their sequences, where rows and pages are left.
#include <algorithm>

#include "runtime/scheduler.h"

namespace colibri {

// Pages for the first `tokens` positions, if some are free that the rows of other frames, which may
// be filled before these are back, are not in need of.
bool Scheduler::GrowFree(Sequence& s, int64_t tokens) {
  const int32_t more = kv_.PagesFor(tokens) - static_cast<int32_t>(s.pages.ids.size());
  if (more <= 0) return true;
  const int32_t kept = kv_.Streams() ? (options_.frames - 1) * kv_.Layout().MostCompleted() : 0;
  if (kv_.Streams() && kv_.FreeHotSlots() - more < kept) return false;
  return kv_.Grow(&s.pages, tokens);
}

// The first draft of every sequence before the second of any.
int32_t Scheduler::ChooseDrafts(Frame& frame) {
  auto room = options_.rows - static_cast<int32_t>(frame.rows.size());
  int32_t chosen = 0;
  for (int32_t depth = 1; depth <= options_.drafts; ++depth) {
    for (FrameSequence& place : frame.sequences) {
      Sequence& s = *place.sequence;
      if (chosen == room) return chosen;
      if (place.drafts + 1 != depth || static_cast<int32_t>(s.drafts.size()) < depth) continue;
      // One that was preempted stores what it knows first.
      if (s.stored + place.rows < s.Known()) continue;
      if (!GrowFree(s, int64_t{s.stored} + place.rows + depth)) continue;
      place.drafts = depth;
      ++chosen;
    }
  }
  return chosen;
}

void Scheduler::PlaceDrafts(Frame& frame) {
  if (options_.drafts == 0) return;
  const auto chosen = static_cast<size_t>(ChooseDrafts(frame));
  // Rows move back, the last ones first.
  size_t to = frame.rows.size() + chosen;
  frame.rows.resize(to);
  for (size_t i = frame.sequences.size(); i-- > 0;) {
    FrameSequence& place = frame.sequences[i];
    const Sequence& s = *place.sequence;
    const auto first = static_cast<size_t>(place.first_row);
    const auto last = first + static_cast<size_t>(place.rows) - 1;
    for (int32_t d = place.drafts; d-- > 0;) {
      FrameRow draft = frame.rows[last];
      draft.position += d + 1;
      draft.token = s.drafts[static_cast<size_t>(d)];
      draft.draft = draft.wants_logits = true;
      frame.rows[--to] = draft;
    }
    for (size_t r = last + 1; r-- > first;) frame.rows[--to] = frame.rows[r];
    place.first_row = static_cast<int32_t>(to);
    place.rows += place.drafts;
    place.draft_kind = s.draft_kind;
  }
  // The MTP layer's drafts of the frame to come have keys behind those that may be stored by then.
  for (const FrameSequence& place : frame.sequences) {
    Sequence& s = *place.sequence;
    const int64_t end = int64_t{s.stored} + place.rows;
    if (end < s.Known()) continue;
    GrowFree(s, std::min<int64_t>(options_.context, end + options_.drafts - 1));
  }
}

}  // namespace colibri
