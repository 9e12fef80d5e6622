// Synthetic models are real containers.
#include "runtime/model_writer.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "io/error.h"
#include "runtime/weights.h"
#include "tests/shard_files.h"

namespace colibri {
namespace {

const std::string kDemo = COLIBRI_SOURCE_DIR "/apps/demo/model";

SyntheticModel Small() {
  SyntheticModel m;
  m.layers = 5;
  m.experts = 12;
  m.top_k = 3;
  m.hidden = 128;
  m.intermediate = 192;
  m.moe_intermediate = 64;
  m.heads = 4;
  m.q_lora = 64;
  m.kv_lora = 64;
  m.nope = 24;
  m.rope = 16;
  m.v_head = 32;
  m.index_heads = 4;
  m.index_dim = 32;
  m.vocab = 4096;
  return m;
}

TEST_CASE("a synthetic model opens, loads and has the formats asked for") {
  const TempDir dir;
  SyntheticModel m = Small();
  m.tokenizer_from = kDemo;
  m.expert_format = WeightFormat::kInt8Row;
  const uint64_t bytes = WriteSyntheticModel(m, dir.Path("model"));
  CHECK(bytes > 0);
  Model model({dir.Path("model")});
  model.LoadDense();
  CHECK(model.HasMtp());
  CHECK(model.HasIndexer());
  CHECK(model.Notes().empty());
  CHECK(model.FormatSummary() ==
        "int8-row experts, int4-g64/int4-row attention, int8-row head, int8-row MTP experts");
  CHECK(model.ExpertCount() == 5 * 12);
  CHECK(model.Config().stop_ids == std::vector<int32_t>{4060, 4067, 4069});
  CHECK(std::filesystem::exists(dir.Path("model/tokenizer.json")));
  CHECK(std::filesystem::exists(dir.Path("model/tokenizer_config.json")));
}

TEST_CASE("the size of the shards changes no value") {
  const TempDir dir;
  SyntheticModel m = Small();
  WriteSyntheticModel(m, dir.Path("one"));
  m.shard_bytes = 150'000;
  WriteSyntheticModel(m, dir.Path("many"));
  CHECK(Container({dir.Path("one")}).Files().Count() == 3);
  const Container many({dir.Path("many")});
  CHECK(many.Files().Count() > 6);
  const StoredTensors tensors = ReadTensors(dir.Path("one"));
  REQUIRE(tensors.size() == many.TensorCount());
  for (const auto& [name, tensor] : tensors) CHECK(TensorBytes(many, name) == tensor.bytes);
}

TEST_CASE("another seed gives other weights, the same one the same") {
  const TempDir dir;
  SyntheticModel m = Small();
  const std::string name = "model.layers.2.mlp.experts.3.up_proj.weight";
  std::string weights[3];
  for (size_t i = 0; i < 3; ++i) {
    m.seed = i == 2 ? 8 : 7;
    const std::string out = dir.Path(std::to_string(i));
    WriteSyntheticModel(m, out);
    weights[i] = TensorBytes(Container({out}), name);
  }
  CHECK(weights[0] == weights[1]);
  CHECK(weights[0] != weights[2]);
}

TEST_CASE("within a shard scales come first, by name, then weights, by name") {
  const TempDir dir;
  WriteSyntheticModel(Small(), dir.Path("model"));
  const Container container({dir.Path("model")});
  std::vector<std::pair<uint64_t, std::string>> order;
  for (const std::string& name : container.Names()) {
    if (container.Find(name)->file == 0) order.emplace_back(container.Find(name)->offset, name);
  }
  std::sort(order.begin(), order.end());
  const auto is_f32 = [&](const std::string& n) { return container.Find(n)->dtype == DType::kF32; };
  for (size_t i = 1; i < order.size(); ++i) {
    const std::string &before = order[i - 1].second, &name = order[i].second;
    CHECK((is_f32(before) == is_f32(name) ? before < name : is_f32(before)));
  }
}

TEST_CASE("weights keep the variance of what they multiply, and int4 has no -8") {
  const TempDir dir;
  SyntheticModel m = Small();
  m.hidden = 512;
  WriteSyntheticModel(m, dir.Path("model"));
  const Container container({dir.Path("model")});
  const std::string name = "model.layers.0.mlp.up_proj.weight";  // int4-g64 [192 x 512]
  const std::string packed = TensorBytes(container, name);
  const std::string scales = TensorBytes(container, name + ".qs");
  double sum = 0;
  for (size_t i = 0; i < packed.size(); ++i) {
    float scale = 0;
    std::memcpy(&scale, scales.data() + i / 32 * 4, 4);
    for (const int nibble : {packed[i] & 15, packed[i] >> 4 & 15}) {
      CHECK(nibble != 0);
      const double w = (nibble - 8) * static_cast<double>(scale);
      sum += w * w;
    }
  }
  CHECK(sum / 192 == doctest::Approx(1).epsilon(0.1));
}

TEST_CASE("the head's rows of end tokens are zeros, so that no line of a measurement ends early") {
  const TempDir dir;
  SyntheticModel m = Small();
  m.tokenizer_from = kDemo;
  WriteSyntheticModel(m, dir.Path("model"));
  const std::string head = TensorBytes(Container({dir.Path("model")}), "lm_head.weight");
  const auto row = [&](size_t token) { return head.substr(token * 128, 128); };
  for (const size_t token : {4060U, 4067U, 4069U}) CHECK(row(token) == std::string(128, '\0'));
  CHECK(row(4061) != std::string(128, '\0'));
}

TEST_CASE("the head likes a token's successor best, and what eh_proj hands on is the embedding") {
  const TempDir dir;
  SyntheticModel m = Small();
  m.hidden = 512;
  WriteSyntheticModel(m, dir.Path("model"));
  const Container container({dir.Path("model")});
  const std::string embedding = TensorBytes(container, "model.embed_tokens.weight");
  const std::string head = TensorBytes(container, "lm_head.weight");
  const auto dot = [&](size_t token, size_t next) {
    int64_t sum = 0;
    for (size_t i = 0; i < 512; ++i) {
      sum += static_cast<signed char>(embedding[token * 512 + i]) *
             static_cast<signed char>(head[next * 512 + i]);
    }
    return sum;
  };
  for (const size_t token : {0U, 77U, 2000U, 4095U}) {
    const int64_t successor = dot(token, (token + 1) % 4096);
    int better = 0;
    for (size_t next = 0; next < 4096; ++next) better += dot(token, next) > successor ? 1 : 0;
    CHECK(better < 4);  // a jump may be as good
  }
  const std::string mixing = TensorBytes(container, "model.layers.5.eh_proj.weight");
  for (size_t r = 0; r < 512; ++r) CHECK(mixing[r * 1024 + r] == 127);
}

TEST_CASE("without MTP and indexers there are no shards of theirs") {
  const TempDir dir;
  SyntheticModel m = Small();
  m.mtp = m.indexer = false;
  WriteSyntheticModel(m, dir.Path("model"));
  const Model model({dir.Path("model")});
  CHECK_FALSE(model.HasMtp());
  CHECK_FALSE(model.HasIndexer());
  CHECK(model.Files().Files().Count() == 1);
}

TEST_CASE("a directory that holds something is left alone") {
  const TempDir dir;
  dir.Write("notes.txt", "mine");
  CHECK(Contains(MessageOf<UsageError>([&] { WriteSyntheticModel(Small(), dir.Path("")); }),
                 "exists and is not empty"));
}

TEST_CASE("impossible dimensions and too small a vocabulary are refused before anything is made") {
  const TempDir dir;
  SyntheticModel m = Small();
  m.top_k = 13;
  CHECK(Contains(MessageOf<UsageError>([&] { WriteSyntheticModel(m, dir.Path("model")); }),
                 "num_experts_per_tok = 13"));
  m = Small();
  m.vocab = 4000;
  m.tokenizer_from = kDemo;
  CHECK(Contains(MessageOf<UsageError>([&] { WriteSyntheticModel(m, dir.Path("model")); }),
                 "vocabulary of 4000"));
  CHECK_FALSE(std::filesystem::exists(dir.Path("model")));
}

}  // namespace
}  // namespace colibri
