// Few combinations of settings in which every pair of values of every two settings occurs.
// Threads: pure function.
#pragma once

#include <cstddef>
#include <set>
#include <utility>
#include <vector>

namespace colibri {

// sizes[i]: how many values setting i has. Each result holds one value number for each setting.
inline std::vector<std::vector<size_t>> Pairwise(const std::vector<size_t>& sizes) {
  using Value = std::pair<size_t, size_t>;  // setting, number
  std::set<std::pair<Value, Value>> open;
  for (size_t a = 0; a < sizes.size(); ++a) {
    for (size_t b = a + 1; b < sizes.size(); ++b) {
      for (size_t i = 0; i < sizes[a]; ++i) {
        for (size_t j = 0; j < sizes[b]; ++j) open.insert({{a, i}, {b, j}});
      }
    }
  }
  std::vector<std::vector<size_t>> rows;
  while (!open.empty()) {
    // The first pair that is missing, then setting by setting the value that adds most.
    const auto [one, other] = *open.begin();
    std::vector<Value> chosen = {one, other};
    for (size_t s = 0; s < sizes.size(); ++s) {
      if (s == one.first || s == other.first) continue;
      size_t best = 0, most = 0;
      for (size_t i = 0; i < sizes[s]; ++i) {
        // Start elsewhere in each row, so that values that add nothing take turns.
        const size_t number = (i + rows.size()) % sizes[s];
        size_t adds = 1;
        for (const Value& c : chosen) {
          const Value v{s, number};
          adds += open.count(c < v ? std::pair(c, v) : std::pair(v, c));
        }
        if (adds > most) {
          most = adds;
          best = number;
        }
      }
      chosen.push_back({s, best});
    }
    std::vector<size_t> row(sizes.size());
    for (const Value& c : chosen) {
      row[c.first] = c.second;
      for (const Value& d : chosen) open.erase({c, d});
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace colibri
