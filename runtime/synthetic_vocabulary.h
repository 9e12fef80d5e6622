// The embedding and the head of a synthetic model, row by row, and the random numbers that its
// tensors are made of. For the model writer only. Threads: any; a row depends on seed, token and
// dimensions alone.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>
#include <vector>

#include "runtime/config.h"

namespace colibri {

// The largest Normal number.
inline constexpr float kNormalBound = 3.4642F;

// SplitMix64: 8 bytes a step at about 2 GB/s, any seed good.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15U;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9U;
    z = (z ^ z >> 27) * 0x94d049bb133111ebU;
    return z ^ z >> 31;
  }
  float Uniform() { return static_cast<float>(Next() >> 40) * 0x1p-24F; }  // [0, 1)
  // The sum of four uniform 16-bit numbers: near enough to a normal distribution of variance 1.
  // It stays within kNormalBound.
  float Normal() {
    const uint64_t bits = Next();
    const auto sum = static_cast<float>((bits & 0xffff) + (bits >> 16 & 0xffff) +
                                        (bits >> 32 & 0xffff) + (bits >> 48));
    return (sum * 0x1p-16F - 2.0F) * std::sqrt(3.0F);
  }

 private:
  uint64_t state_;
};

inline uint64_t SeedOf(uint64_t seed, std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325U ^ seed * 0x9e3779b97f4a7c15U;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return hash;
}

// A ring of tokens, of which each is mostly followed by the next one and else by one of four jumps,
// all fixed distances. Neighbours share a topic, hence experts; the MTP layer sees the same
// embedding, hence drafts the same successor. Tokens that end a line follow none.
class Vocabulary {
 public:
  Vocabulary(uint64_t seed, const ModelConfig& config);

  // A row of `hidden` values, of variance 1 in the embedding.
  void Embedding(int64_t token, std::vector<float>& row) const;
  void Head(int64_t token, std::vector<float>& row) const;
  // The scale of every row's int8 values: random numbers here are bounded.
  float EmbeddingScale() const;
  float HeadScale() const;

 private:
  int64_t Before(int64_t token, int64_t steps) const {
    return ((token - steps) % tokens_ + tokens_) % tokens_;
  }
  void Add(std::string_view kind, int64_t index, float factor, std::vector<float>& row) const;

  uint64_t seed_;
  int64_t tokens_;
  size_t hidden_;
  std::vector<int32_t> silent_;
  // Two stay in the topic mostly, two lead anywhere: so lines that began alike part.
  int64_t jumps_[4] = {2, 3, 0, 0};
  float head_ = 0, jump_ = 0;
};

}  // namespace colibri
