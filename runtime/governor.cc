#include "runtime/governor.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>

#include "io/check.h"

namespace colibri {
namespace {

// Fetching an expert's weights from memory takes as long as the arithmetic of so many rows.
constexpr double kFetchRows = 8;
// The first sweeps read what later ones find in memory. What sweeps take is known once it has been
// within a fifth of what was expected three times, or after so many.
constexpr double kSettled = 0.2;
constexpr int32_t kSettledTimes = 3, kSettledAtLast = 16;
// What a sweep without drafts makes forget: before that, one of several, and one alone between many
// with drafts. One that is off by more than a third is believed when a second one, at once, is too.
constexpr double kForgetFirst = 0.6, kForgetWithout = 0.2, kForgetAlone = 0.3;
constexpr double kOutlier = 1.0 / 3;
constexpr double kForgetWith = 0.05;
// However cheap drafts seem to be, this share of what the model says is charged.
constexpr double kLeastCharge = 0.5;
// Drafts begin when they promise so much, and end when they promise less, so that a figure which
// wavers does not switch them to and fro. The same for those of a sequence, by a factor.
constexpr double kBegin = 1.04, kEnd = 1.015, kStay = 1.03;
// Lookup behind longer runs is surer; a few drafts soon outweigh the guess. A sequence is taken to
// be like the run until it has more than some of its own.
constexpr std::array<double, kDraftKinds> kGuess = {kUsualMtpShare, 0.4, 0.6, 0.8};
constexpr double kGuessWeight = 3, kRunWeight = 3;
constexpr double kKeepRun = 0.99, kKeepOwn = 0.95, kFade = 0.99;
// And with each sweep while drafts are off.
constexpr double kKeepOff = 0.995, kKeepExtra = 0.9;
// What drafts may have lost: so many sweeps, and so much of the time.
constexpr double kLossSweeps = 1, kLossShare = 0.01;
// A model that is wrong shows before much depends on it: drafts a row grow from the first to the
// second times what there was. (2 took a sweep longer; 4 from 0.25 on made lookup cost too much.)
constexpr double kFirstReach = 0.125, kGrowth = 4;
constexpr size_t kProbeShare = 8;  // one of so many sequences tries a draft when none are made
// The MTP layer's keys are given up when drafts would have lost so much so often in a row.
constexpr double kLoses = 0.98;
constexpr int32_t kLosingSweeps = 8;
constexpr int32_t kFirstCheck = 4, kLastCheck = 32;
// Lookup finds something now and then, which does not mean that it is over when it does not.
constexpr int32_t kPatience = 32;
constexpr double kOtherWidth = 1.5;  // what a sweep takes is looked at again from there on
// Drafts of random weights hit one token in thousands: none of the first so many.
constexpr int64_t kNoiseDrafts = 64;

void Learn(double* value, double seen, double share) { *value += share * (seen - *value); }

}  // namespace

void Governor::Counts::Add(bool hit, double keep) {
  accepted = accepted * keep + (hit ? 1 : 0);
  offered = offered * keep + 1;
}

Governor::Governor(const GovernorOptions& options) : options_(options) {
  COLIBRI_CHECK(options.most >= 0 && options.most <= kMaxDrafts && options.layers > 0);
}

Governor::History& Governor::Of(uint32_t sequence) {
  if (sequence >= histories_.size()) histories_.resize(sequence + 1);
  return histories_[sequence];
}

void Governor::Started(uint32_t sequence) { Of(sequence) = {}; }

void Governor::Verified(uint32_t sequence, int32_t kind, int32_t offered, int32_t accepted) {
  if (offered == 0) return;
  KindCounts& own = Of(sequence).of[static_cast<size_t>(kind)];
  // Those behind the first that missed could not hit.
  for (int32_t i = 0; i <= std::min(accepted, offered - 1); ++i) {
    run_[static_cast<size_t>(kind)][static_cast<size_t>(i)].Add(i < accepted, kKeepRun);
    own[static_cast<size_t>(i)].Add(i < accepted, kKeepOwn);
  }
  if (kind != kMtpDrafts) return;
  ++firsts_;
  firsts_accepted_ += accepted > 0 ? 1 : 0;
  noise_ = noise_ || (firsts_ == kNoiseDrafts && firsts_accepted_ == 0);
}

std::string Governor::TakeNotice() {
  if (!noise_ || told_) return "";
  told_ = true;
  return fmt::format(
      "no more drafts by the MTP layer: none of the first {} was accepted, as if it were noise; "
      "are "
      "its weights damaged?",
      kNoiseDrafts);
}

double Governor::Acceptance(int32_t kind, int32_t position) const {
  const auto k = static_cast<size_t>(kind);
  return run_[k][static_cast<size_t>(position)].Share(kGuess[k], kGuessWeight);
}

double Governor::Hit(const History& own, int32_t kind, int32_t position) const {
  const Counts& counts = own.of[static_cast<size_t>(kind)][static_cast<size_t>(position)];
  return counts.Share(Acceptance(kind, position), kRunWeight);
}

// Seconds that a sequence's drafts are worth at their best depth (at least one), where a token is
// worth `token`, a row costs `row` and a draft's step `step`.
double Governor::Value(const History& own, int32_t kind, double token, double row,
                       double step) const {
  double chance = 1, value = 0, best = -std::numeric_limits<double>::infinity();
  for (int32_t i = 0; i < options_.most; ++i) {
    chance *= Hit(own, kind, i);
    value += chance * token - row - step;
    best = std::max(best, value);
  }
  return best;
}

double Governor::Union(double rows) const {
  const double experts = options_.experts;
  return experts * (1 - std::pow(1 - options_.top_k / experts, rows));
}

double Governor::Modelled(double rows, double drafts) const {
  const double experts = Union(rows + kDraftNewExperts * drafts);
  const double work = rows + drafts + kFetchRows * experts / options_.top_k;
  return std::max(read_ * experts, compute_ * work);
}

double Governor::With(double rows, double drafts) const {
  const double without = Without(rows), more = scale_ * Modelled(rows, drafts) - without;
  return without + std::max(kLeastCharge * more, more + extra_ * drafts);
}

// One more sparse layer with so many rows, until it is known what a step takes.
double Governor::StepTime(int32_t rows) const {
  const double layer = Without(rows) / options_.layers;
  return layer * (step_seen_ + layer) / (step_modelled_ + layer);
}

double Governor::MayLose(int32_t rows) const {
  return kLossSweeps * Without(rows) + kLossShare * seconds_;
}

// The machine is not what it was.
void Governor::StartAgain() {
  settled_ = on_ = false;
  without_ = 1;
  agreed_ = 0;
  extra_ = extra_sum_ = extra_squares_ = 0;
}

void Governor::LearnWithout(const SweepFigures& s) {
  const double off = without_ == 0 ? 1 : s.seconds / Without(s.rows) - 1;
  agreed_ = std::abs(off) < kSettled ? agreed_ + 1 : 0;
  ++without_;
  double share = without_ == 1 ? 1 : kForgetFirst;
  if (settled_) {
    const bool far = std::abs(off) > kOutlier, again = far && off * outlier_ > 0;
    share = again ? 1 : (alone_ ? kForgetAlone : kForgetWithout) * (far ? kOutlier : 1);
    outlier_ = far && !again ? off : 0;
    if (again) StartAgain();
  } else {
    settled_ = agreed_ >= kSettledTimes || without_ >= kSettledAtLast;
  }
  alone_ = false;
  rows_ = s.rows;
  if (!on_) {
    // What was learned from drafts grows old, so that they are tried again.
    extra_ *= kKeepExtra;
    extra_sum_ *= kKeepExtra;
    extra_squares_ *= kKeepExtra;
    for (KindCounts& kind : run_) {
      for (Counts& counts : kind) counts.Fade(kKeepOff);
    }
  }
  const bool known = s.read_seconds + s.compute_seconds > 0;
  const double experts = Union(s.rows), work = s.rows + kFetchRows * experts / options_.top_k;
  Learn(&read_, s.read_seconds / experts, share);
  Learn(&compute_, (known ? s.compute_seconds : s.seconds) / work, share);
  Learn(&scale_, s.seconds / Modelled(s.rows, 0), share);
}

void Governor::LearnWith(const SweepFigures& s) {
  const double base = s.rows - s.drafts, drafts = s.drafts;
  reach_ = std::max(reach_, drafts / base);
  alone_ = true;
  // One sweep's time wavers by a tenth, and a draft's row is thought not to be off by more than a
  // third of an average row: a few drafts among many rows say little.
  const double spread = 0.1 * base * base;
  extra_sum_ =
      extra_sum_ * (1 - kForgetWith) + (s.seconds - scale_ * Modelled(base, drafts)) * drafts;
  extra_squares_ = extra_squares_ * (1 - kForgetWith) + drafts * drafts;
  extra_ = extra_sum_ / (extra_squares_ + spread);
  double modelled = 0;
  for (const int32_t rows : s.draft_rows) {
    modelled += rows > 0 ? Without(rows) / options_.layers : 0;
  }
  if (modelled > 0) {
    step_seen_ = step_seen_ * (1 - kForgetWith) + s.draft_seconds;
    step_modelled_ = step_modelled_ * (1 - kForgetWith) + modelled;
  }
  open_.sweeps += 1;
  open_.rows += base;
  open_.seconds += s.seconds + s.draft_seconds;
  open_.worth += (base + s.accepted) / base;
}

double Governor::Lost() const {
  if (open_.sweeps == 0) return lost_;
  const double due = open_.worth * Without(open_.rows / open_.sweeps);
  return std::max(0.0, lost_ + open_.seconds - due);
}

void Governor::CloseAccount() {
  lost_ = Lost();
  open_ = {};
}

void Governor::Swept(const SweepFigures& sweep) {
  if (sweep.rows <= sweep.drafts || sweep.seconds <= 0) return;
  seconds_ += sweep.seconds + sweep.draft_seconds;
  if (sweep.drafts == 0) {
    LearnWithout(sweep);
  } else if (settled_) {
    LearnWith(sweep);
  }
}

std::vector<Governor::Candidate> Governor::Gains(int32_t rows, std::span<const DraftAsker> asking) {
  std::vector<Candidate> all;
  // What things cost if every sequence has a draft.
  const auto each = static_cast<double>(asking.size());
  const double token = Without(rows) / rows, row = (With(rows, each) - Without(rows)) / each;
  const double step = StepTime(static_cast<int32_t>(asking.size())) / each;
  for (size_t i = 0; i < asking.size(); ++i) {
    const DraftAsker& asker = asking[i];
    if (!Mtp(asker) && asker.lookup == 0) continue;
    const History& own = Of(asker.sequence);
    Candidate c;
    c.kind = Mtp(asker) ? kMtpDrafts : asker.lookup;
    if (Mtp(asker) && asker.lookup != 0 &&
        Value(own, asker.lookup, token, row, 0) >= Value(own, kMtpDrafts, token, row, step)) {
      c.kind = asker.lookup;
    }
    c.gain = 1;
    c.asker = i;
    for (c.depth = 1; c.depth <= options_.most; ++c.depth) {
      c.gain *= Hit(own, c.kind, c.depth - 1);
      c.order = c.gain * (c.depth <= own.depth && c.kind == own.kind ? kStay : 1);
      if (c.kind == kMtpDrafts) c.order -= step / token;
      all.push_back(c);
    }
  }
  std::sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) {
    // A sequence's own in their order.
    return a.order != b.order ? a.order > b.order
                              : std::pair(a.depth, a.asker) < std::pair(b.depth, b.asker);
  });
  return all;
}

// Sequences of which least is known, with what can be hoped for.
std::vector<Governor::Candidate> Governor::Probes(std::span<const DraftAsker> asking) {
  std::vector<Candidate> all;
  if (options_.most == 0) return all;
  for (size_t i = 0; i < asking.size(); ++i) {
    Candidate best;
    for (const int32_t kind : {kMtpDrafts, asking[i].lookup}) {
      if (kind == kMtpDrafts && !Mtp(asking[i])) continue;
      const auto k = static_cast<size_t>(kind);
      const double share = Acceptance(kind, 0);
      const double doubt = std::sqrt((share * (1 - share) + 0.02) / (run_[k][0].offered + 1));
      const double hope = std::min(1.0, share + doubt);
      const double known = Of(asking[i].sequence).of[k][0].offered;
      if (hope > best.gain) best = {hope, -known, i, 1, kind};
    }
    if (best.gain > 0) all.push_back(best);
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Candidate& a, const Candidate& b) { return a.order > b.order; });
  if (!all.empty()) all.resize(std::max<size_t>(1, all.size() / kProbeShare));
  return all;
}

Governor::Choice Governor::Best(int32_t rows, std::span<const Candidate> candidates,
                                size_t most) const {
  Choice best;
  const double without = Without(rows);
  std::array<int32_t, kMaxDrafts> step_rows = {};
  double tokens = rows, making = 0;
  for (size_t n = 1; n <= std::min(candidates.size(), most); ++n) {
    const Candidate& c = candidates[n - 1];
    if (c.kind == kMtpDrafts) {
      int32_t& step = step_rows[static_cast<size_t>(c.depth - 1)];
      if (step > 0) making -= StepTime(step);
      making += StepTime(++step);
    }
    tokens += c.gain;
    const double seconds = With(rows, static_cast<double>(n)) + making;
    const double speedup = tokens / seconds * without / rows;
    if (speedup > best.speedup) best = {speedup, seconds - without, n};
  }
  return best;
}

// The best of them, where the MTP layer makes as many steps as pay: even for few rows one more
// reads much of its experts. `candidates` becomes those of so many steps.
Governor::Choice Governor::BestSteps(int32_t rows, size_t most,
                                     std::vector<Candidate>* candidates) const {
  const std::vector<Candidate> all = std::move(*candidates);
  candidates->clear();
  Choice best;
  for (int32_t steps = 1; steps <= options_.most; ++steps) {
    std::vector<Candidate> some;
    std::copy_if(all.begin(), all.end(), std::back_inserter(some),
                 [&](const Candidate& c) { return c.kind != kMtpDrafts || c.depth <= steps; });
    const Choice choice = Best(rows, some, most);
    if (choice.speedup <= best.speedup) continue;
    best = choice;
    *candidates = std::move(some);
  }
  return best;
}

// What one draft for every sequence would be.
void Governor::JudgeMtp(int32_t rows, size_t asking) {
  const auto all = static_cast<int32_t>(asking);
  const double tokens = rows + all * Acceptance(kMtpDrafts, 0);
  const double seconds = With(rows, all) + StepTime(all);
  const bool loses = tokens * Without(rows) < kLoses * rows * seconds;
  losing_ = loses && asking >= kProbeShare ? losing_ + 1 : 0;
}

bool Governor::Keeps(uint32_t sequence) const {
  return !noise_ && (losing_ < kLosingSweeps || sequence % kProbeShare == 0);
}

// While drafts are made: whether this sweep goes without.
bool Governor::CheckDue(int32_t rows) {
  const bool other = rows > kOtherWidth * rows_ || kOtherWidth * rows < rows_;
  if (outlier_ != 0) return true;
  if (--check_in_ > (other ? check_every_ - kFirstCheck : 0)) return false;
  check_every_ = std::min(2 * check_every_, kLastCheck);
  check_in_ = check_every_;
  if (open_.sweeps > 2 * kLastCheck) CloseAccount();
  return true;
}

// Whether drafts are made at large, by what the best ones promise.
bool Governor::Switch(int32_t rows, bool promised_end, bool promised_begin) {
  const double left = MayLose(rows) - Lost();
  unpromising_ = promised_end ? 0 : unpromising_ + 1;
  const int32_t patience = looked_up_ ? kPatience : 0;
  if (on_ && (unpromising_ > patience || left < 0)) on_ = false;
  if (!on_ && promised_begin && left > MayLose(rows) / 2) {
    CloseAccount();
    outlier_ = 0;
    on_ = true;
    check_in_ = check_every_ = kFirstCheck;
  }
  return on_;
}

void Governor::Choose(int32_t rows, std::span<DraftAsker> asking, int32_t room) {
  for (DraftAsker& asker : asking) {
    asker.depth = 0;
    looked_up_ = looked_up_ || asker.lookup != 0;
  }
  if (!settled_ || asking.empty() || rows <= 0 || room <= 0) return;
  const double reach = std::max(kFirstReach, kGrowth * reach_) * rows;
  const size_t most = std::min(static_cast<size_t>(room), static_cast<size_t>(std::ceil(reach)));
  JudgeMtp(rows, asking.size());
  std::vector<Candidate> candidates = Gains(rows, asking);
  Choice best = BestSteps(rows, most, &candidates);
  // A few drafts cannot promise what those of all sequences would.
  const auto promised = [&](double whole) {
    const auto part = static_cast<double>(best.drafts) / static_cast<double>(asking.size());
    return best.speedup > 1 + (whole - 1) * std::min(1.0, part);
  };
  if (Switch(rows, promised(kEnd), promised(kBegin))) {
    if (!promised(kEnd)) best.drafts = 0;
    if (best.drafts == 0) {
      check_in_ = check_every_;  // this one tells
    } else if (CheckDue(rows)) {
      return;
    }
  } else {
    candidates = Probes(asking);
    best = Best(rows, candidates, most);
    if (!promised(kBegin) || best.loss > MayLose(rows) - Lost()) best.drafts = 0;
  }
  for (size_t n = 0; n < best.drafts; ++n) {
    DraftAsker& asker = asking[candidates[n].asker];
    asker.depth = std::max(asker.depth, candidates[n].depth);
    asker.kind = candidates[n].kind;
  }
  for (const DraftAsker& asker : asking) {
    History& own = Of(asker.sequence);
    own.depth = asker.depth;
    own.kind = asker.kind;
    if (asker.depth > 0) continue;
    // A sequence that has no drafts becomes one like others again.
    for (KindCounts& kind : own.of) kind[0].Fade(kFade);
  }
}

}  // namespace colibri
