// Shards as values: read those of a fixture, change them, write them where a test wants them.
#pragma once

#include <fmt/format.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "io/container.h"
#include "tests/temp_dir.h"

namespace colibri {

// A shard with this header text, whatever it says, and this data.
inline std::string RawShard(const std::string& header, const std::string& data = "") {
  std::string shard;
  for (size_t i = 0; i < 8; ++i) shard += static_cast<char>(header.size() >> 8 * i & 0xff);
  return shard + header + data;
}

struct StoredTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};
using StoredTensors = std::map<std::string, StoredTensor>;

// A well-formed shard of the tensors, in the order of their names.
inline std::string ShardOf(const StoredTensors& tensors, const std::string& metadata = "") {
  std::string header = "{", data;
  if (!metadata.empty()) header += R"("__metadata__":)" + metadata;
  for (const auto& [name, t] : tensors) {
    if (header.size() > 1) header += ',';
    header +=
        fmt::format(R"("{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", name, t.dtype,
                    fmt::join(t.shape, ","), data.size(), data.size() + t.bytes.size());
    data += t.bytes;
  }
  return RawShard(header + "}", data);
}

inline std::string TensorBytes(const Container& container, const std::string& name) {
  const TensorEntry& entry = *container.Find(name);
  std::string bytes(entry.bytes, '\0');
  container.Files().ReadExact(entry.file, entry.offset, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

// Everything in a model directory, by name.
inline StoredTensors ReadTensors(const std::string& directory) {
  const Container container({directory});
  StoredTensors tensors;
  for (const std::string& name : container.Names()) {
    const TensorEntry& entry = *container.Find(name);
    const char* dtype = entry.dtype == DType::kF32    ? "F32"
                        : entry.dtype == DType::kBF16 ? "BF16"
                        : entry.dtype == DType::kF16  ? "F16"
                                                      : "U8";
    tensors[name] = {dtype, entry.shape, TensorBytes(container, name)};
  }
  return tensors;
}

inline std::string FixtureModel(const std::string& name) {
  return std::string(COLIBRI_SOURCE_DIR "/tests/fixtures/") + name + "/model";
}

// A copy of a fixture's model directory that a test may damage.
class ModelCopy {
 public:
  explicit ModelCopy(const std::string& fixture) {
    std::filesystem::copy(FixtureModel(fixture), Directory(),
                          std::filesystem::copy_options::recursive);
  }
  std::string Directory() const { return dir_.Path("model"); }
  std::string Path(const std::string& file) const { return Directory() + "/" + file; }
  void Remove(const std::string& file) const { std::filesystem::remove(Path(file)); }
  void Write(const std::string& file, const std::string& bytes) const {
    dir_.Write("model/" + file, bytes);
  }
  // Replaces all shards by one of these tensors.
  void Replace(const StoredTensors& tensors, const std::string& metadata = "") const {
    for (const auto& entry : std::filesystem::directory_iterator(Directory())) {
      if (entry.path().extension() == ".safetensors") std::filesystem::remove(entry.path());
    }
    Write("out-00000.safetensors", ShardOf(tensors, metadata));
  }

 private:
  TempDir dir_;
};

// What `f` throws as `Error`, or "" when it throws nothing.
template <class Error, class F>
std::string MessageOf(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

inline bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace colibri
