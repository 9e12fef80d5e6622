// ExpertCache under random load of several threads: over the pread reader, and over one whose reads
// end in random order, late, or with an error.
#include <doctest/doctest.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/expert_cache.h"
#include "io/file.h"
#include "io/slot_pool.h"
#include "tests/shuffled_reader.h"
#include "tests/temp_dir.h"
#include "tests/watchdog.h"

namespace colibri {
namespace {

enum class Drive : uint8_t { kPread, kShuffled };

// Several workers request, hint, route and unpin at random; every answer is compared with the file.
// One file is truncated so that reads fail too; of shuffled reads any may.
struct RandomRun {
  static constexpr uint32_t kItems = 120;
  static constexpr uint32_t kLayers = 6;
  static constexpr uint32_t kRequests = 1500;  // for each worker

  RandomRun(Drive drive_in, uint32_t slots, uint32_t seed_in) : drive(drive_in), seed(seed_in) {
    // Page i of file 0 and one or two pages of file 1: two slot classes.
    files.Add(dir.Write("0", PatternBytes(0, kItems * kIoAlign)));
    files.Add(dir.Write("1", PatternBytes(1, (kItems + 2) * kIoAlign)));
    if (drive == Drive::kPread) {
      std::filesystem::resize_file(dir.Path("1"), (kItems - 8) * kIoAlign);
    }
    std::vector<CacheItem> items;
    extents.reserve(kItems);
    for (uint32_t i = 0; i < kItems; ++i) {
      const Extent one = {0, i * kIoAlign, kIoAlign, 0};
      if (i % 3 == 0) {
        extents.push_back({one, {1, i * kIoAlign, 2 * kIoAlign, kIoAlign}});
      } else {
        extents.push_back({one, {1, i * kIoAlign, kIoAlign, kIoAlign}});
      }
    }
    for (uint32_t i = 0; i < kItems; ++i) {
      items.push_back(
          {static_cast<uint16_t>(i % kLayers), static_cast<uint16_t>(i % 3 == 0), extents[i]});
    }
    pool = std::make_unique<SlotPool>(
        std::vector<SlotClass>{{2 * kIoAlign, slots}, {3 * kIoAlign, slots}});
    if (drive == Drive::kPread) {
      reader = MakeReader(IoBackend::kPread, files, {.depth = 4, .prefetch_depth = 2}, nullptr);
    } else {
      reader = std::make_unique<ShuffledReader>(
          files, seed, [random = std::mt19937(seed)](const ReadJob& job) mutable {
            const bool past = PastTheEnd(job.extents[1]);
            return past ? ENODATA : random() % 20 == 0 ? EIO : 0;
          });
    }
    cache = std::make_unique<ExpertCache>(std::move(items), *pool, *reader,
                                          [this](const ReadyItem& ready) { Answered(ready); });
  }

  void Answered(const ReadyItem& ready) {
    {
      std::lock_guard lock(mutex);
      answered.push_back(ready);
    }
    changed.notify_one();
  }

  static bool PastTheEnd(const Extent& extent) {
    return extent.offset + extent.bytes > (kItems - 8) * kIoAlign;
  }
  bool MayFail(uint32_t item) const { return PastTheEnd(extents[item][1]); }

  void Check(uint32_t item, const std::byte* data, const ReadResult& result) {
    ++answers;
    if (data == nullptr) {
      const bool drawn = drive == Drive::kShuffled && result.error == EIO;
      if (!drawn && (result.error != ENODATA || !MayFail(item))) ++wrong;
      return;
    }
    if (MayFail(item)) ++wrong;
    for (const Extent& extent : extents[item]) {
      for (uint64_t i = 0; i < extent.bytes; i += 61) {
        if (data[extent.dest + i] != PatternByte(extent.file, extent.offset + i)) ++wrong;
      }
    }
    cache->Unpin(item);
  }

  void Work(uint32_t worker) {
    std::mt19937 random(seed * 977 + worker);
    const uint16_t frame = static_cast<uint16_t>(worker);
    for (uint32_t i = 0; i < kRequests; ++i) {
      const uint32_t item = static_cast<uint32_t>(random() % kItems);
      switch (random() % 4) {
        case 0:
          cache->Hint(static_cast<uint16_t>(item % kLayers), frame, std::span(&item, 1));
          break;
        case 1:
          cache->LayerRouted(static_cast<uint16_t>(random() % kLayers), frame);
          break;
        default:
          break;
      }
      if (const std::byte* data = cache->Request(item, item)) {
        Check(item, data, {});
      } else {
        ++owed;
      }
    }
  }

  // Answers are checked and unpinned here, away from the thread that delivers them.
  void Consume() {
    for (;;) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return !answered.empty() || over; });
      if (answered.empty()) return;
      const ReadyItem ready = answered.front();
      answered.pop_front();
      lock.unlock();
      if (ready.waiter != ready.item) ++wrong;
      Check(ready.item, ready.data, ready.result);
      --owed;
    }
  }

  void Run() {
    std::vector<std::thread> workers;
    std::thread consumers[2] = {std::thread([&] { Consume(); }), std::thread([&] { Consume(); })};
    for (uint32_t worker = 0; worker < 3; ++worker) {
      workers.emplace_back([&, worker] { Work(worker); });
    }
    for (std::thread& worker : workers) worker.join();
    // Every request is answered without any further push: a lost wake-up hangs here.
    while (owed > 0) std::this_thread::yield();
    {
      std::lock_guard lock(mutex);
      over = true;
    }
    changed.notify_all();
    for (std::thread& consumer : consumers) consumer.join();
    cache->DropHints();
    cache->Stop();
    cache->CheckIdle();
  }

  const Drive drive;
  const uint32_t seed;
  TempDir dir;
  FileTable files;
  std::vector<std::vector<Extent>> extents;
  std::unique_ptr<SlotPool> pool;
  std::unique_ptr<Reader> reader;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<ReadyItem> answered;
  bool over = false;
  std::atomic<int64_t> owed{0};
  std::atomic<uint64_t> answers{0}, wrong{0};
  std::unique_ptr<ExpertCache> cache;
};

TEST_CASE("random requests of several threads all get their item's bytes or its error") {
  for (const Drive drive : {Drive::kPread, Drive::kShuffled}) {
    for (const uint32_t slots : {1u, 3u, 16u, 100u}) {
      const Watchdog watchdog("random requests with slots and seed " + std::to_string(slots));
      RandomRun run(drive, slots, slots);
      run.Run();
      CAPTURE(static_cast<int>(drive));
      CAPTURE(slots);
      CHECK(run.wrong == 0);
      CHECK(run.answers == 3 * RandomRun::kRequests);
      const CacheStats stats = run.cache->Stats();
      CHECK(stats.hits + stats.joined + stats.misses == 3 * RandomRun::kRequests);
      CHECK(stats.failures > 0);
    }
  }
}

}  // namespace
}  // namespace colibri
