// The beginning of a run's output, in the order in which a crash at any point leaves something that
// the next start understands: lock, look at what is there, empty or mend it, manifest, and only
// then records. Threads: one.
#pragma once

#include <sys/stat.h>

#include <memory>
#include <string>
#include <vector>

#include "runtime/finished_lines.h"
#include "runtime/manifest.h"
#include "runtime/output_file.h"

namespace colibri {

struct RunOutputOptions {
  bool resume = false, overwrite = false;
  bool retry_errors = false;  // with resume: lines that failed are run again
};

struct RunOutput {
  std::unique_ptr<OutputFile> file;
  FinishedLines finished;          // empty unless resumed
  std::string run_id;              // the manifest's: of the first run, when this one goes on
  std::vector<std::string> notes;  // for the user: what was cut, what goes on
};

// Opens `path` for a run whose bytes depend on `manifest`. With resume and no record there, the run
// starts afresh. A device or FIFO gets neither lock nor manifest. Throws UsageError: the file
// exists and neither flag is given, it has no manifest, or another one (differences by name and
// value); IoError.
RunOutput OpenRunOutput(const std::string& path, const RunOutputOptions& options,
                        const Manifest& manifest);

// The name under which a run or a merge with the output `path` would write over `file` or remove
// it: the output, its manifest, or what either is before it takes its name; "" if none of them.
std::string NameWritten(const std::string& path, const struct stat& file);

}  // namespace colibri
