// A long prompt among short ones, through the whole engine.
#include <doctest/doctest.h>

#include <atomic>
#include <string>
#include <vector>

#include "tests/engine_lines.h"
#include "tests/engine_rig.h"

namespace colibri {
namespace {

constexpr int32_t kLong = 4000;
constexpr uint64_t kShort = 20;

// Attention keeps 64 positions, so that every layer's index selects.
const TestModel& LongModel() {
  static const TempDir folder;
  static const auto model = [] {
    SyntheticModel m;
    m.layers = 3;
    m.experts = 8;
    m.top_k = 2;
    m.hidden = 64;
    m.intermediate = m.moe_intermediate = 64;
    m.heads = 2;
    m.q_lora = m.kv_lora = 64;
    m.nope = m.rope = m.v_head = 16;
    m.index_heads = 2;
    m.index_dim = 32;
    m.index_top_k = 64;
    m.tokenizer_from = COLIBRI_SOURCE_DIR "/apps/demo/model";
    WriteSyntheticModel(m, folder.Path("model"));
    return std::make_unique<TestModel>(folder.Path("model"));
  }();
  return *model;
}

TestLine LineOf(uint64_t number, int32_t prompt) {
  TestLine line;
  Request& r = line.request;
  r.line = number;
  r.custom_id = std::to_string(number);
  r.chat = false;
  for (int32_t i = 0; i < prompt; ++i) {
    r.prompt.push_back(10 + (i * 31 + static_cast<int32_t>(number) * 17) % 900);
  }
  r.max_tokens = 8;
  r.loop_stop = false;
  return line;
}

RunConfig Config() {
  RunConfig c;
  c.threads = 2;
  c.context = 8192;
  c.kv_pages = 400;
  c.sequences = 24;
  return c;
}

}  // namespace

TEST_CASE("a prompt of thousands of tokens holds up no short one and has the bytes it has alone") {
  std::vector<TestLine> lines = {LineOf(1, kLong)};
  for (uint64_t i = 0; i < kShort; ++i) lines.push_back(LineOf(2 + i, 5));
  std::atomic<int32_t> left{-1};  // of the long prompt when the short ones had their records
  RunHooks hooks;
  hooks.written = [&](Engine& engine, size_t count) {
    if (count != kShort) return;
    for (const SequenceLeft& s : engine.Left()) left = std::max(left.load(), s.prefill);
  };
  const Outcome together = RunGraph(LongModel(), Config(), lines, hooks);
  CHECK(together.records.size() == kShort + 1);
  CHECK(ErrorsOf(together).empty());
  CHECK(left > kLong / 2);

  for (const uint64_t number : {uint64_t{1}, uint64_t{7}}) {
    RunConfig alone = Config();
    alone.rows = number == 1 ? 256 : 3;
    const Outcome one =
        RunSequentially(LongModel(), alone, std::vector<TestLine>{lines[number - 1]});
    CHECK(LineBytes(one.records.at(number)) == LineBytes(together.records.at(number)));
  }
}

}  // namespace colibri
