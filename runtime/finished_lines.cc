#include "runtime/finished_lines.h"

#include <algorithm>

namespace colibri {

bool FinishedLines::Add(const RecordFacts& facts) {
  if (facts.line > kMaxLine) return false;
  places_.push_back(
      {facts.line << 24 | uint64_t{ShortId(facts.id_hash)} << 1 | facts.failed, facts.line_hash});
  return true;
}

FinishedLines::Entry FinishedLines::At(size_t index) const {
  const Place& place = places_[index];
  return {place.packed >> 24, place.line_hash, ShortId(place.packed >> 1), (place.packed & 1) != 0};
}

std::optional<uint64_t> FinishedLines::Settle() {
  std::sort(places_.begin(), places_.end(),
            [](const Place& a, const Place& b) { return a.packed < b.packed; });
  std::optional<uint64_t> differing;
  size_t kept = 0;
  failed_ = 0;
  for (size_t i = 0; i < places_.size(); ++i) {
    const Entry entry = At(i);
    if (kept > 0) {
      const Entry last = At(kept - 1);
      if (last.line == entry.line) {
        if (!differing && (last.line_hash != entry.line_hash || last.id_hash != entry.id_hash)) {
          differing = entry.line;
        }
        ++duplicates_;
        continue;
      }
    }
    places_[kept++] = places_[i];
    if (entry.failed) ++failed_;
  }
  places_.resize(kept);
  return differing;
}

}  // namespace colibri
