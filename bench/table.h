// A table of figures, printed as its reader wants it: aligned text, JSON (an array of objects), CSV
// or Markdown. Threads: one.
#pragma once

#include <string>
#include <vector>

namespace colibri {

enum class TableFormat { kText, kJson, kCsv, kMarkdown };

struct TableColumn {
  std::string key;    // in JSON and CSV
  std::string title;  // elsewhere
  bool number = true;
};

class Table {
 public:
  explicit Table(std::vector<TableColumn> columns) : columns_(std::move(columns)) {}
  // One value a column; "" has none.
  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string Text(TableFormat format) const;

 private:
  std::string Json() const;
  std::vector<TableColumn> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace colibri
