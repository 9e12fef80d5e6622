// How many drafts were verified and how many of them accepted, by position: the first behind a
// row's token, the second and so on. Threads: one at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace colibri {

inline constexpr int32_t kMaxDrafts = 4;  // of a sequence in a frame

struct DraftCounts {
  std::array<uint64_t, kMaxDrafts> offered = {}, accepted = {};

  // Of the drafts behind one row, `of` of them, the first `hits` were accepted.
  void Add(int32_t of, int32_t hits) {
    for (int32_t i = 0; i < of; ++i) {
      ++offered[static_cast<size_t>(i)];
      accepted[static_cast<size_t>(i)] += i < hits ? 1 : 0;
    }
  }
  DraftCounts& operator+=(const DraftCounts& o) {
    for (size_t i = 0; i < kMaxDrafts; ++i) {
      offered[i] += o.offered[i];
      accepted[i] += o.accepted[i];
    }
    return *this;
  }
  DraftCounts& operator-=(const DraftCounts& o) {
    for (size_t i = 0; i < kMaxDrafts; ++i) {
      offered[i] -= o.offered[i];
      accepted[i] -= o.accepted[i];
    }
    return *this;
  }
  bool operator==(const DraftCounts&) const = default;

  uint64_t Offered() const { return Sum(offered); }
  uint64_t Accepted() const { return Sum(accepted); }
  // Accepted drafts of a row that had some, on average.
  double MeanLength() const {
    return offered[0] == 0 ? 0 : static_cast<double>(Accepted()) / static_cast<double>(offered[0]);
  }

 private:
  static uint64_t Sum(const std::array<uint64_t, kMaxDrafts>& of) {
    uint64_t sum = 0;
    for (const uint64_t n : of) sum += n;
    return sum;
  }
};

}  // namespace colibri
