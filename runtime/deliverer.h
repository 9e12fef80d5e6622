// Turns notices into output: records of finished lines, or readable text, handed to the output
// thread.
// Threads: Deliver one call at a time (the graph's serial node), Refuse under the scheduler's lock;
// Tokens any time.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "runtime/delivery.h"
#include "runtime/ordered_release.h"
#include "runtime/output_writer.h"
#include "runtime/record.h"
#include "runtime/text_assembler.h"

namespace colibri {

class Deliverer final : public Delivery {
 public:
  struct Options {
    RecordContext context;
    bool text = false;    // readable text instead of records
    bool stream = false;  // text of the one prompt, token by token
    uint32_t sequences = 1;
    // A sequence that has no record of its own (a choice of a line whose others still run).
    std::function<void(uint32_t sequence)> close;
    // Finished lines go through it, in the order of lines; nullptr: as they finish. Outlives the
    // deliverer. Not with `stream`.
    OrderedRelease* ordered = nullptr;
  };

  // Both outlive the deliverer.
  Deliverer(Options options, OutputWriter& writer);

  void Deliver(Sequence& sequence, const Notice& notice) override;
  void Refuse(Sequence& sequence) override;

  // Generated, of lines under way too.
  uint64_t Tokens() const { return tokens_; }

 private:
  void Stream(Sequence& sequence, const Notice& notice);
  void FinishLine(Sequence& sequence);
  // Makes the output of a line that is done and hands it over.
  void Push(LineState& line, const LineFigures& figures, uint32_t sequence);
  std::string Record(const LineState& line, const LineFigures& figures, RecordTotals* totals) const;
  std::string Text(const LineState& line, RecordTotals* totals) const;

  const Options options_;
  OutputWriter& writer_;
  std::vector<uint32_t> delivered_;  // [sequences] tokens already counted
  std::optional<TextAssembler> assembler_;
  std::atomic<uint64_t> tokens_{0};
};

}  // namespace colibri
