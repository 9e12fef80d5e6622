#include "graph/decode_graph.h"

#include "io/check.h"

namespace colibri {

namespace flow = oneapi::tbb::flow;

namespace {

// Node priorities. Messages that come through a gateway land in a queue that workers look at last;
// a priority makes them critical tasks (0.3-2.5 ms instead of 53-60 ms behind a queued loop).
// Lookahead goes before the experts: hints that come after the reads are no hints. Only on
// unlimited nodes: with a concurrency limit oneTBB before 2022.1 frees tasks into the wrong pool.
constexpr flow::node_priority_t kBeforeExperts = 2;
constexpr flow::node_priority_t kAheadOfNewWork = 1;

static_assert(kSmallMessage<Notice>);

}  // namespace

DecodeGraph::DecodeGraph(NodeBodies* bodies) : bodies_(bodies) {
  MakeNodes();
  MakeEdges();
}

void DecodeGraph::MakeNodes() {
  const auto unlimited = flow::unlimited;
  free_frames_.emplace(graph_);
  wiring_.Node("free_frames", NodeShape::kBuffer);

  admit_.emplace(graph_, unlimited,
                 [this](const FrameRef& frame, AdmitNode::output_ports_type& out) noexcept -> void {
                   const Scheduler::Filled filled = bodies_->Admit(frame);
                   // A frame that was parked is no longer ours; the one to wake is another.
                   if (filled.wake >= 0) {
                     std::get<1>(out).try_put(FrameRef{static_cast<uint16_t>(filled.wake)});
                   }
                   if (filled.filled) std::get<0>(out).try_put(frame);
                 });
  wiring_.Node("admit", NodeShape::kToken);

  embed_.emplace(graph_, unlimited, [this](const FrameRef& frame) noexcept -> LayerRef {
    bodies_->Embed(frame);
    return {frame.frame, 0};
  });
  wiring_.Node("embed");

  layer_ready_.emplace(
      graph_, unlimited,
      [this](const LayerRef& at, ReadyNode::gateway_type& gateway) noexcept -> void {
        gateway.reserve_wait();
        if (!bodies_->LayerReady(at)) return;  // PutLayer releases
        gateway.try_put(at);
        gateway.release_wait();
      });
  wiring_.Node("layer_ready", NodeShape::kAsync);

  attention_.emplace(
      graph_, unlimited,
      [this](const LayerRef& at) noexcept -> LayerRef {
        bodies_->Attention(at);
        return at;
      },
      kAheadOfNewWork);
  wiring_.Node("attention");

  route_.emplace(graph_, unlimited,
                 [this](const LayerRef& at, RouteNode::output_ports_type& out) noexcept -> void {
                   const std::span<const uint16_t> jobs = bodies_->Route(at);
                   std::get<1>(out).try_put(at);
                   for (uint16_t job : jobs) {
                     std::get<0>(out).try_put(ExpertJob{at.frame, at.layer, job});
                   }
                   // Last: it is counted, and until it is done the layer cannot end and `jobs` go.
                   std::get<2>(out).try_put(at);
                 });
  wiring_.Node("route");

  fetch_.emplace(graph_, unlimited,
                 [this](const ExpertJob& job, FetchNode::gateway_type& gateway) noexcept -> void {
                   gateway.reserve_wait();
                   const std::byte* data = bodies_->Fetch(job);
                   if (data == nullptr) return;  // PutReady releases
                   gateway.try_put(ReadyExpert{job.frame, job.layer, job.job, data});
                   gateway.release_wait();
                 });
  wiring_.Node("fetch", NodeShape::kAsync);

  expert_ffn_.emplace(
      graph_, unlimited,
      [this](const ReadyExpert& expert) noexcept -> LayerRef {
        bodies_->ExpertFfn(expert);
        return {expert.frame, expert.layer};
      },
      kAheadOfNewWork);
  wiring_.Node("expert_ffn");

  shared_ffn_.emplace(graph_, unlimited, [this](const LayerRef& at) noexcept -> LayerRef {
    bodies_->SharedFfn(at);
    return at;
  });
  wiring_.Node("shared_ffn");

  lookahead_.emplace(
      graph_, unlimited,
      [this](const LayerRef& at) noexcept -> LayerRef {
        bodies_->Lookahead(at);
        return at;
      },
      kBeforeExperts);
  wiring_.Node("lookahead");

  combine_.emplace(
      graph_, unlimited,
      [this](const LayerRef& at, TwoWayNode::output_ports_type& out) noexcept -> void {
        const NodeBodies::Next next = bodies_->Combine(at);
        if (next == NodeBodies::Next::kLayer) {
          std::get<0>(out).try_put(LayerRef{at.frame, static_cast<uint16_t>(at.layer + 1)});
        } else if (next == NodeBodies::Next::kHead) {
          std::get<1>(out).try_put(at);
        }
      });
  wiring_.Node("combine");

  MakeHead();

  verify_.emplace(graph_, unlimited,
                  [this](const LayerRef& at, VerifyNode::output_ports_type& out) noexcept -> void {
                    const NodeBodies::Verified verified = bodies_->Verify(at);
                    for (const Notice& notice : verified.notices) std::get<1>(out).try_put(notice);
                    if (verified.draft) {
                      std::get<2>(out).try_put(FrameRef{at.frame});
                      return;
                    }
                    bodies_->Release(FrameRef{at.frame});
                    std::get<0>(out).try_put(FrameRef{at.frame});
                  });
  wiring_.Node("verify");

  draft_.emplace(graph_, unlimited, [this](const FrameRef& frame) noexcept -> LayerRef {
    return bodies_->Draft(frame);
  });
  wiring_.Node("draft");

  deliver_.emplace(graph_, flow::serial,
                   [this](const Notice& notice) noexcept -> flow::continue_msg {
                     bodies_->Deliver(notice);
                     return {};
                   });
  wiring_.Node("deliver");
}

void DecodeGraph::MakeHead() {
  head_ready_.emplace(
      graph_, flow::unlimited,
      [this](const LayerRef& at, ReadyNode::gateway_type& gateway) noexcept -> void {
        gateway.reserve_wait();
        if (!bodies_->HeadReady(at)) return;  // PutHead releases
        gateway.try_put(at);
        gateway.release_wait();
      });
  wiring_.Node("head_ready", NodeShape::kAsync);

  head_.emplace(
      graph_, flow::unlimited,
      [this](const LayerRef& at, TwoWayNode::output_ports_type& out) noexcept -> void {
        if (bodies_->Head(at)) {
          std::get<1>(out).try_put(at);
        } else {
          std::get<0>(out).try_put(at);
        }
      },
      kAheadOfNewWork);
  wiring_.Node("head");
}

void DecodeGraph::MakeEdges() {
  using flow::output_port;
  Wiring& w = wiring_;
  w.Edge("free_frames", *free_frames_, "admit", *admit_);
  w.Edge("admit", output_port<0>(*admit_), "embed", *embed_);
  w.Edge("admit", output_port<1>(*admit_), "free_frames", *free_frames_, "wake");
  w.Edge("embed", *embed_, "layer_ready", *layer_ready_);
  w.Edge("layer_ready", output_port<0>(*layer_ready_), "attention", *attention_);
  w.Edge("attention", *attention_, "route", *route_);
  w.Edge("route", output_port<0>(*route_), "fetch", *fetch_, "ExpertJob x union");
  w.Edge("route", output_port<1>(*route_), "lookahead", *lookahead_);
  w.Edge("route", output_port<2>(*route_), "shared_ffn", *shared_ffn_);
  w.Edge("fetch", output_port<0>(*fetch_), "expert_ffn", *expert_ffn_, "ReadyExpert");
  w.Edge("expert_ffn", *expert_ffn_, "combine", *combine_);
  w.Edge("shared_ffn", *shared_ffn_, "combine", *combine_);
  w.Edge("lookahead", *lookahead_, "combine", *combine_);
  w.Edge("combine", output_port<0>(*combine_), "layer_ready", *layer_ready_, "next layer");
  w.Edge("combine", output_port<1>(*combine_), "head_ready", *head_ready_, "last layer");
  w.Edge("head_ready", output_port<0>(*head_ready_), "head", *head_);
  w.Edge("head", output_port<0>(*head_), "verify", *verify_);
  w.Edge("head", output_port<1>(*head_), "head_ready", *head_ready_, "next part");
  w.Edge("verify", output_port<0>(*verify_), "free_frames", *free_frames_, "frame done");
  w.Edge("verify", output_port<1>(*verify_), "deliver", *deliver_, "tokens");
  w.Edge("verify", output_port<2>(*verify_), "draft", *draft_, "draft step");
  w.Edge("draft", *draft_, "layer_ready", *layer_ready_);
}

void DecodeGraph::PutReady(const ReadyExpert& expert) {
  FetchNode::gateway_type& gateway = fetch_->gateway();
  COLIBRI_CHECK(gateway.try_put(expert));
  gateway.release_wait();
}

void DecodeGraph::PutHead(LayerRef at) {
  ReadyNode::gateway_type& gateway = head_ready_->gateway();
  COLIBRI_CHECK(gateway.try_put(at));
  gateway.release_wait();
}

void DecodeGraph::PutLayer(LayerRef at) {
  ReadyNode::gateway_type& gateway = layer_ready_->gateway();
  COLIBRI_CHECK(gateway.try_put(at));
  gateway.release_wait();
}

}  // namespace colibri
