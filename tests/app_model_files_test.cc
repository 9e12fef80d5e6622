// Odd files in a model's folder, through colibri-run: what is no model ends with exit code 3 and
// one line that names the file.
#include <doctest/doctest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>

#include "tests/run_program.h"
#include "tests/temp_dir.h"
#include "tests/watchdog.h"

namespace colibri {
namespace {

namespace fs = std::filesystem;

// The demo model by links, so that a test may replace its files.
class LinkedModel {
 public:
  LinkedModel() {
    for (const auto& entry : fs::directory_iterator(COLIBRI_SOURCE_DIR "/apps/demo/model")) {
      fs::create_symlink(entry.path(), dir_.Path(entry.path().filename().string()));
    }
  }
  std::string Directory() const { return dir_.Path(""); }
  // The path of a file that is no longer there.
  std::string Vacate(const std::string& name) const {
    fs::remove(dir_.Path(name));
    return dir_.Path(name);
  }

 private:
  TempDir dir_;
};

ProgramOutcome Ask(const LinkedModel& model) {
  return RunProgram("colibri-run",
                    {"-m", model.Directory(), "-p", "Hello", "--max-tokens", "1", "--slots", "1"});
}

size_t Lines(const std::string& text) {
  return static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
}

TEST_CASE("a pipe, a folder or a device in the place of a model's JSON file is refused by name") {
  const Watchdog watchdog("a model file that is none");
  for (const char* name : {"config.json", "tokenizer.json", "generation_config.json"}) {
    for (const char* kind : {"pipe", "folder", "device"}) {
      CAPTURE(name);
      CAPTURE(kind);
      const LinkedModel model;
      const std::string path = model.Vacate(name);
      if (std::string_view(kind) == "pipe") {
        REQUIRE(mkfifo(path.c_str(), 0600) == 0);
      } else if (std::string_view(kind) == "folder") {
        fs::create_directory(path);
      } else {
        fs::create_symlink("/dev/zero", path);
      }
      const ProgramOutcome outcome = Ask(model);
      CHECK(outcome.exit_code == 3);
      CHECK(outcome.out.empty());
      CHECK(outcome.err.find(std::string(name) + ": not a regular file") != std::string::npos);
      CHECK_MESSAGE(Lines(outcome.err) == 1, outcome.err);
    }
  }
}

}  // namespace
}  // namespace colibri
