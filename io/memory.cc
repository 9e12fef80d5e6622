#include "io/memory.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "io/error.h"

// Linux 5.14; an older kernel answers EINVAL and the pages are touched instead.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace colibri {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHugePage = uint64_t{2} << 20;

[[noreturn]] void Refused(uint64_t bytes, std::string_view what, int error) {
  throw IoError(fmt::format("no memory for {}: {} bytes: {}", what, bytes, std::strerror(error)));
}

}  // namespace

PopulatedBuffer::PopulatedBuffer(uint64_t bytes, std::string_view what) {
  if (bytes == 0) return;
  if (__builtin_add_overflow(bytes, kHugePage, &mapped_)) Refused(bytes, what, ENOMEM);
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    Refused(bytes, what, errno);
  }
  const auto address = reinterpret_cast<uintptr_t>(mapping_);
  data_ = static_cast<std::byte*>(mapping_) +
          ((address + kHugePage - 1) / kHugePage * kHugePage - address);
  bytes_ = (bytes + kPage - 1) / kPage * kPage;
  // Advice only: without huge pages everything works, with more TLB misses.
  (void)madvise(data_, bytes_, MADV_HUGEPAGE);
  // Pages that exist only on paper would be taken from under a running sweep.
  if (madvise(data_, bytes_, MADV_POPULATE_WRITE) == 0) return;
  const int error = errno;
  if (error == ENOMEM) {
    munmap(mapping_, mapped_);
    Refused(bytes, what, error);
  }
  for (uint64_t at = 0; at < bytes_; at += kPage) {
    static_cast<volatile std::byte*>(data_)[at] = std::byte{0};
  }
}

PopulatedBuffer::~PopulatedBuffer() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
}

}  // namespace colibri
