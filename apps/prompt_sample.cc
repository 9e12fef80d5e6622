#include "apps/prompt_sample.h"

#include <unistd.h>

#include <algorithm>

#include "apps/answers.h"
#include "runtime/prompt_source.h"
#include "runtime/sequence.h"

namespace colibri {
namespace {

constexpr uint64_t kMostLines = 256;

PromptSample Take(PromptSource& source, int32_t context) {
  PromptSample sample;
  for (uint64_t seen = 0; seen < kMostLines;) {
    Request request;
    std::optional<LineError> error;
    const RequestSource::Next next = source.TryNext(&request, &error);
    if (next == RequestSource::Next::kEnd) break;
    if (next != RequestSource::Next::kRequest) continue;  // a regular file is always ready
    ++seen;
    if (error || AdmissionError(request, context)) continue;
    ++sample.lines;
    sample.prompt += static_cast<double>(request.prompt.size());
    const int32_t limit = TokenLimit(request, context);
    const double answer = request.max_tokens > 0 ? limit : std::min(limit, context / 4);
    sample.answer += answer;
    sample.longest = std::max(sample.longest, answer);
  }
  return sample;
}

}  // namespace

std::optional<PromptSample> SamplePrompts(const RunOptions& o, int input, RequestParser& parser) {
  PromptSource::Options options;
  options.fd = input;
  options.format = GivenFormat(o);
  options.prompts = o.prompts;
  const off_t start = input < 0 ? 0 : lseek(input, 0, SEEK_CUR);
  if (start < 0) return std::nullopt;
  PromptSource source(std::move(options), parser);
  PromptSample sample = Take(source, parser.Context());
  if (input >= 0 && lseek(input, start, SEEK_SET) < 0) return std::nullopt;
  if (sample.lines == 0) return std::nullopt;
  sample.prompt /= static_cast<double>(sample.lines);
  sample.answer /= static_cast<double>(sample.lines);
  return sample;
}

}  // namespace colibri
