#include "runtime/verify.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>

#include "io/check.h"

namespace colibri {
namespace {

std::string ErrorText(int number) {
  if (number == ENODATA) return "the file ends before";
  if (number == EBADMSG) return "checksum";
  if (number == EILSEQ) return "scales that are not finite";
  return std::strerror(number);
}

std::string What(const FrameSequence& place) {
  switch (place.failed) {
    case FailedRead::kExpert:
      return "an expert";
    case FailedRead::kDense:
      return "the dense weights";
    case FailedRead::kEmbedding:
      return "the embedding of a token";
    case FailedRead::kHead:
      return "the head";
    case FailedRead::kKvPage:
    case FailedRead::kKvWrite:
      break;
  }
  return fmt::format("KV page {}", place.failed_page);
}

LineError ErrorOf(const FrameRow& row, const FrameSequence& place,
                  const std::function<std::string(uint32_t)>& path_of) {
  if (row.state == RowState::kReadFailed) {
    const bool of_layer =
        place.failed != FailedRead::kEmbedding && place.failed != FailedRead::kHead;
    return {
        500, "read_error",
        fmt::format("{}{} could not be {}: {}, offset {}: {}", What(place),
                    of_layer ? fmt::format(" of layer {}", row.failed_layer) : "",
                    place.failed == FailedRead::kKvWrite ? "written" : "read",
                    path_of(place.error.file), place.error.offset, ErrorText(place.error.error)),
        ""};
  }
  return {500, "not_finite",
          fmt::format("the activations of position {} are not finite in layer {}", row.position,
                      row.failed_layer),
          ""};
}

}  // namespace

void TokenDrawer::Row(Frame& frame, size_t row, std::span<float> logits) {
  const Sequence& s = *frame.sequences[static_cast<size_t>(frame.rows[row].sequence)].sequence;
  const Request& request = s.line->request;
  // The position within the completion of the token this row gives.
  const int64_t position = int64_t{frame.rows[row].position} + 1 - s.prompt;
  SampleScratch& scratch = scratch_[static_cast<size_t>(parallel_.ThreadIndex())];
  const int32_t id =
      Sample(logits, request.sampling, request.custom_id, s.choice, position, mask_, &scratch);
  frame.drawn[row] = id;
  if (id >= 0 && request.logprobs) {
    frame.drawn_logprobs[row] = LogprobOf(logits, id, request.top_logprobs, mask_);
  }
}

namespace {

LineError LogitsError(const FrameRow& row) {
  return {500, "not_finite", fmt::format("the logits of position {} are not finite", row.position),
          ""};
}

// The tokens that a frame gives a sequence, one at a time: the one drawn from row `base`, then,
// while a draft is the token just drawn, the one drawn from the draft's row.
void AppendDrawn(Frame& frame, FrameSequence& place, size_t base) {
  Sequence& s = *place.sequence;
  for (size_t r = base;; ++r) {
    if (s.Generated() == 0) s.first_token = Clock::now();
    s.tokens.push_back(frame.drawn[r]);
    if (s.line->request.logprobs) s.logprobs.Add(frame.drawn_logprobs[r]);
    s.cause = s.stop->Push(frame.drawn[r]);
    if (s.cause != StopCause::kNone || r - base == static_cast<size_t>(place.drafts)) return;
    const FrameRow& draft = frame.rows[r + 1];
    // A draft without a token of its own is rejected: what was wrong with it shows again when its
    // position is computed without drafts, or was nothing that concerns the line.
    if (draft.token != frame.drawn[r] || draft.state != RowState::kLive) return;
    if (frame.drawn[r + 1] < 0) return;
    ++place.accepted;
    s.stored = draft.position + 1;
  }
}

}  // namespace

void AcceptTokens(Frame& frame, const FrameFigures& figures,
                  const std::function<std::string(uint32_t)>& path_of,
                  const std::function<void(const Notice&)>& notify) {
  uint64_t drafts = 0;
  for (const FrameSequence& place : frame.sequences) drafts += static_cast<uint64_t>(place.drafts);
  for (FrameSequence& place : frame.sequences) {
    Sequence& s = *place.sequence;
    COLIBRI_DCHECK(s.owner == frame.id);
    const auto base = static_cast<size_t>(place.first_row + place.rows - 1 - place.drafts);
    const FrameRow& row = frame.rows[base];
    s.bytes_read += figures.bytes_read * static_cast<uint64_t>(place.rows) / frame.Rows();
    s.hit_sum += figures.hit_rate;
    ++s.sweeps;
    if (row.state != RowState::kLive) {
      s.error = ErrorOf(row, place, path_of);
    } else {
      s.stored = row.position + 1;
      if (!row.wants_logits && !s.line->failed) continue;  // prefill goes on
      if (row.wants_logits && frame.drawn[base] < 0) s.error = LogitsError(row);
    }
    if (s.error) s.line->failed = true;
    s.drafts.clear();
    if (!s.line->failed) AppendDrawn(frame, place, base);
    if (place.drafts > 0) {
      s.draft_counts.Add(place.drafts, place.accepted);
      s.draft_bytes += figures.draft_bytes * static_cast<uint64_t>(place.drafts) / drafts;
    }
    s.done = s.line->failed || s.cause != StopCause::kNone;
    const Notice notice{s.index, static_cast<uint32_t>(s.Generated()), s.done ? 1u : 0u};
    // From here a finished sequence belongs to the deliverer: touch nothing of it.
    if (s.done) s.owner = Sequence::kDeliver;
    notify(notice);
  }
}

}  // namespace colibri
