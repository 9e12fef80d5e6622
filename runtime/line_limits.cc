#include "runtime/line_limits.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace colibri {
namespace {

uint64_t TextBytes(const Request& request) {
  uint64_t bytes = request.prompt_text.size();
  for (const auto& [tool, argument] : request.string_arguments) {
    bytes += sizeof(std::pair<std::string, std::string>) + tool.size() + argument.size();
  }
  return bytes;
}

}  // namespace

LineError ContextError(const std::string& prompt, int32_t max_tokens, int32_t context) {
  return {
      400, "context_length_exceeded",
      fmt::format("the prompt has {} tokens and max_tokens is {}: together more than the context "
                  "of {}",
                  prompt, max_tokens > 0 ? std::to_string(max_tokens) : "at least 1", context),
      ""};
}

int32_t TokenLimit(const Request& request, int32_t context) {
  return request.max_tokens > 0 ? request.max_tokens
                                : context - static_cast<int32_t>(request.prompt.size());
}

uint64_t LogprobsOf(const Request& request, int32_t context) {
  if (!request.logprobs) return 0;
  return static_cast<uint64_t>(request.choices) *
         static_cast<uint64_t>(TokenLimit(request, context)) *
         static_cast<uint64_t>(1 + request.top_logprobs);
}

std::optional<LineError> AdmissionError(const Request& request, int32_t context) {
  const auto room = static_cast<int64_t>(context) - static_cast<int64_t>(request.prompt.size());
  if (room < 1 || request.max_tokens > room) {
    return ContextError(std::to_string(request.prompt.size()), request.max_tokens, context);
  }
  const uint64_t logprobs = LogprobsOf(request, context);
  if (logprobs <= kMaxLineLogprobs) return {};
  return LineError{
      400, "too_many_logprobs",
      fmt::format(
          "n {} x max_tokens {} x (1 + top_logprobs {}) are {} log probabilities: a line may "
          "have {}",
          request.choices, TokenLimit(request, context), request.top_logprobs, logprobs,
          kMaxLineLogprobs),
      request.chat ? "top_logprobs" : "logprobs"};
}

uint64_t LineCharge(const Request& request, int32_t context) {
  return LogprobsOf(request, context) * kLogprobBytes + TextBytes(request);
}

uint64_t RequestBytes(const Request& request) {
  uint64_t bytes = sizeof(Request) + request.custom_id.size() + TextBytes(request);
  bytes += request.prompt.capacity() * sizeof(int32_t);
  for (const std::string& stop : request.stop) bytes += sizeof(std::string) + stop.size();
  for (const std::string& warning : request.warnings) bytes += sizeof(std::string) + warning.size();
  return bytes;
}

uint64_t LineReadBytes(int32_t context, uint64_t token_bytes) {
  const uint64_t line = MaxLineBytes(context), tokens = static_cast<uint64_t>(context);
  const uint64_t text = token_bytes > line / tokens ? line : token_bytes * tokens;
  return 6 * line + 192 * MaxLineValues(context) + 36 * text;
}

}  // namespace colibri
