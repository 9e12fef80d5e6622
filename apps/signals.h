// The signals that end a run, taken on a thread of its own. Threads: one object a process, made
// before any other thread exists; Interrupted from any thread.
#pragma once

#include <signal.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

#include "graph/engine.h"

namespace colibri {

// SIGINT, SIGTERM and SIGHUP: the first ends the run after the sweep under way, the second, or one
// that comes while nothing runs, at once with exit code 130.
class Signals {
 public:
  // Threads made later inherit the blocked signals.
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  // What the first signal calls; nullptr: nothing runs.
  void OnFirst(std::function<void()> stop);
  bool Interrupted() const { return count_ > 0; }

 private:
  void Loop();

  sigset_t set_;
  std::atomic<int> count_{0};
  std::atomic<bool> done_{false};
  std::mutex mutex_;
  std::function<void()> stop_;  // guarded by mutex_
  std::thread thread_;
};

// While it lives a signal stops this engine.
class StopOnSignal {
 public:
  StopOnSignal(Signals& signals, Engine& engine) : signals_(signals) {
    signals_.OnFirst([&engine] { engine.Stop(); });
  }
  ~StopOnSignal() { signals_.OnFirst(nullptr); }
  StopOnSignal(const StopOnSignal&) = delete;
  StopOnSignal& operator=(const StopOnSignal&) = delete;

 private:
  Signals& signals_;
};

}  // namespace colibri
