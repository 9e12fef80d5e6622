#include "runtime/text_hash.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <charconv>

namespace colibri {

uint64_t HashText(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::string HexOf(uint64_t hash) { return fmt::format("{:016x}", hash); }

std::optional<uint64_t> FromHex(std::string_view text) {
  if (text.size() != 16) return {};
  uint64_t value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size()) return {};
  return HexOf(value) == text ? std::optional(value) : std::nullopt;
}

}  // namespace colibri
