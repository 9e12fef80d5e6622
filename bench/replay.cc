#include "bench/replay.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <optional>

#include "io/error.h"
#include "runtime/usage_file.h"

namespace colibri {
namespace {

constexpr uint32_t kNone = ~uint32_t{0};
// Experts that are being read or computed at one time and cannot go: about what the default read
// depth holds.
constexpr size_t kInUse = 8;

// Experts of one size and their slots.
class Simulation {
 public:
  Simulation(std::optional<CachePolicyKind> policy, uint32_t slots, const PolicyItems& items)
      : item_of_(slots, kNone), slot_of_(items.layer.size(), kNone), next_use_(slots, 0) {
    if (policy) policy_ = MakeCachePolicy(*policy, slots, items);
    in_use_most_ = policy ? std::min<size_t>(kInUse, slots - 1) : 0;
    needed_.resize(items.layer.size());
    busy_.resize(items.layer.size());
  }

  void Routed(uint16_t layer) {
    if (policy_) policy_->Routed(layer);
  }
  bool Resident(uint32_t item) const { return slot_of_[item] != kNone; }
  void Need(uint32_t item) { needed_[item] = 1; }

  // One request; `next`: when the item is requested again. True: it was in memory.
  bool Request(uint32_t item, uint64_t next) {
    needed_[item] = 0;
    if (policy_) policy_->Asked(item);
    uint32_t slot = slot_of_[item];
    const bool hit = slot != kNone;
    if (hit) {
      if (policy_) policy_->Used(slot);
    } else {
      slot = SlotFor();
      if (item_of_[slot] != kNone) slot_of_[item_of_[slot]] = kNone;
      item_of_[slot] = item;
      slot_of_[item] = slot;
      if (policy_) policy_->Placed(slot, item);
    }
    next_use_[slot] = next;
    busy_[item] = 1;
    in_use_.push_back(item);
    if (in_use_.size() > in_use_most_) {
      busy_[in_use_.front()] = 0;
      in_use_.pop_front();
    }
    return hit;
  }

 private:
  uint32_t SlotFor() {
    if (filled_ < item_of_.size()) return filled_++;
    if (!policy_) {
      const auto at = std::max_element(next_use_.begin(), next_use_.end());
      return static_cast<uint32_t>(at - next_use_.begin());
    }
    const auto idle = [this](uint32_t slot) { return busy_[item_of_[slot]] == 0; };
    auto victim =
        policy_->Victim([&](uint32_t slot) { return idle(slot) && needed_[item_of_[slot]] == 0; });
    if (!victim) victim = policy_->Victim(idle);
    return *victim;  // fewer are in use than there are slots
  }

  std::unique_ptr<CachePolicy> policy_;
  std::vector<uint32_t> item_of_, slot_of_;
  std::vector<uint64_t> next_use_;  // by slot
  std::vector<uint8_t> needed_, busy_;
  std::deque<uint32_t> in_use_;
  size_t in_use_most_ = 0;
  uint32_t filled_ = 0;
};

// For each request of the trace, in the order of its lines: when its item is requested again.
std::vector<std::vector<uint64_t>> NextUses(const RouteTrace& trace) {
  std::vector<std::vector<uint64_t>> next(trace.visits.size());
  std::vector<uint64_t> coming(trace.expert_bytes.size() * static_cast<size_t>(trace.experts),
                               std::numeric_limits<uint64_t>::max());
  for (size_t v = trace.visits.size(); v-- > 0;) {
    const RouteVisit& visit = trace.visits[v];
    for (const uint16_t expert : visit.experts) {
      uint64_t& at = coming[ReplayItem(trace, visit.layer, expert)];
      next[v].push_back(at);
      at = v;
    }
  }
  return next;
}

struct Size {
  double value = 0;
  bool percent = false;
};

Size ParseSize(const std::string& text) {
  Size size;
  size.percent = text.ends_with('%');
  const char* end = text.data() + text.size() - (size.percent ? 1 : 0);
  const auto [rest, error] = std::from_chars(text.data(), end, size.value);
  if (error != std::errc() || rest != end || !(size.value > 0) ||
      (size.percent && size.value > 100)) {
    throw UsageError(
        fmt::format("--slots {}: a number of slots or a share such as 10% expected", text));
  }
  return size;
}

std::string Percent(double share) { return fmt::format("{:.1f}", 100 * share); }

void Add(GuessFigures* f, const std::vector<uint16_t>& guess, const RouteVisit& visit) {
  std::vector<uint16_t> wanted = visit.experts;
  std::sort(wanted.begin(), wanted.end());
  ++f->visits;
  f->guessed += guess.size();
  f->wanted += wanted.size();
  for (const uint16_t e : guess) f->right += std::binary_search(wanted.begin(), wanted.end(), e);
}

uint16_t FirstSparse(const RouteTrace& trace) {
  size_t layer = 0;
  while (layer < trace.expert_bytes.size() && trace.expert_bytes[layer] == 0) ++layer;
  return static_cast<uint16_t>(layer);
}

Table GuessTable(const RouteTrace& trace) {
  Table table({{"layers", "layers", false},
               {"guess", "guess", false},
               {"visits", "visits"},
               {"guessed", "experts guessed a visit"},
               {"wanted", "experts chosen a visit"},
               {"recall_percent", "recall %"},
               {"wrong_per_right", "wrong a right one"}});
  const auto add = [&](const char* layers, const char* name, const GuessFigures& f) {
    if (f.visits == 0) return;
    const auto visits = static_cast<double>(f.visits);
    table.Add({layers, name, fmt::format("{}", f.visits),
               fmt::format("{:.1f}", static_cast<double>(f.guessed) / visits),
               fmt::format("{:.1f}", static_cast<double>(f.wanted) / visits), Percent(f.Recall()),
               fmt::format("{:.2f}", f.WrongPerRight())});
  };
  for (const bool first : {false, true}) {
    const char* layers = first ? "first" : "others";
    for (size_t way = 0; way < kGuesses; ++way) {
      const auto guess = static_cast<Guess>(way);
      add(layers, GuessName(guess), ReplayGuess(trace, guess, first));
    }
    if (first) add(layers, "sweep before", ReplayWrap(trace));
  }
  return table;
}

}  // namespace

ReplayFigures ReplayPolicy(const RouteTrace& trace, std::optional<CachePolicyKind> policy,
                           double slots, bool percent, const std::vector<float>& heat) {
  const auto experts = static_cast<size_t>(trace.experts);
  PolicyItems items;
  items.heat = heat;
  std::map<uint64_t, size_t> class_items;  // by bytes of an expert
  for (size_t layer = 0; layer < trace.expert_bytes.size(); ++layer) {
    items.layer.insert(items.layer.end(), experts, static_cast<uint16_t>(layer));
    if (trace.expert_bytes[layer] > 0) class_items[trace.expert_bytes[layer]] += experts;
  }
  std::map<uint64_t, Simulation> classes;
  for (const auto& [bytes, count] : class_items) {
    const double all = static_cast<double>(count);
    const double some = std::clamp(percent ? all * slots / 100 : slots, 1.0, all);
    classes.try_emplace(bytes, policy, static_cast<uint32_t>(some), items);
  }
  const auto next = NextUses(trace);
  ReplayFigures figures;
  std::vector<size_t> order;
  for (size_t v = 0; v < trace.visits.size(); ++v) {
    const RouteVisit& visit = trace.visits[v];
    const uint64_t bytes = trace.expert_bytes[visit.layer];
    for (auto& [size, simulation] : classes) simulation.Routed(visit.layer);
    Simulation& simulation = classes.at(bytes);
    // As the engine issues them: what is in memory first, then in file order.
    order.clear();
    for (const bool resident : {true, false}) {
      for (size_t i = 0; i < visit.experts.size(); ++i) {
        if (simulation.Resident(ReplayItem(trace, visit.layer, visit.experts[i])) == resident) {
          order.push_back(i);
        }
      }
    }
    for (const uint16_t e : visit.experts) simulation.Need(ReplayItem(trace, visit.layer, e));
    for (const size_t i : order) {
      const bool hit =
          simulation.Request(ReplayItem(trace, visit.layer, visit.experts[i]), next[v][i]);
      ++figures.asked;
      figures.asked_bytes += bytes;
      figures.hits += hit ? 1 : 0;
      figures.read_bytes += hit ? 0 : bytes;
    }
  }
  return figures;
}

GuessFigures ReplayGuess(const RouteTrace& trace, Guess way, bool first_layer) {
  const uint16_t first = FirstSparse(trace);
  const auto at = static_cast<size_t>(way);
  GuessFigures figures;
  for (const RouteVisit& visit : trace.visits) {
    if ((visit.layer == first) != first_layer || !visit.guessed[at]) continue;
    Add(&figures, visit.guesses[at], visit);
  }
  return figures;
}

GuessFigures ReplayWrap(const RouteTrace& trace) {
  const uint16_t first = FirstSparse(trace);
  GuessFigures figures;
  std::map<uint16_t, const RouteVisit*> before;  // by frame
  for (const RouteVisit& visit : trace.visits) {
    if (visit.layer != first) continue;
    const RouteVisit*& last = before[visit.frame];
    if (last != nullptr) Add(&figures, last->experts, visit);
    last = &visit;
  }
  return figures;
}

int RunReplay(const ReplayOptions& options) {
  std::vector<std::optional<CachePolicyKind>> policies;
  for (const std::string& name : options.policies) {
    policies.push_back(ParseCachePolicy(name));
    if (!policies.back() && name != "belady") {
      throw UsageError(fmt::format("--policy {}: lru, slru, lfu, sweep or belady expected", name));
    }
  }
  if (policies.empty()) {
    policies.assign(std::begin(kCachePolicies), std::end(kCachePolicies));
    policies.push_back(std::nullopt);
  }
  std::vector<Size> sizes;
  for (const std::string& text : options.slots) sizes.push_back(ParseSize(text));
  const RouteTrace trace = ReadRouteTrace(options.trace);
  if (options.guesses) {
    fmt::print("{}", GuessTable(trace).Text(options.format));
    return 0;
  }
  std::vector<float> heat;
  if (!options.usage.empty()) {
    const auto usage = ReadUsage(options.usage, trace.layers, trace.experts);
    if (!usage) throw IoError(fmt::format("{}: there is no such file", options.usage));
    uint64_t rows = 0;
    for (const RouteVisit& visit : trace.visits) rows += visit.rows;
    heat = HeatOf(*usage, trace.top_k, static_cast<int32_t>(rows / trace.visits.size()));
    heat.resize(trace.expert_bytes.size() * static_cast<size_t>(trace.experts));  // no MTP layer
  }
  Table table({{"slots", "slots", false},
               {"policy", "policy", false},
               {"asked", "experts asked for"},
               {"hit_percent", "hits %"},
               {"read_gb", "GB read"},
               {"of_asked_percent", "of the GB asked for %"}});
  for (size_t s = 0; s < sizes.size(); ++s) {
    for (const auto& policy : policies) {
      const ReplayFigures f = ReplayPolicy(trace, policy, sizes[s].value, sizes[s].percent, heat);
      const auto read = static_cast<double>(f.read_bytes);
      table.Add({options.slots[s], policy ? CachePolicyName(*policy) : "belady",
                 fmt::format("{}", f.asked),
                 Percent(static_cast<double>(f.hits) / static_cast<double>(f.asked)),
                 fmt::format("{:.3f}", read / 1e9),
                 Percent(read / static_cast<double>(f.asked_bytes))});
    }
  }
  fmt::print("{}", table.Text(options.format));
  return 0;
}

}  // namespace colibri
