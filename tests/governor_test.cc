// The governor of drafts against simulated machines: what it must never cost, and what it finds.
#include "runtime/governor.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace colibri {
namespace {

constexpr int32_t kExperts = 256, kTopK = 8, kLayers = 75;

double UnionOf(double rows) {
  return kExperts * (1 - std::pow(1 - static_cast<double>(kTopK) / kExperts, rows));
}

// A machine and its prompts, which know more than the governor does.
struct Machine {
  double read = 0;           // seconds to read an expert of the union in all layers
  double row = 0;            // and for a row's arithmetic
  double fetch = 0;          // and to fetch an expert of the union from memory
  double fixed = 0;          // and for what every sweep takes
  double draft_reads = 0.6;  // of an independent row: neighbours share experts
  double step = 1.3;         // a draft step, in layers
  double noise = 0.05;
  int32_t room = 4;      // drafts for each sequence that a frame takes
  int32_t cold = 3;      // first sweeps that take double
  int32_t warming = 0;   // sweeps in which the time of one falls from twice what it is then
  bool measured = true;  // the drive and the processor apart
  // The chance that a sequence's next draft hits, by sweep.
  std::function<double(uint32_t sequence, int32_t position, int32_t sweep)> hits = {};
  // How often prompt lookup finds something, behind a run of four tokens, and how often that hits.
  double found = 0, found_hits = 0;

  double Reading(double base, double drafts) const {
    return read * UnionOf(base + draft_reads * drafts);
  }
  double Computing(double base, double drafts) const {
    return row * (base + drafts) + fetch * UnionOf(base + draft_reads * drafts) + fixed;
  }
};

struct RunResult {
  double seconds = 0, without = 0;  // with the governor; the same tokens without drafts
  double depth = 0;                 // mean over the run's second half
  int32_t on = 0, sweeps = 0;
  std::string notice;
  double Speedup() const { return without / seconds; }
};

class Simulation {
 public:
  Simulation(const Machine& machine, uint32_t seed)
      : machine_(machine), random_(seed), governor_({kExperts, kTopK, kLayers, kMaxDrafts}) {}

  // `sequences` by sweep; `drafts`: of each.
  RunResult Run(int32_t sweeps, const std::function<int32_t(int32_t)>& sequences,
                std::vector<int32_t>* drafts = nullptr) {
    RunResult result;
    std::vector<DraftAsker> drafting;
    SweepFigures making;
    double drafted = 0, rows = 0;
    for (int32_t sweep = 0; sweep < sweeps; ++sweep) {
      const int32_t base = sequences(sweep);
      drafting.resize(static_cast<size_t>(base));
      const SweepFigures figures = Sweep(base, drafting, making, sweep);
      const double usual = Time(base, 0, sweep);
      result.seconds += figures.seconds + figures.draft_seconds;
      result.without += usual * (base + figures.accepted) / base;
      result.on += governor_.On() ? 1 : 0;
      if (sweep >= sweeps / 2) {
        drafted += figures.drafts;
        rows += base;
      }
      governor_.Swept(figures);
      if (drafts != nullptr) drafts->push_back(figures.drafts);
      if (const std::string notice = governor_.TakeNotice(); !notice.empty()) {
        CHECK(result.notice.empty());
        result.notice = notice;
      }
      const int32_t next = sequences(std::min(sweep + 1, sweeps - 1));
      drafting.assign(static_cast<size_t>(next), {});
      for (size_t i = 0; i < drafting.size(); ++i) {
        drafting[i].sequence = static_cast<uint32_t>(i);
        drafting[i].mtp = governor_.Keeps(drafting[i].sequence);
        drafting[i].lookup = Chance(machine_.found) ? 3 : 0;
      }
      governor_.Choose(next, drafting, machine_.room * next);
      making = Make(drafting, sweep);
    }
    result.sweeps = sweeps;
    result.depth = drafted / rows;
    return result;
  }
  int32_t Drafted(size_t sequence) { return drafted_[sequence]; }
  // Sweeps in which the MTP layer made step `step`, the first is 0.
  int32_t Steps(size_t step) const { return steps_[step]; }
  int32_t LookedUp() const { return looked_up_; }
  const Governor& TheGovernor() const { return governor_; }

 private:
  double Time(double base, double drafts, int32_t sweep) const {
    const double time =
        std::max(machine_.Reading(base, drafts), machine_.Computing(base, drafts)) * 1.05;
    if (sweep < machine_.warming) return time * (2 - static_cast<double>(sweep) / machine_.warming);
    return sweep < machine_.cold ? 2 * time : time;
  }
  double Noise() {
    return std::clamp(1 + machine_.noise * std::normal_distribution<>()(random_), 0.5, 2.0);
  }

  bool Chance(double chance) {
    return chance > 0 && std::uniform_real_distribution<>()(random_) < chance;
  }

  SweepFigures Make(const std::vector<DraftAsker>& drafting, int32_t sweep) {
    SweepFigures figures;
    for (int32_t step = 0; step < kMaxDrafts; ++step) {
      const auto rows = static_cast<int32_t>(std::count_if(
          drafting.begin(), drafting.end(),
          [&](const DraftAsker& asker) { return asker.kind == kMtpDrafts && asker.depth > step; }));
      figures.draft_rows[static_cast<size_t>(step)] = rows;
      if (rows > 0) {
        ++steps_[static_cast<size_t>(step)];
        figures.draft_seconds += machine_.step * Time(rows, 0, sweep) / kLayers * Noise();
      }
    }
    return figures;
  }

  SweepFigures Sweep(int32_t base, const std::vector<DraftAsker>& drafting, SweepFigures figures,
                     int32_t sweep) {
    for (uint32_t i = 0; i < drafting.size(); ++i) {
      const DraftAsker& asker = drafting[i];
      const bool looked_up = asker.kind != kMtpDrafts;
      const auto hits = [&](int32_t position) {
        return looked_up ? machine_.found_hits : machine_.hits(i, position, sweep);
      };
      int32_t accepted = 0;
      while (accepted < asker.depth && Chance(hits(accepted))) ++accepted;
      figures.drafts += asker.depth;
      drafted_[i] += asker.depth;
      looked_up_ += looked_up ? asker.depth : 0;
      figures.accepted += accepted;
      governor_.Verified(i, asker.kind, asker.depth, accepted);
    }
    figures.rows = base + figures.drafts;
    const double noise = Noise();
    figures.seconds = Time(base, figures.drafts, sweep) * noise;
    if (!machine_.measured) return figures;
    figures.read_seconds = machine_.Reading(base, figures.drafts) * noise;
    figures.compute_seconds = machine_.Computing(base, figures.drafts) * noise;
    return figures;
  }

  const Machine machine_;
  std::mt19937 random_;
  Governor governor_;
  std::map<size_t, int32_t> drafted_;
  std::array<int32_t, kMaxDrafts> steps_ = {};
  int32_t looked_up_ = 0;
};

// 3 GB/s, two cores.
Machine DiskBound() { return {.read = 0.5, .row = 0.1, .fetch = 0.02, .fixed = 0.1}; }
// Everything in memory.
Machine ComputeBound() { return {.read = 0, .row = 0.05, .fetch = 0.05, .fixed = 0.2}; }

std::function<double(uint32_t, int32_t, int32_t)> Hits(double chance) {
  return [chance](uint32_t, int32_t, int32_t) { return chance; };
}

RunResult Simulate(Machine machine, double chance, int32_t sequences, int32_t sweeps,
                   uint32_t seed) {
  machine.hits = Hits(chance);
  return Simulation(machine, seed).Run(sweeps, [=](int32_t) { return sequences; });
}

// What the best fixed depth would gain.
double Ideal(const Machine& m, double chance, int32_t sequences) {
  double best = 1, tokens = 1, likely = 1;
  const auto time = [&](double base, double drafts) {
    return std::max(m.Reading(base, drafts), m.Computing(base, drafts));
  };
  for (int32_t depth = 1; depth <= kMaxDrafts; ++depth) {
    tokens += likely *= chance;
    const double steps = depth * m.step / kLayers;
    best = std::max(best, tokens * time(sequences, 0) /
                              (time(sequences, depth * sequences) + steps * time(sequences, 0)));
  }
  return best;
}

const int32_t kWidths[] = {1, 4, 32, 256};
const double kChances[] = {0, 0.1, 0.3, 0.5, 0.7, 0.9};
constexpr double kNeverSlower = 0.97;

void CheckNeverSlower(const Machine& machine, const std::string& name) {
  for (const int32_t sequences : kWidths) {
    for (const double chance : kChances) {
      for (uint32_t seed = 0; seed < 4; ++seed) {
        const RunResult r = Simulate(machine, chance, sequences, 300, seed);
        CHECK_MESSAGE(r.Speedup() > kNeverSlower, name, ", ", sequences, " sequences, chance ",
                      chance, ", seed ", seed);
      }
    }
  }
}

TEST_CASE("drafts never cost 3 percent, whatever bounds the sweep and however few are accepted") {
  CheckNeverSlower(DiskBound(), "disk");
  CheckNeverSlower(ComputeBound(), "compute");
}

TEST_CASE("drafts never cost 3 percent where they are dearer than the model thinks") {
  Machine apart = DiskBound();  // every draft chooses experts of its own, and more
  apart.draft_reads = 1.5;
  CheckNeverSlower(apart, "apart");
  Machine slow = ComputeBound();  // making drafts takes as long as a tenth of the layers
  slow.step = 8;
  CheckNeverSlower(slow, "slow steps");
  Machine unsteady = DiskBound();
  unsteady.noise = 0.1;
  unsteady.cold = 12;
  CheckNeverSlower(unsteady, "unsteady");
}

TEST_CASE("where drafts gain, most of the gain is found") {
  int32_t cases = 0;
  for (const Machine& machine : {DiskBound(), ComputeBound()}) {
    for (const int32_t sequences : kWidths) {
      for (const double chance : kChances) {
        const double ideal = Ideal(machine, chance, sequences);
        if (ideal < 1.2) continue;
        ++cases;
        for (uint32_t seed = 0; seed < 4; ++seed) {
          const RunResult r = Simulate(machine, chance, sequences, 300, seed);
          INFO(sequences, " sequences, chance ", chance, ", seed ", seed, ", ideal ", ideal);
          CHECK(r.Speedup() > 1 + 0.5 * (ideal - 1));
          CHECK(r.depth >= 0.9);  // a sweep now and then goes without
        }
      }
    }
  }
  CHECK(cases > 10);
}

TEST_CASE("wide sweeps that wait for the drive take every draft, those that compute take none") {
  const RunResult disk = Simulate(DiskBound(), 0.7, 256, 200, 1);
  CHECK(disk.depth > 3.5);
  const RunResult compute = Simulate(ComputeBound(), 0.3, 256, 200, 1);
  CHECK(compute.depth < 0.05);
  CHECK(compute.on < compute.sweeps / 10);
}

TEST_CASE(
    "no further step is made for a few sequences whose second drafts are surer than first ones") {
  Machine machine = DiskBound();
  machine.step = 15;  // its experts take as long as those of a fifth of the layers
  machine.room = 1;
  machine.hits = [](uint32_t sequence, int32_t, int32_t) { return sequence < 8 ? 1 : 0.7; };
  Simulation simulation(machine, 1);
  simulation.Run(100, [](int32_t) { return 128; });
  CHECK(simulation.Steps(0) > 60);
  CHECK(simulation.Steps(1) < 10);
}

TEST_CASE("a sequence whose drafts hit has more of them than one whose drafts miss") {
  Machine machine = ComputeBound();
  machine.hits = [](uint32_t sequence, int32_t, int32_t) {
    return sequence % 2 == 0 ? 0.95 : 0.05;
  };
  Simulation simulation(machine, 3);
  simulation.Run(200, [](int32_t) { return 32; });
  double even = 0, odd = 0;
  for (size_t i = 0; i < 32; ++i) (i % 2 == 0 ? even : odd) += simulation.Drafted(i);
  CHECK(even > 200 * 16);
  CHECK(odd < even / 10);
}

TEST_CASE("drafts end when they are accepted no more and come back when they are again") {
  Machine machine = DiskBound();
  machine.hits = [](uint32_t, int32_t, int32_t sweep) {
    return sweep < 200 || sweep >= 500 ? 0.85 : 0.02;
  };
  Simulation simulation(machine, 5);
  std::vector<int32_t> drafts;
  const RunResult r = simulation.Run(
      900, [](int32_t) { return 4; }, &drafts);
  const auto between = [&](size_t first, size_t last) {
    return std::accumulate(drafts.begin() + static_cast<std::ptrdiff_t>(first),
                           drafts.begin() + static_cast<std::ptrdiff_t>(last), 0) /
           static_cast<double>(last - first);
  };
  CHECK(between(100, 200) > 3);
  CHECK(between(300, 500) < 0.5);
  CHECK(between(700, 900) > 3);
  CHECK(r.Speedup() > 1);
}

TEST_CASE("a run whose width changes all the time is none the slower") {
  for (const double chance : {0.05, 0.4, 0.8}) {
    for (const Machine& kind : {DiskBound(), ComputeBound()}) {
      Machine machine = kind;
      machine.hits = Hits(chance);
      // Prompts come in now and then; at last one line after the other ends.
      const auto width = [](int32_t sweep) {
        if (sweep < 250) return sweep % 5 == 0 ? 90 : 40;
        return std::max(1, 40 - (sweep - 250) / 4);
      };
      const RunResult r = Simulation(machine, 11).Run(450, width);
      CHECK_MESSAGE(r.Speedup() > kNeverSlower, "chance ", chance);
      if (chance == 0.8) CHECK(r.Speedup() > 1.2);
    }
  }
}

TEST_CASE("a machine that slowly becomes faster does not make drafts look good") {
  for (const double chance : {0.0, 0.3}) {
    Machine machine = ComputeBound();
    machine.hits = Hits(chance);
    machine.warming = 100;
    INFO("chance ", chance);
    const RunResult r = Simulation(machine, 2).Run(300, [](int32_t) { return 32; });
    CHECK(r.Speedup() > kNeverSlower);
  }
}

TEST_CASE("drafts that are noise are told of once and made no more") {
  const RunResult noise = Simulate(DiskBound(), 0.0005, 256, 60, 1);
  CHECK(noise.notice.find("MTP layer") != std::string::npos);
  CHECK(noise.depth == 0);
  const RunResult poor = Simulate(DiskBound(), 0.1, 256, 60, 1);
  CHECK(poor.notice.empty());
}

TEST_CASE("there are never more drafts than asked for, than there is room for, or by whom") {
  Governor governor({kExperts, kTopK, kLayers, 2});
  SweepFigures sweep;
  sweep.rows = 8;
  sweep.seconds = sweep.read_seconds = 10;
  std::vector<DraftAsker> asking(3);
  asking[0].sequence = 7;
  asking[1].sequence = 3;
  asking[2].sequence = 900;
  const auto none_of = [&asking] {
    return std::all_of(asking.begin(), asking.end(),
                       [](const DraftAsker& asker) { return asker.depth == 0; });
  };
  for (DraftAsker& asker : asking) asker.depth = 9;
  governor.Choose(8, asking, 100);
  CHECK(none_of());  // nothing is known yet
  for (int i = 0; i < 20; ++i) governor.Swept(sweep);
  bool some = false;
  for (int i = 0; i < 300; ++i) {
    const int32_t room = i % 4;
    governor.Choose(8, asking, room);
    int32_t drafts = 0;
    for (const DraftAsker& asker : asking) {
      CHECK(asker.depth >= 0);
      CHECK(asker.depth <= 2);
      CHECK(asker.kind == kMtpDrafts);
      drafts += asker.depth;
      governor.Verified(asker.sequence, asker.kind, asker.depth, asker.depth);
    }
    CHECK(drafts <= room);
    some = some || drafts > 1;
    SweepFigures with = sweep;
    with.rows += drafts;
    with.drafts = with.accepted = drafts;
    governor.Swept(with);
  }
  CHECK(some);
  governor.Choose(8, {}, 100);
  Governor none({kExperts, kTopK, kLayers, 0});
  for (int i = 0; i < 20; ++i) none.Swept(sweep);
  none.Choose(8, asking, 100);
  CHECK(none_of());
}

TEST_CASE(
    "lookup that hits is used whenever it finds something, and costs nothing where it misses") {
  for (const int32_t sequences : {1, 4, 32}) {
    for (uint32_t seed = 0; seed < 4; ++seed) {
      INFO(sequences, " sequences, seed ", seed);
      Machine machine = ComputeBound();
      machine.hits = Hits(0.05);
      machine.found = 0.4;
      machine.found_hits = 0.95;
      Simulation good(machine, seed);
      // 4.5 tokens for the time of 2.2 to 4.1 in two of five sweeps.
      CHECK(good.Run(400, [=](int32_t) { return sequences; }).Speedup() > 1.04);
      CHECK(good.LookedUp() > 400 * sequences / 2);
      machine.found_hits = 0.05;
      Simulation poor(machine, seed);
      CHECK(poor.Run(400, [=](int32_t) { return sequences; }).Speedup() > kNeverSlower);
    }
  }
}

TEST_CASE("of two kinds of drafts a sequence has the one that brings more") {
  Machine machine = DiskBound();
  machine.hits = Hits(0.8);
  machine.found = 1;
  machine.found_hits = 0.2;
  const auto share = [](const Machine& m) {
    Simulation simulation(m, 6);
    simulation.Run(300, [](int32_t) { return 8; });
    int32_t all = 0;
    for (size_t i = 0; i < 8; ++i) all += simulation.Drafted(i);
    REQUIRE(all > 300 * 8);
    return static_cast<double>(simulation.LookedUp()) / all;
  };
  CHECK(share(machine) < 0.2);
  machine.hits = Hits(0.2);
  machine.found_hits = 0.8;
  CHECK(share(machine) > 0.8);
}

TEST_CASE("keys of the MTP layer are given up where its drafts lose, but for some to try with") {
  Machine machine = ComputeBound();
  machine.row = 0.15;
  machine.hits = Hits(0.1);
  Simulation losing(machine, 8);
  losing.Run(200, [](int32_t) { return 64; });
  CHECK_FALSE(losing.TheGovernor().Keeps(1));
  CHECK(losing.TheGovernor().Keeps(8));
  Simulation alone(machine, 8);
  alone.Run(200, [](int32_t) { return 1; });
  CHECK(alone.TheGovernor().Keeps(1));
  Machine gaining = DiskBound();
  gaining.hits = Hits(0.7);
  Simulation wide(gaining, 8);
  wide.Run(200, [](int32_t) { return 64; });
  CHECK(wide.TheGovernor().Keeps(1));
}

TEST_CASE("times of sweeps alone are enough where nobody measures the drive and the processor") {
  Machine machine = DiskBound();
  machine.hits = Hits(0.8);
  machine.measured = false;
  const RunResult r = Simulation(machine, 4).Run(300, [](int32_t) { return 32; });
  CHECK(r.Speedup() > 1.3);
  machine.hits = Hits(0.1);
  CHECK(Simulation(machine, 4).Run(300, [](int32_t) { return 32; }).Speedup() > kNeverSlower);
}

}  // namespace
}  // namespace colibri
