// colibri-bench: measures and checks. Each subcommand is a function in bench/.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/flags.h"
#include "apps/process.h"
#include "apps/run.h"
#include "apps/say.h"
#include "apps/setup.h"
#include "bench/drafts.h"
#include "bench/fixture.h"
#include "bench/io_bench.h"
#include "bench/kernels_bench.h"
#include "bench/make_model.h"
#include "bench/pipeline.h"
#include "bench/quality.h"
#include "bench/replay.h"
#include "bench/tokenize.h"
#include "io/error.h"
#include "runtime/prompt_source.h"

namespace colibri {
namespace {

// Natural openings: repetitive made-up prompts overstate cache hits.
const std::vector<std::string>& NaturalPrompts() {
  static const std::vector<std::string> kPrompts = {
      "Once upon a time there was a miller who had three sons, and when he died",
      "The detective put down his pipe and looked at the letter for a long while before",
      "It was late in the autumn, and the road over the moor had been washed away, so",
      "\"You will never guess what I found in the garden,\" said the youngest of them,",
      "The ship had been eleven days out of Bristol when the wind dropped and",
      "My aunt, who disapproved of most things, disapproved especially of",
      "In the middle of the forest stood a house with a green door, and nobody knew",
      "The train was two hours late, which gave me time to consider"};
  return kPrompts;
}

// Sizes as colibri-run reads them, where GB is 10^9 bytes.
CLI::Validator SizeValue() {
  const auto to_bytes = [](std::string& text) {
    const std::optional<uint64_t> bytes = ParseSize(text);
    if (!bytes) return fmt::format("{} is not a size such as 64MiB", text);
    text = std::to_string(*bytes);
    return std::string();
  };
  return {to_bytes, "SIZE"};
}

struct PipelineFlags {
  int32_t prompts = 8, tokens = 32, prompt_tokens = 0;
  std::vector<int32_t> sequences;
  bool warm = false, alone = true;
  std::string trace, routes, text;
  bool json = false, csv = false, markdown = false;
};

// Flags of colibri-run that the pipeline takes beside its own. Those about prompts, answers and
// their order mean nothing here and are refused.
constexpr auto kRunFlags = std::to_array<std::string_view>(
    {"-m",         "--model",        "--ctx-size",  "--ram",        "--slots",
     "--resident", "--kv-ram",       "--kv-dir",    "--kv",         "--threads",
     "--max-rows", "--prefill-rows", "--max-seqs",  "--frames",     "--io",
     "--direct",   "--io-depth",     "--io-limit",  "--prefetch",   "--prefetch-depth",
     "--draft",    "--cache-policy", "--attention", "--activations"});

RunOptions RunOptionsOf(std::vector<std::string> arguments) {
  for (const std::string& argument : arguments) {
    const std::string name = argument.substr(0, argument.find('='));
    if (name.starts_with("-") &&
        std::find(kRunFlags.begin(), kRunFlags.end(), name) == kRunFlags.end()) {
      throw UsageError(fmt::format("pipeline: {} has no meaning here", name));
    }
  }
  arguments.insert(arguments.end(), {"-p", "-"});
  ParsedCommandLine line = ParseRunCommandLine(arguments);
  if (!line.options) throw UsageError(line.text);
  return *line.options;
}

std::vector<std::vector<int32_t>> PromptsOf(const PipelineFlags& flags,
                                            const Tokenizer& tokenizer) {
  std::vector<std::string> texts = NaturalPrompts();
  if (!flags.text.empty()) {
    std::ifstream file(flags.text);
    if (!file) throw IoError(fmt::format("{}: cannot be read", flags.text));
    texts.clear();
    for (std::string line; std::getline(file, line);) {
      if (!line.empty()) texts.push_back(line);
    }
    if (texts.empty()) throw IoError(fmt::format("{}: has no prompts", flags.text));
  }
  std::vector<std::vector<int32_t>> prompts;
  const int32_t count = flags.sequences.empty()
                            ? flags.prompts
                            : *std::max_element(flags.sequences.begin(), flags.sequences.end());
  for (int32_t i = 0; i < count; ++i) {
    const std::string& text = texts[static_cast<size_t>(i) % texts.size()];
    auto ids = tokenizer.Encode("[gMASK]<sop>", AddedTokens::kRecognise);
    const auto more = tokenizer.Encode(text, AddedTokens::kPlain);
    ids.insert(ids.end(), more.begin(), more.end());
    if (flags.prompt_tokens > 0) {
      ids.resize(std::min(ids.size(), static_cast<size_t>(flags.prompt_tokens)));
    }
    prompts.push_back(std::move(ids));
  }
  return prompts;
}

// What is run is known to the token.
void PlanForPrompts(const std::vector<std::vector<int32_t>>& prompts, int32_t tokens,
                    PlanRequest* request) {
  uint64_t all = 0, longest = 0;
  for (const auto& ids : prompts) {
    all += ids.size();
    longest = std::max<uint64_t>(longest, ids.size());
  }
  const double mean = static_cast<double>(all) / static_cast<double>(prompts.size());
  request->answers = prompts.size();
  request->prompt_tokens = all;
  request->most_tokens = static_cast<int32_t>(longest) + tokens;
  request->held_tokens = static_cast<int32_t>(mean) + tokens / 2;
  request->rows_per_token = 1 + mean / tokens;
  request->logprobs = false;
}

int Pipeline(const PipelineFlags& flags, const std::vector<std::string>& rest) {
  const RunOptions run = RunOptionsOf(rest);
  Model model(run.model);
  if (run.dense_attention) model.DropIndexer();
  model.SetInt8Activations(!run.f32_activations);
  model.MutableConfig()
      .stop_ids.clear();  // a fixed number of tokens: short answers measure nothing
  const Tokenizer tokenizer = Tokenizer::Load(run.model.front() + "/tokenizer.json");
  PipelineOptions options;
  options.prompts = PromptsOf(flags, tokenizer);
  PlanRequest request = PlanRequestOf(run);
  PlanForPrompts(options.prompts, flags.tokens, &request);
  options.plan = MakePlan(model, request);
  fmt::print(stderr, "{}\n", options.plan.Line());
  options.engine = EngineOptionsOf(run, options.plan);
  options.tokens = flags.tokens;
  options.sequences = flags.sequences;
  options.warm = flags.warm;
  options.compute_alone = flags.alone;
  options.trace = flags.trace;
  options.routes = flags.routes;
  OpenFiles(run, options.plan, model, &options.engine);
  options.open_reader = [&] { return OpenReader(run, model); };
  options.format = flags.json       ? TableFormat::kJson
                   : flags.csv      ? TableFormat::kCsv
                   : flags.markdown ? TableFormat::kMarkdown
                                    : TableFormat::kText;
  model.LoadDense(options.plan.resident);
  return RunPipeline(model, tokenizer, options);
}

void AddMakeModelFlags(CLI::App* sub, MakeModelOptions* make, std::string* expert_format,
                       std::string* dense_format) {
  SyntheticModel& m = make->model;
  sub->add_option("out", make->out, "Folder to write; must be new or empty")->required();
  // Parsed before the others are stored, which therefore override it wherever it stands.
  sub->add_option_function<std::string>(
         "--preset", [make](const std::string& name) { make->model = PresetModel(name); },
         "Dimensions of tiny (tens of MB), mid (real shapes, 22 GB) or thin (real attention, "
         "narrow "
         "experts); other flags override")
      ->check(CLI::IsMember({"tiny", "mid", "thin"}))
      ->trigger_on_parse();
  const auto dim = [&](const char* name, int32_t* value, const char* help) {
    sub->add_option(name, *value, help)->check(CLI::Range(0, 1 << 24))->capture_default_str();
  };
  dim("--layers", &m.layers, "Layers, the MTP layer not counted");
  dim("--dense-layers", &m.dense_layers, "Of those, leading dense ones");
  dim("--experts", &m.experts, "Routed experts a layer");
  dim("--top-k", &m.top_k, "Experts a token");
  dim("--shared-experts", &m.shared_experts, "Shared experts");
  dim("--hidden", &m.hidden, "Hidden size");
  dim("--intermediate", &m.intermediate, "Width of a dense FFN");
  dim("--moe-intermediate", &m.moe_intermediate, "Width of an expert");
  dim("--heads", &m.heads, "Attention heads");
  dim("--q-lora", &m.q_lora, "Rank of the query latent");
  dim("--kv-lora", &m.kv_lora, "Rank of the key-value latent");
  dim("--nope", &m.nope, "Head dimensions without rotation");
  dim("--rope", &m.rope, "Head dimensions with rotation");
  dim("--v-head", &m.v_head, "Value dimensions of a head");
  dim("--index-heads", &m.index_heads, "Indexer heads");
  dim("--index-dim", &m.index_dim, "Indexer head dimensions");
  dim("--index-topk", &m.index_top_k, "Positions the indexer keeps");
  dim("--vocab", &m.vocab, "Vocabulary");
  dim("--max-positions", &m.max_positions, "Positions");
  sub->add_option("--expert-format", *expert_format, "int4-g64, int4-row or int8");
  sub->add_option("--dense-format", *dense_format, "int4-g64, int4-row or int8");
  sub->add_flag("!--no-mtp", m.mtp, "Leave the MTP layer out");
  sub->add_flag("!--no-indexer", m.indexer, "Leave the indexer out");
  sub->add_option("--shard-bytes", m.shard_bytes, "Size at which a shard ends")
      ->transform(SizeValue());
  sub->add_option("--seed", m.seed, "Seed of the weights");
  sub->add_flag("--holes", m.holes, "Zeros that take no room on the drive in place of weights");
  sub->add_option("--tokenizer-from", m.tokenizer_from, "Model folder whose tokenizer is copied")
      ->required();
  sub->add_flag("--quiet", make->quiet, "Do not list the shards");
  sub->add_flag("!--no-check", make->check, "Do not measure what the routing reaches");
}

void AddFormatFlags(CLI::App* sub, TableFormat* to) {
  const auto format = [sub, to](const char* flag, TableFormat value, const char* text) {
    sub->add_flag_callback(
        flag, [to, value] { *to = value; }, text);
  };
  format("--json", TableFormat::kJson, "Print JSON");
  format("--csv", TableFormat::kCsv, "Print CSV");
  format("--markdown", TableFormat::kMarkdown, "Print a Markdown table");
}

void AddKernelsFlags(CLI::App* sub, KernelsOptions* o, int* code) {
  sub->add_option("--format", o->formats,
                  "int4-g32, int4-g64, int4-g128, int4-row, int8-row, bf16, f32")
      ->delimiter(',');
  sub->add_option("--activations", o->activations, "int8, int8x2 (two planes), f32")
      ->delimiter(',')
      ->check(CLI::IsMember({"int8", "int8x2", "f32"}));
  sub->add_option("--target", o->targets, "SIMD targets (default: the best)")->delimiter(',');
  sub->add_option("--rows", o->rows, "Rows of activations")
      ->delimiter(',')
      ->check(CLI::Range(1, 4096));
  sub->add_option("--shape", o->shapes, "OUTPUTSxINPUTS")->delimiter(',');
  sub->add_option("--threads", o->threads, "Threads, of the loops as well")
      ->check(CLI::Range(1, 1024));
  sub->add_option("--repetitions", o->repetitions, "The medians are of so many")
      ->check(CLI::Range(1, 1000));
  sub->add_option("--bytes", o->bytes, "Of weights that take turns")->transform(SizeValue());
  sub->add_flag("!--no-attention", o->attention, "Products only");
  AddFormatFlags(sub, &o->format);
  sub->callback([o, code] { *code = RunKernels(*o); });
}

void AddIoFlags(CLI::App* sub, IoBenchOptions* o, int* code) {
  const auto list = [sub](const char* flag, auto* values, const char* help) {
    return sub->add_option(flag, *values, help)->delimiter(',')->capture_default_str();
  };
  CLI::Option* model = sub->add_option("-m,--model", o->model, "Model folder; again for further");
  CLI::Option* file = sub->add_option("--file", o->file, "Any file instead of a model's experts");
  file->excludes(model);
  sub->add_option("--piece", o->piece, "Bytes of the file that are read as one expert")
      ->transform(SizeValue())
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 30));
  list("--depth", &o->depths, "Segments in flight")->check(CLI::Range(1, 1024));
  list("--backend", &o->backends, "uring, pread")->check(CLI::IsMember({"uring", "pread"}));
  list("--reads", &o->reads, "direct, buffered")->check(CLI::IsMember({"direct", "buffered"}));
  list("--order", &o->orders, "file, random")->check(CLI::IsMember({"file", "random"}));
  sub->add_option("--bytes", o->bytes, "Read for each figure, over all repetitions")
      ->transform(SizeValue());
  sub->add_option("--repetitions", o->repetitions, "The medians are of so many")
      ->check(CLI::Range(1, 1000));
  AddFormatFlags(sub, &o->format);
  sub->callback([o, code] {
    if (o->model.empty() && o->file.empty()) throw UsageError("io: -m or --file is needed");
    *code = RunIoBench(*o);
  });
}

void AddReplayFlags(CLI::App* sub, ReplayOptions* o, int* code) {
  sub->add_option("trace", o->trace, "Route trace (--route-trace of pipeline and colibri-run)")
      ->required();
  sub->add_option("--slots", o->slots, "Sizes of the cache: N or N% of the experts of each size")
      ->delimiter(',');
  sub->add_option("--policy", o->policies, "lru, slru, lfu, sweep, belady (default: all)")
      ->delimiter(',');
  sub->add_option("--usage", o->usage, "Counts of earlier runs, known from the start");
  sub->add_flag("--guesses", o->guesses, "Recall and waste of the ways to guess, not the policies");
  AddFormatFlags(sub, &o->format);
  sub->callback([o, code] { *code = RunReplay(*o); });
}

void AddDraftsFlags(CLI::App* sub, DraftsOptions* o, int* code) {
  sub->add_option("-m,--model", o->model, "Model folder; again for further ones")
      ->required()
      ->allow_extra_args(false);  // or it would take the file
  sub->add_option("file", o->file, "Continuations: .jsonl with prompt_ids and greedy_ids a line")
      ->required();
  sub->add_option("--kind", o->kinds, "Only lines of these kinds")->delimiter(',');
  sub->add_option("--depth", o->depth, "Drafts a position")->check(CLI::Range(1, 16));
  sub->add_option("--reference", o->reference, "A reference.json to print beside")
      ->check(CLI::ExistingFile);
  const auto choice = [sub](const char* flag, const std::vector<std::string>& values,
                            const char* help, const std::function<void(bool first)>& set) {
    sub->add_option_function<std::string>(
           flag, [values, set](const std::string& value) { set(value == values[0]); }, help)
        ->check(CLI::IsMember(values));
  };
  choice("--activations", {"auto", "f32"}, "auto (int8 where taken) or f32",
         [o](bool first) { o->int8 = first; });
  choice("--kv", {"bf16", "f32"}, "bf16 or f32",
         [o](bool first) { o->kv = first ? KvType::kBF16 : KvType::kF32; });
  choice("--attention", {"auto", "dense"}, "auto or dense",
         [o](bool first) { o->dense_attention = !first; });
  sub->add_option("--rows", o->rows, "Rows a frame")->check(CLI::Range(1, 4096));
  sub->add_option("--threads", o->threads, "Threads (default: the machine's)")
      ->check(CLI::Range(1, 1024));
  AddFormatFlags(sub, &o->format);
  sub->callback([o, code] { *code = RunDrafts(*o); });
}

int Run(int argc, char** argv) {
  CLI::App app("Measures and checks colibri.", "colibri-bench");
  app.require_subcommand(1);
  int code = 0;

  VerifyOptions verify;
  CLI::App* sub = app.add_subcommand("verify", "Run fixture folders and compare every tensor");
  sub->add_option("folders", verify.directories, "Fixture folders")->required();
  sub->add_flag("--json", verify.json, "Print JSON");
  sub->callback([&] { code = RunVerify(verify); });

  TokenizeOptions tokenize;
  sub = app.add_subcommand("tokenize", "Text to ids and back, or a cases file; loading time");
  sub->add_option("-m,--model", tokenize.model_dir_or_tokenizer_json,
                  "Model folder or tokenizer.json");
  sub->add_option("file", tokenize.file, "Text file (default: standard input)");
  sub->add_option("--cases", tokenize.cases, "A cases.jsonl of the tokenizer or the chat template");
  sub->add_flag("--plain", tokenize.plain, "Recognise no added tokens");
  sub->add_flag("--json", tokenize.json, "Print JSON");
  sub->add_option("--generate-merges", tokenize.generate_merges,
                  "Load a made-up tokenizer with this many merges");
  sub->callback([&] { code = RunTokenize(tokenize); });

  QualityOptions quality;
  std::string kv = "both", attention = "auto", activations = "both";
  sub = app.add_subcommand("quality", "Perplexity of text or id files, settings side by side");
  sub->add_option("-m,--model", quality.model, "Model folder; again for further ones")
      ->required()
      ->allow_extra_args(false);  // or it would take the files
  sub->add_option("files", quality.files, "Text files, or .jsonl files of id windows")->required();
  sub->add_option("--activations", activations, "auto (int8 where taken), f32 or both")
      ->check(CLI::IsMember({"auto", "f32", "both"}));
  sub->add_option("--reference", quality.reference, "A reference.json to print beside")
      ->check(CLI::ExistingFile);
  sub->add_option("--kv", kv, "bf16, f32 or both")->check(CLI::IsMember({"bf16", "f32", "both"}));
  sub->add_option("--attention", attention, "auto or dense")
      ->check(CLI::IsMember({"auto", "dense"}));
  sub->add_option("--window", quality.window, "Ids a window of a text file")
      ->check(CLI::Range(8, 1 << 20));
  sub->add_option("--max-windows", quality.max_windows, "At most so many windows");
  sub->add_option("--rows", quality.rows, "Rows a frame")->check(CLI::Range(1, 4096));
  sub->add_option("--threads", quality.threads, "Threads (default: the machine's)");
  sub->add_flag("--json", quality.json, "Print JSON");
  sub->callback([&] {
    if (kv == "bf16") quality.kv = {KvType::kBF16};
    if (kv == "f32") quality.kv = {KvType::kF32};
    if (activations != "both") quality.int8 = {activations == "auto"};
    quality.dense_attention = attention == "dense";
    code = RunQuality(quality);
  });

  std::string dump = "mermaid";
  sub = app.add_subcommand("graph", "The flow graph as it is wired");
  sub->add_option("--dump", dump, "mermaid or dot")->capture_default_str();
  sub->callback([&] { fmt::print("{}", GraphPicture(dump)); });

  PipelineFlags pipeline;
  CLI::App* pipe = app.add_subcommand(
      "pipeline", "Run prompts and show where the time goes: -m DIR and the flags below");
  pipe->footer(fmt::format("As in colibri-run: {}", fmt::join(kRunFlags, " ")));
  pipe->add_option("--prompts", pipeline.prompts, "How many prompts")->check(CLI::Range(1, 100000));
  pipe->add_option("--tokens", pipeline.tokens, "Tokens generated for each")
      ->check(CLI::Range(1, 1 << 20));
  pipe->add_option("--text", pipeline.text, "File of prompts, one a line (default: built-in ones)");
  pipe->add_option("--prompt-tokens", pipeline.prompt_tokens, "Of each prompt, at most so many")
      ->check(CLI::Range(1, 1 << 20));
  CLI::Option* sequences =
      pipe->add_option("--sequences", pipeline.sequences,
                       "Runs with so many prompts at once each, compared in one table")
          ->delimiter(',')
          ->check(CLI::Range(1, 100000));
  sequences->excludes(pipe->get_option("--prompts"));
  pipe->add_flag("--warm", pipeline.warm,
                 "Run the prompts twice and show the second time, when the cache is warm");
  pipe->add_flag("!--no-alone", pipeline.alone, "Do not measure computing alone");
  // One file holds one run.
  pipe->add_option("--trace", pipeline.trace, "Write a Chrome trace (Perfetto opens it)")
      ->excludes(sequences);
  pipe->add_option("--route-trace", pipeline.routes,
                   "Write which experts were chosen and guessed, for replay")
      ->excludes(sequences);
  pipe->add_flag("--json", pipeline.json, "Print JSON");
  pipe->add_flag("--csv", pipeline.csv, "Print CSV");
  pipe->add_flag("--markdown", pipeline.markdown, "Print a Markdown table");
  pipe->allow_extras();
  pipe->callback([&] { code = Pipeline(pipeline, pipe->remaining()); });

  KernelsOptions kernels;
  AddKernelsFlags(app.add_subcommand("kernels",
                                     "Products and attention beside plain loops of "
                                     "reads and arithmetic in the same run"),
                  &kernels, &code);

  IoBenchOptions io;
  AddIoFlags(
      app.add_subcommand("io", "The drive, read as the engine reads it, beside a plain loop"), &io,
      &code);

  ReplayOptions replay;
  AddReplayFlags(
      app.add_subcommand("replay", "Cache policies and guesses on a recorded route trace"), &replay,
      &code);

  DraftsOptions drafts;
  AddDraftsFlags(app.add_subcommand("drafts", "How many drafts stored continuations accept"),
                 &drafts, &code);

  MakeModelOptions make;
  std::string expert_format = "int4-g64", dense_format = "int4-g64";
  sub = app.add_subcommand("make-model", "Write a synthetic model in the container's layout");
  AddMakeModelFlags(sub, &make, &expert_format, &dense_format);
  sub->callback([&] {
    make.model.expert_format = ParseSyntheticFormat(expert_format);
    make.model.dense_format = ParseSyntheticFormat(dense_format);
    code = RunMakeModel(make);
  });

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    const int status = app.exit(e);
    return status == 0 ? 0 : 2;
  }
  return code;
}

}  // namespace
}  // namespace colibri

int main(int argc, char** argv) {
  const colibri::ClosedStreams closed = colibri::PrepareProcess();
  return colibri::WithExitCodes("colibri-bench", [&] {
    if (closed.output) throw colibri::IoError("standard output is closed");
    const int code = colibri::Run(argc, argv);
    colibri::Print("");  // what fmt::print left in the buffer
    return code;
  });
}
