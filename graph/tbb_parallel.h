// The loops of stages as TBB loops. Isolated: a thread that waits in one may not start another
// node's body on the same stack (a 20 ms loop took 65 ms without isolation). Bodies never put
// messages.
// Threads: any thread of the arena.
#pragma once

#include "runtime/parallel.h"

namespace colibri {

class TbbParallel final : public Parallel {
 public:
  // Throws IoError where the process may not start as many threads.
  explicit TbbParallel(int threads);
  void For(size_t count, size_t grain, RangeBody body) override;
  int Threads() const override { return threads_; }
  int ThreadIndex() const override;

 private:
  int threads_;
};

}  // namespace colibri
