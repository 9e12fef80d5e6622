// The list of all dense tensors of a model. For runtime/weights*.cc only; runtime/weights.h is the
// interface.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/weights.h"
#include "runtime/weights_visit.h"

namespace colibri {

struct Model::Dense {
  // Passes on what stays in memory.
  template <class Visitor>
  struct Filter {
    const ModelConfig& config;
    const DenseResidents& residents;
    Visitor& visit;

    bool Held(int32_t layer) const { return layer < config.layers || residents.mtp; }
    void Matrix(int32_t layer, const std::string& name, int64_t rows, int64_t cols,
                PackedMatrix& m) const {
      const bool in_block = layer >= 0 && layer < config.layers && name != kRouterName;
      if (!Held(layer) || (in_block && layer >= residents.layers)) return;
      const bool whole =
          name == kEmbeddingName ? residents.embedding : name != kHeadName || residents.head;
      visit.Matrix(layer, name, rows, cols, m, whole);
    }
    void Vector(int32_t layer, const std::string& name, int64_t size, std::vector<float>& v) const {
      if (Held(layer)) visit.Vector(layer, name, size, v);
    }
  };

  // Calls the visitor (runtime/weights_visit.h) for every dense tensor of the model.
  template <class Visitor>
  static void Visit(Model& m, Visitor&& visit) {
    const ModelConfig& c = m.config_;
    visit.Matrix(-1, std::string(kEmbeddingName), c.vocab, c.hidden, m.embedding_);
    visit.Matrix(-1, std::string(kHeadName), c.vocab, c.hidden, m.head_);
    visit.Vector(-1, "model.norm.weight", c.hidden, m.final_norm_);
    for (int32_t layer = 0; layer < m.LayerCount(); ++layer) {
      VisitLayer(c, layer, m.layers_[static_cast<size_t>(layer)], visit);
    }
    if (m.mtp_) VisitMtp(c, *m.mtp_, visit);
  }
  // The same for what `residents` keep in memory. Matrix() gets one more argument: false where only
  // the scales stay.
  template <class Visitor>
  static void VisitResident(Model& m, const DenseResidents& residents, Visitor&& visit) {
    Visit(m, Filter<Visitor>{m.config_, residents, visit});
  }
  // Bytes of the arena, and of it, vectors and tables together.
  static uint64_t ArenaBytes(const Model& m, const DenseResidents& residents);
  static uint64_t TotalBytes(const Model& m, const DenseResidents& residents);
  // Lays out the blocks of all layers, and the parts of the head.
  static void MakeBlocks(Model& m);
  static void MakeHeadBlocks(Model& m);
};

}  // namespace colibri
