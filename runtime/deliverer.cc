#include "runtime/deliverer.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "io/check.h"

namespace colibri {
namespace {

double Seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

Choice ChoiceOf(Sequence& s) {
  Choice choice;
  choice.index = s.choice;
  choice.tokens.assign(s.tokens.begin() + s.prompt, s.tokens.end());
  choice.logprobs = std::move(s.logprobs);
  choice.cause = s.cause;
  if (s.stop) choice.matched_stop = s.stop->MatchedStop();
  return choice;
}

LineFigures FiguresOf(const Sequence& s) {
  LineFigures figures;
  if (s.Generated() > 0) {
    figures.seconds_to_first_token = Seconds(s.first_token - s.admitted);
    const double decoding = Seconds(Clock::now() - s.first_token);
    if (decoding > 0) figures.tokens_per_second = (s.Generated() - 1) / decoding;
  }
  figures.bytes_read = s.bytes_read;
  figures.hit_rate = s.sweeps > 0 ? s.hit_sum / s.sweeps : 0;
  return figures;
}

LineOutcome OutcomeOf(const LineState& line, const RecordTotals& totals) {
  LineOutcome outcome;
  outcome.line = line.request.line;
  outcome.id = line.request.custom_id;
  if (line.error) outcome.error = line.error->code;
  if (line.finished.empty()) return outcome;  // refused
  outcome.seconds = Seconds(Clock::now() - line.admitted);
  outcome.prompt_tokens = line.request.prompt.size();
  outcome.reasoning_tokens = static_cast<uint64_t>(totals.reasoning_tokens);
  for (const Choice& choice : line.finished) {
    outcome.generated_tokens += choice.tokens.size();
    if (choice.cause == StopCause::kLength) ++outcome.ends.length;
    if (choice.cause == StopCause::kDegenerate) ++outcome.ends.degenerate;
    if (choice.cause == StopCause::kStopToken || choice.cause == StopCause::kStopString) {
      ++outcome.ends.stop;
    }
  }
  // Of a failed line the record tells of no call.
  outcome.ends.tool_calls = static_cast<uint64_t>(totals.calling);
  outcome.ends.stop -= outcome.ends.tool_calls;
  return outcome;
}

}  // namespace

Deliverer::Deliverer(Options options, OutputWriter& writer)
    : options_(std::move(options)), writer_(writer), delivered_(options_.sequences, 0) {}

std::string Deliverer::Record(const LineState& line, const LineFigures& figures,
                              RecordTotals* totals) const {
  if (line.error) {
    return BuildErrorRecord(line.request.line, line.request.custom_id, *line.error,
                            options_.context, line.request.line_hash);
  }
  return BuildRecord(line.request, line.finished, figures, options_.context, totals);
}

std::string Deliverer::Text(const LineState& line, RecordTotals* totals) const {
  const Request& request = line.request;
  std::string text;
  if (!options_.stream) {
    text += fmt::format("## {}\n", request.custom_id);
    if (!request.prompt_text.empty()) text += fmt::format("> {}\n", request.prompt_text);
    text += "\n";
  }
  if (line.error) return text + fmt::format("error: {}\n\n", line.error->message);
  for (const Choice& choice : line.finished) {
    const ChoiceText answer = TextOf(request, choice, *options_.context.tokenizer);
    totals->reasoning_tokens += answer.reasoning_tokens;
    if (!options_.stream) text += answer.content + "\n";
    if (answer.ended_in_reasoning) text += "(ended inside its reasoning: no answer)\n";
  }
  return text + "\n";
}

void Deliverer::Stream(Sequence& s, const Notice& notice) {
  if (!assembler_) assembler_.emplace(*options_.context.tokenizer, s.line->request);
  std::string text;
  for (uint32_t i = delivered_[s.index]; i < notice.count; ++i) {
    const bool end = notice.final != 0 && i + 1 == notice.count && s.cause == StopCause::kStopToken;
    if (!end) text += assembler_->Push(s.tokens[static_cast<size_t>(s.prompt) + i]).content;
  }
  if (notice.final != 0) text += assembler_->Finish().content;
  if (!text.empty()) writer_.Push(std::move(text), OutputWriter::kNoToken);
}

void Deliverer::Deliver(Sequence& s, const Notice& notice) {
  COLIBRI_CHECK(notice.count >= delivered_[s.index]);
  if (options_.stream) Stream(s, notice);
  tokens_.fetch_add(notice.count - delivered_[s.index], std::memory_order_relaxed);
  delivered_[s.index] = notice.count;
  if (notice.final == 0) return;
  delivered_[s.index] = 0;
  FinishLine(s);
}

void Deliverer::Push(LineState& line, const LineFigures& figures, uint32_t sequence) {
  RecordTotals totals;
  std::string output = options_.text ? Text(line, &totals) : Record(line, figures, &totals);
  auto outcome = std::make_shared<const LineOutcome>(OutcomeOf(line, totals));
  // The sequence may wait for slow output: what is in the text need not be held twice.
  line.finished = {};
  if (options_.ordered == nullptr) {
    return writer_.Push(std::move(output), sequence, std::move(outcome));
  }
  options_.ordered->Finish(line.request.line, std::move(output), sequence, std::move(outcome));
}

void Deliverer::FinishLine(Sequence& s) {
  LineState& line = *s.line;
  if (s.error && !line.error) line.error = s.error;
  line.admitted = std::min(line.admitted, s.admitted);
  line.cached = std::min(line.cached, std::max(0, s.cached));
  line.drafts += s.draft_counts;
  line.draft_bytes += s.draft_bytes;
  line.finished.push_back(ChoiceOf(s));
  if (line.open_choices.fetch_sub(1) > 1) return options_.close(s.index);
  std::sort(line.finished.begin(), line.finished.end(),
            [](const Choice& a, const Choice& b) { return a.index < b.index; });
  LineFigures figures = FiguresOf(s);
  figures.cached_tokens = line.cached;
  figures.drafts = line.drafts;
  figures.draft_bytes = line.draft_bytes;
  Push(line, figures, s.index);
}

void Deliverer::Refuse(Sequence& s) {
  LineState& line = *s.line;
  line.error = s.error;
  Push(line, {}, s.index);
}

}  // namespace colibri
