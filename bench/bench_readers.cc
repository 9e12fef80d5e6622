#include "bench/bench_readers.h"

#include <algorithm>
#include <chrono>

#include "io/memory.h"
#include "io/read_hub.h"

namespace colibri {

void NotingReader::Submit(const ReadJob& job) {
  // The experts' port is the engine's first.
  if (!job.write && job.id >> ReadHub::kIdBits == 0) {
    const std::lock_guard lock(mutex_);
    items_->push_back(static_cast<uint32_t>(job.id));  // the cache's ids are generation and item
  }
  reader_->Submit(job);
}

void InstantReader::Start(ReadDone done) {
  done_ = std::move(done);
  thread_ = std::thread([this] { Run(); });
}

void InstantReader::Submit(const ReadJob& job) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(job.id);
  }
  wake_.notify_one();
}

void InstantReader::Stop() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void InstantReader::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const uint64_t id = jobs_.front();
    jobs_.pop_front();
    lock.unlock();
    done_(id, ReadResult{});
    lock.lock();
  }
}

double RawReadRate(const Model& model, const std::function<std::unique_ptr<Reader>()>& open_reader,
                   std::span<const uint32_t> items, double seconds, uint64_t memory) {
  using Clock = std::chrono::steady_clock;
  // Enough experts at once that the reader's queue is never empty, however small they are.
  constexpr size_t kSlots = 64;
  uint64_t widest = 0;
  for (const uint32_t item : items) widest = std::max(widest, model.Expert(item).slot_bytes);
  if (widest == 0) return 0;
  const size_t slots = std::clamp<size_t>(memory / widest, 1, kSlots);
  const PopulatedBuffer buffer(widest * slots, "the raw read");
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<size_t> free(slots), slot_of(items.size());
  for (size_t i = 0; i < slots; ++i) free[i] = i;
  bool failed = false;
  const std::unique_ptr<Reader> reader = open_reader();
  reader->Start([&](uint64_t id, const ReadResult& result) {
    const std::lock_guard lock(mutex);
    failed |= result.error != 0;
    free.push_back(slot_of[id]);
    wake.notify_one();
  });
  uint64_t bytes = 0;
  const auto start = Clock::now();
  const auto passed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  std::unique_lock lock(mutex);
  for (size_t i = 0; i < items.size() && passed() < seconds; ++i) {
    wake.wait(lock, [&] { return !free.empty(); });
    slot_of[i] = free.back();
    free.pop_back();
    const ExpertLayout& expert = model.Expert(items[i]);
    bytes += expert.slot_bytes;
    lock.unlock();
    reader->Submit({i, ReadClass::kDemand, buffer.data() + widest * slot_of[i], expert.extents});
    lock.lock();
  }
  wake.wait(lock, [&] { return free.size() == slots; });
  const double took = passed();
  lock.unlock();
  reader->Stop();
  return failed || took <= 0 ? 0 : static_cast<double>(bytes) / took;
}

}  // namespace colibri
