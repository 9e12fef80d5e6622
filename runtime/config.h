// The model's configuration from config.json and generation_config.json, checked before anything
// else is read (model spec 1). Every value that changes the maths must be in the file: nothing
// falls back silently. Threads: plain data.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace colibri {

// Sampling defaults of the vendor; absent when generation_config.json does not say.
struct GenerationDefaults {
  std::optional<float> temperature, top_p;
  std::optional<int32_t> top_k;
};

struct ModelConfig {
  int32_t vocab = 0, hidden = 0, layers = 0;  // the MTP layer is layer number `layers`
  int32_t heads = 0, q_lora = 0, kv_lora = 0, nope = 0, rope = 0, v_head = 0;
  int32_t intermediate = 0, moe_intermediate = 0;
  int32_t experts = 0, top_k = 0, shared_experts = 0, groups = 1, top_groups = 1;
  float routed_scale = 1;
  bool norm_top_k = false;
  int32_t index_heads = 0, index_dim = 0, index_top_k = 0;
  bool index_share_for_mtp = false;
  float rms_eps = 0;
  float latent_eps = 0;  // rms_eps unless a caller says otherwise (model spec 3.2)
  float rope_theta = 0;
  int32_t max_positions = 0;
  std::vector<bool> sparse;        // [layers] MoE, else a dense FFN
  std::vector<bool> full_indexer;  // [layers] computes its own index set, else reuses the last one
  bool mtp = false;                // the config announces an MTP layer
  std::vector<int32_t> stop_ids;   // config and generation config together, ascending
  GenerationDefaults generation;

  int32_t QkHead() const { return nope + rope; }
  int32_t KvWidth() const { return kv_lora + rope; }
  // Layer kinds with the MTP layer (index `layers`) included: sparse and with its own indexer.
  bool Sparse(int32_t layer) const { return layer >= layers || sparse[static_cast<size_t>(layer)]; }
  bool FullIndexer(int32_t layer) const {
    return layer >= layers || full_indexer[static_cast<size_t>(layer)];
  }
};

// Parses the texts. `path` is for messages. Throws ModelError "<path>: key = value found, ...
// expected".
ModelConfig ParseConfig(std::string_view config_json, std::string_view generation_json,
                        const std::string& path);
// Reads DIR/config.json (required) and DIR/generation_config.json (optional).
ModelConfig LoadConfig(const std::string& directory);

}  // namespace colibri
