#include "io/memory.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "io/error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace colibri {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHugePage = uint64_t{2} << 20;

}  // namespace

PopulatedBuffer::PopulatedBuffer(uint64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  bytes_ = (bytes + kPage - 1) / kPage * kPage;
  void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    throw IoError(fmt::format("cannot allocate {} bytes: {}", bytes_, std::strerror(errno)));
  }
  data_ = static_cast<std::byte*>(p);
  if (bytes_ >= kHugePage) madvise(p, bytes_, MADV_HUGEPAGE);
  // Kernels before 5.14 lack it: touch the pages instead.
  if (madvise(p, bytes_, MADV_POPULATE_WRITE) != 0) {
    for (uint64_t i = 0; i < bytes_; i += kPage) data_[i] = std::byte{0};
  }
}

PopulatedBuffer::~PopulatedBuffer() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

}  // namespace colibri
