#include "graph/wiring.h"

#include <fmt/format.h>

#include <algorithm>

#include "io/check.h"

namespace colibri {

void Wiring::Node(std::string_view name, NodeShape shape) {
  nodes_.push_back({std::string(name), shape});
}

void Wiring::Record(std::string_view from, std::string_view to, std::string_view label) {
  for (std::string_view end : {from, to}) {
    COLIBRI_CHECK(std::any_of(nodes_.begin(), nodes_.end(),
                              [&](const NodeEntry& n) { return n.name == end; }));
  }
  edges_.push_back({std::string(from), std::string(to), std::string(label)});
}

std::string Wiring::Mermaid() const {
  std::string text = "flowchart LR\n";
  for (const NodeEntry& n : nodes_) {
    const char* open = "[\"";
    const char* close = "\"]";
    if (n.shape == NodeShape::kToken) open = "{{\"", close = "\"}}";
    if (n.shape == NodeShape::kBuffer) open = "[(\"", close = "\")]";
    if (n.shape == NodeShape::kAsync) open = "[/\"", close = "\"/]";
    text += fmt::format("  {}{}{}{}\n", n.name, open, n.name, close);
  }
  for (const EdgeEntry& e : edges_) {
    text += e.label.empty() ? fmt::format("  {} --> {}\n", e.from, e.to)
                            : fmt::format("  {} -- \"{}\" --> {}\n", e.from, e.label, e.to);
  }
  return text;
}

std::string Wiring::Dot() const {
  std::string text = "digraph colibri {\n  rankdir=LR;\n";
  for (const NodeEntry& n : nodes_) {
    const char* shape = "box";
    if (n.shape == NodeShape::kToken) shape = "hexagon";
    if (n.shape == NodeShape::kBuffer) shape = "cylinder";
    if (n.shape == NodeShape::kAsync) shape = "parallelogram";
    text += fmt::format("  {} [shape={}];\n", n.name, shape);
  }
  for (const EdgeEntry& e : edges_) {
    text += e.label.empty() ? fmt::format("  {} -> {};\n", e.from, e.to)
                            : fmt::format("  {} -> {} [label=\"{}\"];\n", e.from, e.to, e.label);
  }
  return text + "}\n";
}

}  // namespace colibri
