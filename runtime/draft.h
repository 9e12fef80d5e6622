// Drafts: guesses at the next tokens of a sequence, which its next frame verifies beside the token
// they follow (AcceptTokens of runtime/verify.h). They never change a line, only how many tokens a
// sweep gives it.
//
// The MTP layer drafts from a frame that was just verified, by one pass of these steps:
//
//   DraftPass::Begin   rows whose positions are stored for good, each with the token behind it
//   DraftPass::Choose  how many drafts each sequence is to have
//   DraftPass::Keys    as long as rows are due
//     Stages::MtpKeys  their keys in the MTP layer, from true hidden states, over those of drafts
//   DraftPass::First   the last row of every sequence that is to draft
//     Stages::MtpInput, the MTP layer, Stages::Head with a DraftDrawer
//   DraftPass::Next    the same rows one draft further, as long as one wants more
//   DraftPass::End     the frame has its sequences back, for their release
//
// Threads: whoever holds the frame; Row of DraftDrawer from any thread of a parallel loop.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "runtime/draft_counts.h"
#include "runtime/frame.h"
#include "runtime/parallel.h"
#include "runtime/sampler.h"
#include "runtime/sequence.h"
#include "runtime/stages.h"

namespace colibri {

// Kinds of drafts: of the MTP layer, and of prompt lookup behind a run of 2, 3 or 4 tokens.
inline constexpr int32_t kDraftKinds = 4;
inline constexpr int32_t kMtpDrafts = 0;

// The MTP layer's keys of so many rows of a sequence may wait until it drafts or they are more: its
// input matrix is then read once for all of them. Not measured: any other number.
inline constexpr int32_t kWaitingKeys = 8;

// Of the experts that a draft's row chooses, such a share its sequence's last row does not.
inline constexpr double kDraftNewExperts = 0.65;
// Trained MTP layers have 0.6 to 0.85 of their first drafts accepted.
inline constexpr double kUsualMtpShare = 0.7;

struct DraftOptions {
  int32_t most = 0;     // of a sequence; 0: none are made
  bool lookup = false;  // by prompt lookup too, or alone where there is no MTP layer
  // How many a sequence should have next, asked after each of its frames; none: `most`.
  std::function<int32_t(const Sequence&)> depth;
  // Tests: replaces what the MTP layer drafted by at most `most` others.
  std::function<void(const Sequence&, int32_t most, std::vector<int32_t>* drafts)> propose;
};

// After a pass: lets `options.propose` have its way.
void ProposeDrafts(const Frame& frame, const DraftOptions& options);

class DraftPass {
 public:
  // `page_tokens` of the KvStore; `share_index`: drafts after the first keep its index set (model
  // spec 4.3).
  DraftPass(int32_t page_tokens, bool share_index)
      : page_tokens_(page_tokens), share_index_(share_index) {}

  // After AcceptTokens: the frame's rows become those that are stored for good. False: there are
  // none, and the frame is as it was.
  bool Begin(Frame& frame);
  // `depth`: how many drafts a sequence whose prompt is stored should have; what the line may still
  // generate and the pages it holds (positions up to stored + depth - 2 are written) lessen it.
  // `wait`: keys of sequences that do not draft may wait, as long as their page is not full. Those
  // of sequences that are not `keyed` are never due. False: none drafts.
  bool Choose(Frame& frame, const std::function<int32_t(Sequence&)>& depth, bool wait);
  // After each call that returns true: MtpKeys with Hidden(). False: no keys are due any more.
  bool Keys(Frame& frame);
  std::span<const float* const> Hidden() const { return hidden_; }
  // The rows become the last ones of the sequences that draft.
  void First(Frame& frame);
  // After the head: takes what was drawn as drafts. The rows become the next step's. False: no
  // sequence wants one more.
  bool Next(Frame& frame);
  void End(Frame& frame);

 private:
  bool MayWait(const Sequence& s, int32_t rows) const;
  void AddDue(const Frame& frame, size_t sequence);

  const int32_t page_tokens_;
  const bool share_index_;
  std::vector<FrameSequence> verified_;  // the frame's sequences before Begin
  std::vector<int32_t> depths_;          // of the frame's sequences
  std::vector<FrameRow> stored_;         // the rows of Begin, while others' keys are written
  // Rows whose keys are due and their hidden states, of which some have been taken.
  std::vector<FrameRow> due_;
  std::vector<const float*> due_hidden_;
  size_t taken_ = 0;
  std::span<const float* const> hidden_;
};

// Turns a frame whose MTP rows have just run into one MTP row for each sequence, the next draft
// step: position + 1, the token in `drafts` (one a sequence), the hidden just computed. With
// `share_index` the row keeps its predecessor's index set.
void NextDraftStep(Frame& frame, std::span<const int32_t> drafts, bool share_index);

// Draws the draft of each MTP row as the token that it guesses at will be drawn, with the same
// number: where the MTP layer's distribution is the model's own, so is its draft.
class DraftDrawer final : public LogitsSink {
 public:
  DraftDrawer(const VocabMask& mask, Parallel& parallel)
      : mask_(mask), parallel_(parallel), scratch_(static_cast<size_t>(parallel.Threads())) {}
  void Row(Frame& frame, size_t row, std::span<float> logits) override;

 private:
  const VocabMask& mask_;
  Parallel& parallel_;
  std::vector<SampleScratch> scratch_;
};

// Prompt lookup: what followed the last place where the sequence's last tokens stand already. Of
// the last 4, 3 or 2 tokens the longest run that occurs before counts, of its places the newest.
// `drafts` becomes at most `most` tokens, none without such a place. A continuation that reaches
// the end goes on with the drafts themselves, as a sequence that repeats itself would. Returns
// their kind, 0 without any.
int32_t LookupDrafts(std::span<const int32_t> tokens, int32_t most, std::vector<int32_t>* drafts);

}  // namespace colibri
