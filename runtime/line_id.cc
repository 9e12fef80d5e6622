#include "runtime/line_id.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <stdexcept>

#include "runtime/json_text.h"

namespace colibri {

std::string CustomIdOf(const nlohmann::ordered_json& root) {
  if (!root.is_object()) return {};
  const auto id = root.find("custom_id");
  return id != root.end() && id->is_string() ? id->get<std::string>() : std::string();
}

std::string LineCustomId(std::string_view line, uint64_t number, InputFormat format) {
  if (format == InputFormat::kLines) return fmt::format("line-{}", number);
  try {
    return CustomIdOf(ParseJson(line));
  } catch (const std::invalid_argument&) {
    return {};
  }
}

}  // namespace colibri
