#include "runtime/manifest.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>

#include "io/error.h"
#include "io/strict_json.h"
#include "io/whole_file.h"

namespace colibri {
namespace {

using Json = nlohmann::ordered_json;

// Of the file's layout, not of the numerics.
constexpr int kLayout = 1;

bool ParseNumber(std::string_view text, uint64_t* into) {
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, *into);
  return parsed.ec == std::errc() && parsed.ptr == end;
}

const std::string* FindOption(const Manifest& manifest, const std::string& name) {
  for (const auto& [known, value] : manifest.options) {
    if (known == name) return &value;
  }
  return nullptr;
}

}  // namespace

std::optional<LineShard> ParseLineShard(std::string_view text) {
  const size_t slash = text.find('/');
  LineShard shard;
  if (slash == std::string_view::npos || !ParseNumber(text.substr(0, slash), &shard.index) ||
      !ParseNumber(text.substr(slash + 1), &shard.count) || shard.index >= shard.count) {
    return {};
  }
  return shard;
}

std::string ToText(const LineShard& shard) {
  return fmt::format("{}/{}", shard.index, shard.count);
}

int32_t ContextOf(const Manifest& manifest) {
  const std::string* text = FindOption(manifest, "ctx-size");
  uint64_t context = 0;
  if (text == nullptr || !ParseNumber(*text, &context)) return 0;
  return static_cast<int32_t>(std::min<uint64_t>(context, std::numeric_limits<int32_t>::max()));
}

std::string ManifestPath(const std::string& output) { return output + ".manifest.json"; }

void WriteManifest(const std::string& path, const Manifest& manifest) {
  Json options = Json::object();
  for (const auto& [name, value] : manifest.options) options[name] = value;
  const Json json = {{"colibri_manifest", kLayout},     {"engine", manifest.engine_version},
                     {"run", manifest.run_id},          {"numerics", manifest.numerics},
                     {"simd", manifest.simd_target},    {"model", manifest.model},
                     {"shard", ToText(manifest.shard)}, {"options", std::move(options)}};
  ReplacedFile file(path);
  // A stop text may hold bytes that are no UTF-8.
  file.Append(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  file.Commit();
}

std::optional<Manifest> ReadManifest(const std::string& path) {
  const std::optional<std::string> text = ReadWholeFile(path);
  if (!text) return {};
  try {
    // Refuses what readers could understand differently; the order of options comes from the second
    // pass.
    (void)ParseStrictJson(*text, path);
    const Json json = Json::parse(*text);
    if (json.at("colibri_manifest") != kLayout) {
      throw IoError(fmt::format("{}: of another version, {}", path,
                                Printable(json["colibri_manifest"].dump())));
    }
    Manifest manifest;
    manifest.engine_version = json.at("engine").get<std::string>();
    manifest.run_id = json.at("run").get<std::string>();
    manifest.numerics = json.at("numerics").get<int32_t>();
    manifest.simd_target = json.at("simd").get<std::string>();
    manifest.model = json.at("model").get<std::string>();
    const auto shard = ParseLineShard(json.at("shard").get<std::string>());
    if (!shard) throw IoError(fmt::format("{}: its shard is not I/N", path));
    manifest.shard = *shard;
    for (const auto& [name, value] : json.at("options").items()) {
      manifest.options.emplace_back(name, value.get<std::string>());
    }
    return manifest;
  } catch (const ModelError& error) {
    throw IoError(error.what());
  } catch (const Json::exception&) {
    throw IoError(fmt::format("{}: not a manifest of colibri-run", path));
  }
}

std::vector<std::string> CompareManifests(const Manifest& was, const Manifest& is,
                                          const ManifestScope& scope) {
  std::vector<std::string> differences;
  const auto compare = [&](const std::string& name, const std::string& before,
                           const std::string& now) {
    if (before == now) return;
    differences.push_back(
        fmt::format("{}: was {}, is {}", name, Printable(before), Printable(now)));
  };
  compare("model", was.model, is.model);
  compare("numerics version", std::to_string(was.numerics), std::to_string(is.numerics));
  if (scope.simd_target) compare("SIMD target", was.simd_target, is.simd_target);
  if (scope.shard) compare("shard", ToText(was.shard), ToText(is.shard));
  const std::string unset = "not set";
  for (const auto& [name, value] : is.options) {
    const std::string* before = FindOption(was, name);
    compare(name, before != nullptr ? *before : unset, value);
  }
  for (const auto& [name, value] : was.options) {
    if (FindOption(is, name) == nullptr) compare(name, value, unset);
  }
  return differences;
}

}  // namespace colibri
