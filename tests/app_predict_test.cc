// Predictions as a user meets them: measured once and remembered, said before and after a run, and
// without any effect on its answers.
#include <doctest/doctest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "apps/flags.h"
#include "tests/run_program.h"
#include "tests/shard_files.h"
#include "tests/temp_dir.h"
#include "tests/watchdog.h"

namespace colibri {
namespace {

using Words = std::vector<std::string>;

const std::string kModel = COLIBRI_SOURCE_DIR "/apps/demo/model";

// Some answers of the demo model with a quarter of its experts in memory.
ProgramOutcome Run(const Words& more, const Words& environment) {
  Words all = {"-m",
               kModel,
               "--ram",
               "200MB",
               "--slots",
               "25%",
               "--threads",
               "2",
               "--usage",
               "off",
               "-p",
               "Hello there",
               "-p",
               "Good day",
               "--max-tokens",
               "6",
               "--output-format",
               "jsonl",
               "--temperature",
               "0"};
  all.insert(all.end(), more.begin(), more.end());
  return RunProgram("colibri-run", all, "", environment);
}

Words Predicting(const std::string& cache) {
  return {"COLIBRI_NO_PREDICTION=", "XDG_CACHE_HOME=" + cache};
}

// What stands behind `text`.
double NumberAfter(const std::string& err, const std::string& text) {
  const size_t at = err.find(text);
  if (at == std::string::npos) FAIL("no ", text, " in ", err);
  return std::stod(err.substr(at + text.size()));
}

ino_t InodeOf(const std::string& path) {
  struct stat info {};
  REQUIRE(stat(path.c_str(), &info) == 0);
  return info.st_ino;
}

// What belongs to the lines: no times, no figures.
std::string Choices(const std::string& out) {
  std::string all;
  std::istringstream lines(out);
  for (std::string line; std::getline(lines, line);) {
    const auto record = nlohmann::json::parse(line);
    all += record.at("custom_id").dump() + record.at("response").at("body").at("choices").dump();
  }
  return all;
}

}  // namespace

TEST_CASE("a run measures once, predicts, and says at its end what came of it") {
  const TempDir dir;
  const std::string file = dir.Path("colibri/speeds.json");
  const ProgramOutcome first = Run({}, Predicting(dir.Path("")));
  INFO(first.err);
  REQUIRE(first.exit_code == 0);
  const double predicted = NumberAfter(first.err, "; predicted: ");
  CHECK(predicted > 0);
  CHECK(NumberAfter(first.err, "\npredicted ") == doctest::Approx(predicted).epsilon(0.01));
  CHECK(Contains(first.err, ", got "));
  const ino_t written = InodeOf(file);

  const ProgramOutcome second = Run({}, Predicting(dir.Path("")));
  // Under ASan a run that has measured is thought to be larger, and its plan a smaller one.
  CHECK((kAddressSanitizer || NumberAfter(second.err, "; predicted: ") == predicted));
  CHECK(InodeOf(file) == written);  // remembered, so nothing was written

  REQUIRE(Run({"--calibrate"}, Predicting(dir.Path(""))).exit_code == 0);
  CHECK(InodeOf(file) != written);
}

TEST_CASE("a prediction changes no answer, and peak memory stays within the plan") {
  const TempDir dir;
  const ProgramOutcome with = Run({}, Predicting(dir.Path("")));
  const ProgramOutcome without = Run({"--no-prediction"}, {});
  INFO(with.err);
  CHECK(with.exit_code == 0);
  CHECK_FALSE(Contains(without.err, "predicted"));
  CHECK(Choices(with.out) == Choices(without.out));
  if (kAddressSanitizer) return;
  CHECK(static_cast<double>(with.peak_bytes) / 1e6 < NumberAfter(with.err, "plan: ") * 1.005);
}

TEST_CASE("the speed of the drive given by hand is what the prediction reckons with") {
  const TempDir dir;
  const auto predicted = [&](const char* speed) {
    return NumberAfter(Run({"--drive-speed", speed}, Predicting(dir.Path(""))).err,
                       "; predicted: ");
  };
  const double slow = predicted("1MB/s"), fast = predicted("2MB/s");
  CHECK(slow < 10);
  CHECK(fast == doctest::Approx(2 * slow).epsilon(0.1));
}

TEST_CASE(
    "under a limit that hardly lets an expert through it is the limit that is reckoned with") {
  const TempDir dir;
  const Watchdog watchdog("a low --io-limit");
  Words all = {"-m", kModel, "--plan", "--ram", "400MB", "--io-limit", "10"};
  const ProgramOutcome outcome = RunProgram("colibri-run", all, "", Predicting(dir.Path("")));
  CHECK(outcome.exit_code == 0);
  CHECK(Contains(outcome.out, "predicted"));
}

TEST_CASE("where no cache can be written speeds are measured and nothing fails") {
  const TempDir dir;
  dir.Write("file", "");
  const ProgramOutcome outcome = Run({}, Predicting(dir.Path("file")));
  INFO(outcome.err);
  CHECK(outcome.exit_code == 0);
  CHECK(NumberAfter(outcome.err, "; predicted: ") > 0);
}

TEST_CASE("--plan predicts too") {
  const TempDir dir;
  const ProgramOutcome outcome = RunProgram(
      "colibri-run", {"-m", kModel, "--plan", "--ram", "400MB"}, "", Predicting(dir.Path("")));
  CHECK(outcome.exit_code == 0);
  CHECK(Contains(outcome.out, "predicted"));
  CHECK(std::filesystem::exists(dir.Path("colibri/speeds.json")));
}

TEST_CASE("measuring and not measuring exclude each other") {
  const auto refused = [](const Words& more) {
    Words all = {"-m", "d", "--plan", "--no-prediction"};
    all.insert(all.end(), more.begin(), more.end());
    return ParseRunCommandLine(all);
  };
  CHECK(refused({}).options.has_value());
  CHECK(Contains(refused({"--calibrate"}).text, "--calibrate measures"));
  CHECK(Contains(refused({"--drive-speed", "2GB/s"}).text, "--no-prediction leaves out"));
  const ParsedCommandLine rate =
      ParseRunCommandLine({"-m", "d", "--plan", "--drive-speed", "2GB/s"});
  REQUIRE(rate.options);
  CHECK(rate.options->drive_speed == 2'000'000'000);
  CHECK(ParseRunCommandLine({"-m", "d", "--plan", "--drive-speed", "fast"}).exit_code == 2);
}

TEST_CASE("a run without an answer is not compared with what was predicted for it") {
  const TempDir cache;
  const ProgramOutcome outcome =
      RunProgram("colibri-run", {"-m", kModel, "--ram", "400MB", "-i", "-"}, "[1]\n",
                 Predicting(cache.Path("")));
  INFO(outcome.err);
  CHECK(outcome.exit_code == 1);
  CHECK(Contains(outcome.err, "; predicted: "));
  CHECK(Contains(outcome.err, "1 line, 1 failed"));
  CHECK_FALSE(Contains(outcome.err, ", got "));
}

}  // namespace colibri
