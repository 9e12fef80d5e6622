// A reader that tells the profile when reads or writes are in flight and when none is, and for a
// trace what each of them was.
// Threads: as the reader it wraps.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "graph/profile.h"
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
  void Stop() override { reader_->Stop(); }
  ReaderStats Stats() const override { return reader_->Stats(); }
  std::string Name() const override { return reader_->Name(); }

 private:
  struct Traced {
    Profile::Clock::time_point start;
    const char* name = "";
    uint64_t bytes = 0;
  };

  static const char* TraceName(const ReadJob& job) {
    if (job.write) return "write";
    if (job.read_class == ReadClass::kDemand) return "demand";
    return job.read_class == ReadClass::kAhead ? "ahead" : "prefetch";
  }
  void Started(const ReadJob& job) {
    const std::lock_guard lock(mutex_);
    if (jobs_++ == 0) profile_.ReadsBusy(true);
    if (!profile_.Tracing()) return;
    Traced traced{Profile::Clock::now(), TraceName(job), 0};
    for (const Extent& extent : job.extents) traced.bytes += extent.bytes;
    traced_[job.id] = traced;
  }
  void Ended(uint64_t id, bool done) {
    const std::lock_guard lock(mutex_);
    if (--jobs_ == 0) profile_.ReadsBusy(false);
    const auto at = traced_.find(id);
    if (at == traced_.end()) return;
    if (done) profile_.AddRead(at->second.start, at->second.name, at->second.bytes);
    traced_.erase(at);
  }

  std::unique_ptr<Reader> reader_;
  Profile& profile_;
  std::mutex mutex_;
  int jobs_ = 0;
  std::unordered_map<uint64_t, Traced> traced_;
};

}  // namespace colibri
