// How the vocabulary's vectors are mixed, and how loud.
#include "runtime/synthetic_vocabulary.h"

#include <algorithm>
#include <iterator>

namespace colibri {
namespace {

// The residual stream's variance grows by about this in a layer.
constexpr float kLayerVariance = 0.15F;
// An embedding is kTopic times a vector that the kTopicTokens tokens of its topic share plus kOwn
// times one of its own, of variance 1 together: what neighbours share, their experts share.
constexpr int64_t kTopicTokens = 32;
constexpr float kTopic = 0.85F, kOwn = 0.53F;
// The logit of a token's successor, and that of each jump as a share of it. Vectors that should be
// orthogonal are so up to 1 / sqrt(hidden), and what stands out of that noise must be higher and
// farther apart where it is louder. Found by trial with hidden sizes of 512 and 6144.
float Peak(int32_t hidden) { return 7.0F + 382.0F / std::sqrt(static_cast<float>(hidden)); }
float JumpShare(int32_t hidden) {
  return std::max(0.0F, 0.859F - 3.2F / std::sqrt(static_cast<float>(hidden)));
}

}  // namespace

Vocabulary::Vocabulary(uint64_t seed, const ModelConfig& config)
    : seed_(seed),
      tokens_(config.vocab),
      hidden_(static_cast<size_t>(config.hidden)),
      silent_(config.stop_ids) {
  Random random(SeedOf(seed, "jumps"));
  for (size_t i = 2; i < std::size(jumps_); ++i) {
    jumps_[i] = static_cast<int64_t>(random.Next() % static_cast<uint64_t>(tokens_));
  }
  const float depth = std::sqrt(1 + kLayerVariance * static_cast<float>(config.layers));
  head_ = Peak(config.hidden) * depth / (kOwn * static_cast<float>(hidden_));
  jump_ = head_ * JumpShare(config.hidden);
}

float Vocabulary::EmbeddingScale() const { return (kTopic + kOwn) * kNormalBound / 127; }

float Vocabulary::HeadScale() const {
  return (head_ + static_cast<float>(std::size(jumps_)) * jump_) * kNormalBound / 127;
}

void Vocabulary::Embedding(int64_t token, std::vector<float>& row) const {
  row.assign(hidden_, 0);
  Add("topic", token / kTopicTokens, kTopic, row);
  Add("token", token, kOwn, row);
}

void Vocabulary::Head(int64_t token, std::vector<float>& row) const {
  row.assign(hidden_, 0);
  if (std::find(silent_.begin(), silent_.end(), token) != silent_.end()) return;
  Add("token", Before(token, 1), head_, row);
  for (const int64_t jump : jumps_) Add("token", Before(token, jump), jump_, row);
}

void Vocabulary::Add(std::string_view kind, int64_t index, float factor,
                     std::vector<float>& row) const {
  Random random(SeedOf(seed_ + static_cast<uint64_t>(index) * 0x9e3779b97f4a7c15U, kind));
  for (float& value : row) value += factor * random.Normal();
}

}  // namespace colibri
