// A reader that tells the profile when reads are in flight and when none is.
// Threads: as the reader it wraps.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "graph/profile.h"
#include "io/reader.h"

namespace colibri {

class MeteredReader final : public Reader {
 public:
  MeteredReader(std::unique_ptr<Reader> reader, Profile& profile)
      : reader_(std::move(reader)), profile_(profile) {}

  void Start(ReadDone done) override {
    reader_->Start([this, done = std::move(done)](uint64_t id, const ReadResult& result) {
      Count(-1);
      done(id, result);
    });
  }
  void Submit(const ReadJob& job) override {
    Count(1);
    reader_->Submit(job);
  }
  void Promote(uint64_t id) override { reader_->Promote(id); }
  bool Cancel(uint64_t id) override {
    const bool cancelled = reader_->Cancel(id);
    if (cancelled) Count(-1);
    return cancelled;
  }
  void Stop() override { reader_->Stop(); }
  ReaderStats Stats() const override { return reader_->Stats(); }
  std::string Name() const override { return reader_->Name(); }

 private:
  void Count(int change) {
    const std::lock_guard lock(mutex_);
    const bool before = jobs_ > 0;
    jobs_ += change;
    if ((jobs_ > 0) != before) profile_.ReadsBusy(!before);
  }

  std::unique_ptr<Reader> reader_;
  Profile& profile_;
  std::mutex mutex_;
  int jobs_ = 0;
};

}  // namespace colibri
