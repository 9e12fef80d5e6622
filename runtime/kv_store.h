// The stored keys and values of all sequences: for each layer latents with rope keys (one arena)
// and, for layers with an indexer of their own, index keys (another), cut into pages of
// `page_tokens` positions. A page id means the same page in every layer, so that a sequence is a
// list of ids. A page whose positions are all stored may be published: it is then known by its
// tokens and those before it, is never written again, and further sequences hold it by reference.
// Known pages that nobody holds any more stay so until they are wanted, the longest unused first;
// they count as free.
//
// Layers may be streamed (runtime/kv_layout.h): their pages are on the drive, but for hot ones
// (runtime/kv_hot.h), and a frame reads the others, the cold ones, into its windows, layer by layer
// (runtime/kv_stream.h). Which page is where is fixed for a frame when it is filled: its view.
// Threads: Grow, Share, Publish, Release and everything about views under the scheduler's lock;
// page bytes by whoever owns the sequence's rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <vector>

#include "io/memory.h"
#include "runtime/kv_hot.h"
#include "runtime/kv_layout.h"
#include "runtime/prefix_index.h"

namespace colibri {

// A sequence's pages, first position first.
struct KvPages {
  std::vector<int32_t> ids;
  int32_t known = 0;  // of them, the first ones: published, and perhaps held by others too
};

// A page of a frame's sequence: its id and, in streamed layers, its place: the slot in the window
// of a cold one, ~slot of a hot one.
struct KvPlace {
  int32_t page = 0, place = 0;
};

// Where a frame finds the pages of its sequences in streamed layers.
struct PageView {
  // A page that was lost, and whose: the number of the sequence in the frame.
  struct Lost {
    size_t sequence = 0;
    LostPage page;
  };
  std::vector<int32_t> places;     // of all pages of all sequences, one after another
  std::vector<int32_t> cold;       // pages, ascending: the windows' slots
  std::vector<int32_t> pinned;     // hot slots
  std::vector<KvPlace> completed;  // hot ones that the frame's rows fill
  std::vector<Lost> lost;
  std::byte* windows[2] = {nullptr, nullptr};  // of even and of odd layers
  bool open = false;
};

class KvStore {
 public:
  KvStore(const KvShape& shape, int32_t pages, const KvStreaming& streaming = {});

  const KvShape& Shape() const { return layout_.Shape(); }
  const KvLayout& Layout() const { return layout_; }
  // Pages that may still be held.
  int32_t FreePages() const { return Pages() - held_; }
  int32_t Pages() const { return layout_.Pages(); }
  int32_t PagesFor(int64_t tokens) const {
    return static_cast<int32_t>((tokens + Shape().page_tokens - 1) / Shape().page_tokens);
  }

  // Extends `pages` to hold `tokens` positions. False, and nothing taken, when too few are free.
  bool Grow(KvPages* pages, int64_t tokens);
  void Release(KvPages* pages);
  // Gives back what lies behind the first `tokens` positions.
  void Shrink(KvPages* pages, int64_t tokens);

  // The known pages that hold the first of `tokens`, and how many of them are free as long as
  // nobody takes them.
  struct Prefix {
    int32_t pages = 0, free = 0;
  };
  Prefix Find(std::span<const int32_t> tokens) const;
  // Takes those pages into `pages`, which are none yet. Returns the positions that they hold.
  int32_t Share(KvPages* pages, std::span<const int32_t> tokens);
  // The pages' first tokens.size() positions are stored: full pages are known from now on, those of
  // streamed layers once their writes have begun. Where
  // another sequence stored the same meanwhile, its page, with the same bytes, takes their place.
  void Publish(KvPages* pages, std::span<const int32_t> tokens);
  // Whether positions [first, first + count) lie in pages that this sequence alone may write to.
  bool Writable(const KvPages& pages, int32_t first, int32_t count) const;

  // A page of a layer that is not streamed.
  std::byte* Latents(int32_t layer, int32_t page) const;
  std::byte* IndexKeys(int32_t layer, int32_t page) const;
  // Where position `position` is stored, in such a layer.
  std::byte* LatentAt(int32_t layer, const KvPages& pages, int32_t position) const;
  std::byte* IndexKeyAt(int32_t layer, const KvPages& pages, int32_t position) const;
  // A page of any layer, for the frame with this view.
  std::byte* Latents(int32_t layer, const PageView& view, KvPlace at) const;
  std::byte* IndexKeys(int32_t layer, const PageView& view, KvPlace at) const;
  // From a page's first position to one of the others.
  uint64_t LatentOffset(int32_t position) const;
  uint64_t IndexKeyOffset(int32_t position) const;

  // Streamed layers. How many of the next `rows` positions of a sequence that holds `pages` and has
  // stored `stored` can be stored while hot slots are as scarce as they are and `completed` pages
  // more may be completed.
  bool Streams() const { return layout_.Streams(); }
  int32_t FreeHotSlots() const { return hot_.Free(); }
  int32_t RowsWithin(const KvPages& pages, int32_t stored, int32_t rows, int32_t completed) const;
  // Pages whose writes have not begun although all their positions are among the first `stored`: a
  // draft was the last of them. The next frame's view completes them.
  int32_t Unwritten(const KvPages& pages, int32_t stored) const;
  // Takes notice of the writes that have ended.
  void CollectWrites();
  // The view of frame `frame` is made anew: BeginView, AddToView for each sequence in turn, with
  // the positions stored so far and the rows that follow and are no drafts, EndView. CloseView
  // gives what it pinned back.
  void BeginView(PageView* view, int32_t frame) const;
  // Returns the number of the first of the pages in view->places.
  size_t AddToView(PageView* view, size_t sequence, const KvPages& pages, int32_t stored,
                   int32_t rows);
  void EndView(PageView* view);
  void CloseView(PageView* view);
  // A write of a page at a layer ended. Any thread.
  void WriteEnded(int32_t page, int32_t layer, const ReadResult& result) {
    hot_.WriteEnded(page, layer, result);
  }
  // What hot slots' offsets count from.
  std::byte* HotBase() const { return hot_bytes_.data(); }

 private:
  template <class Visit>
  void ForEachKnown(std::span<const int32_t> tokens, const Visit& visit) const;
  void Hold(int32_t page);
  void LetGo(int32_t page);
  void PutFree(int32_t page);
  void Forget(int32_t page);
  int32_t TakeFree();

  KvLayout layout_;
  std::vector<int32_t> free_;  // a heap, the lowest first: what is held together lies together
  PrefixIndex index_;
  int32_t held_ = 0;            // pages with users
  std::vector<int32_t> users_;  // [ids]
  std::list<int32_t> idle_;     // known, without users; the longest unused first
  std::vector<std::list<int32_t>::iterator> place_;  // [ids] in idle_
  PopulatedBuffer latents_, index_keys_, hot_bytes_, windows_;
  HotPages hot_;
  std::vector<int32_t> slot_of_cold_;  // [ids] while a view is made
};

}  // namespace colibri
