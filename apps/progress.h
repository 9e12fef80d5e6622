// The progress line of a run on stderr: a bar on a terminal, plain lines elsewhere, JSON for
// scripts; and the closing summary. Reads the engine's figures, changes nothing. Threads: one of
// its own, from construction to Stop.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "apps/flags.h"
#include "graph/engine.h"
#include "runtime/deliverer.h"
#include "runtime/plan.h"

namespace colibri {

class Progress {
 public:
  // `format` kAuto is a bar on a terminal, else plain lines. All references outlive the object.
  Progress(ProgressFormat format, const Engine& engine, const Deliverer& deliverer, int32_t layers);
  ~Progress() { Stop(); }
  void Stop();

 private:
  void Loop();
  void Print(bool last);

  ProgressFormat format_;
  const Engine& engine_;
  const Deliverer& deliverer_;
  int32_t layers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  bool printed_ = false;
  std::thread thread_;
};

// Totals, speed, reading, what overlapped, memory against the plan.
std::string Summary(const EngineStats& stats, const DeliveryTotals& totals, const Plan& plan);

}  // namespace colibri
