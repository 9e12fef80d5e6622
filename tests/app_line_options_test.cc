#include "apps/line_options.h"

#include <doctest/doctest.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

using colibri::GenerationDefaults;
using colibri::InputFormat;
using colibri::LineOptions;
using colibri::RunOptions;

namespace {

RunOptions Plain() {
  RunOptions options;
  options.input = "in.jsonl";
  return options;
}

}  // namespace

TEST_CASE("every option that can change a line's bytes is in the list, each under its own name") {
  const GenerationDefaults model{};
  const auto base = LineOptions(Plain(), model, 4096);
  std::set<std::string> names;
  for (const auto& [name, value] : base) CHECK(names.insert(name).second);
  const std::vector<std::pair<std::string, std::function<void(RunOptions*)>>> changes = {
      {"input-format", [](RunOptions* o) { o->input_format = InputFormat::kLines; }},
      {"input-format", [](RunOptions* o) { o->input = "in.txt"; }},
      {"raw", [](RunOptions* o) { o->raw = true; }},
      {"parse-special", [](RunOptions* o) { o->parse_special = true; }},
      {"temperature", [](RunOptions* o) { o->temperature = 0.5f; }},
      {"top-p", [](RunOptions* o) { o->top_p = 0.5f; }},
      {"top-k", [](RunOptions* o) { o->top_k = 5; }},
      {"min-p", [](RunOptions* o) { o->min_p = 0.5f; }},
      {"seed", [](RunOptions* o) { o->seed = 5; }},
      {"max-tokens", [](RunOptions* o) { o->max_tokens = 5; }},
      {"stop",
       [](RunOptions* o) {
         o->stop = {"a", "b"};
       }},
      {"thinking", [](RunOptions* o) { o->thinking = false; }},
      {"effort", [](RunOptions* o) { o->effort = "high"; }},
      {"loop-stop", [](RunOptions* o) { o->loop_stop = false; }},
      {"attention", [](RunOptions* o) { o->dense_attention = true; }},
      {"activations", [](RunOptions* o) { o->f32_activations = true; }},
      {"kv", [](RunOptions* o) { o->f32_kv = true; }},
  };
  for (const auto& entry : changes) {
    const std::string& name = entry.first;  // clang 14: a lambda captures no structured binding
    const auto& change = entry.second;
    RunOptions options = Plain();
    change(&options);
    const auto changed = LineOptions(options, model, 4096);
    REQUIRE(changed.size() == base.size());
    for (size_t i = 0; i < base.size(); ++i) {
      INFO(name);
      CHECK(changed[i].first == base[i].first);
      CHECK((changed[i].second != base[i].second) == (base[i].first == name));
    }
  }
  CHECK(LineOptions(Plain(), model, 2048) != base);
}

TEST_CASE("options that cannot change a line are not in the list") {
  RunOptions options = Plain();
  options.threads = 7;
  options.frames = 2;
  options.max_rows = 3;
  options.ram = 1;
  options.output = "out";
  options.io_limit = 5;
  CHECK(LineOptions(options, {}, 4096) == LineOptions(Plain(), {}, 4096));
}

TEST_CASE("a flag that says what the model says changes nothing") {
  GenerationDefaults model;
  model.temperature = 0.6f;
  model.top_k = 5;
  RunOptions options = Plain();
  options.temperature = 0.6f;
  options.top_k = 5;
  CHECK(LineOptions(options, model, 4096) == LineOptions(Plain(), model, 4096));
}

TEST_CASE("stop texts cannot be mistaken for one another, and every value is ASCII") {
  RunOptions one = Plain(), two = Plain();
  one.stop = {"a\",\"b"};
  two.stop = {"a", "b"};
  CHECK(LineOptions(one, {}, 4096) != LineOptions(two, {}, 4096));
  one.stop = {"\xff \xC3\xA4 \n"};
  for (const auto& [name, value] : LineOptions(one, {}, 4096)) {
    for (const char c : value) CHECK((c >= 0x20 && c < 0x7f));
  }
}
