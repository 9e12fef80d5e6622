// Sequences over one model, run through the stages one by one, with reads that fail on demand.
#pragma once

#include <doctest/doctest.h>
#include <errno.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "runtime/stages.h"
#include "tests/function_hook.h"

namespace colibri {

// Logits of each row that had some.
class Logits final : public LogitsSink {
 public:
  void Row(Frame&, size_t row, std::span<float> logits) override {
    CHECK_MESSAGE(!of.contains(row), "row ", row, " has its logits twice");
    of[row].assign(logits.begin(), logits.end());
  }
  std::map<size_t, std::vector<float>> of;
};

// Which reads fail: true for an expert of a layer.
using Fails = std::function<bool(int32_t layer, int32_t expert)>;

// Sequences over one model, store and frame, run through the stages one by one.
class Bench {
 public:
  explicit Bench(const Model& model, FunctionHook::Function hook = nullptr, int32_t rows = 64)
      : model_(model),
        kv_(KvShapeOf(model, 4, KvType::kF32), 64),
        hook_(std::move(hook)),
        stages_(model, kv_, serial_, &hook_),
        frame(model, {rows, 64, 1}) {}

  // Rows [first, first + count) of sequence `number`, whose token at position p is known to all.
  void Add(int32_t number, int32_t first, int32_t count, int32_t drafts = 0) {
    KvPages& pages = pages_[number];
    REQUIRE(kv_.Grow(&pages, first + count));
    FrameSequence s;
    s.pages = &pages;
    s.first_row = static_cast<int32_t>(frame.rows.size());
    s.rows = count;
    s.drafts = drafts;
    for (int32_t i = 0; i < count; ++i) {
      FrameRow row;
      row.sequence = static_cast<int32_t>(frame.sequences.size());
      row.position = first + i;
      row.token = TokenAt(number, first + i);
      row.wants_logits = true;
      row.draft = i >= count - drafts;
      frame.rows.push_back(row);
    }
    frame.sequences.push_back(s);
  }
  void Clear() {
    frame.rows.clear();
    frame.sequences.clear();
  }

  Logits Run(const Fails& fails = nullptr) {
    stages_.Embed(frame);
    Logits logits;
    for (int32_t layer = 0; layer < model_.Config().layers; ++layer) RunLayer(layer, fails);
    stages_.Head(frame, logits);
    return logits;
  }
  Logits RunMtp(const Fails& fails = nullptr) {
    stages_.MtpInput(frame);
    Logits logits;
    RunLayer(model_.Config().layers, fails);
    stages_.Head(frame, logits);
    return logits;
  }

  size_t Live(int32_t sequence) const {
    const FrameSequence& s = frame.sequences[static_cast<size_t>(sequence)];
    return static_cast<size_t>(
        std::count_if(frame.rows.begin() + s.first_row, frame.rows.begin() + s.first_row + s.rows,
                      [](const FrameRow& r) { return r.state == RowState::kLive; }));
  }

 private:
  static int32_t TokenAt(int32_t sequence, int32_t position) {
    return (sequence * 97 + position * 31 + position * position) % 300;
  }

  void RunLayer(int32_t layer, const Fails& fails) {
    frame.layer = layer;
    stages_.Attention(frame, layer);
    stages_.Route(frame, layer);
    const FileTable& files = model_.Files().Files();
    for (FrameJob& job : frame.jobs) {
      const ExpertLayout& layout = model_.Expert(job.item);
      if (fails && fails(layer, job.expert)) {
        job.failed = true;
        job.error = {EIO, layout.extents[0].file, layout.extents[0].offset};
        continue;
      }
      std::vector<std::byte> slot(layout.slot_bytes);
      for (const Extent& e : layout.extents) {
        const uint64_t end = std::min(e.offset + e.bytes, files.Size(e.file));
        files.ReadExact(e.file, e.offset, {slot.data() + e.dest, end - e.offset});
      }
      stages_.RunExpert(frame, job, model_.ExpertView(job.item, slot.data()));
    }
    stages_.SharedFfn(frame, layer);
    stages_.Combine(frame, layer);
  }

  const Model& model_;
  KvStore kv_;
  SerialParallel serial_;
  FunctionHook hook_;
  Stages stages_;
  std::map<int32_t, KvPages> pages_;

 public:
  Frame frame;
};

}  // namespace colibri
