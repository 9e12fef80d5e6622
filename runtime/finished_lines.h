// The lines of an input that an output holds records of. 16 bytes a line. Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include "runtime/record_reader.h"

namespace colibri {

class FinishedLines {
 public:
  struct Entry {
    uint64_t line = 0;
    uint64_t line_hash = 0;
    uint32_t id_hash = 0;  // the low 23 bits
    bool failed = false;
  };
  static constexpr uint64_t kMaxLine = (uint64_t{1} << 40) - 1;
  static uint32_t ShortId(uint64_t id_hash) { return static_cast<uint32_t>(id_hash & 0x7FFFFF); }

  // In any order. False: the line number is above kMaxLine.
  bool Add(const RecordFacts& facts);
  // After the last Add: sorts, and drops second records of a line. Returns the first line whose
  // records differ in id or hash.
  std::optional<uint64_t> Settle();

  size_t Count() const { return places_.size(); }
  bool Empty() const { return places_.empty(); }
  size_t Failed() const { return failed_; }
  size_t Duplicates() const { return duplicates_; }  // dropped by Settle
  Entry At(size_t index) const;                      // ascending by line

  // The lowest line still held, which is forgotten. Input lines come in ascending order, so the
  // memory goes back as that of their ids grows.
  void DropFirst() { places_.pop_front(); }

 private:
  // line (40 bits), id (23), failed (1): ascending means by line.
  struct Place {
    uint64_t packed = 0;
    uint64_t line_hash = 0;
  };
  // Not a vector: growing that one holds everything three times for a moment.
  std::deque<Place> places_;
  size_t failed_ = 0, duplicates_ = 0;
};

}  // namespace colibri
