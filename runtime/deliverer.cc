#include "runtime/deliverer.h"

#include <fmt/format.h>

#include <algorithm>
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

}  // namespace

Deliverer::Deliverer(Options options, OutputWriter& writer)
    : options_(std::move(options)), writer_(writer), delivered_(options_.sequences, 0) {}

DeliveryTotals Deliverer::Totals() const { return {done_, failed_, tokens_}; }

void Deliverer::Count(bool failed) {
  done_.fetch_add(1, std::memory_order_relaxed);
  if (failed) failed_.fetch_add(1, std::memory_order_relaxed);
}

std::string Deliverer::Record(const LineState& line, const LineFigures& figures) const {
  if (line.error) {
    return BuildErrorRecord(line.request.line, line.request.custom_id, *line.error,
                            options_.context, line.request.line_hash);
  }
  return BuildRecord(line.request, line.finished, figures, options_.context);
}

std::string Deliverer::Text(const LineState& line) const {
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

void Deliverer::Push(const LineState& line, std::string output, uint32_t sequence) {
  if (options_.ordered == nullptr) return writer_.Push(std::move(output), sequence);
  options_.ordered->Finish(line.request.line, std::move(output), sequence);
}

void Deliverer::FinishLine(Sequence& s) {
  LineState& line = *s.line;
  if (s.error && !line.error) line.error = s.error;
  line.finished.push_back(ChoiceOf(s));
  if (--line.open_choices > 0) return options_.close(s.index);
  std::sort(line.finished.begin(), line.finished.end(),
            [](const Choice& a, const Choice& b) { return a.index < b.index; });
  Count(line.error.has_value());
  std::string output = options_.text ? Text(line) : Record(line, FiguresOf(s));
  // The sequence may wait for slow output: what is in the text need not be held twice.
  line.finished = {};
  Push(line, std::move(output), s.index);
}

void Deliverer::Refuse(Sequence& s) {
  LineState& line = *s.line;
  line.error = s.error;
  Count(true);
  Push(line, options_.text ? Text(line) : Record(line, {}), s.index);
}

}  // namespace colibri
