#include "bench/pipeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <nlohmann/json.hpp>

#include "io/check.h"
#include "io/error.h"
#include "io/memory.h"

namespace colibri {
namespace {

double Seconds(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double>(d).count();
}

class ListSource final : public RequestSource {
 public:
  explicit ListSource(const PipelineOptions& options) : options_(options) {}
  Next TryNext(Request* request, std::optional<LineError>* /*error*/) override {
    if (next_ == options_.prompts.size()) return Next::kEnd;
    request->prompt = options_.prompts[next_++];
    request->line = next_;
    request->custom_id = fmt::format("line-{}", next_);
    request->max_tokens = options_.tokens;
    request->loop_stop = false;
    request->sampling.temperature = 0.8f;  // natural variety: greedy small models repeat themselves
    return Next::kRequest;
  }
  int Fd() const override { return -1; }
  bool Buffered() const override { return next_ < options_.prompts.size(); }

 private:
  const PipelineOptions& options_;
  size_t next_ = 0;
};

// Counts and forgets.
class NullDelivery final : public Delivery {
 public:
  explicit NullDelivery(Engine& engine) : engine_(engine) {}
  void Deliver(Sequence& s, const Notice& notice) override {
    if (notice.final == 0) return;
    tokens += notice.count;
    failed += s.error ? 1 : 0;
    engine_.Closed(s.index);
  }
  void Refuse(Sequence& /*s*/) override { COLIBRI_CHECK(false); }  // lengths were checked
  uint64_t tokens = 0, failed = 0;

 private:
  Engine& engine_;
};

// Reads experts as the engine would, with nothing else going on: bytes a second.
double RawRead(const Model& model, const PipelineOptions& options) {
  constexpr uint64_t kEnough = uint64_t{1} << 30;
  uint64_t widest = 0, chosen_bytes = 0;
  std::vector<uint32_t> items;
  for (uint32_t i = 0; i < model.ExpertCount() && chosen_bytes < kEnough; ++i) {
    items.push_back(i);
    widest = std::max(widest, model.Expert(i).slot_bytes);
    chosen_bytes += model.Expert(i).slot_bytes;
  }
  constexpr size_t kSlots = 8;
  const PopulatedBuffer buffer(widest * kSlots, "the raw read");
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<size_t> free;
  std::vector<size_t> slot_of(items.size());
  for (size_t i = 0; i < kSlots; ++i) free.push_back(i);
  bool failed = false;
  const std::unique_ptr<Reader> reader = options.open_reader();
  reader->Start([&](uint64_t id, const ReadResult& result) {
    const std::lock_guard lock(mutex);
    failed |= result.error != 0;
    free.push_back(slot_of[id]);
    wake.notify_one();
  });
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < items.size(); ++i) {
    std::unique_lock lock(mutex);
    wake.wait(lock, [&] { return !free.empty(); });
    slot_of[i] = free.back();
    free.pop_back();
    reader->Submit({i, ReadClass::kDemand, buffer.data() + widest * slot_of[i],
                    model.Expert(items[i]).extents});
  }
  {
    std::unique_lock lock(mutex);
    wake.wait(lock, [&] { return free.size() == kSlots; });
  }
  const double seconds = Seconds(std::chrono::steady_clock::now() - start);
  reader->Stop();
  return failed || seconds <= 0 ? 0 : static_cast<double>(chosen_bytes) / seconds;
}

struct Row {
  std::string name, value, note;
};

// Every figure of a run, in the order it is printed.
std::vector<Row> Figures(const EngineStats& stats, const Profile& profile,
                         const NullDelivery& delivery, const PipelineOptions& options, double raw) {
  std::vector<Row> rows;
  const OverlapFigures& o = stats.overlap;
  const CacheStats& c = stats.cache;
  const auto number = [&](std::string name, double value, std::string note) {
    rows.push_back({std::move(name), fmt::format("{:.3f}", value), std::move(note)});
  };
  for (size_t n = 0; n < static_cast<size_t>(NodeId::kCount); ++n) {
    const NodeFigures f = profile.Node(static_cast<NodeId>(n));
    number(fmt::format("node {}", NodeName(static_cast<NodeId>(n))),
           static_cast<double>(f.busy_ns) / 1e9, fmt::format("s busy, {} messages", f.count));
  }
  const double io = o.both_s + o.io_only_s, compute = o.both_s + o.compute_only_s;
  const double useful = static_cast<double>(c.bytes_demand + c.bytes_prefetch_used);
  const double all = static_cast<double>(c.bytes_demand + c.bytes_prefetch);
  const double asked = static_cast<double>(c.hits + c.joined + c.misses);
  number("wall", stats.seconds, "s");
  number("reading", io, "s with reads in flight");
  number("computing", compute, "s with a node at work");
  number("both at once", o.both_s, "s");
  number("neither", o.neither_s, "s");
  number("GB read", all / 1e9, fmt::format("{:.3f} GB of it never used", (all - useful) / 1e9));
  number("GB/s", io > 0 ? all / io / 1e9 : 0, "while reading");
  number("raw GB/s", raw / 1e9, "the same experts read with nothing else going on");
  number("hits", asked > 0 ? 100 * static_cast<double>(c.hits) / asked : 0,
         fmt::format("% of {} requests were resident, {} more were on their way", asked, c.joined));
  number("hints read", static_cast<double>(c.hints_read),
         fmt::format("of {}, {} used", c.hints, c.hints_used));
  number("hint recall",
         c.misses + c.hints_used > 0 ? 100 * static_cast<double>(c.hints_used) /
                                           static_cast<double>(c.misses + c.hints_used)
                                     : 0,
         "% of the experts that had to be read");
  const double ideal = std::max(raw > 0 ? useful / raw : 0, compute);
  number("ideal", ideal, "s: the longer of useful bytes at the raw rate and computing alone");
  number("wall / ideal", ideal > 0 ? stats.seconds / ideal : 0, "");
  number("tokens/s", static_cast<double>(delivery.tokens) / stats.seconds,
         fmt::format("{} generated, {} prompt, {} frames", delivery.tokens,
                     stats.scheduler.prompt_tokens, stats.scheduler.frames_filled));
  number(
      "peak MB", static_cast<double>(PeakResidentBytes()) / 1e6,
      fmt::format("planned {:.1f}, budget {:.1f}", static_cast<double>(options.plan.Total()) / 1e6,
                  static_cast<double>(options.plan.budget) / 1e6));
  return rows;
}

void Print(const std::vector<Row>& rows, PipelineOptions::Format format) {
  using Format = PipelineOptions::Format;
  if (format == Format::kJson) {
    nlohmann::ordered_json report;
    for (const Row& r : rows) report[r.name] = {{"value", std::stod(r.value)}, {"note", r.note}};
    fmt::print("{}\n", report.dump(1));
    return;
  }
  if (format == Format::kMarkdown) fmt::print("| figure | value | |\n|---|---:|---|\n");
  for (const Row& r : rows) {
    if (format == Format::kCsv) {
      fmt::print("\"{}\",{},\"{}\"\n", r.name, r.value, r.note);
    } else if (format == Format::kMarkdown) {
      fmt::print("| {} | {} | {} |\n", r.name, r.value, r.note);
    } else {
      fmt::print("{:<18}{:>12}  {}\n", r.name, r.value, r.note);
    }
  }
}

}  // namespace

int RunPipeline(const Model& model, const Tokenizer& tokenizer, const PipelineOptions& options) {
  for (const auto& prompt : options.prompts) {
    if (static_cast<int64_t>(prompt.size()) + options.tokens > options.engine.context) {
      throw UsageError(fmt::format("a prompt of {} tokens and {} more do not fit a context of {}",
                                   prompt.size(), options.tokens, options.engine.context));
    }
  }
  ListSource source(options);
  Engine engine(model, tokenizer, options.engine, options.open_reader(), source);
  if (!options.trace.empty()) engine.TheProfile().EnableTrace();
  NullDelivery delivery(engine);
  engine.Run(delivery);
  const EngineStats stats = engine.Stats();  // before the raw read goes on the same clock
  const double raw = RawRead(model, options);
  Print(Figures(stats, engine.TheProfile(), delivery, options, raw), options.format);
  if (!options.trace.empty()) engine.TheProfile().WriteTrace(options.trace);
  return delivery.failed > 0 ? 1 : 0;
}

std::string GraphPicture(const std::string& format) {
  const DecodeGraph graph(nullptr);
  if (format == "mermaid") return graph.Picture().Mermaid();
  if (format == "dot") return graph.Picture().Dot();
  throw UsageError(fmt::format("--dump {}: mermaid or dot is expected", format));
}

}  // namespace colibri
