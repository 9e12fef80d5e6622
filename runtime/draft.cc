#include "runtime/draft.h"

#include <algorithm>
#include <cstring>

#include "io/check.h"

namespace colibri {
namespace {

size_t S(int32_t v) { return static_cast<size_t>(v); }

// Rows that stay are moved to the front in their order; `to` is never behind `from`.
void MoveFinal(Frame& frame, size_t from, size_t to) {
  const size_t hidden = frame.HiddenSize();
  std::memmove(frame.final + to * hidden, frame.final + from * hidden, hidden * sizeof(float));
}

void MoveIndexSet(Frame& frame, size_t from, size_t to) {
  frame.index_sets[to] = frame.index_sets[from];
  if (!frame.index_sets[to].listed) return;
  std::memmove(frame.IndexList(to), frame.IndexList(from),
               S(frame.index_sets[to].count) * sizeof(int32_t));
}

// Row `from` and its hidden become the next of `rows`, the only one of a sequence placed anew.
FrameSequence PlaceAlone(Frame& frame, const FrameSequence& place, size_t from,
                         std::vector<FrameRow>* rows, size_t number) {
  FrameRow row = frame.rows[from];
  row.sequence = static_cast<int32_t>(number);
  row.draft = row.wants_logits = true;
  MoveFinal(frame, from, rows->size());
  FrameSequence alone;
  alone.sequence = place.sequence;
  alone.pages = place.pages;
  alone.first_place = place.first_place;
  alone.first_row = static_cast<int32_t>(rows->size());
  alone.rows = alone.drafts = 1;
  rows->push_back(row);
  return alone;
}

}  // namespace

bool DraftPass::Begin(Frame& frame) {
  std::vector<FrameRow> rows;
  std::vector<FrameSequence> sequences;
  for (const FrameSequence& place : frame.sequences) {
    // What belongs to the deliverer is not looked at.
    const Sequence& s = *place.sequence;
    if (s.owner != frame.id) continue;
    FrameSequence mtp;
    mtp.sequence = place.sequence;
    mtp.pages = place.pages;
    mtp.first_place = place.first_place;
    mtp.first_row = static_cast<int32_t>(rows.size());
    for (int32_t r = place.first_row; r < place.first_row + place.rows; ++r) {
      FrameRow row = frame.rows[S(r)];
      if (row.position >= s.stored) break;  // rejected
      MoveFinal(frame, S(r), rows.size());
      row.sequence = static_cast<int32_t>(sequences.size());
      row.token = s.tokens[S(row.position + 1)];
      row.draft = row.wants_logits = row.frozen_index = false;
      rows.push_back(row);
      ++mtp.rows;
    }
    if (mtp.rows > 0) sequences.push_back(mtp);
  }
  if (rows.empty()) return false;
  verified_.swap(frame.sequences);
  frame.sequences = std::move(sequences);
  frame.rows = std::move(rows);
  return true;
}

// A page that is full may be shared: nothing is written to it any more.
bool DraftPass::MayWait(const Sequence& s, int32_t rows) const {
  const int32_t keyed = s.stored - rows - s.unkeyed;
  return s.unkeyed + rows <= kWaitingKeys && keyed / page_tokens_ == s.stored / page_tokens_;
}

// The rows of a sequence that waited, then those of the frame.
void DraftPass::AddDue(const Frame& frame, size_t sequence) {
  const FrameSequence& place = frame.sequences[sequence];
  const Sequence& s = *place.sequence;
  const size_t hidden = frame.HiddenSize();
  for (int32_t i = 0; i < s.unkeyed; ++i) {
    FrameRow row;
    row.sequence = static_cast<int32_t>(sequence);
    row.position = s.stored - place.rows - s.unkeyed + i;
    row.token = s.tokens[S(row.position + 1)];
    due_.push_back(row);
    due_hidden_.push_back(s.unkeyed_hidden.data() + S(i) * hidden);
  }
  for (int32_t r = place.first_row; r < place.first_row + place.rows; ++r) {
    due_.push_back(frame.rows[S(r)]);
    due_hidden_.push_back(frame.final + S(r) * hidden);
  }
}

bool DraftPass::Choose(Frame& frame, const std::function<int32_t(Sequence&)>& depth, bool wait) {
  depths_.clear();
  due_.clear();
  due_hidden_.clear();
  taken_ = 0;
  bool any = false;
  for (size_t i = 0; i < frame.sequences.size(); ++i) {
    const FrameSequence& place = frame.sequences[i];
    Sequence& s = *place.sequence;
    if (!s.keyed) {
      depths_.push_back(0);
      s.unkeyed = 0;
      continue;
    }
    int32_t most = 0;
    if (s.Known() - s.stored == 1) {    // else its prompt goes on
      const int32_t wanted = depth(s);  // which may give it pages
      const auto held = static_cast<int32_t>(place.pages->ids.size()) * page_tokens_;
      // A step gives one token besides those of its drafts.
      most = std::min({wanted, kMaxDrafts, s.stop->Left() - 1, held - s.stored + 1});
    }
    depths_.push_back(most);
    any |= most > 0;
    if (most > 0 || !wait || !MayWait(s, place.rows)) {
      AddDue(frame, i);
      continue;
    }
    const size_t hidden = frame.HiddenSize();
    s.unkeyed_hidden.resize(S(kWaitingKeys) * hidden);
    std::memcpy(s.unkeyed_hidden.data() + S(s.unkeyed) * hidden,
                frame.final + S(place.first_row) * hidden, S(place.rows) * hidden * sizeof(float));
    s.unkeyed += place.rows;
  }
  stored_.swap(frame.rows);
  return any;
}

bool DraftPass::Keys(Frame& frame) {
  const size_t rows = std::min(due_.size() - taken_, S(frame.shape.rows));
  const auto first = due_.begin() + static_cast<std::ptrdiff_t>(taken_);
  frame.rows.assign(first, first + static_cast<std::ptrdiff_t>(rows));
  hidden_ = std::span(due_hidden_).subspan(taken_, rows);
  taken_ += rows;
  if (rows > 0) return true;
  for (const FrameRow& row : due_) {
    frame.sequences[S(row.sequence)].sequence->unkeyed = 0;
  }
  frame.rows.swap(stored_);
  return false;
}

void DraftPass::First(Frame& frame) {
  std::vector<FrameRow> rows;
  std::vector<FrameSequence> sequences;
  std::vector<int32_t> depths;
  for (size_t i = 0; i < frame.sequences.size(); ++i) {
    if (depths_[i] < 1) continue;
    const FrameSequence& place = frame.sequences[i];
    place.sequence->drafts.clear();
    sequences.push_back(
        PlaceAlone(frame, place, S(place.first_row + place.rows - 1), &rows, sequences.size()));
    depths.push_back(depths_[i]);
  }
  frame.sequences = std::move(sequences);
  frame.rows = std::move(rows);
  depths_ = std::move(depths);
}

bool DraftPass::Next(Frame& frame) {
  std::vector<FrameRow> rows;
  std::vector<FrameSequence> sequences;
  std::vector<int32_t> depths, drafts;
  for (size_t i = 0; i < frame.sequences.size(); ++i) {
    const FrameSequence& place = frame.sequences[i];
    const size_t from = S(place.first_row);
    const int32_t drawn = frame.rows[from].state == RowState::kLive ? frame.drawn[from] : -1;
    if (drawn < 0) continue;  // a failed row ends its sequence's drafts
    Sequence& s = *place.sequence;
    s.drafts.push_back(drawn);
    if (static_cast<int32_t>(s.drafts.size()) == depths_[i]) continue;
    MoveIndexSet(frame, from, rows.size());
    sequences.push_back(PlaceAlone(frame, place, from, &rows, sequences.size()));
    depths.push_back(depths_[i]);
    drafts.push_back(drawn);
  }
  frame.sequences = std::move(sequences);
  frame.rows = std::move(rows);
  depths_ = std::move(depths);
  if (!frame.rows.empty()) NextDraftStep(frame, drafts, share_index_);
  return !frame.rows.empty();
}

void DraftPass::End(Frame& frame) {
  frame.rows.clear();
  frame.sequences.swap(verified_);
  verified_.clear();
}

void ProposeDrafts(const Frame& frame, const DraftOptions& options) {
  if (!options.propose) return;
  for (const FrameSequence& place : frame.sequences) {
    Sequence& s = *place.sequence;
    if (s.owner != frame.id || s.Known() - s.stored != 1) continue;
    s.drafts.clear();
    options.propose(s, std::max(0, std::min(options.most, s.stop->Left() - 1)), &s.drafts);
  }
}

void NextDraftStep(Frame& frame, std::span<const int32_t> drafts, bool share_index) {
  COLIBRI_CHECK(drafts.size() == frame.sequences.size());
  std::vector<FrameRow> rows;
  for (size_t s = 0; s < frame.sequences.size(); ++s) {
    FrameSequence& place = frame.sequences[s];
    const size_t last = S(place.first_row + place.rows - 1);
    MoveIndexSet(frame, last, rows.size());
    place = PlaceAlone(frame, place, last, &rows, s);
    FrameRow& row = rows.back();
    row.position += 1;
    row.token = drafts[s];
    row.frozen_index = share_index;
  }
  frame.rows = std::move(rows);
}

void DraftDrawer::Row(Frame& frame, size_t row, std::span<float> logits) {
  const Sequence& s = *frame.sequences[static_cast<size_t>(frame.rows[row].sequence)].sequence;
  const Request& request = s.line->request;
  // The row holds the token behind its position; guessed at is the one behind that.
  const int64_t position = int64_t{frame.rows[row].position} + 2 - s.prompt;
  frame.drawn[row] = Sample(logits, request.sampling, request.custom_id, s.choice, position, mask_,
                            &scratch_[static_cast<size_t>(parallel_.ThreadIndex())]);
}

int32_t LookupDrafts(std::span<const int32_t> tokens, int32_t most, std::vector<int32_t>* drafts) {
  constexpr size_t kLongest = 4, kShortest = 2;
  drafts->clear();
  // Behind the longest run found so far, which ends before the sequence's end.
  size_t best = 0, next = 0;
  for (size_t end = tokens.size(); end-- > kShortest && best < kLongest;) {
    size_t run = 0;
    while (run < std::min(kLongest, end) &&
           tokens[end - 1 - run] == tokens[tokens.size() - 1 - run]) {
      ++run;
    }
    if (run < kShortest || run <= best) continue;
    best = run;
    next = end;
  }
  for (int32_t i = 0; best > 0 && i < most; ++i, ++next) {
    drafts->push_back(next < tokens.size() ? tokens[next] : (*drafts)[next - tokens.size()]);
  }
  return best == 0 ? 0 : static_cast<int32_t>(best - kShortest) + 1;
}

}  // namespace colibri
