#include "runtime/json_cursor.h"

#include <fmt/format.h>

#include <charconv>
#include <stdexcept>

#include "runtime/utf8.h"

namespace colibri {

void JsonCursor::Fail(std::string_view what) const {
  throw std::invalid_argument(fmt::format("byte {}: {}", at_ + 1, what));
}

char JsonCursor::Next() {
  while (at_ < text_.size()) {
    const char c = text_[at_];
    if (c != ' ' && c != '\n' && c != '\r' && c != '\t') return c;
    ++at_;
  }
  return '\0';
}

bool JsonCursor::Consume(char c) {
  if (Next() != c || at_ == text_.size()) return false;
  ++at_;
  return true;
}

void JsonCursor::Expect(char c) {
  if (!Consume(c)) Fail(fmt::format("'{}' expected", c));
}

bool JsonCursor::More(char close, bool* first) {
  if (Consume(close)) return false;
  if (!*first) {
    if (!Consume(',')) Fail(fmt::format("',' or '{}' expected", close));
  }
  *first = false;
  return true;
}

void JsonCursor::ExpectEnd() {
  Next();
  if (at_ != text_.size()) Fail("nothing more expected");
}

uint32_t JsonCursor::Hex4() {
  uint32_t value = 0;
  const char* begin = text_.data() + at_;
  if (text_.size() - at_ < 4) Fail("four hexadecimal digits expected");
  const auto [end, error] = std::from_chars(begin, begin + 4, value, 16);
  if (error != std::errc() || end != begin + 4) Fail("four hexadecimal digits expected");
  at_ += 4;
  return value;
}

void JsonCursor::Escape(std::string* out) {
  constexpr std::string_view kLetters = "\"\\/bfnrt", kValues = "\"\\/\b\f\n\r\t";
  if (at_ == text_.size()) Fail("the text ends inside a string");
  const char c = text_[at_];
  if (const size_t i = kLetters.find(c); i != std::string_view::npos) {
    ++at_;
    out->push_back(kValues[i]);
    return;
  }
  if (c != 'u') Fail("unknown escape");
  ++at_;
  char32_t value = Hex4();
  if (value >= 0xD800 && value < 0xDC00 && text_.substr(at_, 2) == "\\u") {
    at_ += 2;
    const uint32_t low = Hex4();
    if (low < 0xDC00 || low > 0xDFFF) Fail("a surrogate without its partner");
    value = 0x10000 + ((value - 0xD800) << 10) + (low - 0xDC00);
  } else if (value >= 0xD800 && value <= 0xDFFF) {
    Fail("a surrogate without its partner");
  }
  AppendUtf8(value, out);
}

std::string_view JsonCursor::String(std::string* scratch) {
  Expect('"');
  const size_t begin = at_;
  bool escaped = false;
  while (true) {
    size_t end = at_;
    while (end < text_.size() && text_[end] != '"' && text_[end] != '\\' &&
           static_cast<uint8_t>(text_[end]) >= 0x20) {
      ++end;
    }
    const std::string_view plain = text_.substr(at_, end - at_);
    at_ = end;
    if (end == text_.size()) Fail("the text ends inside a string");
    if (text_[end] == '"') {
      ++at_;
      if (!escaped) return text_.substr(begin, end - begin);
      scratch->append(plain);
      return *scratch;
    }
    if (text_[end] != '\\') Fail("a control character inside a string");
    if (!escaped) scratch->clear();
    escaped = true;
    scratch->append(plain);
    ++at_;
    Escape(scratch);
  }
}

int64_t JsonCursor::Integer() {
  Next();
  int64_t value = 0;
  const char* begin = text_.data() + at_;
  const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
  if (error != std::errc()) Fail("an integer expected");
  const char* digits = *begin == '-' ? begin + 1 : begin;
  if (*digits == '0' && end - digits > 1) Fail("an integer with leading zeros");
  if (end != text_.data() + text_.size() && (*end == '.' || *end == 'e' || *end == 'E')) {
    Fail("an integer expected");
  }
  at_ = static_cast<size_t>(end - text_.data());
  return value;
}

JsonCursor::Range JsonCursor::Skip() {
  if (Next() == '\0') Fail("a value expected");
  const size_t begin = at_;
  size_t depth = 0;
  while (at_ < text_.size()) {
    const char c = text_[at_];
    if (c == '"') {
      for (++at_; at_ < text_.size() && text_[at_] != '"'; ++at_) {
        if (text_[at_] == '\\') ++at_;
      }
      if (at_ >= text_.size()) {
        at_ = text_.size();
        Fail("the text ends inside a string");
      }
      ++at_;
    } else if (c == '[' || c == '{') {
      ++depth;
      ++at_;
    } else if (c == ']' || c == '}') {
      if (depth == 0) break;  // closes what holds the value
      --depth;
      ++at_;
    } else if (depth == 0 && c == ',') {
      break;
    } else {
      ++at_;
      if (depth == 0) continue;
    }
    if (depth == 0 && (c == '"' || c == ']' || c == '}')) break;
  }
  if (depth != 0) Fail("the text ends inside a value");
  if (begin == at_) Fail("a value expected");
  return {begin, at_};
}

}  // namespace colibri
