// Reads config.json and generation_config.json. All checks of values are here, so that the rest may
// multiply dimensions without thinking: every product of two of them that names a tensor's side
// stays below 2^30.
#include "runtime/config.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "io/container.h"
#include "io/error.h"
#include "io/strict_json.h"

namespace colibri {
namespace {

using nlohmann::json;

constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxExperts = 65535;
constexpr int64_t kMaxVocab = 1 << 24;
constexpr int64_t kMaxWidth = 1 << 20;  // hidden, latents, FFN widths
constexpr int64_t kMaxHeads = 65536;
constexpr int64_t kMaxHeadDim = 65536;
constexpr int64_t kMaxSide = 1 << 30;      // products such as heads * head width
constexpr size_t kMaxFileBytes = 1 << 20;  // a config has a few kB; parsed, it grows

// One object of a JSON file with typed access; messages name the file, the key and the value.
class Keys {
 public:
  Keys(const json& object, std::string path, std::string prefix = "")
      : object_(object), path_(std::move(path)), prefix_(std::move(prefix)) {}

  // nullptr when absent or null: both mean "not said".
  const json* Find(const std::string& key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }

  [[noreturn]] void Refuse(const std::string& key, const std::string& expected) const {
    const auto it = object_.find(key);
    const std::string found =
        it == object_.end() ? "is missing" : "= " + Printable(it->dump(-1, ' ', true));
    throw ModelError(fmt::format("{}: {}{} {}, {} expected", path_, prefix_, key, found, expected));
  }

  int32_t Int(const std::string& key, int64_t low, int64_t high) const {
    const json* value = Find(key);
    const std::string range = fmt::format("an integer from {} to {}", low, high);
    if (value == nullptr || !value->is_number_integer()) Refuse(key, range);
    // An unsigned value above INT64_MAX would turn negative.
    if (value->is_number_unsigned() && value->get<uint64_t>() > INT32_MAX) Refuse(key, range);
    const auto number = value->get<int64_t>();
    if (number < low || number > high) Refuse(key, range);
    return static_cast<int32_t>(number);
  }
  int32_t IntOr(const std::string& key, int64_t low, int64_t high, int32_t otherwise) const {
    return Find(key) == nullptr ? otherwise : Int(key, low, high);
  }

  bool Bool(const std::string& key) const {
    const json* value = Find(key);
    if (value == nullptr || !value->is_boolean()) Refuse(key, "true or false");
    return value->get<bool>();
  }
  bool BoolOr(const std::string& key, bool otherwise) const {
    return Find(key) == nullptr ? otherwise : Bool(key);
  }

  // A finite number with low <= value <= high that is still above zero as a float if low is.
  float Float(const std::string& key, float low, float high, const char* expected) const {
    const json* value = Find(key);
    if (value == nullptr || !value->is_number()) Refuse(key, expected);
    const auto number = value->get<double>();
    if (!(number >= static_cast<double>(low) && number <= static_cast<double>(high))) {
      Refuse(key, expected);
    }
    return static_cast<float>(number);
  }
  float Positive(const std::string& key) const {
    return Float(key, std::numeric_limits<float>::min(), std::numeric_limits<float>::max(),
                 "a number above 0");
  }

  // The one value the engine computes with; absent counts as that value.
  void Only(const std::string& key, const json& supported) const {
    const json* value = Find(key);
    if (value != nullptr && *value != supported) Refuse(key, supported.dump());
  }

  Keys Object(const std::string& key) const {
    const json* value = Find(key);
    if (value == nullptr || !value->is_object()) Refuse(key, "an object");
    return Keys(*value, path_, prefix_ + key + ".");
  }

 private:
  const json& object_;
  std::string path_;
  std::string prefix_;
};

void CheckProduct(const Keys& keys, const char* key, int64_t a, int64_t b) {
  if (a * b > kMaxSide) keys.Refuse(key, fmt::format("a product of at most {}", kMaxSide));
}

// Lists of "full"/"shared" and the like: true for `yes`, false for `no`, also for their first
// letters in upper case when `letters`.
std::vector<bool> TwoWords(const Keys& keys, const std::string& key, int32_t layers,
                           const std::string& yes, const std::string& no, bool letters) {
  const std::string expected = fmt::format("{} times \"{}\" or \"{}\"", layers, yes, no) +
                               (letters ? ", or their letters" : "");
  const json& value = *keys.Find(key);
  std::vector<std::string> words;
  if (letters && value.is_string()) {
    for (const char c : value.get_ref<const std::string&>()) words.emplace_back(1, c);
  } else if (value.is_array()) {
    for (const json& item : value) {
      if (!item.is_string()) keys.Refuse(key, expected);
      words.push_back(item.get<std::string>());
    }
  } else {
    keys.Refuse(key, expected);
  }
  if (words.size() != static_cast<size_t>(layers)) {
    keys.Refuse(key, fmt::format("{} entries (num_hidden_layers)", layers));
  }
  std::vector<bool> result;
  for (const std::string& word : words) {
    const auto is = [&](const std::string& full) {
      return word == full || (letters && word.size() == 1 && word[0] == full[0] - 'a' + 'A');
    };
    if (!is(yes) && !is(no)) keys.Refuse(key, expected);
    result.push_back(is(yes));
  }
  return result;
}

void ReadDimensions(const Keys& keys, ModelConfig& c) {
  c.vocab = keys.Int("vocab_size", 1, kMaxVocab);
  c.hidden = keys.Int("hidden_size", 1, kMaxWidth);
  c.layers = keys.Int("num_hidden_layers", 1, kMaxLayers);
  c.heads = keys.Int("num_attention_heads", 1, kMaxHeads);
  c.q_lora = keys.Int("q_lora_rank", 1, kMaxWidth);
  c.kv_lora = keys.Int("kv_lora_rank", 1, kMaxWidth);
  c.nope = keys.Int("qk_nope_head_dim", 1, kMaxHeadDim);
  c.rope = keys.Int("qk_rope_head_dim", 2, kMaxHeadDim);
  if (c.rope % 2 != 0) keys.Refuse("qk_rope_head_dim", "an even number");
  c.v_head = keys.Int("v_head_dim", 1, kMaxHeadDim);
  if (keys.Find("qk_head_dim") != nullptr &&
      keys.Int("qk_head_dim", 1, 2 * kMaxHeadDim) != c.QkHead()) {
    keys.Refuse("qk_head_dim", fmt::format("{} (qk_nope_head_dim + qk_rope_head_dim)", c.QkHead()));
  }
  CheckProduct(keys, "num_attention_heads", c.heads, c.nope + c.rope);
  CheckProduct(keys, "num_attention_heads", c.heads, c.nope + c.v_head);
  // An f32 logits block of 16 rows and an embedding row count in 32 bits.
  c.max_positions = keys.Int("max_position_embeddings", 1, kMaxSide);
  c.rms_eps = keys.Positive("rms_norm_eps");
  c.latent_eps = c.rms_eps;
}

void ReadLayerKinds(const Keys& keys, ModelConfig& c) {
  if (keys.Find("mlp_layer_types") != nullptr) {
    c.sparse = TwoWords(keys, "mlp_layer_types", c.layers, "sparse", "dense", false);
    return;
  }
  // 3 and 1 are what the reference defines for absent keys; another truth would need tensors of
  // other names, so a wrong guess cannot go unnoticed.
  const int32_t first = keys.IntOr("first_k_dense_replace", 0, kMaxLayers, 3);
  const int32_t every = keys.IntOr("moe_layer_freq", 1, kMaxLayers, 1);
  for (int32_t i = 0; i < c.layers; ++i) c.sparse.push_back(i >= first && i % every == 0);
}

// n_routed_experts has two other spellings (model spec 1.2); where several are given they agree.
int32_t ReadExpertCount(const Keys& keys) {
  int32_t count = 0;
  for (const char* key : {"n_routed_experts", "num_experts", "num_local_experts"}) {
    if (keys.Find(key) == nullptr) continue;
    const int32_t found = keys.Int(key, 1, kMaxExperts);
    if (count != 0 && found != count) keys.Refuse(key, fmt::format("{} as elsewhere", count));
    count = found;
  }
  if (count == 0)
    keys.Refuse("n_routed_experts", fmt::format("an integer from 1 to {}", kMaxExperts));
  return count;
}

void ReadExperts(const Keys& keys, ModelConfig& c) {
  const bool any_sparse = std::find(c.sparse.begin(), c.sparse.end(), true) != c.sparse.end();
  const bool any_dense = std::find(c.sparse.begin(), c.sparse.end(), false) != c.sparse.end();
  if (any_dense) c.intermediate = keys.Int("intermediate_size", 1, kMaxWidth);
  if (!any_sparse && !c.mtp) return;
  c.moe_intermediate = keys.Int("moe_intermediate_size", 1, kMaxWidth);
  c.experts = ReadExpertCount(keys);
  c.top_k = keys.Int("num_experts_per_tok", 1, c.experts);
  c.shared_experts = keys.Int("n_shared_experts", 1, 1024);
  CheckProduct(keys, "n_shared_experts", c.shared_experts, c.moe_intermediate);
  c.groups = keys.IntOr("n_group", 1, c.experts, 1);
  if (c.experts % c.groups != 0) {
    keys.Refuse("n_group", fmt::format("a divisor of the {} experts", c.experts));
  }
  c.top_groups =
      c.groups == 1 ? keys.IntOr("topk_group", 1, 1, 1) : keys.Int("topk_group", 1, c.groups);
  const int32_t group_size = c.experts / c.groups;
  // A group's score is the sum of its two best choices.
  if (c.groups > 1 && group_size < 2) keys.Refuse("n_group", "at least two experts a group");
  if (c.top_k > c.top_groups * group_size) {
    keys.Refuse("num_experts_per_tok", fmt::format("at most {} (the experts of topk_group groups)",
                                                   c.top_groups * group_size));
  }
  c.norm_top_k = keys.Bool("norm_topk_prob");
  c.routed_scale = keys.Positive("routed_scaling_factor");
  keys.Only("scoring_func", "sigmoid");
  keys.Only("topk_method", "noaux_tc");
}

void ReadIndexer(const Keys& keys, ModelConfig& c) {
  c.index_heads = keys.Int("index_n_heads", 1, kMaxHeads);
  c.index_dim = keys.Int("index_head_dim", 1, kMaxHeadDim);
  c.index_top_k = keys.Int("index_topk", 1, kMaxSide);
  if (c.index_dim < c.rope) {
    keys.Refuse("index_head_dim", fmt::format("at least {} (qk_rope_head_dim)", c.rope));
  }
  CheckProduct(keys, "index_n_heads", c.index_heads, c.index_dim);
  c.index_share_for_mtp = keys.BoolOr("index_share_for_mtp_iteration", false);
  std::string key = "index_topk_freq";
  if (keys.Find("indexer_types") != nullptr) {
    key = "indexer_types";
    c.full_indexer = TwoWords(keys, key, c.layers, "full", "shared", false);
  } else if (keys.Find("index_topk_pattern") != nullptr) {
    key = "index_topk_pattern";
    c.full_indexer = TwoWords(keys, key, c.layers, "full", "shared", true);
  } else {
    // Model spec 1.2. Without a frequency every layer is full (GLM-5, 5.1).
    const int32_t every = std::max(keys.IntOr("index_topk_freq", 0, kMaxLayers, 1), 1);
    const int32_t offset = keys.IntOr("index_skip_topk_offset", 0, kMaxLayers, 2);
    for (int32_t i = 0; i < c.layers; ++i) {
      c.full_indexer.push_back(std::max(i - offset + 1, 0) % every == 0);
    }
  }
  if (!c.full_indexer.front()) keys.Refuse(key, "a first layer that is full");
}

// rope_parameters and the older rope_scaling say the same things.
void CheckRopeObject(const Keys& keys, const std::string& name) {
  const Keys rope = keys.Object(name);
  const std::string type_key = rope.Find("rope_type") != nullptr ? "rope_type" : "type";
  rope.Only(type_key, "default");
  if (name == "rope_scaling" && rope.Find(type_key) == nullptr)
    rope.Refuse("rope_type", "\"default\"");
  for (const char* scaled :
       {"factor", "attention_factor", "mscale", "mscale_all_dim", "partial_rotary_factor"}) {
    const json* value = rope.Find(scaled);
    if (value != nullptr && *value != 1) rope.Refuse(scaled, "1");
  }
}

void ReadRope(const Keys& keys, ModelConfig& c) {
  const bool parameters = keys.Find("rope_parameters") != nullptr;
  if (parameters) CheckRopeObject(keys, "rope_parameters");
  if (keys.Find("rope_scaling") != nullptr) CheckRopeObject(keys, "rope_scaling");
  keys.Only("partial_rotary_factor", 1);
  // No default: with 10000 for 8000000 the model talks nonsense fluently.
  if (parameters && keys.Object("rope_parameters").Find("rope_theta") != nullptr) {
    c.rope_theta = keys.Object("rope_parameters").Positive("rope_theta");
  } else {
    c.rope_theta = keys.Positive("rope_theta");
  }
  keys.Only("rope_interleave", true);
  keys.Only("indexer_rope_interleave", true);
}

void AddStopIds(const Keys& keys, int32_t vocab, std::set<int32_t>& ids) {
  const std::string key = "eos_token_id";
  const json* value = keys.Find(key);
  if (value == nullptr) return;
  const std::string expected = fmt::format("an id below {}, or a list of them", vocab);
  const json list = value->is_array() ? *value : json::array({*value});
  for (const json& id : list) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= static_cast<uint64_t>(vocab)) {
      keys.Refuse(key, expected);
    }
    ids.insert(id.get<int32_t>());
  }
}

GenerationDefaults ReadGeneration(const Keys& keys) {
  GenerationDefaults defaults;
  if (keys.Find("temperature") != nullptr) {
    defaults.temperature = keys.Float("temperature", 0.0F, 100.0F, "a number from 0 to 100");
  }
  if (keys.Find("top_p") != nullptr) {
    defaults.top_p =
        keys.Float("top_p", std::numeric_limits<float>::min(), 1.0F, "a number above 0, at most 1");
  }
  if (keys.Find("top_k") != nullptr) defaults.top_k = keys.Int("top_k", 0, INT32_MAX);
  return defaults;
}

json ParseObject(std::string_view text, const std::string& path) {
  json object = ParseStrictJson(text, path);
  if (!object.is_object()) throw ModelError(fmt::format("{}: not a JSON object", path));
  return object;
}

// The text of a whole small file; nullopt when there is none.
std::optional<std::string> ReadSmallFile(const std::string& path) {
  if (access(path.c_str(), F_OK) != 0 && errno == ENOENT) return std::nullopt;
  CheckRegular(path);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rbe"),
                                                             std::fclose);
  if (file == nullptr) FailToOpen(path, errno);
  std::string text;
  char buffer[1 << 16];
  while (const size_t n = std::fread(buffer, 1, sizeof(buffer), file.get())) {
    text.append(buffer, n);
    if (text.size() > kMaxFileBytes) {
      throw ModelError(fmt::format("{}: longer than {} bytes", path, kMaxFileBytes));
    }
  }
  if (std::ferror(file.get()) != 0) {
    throw IoError(fmt::format("{}: {}", path, std::strerror(errno)));
  }
  return text;
}

std::string GenerationPath(const std::string& config_path) {
  const size_t slash = config_path.rfind('/');
  const std::string folder = slash == std::string::npos ? "" : config_path.substr(0, slash + 1);
  return folder + "generation_config.json";
}

}  // namespace

ModelConfig ParseConfig(std::string_view config_json, std::string_view generation_json,
                        const std::string& path) {
  const json object = ParseObject(config_json, path);
  const Keys keys(object, path);
  const json* type = keys.Find("model_type");
  if (type == nullptr || *type != "glm_moe_dsa") keys.Refuse("model_type", "\"glm_moe_dsa\"");
  keys.Only("hidden_act", "silu");
  keys.Only("attention_bias", false);
  keys.Only("mlp_bias", false);
  keys.Only("tie_word_embeddings", false);

  ModelConfig c;
  ReadDimensions(keys, c);
  // It counts weight modules, not drafts; more than one has never been published.
  c.mtp = keys.IntOr("num_nextn_predict_layers", 0, 1, 0) == 1;
  ReadLayerKinds(keys, c);
  ReadExperts(keys, c);
  ReadIndexer(keys, c);
  ReadRope(keys, c);

  std::set<int32_t> stop_ids;
  AddStopIds(keys, c.vocab, stop_ids);
  if (!generation_json.empty()) {
    const std::string generation_path = GenerationPath(path);
    const json generation = ParseObject(generation_json, generation_path);
    const Keys generation_keys(generation, generation_path);
    c.generation = ReadGeneration(generation_keys);
    AddStopIds(generation_keys, c.vocab, stop_ids);
  }
  c.stop_ids.assign(stop_ids.begin(), stop_ids.end());
  return c;
}

ModelConfig LoadConfig(const std::string& directory) {
  const std::string path = directory + "/config.json";
  const std::optional<std::string> config = ReadSmallFile(path);
  if (!config) throw ModelError(fmt::format("{}: no such file; it describes the model", path));
  const std::optional<std::string> generation = ReadSmallFile(GenerationPath(path));
  // An empty file is a failed download, not an absent one.
  if (generation && generation->empty()) {
    throw ModelError(fmt::format("{}: empty", GenerationPath(path)));
  }
  return ParseConfig(*config, generation.value_or(""), path);
}

}  // namespace colibri
