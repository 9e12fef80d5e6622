// Peak resident memory of whole runs against the budget, with a model several times larger than it.
// The model is made for the test and goes with it.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/run_program.h"
#include "tests/shard_files.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

using Words = std::vector<std::string>;

constexpr uint64_t kRam = 230'000'000;

// 480 experts of 1.4 MB and 40 MB of dense weights.
const std::string& LargeModel() {
  static const TempDir dir;
  static const std::string path = dir.Path("model");
  if (!std::filesystem::exists(path)) {
    REQUIRE_MESSAGE(std::filesystem::space(dir.Path("")).available > 1'500'000'000,
                    "the folder for temporary files has no room for a model of 700 MB");
    const ProgramOutcome made = RunProgram(
        "colibri-bench", {"make-model", path, "--layers", "6", "--experts", "96", "--hidden",
                          "1024", "--moe-intermediate", "768", "--no-mtp", "--quiet",
                          "--tokenizer-from", COLIBRI_SOURCE_DIR "/apps/demo/model"});
    INFO(made.err);
    REQUIRE(made.exit_code == 0);
    uint64_t bytes = 0;
    for (const auto& file : std::filesystem::directory_iterator(path)) bytes += file.file_size();
    REQUIRE(bytes > 5 * kRam / 2);
  }
  return path;
}

// The number of megabytes after `label` in the notes.
double Megabytes(const std::string& notes, const std::string& label) {
  const size_t at = notes.find(label);
  REQUIRE(at != std::string::npos);
  return std::stod(notes.substr(at + label.size()));
}

void CheckRun(const Words& more, int32_t prompts) {
  Words all = {"-m", LargeModel(),     "--ram",           "230MB", "--max-tokens",
               "6",  "--no-loop-stop", "--output-format", "jsonl"};
  all.insert(all.end(), more.begin(), more.end());
  std::string setting;
  for (const std::string& word : more) setting += word + " ";
  CAPTURE(setting);
  std::string input;
  for (int32_t i = 0; i < prompts; ++i) {
    input += "Prompt number " + std::to_string(i) + " asks for a page about the sea and the moor\n";
  }
  all.insert(all.end(), {"-i", "-"});
  const ProgramOutcome outcome = RunProgram("colibri-run", all, input);
  INFO(outcome.err);
  CHECK(outcome.exit_code == 0);
  CHECK(std::count(outcome.out.begin(), outcome.out.end(), '\n') == prompts);
  CHECK(outcome.peak_bytes < kRam);
  // The plan's own promise is tighter: three digits are printed, so compared to one in 300.
  const double peak = static_cast<double>(outcome.peak_bytes) / 1e6;
  CHECK(peak < Megabytes(outcome.err, "plan: ") * 1.003);
  CHECK(peak < 1.003 * Megabytes(outcome.err, "memory: peak "));
}

}  // namespace

TEST_CASE("peak memory stays within --ram, whatever the pipeline's settings" *
          doctest::skip(kAddressSanitizer)) {
  // The default context comes first: 4,096 tokens.
  CheckRun({}, 4);
  CheckRun({"--threads", "1", "--ctx-size", "512"}, 24);
  CheckRun({"--frames", "2", "--max-rows", "64", "--ctx-size", "1k"}, 24);
  CheckRun({"--slots", "20", "--direct", "on"}, 8);
  CheckRun({"--slots", "5%", "--io", "pread", "--kv", "f32"}, 8);
}

TEST_CASE("a budget below what the model needs is refused before anything is loaded" *
          doctest::skip(kAddressSanitizer)) {
  const ProgramOutcome outcome =
      RunProgram("colibri-run", {"-m", LargeModel(), "--ram", "120MB", "-p", "Hello"});
  CHECK(outcome.exit_code == 2);
  CHECK(Contains(outcome.err, "the plan does not fit"));
  CHECK(outcome.peak_bytes < 60'000'000);
}

TEST_CASE("log probabilities of long answers stay within --ram as well" *
          doctest::skip(kAddressSanitizer)) {
  std::string input;
  for (int32_t i = 0; i < 24; ++i) {
    input += R"({"custom_id":")" + std::to_string(i) +
             R"(","method":"POST","url":"/v1/completions","body":{"prompt":"The sea","logprobs":5,)"
             R"("max_tokens":150}})"
             "\n";
  }
  const ProgramOutcome outcome =
      RunProgram("colibri-run",
                 {"-m", COLIBRI_SOURCE_DIR "/apps/demo/model", "--ram", "120MB", "-i", "-",
                  "--no-loop-stop", "--threads", "2"},
                 input);
  INFO(outcome.err);
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.peak_bytes < 120'000'000);
}

}  // namespace colibri
