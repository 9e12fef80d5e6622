#include "runtime/kv_store.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "io/check.h"

namespace colibri {
namespace {

size_t S(int32_t v) { return static_cast<size_t>(v); }

}  // namespace

KvStore::KvStore(const KvShape& shape, int32_t pages, const KvStreaming& streaming)
    : layout_(shape, pages, streaming),
      index_(layout_.Ids(), shape.page_tokens),
      users_(S(layout_.Ids())),
      place_(S(layout_.Ids())),
      latents_(layout_.ResidentLatentBytes(), "KV pages"),
      index_keys_(layout_.ResidentIndexBytes(), "index key pages"),
      hot_bytes_(layout_.HotBytes(), "hot KV pages"),
      windows_(2 * static_cast<uint64_t>(layout_.Frames()) * layout_.WindowBytes(), "KV windows") {
  // Ascending, and so a heap.
  for (int32_t i = 0; i < layout_.Ids(); ++i) free_.push_back(i);
  if (!Streams()) return;
  hot_ = HotPages(layout_.Ids(), layout_.HotSlots(), layout_.StreamedLayers());
  slot_of_cold_.resize(S(layout_.Ids()));
}

void KvStore::PutFree(int32_t page) {
  if (Streams()) {
    if (hot_.Writing(page)) return;  // CollectWrites puts it
    hot_.Drop(page);
  }
  free_.push_back(page);
  std::push_heap(free_.begin(), free_.end(), std::greater<>());
}

// A known page without users tells nothing any more.
void KvStore::Forget(int32_t page) {
  idle_.erase(place_[S(page)]);
  index_.Remove(page);
  PutFree(page);
}

// One that tells nothing before one that may be asked for again. The known ones are, with those
// that are held, never more than there are pages: the ids beyond are of pages that wait for their
// writes.
int32_t KvStore::TakeFree() {
  if (held_ + static_cast<int32_t>(idle_.size()) == Pages()) Forget(idle_.front());
  COLIBRI_CHECK(!free_.empty());
  std::pop_heap(free_.begin(), free_.end(), std::greater<>());
  const int32_t page = free_.back();
  free_.pop_back();
  if (Streams()) hot_.Take(page);
  return page;
}

void KvStore::Hold(int32_t page) {
  if (users_[S(page)]++ > 0) return;
  ++held_;
  if (index_.Knows(page)) idle_.erase(place_[S(page)]);
}

void KvStore::LetGo(int32_t page) {
  COLIBRI_DCHECK(users_[S(page)] > 0);
  if (--users_[S(page)] > 0) return;
  --held_;
  if (index_.Knows(page)) {
    place_[S(page)] = idle_.insert(idle_.end(), page);
  } else {
    PutFree(page);
  }
}

bool KvStore::Grow(KvPages* pages, int64_t tokens) {
  const auto want = S(PagesFor(tokens));
  if (want <= pages->ids.size()) return true;
  if (want - pages->ids.size() > S(FreePages())) return false;
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
  COLIBRI_DCHECK(FreePages() <= Pages());
}

void KvStore::Shrink(KvPages* pages, int64_t tokens) {
  const auto keep = S(PagesFor(tokens));
  while (pages->ids.size() > keep) {
    LetGo(pages->ids.back());
    pages->ids.pop_back();
  }
  COLIBRI_DCHECK(S(pages->known) <= keep);
}

template <class Visit>
void KvStore::ForEachKnown(std::span<const int32_t> tokens, const Visit& visit) const {
  const auto n = S(Shape().page_tokens);
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
    found.free += users_[S(page)] == 0 ? 1 : 0;
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
  return pages->known * Shape().page_tokens;
}

void KvStore::Publish(KvPages* pages, std::span<const int32_t> tokens) {
  const auto n = S(Shape().page_tokens);
  const size_t full = tokens.size() / n;
  COLIBRI_CHECK(full <= pages->ids.size());
  for (auto i = S(pages->known); i < full; ++i) {
    int32_t& page = pages->ids[i];
    if (Streams() && hot_.Waits(page)) return;
    const uint64_t before = i == 0 ? PrefixIndex::kRoot : index_.Serial(pages->ids[i - 1]);
    if (i > 0 && before == PrefixIndex::kRoot) return;  // that page was lost meanwhile
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
  for (int32_t i = first / Shape().page_tokens; i < PagesFor(int64_t{first} + count); ++i) {
    const int32_t page = pages.ids[S(i)];
    if (index_.Knows(page) || users_[S(page)] != 1) return false;
  }
  return true;
}

std::byte* KvStore::Latents(int32_t layer, int32_t page) const {
  COLIBRI_DCHECK(!layout_.Streamed(layer));
  return latents_.data() + layout_.ResidentLatents(layer, page);
}

std::byte* KvStore::IndexKeys(int32_t layer, int32_t page) const {
  COLIBRI_DCHECK(!layout_.Streamed(layer));
  return index_keys_.data() + layout_.ResidentIndexKeys(layer, page);
}

std::byte* KvStore::Latents(int32_t layer, const PageView& view, KvPlace at) const {
  if (!layout_.Streamed(layer)) return Latents(layer, at.page);
  COLIBRI_DCHECK(view.open);
  if (at.place < 0) return hot_bytes_.data() + layout_.HotLatents(layer, ~at.place);
  return view.windows[layer % 2] + layout_.WindowLatents(at.place);
}

std::byte* KvStore::IndexKeys(int32_t layer, const PageView& view, KvPlace at) const {
  if (!layout_.Streamed(layer)) return IndexKeys(layer, at.page);
  COLIBRI_DCHECK(view.open);
  if (at.place < 0) return hot_bytes_.data() + layout_.HotIndexKeys(layer, ~at.place);
  return view.windows[layer % 2] + layout_.WindowIndexKeys(at.place);
}

uint64_t KvStore::LatentOffset(int32_t position) const {
  const auto in_page = static_cast<uint64_t>(position % Shape().page_tokens);
  return in_page * static_cast<uint64_t>(Shape().latent_width) * KvBytes(Shape().type);
}

uint64_t KvStore::IndexKeyOffset(int32_t position) const {
  const auto in_page = static_cast<uint64_t>(position % Shape().page_tokens);
  return in_page * static_cast<uint64_t>(Shape().index_width) * KvBytes(Shape().type);
}

std::byte* KvStore::LatentAt(int32_t layer, const KvPages& pages, int32_t position) const {
  return Latents(layer, pages.ids[S(position / Shape().page_tokens)]) + LatentOffset(position);
}

std::byte* KvStore::IndexKeyAt(int32_t layer, const KvPages& pages, int32_t position) const {
  return IndexKeys(layer, pages.ids[S(position / Shape().page_tokens)]) + IndexKeyOffset(position);
}

int32_t KvStore::RowsWithin(const KvPages& pages, int32_t stored, int32_t rows,
                            int32_t completed) const {
  if (!Streams()) return rows;
  const int64_t n = Shape().page_tokens;
  const int64_t end_by_writes = (stored / n + completed + 1) * n - 1;
  const int64_t end_by_slots = (static_cast<int64_t>(pages.ids.size()) + hot_.Free()) * n;
  return static_cast<int32_t>(
      std::clamp<int64_t>(std::min(end_by_writes, end_by_slots) - stored, 0, rows));
}

int32_t KvStore::Unwritten(const KvPages& pages, int32_t stored) const {
  if (!Streams()) return 0;
  const int32_t full = stored / Shape().page_tokens;
  int32_t unwritten = 0;
  while (unwritten < full && hot_.Waits(pages.ids[S(full - unwritten - 1)])) ++unwritten;
  return unwritten;
}

void KvStore::CollectWrites() {
  if (!Streams()) return;
  hot_.Collect([this](int32_t page) {
    if (index_.Knows(page) && hot_.Loss(page) != nullptr) {
      if (users_[S(page)] == 0) return Forget(page);
      index_.Remove(page);
    }
    if (users_[S(page)] == 0 && !index_.Knows(page)) PutFree(page);
  });
}

void KvStore::BeginView(PageView* view, int32_t frame) const {
  COLIBRI_CHECK(!view->open);
  view->open = true;
  view->places.clear();
  view->cold.clear();
  view->completed.clear();
  view->lost.clear();
  if (view->places.capacity() == 0) view->places.reserve(layout_.MostPlaces());
  for (int32_t parity = 0; parity < 2; ++parity) {
    view->windows[parity] =
        windows_.data() + static_cast<uint64_t>(2 * frame + parity) * layout_.WindowBytes();
  }
}

// Until EndView the places are ids.
size_t KvStore::AddToView(PageView* view, size_t sequence, const KvPages& pages, int32_t stored,
                          int32_t rows) {
  const size_t first = view->places.size();
  for (const int32_t page : pages.ids) {
    view->places.push_back(page);
    const int32_t slot = hot_.SlotOf(page);
    if (slot != HotPages::kNone) {
      hot_.Pin(slot);
      view->pinned.push_back(slot);
    } else if (const LostPage* loss = hot_.Loss(page); loss != nullptr) {
      view->lost.push_back({sequence, *loss});
    } else {
      view->cold.push_back(page);
    }
  }
  const int32_t n = Shape().page_tokens;
  const int32_t first_due = stored / n - Unwritten(pages, stored);
  for (int32_t i = first_due; i < (stored + rows) / n; ++i) {
    const int32_t page = pages.ids[S(i)];
    hot_.StartWriting(page);
    view->completed.push_back({page, ~hot_.SlotOf(page)});
  }
  return first;
}

void KvStore::EndView(PageView* view) {
  std::sort(view->cold.begin(), view->cold.end());
  view->cold.erase(std::unique(view->cold.begin(), view->cold.end()), view->cold.end());
  COLIBRI_CHECK(view->cold.size() <= S(layout_.WindowPages()));
  COLIBRI_CHECK(view->completed.size() <= S(layout_.MostCompleted()));
  for (size_t i = 0; i < view->cold.size(); ++i) {
    slot_of_cold_[S(view->cold[i])] = static_cast<int32_t>(i);
  }
  for (int32_t& place : view->places) {
    const int32_t slot = hot_.SlotOf(place);
    // Nothing of a lost page is read: its sequences fail.
    const bool lost = slot == HotPages::kNone && hot_.Loss(place) != nullptr;
    place = slot != HotPages::kNone ? ~slot : lost ? 0 : slot_of_cold_[S(place)];
  }
}

void KvStore::CloseView(PageView* view) {
  if (!std::exchange(view->open, false)) return;
  for (const int32_t slot : view->pinned) hot_.Unpin(slot);
  view->pinned.clear();
}

}  // namespace colibri
