// A model made small, with weights that are made up: what computing takes is measured on it before
// the real weights are read.
#include <algorithm>
#include <bit>
#include <cstring>
#include <random>

#include "io/check.h"
#include "runtime/weights.h"
#include "runtime/weights_dense.h"

namespace colibri {
namespace {

constexpr uint64_t kAlign = 64;

uint64_t Aligned(uint64_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

// Values between -2 and 2 of any format.
void Randomise(const PackedMatrix& m, std::byte* data, std::byte* scales, std::mt19937_64* random) {
  const uint64_t bytes = DataBytes(m);
  // The exponent's upper bits make numbers of 1/4 to 2.
  uint64_t keep = ~uint64_t{0}, set = 0;
  if (m.format == WeightFormat::kF32) keep = 0x80FFFFFF80FFFFFFull, set = 0x3F0000003F000000ull;
  if (m.format == WeightFormat::kBF16) keep = 0x80FF80FF80FF80FFull, set = 0x3F003F003F003F00ull;
  if (m.format == WeightFormat::kF16) keep = 0x87FF87FF87FF87FFull, set = 0x3000300030003000ull;
  for (uint64_t i = 0; i < bytes; i += 8) {
    const uint64_t bits = ((*random)() & keep) | set;
    std::memcpy(data + i, &bits, std::min<uint64_t>(8, bytes - i));
  }
  const float scale = 1.0F / 128;
  for (uint64_t i = 0; i < ScaleBytes(m); i += sizeof(scale)) {
    std::memcpy(scales + i, &scale, sizeof(scale));
  }
}

// A visitor of runtime/weights_visit.h. The arena is zeros.
struct MakeUp {
  std::byte* next;
  std::mt19937_64 random;

  void Matrix(int32_t, const std::string& name, int64_t, int64_t, PackedMatrix& m) {
    std::byte* data = next;
    std::byte* scales = data + Aligned(DataBytes(m));
    next = scales + Aligned(ScaleBytes(m));
    m.data = data;
    if (HasScales(m.format)) m.scales = scales;
    if (name.starts_with("mlp.gate.") || name.starts_with("model.embed_tokens.")) {
      Randomise(m, data, scales, &random);
    }
  }
  void Vector(int32_t, const std::string&, int64_t size, std::vector<float>& v) {
    v.assign(static_cast<size_t>(size), 1.0F);
  }
};

template <class T>
void KeepRange(std::vector<T>* all, int32_t first, int32_t count) {
  std::vector<T> kept;
  for (int32_t i = first; i < first + count; ++i) {
    kept.push_back(std::move((*all)[static_cast<size_t>(i)]));
  }
  *all = std::move(kept);
}

}  // namespace

void Model::CutToSample(int32_t first, int32_t layers, int32_t vocab) {
  COLIBRI_CHECK(arena_.data() == nullptr && first >= 0 && layers > 0);
  COLIBRI_CHECK(first + layers <= config_.layers && vocab <= config_.vocab);
  const bool whole = layers == config_.layers;
  const uint32_t begin = first_expert_[static_cast<size_t>(first)];
  const uint32_t end = static_cast<size_t>(first + layers) < first_expert_.size()
                           ? first_expert_[static_cast<size_t>(first + layers)]
                           : ExpertCount();
  KeepRange(&layers_, first, layers);
  KeepRange(&blocks_, first, layers);  // of no use: nothing of a sample is streamed
  head_blocks_.clear();
  KeepRange(&first_expert_, first, layers);
  KeepRange(&experts_, static_cast<int32_t>(begin), static_cast<int32_t>(end - begin));
  KeepRange(&expert_layer_, static_cast<int32_t>(begin), static_cast<int32_t>(end - begin));
  for (uint32_t& expert : first_expert_) expert -= begin;
  for (int32_t& layer : expert_layer_) layer -= first;
  std::vector<bool> sparse, full;
  for (int32_t i = first; i < first + layers; ++i) {
    sparse.push_back(config_.Sparse(i));
    full.push_back(config_.FullIndexer(i));
  }
  config_.sparse = std::move(sparse);
  config_.full_indexer = std::move(full);
  config_.layers = layers;
  config_.mtp = false;
  mtp_.reset();
  config_.vocab = embedding_.rows = head_.rows = vocab;
  config_.stop_ids.clear();
  if (!whole) {
    for (LayerWeights& layer : layers_) layer.indexer.reset();
    has_indexer_ = false;
  }
  for (ExpertClass& c : classes_) c.experts = 0;
  for (const ExpertLayout& expert : experts_) ++classes_[expert.slot_class].experts;
}

void Model::MakeUpDense() {
  COLIBRI_CHECK(arena_.data() == nullptr);
  PopulatedBuffer arena(Dense::ArenaBytes(*this, {}), "the measured weights");
  MakeUp make{arena.data(), std::mt19937_64(1)};
  Dense::Visit(*this, make);
  arena_ = std::move(arena);
}

}  // namespace colibri
