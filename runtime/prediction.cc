#include "runtime/prediction.h"

#include <algorithm>
#include <cmath>

namespace colibri {
namespace {

// Of the shorter of reading and computing this part does not hide behind the longer one: at the
// start of a layer nothing is read for it yet, at its end nothing is left to compute.
constexpr double kExposed = 0.05;
// A slot is taken for so long besides its share of the reading: an expert is asked for, comes,
// waits for its turn and is computed. Few slots of small experts leave the drive without work.
// Fitted to runs of models with experts of 80 kB; those of 20 MB take a hundred times as long to
// read.
constexpr double kSlotTaken = 0.65e-3;
// Real routers: the hottest quarter of a layer's experts takes 50 to 58 % of the choices, and some
// are hardly chosen at all, so that unions are smaller than if all were as likely: of 256 rows 91
// to 96 % with 128 experts a layer. The 32 of the demo model are chosen about evenly.
struct Popularity {
  double experts, choices;  // shares
};
constexpr Popularity kPopularity[] = {{0.25, 0.54}, {0.45, 0.38}, {0.30, 0.08}};
// Hits of held experts: held^p, where p is small for one row, which asks for the hot ones, and
// nearly one where unions are whole layers or all experts are as likely. Fitted to 57 runs of
// four models with 1 to 64 sequences; one row finds what it found in replays of route traces.
constexpr double kHitsSpread = 0.15, kHitsSkewed = 0.55;
// Longer runs are foreseen by their beginning.
constexpr int kMostSweeps = 20'000;
// A run without end: what so many rounds of answers take beyond half of them, so that neither its
// start nor its end counts.
constexpr double kRounds = 8;

double Between(const std::vector<Speeds::Sweep>& sweeps, double rows,
               double Speeds::Sweep::*figure) {
  if (sweeps.empty() || rows <= 0) return 0;
  if (sweeps.size() == 1) return sweeps[0].*figure * std::max(1.0, rows / sweeps[0].rows);
  size_t i = 1;
  while (i + 1 < sweeps.size() && sweeps[i].rows < rows) ++i;
  const Speeds::Sweep &a = sweeps[i - 1], &b = sweeps[i];
  // Noise must not make wider sweeps cheaper.
  const double slope = std::max(0.0, (b.*figure - a.*figure) / (b.rows - a.rows));
  return std::max(0.0, a.*figure + slope * (std::max(rows, sweeps[0].rows) - a.rows));
}

// Answers that started in the same sweep.
struct Cohort {
  double count = 0;
  double prefill = 0;  // rows still to be computed, of all of them
  double left = 0;     // tokens still to be drawn, of each
  double drawn = 0;    // of each
};

struct Simulated {
  double seconds = 0, bytes = 0, tokens = 0;
  int sweeps = 0;
};

// A run as it goes on.
class Simulation {
 public:
  Simulation(const Speeds& speeds, const SweepModel& model, const RunModel& run, double answers)
      : speeds_(speeds), model_(model), run_(run), waiting_(answers), most_(answers) {}

  void Go() {
    while ((waiting_ > 0 || !cohorts_.empty()) && done_.sweeps < kMostSweeps) Step();
  }
  const Simulated& Result() const { return done_; }

 private:
  void Step() {
    SweepRows sweep;
    double positions = 0, active = 0, held = 0;
    for (Cohort& c : cohorts_) {
      active += c.count;
      if (c.prefill > 0) continue;
      held += c.count * (run_.prompt + c.drawn);
      sweep.rows += c.count;
      positions += c.count * (run_.prompt + c.drawn);
      Draw(&c, &sweep);
    }
    double room = std::min(run_.prefill_rows, std::max(0.0, run_.rows - sweep.rows));
    Start(active, room);
    for (Cohort& c : cohorts_) {
      if (c.prefill <= 0 || room <= 0) continue;
      const double rows = std::min(c.prefill, room);
      room -= rows;
      c.prefill -= rows;
      sweep.rows += rows;
      positions += rows * run_.prompt / 2;
      held += c.count * run_.prompt / 2;
      if (c.prefill <= 0) Draw(&c, &sweep);
    }
    std::erase_if(cohorts_, [](const Cohort& c) { return c.prefill <= 0 && c.left <= 0; });
    sweep.context = sweep.rows > 0 ? positions / sweep.rows : 0;
    Account(sweep, held);
  }

  static void Draw(Cohort* c, SweepRows* sweep) {
    const double part = std::min(1.0, c->left);
    sweep->drawn += part * c->count;
    c->left -= 1;
    c->drawn += 1;
  }

  // As many as have a place and rows; one whose prompt takes several sweeps has them at any rate.
  void Start(double active, double room) {
    for (const Cohort& c : cohorts_) room -= std::max(0.0, c.prefill);
    if (room <= 0 || waiting_ <= 0) return;
    const double places = std::max(0.0, run_.together - active);
    double count = std::min({waiting_, places, std::max(1.0, room / std::max(1.0, run_.prompt))});
    if (count <= 0) return;
    waiting_ -= count;
    // One of them is the longest.
    if (waiting_ <= 0 && run_.longest > run_.answer && most_ > 1 && count > 1) {
      cohorts_.push_back({1, run_.prompt, run_.longest, 0});
      count -= 1;
    }
    cohorts_.push_back({count, count * run_.prompt, run_.answer, 0});
  }

  // Reading gets as far ahead of computing as it is faster.
  double Ahead(const SweepRows& sweep, double bytes) const {
    if (speeds_.drive <= 0 || bytes <= 0) return 1;
    return std::min(1.0, ComputeSeconds(speeds_, model_, sweep) * speeds_.drive / bytes);
  }

  // `held`: positions of the answers that take part.
  void Account(const SweepRows& sweep, double held) {
    const double share = model_.Union(sweep.rows);
    const double others = model_.streamed_bytes + model_.position_bytes * (held + sweep.rows);
    const double hits = model_.Hits(sweep.rows, std::min(held_, model_.resident),
                                    Ahead(sweep, share * model_.expert_bytes + others));
    const double experts = share * (1 - hits) * model_.expert_bytes;
    held_ += (1 - held_) * share;
    done_.seconds += SweepSeconds(speeds_, model_, sweep, experts, others);
    done_.bytes += experts + others;
    done_.tokens += sweep.drawn;
    ++done_.sweeps;
  }

  const Speeds& speeds_;
  const SweepModel& model_;
  const RunModel& run_;
  std::vector<Cohort> cohorts_;
  double waiting_, most_;
  double held_ = 0;  // share of the experts that have been read at least once
  Simulated done_;
};

}  // namespace

double Speeds::LayersSeconds(double rows) const { return Between(sweeps, rows, &Sweep::layers_s); }
double Speeds::DrawSeconds(double tokens) const { return Between(sweeps, tokens, &Sweep::draw_s); }

double SweepModel::Union(double rows) const {
  double share = 1;
  for (const Popularity& p : kPopularity) {
    const double choices = p.experts + skew * (p.choices - p.experts);
    share -= p.experts * std::pow(1 - std::min(1.0, chosen * choices / p.experts), rows);
  }
  return share;
}

double SweepModel::Hits(double rows, double held, double ahead) const {
  if (held <= 0 || held >= 1) return std::clamp(held, 0.0, 1.0);
  const double early = layers > 0 ? std::min(1.0, ahead * Union(rows) / layers) : 0;
  if (held <= early) return 0;
  const double spread = (kHitsSpread + kHitsSkewed * skew) / (1 + rows * chosen);
  return std::pow((held - early) / (1 - early), 1 - spread);
}

double ComputeSeconds(const Speeds& speeds, const SweepModel& model, const SweepRows& sweep) {
  double context = sweep.context;
  if (model.most_positions > 0) context = std::min<double>(context, model.most_positions);
  return speeds.LayersSeconds(sweep.rows) + speeds.DrawSeconds(sweep.drawn) +
         sweep.rows * context * speeds.position_s;
}

double SweepSeconds(const Speeds& speeds, const SweepModel& model, const SweepRows& sweep,
                    double expert_bytes, double other_bytes) {
  const double computing = ComputeSeconds(speeds, model, sweep);
  double reading = speeds.drive > 0 ? (expert_bytes + other_bytes) / speeds.drive : 0;
  if (model.slots > 0 && model.read_bytes > 0) {
    reading += expert_bytes / model.read_bytes * kSlotTaken / model.slots;
  }
  return std::max(computing, reading) + kExposed * std::min(computing, reading);
}

Prediction Predict(const Speeds& speeds, const SweepModel& model, const RunModel& run) {
  const auto go = [&](double answers) {
    Simulation simulation(speeds, model, run, answers);
    simulation.Go();
    return simulation.Result();
  };
  Prediction p;
  Simulated s;
  if (run.answers) {
    s = go(static_cast<double>(*run.answers));
    if (s.sweeps < kMostSweeps) {
      p.seconds = s.seconds;
      p.sweeps = s.sweeps;
    }
  } else {
    const double rounds = kRounds * std::max(1.0, run.together);
    const Simulated half = go(rounds / 2);
    s = go(rounds);
    s = {s.seconds - half.seconds, s.bytes - half.bytes, s.tokens - half.tokens, 0};
  }
  if (s.tokens <= 0 || s.seconds <= 0) return {};
  p.tokens_a_second = s.tokens / s.seconds;
  p.bytes_a_token = s.bytes / s.tokens;
  return p;
}

}  // namespace colibri
