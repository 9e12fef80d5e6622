#include "io/read_scheduler.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "io/check.h"
#include "io/file.h"

namespace colibri {
namespace {

// Far beyond any depth that helps: 1,024 segments are 1 GiB in flight.
constexpr int kMaxDepth = 1024;

// EINTR and EAGAIN are resubmitted, but a kernel that never relents must not hang the run.
constexpr int kMaxStalls = 1000;

constexpr uint64_t AlignUp(uint64_t n) { return (n + kIoAlign - 1) / kIoAlign * kIoAlign; }
constexpr uint64_t AlignDown(uint64_t n) { return n / kIoAlign * kIoAlign; }

// 20 ms of the rate, so that waking late by a scheduler tick loses no bandwidth.
uint64_t Burst(uint64_t bytes_per_second) { return std::max(kSegmentBytes, bytes_per_second / 50); }

}  // namespace

uint64_t ReadScheduler::SteadyNow() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::nanoseconds(now).count());
}

ReadScheduler::ReadScheduler(const FileTable& files, const ReaderOptions& options, Clock clock)
    : files_(files),
      prefetch_depth_(static_cast<uint32_t>(std::max(1, options.prefetch_depth))),
      clock_(std::move(clock)),
      records_(static_cast<size_t>(std::clamp(options.depth, 1, kMaxDepth))),
      bucket_(options.bytes_per_second, Burst(options.bytes_per_second)) {
  for (uint32_t i = Depth(); i-- > 0;) free_records_.push_back(i);
}

uint64_t ReadScheduler::Wanted(const Extent& extent) const {
  return std::min(extent.bytes, files_.Size(extent.file) - extent.offset);
}

void ReadScheduler::SkipFinishedExtents(Job& job) const {
  while (!Exhausted(job)) {
    const Extent& extent = job.job.extents[job.extent];
    if (extent.bytes > 0 && job.cut < Wanted(extent)) return;
    ++job.extent;
    job.cut = 0;
  }
}

void ReadScheduler::Submit(const ReadJob& job) {
  std::lock_guard lock(mutex_);
  if (closed_) {
    finished_.push_back({job.id, {ECANCELED, 0, 0}});
    return;
  }
  for (const Extent& extent : job.extents) {
    COLIBRI_CHECK(extent.file < files_.Count());
    COLIBRI_DCHECK((extent.offset | extent.bytes | extent.dest) % kIoAlign == 0);
    // A write past the end would grow the file beyond what was reserved for it.
    COLIBRI_CHECK(!job.write || (extent.offset <= files_.Size(extent.file) &&
                                 extent.bytes <= files_.Size(extent.file) - extent.offset));
    // The end may lie past the file's end, the begin may not: nothing of it would be there.
    if (extent.bytes > 0 && extent.offset >= files_.Size(extent.file)) {
      ++stats_.failures;
      finished_.push_back({job.id, {ENODATA, extent.file, extent.offset}});
      return;
    }
  }
  const auto [at, is_new] = jobs_.try_emplace(job.id);
  COLIBRI_CHECK(is_new);
  Job& added = at->second;
  added.job = job;
  SkipFinishedExtents(added);
  if (Exhausted(added)) {
    FinishIfOver(added);
  } else {
    QueueOf(added).push_back(&added);
  }
}

void ReadScheduler::Promote(uint64_t id) {
  std::lock_guard lock(mutex_);
  const auto at = jobs_.find(id);
  if (at == jobs_.end() || IsDemand(at->second)) return;
  Job& job = at->second;
  if (!Exhausted(job)) Dequeue(job);
  if (IsPrefetch(job)) prefetch_flying_ -= job.flying;
  job.job.read_class = ReadClass::kDemand;
  if (!Exhausted(job)) QueueOf(job).push_back(&job);
}

bool ReadScheduler::Cancel(uint64_t id) {
  std::lock_guard lock(mutex_);
  const auto at = jobs_.find(id);
  if (at == jobs_.end() || at->second.sent) return false;
  Dequeue(at->second);
  jobs_.erase(at);
  return true;
}

void ReadScheduler::CutShort(uint64_t id) {
  std::lock_guard lock(mutex_);
  const auto at = jobs_.find(id);
  if (at == jobs_.end() || IsDemand(at->second) || Exhausted(at->second)) return;
  Abandon(at->second, {ECANCELED, 0, 0});
  FinishIfOver(at->second);
}

void ReadScheduler::Unthrottle() {
  std::lock_guard lock(mutex_);
  bucket_.Lift();
}

ReaderStats ReadScheduler::Stats() const {
  std::lock_guard lock(mutex_);
  ReaderStats stats = stats_;
  if (flying_ > 0) stats.busy_ns += clock_() - busy_since_;
  return stats;
}

void ReadScheduler::Dequeue(Job& job) {
  std::deque<Job*>& queue = QueueOf(job);
  queue.erase(std::find(queue.begin(), queue.end(), &job));
}

ReadScheduler::Turn ReadScheduler::TryNext() {
  std::lock_guard lock(mutex_);
  for (const ReadClass read_class : {ReadClass::kDemand, ReadClass::kAhead, ReadClass::kPrefetch}) {
    if (read_class == ReadClass::kPrefetch && prefetch_flying_ >= prefetch_depth_) break;
    const auto again = std::find_if(again_.begin(), again_.end(), [&](uint32_t index) {
      return records_[index].job->job.read_class == read_class;
    });
    std::deque<Job*>& queue = queues_[static_cast<size_t>(read_class)];
    const bool can_cut = !queue.empty() && !free_records_.empty();
    if (again == again_.end() && !can_cut) continue;

    const uint64_t now = clock_();
    const uint64_t bytes =
        again != again_.end() ? records_[*again].bytes : AlignUp(NextWanted(*queue.front()));
    if (const uint64_t wait_ns = bucket_.WaitNs(bytes, now); wait_ns > 0) {
      return {std::nullopt, wait_ns};
    }
    uint32_t index = 0;
    if (again != again_.end()) {
      index = *again;
      again_.erase(again);
    } else {
      index = Cut(*queue.front());
    }
    return {Send(index, now), 0};
  }
  return {};
}

uint64_t ReadScheduler::NextWanted(const Job& job) const {
  return std::min(kSegmentBytes, Wanted(job.job.extents[job.extent]) - job.cut);
}

uint32_t ReadScheduler::Cut(Job& job) {
  const uint32_t index = free_records_.back();
  free_records_.pop_back();
  const Extent& extent = job.job.extents[job.extent];
  Record& record = records_[index];
  record.job = &job;
  record.stalls = 0;
  record.file = extent.file;
  record.offset = extent.offset + job.cut;
  record.wanted = NextWanted(job);
  record.bytes = AlignUp(record.wanted);
  record.seen = record.offset;
  record.memory = job.job.destination + extent.dest + job.cut;
  job.cut += record.bytes;
  job.sent = true;
  ++job.out;
  ++stats_.segments;
  SkipFinishedExtents(job);
  if (Exhausted(job)) QueueOf(job).pop_front();
  return index;
}

Segment ReadScheduler::Send(uint32_t index, uint64_t now) {
  Record& record = records_[index];
  record.flying = true;
  record.direct = files_.IsDirect(record.file);
  ++record.job->flying;
  if (IsPrefetch(*record.job)) ++prefetch_flying_;
  if (flying_++ == 0) busy_since_ = now;
  bucket_.Take(record.bytes);
  return {index,
          record.generation,
          record.file,
          record.direct,
          record.job->job.write,
          record.offset,
          static_cast<uint32_t>(record.bytes),
          record.memory};
}

bool ReadScheduler::Complete(uint32_t index, uint32_t generation, int64_t received) {
  std::lock_guard lock(mutex_);
  Record& record = records_[index];
  if (!record.flying || record.generation != generation) return !finished_.empty();
  Job& job = *record.job;
  record.flying = false;
  --job.flying;
  if (IsPrefetch(job)) --prefetch_flying_;
  if (--flying_ == 0) stats_.busy_ns += clock_() - busy_since_;
  const uint64_t arrived = static_cast<uint64_t>(std::max<int64_t>(received, 0));
  bucket_.GiveBack(record.bytes - std::min(record.bytes, arrived));

  const int ended_early = job.job.write ? EIO : ENODATA;
  const ReadResult here{received < 0 ? static_cast<int>(-received) : ended_early, record.file,
                        record.offset + arrived};
  const Answer answer = Judge(record, received);
  if (answer == Answer::kAgain && job.result.error == 0) {
    ++stats_.retries;
    again_.push_back(index);
    return !finished_.empty();
  }
  Release(index);
  if (answer == Answer::kFailed) Abandon(job, here);
  FinishIfOver(job);
  return !finished_.empty();
}

uint64_t& ReadScheduler::BytesOf(const Job& job) {
  if (job.job.write) return stats_.written_bytes;
  if (IsDemand(job)) return stats_.demand_bytes;
  return IsPrefetch(job) ? stats_.prefetch_bytes : stats_.ahead_bytes;
}

ReadScheduler::Answer ReadScheduler::Judge(Record& record, int64_t received) {
  if (received < 0) {
    if (received == -EINTR || received == -EAGAIN) {
      return ++record.stalls < kMaxStalls ? Answer::kAgain : Answer::kFailed;
    }
    if (received == -EINVAL && record.direct) {
      files_.GiveUpDirect(record.file);
      return Answer::kAgain;
    }
    return Answer::kFailed;
  }
  const uint64_t arrived = static_cast<uint64_t>(received);
  uint64_t& counted = BytesOf(*record.job);
  if (arrived >= record.wanted) {
    counted += arrived;
    record.job->arrived += arrived;
    return Answer::kDone;
  }
  // Nothing beyond what an earlier try brought: the file has shrunk since it was opened, or takes
  // no more. (A short answer inside a page repeats that page, so "0 bytes" alone would not end.)
  if (record.offset + arrived <= record.seen) return Answer::kFailed;
  const uint64_t advance = AlignDown(arrived);
  counted += advance;
  record.job->arrived += advance;
  record.seen = record.offset + arrived;
  record.offset += advance;
  record.memory += advance;
  record.bytes -= advance;
  record.wanted -= advance;
  record.stalls = 0;
  return Answer::kAgain;
}

void ReadScheduler::Release(uint32_t index) {
  Record& record = records_[index];
  --record.job->out;
  record.job = nullptr;
  ++record.generation;
  free_records_.push_back(index);
}

// The job ends with its first error; what it has not sent is not worth reading.
void ReadScheduler::Abandon(Job& job, const ReadResult& why) {
  if (job.result.error != 0) return;
  job.result = why;
  if (!Exhausted(job)) {
    Dequeue(job);
    job.extent = job.job.extents.size();
  }
  std::erase_if(again_, [&](uint32_t index) {
    if (records_[index].job != &job) return false;
    Release(index);
    return true;
  });
}

void ReadScheduler::FinishIfOver(Job& job) {
  if (job.out > 0 || !Exhausted(job)) return;
  if (job.result.error != 0 && job.result.error != ECANCELED) ++stats_.failures;
  const uint64_t id = job.job.id;
  job.result.bytes = job.arrived;
  finished_.push_back({id, job.result});
  jobs_.erase(id);
}

std::vector<FinishedRead> ReadScheduler::TakeFinished() {
  std::lock_guard lock(mutex_);
  return std::exchange(finished_, {});
}

void ReadScheduler::Close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  for (std::deque<Job*>& queue : queues_) {
    while (!queue.empty()) {
      Job& job = *queue.front();
      Abandon(job, {ECANCELED, 0, 0});
      FinishIfOver(job);
    }
  }
}

bool ReadScheduler::Empty() const {
  std::lock_guard lock(mutex_);
  return jobs_.empty();
}

}  // namespace colibri
