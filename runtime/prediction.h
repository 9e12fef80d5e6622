// What a run will be like before it begins: seconds of a sweep from the speeds of drive and
// processor, and tokens a second of all its sweeps. The plan weighs widths with the same figures.
// A sweep of B rows reads the layers' unions, E (1 - (1 - k/E)^B) experts each where all are as
// likely and somewhat fewer where some are not, less those that are in memory, and takes the longer
// of reading and computing; the shorter hides but for a part. Threads: pure.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace colibri {

// What the machine does with a model, measured or given.
struct Speeds {
  double drive = 0;  // bytes of experts a second; 0: unknown
  // Seconds of computing, at some widths in ascending order: of all layers, and of embedding, head
  // and draw for so many drawn tokens. Positions attended to not included. Empty: unknown.
  struct Sweep {
    double rows = 0, layers_s = 0, draw_s = 0;
  };
  std::vector<Sweep> sweeps;
  double position_s = 0;  // of one row and one position that it attends to, all layers

  bool Known() const { return drive > 0 && !sweeps.empty(); }
  // Between measured widths in proportion; beyond the last one as between the last two.
  double LayersSeconds(double rows) const;
  double DrawSeconds(double tokens) const;
};

// The model and the plan as far as a sweep's bytes follow from them.
struct SweepModel {
  double expert_bytes = 0;     // of all experts that may be asked for
  double chosen = 0;           // top_k / experts
  double skew = 1;             // 0: all experts are as likely; 1: as unevenly as with 128 and more
  double layers = 0;           // that these experts are of; 0: many
  double resident = 0;         // share of the experts that there are slots for
  double slots = 0;            // that is how many; 0: enough
  double read_bytes = 0;       // of one expert
  double streamed_bytes = 0;   // read in every sweep besides experts: dense weights
  double position_bytes = 0;   // of KV on the drive, for each position held or stored
  int32_t most_positions = 0;  // a row attends to no more; 0: to all

  double Union(double rows) const;  // share of the experts
  // The share of a union that is in memory when the share `held` of all experts is, those that are
  // asked for most: one row finds far more than that share, a wide union just that. Not those in
  // whose slots the next layer's experts arrive early: `ahead` of its union, 0 to 1.
  double Hits(double rows, double held, double ahead = 0) const;
};

struct SweepRows {
  double rows = 0, drawn = 0;  // drawn: tokens
  double context = 0;          // positions a row attends to, on average
};
double ComputeSeconds(const Speeds& speeds, const SweepModel& model, const SweepRows& sweep);
// Of a sweep that reads so many bytes of experts, and others.
double SweepSeconds(const Speeds& speeds, const SweepModel& model, const SweepRows& sweep,
                    double expert_bytes, double other_bytes = 0);

// What is run: tokens of a prompt and of an answer on average, and of the longest answer.
struct RunModel {
  std::optional<uint64_t> answers;  // nullopt: without end
  double prompt = 1, answer = 1, longest = 1;
  double together = 1;  // answers at once
  double rows = 1, prefill_rows = 1;
};

struct Prediction {
  double tokens_a_second = 0, bytes_a_token = 0;
  double seconds = 0, sweeps = 0;  // of the whole run; 0: without end
};
// Sweep by sweep: prompts come in beside answers, the first sweeps find no experts in memory, the
// last ones are narrow. `speeds` are known.
Prediction Predict(const Speeds& speeds, const SweepModel& model, const RunModel& run);

}  // namespace colibri
