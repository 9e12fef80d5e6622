#include "io/slot_pool.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "io/check.h"
#include "io/error.h"
#include "io/reader.h"

// Linux 5.14; an older kernel answers EINVAL and the pages are touched instead.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace colibri {
namespace {

constexpr uint64_t kHugePage = uint64_t{2} << 20;

struct Arena {
  void* mapping = nullptr;  // what munmap gets
  uint64_t mapped = 0;
  std::byte* base = nullptr;  // aligned to kHugePage
  uint64_t slot_bytes = 0;
  uint32_t count = 0;
};

[[noreturn]] void Refused(const SlotClass& wanted, int error) {
  throw IoError(fmt::format("no memory for {} expert slots of {} bytes: {}", wanted.count,
                            wanted.bytes, std::strerror(error)));
}

// Pages that exist only on paper would be taken from under a running sweep.
void Populate(const SlotClass& wanted, const Arena& arena, uint64_t bytes) {
  if (madvise(arena.base, bytes, MADV_POPULATE_WRITE) == 0) return;
  if (errno == ENOMEM) Refused(wanted, errno);
  for (uint64_t at = 0; at < bytes; at += kIoAlign) {
    *const_cast<volatile std::byte*>(arena.base + at) = std::byte{0};
  }
}

}  // namespace

struct SlotPool::Impl {
  Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    for (const Arena& arena : arenas) {
      if (arena.mapping != nullptr) munmap(arena.mapping, arena.mapped);
    }
  }

  void AddArena(const SlotClass& wanted) {
    uint64_t slot_bytes = 0, bytes = 0, mapped = 0;
    bool too_large = __builtin_add_overflow(wanted.bytes, kIoAlign - 1, &slot_bytes);
    slot_bytes = slot_bytes / kIoAlign * kIoAlign;
    too_large |= __builtin_mul_overflow(slot_bytes, uint64_t{wanted.count}, &bytes);
    too_large |= __builtin_add_overflow(bytes, kHugePage, &mapped);
    if (too_large) Refused(wanted, ENOMEM);
    Arena& arena = arenas.emplace_back();
    arena.slot_bytes = slot_bytes;
    arena.count = wanted.count;
    if (bytes == 0) return;
    void* mapping =
        mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) Refused(wanted, errno);
    arena.mapping = mapping;
    arena.mapped = mapped;
    const uint64_t address = reinterpret_cast<uint64_t>(mapping);
    arena.base = static_cast<std::byte*>(mapping) +
                 ((address + kHugePage - 1) / kHugePage * kHugePage - address);
    // Advice only: without huge pages everything works, with more TLB misses.
    (void)madvise(arena.base, bytes, MADV_HUGEPAGE);
    Populate(wanted, arena, bytes);
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
  return arena.base + arena.slot_bytes * slot;
}

uint64_t SlotPool::TotalBytes() const { return impl_->total; }

}  // namespace colibri
