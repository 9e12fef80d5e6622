#include "runtime/prompt_source.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "runtime/line_id.h"
#include "runtime/text_hash.h"

namespace colibri {
namespace {

constexpr off_t kCheapToCount = off_t{16} << 20;

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

}  // namespace

InputSurvey SurveyInput(int fd, int32_t context) {
  struct stat info {};
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) return {};
  const off_t start = lseek(fd, 0, SEEK_CUR);
  if (start < 0 || info.st_size - start > kCheapToCount) return {};
  LineSource lines(fd, MaxLineBytes(context));
  std::string line;
  uint64_t count = 0, number = 0;
  bool several = false, logprobs = false;
  LineSource::Next next = LineSource::Next::kEnd;
  for (;;) {
    next = lines.TryNext(&line, &number);
    if (next != LineSource::Next::kLine && next != LineSource::Next::kTooLong) break;
    ++count;
    if (next == LineSource::Next::kTooLong) continue;
    several = several || MayAskForSeveral(line);
    // As a key, or in a prompt's text, which costs a little memory and changes no answer. A key may
    // spell its letters as \u006c.
    logprobs = logprobs || line.find("logprobs") != std::string::npos ||
               line.find("\\u00") != std::string::npos;
  }
  lseek(fd, start, SEEK_SET);
  if (next != LineSource::Next::kEnd) return {};
  InputSurvey survey{count, logprobs};
  if (several) survey.answers.reset();
  return survey;
}

bool PromptSource::Buffered() const {
  return options_.fd < 0 ? next_prompt_ < options_.prompts.size() : lines_.Buffered();
}

RequestSource::Next PromptSource::TryNext(Request* request, std::optional<LineError>* error) {
  if (options_.fd < 0) {
    while (next_prompt_ < options_.prompts.size()) {
      const std::string& prompt = options_.prompts[next_prompt_++];
      if (Skipped(next_prompt_, HashText(prompt), &prompt)) continue;
      return Parsed(parser_.ParseText(prompt, next_prompt_), request, error);
    }
    return End();
  }
  for (;;) {
    uint64_t number = 0;
    switch (lines_.TryNext(&line_, &number)) {
      case LineSource::Next::kAgain:
        return Next::kAgain;
      case LineSource::Next::kEnd:
        return End();
      case LineSource::Next::kError:
        error_ = lines_.Error();
        return Next::kEnd;
      case LineSource::Next::kTooLong: {
        if (Skipped(number, 0, nullptr)) continue;
        ParsedLine line;
        line.line = number;
        line.error = {400, "line_too_long",
                      fmt::format("line {} is longer than {} bytes, the most for a context of {} "
                                  "tokens: --ctx-size raises it",
                                  number, MaxLineBytes(parser_.Context()), parser_.Context()),
                      ""};
        return Parsed(std::move(line), request, error);
      }
      case LineSource::Next::kLine:
        break;
    }
    if (!options_.format) {
      options_.format = FormatFromLine(line_);
      if (options_.on_format) options_.on_format(*options_.format);
    }
    if (Skipped(number, HashText(line_), &line_)) continue;
    return Parsed(*options_.format == InputFormat::kJsonl ? parser_.Parse(line_, number)
                                                          : parser_.ParseText(line_, number),
                  request, error);
  }
}

// `line`: nullptr for one too long to be read.
bool PromptSource::Skipped(uint64_t number, uint64_t line_hash, const std::string* line) {
  if (options_.filter == nullptr || !options_.filter->MaySkip(number)) return false;
  const bool jsonl = options_.fd >= 0 && options_.format == InputFormat::kJsonl;
  std::string id;
  if (line != nullptr) {
    id = LineCustomId(*line, number, jsonl ? InputFormat::kJsonl : InputFormat::kLines,
                      parser_.Context());
  }
  if (options_.filter->Runs({number, line_hash, id})) return false;
  if (jsonl) parser_.Remember(id);
  return true;
}

RequestSource::Next PromptSource::End() {
  if (!ended_ && options_.filter != nullptr) options_.filter->AtEnd();
  ended_ = true;
  return Next::kEnd;
}

RequestSource::Next PromptSource::Parsed(ParsedLine line, Request* request,
                                         std::optional<LineError>* error) {
  if (!told_model_ && !line.model.empty() && line.model != options_.our_model) {
    told_model_ = true;
    if (options_.on_other_model) options_.on_other_model(line.model);
  }
  if (line.request) {
    *request = std::move(*line.request);
  } else {
    *error = std::move(line.error);
  }
  request->line = line.line;
  request->line_hash = line.line_hash;
  request->custom_id = line.custom_id;
  if (options_.on_taken) options_.on_taken(line.line);
  return Next::kRequest;
}

}  // namespace colibri
