#include "runtime/run_output.h"

#include <fmt/format.h>

#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "io/error.h"
#include "io/whole_file.h"

namespace colibri {
namespace {

void CheckManifest(const std::string& path, const std::optional<Manifest>& was,
                   const Manifest& is) {
  const auto differences = CompareManifests(*was, is);
  if (differences.empty()) return;
  std::string text = fmt::format("{} cannot be resumed: its lines were answered with", path);
  for (const std::string& difference : differences) text += "\n  " + difference;
  throw UsageError(text);
}

// Goes on in a file that is not empty. False: it holds no record.
bool Resume(const RunOutputOptions& options, const Manifest& manifest, RunOutput* out) {
  OutputFile& file = *out->file;
  const std::optional<Manifest> was = ReadManifest(ManifestPath(file.Path()));
  // Without it the file is not ours: nothing in it is cut.
  if (!was) {
    throw UsageError(fmt::format("{} cannot be resumed: {} is not there", file.Path(),
                                 ManifestPath(file.Path())));
  }
  OutputScan scan = file.Scan();
  if (scan.finished.Empty()) return false;
  CheckManifest(file.Path(), was, manifest);
  file.Mend(scan);
  if (scan.end.cut_bytes > 0) {
    out->notes.push_back(
        fmt::format("{}: a torn end of {} bytes was cut off", file.Path(), scan.end.cut_bytes));
  }
  if (scan.finished.Duplicates() > 0) {
    out->notes.push_back(fmt::format("{}: {} lines have more than one record", file.Path(),
                                     scan.finished.Duplicates()));
  }
  const size_t failed = scan.finished.Failed();
  if (options.retry_errors && failed > 0) {
    file.DropFailed();
    scan = file.Scan();
    out->notes.push_back(fmt::format("{} failed lines are run again", failed));
  }
  out->run_id = was->run_id;
  out->finished = std::move(scan.finished);
  return true;
}

}  // namespace

RunOutput OpenRunOutput(const std::string& path, const RunOutputOptions& options,
                        const Manifest& manifest) {
  RunOutput out;
  out.file = std::make_unique<OutputFile>(path);
  out.run_id = manifest.run_id;
  if (!out.file->Note().empty()) out.notes.push_back(out.file->Note());
  if (!out.file->Regular()) {
    if (options.resume) throw UsageError(fmt::format("--resume: {} is no regular file", path));
    return out;
  }
  try {
    if (out.file->Size() > 0) {
      if (!options.resume && !options.overwrite) {
        throw UsageError(fmt::format(
            "{} exists and is not empty: --resume goes on in it, --overwrite empties it", path));
      }
      if (options.resume && Resume(options, manifest, &out)) return out;
      out.file->Empty();
    }
    WriteManifest(ManifestPath(path), manifest);
  } catch (...) {
    out.file->Discard();
    throw;
  }
  return out;
}

std::string NameWritten(const std::string& path, const struct stat& file) {
  std::error_code none;
  // Links are followed when the output is replaced.
  const std::string target = std::filesystem::weakly_canonical(path, none).string();
  const std::string manifest = ManifestPath(path);
  for (const std::string& name :
       {path, manifest, ReplacedFile::PartOf(target), ReplacedFile::PartOf(manifest)}) {
    struct stat named {};
    if (stat(name.c_str(), &named) == 0 && S_ISREG(named.st_mode) && named.st_dev == file.st_dev &&
        named.st_ino == file.st_ino) {
      return name;
    }
  }
  return {};
}

}  // namespace colibri
