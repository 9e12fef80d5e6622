// What a job asks for, done at once: the bytes of its extents read from the files or written there.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "io/check.h"
#include "io/file.h"
#include "io/reader.h"

namespace colibri {

// What lies past a file's end stays as it was.
inline void MoveJobBytes(const FileTable& files, const ReadJob& job) {
  for (const Extent& extent : job.extents) {
    std::byte* memory = job.destination + extent.dest;
    const uint64_t size = files.Size(extent.file);
    COLIBRI_CHECK(extent.offset < size);
    if (!job.write) {
      files.ReadExact(extent.file, extent.offset,
                      {memory, std::min(extent.bytes, size - extent.offset)});
      continue;
    }
    COLIBRI_CHECK(extent.bytes <= size - extent.offset);
    const ssize_t written =
        pwrite(files.Fd(extent.file), memory, extent.bytes, static_cast<off_t>(extent.offset));
    COLIBRI_CHECK(written == static_cast<ssize_t>(extent.bytes));
  }
}

}  // namespace colibri
