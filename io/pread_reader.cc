#include "io/pread_reader.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "io/check.h"
#include "io/file.h"
#include "io/read_scheduler.h"

namespace colibri {
namespace {

// Drives need about 8 requests of 1 MiB in flight for their full rate; more threads only take
// memory and cores from the matmuls.
constexpr int kThreads = 8;

class PreadReader final : public Reader {
 public:
  PreadReader(const FileTable& files, const ReaderOptions& options)
      : files_(files), scheduler_(files, options) {}
  ~PreadReader() override { Stop(); }

  void Start(ReadDone done) override {
    COLIBRI_CHECK(threads_.empty() && !stopping_);
    done_ = std::move(done);
    for (int i = 0; i < kThreads; ++i) threads_.emplace_back([this] { ReadLoop(); });
    threads_.emplace_back([this] { CallbackLoop(); });
  }

  void Submit(const ReadJob& job) override {
    scheduler_.Submit(job);
    NotifyAll();
  }

  void Promote(uint64_t id) override {
    scheduler_.Promote(id);
    NotifyAll();
  }

  bool Cancel(uint64_t id) override { return scheduler_.Cancel(id); }

  void CutShort(uint64_t id) override {
    scheduler_.CutShort(id);
    NotifyAll();
  }

  void Unthrottle() override {
    scheduler_.Unthrottle();
    NotifyAll();
  }

  void Stop() override {
    scheduler_.Close();
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    NotifyAll();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  ReaderStats Stats() const override {
    ReaderStats stats = scheduler_.Stats();
    stats.wakes = wakes_.load(std::memory_order_relaxed);
    return stats;
  }
  std::string Name() const override { return fmt::format("pread x{}", kThreads); }

 private:
  // Whoever sleeps has looked at the scheduler after reading `changes_`; a change in between moves
  // the number on, so that no wake-up is lost.
  uint64_t Changes() {
    std::lock_guard lock(mutex_);
    return changes_;
  }

  void Change() {
    std::lock_guard lock(mutex_);
    ++changes_;
  }

  void NotifyAll() {
    Change();
    work_.notify_all();
    finished_.notify_one();
  }

  void WaitForChange(std::condition_variable& condition, uint64_t seen, uint64_t wait_ns) {
    std::unique_lock lock(mutex_);
    const auto changed = [&] { return changes_ != seen; };
    if (wait_ns == 0) {
      condition.wait(lock, changed);
    } else {
      condition.wait_for(lock, std::chrono::nanoseconds(std::min<uint64_t>(wait_ns, 1'000'000'000)),
                         changed);
    }
    wakes_.fetch_add(1, std::memory_order_relaxed);
  }

  // Stopping, and no job is left. Only the callbacks of those that have ended remain.
  bool Over() {
    std::lock_guard lock(mutex_);
    return stopping_ && scheduler_.Empty();
  }

  void ReadLoop() {
    for (;;) {
      const uint64_t seen = Changes();
      const ReadScheduler::Turn turn = scheduler_.TryNext();
      if (!turn.segment) {
        if (Over()) return;
        WaitForChange(work_, seen, turn.wait_ns);
        continue;
      }
      const Segment& segment = *turn.segment;
      const int fd = segment.direct ? files_.DirectFd(segment.file) : files_.Fd(segment.file);
      const auto offset = static_cast<off_t>(segment.offset);
      const ssize_t got = segment.write ? pwrite(fd, segment.memory, segment.bytes, offset)
                                        : pread(fd, segment.memory, segment.bytes, offset);
      const bool ended =
          scheduler_.Complete(segment.index, segment.generation, got < 0 ? -errno : got);
      Change();
      // One reader suffices: this one asks for more work itself, and a completion makes room for at
      // most one more prefetch. At the end of a stop all have to see that nothing is left.
      const bool over = Over();
      if (over) {
        work_.notify_all();
      } else {
        work_.notify_one();
      }
      if (ended || over) finished_.notify_one();
    }
  }

  void CallbackLoop() {
    for (;;) {
      const uint64_t seen = Changes();
      // Asked before taking: a job that ends in between still gets its callback.
      const bool over = Over();
      const std::vector<FinishedRead> finished = scheduler_.TakeFinished();
      for (const FinishedRead& read : finished) done_(read.id, read.result);
      // A callback may have submitted another job, even while stopping.
      if (!finished.empty()) continue;
      if (over) return;
      WaitForChange(finished_, seen, 0);
    }
  }

  const FileTable& files_;
  ReadScheduler scheduler_;
  ReadDone done_;
  std::mutex mutex_;  // guards changes_ and stopping_
  std::condition_variable work_, finished_;
  std::atomic<uint64_t> wakes_{0};
  uint64_t changes_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Reader> MakePreadReader(const FileTable& files, const ReaderOptions& options) {
  return std::make_unique<PreadReader>(files, options);
}

}  // namespace colibri
