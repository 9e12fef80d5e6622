#include "runtime/reference.h"

#include <algorithm>
#include <cerrno>

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

void ReferenceEngine::RunMtpKeys(Frame& frame, std::span<const float* const> hidden) {
  stages_.MtpKeys(frame, hidden);
}

void ReferenceEngine::RunMtp(Frame& frame, LogitsSink& sink) {
  stages_.MtpInput(frame);
  RunLayer(frame, model_.Config().layers);
  stages_.Head(frame, sink);
}

}  // namespace colibri
