// A long run of one engine with faults on: reads fail after they have arrived, or come late, and so
// do pages of KV; dense weights, KV and most experts are on the drive; drafts are made. Every line
// has to have one record, with the bytes that it always has or with a read error, and the memory of
// the process has to stay what it was. Not among the tests:
//   cmake --build --preset ci --target soak && build/ci/soak [MINUTES] [SEED]
// 30 minutes unless told otherwise. Exits with 1 if anything of that does not hold.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/engine_lines.h"
#include "tests/engine_rig.h"

namespace colibri {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kKinds = 60;  // of lines, again and again
constexpr uint32_t kFaultOf = 3000, kLateOf = 300;
// The allocator keeps what threads freed; measured over 30 minutes it moves by less.
constexpr uint64_t kFlatBytes = 2'000'000;
constexpr auto kSilence = std::chrono::seconds(60);

double Megabytes(uint64_t bytes) { return static_cast<double>(bytes) * 1e-6; }

uint64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  uint64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

// What the other reader reads, with faults. Threads: as any reader's.
class FaultyReader final : public Reader {
 public:
  FaultyReader(std::unique_ptr<Reader> inner, uint32_t seed, std::atomic<uint64_t>* faults)
      : inner_(std::move(inner)), random_(seed), faults_(*faults) {}
  void Start(ReadDone done) override {
    inner_->Start([this, done = std::move(done)](uint64_t id, const ReadResult& result) {
      ReadResult told = result;
      if (random_() % kLateOf == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      if (result.error == 0 && random_() % kFaultOf == 0) {
        told.error = EIO;
        ++faults_;
      }
      done(id, told);
    });
  }
  void Submit(const ReadJob& job) override { inner_->Submit(job); }
  void Promote(uint64_t id) override { inner_->Promote(id); }
  bool Cancel(uint64_t id) override { return inner_->Cancel(id); }
  void CutShort(uint64_t id) override { inner_->CutShort(id); }
  void Stop() override { inner_->Stop(); }
  ReaderStats Stats() const override { return inner_->Stats(); }
  std::string Name() const override { return inner_->Name() + " with faults"; }

 private:
  const std::unique_ptr<Reader> inner_;
  std::mt19937 random_;  // the I/O thread's
  std::atomic<uint64_t>& faults_;
};

// The same lines in another order each time round, until the time is over.
class EndlessSource final : public RequestSource {
 public:
  EndlessSource(Clock::time_point end, uint32_t seed) : end_(end), random_(seed) {}
  Next TryNext(Request* request, std::optional<LineError>* error) override {
    if (Clock::now() >= end_) return Next::kEnd;
    *request = MixedLine(1 + random_() % kKinds).request;
    request->line = ++lines_;
    error->reset();
    return Next::kRequest;
  }
  int Fd() const override { return -1; }
  bool Buffered() const override { return true; }
  uint64_t Lines() const { return lines_; }

 private:
  const Clock::time_point end_;
  std::mt19937 random_;
  uint64_t lines_ = 0;
};

// Takes the records from a pipe and compares them.
class Judge {
 public:
  Judge() {
    for (const auto& [line, record] : LineByLine(SmallModel(), MixedLines(kKinds)).records) {
      expected_.emplace(After(record, "\"custom_id\":\"", "\""), LineBytes(record));
    }
    REQUIRE(pipe(ends_) == 0);
    thread_ = std::thread([this] { Loop(); });
  }
  int Fd() const { return ends_[1]; }
  // Once nothing more is written.
  void Finish() {
    close(ends_[1]);
    thread_.join();
    close(ends_[0]);
  }
  std::atomic<uint64_t> records{0}, failed{0}, wrong{0};

 private:
  void Loop() {
    std::FILE* file = fdopen(dup(ends_[0]), "r");
    char* text = nullptr;
    size_t room = 0;
    for (ssize_t got; (got = getline(&text, &room, file)) > 0;) {
      Look(std::string(text, static_cast<size_t>(got) - 1));
    }
    std::free(text);
    std::fclose(file);
  }
  void Look(const std::string& record) {
    ++records;
    const std::string code = After(record, "\"error\":{\"code\":\"", "\"");
    if (code == "read_error") {
      ++failed;
      return;
    }
    const auto at = expected_.find(After(record, "\"custom_id\":\"", "\""));
    if (at != expected_.end() && LineBytes(record) == at->second) return;
    if (++wrong <= 5) fmt::print(stderr, "wrong: {}\n", record);
  }

  std::map<std::string, std::string> expected_;  // bytes by custom_id
  int ends_[2] = {-1, -1};
  std::thread thread_;
};

// Prints how it goes, keeps the largest memory of each third, ends the process when nothing moves.
class Observer {
 public:
  Observer(const Judge& judge, const std::atomic<uint64_t>& faults, std::chrono::seconds time)
      : judge_(judge), faults_(faults), time_(time), thread_([this] { Loop(); }) {}
  void Finish() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }
  const std::vector<uint64_t>& Largest() const { return largest_; }

 private:
  void Loop() {
    const auto start = Clock::now();
    auto moved = start, said = start;
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (!wake_.wait_for(lock, std::chrono::milliseconds(500), [this] { return over_; })) {
      const auto now = Clock::now();
      const uint64_t resident = ResidentBytes();
      const auto third = static_cast<size_t>(3 * (now - start) / time_);
      largest_[std::min<size_t>(third, 2)] =
          std::max(largest_[std::min<size_t>(third, 2)], resident);
      if (std::exchange(seen, judge_.records.load()) != judge_.records) moved = now;
      if (now - moved > kSilence) {
        fmt::print(stderr, "no record for {} s after {}\n", kSilence.count(), seen);
        std::abort();
      }
      if (now - said < time_ / 12) continue;
      said = now;
      fmt::print("{:6.1f} min  {:9} records  {:7} failed  {:2} wrong  {:7} faults  RSS {:.1f} MB\n",
                 std::chrono::duration<double>(now - start).count() / 60, judge_.records.load(),
                 judge_.failed.load(), judge_.wrong.load(), faults_.load(), Megabytes(resident));
      std::fflush(stdout);
    }
  }

  const Judge& judge_;
  const std::atomic<uint64_t>& faults_;
  const std::chrono::seconds time_;
  std::vector<uint64_t> largest_ = std::vector<uint64_t>(3);  // bytes, by third of the time
  std::mutex mutex_;
  std::condition_variable wake_;
  bool over_ = false;
  std::thread thread_;
};

RunConfig Config(uint32_t seed) {
  RunConfig c;
  c.threads = 2;
  c.frames = 2;
  c.slots = 6;
  c.rows = 32;
  c.sequences = 12;
  c.page_tokens = 4;
  // A context and a little more: sequences are preempted.
  c.kv_pages = (c.context + c.page_tokens - 1) / c.page_tokens + 16;
  c.kv_ram_layers = 2;
  c.dense_windows = 2;  // for four layers
  c.drafts = 2;
  c.random_depth = true;
  c.reader = ReaderKind::kUring;
  c.seed = seed;
  return c;
}

bool Soak(std::chrono::seconds time, uint32_t seed) {
  TempDir folder;
  WriteSmallModel(folder.Path("model"));
  const TestModel m(folder.Path("model"), {.layers = 1});
  const RunConfig c = Config(seed);
  fmt::print("{}\n", c.Text());
  const RunFiles files(m.model, c);
  EngineOptions options = EngineOptionsOf(m, c);
  options.kv_file = files.Kv();
  std::atomic<uint64_t> faults{0};
  Judge judge;
  EndlessSource source(Clock::now() + time, seed);
  Observer observer(judge, faults, time);
  {
    Engine engine(
        m.model, m.tokenizer, options,
        std::make_unique<FaultyReader>(ReaderOf(c, files.Table(), nullptr), seed, &faults), source);
    OutputWriter::Options writing;
    writing.fd = judge.Fd();
    writing.on_written = [&](uint32_t sequence) { engine.Closed(sequence); };
    OutputWriter writer(std::move(writing));
    Deliverer::Options delivery;
    delivery.context = TestContext(m.tokenizer);
    delivery.sequences = static_cast<uint32_t>(c.sequences);
    delivery.close = [&](uint32_t sequence) { engine.Closed(sequence); };
    Deliverer deliverer(std::move(delivery), writer);
    engine.Run(deliverer);
    CHECK(writer.Finish() == OutputWriter::State::kOk);
    const EngineStats stats = engine.Stats();
    const auto gigabytes = [](uint64_t bytes) { return static_cast<double>(bytes) * 1e-9; };
    fmt::print(
        "read: {:.2f} GB of experts, {:.2f} of dense weights, {:.2f} all in all; {:.2f} GB of KV "
        "written; {} sequences preempted\n",
        gigabytes(stats.cache.BytesRead()), gigabytes(stats.dense.Bytes()),
        gigabytes(stats.reader.demand_bytes + stats.reader.ahead_bytes +
                  stats.reader.prefetch_bytes),
        gigabytes(stats.reader.written_bytes), stats.scheduler.preemptions);
  }
  judge.Finish();
  observer.Finish();
  const std::vector<uint64_t>& largest = observer.Largest();
  const bool flat = largest[2] <= largest[1] + kFlatBytes;
  const bool whole = judge.records == source.Lines() && judge.wrong == 0;
  const bool meaningful = judge.failed > 0 && judge.failed < judge.records;
  fmt::print("{} lines, {} records, {} failed, {} wrong, {} faults, seed {}\n", source.Lines(),
             judge.records.load(), judge.failed.load(), judge.wrong.load(), faults.load(), seed);
  fmt::print("RSS, largest of each third: {:.1f}, {:.1f}, {:.1f} MB: {}\n", Megabytes(largest[0]),
             Megabytes(largest[1]), Megabytes(largest[2]), flat ? "flat" : "GROWS");
  if (!whole) fmt::print("LINES LOST OR WRONG\n");
  if (!meaningful) fmt::print("no faults, or nothing but faults: proves nothing\n");
  return flat && whole && meaningful;
}

}  // namespace
}  // namespace colibri

int main(int argc, char** argv) {
  // What the rig checks is checked outside of any test case.
  doctest::Context context;
  context.setAsDefaultForAssertsOutOfTestCases();
  const double minutes = argc > 1 ? std::atof(argv[1]) : 30;
  const auto time = std::chrono::seconds(static_cast<int64_t>(minutes * 60));
  const auto seed = argc > 2 ? static_cast<uint32_t>(std::atoi(argv[2])) : std::random_device()();
  if (time.count() < 12) {
    std::fputs("usage: soak [MINUTES] [SEED], at least 0.2 minutes\n", stderr);
    return 2;
  }
  return colibri::Soak(time, seed) ? 0 : 1;
}
