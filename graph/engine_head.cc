// What the engine does for the head: in one go where it is in memory, else part after part, each of
// them for all rows of the frame that want logits.
#include "graph/engine.h"

namespace colibri {

bool Engine::HeadReady(LayerRef at) noexcept {
  const Profile::Span span(profile_, NodeId::kHeadReady, at.frame, at.layer);
  if (!model_.StreamsHead()) return true;
  GraphFrame& f = At(at);
  // A frame of prompts that go on has no use for the head.
  if (!f.frame.WantsLogits()) return true;
  const bool ready = dense_stream_->Await(f.frame, model_.Config().layers + f.frame.head_part);
  if (!ready) Pause();  // the frame may be anybody's
  return ready;
}

bool Engine::Head(LayerRef at) noexcept {
  const Profile::Span span(profile_, NodeId::kHead, at.frame, at.layer);
  GraphFrame& f = At(at);
  if (model_.StreamsHead()) return HeadPart(f);
  LogitsSink& sink = IsMtp(at) ? static_cast<LogitsSink&>(draft_drawer_) : drawer_;
  stages_.Head(f.frame, sink);
  return false;
}

bool Engine::HeadPart(GraphFrame& f) {
  Frame& frame = f.frame;
  const int32_t part = frame.head_part, block = model_.Config().layers + part;
  if (part == 0) stages_.BeginHead(frame);
  dense_stream_->Begin(frame, block);
  if (frame.WantsLogits()) {
    dense_stream_->Prepare(frame, block + 1);
    stages_.HeadPart(frame, part);
  }
  dense_stream_->Left(frame, block);
  if (part + 1 < model_.HeadParts() && frame.WantsLogits()) {
    ++frame.head_part;
    return true;
  }
  frame.head_part = 0;
  stages_.EndHead(frame, drawer_);
  return false;
}

}  // namespace colibri
