// Length: one state machine under one lock; a reader of a transition needs all the others.
#include "io/expert_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "io/check.h"
#include "io/lock_soon.h"
#include "io/slot_pool.h"

namespace colibri {
namespace {

constexpr uint32_t kNoSlot = ~uint32_t{0};
constexpr uint32_t kNoItem = ~uint32_t{0};

// Hints handed to the reader at one time, for each slot class. 8 fill the default prefetch depth
// even where an expert is one segment; more would evict for reads that are not yet sent.
constexpr size_t kMaxHintReads = 8;

// Demands get their slots when their reads are about to be sent: with so many bytes handed to the
// reader, of each slot class, the others wait. Else a wide layer's demands would at once take the
// slots of what other layers keep, where a few, used over and over, do: with 256 rows and slots for
// a quarter of the experts a sweep read 86 % of its union.
constexpr uint64_t kDemandBytes = uint64_t{64} << 20;

enum class State : uint8_t { kAbsent, kQueued, kReading, kReady };

// Absent -> (Queued ->) Reading -> Ready -> Absent. Queued: demanded, no slot yet.
struct Entry {
  State state = State::kAbsent;
  bool hint_queued = false;  // in its class's hint queue
  bool hint_read = false;    // Reading or Ready, and a hint was the cause of the read
  bool used = false;         // requested since that read began
  uint32_t slot = kNoSlot;
  uint32_t pins = 0;
  uint32_t needed = 0;               // requests that are sure to come (LayerRouted)
  uint32_t generation = 0;           // of the last read
  std::vector<uint64_t> waiters;     // one callback each
  std::vector<uint16_t> hinted_for;  // frames whose guess is not settled yet
};

struct Class {
  Class(uint32_t count, std::unique_ptr<CachePolicy> policy_in)
      : policy(std::move(policy_in)), item_of(count, kNoItem) {
    for (uint32_t slot = count; slot-- > 0;) free.push_back(slot);
  }
  std::unique_ptr<CachePolicy> policy;
  std::vector<uint32_t> item_of;  // by slot
  std::vector<uint32_t> free;
  std::deque<uint32_t> demand;         // items in state Queued, first come first served
  std::deque<uint32_t> hints;          // items in state Absent
  std::vector<uint32_t> hint_reading;  // items being read for a hint, oldest first
  uint64_t demand_reading = 0;         // bytes handed to the reader for demands
};

uint64_t Bytes(const CacheItem& item) {
  uint64_t bytes = 0;
  for (const Extent& extent : item.extents) bytes += extent.bytes;
  return bytes;
}

template <class Container, class Value>
bool EraseValue(Container& from, const Value& value) {
  const auto at = std::find(from.begin(), from.end(), value);
  if (at == from.end()) return false;
  from.erase(at);
  return true;
}

}  // namespace

struct ExpertCache::Impl {
  Impl(std::vector<CacheItem> items_in, SlotPool& pool_in, Reader& reader_in, OnReady on_ready_in,
       CachePolicyKind policy, std::vector<float> heat);

  // All of these are called under the lock.
  void Pump(uint16_t slot_class);
  void PumpAll();
  uint32_t SlotForDemand(Class& in);
  uint32_t SlotForHint(Class& in);
  uint32_t Evict(Class& in, uint32_t slot);
  void Read(uint32_t item, uint32_t slot, ReadClass read_class);
  bool TakeBackHintRead(uint32_t item);
  void AddHint(uint32_t item, uint16_t frame, bool sure);
  void DropHint(uint32_t item);
  void MarkUsed(Entry& entry, uint32_t item);
  void Succeeded(Entry& entry, uint32_t item);
  void Failed(Entry& entry, uint32_t item);
  void FreeSlot(Entry& entry, Class& in);

  void Done(uint64_t id, const ReadResult& result);  // I/O thread, without the lock
  Class& ClassOf(uint32_t item) { return classes[items[item].slot_class]; }
  // Below 2^56: of the generation, which tells late answers, the low 24 bits will do.
  uint64_t ReadId(uint32_t item) const {
    return uint64_t{entries[item].generation & 0xffffff} << 32 | item;
  }

  const std::vector<CacheItem> items;
  SlotPool& pool;
  Reader& reader;
  const OnReady on_ready;
  PolicyItems policy_items;

  std::mutex mutex;  // guards everything below; taken before any lock of the reader
  std::vector<Entry> entries;
  std::vector<Class> classes;
  std::vector<std::vector<uint32_t>> by_layer;
  std::vector<uint32_t> ready_in_layer;
  CacheStats stats;
  bool stopping = false;
};

ExpertCache::Impl::Impl(std::vector<CacheItem> items_in, SlotPool& pool_in, Reader& reader_in,
                        OnReady on_ready_in, CachePolicyKind policy, std::vector<float> heat)
    : items(std::move(items_in)),
      pool(pool_in),
      reader(reader_in),
      on_ready(std::move(on_ready_in)),
      entries(items.size()) {
  COLIBRI_CHECK(heat.empty() || heat.size() == items.size());
  policy_items.heat = std::move(heat);
  for (const CacheItem& item : items) policy_items.layer.push_back(item.layer);
  for (uint32_t i = 0; i < pool.Classes(); ++i) {
    const uint32_t count = pool.Count(static_cast<uint16_t>(i));
    classes.emplace_back(count, MakeCachePolicy(policy, count, policy_items));
  }
  for (uint32_t i = 0; i < items.size(); ++i) {
    const CacheItem& item = items[i];
    // A class without slots would let its first demand wait for ever.
    COLIBRI_CHECK(item.slot_class < classes.size() && pool.Count(item.slot_class) > 0);
    for (const Extent& extent : item.extents) {
      COLIBRI_CHECK(extent.dest + extent.bytes <= pool.SlotBytes(item.slot_class));
    }
    if (by_layer.size() <= item.layer) by_layer.resize(size_t{item.layer} + 1);
    by_layer[item.layer].push_back(i);
  }
  ready_in_layer.resize(by_layer.size());
}

// Demands first, in order; hints only when none waits.
void ExpertCache::Impl::Pump(uint16_t slot_class) {
  if (stopping) return;
  Class& in = classes[slot_class];
  while (!in.demand.empty()) {
    if (in.demand_reading >= kDemandBytes) return;
    const uint32_t slot = SlotForDemand(in);
    if (slot == kNoSlot) return;
    const uint32_t item = in.demand.front();
    in.demand.pop_front();
    Read(item, slot, ReadClass::kDemand);
  }
  while (!in.hints.empty() && in.hint_reading.size() < kMaxHintReads) {
    const uint32_t slot = SlotForHint(in);
    if (slot == kNoSlot) return;
    const uint32_t item = in.hints.front();
    in.hints.pop_front();
    entries[item].hint_queued = false;
    Read(item, slot, ReadClass::kPrefetch);
  }
}

void ExpertCache::Impl::PumpAll() {
  for (size_t i = 0; i < classes.size(); ++i) Pump(static_cast<uint16_t>(i));
}

uint32_t ExpertCache::Impl::SlotForDemand(Class& in) {
  if (in.free.empty()) {
    const auto idle = [&](uint32_t slot) {
      const Entry& entry = entries[in.item_of[slot]];
      return entry.state == State::kReady && entry.pins == 0;
    };
    // What is sure to be asked for, or guessed to be, goes only where nothing else can: if it never
    // did, one slot would be waited for for ever.
    auto victim = in.policy->Victim([&](uint32_t slot) {
      const Entry& entry = entries[in.item_of[slot]];
      return idle(slot) && entry.needed == 0 && entry.hinted_for.empty();
    });
    if (!victim) victim = in.policy->Victim(idle);
    if (victim) return Evict(in, *victim);
    // Last, the newest guess that is not being read yet; it stays a guess.
    for (size_t i = in.hint_reading.size(); i-- > 0;) {
      const uint32_t item = in.hint_reading[i];
      if (!TakeBackHintRead(item)) continue;
      if (!entries[item].hinted_for.empty()) {
        entries[item].hint_queued = true;
        in.hints.push_front(item);
      }
      break;
    }
  }
  if (in.free.empty()) return kNoSlot;
  const uint32_t slot = in.free.back();
  in.free.pop_back();
  return slot;
}

uint32_t ExpertCache::Impl::SlotForHint(Class& in) {
  if (!in.free.empty()) {
    const uint32_t slot = in.free.back();
    in.free.pop_back();
    return slot;
  }
  // With 256 rows and slots for a quarter of the experts the cold ones ran out during attention:
  // the drive rested for 9.6 % of the time, 4.6 % so, for 4 % more bytes.
  const bool resting = in.demand_reading == 0 && in.hint_reading.size() < kMaxHintReads / 2;
  const auto victim = in.policy->Victim([&](uint32_t slot) {
    const Entry& entry = entries[in.item_of[slot]];
    return entry.state == State::kReady && entry.pins == 0 && entry.needed == 0 &&
           entry.hinted_for.empty() &&
           (in.policy->IsCold(slot) || (resting && in.policy->MayStream(slot)));
  });
  return victim ? Evict(in, *victim) : kNoSlot;
}

uint32_t ExpertCache::Impl::Evict(Class& in, uint32_t slot) {
  const uint32_t item = in.item_of[slot];
  Entry& entry = entries[item];
  ++stats.evictions;
  if (entry.hint_read && !entry.used) stats.bytes_prefetch_wasted += Bytes(items[item]);
  entry.state = State::kAbsent;
  --ready_in_layer[items[item].layer];
  entry.slot = kNoSlot;
  entry.hinted_for.clear();
  in.item_of[slot] = kNoItem;
  return slot;
}

void ExpertCache::Impl::Read(uint32_t item, uint32_t slot, ReadClass read_class) {
  Entry& entry = entries[item];
  Class& in = ClassOf(item);
  entry.state = State::kReading;
  entry.slot = slot;
  entry.hint_read = read_class == ReadClass::kPrefetch;
  entry.used = !entry.hint_read;
  ++entry.generation;
  in.item_of[slot] = item;
  in.policy->Placed(slot, item);
  if (entry.hint_read) {
    in.hint_reading.push_back(item);
  } else {
    in.demand_reading += Bytes(items[item]);
  }
  reader.Submit(
      {ReadId(item), read_class, pool.Data(items[item].slot_class, slot), items[item].extents});
}

void ExpertCache::Impl::FreeSlot(Entry& entry, Class& in) {
  in.item_of[entry.slot] = kNoItem;
  in.free.push_back(entry.slot);
  entry.slot = kNoSlot;
  entry.state = State::kAbsent;
}

// False: somebody waits for it or its bytes are already on their way.
bool ExpertCache::Impl::TakeBackHintRead(uint32_t item) {
  Entry& entry = entries[item];
  if (entry.state != State::kReading || !entry.hint_read || entry.used) return false;
  if (!reader.Cancel(ReadId(item))) return false;
  EraseValue(ClassOf(item).hint_reading, item);
  FreeSlot(entry, ClassOf(item));
  return true;
}

void ExpertCache::Impl::AddHint(uint32_t item, uint16_t frame, bool sure) {
  Entry& entry = entries[item];
  // Also where it is Ready or on its way: the guess protects it from other hints.
  std::vector<uint16_t>& frames = entry.hinted_for;
  if (std::find(frames.begin(), frames.end(), frame) == frames.end()) frames.push_back(frame);
  if (!sure || entry.state != State::kAbsent || entry.hint_queued) return;
  ++stats.hints;
  entry.hint_queued = true;
  ClassOf(item).hints.push_back(item);
}

// The last frame that hinted `item` has taken the hint back.
void ExpertCache::Impl::DropHint(uint32_t item) {
  Entry& entry = entries[item];
  if (entry.hint_queued) {
    entry.hint_queued = false;
    EraseValue(ClassOf(item).hints, item);
    ++stats.hints_dropped;
  } else if (entry.state == State::kReady) {
    if (entry.hint_read && !entry.used) ClassOf(item).policy->Forget(entry.slot);
  } else if (TakeBackHintRead(item)) {
    ++stats.hints_dropped;
  } else if (entry.state == State::kReading && entry.hint_read && !entry.used) {
    // On its way. The rest would take the drive from what is surely needed: with one sequence 12 %
    // of all bytes read were never used while guesses were read to their end, 4 % so.
    reader.CutShort(ReadId(item));
  }
}

void ExpertCache::Impl::MarkUsed(Entry& entry, uint32_t item) {
  if (!entry.hint_read || entry.used) return;
  entry.used = true;
  if (entry.state != State::kReady) return;  // once it is there
  ++stats.hints_used;
  stats.bytes_prefetch_used += Bytes(items[item]);
}

void ExpertCache::Impl::Succeeded(Entry& entry, uint32_t item) {
  Class& in = ClassOf(item);
  const uint64_t bytes = Bytes(items[item]);
  entry.state = State::kReady;
  ++ready_in_layer[items[item].layer];
  entry.pins = static_cast<uint32_t>(entry.waiters.size());
  in.policy->Placed(entry.slot, item);
  if (!entry.hint_read) {
    stats.bytes_demand += bytes;
    return;
  }
  ++stats.hints_read;
  stats.bytes_prefetch += bytes;
  if (entry.used) {
    ++stats.hints_used;
    stats.bytes_prefetch_used += bytes;
  } else if (entry.hinted_for.empty()) {
    in.policy->Forget(entry.slot);  // refuted while it was being read
  }
}

void ExpertCache::Impl::Failed(Entry& entry, uint32_t item) {
  if (!entry.waiters.empty()) ++stats.failures;
  entry.hinted_for.clear();
  FreeSlot(entry, ClassOf(item));
}

void ExpertCache::Impl::Done(uint64_t id, const ReadResult& result) {
  const uint32_t item = static_cast<uint32_t>(id);
  std::vector<uint64_t> waiters;
  const std::byte* data = nullptr;
  {
    std::lock_guard lock(mutex);
    COLIBRI_CHECK(item < entries.size());
    Entry& entry = entries[item];
    if (entry.state != State::kReading || ReadId(item) != id) return;
    if (entry.hint_read) {
      EraseValue(ClassOf(item).hint_reading, item);
    } else {
      ClassOf(item).demand_reading -= Bytes(items[item]);
    }
    if (entry.hint_read && result.error != 0) {
      stats.bytes_prefetch += result.bytes;
      stats.bytes_prefetch_wasted += result.bytes;
    }
    if (result.error == 0) {
      Succeeded(entry, item);
      data = pool.Data(items[item].slot_class, entry.slot);
    } else if (entry.hint_read && !entry.waiters.empty() && !stopping) {
      // The guess failed, not the demand that joined it: it is owed a read of its own.
      Read(item, entry.slot, ReadClass::kDemand);
      return;
    } else {
      Failed(entry, item);
    }
    waiters.swap(entry.waiters);
    Pump(items[item].slot_class);
  }
  for (const uint64_t waiter : waiters) on_ready({waiter, item, data, result});
}

ExpertCache::ExpertCache(std::vector<CacheItem> items, SlotPool& pool, Reader& reader,
                         OnReady on_ready, CachePolicyKind policy, std::vector<float> heat)
    : impl_(std::make_unique<Impl>(std::move(items), pool, reader, std::move(on_ready), policy,
                                   std::move(heat))) {
  reader.Start(
      [impl = impl_.get()](uint64_t id, const ReadResult& result) { impl->Done(id, result); });
}

ExpertCache::~ExpertCache() { Stop(); }

const std::byte* ExpertCache::Request(uint32_t item, uint64_t waiter) {
  Impl& cache = *impl_;
  std::lock_guard lock(cache.mutex);
  Entry& entry = cache.entries[item];
  if (entry.needed > 0) --entry.needed;
  cache.ClassOf(item).policy->Asked(item);
  if (entry.state == State::kReady) {
    ++cache.stats.hits;
    ++entry.pins;
    cache.MarkUsed(entry, item);
    cache.ClassOf(item).policy->Used(entry.slot);
    return cache.pool.Data(cache.items[item].slot_class, entry.slot);
  }
  entry.waiters.push_back(waiter);
  if (entry.state == State::kAbsent) {
    ++cache.stats.misses;
    if (std::exchange(entry.hint_queued, false)) EraseValue(cache.ClassOf(item).hints, item);
    entry.state = State::kQueued;
    cache.ClassOf(item).demand.push_back(item);
    cache.Pump(cache.items[item].slot_class);
    return nullptr;
  }
  ++cache.stats.joined;
  if (entry.state == State::kReading && entry.hint_read && !entry.used) {
    cache.MarkUsed(entry, item);
    cache.reader.Promote(cache.ReadId(item));
  }
  return nullptr;
}

void ExpertCache::Unpin(uint32_t item) {
  std::lock_guard lock(impl_->mutex);
  Entry& entry = impl_->entries[item];
  COLIBRI_CHECK(entry.state == State::kReady && entry.pins > 0);
  if (--entry.pins == 0) impl_->Pump(impl_->items[item].slot_class);
}

bool ExpertCache::IsReady(uint32_t item) const {
  std::lock_guard lock(impl_->mutex);
  return impl_->entries[item].state == State::kReady;
}

bool ExpertCache::LayerReady(uint16_t layer) const {
  std::lock_guard lock(impl_->mutex);
  return layer < impl_->by_layer.size() &&
         impl_->ready_in_layer[layer] == impl_->by_layer[layer].size();
}

void ExpertCache::Hint(uint16_t layer, uint16_t frame, std::span<const uint32_t> items,
                       size_t sure) {
  Impl& cache = *impl_;
  std::lock_guard lock(cache.mutex);
  if (cache.stopping || layer >= cache.by_layer.size()) return;
  for (const uint32_t item : cache.by_layer[layer]) {
    Entry& entry = cache.entries[item];
    const auto at = std::find(entry.hinted_for.begin(), entry.hinted_for.end(), frame);
    if (at == entry.hinted_for.end()) continue;
    if (std::find(items.begin(), items.end(), item) == items.end()) {
      entry.hinted_for.erase(at);
      if (entry.hinted_for.empty()) cache.DropHint(item);
    } else if (std::exchange(entry.hint_queued, false)) {
      EraseValue(cache.ClassOf(item).hints, item);  // queued anew in its place
      --cache.stats.hints;
    }
  }
  for (size_t i = 0; i < items.size(); ++i) cache.AddHint(items[i], frame, i < sure);
  cache.PumpAll();
}

void ExpertCache::LayerRouted(uint16_t layer, uint16_t frame, std::span<const uint32_t> needed) {
  Impl& cache = *impl_;
  std::lock_guard lock(cache.mutex);
  if (layer >= cache.by_layer.size()) return;
  for (const uint32_t item : needed) ++cache.entries[item].needed;
  for (Class& in : cache.classes) in.policy->Routed(layer);
  for (const uint32_t item : cache.by_layer[layer]) {
    Entry& entry = cache.entries[item];
    // A guess that came true is not taken back: its request is about to come.
    if (EraseValue(entry.hinted_for, frame) && entry.hinted_for.empty() && entry.needed == 0) {
      cache.DropHint(item);
    }
  }
  cache.PumpAll();
}

void ExpertCache::DropHints() {
  Impl& cache = *impl_;
  std::lock_guard lock(cache.mutex);
  for (uint32_t item = 0; item < cache.entries.size(); ++item) {
    if (cache.entries[item].hinted_for.empty()) continue;
    cache.entries[item].hinted_for.clear();
    cache.DropHint(item);
  }
  cache.PumpAll();
}

CacheStats ExpertCache::Stats() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->stats;
}

std::string ExpertCache::StateText() const {
  const auto lock = LockSoon(impl_->mutex);
  if (!lock.owns_lock()) return "busy";
  size_t ready = 0, pinned = 0, reading = 0, hints = 0, queued = 0, waiters = 0, slots = 0,
         free = 0;
  for (const Entry& entry : impl_->entries) {
    ready += entry.state == State::kReady ? 1 : 0;
    pinned += entry.pins > 0 ? 1 : 0;
    reading += entry.state == State::kReading ? 1 : 0;
    hints += entry.state == State::kReading && entry.hint_read ? 1 : 0;
    queued += entry.state == State::kQueued ? 1 : 0;
    waiters += entry.waiters.size();
  }
  for (const Class& in : impl_->classes) {
    slots += in.item_of.size();
    free += in.free.size();
  }
  return fmt::format(
      "{} ready, {} of them pinned; {} being read, {} of them guesses; {} without a slot; {} jobs "
      "wait; {} of {} slots free",
      ready, pinned, reading, hints, queued, waiters, free, slots);
}

void ExpertCache::CheckIdle() const {
  std::lock_guard lock(impl_->mutex);
  for (const Entry& entry : impl_->entries) {
    COLIBRI_CHECK(entry.pins == 0 && entry.waiters.empty() && entry.state != State::kQueued);
  }
  for (const Class& in : impl_->classes) {
    COLIBRI_CHECK(in.demand.empty());
    const auto empty = std::count(in.item_of.begin(), in.item_of.end(), kNoItem);
    COLIBRI_CHECK(static_cast<size_t>(empty) == in.free.size());
  }
}

void ExpertCache::Stop() {
  Impl& cache = *impl_;
  {
    std::lock_guard lock(cache.mutex);
    if (std::exchange(cache.stopping, true)) return;
  }
  cache.reader.Stop();
  // Demands that never got a slot. The I/O thread is gone, so they are told from here.
  std::vector<ReadyItem> unserved;
  {
    std::lock_guard lock(cache.mutex);
    for (Class& in : cache.classes) {
      for (const uint32_t item : in.demand) {
        Entry& entry = cache.entries[item];
        entry.state = State::kAbsent;
        for (const uint64_t waiter : std::exchange(entry.waiters, {})) {
          unserved.push_back({waiter, item, nullptr, {ECANCELED, 0, 0}});
        }
      }
      in.demand.clear();
    }
  }
  for (const ReadyItem& ready : unserved) cache.on_ready(ready);
}

}  // namespace colibri
