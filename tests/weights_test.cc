// Opening models: formats, missing parts, layouts of experts, dense weights in memory.
// Length: every refusal needs a model folder of its own, made by shared helpers.
#include "runtime/weights.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "io/error.h"
#include "runtime/missing_tensors.h"
#include "tests/shard_files.h"

namespace colibri {
namespace {

constexpr const char* kFixtures[] = {
    "tiny",           "groups",         "long",        "quant-int4-row", "quant-int4-g64",
    "quant-int4-g32", "quant-int8-row", "quant-mixed", "short-int4-g64", "odd-int4-row"};

std::string OpenComplaint(const ModelCopy& copy) {
  return MessageOf<ModelError>([&] { Model({copy.Directory()}); });
}

// The packed bytes that a matrix points to, and those of its scales.
std::string Bytes(const PackedMatrix& m) {
  std::string bytes(reinterpret_cast<const char*>(m.data), DataBytes(m));
  if (HasScales(m.format)) {
    bytes.append(reinterpret_cast<const char*>(m.scales), ScaleBytes(m));
  }
  return bytes;
}

std::string StoredBytes(const Container& container, const std::string& name) {
  std::string bytes = TensorBytes(container, name);
  if (container.Find(name + ".qs") != nullptr) bytes += TensorBytes(container, name + ".qs");
  return bytes;
}

// Reads extents as the cache would, after checking that they can be read directly.
std::vector<std::byte> ReadExtents(const Model& model, const std::vector<Extent>& extents,
                                   uint64_t bytes) {
  std::vector<std::byte> slot(bytes);
  uint64_t filled = 0;
  for (const Extent& extent : extents) {
    CHECK(extent.offset % kIoAlign == 0);
    CHECK(extent.bytes % kIoAlign == 0);
    CHECK(extent.dest == filled);
    filled += extent.bytes;
    const uint64_t end =
        std::min(extent.offset + extent.bytes, model.Files().Files().Size(extent.file));
    model.Files().Files().ReadExact(extent.file, extent.offset,
                                    std::span(slot).subspan(extent.dest, end - extent.offset));
  }
  CHECK(filled == bytes);
  return slot;
}

// Every expert's matrices, seen through its extents, are the tensors of the container.
void CheckExperts(const Model& model) {
  for (uint32_t item = 0; item < model.ExpertCount(); ++item) {
    const ExpertLayout& expert = model.Expert(item);
    CHECK(expert.slot_bytes <= model.ExpertClasses()[expert.slot_class].slot_bytes);
    const std::vector<std::byte> slot = ReadExtents(model, expert.extents, expert.slot_bytes);
    const FfnWeights view = model.ExpertView(item, slot.data());
    const int32_t layer = model.ExpertLayer(item);
    const std::string prefix =
        fmt::format("model.layers.{}.mlp.experts.{}.", layer, item - model.ExpertItem(layer, 0));
    uint64_t useful = 0;
    for (const auto& [name, matrix] : {std::pair("gate", &view.gate), std::pair("up", &view.up),
                                       std::pair("down", &view.down)}) {
      const std::string stored = StoredBytes(model.Files(), prefix + name + "_proj.weight");
      CHECK(Bytes(*matrix) == stored);
      useful += stored.size();
    }
    CHECK(expert.useful_bytes == useful);
  }
}

TEST_CASE("every fixture opens with the formats it was made with") {
  const std::map<std::string, std::string> expected = {
      {"tiny", "bf16 experts, bf16 attention, bf16 head, bf16 MTP experts"},
      {"groups", "f32 experts, f32 attention, f32 head, f32 MTP experts"},
      {"long", "f16 experts, f16 attention, f16 head, f16 MTP experts"},
      {"quant-int4-row",
       "int4-row experts, int4-row attention, int8-row head, int8-row MTP experts"},
      {"quant-int4-g64",
       "int4-g64/int4-row experts, int4-g64/int4-row attention, int8-row head, "
       "int8-row MTP experts"},
      {"quant-int4-g32",
       "int4-g32 experts, int4-g32 attention, int8-row head, int8-row MTP experts"},
      {"quant-int8-row",
       "int8-row experts, int8-row attention, int8-row head, int8-row MTP experts"},
      {"quant-mixed",
       "int4-g64/int4-row experts, int8-row attention, int8-row head, int8-row MTP experts"},
      {"short-int4-g64",
       "int4-g64 experts, int4-g64/int4-row attention, int8-row head, int8-row MTP experts"},
      {"odd-int4-row", "int4-row experts, int4-row attention, int8-row head, int8-row MTP experts"},
  };
  for (const char* name : kFixtures) {
    CAPTURE(name);
    const Model model({FixtureModel(name)});
    CHECK(model.FormatSummary() == expected.at(name));
    CHECK(model.HasIndexer());
    CHECK(model.HasMtp());
    CHECK(model.LayerCount() == 8);
    CHECK(model.Notes().empty());
    CHECK(model.ExpertCount() == 6U * static_cast<uint32_t>(model.Config().experts));
  }
}

TEST_CASE("experts read through their extents are the tensors, in every fixture") {
  for (const char* name : kFixtures) {
    CAPTURE(name);
    CheckExperts(Model({FixtureModel(name)}));
  }
}

TEST_CASE("the demo model opens and loads") {
  Model model({COLIBRI_SOURCE_DIR "/apps/demo/model"});
  CheckExperts(model);
  model.LoadDense();
  CHECK(model.FinalNorm().size() == 256);
  CHECK(model.ExpertClasses().size() == 2);
  CHECK(model.ExpertClasses()[0].last_layer == 5);
  CHECK(model.ExpertClasses()[1].experts == 32);
}

TEST_CASE("some experts of a fixture lie in two shards") {
  const Model model({FixtureModel("tiny")});
  std::set<size_t> files_of_experts;
  for (uint32_t item = 0; item < model.ExpertCount(); ++item) {
    std::set<uint32_t> files;
    for (const Extent& extent : model.Expert(item).extents) files.insert(extent.file);
    files_of_experts.insert(files.size());
  }
  CHECK(files_of_experts == std::set<size_t>{1, 2});
}

TEST_CASE("adjacent weights are one extent and their distant scales another") {
  const Model plain({FixtureModel("tiny")});
  CHECK(plain.Expert(0).extents.size() == 1);
  const Model quantised({FixtureModel("quant-int4-g64")});
  CHECK(quantised.Expert(0).extents.size() == 2);
}

TEST_CASE("an expert whose six parts lie in six shards in any order is found") {
  const ModelCopy copy("quant-int4-g64");
  StoredTensors shards[6];
  for (const auto& [name, tensor] : ReadTensors(copy.Directory())) {
    size_t shard = name.ends_with(".qs") ? 1 : 4;
    if (Contains(name, "gate_proj")) --shard;
    if (Contains(name, "down_proj")) ++shard;
    shards[shard][name] = tensor;
  }
  copy.Replace({});
  for (size_t i = 0; i < 6; ++i) {
    copy.Write(fmt::format("part-{}.safetensors", "bdface"[i]), ShardOf(shards[i]));
  }
  const Model model({copy.Directory()});
  CHECK(model.Expert(0).extents.size() == 6);
  CheckExperts(model);
}

TEST_CASE("an ambiguous group size is settled by the container's other tensors") {
  const Model model({FixtureModel("short-int4-g64")});
  const PackedMatrix& down = model.Expert(0).down.shape;
  CHECK(down.format == WeightFormat::kInt4Grouped);
  CHECK(down.cols == 80);
  CHECK(down.group == 64);
}

TEST_CASE("formats are resolved tensor by tensor") {
  const Model model({FixtureModel("quant-mixed")});
  CHECK(model.Layer(0).o.format == WeightFormat::kInt8Row);
  CHECK(model.Layer(3).ffn.gate.format == WeightFormat::kInt8Row);
  CHECK(model.Expert(0).gate.shape.format == WeightFormat::kInt4Grouped);
  CHECK(model.Expert(model.ExpertItem(7, 0)).gate.shape.format == WeightFormat::kInt8Row);
}

TEST_CASE("stamps in a shard's metadata are honoured") {
  const ModelCopy copy("quant-int8-row");
  const StoredTensors tensors = ReadTensors(copy.Directory());
  const auto metadata = [](const char* format) {
    return fmt::format(
        R"({{"colibri.fmt":"{{\"model.layers.0.self_attn.o_proj.weight\":\"{}\"}}"}})", format);
  };
  copy.Replace(tensors, metadata("int8-row"));
  CHECK(OpenComplaint(copy).empty());
  copy.Replace(tensors, metadata("int4-row"));
  CHECK(Contains(OpenComplaint(copy), "layers.0.self_attn.o_proj.weight: stamped int4-row"));
}

TEST_CASE("int8 tensors may be tagged I8") {
  const ModelCopy copy("quant-int8-row");
  StoredTensors tensors = ReadTensors(copy.Directory());
  for (auto& [name, tensor] : tensors) {
    if (tensor.dtype == "U8") tensor.dtype = "I8";
  }
  copy.Replace(tensors);
  CHECK(Model({copy.Directory()}).Layer(0).o.format == WeightFormat::kInt8Row);
}

TEST_CASE("a transposed matrix of equal size is refused") {
  const ModelCopy copy("tiny");
  StoredTensors tensors = ReadTensors(copy.Directory());
  auto& shape = tensors["model.layers.2.mlp.experts.3.up_proj.weight"].shape;
  std::swap(shape[0], shape[1]);
  copy.Replace(tensors);
  CHECK(Contains(OpenComplaint(copy),
                 "model.layers.2.mlp.experts.3.up_proj.weight: shape [96, 40], "
                 "[40, 96] expected"));
}

TEST_CASE("a norm of the wrong width is refused") {
  const ModelCopy copy("tiny");
  StoredTensors tensors = ReadTensors(copy.Directory());
  tensors["model.norm.weight"] = {"F32", {95}, std::string(95 * 4, '\0')};
  copy.Replace(tensors);
  CHECK(Contains(OpenComplaint(copy), "model.norm.weight: shape [95]"));
}

TEST_CASE("a missing middle shard is named, with what it held by layers") {
  const ModelCopy copy("quant-int4-g64");
  copy.Remove("out-00001.safetensors");
  const std::string message = OpenComplaint(copy);
  CAPTURE(message);
  CHECK(Contains(message, "tensors missing; is a shard missing? not there: out-00001.safetensors"));
  CHECK(Contains(message, "layers 3-5: mlp.experts.*: "));
  CHECK(std::count(message.begin(), message.end(), '\n') < 13);
}

TEST_CASE("a missing last shard is told by the tensors it held and the last one there") {
  const ModelCopy copy("quant-int4-g64");
  copy.Remove("out-00002.safetensors");
  const std::string message = OpenComplaint(copy);
  CAPTURE(message);
  CHECK(Contains(message, "the last is out-00001.safetensors"));
  CHECK(Contains(message, "lm_head.weight, model.norm.weight: 2 tensors"));
}

TEST_CASE("one missing scale tensor is named") {
  const ModelCopy copy("quant-int4-g64");
  StoredTensors tensors = ReadTensors(copy.Directory());
  tensors.erase("model.layers.4.self_attn.kv_b_proj.weight.qs");
  copy.Replace(tensors);
  CHECK(Contains(OpenComplaint(copy), "layer 4: self_attn.kv_b_proj.weight.qs: 1 tensor"));
}

TEST_CASE("gaps are found in both ways of numbering shards") {
  CHECK(ShardHint({"out-00000.safetensors", "out-00003.safetensors"}) ==
        "not there: out-00001.safetensors, out-00002.safetensors");
  CHECK(ShardHint({"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"}) ==
        "not there: model-00003-of-00003.safetensors");
  CHECK(ShardHint({"out-00009.safetensors"}) ==
        "not there: out-00000.safetensors, out-00001.safetensors, out-00002.safetensors, "
        "out-00003.safetensors and 5 more");
  CHECK(
      ShardHint({"out-00000.safetensors", "out-00001.safetensors", "out-mtp-00000.safetensors"}) ==
      "3 shards here, the last is out-00001.safetensors");
  CHECK(ShardHint({"weights.safetensors"}) == "1 shard here, the last is weights.safetensors");
}

TEST_CASE("a configuration that promises more experts than there are is answered at once") {
  const ModelCopy copy("tiny");
  std::ifstream file(copy.Path("config.json"));
  nlohmann::json config = nlohmann::json::parse(file);
  config["n_routed_experts"] = 65535;
  copy.Write("config.json", config.dump());
  CHECK(Contains(OpenComplaint(copy), "mlp.gate.weight: shape [8, 96], [65535, 96] expected"));
  StoredTensors tensors = ReadTensors(copy.Directory());
  std::erase_if(tensors, [](const auto& t) { return Contains(t.first, "mlp.gate."); });
  copy.Replace(tensors);
  CHECK(Contains(OpenComplaint(copy), "layers 2-6: mlp.experts.*: 982,905 tensors"));
}

TEST_CASE("without an MTP shard there are no drafts and a note") {
  const ModelCopy copy("quant-int4-g64");
  copy.Remove("out-mtp-00000.safetensors");
  const Model model({copy.Directory()});
  CHECK_FALSE(model.HasMtp());
  CHECK(model.LayerCount() == 7);
  CHECK(model.ExpertCount() == 40);
  CHECK(model.ExpertClasses().size() == 1);
  REQUIRE(model.Notes().size() == 1);
  CHECK(Contains(model.Notes()[0], "no drafts: the MTP layer is incomplete"));
}

TEST_CASE("an MTP layer that lacks one tensor is left out whole, whichever it is") {
  for (const char* name : {"eh_proj.weight", "shared_head.norm.weight", "mlp.gate.weight",
                           "mlp.experts.7.down_proj.weight", "mlp.experts.0.up_proj.weight.qs",
                           "self_attn.indexer.wk.weight"}) {
    CAPTURE(name);
    const ModelCopy copy("quant-int4-g64");
    StoredTensors tensors = ReadTensors(copy.Directory());
    REQUIRE(tensors.erase(std::string("model.layers.7.") + name) == 1);
    copy.Replace(tensors);
    const Model model({copy.Directory()});
    CHECK_FALSE(model.HasMtp());
    CHECK(model.HasIndexer());
    CHECK(model.ExpertCount() == 40);
    REQUIRE(model.Notes().size() == 1);
    CHECK(Contains(model.Notes()[0], "layer 7: "));
  }
}

TEST_CASE("an MTP layer that the configuration does not announce is ignored") {
  const ModelCopy copy("tiny");
  std::ifstream file(copy.Path("config.json"));
  nlohmann::json config = nlohmann::json::parse(file);
  config["num_nextn_predict_layers"] = 0;
  copy.Write("config.json", config.dump());
  const Model model({copy.Directory()});
  CHECK_FALSE(model.HasMtp());
  CHECK(model.Notes().empty());
}

TEST_CASE("an int4 eh_proj gets a note") {
  const ModelCopy copy("quant-int4-row");
  StoredTensors tensors = ReadTensors(copy.Directory());
  tensors["model.layers.7.eh_proj.weight"] = {"U8", {128 * 128}, std::string(128 * 128, '\x77')};
  copy.Replace(tensors);
  const Model model({copy.Directory()});
  CHECK(model.HasMtp());
  REQUIRE(model.Notes().size() == 1);
  CHECK(Contains(model.Notes()[0], "eh_proj of the MTP layer is int4-row"));
}

TEST_CASE("without indexers attention is dense and the MTP layer stays") {
  const ModelCopy copy("tiny");
  StoredTensors tensors = ReadTensors(copy.Directory());
  std::erase_if(tensors, [](const auto& t) { return Contains(t.first, ".indexer."); });
  copy.Replace(tensors);
  const Model model({copy.Directory()});
  CHECK_FALSE(model.HasIndexer());
  CHECK(model.HasMtp());
  REQUIRE(model.Notes().size() == 1);
  CHECK(
      Contains(model.Notes()[0], "dense attention at every length: the container has no indexer"));
}

TEST_CASE("one lacking indexer makes all layers dense, a lone MTP indexer is ignored") {
  const ModelCopy copy("quant-int4-g64");
  copy.Remove("out-idx-00000.safetensors");
  const Model lone({copy.Directory()});
  CHECK_FALSE(lone.HasIndexer());
  CHECK(lone.HasMtp());
  CHECK_FALSE(lone.Layer(7).indexer.has_value());

  const ModelCopy partial("quant-int4-g64");
  StoredTensors tensors = ReadTensors(partial.Directory());
  tensors.erase("model.layers.3.self_attn.indexer.k_norm.bias");
  partial.Replace(tensors);
  const Model model({partial.Directory()});
  CHECK_FALSE(model.HasIndexer());
  CHECK_FALSE(model.Layer(0).indexer.has_value());
  REQUIRE(model.Notes().size() == 1);
  CHECK(Contains(model.Notes()[0], "1 of 4 indexers are missing (first at layer 3)"));
}

TEST_CASE("indexer tensors on shared layers are ignored, whatever they are") {
  const ModelCopy copy("tiny");
  StoredTensors tensors = ReadTensors(copy.Directory());
  tensors["model.layers.2.self_attn.indexer.wk.weight"] = {"U8", {1}, "x"};
  copy.Replace(tensors);
  const Model model({copy.Directory()});
  CHECK(model.HasIndexer());
  CHECK_FALSE(model.Layer(2).indexer.has_value());
  CHECK(model.Layer(3).indexer.has_value());
}

TEST_CASE("dropping the indexers frees their share of the memory") {
  Model model({FixtureModel("quant-int4-g64")});
  const uint64_t before = model.DenseBytes();
  model.DropIndexer();
  CHECK_FALSE(model.HasIndexer());
  CHECK(model.DenseBytes() < before);
  model.LoadDense();
  CHECK_FALSE(model.Layer(0).indexer.has_value());
}

TEST_CASE("loaded matrices are the container's bytes, aligned, and survive a move") {
  for (const char* name : {"tiny", "quant-mixed", "odd-int4-row"}) {
    CAPTURE(name);
    Model opened({FixtureModel(name)});
    const uint64_t planned = opened.DenseBytes();
    opened.LoadDense();
    CHECK(opened.DenseBytes() == planned);
    const Model model = std::move(opened);
    const auto check = [&](const PackedMatrix& m, const std::string& tensor) {
      CHECK(reinterpret_cast<uintptr_t>(m.data) % 64 == 0);
      CHECK(reinterpret_cast<uintptr_t>(m.scales) % 64 == 0);
      CHECK_MESSAGE(Bytes(m) == StoredBytes(model.Files(), tensor), tensor);
    };
    check(model.Embedding(), "model.embed_tokens.weight");
    check(model.Head(), "lm_head.weight");
    check(model.Layer(0).ffn.down, "model.layers.0.mlp.down_proj.weight");
    check(model.Layer(3).ffn.up, "model.layers.3.mlp.shared_experts.up_proj.weight");
    check(model.Layer(3).router, "model.layers.3.mlp.gate.weight");
    check(model.Layer(6).kv_b, "model.layers.6.self_attn.kv_b_proj.weight");
    check(model.Layer(7).q_a, "model.layers.7.self_attn.q_a_proj.weight");
    check(model.Layer(7).indexer->wq_b, "model.layers.7.self_attn.indexer.wq_b.weight");
    check(model.Mtp().eh_proj, "model.layers.7.eh_proj.weight");
  }
}

TEST_CASE("a layer's block, read through its extents, shows the layer's tensors") {
  for (const char* name : kFixtures) {
    CAPTURE(name);
    Model model({FixtureModel(name)});
    model.LoadDense({.layers = 2});
    CHECK_FALSE(model.Streams(1));
    CHECK(model.Streams(2));
    CHECK_FALSE(model.Streams(7));  // the MTP layer
    for (int32_t layer = 2; layer < 7; ++layer) {
      const DenseBlock& block = model.Block(layer);
      const std::vector<std::byte> window = ReadExtents(model, block.extents, block.bytes);
      model.PlaceLayer(layer, window.data());
      uint64_t useful = 0;
      const auto check = [&](const PackedMatrix& m, const std::string& tensor) {
        const std::string full = fmt::format("model.layers.{}.{}.weight", layer, tensor);
        CHECK_MESSAGE(Bytes(m) == StoredBytes(model.Files(), full), full);
        useful += DataBytes(m) + ScaleBytes(m);
      };
      const LayerWeights& w = model.Layer(layer);
      check(w.q_a, "self_attn.q_a_proj");
      check(w.q_b, "self_attn.q_b_proj");
      check(w.kv_a, "self_attn.kv_a_proj_with_mqa");
      check(w.kv_b, "self_attn.kv_b_proj");
      check(w.o, "self_attn.o_proj");
      CHECK(w.indexer.has_value() == model.Config().FullIndexer(layer));
      if (w.indexer) {
        check(w.indexer->wq_b, "self_attn.indexer.wq_b");
        check(w.indexer->wk, "self_attn.indexer.wk");
        check(w.indexer->weights_proj, "self_attn.indexer.weights_proj");
      }
      const std::string ffn = model.Config().Sparse(layer) ? "mlp.shared_experts." : "mlp.";
      check(w.ffn.gate, ffn + "gate_proj");
      check(w.ffn.up, ffn + "up_proj");
      check(w.ffn.down, ffn + "down_proj");
      CHECK(block.useful_bytes == useful);
      CHECK(block.bytes >= useful);
      model.PlaceLayer(layer, nullptr);
      CHECK(w.o.data == nullptr);
    }
  }
}

TEST_CASE("the head's parts have its outputs, each once, where they were read to") {
  for (const char* name : {"tiny", "quant-int4-g64", "quant-int8-row", "quant-mixed"}) {
    CAPTURE(name);
    Model model({FixtureModel(name)});
    model.LoadDense({.mtp = false, .head = false});
    CHECK(model.StreamsHead());
    CHECK(model.Head().data == nullptr);
    const FileTable& files = model.Files().Files();
    std::string data, scales;
    int32_t next = 0;
    CHECK(model.HeadParts() > 1);
    for (int32_t part = 0; part < model.HeadParts(); ++part) {
      CHECK(model.HeadOutput(part) == next);
      const DenseBlock& block = model.HeadBlock(part);
      std::vector<std::byte> bytes(block.bytes);
      for (const Extent& e : block.extents) {
        CHECK(e.offset % kIoAlign == 0);
        const uint64_t end = std::min(e.offset + e.bytes, files.Size(e.file));
        files.ReadExact(e.file, e.offset, {bytes.data() + e.dest, end - e.offset});
      }
      model.PlaceHead(part, bytes.data());
      const PackedMatrix m = model.HeadPart(part);
      CHECK(block.useful_bytes == DataBytes(m));
      data.append(reinterpret_cast<const char*>(m.data), DataBytes(m));
      if (HasScales(m.format)) {
        scales.append(reinterpret_cast<const char*>(m.scales), ScaleBytes(m));
      }
      next += m.rows;
      model.PlaceHead(part, nullptr);
    }
    CHECK(next == model.Config().vocab);
    CHECK(data + scales == StoredBytes(model.Files(), "lm_head.weight"));
  }
}

TEST_CASE("of what does not stay in memory nothing is loaded but routers, norms and scales") {
  Model model({FixtureModel("quant-mixed")});
  uint64_t blocks = 0;
  for (int32_t layer = 3; layer < 7; ++layer) blocks += model.Block(layer).useful_bytes;
  const uint64_t all = model.DenseBytes(), less = model.DenseBytes({.layers = 3});
  CHECK(less < all - blocks + 4096);  // the arena has whole pages
  CHECK(model.DenseBytes({.layers = 3, .embedding = false}) < less);
  CHECK(model.DenseBytes({.layers = 3, .head = false}) < less - DataBytes(model.Head()) + 4096);
  const DenseResidents residents{.layers = 3, .embedding = false, .mtp = false};
  CHECK(model.DenseBytes(residents) < model.DenseBytes({.layers = 3, .embedding = false}));
  model.LoadDense(residents);
  CHECK(model.Residents() == residents);
  CHECK(model.Embedding().data == nullptr);
  CHECK(HasScales(model.Embedding().format) == (model.Embedding().scales != nullptr));
  CHECK(Bytes(model.Head()) == StoredBytes(model.Files(), "lm_head.weight"));
  CHECK(Bytes(model.Layer(2).q_a) ==
        StoredBytes(model.Files(), "model.layers.2.self_attn.q_a_proj.weight"));
  CHECK(model.Layer(3).q_a.data == nullptr);
  CHECK(model.Layer(3).ffn.up.scales == nullptr);
  CHECK(Bytes(model.Layer(6).router) ==
        StoredBytes(model.Files(), "model.layers.6.mlp.gate.weight"));
  CHECK(model.Layer(6).post_norm.size() == static_cast<size_t>(model.Config().hidden));
  CHECK(model.HasMtp());
  CHECK(model.Layer(7).router.data == nullptr);
  CHECK(model.Layer(7).post_norm.empty());
  CHECK(model.Mtp().eh_proj.data == nullptr);
}

TEST_CASE("norms and biases become floats from every plain type") {
  // 1.5, -2, the smallest subnormal half (2^-24) and the largest (65504).
  const std::vector<float> f16{1.5F, -2.0F, 0x1p-24F, 65504.0F};
  const std::string f16_bytes("\x00\x3e\x00\xc0\x01\x00\xff\x7b", 8);
  // 1.5, -2, the smallest subnormal bf16 (2^-133) and the largest.
  const std::vector<float> bf16{1.5F, -2.0F, 0x1p-133F, 0x1.fep127F};
  const std::string bf16_bytes("\xc0\x3f\x00\xc0\x01\x00\x7f\x7f", 8);
  const ModelCopy copy("tiny");
  StoredTensors tensors = ReadTensors(copy.Directory());
  for (const bool half : {true, false}) {
    std::string bytes;
    for (int i = 0; i < 24; ++i) bytes += half ? f16_bytes : bf16_bytes;
    tensors["model.norm.weight"] = {half ? "F16" : "BF16", {96}, bytes};
    copy.Replace(tensors);
    Model model({copy.Directory()});
    model.LoadDense();
    const std::vector<float>& norm = model.FinalNorm();
    CHECK(std::vector<float>(norm.begin() + 92, norm.end()) == (half ? f16 : bf16));
  }
}

TEST_CASE("values that are not finite are refused by tensor and file") {
  const auto complaint = [](const std::string& fixture, const std::string& name,
                            const std::string& value) {
    const ModelCopy copy(fixture);
    StoredTensors tensors = ReadTensors(copy.Directory());
    tensors[name].bytes.replace(tensors[name].bytes.size() - value.size(), value.size(), value);
    copy.Replace(tensors);
    Model model({copy.Directory()});
    return MessageOf<ModelError>([&] { model.LoadDense(); });
  };
  const std::string infinity("\x00\x00\x80\x7f", 4);
  CHECK(Contains(complaint("quant-int4-g64", "lm_head.weight.qs", infinity),
                 "out-00000.safetensors: lm_head.weight.qs has scales that are not finite"));
  CHECK(Contains(complaint("groups", "model.norm.weight", infinity),
                 "model.norm.weight has values that are not finite"));
}

}  // namespace
}  // namespace colibri
