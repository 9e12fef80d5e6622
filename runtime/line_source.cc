#include "runtime/line_source.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace colibri {
namespace {

// 256 KiB: a few hundred prompts a system call.
constexpr size_t kChunk = size_t{256} << 10;
// Bytes without a line that one call passes: about a millisecond.
constexpr uint64_t kSkipACall = uint64_t{1} << 20;
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
constexpr std::string_view kBlank = " \t\r\v\f";

}  // namespace

std::optional<InputFormat> FormatFromName(std::string_view name) {
  if (name.ends_with(".jsonl") || name.ends_with(".json")) return InputFormat::kJsonl;
  return std::nullopt;
}

InputFormat FormatFromLine(std::string_view line) {
  const size_t first = line.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return InputFormat::kLines;
  return line[first] == '{' || line[first] == '[' ? InputFormat::kJsonl : InputFormat::kLines;
}

bool LineSource::Buffered() const {
  if (failed_ || begin_ == buffer_.size()) return false;
  return eof_ || buffer_.find('\n', scan_) != std::string::npos;
}

bool LineSource::Fill() {
  if (eof_ || failed_) return false;
  // Room for a line at the cap is asked for once, since growing would hold the line twice; it takes
  // memory as it fills.
  if (buffer_.capacity() < max_line_ + 2 * kChunk) buffer_.reserve(max_line_ + 2 * kChunk);
  // Lines taken leave a hole at the front; closing it once it outweighs the rest keeps the cost of
  // moving bytes linear. Where room ends first, a long line moves once a chunk at most.
  if (begin_ >= buffer_.size() - begin_ || buffer_.size() + kChunk > buffer_.capacity()) {
    buffer_.erase(0, begin_);
    scan_ -= begin_;
    dropped_ += begin_;
    begin_ = 0;
  }
  for (;;) {
    pollfd ready{fd_, POLLIN, 0};
    const int polled = poll(&ready, 1, 0);
    if (polled == 0) return false;
    ssize_t got = -1;
    if (polled > 0) {
      const size_t old = buffer_.size();
      buffer_.resize(old + kChunk);
      got = read(fd_, buffer_.data() + old, kChunk);
      const int error = errno;
      buffer_.resize(old + static_cast<size_t>(got > 0 ? got : 0));
      errno = error;
    }
    if (got > 0) return true;
    if (got == 0) {
      eof_ = true;
      return false;
    }
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
    error_ = fmt::format("reading the input failed after line {}: {}", number_,
                         std::generic_category().message(errno));
    failed_ = true;
    return false;
  }
}

// Hands out [begin_, end) unless it is blank; the next line starts at `next`.
bool LineSource::TakeLine(size_t end, size_t next, std::string* line) {
  std::string_view text(buffer_.data() + begin_, end - begin_);
  ++number_;
  begin_ = scan_ = next;
  if (number_ == 1 && text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  if (text.ends_with('\r')) text.remove_suffix(1);
  if (text.find_first_not_of(kBlank) == std::string_view::npos) return false;
  line->assign(text);
  return true;
}

LineSource::Next LineSource::TryNext(std::string* line, uint64_t* number) {
  // A part of a line is not passed, but it is no longer than the cap.
  const uint64_t enough = TakenBytes() + kSkipACall;
  for (;;) {
    if (failed_) return Next::kError;
    if (TakenBytes() >= enough) return Next::kSkipped;
    const size_t end = buffer_.find('\n', scan_);
    const bool whole = end != std::string::npos;
    const size_t stop = whole ? end : buffer_.size();
    if (skipping_) {
      // The rest of a line that was reported as too long.
      begin_ = scan_ = whole ? end + 1 : stop;
      skipping_ = !whole;
    } else if (stop - begin_ > max_line_) {
      *number = ++number_;
      begin_ = scan_ = whole ? end + 1 : stop;
      skipping_ = !whole;
      return Next::kTooLong;
    } else if (whole || (eof_ && stop > begin_)) {
      if (TakeLine(stop, whole ? end + 1 : stop, line)) {
        *number = number_;
        return Next::kLine;
      }
    } else {
      scan_ = stop;
    }
    if (whole) continue;
    if (eof_) return Next::kEnd;
    if (!Fill() && !eof_ && !failed_) return Next::kAgain;
  }
}

}  // namespace colibri
