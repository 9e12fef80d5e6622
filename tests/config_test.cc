// Spellings of config.json that are accepted, and values that are refused by name.
#include "runtime/config.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "io/error.h"
#include "tests/shard_files.h"

namespace colibri {
namespace {

using nlohmann::json;

// The fixtures' configuration: 7 layers, 2 of them dense, 8 experts.
json Base() {
  std::ifstream file(FixtureModel("tiny") + "/config.json");
  return json::parse(file);
}

ModelConfig Parse(const json& config, const std::string& generation = "") {
  return ParseConfig(config.dump(), generation, "dir/config.json");
}

// The message about the base configuration with these keys changed (null removes one).
std::string Complaint(const json& changes, const std::string& generation = "") {
  json config = Base();
  config.merge_patch(changes);
  return MessageOf<ModelError>([&] { Parse(config, generation); });
}

TEST_CASE("GLM-5.2's own values are understood") {
  json config = Base();
  json types = json::array();
  for (int i = 0; i < 78; ++i) types.push_back(i < 3 || i % 4 == 2 ? "full" : "shared");
  config.merge_patch({{"vocab_size", 154880},
                      {"hidden_size", 6144},
                      {"num_hidden_layers", 78},
                      {"num_attention_heads", 64},
                      {"q_lora_rank", 2048},
                      {"kv_lora_rank", 512},
                      {"qk_nope_head_dim", 192},
                      {"qk_rope_head_dim", 64},
                      {"v_head_dim", 256},
                      {"qk_head_dim", 256},
                      {"head_dim", 192},
                      {"intermediate_size", 12288},
                      {"moe_intermediate_size", 2048},
                      {"n_routed_experts", 256},
                      {"num_experts_per_tok", 8},
                      {"first_k_dense_replace", 3},
                      {"mlp_layer_types", nullptr},
                      {"index_n_heads", 32},
                      {"index_head_dim", 128},
                      {"index_topk", 2048},
                      {"indexer_types", types},
                      {"index_topk_pattern", nullptr},
                      {"max_position_embeddings", 1048576},
                      {"moe_router_dtype", "float32"},
                      {"eos_token_id", {154820, 154827, 154829}}});
  const ModelConfig c =
      Parse(config, R"({"temperature":1.0,"top_p":0.95,"eos_token_id":[154820,154827,154829]})");
  CHECK(c.layers == 78);
  CHECK(c.rope == 64);
  CHECK(c.QkHead() == 256);
  CHECK(c.KvWidth() == 576);
  CHECK(c.rope_theta == 8e6F);
  CHECK(c.rms_eps == 1e-5F);
  CHECK(c.latent_eps == c.rms_eps);
  CHECK(c.norm_top_k);
  CHECK(c.routed_scale == 2.5F);
  CHECK(c.mtp);
  CHECK(c.index_share_for_mtp);
  CHECK(std::count(c.sparse.begin(), c.sparse.end(), true) == 75);
  CHECK(std::count(c.full_indexer.begin(), c.full_indexer.end(), true) == 21);
  CHECK(c.Sparse(78));
  CHECK(c.FullIndexer(78));
  CHECK(c.stop_ids == std::vector<int32_t>{154820, 154827, 154829});
  CHECK(c.generation.temperature == 1.0F);
  CHECK(c.generation.top_p == 0.95F);
  CHECK_FALSE(c.generation.top_k.has_value());
}

TEST_CASE("every fixture's configuration is read") {
  for (const char* name : {"tiny", "groups", "long", "quant-mixed", "odd-int4-row"}) {
    CAPTURE(name);
    const ModelConfig c = LoadConfig(FixtureModel(name));
    CHECK(c.layers == 7);
    CHECK(c.sparse == std::vector<bool>{false, false, true, true, true, true, true});
    CHECK(c.full_indexer == std::vector<bool>{true, true, false, true, false, false, true});
  }
  CHECK(LoadConfig(FixtureModel("groups")).top_groups == 2);
  CHECK(LoadConfig(COLIBRI_SOURCE_DIR "/apps/demo/model").generation.temperature.has_value());
}

TEST_CASE("rope theta has two places and no default") {
  json config = Base();
  config.erase("rope_parameters");
  CHECK(Contains(MessageOf<ModelError>([&] { Parse(config); }),
                 "dir/config.json: rope_theta is missing"));
  config["rope_theta"] = 10000;
  CHECK(Parse(config).rope_theta == 10000.0F);
  config["rope_scaling"] = nullptr;
  CHECK(Parse(config).rope_theta == 10000.0F);
  config["rope_parameters"] = {{"type", "default"}, {"rope_theta", 5e5}};
  CHECK(Parse(config).rope_theta == 5e5F);
  config["rope_parameters"] = {{"rope_type", "default"}};
  CHECK(Parse(config).rope_theta == 10000.0F);
  CHECK(Contains(Complaint({{"rope_parameters", {{"rope_theta", "8000000"}}}}),
                 "rope_parameters.rope_theta = \"8000000\", a number above 0 expected"));
  CHECK(Contains(Complaint({{"rope_parameters", {{"rope_theta", 0}}}}), "rope_theta = 0,"));
  CHECK(Contains(Complaint({{"rope_parameters", {{"rope_theta", 1e300}}}}), "rope_theta = 1e+300"));
}

TEST_CASE("scaled rotations are refused by name") {
  CHECK(Contains(Complaint({{"rope_parameters", {{"rope_type", "yarn"}}}}),
                 "rope_parameters.rope_type = \"yarn\", \"default\" expected"));
  CHECK(Contains(Complaint({{"rope_scaling", {{"type", "linear"}, {"factor", 4}}}}),
                 "rope_scaling.type = \"linear\""));
  CHECK(Contains(Complaint({{"rope_scaling", {{"factor", 4}}}}),
                 "rope_scaling.rope_type is missing"));
  CHECK(Contains(Complaint({{"rope_parameters", {{"factor", 4}}}}), "factor = 4"));
  CHECK(Contains(Complaint({{"rope_scaling", "yarn"}}), "an object expected"));
}

TEST_CASE("rotations that are not interleaved are refused, absent flags are fine") {
  CHECK(
      Contains(Complaint({{"rope_interleave", false}}), "rope_interleave = false, true expected"));
  CHECK(
      Contains(Complaint({{"indexer_rope_interleave", false}}), "indexer_rope_interleave = false"));
  CHECK(Complaint({{"rope_interleave", nullptr}, {"indexer_rope_interleave", nullptr}}).empty());
}

TEST_CASE("head_dim and the number of KV heads are ignored") {
  CHECK(Complaint({{"head_dim", 192}, {"num_key_value_heads", 1}, {"layer_types", {"x"}}}).empty());
  CHECK(Complaint({{"head_dim", nullptr}, {"num_key_value_heads", nullptr}}).empty());
}

TEST_CASE("dense layers come from the list, else from the first sparse layer and its frequency") {
  json config = Base();
  config.erase("mlp_layer_types");
  CHECK(Parse(config).sparse == std::vector<bool>{false, false, true, true, true, true, true});
  config["moe_layer_freq"] = 2;
  CHECK(Parse(config).sparse == std::vector<bool>{false, false, true, false, true, false, true});
  config.erase("moe_layer_freq");
  config.erase("first_k_dense_replace");
  CHECK(Parse(config).sparse == std::vector<bool>{false, false, false, true, true, true, true});
  CHECK(Contains(Complaint({{"mlp_layer_types", {"dense"}}}), "7 entries"));
  CHECK(Contains(Complaint({{"mlp_layer_types", {"dense", 1, 2, 3, 4, 5, 6}}}), "mlp_layer_types"));
  CHECK(Contains(Complaint({{"mlp_layer_types", "dense"}}), "mlp_layer_types = \"dense\""));
}

TEST_CASE("indexers come from the list, the pattern, the formula, or are in every layer") {
  json config = Base();
  const std::vector<bool> formula{true, true, true, false, false, false, true};
  config.erase("indexer_types");
  CHECK(Parse(config).full_indexer == formula);
  config["index_skip_topk_offset"] = nullptr;  // 2
  CHECK(Parse(config).full_indexer ==
        std::vector<bool>{true, true, false, false, false, true, false});
  config["index_topk_freq"] = nullptr;
  CHECK(Parse(config).full_indexer == std::vector<bool>(7, true));
  config["index_topk_pattern"] = "FSSFSSF";
  const std::vector<bool> pattern{true, false, false, true, false, false, true};
  CHECK(Parse(config).full_indexer == pattern);
  config["index_topk_pattern"] = {"full", "S", "shared", "F", "S", "S", "full"};
  CHECK(Parse(config).full_indexer == pattern);
}

TEST_CASE("the formula gives F F F S S S F S for eight layers, frequency 4 and offset 3") {
  json config = Base();
  config.merge_patch(
      {{"num_hidden_layers", 8}, {"indexer_types", nullptr}, {"mlp_layer_types", nullptr}});
  CHECK(Parse(config).full_indexer ==
        std::vector<bool>{true, true, true, false, false, false, true, false});
}

TEST_CASE("indexer lists of the wrong length or without a first full layer are refused") {
  CHECK(Contains(Complaint({{"indexer_types", {"full"}}}), "7 entries"));
  const std::vector<std::string> shared(7, "shared");
  CHECK(Contains(Complaint({{"indexer_types", shared}}), "a first layer that is full"));
  CHECK(Contains(Complaint({{"indexer_types", nullptr}, {"index_topk_pattern", "SFFFFFF"}}),
                 "index_topk_pattern = \"SFFFFFF\", a first layer that is full"));
  CHECK(Contains(Complaint({{"indexer_types", nullptr}, {"index_topk_pattern", "FXFFFFF"}}),
                 "index_topk_pattern"));
  CHECK(Contains(Complaint({{"indexer_types", nullptr}, {"index_topk_pattern", "FFFFFFFF"}}),
                 "7 entries"));
}

TEST_CASE("the number of experts has three spellings that must agree") {
  CHECK(Complaint({{"n_routed_experts", nullptr}, {"num_experts", 8}}).empty());
  CHECK(Complaint({{"n_routed_experts", nullptr}, {"num_local_experts", 8}}).empty());
  CHECK(Complaint({{"num_experts", 8}}).empty());
  CHECK(Contains(Complaint({{"num_experts", 16}}), "num_experts = 16, 8 as elsewhere"));
  CHECK(Contains(Complaint({{"n_routed_experts", nullptr}}), "n_routed_experts is missing"));
}

TEST_CASE("unsupported variants are refused by key and value") {
  const auto check = [](const json& change, const std::string& expected) {
    CHECK_MESSAGE(Contains(Complaint(change), "dir/config.json: " + expected), Complaint(change));
  };
  check({{"model_type", "deepseek_v32"}},
        "model_type = \"deepseek_v32\", \"glm_moe_dsa\" expected");
  check({{"model_type", nullptr}}, "model_type is missing");
  check({{"hidden_act", "gelu"}}, "hidden_act = \"gelu\", \"silu\" expected");
  check({{"attention_bias", true}}, "attention_bias = true, false expected");
  check({{"tie_word_embeddings", true}}, "tie_word_embeddings = true");
  check({{"scoring_func", "softmax"}}, "scoring_func = \"softmax\", \"sigmoid\" expected");
  check({{"topk_method", "greedy"}}, "topk_method = \"greedy\", \"noaux_tc\" expected");
  check({{"norm_topk_prob", nullptr}}, "norm_topk_prob is missing");
  check({{"norm_topk_prob", 1}}, "norm_topk_prob = 1, true or false expected");
  check({{"routed_scaling_factor", nullptr}}, "routed_scaling_factor is missing");
  check({{"routed_scaling_factor", -1}}, "routed_scaling_factor = -1");
  check({{"n_shared_experts", 0}}, "n_shared_experts = 0");
  check({{"n_group", 3}}, "n_group = 3, a divisor of the 8 experts expected");
  check({{"n_group", 8}, {"topk_group", 1}}, "n_group = 8, at least two experts a group expected");
  check({{"n_group", 4}, {"topk_group", nullptr}}, "topk_group is missing");
  check({{"n_group", 4}, {"topk_group", 5}}, "topk_group = 5");
  check({{"n_group", nullptr}, {"topk_group", 2}}, "topk_group = 2");
  check({{"n_group", 4}, {"topk_group", 1}, {"num_experts_per_tok", 3}},
        "num_experts_per_tok = 3, at most 2");
  check({{"num_experts_per_tok", 9}}, "num_experts_per_tok = 9, an integer from 1 to 8 expected");
  check({{"qk_rope_head_dim", 15}}, "qk_rope_head_dim = 15, an even number expected");
  check({{"qk_head_dim", 24}},
        "qk_head_dim = 24, 40 (qk_nope_head_dim + qk_rope_head_dim) expected");
  check({{"index_head_dim", 8}}, "index_head_dim = 8, at least 16");
  check({{"q_lora_rank", nullptr}}, "q_lora_rank is missing");
  check({{"num_nextn_predict_layers", 2}}, "num_nextn_predict_layers = 2");
  check({{"rms_norm_eps", 0}}, "rms_norm_eps = 0");
}

TEST_CASE("hostile sizes are refused before anything is multiplied") {
  const auto refused = [](const char* key, const json& value) {
    CAPTURE(key);
    CHECK(Contains(Complaint({{key, value}}), std::string(key) + " = "));
  };
  for (const char* key :
       {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank",
        "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size",
        "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_shared_experts",
        "index_n_heads", "index_head_dim", "index_topk", "max_position_embeddings"}) {
    refused(key, 0);
    refused(key, -1);
    refused(key, 1LL << 31);
    refused(key, 18446744073709551615ULL);
    refused(key, 1e30);
    refused(key, 64.0);
    refused(key, "64");
    refused(key, json::array({64}));
    refused(key, true);
  }
  refused("num_hidden_layers", 1025);
  refused("n_routed_experts", 65536);
  CHECK(Contains(Complaint({{"num_attention_heads", 65536}, {"qk_nope_head_dim", 65536}}),
                 "a product of at most"));
  CHECK(Contains(Complaint({{"index_n_heads", 65536}, {"index_head_dim", 65536}}),
                 "a product of at most"));
}

TEST_CASE("stop ids of both files are joined, and must be in the vocabulary") {
  CHECK(Parse(Base(), R"({"eos_token_id":[5,317]})").stop_ids ==
        std::vector<int32_t>{5, 317, 318, 319});
  CHECK(Parse(Base(), R"({"eos_token_id":7})").stop_ids.front() == 7);
  CHECK(Contains(Complaint({{"eos_token_id", 320}}), "eos_token_id = 320, an id below 320"));
  CHECK(Contains(Complaint({{"eos_token_id", {1, -1}}}), "eos_token_id"));
  CHECK(Contains(Complaint(json::object(), R"({"eos_token_id":"x"})"),
                 "dir/generation_config.json: eos_token_id"));
}

TEST_CASE("generation defaults out of range are refused") {
  CHECK(Contains(Complaint(json::object(), R"({"temperature":-1})"), "temperature = -1"));
  CHECK(Contains(Complaint(json::object(), R"({"top_p":1.5})"), "top_p = 1.5"));
  CHECK(Contains(Complaint(json::object(), R"({"top_p":"0.9"})"), "top_p = \"0.9\""));
  CHECK(Contains(Complaint(json::object(), R"({"top_k":2147483648})"), "top_k = 2147483648"));
  CHECK(Parse(Base(), R"({"temperature":null,"top_k":40})").generation.top_k == 40);
}

TEST_CASE("texts that are no JSON object, have doubled keys, NULs or deep nesting are refused") {
  const auto complaint = [](const std::string& text) {
    return MessageOf<ModelError>([&] { ParseConfig(text, "", "c"); });
  };
  CHECK(Contains(complaint(""), "c: not valid JSON"));
  CHECK(Contains(complaint("[]"), "c: not a JSON object"));
  CHECK(Contains(complaint(R"({"hidden_size":1,"hidden_size":2})"),
                 "\"hidden_size\" is given twice"));
  CHECK(Contains(complaint(Base().dump() + '\0'), "NUL"));
  CHECK(Contains(complaint(R"({"a":)" + std::string(100000, '[')), "nested deeper"));
  CHECK(Contains(complaint(Base().dump().substr(0, 200)), "not valid JSON"));
}

TEST_CASE("messages stay short whatever the file holds") {
  CHECK(Complaint({{"hidden_act", std::string(1 << 20, 'x')}}).size() < 400);
  CHECK(Complaint({{"indexer_types", json(std::vector<int>(100000, 1))}}).size() < 400);
}

TEST_CASE("a missing or truncated config.json is told with its path") {
  const TempDir dir;
  CHECK(Contains(MessageOf<ModelError>([&] { LoadConfig(dir.Path("")); }),
                 "config.json: no such file"));
  dir.Write("config.json", "{\"model_type\"");
  CHECK(
      Contains(MessageOf<ModelError>([&] { LoadConfig(dir.Path("")); }), "config.json: not valid"));
  dir.Write("config.json", Base().dump());
  dir.Write("generation_config.json", "");
  CHECK(Contains(MessageOf<ModelError>([&] { LoadConfig(dir.Path("")); }),
                 "generation_config.json: empty"));
}

}  // namespace
}  // namespace colibri
