// Where keys and values lie: in memory for the first layers, for the streamed ones in a file, with
// hot slots for pages that are being filled and two windows a frame for those that it reads.
// Threads: pure.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/weights.h"

namespace colibri {

inline constexpr int32_t kDefaultPageTokens = 32;

struct KvShape {
  int32_t layers = 0;           // the MTP layer included
  int32_t latent_width = 0;     // kv_lora + rope
  int32_t index_width = 0;      // index_dim, or 0 without indexers
  std::vector<bool> has_index;  // [layers]
  int32_t page_tokens = kDefaultPageTokens;
  KvType type = KvType::kBF16;

  uint64_t LatentPageBytes() const;
  uint64_t IndexPageBytes() const;
  // One page in all layers.
  uint64_t PageBytes() const;
};

KvShape KvShapeOf(const Model& model, int32_t page_tokens, KvType type);

// Pages of layers [first, end) are on the drive; first == end: none are. The first layers stay in
// memory rather than the last ones, since a sweep's first has nothing to be read behind.
struct KvStreaming {
  int32_t first = 0, end = 0;
  int32_t frames = 1, rows = 1, sequences = 1, context = 0;  // as the scheduler has them

  int32_t Layers() const { return end - first; }
};

// All but the first `ram_layers` main layers. The MTP layer's pages stay in memory.
KvStreaming KvStreamingOf(const Model& model, int32_t ram_layers, int32_t frames, int32_t rows,
                          int32_t sequences, int32_t context);

// Sizes and offsets of a store with `pages` pages for its sequences.
class KvLayout {
 public:
  KvLayout() = default;
  KvLayout(const KvShape& shape, int32_t pages, const KvStreaming& streaming);

  const KvShape& Shape() const { return shape_; }
  int32_t Pages() const { return pages_; }
  // Page ids: some more than pages, so that one that is given back while it is still being written
  // can wait.
  int32_t Ids() const { return ids_; }
  int32_t Frames() const { return streaming_.frames; }
  bool Streams() const { return streaming_.Layers() > 0; }
  bool Streamed(int32_t layer) const { return layer >= streaming_.first && layer < streaming_.end; }
  int32_t FirstStreamed() const { return streaming_.first; }
  int32_t StreamedLayers() const { return streaming_.Layers(); }
  bool HasIndex(int32_t layer) const { return shape_.has_index[static_cast<size_t>(layer)]; }
  // Pages that one frame may complete, so that the hot slots suffice: one is being filled for each
  // sequence, others wait for the writes of each frame's last two sweeps.
  int32_t MostCompleted() const { return most_completed_; }
  int32_t HotSlots() const { return hot_slots_; }
  // Pages that all sequences of a frame can hold in its windows, and in its list of places.
  int32_t WindowPages() const { return pages_; }
  uint64_t MostPlaces() const;

  uint64_t ResidentLatentBytes() const;
  uint64_t ResidentIndexBytes() const;
  uint64_t HotBytes() const;
  uint64_t WindowBytes() const;  // one of them
  uint64_t FileBytes() const { return file_bytes_; }
  // All memory, the account of pages and their prefixes included (220 bytes a page of 32 tokens).
  uint64_t MemoryBytes() const;
  uint64_t StreamedPageBytes() const { return file_bytes_ / static_cast<uint64_t>(ids_); }

  // Offsets: of a page in the resident arenas, of a hot slot, of a window's slot, in the file.
  uint64_t ResidentLatents(int32_t layer, int32_t page) const;
  uint64_t ResidentIndexKeys(int32_t layer, int32_t page) const;
  uint64_t HotLatents(int32_t layer, int32_t slot) const;
  uint64_t HotIndexKeys(int32_t layer, int32_t slot) const;
  uint64_t WindowLatents(int32_t slot) const;
  uint64_t WindowIndexKeys(int32_t slot) const;
  uint64_t FileLatents(int32_t layer, int32_t page) const;
  uint64_t FileIndexKeys(int32_t layer, int32_t page) const;
  // From one page to the next in hot slots, windows and file: whole blocks of kIoAlign.
  uint64_t LatentStride() const { return latent_stride_; }
  uint64_t IndexStride() const { return index_stride_; }

 private:
  KvShape shape_;
  KvStreaming streaming_;
  int32_t pages_ = 0, ids_ = 0, most_completed_ = 0, hot_slots_ = 0;
  // Among layers with index keys, those resident and those streamed before each layer.
  std::vector<int32_t> resident_before_, index_before_, streamed_index_before_;
  uint64_t latent_stride_ = 0, index_stride_ = 0, file_bytes_ = 0;
};

}  // namespace colibri
