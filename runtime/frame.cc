#include "runtime/frame.h"

#include <algorithm>

namespace colibri {
namespace {

constexpr uint64_t kAlign = 64;

// Floats that one thread's attention kernels work in.
uint64_t KernelScratchFloats(const Model& model) {
  const ModelConfig& c = model.Config();
  const size_t attention = AttentionScratch(c.kv_lora, c.rope);
  return model.HasIndexer() ? std::max(attention, IndexScratch(c.index_heads, c.index_dim))
                            : attention;
}

// Lists longer than a sequence are never made: where everything is selected, nothing is listed.
int32_t ListLength(const Model& model, const FrameShape& shape) {
  return model.HasIndexer() ? std::min(model.Config().index_top_k, shape.context) : 0;
}

// What a buffer is for: kept through the head, for the layers alone, or the logits.
enum class Use : uint8_t { kHead, kLayers, kLogits };

// Visits every float buffer of a frame with its size, in one place for both the plan and the frame:
// those of the head first, the logits last.
template <class Visit>
void ForEachBuffer(const Model& model, const FrameShape& shape, Frame* f, Visit&& visit_any) {
  const ModelConfig& c = model.Config();
  const auto n = [](int32_t v) { return static_cast<uint64_t>(v); };
  const uint64_t rows = n(shape.rows), threads = n(shape.threads), hidden = n(c.hidden);
  const uint64_t heads = n(c.heads), routed = rows * n(c.top_k);
  const uint64_t indexed = model.HasIndexer() ? 1 : 0;
  const uint64_t widest = n(std::max(c.intermediate, c.moe_intermediate * c.shared_experts));
  const auto at = [f](float* Frame::*member) { return f == nullptr ? nullptr : &(f->*member); };
  visit_any(Use::kHead, at(&Frame::final), rows * hidden);
  visit_any(Use::kHead, at(&Frame::attention_out), rows * hidden);
  visit_any(Use::kHead, at(&Frame::ffn_out), rows * hidden);
  const auto visit = [&](float** to, uint64_t floats) { visit_any(Use::kLayers, to, floats); };
  visit(at(&Frame::x), rows * hidden);
  visit(at(&Frame::normed), rows * hidden);
  // The MTP layer's input is two hidden vectors wide.
  const int32_t inputs = model.HasMtp() ? 2 * c.hidden : c.hidden;
  visit(at(&Frame::normed8_memory), QuantisedRows::MaxBytes(rows, inputs, 2) / sizeof(float));
  visit(at(&Frame::q_latent8_memory), QuantisedRows::MaxBytes(rows, c.q_lora, 2) / sizeof(float));
  visit(at(&Frame::rope_cos), rows * n(c.rope / 2));
  visit(at(&Frame::rope_sin), rows * n(c.rope / 2));
  visit(at(&Frame::q_latent), rows * n(c.q_lora));
  visit(at(&Frame::q), rows * heads * n(c.QkHead()));
  visit(at(&Frame::q_absorbed), rows * heads * n(c.kv_lora));
  visit(at(&Frame::q_rope), rows * heads * n(c.rope));
  visit(at(&Frame::kv), rows * n(c.KvWidth()));
  // Later the quantised values.
  visit(at(&Frame::attended), rows * heads * n(std::max(c.kv_lora, c.v_head)));
  visit(at(&Frame::values), rows * heads * n(c.v_head));
  visit(at(&Frame::kernel_scratch), threads * KernelScratchFloats(model));
  visit(at(&Frame::index_q), indexed * rows * n(c.index_heads) * n(c.index_dim));
  visit(at(&Frame::index_k), indexed * rows * n(c.index_dim));
  visit(at(&Frame::index_w), indexed * rows * n(c.index_heads));
  visit(at(&Frame::index_scores), indexed * n(shape.IndexRows()) * n(shape.context));
  visit(at(&Frame::router_logits), rows * n(c.experts));
  visit(at(&Frame::router_scratch), threads * n(c.experts));
  visit(at(&Frame::expert_gate), routed * n(c.moe_intermediate));
  visit(at(&Frame::expert_up), routed * n(c.moe_intermediate));
  visit(at(&Frame::expert_out), rows * n(std::max(c.top_k, 2)) * hidden);
  visit(at(&Frame::ffn_gate), rows * widest);
  visit(at(&Frame::ffn_up), rows * widest);
  const int32_t most = shape.streamed_head ? shape.rows : FrameShape::kHeadRows;
  visit_any(Use::kLogits, at(&Frame::logits), n(std::min(most, shape.rows)) * n(c.vocab));
}

// Calls place(member, offset) for every buffer; returns the bytes they take together.
template <class Place>
uint64_t LayOut(const Model& model, const FrameShape& shape, Frame* f, Place&& place) {
  uint64_t next = 0, layers = 0;  // bytes so far, and those of the head
  ForEachBuffer(model, shape, f, [&](Use use, float** member, uint64_t floats) {
    const uint64_t bytes = (floats * sizeof(float) + kAlign - 1) / kAlign * kAlign;
    if (use == Use::kHead) layers += bytes;
    const bool over_layers = use == Use::kLogits && shape.streamed_head;
    const uint64_t begin = over_layers ? layers : next;
    place(member, begin);
    next = std::max(next, begin + bytes);
  });
  return next;
}

uint64_t FloatBytes(const Model& model, const FrameShape& shape) {
  return LayOut(model, shape, nullptr, [](float**, uint64_t) {});
}

}  // namespace

int32_t FrameShape::IndexRows() const {
  return std::min(rows, std::max(threads, static_cast<int32_t>(kIndexPass)));
}

uint64_t FrameShape::Bytes(const Model& model) const {
  const ModelConfig& c = model.Config();
  const auto n = static_cast<uint64_t>(rows);
  const auto k = static_cast<uint64_t>(c.top_k);
  const uint64_t lists = n * static_cast<uint64_t>(ListLength(model, *this)) * 4;
  const uint64_t per_row = sizeof(FrameRow) + sizeof(FrameSequence) + sizeof(IndexSet) +
                           sizeof(TokenLogprob) + sizeof(uint32_t) + 4 + k * (16);
  return FloatBytes(model, *this) + lists + n * per_row;
}

Frame::Frame(const Model& model, const FrameShape& frame_shape)
    : shape(frame_shape),
      hidden_(static_cast<size_t>(model.Config().hidden)),
      list_length_(ListLength(model, frame_shape)),
      kernel_scratch_floats_(KernelScratchFloats(model)),
      buffer_(FloatBytes(model, frame_shape), "the frame") {
  LayOut(model, shape, this, [&](float** member, uint64_t offset) {
    *member = reinterpret_cast<float*>(buffer_.data() + offset);
  });
  const auto n = static_cast<size_t>(shape.rows);
  const auto k = static_cast<size_t>(model.Config().top_k);
  rows.reserve(n);
  sequences.reserve(n);
  index_sets.resize(n);
  index_lists.resize(n * static_cast<size_t>(list_length_));
  experts.resize(n * k);
  weights.resize(n * k);
  place.resize(n * k);
  drawn.resize(n);
  drawn_logprobs.resize(n);
  head_rows.reserve(n);
  jobs.reserve(std::min(n * k, static_cast<size_t>(model.Config().experts)));
  job_rows.reserve(n * k);
}

void MakeView(KvStore& kv, Frame* frame) {
  if (!kv.Streams()) return;
  kv.BeginView(&frame->view, frame->id);
  for (size_t i = 0; i < frame->sequences.size(); ++i) {
    FrameSequence& s = frame->sequences[i];
    const int32_t stored = frame->rows[static_cast<size_t>(s.first_row)].position;
    s.first_place = kv.AddToView(&frame->view, i, *s.pages, stored, s.rows - s.drafts);
  }
  kv.EndView(&frame->view);
}

bool Frame::WantsLogits() const {
  return std::any_of(rows.begin(), rows.end(), [](const FrameRow& row) {
    return row.wants_logits && row.state == RowState::kLive;
  });
}

bool Frame::AnyLive() const {
  return std::any_of(rows.begin(), rows.end(),
                     [](const FrameRow& row) { return row.state == RowState::kLive; });
}

}  // namespace colibri
