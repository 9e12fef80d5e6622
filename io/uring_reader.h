// Reads and writes with io_uring: one thread of its own alone touches the ring, issues what the
// scheduler gives and runs the callbacks. Threads: the one I/O thread, from construction to Stop.
#pragma once

#include <memory>

#include "io/reader.h"

namespace colibri {

// `files` is complete (every Add, AddScratch and EnableDirect done) and outlives the reader. The
// ring is set up and tried with one read before this returns. Throws IoError with the step that
// failed.
std::unique_ptr<Reader> MakeUringReader(const FileTable& files, const ReaderOptions& options);

}  // namespace colibri
