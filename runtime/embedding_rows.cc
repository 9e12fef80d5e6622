#include "runtime/embedding_rows.h"

#include <algorithm>
#include <utility>

#include "io/check.h"
#include "kernels/kernels.h"
#include "runtime/stages.h"
#include "runtime/weights_visit.h"

namespace colibri {
namespace {

uint64_t RowSize(const Model& model) {
  return RowBytes(model.Embedding().format, model.Embedding().cols);
}

// A row begins and ends anywhere in its pages.
uint64_t SlotSize(const Model& model) {
  return (RowSize(model) + kIoAlign - 1) / kIoAlign * kIoAlign + kIoAlign;
}

}  // namespace

uint64_t EmbeddingRows::Bytes(const Model& model, int32_t frames, int32_t rows) {
  const uint64_t each = SlotSize(model) + sizeof(int32_t) + sizeof(Extent) + sizeof(ReadResult);
  return static_cast<uint64_t>(frames) * static_cast<uint64_t>(rows) * each;
}

EmbeddingRows::EmbeddingRows(const Model& model, Reader& reader, int32_t frames, int32_t rows)
    : model_(model),
      reader_(reader),
      table_(*model.Files().Find(kEmbeddingName)),
      slot_bytes_(SlotSize(model)),
      rows_(static_cast<size_t>(rows)),
      buffer_(slot_bytes_ * rows_ * static_cast<uint64_t>(frames), "rows of the embedding"),
      frames_(static_cast<size_t>(frames)) {
  for (Rows& f : frames_) {
    f.tokens.reserve(rows_);
    f.extents.reserve(rows_);
    f.results.reserve(rows_);
  }
}

void EmbeddingRows::Start(Arrived arrived) {
  arrived_ = std::move(arrived);
  reader_.Start([this](uint64_t id, const ReadResult& result) { Done(id, result); });
}

std::byte* EmbeddingRows::Slot(size_t frame, size_t number) const {
  return buffer_.data() + (frame * rows_ + number) * slot_bytes_;
}

void EmbeddingRows::Prepare(Frame& frame, int32_t layer) {
  if (layer != 0) return;
  COLIBRI_CHECK(frame.Rows() <= rows_);
  Rows& f = frames_[frame.id];
  f.tokens.clear();
  for (const FrameRow& row : frame.rows) f.tokens.push_back(row.token);
  std::sort(f.tokens.begin(), f.tokens.end());
  f.tokens.erase(std::unique(f.tokens.begin(), f.tokens.end()), f.tokens.end());
  f.extents.clear();
  const uint64_t size = RowSize(model_);
  for (const int32_t token : f.tokens) {
    const uint64_t at = table_.offset + static_cast<uint64_t>(token) * size;
    const uint64_t begin = at / kIoAlign * kIoAlign;
    const uint64_t end = (at + size + kIoAlign - 1) / kIoAlign * kIoAlign;
    f.extents.push_back({table_.file, begin, end - begin, 0});
  }
  const std::lock_guard lock(mutex_);
  f.results.assign(f.tokens.size(), {});
  f.missing = f.tokens.size();
  for (size_t i = 0; i < f.tokens.size(); ++i) {
    ReadJob job;
    job.id = uint64_t{frame.id} << 32 | i;
    job.destination = Slot(frame.id, i);
    job.extents = {&f.extents[i], 1};
    reader_.Submit(job);
  }
}

bool EmbeddingRows::Await(Frame& frame, int32_t layer) {
  if (layer != 0) return true;
  const std::lock_guard lock(mutex_);
  Rows& f = frames_[frame.id];
  if (f.missing == 0) return true;
  f.waiting = true;
  ++stats_.waits;
  return false;
}

void EmbeddingRows::Done(uint64_t id, const ReadResult& result) {
  const auto frame = static_cast<uint16_t>(id >> 32);
  {
    const std::lock_guard lock(mutex_);
    Rows& f = frames_[frame];
    const auto number = static_cast<size_t>(id & 0xffffffff);
    f.results[number] = result;
    if (result.error == 0) {
      stats_.bytes_demand += f.extents[number].bytes;
    } else {
      ++stats_.failures;
    }
    if (--f.missing > 0 || !std::exchange(f.waiting, false)) return;
  }
  arrived_(frame, 0);
}

void EmbeddingRows::Begin(Frame& frame, int32_t layer) {
  if (layer != 0) return;
  const Rows& f = frames_[frame.id];
  const size_t hidden = frame.HiddenSize();
  const PackedMatrix& table = model_.Embedding();
  for (size_t r = 0; r < frame.Rows(); ++r) {
    const int32_t token = frame.rows[r].token;
    const auto number = static_cast<size_t>(
        std::lower_bound(f.tokens.begin(), f.tokens.end(), token) - f.tokens.begin());
    const ReadResult& result = f.results[number];
    float* x = frame.x + r * hidden;
    if (result.error != 0) {
      FrameSequence& sequence = frame.sequences[static_cast<size_t>(frame.rows[r].sequence)];
      if (!frame.rows[r].draft) {  // why a draft was rejected is never told
        sequence.error = result;
        sequence.failed = FailedRead::kEmbedding;
      }
      MarkFailed(frame, r, RowState::kReadFailed, layer);
      std::fill(x, x + hidden, 0.0f);
      continue;
    }
    // Of the table only the scales are in memory.
    PackedMatrix row = table;
    row.rows = 1;
    const uint64_t at = table_.offset + static_cast<uint64_t>(token) * RowSize(model_);
    row.data = Slot(frame.id, number) + at % kIoAlign;
    if (HasScales(table.format)) {
      row.scales += ScalesPerRow(table.format, table.cols, table.group) * token * 4;
    }
    DequantiseRow(row, 0, x);
  }
}

DenseStats EmbeddingRows::Stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace colibri
