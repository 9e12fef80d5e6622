// Perplexity of the demo model over the reference's windows: what rounding to int4, attention
// restricted by the indexer and a bf16 KV store cost has to be what the reference says.
#include <doctest/doctest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench/quality.h"
#include "tests/run_program.h"

namespace colibri {
namespace {

nlohmann::json Reference() {
  std::ifstream file(COLIBRI_SOURCE_DIR "/tests/fixtures/demo/reference.json");
  return nlohmann::json::parse(file).at("perplexity").at("int4-g64");
}

// The reference's perplexities are those of all twelve. Under ASan, where a window takes two
// seconds, two are run for what ASan finds, and the other preset compares.
constexpr int32_t kWindows = kAddressSanitizer ? 2 : 12;

std::vector<QualityResult> Measured(bool dense, std::vector<KvType> kv, bool int8 = false) {
  QualityOptions options;
  options.model = {COLIBRI_SOURCE_DIR "/apps/demo/model"};
  options.files = {COLIBRI_SOURCE_DIR "/tests/fixtures/demo/perplexity.jsonl"};
  options.dense_attention = dense;
  options.kv = std::move(kv);
  options.int8 = {int8};
  options.max_windows = kWindows;
  std::vector<QualityResult> results = MeasureQuality(options);
  REQUIRE(results.size() == options.kv.size());
  for (const QualityResult& r : results) CHECK(r.predictions == kWindows * 1023);
  return results;
}

double Difference(double measured, double expected) { return std::abs(measured / expected - 1); }

void CheckReference(const QualityResult& measured, double expected, double tolerance) {
  if (kAddressSanitizer) return;
  CHECK(Difference(measured.perplexity, expected) < tolerance);
}

}  // namespace

TEST_CASE("perplexity with sparse attention and f32 KV is the reference's to 0.1 percent") {
  const double expected = Reference().at("sparse");
  const QualityResult f32 = Measured(false, {KvType::kF32})[0];
  CheckReference(f32, expected, 0.001);
}

TEST_CASE("perplexity with bf16 KV is the reference's to 0.5 percent") {
  const double expected = Reference().at("sparse");
  const QualityResult bf16 = Measured(false, {KvType::kBF16})[0];
  CheckReference(bf16, expected, 0.005);
}

TEST_CASE("perplexity with int8 activations is that of f32 activations to 1 percent, and another") {
  const std::vector<KvType> both = {KvType::kBF16, KvType::kF32};
  const auto f32 = Measured(false, both), int8 = Measured(false, both, true);
  for (size_t i = 0; i < both.size(); ++i) {
    CHECK(Difference(int8[i].perplexity, f32[i].perplexity) < 0.01);
    CHECK(int8[i].perplexity != f32[i].perplexity);
  }
}

TEST_CASE("perplexity with dense attention is the reference's to 0.1 percent") {
  const double expected = Reference().at("dense");
  const QualityResult dense = Measured(true, {KvType::kF32})[0];
  CheckReference(dense, expected, 0.001);
}

}  // namespace colibri
