// The sequential engine: the same stages as the graph, one after another on one thread, every
// expert read when it is needed. Slow and simple; the oracle the graph is compared with bit for
// bit. Threads: one caller at a time.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "runtime/frame.h"
#include "runtime/stages.h"

namespace colibri {

class ReferenceEngine {
 public:
  // All outlive the engine. `model` has its dense weights loaded. `parallel`: how the loops within
  // a stage run; nullptr: serially.
  ReferenceEngine(const Model& model, KvStore& kv, StageHook* hook = nullptr,
                  Parallel* parallel = nullptr);

  // All main layers and the head over a frame whose rows and sequences are filled in.
  void Run(Frame& frame, LogitsSink& sink);
  // The MTP layer and its head: each row holds the token after its position, `final` its hidden.
  void RunMtp(Frame& frame, LogitsSink& sink);
  // The same rows' keys in the MTP layer and nothing else.
  void RunMtpKeys(Frame& frame, std::span<const float* const> hidden = {});

  // Reads of these experts fail with EIO from now on, as those of a broken drive would.
  void FailItems(std::vector<uint32_t> items) { failing_ = std::move(items); }

  // Of experts, so far.
  uint64_t BytesRead() const { return bytes_read_; }

 private:
  void RunLayer(Frame& frame, int32_t layer);
  bool Load(uint32_t item, ReadResult* error);

  const Model& model_;
  SerialParallel serial_;
  Stages stages_;
  PopulatedBuffer slot_;
  std::vector<uint32_t> failing_;
  uint64_t bytes_read_ = 0;
};

}  // namespace colibri
