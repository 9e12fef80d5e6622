// Length: one table of all flags, in the order of --help, and what their combinations mean.
#include "apps/flags.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "io/error.h"
#include "runtime/draft.h"

namespace colibri {
namespace {

constexpr const char* kUsage =
    "usage: colibri-run -m MODEL_DIR (-i FILE | -p TEXT) [-o FILE] [options]\n"
    "       colibri-run --merge -i FILE [-o FILE] OUTPUT...\n"
    "       colibri-run --help\n";

// A decimal number and what follows it; nullopt when there is none or it is negative.
std::optional<std::pair<double, std::string_view>> SplitNumber(std::string_view text) {
  double value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
  if (error != std::errc() || !(value >= 0)) return {};
  return std::pair(value, text.substr(static_cast<size_t>(end - text.data())));
}

// The whole text as an integer that fits; CLI11's own conversion gives the nearest one that does.
template <class Integer>
bool ParseWhole(std::string_view text, Integer* into) {
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, *into);
  return parsed.ec == std::errc() && parsed.ptr == end;
}

// "--max-rows" -> "COLIBRI_MAX_ROWS".
std::string EnvironmentName(const std::string& flags) {
  std::string name = "COLIBRI_";
  for (const char c : flags.substr(flags.find("--") + 2)) {
    name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return name;
}

// Builds the flags of one RunOptions; each Add gives name, help and environment variable at once.
class FlagSet {
 public:
  using Strings = std::vector<std::string>;
  explicit FlagSet(RunOptions* options) : options_(*options) {
    app_.set_help_flag("-h,--help", "Print this and exit");
    app_.option_defaults()->group("Other");
    AddModel();
    AddInput();
    AddOutput();
    AddMachines();
    AddSampling();
    AddMemory();
    AddPipeline();
    group_ = "Other";
    Flag("--plan", &options_.plan, "Print how memory would be used, and how fast, and exit");
    Rate("--drive-speed", &options_.drive_speed,
         "What the drive gives (default: measured once and remembered)");
    Flag("--calibrate", &options_.calibrate, "Measure drive and processor again");
    Flag("--no-prediction", &options_.no_prediction,
         "Measure nothing; the plan reckons with usual speeds");
    // Not from the environment: COLIBRI_VERSION is a name that others set for their own purposes.
    app_.add_flag("--version", options_.version, "Print version, backends and SIMD target and exit")
        ->group(group_);
  }

  CLI::App& App() { return app_; }
  bool Given(const std::string& flag) const { return app_.get_option(flag)->count() > 0; }

  // See RunOptions::from_environment.
  std::vector<std::pair<std::string, std::string>> FromEnvironment(const Strings& arguments) {
    std::vector<std::pair<std::string, std::string>> found;
    for (const CLI::Option* option : app_.get_options()) {
      const std::string& variable = option->get_envname();
      const char* value = variable.empty() ? nullptr : std::getenv(variable.c_str());
      if (value == nullptr || *value == '\0') continue;
      Strings names;
      for (const std::string& name : option->get_snames()) names.push_back("-" + name);
      for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
      const bool given = std::any_of(names.begin(), names.end(), [&](const std::string& name) {
        return std::any_of(arguments.begin(), arguments.end(), [&](const std::string& argument) {
          return argument.starts_with(name) &&  // -mDIR, --model=DIR
                 (argument.size() == name.size() || name[1] != '-' || argument[name.size()] == '=');
        });
      });
      if (given) continue;
      for (std::string& name : names) found.emplace_back(std::move(name), variable);
    }
    return found;
  }

  const std::string& InputFormatName() const { return input_format_; }
  const std::string& ThinkingName() const { return thinking_; }

  // The first flag of the command line that --merge would ignore; "". The environment may hold what
  // other runs need.
  std::string IgnoredByMerge() {
    for (const CLI::Option* option : app_.get_options()) {
      const std::string name = option->get_name();
      const std::string& environment = option->get_envname();
      if (option->count() == 0 || kOfMerge.contains(name)) continue;
      if (!environment.empty() && std::getenv(environment.c_str()) != nullptr) continue;
      return name;
    }
    return {};
  }

 private:
  static inline const std::set<std::string> kOfMerge = {
      "--merge",  "--mixed-targets", "--model",   "--input", "--input-format",
      "--output", "--overwrite",     "--version", "OUTPUT"};

  template <class T>
  CLI::Option* Value(const std::string& flags, T* into, const std::string& help) {
    return app_.add_option(flags, *into, help)->group(group_)->envname(EnvironmentName(flags));
  }
  // May be given several times, one value each.
  CLI::Option* List(const std::string& flags, Strings* into, const std::string& help) {
    return Value(flags, into, help)->allow_extra_args(false);
  }
  void Flag(const std::string& flags, bool* into, const std::string& help) {
    app_.add_flag(flags, *into, help)->group(group_)->envname(EnvironmentName(flags));
  }
  // `parse` gives an optional; an empty one is an error that says what was expected.
  template <class Parse>
  CLI::Option* Parsed(const std::string& flags, const std::string& type,
                      const std::string& expected, const std::string& help, Parse parse) {
    const auto take = [flags, expected, parse](const std::string& text) {
      if (parse(text)) return;
      throw CLI::ValidationError(flags.substr(flags.find("--")),
                                 fmt::format("\"{}\" is given, {} is expected", text, expected));
    };
    return app_.add_option_function<std::string>(flags, take, help)
        ->group(group_)
        ->type_name(type)
        ->envname(EnvironmentName(flags));
  }
  void Count(const std::string& flags, int32_t* into, int32_t low, int32_t high,
             const std::string& help) {
    Parsed(flags, "N", fmt::format("a whole number from {} to {}", low, high), help,
           [into, low, high](const std::string& text) {
             return ParseWhole(text, into) && *into >= low && *into <= high;
           });
  }
  template <class T>
  void Choice(const std::string& flags, T* into,
              const std::vector<std::pair<std::string, T>>& names, const std::string& help) {
    std::string known;
    for (const auto& [name, value] : names) known += (known.empty() ? "" : "|") + name;
    Parsed(flags, known, "one of " + known, help, [into, names](const std::string& text) {
      for (const auto& [name, value] : names) {
        if (name != text) continue;
        *into = value;
        return true;
      }
      return false;
    });
  }
  void Size(const std::string& flags, std::optional<uint64_t>* into, const std::string& help) {
    Parsed(flags, "SIZE", "a size such as 16GB or 16GiB", help, [into](const std::string& text) {
      *into = ParseSize(text);
      return into->has_value();
    });
  }
  // Bytes a second.
  void Rate(const std::string& flags, uint64_t* into, const std::string& help) {
    Parsed(flags, "SIZE", "a size a second such as 2GB or 2GB/s", help, [into](std::string text) {
      if (text.ends_with("/s")) text.resize(text.size() - 2);
      const std::optional<uint64_t> size = ParseSize(text);
      if (!size || *size == 0) return false;
      *into = *size;
      return true;
    });
  }
  void Tokens(const std::string& flags, int32_t* into, const std::string& help) {
    Parsed(flags, "TOKENS", "a number of tokens from 1 such as 4096 or 4k", help,
           [into](const std::string& text) {
             const std::optional<int32_t> tokens = ParseTokens(text);
             if (!tokens || *tokens < 1) return false;
             *into = *tokens;
             return true;
           });
  }
  // A number within [low, high], the lower bound itself left out if `open`.
  void Real(const std::string& flags, std::optional<float>* into, double low, double high,
            bool open, const std::string& help) {
    const std::string expected =
        fmt::format("a number {} {} and at most {}", open ? "above" : "of at least", low, high);
    Parsed(flags, "X", expected, help, [into, low, high, open](const std::string& text) {
      const auto number = SplitNumber(text);
      if (!number || !number->second.empty() || number->first > high) return false;
      const float value = static_cast<float>(number->first);
      if (open ? !(static_cast<double>(value) > low) : !(number->first >= low)) return false;
      *into = value;
      return true;
    });
  }

  void AddModel() {
    group_ = "Model";
    List("-m,--model", &options_.model,
         "Model directory; again for further directories with shards of it, on other drives")
        ->type_name("DIR");
    Tokens("--ctx-size", &options_.ctx_size,
           "Longest prompt and answer together (default: 4096, or the model's limit if lower)");
  }

  void AddInput() {
    group_ = "Prompts";
    Value("-i,--input", &options_.input, "Prompt file; - is standard input")->type_name("FILE");
    Choice("--input-format", &input_format_,
           {{"auto", "auto"}, {"jsonl", "jsonl"}, {"lines", "lines"}},
           "jsonl: OpenAI batch lines; lines: one prompt a line; auto: by name, else first byte");
    List("-p,--prompt", &options_.prompts, "A prompt; may be given several times")
        ->type_name("TEXT");
    Flag("--raw", &options_.raw, "Plain prompts are continued as they are, without chat template");
    Flag("--parse-special", &options_.parse_special,
         "Spellings of control tokens in prompts become these tokens");
    Flag("--strict", &options_.strict,
         "Check every line of the file first; refuse it if one cannot be answered");
  }

  void AddOutput() {
    group_ = "Answers";
    Value("-o,--output", &options_.output, "File for the answers (default: -, standard output)")
        ->type_name("FILE");
    Choice("--output-format", &options_.output_format,
           {{"auto", OutputFormat::kAuto},
            {"text", OutputFormat::kText},
            {"jsonl", OutputFormat::kJsonl}},
           "auto: text for -p or a terminal, else one JSON object a line");
    Flag("--overwrite", &options_.overwrite, "Empty an output file that exists");
    Flag("--resume", &options_.resume,
         "Go on in an output file: only lines without an answer in it are run");
    Flag("--retry-errors", &options_.retry_errors, "With --resume: run failed lines again");
    Flag("--ordered", &options_.ordered,
         "Answers in the order of the prompts (a file is sorted at the end)");
    Choice("--progress", &options_.progress,
           {{"auto", ProgressFormat::kAuto},
            {"bar", ProgressFormat::kBar},
            {"plain", ProgressFormat::kPlain},
            {"json", ProgressFormat::kJson},
            {"off", ProgressFormat::kOff}},
           "Progress on standard error; auto: a bar on a terminal, else a line every 5 s");
  }

  void AddMachines() {
    group_ = "Several machines";
    Parsed("--shard", "I/N", "a share such as 0/4, counted from 0",
           "Run only every Nth line, from line I + 1 on; each process has its own -o",
           [this](const std::string& text) {
             const std::optional<LineShard> shard = ParseLineShard(text);
             if (shard) options_.shard = *shard;
             return shard.has_value();
           });
    Flag("--merge", &options_.merge,
         "Put the outputs of all shards together in the order of -i; needs no model");
    Flag("--mixed-targets", &options_.mixed_targets,
         "With --merge: accept outputs of processors with different instruction sets");
    app_.add_option("OUTPUT", options_.merge_files, "With --merge: the outputs")->group(group_);
  }

  void AddSampling() {
    group_ = "Sampling (defaults: the model's generation_config.json)";
    Real("--temperature", &options_.temperature, 0, 2, false, "0 takes the best token always");
    Real("--top-p", &options_.top_p, 0, 1, true, "Keep the best tokens with this share in total");
    Parsed("--top-k", "N", "a whole number from 0", "Keep this many tokens; 0: all",
           [this](const std::string& text) {
             int32_t value = 0;
             if (!ParseWhole(text, &value) || value < 0) return false;
             options_.top_k = value;
             return true;
           });
    Real("--min-p", &options_.min_p, 0, 1, false, "Keep tokens with this share of the best one's");
    Parsed("--seed", "N", "an integer of 64 bits", "Seed of lines that have none (default: 0)",
           [this](const std::string& text) {
             // A negative seed means what it means in a line.
             int64_t negative = 0;
             if (text.starts_with('-')) {
               if (!ParseWhole(text, &negative)) return false;
               options_.seed = static_cast<uint64_t>(negative);
               return true;
             }
             return ParseWhole(text, &options_.seed);
           });
    Tokens("--max-tokens", &options_.max_tokens,
           "Longest answer (default: the room in the context)");
    List("--stop", &options_.stop, "End an answer before this text; may be given several times")
        ->type_name("TEXT");
    Choice("--thinking", &thinking_, {{"on", "on"}, {"off", "off"}}, "Reason first (default: on)");
    Choice("--effort", &options_.effort, {{"high", "high"}, {"max", "max"}, {"none", "none"}},
           "How long to reason (default: max); none is --thinking off");
    Flag("--no-loop-stop", &no_loop_stop_, "Let answers that repeat themselves go on");
  }

  void AddMemory() {
    group_ = "Memory";
    Size("--ram", &options_.ram, "All memory to use (default: what is free, less a reserve)");
    Parsed("--slots", "N|N%", "a number of experts or a percentage up to 100%",
           "Experts kept in memory, of each size (default: what fits)",
           [this](const std::string& text) { return SetSlots(text); });
    Parsed("--resident", "auto|all|none|SIZE", "auto, all, none or a size such as 4GB",
           "Dense weights kept in memory, the others are read with every sweep (default: auto)",
           [this](const std::string& text) { return SetResident(text); });
    Value("--kv-dir", &options_.kv_dir,
          "Directory for KV pages that are not kept in memory (default: that of the output, or "
          "the current one)")
        ->type_name("DIR");
    Parsed("--kv-ram", "SIZE|auto|all", "a size such as 16GB, auto or all",
           "Memory for KV pages; those of further layers are on the drive (default: auto)",
           [this](const std::string& text) {
             options_.kv_ram = ParseSize(text);
             options_.kv_ram_all = text == "all";
             return options_.kv_ram || options_.kv_ram_all || text == "auto";
           });
    Choice("--kv", &options_.f32_kv, {{"bf16", false}, {"f32", true}},
           "How keys and values are kept (default: bf16)");
  }

  void AddPipeline() {
    group_ = "Pipeline";
    constexpr int32_t kMany = 1 << 20;
    Choice("--attention", &options_.dense_attention, {{"auto", false}, {"dense", true}},
           "dense: attend to every position (default: auto, the model's indexer chooses)");
    Choice("--activations", &options_.f32_activations, {{"auto", false}, {"f32", true}},
           "Activations that enter quantised weights: auto (int8, two planes of it into attention) "
           "or f32");
    Parsed(
        "--draft", "off|auto|N", fmt::format("off, auto or a number from 1 to {}", kMaxDrafts),
        "Tokens guessed by the MTP layer (auto: or by prompt lookup) and verified together; auto: "
        "as many as pay (default: auto)",
        [this](const std::string& text) { return SetDrafts(text); });
    Count("--threads", &options_.threads, 1, 4096, "Compute threads (default: physical cores)");
    Count("--frames", &options_.frames, 1, 64, "Frames in flight (default: 1)");
    Count("--max-rows", &options_.max_rows, 1, kMany,
          "Rows in a frame (default: the plan's choice)");
    Count("--max-seqs", &options_.max_seqs, 1, kMany, "Answers in progress (default: the plan's)");
    Count("--prefill-rows", &options_.prefill_rows, 1, kMany, "Prompt rows in a frame");
    Choice("--io", &options_.io,
           {{"auto", IoChoice::kAuto}, {"uring", IoChoice::kUring}, {"pread", IoChoice::kPread}},
           "How the drive is read (default: auto, io_uring where it works)");
    Count("--io-depth", &options_.io_depth, 1, 256, "Reads of 1 MiB in flight");
    Rate("--io-limit", &options_.io_limit, "Read no faster than this");
    const std::vector<std::pair<std::string, OnOffAuto>> on_off = {
        {"auto", OnOffAuto::kAuto}, {"on", OnOffAuto::kOn}, {"off", OnOffAuto::kOff}};
    Choice("--direct", &options_.direct, on_off,
           "Read past the page cache; bare: on (default: auto)");
    Choice("--prefetch", &options_.prefetch, on_off, "Read guessed experts early (default: auto)");
    Count("--prefetch-depth", &options_.prefetch_depth, 1, 256, "Of the reads, at most this many");
    Choice("--cache-policy", &options_.cache_policy,
           {{"auto", "auto"}, {"lru", "lru"}, {"slru", "slru"}, {"lfu", "lfu"}, {"sweep", "sweep"}},
           "Which experts stay: auto (sweep), sweep (what the sweep comes back to soonest), lru, "
           "slru or lfu");
    Value("--usage", &options_.usage,
          "Counts of chosen experts, used and brought up to date: a file, auto (MODEL/.coli_usage "
          "if it is there) or off")
        ->type_name("auto|off|FILE");
    Value("--route-trace", &options_.route_trace,
          "Write which experts were chosen and guessed, for colibri-bench replay")
        ->type_name("FILE");
  }

  bool SetDrafts(const std::string& text) {
    options_.draft_auto = text == "auto";
    options_.drafts = options_.draft_auto ? kMaxDrafts : 0;
    if (options_.draft_auto || text == "off") return true;
    if (text.size() != 1 || text[0] < '1' || text[0] > '0' + kMaxDrafts) return false;
    options_.drafts = text[0] - '0';
    return true;
  }

  bool SetResident(const std::string& text) {
    if (text == "auto") {
      options_.resident.reset();
    } else if (text == "all" || text == "none") {
      options_.resident = text == "all" ? UINT64_MAX : 0;
    } else {
      options_.resident = ParseSize(text);
      return options_.resident.has_value();
    }
    return true;
  }

  bool SetSlots(std::string text) {
    SlotsOption slots;
    slots.percent = text.ends_with('%');
    if (slots.percent) text.pop_back();
    const auto number = SplitNumber(text);
    if (!number || !number->second.empty() || number->first <= 0) return false;
    slots.value = number->first;
    if (slots.percent ? slots.value > 100
                      : slots.value != std::floor(slots.value) || slots.value > 1e9) {
      return false;
    }
    options_.slots = slots;
    return true;
  }

 public:
  bool no_loop_stop_ = false;

 private:
  CLI::App app_{"Answers the prompts of a file with a GLM model whose experts are read from disk.",
                "colibri-run"};
  RunOptions& options_;
  std::string group_;
  std::string input_format_ = "auto", thinking_ = "on";
};

void RefuseIf(bool nonsense, const std::string& why) {
  if (nonsense) throw UsageError(why);
}

void CheckMerge(FlagSet& flags, const RunOptions& options) {
  RefuseIf(options.input.empty() || options.input == "-",
           "--merge needs the prompt file of the run: -i FILE");
  RefuseIf(options.merge_files.empty(), "--merge: no outputs are given");
  RefuseIf(options.output.empty(), "-o: an empty name is no file");
  RefuseIf(options.overwrite && options.output == "-", "--overwrite is for an output file (-o)");
  const std::string ignored = flags.IgnoredByMerge();
  RefuseIf(!ignored.empty(), fmt::format("{} has no place in --merge", ignored));
}

// Going on, and shares of a file.
void CheckOutputs(const FlagSet& flags, const RunOptions& options) {
  RefuseIf(options.resume && options.output == "-",
           "--resume is for an output file (-o): standard output cannot be read again");
  RefuseIf(options.resume && options.overwrite,
           "--resume goes on in the output and --overwrite empties it: give one of them");
  RefuseIf(options.resume && options.output_format == OutputFormat::kText,
           "--resume: text output cannot be resumed, --output-format jsonl can");
  RefuseIf(options.retry_errors && !options.resume, "--retry-errors is for --resume");
  RefuseIf(options.strict && !flags.Given("--input"), "--strict is for a prompt file (-i)");
  RefuseIf(options.strict && options.input == "-",
           "--strict reads the prompts twice: it needs a file, not standard input");
  RefuseIf(options.mixed_targets, "--mixed-targets is for --merge");
  RefuseIf(!options.merge_files.empty(),
           fmt::format("{}: names without a flag are for --merge; prompts come from -i",
                       options.merge_files.empty() ? "" : options.merge_files.front()));
}

// Combinations of which one half would be ignored.
void CheckCombinations(FlagSet& flags, const RunOptions& options) {
  if (options.version) return;
  if (options.merge) return CheckMerge(flags, options);
  CheckOutputs(flags, options);
  RefuseIf(options.model.empty(), "-m is missing: the directory of the model");
  for (const std::string& directory : options.model) {
    RefuseIf(directory.empty(), "-m: an empty name is no directory");
  }
  const bool file = flags.Given("--input"), prompts = flags.Given("--prompt");
  RefuseIf(file && prompts, "-i and -p are given: prompts come from a file or the command line");
  RefuseIf(!file && !prompts && !options.plan, "nothing to do: give -i FILE or -p TEXT");
  RefuseIf(file && options.input.empty(), "-i: an empty name is no file");
  RefuseIf(options.output.empty(), "-o: an empty name is no file");
  RefuseIf(prompts && flags.Given("--input-format"), "--input-format is for -i, not for -p");
  const auto format = options.input_format ? options.input_format : FormatFromName(options.input);
  RefuseIf(options.raw && format == InputFormat::kJsonl,
           "--raw is for plain prompts: in jsonl the url of each line decides");
  RefuseIf(options.raw && (flags.Given("--thinking") || flags.Given("--effort")),
           "--raw uses no chat template: --thinking and --effort have no place in it");
  RefuseIf(file && options.input == options.output && options.input != "-",
           "-i and -o name the same file");
  RefuseIf(options.overwrite && options.output == "-", "--overwrite is for an output file (-o)");
  const bool off = flags.ThinkingName() == "off";
  RefuseIf(
      flags.Given("--thinking") && flags.Given("--effort") && off != (options.effort == "none"),
      fmt::format("--thinking {} contradicts --effort {}", flags.ThinkingName(), options.effort));
  for (const std::string& stop : options.stop) {
    RefuseIf(stop.empty(), "--stop: an empty text would end every answer at once");
  }
  RefuseIf(options.no_prediction && flags.Given("--calibrate"),
           "--calibrate measures and --no-prediction does not: give one of them");
  RefuseIf(options.no_prediction && flags.Given("--drive-speed"),
           "--drive-speed is for the prediction, which --no-prediction leaves out");
  RefuseIf(options.prefetch == OnOffAuto::kOff && flags.Given("--prefetch-depth"),
           "--prefetch off leaves nothing for --prefetch-depth");
  RefuseIf(options.io_depth > 0 && options.prefetch_depth > options.io_depth,
           "--prefetch-depth is a part of --io-depth and cannot exceed it");
  RefuseIf(options.max_rows > 0 && options.prefill_rows > options.max_rows,
           "--prefill-rows is a part of --max-rows and cannot exceed it");
  RefuseIf(options.ctx_size > 0 && options.max_tokens >= options.ctx_size,
           "--max-tokens leaves no room for a prompt within --ctx-size");
}

// What the flags say in words becomes what the options hold.
void Settle(FlagSet& flags, RunOptions* options) {
  if (flags.InputFormatName() == "jsonl") options->input_format = InputFormat::kJsonl;
  if (flags.InputFormatName() == "lines") options->input_format = InputFormat::kLines;
  options->loop_stop = !flags.no_loop_stop_;
  CheckCombinations(flags, *options);
  options->thinking = flags.ThinkingName() == "on" && options->effort != "none";
  // A line may still turn thinking on; then it gets the default effort.
  if (options->effort == "none") options->effort = "max";
}

}  // namespace

std::string NameVariables(
    std::string message, const std::vector<std::pair<std::string, std::string>>& from_environment) {
  const auto in_word = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_';
  };
  for (const auto& [flag, variable] : from_environment) {
    for (size_t at = 0; (at = message.find(flag, at)) != std::string::npos;) {
      const size_t end = at + flag.size();
      const bool whole = (at == 0 || !in_word(message[at - 1])) &&
                         (end == message.size() || !in_word(message[end]));
      if (whole) message.replace(at, flag.size(), variable);
      at += whole ? variable.size() : flag.size();
    }
  }
  return message;
}

std::optional<uint64_t> ParseSize(std::string_view text) {
  const auto number = SplitNumber(text);
  if (!number) return {};
  static const std::map<std::string_view, double> kUnits = {
      {"", 1},        {"B", 1},        {"kB", 1e3},     {"KB", 1e3},     {"K", 1e3},
      {"k", 1e3},     {"MB", 1e6},     {"M", 1e6},      {"GB", 1e9},     {"G", 1e9},
      {"TB", 1e12},   {"T", 1e12},     {"KiB", 0x1p10}, {"Ki", 0x1p10},  {"MiB", 0x1p20},
      {"Mi", 0x1p20}, {"GiB", 0x1p30}, {"Gi", 0x1p30},  {"TiB", 0x1p40}, {"Ti", 0x1p40}};
  const auto unit = kUnits.find(number->second);
  if (unit == kUnits.end()) return {};
  const double bytes = std::round(number->first * unit->second);
  // 2^53: up to there every whole number of bytes is exact.
  if (!(bytes <= 0x1p53)) return {};
  return static_cast<uint64_t>(bytes);
}

std::optional<int32_t> ParseTokens(std::string_view text) {
  const auto number = SplitNumber(text);
  if (!number || (!number->second.empty() && number->second != "k" && number->second != "K")) {
    return {};
  }
  const double tokens = number->first * (number->second.empty() ? 1 : 1024);
  if (tokens != std::floor(tokens) || tokens > std::numeric_limits<int32_t>::max()) return {};
  return static_cast<int32_t>(tokens);
}

ParsedCommandLine ParseRunCommandLine(const std::vector<std::string>& arguments) {
  RunOptions options;
  FlagSet flags(&options);
  options.from_environment = flags.FromEnvironment(arguments);
  if (arguments.empty() && options.from_environment.empty()) return {{}, 2, kUsage};
  const auto refused = [from = options.from_environment](const char* what) {
    return ParsedCommandLine{
        {}, 2, fmt::format("colibri-run: {}\n{}", NameVariables(what, from), kUsage)};
  };
  try {
    // CLI11 takes the arguments from the end of the vector.
    std::vector<std::string> reversed;
    for (size_t i = arguments.size(); i-- > 0;) {
      const bool bare = arguments[i] == "--direct" &&
                        (i + 1 == arguments.size() || arguments[i + 1].starts_with("-"));
      reversed.push_back(bare ? "--direct=on"
                              : arguments[i]);  // an option with a choice, or a flag
    }
    flags.App().parse(std::move(reversed));
    Settle(flags, &options);
    return {std::move(options), 0, {}};
  } catch (const CLI::CallForHelp&) {
    return {{}, 0, flags.App().help()};
  } catch (const CLI::ParseError& error) {
    return refused(error.what());
  } catch (const UsageError& error) {
    return refused(error.what());
  }
}

}  // namespace colibri
