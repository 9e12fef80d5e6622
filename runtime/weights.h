// A model: its configuration, its dense weights in memory (packed as on disk) and, for every routed
// expert, where its bytes lie and how they look once read into a slot.
//
// Opening reads headers only (enough for the plan); LoadDense reads the dense weights, all of them
// or those that are to stay in memory. The others are read with each sweep
// (runtime/dense_stream.h).
// Threads: LoadDense once; everything const from any thread afterwards, but see PlaceLayer.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/container.h"
#include "io/memory.h"
#include "io/reader.h"
#include "kernels/weight_format.h"
#include "runtime/config.h"

namespace colibri {

// down(silu(gate x) * (up x)); gate and up [width x hidden], down [hidden x width].
struct FfnWeights {
  PackedMatrix gate, up, down;
};

struct IndexerWeights {
  PackedMatrix wq_b;          // [index_heads * index_dim x q_lora], fed the normalised q latent
  PackedMatrix wk;            // [index_dim x hidden]
  PackedMatrix weights_proj;  // [index_heads x hidden]
  std::vector<float> k_norm_weight, k_norm_bias;  // [index_dim]
};

struct LayerWeights {
  std::vector<float> input_norm, post_norm;  // [hidden]
  std::vector<float> q_a_norm, kv_a_norm;    // [q_lora], [kv_lora]
  PackedMatrix q_a, q_b, kv_a, kv_b, o;      // model spec 2.1
  std::optional<IndexerWeights> indexer;     // full layers of a container that has indexers
  FfnWeights ffn;                            // dense FFN, or the shared expert(s)
  PackedMatrix router;                       // [experts x hidden]; sparse layers
  std::vector<float> router_bias;            // [experts]; sparse layers
};

struct MtpWeights {
  std::vector<float> enorm, hnorm, head_norm;  // [hidden]
  PackedMatrix eh_proj;  // [hidden x 2 hidden]; columns 0..hidden-1: embedding
};

// One routed expert. The matrices' pointers are offsets from the slot's start, held as such.
struct ExpertLayout {
  std::vector<Extent> extents;  // merged where adjacent, aligned to kIoAlign
  uint16_t slot_class = 0;
  uint64_t slot_bytes = 0;    // what the extents fill
  uint64_t useful_bytes = 0;  // without rounding
  struct Matrix {
    PackedMatrix shape;  // data and scales unset
    uint64_t data_at = 0, scales_at = 0;
  };
  Matrix gate, up, down;
};

// Which dense weights stay in memory. Norms, biases, routers and the scales of embedding and head
// always do.
struct DenseResidents {
  // The blocks of the first so many layers; the others are read with each sweep.
  int32_t layers = std::numeric_limits<int32_t>::max();
  bool embedding = true;  // false: rows are read as tokens need them
  bool mtp = true;        // false: nothing of the MTP layer is loaded, there are no drafts
  bool head = true;  // false: read in parts with each sweep; there are no drafts by the MTP layer
  bool operator==(const DenseResidents&) const = default;
};

// A layer's large matrices as one thing to read: attention, indexer, dense FFN or shared expert. Or
// a part of the head without its scales.
struct DenseBlock {
  std::vector<Extent> extents;  // as an expert's
  uint64_t bytes = 0;           // what the extents fill
  uint64_t useful_bytes = 0;    // without rounding
  struct Place {
    uint64_t data_at = 0, scales_at = 0;
  };
  std::vector<Place> places;  // of the matrices in their order
};

class Model {
 public:
  // Headers and config only. Directories as in Container. Throws ModelError: with every missing
  // tensor, grouped ("layers 40-77: mlp.experts.*: 9,728 tensors missing; is a shard missing?"),
  // with formats that are recognised but not supported by name (int2-row, int3-g64, e8-iq3-lattice,
  // fp8-e4m3-b128), with sizes that fit nothing.
  explicit Model(const std::vector<std::string>& directories);
  ~Model();
  Model(Model&&) noexcept;

  // Reads the dense weights that are to stay into one populated arena; with the tables they are
  // DenseBytes(residents). Throws IoError.
  void LoadDense(const DenseResidents& residents = {});

  // For measuring how fast the machine computes: keeps `layers` layers from `first` on and the
  // first `vocab` tokens, without MTP layer and, unless it is the whole model, without indexers.
  // Before any load; DenseBytes() follows.
  void CutToSample(int32_t first, int32_t layers, int32_t vocab);
  // In place of LoadDense: routers and embeddings at random, everything else zeros, which products
  // take as long for. Nothing is read.
  void MakeUpDense();

  const ModelConfig& Config() const { return config_; }
  ModelConfig& MutableConfig() { return config_; }  // latent_eps, index_top_k: before LoadDense
  const Container& Files() const { return container_; }
  Container& Files() { return container_; }

  // Layers 0 .. layers-1, and the MTP layer at index `layers` when HasMtp().
  const LayerWeights& Layer(int32_t layer) const { return layers_[static_cast<size_t>(layer)]; }
  // Tests make mistakes in a loaded model through these two, so that no engine needs a switch.
  LayerWeights& MutableLayer(int32_t layer) { return layers_[static_cast<size_t>(layer)]; }
  ExpertLayout& MutableExpert(uint32_t item) { return experts_[item]; }
  // Without data where its rows are read as tokens need them, or where the head is read in parts.
  const PackedMatrix& Embedding() const { return embedding_; }
  const PackedMatrix& Head() const { return head_; }
  const std::vector<float>& FinalNorm() const { return final_norm_; }

  // The MTP layer is complete and announced.
  bool HasMtp() const { return mtp_.has_value(); }
  const MtpWeights& Mtp() const { return *mtp_; }
  // Layers with weights: layers + (HasMtp() ? 1 : 0).
  int32_t LayerCount() const { return static_cast<int32_t>(layers_.size()); }
  // False: some full layer lacks its indexer, so every layer attends densely at every length.
  bool HasIndexer() const { return has_indexer_; }
  // Forgets all indexers (--attention dense). Before LoadDense.
  void DropIndexer();
  // Products of experts, dense FFN, o_proj and head take int8 activations where the format has them
  // (decisions: numerics). False: f32 everywhere (--activations f32). Not while frames run.
  bool Int8Activations() const { return int8_activations_; }
  void SetInt8Activations(bool on) { int8_activations_ = on; }
  // Lines for the banner: dense attention for want of indexers, incomplete MTP layer, int4 eh_proj.
  const std::vector<std::string>& Notes() const { return notes_; }

  // Experts are numbered over all sparse layers, in layer order, the MTP layer last.
  uint32_t ExpertCount() const { return static_cast<uint32_t>(experts_.size()); }
  uint32_t ExpertItem(int32_t layer, int32_t expert) const {
    return first_expert_[static_cast<size_t>(layer)] + static_cast<uint32_t>(expert);
  }
  const ExpertLayout& Expert(uint32_t item) const { return experts_[item]; }
  int32_t ExpertLayer(uint32_t item) const { return expert_layer_[item]; }
  // The matrices of an expert whose bytes were read to `slot`.
  FfnWeights ExpertView(uint32_t item, const std::byte* slot) const;
  // One class for each distinct expert size; bytes of a slot that holds any expert of the class.
  struct ExpertClass {
    uint64_t slot_bytes = 0;
    uint32_t experts = 0;
    int32_t first_layer = 0, last_layer = 0;
  };
  const std::vector<ExpertClass>& ExpertClasses() const { return classes_; }

  // What LoadDense takes from memory, tables included.
  uint64_t DenseBytes(const DenseResidents& residents = {}) const;
  // Of every layer with weights, whether it is in memory or not.
  const DenseBlock& Block(int32_t layer) const { return blocks_[static_cast<size_t>(layer)]; }
  // The layer's block is not in memory. After LoadDense.
  bool Streams(int32_t layer) const { return layer >= residents_.layers && layer < config_.layers; }
  const DenseResidents& Residents() const { return residents_; }
  // The head in parts of consecutive outputs, of at most kHeadPartBytes and rounding each: part i
  // has those from HeadOutput(i) to HeadOutput(i + 1).
  int32_t HeadParts() const { return static_cast<int32_t>(head_blocks_.size()); }
  int32_t HeadOutput(int32_t part) const;
  const DenseBlock& HeadBlock(int32_t part) const {
    return head_blocks_[static_cast<size_t>(part)];
  }
  static constexpr uint64_t kHeadPartBytes = uint64_t{48} << 20;
  // The head is not in memory. After LoadDense.
  bool StreamsHead() const { return !residents_.head; }
  // Layer(layer) shows the block that was read to `base`; nullptr: it shows none. Only where the
  // bytes lie changes, not what they are. For layers that Streams() names, while nobody computes
  // with the layer.
  void PlaceLayer(int32_t layer, const std::byte* base) const;
  // The same for HeadPart(part), if StreamsHead().
  void PlaceHead(int32_t part, const std::byte* base) const;
  // The part's outputs as a matrix, where PlaceHead found them.
  PackedMatrix HeadPart(int32_t part) const;
  // Of a layer whose block is shown: the first scales that are not finite, nullptr if all are. What
  // stays in memory is checked by LoadDense.
  const TensorEntry* BadScales(int32_t layer) const;
  // "int4-g64 experts, int4-g64 attention, int8-row head" for the banner.
  std::string FormatSummary() const;

 private:
  struct Resolver;
  struct Dense;
  Container container_;
  ModelConfig config_;
  mutable std::vector<LayerWeights> layers_;  // PlaceLayer moves views into them
  std::optional<MtpWeights> mtp_;
  PackedMatrix embedding_, head_;
  std::vector<float> final_norm_;
  bool has_indexer_ = false;
  bool int8_activations_ = true;
  std::vector<std::string> notes_;
  std::vector<uint32_t> first_expert_;
  std::vector<int32_t> expert_layer_;
  std::vector<ExpertLayout> experts_;
  std::vector<ExpertClass> classes_;
  std::vector<DenseBlock> blocks_, head_blocks_;
  int32_t head_outputs_ = 0;                         // of every part of the head but the last
  mutable std::vector<const std::byte*> head_data_;  // of the parts: PlaceHead
  DenseResidents residents_;
  PopulatedBuffer arena_;
};

}  // namespace colibri
