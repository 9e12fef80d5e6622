// The table of input oddities in tests/oddities.md as tests use it: what a row says is what the
// program has to answer, so that table and program cannot differ. Threads: pure functions.
#pragma once

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cstdint>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/record.h"
#include "runtime/record_reader.h"
#include "tests/output_records.h"
#include "tests/run_program.h"

namespace colibri {

struct TableRow {
  std::string oddity, gets;
  std::string test;  // "program: case"
};

// The rows of all tables of tests/oddities.md whose head is | oddity | what it gets | test |.
inline std::vector<TableRow> OddityTable() {
  const auto cells = [](std::string_view line) {
    std::vector<std::string> all;
    for (size_t i = 0; i < line.size(); ++i) {
      if (line[i] == '|') {
        all.emplace_back();
      } else if (!all.empty()) {
        if (line.substr(i, 2) == "\\|") ++i;
        all.back() += line[i];
      }
    }
    for (std::string& cell : all) {
      cell.erase(0, cell.find_first_not_of(' '));
      cell.erase(cell.find_last_not_of(' ') + 1);
    }
    return all;
  };
  std::vector<TableRow> rows;
  std::istringstream text(ReadWhole(std::string(COLIBRI_SOURCE_DIR) + '/' + "tests/oddities.md"));
  bool inside = false;
  for (std::string line; std::getline(text, line);) {
    const std::vector<std::string> row = cells(line);
    if (line.starts_with("| oddity |")) {
      inside = true;
    } else if (row.size() != 4) {
      inside = false;
    } else if (inside && !line.starts_with("|---")) {
      rows.push_back({row[0], row[1], row[2]});
    }
  }
  return rows;
}

// What the table says of each oddity of this test.
inline std::map<std::string, std::string> RowsOf(const std::string& test) {
  std::map<std::string, std::string> rows;
  for (const TableRow& row : OddityTable()) {
    if (row.test == test) CHECK_MESSAGE(rows.emplace(row.oddity, row.gets).second, row.oddity);
  }
  return rows;
}

// Whether `text` is `pattern`, in which each … stands for anything.
inline bool Fits(std::string_view text, std::string_view pattern) {
  constexpr std::string_view kAny = "…";
  const size_t first = pattern.find(kAny);
  if (first == std::string_view::npos) return text == pattern;
  if (!text.starts_with(pattern.substr(0, first))) return false;
  text.remove_prefix(first);
  pattern.remove_prefix(first + kAny.size());
  for (size_t skip = 0; skip <= text.size(); ++skip) {
    if (Fits(text.substr(skip), pattern)) return true;
  }
  return false;
}

// An error record's status, code, field and message as the table says them; "answered" otherwise.
// Json: nlohmann::json, whose header test programs alone include.
template <class Json>
std::string SaidBy(const Json& record) {
  if (record.at("error").is_null()) return "answered";
  const Json& error = record.at("response").at("body").at("error");
  const auto text = [&error](const char* field) {
    return error.at(field).is_null() ? std::string() : error.at(field).template get<std::string>();
  };
  const std::string param = text("param");
  return fmt::format("{} `{}`{}: {}", record.at("response").at("status_code").template get<int>(),
                     text("code"), param.empty() ? "" : fmt::format(" at `{}`", param),
                     text("message"));
}

// The records of `text` by their line; no line twice.
inline std::map<uint64_t, std::string> RecordsByLine(const std::string& text) {
  REQUIRE((text.empty() || text.back() == '\n'));
  std::map<uint64_t, std::string> records;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto facts = ReadRecordFacts(line);
    REQUIRE_MESSAGE(facts.has_value(), line);
    CHECK_MESSAGE(records.emplace(facts->line, line).second, "line " << facts->line << " twice");
  }
  return records;
}

// colibri-run with the demo model, two tokens a line unless it says otherwise.
inline std::vector<std::string> OddityArguments(const std::vector<std::string>& more) {
  std::vector<std::string> all = {
      "-m", COLIBRI_SOURCE_DIR "/apps/demo/model", "--ram", "200MB", "--max-tokens", "2"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

inline ProgramOutcome RunOddities(const std::vector<std::string>& more,
                                  std::string_view input = "") {
  return RunProgram("colibri-run", OddityArguments(more), input);
}

}  // namespace colibri
