// `colibri-bench io`: the drive, read as the engine reads it: the same readers, the experts' own
// extents, slots of a populated pool, beside a plain loop of reads in the same run.
// Threads: one call at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/table.h"
#include "io/reader.h"

namespace colibri {

struct IoBenchOptions {
  std::vector<std::string> model;  // folders; or, when empty,
  std::string file;                // any file, cut into pieces of `piece` bytes
  uint64_t piece = uint64_t{18} << 20;
  std::vector<int32_t> depths = {1, 4, 8, 16, 32, 64};
  std::vector<std::string> backends = {"uring", "pread"};
  std::vector<std::string> reads = {"direct"};  // and "buffered"
  std::vector<std::string> orders = {"file", "random"};
  uint64_t bytes = uint64_t{2} << 30;  // read for each figure, over all repetitions
  int32_t repetitions = 5;
  TableFormat format = TableFormat::kText;
};

// Throws IoError, ModelError, UsageError for a file that holds no piece.
int RunIoBench(const IoBenchOptions& options);

}  // namespace colibri
