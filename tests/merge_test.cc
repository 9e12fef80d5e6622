#include "runtime/merge.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "io/error.h"
#include "runtime/output_file.h"
#include "tests/output_records.h"
#include "tests/temp_dir.h"

using colibri::Has;
using colibri::IoError;
using colibri::LineShard;
using colibri::Manifest;
using colibri::ManifestPath;
using colibri::MergeIntoFile;
using colibri::MergeOutputs;
using colibri::MergeReport;
using colibri::MergeRequest;
using colibri::ReadWhole;
using colibri::TempDir;
using colibri::TestManifest;
using colibri::TestRecord;
using colibri::UsageError;
using colibri::WriteManifest;

namespace fs = std::filesystem;

namespace {

using Words = std::vector<std::string>;

std::string Prompt(int line) { return "prompt " + std::to_string(line); }

std::string Answer(int line, int status = 200, const std::string& answer = "a") {
  const auto number = static_cast<uint64_t>(line);
  return TestRecord(number, Prompt(line), "line-" + std::to_string(line), status, answer);
}

// An input of six lines, the third blank, and the outputs that a test gives it.
class Shards {
 public:
  Shards() {
    std::string text;
    for (int line = 1; line <= 6; ++line) {
      if (line != 3) text += Prompt(line);
      text += '\n';
    }
    request_.input = dir_.Write("in.txt", text);
  }
  void Add(const std::string& records, const Manifest& manifest = TestManifest()) {
    const std::string name = "out" + std::to_string(request_.outputs.size());
    request_.outputs.push_back(dir_.Write(name, records));
    WriteManifest(ManifestPath(request_.outputs.back()), manifest);
  }
  void AddShard(const std::string& records, uint64_t index, const std::string& target = "AVX2") {
    Manifest manifest = TestManifest();
    manifest.shard = {index, 2};
    manifest.simd_target = target;
    Add(records, manifest);
  }
  MergeRequest& Request() { return request_; }
  const TempDir& Dir() const { return dir_; }
  const std::string& Output(size_t i) const { return request_.outputs[i]; }

  MergeReport Merge() {
    merged_.clear();
    return MergeOutputs(request_, [this](std::string_view bytes) { merged_ += bytes; });
  }
  const std::string& Merged() const { return merged_; }
  // The message of a refused merge, which must have written nothing.
  std::string Refused() {
    std::string message;
    try {
      Merge();
    } catch (const UsageError& error) {
      message = error.what();
    }
    CHECK(merged_.empty());
    return message;
  }

 private:
  TempDir dir_;
  MergeRequest request_;
  std::string merged_;
};

}  // namespace

TEST_CASE("the outputs of shards come together in the order of the input") {
  Shards shards;
  shards.AddShard(Answer(5) + Answer(1, 400), 0);
  shards.AddShard(Answer(6) + Answer(2) + Answer(4), 1);
  const MergeReport report = shards.Merge();
  CHECK(shards.Merged() == Answer(1, 400) + Answer(2) + Answer(4) + Answer(5) + Answer(6));
  CHECK(report.lines == 5);
  CHECK(report.records == 5);
  CHECK(report.failed == 1);
  CHECK(report.missing == 0);
  CHECK(report.MissingText() == "");
  CHECK(report.manifest.shard == LineShard{0, 1});
}

TEST_CASE("missing lines are listed, and the rest is merged") {
  Shards shards;
  shards.AddShard(Answer(5), 0);
  shards.AddShard("", 1);
  const MergeReport report = shards.Merge();
  CHECK(shards.Merged() == Answer(5));
  CHECK(report.missing == 4);
  CHECK(report.MissingText() == "4 of 5 lines have no record: 1, 2, 4, 6");
}

TEST_CASE("a torn end of a killed run is left out and said, and stays in its file") {
  Shards shards;
  shards.Add(Answer(1) + Answer(2).substr(0, 20));
  const MergeReport report = shards.Merge();
  CHECK(shards.Merged() == Answer(1));
  CHECK(report.notes == Words{shards.Output(0) + ": a torn end of 20 bytes is left out"});
  CHECK(ReadWhole(shards.Output(0)) == Answer(1) + Answer(2).substr(0, 20));
  Shards unended;
  std::string record = Answer(1);
  record.pop_back();
  unended.Add(record);
  unended.Merge();
  CHECK(unended.Merged() == Answer(1));
}

TEST_CASE("manifests that differ refuse the merge by name and value") {
  Shards shards;
  shards.Add(Answer(1));
  Manifest other = TestManifest();
  other.options[1] = {"seed", "7"};
  shards.Add(Answer(2), other);
  Has(shards.Refused(), "come from different runs\n  seed: was 0, is 7");
}

TEST_CASE("an output without its manifest is refused") {
  Shards shards;
  shards.Add(Answer(1));
  fs::remove(ManifestPath(shards.Output(0)));
  Has(shards.Refused(), "has no manifest");
}

TEST_CASE("outputs of several SIMD targets need the flag") {
  Shards shards;
  shards.AddShard(Answer(1), 0, "AVX2");
  shards.AddShard(Answer(2), 1, "SSE4");
  Has(shards.Refused(), "SIMD target: was AVX2, is SSE4");
  shards.Request().mixed_targets = true;
  CHECK(shards.Merge().manifest.simd_target == "AVX2+SSE4");
  CHECK(shards.Merged() == Answer(1) + Answer(2));
}

TEST_CASE("equal records of a line are one, different ones are refused") {
  Shards shards;
  shards.Add(Answer(1) + Answer(2));
  shards.Add(Answer(2) + Answer(4));
  const MergeReport report = shards.Merge();
  CHECK(shards.Merged() == Answer(1) + Answer(2) + Answer(4));
  CHECK(report.duplicates == 1);
  CHECK(report.records == 3);
  shards.Add(Answer(4, 200, "other"));
  Has(shards.Refused(), "answer line 4 differently");
}

TEST_CASE("records of lines that the input does not have, or has otherwise, are refused") {
  Shards beyond;
  beyond.Add(Answer(1) + Answer(7));
  Has(beyond.Refused(), "has a record of line 7");
  Shards blank;
  blank.Add(Answer(3));
  Has(blank.Refused(), "has a record of line 3");
  Shards changed;
  changed.Add(TestRecord(2, "another prompt", "line-2"));
  Has(changed.Refused(), "was changed since it was answered");
  Shards renamed;
  renamed.Add(TestRecord(2, Prompt(2), "else"));
  Has(renamed.Refused(), "was changed since it was answered");
}

TEST_CASE("an output that is damaged, being written or given twice is refused") {
  Shards damaged;
  damaged.Add(Answer(1) + "x\n" + Answer(2));
  CHECK_THROWS_AS(damaged.Merge(), IoError);
  Shards running;
  running.Add(Answer(1));
  {
    const colibri::OutputFile held(running.Output(0));
    CHECK_THROWS_AS(running.Merge(), IoError);
  }
  CHECK(running.Merge().records == 1);
  running.Request().outputs.push_back(running.Output(0));
  Has(running.Refused(), "is given twice");
  Shards none;
  Has(none.Refused(), "no outputs");
}

TEST_CASE("a merged file has a manifest of its own and can be resumed") {
  Shards shards;
  shards.AddShard(Answer(5), 0);
  shards.AddShard(Answer(4), 1);
  const std::string path = shards.Dir().Path("merged");
  MergeIntoFile(shards.Request(), path, false);
  CHECK(ReadWhole(path) == Answer(4) + Answer(5));
  const auto manifest = colibri::ReadManifest(ManifestPath(path));
  REQUIRE(manifest.has_value());
  CHECK(colibri::CompareManifests(*manifest, TestManifest()).empty());
}

TEST_CASE("a merge that is refused or finds the drive full leaves the old file") {
  Shards shards;
  shards.Add(Answer(1) + Answer(2));
  const std::string path = shards.Dir().Write("merged", "old");
  {
    const colibri::FileSizeLimit full(100);
    CHECK_THROWS_AS(MergeIntoFile(shards.Request(), path, true), IoError);
  }
  CHECK_FALSE(fs::exists(ManifestPath(path)));
  CHECK(ReadWhole(path) == "old");
  CHECK_FALSE(fs::exists(path + ".part"));
  shards.Add(Answer(2, 200, "other"));
  CHECK_THROWS_AS(MergeIntoFile(shards.Request(), path, true), UsageError);
  CHECK(ReadWhole(path) == "old");
  CHECK_THROWS_AS(MergeIntoFile(shards.Request(), shards.Dir().Path("new"), false), UsageError);
  CHECK_FALSE(fs::exists(shards.Dir().Path("new")));
}

TEST_CASE("how long a line may be follows from the context in the manifest") {
  for (const char* context : {"64", "4096"}) {
    const TempDir dir;
    MergeRequest request;
    // Too long for 64 tokens: its record has no hash of it.
    const std::string text(size_t{1'200'000}, 'x');
    request.input = dir.Write("in.txt", text + "\n");
    request.outputs = {dir.Write("out", TestRecord(1, text, "line-1"))};
    Manifest manifest = TestManifest();
    manifest.options.back().second = context;
    WriteManifest(ManifestPath(request.outputs[0]), manifest);
    const auto merge = [&] { MergeOutputs(request, [](std::string_view) {}); };
    if (std::string(context) == "64") {
      CHECK_THROWS_AS(merge(), UsageError);
    } else {
      CHECK_NOTHROW(merge());
    }
    manifest.options.pop_back();
    WriteManifest(ManifestPath(request.outputs[0]), manifest);
    CHECK_THROWS_AS(merge(), IoError);
  }
}

TEST_CASE("a merge replaces answers only when told so, and never one of its own inputs") {
  Shards shards;
  shards.Add(Answer(1));
  const std::string path = shards.Dir().Write("merged", "old");
  CHECK_THROWS_AS(MergeIntoFile(shards.Request(), path, false), UsageError);
  CHECK(ReadWhole(path) == "old");
  CHECK_THROWS_AS(MergeIntoFile(shards.Request(), shards.Output(0), true), UsageError);
  CHECK(ReadWhole(shards.Output(0)) == Answer(1));
  MergeIntoFile(shards.Request(), path, true);
  CHECK(ReadWhole(path) == Answer(1));
  // What takes the name of the output when it is whole.
  MergeRequest request = shards.Request();
  request.input = shards.Dir().Write("merged.part", ReadWhole(request.input));
  CHECK_THROWS_AS(MergeIntoFile(request, path, true), UsageError);
  CHECK(ReadWhole(request.input) == ReadWhole(shards.Request().input));
}
