// Records in the order of their lines where a file cannot be sorted afterwards (--ordered on
// standard output): holds back only what is ahead of its turn. Knows nothing of blank lines and of
// other shards' lines: what is expected is said line by line as lines are taken in.
// Threads: any; calls are made one after the other by a lock. What Finish hands to `emit` is handed
// over under that lock, so that the order holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "runtime/tally.h"

namespace colibri {

class OrderedRelease {
 public:
  // The next record for the output thread, and the sequence that it frees (OutputWriter::Push). An
  // empty record only frees. Must not call this object.
  using Line = std::shared_ptr<const LineOutcome>;
  using Emit = std::function<void(std::string record, uint32_t token, Line line)>;

  // Up to `held_bytes` of records a sequence is freed at once although its record waits: one slow
  // line then does not drain the frame. Beyond, the sequence waits with its record.
  OrderedRelease(Emit emit, uint32_t no_token, size_t held_bytes)
      : emit_(std::move(emit)), no_token_(no_token), cap_(held_bytes) {}

  // `line` was taken in: a record of it will come. Ascending.
  void Expect(uint64_t line);
  // The record of an expected line; `outcome` goes with it.
  void Finish(uint64_t line, std::string record, uint32_t token, Line outcome = nullptr);
  // The run ended early: what is finished goes out, gaps left out.
  void Flush();

  size_t HeldBytes() const;

 private:
  struct Held {
    std::string record;
    uint32_t token;
    Line outcome;
  };
  void EmitFirst(std::map<uint64_t, Held>::iterator it);

  const Emit emit_;
  const uint32_t no_token_;
  const size_t cap_;
  mutable std::mutex mutex_;
  std::deque<uint64_t> expected_;
  std::map<uint64_t, Held> held_;
  size_t bytes_ = 0;
};

}  // namespace colibri
