// The rules of the project's shape as functions on text, so that tests can show that each of them
// catches what it forbids: which folder may include what, how long a file may be, which paths a
// file may name. Reads nothing but what it is given, except where a function takes a root.
// Threads: pure functions.
#pragma once

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace colibri {

using Complaints = std::vector<std::string>;

// What files of a folder may include of the project. apps and bench are one program in two folders.
inline const std::map<std::string, std::set<std::string>, std::less<>>& AllowedFolders() {
  static const std::map<std::string, std::set<std::string>, std::less<>> kAllowed = {
      {"kernels", {"kernels"}},
      {"io", {"io"}},
      {"runtime", {"runtime", "kernels", "io"}},
      {"graph", {"graph", "runtime", "kernels", "io"}},
      {"apps", {"apps", "bench", "graph", "runtime", "kernels", "io"}},
      {"bench", {"apps", "bench", "graph", "runtime", "kernels", "io"}},
      {"tests", {"tests", "apps", "bench", "graph", "runtime", "kernels", "io"}},
  };
  return kAllowed;
}

inline std::string FirstComponent(std::string_view path) {
  return std::string(path.substr(0, path.find('/')));
}

inline std::vector<std::string_view> SplitLines(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

struct Include {
  std::string name;
  bool quoted = false;
};

// The include directive of a line; name "" when it is one whose target is a macro.
inline std::optional<Include> ParseInclude(std::string_view line) {
  const auto skip_blanks = [&line] {
    while (!line.empty() && (line.front() == ' ' || line.front() == '\t')) line.remove_prefix(1);
  };
  skip_blanks();
  if (!line.starts_with('#')) return {};
  line.remove_prefix(1);
  skip_blanks();
  if (!line.starts_with("include")) return {};
  line.remove_prefix(std::string_view("include").size());
  skip_blanks();
  const bool quoted = line.starts_with('"');
  if (!quoted && !line.starts_with('<')) return Include{};
  const size_t end = line.find(quoted ? '"' : '>', 1);
  if (end == std::string_view::npos) return Include{};
  return Include{std::string(line.substr(1, end - 1)), quoted};
}

// Headers of kernels that are compiled once for each SIMD target and need Highway.
inline bool IsPerTarget(std::string_view header) {
  return header == "kernels/targets.h" || header.ends_with("-inl.h");
}

// Third-party headers that have a place: by the beginning of their name, where they may be.
inline bool ThirdPartyAllowed(std::string_view path, std::string_view header) {
  const std::string folder = FirstComponent(path);
  const bool source = path.ends_with(".cc");
  if (header.starts_with("hwy/")) {
    return folder == "kernels" && (source || IsPerTarget(path));
  }
  // The standard library has no slash, POSIX and Linux are asked for below sys/ and linux/.
  const bool system = header.find('/') == std::string_view::npos || header.starts_with("sys/") ||
                      header.starts_with("linux/");
  if (header.starts_with("liburing")) return path == "io/uring_reader.cc";
  if (folder == "kernels") return system;
  if (header.starts_with("tbb/") || header.starts_with("oneapi/")) return folder == "graph";
  if (header == "nlohmann/json_fwd.hpp") return true;
  if (header.starts_with("nlohmann/")) return source;
  if (header.starts_with("CLI/")) return folder == "apps" || folder == "bench";
  if (header.starts_with("doctest/")) return folder == "tests";
  return true;
}

// Includes of the file `path` (from the root of the project) that the layers forbid.
inline Complaints CheckIncludes(std::string_view path, std::string_view text) {
  Complaints complaints;
  const auto allowed = AllowedFolders().find(FirstComponent(path));
  for (std::string_view line : SplitLines(text)) {
    const std::optional<Include> include = ParseInclude(line);
    if (!include) continue;
    const std::string folder = FirstComponent(include->name);
    const bool ours = AllowedFolders().contains(folder);
    std::string why;
    if (allowed == AllowedFolders().end()) {
      why = "is in no folder of the project";
    } else if (include->name.empty()) {
      why = "includes what cannot be read";
    } else if (ours && !include->quoted) {
      why = "names a file of the project in angle brackets";
    } else if (ours && !allowed->second.contains(folder)) {
      why = "points against the layers";
    } else if (allowed->first != "kernels" && IsPerTarget(include->name)) {
      why = "brings Highway to another folder";
    } else if (!ours && include->quoted && folder != "hwy") {
      why = "does not start with a folder of the project";
    } else if (!ours && !ThirdPartyAllowed(path, include->name)) {
      why = "has no place here";
    }
    if (!why.empty())
      complaints.push_back(std::string(path) + ": " + std::string(line) + " " + why);
  }
  return complaints;
}

inline constexpr size_t kMaxLines = 500;
// A longer file says why: a line of its head comment begins so.
inline constexpr std::string_view kLengthNote = "Length: ";

inline Complaints CheckLength(std::string_view path, std::string_view text) {
  const std::vector<std::string_view> lines = SplitLines(text);
  if (lines.size() <= kMaxLines) return {};
  for (std::string_view line : lines) {
    if (!line.starts_with("//") && !line.starts_with("#")) break;
    if (line.find(kLengthNote) != std::string_view::npos) return {};
  }
  return {std::string(path) + ": " + std::to_string(lines.size()) + " lines, and the head comment" +
          " has no \"" + std::string(kLengthNote) + "reason\""};
}

// Absolute paths below folders that differ from machine to machine. (/proc, /sys, /dev and /usr/bin
// are the same on all of them.)
inline Complaints CheckPaths(std::string_view path, std::string_view text) {
  // Without slashes, so that this list is not what it forbids.
  constexpr std::array<std::string_view, 11> kFolders = {
      "work", "tmp", "home", "root", "mnt", "opt", "srv", "var", "media", "data", "Users"};
  Complaints complaints;
  for (std::string_view line : SplitLines(text)) {
    for (size_t at = line.find('/'); at != std::string_view::npos; at = line.find('/', at + 1)) {
      const char before = at == 0 ? ' ' : line[at - 1];
      const bool begins = !std::isalnum(static_cast<unsigned char>(before)) &&
                          std::string_view("_./-})]>*$<").find(before) == std::string_view::npos;
      if (!begins) continue;
      const std::string_view rest = line.substr(at + 1);
      for (std::string_view folder : kFolders) {
        const std::string_view after = rest.substr(std::min(folder.size(), rest.size()));
        if (rest.starts_with(folder) && (after.empty() || after.front() == '/')) {
          complaints.push_back(std::string(path) + ": " + std::string(line));
        }
      }
    }
  }
  return complaints;
}

// Names of Markdown and Python files that the text mentions and that are not there, neither from
// `root` nor from the file's own folder.
inline Complaints CheckMentions(const std::filesystem::path& root, std::string_view path,
                                std::string_view text) {
  const auto is_name = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) ||
           std::string_view("_./-").find(c) != std::string_view::npos;
  };
  Complaints complaints;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = begin;
    while (end < text.size() && is_name(text[end])) ++end;
    std::string_view word = text.substr(begin, end - begin);
    while (word.ends_with('.')) word.remove_suffix(1);
    begin = std::max(end, begin + 1);
    if (!word.ends_with(".md") && !word.ends_with(".py")) continue;
    if (word.starts_with('.') && !word.starts_with("./") && !word.starts_with("../")) continue;
    const std::filesystem::path name{std::string(word)};
    const std::filesystem::path own = (root / std::string(path)).parent_path();
    const auto inside = [&root](const std::filesystem::path& file) {
      const std::string from_root = file.lexically_normal().lexically_relative(root).string();
      return !from_root.starts_with("..") && std::filesystem::exists(file);
    };
    if (inside(root / name) || inside(own / name)) continue;
    complaints.push_back(std::string(path) + ": " + std::string(word) + " is not in the project");
  }
  return complaints;
}

}  // namespace colibri
