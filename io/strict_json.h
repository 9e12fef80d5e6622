// JSON as start-up code wants it: a text that different readers could understand differently is
// refused. Used for small files (configurations, stamps); shard headers have a parser of their own.
// Threads: any.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace colibri {

// Parses `text`. Throws ModelError "<what>: ..." for syntax errors, broken UTF-8, NUL bytes (which
// nlohmann takes for the end), keys given twice (which it resolves silently) and nesting deeper
// than 64.
nlohmann::json ParseStrictJson(std::string_view text, const std::string& what);

// A name or value from a file, made fit for a message: at most 120 bytes, control characters and
// broken UTF-8 replaced.
std::string Printable(std::string_view text);

}  // namespace colibri
