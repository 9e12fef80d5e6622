#include "apps/line_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace colibri {
namespace {

const char* OnOff(bool on) { return on ? "on" : "off"; }

std::string FormatName(const RunOptions& options) {
  if (!options.prompts.empty()) return "command line";
  std::optional<InputFormat> format = options.input_format;
  if (!format) format = FormatFromName(options.input);
  // Then the first line decides, and a changed line is noticed by its hash.
  if (!format) return "by the first line";
  return *format == InputFormat::kJsonl ? "jsonl" : "lines";
}

}  // namespace

std::vector<std::pair<std::string, std::string>> LineOptions(const RunOptions& options,
                                                             const GenerationDefaults& model,
                                                             int32_t context) {
  const RequestDefaults defaults = MakeRequestDefaults(options, model);
  const Sampling& sampling = defaults.sampling;
  const nlohmann::json stop = defaults.stop;
  return {
      {"input-format", FormatName(options)},
      {"raw", OnOff(defaults.raw)},
      {"parse-special", OnOff(defaults.parse_special)},
      {"ctx-size", fmt::format("{}", context)},
      {"temperature", fmt::format("{}", sampling.temperature)},
      {"top-p", fmt::format("{}", sampling.top_p)},
      {"top-k", fmt::format("{}", sampling.top_k)},
      {"min-p", fmt::format("{}", sampling.min_p)},
      {"seed", fmt::format("{}", sampling.seed)},
      {"max-tokens", fmt::format("{}", defaults.max_tokens)},
      {"stop", stop.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace)},
      {"thinking", OnOff(defaults.thinking)},
      {"effort", defaults.effort},
      {"loop-stop", OnOff(defaults.loop_stop)},
      {"attention", options.dense_attention ? "dense" : "auto"},
      {"activations", options.f32_activations ? "f32" : "auto"},
      {"kv", options.f32_kv ? "f32" : "bf16"},
  };
}

RequestDefaults MakeRequestDefaults(const RunOptions& options, const GenerationDefaults& model) {
  RequestDefaults defaults;
  Sampling& sampling = defaults.sampling;
  sampling.temperature = options.temperature.value_or(model.temperature.value_or(1.0f));
  sampling.top_p = options.top_p.value_or(model.top_p.value_or(1.0f));
  sampling.top_k = options.top_k.value_or(std::max(model.top_k.value_or(0), 0));
  sampling.min_p = options.min_p.value_or(0.0f);
  sampling.seed = options.seed;
  defaults.max_tokens = options.max_tokens;
  defaults.stop = options.stop;
  defaults.thinking = options.thinking;
  defaults.effort = options.effort;
  defaults.loop_stop = options.loop_stop;
  defaults.raw = options.raw;
  defaults.parse_special = options.parse_special;
  return defaults;
}

std::string DescribeSampling(const RunOptions& options, const GenerationDefaults& model) {
  const Sampling sampling = MakeRequestDefaults(options, model).sampling;
  const auto origin = [](bool flag, bool file) {
    return flag ? "flag" : file ? "model" : "default";
  };
  return fmt::format("temperature {} ({}), top-p {} ({}), top-k {} ({}), min-p {} ({}), seed {}",
                     sampling.temperature,
                     origin(options.temperature.has_value(), model.temperature.has_value()),
                     sampling.top_p, origin(options.top_p.has_value(), model.top_p.has_value()),
                     sampling.top_k, origin(options.top_k.has_value(), model.top_k.has_value()),
                     sampling.min_p, origin(options.min_p.has_value(), false), sampling.seed);
}

}  // namespace colibri
