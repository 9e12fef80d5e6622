// The sequential engine with drafts: sequences are generated to their end one frame after another,
// each frame verifying the drafts that the one before made. Simple and without scheduler or cache;
// what drafts must never change is compared with it. Threads: one caller at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "runtime/draft.h"
#include "runtime/frame.h"
#include "runtime/kv_store.h"
#include "runtime/reference.h"
#include "runtime/sampler.h"
#include "runtime/sequence.h"
#include "runtime/verify.h"

namespace colibri {

struct DraftOracleOptions {
  // Drafts that a sequence should have verified next; it is asked after each of its frames.
  std::function<int32_t(const Sequence&)> depth = [](const Sequence&) { return 0; };
  // Replaces what the MTP layer drafted by at most `most` others.
  std::function<void(const Sequence&, int32_t most, std::vector<int32_t>* drafts)> propose;
  // Which sequences take part in the next frame, in which order; default: all, as given.
  std::function<void(std::vector<Sequence*>*)> order;
  // Called when a frame is verified, its drafts made and its sequences back.
  std::function<void(const Frame&)> verified;
  bool wait = false;     // keys in the MTP layer may (DraftPass)
  int32_t rows = 64;     // of a frame
  int32_t context = 64;  // longest sequence
};

class DraftOracle {
 public:
  // All outlive the oracle. `kv` has room for all sequences at once, drafts included.
  DraftOracle(const Model& model, KvStore& kv, const VocabMask& mask,
              const DraftOracleOptions& options, StageHook* hook = nullptr);

  // Until all are done. They are as the scheduler admits them, and hold their pages at the end.
  void Run(std::span<Sequence* const> sequences);

  ReferenceEngine& Engine() { return engine_; }

 private:
  void Fill(const std::vector<Sequence*>& chosen);
  void Place(Sequence& s, int32_t rows, int32_t drafts);
  void Draft();
  void DraftByMtp();

  const Model& model_;
  KvStore& kv_;
  const DraftOracleOptions options_;
  ReferenceEngine engine_;
  SerialParallel serial_;
  TokenDrawer drawer_;
  DraftDrawer draft_drawer_;
  DraftPass pass_;
  Frame frame_;
};

}  // namespace colibri
