// The stored keys and values of all sequences: for each layer latents with rope keys (one arena)
// and, for layers with an indexer of their own, index keys (another), cut into pages of
// `page_tokens` positions. A page id means the same page in every layer, so that a sequence is a
// list of ids. A page whose positions are all stored may be published: it is then known by its
// tokens and those before it, is never written again, and further sequences hold it by reference.
// Known pages that nobody holds any more stay so until they are wanted, the longest unused first;
// they count as free. Threads: Grow, Share, Publish and Release under the scheduler's lock; page
// bytes by whoever owns the sequence's rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <vector>

#include "io/memory.h"
#include "kernels/kernels.h"
#include "runtime/prefix_index.h"
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

// A sequence's pages, first position first.
struct KvPages {
  std::vector<int32_t> ids;
  int32_t known = 0;  // of them, the first ones: published, and perhaps held by others too
};

class KvStore {
 public:
  KvStore(const KvShape& shape, int32_t pages);

  const KvShape& Shape() const { return shape_; }
  int32_t FreePages() const { return static_cast<int32_t>(free_.size() + idle_.size()); }
  int32_t Pages() const { return pages_; }
  int32_t PagesFor(int64_t tokens) const {
    return static_cast<int32_t>((tokens + shape_.page_tokens - 1) / shape_.page_tokens);
  }

  // Extends `pages` to hold `tokens` positions. False, and nothing taken, when too few are free.
  bool Grow(KvPages* pages, int64_t tokens);
  void Release(KvPages* pages);

  // The known pages that hold the first of `tokens`, and how many of them are free as long as
  // nobody takes them.
  struct Prefix {
    int32_t pages = 0, free = 0;
  };
  Prefix Find(std::span<const int32_t> tokens) const;
  // Takes those pages into `pages`, which are none yet. Returns the positions that they hold.
  int32_t Share(KvPages* pages, std::span<const int32_t> tokens);
  // The pages' first tokens.size() positions are stored: full pages are known from now on. Where
  // another sequence stored the same meanwhile, its page, with the same bytes, takes their place.
  void Publish(KvPages* pages, std::span<const int32_t> tokens);
  // Whether positions [first, first + count) lie in pages that this sequence alone may write to.
  bool Writable(const KvPages& pages, int32_t first, int32_t count) const;

  std::byte* Latents(int32_t layer, int32_t page) const;
  std::byte* IndexKeys(int32_t layer, int32_t page) const;
  // Where position `position` is stored.
  std::byte* LatentAt(int32_t layer, const KvPages& pages, int32_t position) const;
  std::byte* IndexKeyAt(int32_t layer, const KvPages& pages, int32_t position) const;

 private:
  template <class Visit>
  void ForEachKnown(std::span<const int32_t> tokens, const Visit& visit) const;
  void Hold(int32_t page);
  void LetGo(int32_t page);
  int32_t TakeFree();

  KvShape shape_;
  int32_t pages_ = 0;
  std::vector<int32_t> index_layer_;  // layer -> number among layers with index keys
  std::vector<int32_t> free_;         // not known
  PrefixIndex index_;
  std::vector<int32_t> users_;  // [pages]
  std::list<int32_t> idle_;     // known, without users; the longest unused first
  std::vector<std::list<int32_t>::iterator> place_;  // [pages] in idle_
  PopulatedBuffer latents_, index_keys_;
};

}  // namespace colibri
