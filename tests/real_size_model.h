// A model of GLM-5.2's shapes whose shards hold headers alone, for plans and predictions at real
// size. Threads: made at its first use.
#pragma once

#include "runtime/model_writer.h"
#include "runtime/weights.h"
#include "tests/temp_dir.h"

namespace colibri {

// Headers of GLM-5.2 with int4 weights, without an indexer: the real size.
inline const Model& RealSize() {
  static const TempDir dir;
  static const Model model = [] {
    SyntheticModel m;
    m.layers = 78;
    m.dense_layers = 3;
    m.experts = 256;
    m.hidden = 6144;
    m.intermediate = 12288;
    m.moe_intermediate = 2048;
    m.heads = 64;
    m.q_lora = 2048;
    m.kv_lora = 512;
    m.nope = 192;
    m.rope = 64;
    m.v_head = 256;
    m.vocab = 154880;
    m.indexer = false;
    m.holes = true;
    WriteSyntheticModel(m, dir.Path("model"));
    return Model({dir.Path("model")});
  }();
  return model;
}

}  // namespace colibri
