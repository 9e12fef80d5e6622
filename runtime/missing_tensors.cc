// Grouping and wording of missing tensors.
#include "runtime/missing_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <optional>
#include <set>

namespace colibri {
namespace {

constexpr size_t kMaxNames = 3;   // named in one line
constexpr size_t kMaxLines = 12;  // of one message
constexpr size_t kMaxGaps = 4;

// 1234567 as "1,234,567".
std::string Grouped(uint64_t n) {
  if (n < 1000) return fmt::format("{}", n);
  return fmt::format("{},{:03}", Grouped(n / 1000), n % 1000);
}

// {3, 4, 5, 9} as "layers 3-5, 9".
std::string LayerRanges(const std::vector<int32_t>& layers) {
  std::string text = layers.size() == 1 ? "layer " : "layers ";
  for (size_t i = 0; i < layers.size();) {
    size_t end = i + 1;
    while (end < layers.size() && layers[end] == layers[end - 1] + 1) ++end;
    if (i > 0) text += ", ";
    text += fmt::format("{}", layers[i]);
    if (end - i > 1) text += fmt::format("-{}", layers[end - 1]);
    i = end;
  }
  return text;
}

// "out-", 17, and of how many ("model-00003-of-00282"; 0: not said).
struct ShardName {
  std::string series;
  uint32_t number = 0, total = 0;
  size_t digits = 0;
};

std::optional<uint32_t> TakeNumber(std::string& stem, size_t& digits) {
  size_t at = stem.size();
  while (at > 0 && std::isdigit(static_cast<unsigned char>(stem[at - 1]))) --at;
  digits = stem.size() - at;
  uint32_t number = 0;
  if (digits == 0 || digits > 6) return std::nullopt;
  std::from_chars(stem.data() + at, stem.data() + stem.size(), number);
  stem.resize(at);
  return number;
}

std::optional<ShardName> ParseShardName(std::string stem) {
  stem.resize(stem.size() - std::min<size_t>(stem.size(), sizeof(".safetensors") - 1));
  ShardName name;
  std::optional<uint32_t> number = TakeNumber(stem, name.digits);
  if (number && stem.ends_with("-of-")) {
    name.total = *number;
    stem.resize(stem.size() - 4);
    number = TakeNumber(stem, name.digits);
  }
  if (!number) return std::nullopt;
  name.series = stem;
  name.number = *number;
  return name;
}

std::string FileName(const ShardName& name, uint32_t number) {
  std::string text = fmt::format("{}{:0{}}", name.series, number, name.digits);
  if (name.total > 0) text += fmt::format("-of-{:0{}}", name.total, name.digits);
  return text + ".safetensors";
}

}  // namespace

void MissingTensors::Add(int32_t layer, const std::string& name, uint64_t count) {
  counts_[name][layer] += count;
}

uint64_t MissingTensors::Count() const {
  uint64_t count = 0;
  for (const auto& [name, layers] : counts_) {
    for (const auto& [layer, n] : layers) count += n;
  }
  return count;
}

std::vector<std::string> MissingTensors::Lines() const {
  struct Group {
    std::vector<std::string> names;
    uint64_t count = 0;
  };
  std::map<std::vector<int32_t>, Group> groups;
  for (const auto& [name, layers] : counts_) {
    std::vector<int32_t> numbers;
    uint64_t count = 0;
    for (const auto& [layer, n] : layers) {
      numbers.push_back(layer);
      count += n;
    }
    // Experts are counted by themselves: they are the bulk of a shard.
    if (name.ends_with('*')) numbers.push_back(INT32_MAX);
    Group& group = groups[numbers];
    group.names.push_back(name);
    group.count += count;
  }
  std::vector<std::string> lines;
  for (const auto& [key, group] : groups) {
    std::vector<int32_t> layers = key;
    if (layers.back() == INT32_MAX) layers.pop_back();
    const size_t named = std::min(group.names.size(), kMaxNames);
    std::string names = fmt::format(
        "{}",
        fmt::join(group.names.begin(), group.names.begin() + static_cast<ptrdiff_t>(named), ", "));
    if (group.names.size() > named)
      names += fmt::format(" and {} more", group.names.size() - named);
    const std::string where = layers.front() < 0 ? "" : LayerRanges(layers) + ": ";
    lines.push_back(fmt::format("{}{}: {} tensor{}", where, names, Grouped(group.count),
                                group.count == 1 ? "" : "s"));
  }
  return lines;
}

std::string MissingTensors::Message(const Container& container) const {
  std::vector<std::string> names;
  for (uint32_t file = 0; file < container.Files().Count(); ++file) {
    const std::string& path = container.Files().Path(file);
    names.push_back(path.substr(path.rfind('/') + 1));
  }
  std::vector<std::string> lines = Lines();
  std::string text = fmt::format("{}: {} tensor{} missing; is a shard missing? {}",
                                 container.Directories().front(), Grouped(Count()),
                                 Count() == 1 ? "" : "s", ShardHint(names));
  const size_t shown = std::min(lines.size(), kMaxLines);
  for (size_t i = 0; i < shown; ++i) text += "\n  " + lines[i];
  if (lines.size() > shown) text += fmt::format("\n  and {} more lines", lines.size() - shown);
  return text;
}

std::string ShardHint(const std::vector<std::string>& base_names) {
  struct Series {
    ShardName name;
    std::set<uint32_t> numbers;
  };
  std::map<std::string, Series> all;
  for (const std::string& base_name : base_names) {
    const std::optional<ShardName> name = ParseShardName(base_name);
    if (!name) continue;
    Series& series = all[name->series];
    series.name = *name;
    series.numbers.insert(name->number);
  }
  std::vector<std::string> gaps;
  size_t more = 0;
  std::string last;
  for (const auto& [key, series] : all) {
    // Files with "-of-" count from 1 to the total, colibri's from 0 to an end nobody knows.
    const uint32_t first = series.name.total > 0 ? 1 : 0;
    const uint32_t end = series.name.total > 0 ? series.name.total : *series.numbers.rbegin();
    for (uint32_t n = first; n <= end; ++n) {
      if (series.numbers.contains(n)) continue;
      gaps.size() < kMaxGaps ? gaps.push_back(FileName(series.name, n)) : void(++more);
    }
    if (last.empty()) last = FileName(series.name, *series.numbers.rbegin());
  }
  if (!gaps.empty()) {
    return fmt::format("not there: {}{}", fmt::join(gaps, ", "),
                       more > 0 ? fmt::format(" and {} more", more) : "");
  }
  const std::string& name = last.empty() ? base_names.back() : last;
  return fmt::format("{} shard{} here, the last is {}", base_names.size(),
                     base_names.size() == 1 ? "" : "s", name);
}

}  // namespace colibri
