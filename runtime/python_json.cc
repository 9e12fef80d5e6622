// PythonJson of chat_template.h: tools and arguments must reach the model in the bytes it was
// trained on, which json.dumps wrote.
#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "runtime/chat_template.h"
#include "runtime/json_text.h"

namespace colibri {
namespace {

using Json = nlohmann::ordered_json;

void AppendString(std::string_view text, std::string* out) {
  constexpr std::string_view kSpecial = "\"\\\b\f\n\r\t", kLetters = "\"\\bfnrt";
  out->push_back('"');
  for (const char c : text) {
    if (const size_t i = kSpecial.find(c); i != std::string_view::npos) {
      out->push_back('\\');
      out->push_back(kLetters[i]);
    } else if (static_cast<uint8_t>(c) < 0x20) {
      out->append(fmt::format("\\u{:04x}", static_cast<unsigned>(c)));
    } else {
      out->push_back(c);
    }
  }
  out->push_back('"');
}

// The shortest digits that give the value back, with an exponent below 1e-4 and from 1e16 on.
void AppendFloat(double value, std::string* out) {
  if (!std::isfinite(value)) {
    out->append(std::isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity");
    return;
  }
  char buffer[32];
  const auto written =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific);
  std::string_view text(buffer, static_cast<size_t>(written.ptr - buffer));
  if (text[0] == '-') {
    out->push_back('-');
    text.remove_prefix(1);
  }
  const size_t e = text.find('e');
  const char* exponent_begin = text.data() + e + (text[e + 1] == '+' ? 2 : 1);
  int exponent = 0;
  std::from_chars(exponent_begin, text.data() + text.size(), exponent);
  if (exponent < -4 || exponent >= 16) {
    out->append(text);
    return;
  }
  std::string digits(1, text[0]);
  if (e > 2) digits.append(text.substr(2, e - 2));
  if (exponent < 0) {
    out->append("0.").append(static_cast<size_t>(-exponent - 1), '0').append(digits);
    return;
  }
  const size_t whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) digits.append(whole + 1 - digits.size(), '0');
  out->append(digits, 0, whole).append(".").append(digits, whole);
}

void Append(const Json& value, size_t most, std::string* out) {
  if (out->size() > most) throw TextTooLong();
  const char* separator = "";
  switch (value.type()) {
    case Json::value_t::object:
      out->push_back('{');
      for (const auto& [key, member] : value.get_ref<const Json::object_t&>()) {
        out->append(separator);
        AppendString(key, out);
        out->append(": ");
        Append(member, most, out);
        separator = ", ";
      }
      out->push_back('}');
      return;
    case Json::value_t::array:
      out->push_back('[');
      for (const Json& element : value) {
        out->append(separator);
        Append(element, most, out);
        separator = ", ";
      }
      out->push_back(']');
      return;
    case Json::value_t::string:
      return AppendString(value.get_ref<const std::string&>(), out);
    case Json::value_t::number_float:
      return AppendFloat(value.get<double>(), out);
    case Json::value_t::binary:
      out->append(BigIntegerDigits(value));
      return;
    default:  // null, true, false and integers look the same everywhere
      out->append(value.dump());
      return;
  }
}

}  // namespace

std::string PythonJson(const Json& value, size_t most) {
  std::string out;
  Append(value, most, &out);
  return out;
}

}  // namespace colibri
