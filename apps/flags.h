// The command line of colibri-run: every flag, its COLIBRI_ environment variable, the help, and the
// refusal of combinations that make no sense. Opens nothing and asks the machine nothing.
// Threads: pure functions (the environment is read).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/draft_counts.h"
#include "runtime/line_source.h"
#include "runtime/manifest.h"

namespace colibri {

enum class OutputFormat : uint8_t { kAuto, kText, kJsonl };
enum class ProgressFormat : uint8_t { kAuto, kBar, kPlain, kJson, kOff };
enum class OnOffAuto : uint8_t { kAuto, kOn, kOff };
enum class IoChoice : uint8_t { kAuto, kUring, kPread };

// Expert slots: by number, or as a percentage of the experts of each class.
struct SlotsOption {
  bool percent = false;
  double value = 0;
};

struct RunOptions {
  // Model. Directories are searched for shards in this order; the first holds config and tokenizer.
  std::vector<std::string> model;
  int32_t ctx_size = 0;  // 0: the lesser of 4096 and the model's positions

  // Prompts: `input` or `prompts`.
  std::string input;  // "-": standard input; "": none
  std::vector<std::string> prompts;
  std::optional<InputFormat> input_format;  // nullopt: auto
  bool raw = false, parse_special = false;
  bool strict = false;  // every line is checked before the model is loaded

  // Answers.
  std::string output = "-";
  OutputFormat output_format = OutputFormat::kAuto;
  bool overwrite = false;
  bool resume = false, retry_errors = false;  // retry_errors: with resume
  bool ordered = false;                       // answers in the order of the prompts
  ProgressFormat progress = ProgressFormat::kAuto;

  // Several machines. With `merge` nothing is generated: outputs are put together.
  LineShard shard;
  bool merge = false, mixed_targets = false;
  std::vector<std::string> merge_files;

  // Sampling; unset: generation_config.json, then temperature 1 and no cuts.
  std::optional<float> temperature, top_p, min_p;
  std::optional<int32_t> top_k;
  uint64_t seed = 0;
  int32_t max_tokens = 0;  // 0: the room left in the context
  std::vector<std::string> stop;
  bool thinking = true;
  std::string effort = "max";
  bool loop_stop = true;

  // Memory; bytes. nullopt: the plan decides. resident: all is UINT64_MAX, none 0.
  std::optional<uint64_t> ram, kv_ram, resident;
  std::optional<SlotsOption> slots;
  bool kv_ram_all = false;  // nothing of it goes to the drive
  std::string kv_dir;       // "": beside the output, else the current directory

  // The pipeline. 0: the plan or the machine decides.
  bool dense_attention = false;
  int32_t threads = 0, frames = 1, max_rows = 0, max_seqs = 0, prefill_rows = 0;
  IoChoice io = IoChoice::kAuto;
  int32_t io_depth = 0;
  uint64_t io_limit = 0;  // bytes a second; 0: none
  OnOffAuto direct = OnOffAuto::kAuto, prefetch = OnOffAuto::kAuto;
  int32_t prefetch_depth = 0;
  int32_t drafts = kMaxDrafts;  // most of a sequence
  bool draft_auto = true;       // a governor says how many
  std::string cache_policy = "auto";
  std::string usage = "auto";  // auto, off or a file
  std::string route_trace;     // file; "": none
  bool f32_activations = false;
  bool f32_kv = false;

  // The prediction.
  bool calibrate = false, no_prediction = false;
  uint64_t drive_speed = 0;  // bytes a second; 0: measured, or known from an earlier run

  bool plan = false, version = false;

  // Flags that the command line does not give and a variable does: ("--ram", "COLIBRI_RAM").
  std::vector<std::pair<std::string, std::string>> from_environment;
};

// What to do: run with `options`, or print `text` (to standard output if the exit code is 0, else
// to standard error) and exit.
struct ParsedCommandLine {
  std::optional<RunOptions> options;
  int exit_code = 0;
  std::string text;
};

// arguments: without the program's name. Exit code 0: --help; 2: no arguments, or an error, which
// `text` names.
ParsedCommandLine ParseRunCommandLine(const std::vector<std::string>& arguments);

// `message` with the variable in place of each flag that it set, so that an error names what is to
// be changed.
std::string NameVariables(std::string message,
                          const std::vector<std::pair<std::string, std::string>>& from_environment);

// Bytes: "16GB" (10^9), "16GiB" (2^30), "4.5G", "1048576"; nullopt when it is no size.
std::optional<uint64_t> ParseSize(std::string_view text);
// Tokens: "4096", "4k" (k = 1024), "1.5k"; nullopt when it is no whole number of them.
std::optional<int32_t> ParseTokens(std::string_view text);

}  // namespace colibri
