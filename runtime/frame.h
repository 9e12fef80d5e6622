// A frame: one micro-batch of rows travelling through the layers together, with every buffer its
// stages write to. Rows of one sequence are consecutive and ascending in position.
// Ownership: allocated once from a FrameShape, reused for ever. Threads: whoever holds the frame (a
// graph node, the reference engine); stages cut rows and outputs into disjoint pieces.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/memory.h"
#include "io/reader.h"
#include "runtime/kv_store.h"
#include "runtime/request.h"
#include "runtime/weights.h"

namespace colibri {

struct Sequence;  // runtime/sequence.h; stages never look inside

// Why a row, and with it its sequence's line, cannot go on.
enum class RowState : uint8_t { kLive, kReadFailed, kNotFinite };
// What a row that is kReadFailed misses.
enum class FailedRead : uint8_t { kExpert, kDense, kEmbedding, kHead, kKvPage, kKvWrite };

struct FrameRow {
  int32_t sequence = 0;  // index in Frame::sequences
  int32_t position = 0;
  int32_t token = 0;
  bool draft = false;         // its failure rejects a draft, not the line
  bool wants_logits = false;  // a token is drawn from it, or its logits are asked for
  bool frozen_index = false;  // MTP steps >= 2: keeps the index set it was given (model spec 4.3)
  RowState state = RowState::kLive;
  int32_t failed_layer = -1;
};

struct FrameSequence {
  Sequence* sequence = nullptr;
  const KvPages* pages = nullptr;
  int32_t first_row = 0;
  int32_t rows = 0;
  int32_t drafts = 0;      // of the rows, the last ones
  int32_t accepted = 0;    // of the drafts, once they are verified
  int32_t draft_kind = 0;  // of the drafts (runtime/draft.h)
  size_t first_place = 0;  // of its pages in the frame's view, where layers are streamed
  // When a row is kReadFailed: what could not be read, or for a page perhaps written, and how.
  ReadResult error;
  FailedRead failed = FailedRead::kExpert;
  int32_t failed_page = -1;
};

// One distinct expert of a layer's union with the rows routed to it: job_rows [first, first +
// count).
struct FrameJob {
  int32_t expert = 0;
  uint32_t item = 0;
  int32_t first = 0;
  int32_t count = 0;
  bool failed = false;
  ReadResult error;
};

// The positions a row attends to: the first `count` of its sequence, or `count` listed ones.
struct IndexSet {
  int32_t count = 0;
  bool listed = false;
};

// Sizes of everything a frame holds; also what the plan counts.
struct FrameShape {
  int32_t rows = 0;
  int32_t context = 0;  // longest sequence, for index scratch
  int32_t threads = 1;
  // The head is read in parts, each of which is used for all rows before the next one comes: logits
  // of all rows are held, where what the layers work in is free by then. At real size that is 880
  // kB a row, and logits are 620.
  bool streamed_head = false;
  static constexpr int32_t kHeadRows = 16;  // else logits are computed for at most so many at once
  // Index scores are computed for so many rows at once: a pass of the kernel, or a selection for
  // each thread.
  int32_t IndexRows() const;

  uint64_t Bytes(const Model& model) const;
};

class Frame {
 public:
  Frame(const Model& model, const FrameShape& shape);

  const FrameShape shape;
  uint16_t id = 0;

  // What travels.
  std::vector<FrameRow> rows;
  std::vector<FrameSequence> sequences;
  int32_t layer = 0;
  PageView view;  // where the pages of streamed layers are
  size_t Rows() const { return rows.size(); }
  size_t HiddenSize() const { return hidden_; }
  // Page number `number` of a sequence of the frame.
  KvPlace Place(const FrameSequence& s, size_t number) const {
    return {s.pages->ids[number], view.open ? view.places[s.first_place + number] : 0};
  }
  // False: no row has anything left to compute.
  bool AnyLive() const;
  // Some row that has not failed wants logits.
  bool WantsLogits() const;

  // Residual stream and its norms, [rows][hidden].
  float* x = nullptr;
  float* normed = nullptr;
  // `normed` and `q_latent` as int8: in two planes for attention's projections, in one for the FFN.
  // No values where the weights take f32.
  QuantisedRows normed8, q_latent8;
  float* normed8_memory = nullptr;
  float* q_latent8_memory = nullptr;
  float* final = nullptr;  // after the final norm (or the MTP layer's head norm)
  // Attention. Heads are the outer index within a row.
  float* rope_cos = nullptr;  // [rows][rope / 2]
  float* rope_sin = nullptr;
  float* q_latent = nullptr;        // [rows][q_lora], normalised
  float* q = nullptr;               // [rows][heads][nope + rope]
  float* q_absorbed = nullptr;      // [rows][heads][kv_lora]
  float* q_rope = nullptr;          // [rows][heads][rope]
  float* kv = nullptr;              // [rows][kv_lora + rope]
  float* attended = nullptr;        // [rows][heads][kv_lora]
  float* values = nullptr;          // [rows][heads][v_head]
  float* attention_out = nullptr;   // [rows][hidden]
  float* kernel_scratch = nullptr;  // [threads][what AttendLatents and IndexScores work in]
  // Indexer.
  float* index_q = nullptr;          // [rows][index_heads][index_dim]
  float* index_k = nullptr;          // [rows][index_dim]
  float* index_w = nullptr;          // [rows][index_heads]
  float* index_scores = nullptr;     // [IndexRows()][context]
  std::vector<IndexSet> index_sets;  // [rows]
  std::vector<int32_t> index_lists;  // [rows][min(index_top_k, context)]
  // Router and experts.
  float* router_logits = nullptr;   // [rows][experts]
  float* router_scratch = nullptr;  // [threads][experts]
  std::vector<int32_t> experts;     // [rows][top_k]
  std::vector<float> weights;       // [rows][top_k]
  std::vector<FrameJob> jobs;
  std::vector<int32_t> job_rows;  // rows of the frame, job by job
  std::vector<int32_t> place;     // [rows][top_k]: index in job_rows, -1 for a failed row
  float* expert_gate = nullptr;   // [rows * top_k][moe_intermediate], in job_rows order
  float* expert_up = nullptr;
  float* expert_out = nullptr;  // [rows * max(top_k, 2)][hidden], in job_rows order
  // Dense or shared FFN.
  float* ffn_gate = nullptr;  // [rows][widest]
  float* ffn_up = nullptr;
  float* ffn_out = nullptr;  // [rows][hidden]
  // Head, where it is read in parts: the next one, and the rows that want logits, which are the
  // first rows of attention_out and, where the head takes int8, of head8.
  int32_t head_part = 0;
  std::vector<uint32_t> head_rows;
  QuantisedRows head8;
  // Head: what was drawn from the rows that wanted logits (-1: logits not finite).
  std::vector<int32_t> drawn;
  std::vector<TokenLogprob> drawn_logprobs;
  float* logits = nullptr;  // [kHeadRows or, with a streamed head, rows][vocab]

  int32_t* IndexList(size_t row) {
    return index_lists.data() + row * static_cast<size_t>(list_length_);
  }
  float* KernelScratch(int thread) const {
    return kernel_scratch + static_cast<size_t>(thread) * kernel_scratch_floats_;
  }

 private:
  size_t hidden_ = 0;
  int32_t list_length_ = 0;
  size_t kernel_scratch_floats_ = 0;
  PopulatedBuffer buffer_;
};

// Fixes, where layers are streamed, in which places a frame that has just been filled finds the
// pages of its sequences. Under the scheduler's lock.
void MakeView(KvStore& kv, Frame* frame);

}  // namespace colibri
