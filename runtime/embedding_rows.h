// The embedding's rows where the table is not in memory: those of a frame's tokens are read when it
// has been filled, each token's once, and become the residual stream when layer 0 begins.
// Threads: as LayerSupplier says; the reader's callbacks from its I/O thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "io/memory.h"
#include "io/reader.h"
#include "runtime/dense_stream.h"
#include "runtime/layer_supplier.h"
#include "runtime/weights.h"

namespace colibri {

class EmbeddingRows final : public LayerSupplier {
 public:
  // `model` is loaded without the embedding. Model and reader outlive the object, which is the
  // reader's only user; the reader has been stopped when the object is destroyed.
  EmbeddingRows(const Model& model, Reader& reader, int32_t frames, int32_t rows);

  // What it takes from memory.
  static uint64_t Bytes(const Model& model, int32_t frames, int32_t rows);

  void Start(Arrived arrived) override;
  void Prepare(Frame& frame, int32_t layer) override;
  bool Await(Frame& frame, int32_t layer) override;
  void Begin(Frame& frame, int32_t layer) override;
  DenseStats Stats() const;

 private:
  // Of one frame. The tokens are the frame owner's; the rest is under the lock while reads are out.
  struct Rows {
    std::vector<int32_t> tokens;  // distinct, ascending; number i is read into slot i
    std::vector<Extent> extents;
    std::vector<ReadResult> results;
    size_t missing = 0;
    bool waiting = false;
  };

  void Done(uint64_t id, const ReadResult& result);
  std::byte* Slot(size_t frame, size_t number) const;

  const Model& model_;
  Reader& reader_;
  const TensorEntry& table_;
  const uint64_t slot_bytes_;
  const size_t rows_;  // slots of a frame
  PopulatedBuffer buffer_;
  Arrived arrived_;

  mutable std::mutex mutex_;  // taken before any lock of the reader
  std::vector<Rows> frames_;
  DenseStats stats_;
};

}  // namespace colibri
