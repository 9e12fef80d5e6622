// Readers for measuring: one that notes what was read, one that answers at once and reads nothing,
// and a run of plain reads of the same experts.
// Threads: as Reader; RawReadRate blocks.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "io/reader.h"
#include "runtime/weights.h"

namespace colibri {

// Passes everything on and appends the item of each expert read to `items`, which outlives it.
class NotingReader final : public Reader {
 public:
  NotingReader(std::unique_ptr<Reader> reader, std::vector<uint32_t>* items)
      : reader_(std::move(reader)), items_(items) {}
  void Start(ReadDone done) override { reader_->Start(std::move(done)); }
  void Submit(const ReadJob& job) override;
  void Promote(uint64_t id) override { reader_->Promote(id); }
  bool Cancel(uint64_t id) override { return reader_->Cancel(id); }
  void CutShort(uint64_t id) override { reader_->CutShort(id); }
  void Stop() override { reader_->Stop(); }
  ReaderStats Stats() const override { return reader_->Stats(); }
  std::string Name() const override { return reader_->Name(); }

 private:
  std::unique_ptr<Reader> reader_;
  std::mutex mutex_;
  std::vector<uint32_t>* items_;
};

// Every job is done as soon as its thread comes to it; destinations stay as they were (zeros at
// first: experts that add nothing), files too. What a run takes with it is what computing alone
// takes.
class InstantReader final : public Reader {
 public:
  ~InstantReader() override { Stop(); }
  void Start(ReadDone done) override;
  void Submit(const ReadJob& job) override;
  void Promote(uint64_t /*id*/) override {}
  bool Cancel(uint64_t /*id*/) override { return false; }
  void Stop() override;
  ReaderStats Stats() const override { return {}; }
  std::string Name() const override { return "nothing is read"; }

 private:
  void Run();
  ReadDone done_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<uint64_t> jobs_;
  bool stopping_ = false;
  std::thread thread_;
};

// Bytes a second of reading `items` in their order, from the first on until `seconds` have gone by,
// with nothing else going on. `memory`: bytes to read into, at least one expert's. 0: a read
// failed, or there are none.
double RawReadRate(const Model& model, const std::function<std::unique_ptr<Reader>()>& open_reader,
                   std::span<const uint32_t> items, double seconds,
                   uint64_t memory = uint64_t{1} << 28);

}  // namespace colibri
