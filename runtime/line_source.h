// Lines of a prompt file, taken from a file descriptor as a stream: a regular file, a pipe or a
// terminal. Owns the bytes read and not yet handed out, not the descriptor. Never blocks: it reads
// only what poll(0) says is there, so that a pipe which trickles holds up nobody.
// Memory: two chunks of 256 KiB more than the longest line; of a line longer than the cap no more
// is held than of one at it. Threads: one at a time (the graph's `admit`, or the engine thread
// while the graph is idle).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace colibri {

enum class InputFormat : uint8_t { kLines, kJsonl };

// By the file's name: .jsonl and .json are JSON Lines; nullopt: the first line decides.
std::optional<InputFormat> FormatFromName(std::string_view name);
// By the first line that is not blank: JSON Lines if it starts with { or [ after white space.
InputFormat FormatFromLine(std::string_view line);

class LineSource {
 public:
  // kLine: a line was taken. kAgain: nothing to read now. kSkipped: some bytes that are no line
  // were passed (blank lines, the rest of one too long); the call ends there, since they may go on
  // for ever, and is to be made again. kEnd: no further lines. kTooLong: the line `number` is
  // longer than the cap, its bytes are skipped. kError: reading failed, see Error(); every later
  // call gives kError too.
  enum class Next : uint8_t { kLine, kAgain, kSkipped, kEnd, kTooLong, kError };

  // `max_line`: the cap in bytes (runtime/line_limits.h).
  LineSource(int fd, size_t max_line) : fd_(fd), max_line_(max_line) {}

  // Takes the next line that is not blank, without its end (LF or CR LF) and, for the first,
  // without a UTF-8 byte order mark. `number`: physical line from 1, blank lines counted. A last
  // line without a line end is a line. Does not throw except bad_alloc.
  Next TryNext(std::string* line, uint64_t* number);

  int Fd() const { return fd_; }
  // A call of TryNext may give a line without reading: poll() on Fd() would be asleep on it.
  bool Buffered() const;
  // The descriptor's end was seen and every line was taken, or reading failed.
  bool AtEnd() const { return failed_ || (eof_ && begin_ == buffer_.size()); }
  // Bytes of lines taken, line ends included.
  uint64_t TakenBytes() const { return dropped_ + begin_; }
  const std::string& Error() const { return error_; }

 private:
  // False: nothing came (eof_ and failed_ tell why; neither: not now).
  bool Fill();
  bool TakeLine(size_t end, size_t next, std::string* line);

  int fd_;
  size_t max_line_;
  std::string buffer_;
  uint64_t dropped_ = 0;  // bytes that stood before the buffer's first
  size_t begin_ = 0;      // of the line at hand
  size_t scan_ = 0;       // no line end before it
  uint64_t number_ = 0;
  bool eof_ = false, failed_ = false, skipping_ = false;
  std::string error_;
};

}  // namespace colibri
