#include "runtime/line_id.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <stdexcept>

#include "runtime/json_text.h"
#include "runtime/line_limits.h"

namespace colibri {

std::string CustomIdOf(const nlohmann::ordered_json& root) {
  if (!root.is_object()) return {};
  const auto id = root.find("custom_id");
  if (id == root.end() || !id->is_string()) return {};
  const std::string& text = id->get_ref<const std::string&>();
  return text.size() <= kMaxIdBytes ? text : std::string();
}

std::string LineCustomId(std::string_view line, uint64_t number, InputFormat format,
                         int32_t context) {
  if (format == InputFormat::kLines) return fmt::format("line-{}", number);
  try {
    bool left_out = false;
    return CustomIdOf(ParseJsonUpTo(line, MaxLineValues(context), &left_out));
  } catch (const std::invalid_argument&) {
    return {};
  }
}

}  // namespace colibri
