#include "io/reader.h"

#include <fmt/format.h>

#include <exception>
#include <fstream>

#include "io/error.h"
#include "io/pread_reader.h"
#include "io/uring_reader.h"

namespace colibri {
namespace {

// Nonzero: the kernel has been told to refuse. Zero with EPERM: a sandbox (Docker's default).
std::string UringDisabled() {
  std::ifstream file("/proc/sys/kernel/io_uring_disabled");
  std::string value;
  return std::getline(file, value) ? value : "absent";
}

}  // namespace

std::unique_ptr<Reader> MakeReader(IoBackend backend, const FileTable& files,
                                   const ReaderOptions& options, std::string* note) {
  if (note != nullptr) note->clear();
  if (backend == IoBackend::kPread) return MakePreadReader(files, options);
  std::string reason;
  try {
    return MakeUringReader(files, options);
  } catch (const std::exception& error) {
    // Any failure, not a list of errnos: a container answered EOPNOTSUPP where EPERM is usual.
    reason = fmt::format("io_uring cannot be used ({}; kernel.io_uring_disabled: {})", error.what(),
                         UringDisabled());
  }
  if (backend == IoBackend::kUring) throw IoError(reason);
  std::unique_ptr<Reader> reader = MakePreadReader(files, options);
  if (note != nullptr) *note = fmt::format("{}: reading with {}", reason, reader->Name());
  return reader;
}

}  // namespace colibri
