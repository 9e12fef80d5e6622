#include "runtime/strict_check.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "io/error.h"
#include "runtime/line_limits.h"
#include "runtime/prompt_source.h"

namespace colibri {

std::string StrictReport::Text() const {
  std::string text = fmt::format("{} of {} lines cannot be answered", bad, lines);
  for (const std::string& problem : problems) text += "\n  " + problem;
  if (bad > problems.size()) text += fmt::format("\n  and {} more", bad - problems.size());
  return text;
}

StrictReport CheckAllLines(int fd, std::optional<InputFormat> format, RequestParser& parser) {
  struct stat info {};
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    throw UsageError("--strict reads the prompts twice: it needs a file, not a pipe");
  }
  // Whoever opened the file may have read some of it: the run begins here, too.
  const off_t start = lseek(fd, 0, SEEK_CUR);
  PromptSource::Options options;
  options.fd = fd;
  options.format = format;
  PromptSource source(std::move(options), parser);
  StrictReport report;
  for (;;) {
    Request request;
    std::optional<LineError> error;
    const RequestSource::Next next = source.TryNext(&request, &error);
    if (next == RequestSource::Next::kEnd) break;
    // A regular file is always ready.
    if (next == RequestSource::Next::kAgain || next == RequestSource::Next::kSkipped) continue;
    ++report.lines;
    if (!error) error = AdmissionError(request, parser.Context());
    if (!error) continue;
    ++report.bad;
    if (report.problems.size() < kMaxProblems) {
      report.problems.push_back(fmt::format("line {}: {}", request.line, error->message));
    }
  }
  if (!source.Error().empty()) throw IoError(source.Error());
  if (start < 0 || lseek(fd, start, SEEK_SET) < 0) {
    throw IoError(fmt::format("the input cannot be read twice: {}", std::strerror(errno)));
  }
  return report;
}

}  // namespace colibri
