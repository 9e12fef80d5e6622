// Which expert gives way: the one place that knows the cache policies. ExpertCache asks them under
// its lock, `colibri-bench replay` asks the same code about a recorded trace.
// Time is counted in uses, and in layers of a sweep, never in seconds.
// Threads: none of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace colibri {

enum class CachePolicyKind : uint8_t {
  kLru,    // the last used stay
  kSlru,   // segmented LRU: what was used twice stays longer than what was used once
  kLfu,    // the most often used stay; old uses fade
  kSweep,  // what is expected back soonest stays: the layers come in a cycle, and an expert is used
           // by a known share of its layer's turns
};
constexpr CachePolicyKind kCachePolicies[] = {CachePolicyKind::kLru, CachePolicyKind::kSlru,
                                              CachePolicyKind::kLfu, CachePolicyKind::kSweep};
const char* CachePolicyName(CachePolicyKind kind);
std::optional<CachePolicyKind> ParseCachePolicy(std::string_view name);

// What a policy knows of the experts beforehand. Items are numbered as in ExpertCache.
struct PolicyItems {
  std::vector<uint16_t> layer;  // of each item
  // The share of its layer's turns that use the item, 0 to 1, as far as earlier runs tell; empty:
  // nothing is known. Policies without frequencies ignore it.
  std::vector<float> heat;
};

class CachePolicy {
 public:
  using MayGo = std::function<bool(uint32_t slot)>;

  virtual ~CachePolicy() = default;

  // A frame's router has chosen the experts of `layer`; their requests follow.
  virtual void Routed(uint16_t layer) { (void)layer; }
  // `item` is requested, wherever it is.
  virtual void Asked(uint32_t item) { (void)item; }
  // `slot` is taken for `item`, and called again when its bytes are there.
  virtual void Placed(uint32_t slot, uint32_t item) = 0;
  // What `slot` holds is used.
  virtual void Used(uint32_t slot) = 0;
  // What was read for a hint that did not come true: the first to go until it is used.
  virtual void Forget(uint32_t slot) = 0;
  // What `slot` holds is worth less than an expert that was hinted: a hint may take it.
  virtual bool IsCold(uint32_t slot) const = 0;
  // Where the drive would rest otherwise, a hint may take it too: it comes back so late that it is
  // the same whether it is read again or what is hinted is read later.
  virtual bool MayStream(uint32_t slot) const { return IsCold(slot); }
  // The slot that gives way among those that `may_go` admits; nullopt: it admits none.
  virtual std::optional<uint32_t> Victim(const MayGo& may_go) const = 0;
};

// For the `slots` slots of one class. `items` outlives the policy.
std::unique_ptr<CachePolicy> MakeCachePolicy(CachePolicyKind kind, uint32_t slots,
                                             const PolicyItems& items);

}  // namespace colibri
