// The signals that end a run, taken on a thread of its own. Threads: one object a process, made
// before any other thread exists; Interrupted from any thread.
#pragma once

#include <signal.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "graph/engine.h"

namespace colibri {

// SIGINT, SIGTERM and SIGHUP: the first ends the run after the sweep under way, the second, or one
// that comes while nothing runs, at once with exit code 130, whatever the other threads wait for.
// SIGQUIT says what the run waits for and changes nothing. Those that were ignored when the program
// started stay ignored.
class Signals {
 public:
  // Threads made later inherit the blocked signals.
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  // What the first signal calls, and what SIGQUIT says; nullptr: nothing runs.
  void OnFirst(std::function<void()> stop, std::function<std::string()> state);
  bool Interrupted() const { return count_ > 0; }

 private:
  void Loop();

  sigset_t set_;
  std::atomic<int> count_{0};
  std::atomic<bool> done_{false};
  std::mutex mutex_;
  std::function<void()> stop_;          // guarded by mutex_
  std::function<std::string()> state_;  // guarded by mutex_
  std::thread thread_;
};

// While it lives signals stop this engine, or ask it.
class StopOnSignal {
 public:
  StopOnSignal(Signals& signals, Engine& engine) : signals_(signals) {
    signals_.OnFirst([&engine] { engine.Stop(); }, [&engine] { return engine.StateText(); });
  }
  ~StopOnSignal() { signals_.OnFirst(nullptr, nullptr); }
  StopOnSignal(const StopOnSignal&) = delete;
  StopOnSignal& operator=(const StopOnSignal&) = delete;

 private:
  Signals& signals_;
};

}  // namespace colibri
