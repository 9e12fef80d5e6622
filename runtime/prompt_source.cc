#include "runtime/prompt_source.h"

#include <fmt/format.h>

namespace colibri {

bool PromptSource::Buffered() const {
  return options_.fd < 0 ? next_prompt_ < options_.prompts.size() : lines_.Buffered();
}

RequestSource::Next PromptSource::TryNext(Request* request, std::optional<LineError>* error) {
  if (options_.fd < 0) {
    if (next_prompt_ == options_.prompts.size()) return Next::kEnd;
    const std::string& prompt = options_.prompts[next_prompt_++];
    return Parsed(parser_.ParseText(prompt, next_prompt_), request, error);
  }
  uint64_t number = 0;
  switch (lines_.TryNext(&line_, &number)) {
    case LineSource::Next::kAgain:
      return Next::kAgain;
    case LineSource::Next::kEnd:
      return Next::kEnd;
    case LineSource::Next::kError:
      error_ = lines_.Error();
      return Next::kEnd;
    case LineSource::Next::kTooLong: {
      ParsedLine line;
      line.line = number;
      line.error = {400, "line_too_long",
                    fmt::format("line {} is longer than {} bytes", number, LineSource::kMaxLine),
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
  return Parsed(*options_.format == InputFormat::kJsonl ? parser_.Parse(line_, number)
                                                        : parser_.ParseText(line_, number),
                request, error);
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
  request->custom_id = line.custom_id;
  return Next::kRequest;
}

}  // namespace colibri
