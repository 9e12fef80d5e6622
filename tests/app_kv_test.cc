// colibri-run with KV pages on the drive: the same answers, no file left, and errors by name.
#include <doctest/doctest.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/run_program.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

const std::string kModel = COLIBRI_SOURCE_DIR "/apps/demo/model";
const std::string kPrompts = COLIBRI_SOURCE_DIR "/apps/demo/prompts.jsonl";

ProgramOutcome Run(const Words& more) {
  Words all = {"-m",  kModel,       "-i",  kPrompts,       "--ram", "200MB",           "--slots",
               "25%", "--thinking", "off", "--max-tokens", "40",    "--output-format", "jsonl"};
  all.insert(all.end(), more.begin(), more.end());
  return RunProgram("colibri-run", all, "", {});
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Of each line what depends on it alone.
std::map<std::string, std::string> Answers(const std::string& records) {
  std::map<std::string, std::string> answers;
  std::istringstream lines(records);
  for (std::string line; std::getline(lines, line);) {
    const Json json = Json::parse(line);
    const Json& body = json.at("response").at("body");
    answers[json.at("custom_id")] = body.at("choices").dump() + body.at("usage").dump();
  }
  return answers;
}

}  // namespace

TEST_CASE("a run with KV on the drive gives the answers of one in memory and leaves no file") {
  const ProgramOutcome memory = Run({"--kv-ram", "all"});
  REQUIRE(memory.exit_code == 0);
  CHECK_FALSE(Contains(memory.err, "KV file"));
  const std::map<std::string, std::string> expected = Answers(memory.out);
  CHECK(expected.size() == 24);
  const TempDir folder;
  for (const Words& more : {Words{}, Words{"--frames", "2", "--max-rows", "16", "--direct", "on"},
                            Words{"--threads", "1"}}) {
    Words all = {"--kv-ram", "11MB", "--kv-dir", folder.Path("")};
    all.insert(all.end(), more.begin(), more.end());
    const ProgramOutcome drive = Run(all);
    INFO(drive.err);
    REQUIRE(drive.exit_code == 0);
    CHECK(Contains(drive.err, "; KV file "));
    CHECK(Contains(drive.err, "KV pages: "));
    CHECK(Answers(drive.out) == expected);
    CHECK(std::filesystem::is_empty(folder.Path("")));
  }
}

TEST_CASE("a folder for KV that is not there, and a memory for it that is too small, are named") {
  const ProgramOutcome folder = Run({"--kv-dir", "/no/such/folder"});
  CHECK(folder.exit_code == 2);
  CHECK(Contains(folder.err, "--kv-dir /no/such/folder: No such file or directory"));
  const TempDir here;
  const ProgramOutcome small = Run({"--kv-ram", "1MB", "--kv-dir", here.Path("")});
  CHECK(small.exit_code == 2);
  CHECK(Contains(small.err, "--kv-ram 1.00 MB: KV takes "));
  const ProgramOutcome odd = Run({"--kv-ram", "some"});
  CHECK(odd.exit_code == 2);
  CHECK(Contains(odd.err, "--kv-ram"));
}

TEST_CASE("the pipeline's figures tell what KV was read and written") {
  const TempDir folder;
  const ProgramOutcome outcome =
      RunProgram("colibri-bench",
                 {"pipeline", "-m", kModel, "--ram", "200MB", "--slots", "25%", "--prompt-tokens",
                  "100", "--kv-ram", "2500kB", "--kv-dir", folder.Path("")},
                 "", {});
  INFO(outcome.err);
  CHECK(outcome.exit_code == 0);
  CHECK(Contains(outcome.out, "KV GB read"));
  CHECK(Contains(outcome.out, "KV GB written"));
}

}  // namespace colibri
