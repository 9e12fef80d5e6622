// The memory experts are read into: one arena for each slot class, cut into equal slots, aligned
// to kIoAlign, huge pages where they can be had, populated once at construction.
// Threads: none of its own; ExpertCache calls it under its lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace colibri {

struct SlotClass {
  uint64_t bytes = 0;  // of one slot; rounded up to kIoAlign
  uint32_t count = 0;
};

class SlotPool {
 public:
  // Throws std::bad_alloc-like IoError with the bytes asked for when memory is refused.
  explicit SlotPool(const std::vector<SlotClass>& classes);
  ~SlotPool();
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  uint32_t Classes() const;
  uint32_t Count(uint16_t slot_class) const;
  uint64_t SlotBytes(uint16_t slot_class) const;  // of one slot, rounded up
  // Slot numbers run from 0 within a class.
  std::byte* Data(uint16_t slot_class, uint32_t slot) const;
  uint64_t TotalBytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace colibri
