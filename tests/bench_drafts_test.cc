// colibri-bench drafts: acceptance on the demo model's stored continuations.
#include <doctest/doctest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tests/run_program.h"
#include "tests/shard_files.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

const std::string kDemo = COLIBRI_SOURCE_DIR "/tests/fixtures/demo/";

ProgramOutcome Drafts(const Words& more, const std::string& file = kDemo + "greedy.jsonl") {
  Words all = {"drafts", "-m", COLIBRI_SOURCE_DIR "/apps/demo/model", file};
  all.insert(all.end(), more.begin(), more.end());
  return RunProgram("colibri-bench", all, "");
}

// By source and depth.
Json Row(const ProgramOutcome& outcome, const std::string& source, int depth) {
  for (const Json& row : Json::parse(outcome.out)) {
    if (row.at("source") == source && row.at("depth") == depth) return row;
  }
  return nullptr;
}

}  // namespace

TEST_CASE("drafts accepts what the reference implementation accepts, at every depth") {
  const Words common = {"--json", "--kind", "chat,text", "--reference", kDemo + "reference.json"};
  for (const Words& kernels : {Words{}, Words{"--activations", "f32", "--kv", "f32"}}) {
    Words flags = common;
    flags.insert(flags.end(), kernels.begin(), kernels.end());
    const ProgramOutcome outcome = Drafts(flags);
    INFO(outcome.err);
    REQUIRE(outcome.exit_code == 0);
    const int positions[] = {1512, 1488, 1464, 1440};
    for (int depth = 1; depth <= 4; ++depth) {
      const Json row = Row(outcome, "MTP layer", depth);
      REQUIRE(row.is_object());
      CHECK(row.at("positions") == positions[depth - 1]);
      const double share = row.at("share").get<double>(), want = row.at("reference").get<double>();
      CHECK(share > want - 1);
      CHECK(share < want + 1);
    }
  }
}

TEST_CASE("drafts shows prompt lookup beside the MTP layer") {
  const ProgramOutcome outcome = Drafts({"--json", "--kind", "chat", "--depth", "2"});
  REQUIRE(outcome.exit_code == 0);
  CHECK(Json::parse(outcome.out).size() == 4);
  const Json first = Row(outcome, "prompt lookup", 1), second = Row(outcome, "prompt lookup", 2);
  CHECK(first.at("accepted") > second.at("accepted"));
  CHECK(second.at("accepted") > 0);
  CHECK(first.at("reference").is_null());
}

TEST_CASE("the rows of a frame and its threads change no acceptance") {
  const ProgramOutcome wide = Drafts({"--kind", "text", "--csv", "--rows", "512"});
  const ProgramOutcome narrow =
      Drafts({"--kind", "text", "--csv", "--rows", "3", "--threads", "2"});
  CHECK(wide.exit_code == 0);
  CHECK(wide.out == narrow.out);
  CHECK(wide.out.starts_with("source,depth,positions,accepted,share,reference,mean\n"));
}

TEST_CASE("drafts prints text and Markdown") {
  const ProgramOutcome text = Drafts({"--kind", "chat"});
  CHECK(Contains(text.out, "% accepted"));
  const ProgramOutcome markdown = Drafts({"--kind", "chat", "--markdown"});
  CHECK(markdown.out.starts_with("| drafts by | depth |"));
}

TEST_CASE("drafts names what is wrong with its input") {
  const TempDir dir;
  const std::pair<std::string, std::string> cases[] = {
      {R"({"prompt_ids":[1,2]})", "line 1"},
      {R"({"prompt_ids":[1,2],"greedy_ids":[3,99999]})", "99999"},
      {"", "has no continuation"}};
  for (const auto& [text, complaint] : cases) {
    const ProgramOutcome outcome = Drafts({}, dir.Write("c.jsonl", text));
    CHECK(outcome.exit_code == 4);
    CHECK(Contains(outcome.err, complaint));
  }
  CHECK(Drafts({}, dir.Path("nowhere.jsonl")).exit_code == 4);
  const ProgramOutcome reference =
      Drafts({"--reference", dir.Write("r.json", "{}"), "--kind", "chat"});
  CHECK(reference.exit_code == 4);
  CHECK(Contains(reference.err, "mtp_prefix_acceptance_by_depth"));
}

TEST_CASE("drafts of a model without MTP layer is a model error that says so") {
  const TempDir dir;
  const std::string model = dir.Path("model");
  const ProgramOutcome made =
      RunProgram("colibri-bench",
                 {"make-model", model, "--preset", "tiny", "--no-mtp", "--quiet", "--no-check",
                  "--tokenizer-from", COLIBRI_SOURCE_DIR "/apps/demo/model"},
                 "");
  REQUIRE(made.exit_code == 0);
  const ProgramOutcome outcome =
      RunProgram("colibri-bench", {"drafts", "-m", model, kDemo + "greedy.jsonl"}, "");
  CHECK(outcome.exit_code == 3);
  CHECK(Contains(outcome.err, "no MTP layer"));
}

}  // namespace colibri
