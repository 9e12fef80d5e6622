// The forward pass as plain functions over a frame: what is computed. The reference engine calls
// them one after another, the flow graph when their inputs are there; both give the same bits.
//
// A layer is: Attention, Route, RunExpert for every job of the union, SharedFfn, Combine (model
// spec 3.1). Layer number `layers` is the MTP layer, entered through MtpInput (model spec 4.1).
// Threads: one caller per frame at a time, except RunExpert (any number of jobs of a frame at once,
// beside SharedFfn and Predict).
#pragma once

#include <cstdint>
#include <span>

#include "runtime/frame.h"
#include "runtime/kv_store.h"
#include "runtime/parallel.h"
#include "runtime/weights.h"

namespace colibri {

// Where the reference engine lets a test look at a frame, or make a mistake in it.
enum class StagePoint : uint8_t {
  kLayerStart,    // x is the residual stream entering the layer
  kIndexQueries,  // index_q, index_w are final; scores are not computed yet
  kIndexSets,     // index_sets, index_lists are final
  kAttention,     // attention_out is the output of o_proj
  kChosen,        // experts, weights are final; the union is not formed yet
};

class StageHook {
 public:
  virtual ~StageHook() = default;
  virtual void At(StagePoint point, Frame& frame, int32_t layer) = 0;
};

// Takes the logits of a row: draws a token, stores a log probability, compares with a fixture.
class LogitsSink {
 public:
  virtual ~LogitsSink() = default;
  // Called once for each row that wants logits and is live; several rows at once from several
  // threads. `logits` [vocab] is valid during the call.
  virtual void Row(Frame& frame, size_t row, std::span<float> logits) = 0;
};

class Stages {
 public:
  // All outlive the object. `hook` may be nullptr.
  Stages(const Model& model, KvStore& kv, Parallel& parallel, StageHook* hook = nullptr)
      : model_(model), kv_(kv), parallel_(parallel), hook_(hook) {}

  // Starts a frame whose rows and sequences are filled in: embeddings into x (or, where the table
  // is not in memory, by EmbeddingRows before attention), rotary angles, layer 0.
  void Embed(Frame& frame) const;
  // Starts the MTP layer: x from each row's token and its `final` vector, or the one that `hidden`
  // names; rotary angles; the layer.
  void MtpInput(Frame& frame, std::span<const float* const> hidden = {}) const;
  // MtpInput and nothing of the layer but its rows' latents and index keys, the same bits as
  // Attention stores: all that later drafts need of a prompt's rows and of confirmed ones.
  void MtpKeys(Frame& frame, std::span<const float* const> hidden = {}) const;

  // x += attention of the layer; writes the rows' latents and index keys. Rows that turn out not
  // finite are marked. Of a frame without live rows neither it nor SharedFfn computes anything: its
  // weights need not be there.
  void Attention(Frame& frame, int32_t layer) const;
  // Sparse layers: the choice of every live row and the union as jobs in file order of the experts.
  // Dense layers: no jobs. Both: the normalised input of the FFN in `normed`.
  void Route(Frame& frame, int32_t layer) const;
  // One job's rows through one expert, into its rows of expert_out.
  void RunExpert(Frame& frame, const FrameJob& job, const FfnWeights& weights) const;
  // The dense FFN or the shared expert of the layer, into ffn_out.
  void SharedFfn(Frame& frame, int32_t layer) const;
  // x += routed experts in rank order + shared; marks rows whose job failed, and those after them.
  void Combine(Frame& frame, int32_t layer) const;

  // `final` of all rows, then logits of the rows that want them, in blocks, to the sink.
  void Head(Frame& frame, LogitsSink& sink) const;
  // The same bits in steps, where the head is read in parts: `final` and the rows that want logits;
  // their logits for the outputs of one part, which is there; all logits to the sink. The frame has
  // streamed_head. Rows that have failed meanwhile are left out.
  void BeginHead(Frame& frame) const;
  void HeadPart(Frame& frame, int32_t part) const;
  void EndHead(Frame& frame, LogitsSink& sink) const;

  // Experts that the router of sparse layer `layer` would choose for the frame's current x: between
  // Attention and Combine of the layer before, its post-attention state; after Combine, the layer's
  // input. `with_shared` adds the output of SharedFfn, which must have ended. Adds to votes
  // [experts]: top_k from each row for its first choice, 1 for its last; the more, the surer.
  // `scratch`: see PredictScratch.
  void Predict(const Frame& frame, int32_t layer, bool with_shared, std::span<float> scratch,
               std::span<uint32_t> votes) const;
  // Floats Predict needs, for frames of at most `rows` rows.
  static uint64_t PredictScratch(const ModelConfig& config);

  const Model& TheModel() const { return model_; }

 private:
  // The head's input: `final`, and the rows that want logits.
  void FinalRows(Frame& frame) const;
  void Draw(Frame& frame, std::span<const uint32_t> rows, LogitsSink& sink) const;
  void At(StagePoint point, Frame& frame, int32_t layer) const {
    if (hook_ != nullptr) hook_->At(point, frame, layer);
  }
  void Angles(Frame& frame) const;
  void NormRows(const Frame& frame, const float* x, const std::vector<float>& weight,
                float* out) const;
  void MatmulRows(const PackedMatrix& w, const float* x, size_t rows, float* out) const;
  // y = w x for rows index[0 .. rows) of x, or the first ones: with int8 activations if the matrix
  // takes them. For the classes that decisions name; `scratch` holds rows of x.
  void Product(const PackedMatrix& w, const float* x, const int32_t* index, size_t rows, float* y,
               float* scratch) const;
  // y = w x for the first rows of x, with two planes of int8 activations if the matrix takes them.
  // `ready`: x as it was quantised for another matrix, or to be made in `memory`.
  void WideProduct(const PackedMatrix& w, const float* x, size_t rows, float* y,
                   QuantisedRows* ready, float* memory) const;
  void QuantiseNormed(Frame& frame, int32_t layer) const;
  struct FfnBuffers {
    float* gate;  // [rows][width]
    float* up;    // [rows][width]
    float* out;   // [rows][hidden]
  };
  // down(silu(gate x) * up x) of the frame's normed rows.
  void Ffn(const FfnWeights& w, const Frame& frame, const int32_t* index, size_t rows,
           const FfnBuffers& to) const;
  void Queries(Frame& frame, const LayerWeights& w) const;
  void StoreKeys(Frame& frame, const LayerWeights& w, int32_t layer) const;
  void ChooseIndexSets(Frame& frame, const LayerWeights& w, int32_t layer) const;
  void ScoreRows(Frame& frame, std::span<const int32_t> rows, int32_t layer) const;
  void Attend(Frame& frame, int32_t layer) const;
  void FormUnion(Frame& frame, int32_t layer) const;
  void MarkNotFinite(Frame& frame, int32_t layer) const;

  const Model& model_;
  KvStore& kv_;
  Parallel& parallel_;
  StageHook* hook_;
};

// Marks row `row` and, as nothing of its sequence after it can be right either, all later rows of
// the sequence; if it is not a draft, all rows of the sequence.
void MarkFailed(Frame& frame, size_t row, RowState state, int32_t layer);

// y[r][o] = sum of w[o][i] * x[r][i], split over threads. Row-major, tight, or rows of y of
// `stride` floats.
void ParallelMatmul(Parallel& parallel, const PackedMatrix& w, const float* x, size_t rows,
                    float* y, size_t stride = 0);

// Rows [first, first + count) of a matrix as a matrix.
PackedMatrix RowsOf(const PackedMatrix& w, int64_t first, int32_t count);

// cos and sin of position * theta^(-2j/width) for j < width / 2, angle and frequency in f32 exactly
// as the reference computes them (model spec 3.3): inv_freq = 1 / powf(theta, 2j / width).
void RopeAngles(float theta, int32_t width, int32_t position, float* cos, float* sin);
void RopeFrequencies(float theta, int32_t width, float* inv_freq);

}  // namespace colibri
