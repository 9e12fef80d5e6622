// Greedy continuations of the demo model, through the flow graph, against those of transformers.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/request_parser.h"
#include "tests/engine_rig.h"

namespace colibri {
namespace {

using Ids = std::vector<int32_t>;

struct Continuation {
  std::string kind, prompt;
  Ids prompt_ids, greedy_ids;
  size_t sure = 0;  // steps before the first margin that rounding may turn
};

constexpr double kSureMargin = 1e-3;

const std::vector<Continuation>& Continuations() {
  static const std::vector<Continuation> all = [] {
    std::vector<Continuation> list;
    std::ifstream file(COLIBRI_SOURCE_DIR "/tests/fixtures/demo/greedy.jsonl");
    for (std::string line; std::getline(file, line);) {
      const nlohmann::json json = nlohmann::json::parse(line);
      Continuation c;
      c.kind = json.at("kind");
      c.prompt = json.at("prompt");
      c.prompt_ids = json.at("prompt_ids").get<Ids>();
      c.greedy_ids = json.at("greedy_ids").get<Ids>();
      const auto margins = json.at("margins").get<std::vector<double>>();
      const auto unsure = std::find_if(margins.begin(), margins.end(),
                                       [](double margin) { return margin < kSureMargin; });
      c.sure = static_cast<size_t>(unsure - margins.begin());
      list.push_back(std::move(c));
    }
    return list;
  }();
  return all;
}

// The generated ids of each sequence that ended, by line.
class TokenDelivery final : public Delivery {
 public:
  void Deliver(Sequence& s, const Notice& notice) override {
    if (notice.final == 0) return;
    if (!s.error) tokens[s.line->request.line] = {s.tokens.begin() + s.prompt, s.tokens.end()};
    engine->Closed(s.index);
  }
  void Refuse(Sequence&) override {}
  Engine* engine = nullptr;
  std::map<uint64_t, Ids> tokens;
};

// The stored continuations were made with f32 activations.
const TestModel& F32DemoModel() {
  static const TestModel demo = [] {
    TestModel m(COLIBRI_SOURCE_DIR "/apps/demo/model");
    m.model.SetInt8Activations(false);
    return m;
  }();
  return demo;
}

std::map<uint64_t, Ids> Generate(const RunConfig& c, const std::vector<size_t>& which) {
  const TestModel& m = F32DemoModel();
  std::vector<TestLine> lines;
  for (const size_t i : which) {
    TestLine line;
    line.request.line = i;
    line.request.custom_id = fmt::format("{}", i);
    line.request.prompt = Continuations()[i].prompt_ids;
    line.request.max_tokens = static_cast<int32_t>(Continuations()[i].greedy_ids.size());
    line.request.sampling.temperature = 0;
    line.request.loop_stop = false;
    lines.push_back(std::move(line));
  }
  const Watchdog watchdog(c.Text());
  ListSource source(std::move(lines));
  TokenDelivery delivery;
  Engine engine(m.model, m.tokenizer, EngineOptionsOf(m, c),
                ReaderOf(c, m.model.Files().Files(), nullptr), source);
  delivery.engine = &engine;
  engine.Run(delivery);
  return delivery.tokens;
}

void CheckContinuations(const RunConfig& c, const std::vector<size_t>& which) {
  INFO(c.Text());
  const std::map<uint64_t, Ids> got = Generate(c, which);
  for (const size_t i : which) {
    const Continuation& expected = Continuations()[i];
    REQUIRE(got.contains(i));
    Ids ours = got.at(i), theirs = expected.greedy_ids;
    ours.resize(std::min(ours.size(), expected.sure));
    theirs.resize(std::min(theirs.size(), expected.sure));
    CHECK_MESSAGE(ours == theirs, "continuation ", i, " (", expected.kind, ")");
  }
}

RunConfig Exact() {
  RunConfig c;
  c.kv_type = KvType::kF32;
  c.context = 1024;
  c.reader = ReaderKind::kUring;
  return c;
}

std::vector<size_t> First(size_t count, size_t skip = 0) {
  std::vector<size_t> which;
  for (size_t i = skip; i < std::min(Continuations().size(), skip + count); ++i) which.push_back(i);
  return which;
}

}  // namespace

TEST_CASE("all 25 continuations in one batch are those of the reference") {
  REQUIRE(Continuations().size() == 25);
  RunConfig c = Exact();
  c.threads = 2;
  c.sequences = 25;
  c.rows = 128;
  CheckContinuations(c, First(25));
}

TEST_CASE("continuations alone are those of the reference") {
  const std::vector<uint32_t> slots = {1, 6, 0};
  for (size_t i = 0; i < Continuations().size(); ++i) {
    for (size_t s = 0; s < slots.size(); ++s) {
      if (!FullTests() && s != i % slots.size()) continue;
      RunConfig c = Exact();
      c.sequences = 1;
      c.slots = slots[s];
      c.threads = 1 + static_cast<int32_t>(i / 2 % 2);
      c.reader = i % 2 == 0 ? ReaderKind::kUring : ReaderKind::kPread;
      CheckContinuations(c, {i});
    }
  }
}

TEST_CASE("continuations in batches of 2 and 8 are those of the reference") {
  const std::vector<uint32_t> slots = {1, 6, 0};
  size_t number = 0;
  for (const int32_t batch : {2, 8}) {
    for (const int32_t threads : {1, 2}) {
      for (size_t s = 0; s < slots.size(); ++s) {
        if (!FullTests() && s != number % slots.size()) continue;
        RunConfig c = Exact();
        c.sequences = batch;
        c.threads = threads;
        c.slots = slots[s];
        c.frames = 1 + static_cast<int32_t>(s % 2);
        c.reader = number % 2 == 0 ? ReaderKind::kPread : ReaderKind::kUring;
        CheckContinuations(c, FullTests() ? First(25) : First(static_cast<size_t>(batch), 10));
      }
      ++number;
    }
  }
}

TEST_CASE("chat prompts of the continuations are rendered to their ids") {
  RequestDefaults defaults;
  defaults.thinking = false;
  RequestParser parser(DemoModel().tokenizer, DemoModel().model.Config().vocab, 4096, defaults);
  size_t chats = 0;
  for (const Continuation& c : Continuations()) {
    if (c.kind != "chat") continue;
    const ParsedLine line = parser.ParseText(c.prompt, ++chats);
    REQUIRE(line.request);
    CHECK(line.request->prompt == c.prompt_ids);
  }
  CHECK(chats == 12);
}

}  // namespace colibri
