#include "bench/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace colibri {

std::string Table::Json() const {
  auto all = nlohmann::ordered_json::array();
  for (const auto& row : rows_) {
    nlohmann::ordered_json object;
    for (size_t c = 0; c < columns_.size(); ++c) {
      const bool number = columns_[c].number;
      object[columns_[c].key] = row[c].empty() ? nlohmann::ordered_json(nullptr)
                                : number       ? nlohmann::ordered_json(std::stod(row[c]))
                                               : nlohmann::ordered_json(row[c]);
    }
    all.push_back(std::move(object));
  }
  return all.dump(1) + "\n";
}

std::string Table::Text(TableFormat format) const {
  if (format == TableFormat::kJson) return Json();
  const bool csv = format == TableFormat::kCsv, markdown = format == TableFormat::kMarkdown;
  std::vector<size_t> widths;
  for (size_t c = 0; c < columns_.size(); ++c) {
    widths.push_back(columns_[c].title.size());
    for (const auto& row : rows_) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  const auto add = [&](const std::vector<std::string>& row) {
    if (markdown) text += "|";
    for (size_t c = 0; c < columns_.size(); ++c) {
      if (csv) {
        text += (c == 0 ? "" : ",") + row[c];
      } else if (markdown) {
        text += fmt::format(" {} |", row[c]);
      } else {
        text += columns_[c].number ? fmt::format("{:>{}}", row[c], widths[c])
                                   : fmt::format("{:<{}}", row[c], widths[c]);
        if (c + 1 < columns_.size()) text += "  ";
      }
    }
    text += "\n";
  };
  std::vector<std::string> head, rule;
  for (const TableColumn& column : columns_) {
    head.push_back(csv ? column.key : column.title);
    rule.push_back(column.number ? "---:" : "---");
  }
  add(head);
  if (markdown) add(rule);
  for (const auto& row : rows_) add(row);
  return text;
}

}  // namespace colibri
