// How often each expert was chosen in earlier runs: `.coli_usage` in the model's folder, in the
// format of colibri's C engine, which reads and writes the same file. Whitespace-separated triples,
// one a line:
//   -1 LAYERS EXPERTS        header; may be missing (older files)
//   -2 1 3815245270          version, hash of the architecture's name
//   LAYER EXPERT COUNT       what was chosen at all; layer LAYERS is the MTP layer
// A history without a choice is an empty file. Counts only say what may stay in memory: they change
// no answer. Threads: any, each file one at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace colibri {

constexpr const char* kUsageName = ".coli_usage";

struct ExpertUsage {
  ExpertUsage(int32_t layers_in, int32_t experts_in)
      : layers(layers_in),
        experts(experts_in),
        counts(static_cast<size_t>(layers_in + 1) * static_cast<size_t>(experts_in), 0) {}

  int32_t layers = 0, experts = 0;
  std::vector<uint64_t> counts;  // [layers + 1][experts]: rows that chose the expert

  uint64_t& At(int32_t layer, int32_t expert) {
    return counts[static_cast<size_t>(layer) * static_cast<size_t>(experts) +
                  static_cast<size_t>(expert)];
  }
};

// The text of such a file. Throws IoError with `path`, line, what was found and expected.
ExpertUsage ParseUsage(std::string_view text, const std::string& path, int32_t layers,
                       int32_t experts);
// nullopt: there is no such file. Throws as ParseUsage.
std::optional<ExpertUsage> ReadUsage(const std::string& path, int32_t layers, int32_t experts);

// Replaces the file as a whole or not at all; counts beyond 32 bits are written as the largest.
// Throws IoError.
void WriteUsage(const std::string& path, const ExpertUsage& usage);

// The share of its layer's turns that uses each expert, indexed as the counts, if `rows` rows of
// `top_k` choices each are routed together and choose as before (PolicyItems::heat). 0 for layers
// without a count.
std::vector<float> HeatOf(const ExpertUsage& usage, int32_t top_k, int32_t rows);

}  // namespace colibri
