// The shell scripts: they parse, they can be started, and the list of packages asks for what is
// missing and for nothing else. dpkg-query is replaced by a script that knows what a test wants.
#include <doctest/doctest.h>
#include <stdio.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/temp_dir.h"

namespace colibri {
namespace {

struct Outcome {
  int status = -1;
  std::string output;  // standard output and standard error
};

Outcome Shell(const std::string& command) {
  FILE* pipe = popen(("cd '" COLIBRI_SOURCE_DIR "' && { " + command + "; } 2>&1").c_str(), "r");
  REQUIRE(pipe != nullptr);
  Outcome outcome;
  std::array<char, 4096> buffer;
  for (size_t n; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    outcome.output.append(buffer.data(), n);
  }
  outcome.status = pclose(pipe);
  return outcome;
}

// apps/packages.sh --dry-run where dpkg-query runs `body`.
Outcome MissingPackages(const std::string& body, const std::string& arguments = "") {
  const TempDir folder;
  const std::string path = folder.Write("dpkg-query", "#!/bin/sh\n" + body + "\n");
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return Shell("PATH='" + folder.Path("") + "':\"$PATH\" bash apps/packages.sh --dry-run " +
               arguments);
}

// Answers as dpkg-query does: status:name and a blank for each known package after the options.
const char* const kAllInstalled = "shift 2; for p; do printf 'installed:%s ' \"$p\"; done";

}  // namespace

TEST_CASE("every script parses and can be started") {
  for (const char* script :
       {".ci/run", "apps/demo.sh", "apps/packages.sh", "tests/client_python.sh", "tests/run.sh"}) {
    CAPTURE(script);
    const Outcome parsed = Shell(std::string("bash -n ") + script);
    CHECK(parsed.output == "");
    CHECK(parsed.status == 0);
    CHECK(access((std::string(COLIBRI_SOURCE_DIR "/") + script).c_str(), X_OK) == 0);
  }
  CHECK(Shell("bash -n apps/jobs.sh").status == 0);
}

TEST_CASE("at least one compiler runs, and no more than there are cores") {
  const Outcome outcome = Shell(
      "bash -euo pipefail -c 'source apps/jobs.sh; jobs=$(build_jobs)\n"
      "[[ $jobs -ge 1 ]]; [[ $jobs -le $(nproc) ]]'");
  CHECK(outcome.output == "");
  CHECK(outcome.status == 0);
}

TEST_CASE("with every package installed nothing is asked for") {
  const Outcome outcome = MissingPackages(kAllInstalled, "tests");
  CHECK(outcome.output == "");
  CHECK(outcome.status == 0);
}

TEST_CASE("exactly the missing packages are asked for") {
  // Removed but not purged, and unknown: dpkg-query fails on the latter.
  const Outcome outcome = MissingPackages(
      "shift 2; for p; do case $p in libtbb-dev) printf 'config-files:%s ' \"$p\";; "
      "cmake) ;; *) printf 'installed:%s ' \"$p\";; esac; done; exit 1");
  CHECK(outcome.output == "cmake\nlibtbb-dev\n");
  CHECK(outcome.status == 0);
}

TEST_CASE("the packages of the tests are asked for by the tests alone") {
  CHECK(MissingPackages("exit 1").output.find("clang-14") == std::string::npos);
  CHECK(MissingPackages("exit 1", "tests").output.find("\nclang-14\n") != std::string::npos);
}

TEST_CASE("an unknown argument of a script is an error") {
  CHECK(Shell("bash apps/packages.sh --dry").status != 0);
  CHECK(Shell("bash tests/run.sh --fast").output == "usage: bash tests/run.sh [--full]\n");
}

TEST_CASE("without PyPI there is no Python for the answers, but a reason, and nothing half made") {
  const TempDir folder;
  // Makes an environment in which nothing can be installed.
  const std::string python =
      folder.Write("python3",
                   "#!/bin/sh\nmkdir -p \"$3/bin\"\nprintf '#!/bin/sh\\necho no route; exit 1' "
                   "> \"$3/bin/python\"\nchmod +x \"$3/bin/python\"\n");
  std::filesystem::permissions(python, std::filesystem::perms::owner_all);
  const std::string made = folder.Path("made");
  const Outcome outcome =
      Shell("PATH='" + folder.Path("") + "':\"$PATH\" bash tests/client_python.sh '" + made + "'");
  CAPTURE(outcome.output);
  CHECK(outcome.status != 0);
  CHECK(outcome.output.find("no route\nclient_python.sh: no Python with openai==") == 0);
  CHECK(outcome.output.find("PyPI are needed") != std::string::npos);
  CHECK_FALSE(std::filesystem::exists(made));
}

TEST_CASE("the machine that built this test has every package of the build") {
  if (Shell("command -v dpkg-query").status != 0) return;  // no Debian
  CHECK(Shell("bash apps/packages.sh --dry-run").output == "");
}

}  // namespace colibri
