// Byte pair encoding: which bytes are which id, which pairs merge, and the merging itself (model
// spec 5.1). Knows neither tokenizer.json nor patterns. Private to the tokenizer.
// Threads: const methods from any thread; a Merger from one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace colibri {

// Ids index a table; a hostile file could otherwise ask for gigabytes. The largest published
// vocabularies have about 2^18 entries.
inline constexpr int32_t kMaxTokenIds = 1 << 21;

// Ids and their bytes.
class Vocabulary {
 public:
  // Room for about this many entries.
  explicit Vocabulary(size_t expected = 0);

  enum class Lookup : uint8_t { kFindable, kHidden };  // kHidden: Find does not give it
  enum class Added : uint8_t { kYes, kIdTaken, kBytesTaken };
  // 0 <= id < kMaxTokenIds.
  Added Add(std::string_view bytes, int32_t id, Lookup lookup);

  int32_t Find(std::string_view bytes) const;  // -1 when there is none
  bool Has(int32_t id) const { return id >= 0 && id < Size() && entries_[Index(id)].present; }
  std::string_view Bytes(int32_t id) const {  // "" when there is none
    if (!Has(id)) return {};
    const Entry& entry = entries_[Index(id)];
    return std::string_view(arena_).substr(entry.offset, entry.length);
  }
  int32_t Size() const { return static_cast<int32_t>(entries_.size()); }  // highest id + 1
  size_t Count() const { return count_; }

 private:
  struct Entry {
    size_t offset = 0;
    uint32_t length = 0;
    bool present = false;
  };
  static size_t Index(int32_t id) { return static_cast<size_t>(id); }
  // The slot that holds `bytes`, or the empty one where they belong.
  size_t Slot(std::string_view bytes) const;
  void Grow();

  std::string arena_;
  std::vector<Entry> entries_;  // by id
  std::vector<int32_t> slots_;  // open addressing, -1 is empty; a power of two
  size_t findable_ = 0, count_ = 0;
};

struct Merge {
  uint32_t rank = UINT32_MAX;  // lower ones first
  int32_t id = -1;             // what the pair becomes; -1: the pair does not merge
};

class MergeTable {
 public:
  explicit MergeTable(size_t expected = 0);
  // A pair that is there already gets the new rank, as in the reference.
  void Add(int32_t left, int32_t right, Merge merge);
  Merge Find(int32_t left, int32_t right) const;
  size_t Count() const { return count_; }

 private:
  struct Slot {
    uint64_t pair = UINT64_MAX;  // no id is negative
    Merge merge;
  };
  size_t Position(uint64_t pair) const;

  std::vector<Slot> slots_;  // open addressing, a power of two, at least a third empty
  size_t count_ = 0;
};

// Merges pieces of any length in O(n log n): 10 MB without a space are no trap. Needs at most 32
// bytes for each byte of the piece. Positions are 32 bits wide: pieces of less than 4 GiB.
class Merger {
 public:
  // `byte_ids`: the id of each single byte; -1 leaves the byte out, as the reference does.
  Merger(const MergeTable& merges, const std::array<int32_t, 256>& byte_ids)
      : merges_(merges), byte_ids_(byte_ids) {}
  void Append(std::string_view piece, std::vector<int32_t>* ids);

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Symbol {
    int32_t id = -1;
    uint32_t previous = kNone, next = kNone;
    uint32_t rank = kNone;  // of the merge with the next one; kNone: no such merge
  };
  void Rank(uint32_t position);
  void Push(uint32_t position);

  const MergeTable& merges_;
  const std::array<int32_t, 256>& byte_ids_;
  std::vector<Symbol> symbols_;
  std::vector<uint64_t> heap_;  // rank << 32 | position, smallest first; may hold outdated entries
};

}  // namespace colibri
