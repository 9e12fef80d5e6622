// A Reader whose reads end in random order, after random pauses, and fail when the test says so.
// Bytes come from the files and go there. Threads: one of its own, on which every callback runs.
#pragma once

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/file.h"
#include "io/reader.h"
#include "tests/job_bytes.h"

namespace colibri {

class ShuffledReader final : public Reader {
 public:
  // The errno a job ends with, 0 for none. Called on the reader's thread.
  using Fault = std::function<int(const ReadJob& job)>;

  ShuffledReader(const FileTable& files, uint32_t seed, Fault fault = nullptr)
      : files_(files), fault_(std::move(fault)), random_(seed) {}
  ~ShuffledReader() override { Stop(); }

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
  // A job keeps its class, so that guesses somebody has joined by now can be failed as well.
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
  std::string Name() const override { return "shuffled"; }

 private:
  void Loop() {
    for (;;) {
      // More jobs may come meanwhile, so that there is an order to be shuffled.
      for (uint32_t pauses = static_cast<uint32_t>(random_()) % 8; pauses > 0; --pauses) {
        std::this_thread::yield();
      }
      ReadJob job;
      bool stopping = false;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] { return stopping_ || !pending_.empty(); });
        if (pending_.empty()) return;
        stopping = stopping_;
        const size_t at = random_() % pending_.size();
        job = pending_[at];
        pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(at));
      }
      const Extent& first = job.extents.front();
      const int error = stopping ? ECANCELED : fault_ ? fault_(job) : 0;
      if (error == 0) MoveJobBytes(files_, job);
      done_(job.id, {error, first.file, first.offset});
    }
  }

  const FileTable& files_;
  const Fault fault_;
  std::mt19937 random_;  // its own thread only
  ReadDone done_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<ReadJob> pending_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace colibri
