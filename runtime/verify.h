// The end of a frame: tokens are drawn from logits, accepted one at a time, and sequences told to
// go on or to end. Shared by the graph's `head` and `verify` nodes and the sequential engine.
// Threads: Row of TokenDrawer from any thread of a parallel loop; AcceptTokens by whoever holds the
// frame.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "runtime/frame.h"
#include "runtime/parallel.h"
#include "runtime/sampler.h"
#include "runtime/sequence.h"
#include "runtime/stages.h"

namespace colibri {

// Tells the deliverer that a sequence has `count` generated tokens. After a final notice the
// sequence belongs to the deliverer.
struct Notice {
  uint32_t sequence = 0;
  uint32_t count = 0;
  uint32_t final = 0;
};

// Draws the token of each row from its logits as the line asks (sampling, log probabilities).
class TokenDrawer final : public LogitsSink {
 public:
  TokenDrawer(const VocabMask& mask, Parallel& parallel)
      : mask_(mask), parallel_(parallel), scratch_(static_cast<size_t>(parallel.Threads())) {}
  void Row(Frame& frame, size_t row, std::span<float> logits) override;

 private:
  const VocabMask& mask_;
  Parallel& parallel_;
  std::vector<SampleScratch> scratch_;
};

// Shares of a frame's work, spread over its rows, for the records.
struct FrameFigures {
  uint64_t bytes_read = 0;
  uint64_t draft_bytes = 0;  // of it, what drafts alone asked for
  double hit_rate = 0;
};

// Appends the drawn tokens of a frame that passed the head, ends sequences that stop or fail, and
// hands out one notice for each sequence that got a token or ended. `path_of` names a shard file.
// Rows of a sequence that are drafts hold guesses at the tokens after its last one. A guess is
// accepted exactly if it is the token drawn from the row before it; then the token drawn from its
// own row is the next one, and so on, each passing the stop conditions in its turn. Rows behind the
// last accepted one, failed ones included, were for nothing: their positions are stored again.
void AcceptTokens(Frame& frame, const FrameFigures& figures,
                  const std::function<std::string(uint32_t)>& path_of,
                  const std::function<void(const Notice&)>& notify);

}  // namespace colibri
