// Records nodes and edges while the TBB graph is built, so that the picture (Mermaid, DOT) is what
// was wired and cannot lie: TBB itself has no way to ask a graph for its edges.
// Threads: one, at construction.
#pragma once

#include <oneapi/tbb/flow_graph.h>

#include <string>
#include <string_view>
#include <vector>

namespace colibri {

// How a node is drawn: buffers as drums, multi-way nodes as hexagons, asynchronous ones slanted.
enum class NodeShape : uint8_t { kFunction, kToken, kBuffer, kAsync };

class Wiring {
 public:
  void Node(std::string_view name, NodeShape shape = NodeShape::kFunction);

  // Makes the TBB edge and records it. Both nodes were named before.
  template <class Sender, class Receiver>
  void Edge(std::string_view from, Sender& sender, std::string_view to, Receiver& receiver,
            std::string_view label = "") {
    oneapi::tbb::flow::make_edge(sender, receiver);
    Record(from, to, label);
  }

  std::string Mermaid() const;
  std::string Dot() const;

 private:
  struct NodeEntry {
    std::string name;
    NodeShape shape;
  };
  struct EdgeEntry {
    std::string from, to, label;
  };
  void Record(std::string_view from, std::string_view to, std::string_view label);

  std::vector<NodeEntry> nodes_;
  std::vector<EdgeEntry> edges_;
};

}  // namespace colibri
