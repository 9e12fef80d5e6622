// The small random model most engine tests run, and lines of every kind for it.
// Threads: one.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "runtime/model_writer.h"
#include "tests/engine_rig.h"
#include "tests/temp_dir.h"

namespace colibri {

// Five layers, four of them with 24 experts; attention keeps 8 positions, so that all but the
// shortest lines select; several shards. 4,096 token ids, the demo model's tokenizer.
inline void WriteSmallModel(const std::string& directory, bool mtp = true) {
  SyntheticModel m;
  m.mtp = mtp;
  m.layers = 5;
  m.experts = 24;
  m.top_k = 2;
  m.hidden = 64;
  m.intermediate = 128;
  m.moe_intermediate = 64;
  m.heads = 4;
  m.q_lora = 64;
  m.kv_lora = 64;
  m.nope = 16;
  m.rope = 16;
  m.v_head = 16;
  m.index_heads = 2;
  m.index_dim = 32;
  m.index_top_k = 8;
  m.max_positions = 512;
  m.shard_bytes = 300'000;
  m.tokenizer_from = COLIBRI_SOURCE_DIR "/apps/demo/model";
  WriteSyntheticModel(m, directory);
}

inline const TestModel& SmallModel() {
  static const TempDir folder;
  static const auto model = [] {
    WriteSmallModel(folder.Path("model"));
    return std::make_unique<TestModel>(folder.Path("model"));
  }();
  return *model;
}

// Line `number` of a file: prompts of 1 to 40 tokens, answers of 1 to 12, greedy and sampled,
// several choices, stop strings, log probabilities.
inline TestLine MixedLine(uint64_t number) {
  std::mt19937 random(static_cast<uint32_t>(number) * 7919);
  const auto below = [&](uint32_t n) { return static_cast<int32_t>(random() % n); };
  TestLine line;
  Request& r = line.request;
  r.line = number;
  r.custom_id = fmt::format("id-{}", number);
  r.chat = number % 3 != 0;
  r.prompt.resize(static_cast<size_t>(number % 7 == 0 ? 1 : 1 + below(40)));
  for (int32_t& id : r.prompt) id = below(4000);
  r.max_tokens = 1 + below(12);
  r.choices = number % 5 == 0 ? 3 : 1;
  r.sampling.temperature = number % 4 == 0 ? 0.0f : 0.9f;
  r.sampling.top_p = number % 4 == 1 ? 0.9f : 1.0f;
  r.sampling.top_k = number % 4 == 2 ? 50 : 0;
  r.sampling.seed = number;
  if (number % 2 == 0) r.stop = {"e", "the "};
  r.logprobs = number % 6 != 5;
  r.top_logprobs = r.logprobs ? below(4) : 0;
  return line;
}

inline std::vector<TestLine> MixedLines(size_t count) {
  std::vector<TestLine> lines;
  for (size_t i = 1; i <= count; ++i) lines.push_back(MixedLine(i));
  return lines;
}

// Every line alone, one row a sweep: what everything else is compared with.
inline Outcome LineByLine(const TestModel& m, const std::vector<TestLine>& lines,
                          const std::vector<uint32_t>& failing = {}) {
  RunConfig alone;
  alone.sequences = 1;
  alone.rows = 1;
  alone.share_prefixes = false;
  return RunSequentially(m, alone, lines, failing);
}

}  // namespace colibri
