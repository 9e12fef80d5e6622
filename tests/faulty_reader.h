// A Reader of which one job goes wrong, the n-th that comes to its end: so a test can let every
// read and write of a run fail, one run each. Bytes come from the files and go there. Threads: one
// of its own, on which every callback runs.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/file.h"
#include "io/reader.h"
#include "tests/job_bytes.h"

namespace colibri {

enum class FaultKind : uint8_t {
  kError,   // EIO, no byte moved
  kShort,   // the file ends within it: half of the bytes are there, ENODATA
  kTorn,    // EIO, and rubbish in the place of the bytes
  kRotten,  // rubbish in the place of the bytes, and nobody says so; reads of the scratch file only
  kSlow,    // ends when all others have ended and nothing comes any more
  kNever,   // ends when the test says so (on_stuck), or with the reader
};

inline const char* NameOf(FaultKind kind) {
  static constexpr const char* kNames[] = {"error", "short", "torn", "rotten", "slow", "never"};
  return kNames[static_cast<size_t>(kind)];
}

struct Fault {
  FaultKind kind = FaultKind::kError;
  uint64_t n = 1;                 // from 1
  uint32_t scratch = UINT32_MAX;  // file that kRotten is about
  // kNever: nothing else is under way. Called once, on the reader's thread; the job ends
  // afterwards.
  std::function<void(const ReadJob& job)> on_stuck;
};

class FaultyReader final : public Reader {
 public:
  // What became of the fault, for when the reader is gone.
  struct Report {
    std::atomic<uint64_t> jobs{0};
    std::atomic<bool> fired{false};
  };

  // The others end in a random order, or the newest first.
  FaultyReader(const FileTable& files, Fault fault, Report* report, uint32_t seed,
               bool newest_first = false)
      : files_(files),
        fault_(std::move(fault)),
        report_(report),
        newest_first_(newest_first),
        random_(seed) {}
  ~FaultyReader() override { Stop(); }

  void Start(ReadDone done) override {
    done_ = std::move(done);
    thread_ = std::thread([this] { Loop(); });
  }
  void Submit(const ReadJob& job) override {
    {
      const std::lock_guard lock(mutex_);
      pending_.push_back(job);
    }
    wake_.notify_one();
  }
  void Promote(uint64_t /*id*/) override {}
  bool Cancel(uint64_t id) override {
    const std::lock_guard lock(mutex_);
    return std::erase_if(pending_, [&](const ReadJob& job) { return job.id == id; }) > 0;
  }
  void Stop() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
  }
  ReaderStats Stats() const override { return {}; }
  std::string Name() const override { return "faulty"; }

 private:
  // So long nothing has to come before what is held is let go. What the engine makes of it does not
  // depend on it.
  static constexpr auto kQuiet = std::chrono::milliseconds(2);

  bool Suits(const ReadJob& job) const {
    return fault_.kind != FaultKind::kRotten ||
           (!job.write && job.extents.front().file == fault_.scratch);
  }

  // False: over.
  bool Next(ReadJob* job, bool* stopping) {
    std::unique_lock lock(mutex_);
    const auto ready = [this] { return stopping_ || !pending_.empty(); };
    if (!held_) {
      wake_.wait(lock, ready);
    } else if (!wake_.wait_for(lock, kQuiet, ready)) {
      *job = *std::exchange(held_, std::nullopt);
      lock.unlock();
      if (fault_.on_stuck) fault_.on_stuck(*job);
      return true;
    }
    *stopping = stopping_;
    if (!pending_.empty()) {
      const size_t at = newest_first_ ? pending_.size() - 1 : random_() % pending_.size();
      *job = pending_[at];
      pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(at));
      return true;
    }
    if (!held_) return false;
    *job = *std::exchange(held_, std::nullopt);
    return true;
  }

  static void Rubbish(const ReadJob& job) {
    for (const Extent& e : job.extents) std::memset(job.destination + e.dest, 0xA5, e.bytes);
  }

  // The first half of what is asked for.
  void MoveHalf(const ReadJob& job) const {
    const std::vector<Extent> half(
        job.extents.begin(),
        job.extents.begin() + static_cast<std::ptrdiff_t>(job.extents.size() / 2));
    ReadJob part = job;
    part.extents = half;
    MoveJobBytes(files_, part);
  }

  // The error a job ends with that is not held.
  int End(const ReadJob& job, bool hit) {
    if (!hit) {
      MoveJobBytes(files_, job);
      return 0;
    }
    switch (fault_.kind) {
      case FaultKind::kShort:
        MoveHalf(job);
        return job.write ? ENOSPC : ENODATA;
      case FaultKind::kTorn:
        if (!job.write) Rubbish(job);
        return EIO;
      case FaultKind::kRotten:
        Rubbish(job);
        return 0;
      default:
        return EIO;
    }
  }

  void Loop() {
    for (;;) {
      // More jobs may come meanwhile, so that there is an order to be shuffled.
      for (uint32_t pauses = static_cast<uint32_t>(random_()) % 8; pauses > 0; --pauses) {
        std::this_thread::yield();
      }
      ReadJob job;
      bool stopping = false;
      if (!Next(&job, &stopping)) return;
      const Extent first = job.extents.front();
      if (stopping) {
        done_(job.id, {ECANCELED, first.file, first.offset});
        continue;
      }
      const bool hit =
          Suits(job) && !report_->fired && ++report_->jobs == fault_.n && !report_->fired;
      if (hit) report_->fired = true;
      if (hit && (fault_.kind == FaultKind::kSlow || fault_.kind == FaultKind::kNever)) {
        const std::lock_guard lock(mutex_);
        held_ = job;
        continue;
      }
      done_(job.id, {End(job, hit), first.file, first.offset});
    }
  }

  const FileTable& files_;
  const Fault fault_;
  Report* const report_;
  const bool newest_first_;
  std::mt19937 random_;  // its own thread only
  ReadDone done_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<ReadJob> pending_;
  std::optional<ReadJob> held_;  // the reader's own thread
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace colibri
