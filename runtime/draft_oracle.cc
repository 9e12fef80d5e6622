#include "runtime/draft_oracle.h"

#include <algorithm>

#include "io/check.h"

namespace colibri {

DraftOracle::DraftOracle(const Model& model, KvStore& kv, const VocabMask& mask,
                         const DraftOracleOptions& options, StageHook* hook)
    : model_(model),
      kv_(kv),
      options_(options),
      engine_(model, kv, hook),
      drawer_(mask, serial_),
      draft_drawer_(mask, serial_),
      pass_(kv.Shape().page_tokens, model.Config().index_share_for_mtp),
      frame_(model, {options.rows, options.context, 1}) {}

void DraftOracle::Place(Sequence& s, int32_t rows, int32_t drafts) {
  COLIBRI_CHECK(kv_.Grow(&s.pages, int64_t{s.stored} + rows + drafts));
  s.owner = frame_.id;
  FrameSequence place;
  place.sequence = &s;
  place.pages = &s.pages;
  place.first_row = static_cast<int32_t>(frame_.rows.size());
  place.rows = rows + drafts;
  place.drafts = drafts;
  for (int32_t i = 0; i < rows + drafts; ++i) {
    FrameRow row;
    row.sequence = static_cast<int32_t>(frame_.sequences.size());
    row.position = s.stored + i;
    row.draft = i >= rows;
    row.token = row.draft ? s.drafts[static_cast<size_t>(i - rows)]
                          : s.tokens[static_cast<size_t>(row.position)];
    row.wants_logits = row.position + 1 >= s.Known();
    frame_.rows.push_back(row);
  }
  frame_.sequences.push_back(place);
}

void DraftOracle::Fill(const std::vector<Sequence*>& chosen) {
  frame_.rows.clear();
  frame_.sequences.clear();
  for (Sequence* s : chosen) {
    const auto room = options_.rows - static_cast<int32_t>(frame_.rows.size());
    const int32_t rows = std::min(s->Known() - s->stored, room);
    if (rows == 0) return;
    const bool all = s->stored + rows == s->Known();
    Place(*s, rows, all ? std::min(static_cast<int32_t>(s->drafts.size()), room - rows) : 0);
  }
}

void DraftOracle::DraftByMtp() {
  const auto depth = [&](Sequence& s) {
    const int32_t wanted = std::min(options_.depth(s), kMaxDrafts);
    // Its last draft's keys lie so far behind those that are stored.
    COLIBRI_CHECK(kv_.Grow(&s.pages, int64_t{s.stored} + std::max(0, wanted - 1)));
    return wanted;
  };
  if (!pass_.Begin(frame_)) return;
  const bool any = pass_.Choose(frame_, depth, options_.wait);
  while (pass_.Keys(frame_)) engine_.RunMtpKeys(frame_, pass_.Hidden());
  if (any) {
    pass_.First(frame_);
    do {
      engine_.RunMtp(frame_, draft_drawer_);
    } while (pass_.Next(frame_));
  }
  pass_.End(frame_);
}

void DraftOracle::Draft() {
  if (model_.HasMtp()) DraftByMtp();
  if (!options_.propose) return;
  for (const FrameSequence& place : frame_.sequences) {
    Sequence& s = *place.sequence;
    if (s.done || s.Known() - s.stored != 1) continue;
    const int32_t most = std::min({options_.depth(s), kMaxDrafts, s.stop->Left() - 1});
    s.drafts.clear();
    if (most > 0) options_.propose(s, most, &s.drafts);
  }
}

void DraftOracle::Run(std::span<Sequence* const> sequences) {
  const auto path_of = [&](uint32_t file) { return model_.Files().Files().Path(file); };
  for (;;) {
    std::vector<Sequence*> chosen;
    for (Sequence* s : sequences) {
      if (!s->done) chosen.push_back(s);
    }
    if (chosen.empty()) return;
    if (options_.order) options_.order(&chosen);
    Fill(chosen);
    engine_.Run(frame_, drawer_);
    AcceptTokens(frame_, {}, path_of, [](const Notice&) {});
    Draft();
    for (const FrameSequence& place : frame_.sequences) {
      if (!place.sequence->done) place.sequence->owner = Sequence::kNobody;
    }
    if (options_.verified) options_.verified(frame_);
  }
}

}  // namespace colibri
