#include "runtime/tally.h"

#include <algorithm>

namespace colibri {
namespace {

// Keeps the best of `lines` in order; `better` is a strict order.
template <class Better>
void Keep(const LineOutcome& line, Better better, std::vector<LineOutcome>* lines) {
  if (lines->size() == Tally::kNamed && !better(line, lines->back())) return;
  lines->insert(std::upper_bound(lines->begin(), lines->end(), line, better), line);
  if (lines->size() > Tally::kNamed) lines->pop_back();
}

}  // namespace

void Tally::Add(const LineOutcome& line) {
  ++lines_;
  prompt_tokens_ += line.prompt_tokens;
  generated_tokens_ += line.generated_tokens;
  reasoning_tokens_ += line.reasoning_tokens;
  ends_.stop += line.ends.stop;
  ends_.length += line.ends.length;
  ends_.degenerate += line.ends.degenerate;
  ends_.tool_calls += line.ends.tool_calls;
  if (!line.error.empty()) {
    ++failed_;
    auto known = std::find_if(failures_.begin(), failures_.end(),
                              [&](const Failure& f) { return f.code == line.error; });
    if (known == failures_.end()) known = failures_.insert(known, {line.error, 0, line.line});
    ++known->count;
    known->first_line = std::min(known->first_line, line.line);
  }
  // A refused line took no time and no tokens: it is no candidate.
  if (line.generated_tokens == 0) return;
  Keep(
      line,
      [](const LineOutcome& a, const LineOutcome& b) {
        return a.seconds != b.seconds ? a.seconds > b.seconds : a.line < b.line;
      },
      &slowest_);
  Keep(
      line,
      [](const LineOutcome& a, const LineOutcome& b) {
        return a.generated_tokens != b.generated_tokens ? a.generated_tokens > b.generated_tokens
                                                        : a.line < b.line;
      },
      &longest_);
}

std::vector<Tally::Failure> Tally::Failures() const {
  std::vector<Failure> failures = failures_;
  std::sort(failures.begin(), failures.end(), [](const Failure& a, const Failure& b) {
    return a.count != b.count ? a.count > b.count : a.first_line < b.first_line;
  });
  return failures;
}

}  // namespace colibri
