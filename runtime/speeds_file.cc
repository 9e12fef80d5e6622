#include "runtime/speeds_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "io/error.h"
#include "io/whole_file.h"

namespace colibri {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kVersion = 1;
constexpr size_t kMostEntries = 64;  // of each kind

Json Empty() {
  return {{"version", kVersion}, {"drives", Json::array()}, {"computing", Json::array()}};
}

Json Parse(const std::string& path) {
  try {
    const std::optional<std::string> text = ReadWholeFile(path);
    if (!text) return Empty();
    Json file = Json::parse(*text, nullptr, false);
    if (file.is_object() && file.value("version", 0) == kVersion && file["drives"].is_array() &&
        file["computing"].is_array()) {
      return file;
    }
  } catch (const IoError&) {
  } catch (const nlohmann::json::exception&) {
  }
  return Empty();
}

const Json* Find(const Json& entries, const std::string& name) {
  for (const Json& entry : entries) {
    if (entry.is_object() && entry.value("of", "") == name) return &entry;
  }
  return nullptr;
}

void Put(Json* entries, const std::string& name, Json entry) {
  Json kept = Json::array();
  for (Json& one : *entries) {
    if (one.is_object() && one.value("of", "") != name) kept.push_back(std::move(one));
  }
  while (kept.size() >= kMostEntries) kept.erase(kept.begin());
  entry["of"] = name;
  kept.push_back(std::move(entry));
  *entries = std::move(kept);
}

double Positive(const Json& entry, const char* key) {
  const double value = entry.at(key).get<double>();
  if (!(value >= 0)) throw IoError("negative");
  return value;
}

std::optional<Speeds> ComputingOf(const Json& entry) {
  Speeds speeds;
  speeds.position_s = Positive(entry, "position_s");
  for (const Json& s : entry.at("sweeps")) {
    speeds.sweeps.push_back({Positive(s, "rows"), Positive(s, "layers_s"), Positive(s, "draw_s")});
  }
  const auto ascending = [](const Speeds::Sweep& a, const Speeds::Sweep& b) {
    return a.rows < b.rows;
  };
  if (speeds.sweeps.empty() ||
      !std::is_sorted(speeds.sweeps.begin(), speeds.sweeps.end(), ascending))
    return std::nullopt;
  return speeds;
}

}  // namespace

std::string SpeedsPath() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  // The standard wants relative paths ignored.
  if (cache != nullptr && *cache == '/') return std::string(cache) + "/colibri/speeds.json";
  const char* home = std::getenv("HOME");
  if (home == nullptr || *home == '\0') return {};
  return std::string(home) + "/.cache/colibri/speeds.json";
}

RememberedSpeeds ReadSpeeds(const std::string& path, const std::string& drive_name,
                            const std::string& computing_name) {
  RememberedSpeeds speeds;
  if (path.empty()) return speeds;
  const Json file = Parse(path);
  try {
    if (const Json* drive = Find(file["drives"], drive_name)) {
      if (const double rate = Positive(*drive, "bytes_per_second"); rate > 0) speeds.drive = rate;
    }
    if (const Json* entry = Find(file["computing"], computing_name)) {
      speeds.computing = ComputingOf(*entry);
    }
  } catch (const IoError&) {
  } catch (const nlohmann::json::exception&) {
  }
  return speeds;
}

void RememberSpeeds(const std::string& path, const std::string& drive_name,
                    const std::string& computing_name, const RememberedSpeeds& speeds) {
  Json file = Parse(path);
  if (speeds.drive) Put(&file["drives"], drive_name, {{"bytes_per_second", *speeds.drive}});
  if (speeds.computing) {
    Json sweeps = Json::array();
    for (const Speeds::Sweep& s : speeds.computing->sweeps) {
      sweeps.push_back({{"rows", s.rows}, {"layers_s", s.layers_s}, {"draw_s", s.draw_s}});
    }
    Put(&file["computing"], computing_name,
        {{"position_s", speeds.computing->position_s}, {"sweeps", std::move(sweeps)}});
  }
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw IoError(fmt::format("{}: {}", folder.string(), error.message()));
  ReplacedFile out(path);
  out.Append(file.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
  out.Commit();
}

}  // namespace colibri
