// The command io.
//
// Every run reads the next experts of its order, so that neither the page cache nor a cache below
// it (a virtual machine's host) shows one run what another has just read; what is read buffered is
// dropped from the page cache before.
#include "bench/io_bench.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

#include "io/error.h"
#include "io/file.h"
#include "io/slot_pool.h"
#include "runtime/weights.h"

namespace colibri {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr int kRawThreads = 32;

double Seconds(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// The q-th part of the sorted values; 0.5 is the median.
double Quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1,
                         static_cast<size_t>(q * static_cast<double>(values.size())))];
}

using Object = std::vector<Extent>;  // one expert

uint64_t BytesOf(const Object& object) {
  uint64_t bytes = 0;
  for (const Extent& e : object) bytes += e.bytes;
  return bytes;
}

// What is read: the objects in file order, and their files opened both ways.
struct Source {
  FileTable direct, buffered;
  std::vector<Object> objects;
  uint64_t slot_bytes = 0;

  void Open(const std::string& path) {
    direct.Add(path);
    buffered.Add(path);
  }
};

void OpenSource(const IoBenchOptions& o, Source* source) {
  if (!o.model.empty()) {
    const Model model(o.model);
    const FileTable& files = model.Files().Files();
    for (uint32_t f = 0; f < files.Count(); ++f) source->Open(files.Path(f));
    for (uint32_t i = 0; i < model.ExpertCount(); ++i) {
      source->objects.push_back(model.Expert(i).extents);
      source->slot_bytes = std::max(source->slot_bytes, model.Expert(i).slot_bytes);
    }
  } else {
    source->Open(o.file);
    source->slot_bytes = (o.piece + kIoAlign - 1) / kIoAlign * kIoAlign;
    // Whole pieces only: every figure is of reads of one size.
    for (uint64_t at = 0; at + source->slot_bytes <= source->direct.Size(0);
         at += source->slot_bytes) {
      source->objects.push_back({{0, at, source->slot_bytes, 0}});
    }
  }
  if (source->objects.empty()) throw UsageError("io: there is nothing of this size to read");
  std::sort(source->objects.begin(), source->objects.end(), [](const Object& a, const Object& b) {
    return std::pair(a.front().file, a.front().offset) <
           std::pair(b.front().file, b.front().offset);
  });
  if (const std::string note = source->direct.EnableDirect(); !note.empty()) {
    fmt::print(stderr, "{}\n", note);
  }
}

// The objects in one order, round and round.
class Order {
 public:
  Order(size_t count, const std::string& name) : numbers_(count) {
    std::iota(numbers_.begin(), numbers_.end(), size_t{0});
    std::mt19937 random(1);
    if (name == "random") std::shuffle(numbers_.begin(), numbers_.end(), random);
  }
  // The next ones, `bytes` or a little more.
  std::vector<const Object*> Next(const Source& source, uint64_t bytes) {
    std::vector<const Object*> taken;
    for (uint64_t sum = 0; sum < bytes && taken.size() < numbers_.size(); ++at_) {
      taken.push_back(&source.objects[numbers_[at_ % numbers_.size()]]);
      sum += BytesOf(*taken.back());
    }
    return taken;
  }

 private:
  std::vector<size_t> numbers_;
  size_t at_ = 0;
};

void DropCached(const FileTable& files, const std::vector<const Object*>& objects) {
  for (const Object* object : objects) {
    for (const Extent& e : *object) {
      if (files.IsDirect(e.file)) continue;
      (void)posix_fadvise(files.Fd(e.file), static_cast<off_t>(e.offset),
                          static_cast<off_t>(e.bytes), POSIX_FADV_DONTNEED);
    }
  }
}

struct Run {
  double gb_per_second = 0, cpu_per_gb = 0;
  std::vector<double> demand_seconds;
};

// Bytes and both clocks from construction to End().
class Meter {
 public:
  Run End(uint64_t bytes) const {
    const double gb = static_cast<double>(bytes) * 1e-9;
    return {gb / (Seconds(CLOCK_MONOTONIC) - wall_),
            (Seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu_) / gb,
            {}};
  }

 private:
  double wall_ = Seconds(CLOCK_MONOTONIC), cpu_ = Seconds(CLOCK_PROCESS_CPUTIME_ID);
};

uint64_t TotalBytes(const std::vector<const Object*>& objects) {
  uint64_t bytes = 0;
  for (const Object* object : objects) bytes += BytesOf(*object);
  return bytes;
}

// Threads that each read the next MiB, nothing else.
Run RawRun(const FileTable& files, const SlotPool& slots,
           const std::vector<const Object*>& objects) {
  struct Piece {
    uint32_t file;
    uint64_t offset, bytes;
  };
  std::vector<Piece> pieces;
  for (const Object* object : objects) {
    for (const Extent& e : *object) {
      for (uint64_t at = 0; at < e.bytes; at += kMiB) {
        pieces.push_back({e.file, e.offset + at, std::min(kMiB, e.bytes - at)});
      }
    }
  }
  DropCached(files, objects);
  std::atomic<size_t> next{0};
  std::atomic<uint64_t> bytes{0};
  std::atomic<int> error{0};
  const Meter meter;
  std::vector<std::thread> threads;
  for (int t = 0; t < kRawThreads; ++t) {
    threads.emplace_back([&, t] {
      std::byte* into = slots.Data(0, 0) + static_cast<uint64_t>(t) * kMiB;
      for (size_t i = next++; i < pieces.size(); i = next++) {
        const Piece& p = pieces[i];
        const ssize_t got =
            pread(files.DirectFd(p.file), into, p.bytes, static_cast<off_t>(p.offset));
        if (got < 0) {
          error = errno;
          return;
        }
        bytes += static_cast<uint64_t>(got);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (error != 0) throw IoError(fmt::format("io: the plain loop: {}", std::strerror(error)));
  return meter.End(bytes);
}

// Every object through the reader, as many at a time as there are slots. With `demand_every` > 0
// objects are prefetched, and each time so many have come, one is demanded and timed.
class ReaderRun {
 public:
  ReaderRun(Reader& reader, const SlotPool& slots, const FileTable& files)
      : reader_(reader), slots_(slots), files_(files) {
    reader_.Start([this](uint64_t id, const ReadResult& result) {
      const double now = Seconds(CLOCK_MONOTONIC);
      {
        std::lock_guard lock(mutex_);
        done_.push_back({id, now, result});
      }
      changed_.notify_one();
    });
  }
  ~ReaderRun() { reader_.Stop(); }

  Run Go(const std::vector<const Object*>& objects, size_t demand_every) {
    DropCached(files_, objects);
    const Meter meter;
    Run run;
    std::vector<uint32_t> free(slots_.Count(0));
    std::iota(free.begin(), free.end(), 0u);
    std::vector<uint32_t> slot_of(objects.size());
    size_t next = 0, ended = 0, since_demand = 0, demanded = objects.size();
    double demanded_at = 0;
    // Guesses under way; a short run keeps some objects to be demanded.
    const size_t window = std::max<size_t>(1, std::min(free.size() - 1, objects.size() / 3));
    const auto submit = [&](ReadClass read_class) {
      slot_of[next] = free.back();
      free.pop_back();
      reader_.Submit({next, read_class, slots_.Data(0, slot_of[next]), *objects[next]});
      ++next;
    };
    while (ended < objects.size()) {
      const bool demand = demand_every > 0 && demanded == objects.size() &&
                          since_demand >= demand_every && !free.empty() && next < objects.size();
      if (demand) {
        demanded = next;
        since_demand = 0;
        demanded_at = Seconds(CLOCK_MONOTONIC);
        submit(ReadClass::kDemand);
      }
      while (!free.empty() && next < objects.size() &&
             (demand_every == 0 || next - ended < window)) {
        submit(demand_every > 0 ? ReadClass::kPrefetch : ReadClass::kDemand);
      }
      for (const Done& done : Take()) {
        Check(done);
        if (done.id == demanded) {
          run.demand_seconds.push_back(done.at - demanded_at);
          demanded = objects.size();
        } else {
          ++since_demand;
        }
        free.push_back(slot_of[done.id]);
        ++ended;
      }
    }
    const Run totals = meter.End(TotalBytes(objects));
    run.gb_per_second = totals.gb_per_second;
    run.cpu_per_gb = totals.cpu_per_gb;
    return run;
  }

 private:
  struct Done {
    uint64_t id;
    double at;
    ReadResult result;
  };

  std::vector<Done> Take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !done_.empty(); });
    return std::exchange(done_, {});
  }

  void Check(const Done& done) const {
    if (done.result.error == 0) return;
    throw IoError(fmt::format("io: {} at offset {}: {}", files_.Path(done.result.file),
                              done.result.offset, std::strerror(done.result.error)));
  }

  Reader& reader_;
  const SlotPool& slots_;
  const FileTable& files_;
  std::mutex mutex_;  // guards done_
  std::condition_variable changed_;
  std::vector<Done> done_;
};

// One line of the table and its runs.
struct Case {
  std::string backend, reads, order;
  int32_t depth = 0;
  std::vector<double> rates, cpu, demand;
};

void RunCase(const Source& source, const SlotPool& slots, Order& order, uint64_t bytes, Case* c) {
  const FileTable& files = c->reads == "direct" ? source.direct : source.buffered;
  const auto keep = [c](const Run& run) {
    c->rates.push_back(run.gb_per_second);
    c->cpu.push_back(run.cpu_per_gb);
  };
  if (c->backend == "plain loop") {
    keep(RawRun(files, slots, order.Next(source, bytes / 2)));
    return;
  }
  ReaderOptions options;
  options.depth = c->depth;
  options.prefetch_depth = std::min(options.prefetch_depth, c->depth);
  const auto reader = MakeReader(c->backend == "uring" ? IoBackend::kUring : IoBackend::kPread,
                                 files, options, nullptr);
  ReaderRun run(*reader, slots, files);
  keep(run.Go(order.Next(source, bytes / 2), 0));
  const Run under_way = run.Go(order.Next(source, bytes / 2), 2);
  c->demand.insert(c->demand.end(), under_way.demand_seconds.begin(),
                   under_way.demand_seconds.end());
}

std::vector<Case> CasesOf(const IoBenchOptions& o) {
  std::vector<Case> cases;
  for (const std::string& reads : o.reads) {
    for (const std::string& order : o.orders) {
      cases.push_back({"plain loop", reads, order, kRawThreads, {}, {}, {}});
      for (const std::string& backend : o.backends) {
        for (const int32_t depth : o.depths) {
          cases.push_back({backend, reads, order, depth, {}, {}, {}});
        }
      }
    }
  }
  return cases;
}

Table TableOf(const std::vector<Case>& cases) {
  Table table({{"backend", "backend", false},
               {"reads", "reads", false},
               {"order", "order", false},
               {"depth", "depth"},
               {"gb_per_second", "GB/s"},
               {"plain_share", "% of plain"},
               {"cpu_ms_per_gb", "CPU ms/GB"},
               {"demand_ms", "demand ms"},
               {"demand_p99_ms", "p99 ms"}});
  std::vector<double> plain;  // of the same repetition, as the machine's pace drifts
  for (const Case& c : cases) {
    if (c.backend == "plain loop") plain = c.rates;
    std::vector<double> shares;
    for (size_t r = 0; r < c.rates.size(); ++r) shares.push_back(c.rates[r] / plain[r]);
    const auto ms = [&c](double q) {
      return c.demand.empty() ? "" : fmt::format("{:.2f}", 1e3 * Quantile(c.demand, q));
    };
    table.Add({c.backend, c.reads, c.order, std::to_string(c.depth),
               fmt::format("{:.3f}", Quantile(c.rates, 0.5)),
               fmt::format("{:.1f}", 100 * Quantile(shares, 0.5)),
               fmt::format("{:.1f}", 1e3 * Quantile(c.cpu, 0.5)), ms(0.5), ms(0.99)});
  }
  return table;
}

}  // namespace

int RunIoBench(const IoBenchOptions& options) {
  Source source;
  OpenSource(options, &source);
  std::vector<Case> cases = CasesOf(options);
  // Room for the plain loop's threads and for twice the deepest queue, so that a reader always has
  // more to send than it may.
  uint64_t room = kRawThreads * kMiB;
  for (const int32_t depth : options.depths) {
    room = std::max(room, 2 * static_cast<uint64_t>(depth) * kMiB);
  }
  const auto count = static_cast<uint32_t>(std::max<uint64_t>(4, room / source.slot_bytes + 1));
  const SlotPool slots({{source.slot_bytes, count}});

  const auto repetitions = static_cast<uint64_t>(options.repetitions);
  const uint64_t bytes = std::max<uint64_t>(1, options.bytes / repetitions);
  std::vector<Order> orders;
  for (const std::string& name : options.orders) orders.emplace_back(source.objects.size(), name);
  for (uint64_t r = 0; r < repetitions; ++r) {
    for (Case& c : cases) {
      const auto order = std::find(options.orders.begin(), options.orders.end(), c.order);
      RunCase(source, slots, orders[static_cast<size_t>(order - options.orders.begin())], bytes,
              &c);
    }
  }
  fmt::print("{}", TableOf(cases).Text(options.format));
  return 0;
}

}  // namespace colibri
