#include "runtime/resume.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "io/error.h"
#include "runtime/line_id.h"
#include "runtime/line_limits.h"
#include "runtime/text_hash.h"

namespace colibri {
namespace {

constexpr const char* kBytes = "was changed since it was answered";
constexpr const char* kGone = "was answered and is no longer in the input";

ChangedLine DescribeChange(uint64_t line, const char* what) {
  return {line, fmt::format("line {} {}", line, what)};
}

}  // namespace

bool Matches(const FinishedLines::Entry& entry, const SeenLine& line) {
  return entry.line == line.number && entry.line_hash == line.line_hash &&
         entry.id_hash == FinishedLines::ShortId(HashText(line.custom_id));
}

std::optional<ChangedLine> FindChangedLine(int fd, std::optional<InputFormat> format,
                                           const FinishedLines& finished, int32_t context) {
  const auto rewind = [fd] {
    if (lseek(fd, 0, SEEK_SET) < 0) {
      throw IoError(fmt::format("the input cannot be read twice: {}", std::strerror(errno)));
    }
  };
  rewind();
  LineSource source(fd, MaxLineBytes(context));
  std::string text;
  uint64_t number = 0;
  std::optional<ChangedLine> changed;
  for (size_t i = 0; i < finished.Count() && !changed;) {
    const LineSource::Next next = source.TryNext(&text, &number);
    if (next == LineSource::Next::kError) throw IoError(source.Error());
    if (next == LineSource::Next::kAgain) continue;  // a regular file is always ready
    const FinishedLines::Entry entry = finished.At(i);
    if (next == LineSource::Next::kEnd || entry.line < number) {
      changed = DescribeChange(entry.line, kGone);
      continue;
    }
    SeenLine seen{number, 0, {}};
    std::string id;
    if (next == LineSource::Next::kLine) {
      if (!format) format = FormatFromLine(text);
      if (entry.line > number) continue;
      id = LineCustomId(text, number, *format, context);
      seen = {number, HashText(text), id};
    }
    if (entry.line > number) continue;
    if (!Matches(entry, seen)) changed = DescribeChange(number, kBytes);
    ++i;
  }
  rewind();
  return changed;
}

bool LineFilter::MaySkip(uint64_t line) const {
  return !shard_.Has(line) || (!finished_.Empty() && finished_.At(0).line <= line);
}

bool LineFilter::Runs(const SeenLine& line) {
  while (!finished_.Empty() && finished_.At(0).line < line.number) {
    Change(finished_.At(0).line, kGone);
    finished_.DropFirst();
  }
  if (!finished_.Empty() && finished_.At(0).line == line.number) {
    if (Matches(finished_.At(0), line)) {
      ++skipped_;
    } else {
      Change(line.number, kBytes);
    }
    finished_.DropFirst();
    return false;
  }
  return shard_.Has(line.number);
}

void LineFilter::AtEnd() {
  for (; !finished_.Empty(); finished_.DropFirst()) Change(finished_.At(0).line, kGone);
}

void LineFilter::Change(uint64_t line, const char* what) {
  ++changes_;
  if (changed_) changed_(DescribeChange(line, what));
}

}  // namespace colibri
