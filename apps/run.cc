#include "apps/run.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "apps/answers.h"
#include "apps/calibrate.h"
#include "apps/line_options.h"
#include "apps/process.h"
#include "apps/progress.h"
#include "apps/prompt_sample.h"
#include "apps/say.h"
#include "apps/setup.h"
#include "apps/signals.h"
#include "apps/summary.h"
#include "apps/usage.h"
#include "graph/engine.h"
#include "io/check.h"
#include "io/error.h"
#include "kernels/kernels.h"
#include "runtime/deliverer.h"
#include "runtime/fingerprint.h"
#include "runtime/manifest.h"
#include "runtime/ordered_release.h"
#include "runtime/plan.h"
#include "runtime/prompt_source.h"
#include "runtime/tally.h"

namespace colibri {
namespace {

constexpr const char* kVersion = "0.1.0";

// A file descriptor that closes itself, unless it is a standard stream.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ > 2) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int Get() const { return fd_; }

 private:
  int fd_ = -1;
};

Descriptor OpenInput(const RunOptions& o) {
  if (o.input.empty()) return {};
  if (o.input == "-") return Descriptor(STDIN_FILENO);
  const int fd = open(o.input.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw IoError(fmt::format("{}: {}", o.input, Reason(errno)));
  struct stat info {};
  if (fstat(fd, &info) == 0 && S_ISDIR(info.st_mode)) {
    close(fd);
    throw IoError(fmt::format("{}: is a directory, a file of prompts was expected", o.input));
  }
  return Descriptor(fd);
}

std::string ModelName(const std::string& directory) {
  std::filesystem::path path(directory);
  path = std::filesystem::weakly_canonical(path);
  // A folder called "model" says less than the one it is in.
  return path.filename() == "model" ? path.parent_path().filename().string()
                                    : path.filename().string();
}

std::string RunId(int64_t created) {
  return fmt::format("{:x}{:x}", created, static_cast<unsigned>(getpid()));
}

bool WantsText(const RunOptions& o) {
  if (o.output_format != OutputFormat::kAuto) return o.output_format == OutputFormat::kText;
  return !o.prompts.empty() || (o.output == "-" && isatty(STDOUT_FILENO) != 0);
}

RecordContext ContextOf(const RunOptions& o, const Tokenizer& tokenizer) {
  RecordContext context;
  context.tokenizer = &tokenizer;
  context.model = ModelName(o.model.front());
  context.created = std::chrono::duration_cast<std::chrono::seconds>(
                        std::chrono::system_clock::now().time_since_epoch())
                        .count();
  context.run_id = RunId(context.created);
  context.simd_target = SimdTarget();
  context.engine_version = kVersion;
  return context;
}

Manifest ManifestOf(const RunOptions& o, const Model& model, const Plan& plan,
                    const RecordContext& context) {
  Manifest manifest;
  manifest.options = LineOptions(o, model.Config().generation, plan.context);
  manifest.shard = o.shard;
  manifest.simd_target = context.simd_target;
  manifest.model = ModelFingerprint(model.Files());
  manifest.engine_version = context.engine_version;
  manifest.run_id = context.run_id;
  return manifest;
}

// With a name or flag that says jsonl --raw is refused; the first character comes too late for
// that.
void SayFormat(InputFormat format, bool raw) {
  const bool jsonl = format == InputFormat::kJsonl;
  Say(fmt::format(
      "input: {}{}", jsonl ? "jsonl" : "lines",
      jsonl && raw ? "; --raw has no meaning there, the url of each line decides" : ""));
}

PromptSource::Options SourceOptionsOf(const RunOptions& o, int input, const std::string& name) {
  PromptSource::Options options;
  options.fd = input;
  options.format = GivenFormat(o);
  const auto say = [raw = o.raw](InputFormat format) { SayFormat(format, raw); };
  if (options.format && input >= 0) say(*options.format);
  options.prompts = o.prompts;
  options.on_format = say;
  options.our_model = name;
  options.on_other_model = [name](const std::string& asked) {
    Say(fmt::format("lines ask for model \"{}\": {} answers", asked, name));
  };
  return options;
}

// What a run has opened and checked before the weights are read.
struct Job {
  const RunOptions& options;
  Model& model;
  const Tokenizer& tokenizer;
  const Plan& plan;
  int input = -1;
  bool text = false;
  RecordContext context;
  Answers answers;
  std::optional<PromptSurvey> survey;
};

// The tally of records as the output thread writes them, for whoever looks meanwhile.
class SharedTally {
 public:
  void Add(const LineOutcome& line) {
    const std::lock_guard lock(mutex_);
    tally_.Add(line);
  }
  Tally Get() const {
    const std::lock_guard lock(mutex_);
    return tally_;
  }
  std::pair<uint64_t, uint64_t> Written() const {
    const std::lock_guard lock(mutex_);
    return {tally_.Lines(), tally_.Failed()};
  }

 private:
  mutable std::mutex mutex_;
  Tally tally_;  // guarded by mutex_
};

// Lines that are still to be taken in and run; nullopt: unknown, as on a pipe.
std::function<std::optional<double>(uint64_t lines_read)> UnreadOf(const Job& job,
                                                                   const PromptSource& source) {
  if (job.survey && job.survey->whole) {
    return [lines = job.survey->lines](uint64_t read) {
      return std::optional(static_cast<double>(lines - std::min(lines, read)));
    };
  }
  const off_t start = job.input < 0 ? 0 : lseek(job.input, 0, SEEK_CUR);
  return [&source, start, input = job.input, records = job.answers.done_before,
          shards = job.options.shard.count](uint64_t) -> std::optional<double> {
    struct stat info {};
    if (fstat(input, &info) != 0 || !S_ISREG(info.st_mode)) return std::nullopt;
    const PromptSource::Taken taken = source.TakenSoFar();
    const auto size = static_cast<uint64_t>(std::max<off_t>(0, info.st_size - start));
    return GuessUnread(
        {size, taken.bytes, taken.lines, records - std::min(records, taken.records), shards});
  };
}

// After the last sweep: what is to be said, and the exit code.
int Conclude(Job& job, OutputWriter& writer, const PromptSource& source, const LineFilter& filter,
             const Engine& engine, const Deliverer& deliverer, const SharedTally& shared,
             bool interrupted) {
  const OutputWriter::State state = writer.Finish();
  const Tally tally = shared.Get();
  if (tally.Lines() > 0 || deliverer.Tokens() > 0) {
    const EngineStats stats = engine.Stats();
    SayPart(LinesSummary(tally, deliverer.Tokens(), stats.seconds) +
            PredictionSummary(job.plan, deliverer.Tokens(), stats.seconds) +
            MachineSummary(stats, job.plan));
  } else if (!interrupted && state == OutputWriter::State::kOk && source.Error().empty() &&
             filter.Changed() == 0) {
    Say(job.answers.done_before > 0 ? "nothing left to do: every line has its record"
                                    : "0 prompts");
  }
  if (filter.Changed() > 1) Say(fmt::format("{} lines were changed", filter.Changed()));
  if (state == OutputWriter::State::kFailed) throw IoError(writer.Error());
  if (state == OutputWriter::State::kReaderGone) return 141;
  if (job.answers.run.file) {
    if (const std::string note = job.answers.run.file->KeepNamed(); !note.empty()) Say(note);
  }
  if (!source.Error().empty()) throw IoError(source.Error());
  if (interrupted) {
    if (job.answers.records) Say(fmt::format("{}: --resume goes on", job.options.output));
    return 130;
  }
  SortAnswers(job.options, job.answers);
  const bool all_fine =
      tally.Failed() == 0 && job.answers.failed_before == 0 && filter.Changed() == 0;
  return all_fine ? 0 : 1;
}

// A trace that could not be written ends nothing: the answers are what the run is for.
void FinishRoutes(RouteTraceWriter& routes) {
  try {
    routes.Finish();
  } catch (const IoError& e) {
    Say(e.what());
  }
}

// The parts of a run, built in the order they are torn down in reverse. Longer than 60 lines, since
// they point at each other.
int Generate(Job job, Signals& signals) {
  const RunOptions& o = job.options;
  RequestDefaults defaults = MakeRequestDefaults(o, job.model.Config().generation);
  const bool stream = job.text && o.prompts.size() == 1;
  defaults.keep_prompt_text = job.text && !stream;
  RequestParser parser(job.tokenizer, job.model.Config().vocab, job.plan.context, defaults);
  LineFilter filter(o.shard, std::move(job.answers.run.finished),
                    [said = false](const ChangedLine& changed) mutable {
                      if (!std::exchange(said, true)) {
                        Say(fmt::format("{}: its record stays, it is not run", changed.what));
                      }
                    });
  PromptSource::Options source_options = SourceOptionsOf(o, job.input, job.context.model);
  source_options.filter = &filter;
  std::optional<OrderedRelease> ordered;
  source_options.on_taken = [&ordered](uint64_t line) {
    if (ordered) ordered->Expect(line);
  };
  PromptSource source(std::move(source_options), parser);

  job.model.LoadDense(job.plan.resident);
  UsageCounts usage(o, job.model);
  std::optional<RouteTraceWriter> routes;
  EngineOptions engine_options = EngineOptionsOf(o, job.plan);
  engine_options.heat = usage.Heat(std::min(job.plan.sequences, job.plan.rows));
  if (!o.route_trace.empty()) engine_options.routes = &routes.emplace(o.route_trace, job.model);
  OpenFiles(o, job.plan, job.model, &engine_options);
  Engine engine(job.model, job.tokenizer, engine_options, OpenReader(o, job.model), source);
  Say(fmt::format("mode: {} threads, {}, {}, {} reads, prefetch {}", job.plan.threads, SimdTarget(),
                  engine.ReaderName(), ReadsText(job.model.Files().Files()),
                  Prefetches(o, job.plan) ? "on" : "off"));
  if (o.drafts > 0 && !job.plan.resident.mtp) {
    Say(fmt::format("drafts by prompt lookup alone: {}",
                    job.plan.mtp_outweighed
                        ? "here the MTP layer is not thought to gain; --draft N makes it"
                        : "the model has no MTP layer"));
  }
  SharedTally tally;
  OutputWriter::Options writer_options;
  OutputWriter* writer_pointer = nullptr;
  writer_options.fd = job.answers.Fd();
  if (o.output != "-") writer_options.name = o.output;
  if (job.answers.records) writer_options.advice = "--resume goes on";
  writer_options.on_line = [&tally](const LineOutcome& line) { tally.Add(line); };
  writer_options.on_written = [&](uint32_t sequence) {
    if (writer_pointer->GetState() != OutputWriter::State::kOk) engine.Stop();
    if (sequence != OutputWriter::kNoToken) engine.Closed(sequence);
  };
  OutputWriter writer(std::move(writer_options));
  writer_pointer = &writer;
  // A file of records is sorted at the end, so that nothing finished waits in memory.
  if (o.ordered && !stream && !job.answers.records) {
    ordered.emplace(
        [&writer](std::string record, uint32_t token, OrderedRelease::Line line) {
          writer.Push(std::move(record), token, std::move(line));
        },
        OutputWriter::kNoToken, job.plan.held_back);
  }
  Deliverer::Options delivery;
  delivery.context = job.context;
  delivery.text = job.text;
  delivery.stream = stream;
  delivery.sequences = static_cast<uint32_t>(job.plan.sequences);
  delivery.close = [&](uint32_t sequence) { engine.Closed(sequence); };
  delivery.ordered = ordered ? &*ordered : nullptr;
  Deliverer deliverer(std::move(delivery), writer);

  const StopOnSignal stop(signals, engine);
  {
    // A single answer is its own progress, and a bar would be drawn into answers on a terminal.
    const bool screen = o.output == "-" && isatty(STDOUT_FILENO) != 0 && isatty(STDERR_FILENO) != 0;
    const bool quiet = (stream || screen) && o.progress == ProgressFormat::kAuto;
    Progress progress(quiet ? ProgressFormat::kOff : o.progress,
                      {engine, deliverer, job.plan, job.model.Config().layers,
                       [&tally] { return tally.Written(); }, UnreadOf(job, source),
                       !job.survey || !job.survey->whole});
    engine.Run(deliverer);
  }
  if (ordered) ordered->Flush();
  usage.Save(engine);
  if (routes) FinishRoutes(*routes);
  return Conclude(job, writer, source, filter, engine, deliverer, tally, signals.Interrupted());
}

}  // namespace

// Nothing is to be run: says so. Returns the exit code.
int ConcludeWithoutRun(const RunOptions& o, Answers& answers) {
  Say(answers.done_before > 0 ? "nothing left to do: every line has its record" : "0 prompts");
  SortAnswers(o, answers);
  return answers.failed_before == 0 ? 0 : 1;
}

// What the prompts may ask for, as far as it is known. `context`: of the run.
void PlanFor(const RunOptions& o, const std::optional<PromptSurvey>& survey, int32_t context,
             PlanRequest* request) {
  const bool plain = !o.prompts.empty() || GivenFormat(o) == InputFormat::kLines;
  request->logprobs = !plain && (!survey || !survey->whole || survey->logprobs);
  // A pipe's lines are left to it until they start: how many are to come is not known anyway. And
  // where the order of the answers is kept, it is the order of the starts.
  request->reads_ahead = survey && !request->held_back;
  if (!survey) return;
  request->answers = survey->Answers();
  if (!request->answers || survey->lines == 0) return;
  // A token has a byte at least, and four on average; the chat template adds some.
  const uint64_t template_tokens = plain ? 64 : 512;
  const auto tokens = [](double count) {
    return static_cast<int32_t>(std::clamp(count, 1.0, 1e9));
  };
  const uint64_t unlimited = survey->lines - std::min(survey->limited, survey->lines);
  const auto flag = static_cast<uint64_t>(o.max_tokens);
  request->prompt_tokens = survey->bytes + template_tokens * survey->lines;
  if (unlimited == 0 || flag > 0) {
    const uint64_t answer = std::max(survey->largest_limit, unlimited > 0 ? flag : 0);
    request->most_tokens = tokens(static_cast<double>(survey->longest + template_tokens + answer));
  }
  const auto lines = static_cast<double>(survey->lines);
  // Answers seldom reach a generous limit.
  const uint64_t usual = static_cast<uint64_t>(context / 4);
  const uint64_t limits = survey->limits + unlimited * (flag > 0 ? flag : usual);
  const double answer = std::min(static_cast<double>(limits) / lines, static_cast<double>(usual));
  const double prompt = static_cast<double>(survey->bytes) / 4 / lines;
  request->held_tokens = tokens(prompt + answer / 2);
  request->rows_per_token = 1 + prompt / std::max(1.0, answer);
}

// For the prediction: what the machine does, and what the first prompts ask for.
void Foresee(const RunOptions& o, const Model& model, const Tokenizer& tokenizer, int input,
             const std::optional<PromptSurvey>& survey, PlanRequest* request) {
  if (survey && survey->whole && survey->lines == 0) return;
  const uint64_t peak = PeakResidentBytes();
  request->speeds = SpeedsOf(o, model, tokenizer, *request);
  if (PeakResidentBytes() > peak) request->measuring = PeakResidentBytes();
  if (!request->speeds || !survey) return;
  const ModelConfig& config = model.Config();
  const int32_t context = o.ctx_size > 0 ? o.ctx_size : DefaultContext(config);
  RequestParser parser(tokenizer, config.vocab, context, MakeRequestDefaults(o, config.generation));
  const std::optional<PromptSample> sample = SamplePrompts(o, input, parser);
  if (!sample) return;
  request->prompt_mean = sample->prompt;
  request->answer_mean = sample->answer;
  request->answer_longest = sample->longest;
}

// The manifest is as old as the run.
void SayNewerShard(const RunOptions& o, const Model& model) {
  const std::string shard = ShardNewerThan(model.Files(), ManifestPath(o.output));
  if (shard.empty()) return;
  Say(fmt::format("{} was written after this run had begun: of its weights 64 KiB are compared",
                  shard));
}

int RunChecked(const RunOptions& o) {
  if (o.merge) return Merge(o);
  Model model(o.model);
  if (o.dense_attention) model.DropIndexer();
  model.SetInt8Activations(!o.f32_activations);
  const Tokenizer tokenizer = Tokenizer::Load(o.model.front() + "/tokenizer.json");
  const ModelConfig& config = model.Config();
  if (o.ctx_size > config.max_positions) {
    throw UsageError(
        fmt::format("--ctx-size {}: the model has {} positions", o.ctx_size, config.max_positions));
  }
  const Descriptor input = OpenInput(o);
  PlanRequest request = PlanRequestOf(o);
  const int32_t context = o.ctx_size > 0 ? o.ctx_size : DefaultContext(config);
  request.token_bytes = tokenizer.MostBytes(1);
  request.held_back = o.ordered && (o.output == "-" || WantsText(o));
  std::optional<PromptSurvey> survey = Survey(o, input.Get(), {}, context);
  PlanFor(o, survey, context, &request);
  Foresee(o, model, tokenizer, input.Get(), survey, &request);
  Plan plan = MakePlan(model, request);
  if (o.plan) {
    Print(plan.Table());
    return 0;
  }
  Signals signals;
  RefuseSameFile(o, input.Get());
  if (o.strict) {
    RequestParser parser(tokenizer, config.vocab, plan.context,
                         MakeRequestDefaults(o, config.generation));
    CheckStrictly(o, input.Get(), parser);
  }
  Job job{o, model, tokenizer, plan, input.Get(), WantsText(o), ContextOf(o, tokenizer), {}, {}};
  job.answers = OpenAnswers(o, job.text, [&] { return ManifestOf(o, model, plan, job.context); });
  if (job.answers.done_before > 0) {
    SayNewerShard(o, model);
    // Memory for the answers that are left; the context, which the manifest has, stays.
    survey = Survey(o, input.Get(), job.answers.run.finished, plan.context);
    PlanFor(o, survey, context, &request);
    plan = MakePlan(model, request);
  }
  if (survey && survey->whole && survey->lines == 0) return ConcludeWithoutRun(o, job.answers);
  job.survey = survey;
  // Records of a run that goes on have the ids they would have had.
  if (!job.answers.run.run_id.empty()) job.context.run_id = job.answers.run.run_id;
  Say(fmt::format("model: {} ({})", o.model.front(), model.FormatSummary()));
  for (const std::string& note : model.Notes()) Say(note);
  if (const std::string note = model.Files().RepeatNote(); !note.empty()) Say(note);
  Say(fmt::format("thinking: {}; sampling: {}",
                  o.thinking ? fmt::format("on (effort {})", o.effort) : "off",
                  DescribeSampling(o, config.generation)));
  Say(plan.Line());
  for (const std::string& wasted : plan.wasted) Say(wasted);
  return Generate(std::move(job), signals);
}

int RunPrompts(const RunOptions& options) {
  RunOptions o = options;
  try {
    o.output = OutputName(o.output);
    RefuseForStandardOutput(o);
    return RunChecked(o);
  } catch (const UsageError& e) {
    throw UsageError(NameVariables(e.what(), o.from_environment));
  }
}

std::string VersionText() {
  return fmt::format("colibri-run {}\nSIMD target: {}\nread backends: io_uring, pread\n", kVersion,
                     SimdTarget());
}

int WithExitCodes(const char* program, const std::function<int()>& body) {
  try {
    RequireStack();
    return body();
  } catch (const UsageError& e) {
    Say(fmt::format("{}: {}", program, e.what()));
    return 2;
  } catch (const ModelError& e) {
    Say(fmt::format("{}: {}", program, e.what()));
    return 3;
  } catch (const IoError& e) {
    Say(fmt::format("{}: {}", program, e.what()));
    return 4;
  } catch (const std::filesystem::filesystem_error& e) {
    Say(fmt::format("{}: {}", program, e.what()));
    return 4;
  } catch (const std::system_error& e) {
    const bool thread = e.code() == std::errc::resource_unavailable_try_again;
    Say(fmt::format("{}: {}{}", program, thread ? "a thread cannot be started: " : "", e.what()));
    return 4;
  } catch (const std::bad_alloc&) {
    Say(fmt::format("{}: out of memory: a smaller --ram or --max-rows helps", program));
    return 2;
  }
}

}  // namespace colibri
