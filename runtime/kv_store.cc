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

KvStore::KvStore(const KvShape& shape, int32_t pages)
    : shape_(shape),
      pages_(pages),
      index_(pages, shape.page_tokens),
      users_(static_cast<size_t>(pages)),
      place_(static_cast<size_t>(pages)) {
  int32_t indexed = 0;
  for (bool has : shape_.has_index) index_layer_.push_back(has ? indexed++ : -1);
  const auto n = static_cast<uint64_t>(pages);
  latents_ = PopulatedBuffer(n * static_cast<uint64_t>(shape_.layers) * shape_.LatentPageBytes(),
                             "KV pages");
  index_keys_ = PopulatedBuffer(n * static_cast<uint64_t>(indexed) * shape_.IndexPageBytes(),
                                "index key pages");
  for (int32_t i = pages; i-- > 0;) free_.push_back(i);
}

// One that tells nothing before one that may be asked for again.
int32_t KvStore::TakeFree() {
  if (free_.empty()) {
    const int32_t page = idle_.front();
    idle_.pop_front();
    index_.Remove(page);
    return page;
  }
  const int32_t page = free_.back();
  free_.pop_back();
  return page;
}

void KvStore::Hold(int32_t page) {
  const auto p = static_cast<size_t>(page);
  if (users_[p]++ == 0 && index_.Knows(page)) idle_.erase(place_[p]);
}

void KvStore::LetGo(int32_t page) {
  const auto p = static_cast<size_t>(page);
  COLIBRI_DCHECK(users_[p] > 0);
  if (--users_[p] > 0) return;
  if (index_.Knows(page)) {
    place_[p] = idle_.insert(idle_.end(), page);
  } else {
    free_.push_back(page);
  }
}

bool KvStore::Grow(KvPages* pages, int64_t tokens) {
  const auto want = static_cast<size_t>(PagesFor(tokens));
  if (want <= pages->ids.size()) return true;
  if (want - pages->ids.size() > free_.size() + idle_.size()) return false;
  while (pages->ids.size() < want) {
    pages->ids.push_back(TakeFree());
    Hold(pages->ids.back());
  }
  return true;
}

// The last page first: of a chain without users the end is taken before what leads to it.
void KvStore::Release(KvPages* pages) {
  std::for_each(pages->ids.rbegin(), pages->ids.rend(), [this](int32_t page) { LetGo(page); });
  pages->ids.clear();
  pages->known = 0;
  COLIBRI_DCHECK(FreePages() <= pages_);
}

template <class Visit>
void KvStore::ForEachKnown(std::span<const int32_t> tokens, const Visit& visit) const {
  const auto n = static_cast<size_t>(shape_.page_tokens);
  uint64_t before = PrefixIndex::kRoot;
  for (; tokens.size() >= n; tokens = tokens.subspan(n)) {
    const int32_t page = index_.Find(before, tokens.first(n));
    if (page == PrefixIndex::kNone) return;
    visit(page);
    before = index_.Serial(page);
  }
}

KvStore::Prefix KvStore::Find(std::span<const int32_t> tokens) const {
  Prefix found;
  ForEachKnown(tokens, [&](int32_t page) {
    ++found.pages;
    found.free += users_[static_cast<size_t>(page)] == 0 ? 1 : 0;
  });
  return found;
}

int32_t KvStore::Share(KvPages* pages, std::span<const int32_t> tokens) {
  COLIBRI_CHECK(pages->ids.empty());
  ForEachKnown(tokens, [&](int32_t page) {
    Hold(page);
    pages->ids.push_back(page);
  });
  pages->known = static_cast<int32_t>(pages->ids.size());
  return pages->known * shape_.page_tokens;
}

void KvStore::Publish(KvPages* pages, std::span<const int32_t> tokens) {
  const auto n = static_cast<size_t>(shape_.page_tokens);
  const size_t full = tokens.size() / n;
  COLIBRI_CHECK(full <= pages->ids.size());
  for (auto i = static_cast<size_t>(pages->known); i < full; ++i) {
    int32_t& page = pages->ids[i];
    const uint64_t before = i == 0 ? PrefixIndex::kRoot : index_.Serial(pages->ids[i - 1]);
    const auto text = tokens.subspan(i * n, n);
    const int32_t same = index_.Find(before, text);
    if (same == PrefixIndex::kNone) {
      index_.Add(page, before, text);
    } else {
      Hold(same);
      LetGo(page);
      page = same;
    }
    ++pages->known;
  }
}

bool KvStore::Writable(const KvPages& pages, int32_t first, int32_t count) const {
  for (int32_t i = first / shape_.page_tokens; i < PagesFor(int64_t{first} + count); ++i) {
    const int32_t page = pages.ids[static_cast<size_t>(i)];
    if (index_.Knows(page) || users_[static_cast<size_t>(page)] != 1) return false;
  }
  return true;
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
