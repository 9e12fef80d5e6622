// Reading JSON that comes from users: strict, in key order, and exact where a double is not.
// Not for config.json and tokenizer.json, which have parsers of their own.
// Threads: pure functions.
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace colibri {

// The deepest nesting of arrays and objects that is accepted: rendering recurses.
inline constexpr int kMaxJsonDepth = 512;

// Parses one JSON text; white space around it and a UTF-8 byte order mark before it are skipped.
// Integers beyond 64 bits keep all their digits: they become values for which IsBigInteger() holds
// (and is_number() does not). Throws std::invalid_argument, whose text is valid UTF-8 and gives
// position and reason, for anything else than one JSON text: bytes behind it, invalid UTF-8, lone
// surrogates, NaN, floats beyond a double, integers of more than 308 digits, an object with a key
// twice, nesting deeper than kMaxJsonDepth.
nlohmann::ordered_json ParseJson(std::string_view text);

// The same, but of a text with more than `most` values (members and elements, at any depth) the
// later ones are read and left out, those with a key that is there already too; only a custom_id of
// the outermost object always stays. `*left_out`: whether that happened. Memory: up to 256 bytes a
// value that stays, the bytes of the strings, and three times the longest of them.
nlohmann::ordered_json ParseJsonUpTo(std::string_view text, size_t most, bool* left_out);

// An integer that no 64-bit type holds, as ParseJson keeps it.
bool IsBigInteger(const nlohmann::ordered_json& value);
// Its decimal digits with the sign; "" if it is no big integer.
std::string BigIntegerDigits(const nlohmann::ordered_json& value);

// What a message shows of a value: its JSON text in ASCII, at most 60 bytes of it.
std::string ShownJson(const nlohmann::ordered_json& value);

}  // namespace colibri
