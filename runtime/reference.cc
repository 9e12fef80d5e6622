#include "runtime/reference.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "io/check.h"
#include "io/error.h"

namespace colibri {
namespace {

uint64_t WidestSlot(const Model& model) {
  uint64_t bytes = 0;
  for (const Model::ExpertClass& c : model.ExpertClasses()) bytes = std::max(bytes, c.slot_bytes);
  return bytes;
}

}  // namespace

ReferenceEngine::ReferenceEngine(const Model& model, KvStore& kv, StageHook* hook,
                                 Parallel* parallel)
    : model_(model),
      stages_(model, kv, parallel != nullptr ? *parallel : serial_, hook),
      slot_(WidestSlot(model), "an expert") {}

bool ReferenceEngine::Load(uint32_t item, ReadResult* error) {
  const FileTable& files = model_.Files().Files();
  const std::vector<Extent>& extents = model_.Expert(item).extents;
  if (std::find(failing_.begin(), failing_.end(), item) != failing_.end()) {
    *error = {EIO, extents.front().file, extents.front().offset};
    return false;
  }
  for (const Extent& e : extents) {
    const uint64_t end = std::min(e.offset + e.bytes, files.Size(e.file));
    try {
      files.ReadExact(e.file, e.offset, {slot_.data() + e.dest, end - e.offset});
    } catch (const IoError&) {
      *error = {EIO, e.file, e.offset};
      return false;
    }
    bytes_read_ += end - e.offset;
  }
  return true;
}

void ReferenceEngine::RunLayer(Frame& frame, int32_t layer) {
  frame.layer = layer;
  stages_.Attention(frame, layer);
  stages_.Route(frame, layer);
  for (FrameJob& job : frame.jobs) {
    job.failed = !Load(job.item, &job.error);
    if (!job.failed) stages_.RunExpert(frame, job, model_.ExpertView(job.item, slot_.data()));
  }
  stages_.SharedFfn(frame, layer);
  stages_.Combine(frame, layer);
}

void ReferenceEngine::Run(Frame& frame, LogitsSink& sink) {
  stages_.Embed(frame);
  for (int32_t layer = 0; layer < model_.Config().layers; ++layer) RunLayer(frame, layer);
  stages_.Head(frame, sink);
}

void ReferenceEngine::RunMtp(Frame& frame, LogitsSink& sink) {
  stages_.MtpInput(frame);
  RunLayer(frame, model_.Config().layers);
  stages_.Head(frame, sink);
}

void ReferenceEngine::NextDraftStep(Frame& frame, std::span<const int32_t> drafts,
                                    bool share_index) {
  std::vector<FrameRow> next;
  for (size_t s = 0; s < frame.sequences.size(); ++s) {
    FrameSequence& sequence = frame.sequences[s];
    const auto last = static_cast<size_t>(sequence.first_row + sequence.rows - 1);
    FrameRow row = frame.rows[last];
    row.position += 1;
    row.token = drafts[s];
    row.draft = true;
    row.frozen_index = share_index;
    const size_t to = next.size();  // never behind `last`
    const size_t hidden = frame.HiddenSize();
    std::memmove(frame.final + to * hidden, frame.final + last * hidden, hidden * sizeof(float));
    frame.index_sets[to] = frame.index_sets[last];
    if (frame.index_sets[to].listed) {
      std::memmove(frame.IndexList(to), frame.IndexList(last),
                   static_cast<size_t>(frame.index_sets[to].count) * sizeof(int32_t));
    }
    sequence.first_row = static_cast<int32_t>(to);
    sequence.rows = 1;
    sequence.drafts = 1;
    next.push_back(row);
  }
  frame.rows = std::move(next);
}

}  // namespace colibri
