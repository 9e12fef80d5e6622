// `colibri-bench quality`: perplexity of text or id files for chosen activations, KV types and
// attention, side by side. Runs the sequential engine's stages on all threads.
// Threads: one call at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace colibri {

struct QualityOptions {
  std::vector<std::string> model;
  // Windows: .jsonl files with an "ids" array a line, taken as they stand; other files are text,
  // cut into windows of `window` ids that begin with the model's prefix.
  std::vector<std::string> files;
  int32_t window = 1024;
  int32_t max_windows = 0;  // 0: all
  bool dense_attention = false;
  // Side by side: every KV type with every kind of activations (true: int8 where taken).
  std::vector<KvType> kv = {KvType::kBF16, KvType::kF32};
  std::vector<bool> int8 = {true, false};
  std::string reference;  // a reference.json whose perplexities are printed beside ours
  int32_t rows = 64;
  int32_t threads = 0;
  bool json = false;
};

struct QualityResult {
  KvType kv = KvType::kBF16;
  bool int8 = true;
  double perplexity = 0;
  int64_t predictions = 0;
  double seconds = 0;
  uint64_t bytes_read = 0;
};

// One result for each of options.int8 and options.kv. Throws ModelError, IoError.
std::vector<QualityResult> MeasureQuality(const QualityOptions& options);
int RunQuality(const QualityOptions& options);

}  // namespace colibri
