// Which full page holds which tokens, so that equal prefixes are found again. A page is known by
// the page before it and its own tokens; both are compared, the hash only says where to look. A
// page's serial is never given twice and so stands for its whole prefix: what remains of a chain
// whose first page was taken for something else is never found again.
// Threads: one at a time (the scheduler's lock). Memory: page_tokens ids and 28 bytes for each page
// (156 bytes a page of 32, which at real size holds 2.9 MB), all of it taken at construction.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace colibri {

class PrefixIndex {
 public:
  static constexpr uint64_t kRoot = 0;  // the serial before a first page
  static constexpr int32_t kNone = -1;

  PrefixIndex(int32_t pages, int32_t page_tokens);

  // At most, for each page.
  static uint64_t PageBytes(int32_t page_tokens) {
    // A power of two buckets, no more than two for each page; the next one, two serials, the ids.
    return (2 + 1 + static_cast<uint64_t>(page_tokens)) * sizeof(int32_t) + 2 * sizeof(uint64_t);
  }

  // The page that holds `tokens` (page_tokens of them) after the page with serial `before`.
  int32_t Find(uint64_t before, std::span<const int32_t> tokens) const;
  // `page` is not known yet, and no other page is known by the same.
  void Add(int32_t page, uint64_t before, std::span<const int32_t> tokens);
  void Remove(int32_t page);
  bool Knows(int32_t page) const { return Serial(page) != kRoot; }
  uint64_t Serial(int32_t page) const { return serials_[static_cast<size_t>(page)]; }

 private:
  size_t Bucket(uint64_t before, std::span<const int32_t> tokens) const;
  std::span<const int32_t> TokensOf(int32_t page) const;

  const size_t page_tokens_;
  uint64_t last_serial_ = kRoot;
  std::vector<int32_t> buckets_;            // a power of two; the first page of each, or kNone
  std::vector<int32_t> next_;               // [pages] in the same bucket
  std::vector<uint64_t> serials_, before_;  // [pages]; serial kRoot: not known
  std::vector<int32_t> tokens_;             // [pages][page_tokens]
};

}  // namespace colibri
