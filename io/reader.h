// Reads of extents from shard files, and reads and writes of scratch files, asynchronously: an
// io_uring thread, a pool of pread threads, or a script (tests). Knows files, offsets and bytes;
// nothing of experts, models or TBB.
// Threads: Submit, Promote, Cancel and CutShort from any thread; the callback always runs on one
// thread of the reader's own (the I/O thread), never inside Submit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

namespace colibri {

class FileTable;  // io/file.h

// Every extent's offset, bytes and dest are multiples of this, so that any of them may be read
// with O_DIRECT. The end of a read may lie past the file's end: what the file has is what is
// wanted. The end of a write may not.
inline constexpr uint64_t kIoAlign = 4096;

// Bytes [offset, offset + bytes) of file `file`, to be placed at destination + dest, or to be
// written from there.
struct Extent {
  uint32_t file = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t dest = 0;
  bool operator==(const Extent&) const = default;
};

// Demand: something waits for it. Ahead: needed for sure, but only by the next layer; it goes where
// no demand waits. Prefetch: a guess; it goes where neither waits.
enum class ReadClass : uint8_t { kDemand, kAhead, kPrefetch };
inline constexpr size_t kReadClasses = 3;

// One object's bytes. `destination` (kIoAlign-aligned) and the array behind `extents` stay valid
// until the callback has run or Cancel returned true. `id` is the caller's, unique while in use.
// A read and a write of the same bytes are in no order unless one is submitted after the other's
// callback.
struct ReadJob {
  uint64_t id = 0;
  ReadClass read_class = ReadClass::kDemand;
  std::byte* destination = nullptr;
  std::span<const Extent> extents;
  bool write = false;  // from the destination to the file
};

// error 0: all bytes are there. Otherwise an errno (ENODATA: the shard ends too early; EIO of a
// write also: the file takes no more and does not say why) and the place that failed. Segments of
// the same job that had already been sent are waited for first.
struct ReadResult {
  int error = 0;
  uint32_t file = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;  // that arrived or were written
};

using ReadDone = std::function<void(uint64_t id, const ReadResult& result)>;

struct ReaderOptions {
  int depth = 32;                 // segments in flight, all classes together
  int prefetch_depth = 8;         // of those, at most this many prefetch segments
  uint64_t bytes_per_second = 0;  // 0: no throttle (--io-limit)
};

// Monotonic totals; read at any time.
struct ReaderStats {
  // Asked for and arrived, rounding included.
  uint64_t demand_bytes = 0, ahead_bytes = 0, prefetch_bytes = 0;
  uint64_t written_bytes = 0;  // of every class
  uint64_t segments = 0, retries = 0, failures = 0;
  uint64_t busy_ns = 0;  // time with at least one segment in flight
  uint64_t wakes = 0;    // times a thread of the reader's own woke; none while nothing is wanted
};

class Reader {
 public:
  virtual ~Reader() = default;
  // Sets the callback and starts the threads. Once, before any Submit.
  virtual void Start(ReadDone done) = 0;
  virtual void Submit(const ReadJob& job) = 0;
  // Makes a queued prefetch, or one ahead, a demand; no effect once it is done.
  virtual void Promote(uint64_t id) = 0;
  // True: no segment had been sent, the job is forgotten and its callback never runs.
  virtual bool Cancel(uint64_t id) = 0;
  // Nobody wants this job any more: what of it has not been sent need not be. Its callback runs all
  // the same, with ECANCELED if something was left out. No effect on a demand.
  virtual void CutShort(uint64_t /*id*/) {}
  // Lifts the throttle for good: a run that was told to stop is not to wait for it.
  virtual void Unthrottle() {}
  // Waits for what is in flight, drops what is queued (their callbacks run with ECANCELED),
  // joins the threads. The callback is not called afterwards.
  virtual void Stop() = 0;
  virtual ReaderStats Stats() const = 0;
  // "io_uring" or "pread x8".
  virtual std::string Name() const = 0;
};

enum class IoBackend : uint8_t { kAuto, kUring, kPread };

// kAuto tries io_uring and falls back to pread on any failure; `note` then holds one line with the
// reason (else it is empty). kUring throws IoError instead of falling back. `files` is complete
// (Add, AddScratch, EnableDirect) and outlives the reader.
std::unique_ptr<Reader> MakeReader(IoBackend backend, const FileTable& files,
                                   const ReaderOptions& options, std::string* note);

}  // namespace colibri
