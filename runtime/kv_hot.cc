#include "runtime/kv_hot.h"

#include <algorithm>

#include "io/check.h"

namespace colibri {
namespace {

size_t S(int32_t v) { return static_cast<size_t>(v); }

}  // namespace

HotPages::HotPages(int32_t pages, int32_t slots, int32_t writes)
    : writes_(writes),
      pins_(S(slots)),
      page_of_(S(slots), kNone),
      slot_of_(S(pages), kNone),
      writing_flag_(S(pages)),
      to_write_(S(pages)),
      news_(std::make_unique<News>()) {
  for (int32_t i = slots; i-- > 0;) free_.push_back(i);
  writing_.reserve(S(slots));
}

void HotPages::Take(int32_t page) {
  COLIBRI_CHECK(!free_.empty() && SlotOf(page) == kNone && !Writing(page));
  std::erase_if(lost_, [page](const LostPage& lost) { return lost.page == page; });
  const int32_t slot = free_.back();
  free_.pop_back();
  slot_of_[S(page)] = slot;
  page_of_[S(slot)] = page;
}

void HotPages::Detach(int32_t page) {
  const int32_t slot = std::exchange(slot_of_[S(page)], kNone);
  if (slot == kNone) return;
  page_of_[S(slot)] = kNone;
  if (pins_[S(slot)] == 0) free_.push_back(slot);
}

void HotPages::Drop(int32_t page) {
  COLIBRI_DCHECK(!Writing(page));
  Detach(page);
}

void HotPages::StartWriting(int32_t page) {
  COLIBRI_CHECK(SlotOf(page) != kNone && !Writing(page));
  // Released to the writers with the frame.
  to_write_[S(page)].store(writes_, std::memory_order_relaxed);
  writing_flag_[S(page)] = true;
  writing_.push_back(page);
}

void HotPages::WriteEnded(int32_t page, int32_t layer, const ReadResult& result) {
  if (result.error != 0) {
    const std::lock_guard lock(news_->mutex);
    news_->lost.push_back({page, layer, result});
  }
  to_write_[S(page)].fetch_sub(1, std::memory_order_release);
}

void HotPages::Collect(const std::function<void(int32_t page)>& ended) {
  const auto over = [this](int32_t page) {
    return to_write_[S(page)].load(std::memory_order_acquire) == 0;
  };
  const auto first = std::stable_partition(writing_.begin(), writing_.end(),
                                           [&](int32_t page) { return !over(page); });
  if (first == writing_.end()) return;
  {
    // Whoever counted to zero has told its loss before.
    const std::lock_guard lock(news_->mutex);
    for (const LostPage& lost : news_->lost) {
      if (Loss(lost.page) == nullptr) lost_.push_back(lost);
    }
    news_->lost.clear();
  }
  const std::vector<int32_t> pages(first, writing_.end());
  writing_.erase(first, writing_.end());
  for (const int32_t page : pages) {
    writing_flag_[S(page)] = false;
    Detach(page);
    ended(page);
  }
}

void HotPages::Pin(int32_t slot) { ++pins_[S(slot)]; }

void HotPages::Unpin(int32_t slot) {
  COLIBRI_DCHECK(pins_[S(slot)] > 0);
  if (--pins_[S(slot)] == 0 && page_of_[S(slot)] == kNone) free_.push_back(slot);
}

const LostPage* HotPages::Loss(int32_t page) const {
  const auto at = std::find_if(lost_.begin(), lost_.end(),
                               [page](const LostPage& lost) { return lost.page == page; });
  return at == lost_.end() ? nullptr : &*at;
}

}  // namespace colibri
