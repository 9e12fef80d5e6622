// Peak resident memory of whole runs against the budget, with a model several times larger than it.
// The model is made for the test and goes with it.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "runtime/line_limits.h"
#include "runtime/record.h"
#include "tests/run_program.h"
#include "tests/shard_files.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

using Words = std::vector<std::string>;

constexpr uint64_t kRam = 230'000'000;

bool FullTests() { return std::getenv("COLIBRI_FULL_TESTS") != nullptr; }

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
  Words all = {"-m",    LargeModel(),      "--ram", "230MB",          "--max-tokens", "2",
               "--raw", "--output-format", "jsonl", "--input-format", "lines"};
  all.insert(all.end(), more.begin(), more.end());
  std::string setting;
  for (const std::string& word : more) setting += word + " ";
  CAPTURE(setting);
  std::string input;
  for (int32_t i = 0; i < prompts; ++i) {
    input += "Page " + std::to_string(i) + "\n";
  }
  all.insert(all.end(), {"-i", "-"});
  const ProgramOutcome outcome = RunProgram("colibri-run", all, input);
  INFO(outcome.err);
  CHECK(outcome.exit_code == 0);
  CHECK(std::count(outcome.out.begin(), outcome.out.end(), '\n') == prompts);
  CHECK(outcome.peak_bytes < kRam);
  // The plan's own promise is tighter: three digits are printed, so compared to one in 200.
  const double peak = static_cast<double>(outcome.peak_bytes) / 1e6;
  CHECK(peak < Megabytes(outcome.err, "plan: ") * 1.005);
  CHECK(peak < 1.005 * Megabytes(outcome.err, "memory: peak "));
}

}  // namespace

TEST_CASE("peak memory stays within --ram, whatever the pipeline's settings" *
          doctest::skip(kAddressSanitizer)) {
  // The default context comes first: 4,096 tokens.
  CheckRun({}, 4);
  CheckRun({"--threads", "1", "--ctx-size", "512"}, 12);
  CheckRun({"--frames", "2", "--max-rows", "64", "--ctx-size", "1k"}, 12);
  CheckRun({"--slots", "20", "--direct", "on"}, 4);
  CheckRun({"--slots", "5%", "--io", "pread", "--kv", "f32"}, 4);
  CheckRun({"--resident", "none", "--frames", "2", "--direct", "on", "--ctx-size", "1k"}, 6);
  CheckRun({"--resident", "25MB", "--ctx-size", "1k"}, 4);
}

TEST_CASE("measuring how fast the machine is stays within --ram" *
          doctest::skip(kAddressSanitizer)) {
  // Reading without a bound took 90 MB, which the first does not have; the last has room for
  // nothing.
  for (const uint64_t ram : {uint64_t{150'000'000}, kRam, uint64_t{90'000'000}}) {
    CAPTURE(ram);
    const TempDir cache;
    const ProgramOutcome outcome =
        RunProgram("colibri-run",
                   {"-m", LargeModel(), "--ram", std::to_string(ram / 1'000'000) + "MB",
                    "--ctx-size", "512", "--calibrate", "--plan", "-p", "Hello", "--threads", "2"},
                   "", {"COLIBRI_NO_PREDICTION=", "XDG_CACHE_HOME=" + cache.Path("")});
    INFO(outcome.out, outcome.err);
    if (ram < 100'000'000) {
      CHECK(outcome.peak_bytes < ram);
      CHECK(Contains(outcome.err, "no prediction: too little memory"));
      continue;
    }
    CHECK(outcome.peak_bytes < ram - 64'000'000);
    CHECK(outcome.exit_code == 0);
    CHECK(Contains(outcome.out, "predicted"));
    const double said = Megabytes(outcome.err, "peak memory ");
    CHECK(static_cast<double>(outcome.peak_bytes) / 1e6 < 1.1 * said);
    CHECK(said < static_cast<double>(ram) / 1e6);
  }
}

TEST_CASE("a budget below what the model needs is refused before anything is loaded" *
          doctest::skip(kAddressSanitizer)) {
  const ProgramOutcome outcome =
      RunProgram("colibri-run", {"-m", LargeModel(), "--ram", "120MB", "-p", "Hello"});
  CHECK(outcome.exit_code == 2);
  CHECK(Contains(outcome.err, "the plan does not fit"));
  CHECK(outcome.peak_bytes < 60'000'000);
}

// A batch line; `body` goes on behind the messages.
std::string Line(const std::string& id, const std::string& body,
                 const std::string& prompt = "The sea") {
  return R"({"custom_id":")" + id + R"(","body":{"messages":[{"role":"user","content":")" + prompt +
         R"("}],"max_tokens":2)" + body + "}}\n";
}

// `text` over and over, a comma between, as the metadata of a line of about `bytes` bytes.
std::string Filled(const std::string& id, const std::string& text, size_t bytes) {
  std::string all = text;
  while (all.size() < bytes) all += "," + text;
  return Line(id, R"(,"metadata":[)" + all + "]");
}

// The cap of a line for the demo's context.
constexpr size_t kCap = MaxLineBytes(2048);

// A file of lines, written piece by piece: what the test itself once held would count as the peak
// of the programs it starts.
class Lines {
 public:
  void Add(const std::string& text) {
    file_ << text;
    count_ += std::count(text.begin(), text.end(), '\n');
  }
  std::string Path() {
    file_.flush();
    return path_;
  }
  ptrdiff_t Count() const { return count_; }

 private:
  const TempDir dir_;
  const std::string path_ = dir_.Path("in.jsonl");
  std::ofstream file_{path_};
  ptrdiff_t count_ = 0;
};

// Runs the demo. The peak stays below the plan, of which three digits are printed.
ProgramOutcome RunDemo(Lines& lines, const Words& more) {
  Words all = {"-m", COLIBRI_SOURCE_DIR "/apps/demo/model", "-i", lines.Path(), "--threads", "2"};
  all.insert(all.end(), more.begin(), more.end());
  const ProgramOutcome outcome = RunProgram("colibri-run", all);
  INFO(outcome.err);
  CHECK(static_cast<double>(outcome.peak_bytes) / 1e6 < Megabytes(outcome.err, "plan: ") * 1.005);
  CHECK(std::count(outcome.out.begin(), outcome.out.end(), '\n') == lines.Count());
  return outcome;
}

// The same, where the lines cost nothing but their reading: what they add to the peak of a run with
// an ordinary line is in the plan as well.
ProgramOutcome RunHostile(Lines& hostile, const std::string& ram) {
  const Words least = {"--ram", ram, "--max-rows", "8"};
  const ProgramOutcome outcome = RunDemo(hostile, least);
  CHECK(outcome.exit_code == 1);
  Lines usual;
  usual.Add(Line("a", ""));
  const double before = Megabytes(RunDemo(usual, least).err, "memory: peak ");
  CHECK(Megabytes(outcome.err, "memory: peak ") - before < Megabytes(outcome.err, ", lines "));
  return outcome;
}

TEST_CASE("a line far above its cap is skipped in the memory of one at it" *
          doctest::skip(kAddressSanitizer)) {
  Lines lines;
  lines.Add(Line("first", "") + "{\"");
  for (int i = 0; i < 66; ++i) lines.Add(std::string(1'000'000, 'x'));
  lines.Add("\n" + Line("last", ""));
  const ProgramOutcome outcome = RunHostile(lines, "155MB");  // may ask for log probabilities
  CHECK(Contains(outcome.out, "line 2 is longer than " + std::to_string(kCap) + " bytes"));
  CHECK(Contains(outcome.out, "--ctx-size raises it"));
}

TEST_CASE("lines at the cap that are made to grow stay within the plan" *
          doctest::skip(kAddressSanitizer)) {
  const size_t bytes = kCap - 300;
  Lines lines;
  lines.Add(Filled("a", "[]", bytes));
  lines.Add(Filled("b", "\"\"", bytes));
  lines.Add(Filled("c", "\"0123456789abcdef\"", bytes));
  lines.Add(Filled("d", R"({"":{"":[]}})", bytes));
  lines.Add(Filled("e", std::string(500, '[') + std::string(500, ']'), bytes - 1000));
  lines.Add(Line("f", "", std::string(bytes, 'x')));
  lines.Add(Line("g", R"(,"user":")" + std::string(bytes, 'x') + "\""));
  lines.Add(R"({"custom_id":"h","body":{"messages":[{"role":"user","content":"a"},)"
            R"({"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\"x\":[)");
  for (size_t i = 0; i < (bytes - 200) / 3; ++i) lines.Add("[],");
  lines.Add("0]}\"}}]}]}}\n");
  const ProgramOutcome outcome = RunHostile(lines, "130MB");
  CHECK_FALSE(Contains(outcome.out, "line_too_long"));
  CHECK(Contains(outcome.out, "JSON values"));
}

// The bytes of the lines by custom_id.
std::map<std::string, std::string> LinesOf(Lines& input, const Words& options) {
  const ProgramOutcome outcome = RunDemo(input, options);
  CHECK(outcome.exit_code == 1);
  CHECK(Contains(outcome.out, "too_many_logprobs"));
  std::map<std::string, std::string> lines;
  std::istringstream records(outcome.out);
  for (std::string record; std::getline(records, record);) {
    std::string bytes = LineBytes(record);
    lines[bytes.substr(0, bytes.find(','))] = std::move(bytes);
  }
  return lines;
}

TEST_CASE("many choices with many log probabilities give the same lines with any memory" *
          doctest::skip(kAddressSanitizer)) {
  const auto line = [](const std::string& id, const std::string& more) {
    return R"({"custom_id":")" + id +
           R"(","body":{"messages":[{"role":"user","content":"The sea"}],"n":8,"logprobs":true,)"
           R"("top_logprobs":20,)" +
           more + "}}\n";
  };
  Lines input;
  for (int i = 0; i < 4; ++i) {
    // 252,000 log probabilities may come, nearly the most there are: such lines go one by one.
    input.Add(line("one" + std::to_string(i), R"("max_tokens":1500,"stop":["e"])"));
    input.Add(line("few" + std::to_string(i), R"("max_tokens":12)"));
  }
  input.Add(line("many", R"("max_tokens":1600)"));
  // The whole of the pool.
  if (FullTests()) {
    input.Add(
        R"({"custom_id":"all","body":{"prompt":"The sea","max_tokens":340,"n":128,"logprobs":5}})"
        "\n");
  }
  const auto little = LinesOf(input, {"--no-loop-stop", "--ram", "160MB"});
  CHECK(little.size() == (FullTests() ? 10 : 9));
  CHECK((little == LinesOf(input, {"--no-loop-stop", "--ram", "12GB"})));
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
                 {"-m", COLIBRI_SOURCE_DIR "/apps/demo/model", "--ram", "170MB", "-i", "-",
                  "--no-loop-stop", "--threads", "2"},
                 input);
  INFO(outcome.err);
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.peak_bytes < 170'000'000);
}

}  // namespace colibri
