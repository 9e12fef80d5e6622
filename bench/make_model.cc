// The command make-model.
#include "bench/make_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "io/error.h"

namespace colibri {

WeightFormat ParseSyntheticFormat(const std::string& name) {
  if (name == "int4-g64") return WeightFormat::kInt4Grouped;
  if (name == "int4-row") return WeightFormat::kInt4Row;
  if (name == "int8" || name == "int8-row") return WeightFormat::kInt8Row;
  throw UsageError(fmt::format("format {}: int4-g64, int4-row or int8 expected", name));
}

int RunMakeModel(const MakeModelOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const uint64_t bytes = WriteSyntheticModel(
      options.model, options.out, [&](const std::string& path, uint64_t shard_bytes) {
        if (!options.quiet) {
          fmt::print(stderr, "{}: {:.3f} GB\n", path, static_cast<double>(shard_bytes) * 1e-9);
        }
      });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  if (!options.quiet) {
    fmt::print("{}: {:.3f} GB in {:.1f} s ({:.0f} MB/s)\n", options.out,
               static_cast<double>(bytes) * 1e-9, seconds.count(),
               static_cast<double>(bytes) * 1e-6 / std::max(seconds.count(), 1e-3));
  }
  return 0;
}

}  // namespace colibri
