// What an engine is at, for people who look at a run that stands still.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "graph/engine.h"

namespace colibri {
namespace {

// Reads told of by themselves: the oldest are those that everything waits for.
constexpr size_t kReadsTold = 8;

std::string PlaceText(FramePlace place, int32_t awaited, int32_t remaining) {
  if (place.node == NodeId::kCount) return "not begun";
  std::string text = fmt::format("{} of layer {}", NodeName(place.node), place.layer);
  if (place.node == NodeId::kLayerReady && awaited > 0) {
    text += fmt::format(", {} parts of what it needs not there", awaited);
  }
  if (place.node == NodeId::kRoute && remaining > 0) {
    text += fmt::format(", {} of its jobs, shared_ffn and lookahead not done", remaining);
  }
  return text;
}

}  // namespace

std::string Engine::StateText() const {
  std::string text = fmt::format("state: {} frames\n", frames_.size());
  for (const auto& f : frames_) {
    text += fmt::format("frame {}: {}\n", f->frame.id,
                        PlaceText(profile_.Place(f->frame.id), f->awaited, f->remaining));
  }
  text += "nodes, bodies run and running:";
  for (size_t n = 0; n < static_cast<size_t>(NodeId::kCount); ++n) {
    const NodeFigures node = profile_.Node(static_cast<NodeId>(n));
    text += fmt::format(" {} {}", NodeName(static_cast<NodeId>(n)), node.count);
    if (node.running > 0) text += fmt::format(" ({} running)", node.running);
  }
  text += fmt::format("\n{}experts: {}\n", scheduler_.StateText(), cache_->StateText());
  const auto reads = reader_.UnderWay();
  if (!reads) return text + "reads: busy\n";
  text += fmt::format("reads under way: {}\n", reads->size());
  const auto now = Profile::Clock::now();
  for (size_t i = 0; i < std::min(reads->size(), kReadsTold); ++i) {
    const MeteredReader::Pending& read = (*reads)[i];
    text += fmt::format("  for {:.1f} s: {} of {}, offset {}, {} bytes\n",
                        std::chrono::duration<double>(now - read.start).count(), read.name,
                        PathOf(read.first.file), read.first.offset, read.bytes);
  }
  return text;
}

}  // namespace colibri
