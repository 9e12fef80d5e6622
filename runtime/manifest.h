// OUT.manifest.json: what the bytes of OUT's records depend on besides the prompts. A run may go on
// in an OUT, and outputs may be merged, only where all of it agrees. Threads: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace colibri {

// Raised by every change of the engine that alters a line's bytes on some SIMD target.
inline constexpr int32_t kNumericsVersion = 2;

// The lines of one of several processes that share a prompt file: line number `line`, from 1, with
// (line - 1) mod count = index.
struct LineShard {
  uint64_t index = 0, count = 1;
  bool Has(uint64_t line) const { return (line - 1) % count == index; }
  bool operator==(const LineShard&) const = default;
};

// "I/N" with I < N, decimal digits only; nullopt for anything else.
std::optional<LineShard> ParseLineShard(std::string_view text);
std::string ToText(const LineShard& shard);

struct Manifest {
  // Every option that can change a line's bytes: name and value in plain words, no name twice.
  std::vector<std::pair<std::string, std::string>> options;
  LineShard shard;
  std::string simd_target;
  int32_t numerics = kNumericsVersion;
  std::string model;  // ModelFingerprint
  // Not compared.
  std::string engine_version;
  std::string run_id;  // a run that goes on keeps it, so that the ids of its records stay alike
};

// The context that lines were answered with, in tokens; 0 when the manifest does not say it.
int32_t ContextOf(const Manifest& manifest);

// Path of the manifest of an output file.
std::string ManifestPath(const std::string& output);

// Replaces the file durably (io/whole_file.h). Throws IoError.
void WriteManifest(const std::string& path, const Manifest& manifest);

// nullopt: there is no such file. Throws IoError when it cannot be read or is no manifest.
std::optional<Manifest> ReadManifest(const std::string& path);

struct ManifestScope {
  bool shard = true;        // false: outputs to be merged are shards of one run
  bool simd_target = true;  // false: --mixed-targets
};

// "NAME: was X, is Y" for everything that differs, in a fixed order; empty: the same.
std::vector<std::string> CompareManifests(const Manifest& was, const Manifest& is,
                                          const ManifestScope& scope = {});

}  // namespace colibri
