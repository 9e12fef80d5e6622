// Collects the tensors a model lacks and says so in few lines: the same names over many layers are
// one line, and gaps in the shards' numbers are pointed out, since an incomplete download is the
// usual cause. Threads: one.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "io/container.h"

namespace colibri {

class MissingTensors {
 public:
  // A tensor outside the layers: layer -1.
  void Add(int32_t layer, const std::string& name, uint64_t count = 1);
  bool Empty() const { return counts_.empty(); }
  uint64_t Count() const;
  // "layers 40-77: mlp.experts.*: 29,184 tensors", one line a group, without the hint.
  std::vector<std::string> Lines() const;
  // The whole message of the error.
  std::string Message(const Container& container) const;

 private:
  // Name within its layer -> layer -> tensors missing there.
  std::map<std::string, std::map<int32_t, uint64_t>> counts_;
};

// "out-00017.safetensors is not there" for gaps in the numbering of the shards, else the name of
// the last one.
std::string ShardHint(const std::vector<std::string>& base_names);

}  // namespace colibri
