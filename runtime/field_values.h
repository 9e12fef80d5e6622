// The values of a line's fields, taken as their kind or refused with the field's name.
// Threads: pure functions. All throw LineRefusal (runtime/chat_messages.h).
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace colibri {

// Says what is given, or the beginning of it, and what is wanted.
[[noreturn]] void BadValue(const std::string& field, const nlohmann::ordered_json& value,
                           std::string_view wanted);

// The same of a field of `owner` that a line cannot do without.
[[noreturn]] void BadNeed(const std::string& field, const nlohmann::ordered_json& owner,
                          std::string_view wanted);

bool BoolField(const std::string& field, const nlohmann::ordered_json& value);
// low <= value <= high.
int64_t IntField(const std::string& field, const nlohmann::ordered_json& value, int64_t low,
                 int64_t high);
// As IntField; low_open: low < value.
float FloatField(const std::string& field, const nlohmann::ordered_json& value, double low,
                 double high, bool low_open);
std::string StringField(const std::string& field, const nlohmann::ordered_json& value);
// One string or up to 4, none empty or longer than kMaxStopBytes.
std::vector<std::string> StopField(const nlohmann::ordered_json& value);
// "high", "max" or "none".
std::string EffortField(const std::string& field, const nlohmann::ordered_json& value);

}  // namespace colibri
