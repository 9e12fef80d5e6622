// The one thread that writes finished records: each with one write(2), synced to the drive at
// intervals, so that a crash of the process loses nothing written and one of the machine at most
// the interval. A record that does not fit on the drive is taken back, so that a regular file ends
// with a whole one. Owns the thread and the queue, not the descriptor. Workers never wait for
// output: the queue holds each sequence object at most once, and a sequence is free again only when
// its record is written, which is the back-pressure. Records leave in the order they came; what
// puts them in another order belongs before Push. Threads: Push, GetState and Error from any
// thread; Finish from one, once nothing is pushed any more.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime/tally.h"

namespace colibri {

class OutputWriter {
 public:
  // kReaderGone: the other end of the pipe was closed (exit 141). kFailed: see Error() (exit 4).
  enum class State : uint8_t { kOk, kReaderGone, kFailed };

  // For what belongs to no sequence.
  static constexpr uint32_t kNoToken = 0xFFFFFFFF;

  struct Options {
    int fd = 1;
    std::string name = "standard output";           // for messages
    std::string advice;                             // ends the message of a failed write
    std::chrono::milliseconds sync_interval{5000};  // regular files only
    // Called on the output thread with the line of a record that was written whole; on_written
    // comes after it. Must not call the writer.
    std::function<void(const LineOutcome& line)> on_line;
    // Called on the output thread once the record pushed with `token` has been written, or dropped
    // because an earlier one could not be. Must not call the writer. GetState() is up to date by
    // then.
    std::function<void(uint32_t token)> on_written;
    std::function<int(int fd)> sync;  // fdatasync unless a test says otherwise
  };

  explicit OutputWriter(Options options);
  ~OutputWriter();  // Finish(), its state ignored
  OutputWriter(const OutputWriter&) = delete;
  OutputWriter& operator=(const OutputWriter&) = delete;

  // `line`: whose record it is, if on_line is to be told of it; else nullptr.
  void Push(std::string record, uint32_t token, std::shared_ptr<const LineOutcome> line = nullptr);
  // Writes what is queued, syncs, joins the thread. Returns the last state.
  State Finish();

  State GetState() const;
  std::string Error() const;  // "" unless kFailed

 private:
  struct Entry {
    std::string record;
    uint32_t token = kNoToken;
    std::shared_ptr<const LineOutcome> line;
  };
  void Run();
  bool Write(const std::string& record);  // false: not all of it
  void TakeBack(size_t bytes);
  void Sync();
  void Fail(const char* action, int error);

  const Options options_;
  bool regular_ = false;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Entry> queue_;  // guarded by mutex_
  bool finishing_ = false;    // guarded by mutex_
  State state_ = State::kOk;  // guarded by mutex_, written by the output thread
  std::string error_;         // guarded by mutex_, written by the output thread
  bool unsynced_ = false;     // output thread
  std::chrono::steady_clock::time_point next_sync_;  // output thread
  std::thread thread_;
};

}  // namespace colibri
