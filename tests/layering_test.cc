// The shape of the project: what each folder includes, what lies at the top, how long files are and
// which paths they name. The rules are in tests/project_rules.h.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "tests/project_rules.h"

namespace colibri {
namespace {

namespace fs = std::filesystem;

const fs::path kRoot = fs::path(COLIBRI_SOURCE_DIR).lexically_normal();

struct TextFile {
  std::string path;  // from the root
  std::string text;
};

std::string ReadText(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool IsCode(const std::string& path) { return path.ends_with(".cc") || path.ends_with(".h"); }

// Everything people write by hand; not the models and expected values of demo and fixtures.
std::vector<TextFile> ProjectFiles() {
  std::vector<TextFile> files;
  const auto add = [&files](const fs::path& path) {
    files.push_back({path.lexically_relative(kRoot).string(), ReadText(path)});
  };
  for (const char* name :
       {"CMakeLists.txt", "CMakePresets.json", "README.md", ".clang-format", ".gitignore"}) {
    add(kRoot / name);
  }
  std::vector<std::string> folders = {".ci"};
  for (const auto& entry : AllowedFolders()) folders.push_back(entry.first);
  for (const std::string& folder : folders) {
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / folder)) {
      const std::string extension = entry.path().extension();
      const std::set<std::string> text = {"", ".cc", ".h", ".md", ".sh", ".py", ".txt", ".cmake"};
      if (entry.is_regular_file() && text.contains(extension)) add(entry.path());
    }
  }
  return files;
}

std::string Joined(const Complaints& complaints) {
  return fmt::format("{}", fmt::join(complaints, "\n"));
}

// Complaints of `check` (path, text) about every file.
template <class Check>
std::string AboutAllFiles(Check check) {
  Complaints all;
  for (const TextFile& file : ProjectFiles()) {
    for (std::string& complaint : check(file)) all.push_back(std::move(complaint));
  }
  return Joined(all);
}

bool Refused(const char* path, const char* line) { return !CheckIncludes(path, line).empty(); }

}  // namespace

TEST_CASE("every include follows the layers") {
  size_t seen = 0;
  const std::string complaints = AboutAllFiles([&seen](const TextFile& file) -> Complaints {
    if (!IsCode(file.path)) return {};
    ++seen;
    return CheckIncludes(file.path, file.text);
  });
  CHECK(seen > 100);
  CHECK(complaints == "");
}

TEST_CASE("every included file of the project exists") {
  CHECK(AboutAllFiles([](const TextFile& file) -> Complaints {
          Complaints complaints;
          if (!IsCode(file.path)) return complaints;
          for (std::string_view line : SplitLines(file.text)) {
            const std::optional<Include> include = ParseInclude(line);
            if (!include || !AllowedFolders().contains(FirstComponent(include->name))) continue;
            if (!fs::exists(kRoot / include->name))
              complaints.push_back(file.path + ": " + include->name);
          }
          return complaints;
        }) == "");
}

TEST_CASE("an include against the layers is caught") {
  CHECK(Refused("kernels/matmul.cc", "#include \"io/check.h\""));
  CHECK(Refused("kernels/matmul.cc", "#include \"runtime/frame.h\""));
  CHECK(Refused("io/file.cc", "#include \"kernels/kernels.h\""));
  CHECK(Refused("io/file.h", "#include \"runtime/config.h\""));
  CHECK(Refused("runtime/frame.h", "#include \"graph/messages.h\""));
  CHECK(Refused("runtime/stages.cc", "#include \"apps/flags.h\""));
  CHECK(Refused("graph/engine.cc", "#include \"bench/fixture.h\""));
  CHECK(Refused("graph/engine.cc", "#include \"tests/temp_dir.h\""));
  CHECK(Refused("apps/flags.cc", "#include \"tests/temp_dir.h\""));
  CHECK(Refused("bench/fixture.cc", "  #  include\t\"tests/temp_dir.h\" // why"));
  CHECK(Refused("elsewhere/a.cc", "#include <vector>"));
  CHECK(Refused("graph/engine.cc", "#include MACRO"));
  CHECK(Refused("graph/engine.cc", "#include \"messages.h\""));
  CHECK(Refused("graph/engine.cc", "#include \"../io/file.h\""));
  CHECK(Refused("graph/engine.cc", "#include <io/file.h>"));
  CHECK_FALSE(Refused("graph/engine.cc", "#include \"graph/messages.h\"\n#include \"io/file.h\""));
  CHECK_FALSE(Refused("runtime/stages.cc", "#include \"kernels/kernels.h\"  // why"));
  CHECK_FALSE(Refused("apps/colibri_bench.cc", "#include \"bench/fixture.h\""));
  CHECK_FALSE(Refused("tests/engine_test.cc", "#include \"graph/engine.h\""));
  CHECK_FALSE(Refused("io/file.cc", "// #include \"graph/engine.h\""));
}

TEST_CASE("a third-party header outside its place is caught") {
  CHECK(Refused("runtime/router.cc", "#include \"hwy/highway.h\""));
  CHECK(Refused("kernels/kernels.h", "#include <hwy/highway.h>"));
  CHECK(Refused("tests/kernels_test.cc", "#include \"kernels/vector-inl.h\""));
  CHECK(Refused("kernels/matmul.cc", "#include <fmt/format.h>"));
  CHECK(Refused("kernels/matmul.cc", "#include <nlohmann/json_fwd.hpp>"));
  CHECK(Refused("io/pread_reader.cc", "#include <liburing.h>"));
  CHECK(Refused("io/uring_reader.h", "#include <liburing.h>"));
  CHECK(Refused("runtime/parallel.h", "#include <oneapi/tbb/parallel_for.h>"));
  CHECK(Refused("tests/engine_test.cc", "#include <tbb/flow_graph.h>"));
  CHECK(Refused("io/container.h", "#include <nlohmann/json.hpp>"));
  CHECK(Refused("graph/engine.cc", "#include <CLI/CLI.hpp>"));
  CHECK(Refused("io/check.h", "#include <doctest/doctest.h>"));
  CHECK_FALSE(Refused("kernels/matmul.cc", "#include \"hwy/foreach_target.h\""));
  CHECK_FALSE(Refused("kernels/vector-inl.h", "#include <hwy/highway.h>"));
  CHECK_FALSE(Refused("io/uring_reader.cc", "#include <liburing.h>"));
  CHECK_FALSE(Refused("graph/engine.h", "#include <oneapi/tbb/task_arena.h>"));
  CHECK_FALSE(Refused("io/container.h", "#include <nlohmann/json_fwd.hpp>"));
  CHECK_FALSE(Refused("io/container.cc", "#include <nlohmann/json.hpp>"));
  CHECK_FALSE(Refused("bench/pipeline.cc", "#include <CLI/CLI.hpp>"));
  CHECK_FALSE(Refused("io/file.cc", "#include <sys/stat.h>\n#include <vector>"));
}

TEST_CASE("only the agreed names lie at the top") {
  const std::set<std::string> agreed = {
      "CMakeLists.txt", "CMakePresets.json", "LICENSE", "README.md", "apps", "bench", "graph", "io",
      "kernels",        "runtime",           "tests"};
  std::set<std::string> found;
  for (const auto& entry : fs::directory_iterator(kRoot)) {
    const std::string name = entry.path().filename();
    // Dot files belong to tools; build folders are ignored by git.
    if (!name.starts_with('.') && !name.starts_with("build")) found.insert(name);
  }
  CHECK(found == agreed);
  for (const char* name : {".ci/run", ".clang-format", ".gitignore"})
    CHECK(fs::exists(kRoot / name));
}

TEST_CASE("a file of more than 500 lines says why") {
  CHECK(AboutAllFiles([](const TextFile& file) { return CheckLength(file.path, file.text); }) ==
        "");

  std::string lines;
  for (size_t i = 0; i < kMaxLines; ++i) lines += "int a;\n";
  CHECK(CheckLength("io/a.cc", lines).empty());
  CHECK_FALSE(CheckLength("io/a.cc", lines + "int b;\n").empty());
  CHECK(CheckLength("io/a.cc", "// What it owns.\n// Length: one table.\n" + lines).empty());
  CHECK_FALSE(CheckLength("io/a.cc", lines + "// Length: too late.\n").empty());
}

TEST_CASE("no file names a path outside the project") {
  CHECK(AboutAllFiles([](const TextFile& file) { return CheckPaths(file.path, file.text); }) == "");

  const std::string slash = "/";
  CHECK_FALSE(CheckPaths("README.md", "see " + slash + "work/notes").empty());
  CHECK_FALSE(CheckPaths("io/a.cc", "open(\"" + slash + "tmp/x\")").empty());
  CHECK_FALSE(CheckPaths("io/a.cc", slash + "home").empty());
  CHECK(
      CheckPaths("io/a.cc", "a" + slash + "work/b, https:" + slash + slash + "x.org/home").empty());
  CHECK(CheckPaths("io/a.cc", slash + "proc/self/status " + slash + "workshop").empty());
}

TEST_CASE("every document that a file mentions is in the project") {
  CHECK(AboutAllFiles(
            [](const TextFile& file) { return CheckMentions(kRoot, file.path, file.text); }) == "");

  const std::string missing = std::string("notes") + ".md";
  CHECK_FALSE(CheckMentions(kRoot, "io/a.cc", "as (" + missing + " §2) says").empty());
  CHECK_FALSE(CheckMentions(kRoot, "io/a.cc", "../../README" + std::string(".md")).empty());
  CHECK(CheckMentions(kRoot, "io/a.cc", "see README.md.").empty());
  CHECK(CheckMentions(kRoot, "tests/a.cc", "see fixtures/README.md").empty());
}

}  // namespace colibri
