// The pictures in the documents are the graph that is built.
#include <doctest/doctest.h>

#include <fstream>
#include <iterator>
#include <string>

#include "graph/decode_graph.h"

namespace colibri {

TEST_CASE("the picture in both documents is the graph as it was wired") {
  const DecodeGraph graph(nullptr);
  const std::string block = "```mermaid\n" + graph.Picture().Mermaid() + "```\n";
  for (const char* name : {"README.md", "graph/README.md"}) {
    CAPTURE(name);
    std::ifstream file(std::string(COLIBRI_SOURCE_DIR "/") + name);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    CHECK(text.find(block) != std::string::npos);
  }
}

}  // namespace colibri
