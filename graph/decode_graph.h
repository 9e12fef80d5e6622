// The flow graph: fifteen nodes, one buffer and their edges. Start reading here.
//
// One cyclic graph serves every layer; messages carry the layer. This file says when things happen;
// what they do is behind NodeBodies (engine.cc), the maths behind runtime/stages.h. The rules that
// keep it correct (who owns a frame, why the countdown comes first, which nodes have priorities)
// are in graph/README.md. Threads: built inside the arena that will run it. PutReady from the I/O
// thread, PutLayer and PutHead from any.
#pragma once

#include <oneapi/tbb/flow_graph.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "graph/messages.h"
#include "graph/wiring.h"
#include "runtime/scheduler.h"
#include "runtime/verify.h"

namespace colibri {

// What the nodes do. Every method is called by exactly one node and never throws.
class NodeBodies {
 public:
  virtual ~NodeBodies() = default;
  virtual Scheduler::Filled Admit(FrameRef frame) noexcept = 0;
  virtual void Embed(FrameRef frame) noexcept = 0;
  // True: all the layer needs besides experts is there, the frame may go on. False: PutLayer
  // follows, perhaps before this returns.
  virtual bool LayerReady(LayerRef at) noexcept = 0;
  virtual void Attention(LayerRef at) noexcept = 0;
  // Sets the countdown; returns the numbers of the layer's jobs in the order they are to be issued.
  // Valid until the frame's last message of this layer.
  virtual std::span<const uint16_t> Route(LayerRef at) noexcept = 0;
  virtual void Lookahead(LayerRef at) noexcept = 0;
  // The expert's bytes, pinned; nullptr: PutReady follows, from the I/O thread.
  virtual const std::byte* Fetch(ExpertJob job) noexcept = 0;
  virtual void ExpertFfn(const ReadyExpert& expert) noexcept = 0;
  virtual void SharedFfn(LayerRef at) noexcept = 0;
  enum class Next : uint8_t { kWait, kLayer, kHead };
  virtual Next Combine(LayerRef at) noexcept = 0;
  // As LayerReady, for the head or its next part, with PutHead.
  virtual bool HeadReady(LayerRef at) noexcept = 0;
  // True: the head has one more part.
  virtual bool Head(LayerRef at) noexcept = 0;
  // The notices of the frame are put first. Then it goes on with a draft step, or Release is called
  // and the frame is put.
  struct Verified {
    std::span<const Notice> notices;
    bool draft = false;
  };
  virtual Verified Verify(LayerRef at) noexcept = 0;
  // Makes the frame's rows those of the MTP layer's next step; returns the frame at that layer.
  virtual LayerRef Draft(FrameRef frame) noexcept = 0;
  virtual void Release(FrameRef frame) noexcept = 0;
  virtual void Deliver(const Notice& notice) noexcept = 0;
};

class DecodeGraph {
 public:
  // `bodies` outlives the graph; nullptr builds one that is only looked at.
  explicit DecodeGraph(NodeBodies* bodies);
  // An edge from a buffer starts a task, which must end before the nodes do. In the arena, if the
  // graph was made in one.
  ~DecodeGraph() { graph_.wait_for_all(); }
  DecodeGraph(const DecodeGraph&) = delete;
  DecodeGraph& operator=(const DecodeGraph&) = delete;

  // Puts a parked or new frame. The engine thread only, inside the arena.
  void PutFrame(FrameRef frame) { free_frames_->try_put(frame); }
  // Returns when every frame is parked.
  void WaitForAll() { graph_.wait_for_all(); }
  // The answer to a Fetch that returned nullptr. The I/O thread.
  void PutReady(const ReadyExpert& expert);
  // The answer to a LayerReady that returned false. Any thread.
  void PutLayer(LayerRef at);
  // The answer to a HeadReady that returned false. Any thread.
  void PutHead(LayerRef at);

  const Wiring& Picture() const { return wiring_; }

 private:
  template <class... Outputs>
  using Multi = oneapi::tbb::flow::multifunction_node<LayerRef, std::tuple<Outputs...>>;
  template <class In, class Out>
  using Function = oneapi::tbb::flow::function_node<In, Out>;
  using AdmitNode = oneapi::tbb::flow::multifunction_node<FrameRef, std::tuple<FrameRef, FrameRef>>;
  using ReadyNode = oneapi::tbb::flow::async_node<LayerRef, LayerRef>;
  using RouteNode = Multi<ExpertJob, LayerRef, LayerRef>;
  using FetchNode = oneapi::tbb::flow::async_node<ExpertJob, ReadyExpert>;
  using TwoWayNode = Multi<LayerRef, LayerRef>;
  using VerifyNode = Multi<FrameRef, Notice, FrameRef>;

  void MakeNodes();
  void MakeHead();
  void MakeEdges();

  NodeBodies* bodies_;
  Wiring wiring_;
  oneapi::tbb::flow::graph graph_;
  std::optional<oneapi::tbb::flow::buffer_node<FrameRef>> free_frames_;
  std::optional<AdmitNode> admit_;
  std::optional<Function<FrameRef, LayerRef>> embed_, draft_;
  std::optional<ReadyNode> layer_ready_, head_ready_;
  std::optional<Function<LayerRef, LayerRef>> attention_, lookahead_, shared_ffn_;
  std::optional<RouteNode> route_;
  std::optional<FetchNode> fetch_;
  std::optional<Function<ReadyExpert, LayerRef>> expert_ffn_;
  std::optional<TwoWayNode> combine_, head_;
  std::optional<VerifyNode> verify_;
  std::optional<oneapi::tbb::flow::function_node<Notice>> deliver_;
};

}  // namespace colibri
