#include "io/cache_policy.h"

#include <algorithm>
#include <array>

namespace colibri {
namespace {

// The admitted slot with the least key; ties go to the lower number. Linear, and `may_go` is asked
// only of slots that would win.
template <class KeyOf>
std::optional<uint32_t> Least(uint32_t slots, const KeyOf& key_of,
                              const CachePolicy::MayGo& may_go) {
  std::optional<uint32_t> least;
  decltype(key_of(0u)) least_key{};
  for (uint32_t slot = 0; slot < slots; ++slot) {
    const auto key = key_of(slot);
    if ((!least || key < least_key) && may_go(slot)) {
      least = slot;
      least_key = key;
    }
  }
  return least;
}

class LruPolicy : public CachePolicy {
 public:
  explicit LruPolicy(uint32_t slots) : last_use_(slots, 0) {}

  void Placed(uint32_t slot, uint32_t /*item*/) override { Touch(slot); }
  void Used(uint32_t slot) override { Touch(slot); }
  void Forget(uint32_t slot) override { last_use_[slot] = 0; }
  // Refuted, or not used while as many uses went by as there are slots. Taking a slot for a read
  // counts as a use, and so does the read's end: where nothing is ever used twice (wide sweeps) the
  // older half of the pool is cold, so that prefetch never stops.
  bool IsCold(uint32_t slot) const override {
    return last_use_[slot] == 0 || last_use_[slot] + last_use_.size() <= clock_;
  }
  std::optional<uint32_t> Victim(const MayGo& may_go) const override {
    return Least(
        Slots(), [&](uint32_t slot) { return last_use_[slot]; }, may_go);
  }

 protected:
  void Touch(uint32_t slot) { last_use_[slot] = ++clock_; }
  uint32_t Slots() const { return static_cast<uint32_t>(last_use_.size()); }
  uint64_t LastUse(uint32_t slot) const { return last_use_[slot]; }

 private:
  std::vector<uint64_t> last_use_;  // 0: never, or forgotten
  uint64_t clock_ = 0;
};

// Slots whose item was used again after it was read are protected, four fifths of all at most; the
// least recently used of them falls back among the others.
class SlruPolicy final : public LruPolicy {
 public:
  explicit SlruPolicy(uint32_t slots)
      : LruPolicy(slots),
        item_(slots, kNoItem),
        protected_(slots, 0),
        most_protected_(slots - slots / 5) {}

  void Placed(uint32_t slot, uint32_t item) override {
    if (item_[slot] != item) Unprotect(slot);
    item_[slot] = item;
    Touch(slot);
  }
  void Used(uint32_t slot) override {
    Touch(slot);
    if (protected_[slot] != 0) return;
    protected_[slot] = 1;
    if (++protected_count_ <= most_protected_) return;
    const auto oldest = Least(
        Slots(), [&](uint32_t s) { return LastUse(s); },
        [&](uint32_t s) { return protected_[s] != 0; });
    Unprotect(*oldest);
    Touch(*oldest);
  }
  void Forget(uint32_t slot) override {
    Unprotect(slot);
    LruPolicy::Forget(slot);
  }
  bool IsCold(uint32_t slot) const override {
    return protected_[slot] == 0 && LruPolicy::IsCold(slot);
  }
  std::optional<uint32_t> Victim(const MayGo& may_go) const override {
    return Least(
        Slots(), [&](uint32_t slot) { return uint64_t{protected_[slot]} << 63 | LastUse(slot); },
        may_go);
  }

 private:
  static constexpr uint32_t kNoItem = ~uint32_t{0};
  void Unprotect(uint32_t slot) {
    protected_count_ -= protected_[slot];
    protected_[slot] = 0;
  }
  std::vector<uint32_t> item_;
  std::vector<uint8_t> protected_;
  uint32_t protected_count_ = 0;
  const uint32_t most_protected_;
};

// How often each item is used, by the turns of its layer: the share of turns that used it, of which
// the last weigh most, faded slowly and fast. Kept for items that are not in memory too.
class Frequencies {
 public:
  explicit Frequencies(const PolicyItems& items)
      : items_(items), slow_(items.layer.size(), 0), fast_(items.layer.size(), 0) {
    uint16_t last = 0;
    for (const uint16_t layer : items.layer) last = std::max(last, layer);
    turns_.resize(size_t{last} + 1);
    last_turn_.resize(size_t{last} + 1);
    std::vector<bool> with_items(size_t{last} + 1);
    turn_.resize(slow_.size());
    for (const uint16_t layer : items.layer) with_items[layer] = true;
    layers_ = static_cast<int32_t>(std::count(with_items.begin(), with_items.end(), true));
    for (size_t i = 0; i < items.heat.size(); ++i) slow_[i] = fast_[i] = items.heat[i];
    double slow = 1, fast = 1;
    for (size_t turn = 0; turn < kTurns; ++turn) {
      slow_left_[turn] = static_cast<float>(slow);
      fast_left_[turn] = static_cast<float>(fast);
      slow *= 1 - kSlow;
      fast *= 1 - kFast;
    }
  }

  void Routed(uint16_t layer) {
    if (layer >= turns_.size()) return;
    ++turns_[layer];
    last_turn_[layer] = ++now_;
  }
  void Asked(uint32_t item) {
    // A second frame of the same turn adds nothing.
    slow_[item] = std::min(1.0f, Left(item, slow_, slow_left_) + kSlow);
    fast_[item] = std::min(1.0f, Left(item, fast_, fast_left_) + kFast);
    turn_[item] = turns_[items_.layer[item]];
  }
  float Share(uint32_t item) const {
    const size_t turns = std::min<size_t>(turns_[items_.layer[item]], kTurns - 1);
    return kMix * Left(item, fast_, fast_left_) / Known(fast_left_, turns) +
           (1 - kMix) * Left(item, slow_, slow_left_) / Known(slow_left_, turns);
  }
  // Turns of any layer so far, and how many there were at the item's layer's last one.
  uint64_t Now() const { return now_; }
  uint64_t LastTurn(uint32_t item) const { return last_turn_[items_.layer[item]]; }
  int32_t Layers() const { return layers_; }

 private:
  // Weights of the last turn: what an expert is used for in general, and what it is used for now.
  // With one row and a tenth of the experts in memory the slow one alone hits 36 %, the fast one
  // alone 43 %, both 43 %; with half of them 81.2 %, 80.8 %, 81.6 %. Wide frames do not care.
  static constexpr float kSlow = 1.0f / 32, kFast = 1.0f / 4, kMix = 0.5f;
  static constexpr size_t kTurns = 256;
  float Left(uint32_t item, const std::vector<float>& share,
             const std::array<float, kTurns>& left) const {
    const uint32_t past = turns_[items_.layer[item]] - turn_[item];
    return past < kTurns ? share[item] * left[past] : 0.0f;
  }

  // The weight of all turns so far. Without it, what was used in each of a few turns would look
  // rare, and rarer than what the turn at hand has just used.
  float Known(const std::array<float, kTurns>& left, size_t turns) const {
    return items_.heat.empty() && turns > 0 ? 1 - left[turns] : 1.0f;
  }

  const PolicyItems& items_;
  std::vector<float> slow_, fast_;   // of each item when `turn_` was its layer's turn
  std::vector<uint32_t> turn_;       // of each item
  std::vector<uint32_t> turns_;      // of each layer
  std::vector<uint64_t> last_turn_;  // of each layer
  std::array<float, kTurns> slow_left_{}, fast_left_{};
  int32_t layers_ = 0;
  uint64_t now_ = 0;
};

// What the frequency policies share: a worth for each slot, of which the least goes first. It
// changes with the turns of the item's layer alone and is kept, so that a choice only compares.
class CountingPolicy : public CachePolicy {
 public:
  CountingPolicy(uint32_t slots, const PolicyItems& items)
      : items_(items),
        frequencies_(items),
        item_(slots, kNoItem),
        layer_(slots, kNoLayer),
        worth_(slots, kForgotten),
        slot_of_(items.layer.size(), kNoSlot) {}

  void Routed(uint16_t layer) override {
    frequencies_.Routed(layer);
    for (uint32_t slot = 0; slot < layer_.size(); ++slot) {
      if (layer_[slot] == layer && worth_[slot] != kForgotten) Weigh(slot);
    }
  }
  void Asked(uint32_t item) override {
    frequencies_.Asked(item);
    if (slot_of_[item] != kNoSlot) Weigh(slot_of_[item]);
  }
  void Placed(uint32_t slot, uint32_t item) override {
    if (item_[slot] != kNoItem && slot_of_[item_[slot]] == slot) slot_of_[item_[slot]] = kNoSlot;
    item_[slot] = item;
    layer_[slot] = items_.layer[item];
    slot_of_[item] = slot;
    Weigh(slot);
  }
  void Used(uint32_t slot) override { Weigh(slot); }
  void Forget(uint32_t slot) override { worth_[slot] = kForgotten; }
  std::optional<uint32_t> Victim(const MayGo& may_go) const override {
    return Least(
        static_cast<uint32_t>(worth_.size()), [&](uint32_t slot) { return worth_[slot]; }, may_go);
  }

 protected:
  static constexpr double kForgotten = -1e300;
  virtual double Worth(uint32_t item) const = 0;
  double WorthOf(uint32_t slot) const { return worth_[slot]; }
  const Frequencies& Counts() const { return frequencies_; }

 private:
  static constexpr uint32_t kNoItem = ~uint32_t{0}, kNoSlot = ~uint32_t{0};
  static constexpr uint16_t kNoLayer = 0xffff;
  void Weigh(uint32_t slot) { worth_[slot] = Worth(item_[slot]); }

  const PolicyItems& items_;
  Frequencies frequencies_;
  std::vector<uint32_t> item_;     // by slot
  std::vector<uint16_t> layer_;    // by slot
  std::vector<double> worth_;      // by slot
  std::vector<uint32_t> slot_of_;  // by item
};

class LfuPolicy final : public CountingPolicy {
 public:
  using CountingPolicy::CountingPolicy;
  bool IsCold(uint32_t slot) const override { return WorthOf(slot) < 0.5; }

 private:
  double Worth(uint32_t item) const override { return Counts().Share(item); }
};

// Worth: minus the turn at which the item is expected back. Its layer comes again a cycle of layers
// after its last turn, and is likely to pass the item over as often as it did so far. In a sweep
// over all experts the one just used comes back last: what is resident stays so, and the other
// reads stream through a few slots.
class SweepPolicy final : public CountingPolicy {
 public:
  using CountingPolicy::CountingPolicy;
  // Not expected within a whole cycle; what is hinted comes with the next layer.
  bool IsCold(uint32_t slot) const override {
    return -WorthOf(slot) >= static_cast<double>(Counts().Now()) + Counts().Layers();
  }
  bool MayStream(uint32_t slot) const override {
    return -WorthOf(slot) > static_cast<double>(Counts().Now()) + Counts().Layers() / 2.0;
  }

 private:
  double Worth(uint32_t item) const override {
    const double share = std::max(static_cast<double>(Counts().Share(item)), 1e-6);
    return -(static_cast<double>(Counts().LastTurn(item)) + Counts().Layers() / share);
  }
};

constexpr const char* kNames[] = {"lru", "slru", "lfu", "sweep"};

}  // namespace

const char* CachePolicyName(CachePolicyKind kind) { return kNames[static_cast<size_t>(kind)]; }

std::optional<CachePolicyKind> ParseCachePolicy(std::string_view name) {
  for (const CachePolicyKind kind : kCachePolicies) {
    if (name == CachePolicyName(kind)) return kind;
  }
  return std::nullopt;
}

std::unique_ptr<CachePolicy> MakeCachePolicy(CachePolicyKind kind, uint32_t slots,
                                             const PolicyItems& items) {
  switch (kind) {
    case CachePolicyKind::kLru:
      return std::make_unique<LruPolicy>(slots);
    case CachePolicyKind::kSlru:
      return std::make_unique<SlruPolicy>(slots);
    case CachePolicyKind::kLfu:
      return std::make_unique<LfuPolicy>(slots, items);
    case CachePolicyKind::kSweep:
      break;
  }
  return std::make_unique<SweepPolicy>(slots, items);
}

}  // namespace colibri
