// Where finished tokens and failed lines go. The graph's `deliver` node and the sequential engine
// call it; it builds text and records and hands them to the output thread.
#pragma once

#include "runtime/sequence.h"
#include "runtime/verify.h"

namespace colibri {

class Delivery {
 public:
  virtual ~Delivery() = default;
  // One notice at a time, in order for each sequence. After a final one the sequence is closed
  // (Scheduler::Close) once its record was taken by the output thread, or at once if it has none.
  virtual void Deliver(Sequence& sequence, const Notice& notice) = 0;
  // A line that was refused at admission (sequence.error). Called under the scheduler's lock from
  // any thread: it must not call the scheduler; Close comes later from the output thread.
  virtual void Refuse(Sequence& sequence) = 0;
};

}  // namespace colibri
