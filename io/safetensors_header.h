// The JSON header of one safetensors file, validated. Owns no file: bytes in, entries out, so that
// a fuzzer can drive it. Threads: any.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/container.h"

namespace colibri {

// The longest header accepted, the reference library's limit. A main shard of the published
// containers has 0.19 MB; all 117,000 tensors in one file would have 14 MB.
inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;

struct SafetensorsHeader {
  struct Tensor {
    std::string name;
    TensorEntry entry;  // absolute offset; `file` is left 0
  };
  std::vector<Tensor> tensors;
  std::string formats;  // metadata "colibri.fmt" as it stands, "" when absent
};

// `json`: the header's text; data starts at `data_start` of a file of `file_bytes`. Tensors must
// follow each other from data_start on without gap or overlap and end where the file ends, as the
// reference library wants it. Throws ModelError "<path>: ...".
SafetensorsHeader ParseSafetensorsHeader(std::string_view json, uint64_t data_start,
                                         uint64_t file_bytes, const std::string& path);

}  // namespace colibri
