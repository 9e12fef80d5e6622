// The dense tensors of a model, named, with the shapes that the configuration gives them. One list
// for resolving, measuring and loading. For runtime/weights*.cc and the model writer only.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/config.h"
#include "runtime/weights.h"

namespace colibri {

inline std::string LayerPrefix(int32_t layer) {
  return "model.layers." + std::to_string(layer) + ".";
}

inline constexpr std::string_view kEmbeddingName = "model.embed_tokens.weight";
inline constexpr std::string_view kHeadName = "lm_head.weight";
inline constexpr std::string_view kRouterName = "mlp.gate.weight";

// The visitor has Matrix(layer, name, rows, cols, PackedMatrix&) and
// Vector(layer, name, size, std::vector<float>&); `name` is without the layer's prefix, and layer
// is -1 for tensors outside the layers.
template <class Visitor>
void VisitIndexer(const ModelConfig& c, int32_t layer, IndexerWeights& w, Visitor&& visit) {
  const std::string p = "self_attn.indexer.";
  visit.Matrix(layer, p + "wq_b.weight", int64_t{c.index_heads} * c.index_dim, c.q_lora, w.wq_b);
  visit.Matrix(layer, p + "wk.weight", c.index_dim, c.hidden, w.wk);
  visit.Matrix(layer, p + "weights_proj.weight", c.index_heads, c.hidden, w.weights_proj);
  visit.Vector(layer, p + "k_norm.weight", c.index_dim, w.k_norm_weight);
  visit.Vector(layer, p + "k_norm.bias", c.index_dim, w.k_norm_bias);
}

template <class Visitor>
void VisitFfn(const ModelConfig& c, int32_t layer, const std::string& prefix, int64_t width,
              FfnWeights& w, Visitor&& visit) {
  visit.Matrix(layer, prefix + "gate_proj.weight", width, c.hidden, w.gate);
  visit.Matrix(layer, prefix + "up_proj.weight", width, c.hidden, w.up);
  visit.Matrix(layer, prefix + "down_proj.weight", c.hidden, width, w.down);
}

// Everything of a layer but routed experts; the indexer if `w` has one.
template <class Visitor>
void VisitLayer(const ModelConfig& c, int32_t layer, LayerWeights& w, Visitor&& visit) {
  const std::string p = "self_attn.";
  const int64_t heads = c.heads;
  visit.Vector(layer, "input_layernorm.weight", c.hidden, w.input_norm);
  visit.Vector(layer, "post_attention_layernorm.weight", c.hidden, w.post_norm);
  visit.Matrix(layer, p + "q_a_proj.weight", c.q_lora, c.hidden, w.q_a);
  visit.Vector(layer, p + "q_a_layernorm.weight", c.q_lora, w.q_a_norm);
  visit.Matrix(layer, p + "q_b_proj.weight", heads * c.QkHead(), c.q_lora, w.q_b);
  visit.Matrix(layer, p + "kv_a_proj_with_mqa.weight", c.KvWidth(), c.hidden, w.kv_a);
  visit.Vector(layer, p + "kv_a_layernorm.weight", c.kv_lora, w.kv_a_norm);
  visit.Matrix(layer, p + "kv_b_proj.weight", heads * (c.nope + c.v_head), c.kv_lora, w.kv_b);
  visit.Matrix(layer, p + "o_proj.weight", c.hidden, heads * c.v_head, w.o);
  if (w.indexer) VisitIndexer(c, layer, *w.indexer, visit);
  if (!c.Sparse(layer)) {
    VisitFfn(c, layer, "mlp.", c.intermediate, w.ffn, visit);
    return;
  }
  VisitFfn(c, layer, "mlp.shared_experts.", int64_t{c.moe_intermediate} * c.shared_experts, w.ffn,
           visit);
  visit.Matrix(layer, std::string(kRouterName), c.experts, c.hidden, w.router);
  visit.Vector(layer, "mlp.gate.e_score_correction_bias", c.experts, w.router_bias);
}

// The matrices of a layer's block (DenseBlock): visit(name, matrix).
template <class Visit>
void VisitBlock(const ModelConfig& c, int32_t layer, LayerWeights& w, Visit&& visit) {
  struct Matrices {
    Visit& visit;
    void Matrix(int32_t, const std::string& name, int64_t, int64_t, PackedMatrix& m) const {
      if (name != kRouterName) visit(name, m);
    }
    void Vector(int32_t, const std::string&, int64_t, std::vector<float>&) const {}
  };
  VisitLayer(c, layer, w, Matrices{visit});
}

// What the MTP layer has besides a layer's tensors.
template <class Visitor>
void VisitMtp(const ModelConfig& c, MtpWeights& w, Visitor&& visit) {
  visit.Vector(c.layers, "enorm.weight", c.hidden, w.enorm);
  visit.Vector(c.layers, "hnorm.weight", c.hidden, w.hnorm);
  visit.Vector(c.layers, "shared_head.norm.weight", c.hidden, w.head_norm);
  visit.Matrix(c.layers, "eh_proj.weight", c.hidden, int64_t{2} * c.hidden, w.eh_proj);
}

}  // namespace colibri
