// The custom_id of a line of a prompt file, for those who do not parse the rest of it.
// Threads: pure functions.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "runtime/line_source.h"

namespace colibri {

// Of a batch line's JSON; "" when there is none that is a string of at most kMaxIdBytes.
std::string CustomIdOf(const nlohmann::ordered_json& root);

// The custom_id that a RequestParser for `context` tokens finds in a line; "" when there is none
// that can be read.
std::string LineCustomId(std::string_view line, uint64_t number, InputFormat format,
                         int32_t context);

}  // namespace colibri
