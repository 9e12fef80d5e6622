// Which bytes are read or written next, and what an answer of the kernel means: jobs in three
// classes, cut into segments, promoted, cancelled, counted, throttled. Issues nothing itself and
// owns no thread; each backend takes segments with TryNext, reads or writes them, and hands the
// result to Complete, so that short answers, retries and errors are treated in one place.
// Threads: every function from any thread (one mutex inside; nothing is called under it).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "io/reader.h"
#include "io/token_bucket.h"

namespace colibri {

// 1 MiB: with 8 prefetch segments in flight a new demand waits 1.7 ms for them at 5 GB/s. Measured
// on a drive of 2.5 GB/s (bench/README.md, Reading): 256 KiB reads 3 % less a second and takes 17
// ms of processor a GB against 10; with 4 MiB a demand under prefetch comes after 20 ms against 12.
inline constexpr uint64_t kSegmentBytes = uint64_t{1} << 20;

// One read to be issued now: `bytes` bytes from `offset` of `file` (the direct descriptor or the
// buffered one) to `memory`; or one write the other way. All multiples of kIoAlign.
struct Segment {
  uint32_t index = 0;  // of its record: below ReadScheduler::Depth()
  uint32_t generation = 0;
  uint32_t file = 0;
  bool direct = false;
  bool write = false;
  uint64_t offset = 0;
  uint32_t bytes = 0;
  std::byte* memory = nullptr;
};

struct FinishedRead {
  uint64_t id = 0;
  ReadResult result;
};

class ReadScheduler {
 public:
  // Nanoseconds that never go back.
  using Clock = std::function<uint64_t()>;
  static uint64_t SteadyNow();

  // `files` outlives the scheduler. Depths below 1 count as 1: a submitted job must end.
  ReadScheduler(const FileTable& files, const ReaderOptions& options, Clock clock = SteadyNow);

  // The functions of Reader of the same names, without the waking of threads.
  void Submit(const ReadJob& job);
  void Promote(uint64_t id);
  bool Cancel(uint64_t id);
  void CutShort(uint64_t id);
  void Unthrottle();
  ReaderStats Stats() const;

  // The next segment: demand, ahead, prefetch; first come first served within a class, a segment
  // that has to go again before new ones. Without one, wait_ns says when the throttle lets
  // the next go; 0: ask again after the next Submit, Promote or Complete.
  struct Turn {
    std::optional<Segment> segment;
    uint64_t wait_ns = 0;
  };
  Turn TryNext();

  // The answer to a segment: bytes moved or −errno. An answer to a segment that is not out
  // (wrong generation) is ignored. True: TakeFinished() has something.
  bool Complete(uint32_t index, uint32_t generation, int64_t received);

  // Jobs that ended since the last call, in the order they ended; the backend runs the callbacks.
  std::vector<FinishedRead> TakeFinished();

  // Ends with ECANCELED every job that still has a segment to send (once those in flight are back)
  // and every later one.
  void Close();
  // No job is left, TakeFinished() aside.
  bool Empty() const;
  uint32_t Depth() const { return static_cast<uint32_t>(records_.size()); }

 private:
  struct Job {
    ReadJob job;
    size_t extent = 0;    // cursor of the next cut
    uint64_t cut = 0;     // bytes of that extent cut so far
    uint32_t out = 0;     // records in use: in flight or waiting to go again
    uint32_t flying = 0;  // of those, in flight
    uint64_t arrived = 0;
    bool sent = false;  // a segment was handed out: too late to cancel
    ReadResult result;
  };
  // A segment that is out. `wanted` <= `bytes`: less where the file ends inside the last page.
  struct Record {
    Job* job = nullptr;
    uint32_t generation = 0;
    bool flying = false;
    bool direct = false;
    int stalls = 0;  // EINTR and EAGAIN in a row
    uint32_t file = 0;
    uint64_t offset = 0;
    uint64_t bytes = 0;
    uint64_t wanted = 0;
    uint64_t seen = 0;  // file offset up to which bytes have arrived or were taken
    std::byte* memory = nullptr;
  };
  enum class Answer : uint8_t { kDone, kAgain, kFailed };

  static bool IsDemand(const Job& job) { return job.job.read_class == ReadClass::kDemand; }
  static bool IsPrefetch(const Job& job) { return job.job.read_class == ReadClass::kPrefetch; }
  uint64_t& BytesOf(const Job& job);
  uint64_t Wanted(const Extent& extent) const;
  void SkipFinishedExtents(Job& job) const;
  bool Exhausted(const Job& job) const { return job.extent == job.job.extents.size(); }
  std::deque<Job*>& QueueOf(const Job& job) {
    return queues_[static_cast<size_t>(job.job.read_class)];
  }
  void Dequeue(Job& job);
  uint64_t NextWanted(const Job& job) const;  // bytes of the next cut
  uint32_t Cut(Job& job);
  Segment Send(uint32_t index, uint64_t now);
  Answer Judge(Record& record, int64_t received);
  void Release(uint32_t index);
  void Abandon(Job& job, const ReadResult& why);
  void FinishIfOver(Job& job);

  const FileTable& files_;
  const uint32_t prefetch_depth_;
  const Clock clock_;

  mutable std::mutex mutex_;  // guards everything below
  std::unordered_map<uint64_t, Job> jobs_;
  std::array<std::deque<Job*>, kReadClasses> queues_;  // jobs with segments to cut, by class
  std::vector<Record> records_;
  std::vector<uint32_t> free_records_;
  std::vector<uint32_t> again_;  // records that go again, oldest first
  std::vector<FinishedRead> finished_;
  uint32_t flying_ = 0;
  uint32_t prefetch_flying_ = 0;
  bool closed_ = false;
  TokenBucket bucket_;
  uint64_t busy_since_ = 0;
  ReaderStats stats_;
};

}  // namespace colibri
