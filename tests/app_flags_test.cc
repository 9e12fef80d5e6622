#include <doctest/doctest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "apps/flags.h"
#include "apps/line_options.h"

using colibri::GenerationDefaults;
using colibri::InputFormat;
using colibri::IoChoice;
using colibri::LineShard;
using colibri::MakeRequestDefaults;
using colibri::NameVariables;
using colibri::OnOffAuto;
using colibri::OutputFormat;
using colibri::ParsedCommandLine;
using colibri::ParseRunCommandLine;
using colibri::ParseSize;
using colibri::ParseTokens;
using colibri::ProgressFormat;
using colibri::RunOptions;

namespace {

using Words = std::vector<std::string>;

RunOptions Good(const Words& more) {
  Words arguments = {"-m", "dir", "-i", "in.jsonl"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const ParsedCommandLine parsed = ParseRunCommandLine(arguments);
  INFO(parsed.text);
  REQUIRE(parsed.options.has_value());
  return *parsed.options;
}

// The message; the exit code must be 2.
std::string Refused(const Words& arguments) {
  const ParsedCommandLine parsed = ParseRunCommandLine(arguments);
  CHECK_FALSE(parsed.options.has_value());
  CHECK(parsed.exit_code == 2);
  return parsed.text;
}

// Refused after -m dir -i in.jsonl, with `name` in the message.
bool RefusedBy(const Words& more, const std::string& name) {
  Words arguments = {"-m", "dir", "-i", "in.jsonl"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const std::string text = Refused(arguments);
  INFO(text);
  const bool named = text.find(name) != std::string::npos;
  CHECK(named);
  return named;
}

class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Environment() { unsetenv(name_); }

 private:
  const char* name_;
};

}  // namespace

TEST_CASE("no arguments give the usage and exit code 2") {
  CHECK(Refused({}).starts_with("usage: colibri-run"));
}

TEST_CASE("help goes to standard output, names every group and exits with 0") {
  const ParsedCommandLine help = ParseRunCommandLine({"--help"});
  CHECK_FALSE(help.options.has_value());
  CHECK(help.exit_code == 0);
  for (const std::string group : {"Model:", "Prompts:", "Answers:", "Several machines:", "Sampling",
                                  "Memory:", "Pipeline:"}) {
    CHECK(help.text.find(group) != std::string::npos);
  }
  CHECK(help.text.find("auto (int8, two planes of it into attention) or f32") != std::string::npos);
}

TEST_CASE("an unknown flag is refused by name") {
  CHECK(RefusedBy({"--resum"}, "--resum"));
  CHECK(RefusedBy({"stray"}, "stray"));
}

TEST_CASE("the least command line has the documented defaults") {
  const RunOptions options = Good({});
  CHECK(options.model == Words{"dir"});
  CHECK(options.input == "in.jsonl");
  CHECK(options.output == "-");
  CHECK_FALSE(options.input_format.has_value());
  CHECK(options.output_format == OutputFormat::kAuto);
  CHECK(options.ctx_size == 0);
  CHECK(options.seed == 0);
  CHECK(options.thinking);
  CHECK(options.effort == "max");
  CHECK(options.loop_stop);
  CHECK(options.frames == 1);
  CHECK_FALSE(options.temperature.has_value());
  CHECK_FALSE(options.ram.has_value());
  CHECK_FALSE(options.overwrite);
}

TEST_CASE("every flag arrives in the options") {
  const RunOptions o = Good({"-m",
                             "dir2",
                             "--ctx-size",
                             "8k",
                             "--input-format",
                             "lines",
                             "--parse-special",
                             "-o",
                             "out",
                             "--output-format",
                             "jsonl",
                             "--overwrite",
                             "--progress",
                             "json",
                             "--temperature",
                             "0.5",
                             "--top-p",
                             "0.9",
                             "--top-k",
                             "40",
                             "--min-p",
                             "0.05",
                             "--seed",
                             "18446744073709551615",
                             "--max-tokens",
                             "1k",
                             "--stop",
                             "a",
                             "--stop",
                             "-b",
                             "--thinking",
                             "off",
                             "--no-loop-stop",
                             "--ram",
                             "16GiB",
                             "--slots",
                             "25%",
                             "--resident",
                             "2GB",
                             "--kv-dir",
                             "/kv",
                             "--kv-ram",
                             "1GB",
                             "--kv",
                             "f32",
                             "--attention",
                             "dense",
                             "--activations",
                             "f32",
                             "--draft",
                             "off",
                             "--threads",
                             "8",
                             "--frames",
                             "2",
                             "--max-rows",
                             "256",
                             "--max-seqs",
                             "128",
                             "--prefill-rows",
                             "64",
                             "--io",
                             "pread",
                             "--io-depth",
                             "64",
                             "--io-limit",
                             "2GB/s",
                             "--direct",
                             "on",
                             "--prefetch",
                             "on",
                             "--prefetch-depth",
                             "16",
                             "--cache-policy",
                             "lru",
                             "--plan"});
  CHECK(o.model == Words{"dir", "dir2"});
  CHECK(o.ctx_size == 8192);
  CHECK(o.input_format == InputFormat::kLines);
  CHECK(o.parse_special);
  CHECK(o.output == "out");
  CHECK(o.output_format == OutputFormat::kJsonl);
  CHECK(o.overwrite);
  CHECK(o.progress == ProgressFormat::kJson);
  CHECK(o.temperature == 0.5f);
  CHECK(o.top_p == 0.9f);
  CHECK(o.top_k == 40);
  CHECK(o.min_p == 0.05f);
  CHECK(o.seed == ~uint64_t{0});
  CHECK(o.max_tokens == 1024);
  CHECK(o.stop == Words{"a", "-b"});
  CHECK_FALSE(o.thinking);
  CHECK_FALSE(o.loop_stop);
  CHECK(o.ram == uint64_t{16} << 30);
  REQUIRE(o.slots.has_value());
  CHECK(o.slots->percent);
  CHECK(o.slots->value == 25);
  CHECK(o.resident == uint64_t{2000000000});
  CHECK(o.kv_dir == "/kv");
  CHECK(o.kv_ram == uint64_t{1000000000});
  CHECK(o.f32_kv);
  CHECK(o.dense_attention);
  CHECK(o.f32_activations);
  CHECK(o.threads == 8);
  CHECK(o.frames == 2);
  CHECK(o.max_rows == 256);
  CHECK(o.max_seqs == 128);
  CHECK(o.prefill_rows == 64);
  CHECK(o.io == IoChoice::kPread);
  CHECK(o.io_depth == 64);
  CHECK(o.io_limit == 2000000000);
  CHECK(o.direct == OnOffAuto::kOn);
  CHECK(o.prefetch == OnOffAuto::kOn);
  CHECK(o.prefetch_depth == 16);
  CHECK(o.cache_policy == "lru");
  CHECK(o.plan);
  CHECK_FALSE(o.version);
}

TEST_CASE("prompts on the command line keep their order and may begin with a dash") {
  const ParsedCommandLine parsed = ParseRunCommandLine({"-m", "d", "-p", "- one", "-p", "two"});
  REQUIRE(parsed.options.has_value());
  CHECK(parsed.options->prompts == Words{"- one", "two"});
}

TEST_CASE("every flag is an environment variable too, and the command line wins") {
  const Environment rows("COLIBRI_MAX_ROWS", "32");
  const Environment special("COLIBRI_PARSE_SPECIAL", "1");
  const Environment model("COLIBRI_MODEL", "from-environment");
  const Environment ram("COLIBRI_RAM", "3GB");
  CHECK(Good({}).max_rows == 32);
  CHECK(Good({}).parse_special);
  CHECK(Good({}).ram == uint64_t{3000000000});
  CHECK(Good({"--max-rows", "5"}).max_rows == 5);
  CHECK(Good({}).model == Words{"dir"});
  const ParsedCommandLine parsed = ParseRunCommandLine({"-p", "x"});
  REQUIRE(parsed.options.has_value());
  CHECK(parsed.options->model == Words{"from-environment"});
}

TEST_CASE("variables alone make a command line, and no usage is asked for") {
  const Environment model("COLIBRI_MODEL", "from-environment");
  const Environment input("COLIBRI_INPUT", "prompts.jsonl");
  const ParsedCommandLine parsed = ParseRunCommandLine({});
  REQUIRE(parsed.options.has_value());
  CHECK(parsed.options->input == "prompts.jsonl");
}

TEST_CASE("an error in an environment variable names the variable, one in a flag the flag") {
  const Environment rows("COLIBRI_MAX_ROWS", "many");
  CHECK(RefusedBy({}, "COLIBRI_MAX_ROWS: \"many\" is given"));
  CHECK(RefusedBy({"--max-rows", "few"}, "--max-rows: \"few\" is given"));
  CHECK(RefusedBy({"--max-rows=few"}, "--max-rows: \"few\" is given"));
}

TEST_CASE("a switch and a combination that come from the environment are named by variable") {
  {
    const Environment ordered("COLIBRI_ORDERED", "perhaps");
    CHECK(RefusedBy({}, "COLIBRI_ORDERED"));
  }
  const Environment resume("COLIBRI_RESUME", "1");
  CHECK(RefusedBy({}, "COLIBRI_RESUME is for an output file"));
  CHECK(RefusedBy({"--resume"}, "--resume is for an output file"));
}

TEST_CASE("a variable takes the place of its flag's whole name only") {
  const std::vector<std::pair<std::string, std::string>> from = {{"-m", "COLIBRI_MODEL"},
                                                                 {"--max", "COLIBRI_MAX"}};
  CHECK(NameVariables("--max-rows and --max: -m, a-m -more (-m)", from) ==
        "--max-rows and COLIBRI_MAX: COLIBRI_MODEL, a-m -more (COLIBRI_MODEL)");
  CHECK(NameVariables("--max", {}) == "--max");
}

TEST_CASE("values out of range are refused with the flag and what was expected") {
  CHECK(RefusedBy({"--temperature", "2.1"}, "--temperature"));
  CHECK(RefusedBy({"--temperature", "warm"}, "--temperature"));
  CHECK(RefusedBy({"--temperature", "nan"}, "--temperature"));
  CHECK(RefusedBy({"--top-p", "0"}, "--top-p"));
  CHECK(RefusedBy({"--top-k", "-1"}, "--top-k"));
  CHECK(RefusedBy({"--min-p", "1.5"}, "--min-p"));
  CHECK(RefusedBy({"--seed", "1.5"}, "--seed"));
  CHECK(RefusedBy({"--seed", "18446744073709551616"}, "--seed"));
  CHECK(RefusedBy({"--threads", "1.5"}, "--threads"));
  CHECK(RefusedBy({"--max-tokens", "0"}, "--max-tokens"));
  CHECK(RefusedBy({"--ctx-size", "1.0001k"}, "--ctx-size"));
  CHECK(RefusedBy({"--ram", "lots"}, "a size such as 16GB"));
  CHECK(RefusedBy({"--slots", "101%"}, "--slots"));
  CHECK(RefusedBy({"--slots", "0"}, "--slots"));
  CHECK(RefusedBy({"--slots", "1.5"}, "--slots"));
  CHECK(RefusedBy({"--threads", "0"}, "--threads"));
  CHECK(RefusedBy({"--io", "mmap"}, "auto|uring|pread"));
  CHECK(RefusedBy({"--io-limit", "0"}, "--io-limit"));
  CHECK(RefusedBy({"--draft", "0"}, "--draft"));
  CHECK(RefusedBy({"--draft", "5"}, "--draft"));
  CHECK(RefusedBy({"--draft", "on"}, "off, auto or a number from 1 to 4"));
  CHECK(RefusedBy({"--effort", "medium"}, "high|max|none"));
  CHECK(RefusedBy({"--kv", "fp8"}, "bf16|f32"));
}

TEST_CASE("a negative seed is the seed that a line with it has") {
  CHECK(Good({"--seed", "-1"}).seed == ~uint64_t{0});
}

TEST_CASE("combinations that make no sense are refused by name") {
  CHECK(Refused({"-i", "x"}).find("-m is missing") != std::string::npos);
  CHECK(Refused({"-m", "d"}).find("nothing to do") != std::string::npos);
  CHECK(RefusedBy({"-p", "x"}, "-i and -p"));
  CHECK(Refused({"-m", "d", "-p", "x", "--input-format", "lines"}).find("--input-format") !=
        std::string::npos);
  CHECK(RefusedBy({"--raw", "--input-format", "jsonl"}, "--raw"));
  CHECK(RefusedBy({"--raw"}, "--raw"));  // by the name of the file
  CHECK(RefusedBy({"--raw", "--thinking", "off"}, "--raw"));
  CHECK(RefusedBy({"--raw", "--effort", "high"}, "--raw"));
  CHECK(RefusedBy({"--thinking", "off", "--effort", "high"}, "--thinking off contradicts"));
  CHECK(RefusedBy({"--thinking", "on", "--effort", "none"}, "--thinking on contradicts"));
  CHECK(RefusedBy({"-o", "in.jsonl"}, "same file"));
  CHECK(RefusedBy({"--overwrite"}, "--overwrite"));
  CHECK(RefusedBy({"--stop", ""}, "--stop"));
  CHECK(RefusedBy({"--prefetch", "off", "--prefetch-depth", "4"}, "--prefetch-depth"));
  CHECK(RefusedBy({"--io-depth", "4", "--prefetch-depth", "8"}, "--prefetch-depth"));
  CHECK(RefusedBy({"--max-rows", "4", "--prefill-rows", "8"}, "--prefill-rows"));
  CHECK(RefusedBy({"--ctx-size", "1k", "--max-tokens", "1k"}, "--max-tokens"));
}

TEST_CASE("flags for going on and for several machines arrive") {
  const RunOptions o =
      Good({"-o", "out", "--resume", "--retry-errors", "--ordered", "--strict", "--shard", "1/3"});
  CHECK(o.resume);
  CHECK(o.retry_errors);
  CHECK(o.ordered);
  CHECK(o.strict);
  CHECK(o.shard == LineShard{1, 3});
  CHECK(Good({}).shard == LineShard{0, 1});
  CHECK_FALSE(Good({}).merge);
  for (const char* bad : {"3/3", "1", "1/0", "-1/3", "1/3x"}) {
    CHECK(RefusedBy({"--shard", bad}, "--shard"));
  }
}

TEST_CASE("--resume and its like are refused where they would mean nothing") {
  CHECK(RefusedBy({"--resume"}, "--resume is for an output file"));
  CHECK(RefusedBy({"--resume", "-o", "out", "--overwrite"}, "--overwrite"));
  CHECK(RefusedBy({"--resume", "-o", "out", "--output-format", "text"}, "text output"));
  CHECK(RefusedBy({"--retry-errors", "-o", "out"}, "--retry-errors"));
  CHECK(RefusedBy({"--mixed-targets"}, "--mixed-targets"));
  CHECK(Refused({"-m", "d", "-p", "x", "--strict"}).find("--strict") != std::string::npos);
  CHECK(Refused({"-m", "d", "-i", "-", "--strict"}).find("--strict") != std::string::npos);
}

TEST_CASE("--merge takes outputs, needs no model and refuses flags that only a run has") {
  const ParsedCommandLine parsed = ParseRunCommandLine(
      {"--merge", "-i", "in.jsonl", "-o", "whole", "--mixed-targets", "out.0", "out.1"});
  INFO(parsed.text);
  REQUIRE(parsed.options.has_value());
  CHECK(parsed.options->merge);
  CHECK(parsed.options->mixed_targets);
  CHECK(parsed.options->merge_files == Words{"out.0", "out.1"});
  CHECK(RefusedBy({"--merge"}, "no outputs"));
  CHECK(RefusedBy({"--merge", "out.0", "--seed", "1"}, "--seed has no place in --merge"));
  CHECK(RefusedBy({"--merge", "out.0", "--shard", "0/2"}, "--shard has no place in --merge"));
  CHECK(Refused({"--merge", "out.0"}).find("-i FILE") != std::string::npos);
  // What other runs need may stand in the environment.
  const Environment rows("COLIBRI_MAX_ROWS", "32");
  CHECK(ParseRunCommandLine({"--merge", "-i", "in.jsonl", "out.0"}).options.has_value());
}

TEST_CASE("the plan needs no prompts and the version needs nothing") {
  CHECK(ParseRunCommandLine({"-m", "d", "--plan"}).options.has_value());
  const ParsedCommandLine version = ParseRunCommandLine({"--version"});
  REQUIRE(version.options.has_value());
  CHECK(version.options->version);
}

TEST_CASE("effort none is thinking off, and thinking lines still get an effort") {
  const RunOptions options = Good({"--effort", "none"});
  CHECK_FALSE(options.thinking);
  CHECK(options.effort == "max");
  CHECK(Good({"--effort", "high"}).effort == "high");
  CHECK(Good({"--effort", "none", "--thinking", "off"}).thinking == false);
}

TEST_CASE("sizes take decimal and binary units") {
  CHECK(ParseSize("16GB") == uint64_t{16000000000});
  CHECK(ParseSize("16GiB") == uint64_t{16} << 30);
  CHECK(ParseSize("1.5G") == uint64_t{1500000000});
  CHECK(ParseSize("512MiB") == uint64_t{512} << 20);
  CHECK(ParseSize("4096") == uint64_t{4096});
  CHECK(ParseSize("0") == uint64_t{0});
  for (const char* bad : {"", "GB", "-1GB", "1XB", "1 GB", "1e9", "nan", "inf", "99999999TB"}) {
    CHECK_FALSE(ParseSize(bad).has_value());
  }
}

TEST_CASE("token counts take k as 1024") {
  CHECK(ParseTokens("4k") == 4096);
  CHECK(ParseTokens("1.5K") == 1536);
  CHECK(ParseTokens("100") == 100);
  for (const char* bad : {"", "k", "1.5", "4m", "-1", "3000000000", "9999999k"}) {
    CHECK_FALSE(ParseTokens(bad).has_value());
  }
}

TEST_CASE("flags stand over the model's defaults, and the banner says which is which") {
  GenerationDefaults model;
  model.temperature = 1.0f;
  model.top_p = 0.95f;
  const auto plain = MakeRequestDefaults(Good({}), model);
  CHECK(plain.sampling.temperature == 1.0f);
  CHECK(plain.sampling.top_p == 0.95f);
  CHECK(plain.sampling.top_k == 0);
  const RunOptions options = Good({"--temperature", "0.5", "--stop", "x", "--effort", "high"});
  const auto defaults = MakeRequestDefaults(options, model);
  CHECK(defaults.sampling.temperature == 0.5f);
  CHECK(defaults.stop == Words{"x"});
  CHECK(defaults.effort == "high");
  CHECK(colibri::DescribeSampling(options, model) ==
        "temperature 0.5 (flag), top-p 0.95 (model), top-k 0 (default), min-p 0 (default), seed 0");
}
