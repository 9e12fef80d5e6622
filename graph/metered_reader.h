// A reader that tells the profile when reads or writes are in flight and when none is, for a trace
// what each of them was, and to whoever asks what is under way.
// Threads: as the reader it wraps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "graph/profile.h"
#include "io/lock_soon.h"
#include "io/reader.h"

namespace colibri {

class MeteredReader final : public Reader {
 public:
  MeteredReader(std::unique_ptr<Reader> reader, Profile& profile)
      : reader_(std::move(reader)), profile_(profile) {}

  void Start(ReadDone done) override {
    reader_->Start([this, done = std::move(done)](uint64_t id, const ReadResult& result) {
      Ended(id, true);
      done(id, result);
    });
  }
  void Submit(const ReadJob& job) override {
    Started(job);
    reader_->Submit(job);
  }
  void Promote(uint64_t id) override { reader_->Promote(id); }
  bool Cancel(uint64_t id) override {
    const bool cancelled = reader_->Cancel(id);
    if (cancelled) Ended(id, false);
    return cancelled;
  }
  void CutShort(uint64_t id) override { reader_->CutShort(id); }
  void Unthrottle() override { reader_->Unthrottle(); }
  void Stop() override { reader_->Stop(); }
  ReaderStats Stats() const override { return reader_->Stats(); }
  std::string Name() const override { return reader_->Name(); }

  // A job that has not ended, and since when.
  struct Pending {
    Profile::Clock::time_point start;
    const char* name = "";
    Extent first;  // where it begins
    uint64_t bytes = 0;
  };
  // Oldest first; nullopt: cannot be told now.
  std::optional<std::vector<Pending>> UnderWay() const {
    std::vector<Pending> all;
    {
      const auto lock = LockSoon(mutex_);
      if (!lock.owns_lock()) return std::nullopt;
      for (const auto& [id, pending] : pending_) all.push_back(pending);
    }
    std::sort(all.begin(), all.end(),
              [](const Pending& a, const Pending& b) { return a.start < b.start; });
    return all;
  }

 private:
  static const char* NameOf(const ReadJob& job) {
    if (job.write) return "write";
    if (job.read_class == ReadClass::kDemand) return "demand";
    return job.read_class == ReadClass::kAhead ? "ahead" : "prefetch";
  }
  void Started(const ReadJob& job) {
    Pending pending{Profile::Clock::now(), NameOf(job), {}, 0};
    if (!job.extents.empty()) pending.first = job.extents.front();
    for (const Extent& extent : job.extents) pending.bytes += extent.bytes;
    const std::lock_guard lock(mutex_);
    if (pending_.empty()) profile_.ReadsBusy(true);
    pending_[job.id] = pending;
  }
  void Ended(uint64_t id, bool done) {
    const std::lock_guard lock(mutex_);
    const auto at = pending_.find(id);
    if (at == pending_.end()) return;
    const Pending pending = at->second;
    pending_.erase(at);
    if (pending_.empty()) profile_.ReadsBusy(false);
    if (done && profile_.Tracing()) profile_.AddRead(pending.start, pending.name, pending.bytes);
  }

  std::unique_ptr<Reader> reader_;
  Profile& profile_;
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, Pending> pending_;  // guarded by mutex_
};

}  // namespace colibri
