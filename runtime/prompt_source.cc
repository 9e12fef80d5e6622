#include "runtime/prompt_source.h"

#include <fmt/format.h>
#include <utility>

#include "runtime/line_id.h"
#include "runtime/text_hash.h"

namespace colibri {
namespace {

// Skipped lines a call, by their bytes and 1 KiB for each: some milliseconds.
constexpr int64_t kSkipACall = int64_t{1} << 20;
// Portions without a line, of 1 MiB each, after which there is none for now: beside an input that
// never gives one again the lines under way have to go on.
constexpr uint32_t kEmptyPortions = 16;

}  // namespace

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
  for (int64_t budget = kSkipACall; budget > 0;
       budget -= 1024 + static_cast<int64_t>(line_.size())) {
    uint64_t number = 0;
    switch (lines_.TryNext(&line_, &number)) {
      case LineSource::Next::kAgain:
        return Next::kAgain;
      case LineSource::Next::kSkipped:
        bytes_ = lines_.TakenBytes();
        return ++empty_portions_ % kEmptyPortions == 0 ? Next::kAgain : Next::kSkipped;
      case LineSource::Next::kEnd:
        return End();
      case LineSource::Next::kError:
        error_ = lines_.Error();
        return Next::kEnd;
      case LineSource::Next::kTooLong: {
        Count();
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
        Count();
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
  return Next::kSkipped;
}

void PromptSource::Count() {
  bytes_ = lines_.TakenBytes();
  ++taken_;
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
  const bool runs = options_.filter->Runs({number, line_hash, id});
  records_ = options_.filter->Skipped() + options_.filter->Changed();
  if (runs) return false;
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
