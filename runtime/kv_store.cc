#include "runtime/kv_store.h"

#include <algorithm>

#include "io/check.h"

namespace colibri {

uint64_t KvShape::LatentPageBytes() const {
  return static_cast<uint64_t>(page_tokens) * static_cast<uint64_t>(latent_width) * KvBytes(type);
}

uint64_t KvShape::IndexPageBytes() const {
  return static_cast<uint64_t>(page_tokens) * static_cast<uint64_t>(index_width) * KvBytes(type);
}

uint64_t KvShape::PageBytes() const {
  const auto indexed = std::count(has_index.begin(), has_index.end(), true);
  return static_cast<uint64_t>(layers) * LatentPageBytes() +
         static_cast<uint64_t>(indexed) * IndexPageBytes();
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

KvStore::KvStore(const KvShape& shape, int32_t pages) : shape_(shape), pages_(pages) {
  int32_t indexed = 0;
  for (bool has : shape_.has_index) index_layer_.push_back(has ? indexed++ : -1);
  const auto n = static_cast<uint64_t>(pages);
  latents_ = PopulatedBuffer(n * static_cast<uint64_t>(shape_.layers) * shape_.LatentPageBytes(),
                             "KV pages");
  index_keys_ = PopulatedBuffer(n * static_cast<uint64_t>(indexed) * shape_.IndexPageBytes(),
                                "index key pages");
  for (int32_t i = pages; i-- > 0;) free_.push_back(i);
}

bool KvStore::Grow(KvPages* pages, int64_t tokens) {
  const auto want = static_cast<size_t>(PagesFor(tokens));
  if (want <= pages->ids.size()) return true;
  if (want - pages->ids.size() > free_.size()) return false;
  while (pages->ids.size() < want) {
    pages->ids.push_back(free_.back());
    free_.pop_back();
  }
  return true;
}

void KvStore::Release(KvPages* pages) {
  free_.insert(free_.end(), pages->ids.rbegin(), pages->ids.rend());
  pages->ids.clear();
  COLIBRI_DCHECK(free_.size() <= static_cast<size_t>(pages_));
}

std::byte* KvStore::Latents(int32_t layer, int32_t page) const {
  const auto at =
      static_cast<uint64_t>(layer) * static_cast<uint64_t>(pages_) + static_cast<uint64_t>(page);
  return latents_.data() + at * shape_.LatentPageBytes();
}

std::byte* KvStore::IndexKeys(int32_t layer, int32_t page) const {
  const auto number = static_cast<uint64_t>(index_layer_[static_cast<size_t>(layer)]);
  const auto at = number * static_cast<uint64_t>(pages_) + static_cast<uint64_t>(page);
  return index_keys_.data() + at * shape_.IndexPageBytes();
}

std::byte* KvStore::LatentAt(int32_t layer, const KvPages& pages, int32_t position) const {
  const int32_t page = pages.ids[static_cast<size_t>(position / shape_.page_tokens)];
  const auto in_page = static_cast<uint64_t>(position % shape_.page_tokens);
  return Latents(layer, page) +
         in_page * static_cast<uint64_t>(shape_.latent_width) * KvBytes(shape_.type);
}

std::byte* KvStore::IndexKeyAt(int32_t layer, const KvPages& pages, int32_t position) const {
  const int32_t page = pages.ids[static_cast<size_t>(position / shape_.page_tokens)];
  const auto in_page = static_cast<uint64_t>(position % shape_.page_tokens);
  return IndexKeys(layer, page) +
         in_page * static_cast<uint64_t>(shape_.index_width) * KvBytes(shape_.type);
}

}  // namespace colibri
