// Writes synthetic models: random weights of given dimensions in the container's real layout, for
// measurements at any size and for tests. Nothing that answers questions comes out of it.
// Threads: one.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "kernels/weight_format.h"

namespace colibri {

// Defaults: small enough for a laptop's disk (0.5 GB), large enough to be read in many extents.
struct SyntheticModel {
  int32_t layers = 8, dense_layers = 1;
  int32_t experts = 64, top_k = 8, shared_experts = 1;
  int32_t hidden = 1024, intermediate = 2048, moe_intermediate = 512;
  int32_t heads = 16, q_lora = 512, kv_lora = 256, nope = 64, rope = 32, v_head = 64;
  int32_t index_heads = 8, index_dim = 64, index_top_k = 2048;
  int32_t vocab = 4096, max_positions = 8192;
  // kInt8Row, kInt4Row or kInt4Grouped (groups of 64). Embedding, head, indexer and the MTP layer
  // are int8 per row, norms and router F32, as in the published containers.
  WeightFormat expert_format = WeightFormat::kInt4Grouped;
  WeightFormat dense_format = WeightFormat::kInt4Grouped;
  bool mtp = true;
  bool indexer = true;
  // Published shards have 2.7 GB; a shard ends with the first tensor that reaches the limit.
  uint64_t shard_bytes = 2'700'000'000;
  uint64_t seed = 1;
  // Zeros that take no room on the drive in place of weights: for plans of a model of any size.
  bool holes = false;
  // A model directory whose tokenizer.json, tokenizer_config.json and generation_config.json are
  // copied and whose end tokens are taken; "" for none.
  std::string tokenizer_from;
};

// A finished shard: its path and bytes.
using ShardWritten = std::function<void(const std::string& path, uint64_t bytes)>;

// Writes config.json, the shards out-*, out-mtp-* and out-idx-* (no index file) and the copies into
// `directory`, which must not exist or be empty; returns the bytes of the shards. Every tensor
// depends on seed, name and dimensions only, so the shard size changes no value. Memory: two
// megabytes and the names of one shard. Throws UsageError for impossible dimensions, IoError.
uint64_t WriteSyntheticModel(const SyntheticModel& model, const std::string& directory,
                             const ShardWritten& written = nullptr);

}  // namespace colibri
