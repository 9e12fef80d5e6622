#include "runtime/usage_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <string_view>

#include "io/error.h"
#include "io/whole_file.h"

namespace colibri {
namespace {

constexpr int64_t kVersion = 1;
constexpr int64_t kArchitecture = 3815245270;  // FNV-1a, 32 bits, of "glm_moe_dsa"
constexpr int64_t kMostCount = std::numeric_limits<uint32_t>::max();

class Parser {
 public:
  Parser(const std::string& path, int32_t layers, int32_t experts)
      : path_(path), usage_(layers, experts) {}

  void Line(std::string_view text) {
    ++number_;
    text_ = text;
    std::array<int64_t, 3> v{};
    size_t words = 0;
    for (size_t at = text.find_first_not_of(kBlanks); at != std::string_view::npos;
         at = text.find_first_not_of(kBlanks, at)) {
      const size_t end = std::min(text.find_first_of(kBlanks, at), text.size());
      const char* last = text.data() + end;
      if (words == v.size()) Fail("three numbers");
      const auto [rest, error] = std::from_chars(text.data() + at, last, v[words++]);
      if (error != std::errc() || rest != last) Fail("three numbers");
      at = end;
    }
    if (words == 0) return;
    if (words != v.size()) Fail("three numbers");
    Triple(v[0], v[1], v[2]);
  }
  ExpertUsage Take() { return std::move(usage_); }

 private:
  static constexpr std::string_view kBlanks = " \t\r\v\f";

  [[noreturn]] void Fail(const std::string& expected) const {
    throw IoError(fmt::format("{}: line {}: found \"{}\", expected {}", path_, number_,
                              text_.substr(0, 60), expected));
  }
  void Triple(int64_t a, int64_t b, int64_t c) {
    if (a == -1) {
      if (b == usage_.layers && c == usage_.experts) return;
      Fail(fmt::format("-1 {} {}: this model's layers and experts", usage_.layers, usage_.experts));
    }
    if (a == -2) {
      if (b <= kVersion && c == kArchitecture) return;
      Fail(fmt::format("-2 {} {}: the version and glm_moe_dsa", kVersion, kArchitecture));
    }
    if (a < 0 || a > usage_.layers) Fail(fmt::format("a layer, 0 to {}", usage_.layers));
    if (b < 0 || b >= usage_.experts) Fail(fmt::format("an expert, 0 to {}", usage_.experts - 1));
    if (c < 0 || c > kMostCount) Fail(fmt::format("a count, 0 to {}", kMostCount));
    usage_.At(static_cast<int32_t>(a), static_cast<int32_t>(b)) = static_cast<uint64_t>(c);
  }

  const std::string& path_;
  ExpertUsage usage_;
  uint64_t number_ = 0;
  std::string_view text_;
};

}  // namespace

ExpertUsage ParseUsage(std::string_view text, const std::string& path, int32_t layers,
                       int32_t experts) {
  Parser parser(path, layers, experts);
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    parser.Line(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parser.Take();
}

std::optional<ExpertUsage> ReadUsage(const std::string& path, int32_t layers, int32_t experts) {
  const std::optional<std::string> text = ReadWholeFile(path);
  if (!text) return std::nullopt;
  return ParseUsage(*text, path, layers, experts);
}

void WriteUsage(const std::string& path, const ExpertUsage& usage) {
  std::string text =
      fmt::format("-1 {} {}\n-2 {} {}\n", usage.layers, usage.experts, kVersion, kArchitecture);
  bool any = false;
  for (size_t i = 0; i < usage.counts.size(); ++i) {
    if (usage.counts[i] == 0) continue;
    any = true;
    const auto experts = static_cast<size_t>(usage.experts);
    fmt::format_to(std::back_inserter(text), "{} {} {}\n", i / experts, i % experts,
                   std::min(usage.counts[i], static_cast<uint64_t>(kMostCount)));
  }
  ReplacedFile file(path);
  if (any) file.Append(text);
  file.Commit();
}

std::vector<float> HeatOf(const ExpertUsage& usage, int32_t top_k, int32_t rows) {
  std::vector<float> heat(usage.counts.size(), 0);
  const auto experts = static_cast<size_t>(usage.experts);
  for (size_t first = 0; first < heat.size(); first += experts) {
    double all = 0;
    for (size_t e = 0; e < experts; ++e) all += static_cast<double>(usage.counts[first + e]);
    for (size_t e = 0; e < experts && all > 0; ++e) {
      const double one = std::min(1.0, top_k * static_cast<double>(usage.counts[first + e]) / all);
      heat[first + e] = static_cast<float>(1 - std::pow(1 - one, rows));
    }
  }
  return heat;
}

}  // namespace colibri
