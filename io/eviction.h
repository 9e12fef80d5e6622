// Which Ready, unpinned slot gives way: the one place that knows the cache policy. Plain LRU over
// the slots of one class. Time is counted in uses, not seconds.
// Threads: none of its own; ExpertCache calls it under its lock.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace colibri {

class LruOrder {
 public:
  explicit LruOrder(uint32_t slots) : last_use_(slots, 0) {}

  void Use(uint32_t slot) { last_use_[slot] = ++clock_; }
  // What was read for a hint that did not come true: the first to go.
  void Forget(uint32_t slot) { last_use_[slot] = 0; }
  // Refuted, or not used while as many uses went by as there are slots. A hint may take only such a
  // slot. Taking a slot for a read counts as a use, and so does the read's end: where nothing is
  // ever used twice (wide sweeps) the older half of the pool is cold, so that prefetch never stops.
  bool IsCold(uint32_t slot) const {
    return last_use_[slot] == 0 || last_use_[slot] + last_use_.size() <= clock_;
  }

  // The least recently used slot that `may_go` admits; ties go to the lower number. Linear: 1,200
  // slots take a microsecond or two, and a drive gives some 160 experts a second.
  template <class MayGo>
  std::optional<uint32_t> Oldest(const MayGo& may_go) const {
    std::optional<uint32_t> oldest;
    for (uint32_t slot = 0; slot < last_use_.size(); ++slot) {
      if ((!oldest || last_use_[slot] < last_use_[*oldest]) && may_go(slot)) oldest = slot;
    }
    return oldest;
  }

 private:
  std::vector<uint64_t> last_use_;
  uint64_t clock_ = 0;
};

}  // namespace colibri
