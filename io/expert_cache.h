// Residency of experts in the slot pool: who is absent, queued, being read, ready; pins, waiters,
// hints and eviction. This is the join between "the router chose it" and "its bytes arrived".
// Knows opaque items (their extents, slot class and layer), nothing of models or TBB.
// Threads: Request, Hint, LayerRouted and Unpin from any worker; `on_ready` runs on the I/O
// thread, outside the cache's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/cache_policy.h"
#include "io/reader.h"

namespace colibri {

class SlotPool;  // io/slot_pool.h

// One expert: where its bytes lie and which slots are wide enough for it.
struct CacheItem {
  uint16_t layer = 0;
  uint16_t slot_class = 0;
  std::span<const Extent> extents;
};

// What on_ready passes on: the waiter's own number, and the slot's bytes (pinned for it; Unpin when
// done) or nullptr and the error.
struct ReadyItem {
  uint64_t waiter = 0;
  uint32_t item = 0;
  const std::byte* data = nullptr;
  ReadResult result;
};

// Monotonic totals. hits: ready at the request. joined: already being read for a hint or another
// request. misses: read because of the request. prefetch_*: bytes of hints read, used and evicted
// or dropped unused. failures: reads that failed for somebody who waited. hints: guesses queued
// (what was absent); hints_dropped: taken back before they were sent.
struct CacheStats {
  uint64_t hits = 0, joined = 0, misses = 0, failures = 0, evictions = 0;
  uint64_t bytes_demand = 0, bytes_prefetch = 0, bytes_prefetch_used = 0, bytes_prefetch_wasted = 0;
  uint64_t hints = 0, hints_dropped = 0, hints_read = 0, hints_used = 0;

  uint64_t Asked() const { return hits + joined + misses; }
  double HitRate() const {  // 0 to 1; 0 when nothing was asked for
    return Asked() == 0 ? 0 : static_cast<double>(hits) / static_cast<double>(Asked());
  }
  uint64_t BytesRead() const { return bytes_demand + bytes_prefetch; }
};

class ExpertCache {
 public:
  using OnReady = std::function<void(const ReadyItem&)>;

  // `items` (and their extents), `pool` and `reader` outlive the cache. The cache starts the
  // reader. `heat`: see PolicyItems.
  ExpertCache(std::vector<CacheItem> items, SlotPool& pool, Reader& reader, OnReady on_ready,
              CachePolicyKind policy = CachePolicyKind::kLru, std::vector<float> heat = {});
  ~ExpertCache();  // Stop() if it has not run yet
  ExpertCache(const ExpertCache&) = delete;
  ExpertCache& operator=(const ExpertCache&) = delete;

  // Ready: pins the item and returns its bytes; on_ready is not called. Otherwise returns nullptr
  // and on_ready is called once, later, with `waiter`: a demand that joins a prefetch whose read
  // fails is read once more before it is failed.
  const std::byte* Request(uint32_t item, uint64_t waiter);
  // Releases one pin; a waiting demand may take the slot at once.
  void Unpin(uint32_t item);
  bool IsReady(uint32_t item) const;
  // Every item of the layer is Ready: a guess about it would change nothing.
  bool LayerReady(uint16_t layer) const;

  // A guess of what `frame` will request of `layer`, surest first; it takes the place of the one
  // before. A hint holds no slot until no demand waits and one is free or cold. It never evicts a
  // hinted item whose layer is not routed yet. Beyond the first `sure` of `items` that is all that
  // a hint does: what is absent is not read.
  void Hint(uint16_t layer, uint16_t frame, std::span<const uint32_t> items,
            size_t sure = SIZE_MAX);
  // The router has chosen `layer` for `frame`: what that frame hinted for it and is not being read
  // yet is dropped, and what was read for it may be evicted by hints again. Each of `needed` is
  // requested once afterwards; until then hints do not evict it, and demands only if nothing else
  // can go.
  void LayerRouted(uint16_t layer, uint16_t frame, std::span<const uint32_t> needed = {});
  void DropHints();

  CacheStats Stats() const;
  // What is where, in one line for people. Any thread; never waits long.
  std::string StateText() const;
  // Debug: aborts unless nothing is pinned, waited for or queued.
  void CheckIdle() const;
  // Stops the reader (waits for reads in flight). Every waiter gets its on_ready (ECANCELED where
  // nothing was read); those that never had a slot get it from the calling thread, when the I/O
  // thread is gone. No call may follow except Stats and CheckIdle.
  void Stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace colibri
