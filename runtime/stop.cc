#include "runtime/stop.h"

#include <algorithm>

#include "runtime/tokenizer.h"

namespace colibri {

StopScanner::StopScanner(std::span<const std::string> strings) {
  patterns_.reserve(strings.size());
  for (const std::string& text : strings) {
    Pattern& pattern = patterns_.emplace_back();
    pattern.text = text;
    pattern.border.assign(text.size() + 1, 0);
    for (size_t n = 1, k = 0; n < text.size(); ++n) {
      while (k > 0 && text[n] != text[k]) k = pattern.border[k];
      if (text[n] == text[k]) ++k;
      pattern.border[n + 1] = k;
    }
  }
}

int StopScanner::Push(char byte) {
  int found = -1;
  for (size_t i = 0; i < patterns_.size(); ++i) {
    Pattern& p = patterns_[i];
    if (p.text.empty()) continue;
    while (p.matched > 0 && p.text[p.matched] != byte) p.matched = p.border[p.matched];
    if (p.text[p.matched] == byte) ++p.matched;
    if (p.matched < p.text.size()) continue;
    p.matched = p.border[p.matched];
    const int here = static_cast<int>(i);
    if (found < 0 || Length(here) > Length(found)) found = here;
  }
  return found;
}

size_t StopScanner::Partial() const {
  size_t partial = 0;
  for (const Pattern& pattern : patterns_) partial = std::max(partial, pattern.matched);
  return partial;
}

bool LoopDetector::Push(int32_t token) {
  bool loops = false;
  for (size_t q = 1; q <= std::min(kMaxPeriod, count_); ++q) {
    const bool same = recent_[(count_ - q) % kMaxPeriod] == token;
    run_[q] = same ? run_[q] + 1 : 0;
    loops = loops || run_[q] >= kWindow - q;
  }
  recent_[count_ % kMaxPeriod] = token;
  return ++count_ >= kWindow && loops;
}

StopMatcher::StopMatcher(const Tokenizer& tokenizer, std::span<const int32_t> stop_ids,
                         const Request& request, int32_t max_tokens)
    : tokenizer_(&tokenizer),
      stop_ids_(stop_ids),
      strings_(request.stop),
      scanner_(request.stop),
      loop_stop_(request.loop_stop),
      max_tokens_(max_tokens) {}

StopCause StopMatcher::Push(int32_t token) {
  ++tokens_;
  if (std::binary_search(stop_ids_.begin(), stop_ids_.end(), token)) return StopCause::kStopToken;
  if (!strings_.empty() && !tokenizer_->IsSpecial(token)) {
    for (const char byte : tokenizer_->Bytes(token)) {
      const int found = scanner_.Push(byte);
      if (found < 0) continue;
      matched_ = strings_[static_cast<size_t>(found)];
      return StopCause::kStopString;
    }
  }
  if (loop_stop_ && loop_.Push(token)) return StopCause::kDegenerate;
  return tokens_ >= max_tokens_ ? StopCause::kLength : StopCause::kNone;
}

}  // namespace colibri
