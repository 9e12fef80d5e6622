#include "runtime/bpe.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <functional>

namespace colibri {

Vocabulary::Vocabulary(size_t expected)
    : slots_(std::bit_ceil(std::max<size_t>(expected * 2, 16)), -1) {
  entries_.reserve(expected);
}

size_t Vocabulary::Slot(std::string_view bytes) const {
  const size_t mask = slots_.size() - 1;
  size_t slot = XXH3_64bits(bytes.data(), bytes.size()) & mask;
  while (slots_[slot] >= 0 && Bytes(slots_[slot]) != bytes) slot = (slot + 1) & mask;
  return slot;
}

void Vocabulary::Grow() {
  const std::vector<int32_t> old = std::move(slots_);
  slots_.assign(old.size() * 2, -1);
  for (const int32_t id : old) {
    if (id >= 0) slots_[Slot(Bytes(id))] = id;
  }
}

Vocabulary::Added Vocabulary::Add(std::string_view bytes, int32_t id, Lookup lookup) {
  if (Has(id)) return Added::kIdTaken;
  size_t slot = 0;
  if (lookup == Lookup::kFindable) {
    if ((findable_ + 1) * 2 > slots_.size()) Grow();
    slot = Slot(bytes);
    if (slots_[slot] >= 0) return Added::kBytesTaken;
  }
  if (id >= Size()) entries_.resize(Index(id) + 1);
  entries_[Index(id)] = {arena_.size(), static_cast<uint32_t>(bytes.size()), true};
  arena_.append(bytes);
  ++count_;
  if (lookup == Lookup::kFindable) {
    slots_[slot] = id;
    ++findable_;
  }
  return Added::kYes;
}

int32_t Vocabulary::Find(std::string_view bytes) const { return slots_[Slot(bytes)]; }

namespace {

uint64_t PairKey(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

}  // namespace

MergeTable::MergeTable(size_t expected)
    : slots_(std::bit_ceil(std::max<size_t>(expected + expected / 2, 16))) {}

size_t MergeTable::Position(uint64_t pair) const {
  const size_t mask = slots_.size() - 1;
  // Fibonacci hashing: the high half of the product depends on every bit of both ids.
  size_t slot = ((pair * 0x9E3779B97F4A7C15u) >> 32) & mask;
  while (slots_[slot].pair != pair && slots_[slot].pair != UINT64_MAX) slot = (slot + 1) & mask;
  return slot;
}

void MergeTable::Add(int32_t left, int32_t right, Merge merge) {
  if ((count_ + 1) * 3 > slots_.size() * 2) {
    std::vector<Slot> old = std::move(slots_);
    slots_.assign(old.size() * 2, Slot());
    for (const Slot& slot : old) {
      if (slot.pair != UINT64_MAX) slots_[Position(slot.pair)] = slot;
    }
  }
  Slot& slot = slots_[Position(PairKey(left, right))];
  if (slot.pair == UINT64_MAX) ++count_;
  slot = {PairKey(left, right), merge};
}

Merge MergeTable::Find(int32_t left, int32_t right) const {
  return slots_[Position(PairKey(left, right))].merge;
}

void Merger::Rank(uint32_t position) {
  Symbol& symbol = symbols_[position];
  symbol.rank =
      symbol.next == kNone ? kNone : merges_.Find(symbol.id, symbols_[symbol.next].id).rank;
}

void Merger::Push(uint32_t position) {
  Rank(position);
  const uint32_t rank = symbols_[position].rank;
  if (rank == kNone) return;
  heap_.push_back(uint64_t{rank} << 32 | position);
  std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
}

void Merger::Append(std::string_view piece, std::vector<int32_t>* ids) {
  symbols_.clear();
  heap_.clear();
  // Asked for once: growing would hold them twice. A merge takes one entry off the heap and puts
  // two on it at most, so that it never holds more than two a byte.
  symbols_.reserve(piece.size());
  heap_.reserve(2 * piece.size());
  for (const char c : piece) {
    const int32_t id = byte_ids_[static_cast<uint8_t>(c)];
    if (id < 0) continue;
    const auto position = static_cast<uint32_t>(symbols_.size());
    if (position > 0) symbols_.back().next = position;
    symbols_.push_back({id, position > 0 ? position - 1 : kNone, kNone, kNone});
  }
  for (uint32_t i = 0; i < symbols_.size(); ++i) {
    Rank(i);
    if (symbols_[i].rank != kNone) heap_.push_back(uint64_t{symbols_[i].rank} << 32 | i);
  }
  std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
  while (!heap_.empty()) {
    const uint64_t top = heap_.front();
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    heap_.pop_back();
    const auto position = static_cast<uint32_t>(top);
    Symbol& symbol = symbols_[position];
    // Outdated: one of the two has merged with another since. A rank names its pair.
    if (symbol.rank != static_cast<uint32_t>(top >> 32)) continue;
    Symbol& right = symbols_[symbol.next];
    symbol.id = merges_.Find(symbol.id, right.id).id;
    right.rank = kNone;
    symbol.next = right.next;
    if (symbol.next != kNone) symbols_[symbol.next].previous = position;
    Push(position);
    if (symbol.previous != kNone) Push(symbol.previous);
  }
  for (uint32_t i = symbols_.empty() ? kNone : 0; i != kNone; i = symbols_[i].next) {
    ids->push_back(symbols_[i].id);
  }
}

}  // namespace colibri
