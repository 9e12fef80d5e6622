// Streams random tensors into shards laid out as the converter's writer does: within a shard all
// F32 tensors by name, then all U8 tensors by name (container spec 1.5).
#include "runtime/model_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>
#include <utility>
#include <vector>

#include "io/error.h"
#include "io/strict_json.h"
#include "runtime/config.h"
#include "runtime/synthetic_vocabulary.h"
#include "runtime/weights_visit.h"

namespace colibri {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int32_t kGroup = 64;
constexpr size_t kChunkBytes = 1 << 20;
// Standard deviations of a uniform byte, and of a uniform nibble whose -8 became 0.
constexpr float kInt8Deviation = 73.9F;
constexpr float kInt4Deviation = 4.18F;
// Correction bias -kSkew * ln(rank + 1): the busiest quarter of 256 experts gets about half of the
// rows, as in traces of real models.
constexpr float kSkew = 0.06F;
// What a branch's last matrix makes of variance 1, and so how much of the residual stream a layer
// replaces: with 0.42 three quarters of the next layer's experts are foreseen.
constexpr float kBranch = 0.42F;
enum class Fill : uint8_t {
  kConstant,
  kNormal,
  kScales,
  kSkewedBias,
  kInt8,
  kInt4,
  kEmbedding,
  kSuccessors,
  kPassThrough
};

struct Tensor {
  std::string name;
  Fill fill;
  std::vector<int64_t> shape;
  float level = 0;   // kConstant: the values; kNormal: their deviation; kScales: the mean
  int64_t cols = 0;  // the structured int8 matrices: kEmbedding and later

  bool IsF32() const { return fill < Fill::kInt8; }
  uint64_t Values() const {
    return std::accumulate(shape.begin(), shape.end(), uint64_t{1},
                           [](uint64_t a, int64_t b) { return a * static_cast<uint64_t>(b); });
  }
  uint64_t Bytes() const { return Values() * (IsF32() ? 4 : 1); }
};

// A file written front to back.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path)
      : path_(path), fd_(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644)) {
    if (fd_ < 0) Fail();
  }
  ~OutputFile() {
    if (fd_ >= 0) ::close(fd_);
  }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void Write(const void* data, size_t bytes) {
    const char* at = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t n = ::write(fd_, at, bytes);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) Fail();
      at += n;
      bytes -= static_cast<size_t>(n);
    }
  }
  void Lengthen(uint64_t bytes) {
    if (::ftruncate(fd_, static_cast<off_t>(bytes)) != 0) Fail();
  }
  // Some file systems report a full disk only here.
  void Close() {
    if (::close(std::exchange(fd_, -1)) != 0) Fail();
  }

 private:
  [[noreturn]] void Fail() const {
    throw IoError(fmt::format("{}: {}", path_, std::strerror(errno)));
  }
  std::string path_;
  int fd_;
};

// Nibbles 0 (the value -8, which quantisers never give) become 8 (the value 0).
uint64_t WithoutMinusEight(uint64_t word) {
  uint64_t any = word | word >> 1;
  any |= any >> 2;
  const uint64_t zero_nibbles = ~any & 0x1111111111111111U;
  return word | zero_nibbles << 3;
}

void WriteBytes(const Tensor& tensor, uint64_t seed, std::vector<uint64_t>& chunk,
                OutputFile& file) {
  Random random(SeedOf(seed, tensor.name));
  uint64_t left = tensor.Bytes();
  while (left > 0) {
    const auto bytes = static_cast<size_t>(std::min<uint64_t>(left, kChunkBytes));
    const size_t words = (bytes + 7) / 8;
    for (size_t i = 0; i < words; ++i) {
      const uint64_t word = random.Next();
      chunk[i] = tensor.fill == Fill::kInt4 ? WithoutMinusEight(word) : word;
    }
    file.Write(chunk.data(), bytes);
    left -= bytes;
  }
}

// int8 row by row: the embedding, the head, or an eh_proj that hands the embedding's half on with
// a little noise.
void WriteStructured(const Tensor& tensor, uint64_t seed, const Vocabulary& vocabulary,
                     OutputFile& file) {
  const auto cols = static_cast<size_t>(tensor.cols);
  const int64_t rows = tensor.shape[0] / tensor.cols;
  Random random(SeedOf(seed, tensor.name));  // kPassThrough
  std::vector<float> values;
  std::vector<int8_t> chunk;
  for (int64_t r = 0; r < rows; ++r) {
    const size_t at = chunk.size();
    chunk.resize(at + cols);
    if (tensor.fill == Fill::kPassThrough) {
      uint64_t bits = 0;
      for (size_t i = 0; i < cols; ++i) {
        bits = i % 16 == 0 ? random.Next() : bits >> 4;
        chunk[at + i] = static_cast<int8_t>((bits & 15) == 0 ? 1 : (bits & 15) == 1 ? -1 : 0);
      }
      chunk[at + static_cast<size_t>(r)] = 127;
    } else {
      const bool head = tensor.fill == Fill::kSuccessors;
      head ? vocabulary.Head(r, values) : vocabulary.Embedding(r, values);
      const float scale = head ? vocabulary.HeadScale() : vocabulary.EmbeddingScale();
      for (size_t i = 0; i < cols; ++i) {
        chunk[at + i] = static_cast<int8_t>(std::lrint(values[i] / scale));
      }
    }
    if (chunk.size() >= kChunkBytes || r + 1 == rows) {
      file.Write(chunk.data(), chunk.size());
      chunk.clear();
    }
  }
}

void WriteSkewedBias(const Tensor& tensor, Random& random, OutputFile& file) {
  std::vector<float> bias(static_cast<size_t>(tensor.Values()));
  for (size_t rank = 0; rank < bias.size(); ++rank) {
    bias[rank] = -kSkew * std::log(static_cast<float>(rank + 1));
  }
  for (size_t i = bias.size(); i > 1; --i) std::swap(bias[i - 1], bias[random.Next() % i]);
  file.Write(bias.data(), bias.size() * sizeof(float));
}

void WriteFloats(const Tensor& tensor, uint64_t seed, OutputFile& file) {
  Random random(SeedOf(seed, tensor.name));
  if (tensor.fill == Fill::kSkewedBias) return WriteSkewedBias(tensor, random, file);
  std::vector<float> chunk;
  for (uint64_t left = tensor.Values(); left > 0; left -= chunk.size()) {
    chunk.resize(static_cast<size_t>(std::min<uint64_t>(left, kChunkBytes / sizeof(float))));
    for (float& value : chunk) {
      switch (tensor.fill) {
        case Fill::kConstant:
          value = tensor.level;
          break;
        case Fill::kNormal:
          value = tensor.level * random.Normal();
          break;
        default:
          value = tensor.level * (0.8F + 0.4F * random.Uniform());
          break;
      }
    }
    file.Write(chunk.data(), chunk.size() * sizeof(float));
  }
}

// Collects the tensors of one series of shards (a visitor of runtime/weights_visit.h) and writes a
// shard whenever there is enough.
class Series {
 public:
  Series(const SyntheticModel& model, const ModelConfig& config, std::string prefix,
         const ShardWritten& written)
      : model_(model),
        vocabulary_(model.seed, config),
        prefix_(std::move(prefix)),
        written_(written),
        chunk_(kChunkBytes / 8) {}

  void Matrix(int32_t layer, const std::string& name, int64_t rows, int64_t cols, PackedMatrix&) {
    const std::string full = layer < 0 ? name : LayerPrefix(layer) + name;
    const float deviation = Deviation(name, cols);
    if (name == "mlp.gate.weight") {
      tensors_.push_back({full, Fill::kNormal, {rows, cols}, deviation});
    } else if (const auto [fill, scale] = Structure(name); scale > 0) {
      tensors_.push_back({full, fill, {rows * cols}, 0, cols});
      bytes_ += tensors_.back().Bytes();
      tensors_.push_back({full + ".qs", Fill::kConstant, {rows}, scale});
    } else {
      const WeightFormat format = FormatOf(layer, name);
      const bool int8 = format == WeightFormat::kInt8Row;
      const int64_t groups = ScalesPerRow(format, cols, kGroup);
      const auto bytes = static_cast<int64_t>(RowBytes(format, cols)) * rows;
      tensors_.push_back({full, int8 ? Fill::kInt8 : Fill::kInt4, {bytes}});
      bytes_ += tensors_.back().Bytes();
      tensors_.push_back({full + ".qs",
                          Fill::kScales,
                          {rows * groups},
                          deviation / (int8 ? kInt8Deviation : kInt4Deviation)});
    }
    Added();
  }

  void Vector(int32_t layer, const std::string& name, int64_t size, std::vector<float>&) {
    const bool skewed = name == "mlp.gate.e_score_correction_bias";
    tensors_.push_back({layer < 0 ? name : LayerPrefix(layer) + name,
                        skewed ? Fill::kSkewedBias : Fill::kConstant,
                        {size},
                        name.ends_with(".bias") ? 0.0F : 1.0F});
    Added();
  }

  // Writes what is left; returns the bytes of all shards.
  uint64_t Finish() {
    if (!tensors_.empty()) WriteShard();
    return total_;
  }

 private:
  // Activations keep variance 1 through a matrix; branches that end in the residual stream stay
  // small beside it.
  static float Deviation(const std::string& name, int64_t cols) {
    const bool branch_end = name.ends_with("down_proj.weight") || name.ends_with("o_proj.weight");
    return (branch_end ? kBranch : 1.0F) / std::sqrt(static_cast<float>(cols));
  }

  // The matrices that are more than noise, all int8 with one scale; a scale of 0 for the others.
  std::pair<Fill, float> Structure(const std::string& name) const {
    if (name == "model.embed_tokens.weight") {
      return {Fill::kEmbedding, vocabulary_.EmbeddingScale()};
    }
    if (name == "lm_head.weight") return {Fill::kSuccessors, vocabulary_.HeadScale()};
    if (name == "eh_proj.weight") return {Fill::kPassThrough, 1.0F / 127};
    return {Fill::kInt8, 0.0F};
  }

  WeightFormat FormatOf(int32_t layer, const std::string& name) const {
    if (layer < 0 || layer == model_.layers || name.find(".indexer.") != std::string::npos) {
      return WeightFormat::kInt8Row;
    }
    return name.starts_with("mlp.experts.") ? model_.expert_format : model_.dense_format;
  }

  void Added() {
    bytes_ += tensors_.back().Bytes();
    if (bytes_ >= model_.shard_bytes) WriteShard();
  }

  void WriteShard() {
    std::sort(tensors_.begin(), tensors_.end(), [](const Tensor& a, const Tensor& b) {
      return a.IsF32() != b.IsF32() ? a.IsF32() : a.name < b.name;
    });
    std::string header = "{";
    uint64_t offset = 0;
    for (const Tensor& t : tensors_) {
      header += fmt::format(R"({}"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                            offset == 0 ? "" : ",", t.name, t.IsF32() ? "F32" : "U8",
                            fmt::join(t.shape, ","), offset, offset + t.Bytes());
      offset += t.Bytes();
    }
    header += '}';
    header.append((8 - header.size() % 8) % 8, ' ');
    const std::string path = fmt::format("{}-{:05}.safetensors", prefix_, shards_++);
    OutputFile file(path);
    char length[8];
    for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> 8 * i & 0xff);
    file.Write(length, sizeof(length));
    file.Write(header.data(), header.size());
    if (model_.holes) {
      file.Lengthen(8 + header.size() + offset);
      tensors_.clear();
    }
    for (const Tensor& t : tensors_) {
      if (t.IsF32()) {
        WriteFloats(t, model_.seed, file);
      } else if (t.cols > 0) {
        WriteStructured(t, model_.seed, vocabulary_, file);
      } else {
        WriteBytes(t, model_.seed, chunk_, file);
      }
    }
    file.Close();
    const uint64_t bytes = 8 + header.size() + offset;
    total_ += bytes;
    if (written_) written_(path, bytes);
    tensors_.clear();
    bytes_ = 0;
  }

  const SyntheticModel& model_;
  const Vocabulary vocabulary_;
  std::string prefix_;
  const ShardWritten& written_;
  std::vector<uint64_t> chunk_;
  std::vector<Tensor> tensors_;
  uint64_t bytes_ = 0, total_ = 0;
  int shards_ = 0;
};

std::string ReadText(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) throw IoError(fmt::format("{}: {}", path.string(), std::strerror(errno)));
  return text.str();
}

// The end tokens of the model whose tokenizer is taken, which must have no id beyond `vocab`.
json EndTokens(const SyntheticModel& model) {
  if (model.tokenizer_from.empty()) return json::array();
  const fs::path folder = model.tokenizer_from;
  const std::string path = (folder / "tokenizer.json").string();
  const json tokenizer = ParseStrictJson(ReadText(path), path);
  int64_t highest = -1;
  try {
    for (const auto& id : tokenizer.at("model").at("vocab")) {
      highest = std::max(highest, id.get<int64_t>());
    }
    for (const auto& token : tokenizer.value("added_tokens", json::array())) {
      highest = std::max(highest, token.at("id").get<int64_t>());
    }
  } catch (const json::exception&) {
    throw ModelError(path + ": not a tokenizer");
  }
  if (highest >= model.vocab) {
    throw UsageError(
        fmt::format("vocabulary of {}, but {} has ids up to {}", model.vocab, path, highest));
  }
  for (const char* name : {"config.json", "generation_config.json"}) {
    if (!fs::exists(folder / name)) continue;
    const json config = ParseStrictJson(ReadText(folder / name), (folder / name).string());
    if (config.is_object() && config.contains("eos_token_id")) return config["eos_token_id"];
  }
  return json::array();
}

std::string ConfigText(const SyntheticModel& m) {
  const json config = {
      {"architectures", {"GlmMoeDsaForCausalLM"}},
      {"model_type", "glm_moe_dsa"},
      {"dtype", "float32"},
      {"vocab_size", m.vocab},
      {"hidden_size", m.hidden},
      {"num_hidden_layers", m.layers},
      {"num_attention_heads", m.heads},
      {"num_key_value_heads", m.heads},
      {"q_lora_rank", m.q_lora},
      {"kv_lora_rank", m.kv_lora},
      {"qk_nope_head_dim", m.nope},
      {"qk_rope_head_dim", m.rope},
      {"v_head_dim", m.v_head},
      {"intermediate_size", m.intermediate},
      {"moe_intermediate_size", m.moe_intermediate},
      {"first_k_dense_replace", m.dense_layers},
      {"moe_layer_freq", 1},
      {"n_routed_experts", m.experts},
      {"num_experts_per_tok", m.top_k},
      {"n_shared_experts", m.shared_experts},
      {"n_group", 1},
      {"topk_group", 1},
      {"scoring_func", "sigmoid"},
      {"topk_method", "noaux_tc"},
      {"norm_topk_prob", true},
      {"routed_scaling_factor", 2.5},
      {"index_n_heads", m.index_heads},
      {"index_head_dim", m.index_dim},
      {"index_topk", m.index_top_k},
      {"index_topk_freq", 4},
      {"index_skip_topk_offset", 3},
      {"index_share_for_mtp_iteration", true},
      {"rope_interleave", true},
      {"indexer_rope_interleave", true},
      {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 8000000.0}}},
      {"max_position_embeddings", m.max_positions},
      {"rms_norm_eps", 1e-5},
      {"hidden_act", "silu"},
      {"attention_bias", false},
      {"tie_word_embeddings", false},
      {"num_nextn_predict_layers", m.mtp ? 1 : 0},
      {"eos_token_id", EndTokens(m)},
  };
  return config.dump(1) + "\n";
}

void PrepareDirectory(const std::string& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) throw IoError(fmt::format("{}: {}", directory, error.message()));
  if (!fs::is_empty(directory, error) || error) {
    throw UsageError(fmt::format("{}: exists and is not empty", directory));
  }
}

uint64_t WriteMainLayers(const SyntheticModel& model, const ModelConfig& c, const std::string& out,
                         const ShardWritten& written) {
  Series main(model, c, out + "/out", written);
  PackedMatrix matrix;
  std::vector<float> vector;
  main.Matrix(-1, "model.embed_tokens.weight", c.vocab, c.hidden, matrix);
  for (int32_t layer = 0; layer < c.layers; ++layer) {
    LayerWeights weights;
    FfnWeights ffn;
    VisitLayer(c, layer, weights, main);
    for (int32_t e = 0; c.Sparse(layer) && e < c.experts; ++e) {
      VisitFfn(c, layer, fmt::format("mlp.experts.{}.", e), c.moe_intermediate, ffn, main);
    }
  }
  main.Vector(-1, "model.norm.weight", c.hidden, vector);
  main.Matrix(-1, "lm_head.weight", c.vocab, c.hidden, matrix);
  return main.Finish();
}

uint64_t WriteMtpLayer(const SyntheticModel& model, const ModelConfig& c, const std::string& out,
                       const ShardWritten& written) {
  Series mtp(model, c, out + "/out-mtp", written);
  LayerWeights weights;
  if (model.indexer) weights.indexer.emplace();
  MtpWeights extra;
  FfnWeights ffn;
  VisitMtp(c, extra, mtp);
  VisitLayer(c, c.layers, weights, mtp);
  for (int32_t e = 0; e < c.experts; ++e) {
    VisitFfn(c, c.layers, fmt::format("mlp.experts.{}.", e), c.moe_intermediate, ffn, mtp);
  }
  return mtp.Finish();
}

uint64_t WriteIndexers(const SyntheticModel& model, const ModelConfig& c, const std::string& out,
                       const ShardWritten& written) {
  Series indexers(model, c, out + "/out-idx", written);
  for (int32_t layer = 0; layer < c.layers; ++layer) {
    IndexerWeights weights;
    if (c.FullIndexer(layer)) VisitIndexer(c, layer, weights, indexers);
  }
  return indexers.Finish();
}

}  // namespace

uint64_t WriteSyntheticModel(const SyntheticModel& model, const std::string& directory,
                             const ShardWritten& written) {
  const std::string config_text = ConfigText(model);
  ModelConfig config;
  try {
    config = ParseConfig(config_text, "", directory + "/config.json");
  } catch (const ModelError& error) {
    throw UsageError(error.what());
  }
  PrepareDirectory(directory);
  uint64_t bytes = WriteMainLayers(model, config, directory, written);
  if (model.mtp) bytes += WriteMtpLayer(model, config, directory, written);
  if (model.indexer) bytes += WriteIndexers(model, config, directory, written);
  if (!model.tokenizer_from.empty()) {
    for (const char* name : {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}) {
      std::error_code error;
      const fs::path from = fs::path(model.tokenizer_from) / name;
      if (!fs::exists(from)) continue;
      fs::copy_file(from, fs::path(directory) / name, error);
      if (error) throw IoError(fmt::format("{}: {}", from.string(), error.message()));
    }
  }
  OutputFile file(directory + "/config.json");
  file.Write(config_text.data(), config_text.size());
  file.Close();
  return bytes;
}

}  // namespace colibri
