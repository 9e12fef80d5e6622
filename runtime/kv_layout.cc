#include "runtime/kv_layout.h"

#include <algorithm>

#include "io/reader.h"
#include "runtime/prefix_index.h"

namespace colibri {
namespace {

// Of each page, besides what the prefix index takes: lists of free and idle ones, users, hot slots.
constexpr uint64_t kAccountBytes = 64;

size_t S(int32_t v) { return static_cast<size_t>(v); }
uint64_t N(int32_t v) { return static_cast<uint64_t>(v); }

uint64_t Aligned(uint64_t bytes) { return (bytes + kIoAlign - 1) / kIoAlign * kIoAlign; }

}  // namespace

uint64_t KvShape::LatentPageBytes() const {
  return N(page_tokens) * N(latent_width) * KvBytes(type);
}

uint64_t KvShape::IndexPageBytes() const { return N(page_tokens) * N(index_width) * KvBytes(type); }

uint64_t KvShape::PageBytes() const {
  const auto indexed = std::count(has_index.begin(), has_index.end(), true);
  return N(layers) * LatentPageBytes() + static_cast<uint64_t>(indexed) * IndexPageBytes();
}

KvShape KvShapeOf(const Model& model, int32_t page_tokens, KvType type) {
  const ModelConfig& c = model.Config();
  KvShape shape;
  shape.layers = model.LayerCount();
  shape.latent_width = c.KvWidth();
  shape.index_width = model.HasIndexer() ? c.index_dim : 0;
  for (int32_t i = 0; i < shape.layers; ++i) {
    shape.has_index.push_back(model.HasIndexer() && c.FullIndexer(i));
  }
  shape.page_tokens = page_tokens;
  shape.type = type;
  return shape;
}

KvStreaming KvStreamingOf(const Model& model, int32_t ram_layers, int32_t frames, int32_t rows,
                          int32_t sequences, int32_t context) {
  const int32_t layers = model.Config().layers;
  return {std::clamp(ram_layers, 0, layers), layers, frames, rows, sequences, context};
}

KvLayout::KvLayout(const KvShape& shape, int32_t pages, const KvStreaming& streaming)
    : shape_(shape), streaming_(streaming), pages_(pages), ids_(pages) {
  resident_before_ = index_before_ = streamed_index_before_ = {0};
  for (int32_t layer = 0; layer < shape.layers; ++layer) {
    const int32_t streamed = Streamed(layer) ? 1 : 0, indexed = HasIndex(layer) ? 1 : 0;
    resident_before_.push_back(resident_before_.back() + 1 - streamed);
    index_before_.push_back(index_before_.back() + (1 - streamed) * indexed);
    streamed_index_before_.push_back(streamed_index_before_.back() + streamed * indexed);
  }
  if (!Streams()) return;
  // Twice what prompts of a whole frame complete; or, where many answers grow in step, an eighth of
  // them, which puts them out of step.
  most_completed_ = std::max(2 * streaming.rows / shape.page_tokens, streaming.sequences / 8) + 2;
  const int32_t written = 2 * streaming.frames * most_completed_;
  hot_slots_ = streaming.sequences + written;
  ids_ = pages + written;
  latent_stride_ = Aligned(shape.LatentPageBytes());
  index_stride_ = Aligned(shape.IndexPageBytes());
  file_bytes_ = N(ids_) * (N(StreamedLayers()) * latent_stride_ +
                           N(streamed_index_before_.back()) * index_stride_);
}

uint64_t KvLayout::MostPlaces() const {
  return N(streaming_.sequences) *
         N((streaming_.context + shape_.page_tokens - 1) / shape_.page_tokens);
}

uint64_t KvLayout::ResidentLatentBytes() const {
  return N(resident_before_.back()) * N(ids_) * shape_.LatentPageBytes();
}

uint64_t KvLayout::ResidentIndexBytes() const {
  return N(index_before_.back()) * N(ids_) * shape_.IndexPageBytes();
}

uint64_t KvLayout::HotBytes() const {
  return N(hot_slots_) *
         (N(StreamedLayers()) * latent_stride_ + N(streamed_index_before_.back()) * index_stride_);
}

uint64_t KvLayout::WindowBytes() const {
  if (!Streams()) return 0;
  return N(WindowPages()) *
         (latent_stride_ + (streamed_index_before_.back() > 0 ? index_stride_ : 0));
}

uint64_t KvLayout::MemoryBytes() const {
  const uint64_t places = Streams() ? N(Frames()) * MostPlaces() * sizeof(int32_t) : 0;
  return ResidentLatentBytes() + ResidentIndexBytes() + HotBytes() +
         2 * N(Frames()) * WindowBytes() + places +
         N(ids_) * (PrefixIndex::PageBytes(shape_.page_tokens) + kAccountBytes);
}

uint64_t KvLayout::ResidentLatents(int32_t layer, int32_t page) const {
  return (N(resident_before_[S(layer)]) * N(ids_) + N(page)) * shape_.LatentPageBytes();
}

uint64_t KvLayout::ResidentIndexKeys(int32_t layer, int32_t page) const {
  return (N(index_before_[S(layer)]) * N(ids_) + N(page)) * shape_.IndexPageBytes();
}

uint64_t KvLayout::HotLatents(int32_t layer, int32_t slot) const {
  return (N(layer - streaming_.first) * N(hot_slots_) + N(slot)) * latent_stride_;
}

uint64_t KvLayout::HotIndexKeys(int32_t layer, int32_t slot) const {
  return N(StreamedLayers()) * N(hot_slots_) * latent_stride_ +
         (N(streamed_index_before_[S(layer)]) * N(hot_slots_) + N(slot)) * index_stride_;
}

uint64_t KvLayout::WindowLatents(int32_t slot) const { return N(slot) * latent_stride_; }

uint64_t KvLayout::WindowIndexKeys(int32_t slot) const {
  return N(WindowPages()) * latent_stride_ + N(slot) * index_stride_;
}

uint64_t KvLayout::FileLatents(int32_t layer, int32_t page) const {
  return (N(layer - streaming_.first) * N(ids_) + N(page)) * latent_stride_ +
         N(streamed_index_before_[S(layer)]) * N(ids_) * index_stride_;
}

uint64_t KvLayout::FileIndexKeys(int32_t layer, int32_t page) const {
  return FileLatents(layer, 0) + N(ids_) * latent_stride_ + N(page) * index_stride_;
}

}  // namespace colibri
