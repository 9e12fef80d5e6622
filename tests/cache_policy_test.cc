// The cache policies by themselves: who gives way.
#include "io/cache_policy.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <vector>

namespace colibri {
namespace {

bool Any(uint32_t) { return true; }

// `layers` layers of `experts` items each.
PolicyItems ItemsOf(uint16_t layers, uint32_t experts) {
  PolicyItems items;
  for (uint16_t layer = 0; layer < layers; ++layer) {
    items.layer.insert(items.layer.end(), experts, layer);
  }
  return items;
}

// Hits of `sweeps` sweeps over all items of `layers` layers, with `slots` slots; of each layer what
// is in memory comes first, as in the engine.
uint32_t HitsOfWholeSweeps(CachePolicyKind kind, uint16_t layers, uint32_t experts, uint32_t slots,
                           int sweeps) {
  const PolicyItems items = ItemsOf(layers, experts);
  const auto policy = MakeCachePolicy(kind, slots, items);
  std::vector<uint32_t> item_of;
  uint32_t hits = 0;
  for (int visit = 0; visit < sweeps * layers; ++visit) {
    const uint32_t layer = static_cast<uint32_t>(visit) % layers;
    policy->Routed(static_cast<uint16_t>(layer));
    std::vector<uint32_t> missing;
    for (uint32_t item = layer * experts; item < (layer + 1) * experts; ++item) {
      policy->Asked(item);
      const auto at = std::find(item_of.begin(), item_of.end(), item);
      if (at == item_of.end()) {
        missing.push_back(item);
      } else {
        ++hits;
        policy->Used(static_cast<uint32_t>(at - item_of.begin()));
      }
    }
    for (const uint32_t item : missing) {
      auto slot = static_cast<uint32_t>(item_of.size());
      if (slot < slots) {
        item_of.push_back(item);
      } else {
        slot = policy->Victim(Any).value();
        item_of[slot] = item;
      }
      policy->Placed(slot, item);
    }
  }
  return hits;
}

TEST_CASE("in whole sweeps lru scores zero and sweep loses no slot") {
  CHECK(HitsOfWholeSweeps(CachePolicyKind::kLru, 4, 8, 12, 10) == 0);
  // In each of the nine sweeps after the first one.
  CHECK(HitsOfWholeSweeps(CachePolicyKind::kSweep, 4, 8, 12, 10) == 9 * 12);
}

TEST_CASE("every policy answers a name, and the name gives the policy back") {
  for (const CachePolicyKind kind : kCachePolicies) {
    CHECK(ParseCachePolicy(CachePolicyName(kind)) == kind);
  }
  CHECK_FALSE(ParseCachePolicy("fixed"));
}

TEST_CASE("every policy takes only what it may take, a forgotten slot first") {
  const PolicyItems items = ItemsOf(2, 4);
  for (const CachePolicyKind kind : kCachePolicies) {
    INFO(CachePolicyName(kind));
    const auto policy = MakeCachePolicy(kind, 4, items);
    policy->Routed(0);
    for (uint32_t slot = 0; slot < 4; ++slot) {
      policy->Asked(slot);
      policy->Placed(slot, slot);
      policy->Used(slot);
    }
    CHECK_FALSE(policy->Victim([](uint32_t) { return false; }).has_value());
    CHECK(policy->Victim([](uint32_t slot) { return slot == 2; }) == 2u);
    policy->Forget(3);
    CHECK(policy->IsCold(3));
    CHECK(policy->Victim(Any) == 3u);
    policy->Placed(3, 4);
    policy->Used(3);
    CHECK(policy->Victim([](uint32_t slot) { return slot != 3; }) != 3u);
  }
}

TEST_CASE("slru keeps what was used twice, however long ago") {
  const PolicyItems items = ItemsOf(1, 8);
  const auto policy = MakeCachePolicy(CachePolicyKind::kSlru, 3, items);
  for (uint32_t slot = 0; slot < 3; ++slot) policy->Placed(slot, slot);
  policy->Used(0);
  policy->Placed(1, 4);
  policy->Placed(2, 5);
  CHECK(policy->Victim(Any) == 1u);
}

TEST_CASE("lfu and sweep keep what is used every turn before what was used once and last") {
  const PolicyItems items = ItemsOf(1, 8);
  for (const CachePolicyKind kind : {CachePolicyKind::kLfu, CachePolicyKind::kSweep}) {
    const auto policy = MakeCachePolicy(kind, 2, items);
    policy->Placed(0, 0);
    for (int turn = 0; turn < 20; ++turn) {
      policy->Routed(0);
      policy->Asked(0);
    }
    policy->Routed(0);
    policy->Asked(1);
    policy->Placed(1, 1);
    CHECK(policy->Victim(Any) == 1u);
  }
}

TEST_CASE("counts of earlier runs decide before anything was used, and fade") {
  PolicyItems items = ItemsOf(1, 4);
  items.heat = {0.1f, 0.9f, 0.5f, 0.0f};
  const auto policy = MakeCachePolicy(CachePolicyKind::kSweep, 2, items);
  policy->Placed(0, 1);
  policy->Placed(1, 2);
  CHECK(policy->Victim(Any) == 1u);
  for (int turn = 0; turn < 300; ++turn) {
    policy->Routed(0);
    policy->Asked(2);
  }
  CHECK(policy->Victim(Any) == 0u);
}

TEST_CASE("of equally used experts sweep lets go the one whose layer comes last") {
  const PolicyItems items = ItemsOf(4, 1);
  const auto policy = MakeCachePolicy(CachePolicyKind::kSweep, 4, items);
  for (uint32_t item = 0; item < 4; ++item) {
    policy->Routed(static_cast<uint16_t>(item));
    policy->Asked(item);
    policy->Placed(item, item);
  }
  policy->Routed(0);
  policy->Asked(0);
  CHECK(policy->Victim(Any) == 0u);
  CHECK(policy->Victim([](uint32_t slot) { return slot != 0; }) == 3u);
  CHECK(policy->Victim([](uint32_t slot) { return slot == 1 || slot == 2; }) == 2u);
}

}  // namespace
}  // namespace colibri
