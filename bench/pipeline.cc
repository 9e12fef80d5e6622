#include "bench/pipeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <span>

#include "bench/bench_readers.h"
#include "io/check.h"
#include "io/error.h"
#include "runtime/text_hash.h"

namespace colibri {
namespace {

// Reading alone is measured for so long, before and after: a drive that is shared changes by a
// tenth within seconds.
constexpr double kRawSeconds = 2;

constexpr size_t kNodes = static_cast<size_t>(NodeId::kCount);

// What an engine has counted up to a moment.
struct Counts {
  EngineStats stats;
  std::array<NodeFigures, kNodes> nodes;
};

Counts CountsOf(Engine& engine) {
  Counts counts;
  counts.stats = engine.Stats();
  for (size_t n = 0; n < kNodes; ++n) {
    counts.nodes[n] = engine.TheProfile().Node(static_cast<NodeId>(n));
  }
  return counts;
}

// `all` less what had been counted before.
Counts Since(const Counts& before, const Counts& all) {
  Counts c = all;
  for (size_t n = 0; n < kNodes; ++n) {
    c.nodes[n].count -= before.nodes[n].count;
    c.nodes[n].busy_ns -= before.nodes[n].busy_ns;
  }
  c.stats.seconds -= before.stats.seconds;
  OverlapFigures& o = c.stats.overlap;
  o.both_s -= before.stats.overlap.both_s;
  o.io_only_s -= before.stats.overlap.io_only_s;
  o.compute_only_s -= before.stats.overlap.compute_only_s;
  o.neither_s -= before.stats.overlap.neither_s;
  const CacheStats& old = before.stats.cache;
  CacheStats& now = c.stats.cache;
  for (uint64_t CacheStats::*field :
       {&CacheStats::hits, &CacheStats::joined, &CacheStats::misses, &CacheStats::failures,
        &CacheStats::evictions, &CacheStats::bytes_demand, &CacheStats::bytes_prefetch,
        &CacheStats::bytes_prefetch_used, &CacheStats::bytes_prefetch_wasted, &CacheStats::hints,
        &CacheStats::hints_dropped, &CacheStats::hints_read, &CacheStats::hints_used}) {
    now.*field -= old.*field;
  }
  c.stats.kv.bytes_read -= before.stats.kv.bytes_read;
  c.stats.kv.bytes_written -= before.stats.kv.bytes_written;
  DenseStats& dense = c.stats.dense;
  for (uint64_t DenseStats::*field : {&DenseStats::bytes_demand, &DenseStats::bytes_ahead,
                                      &DenseStats::waits, &DenseStats::failures}) {
    dense.*field -= before.stats.dense.*field;
  }
  SchedulerStats& s = c.stats.scheduler;
  s.prompt_tokens -= before.stats.scheduler.prompt_tokens;
  s.frames_filled -= before.stats.scheduler.frames_filled;
  s.rows -= before.stats.scheduler.rows;
  s.mtp_drafts -= before.stats.scheduler.mtp_drafts;
  s.looked_up -= before.stats.scheduler.looked_up;
  c.stats.draft_bytes -= before.stats.draft_bytes;
  return c;
}

// The first `count` prompts, once or twice; the second time when all of the first have ended.
class ListSource final : public RequestSource {
 public:
  ListSource(const PipelineOptions& options, size_t count, bool twice)
      : options_(options), count_(count), all_(twice ? 2 * count : count), open_(count) {}
  Next TryNext(Request* request, std::optional<LineError>* /*error*/) override {
    if (next_ == all_) return Next::kEnd;
    if (next_ >= open_) return Next::kAgain;
    // The same ids the second time: the same draws, and so the same experts.
    const size_t prompt = next_++ % count_;
    request->prompt = options_.prompts[prompt];
    request->line = next_;
    request->custom_id = fmt::format("line-{}", prompt + 1);
    request->max_tokens = options_.tokens;
    request->loop_stop = false;
    request->sampling.temperature = 0.8f;  // natural variety: greedy small models repeat themselves
    return Next::kRequest;
  }
  int Fd() const override { return -1; }
  bool Buffered() const override { return next_ < open_; }
  size_t Count() const { return count_; }
  bool Twice() const { return all_ > count_; }
  void OpenAll() { open_ = all_; }

 private:
  const PipelineOptions& options_;
  const size_t count_, all_;
  size_t next_ = 0;
  std::atomic<size_t> open_;
};

// Counts and forgets.
class CountingDelivery final : public Delivery {
 public:
  CountingDelivery(Engine& engine, ListSource& source) : engine_(engine), source_(source) {}
  void Deliver(Sequence& s, const Notice& notice) override {
    if (notice.final == 0) return;
    tokens += notice.count;  // of the whole answer
    // Whichever ends first: a sum of the answers' hashes, each with the prompt's place.
    const size_t place = s.line->request.line % source_.Count();
    answers += HashText(fmt::format("{}:{}", place, fmt::join(s.tokens, ",")));
    failed += s.error ? 1 : 0;
    if (++ended_ == source_.Count()) {
      first = CountsOf(engine_);
      if (source_.Twice()) tokens = answers = 0;
      source_.OpenAll();
    }
    engine_.Closed(s.index);
  }
  void Refuse(Sequence& /*s*/) override { COLIBRI_CHECK(false); }  // lengths were checked
  uint64_t failed = 0, tokens = 0, answers = 0;  // tokens and answers: of the last pass
  Counts first;                                  // when the first pass was over

 private:
  Engine& engine_;
  ListSource& source_;
  size_t ended_ = 0;
};

// One run and what it is compared with.
struct Figures {
  Counts counts;
  uint64_t failed = 0, tokens = 0, answers = 0;  // answers: a hash, equal where all tokens are
  uint64_t union_bytes = 0;                      // of all experts asked for, each once a layer
  double raw = 0;    // bytes a second of reading the same experts with nothing else going on
  double alone = 0;  // seconds of the same run when nothing is read; 0: not measured

  uint64_t Read() const {
    const EngineStats& s = counts.stats;
    return s.cache.BytesRead() + s.kv.bytes_read + s.dense.Bytes();
  }
  // What was read or written and needed.
  uint64_t Useful() const {
    const EngineStats& s = counts.stats;
    return s.cache.bytes_demand + s.cache.bytes_prefetch_used + s.kv.bytes_read +
           s.kv.bytes_written + s.dense.Bytes();
  }
  // What was read for guesses alone. With --warm some were read before what is counted, used in it.
  uint64_t NeverUsed() const {
    const CacheStats& c = counts.stats.cache;
    return c.BytesRead() - std::min(c.BytesRead(), c.bytes_demand + c.bytes_prefetch_used);
  }
  // The longer of reading what was needed and computing.
  double Ideal() const {
    const OverlapFigures& o = counts.stats.overlap;
    const double computing = alone > 0 ? alone : o.both_s + o.compute_only_s;
    return std::max(raw > 0 ? static_cast<double>(Useful()) / raw : 0, computing);
  }
};

struct Run {
  Counts counts;
  uint64_t failed = 0, tokens = 0, answers = 0;
};

Run RunOnce(const Model& model, const Tokenizer& tokenizer, const PipelineOptions& options,
            const EngineOptions& engine_options, size_t prompts, std::unique_ptr<Reader> reader,
            const std::string& trace, const std::string& routes) {
  ListSource source(options, prompts, options.warm);
  std::optional<RouteTraceWriter> writer;
  EngineOptions with_routes = engine_options;
  if (!routes.empty()) with_routes.routes = &writer.emplace(routes, model);
  Engine engine(model, tokenizer, with_routes, std::move(reader), source);
  if (!trace.empty()) engine.TheProfile().EnableTrace();
  CountingDelivery delivery(engine, source);
  engine.Run(delivery);
  const Counts all = CountsOf(engine);
  if (!trace.empty()) engine.TheProfile().WriteTrace(trace);
  if (writer) writer->Finish();
  return {options.warm ? Since(delivery.first, all) : all, delivery.failed, delivery.tokens,
          delivery.answers};
}

// All experts but those of the MTP layer, in an order that no layer has.
std::vector<uint32_t> ShuffledExperts(const Model& model) {
  std::vector<uint32_t> items;
  for (uint32_t i = 0; i < model.ExpertCount(); ++i) {
    if (model.ExpertLayer(i) < model.Config().layers) items.push_back(i);
  }
  std::shuffle(items.begin(), items.end(), std::mt19937(1));
  return items;
}

Figures Measure(const Model& model, const Tokenizer& tokenizer, const PipelineOptions& options,
                size_t prompts) {
  EngineOptions engine = options.engine;
  engine.scheduler.sequences = std::min(engine.scheduler.sequences, static_cast<int32_t>(prompts));
  // Prompts are texts repeated, and run twice when warm: what is measured is computing all of them.
  engine.scheduler.share_prefixes = false;
  std::vector<uint32_t> items;
  Figures f;
  const double raw_before =
      RawReadRate(model, options.open_reader, ShuffledExperts(model), kRawSeconds);
  const Run run = RunOnce(model, tokenizer, options, engine, prompts,
                          std::make_unique<NotingReader>(options.open_reader(), &items),
                          options.trace, options.routes);
  f.counts = run.counts;
  f.failed = run.failed;
  f.tokens = run.tokens;
  f.answers = run.answers;
  const uint64_t expert = model.ExpertCount() > 0 ? model.Expert(0).slot_bytes : 0;
  f.union_bytes = run.counts.stats.cache.Asked() * expert;
  const double raw_after = RawReadRate(model, options.open_reader, items, kRawSeconds);
  f.raw = raw_after > 0 ? (raw_before + raw_after) / 2 : raw_before;
  if (options.compute_alone) {
    engine.prefetch = false;
    engine.kv_check = false;  // pages come back as whatever the windows hold
    f.alone = RunOnce(model, tokenizer, options, engine, prompts, std::make_unique<InstantReader>(),
                      "", "")
                  .counts.stats.seconds;
  }
  return f;
}

double Giga(uint64_t bytes) { return static_cast<double>(bytes) / 1e9; }
double Ratio(double a, double b) { return b > 0 ? a / b : 0; }

struct Row {
  std::string name, value, note;
};

using AddRow = std::function<void(std::string name, double value, std::string note)>;

void AddDrafts(const EngineStats& stats, const AddRow& number) {
  const DraftCounts &mtp = stats.scheduler.mtp_drafts, &found = stats.scheduler.looked_up;
  const auto source = [&](const char* name, const DraftCounts& counts) {
    if (counts.Offered() == 0) return;
    number(name, static_cast<double>(counts.Offered()), DraftsText(counts));
  };
  source("MTP drafts", mtp);
  source("lookup drafts", found);
  if (mtp.Offered() + found.Offered() == 0) return;
  const auto accepted =
      static_cast<double>(std::max<uint64_t>(1, mtp.Accepted() + found.Accepted()));
  number("MB/accepted", static_cast<double>(stats.draft_bytes) / 1e6 / accepted,
         "read for drafts alone, for each that was accepted");
}

// Every figure of a run, in the order it is printed.
std::vector<Row> Rows(const Figures& f, const PipelineOptions& options) {
  std::vector<Row> rows;
  const EngineStats& stats = f.counts.stats;
  const OverlapFigures& o = stats.overlap;
  const CacheStats& c = stats.cache;
  const auto number = [&](std::string name, double value, std::string note) {
    rows.push_back({std::move(name), fmt::format("{:.3f}", value), std::move(note)});
  };
  for (size_t n = 0; n < kNodes; ++n) {
    const NodeFigures& node = f.counts.nodes[n];
    number(fmt::format("node {}", NodeName(static_cast<NodeId>(n))),
           static_cast<double>(node.busy_ns) / 1e9, fmt::format("s busy, {} messages", node.count));
  }
  const double io = o.both_s + o.io_only_s;
  const double sweeps = static_cast<double>(stats.scheduler.frames_filled);
  const double rate = Ratio(static_cast<double>(f.Read()), io);
  number("wall", stats.seconds, "s");
  number("reading", io, "s with reads in flight");
  number("computing", o.both_s + o.compute_only_s, "s with a node at work");
  number("both at once", o.both_s, "s");
  number("neither", o.neither_s, "s");
  number("GB read", Giga(f.Read()), fmt::format("{:.3f} GB of it never used", Giga(f.NeverUsed())));
  number("GB/sweep", Ratio(Giga(f.Read()), sweeps),
         fmt::format("of the {:.3f} GB that the experts asked for have",
                     Ratio(Giga(f.union_bytes), sweeps)));
  if (stats.kv.bytes_read + stats.kv.bytes_written > 0) {
    number("KV GB read", Giga(stats.kv.bytes_read), "of it");
    number("KV GB written", Giga(stats.kv.bytes_written), "");
  }
  number("GB/s", rate / 1e9, "while reading");
  number("raw GB/s", f.raw / 1e9, "the same experts read with nothing else going on");
  number("dense GB/sweep", Ratio(Giga(stats.dense.Bytes()), sweeps),
         fmt::format("of the GB/sweep; {} of its reads were waited for", stats.dense.waits));
  number("hits", 100 * c.HitRate(),
         fmt::format("% of {} requests were resident, {} more were on their way", c.Asked(),
                     c.joined));
  number("hints read", static_cast<double>(c.hints_read),
         fmt::format("of {}, {} used", c.hints, c.hints_used));
  number(
      "hint recall",
      100 * Ratio(static_cast<double>(c.hints_used), static_cast<double>(c.misses + c.hints_used)),
      "% of the experts that had to be read");
  if (f.alone > 0) number("compute alone", f.alone, "s, the same when nothing is read");
  number("ideal", f.Ideal(), "s: the longer of useful bytes at the raw rate and computing alone");
  number("wall / ideal", Ratio(stats.seconds, f.Ideal()), "");
  number("tokens/s", Ratio(static_cast<double>(f.tokens), stats.seconds),
         fmt::format("{} generated, {} prompt, {} frames", f.tokens, stats.scheduler.prompt_tokens,
                     stats.scheduler.frames_filled));
  AddDrafts(stats, number);
  number("answers", static_cast<double>(options.prompts.size()),
         fmt::format("hash {:016x}, equal where all their tokens are", f.answers));
  number(
      "peak MB", static_cast<double>(PeakResidentBytes()) / 1e6,
      fmt::format("planned {:.1f}, budget {:.1f}", static_cast<double>(options.plan.Total()) / 1e6,
                  static_cast<double>(options.plan.budget) / 1e6));
  return rows;
}

void Print(const std::vector<Row>& rows, TableFormat format) {
  if (format == TableFormat::kJson) {
    nlohmann::ordered_json report;
    for (const Row& r : rows) report[r.name] = {{"value", std::stod(r.value)}, {"note", r.note}};
    fmt::print("{}\n", report.dump(1));
    return;
  }
  if (format == TableFormat::kMarkdown) fmt::print("| figure | value | |\n|---|---:|---|\n");
  for (const Row& r : rows) {
    if (format == TableFormat::kCsv) {
      fmt::print("\"{}\",{},\"{}\"\n", r.name, r.value, r.note);
    } else if (format == TableFormat::kMarkdown) {
      fmt::print("| {} | {} | {} |\n", r.name, r.value, r.note);
    } else {
      fmt::print("{:<18}{:>12}  {}\n", r.name, r.value, r.note);
    }
  }
}

Table ComparisonTable() {
  return Table({{"sequences", "sequences"},
                {"sweeps", "sweeps"},
                {"tokens_per_second", "tokens/s"},
                {"rows_per_second", "rows/s"},
                {"seconds", "wall s"},
                {"gb_per_sweep", "GB/sweep"},
                {"union_gb_per_sweep", "union GB"},
                {"wasted_percent", "wasted %"},
                {"gb_per_second", "GB/s"},
                {"raw_gb_per_second", "raw GB/s"},
                {"alone_seconds", "compute alone s"},
                {"ideal_seconds", "ideal s"},
                {"wall_over_ideal", "wall/ideal"},
                {"peak_mb", "peak MB"},
                {"answers", "answers"}});
}

void AddRun(int32_t sequences, const Figures& f, Table* table) {
  const EngineStats& s = f.counts.stats;
  const double sweeps = static_cast<double>(s.scheduler.frames_filled);
  const auto text = [](double value) { return fmt::format("{:.4g}", value); };
  table->Add({std::to_string(sequences), std::to_string(s.scheduler.frames_filled),
              text(Ratio(static_cast<double>(f.tokens), s.seconds)),
              text(Ratio(static_cast<double>(s.scheduler.rows), s.seconds)), text(s.seconds),
              text(Ratio(Giga(f.Read()), sweeps)), text(Ratio(Giga(f.union_bytes), sweeps)),
              text(100 * Ratio(Giga(f.NeverUsed()), Giga(f.Read()))),
              text(Ratio(Giga(f.Read()), s.overlap.both_s + s.overlap.io_only_s)),
              text(f.raw / 1e9), f.alone > 0 ? text(f.alone) : "", text(f.Ideal()),
              text(Ratio(s.seconds, f.Ideal())),
              fmt::format("{:.0f}", static_cast<double>(PeakResidentBytes()) / 1e6),
              fmt::format("{:016x}", f.answers)});
}

}  // namespace

int RunPipeline(const Model& model, const Tokenizer& tokenizer, const PipelineOptions& options) {
  for (const auto& prompt : options.prompts) {
    if (static_cast<int64_t>(prompt.size()) + options.tokens > options.engine.context) {
      throw UsageError(fmt::format("a prompt of {} tokens and {} more do not fit a context of {}",
                                   prompt.size(), options.tokens, options.engine.context));
    }
  }
  if (options.sequences.empty()) {
    const Figures f = Measure(model, tokenizer, options, options.prompts.size());
    Print(Rows(f, options), options.format);
    return f.failed > 0 ? 1 : 0;
  }
  Table table = ComparisonTable();
  uint64_t failed = 0;
  for (const int32_t sequences : options.sequences) {
    const Figures f = Measure(model, tokenizer, options, static_cast<size_t>(sequences));
    AddRun(sequences, f, &table);
    failed += f.failed;
  }
  fmt::print("{}", table.Text(options.format));
  return failed > 0 ? 1 : 0;
}

std::string GraphPicture(const std::string& format) {
  const DecodeGraph graph(nullptr);
  if (format == "mermaid") return graph.Picture().Mermaid();
  if (format == "dot") return graph.Picture().Dot();
  throw UsageError(fmt::format("--dump {}: mermaid or dot is expected", format));
}

}  // namespace colibri
