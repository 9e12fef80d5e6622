// The reference engine against Hugging Face's own values: every tensor of every folder, for every
// page size, and bit equality of all ways to cut a prompt.
#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "bench/fixture.h"

namespace colibri {
namespace {

// All but `long`, which has test cases of its own, so that ctest runs them beside the others.
const char* const kShortFolders[] = {"tiny",           "groups",         "quant-int4-row",
                                     "quant-int4-g64", "quant-int4-g32", "quant-int8-row",
                                     "quant-mixed",    "short-int4-g64", "odd-int4-row"};

std::string Folder(const std::string& name) { return COLIBRI_SOURCE_DIR "/tests/fixtures/" + name; }

FixtureValues Checked(const std::string& name, const FixtureOptions& options, size_t tensors) {
  FixtureValues values = ComputeFixture(Folder(name), options);
  const auto differences = CompareFixture(Folder(name), values, options);
  CHECK(differences.size() >= tensors);
  for (const TensorDifference& d : differences) {
    CAPTURE(name);
    CAPTURE(options.page_tokens);
    CAPTURE(d.name);
    CHECK_MESSAGE(d.passed, d.largest, " beyond ", d.tolerance);
  }
  return values;
}

bool SameBits(const FixtureValues& a, const FixtureValues& b) {
  if (a.ints != b.ints || a.floats.size() != b.floats.size()) return false;
  for (const auto& [name, values] : a.floats) {
    const auto other = b.floats.find(name);
    if (other == b.floats.end() || other->second.size() != values.size()) return false;
    if (std::memcmp(values.data(), other->second.data(), values.size() * sizeof(float)) != 0) {
      MESSAGE(name);
      return false;
    }
  }
  return true;
}

void CheckPages(const std::string& name, size_t tensors) {
  FixtureOptions options;
  const FixtureValues usual = Checked(name, options, tensors);
  for (const int32_t page : {4, 16}) {
    options.page_tokens = page;
    CHECK_MESSAGE(SameBits(usual, Checked(name, options, tensors)), name, ": pages of ", page);
  }
}

void CheckChunks(const std::string& name, std::vector<std::vector<int32_t>> cuts) {
  FixtureOptions options;
  const FixtureValues whole = ComputeFixture(Folder(name), options);
  for (auto& chunks : cuts) {
    options.chunks = chunks;
    // Another page size as well: neither may move a bit.
    options.page_tokens = options.page_tokens == 4 ? 16 : 4;
    CHECK_MESSAGE(SameBits(whole, ComputeFixture(Folder(name), options)), name, ": first chunk of ",
                  chunks.front());
  }
}

// What each folder must hold at least: 7 layers with hidden, attn and index, routers of 5 sparse
// layers, logits, final_norm, greedy_next, three MTP tensors and four of drafts.
constexpr size_t kTensors = 7 * 3 + 5 * 2 + 3 + 3 + 4;

TEST_CASE("every tensor of the short folders is within its tolerance for every page size") {
  for (const char* name : kShortFolders) CheckPages(name, kTensors);
}

TEST_CASE("three hundred tokens are within their tolerances for every page size") {
  CheckPages("long", kTensors - 7 * 2);
}

TEST_CASE("one pass, chunks of any size and single steps agree bit for bit") {
  for (const char* name : kShortFolders) CheckChunks(name, {{1}, {7}, {25, 1}});
}

TEST_CASE("chunks and single steps agree bit for bit with one pass over three hundred tokens") {
  CheckChunks("long", {{1}, {7}, {25, 1}, {130, 64, 65}});
}

TEST_CASE("a container without indexers attends densely, drafts included") {
  FixtureOptions options;
  options.dense = true;
  for (const int32_t page : {4, 16, 32}) {
    options.page_tokens = page;
    Checked("tiny", options, kTensors - 1);  // greedy_next is not stored twice
  }
}

TEST_CASE("an index_topk beyond the prompt attends to everything, drafts included") {
  FixtureOptions options;
  options.dense_by_top_k = true;
  for (const int32_t page : {4, 16, 32}) {
    options.page_tokens = page;
    Checked("tiny", options, kTensors - 1);  // greedy_next is not stored twice
  }
}

TEST_CASE("leaving the indexers out gives the same bits as an index_topk beyond the prompt") {
  FixtureOptions left_out, beyond;
  left_out.dense = true;
  beyond.dense_by_top_k = true;
  beyond.chunks = {25, 1};
  CHECK(SameBits(ComputeFixture(Folder("tiny"), left_out), ComputeFixture(Folder("tiny"), beyond)));
}

}  // namespace
}  // namespace colibri
