// The command make-model.
#include "bench/make_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "bench/routing_check.h"
#include "io/error.h"

namespace colibri {

WeightFormat ParseSyntheticFormat(const std::string& name) {
  if (name == "int4-g64") return WeightFormat::kInt4Grouped;
  if (name == "int4-row") return WeightFormat::kInt4Row;
  if (name == "int8" || name == "int8-row") return WeightFormat::kInt8Row;
  throw UsageError(fmt::format("format {}: int4-g64, int4-row or int8 expected", name));
}

SyntheticModel PresetModel(const std::string& name) {
  SyntheticModel m;
  m.dense_layers = 1;
  m.experts = 128;
  if (name == "tiny") {
    m.layers = 4;
    m.hidden = 512;
    m.intermediate = 512;
    m.moe_intermediate = 64;
    m.heads = 4;
    m.q_lora = 128;
    m.kv_lora = 64;
    m.nope = 32;
    m.rope = 32;
    m.v_head = 32;
    m.index_heads = 4;
    m.index_dim = 64;
    return m;
  }
  if (name != "mid" && name != "thin") {
    throw UsageError(fmt::format("preset {}: tiny, mid or thin expected", name));
  }
  m.layers = name == "mid" ? 7 : 9;
  m.hidden = 6144;
  m.intermediate = 12288;
  m.moe_intermediate = name == "mid" ? 2048 : 256;
  m.heads = 64;
  m.q_lora = 2048;
  m.kv_lora = 512;
  m.nope = 192;
  m.rope = 64;
  m.v_head = 256;
  m.index_heads = 32;
  m.index_dim = 128;
  m.max_positions = 1 << 20;
  return m;
}

namespace {

void PrintShare(const char* what, double share, const ShareRange& range) {
  fmt::print("  {:<44} {:5.1f} %   {:2.0f} to {:2.0f} % {}\n", what, 100 * share, 100 * range.low,
             100 * range.high, range.Holds(share) ? "as real routers" : "MISSED");
}

void PrintRouting(const std::string& directory) {
  Model model({directory});
  model.LoadDense();
  RoutingCheckOptions options;
  // Every step reads the experts of all layers: with large ones a few steps must do.
  if (model.ExpertClasses().front().slot_bytes > 16'000'000) options.steps = 16;
  const RoutingFigures f = MeasureRouting(model, options);
  fmt::print("routing, over {} sequences of {} tokens:\n", options.sequences, options.steps);
  PrintShare("next layer's experts foreseen", f.recall, kRecallRange);
  PrintShare("experts shared with the token before", f.overlap, kOverlapRange);
  PrintShare("choices that the hottest quarter takes", f.hot_quarter, kHotQuarterRange);
  if (f.mtp) PrintShare("drafts accepted at depth 1", f.accepted, kAcceptedRange);
}

}  // namespace

int RunMakeModel(const MakeModelOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const uint64_t bytes = WriteSyntheticModel(
      options.model, options.out, [&](const std::string& path, uint64_t shard_bytes) {
        if (!options.quiet) {
          fmt::print(stderr, "{}: {:.3f} GB\n", path, static_cast<double>(shard_bytes) * 1e-9);
        }
      });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  if (!options.quiet) {
    fmt::print("{}: {:.3f} GB in {:.1f} s ({:.0f} MB/s)\n", options.out,
               static_cast<double>(bytes) * 1e-9, seconds.count(),
               static_cast<double>(bytes) * 1e-6 / std::max(seconds.count(), 1e-3));
  }
  if (options.check && !options.quiet) PrintRouting(options.out);
  return 0;
}

}  // namespace colibri
