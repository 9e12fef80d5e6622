// Reads and writes with a pool of blocking pread threads: what runs where io_uring is not to be
// had. Threads: 8 readers and one for the callbacks, between Start and Stop.
#pragma once

#include <memory>

#include "io/reader.h"

namespace colibri {

// `files` is complete (every Add, AddScratch and EnableDirect done) and outlives the reader.
std::unique_ptr<Reader> MakePreadReader(const FileTable& files, const ReaderOptions& options);

}  // namespace colibri
