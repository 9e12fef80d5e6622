// UTF-8 as the Unicode standard defines it (table 3-7): what is a whole sequence, what is broken.
// Threads: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace colibri {

enum class Utf8Kind : uint8_t {
  kWhole,       // one encoded character
  kBroken,      // bytes that begin no character, whatever follows
  kUnfinished,  // the text ends inside what may still become a character
};

struct Utf8Sequence {
  Utf8Kind kind = Utf8Kind::kWhole;
  uint8_t length = 0;  // bytes; of a broken one: the longest run that one U+FFFD stands for
  char32_t value = 0;  // of a whole one
};

// The sequence at the beginning of `text`, which is not empty.
Utf8Sequence FirstSequence(std::string_view text);

// Bytes before the first broken or unfinished sequence.
size_t ValidPrefix(std::string_view text);

void AppendUtf8(char32_t value, std::string* out);

// Appends `text` with U+FFFD for every broken sequence. Returns the bytes taken: an unfinished
// sequence at the end is left to the caller.
size_t AppendRepaired(std::string_view text, std::string* out);

inline constexpr std::string_view kReplacementCharacter = "\xef\xbf\xbd";

}  // namespace colibri
