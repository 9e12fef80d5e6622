#include "runtime/sampler.h"

// The streaming state must live on the stack: its size is only known to the inlined form.
#define XXH_INLINE_ALL
#ifndef NDEBUG
#define XXH_NO_INLINE_HINTS 1  // g++ -Og refuses what they demand
#endif
#include <xxhash.h>

#include <algorithm>
#include <array>
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
// The best allowed entry and the lowest allowed logit; id -1 when none is allowed or one is not
// finite.
struct Range {
  Entry best{0, -1};
  float lowest = 0;
};

Range RangeOf(std::span<const float> logits, const VocabMask& mask) {
  Range range;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!mask.Allows(i)) continue;
    if (!std::isfinite(logits[i])) return {};
    if (range.best.id < 0) range.lowest = logits[i];
    if (range.best.id < 0 || logits[i] > range.best.logit) {
      range.best = {logits[i], static_cast<int32_t>(i)};
    }
    range.lowest = std::min(range.lowest, logits[i]);
  }
  return range;
}

void AddLittleEndian(XXH3_state_t* state, uint64_t value) {
  unsigned char bytes[8];
  for (unsigned i = 0; i < 8; ++i) bytes[i] = static_cast<unsigned char>(value >> (8 * i));
  XXH3_64bits_update(state, bytes, sizeof bytes);
}

// Gives the allowed tokens best first, one at a time. Real distributions end after a few of the
// 154,880, so nothing is sorted that is not asked for: logits are counted in buckets that descend
// from the highest one, the next buckets with some tokens in them are gathered, and each is sorted
// when its turn comes.
class BestFirst {
 public:
  BestFirst(std::span<const float> logits, const VocabMask& mask, const Range& range,
            double temperature, std::vector<Entry>* gathered)
      : logits_(logits),
        mask_(mask),
        highest_(static_cast<double>(range.best.logit)),
        gathered_(*gathered) {
    // Beyond 40 temperatures a token weighs less than 10^-17 of the best: one bucket for all that.
    const double span = std::min(highest_ - static_cast<double>(range.lowest), 40 * temperature);
    per_logit_ = span > 0 ? kBuckets / span : 0;
    gathered_.clear();
    gathered_.reserve(logits.size());
    for (size_t i = 0; i < logits.size(); ++i) {
      if (mask.Allows(i)) ++ends_[BucketOf(logits[i])];
    }
    for (uint32_t& end : ends_) end = static_cast<uint32_t>(left_ += end);
  }
  size_t Left() const { return left_; }
  Entry Take() {
    if (next_ == sorted_) SortBucket();
    --left_;
    return gathered_[next_++];
  }

 private:
  static constexpr size_t kBuckets = 2048;

  // Never falls when the logit does: subtraction and product round monotonically. The comparison is
  // false for what overflows and for 0 x infinity.
  size_t BucketOf(float logit) const {
    const double bucket = (highest_ - static_cast<double>(logit)) * per_logit_;
    return bucket < kBuckets - 1 ? static_cast<size_t>(bucket) : kBuckets - 1;
  }

  void SortBucket() {
    while (ends_[bucket_] == next_) ++bucket_;  // nothing in it
    if (bucket_ >= gathered_buckets_) Gather();
    sorted_ = ends_[bucket_++];
    const auto begin = gathered_.begin() + static_cast<std::ptrdiff_t>(next_);
    const auto end = gathered_.begin() + static_cast<std::ptrdiff_t>(sorted_);
    if (!std::is_sorted(begin, end, Better)) std::sort(begin, end, Better);
  }

  // Buckets from the next one on, until they hold `wanted_` tokens or all that are left.
  void Gather() {
    const size_t first = bucket_;
    std::array<uint32_t, kBuckets> places;
    for (size_t begin = next_; gathered_buckets_ < kBuckets && begin < next_ + wanted_;) {
      if (gathered_buckets_ >= first) places[gathered_buckets_] = static_cast<uint32_t>(begin);
      begin = ends_[gathered_buckets_++];
    }
    wanted_ *= 16;
    gathered_.resize(ends_[gathered_buckets_ - 1]);
    for (size_t i = 0; i < logits_.size(); ++i) {
      if (!mask_.Allows(i)) continue;
      const size_t bucket = BucketOf(logits_[i]);
      if (bucket < first || bucket >= gathered_buckets_) continue;
      gathered_[places[bucket]++] = {logits_[i], static_cast<int32_t>(i)};
    }
  }

  std::span<const float> logits_;
  const VocabMask& mask_;
  const double highest_;
  double per_logit_ = 0;
  std::vector<Entry>& gathered_;           // buckets [0, gathered_buckets_), one after another
  std::array<uint32_t, kBuckets> ends_{};  // of the buckets, in the list of all tokens
  size_t left_ = 0;
  size_t bucket_ = 0;  // the first that is not sorted
  size_t gathered_buckets_ = 0;
  size_t next_ = 0, sorted_ = 0;  // in gathered_: the next to give, the end of what is sorted
  size_t wanted_ = 512;
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
  const Range range = RangeOf(logits, mask);
  const Entry best = range.best;
  if (best.id < 0 || sampling.temperature == 0) return best.id;
  const double temperature = static_cast<double>(sampling.temperature);
  const double highest = static_cast<double>(best.logit);
  const auto weight = [&](float logit) {
    return std::exp((static_cast<double>(logit) - highest) / temperature);
  };
  const auto total = [&] {
    double sum = 0;
    for (size_t i = 0; i < logits.size(); ++i) {
      if (mask.Allows(i)) sum += weight(logits[i]);
    }
    return sum;
  };
  const size_t top_k =
      sampling.top_k > 0 ? static_cast<size_t>(sampling.top_k) : std::numeric_limits<size_t>::max();
  const double enough = sampling.top_p < 1 ? static_cast<double>(sampling.top_p) * total()
                                           : std::numeric_limits<double>::infinity();
  const double least = static_cast<double>(sampling.min_p);
  BestFirst tokens(logits, mask, range, temperature, &scratch->gathered);
  if (top_k >= tokens.Left() && sampling.top_p >= 1 && least <= 0) {
    // Nothing is left out: the list's sum is known, and the draw ends long before the list does.
    // Rounding may leave the running sum just below u * total at the end: then it is the last one.
    const double drawn = u * total();
    Entry token = tokens.Take();
    for (double sum = weight(token.logit); !(sum > drawn) && tokens.Left() > 0;) {
      token = tokens.Take();
      sum += weight(token.logit);
    }
    return token.id;
  }
  std::vector<Entry>& kept = scratch->kept;
  kept.clear();
  kept.reserve(logits.size());
  double prefix = 0, sum = 0;
  while (tokens.Left() > 0 && kept.size() < top_k && (kept.empty() || prefix < enough)) {
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
  const Entry highest = RangeOf(logits, mask).best;
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
