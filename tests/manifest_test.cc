#include "runtime/manifest.h"

#include <doctest/doctest.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include "io/error.h"
#include "io/whole_file.h"
#include "runtime/fingerprint.h"
#include "runtime/text_hash.h"
#include "tests/output_records.h"
#include "tests/temp_dir.h"

using colibri::CompareManifests;
using colibri::Container;
using colibri::FileSizeLimit;
using colibri::IoError;
using colibri::LineShard;
using colibri::Manifest;
using colibri::ModelFingerprint;
using colibri::ParseLineShard;
using colibri::ReadManifest;
using colibri::ReadWhole;
using colibri::TempDir;
using colibri::TestManifest;
using colibri::WriteManifest;

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

TEST_CASE("a manifest reads back as it was written") {
  const TempDir dir;
  Manifest manifest = TestManifest();
  manifest.shard = {2, 5};
  manifest.options.emplace_back("stop", "[\"a\\n\", \"\xC3\xA4\"]");
  WriteManifest(dir.Path("m"), manifest);
  const auto read = ReadManifest(dir.Path("m"));
  REQUIRE(read.has_value());
  CHECK(CompareManifests(manifest, *read).empty());
  CHECK(read->options == manifest.options);
  CHECK(read->engine_version == "0.1.0");
  CHECK(read->run_id == "run-1");
  CHECK(read->shard == LineShard{2, 5});
}

TEST_CASE("a manifest says the context its lines were answered with, or nothing") {
  Manifest manifest = TestManifest();
  CHECK(colibri::ContextOf(manifest) == 4096);
  for (const char* text : {"", "4k", "-1", "4096 "}) {
    manifest.options.back().second = text;
    CHECK(colibri::ContextOf(manifest) == 0);
  }
  manifest.options.pop_back();
  CHECK(colibri::ContextOf(manifest) == 0);
}

TEST_CASE("each difference is named with both values, in a fixed order") {
  Manifest was = TestManifest();
  was.numerics = 1;
  Manifest is = was;
  is.options = {{"temperature", "0.5"}, {"top-k", "3"}};
  is.simd_target = "SSE4";
  is.numerics = 2;
  is.shard = {1, 4};
  is.model = "feed";
  is.engine_version = "9";
  is.run_id = "else";
  CHECK(CompareManifests(was, is) ==
        Words{"model: was 0123456789abcdef0123456789abcdef, is feed",
              "numerics version: was 1, is 2", "SIMD target: was AVX2, is SSE4",
              "shard: was 0/1, is 1/4", "temperature: was 1, is 0.5", "top-k: was not set, is 3",
              "seed: was 0, is not set", "ctx-size: was 4096, is not set"});
  is.options = was.options;
  CHECK(CompareManifests(was, is, {false, false}) ==
        Words{"model: was 0123456789abcdef0123456789abcdef, is feed",
              "numerics version: was 1, is 2"});
}

TEST_CASE("no manifest is no error, a broken one is") {
  const TempDir dir;
  CHECK_FALSE(ReadManifest(dir.Path("none")).has_value());
  WriteManifest(dir.Path("m"), TestManifest());
  const std::string whole = ReadWhole(dir.Path("m"));
  for (size_t length = 0; length + 2 < whole.size(); length += 7) {
    CHECK_THROWS_AS(ReadManifest(dir.Write("cut", whole.substr(0, length))), IoError);
  }
  for (const char* text :
       {"{}", "[]", "3", R"({"colibri_manifest": 2})", R"({"colibri_manifest": 1, "engine": 5})"}) {
    CHECK_THROWS_AS(ReadManifest(dir.Write("bad", text)), IoError);
  }
  CHECK_THROWS_AS(ReadManifest(dir.Path("")), IoError);
}

TEST_CASE("a shard is I of N, counted from 0") {
  CHECK(ParseLineShard("0/1") == LineShard{0, 1});
  CHECK(ParseLineShard("3/16") == LineShard{3, 16});
  for (const char* text : {"", "/", "1", "1/1", "4/3", "0/0", "-1/2", "0/-2", "+0/2", "0/2x", "a/b",
                           " 0/2", "0/2/3", "0/99999999999999999999"}) {
    INFO(text);
    CHECK_FALSE(ParseLineShard(text).has_value());
  }
  for (uint64_t line = 1; line < 20; ++line) {
    int owners = 0;
    for (uint64_t i = 0; i < 4; ++i) owners += LineShard{i, 4}.Has(line) ? 1 : 0;
    CHECK(owners == 1);
  }
  CHECK(LineShard{0, 4}.Has(1));
  CHECK(LineShard{3, 4}.Has(8));
}

TEST_CASE("a replaced file is the new one or, whatever fails, the old one") {
  const TempDir dir;
  const std::string path = dir.Write("f", "old");
  dir.Write("f.part", "left by a killed run");
  {
    colibri::ReplacedFile file(path);
    file.Append("new ");
    file.Append("bytes");
    CHECK(ReadWhole(path) == "old");
    file.Commit();
  }
  CHECK(ReadWhole(path) == "new bytes");
  { colibri::ReplacedFile(path).Append("given up"); }
  {
    const FileSizeLimit full(100);
    colibri::ReplacedFile file(path);
    file.Append(std::string(200, 'x'));
    CHECK_THROWS_AS(file.Commit(), IoError);
  }
  CHECK(ReadWhole(path) == "new bytes");
  CHECK_FALSE(fs::exists(path + ".part"));
  CHECK_THROWS_AS(colibri::ReplacedFile(dir.Path("none/f")), IoError);
  fs::create_directory(dir.Path("folder"));
  colibri::ReplacedFile folder(dir.Path("folder"));
  CHECK_THROWS_AS(folder.Commit(), IoError);
}

TEST_CASE("a full drive leaves the old manifest") {
  const TempDir dir;
  WriteManifest(dir.Path("m"), TestManifest());
  Manifest other = TestManifest();
  other.run_id = "run-2";
  {
    const FileSizeLimit full(50);
    CHECK_THROWS_AS(WriteManifest(dir.Path("m"), other), IoError);
  }
  CHECK(ReadManifest(dir.Path("m"))->run_id == "run-1");
}

TEST_CASE("hashes have 16 digits and read back") {
  for (const uint64_t value : {uint64_t{0}, uint64_t{0xab}, ~uint64_t{0}}) {
    CHECK(colibri::HexOf(value).size() == 16);
    CHECK(colibri::FromHex(colibri::HexOf(value)) == value);
  }
  for (const char* text :
       {"", "0", "00000000000000AB", "000000000000000g", "0x00000000000000", "00000000000000000"}) {
    CHECK_FALSE(colibri::FromHex(text).has_value());
  }
}

TEST_CASE("the fingerprint sees every part of a model that it reads, and not where it lies") {
  const TempDir dir;
  const fs::path source = COLIBRI_SOURCE_DIR "/tests/fixtures/quant-mixed/model";
  const fs::path model = dir.Path("model");
  fs::copy(source, model, fs::copy_options::recursive);
  const auto fingerprint = [&] { return ModelFingerprint(Container({model.string()})); };
  const std::string original = fingerprint();
  CHECK(original.size() == 32);
  CHECK(original == ModelFingerprint(Container({source.string()})));

  const auto flip = [&](const std::string& name, uint64_t offset) {
    const std::string path = (model / name).string();
    std::string bytes = ReadWhole(path);
    REQUIRE(offset < bytes.size());
    bytes[offset] = static_cast<char>(bytes[offset] ^ 1);
    dir.Write("model/" + name, bytes);
  };
  const auto changes = [&](const std::string& name, uint64_t offset) {
    flip(name, offset);
    const bool changed = fingerprint() != original;
    flip(name, offset);
    CHECK(fingerprint() == original);
    return changed;
  };
  std::string shard;
  for (const auto& entry : fs::directory_iterator(model)) {
    if (entry.path().extension() == ".safetensors") shard = entry.path().filename().string();
  }
  REQUIRE_FALSE(shard.empty());
  const std::string bytes = ReadWhole((model / shard).string());
  const uint64_t header =
      static_cast<unsigned char>(bytes[0]) + uint64_t{256} * static_cast<unsigned char>(bytes[1]);
  CHECK(changes("config.json", 1));
  // A digit or letter of a name within the header.
  CHECK(changes(shard, bytes.find("model.") + 1));
  CHECK(changes(shard, 8 + header + (bytes.size() - 8 - header) / 2));

  // What it does not read can only be told by its age.
  CHECK_FALSE(changes(shard, bytes.size() - 1));
  const std::string then = dir.Write("then", "");
  const Container container({model.string()});
  fs::last_write_time(model / shard, fs::last_write_time(then) - std::chrono::hours(1));
  CHECK(ShardNewerThan(container, then) == "");
  CHECK(ShardNewerThan(container, dir.Path("no such file")) == "");
  fs::last_write_time(model / shard, fs::last_write_time(then) + std::chrono::hours(1));
  CHECK(ShardNewerThan(container, then) == (model / shard).string());

  fs::rename(model / "config.json", model / "aside");
  CHECK(fingerprint() != original);
  dir.Write("model/config.json", "");
  const std::string empty = fingerprint();
  fs::remove(model / "config.json");
  CHECK(fingerprint() != empty);
  fs::rename(model / "aside", model / "config.json");
  fs::rename(model / shard, model / ("z" + shard));
  CHECK(fingerprint() != original);
}
