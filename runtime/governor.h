// How many drafts each sequence should have, decided in time: a draft is worth the tokens it is
// expected to bring, and costs the seconds by which its row lengthens the sweep and making it
// takes, which is nothing where it is looked up.
//
// What a sweep of R rows takes is modelled as the larger of reading the union of the experts its
// rows choose, E (1 - (1 - k/E)^R) a layer, and of computing, a share for each row and one for each
// expert of the union; both are scaled to what sweeps without drafts really took. What sweeps with
// drafts took beyond that is charged to their draft rows, so that shared experts, a warm cache or
// an idle processor show. Acceptance is counted for each kind and position of a draft, over the run
// and, drawn towards that, for each sequence; a sequence's drafts are of the kind that promises
// most.
//
// Drafts are made while all rows together get on faster with them; else a few now and then, to see
// whether they would. Account is kept of what drafts really cost beyond what they brought: once
// that is a sweep and a hundredth of the run's time, none are made until it is less. While they are
// made, a sweep without them now and then tells what one takes.
//
// None of this touches a line's bytes. Pure arithmetic; threads: one at a time.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "runtime/draft.h"

namespace colibri {

struct GovernorOptions {
  int32_t experts = 1, top_k = 1;  // of a sparse layer
  int32_t layers = 1;              // sparse ones, without the MTP layer
  int32_t most = kMaxDrafts;       // drafts a sequence
};

// One sweep, from the frame's filling to its verification.
struct SweepFigures {
  int32_t rows = 0;      // all of them
  int32_t drafts = 0;    // of these
  int32_t accepted = 0;  // of these
  double seconds = 0;
  double read_seconds = 0;     // in which the drive was busy
  double compute_seconds = 0;  // in which some thread computed
  // Making the drafts that it verified: rows of each step, and all steps' time.
  std::array<int32_t, kMaxDrafts> draft_rows = {};
  double draft_seconds = 0;
};

// A sequence that may have drafts.
struct DraftAsker {
  uint32_t sequence = 0;
  bool mtp = true;     // the MTP layer can make some
  int32_t lookup = 0;  // the kind that prompt lookup has for it; 0: none
  // The answer.
  int32_t depth = 0;
  int32_t kind = kMtpDrafts;
};

class Governor {
 public:
  explicit Governor(const GovernorOptions& options);

  // A sequence begins: what is known of its number is forgotten.
  void Started(uint32_t sequence);
  // Its drafts were verified: of `offered` the first `accepted`.
  void Verified(uint32_t sequence, int32_t kind, int32_t offered, int32_t accepted);
  void Swept(const SweepFigures& sweep);

  // Sets the drafts that each of `asking` should have in the next sweep, which has `rows` rows
  // besides and room for `room` drafts.
  void Choose(int32_t rows, std::span<DraftAsker> asking, int32_t room);

  // Whether the MTP layer's drafts may be wanted for a sequence, so that it is to have its keys.
  // Where many sequences compute and drafts would lose, the keys would too (about 5 % of the demo
  // model's multiply-adds, by count): a few sequences keep theirs, for trying.
  bool Keeps(uint32_t sequence) const;

  // Drafts are made because they gain, not only to see whether they would.
  bool On() const { return on_; }
  // Share of drafts at `position` (0: the first) accepted of those whose predecessors were.
  double Acceptance(int32_t kind, int32_t position) const;
  // A line for the user, once: the MTP layer is noise. "" otherwise. From then on it makes none.
  std::string TakeNotice();

 private:
  // Both forget slowly.
  struct Counts {
    double accepted = 0, offered = 0;
    void Add(bool hit, double keep);
    void Fade(double keep) {
      accepted *= keep;
      offered *= keep;
    }
    double Share(double expected, double weight) const {
      return (accepted + weight * expected) / (offered + weight);
    }
  };
  using KindCounts = std::array<Counts, kMaxDrafts>;  // by position
  struct History {
    std::array<KindCounts, kDraftKinds> of = {};
    int32_t depth = 0, kind = 0;  // chosen last
  };
  struct Candidate {
    double gain = 0;   // expected tokens
    double order = 0;  // the best first
    size_t asker = 0;  // index in asking
    int32_t depth = 1;
    int32_t kind = kMtpDrafts;
  };
  struct Choice {
    double speedup = 0;  // over the same rows without drafts
    double loss = 0;     // seconds, if none is accepted
    size_t drafts = 0;   // the first candidates
  };

  History& Of(uint32_t sequence);
  double Hit(const History& own, int32_t kind, int32_t position) const;
  double Value(const History& own, int32_t kind, double token, double row, double step) const;
  double Union(double rows) const;
  double Modelled(double rows, double drafts) const;
  double Without(double rows) const { return scale_ * Modelled(rows, 0); }
  double With(double rows, double drafts) const;
  double StepTime(int32_t rows) const;
  double MayLose(int32_t rows) const;
  double Lost() const;
  void CloseAccount();
  std::vector<Candidate> Gains(int32_t rows, std::span<const DraftAsker> asking);
  std::vector<Candidate> Probes(std::span<const DraftAsker> asking);
  Choice Best(int32_t rows, std::span<const Candidate> candidates, size_t most) const;
  Choice BestSteps(int32_t rows, size_t most, std::vector<Candidate>* candidates) const;
  void JudgeMtp(int32_t rows, size_t asking);
  bool CheckDue(int32_t rows);
  bool Switch(int32_t rows, bool promised_end, bool promised_begin);
  bool Mtp(const DraftAsker& asker) const { return asker.mtp && !noise_; }
  void StartAgain();
  void LearnWithout(const SweepFigures& sweep);
  void LearnWith(const SweepFigures& sweep);

  const GovernorOptions options_;
  std::vector<History> histories_;
  std::array<KindCounts, kDraftKinds> run_ = {};
  // Seconds to read an expert of the union in all layers and for a row's arithmetic; what a sweep
  // takes in terms of the larger of both.
  double read_ = 0, compute_ = 0, scale_ = 1;
  int32_t without_ = 0;   // sweeps that taught it
  int32_t rows_ = 0;      // of the last of them
  int32_t agreed_ = 0;    // the last ones that were as expected
  double outlier_ = 0;    // by how much the last one was off, if by far
  bool settled_ = false;  // enough of them
  bool alone_ = false;    // since the last one there were some with drafts
  // Least squares of the seconds a draft's row takes beyond the model.
  double extra_sum_ = 0, extra_squares_ = 0, extra_ = 0;
  double reach_ = 0;                          // most drafts a row so far
  double step_seen_ = 0, step_modelled_ = 0;  // seconds of draft steps
  double seconds_ = 0;                        // of the run
  // Seconds lost to drafts, and the sweeps with drafts that are not in it yet: what they would have
  // taken without is judged by what sweeps without are then known to take.
  double lost_ = 0;
  struct Account {
    double sweeps = 0, rows = 0, seconds = 0;
    double worth = 0;  // in sweeps without drafts
  } open_;
  bool on_ = false;
  int32_t unpromising_ = 0;  // sweeps in a row that would have gained nothing, though it is on
  int32_t check_in_ = 0, check_every_ = 0;    // sweeps with drafts until one without
  int64_t firsts_ = 0, firsts_accepted_ = 0;  // first drafts of the MTP layer
  bool noise_ = false, told_ = false;
  int32_t losing_ = 0;      // sweeps in a row in which drafts of the MTP layer would have lost
  bool looked_up_ = false;  // lookup has had some
};

}  // namespace colibri
