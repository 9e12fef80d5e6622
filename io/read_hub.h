// Several users, each with a Reader of its own, over one reader: the demands of one go before what
// the others only need ahead or guess, and all share its depth, its throttle and its thread.
// Threads: AddPort from any; a port as Reader. All callbacks run on the reader's one thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "io/reader.h"

namespace colibri {

class ReadHub {
 public:
  // The ports' number is the top byte of the ids that the reader sees; a user's own stay below.
  static constexpr int kIdBits = 56;
  static constexpr size_t kMaxPorts = 256;

  // `reader` has not been started, outlives the hub and is used by nobody else.
  explicit ReadHub(Reader& reader) : reader_(reader) {}
  ReadHub(const ReadHub&) = delete;
  ReadHub& operator=(const ReadHub&) = delete;

  // The hub outlives its ports. The first Start of any port starts the reader. Stop of any, or the
  // end of one that was started, stops it for all: the callbacks of every port have run when it
  // returns, and whatever is asked of the others later is in vain. Stats and Name are the reader's.
  std::unique_ptr<Reader> AddPort();

 private:
  class Port;
  void Start(uint64_t port, ReadDone done);
  void Stop();

  Reader& reader_;
  // Never moves: the reader's thread finds a callback here without the lock. What it finds was set
  // before the job was submitted.
  std::array<ReadDone, kMaxPorts> done_;

  std::mutex mutex_;  // guards the following three
  uint64_t ports_ = 0;
  bool started_ = false;
  bool stopped_ = false;
  std::once_flag stop_once_;
};

}  // namespace colibri
