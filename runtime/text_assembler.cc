#include "runtime/text_assembler.h"

#include "runtime/tokenizer.h"
#include "runtime/utf8.h"

namespace colibri {

TextAssembler::TextAssembler(const Tokenizer& tokenizer, const Request& request)
    : tokenizer_(&tokenizer),
      think_end_(tokenizer.Find("</think>")),
      scanner_(request.stop),
      in_reasoning_(request.chat && request.starts_in_reasoning) {}

// Moves the first `count` held bytes to the text they belong to.
void TextAssembler::Release(size_t count, Delta* delta) {
  for (size_t i = 0; i < count; ++i) {
    const Part part = static_cast<Part>(held_parts_[i]);
    if (part == Part::kMark) {
      // A character that the mark cuts off never gets its end.
      FlushUnfinished(&delta->reasoning);
      continue;
    }
    unfinished_.push_back(held_[i]);
    std::string* text = part == Part::kReasoning ? &delta->reasoning : &delta->content;
    unfinished_.erase(0, AppendRepaired(unfinished_, text));
  }
  held_.erase(0, count);
  held_parts_.erase(0, count);
}

void TextAssembler::FlushUnfinished(std::string* text) {
  if (!unfinished_.empty()) *text += kReplacementCharacter;
  unfinished_.clear();
}

void TextAssembler::Add(const Delta& delta) {
  reasoning_ += delta.reasoning;
  content_ += delta.content;
}

TextAssembler::Delta TextAssembler::Push(int32_t token) {
  Delta delta;
  if (stopped_) return delta;
  Part part = in_reasoning_ ? Part::kReasoning : Part::kContent;
  if (in_reasoning_ && token == think_end_) {
    // Its spelling takes part in the search for stop strings, but is no text.
    part = Part::kMark;
    in_reasoning_ = false;
  } else if (in_reasoning_) {
    ++reasoning_tokens_;
  }
  if (tokenizer_->IsSpecial(token) && part != Part::kMark) return delta;
  for (const char byte : tokenizer_->Bytes(token)) {
    const int found = scanner_.Push(byte);
    held_.push_back(byte);
    held_parts_.push_back(static_cast<char>(part));
    if (found >= 0) {
      Release(held_.size() - scanner_.Length(found), &delta);
      held_.clear();
      held_parts_.clear();
      stopped_ = true;
      break;
    }
    Release(held_.size() - scanner_.Partial(), &delta);
  }
  Add(delta);
  return delta;
}

TextAssembler::Delta TextAssembler::Finish() {
  Delta delta;
  const bool ends_in_reasoning = held_parts_.empty()
                                     ? in_reasoning_
                                     : held_parts_.back() == static_cast<char>(Part::kReasoning);
  Release(held_.size(), &delta);
  FlushUnfinished(ends_in_reasoning ? &delta.reasoning : &delta.content);
  Add(delta);
  return delta;
}

}  // namespace colibri
