#include "runtime/resume.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "io/error.h"
#include "runtime/line_id.h"
#include "runtime/line_limits.h"
#include "runtime/text_hash.h"

namespace colibri {
namespace {

constexpr size_t kCheapToCount = size_t{16} << 20;
constexpr const char* kBytes = "was changed since it was answered";
constexpr const char* kGone = "was answered and is no longer in the input";

ChangedLine DescribeChange(uint64_t line, const char* what) {
  return {line, fmt::format("line {} {}", line, what)};
}

// A key "n" with a value other than 1 and null. Sees one in a prompt's text too, which costs a
// little memory and changes no answer.
bool MayAskForSeveral(std::string_view line) {
  constexpr std::string_view kKey = "\"n\"", kBlank = " \t";
  for (size_t at = 0; (at = line.find(kKey, at)) != std::string_view::npos;) {
    at += kKey.size();
    size_t next = line.find_first_not_of(kBlank, at);
    if (next == std::string_view::npos || line[next] != ':') continue;
    next = line.find_first_not_of(kBlank, next + 1);
    if (next == std::string_view::npos) continue;
    const std::string_view value = line.substr(next, line.find_first_of(",} \t", next) - next);
    if (value != "1" && value != "null") return true;
  }
  return false;
}

// Sees it in a prompt's text too. A key may spell its letters as \u006c.
bool MayAskForLogprobs(std::string_view line) {
  return line.find("logprobs") != std::string_view::npos ||
         line.find("\\u00") != std::string_view::npos;
}

// The number of the last key "max_tokens" or "max_completion_tokens"; 0: none.
uint64_t LimitIn(std::string_view line) {
  for (const std::string_view key : {"\"max_tokens\"", "\"max_completion_tokens\""}) {
    const size_t at = line.rfind(key);
    if (at == std::string_view::npos) continue;
    const size_t value = line.find_first_not_of(" \t:", at + key.size());
    if (value == std::string_view::npos) continue;
    uint64_t number = 0;
    std::from_chars(line.data() + value, line.data() + line.size(), number);
    if (number > 0) return number;
  }
  return 0;
}

// Lines in ascending order against the records.
class Surveyor {
 public:
  Surveyor(const LineShard& shard, const FinishedLines& finished, int32_t context)
      : shard_(shard), finished_(finished), context_(context) {}

  // `text`: nullptr for a line too long to be read.
  void Take(uint64_t number, const std::string* text, InputFormat format) {
    if (!BeyondRecords() && finished_.At(next_).line <= number) {
      const FinishedLines::Entry entry = finished_.At(next_++);
      if (entry.line < number) {
        survey.changed = DescribeChange(entry.line, kGone);
        return;
      }
      const std::string id = text == nullptr ? "" : LineCustomId(*text, number, format, context_);
      if (!Matches(entry, {number, text == nullptr ? 0 : HashText(*text), id})) {
        survey.changed = DescribeChange(number, kBytes);
      }
    } else if (shard_.Has(number)) {
      ++survey.lines;
      if (text == nullptr) return;
      survey.bytes += text->size();
      survey.longest = std::max<uint64_t>(survey.longest, text->size());
      if (format != InputFormat::kJsonl) return;
      survey.several = survey.several || MayAskForSeveral(*text);
      survey.logprobs = survey.logprobs || MayAskForLogprobs(*text);
      const uint64_t limit = std::min<uint64_t>(LimitIn(*text), INT32_MAX);
      survey.limited += limit > 0 ? 1 : 0;
      survey.limits += limit;
      survey.largest_limit = std::max(survey.largest_limit, limit);
    }
  }
  void End() {
    survey.whole = true;
    if (!BeyondRecords()) survey.changed = DescribeChange(finished_.At(next_).line, kGone);
  }
  bool BeyondRecords() const { return next_ == finished_.Count(); }

  PromptSurvey survey;

 private:
  const LineShard shard_;
  const FinishedLines& finished_;
  const int32_t context_;
  size_t next_ = 0;
};

}  // namespace

bool Matches(const FinishedLines::Entry& entry, const SeenLine& line) {
  return entry.line == line.number && entry.line_hash == line.line_hash &&
         entry.id_hash == FinishedLines::ShortId(HashText(line.custom_id));
}

PromptSurvey SurveyLines(int fd, std::optional<InputFormat> format, const LineShard& shard,
                         const FinishedLines& finished, int32_t context) {
  const off_t start = lseek(fd, 0, SEEK_CUR);
  if (start < 0) {
    throw IoError(fmt::format("the input cannot be read twice: {}", std::strerror(errno)));
  }
  LineSource source(fd, MaxLineBytes(context));
  Surveyor surveyor(shard, finished, context);
  std::string text;
  uint64_t number = 0;
  PromptSurvey& survey = surveyor.survey;
  // As far as a record is of; beyond, as far as is cheap.
  uint64_t records_end = 0;
  while (!survey.changed && source.TakenBytes() - records_end <= kCheapToCount) {
    const LineSource::Next next = source.TryNext(&text, &number);
    if (!surveyor.BeyondRecords()) records_end = source.TakenBytes();
    if (next == LineSource::Next::kError) throw IoError(source.Error());
    // A regular file is always ready.
    if (next == LineSource::Next::kAgain || next == LineSource::Next::kSkipped) continue;
    if (next == LineSource::Next::kEnd) {
      surveyor.End();
      break;
    }
    const bool whole = next == LineSource::Next::kLine;
    if (whole && !format) format = FormatFromLine(text);
    surveyor.Take(number, whole ? &text : nullptr, format.value_or(InputFormat::kLines));
  }
  lseek(fd, start, SEEK_SET);
  return survey;
}

PromptSurvey SurveyPrompts(std::span<const std::string> prompts, const LineShard& shard,
                           const FinishedLines& finished) {
  Surveyor surveyor(shard, finished, 0);  // plain lines' ids do not depend on it
  for (size_t i = 0; i < prompts.size() && !surveyor.survey.changed; ++i) {
    surveyor.Take(i + 1, &prompts[i], InputFormat::kLines);
  }
  if (!surveyor.survey.changed) surveyor.End();
  return surveyor.survey;
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
