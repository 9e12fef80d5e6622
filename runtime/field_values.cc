#include "runtime/field_values.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "runtime/chat_messages.h"
#include "runtime/json_text.h"
#include "runtime/line_limits.h"

namespace colibri {

using Json = nlohmann::ordered_json;

void BadValue(const std::string& field, const Json& value, std::string_view wanted) {
  throw LineRefusal("unsupported_value", field,
                    fmt::format("{}: {} is given, {}", field, ShownJson(value), wanted));
}

void BadNeed(const std::string& field, const Json& owner, std::string_view wanted) {
  const auto at = owner.find(field);
  throw LineRefusal("invalid_request", field,
                    fmt::format("{}: {} is given, {} is expected", field,
                                at == owner.end() ? "none" : ShownJson(*at), wanted));
}

bool BoolField(const std::string& field, const Json& value) {
  if (!value.is_boolean()) BadValue(field, value, "true or false is expected");
  return value.get<bool>();
}

int64_t IntField(const std::string& field, const Json& value, int64_t low, int64_t high) {
  const auto wanted = [&] {
    return fmt::format("an integer from {} to {} is expected", low, high);
  };
  if (!value.is_number_integer()) BadValue(field, value, wanted());
  if (value.is_number_unsigned() &&
      value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    BadValue(field, value, wanted());
  }
  const int64_t number = value.get<int64_t>();
  if (number < low || number > high) BadValue(field, value, wanted());
  return number;
}

float FloatField(const std::string& field, const Json& value, double low, double high,
                 bool low_open) {
  const double number = value.is_number() ? value.get<double>() : std::nan("");
  if (!(low_open ? number > low : number >= low) || !(number <= high)) {
    BadValue(field, value,
             fmt::format("a number {} {} and at most {} is expected",
                         low_open ? "above" : "of at least", low, high));
  }
  // A positive top_p below the smallest float must not become 0.
  const float narrow = static_cast<float>(number);
  return low_open && narrow <= 0 ? std::numeric_limits<float>::min() : narrow;
}

std::string StringField(const std::string& field, const Json& value) {
  if (!value.is_string()) BadValue(field, value, "a string is expected");
  return value.get<std::string>();
}

std::vector<std::string> StopField(const Json& value) {
  std::vector<std::string> stop;
  if (value.is_string()) {
    stop.push_back(value.get<std::string>());
  } else if (value.is_array() && value.size() <= 4) {
    for (const Json& entry : value) stop.push_back(StringField("stop", entry));
  } else {
    BadValue("stop", value, "a string or an array of at most 4 strings is expected");
  }
  for (const std::string& text : stop) {
    if (text.empty()) BadValue("stop", value, "an empty stop string would end every line at once");
    if (text.size() > kMaxStopBytes) {
      BadValue("stop", value,
               fmt::format("strings of at most {} bytes are expected", kMaxStopBytes));
    }
  }
  return stop;
}

std::string EffortField(const std::string& field, const Json& value) {
  const std::string effort = StringField(field, value);
  if (effort != "high" && effort != "max" && effort != "none") {
    BadValue(field, value, "the model knows the efforts high, max and none");
  }
  return effort;
}

}  // namespace colibri
