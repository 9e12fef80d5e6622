// The list of all dense tensors of a model. For runtime/weights*.cc only; runtime/weights.h is the
// interface.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/weights.h"
#include "runtime/weights_visit.h"

namespace colibri {

struct Model::Dense {
  // Calls the visitor (runtime/weights_visit.h) for every dense tensor of the model.
  template <class Visitor>
  static void Visit(Model& m, Visitor&& visit) {
    const ModelConfig& c = m.config_;
    visit.Matrix(-1, "model.embed_tokens.weight", c.vocab, c.hidden, m.embedding_);
    visit.Matrix(-1, "lm_head.weight", c.vocab, c.hidden, m.head_);
    visit.Vector(-1, "model.norm.weight", c.hidden, m.final_norm_);
    for (int32_t layer = 0; layer < m.LayerCount(); ++layer) {
      VisitLayer(c, layer, m.layers_[static_cast<size_t>(layer)], visit);
    }
    if (m.mtp_) VisitMtp(c, *m.mtp_, visit);
  }
  // Bytes of the arena, and of it, vectors and tables together.
  static uint64_t ArenaBytes(Model& m);
  static uint64_t TotalBytes(Model& m);
};

}  // namespace colibri
