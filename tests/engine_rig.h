// Runs the same lines through the flow graph and through the sequential engine, with the real
// deliverer and output thread behind the graph, and gives back the records line by line.
// Threads: one run at a time.
#pragma once

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "graph/engine.h"
#include "runtime/deliverer.h"
#include "runtime/output_writer.h"
#include "runtime/sequential.h"
#include "tests/shuffled_reader.h"
#include "tests/temp_dir.h"
#include "tests/watchdog.h"

namespace colibri {

inline bool FullTests() { return std::getenv("COLIBRI_FULL_TESTS") != nullptr; }

// A model with its tokenizer, from one directory unless the tokenizer is named.
struct TestModel {
  explicit TestModel(const std::string& directory, const DenseResidents& residents = {},
                     const std::string& tokenizer_path = "")
      : model({directory}),
        tokenizer(Tokenizer::Load(tokenizer_path.empty() ? directory + "/tokenizer.json"
                                                         : tokenizer_path)) {
    model.LoadDense(residents);
  }
  Model model;
  Tokenizer tokenizer;
};

inline const TestModel& DemoModel() {
  static const TestModel demo(COLIBRI_SOURCE_DIR "/apps/demo/model");
  return demo;
}

// Lines given as they are, in their order; a line with an error cannot be run.
struct TestLine {
  Request request;
  std::optional<LineError> error;
};

class ListSource final : public RequestSource {
 public:
  explicit ListSource(std::vector<TestLine> lines) : lines_(std::move(lines)) {}
  Next TryNext(Request* request, std::optional<LineError>* error) override {
    if (next_ == lines_.size()) return Next::kEnd;
    *request = lines_[next_].request;
    *error = lines_[next_].error;
    ++next_;
    return Next::kRequest;
  }
  int Fd() const override { return -1; }
  bool Buffered() const override { return next_ < lines_.size(); }

 private:
  const std::vector<TestLine> lines_;
  size_t next_ = 0;
};

enum class ReaderKind : uint8_t { kUring, kPread, kShuffled };

// The tokens of a run's sequences, prompts included, by line and choice.
using Answers = std::map<std::pair<uint64_t, int32_t>, std::vector<int32_t>>;

// What may change when and where things happen, and never a byte of a line.
struct RunConfig {
  int32_t threads = 1;
  uint32_t slots = 0;  // of each class; 0: one for each expert
  int32_t frames = 1;
  int32_t rows = 64;
  int32_t prefill_rows = 0;  // 0: as rows
  int32_t page_tokens = kDefaultPageTokens;
  int32_t kv_pages = 0;  // 0: enough for every sequence
  int32_t sequences = 8;
  int32_t context = 128;
  bool share_prefixes = true;
  bool prefetch = true;
  bool pauses = false;
  bool slow_output = false;
  int32_t dense_windows = 0;  // where the model streams dense weights; 0: as many as serve
  int32_t drafts = 0;         // most of a sequence
  bool random_depth = false;  // up to so many, else always so many
  bool governed = false;      // or as many as a governor says; the graph only
  bool lookup = false;        // by prompt lookup too, where there is a governor or no MTP layer
  // Drafts are then some of these tokens and some that are wrong.
  const Answers* answers = nullptr;
  KvType kv_type = KvType::kBF16;
  int32_t kv_ram_layers = INT32_MAX;  // the graph only; KV pages of later layers are on the drive
  bool kv_check = true;
  ReaderKind reader = ReaderKind::kShuffled;
  uint32_t seed = 1;

  std::string Text() const {
    return fmt::format(
        "threads {} slots {} frames {} rows {} prefill {} page {} pages {} sequences {} prefetch "
        "{} "
        "pauses {} slow output {} KV in memory {} windows {} shared {} reader {} seed {} drafts "
        "{}{}{}{}",
        threads, slots, frames, rows, prefill_rows, page_tokens, kv_pages, sequences, prefetch,
        pauses, slow_output, kv_ram_layers, dense_windows, share_prefixes, static_cast<int>(reader),
        seed, drafts,
        random_depth ? " at random"
        : governed   ? " governed"
                     : "",
        lookup ? " looked up" : "", answers != nullptr ? " of answers" : "");
  }
};

struct Outcome {
  std::map<uint64_t, std::string> records;  // by line
  EngineStats stats;
};

inline RecordContext TestContext(const Tokenizer& tokenizer) {
  RecordContext context;
  context.tokenizer = &tokenizer;
  context.model = "test";
  context.run_id = "run";
  context.simd_target = "any";
  context.engine_version = "none";
  return context;
}

// What stands in a record after `key`, which occurs once; "" without it.
inline std::string After(const std::string& record, const std::string& key, const char* end) {
  const size_t at = record.find(key);
  if (at == std::string::npos) return "";
  const size_t first = at + key.size();
  return record.substr(first, record.find_first_of(end, first) - first);
}

// A file in memory that takes records.
class RecordFile {
 public:
  RecordFile() : fd_(memfd_create("records", MFD_CLOEXEC)) { REQUIRE(fd_ >= 0); }
  ~RecordFile() { close(fd_); }
  RecordFile(const RecordFile&) = delete;
  RecordFile& operator=(const RecordFile&) = delete;
  int Fd() const { return fd_; }

  // Every line has at most one record.
  std::map<uint64_t, std::string> Records() const {
    std::string text(static_cast<size_t>(lseek(fd_, 0, SEEK_END)), '\0');
    REQUIRE(pread(fd_, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
    std::map<uint64_t, std::string> records;
    std::istringstream lines(text);
    for (std::string record; std::getline(lines, record);) {
      const uint64_t line = std::stoull(After(record, ",\"line\":", ","));
      CHECK_MESSAGE(records.emplace(line, record).second, "line ", line, " has two records");
    }
    return records;
  }

 private:
  int fd_;
};

// Gives sequences back late and from another thread, as slow output does.
class LateCloser {
 public:
  explicit LateCloser(std::function<void(uint32_t)> close)
      : close_(std::move(close)), thread_([this] { Loop(); }) {}
  ~LateCloser() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }
  LateCloser(const LateCloser&) = delete;
  LateCloser& operator=(const LateCloser&) = delete;

  void Add(uint32_t sequence) {
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(sequence);
    }
    wake_.notify_one();
  }

 private:
  void Loop() {
    for (;;) {
      uint32_t sequence = 0;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] { return over_ || !waiting_.empty(); });
        if (waiting_.empty()) return;
        sequence = waiting_.front();
        waiting_.pop_front();
      }
      for (int i = 0; i < 200; ++i) std::this_thread::yield();
      close_(sequence);
    }
  }
  const std::function<void(uint32_t)> close_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<uint32_t> waiting_;
  bool over_ = false;
  std::thread thread_;
};

// Drawn anew for each sequence and number of tokens, the same in every run.
inline std::mt19937 RandomOf(const RunConfig& c, const Sequence& s) {
  std::seed_seq seed{static_cast<uint64_t>(c.seed), s.line->request.line,
                     static_cast<uint64_t>(s.choice), static_cast<uint64_t>(s.Known())};
  return std::mt19937(seed);
}

inline DraftOptions DraftOptionsOf(const RunConfig& c) {
  DraftOptions options;
  options.most = c.drafts;
  options.lookup = c.lookup;
  if (c.random_depth) {
    options.depth = [c](const Sequence& s) {
      return static_cast<int32_t>(RandomOf(c, s)() % static_cast<uint32_t>(c.drafts + 1));
    };
  }
  if (c.answers != nullptr) {
    options.propose = [c](const Sequence& s, int32_t most, std::vector<int32_t>* drafts) {
      std::mt19937 random = RandomOf(c, s);
      const std::vector<int32_t>& answer = c.answers->at({s.line->request.line, s.choice});
      const auto from = static_cast<size_t>(s.Known());
      if (c.random_depth) most = static_cast<int32_t>(random() % static_cast<uint32_t>(most + 1));
      for (size_t i = from; i < std::min(answer.size(), from + static_cast<size_t>(most)); ++i) {
        drafts->push_back(random() % 4 == 0 ? 7 : answer[i]);
      }
    };
  }
  return options;
}

inline SchedulerOptions SchedulerOptionsOf(const RunConfig& c) {
  SchedulerOptions s;
  s.sequences = c.sequences;
  s.rows = c.rows;
  s.prefill_rows = c.prefill_rows > 0 ? c.prefill_rows : c.rows;
  s.frames = c.frames;
  s.context = c.context;
  s.share_prefixes = c.share_prefixes;
  return s;
}

inline int32_t PagesOf(const RunConfig& c) {
  const int32_t whole = (c.context + c.page_tokens - 1) / c.page_tokens;
  return c.kv_pages > 0 ? c.kv_pages : whole * c.sequences;
}

inline KvLayout KvLayoutOf(const Model& model, const RunConfig& c) {
  return {KvShapeOf(model, c.page_tokens, c.kv_type), PagesOf(c),
          KvStreamingOf(model, c.kv_ram_layers, c.frames, c.rows, c.sequences, c.context)};
}

// What a run reads: the model's shards and, where some KV is on the drive, a scratch file beside
// them, in a table of its own.
class RunFiles {
 public:
  RunFiles(const Model& model, const RunConfig& c) : shards_(model.Files().Files()) {
    const KvLayout layout = KvLayoutOf(model, c);
    if (!layout.Streams()) return;
    FileTable& table = table_.emplace();
    for (uint32_t i = 0; i < shards_.Count(); ++i) table.Add(shards_.Path(i));
    kv_.file = table.AddScratch(folder_.Path(""), layout.FileBytes());
    kv_.path = table.Path(kv_.file);
  }
  const FileTable& Table() const { return table_ ? *table_ : shards_; }
  const ScratchFile& Kv() const { return kv_; }
  // Nobody sees the scratch file.
  bool FolderIsEmpty() const { return std::filesystem::is_empty(folder_.Path("")); }

 private:
  const FileTable& shards_;
  TempDir folder_;
  std::optional<FileTable> table_;
  ScratchFile kv_;
};

inline std::unique_ptr<Reader> ReaderOf(const RunConfig& c, const FileTable& files,
                                        const ShuffledReader::Fault& fault) {
  if (c.reader == ReaderKind::kShuffled) {
    return std::make_unique<ShuffledReader>(files, c.seed, fault);
  }
  std::string note;
  // A machine without io_uring reads with pread: the bytes are what is compared.
  const IoBackend backend = c.reader == ReaderKind::kPread ? IoBackend::kPread : IoBackend::kAuto;
  return MakeReader(backend, files, {}, &note);
}

inline EngineOptions EngineOptionsOf(const TestModel& m, const RunConfig& c) {
  EngineOptions options;
  options.threads = c.threads;
  options.context = c.context;
  options.scheduler = SchedulerOptionsOf(c);
  options.kv_pages = PagesOf(c);
  options.page_tokens = c.page_tokens;
  options.kv_type = c.kv_type;
  options.kv_ram_layers = c.kv_ram_layers;
  options.kv_check = c.kv_check;
  options.prefetch = c.prefetch;
  options.dense_windows = c.dense_windows;
  options.pause_after_puts = c.pauses;
  options.drafts = DraftOptionsOf(c);
  options.govern_drafts = c.governed;
  for (const Model::ExpertClass& e : m.model.ExpertClasses()) {
    options.slots.push_back(
        {e.slot_bytes, c.slots == 0 ? e.experts : std::min(c.slots, e.experts)});
  }
  return options;
}

struct RunHooks {
  ShuffledReader::Fault fault;  // ReaderKind::kShuffled only
  // Takes the place of the configuration's reader.
  std::function<std::unique_ptr<Reader>(const RunFiles&)> reader;
  std::function<void(EngineOptions*)> options;         // before the engine is made
  std::function<void(Engine&)> before_run;             // on the engine thread
  std::function<void(Engine&, size_t count)> written;  // on the output thread, after each record
};

inline Outcome RunGraph(const TestModel& m, const RunConfig& c, RequestSource& source,
                        const RunHooks& hooks = {}) {
  Watchdog watchdog(c.Text());
  const RunFiles files(m.model, c);
  CHECK(files.FolderIsEmpty());
  EngineOptions options = EngineOptionsOf(m, c);
  options.kv_file = files.Kv();
  if (hooks.options) hooks.options(&options);
  Engine engine(m.model, m.tokenizer, options,
                hooks.reader ? hooks.reader(files) : ReaderOf(c, files.Table(), hooks.fault),
                source);
  const Watchdog::Asking asking(watchdog, [&engine] { return engine.StateText(); });
  Outcome outcome;
  RecordFile file;
  {
    LateCloser closer([&](uint32_t sequence) { engine.Closed(sequence); });
    size_t count = 0;
    OutputWriter::Options writing;
    writing.fd = file.Fd();
    writing.sync = [](int) { return 0; };
    writing.on_written = [&](uint32_t sequence) {
      ++count;
      if (hooks.written) hooks.written(engine, count);
      c.slow_output ? closer.Add(sequence) : engine.Closed(sequence);
    };
    OutputWriter writer(std::move(writing));
    Deliverer::Options delivery;
    delivery.context = TestContext(m.tokenizer);
    delivery.sequences = static_cast<uint32_t>(c.sequences);
    delivery.close = [&](uint32_t sequence) { engine.Closed(sequence); };
    Deliverer deliverer(std::move(delivery), writer);
    if (hooks.before_run) hooks.before_run(engine);
    engine.Run(deliverer);
    REQUIRE(writer.Finish() == OutputWriter::State::kOk);
  }
  CHECK(files.FolderIsEmpty());
  outcome.stats = engine.Stats();
  outcome.records = file.Records();
  return outcome;
}

inline Outcome RunGraph(const TestModel& m, const RunConfig& c, std::vector<TestLine> lines,
                        const RunHooks& hooks = {}) {
  ListSource source(std::move(lines));
  return RunGraph(m, c, source, hooks);
}

// Of the configuration only what the sequential engine has: frames must be 1.
inline Outcome RunSequentially(const TestModel& m, const RunConfig& c, RequestSource& source,
                               const std::vector<uint32_t>& failing = {}) {
  SequentialOptions options;
  options.scheduler = SchedulerOptionsOf(c);
  options.kv_pages = PagesOf(c);
  options.page_tokens = c.page_tokens;
  options.kv_type = c.kv_type;
  options.failing = failing;
  options.drafts = DraftOptionsOf(c);
  RecordFile file;
  Outcome outcome;
  {
    OutputWriter::Options writing;
    writing.fd = file.Fd();
    writing.sync = [](int) { return 0; };
    OutputWriter writer(std::move(writing));
    Deliverer::Options delivery;
    delivery.context = TestContext(m.tokenizer);
    delivery.sequences = static_cast<uint32_t>(c.sequences);
    delivery.close = [](uint32_t) {};
    Deliverer deliverer(std::move(delivery), writer);
    outcome.stats.scheduler = RunSequential(m.model, m.tokenizer, options, source, deliverer);
    REQUIRE(writer.Finish() == OutputWriter::State::kOk);
  }
  outcome.records = file.Records();
  return outcome;
}

inline Outcome RunSequentially(const TestModel& m, const RunConfig& c, std::vector<TestLine> lines,
                               const std::vector<uint32_t>& failing = {}) {
  ListSource source(std::move(lines));
  return RunSequentially(m, c, source, failing);
}

// What the lines' sequences come to.
inline Answers AnswersOf(const TestModel& m, std::vector<TestLine> lines) {
  class Taker final : public Delivery {
   public:
    void Deliver(Sequence& s, const Notice& notice) override {
      if (notice.final != 0) answers[{s.line->request.line, s.choice}] = s.tokens;
    }
    void Refuse(Sequence&) override {}
    Answers answers;
  };
  const RunConfig c;
  SequentialOptions options;
  options.scheduler = SchedulerOptionsOf(c);
  options.kv_pages = PagesOf(c);
  ListSource source(std::move(lines));
  Taker taker;
  RunSequential(m.model, m.tokenizer, options, source, taker);
  return std::move(taker.answers);
}

// The bytes of every line are equal. Lines that `but` names are not looked at.
inline void CheckSameLines(const Outcome& got, const Outcome& expected,
                           const std::vector<uint64_t>& but = {}) {
  CHECK(got.records.size() == expected.records.size());
  for (const auto& entry : expected.records) {
    const uint64_t line = entry.first;  // clang 14 captures no structured binding
    const std::string& record = entry.second;
    if (std::find(but.begin(), but.end(), line) != but.end()) continue;
    const auto at = got.records.find(line);
    if (at == got.records.end()) {
      FAIL_CHECK("line ", line, " has no record");
    } else {
      CHECK_MESSAGE(LineBytes(at->second) == LineBytes(record), "line ", line);
    }
  }
}

// Lines whose record is an error, with its code.
inline std::map<uint64_t, std::string> ErrorsOf(const Outcome& outcome) {
  std::map<uint64_t, std::string> errors;
  for (const auto& [line, record] : outcome.records) {
    const std::string code = After(record, "\"error\":{\"code\":\"", "\"");
    if (!code.empty()) errors[line] = code;
  }
  return errors;
}

}  // namespace colibri
