#include "runtime/sampler.h"

// The streaming state must live on the stack: its size is only known to the inlined form.
#define XXH_INLINE_ALL
#ifndef NDEBUG
#define XXH_NO_INLINE_HINTS 1  // g++ -Og refuses what they demand
#endif
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "io/check.h"
#include "runtime/tokenizer.h"

namespace colibri {
namespace {

using Entry = SampleScratch::Entry;

// The order of tokens everywhere: higher logit, then lower id. -0.0 equals 0.0.
bool Better(const Entry& a, const Entry& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}
// std heaps keep the largest on top: here that is the best.
bool WorseForHeap(const Entry& a, const Entry& b) { return Better(b, a); }

// The best allowed entry; id -1 when none is allowed or one is not finite.
Entry Best(std::span<const float> logits, const VocabMask& mask) {
  Entry best{0, -1};
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!mask.Allows(i)) continue;
    if (!std::isfinite(logits[i])) return Entry{0, -1};
    if (best.id < 0 || logits[i] > best.logit) best = {logits[i], static_cast<int32_t>(i)};
  }
  return best;
}

void AddLittleEndian(XXH3_state_t* state, uint64_t value) {
  unsigned char bytes[8];
  for (unsigned i = 0; i < 8; ++i) bytes[i] = static_cast<unsigned char>(value >> (8 * i));
  XXH3_64bits_update(state, bytes, sizeof bytes);
}

// Gives the allowed tokens best first, one at a time: real distributions end after a few, and
// sorting 154,880 ids took five times as long as making the heap (38 against 8 ms, one busy core).
class BestFirst {
 public:
  BestFirst(std::span<const float> logits, const VocabMask& mask, std::vector<Entry>* heap)
      : heap_(heap) {
    heap_->clear();
    heap_->reserve(logits.size());
    for (size_t i = 0; i < logits.size(); ++i) {
      if (mask.Allows(i)) heap_->push_back({logits[i], static_cast<int32_t>(i)});
    }
    std::make_heap(heap_->begin(), heap_->end(), WorseForHeap);
  }
  bool Empty() const { return heap_->empty(); }
  Entry Take() {
    std::pop_heap(heap_->begin(), heap_->end(), WorseForHeap);
    const Entry best = heap_->back();
    heap_->pop_back();
    return best;
  }

 private:
  std::vector<Entry>* heap_;
};

}  // namespace

VocabMask::VocabMask(const Tokenizer& tokenizer, int32_t vocab)
    : allowed_(static_cast<size_t>(std::max(vocab, 0))) {
  for (int32_t id = 0; id < vocab; ++id) {
    allowed_[static_cast<size_t>(id)] = tokenizer.Has(id) ? 1 : 0;
  }
}

VocabMask::VocabMask(std::vector<uint8_t> allowed) : allowed_(std::move(allowed)) {}

double DrawUniform(uint64_t seed, std::string_view custom_id, int32_t choice, int64_t position) {
  XXH3_state_t state;
  XXH3_INITSTATE(&state);
  XXH3_64bits_reset(&state);
  AddLittleEndian(&state, seed);
  AddLittleEndian(&state, custom_id.size());
  XXH3_64bits_update(&state, custom_id.data(), custom_id.size());
  AddLittleEndian(&state, static_cast<uint64_t>(choice));
  AddLittleEndian(&state, static_cast<uint64_t>(position));
  return static_cast<double>(XXH3_64bits_digest(&state) >> 11) * 0x1p-53;
}

int32_t PickToken(std::span<const float> logits, const Sampling& sampling, double u,
                  const VocabMask& mask, SampleScratch* scratch) {
  COLIBRI_DCHECK(logits.size() == mask.Size());
  const Entry best = Best(logits, mask);
  if (best.id < 0 || sampling.temperature == 0) return best.id;
  const double temperature = static_cast<double>(sampling.temperature);
  const double highest = static_cast<double>(best.logit);
  const auto weight = [&](float logit) {
    return std::exp((static_cast<double>(logit) - highest) / temperature);
  };
  double total = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (mask.Allows(i)) total += weight(logits[i]);
  }

  const size_t top_k =
      sampling.top_k > 0 ? static_cast<size_t>(sampling.top_k) : std::numeric_limits<size_t>::max();
  const double enough = sampling.top_p < 1 ? static_cast<double>(sampling.top_p) * total
                                           : std::numeric_limits<double>::infinity();
  const double least = static_cast<double>(sampling.min_p);
  BestFirst tokens(logits, mask, &scratch->heap);
  if (top_k >= scratch->heap.size() && sampling.top_p >= 1 && least <= 0) {
    // Nothing is left out: the list's sum is known, and the draw ends long before the list does.
    // Rounding may leave the running sum just below u * total at the end: then it is the last one.
    Entry token = tokens.Take();
    for (double sum = weight(token.logit); !(sum > u * total) && !tokens.Empty();) {
      token = tokens.Take();
      sum += weight(token.logit);
    }
    return token.id;
  }
  std::vector<Entry>& kept = scratch->kept;
  kept.clear();
  kept.reserve(logits.size());
  double prefix = 0, sum = 0;
  while (!tokens.Empty() && kept.size() < top_k && (kept.empty() || prefix < enough)) {
    const Entry token = tokens.Take();
    const double w = weight(token.logit);
    if (w < least && !kept.empty()) break;
    kept.push_back(token);
    prefix += w;
  }
  for (const Entry& token : kept) {
    sum += weight(token.logit);
    if (sum > u * prefix) return token.id;
  }
  return kept.back().id;
}

int32_t Sample(std::span<const float> logits, const Sampling& sampling, std::string_view custom_id,
               int32_t choice, int64_t position, const VocabMask& mask, SampleScratch* scratch) {
  const double u =
      sampling.temperature == 0 ? 0 : DrawUniform(sampling.seed, custom_id, choice, position);
  return PickToken(logits, sampling, u, mask, scratch);
}

TokenLogprob LogprobOf(std::span<const float> logits, int32_t id, int32_t top,
                       const VocabMask& mask) {
  COLIBRI_DCHECK(logits.size() == mask.Size());
  TokenLogprob out;
  out.id = id;
  const Entry highest = Best(logits, mask);
  if (highest.id < 0) {
    out.logprob = std::numeric_limits<float>::quiet_NaN();
    return out;
  }
  const size_t wanted = static_cast<size_t>(std::max(top, 0));
  std::vector<Entry> best;  // at most `wanted`, best first
  best.reserve(wanted + 1);
  double total = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!mask.Allows(i)) continue;
    total += std::exp(static_cast<double>(logits[i]) - static_cast<double>(highest.logit));
    const Entry entry{logits[i], static_cast<int32_t>(i)};
    if (wanted == 0 || (best.size() == wanted && !Better(entry, best.back()))) continue;
    best.insert(std::upper_bound(best.begin(), best.end(), entry, Better), entry);
    if (best.size() > wanted) best.pop_back();
  }
  const double shift = static_cast<double>(highest.logit) + std::log(total);
  const auto logprob = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit) - shift);
  };
  out.logprob = logprob(logits[static_cast<size_t>(id)]);
  out.top.reserve(best.size());
  for (const Entry& entry : best) out.top.emplace_back(entry.id, logprob(entry.logit));
  return out;
}

}  // namespace colibri
