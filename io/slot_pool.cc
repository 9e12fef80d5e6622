#include "io/slot_pool.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>

#include "io/check.h"
#include "io/error.h"
#include "io/memory.h"
#include "io/reader.h"

namespace colibri {
namespace {

struct Arena {
  PopulatedBuffer memory;
  uint64_t slot_bytes = 0;
  uint32_t count = 0;
};

}  // namespace

struct SlotPool::Impl {
  void AddArena(const SlotClass& wanted) {
    const std::string what = fmt::format("{} expert slots of {} bytes", wanted.count, wanted.bytes);
    uint64_t slot_bytes = 0, bytes = 0;
    bool too_large = __builtin_add_overflow(wanted.bytes, kIoAlign - 1, &slot_bytes);
    slot_bytes = slot_bytes / kIoAlign * kIoAlign;
    too_large |= __builtin_mul_overflow(slot_bytes, uint64_t{wanted.count}, &bytes);
    if (too_large) throw IoError(fmt::format("no memory for {}: more than 64 bits count", what));
    arenas.push_back({PopulatedBuffer(bytes, what), slot_bytes, wanted.count});
    total += bytes;
  }

  std::vector<Arena> arenas;
  uint64_t total = 0;
};

SlotPool::SlotPool(const std::vector<SlotClass>& classes) : impl_(std::make_unique<Impl>()) {
  impl_->arenas.reserve(classes.size());
  for (const SlotClass& wanted : classes) impl_->AddArena(wanted);
}

SlotPool::~SlotPool() = default;

uint32_t SlotPool::Classes() const { return static_cast<uint32_t>(impl_->arenas.size()); }

uint32_t SlotPool::Count(uint16_t slot_class) const { return impl_->arenas[slot_class].count; }

uint64_t SlotPool::SlotBytes(uint16_t slot_class) const {
  return impl_->arenas[slot_class].slot_bytes;
}

std::byte* SlotPool::Data(uint16_t slot_class, uint32_t slot) const {
  const Arena& arena = impl_->arenas[slot_class];
  COLIBRI_DCHECK(slot < arena.count);
  return arena.memory.data() + arena.slot_bytes * slot;
}

uint64_t SlotPool::TotalBytes() const { return impl_->total; }

}  // namespace colibri
