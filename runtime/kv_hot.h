// Which pages have memory in the streamed layers: those that are being filled and those whose bytes
// are not all on the drive yet. Each has a hot slot. A page keeps its slot until every write of it
// is over; a frame that found it there pins the slot, which is then not given away before the frame
// is done, whatever becomes of the page.
// Threads: one at a time (the scheduler's lock), but for WriteEnded, from any.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "io/reader.h"

namespace colibri {

// A write that failed, and with it the page.
struct LostPage {
  int32_t page = 0;
  int32_t layer = 0;
  ReadResult error;
};

class HotPages {
 public:
  static constexpr int32_t kNone = -1;

  HotPages() = default;
  // `writes`: of each page, before its slot is given back.
  HotPages(int32_t pages, int32_t slots, int32_t writes);

  int32_t Slots() const { return static_cast<int32_t>(pins_.size()); }
  int32_t Free() const { return static_cast<int32_t>(free_.size()); }
  int32_t SlotOf(int32_t page) const { return slot_of_[static_cast<size_t>(page)]; }

  // Gives a page that is taken into use its slot; one is free (checked).
  void Take(int32_t page);
  // The page is free: its slot goes.
  void Drop(int32_t page);

  // All positions of the page are stored when the sweep that now begins has passed; its writes may
  // begin.
  void StartWriting(int32_t page);
  bool Writing(int32_t page) const { return writing_flag_[static_cast<size_t>(page)]; }
  // It has its slot, and its writes have not begun.
  bool Waits(int32_t page) const { return SlotOf(page) != kNone && !Writing(page); }
  // One of the writes ended; with an error the page is lost. Any thread.
  void WriteEnded(int32_t page, int32_t layer, const ReadResult& result);
  // Pages whose writes are all over since the last call lose their slots; `ended` sees each.
  void Collect(const std::function<void(int32_t page)>& ended);

  void Pin(int32_t slot);
  void Unpin(int32_t slot);

  // Of a page in use: how its bytes were lost, or nullptr.
  const LostPage* Loss(int32_t page) const;

 private:
  void Detach(int32_t page);

  int32_t writes_ = 0;
  std::vector<int32_t> free_;
  std::vector<int32_t> pins_;                   // [slots]
  std::vector<int32_t> page_of_;                // [slots]
  std::vector<int32_t> slot_of_;                // [pages]
  std::vector<bool> writing_flag_;              // [pages]
  std::vector<int32_t> writing_;                // pages
  std::vector<std::atomic<int32_t>> to_write_;  // [pages]
  std::vector<LostPage> lost_;
  struct News {  // on the heap, so that the object can be moved before it is used
    std::mutex mutex;
    std::vector<LostPage> lost;
  };
  std::unique_ptr<News> news_;
};

}  // namespace colibri
