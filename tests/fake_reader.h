// A Reader that a test scripts: it records what is submitted and completes it when, in the order
// and with the error the test says. Bytes come from files, or are made up from file and offset
// where the test has written none. Threads: any; a callback runs on the thread that calls Complete
// or Stop.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "io/check.h"
#include "io/file.h"
#include "io/reader.h"
#include "tests/job_bytes.h"

namespace colibri {

class FakeReader final : public Reader {
 public:
  // What the test sees of a job that is submitted and not over. `sent`: Cancel is refused.
  struct Pending {
    ReadJob job;
    bool promoted = false;
    bool sent = false;
    bool cut = false;  // CutShort
  };

  // With `files`, destinations get the files' bytes (what lies past a file's end stays as it was)
  // and writes go there; without, destinations get what was written before, else SyntheticByte.
  explicit FakeReader(const FileTable* files = nullptr) : files_(files) {}

  static std::byte SyntheticByte(uint32_t file, uint64_t offset) {
    return static_cast<std::byte>(file * 131 + offset / kIoAlign * 17 + offset % 251);
  }

  void Start(ReadDone done) override { done_ = std::move(done); }

  void Submit(const ReadJob& job) override {
    std::lock_guard lock(mutex_);
    pending_.push_back({job});
    ++submissions_;
  }

  void Promote(uint64_t id) override {
    std::lock_guard lock(mutex_);
    for (Pending& pending : pending_) {
      if (pending.job.id == id) pending.promoted = true;
    }
  }

  bool Cancel(uint64_t id) override {
    std::lock_guard lock(mutex_);
    return std::erase_if(pending_, [&](const Pending& pending) {
             return pending.job.id == id && !pending.sent;
           }) > 0;
  }

  void CutShort(uint64_t id) override {
    std::lock_guard lock(mutex_);
    for (Pending& pending : pending_) {
      if (pending.job.id == id) pending.cut = true;
    }
  }

  // As the contract says, jobs that nobody "sent" end with ECANCELED; those sent end well.
  void Stop() override {
    for (;;) {
      const std::vector<Pending> left = All();
      if (left.empty()) return;
      Complete(left.front().job.id, left.front().sent ? 0 : ECANCELED);
    }
  }

  ReaderStats Stats() const override { return {}; }
  std::string Name() const override { return "fake"; }

  std::vector<Pending> All() const {
    std::lock_guard lock(mutex_);
    return pending_;
  }
  size_t PendingCount() const { return All().size(); }
  // Jobs ever submitted.
  size_t Submissions() const {
    std::lock_guard lock(mutex_);
    return submissions_;
  }

  // The job has got so far that Cancel is refused.
  void MarkSent(uint64_t id) {
    std::lock_guard lock(mutex_);
    for (Pending& pending : pending_) {
      if (pending.job.id == id) pending.sent = true;
    }
  }

  // Ends a pending job: moves its bytes (error 0) and runs the callback on this thread.
  void Complete(uint64_t id, int error = 0) {
    Pending over;
    {
      std::lock_guard lock(mutex_);
      const auto at = std::find_if(pending_.begin(), pending_.end(),
                                   [&](const Pending& pending) { return pending.job.id == id; });
      COLIBRI_CHECK(at != pending_.end());
      over = *at;
      pending_.erase(at);
    }
    if (error == 0) Move(over.job);
    const Extent where = over.job.extents.empty() ? Extent{} : over.job.extents.front();
    Answer(id, {error, error == 0 ? 0 : where.file, error == 0 ? 0 : where.offset});
  }

  // False: nothing is pending.
  bool CompleteOldest(int error = 0) {
    const std::vector<Pending> pending = All();
    if (pending.empty()) return false;
    Complete(pending.front().job.id, error);
    return true;
  }

  // The callback alone, whatever is pending: answers that come late or twice.
  void Answer(uint64_t id, const ReadResult& result) { done_(id, result); }

 private:
  void Move(const ReadJob& job) {
    if (files_ != nullptr) {
      MoveJobBytes(*files_, job);
      return;
    }
    std::lock_guard lock(mutex_);
    for (const Extent& extent : job.extents) {
      for (uint64_t at = 0; at < extent.bytes; at += kIoAlign) {
        std::byte* page = job.destination + extent.dest + at;
        const std::pair place{extent.file, extent.offset + at};
        if (job.write) {
          written_[place].assign(page, page + kIoAlign);
        } else if (const auto found = written_.find(place); found != written_.end()) {
          std::copy(found->second.begin(), found->second.end(), page);
        } else {
          for (uint64_t i = 0; i < std::min(kIoAlign, extent.bytes - at); ++i) {
            page[i] = SyntheticByte(extent.file, extent.offset + at + i);
          }
        }
      }
    }
  }

  const FileTable* files_;
  ReadDone done_;
  mutable std::mutex mutex_;
  std::vector<Pending> pending_;
  size_t submissions_ = 0;
  std::map<std::pair<uint32_t, uint64_t>, std::vector<std::byte>> written_;  // pages, without files
};

}  // namespace colibri
