// Strict JSON on top of nlohmann's DOM parser.
#include "io/strict_json.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "io/error.h"

namespace colibri {
namespace {

constexpr int kMaxDepth = 64;
constexpr size_t kMaxPrinted = 120;

}  // namespace

std::string Printable(std::string_view text) {
  std::string result;
  for (char c : text.substr(0, kMaxPrinted)) {
    const auto byte = static_cast<unsigned char>(c);
    result += byte < 0x20 || byte >= 0x7f ? '?' : c;
  }
  if (text.size() > kMaxPrinted) result += "...";
  return result;
}

nlohmann::json ParseStrictJson(std::string_view text, const std::string& what) {
  using nlohmann::json;
  if (text.find('\0') != std::string_view::npos) {
    throw ModelError(fmt::format("{}: a NUL byte in JSON text", what));
  }
  std::vector<std::set<std::string>> keys;
  const json::parser_callback_t check = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > kMaxDepth) {
      throw ModelError(fmt::format("{}: JSON nested deeper than {}", what, kMaxDepth));
    }
    if (event == json::parse_event_t::object_start) {
      keys.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      keys.pop_back();
    } else if (event == json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys.back().insert(key).second) {
        throw ModelError(fmt::format("{}: key \"{}\" is given twice", what, Printable(key)));
      }
    }
    return true;
  };
  try {
    return json::parse(text, check);
  } catch (const json::parse_error& error) {
    throw ModelError(fmt::format("{}: not valid JSON at byte {}", what, error.byte));
  } catch (const json::exception&) {
    // Numbers out of range of double.
    throw ModelError(fmt::format("{}: JSON with a value that cannot be represented", what));
  }
}

}  // namespace colibri
