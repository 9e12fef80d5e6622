// colibri-bench as a user meets it: what its subcommands print, write and return.
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/run_program.h"
#include "tests/shard_files.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

const std::string kFixtures = COLIBRI_SOURCE_DIR "/tests/fixtures/";
const std::string kModel = COLIBRI_SOURCE_DIR "/apps/demo/model";

ProgramOutcome Bench(const Words& arguments, std::string_view input = "") {
  return RunProgram("colibri-bench", arguments, input);
}

Words Pipeline(const Words& more) {
  Words all = {"pipeline", "-m", kModel, "--ram", "200MB", "--prompts", "3", "--tokens", "6"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

// A fixture folder with one value of its model changed.
void CopyDamaged(const std::string& fixture, const std::string& to) {
  std::filesystem::copy(kFixtures + fixture, to, std::filesystem::copy_options::recursive);
  {
    const Container container({to + "/model"});
    const TensorEntry& norm = *container.Find("model.norm.weight");
    std::fstream file(container.Files().Path(norm.file),
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(norm.offset));
    file.write("\x00\x41", 2);  // 8.0 as BF16
  }
}

}  // namespace

TEST_CASE("verify passes on a fixture and fails on one whose weights were changed") {
  const ProgramOutcome good = Bench({"verify", kFixtures + "tiny"});
  CHECK(good.exit_code == 0);
  CHECK(Contains(good.out, "verified: every tensor within its tolerance"));
  CHECK_FALSE(Contains(good.out, "FAILED"));
  const TempDir dir;
  CopyDamaged("tiny", dir.Path("damaged"));
  const ProgramOutcome bad = Bench({"verify", dir.Path("damaged")});
  CHECK(bad.exit_code == 1);
  CHECK(Contains(bad.out, "FAILED"));
}

TEST_CASE("verify --json lists every tensor, and one bad folder of several is enough to fail") {
  const TempDir dir;
  CopyDamaged("tiny", dir.Path("damaged"));
  const ProgramOutcome outcome =
      Bench({"verify", dir.Path("damaged"), kFixtures + "tiny", "--json"});
  CHECK(outcome.exit_code == 1);
  bool failed = false, passed = false;
  for (const Json& row : Json::parse(outcome.out)) {
    if (row.at("tensor") != "logits") continue;
    (row.at("folder") == kFixtures + "tiny" ? passed : failed) =
        row.at("passed").get<bool>() == (row.at("folder") == kFixtures + "tiny");
  }
  CHECK(failed);
  CHECK(passed);
}

TEST_CASE("verify of a folder that is no fixture is a model or I/O error with its name") {
  const ProgramOutcome outcome = Bench({"verify", kFixtures + "nowhere"});
  CHECK((outcome.exit_code == 3 || outcome.exit_code == 4));
  CHECK(Contains(outcome.err, "nowhere"));
}

TEST_CASE("tokenize agrees with every case of the tokenizer and of the chat template") {
  for (const std::string cases : {"tokenizer/cases.jsonl", "chat/cases.jsonl"}) {
    const ProgramOutcome outcome = Bench(
        {"tokenize", "-m", kFixtures + "tokenizer/tokenizer.json", "--cases", kFixtures + cases});
    INFO(outcome.out);
    CHECK(outcome.exit_code == 0);
    CHECK(Contains(outcome.out, " 0 failed"));
  }
}

TEST_CASE("tokenize fails on a case that is wrong") {
  const TempDir dir;
  const ProgramOutcome outcome =
      Bench({"tokenize", "-m", kFixtures + "tokenizer/tokenizer.json", "--cases",
             dir.Write("cases.jsonl", R"({"text":" ","ids":[221],"plain_ids":[220],"decoded":" ",)"
                                      R"("decoded_without_special":" "})")});
  INFO(outcome.out);
  CHECK(outcome.exit_code == 1);
  CHECK(Contains(outcome.out, " 1 failed"));
}

TEST_CASE("tokenize turns a text into ids and back") {
  const ProgramOutcome outcome = Bench({"tokenize", "-m", kModel, "--json"}, "It was late.\n");
  CHECK(outcome.exit_code == 0);
  const Json report = Json::parse(outcome.out);
  CHECK(report.at("same_text_back") == true);
  CHECK(report.at("bytes") == 13);
  CHECK(report.at("ids").size() == report.at("tokens"));
}

TEST_CASE("graph prints the wiring as mermaid and as dot, and knows no third language") {
  const ProgramOutcome mermaid = Bench({"graph", "--dump", "mermaid"});
  CHECK(mermaid.exit_code == 0);
  CHECK(mermaid.out.starts_with("flowchart LR\n"));
  CHECK(Bench({"graph"}).out == mermaid.out);
  CHECK(Contains(mermaid.out, "fetch -- \"ReadyExpert\" --> expert_ffn"));
  const ProgramOutcome dot = Bench({"graph", "--dump", "dot"});
  CHECK(dot.exit_code == 0);
  CHECK(dot.out.starts_with("digraph"));
  const ProgramOutcome other = Bench({"graph", "--dump", "svg"});
  CHECK(other.exit_code == 2);
  CHECK(Contains(other.err, "svg"));
}

TEST_CASE("a graph that is only looked at goes as quietly as it came") {
  // Its tasks and its nodes raced at the end: about every third time it crashed.
  for (int i = 0; i < 12; ++i) CHECK(Bench({"graph", "--dump", "dot"}).exit_code == 0);
}

TEST_CASE("pipeline prints a figure for every node beside memory, reading and tokens") {
  const ProgramOutcome outcome = Bench(Pipeline({"--slots", "25%"}));
  INFO(outcome.err);
  CHECK(outcome.exit_code == 0);
  for (const char* figure :
       {"node admit", "node expert_ffn", "node verify", "wall", "both at once", "GB read",
        "raw GB/s", "hits", "hint recall", "ideal", "tokens/s", "peak MB"}) {
    CHECK(Contains(outcome.out, figure));
  }
  CHECK(Contains(outcome.out, "18 generated"));
}

TEST_CASE("KV written to the drive does not make less than nothing of what was never used") {
  const TempDir dir;
  std::string text;
  for (int line = 0; line < 24; ++line) {
    for (int word = 0; word < 100; ++word) text += std::to_string(line * 100 + word) + " ";
    text += "\n";
  }
  const ProgramOutcome outcome =
      Bench({"pipeline", "-m", kModel, "--ram=200MB", "--prompts=24", "--prompt-tokens=100",
             "--text", dir.Write("text", text), "--tokens=6", "--ctx-size=120", "--max-seqs=24",
             "--kv-ram=2600kB", "--kv-dir", dir.Path("."), "--no-alone"});
  INFO(outcome.err);
  CHECK(outcome.exit_code == 0);
  CHECK(Contains(outcome.out, "KV GB written"));
  CHECK(Contains(outcome.out, "0.000 GB of it never used"));
}

TEST_CASE("pipeline refuses flags about prompts and answers, by name") {
  for (const char* flag : {"-p", "--max-tokens", "--output=x"}) {
    const ProgramOutcome outcome = Bench(Pipeline({flag, "3"}));
    CHECK(outcome.exit_code == 2);
    CHECK(Contains(outcome.err, std::string(flag).substr(0, 8)));
  }
}

TEST_CASE("pipeline's help names the flags of colibri-run that it takes") {
  const ProgramOutcome help = Bench({"pipeline", "--help"});
  CHECK(help.exit_code == 0);
  for (const char* flag : {" -m ", " --resident ", " --kv-ram "}) CHECK(Contains(help.out, flag));
  CHECK_FALSE(Contains(help.out, "--max-tokens"));
  const ProgramOutcome none = Bench(Pipeline({"--resident", "none"}));
  CHECK(none.exit_code == 0);
  CHECK(Contains(none.err, "of it dense weights"));
}

TEST_CASE("pipeline's JSON, CSV and Markdown hold the same figures") {
  const ProgramOutcome json = Bench(Pipeline({"--json"}));
  REQUIRE(json.exit_code == 0);
  const Json report = Json::parse(json.out);
  CHECK(report.at("wall").at("value").get<double>() > 0);
  CHECK(report.at("tokens/s").at("value").get<double>() > 0);
  const ProgramOutcome csv = Bench(Pipeline({"--csv"}));
  CHECK(csv.exit_code == 0);
  const ProgramOutcome markdown = Bench(Pipeline({"--markdown"}));
  CHECK(markdown.exit_code == 0);
  for (const auto& item : report.items()) {
    const std::string& name = item.key();
    CAPTURE(name);
    CHECK(Contains(csv.out, "\"" + name + "\","));
    CHECK(Contains(markdown.out, "| " + name + " | "));
  }
}

TEST_CASE("pipeline --sequences compares runs of so many prompts in one table") {
  const ProgramOutcome outcome =
      Bench({"pipeline", "-m", kModel, "--ram", "200MB", "--slots", "30%", "--sequences", "1,5",
             "--prompt-tokens", "4", "--tokens", "6", "--draft", "off", "--json"});
  INFO(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  const Json table = Json::parse(outcome.out);
  REQUIRE(table.size() == 2);
  CHECK(table[0].at("sequences") == 1);
  CHECK(table[1].at("sequences") == 5);
  for (const Json& run : table) {
    CHECK(run.at("sweeps") == 6);  // the first draws a token too, and drafts would save some
    CHECK(run.at("gb_per_sweep").get<double>() > 0);
    CHECK(run.at("wall_over_ideal").get<double>() > 0);
    CHECK(run.at("alone_seconds").get<double>() > 0);
  }
  CHECK(table[1].at("union_gb_per_sweep").get<double>() >
        table[0].at("union_gb_per_sweep").get<double>());
  CHECK(Bench(Pipeline({"--sequences", "2"})).exit_code == 2);  // has --prompts
}

TEST_CASE("where all experts fit, a warm run reads nothing") {
  const ProgramOutcome cold = Bench(Pipeline({"--slots", "100%", "--json"}));
  CHECK(Json::parse(cold.out).at("GB read").at("value").get<double>() > 0);
  const ProgramOutcome warm = Bench(Pipeline({"--slots", "100%", "--json", "--warm"}));
  const Json report = Json::parse(warm.out);
  CHECK(report.at("GB read").at("value") == 0);
  CHECK(report.at("reading").at("value") == 0);
  CHECK(report.at("hits").at("value") == 100);
  CHECK(Contains(report.at("tokens/s").at("note").get<std::string>(), "18 generated"));
}

TEST_CASE("pipeline --trace writes events that a trace viewer can read") {
  const TempDir dir;
  const ProgramOutcome outcome = Bench(Pipeline({"--trace", dir.Path("trace.json")}));
  REQUIRE(outcome.exit_code == 0);
  std::ifstream file(dir.Path("trace.json"));
  const Json trace = Json::parse(file);
  const Json& events = trace.is_array() ? trace : trace.at("traceEvents");
  REQUIRE(events.size() > 100);
  bool expert = false;
  size_t begun = 0, ended = 0;
  for (const Json& event : events) {
    expert = expert || event.value("name", "") == "expert_ffn";
    if (event.value("cat", "") != "read") continue;
    begun += event.at("ph") == "b" ? 1 : 0;
    ended += event.at("ph") == "e" ? 1 : 0;
  }
  CHECK(expert);
  CHECK(begun > 10);
  CHECK(ended == begun);
}

TEST_CASE("pipeline refuses a trace of several runs, of which it would keep the last alone") {
  const TempDir dir;
  for (const char* trace : {"--trace", "--route-trace"}) {
    const ProgramOutcome outcome = Bench({"pipeline", "-m", kModel, "--tokens", "2", "--sequences",
                                          "1,2", trace, dir.Path("trace")});
    CHECK(outcome.exit_code == 2);
    CHECK(Contains(outcome.err, trace));
    CHECK(Contains(outcome.err, "--sequences"));
  }
}

TEST_CASE("pipeline refuses what colibri-run refuses, and prompts that do not fit") {
  CHECK(Bench(Pipeline({"--threads", "none"})).exit_code == 2);
  const ProgramOutcome outcome = Bench(Pipeline({"--ctx-size", "20"}));
  CHECK(outcome.exit_code == 2);
  CHECK(Contains(outcome.err, "context of 20"));
}

TEST_CASE("make-model writes a model that runs, and refuses a folder that holds something") {
  const TempDir dir;
  const Words make = {"make-model", dir.Path("made"),
                      "--layers",   "2",
                      "--experts",  "8",
                      "--hidden",   "128",
                      "--quiet",    "--moe-intermediate",
                      "64",         "--vocab",
                      "8192",       "--tokenizer-from",
                      kModel};
  const ProgramOutcome made = Bench(make);
  INFO(made.err);
  REQUIRE(made.exit_code == 0);
  CHECK(made.out == "");
  const ProgramOutcome run =
      RunProgram("colibri-run", {"-m", dir.Path("made"), "-p", "Hello", "--max-tokens", "3",
                                 "--ram", "200MB", "--output-format", "jsonl"});
  INFO(run.err);
  CHECK(run.exit_code == 0);
  CHECK(Contains(run.out, "\"completion_tokens\":3"));
  const ProgramOutcome again = Bench(make);
  CHECK(again.exit_code != 0);
  CHECK(Contains(again.err, dir.Path("made")));
}

TEST_CASE("io reads a model's experts and any file, beside a plain loop, in every format") {
  const Words model = {"io",      "-m",  kModel,    "--depth",         "1,8",
                       "--bytes", "1MB", "--reads", "direct,buffered", "--repetitions",
                       "2"};
  Words json = model;
  json.push_back("--json");
  const ProgramOutcome outcome = Bench(json);
  REQUIRE(outcome.exit_code == 0);
  const Json rows = Json::parse(outcome.out);
  // Two ways of reading, two orders; the plain loop, and two backends with two depths.
  CHECK(rows.size() == 2 * 2 * (1 + 2 * 2));
  for (const Json& row : rows) {
    CHECK(row.at("gb_per_second").get<double>() > 0);
    CHECK(row.at("demand_p99_ms").is_null() == (row.at("backend") == "plain loop"));
  }
  const TempDir dir;
  const std::string file = dir.Write("a", std::string(300'000, 'x'));
  const ProgramOutcome csv = Bench({"io", "--file", file, "--piece", "10000", "--depth", "4",
                                    "--bytes", "1MB", "--order", "file", "--csv"});
  CHECK(csv.exit_code == 0);
  CHECK(csv.out.starts_with("backend,reads,order,depth,gb_per_second,"));
  CHECK(Bench({"io", "--file", file, "--piece", "1MB"}).exit_code == 2);
  CHECK(Bench({"io"}).exit_code == 2);
}

TEST_CASE("sizes mean in colibri-bench what they mean in colibri-run") {
  const TempDir dir;
  const std::string file = dir.Write("a", std::string(1'010'000, 'x'));
  const auto io = [&](const char* piece) {
    return Bench({"io", "--file", file, "--piece", piece, "--depth", "1", "--bytes", "1MB",
                  "--backend", "pread", "--repetitions", "1"});
  };
  CHECK(io("1MB").exit_code == 0);
  CHECK(io("1MiB").exit_code == 2);
  const ProgramOutcome unknown = io("1mb");
  CHECK(unknown.exit_code == 2);
  CHECK(Contains(unknown.err, "--piece"));
  CHECK(Contains(unknown.err, "1mb is not a size"));
}

TEST_CASE("quality --json gives a perplexity for each KV type and kind of activations") {
  const TempDir dir;
  std::string text;
  for (int i = 0; i < 40; ++i) text += "The ship had been eleven days out of Bristol. ";
  const ProgramOutcome outcome = Bench({"quality", "-m", kModel, dir.Write("text.txt", text),
                                        "--window", "64", "--max-windows", "2", "--json"});
  INFO(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  const Json report = Json::parse(outcome.out);
  REQUIRE(report.size() == 4);
  for (const Json& row : report) {
    CHECK(row.at("perplexity").get<double>() > 1);
    CHECK(row.at("predictions") == 126);
  }
}

TEST_CASE("quality --reference prints the reference's perplexities beside ours") {
  const TempDir dir;
  const std::string text = dir.Write("text.txt", "The ship had been eleven days out of Bristol.");
  const std::string reference =
      dir.Write("reference.json", R"({"perplexity": {"int4-g64": {"sparse": 12.5}}})");
  Words words = {"quality", "-m", kModel, text, "--kv", "f32", "--activations", "f32"};
  words.insert(words.end(), {"--reference", reference});
  const ProgramOutcome outcome = Bench(words);
  CHECK(outcome.exit_code == 0);
  CHECK(Contains(outcome.out, "reference int4-g64 sparse           12.5000"));
  words.back() = dir.Write("other.json", "[]");
  const ProgramOutcome other = Bench(words);
  CHECK(other.exit_code == 4);
  CHECK(Contains(other.err, words.back() + ": has no \"perplexity\""));
}

TEST_CASE(
    "kernels gives speeds and shares for each format, kind of activations and number of rows") {
  const Words words = {
      "kernels",       "--shape", "64x128",         "--rows", "1,3",       "--bytes", "1MiB",
      "--repetitions", "1",       "--no-attention", "--json", "--threads", "2"};
  const ProgramOutcome outcome = Bench(words);
  INFO(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  const Json report = Json::parse(outcome.out);
  CHECK(report.size() == 3 * 3 * 2);
  for (const Json& row : report) {
    for (const char* key :
         {"ms", "gb_per_second", "read_share", "gop_per_second", "compute_share"}) {
      CHECK(row.at(key).get<double>() >= 0);
    }
    CHECK(row.at("ms").get<double>() < 1e4);
  }
  CHECK(Bench({"kernels", "--format", "int5"}).exit_code == 2);
  CHECK(Bench({"kernels", "--shape", "12"}).exit_code == 2);
  const ProgramOutcome target = Bench({"kernels", "--target", "ABACUS"});
  CHECK(target.exit_code == 2);
  CHECK(Contains(target.err, "this machine has "));
}

TEST_CASE("no subcommand and an unknown one are usage errors, and help is not") {
  CHECK(Bench({}).exit_code == 2);
  CHECK(Bench({"fly"}).exit_code == 2);
  CHECK(Bench({"--help"}).exit_code == 0);
  CHECK(Bench({"pipeline", "--help"}).exit_code == 0);
}

}  // namespace colibri
