// The hash by which a line of a prompt file is known again. Threads: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace colibri {

// XXH3-64 of the bytes. Of an input line: without its end (LF or CR LF) and byte order mark.
uint64_t HashText(std::string_view bytes);

// 16 lower-case hex digits, and back; nullopt for anything else.
std::string HexOf(uint64_t hash);
std::optional<uint64_t> FromHex(std::string_view text);

}  // namespace colibri
