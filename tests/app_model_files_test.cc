// Odd and hostile files in a model's folder, through colibri-run: what is no model ends with exit
// code 3 and one line that names the file, in little memory; what is legal is answered. The rows of
// "Hostile model files" in tests/oddities.md are these cases.
// Length: a third is the list of those files.
#include <doctest/doctest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "tests/oddities.h"
#include "tests/run_program.h"
#include "tests/shard_files.h"
#include "tests/temp_dir.h"
#include "tests/watchdog.h"

namespace colibri {
namespace {

namespace fs = std::filesystem;

const std::string kData = "abcd";

// The demo model by links, so that a test may replace its files.
class LinkedModel {
 public:
  LinkedModel() {
    for (const auto& entry : fs::directory_iterator(COLIBRI_SOURCE_DIR "/apps/demo/model")) {
      fs::create_symlink(entry.path(), dir_.Path(entry.path().filename().string()));
    }
  }
  std::string Directory() const { return fs::path(dir_.Path("x")).parent_path().string(); }
  // The path of a file that is no longer there.
  std::string Vacate(const std::string& name) const {
    fs::remove(dir_.Path(name));
    return dir_.Path(name);
  }

 private:
  TempDir dir_;
};

ProgramOutcome Ask(const LinkedModel& model) {
  return RunProgram("colibri-run", {"-m", model.Directory(), "-p", "Hello", "--raw", "--max-tokens",
                                    "6", "--temperature", "0", "--slots", "1"});
}

size_t Lines(const std::string& text) {
  return static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
}

// A file of a model, or a shard that comes beside its own.
struct Hostile {
  std::string oddity;  // its row in tests/oddities.md
  std::string file;    // that is written
  std::string bytes;
  uint64_t size = 0;  // as large as that; 0: as large as its bytes
};

constexpr const char* kShard = "out-00009.safetensors";
// Reading the demo model takes 60 MB, the text of a hostile header up to 100 MB.
constexpr uint64_t kMostMemory = 300'000'000;

std::string Header(const std::string& fields, const std::string& data = "abcd") {
  return RawShard(R"({"t":{)" + fields + "}}", data);
}

std::string Tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"("dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets;
}

std::string Listed(int count, const std::function<std::string(int)>& entry) {
  std::string text;
  for (int i = 0; i < count; ++i) text += (i > 0 ? "," : "") + entry(i);
  return text;
}

std::string Length(uint64_t bytes, const std::string& rest = "") {
  std::string text;
  for (size_t i = 0; i < 8; ++i) text += static_cast<char>(bytes >> 8 * i & 0xff);
  return text + rest;
}

std::string Replaced(const std::string& file, const std::string& from, const std::string& to) {
  std::ifstream in(COLIBRI_SOURCE_DIR "/apps/demo/model/" + file);
  std::stringstream text;
  text << in.rdbuf();
  std::string all = text.str();
  const size_t at = all.find(from);
  REQUIRE_MESSAGE(at != std::string::npos, from);
  return all.replace(at, from.size(), to);
}

std::string Config(const std::string& from, const std::string& to) {
  return Replaced("config.json", from, to);
}

// Of a config whose indexers are given by an offset and a frequency alone.
std::string WithoutIndexerTypes(const std::string& from, const std::string& to) {
  std::string text = Config(from, to);
  const size_t key = text.find(R"("indexer_types")");
  REQUIRE(key != std::string::npos);
  return text.erase(key, text.find(',', text.find(']', key)) + 1 - key);
}

std::vector<Hostile> HostileShards() {
  const std::string t = Tensor("U8", "[4]", "[0,4]");
  std::string deep = R"({"t":)";
  deep.append(100000, '[');
  std::string rank = "1";
  for (int i = 0; i < 1000000; ++i) rank += ",1";
  return {
      {"empty file", kShard, ""},
      {"fewer than 8 bytes", kShard, std::string("\x01\0\0", 3)},
      {"header length 0", kShard, Length(0, "{}")},
      {"header length 2^64-1", kShard, Length(UINT64_MAX, "{}")},
      {"header length 2^63", kShard, Length(uint64_t{1} << 63, "{}")},
      {"header length past the end by one", kShard, Length(3, "{}")},
      {"header length over the limit", kShard, Length(100'000'001, "{}"), 200'000'000},
      {"Git LFS pointer", kShard, "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"},
      {"header that is not UTF-8", kShard, RawShard("{\"\x80\xff\":{" + t + "}}", kData)},
      {"byte order mark before the header", kShard, RawShard("\xEF\xBB\xBF{}")},
      {"zero byte in a name", kShard, RawShard(std::string("{\"a\0b\":{", 9) + t + "}}", kData)},
      {"header that is a list", kShard, RawShard("[]")},
      {"header that is a number", kShard, RawShard("12")},
      {"header that is a string", kShard, RawShard(R"("t")")},
      {"header cut short", kShard, RawShard(R"({"t":{)")},
      {"bytes behind the header's end", kShard, RawShard(R"({"t":{)" + t + "}} x", kData)},
      {"key without quotes", kShard, RawShard("{t:{" + t + "}}", kData)},
      {"100,000 brackets deep", kShard, RawShard(deep)},
      {"tensor given twice", kShard,
       RawShard(R"({"t":{)" + t + R"(},"t":{)" + Tensor("F32", "[1]", "[0,4]") + "}}", kData)},
      {"dtype given twice", kShard, Header(R"("dtype":"I8",)" + t)},
      {"shape given twice", kShard, Header(R"("shape":[4],)" + t)},
      {"offsets given twice", kShard, Header(R"("data_offsets":[0,4],)" + t)},
      {"metadata given twice", kShard,
       RawShard(R"({"__metadata__":{},"__metadata__":{},"t":{)" + t + "}}", kData)},
      {"metadata key given twice", kShard,
       RawShard(R"({"__metadata__":{"a":"1","a":"1"},"t":{)" + t + "}}", kData)},
      {"names equal after escapes", kShard,
       RawShard(R"({"t":{)" + t + R"(},"\u0074":{)" + t + "}}", kData)},
      {"unknown dtype", kShard, Header(Tensor("F33", "[1]", "[0,4]"))},
      {"dtype that is a number", kShard, Header(R"("dtype":4,"shape":[4],"data_offsets":[0,4])")},
      {"missing dtype", kShard, Header(R"("shape":[4],"data_offsets":[0,4])")},
      {"missing shape", kShard, Header(R"("dtype":"U8","data_offsets":[0,4])")},
      {"missing offsets", kShard, Header(R"("dtype":"U8","shape":[4])")},
      {"no offsets", kShard, Header(Tensor("U8", "[4]", "[]"))},
      {"one offset", kShard, Header(Tensor("U8", "[4]", "[0]"))},
      {"three offsets", kShard, Header(Tensor("U8", "[4]", "[0,4,4]"))},
      {"offsets reversed", kShard, Header(Tensor("U8", "[4]", "[4,0]"))},
      {"offsets past the data", kShard, Header(Tensor("U8", "[8]", "[0,8]"))},
      {"bytes that are not shape by dtype", kShard, Header(Tensor("F32", "[1000,1000]", "[0,4]"))},
      {"shape whose product wraps to 4", kShard,
       Header(Tensor("U8", "[4194305,4194305,211106198978564]", "[0,4]"))},
      {"shape whose product wraps to 0", kShard,
       Header(Tensor("U8", "[4294967296,4294967296]", "[0,0]"), "")},
      {"negative dimension", kShard, Header(Tensor("U8", "[-4]", "[0,4]"))},
      {"negative offset", kShard, Header(Tensor("U8", "[4]", "[-4,0]"))},
      {"minus zero", kShard, Header(Tensor("U8", "[4]", "[-0,4]"))},
      {"number with an exponent", kShard, Header(Tensor("U8", "[4e0]", "[0,4]"))},
      {"number with a fraction", kShard, Header(Tensor("U8", "[4.0]", "[0,4]"))},
      {"dimension of 2^53 + 1", kShard,
       Header(Tensor("U8", "[9007199254740993]", "[0,9007199254740993]"))},
      {"number as a string", kShard, Header(Tensor("U8", R"(["4"])", "[0,4]"))},
      {"shape of 1,000,000 dimensions", kShard,
       Header(Tensor("U8", "[" + rank + "]", "[0,1]"), "a")},
      {"two tensors on the same bytes", kShard,
       RawShard(R"({"t":{)" + t + R"(},"s":{)" + t + "}}", kData)},
      {"hole between tensors", kShard,
       RawShard(R"({"t":{)" + Tensor("U8", "[1]", "[0,1]") + R"(},"s":{)" +
                    Tensor("U8", "[1]", "[3,4]") + "}}",
                kData)},
      {"first tensor not at 0", kShard, Header(Tensor("U8", "[2]", "[2,4]"))},
      {"bytes after the last tensor", kShard, Header(Tensor("U8", "[2]", "[0,2]"))},
      {"file shorter than the last end", kShard, Header(t, "ab")},
      {"metadata that is no map of strings", kShard,
       RawShard(R"({"__metadata__":{"a":1},"t":{)" + t + "}}", kData)},
      {"metadata key of 5,000 bytes", kShard,
       RawShard(R"({"__metadata__":{")" + std::string(5000, 'a') + R"(":""},"t":{)" + t + "}}",
                kData)},
      {"65,537 metadata keys", kShard,
       RawShard(R"({"__metadata__":{)" +
                    Listed(65537, [](int i) { return fmt::format(R"("{}":"")", i); }) +
                    R"(},"t":{)" + t + "}}",
                kData)},
      {"formats stamped in 3 MB", kShard,
       RawShard(R"({"__metadata__":{"colibri.fmt":")" + std::string(3'000'000, '[') +
                    R"("},"t":{)" + t + "}}",
                kData)},
      {"500,001 tensors", kShard,
       RawShard("{" +
                Listed(500001,
                       [](int i) {
                         return fmt::format(R"("{}":{{)", i) + Tensor("U8", "[0]", "[0,0]") + "}";
                       }) +
                "}")},
  };
}

std::vector<Hostile> HostileJson() {
  const std::string config = "config.json", tokenizer = "tokenizer.json";
  return {
      {"config without a key", config, Config(R"("hidden_size": 256,)", "")},
      {"config with a string for a number", config, Config("256", R"("256")")},
      {"config of 256 MB", config, "", 256'000'000},
      {"config with 1e9 layers", config,
       Config(R"("num_hidden_layers": 6)", R"("num_hidden_layers": 1000000000)")},
      {"config with 0 experts", config,
       Config(R"("n_routed_experts": 32)", R"("n_routed_experts": 0)")},
      {"config that has an expert more than the shards", config,
       Config(R"("n_routed_experts": 32)", R"("n_routed_experts": 33)")},
      {"config with a negative rope offset", config,
       Config(R"("qk_rope_head_dim": 16)", R"("qk_rope_head_dim": -16)")},
      {"config with a negative indexer offset", config,
       WithoutIndexerTypes(R"("index_skip_topk_offset": 3)", R"("index_skip_topk_offset": -3)")},
      {"tokenizer of 10 GB", tokenizer, "", 10'000'000'000},
      {"tokenizer with an id that is no number", tokenizer,
       Replaced(tokenizer, R"("!": 0)", R"("!": "0")")},
      {"tokenizer with the id 2^31", tokenizer,
       Replaced(tokenizer, R"("!": 0)", R"("!": 2147483648)")},
      {"tokenizer with an id twice", tokenizer, Replaced(tokenizer, R"("!": 0)", R"("!": 1)")},
      {"tokenizer with a merge that is no pair", tokenizer,
       Replaced(tokenizer, R"("merges": [)", R"("merges": ["x",)")},
  };
}

// The tensors of one of the demo model's shards.
StoredTensors DemoTensors(const std::string& shard) {
  const TempDir dir;
  fs::create_symlink(COLIBRI_SOURCE_DIR "/apps/demo/model/" + shard, dir.Path(shard));
  return ReadTensors(dir.Path(""));
}

// That shard with one of its tensors changed.
std::string Changed(const std::string& shard, const std::string& name,
                    const std::function<void(StoredTensor&)>& change) {
  StoredTensors tensors = DemoTensors(shard);
  REQUIRE_MESSAGE(tensors.contains(name), name);
  change(tensors.at(name));
  return ShardOf(tensors);
}

// Sets the n-th value of a tensor of f32.
std::function<void(StoredTensor&)> Set(size_t n, float value) {
  return [n, value](StoredTensor& t) { std::memcpy(t.bytes.data() + 4 * n, &value, 4); };
}

std::function<void(StoredTensor&)> Cut(size_t values) {
  return [values](StoredTensor& t) {
    t.shape = {static_cast<int64_t>(values)};
    t.bytes.resize(4 * values);
  };
}

constexpr const char* kMain = "out-00000.safetensors";
constexpr const char* kQa = "model.layers.0.self_attn.q_a_proj.weight.qs";
constexpr const char* kNorm = "model.layers.0.input_layernorm.weight";
constexpr const char* kExperts = "out-00001.safetensors";
constexpr const char* kUp = "model.layers.2.mlp.experts.19.up_proj.weight.qs";

std::vector<Hostile> HostileTensors() {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const auto without = [](const std::string& shard, const std::string& name) {
    StoredTensors tensors = DemoTensors(shard);
    REQUIRE(tensors.erase(name) == 1);
    return ShardOf(tensors);
  };
  const auto empty = [](StoredTensor& t) {
    t.bytes.clear();
    t.shape = {0};
  };
  constexpr const char* kRouter = "model.layers.1.mlp.gate.weight";
  return {
      {"a tensor is missing", kMain, without(kMain, kNorm)},
      {"scales of an expert are missing", kExperts, without(kExperts, kUp)},
      {"a norm of no values", kMain, Changed(kMain, kNorm, empty)},
      {"scales of an expert of no values", kExperts, Changed(kExperts, kUp, empty)},
      {"a router's value that is not a number", kMain, Changed(kMain, kRouter, Set(7, kNan))},
      {"a router's value that is infinite", kMain, Changed(kMain, kRouter, Set(7, -kInf))},
      {"a router with a row too few", kMain,
       Changed(kMain, "model.layers.1.mlp.gate.weight",
               [](StoredTensor& t) {
                 t.bytes.resize(t.bytes.size() / 32 * 31);
                 t.shape[0] = 31;
               })},
      {"a router that is transposed", kMain,
       Changed(kMain, "model.layers.1.mlp.gate.weight",
               [](StoredTensor& t) { std::swap(t.shape[0], t.shape[1]); })},
      {"a norm as bytes", kMain,
       Changed(kMain, kNorm,
               [](StoredTensor& t) {
                 t.dtype = "U8";
                 t.shape = {1024};
               })},
      {"scales of the wrong length", kMain, Changed(kMain, kQa, Cut(500))},
      {"scales of an expert of the wrong length", kExperts, Changed(kExperts, kUp, Cut(500))},
      {"a scale that is not a number", kMain, Changed(kMain, kQa, Set(7, kNan))},
      {"an infinite scale", kMain, Changed(kMain, kQa, Set(7, kInf))},
      {"a norm that is not a number", kMain, Changed(kMain, kNorm, Set(7, kNan))},
  };
}

// Each ends with exit code 3 and the one line of its row.
void CheckRefused(const std::string& test, const std::vector<Hostile>& files) {
  const std::map<std::string, std::string> table = RowsOf("app_model_files_test: " + test);
  CHECK(table.size() == files.size());
  for (const Hostile& hostile : files) {
    CAPTURE(hostile.oddity);
    const Watchdog watchdog(hostile.oddity);
    const LinkedModel model;
    std::ofstream(model.Vacate(hostile.file), std::ios::binary) << hostile.bytes;
    if (hostile.size > 0) fs::resize_file(model.Directory() + "/" + hostile.file, hostile.size);
    const ProgramOutcome outcome = Ask(model);
    CHECK_MESSAGE(outcome.exit_code == 3, outcome.err);
    CHECK(outcome.out.empty());
    CHECK((kAddressSanitizer || outcome.peak_bytes < kMostMemory));
    const std::string start = "colibri-run: " + model.Directory();
    const size_t at = outcome.err.find(start);
    REQUIRE_MESSAGE(at != std::string::npos, outcome.err);
    std::string said = outcome.err.substr(at + start.size());
    said.erase(0, said.find_first_not_of("/: "));
    const auto row = table.find(hostile.oddity);
    const bool fits = row != table.end() && Fits(said, row->second + "\n");
    CHECK_MESSAGE(fits, "| " << hostile.oddity << " | " << said);
  }
}

TEST_CASE("a malformed shard is refused by name in one line") {
  CheckRefused("a malformed shard is refused by name in one line", HostileShards());
}

TEST_CASE("a malformed config or tokenizer is refused by name in one line") {
  CheckRefused("a malformed config or tokenizer is refused by name in one line", HostileJson());
}

TEST_CASE("tensors that do not fit the config or each other are refused by name in one line") {
  CheckRefused("tensors that do not fit the config or each other are refused by name in one line",
               HostileTensors());
}

// A shard beside the model's own: `header` and `after` with fillers between them, `length`
// in all, and this data. Written in pieces: what a program ever held counts as its child's peak
// memory.
void AddShard(const LinkedModel& model, const std::string& header, size_t length,
              const std::string& data, char filler = ' ', const std::string& after = "") {
  std::ofstream file(model.Vacate(kShard), std::ios::binary);
  file << Length(length) << header;
  for (size_t left = length - header.size() - after.size(); left > 0;) {
    const size_t now = std::min<size_t>(left, 1 << 20);
    file << std::string(now, filler);
    left -= now;
  }
  file << after << data;
}

std::string Answer(const LinkedModel& model) {
  const ProgramOutcome outcome = Ask(model);
  CHECK_MESSAGE(outcome.exit_code == 0, outcome.err);
  CHECK((kAddressSanitizer || outcome.peak_bytes < kMostMemory));
  return outcome.out;
}

TEST_CASE(
    "a header of 100 MB, metadata of 50 and 100,000 tensors are read, and the model answers") {
  const Watchdog watchdog("large headers");
  const std::string plain = Answer(LinkedModel());
  REQUIRE(plain.find_first_not_of(" \n") != std::string::npos);
  const std::string t = R"("t":{)" + Tensor("U8", "[4]", "[0,4]") + "}";
  const LinkedModel padded, stuffed, many;
  AddShard(padded, "{" + t + "}", 100'000'000, kData);
  CHECK(Answer(padded) == plain);
  AddShard(stuffed, R"({"__metadata__":{"a":")", 50'000'000, kData, 'x', R"("},)" + t + "}");
  CHECK(Answer(stuffed) == plain);
  std::string header = "{";
  for (int i = 0; i < 100000; ++i) {
    header += fmt::format(R"({}"tiny.{}":{{)", i > 0 ? "," : "", i) +
              Tensor("U8", "[1]", fmt::format("[{},{}]", i, i + 1)) + "}";
  }
  header += "}";
  AddShard(many, header, header.size(), std::string(100000, 'x'));
  CHECK(Answer(many) == plain);
}

TEST_CASE("of a tensor in two shards the first is used, and said; no index of shards is opened") {
  const Watchdog watchdog("a tensor twice, an index");
  const LinkedModel model;
  const std::string plain = Answer(model);
  StoredTensors norm = DemoTensors(kMain);
  std::erase_if(norm, [](const auto& tensor) { return tensor.first != kNorm; });
  Set(7, 1000)(norm.at(kNorm));
  std::ofstream(model.Vacate(kShard), std::ios::binary) << ShardOf(norm);
  REQUIRE(mkfifo(model.Vacate("model.safetensors.index.json").c_str(), 0600) == 0);
  const ProgramOutcome outcome = Ask(model);
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.out == plain);
  CHECK_MESSAGE(Contains(outcome.err, std::string(kNorm) + " is in "), outcome.err);
  CHECK_MESSAGE(Contains(outcome.err, "the first is used"), outcome.err);
}

TEST_CASE("tensors that start at odd bytes of their shard are read as others, also directly") {
  const Watchdog watchdog("odd starts");
  const LinkedModel model;
  const std::string plain = Answer(model);
  for (const char* shard : {kMain, kExperts}) {
    std::string bytes = ShardOf(DemoTensors(shard));
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof(length));
    const uint64_t more = 1 + length % 2;
    bytes.replace(0, 8, Length(length + more)).insert(8 + length, more, ' ');
    std::ofstream(model.Vacate(shard), std::ios::binary) << bytes;
  }
  for (const char* direct : {"on", "off"}) {
    for (const char* resident : {"all", "none"}) {
      const ProgramOutcome outcome =
          RunProgram("colibri-run", {"-m", model.Directory(), "-p", "Hello", "--raw",
                                     "--max-tokens", "6", "--temperature", "0", "--slots", "1",
                                     "--direct", direct, "--resident", resident});
      CHECK_MESSAGE(outcome.exit_code == 0, outcome.err);
      CHECK(outcome.out == plain);
    }
  }
}

// Sets a scale of the up projection of these experts of a layer.
std::string WithScales(int layer, const std::function<bool(int)>& of, float value) {
  StoredTensors tensors = DemoTensors(kExperts);
  int found = 0;
  for (int e = 0; e < 32; ++e) {
    const auto t =
        tensors.find(fmt::format("model.layers.{}.mlp.experts.{}.up_proj.weight.qs", layer, e));
    if (t == tensors.end() || !of(e)) continue;
    Set(7, value)(t->second);
    ++found;
  }
  REQUIRE(found > 0);
  return ShardOf(tensors);
}

TEST_CASE("scales of zero are numbers like others") {
  const LinkedModel model;
  const std::string bytes = WithScales(
      3, [](int) { return true; }, 0);
  std::ofstream(model.Vacate(kExperts), std::ios::binary) << bytes;
  CHECK(!Answer(model).empty());
}

// The error that the record of each line has, or "answered".
std::vector<std::string> Said(const ProgramOutcome& outcome) {
  std::vector<std::string> said;
  for (const auto& row : RecordsByLine(outcome.out)) {
    said.push_back(SaidBy(nlohmann::json::parse(row.second)));
  }
  return said;
}

// Two lines, of which an expert is asked for by both, one or none.
ProgramOutcome TwoLines(const LinkedModel& model) {
  return RunProgram("colibri-run",
                    {"-m", model.Directory(), "--max-tokens", "1", "--raw", "--temperature", "0",
                     "--slots", "1", "--ram", "200MB", "-i", "-", "--input-format", "lines"},
                    "Hello\nThe sea\n");
}

TEST_CASE("a scale of an expert that is not a number fails the lines that use it, by name") {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const Watchdog watchdog("scales of experts");
  const LinkedModel model;
  const auto damaged = [&](const std::function<bool(int)>& of) {
    std::ofstream(model.Vacate(kExperts), std::ios::binary) << WithScales(3, of, kNan);
    return Said(TwoLines(model));
  };
  const std::vector<std::string> all = damaged([](int) { return true; });
  REQUIRE(all.size() == 2);
  for (const std::string& one : all) {
    CHECK_MESSAGE(Contains(one, "are not finite in layer 3"), one);
  }
  bool one_alone = false;
  for (int e = 0; e < 32 && !one_alone; ++e) {
    const std::vector<std::string> said = damaged([e](int expert) { return expert == e; });
    REQUIRE(said.size() == 2);
    one_alone = (said[0] == "answered") != (said[1] == "answered");
  }
  CHECK(one_alone);
}

TEST_CASE("a scale that is read with each sweep and not a number fails the lines, by its shard") {
  // An indexer's: what is computed from it is only a choice of positions, which always is finite.
  constexpr const char* kIndexer = "out-idx-00000.safetensors";
  const LinkedModel model;
  const std::string bytes = Changed(kIndexer, "model.layers.2.self_attn.indexer.wk.weight.qs",
                                    Set(7, std::numeric_limits<float>::quiet_NaN()));
  std::ofstream(model.Vacate(kIndexer), std::ios::binary) << bytes;
  const auto run = [&](const char* resident) {
    return RunProgram("colibri-run",
                      {"-m", model.Directory(), "--max-tokens", "2", "--resident", resident,
                       "--ram", "200MB", "-i", "-", "--input-format", "lines"},
                      "Hello\nThe sea\n");
  };
  CHECK(run("all").exit_code == 3);
  const ProgramOutcome outcome = run("none");
  CHECK(outcome.exit_code == 1);
  const std::vector<std::string> said = Said(outcome);
  REQUIRE(said.size() == 2);
  for (const std::string& one : said) {
    CHECK_MESSAGE(Contains(one, "the dense weights of layer 2 could not be read"), one);
    CHECK_MESSAGE(Contains(one, std::string(kIndexer) + ", offset "), one);
    CHECK_MESSAGE(Contains(one, "scales that are not finite"), one);
  }
}

TEST_CASE("a shard that shrinks while it is read fails the lines that need it, by name") {
  const Watchdog watchdog("a shard that shrinks");
  const LinkedModel model;
  fs::copy_file(COLIBRI_SOURCE_DIR "/apps/demo/model/" + std::string(kExperts),
                model.Vacate(kExperts));
  RunningProgram program("colibri-run",
                         {"-m", model.Directory(), "--max-tokens", "2", "--slots", "1", "--ram",
                          "200MB", "-i", "-", "--input-format", "lines"});
  program.Write("Hello\n");
  CHECK(program.WaitForOutput("\"line-1\""));
  fs::resize_file(model.Directory() + "/" + kExperts, 40960);
  program.Write("The sea\n");
  program.CloseInput();
  const ProgramOutcome outcome = program.Wait();
  CHECK(outcome.exit_code == 1);
  const std::vector<std::string> said = Said(outcome);
  REQUIRE(said.size() == 2);
  CHECK(said[0] == "answered");
  CHECK_MESSAGE(Contains(said[1], kExperts), said[1]);
}

void Put(std::string_view kind, const std::string& path) {
  if (kind == "pipe") {
    REQUIRE(mkfifo(path.c_str(), 0600) == 0);
  } else if (kind == "folder") {
    fs::create_directory(path);
  } else {
    fs::create_symlink("/dev/zero", path);
  }
}

TEST_CASE("a pipe, a folder or a device in the place of a model's counts is said, and let be") {
  const Watchdog watchdog("counts that are no file");
  for (const char* kind : {"pipe", "folder", "device"}) {
    CAPTURE(kind);
    const LinkedModel model;
    Put(kind, model.Vacate(".coli_usage"));
    const ProgramOutcome outcome = Ask(model);
    CHECK(outcome.exit_code == 0);
    CHECK((kAddressSanitizer || outcome.peak_bytes < kMostMemory));
    CHECK_MESSAGE(Contains(outcome.err, ".coli_usage: not a regular file; the run goes on"),
                  outcome.err);
  }
}

TEST_CASE("a pipe, a folder or a device in the place of a model's file is refused by name") {
  const Watchdog watchdog("a model file that is none");
  for (const char* name : {"config.json", "tokenizer.json", "generation_config.json", kShard}) {
    for (const char* kind : {"pipe", "folder", "device"}) {
      CAPTURE(name);
      CAPTURE(kind);
      const LinkedModel model;
      Put(kind, model.Vacate(name));
      const ProgramOutcome outcome = Ask(model);
      CHECK(outcome.exit_code == 3);
      CHECK(outcome.out.empty());
      CHECK(outcome.err.find(std::string(name) + ": not a regular file") != std::string::npos);
      CHECK_MESSAGE(Lines(outcome.err) == 1, outcome.err);
    }
  }
}

}  // namespace
}  // namespace colibri
