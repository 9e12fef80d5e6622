#include "runtime/utf8.h"

#include <cstring>

namespace colibri {
namespace {

uint8_t Byte(std::string_view text, size_t i) { return static_cast<uint8_t>(text[i]); }

// Leading bytes that are ASCII, eight at a time.
size_t AsciiPrefix(std::string_view text) {
  size_t i = 0;
  for (; i + 8 <= text.size(); i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + i, sizeof(word));
    if ((word & 0x8080808080808080u) != 0) break;
  }
  while (i < text.size() && Byte(text, i) < 0x80) ++i;
  return i;
}

}  // namespace

Utf8Sequence FirstSequence(std::string_view text) {
  const uint8_t lead = Byte(text, 0);
  if (lead < 0x80) return {Utf8Kind::kWhole, 1, lead};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8Kind::kBroken, 1, 0};
  const size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  char32_t value = lead & (0x7Fu >> length);
  // The second byte's range excludes overlong forms, surrogates and values above U+10FFFF.
  uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {Utf8Kind::kUnfinished, static_cast<uint8_t>(i), 0};
    const uint8_t byte = Byte(text, i);
    if (byte < low || byte > high) return {Utf8Kind::kBroken, static_cast<uint8_t>(i), 0};
    value = (value << 6) | (byte & 0x3Fu);
    low = 0x80;
    high = 0xBF;
  }
  return {Utf8Kind::kWhole, static_cast<uint8_t>(length), value};
}

size_t ValidPrefix(std::string_view text) {
  size_t i = AsciiPrefix(text);
  while (i < text.size()) {
    const Utf8Sequence sequence = FirstSequence(text.substr(i));
    if (sequence.kind != Utf8Kind::kWhole) break;
    i += sequence.length;
    if (sequence.length == 1) i += AsciiPrefix(text.substr(i));
  }
  return i;
}

void AppendUtf8(char32_t value, std::string* out) {
  const auto push = [out](char32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (value < 0x80) {
    push(value);
  } else if (value < 0x800) {
    push(0xC0 | (value >> 6));
    push(0x80 | (value & 0x3F));
  } else if (value < 0x10000) {
    push(0xE0 | (value >> 12));
    push(0x80 | ((value >> 6) & 0x3F));
    push(0x80 | (value & 0x3F));
  } else {
    push(0xF0 | (value >> 18));
    push(0x80 | ((value >> 12) & 0x3F));
    push(0x80 | ((value >> 6) & 0x3F));
    push(0x80 | (value & 0x3F));
  }
}

size_t AppendRepaired(std::string_view text, std::string* out) {
  size_t i = 0;
  while (i < text.size()) {
    const size_t valid = ValidPrefix(text.substr(i));
    out->append(text.substr(i, valid));
    i += valid;
    if (i == text.size()) break;
    const Utf8Sequence broken = FirstSequence(text.substr(i));
    if (broken.kind == Utf8Kind::kUnfinished) break;
    out->append(kReplacementCharacter);
    i += broken.length;
  }
  return i;
}

}  // namespace colibri
