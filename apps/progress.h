// The progress of a run on stderr: a bar on a terminal, plain lines elsewhere, JSON for scripts.
// Reads the engine's figures, changes nothing. Threads: one of its own, from construction to Stop;
// the texts are pure functions.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "apps/estimate.h"
#include "apps/flags.h"
#include "graph/engine.h"
#include "runtime/deliverer.h"
#include "runtime/plan.h"

namespace colibri {

// What is shown, at one moment.
struct ProgressFigures {
  double seconds = 0;                               // since the first sweep began
  uint64_t lines_done = 0, lines_failed = 0;        // records written, and those of failed lines
  uint64_t lines_read = 0, lines_under_way = 0;     // taken in; choices that are being answered
  bool input_open = true;                           // more lines may come
  std::optional<double> lines_total;                // nullopt: unknown
  bool total_guessed = false;                       // from the bytes read so far
  uint64_t tokens = 0, sweeps = 0, bytes_read = 0;  // so far
  std::optional<double> tokens_a_second, bytes_a_second, seconds_a_sweep;  // of the last sweeps
  std::optional<double> predicted;  // tokens a second of the whole run
  double hit_rate = 0;              // of all expert requests so far, 0 to 1
  int32_t layer = 0, layers = 1;    // from 1: where the sweep is
  std::optional<SweepsLeft> sweeps_left;
  std::optional<double> seconds_left;
};

// No wider than `columns` - 1, so that the terminal never wraps it: what matters less is left out.
std::string BarText(const ProgressFigures& figures, int32_t columns);
std::string PlainText(const ProgressFigures& figures);
// One JSON object, without line end.
std::string JsonText(const ProgressFigures& figures);

class Progress {
 public:
  struct Sources {
    const Engine& engine;
    const Deliverer& deliverer;
    const Plan& plan;
    int32_t layers = 1;
    std::function<std::pair<uint64_t, uint64_t>()> written;  // records, and those of failed lines
    // Lines still to be taken in that will be run, when the input is open; nullopt: unknown.
    std::function<std::optional<double>(uint64_t lines_read)> unread;
    bool guessed = false;  // `unread` guesses
  };
  // `format` kAuto is a bar on a terminal, else plain lines. What `sources` refers to outlives the
  // object.
  Progress(ProgressFormat format, Sources sources);
  ~Progress() { Stop(); }
  void Stop();

 private:
  void Loop();
  ProgressFigures Look();
  void Print();

  ProgressFormat format_;
  const Sources sources_;
  SweepPace pace_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace colibri
