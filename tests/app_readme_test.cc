// What the README shows is run as it stands there, in a folder where DIR is the demo model: the
// commands that read answers, and those that share a file of prompts between machines. Their hosts
// are processes of this machine.
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "runtime/record.h"
#include "tests/output_records.h"
#include "tests/run_program.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

using Json = nlohmann::ordered_json;
using Words = std::vector<std::string>;

const std::string& Readme() {
  static const std::string kText = ReadWhole(std::string(COLIBRI_SOURCE_DIR "/") + "README.md");
  return kText;
}

// The block of code in which `part` stands.
std::string Block(const std::string& part) {
  const size_t at = Readme().find(part), begin = Readme().rfind("\n```", at);
  REQUIRE(at != std::string::npos);
  const size_t first = Readme().find('\n', begin + 1) + 1;
  return Readme().substr(first, Readme().find("```\n", first) - first);
}

// A folder as the README's commands expect it.
class Folder {
 public:
  Folder() {
    std::filesystem::create_directory_symlink(COLIBRI_SOURCE_DIR "/apps/demo/model",
                                              dir_.Path("DIR"));
  }
  const TempDir& Dir() const { return dir_; }

  // The words of a bash that runs `script` here, with the programs and what is in bin/ in its PATH.
  Words Bash(const std::string& script) const {
    return {"-c", "cd '" + dir_.Path("") + "' && export PATH='" + dir_.Path("bin") +
                      "':'" COLIBRI_BINARY_DIR "':\"$PATH\"\n" + script};
  }
  ProgramOutcome Run(const std::string& script) const {
    return RunProgram("/bin/bash", Bash(script));
  }

 private:
  TempDir dir_;
};

// 19 lines that end out of order; one is blank, one is refused.
std::string Prompts() {
  std::string text;
  for (int i = 0; i < 18; ++i) {
    if (i == 5) text += "\n";
    text +=
        Json{{"custom_id", "q" + std::to_string(i)},
             {"method", "POST"},
             {"url", "/v1/chat/completions"},
             {"body",
              {{"messages",
                {{{"role", "user"}, {"content", "Tell me of ship " + std::to_string(i) + "."}}}},
               {"max_tokens", i == 11 ? 0 : 1 + i * 5 % 7}}}}
            .dump() +
        '\n';
  }
  return text;
}

// The bytes of the lines, in the order of the records.
Words BytesOf(const std::string& records) {
  Words bytes;
  std::istringstream lines(records);
  for (std::string line; std::getline(lines, line);) bytes.push_back(LineBytes(line));
  return bytes;
}

Words Unsharded(const Folder& folder) {
  const ProgramOutcome outcome = folder.Run("exec colibri-run -m DIR -i prompts.jsonl --ordered");
  INFO(outcome.err);
  REQUIRE(outcome.exit_code == 1);  // one is refused
  Words bytes = BytesOf(outcome.out);
  REQUIRE(bytes.size() == 18);
  return bytes;
}

// The README's merge, of `shards` outputs.
void CheckMerged(const Folder& folder, int shards) {
  for (int i = 0; i < shards; ++i) {
    CHECK(ReadWhole(folder.Dir().Path("answers." + std::to_string(i) + ".jsonl")) != "");
  }
  const ProgramOutcome merged = folder.Run(Block("colibri-run --merge -i"));
  INFO(merged.err);
  CHECK(merged.exit_code == 1);  // one is refused
  CHECK(BytesOf(ReadWhole(folder.Dir().Path("merged.jsonl"))) == Unsharded(folder));
}

}  // namespace

TEST_CASE("the README's jq and Python find the answers to the README's line") {
  const Folder folder;
  const size_t at = Readme().find(R"({"custom_id": "a")");
  REQUIRE(at != std::string::npos);
  folder.Dir().Write("prompts.jsonl", Readme().substr(at, Readme().find('`', at) - at) +
                                          "\n"
                                          R"({"custom_id": "b", "url": "/v1/completions", "body": )"
                                          R"({"prompt": "It was late", "max_tokens": 4}})"
                                          "\n[1]\n");
  CHECK(folder.Run("exec colibri-run -m DIR -i prompts.jsonl -o answers.jsonl").exit_code == 1);
  std::string chat, text;
  std::istringstream lines(ReadWhole(folder.Dir().Path("answers.jsonl")));
  for (std::string line; std::getline(lines, line);) {
    const Json record = Json::parse(line);
    const Json& body = record["response"]["body"];
    if (record["custom_id"] == "a") chat = body["choices"][0]["message"]["content"];
    if (record["custom_id"] == "b") text = body["choices"][0]["text"];
  }
  REQUIRE(chat != "");
  REQUIRE(text != "");

  const ProgramOutcome jq = folder.Run("set -euo pipefail\n" + Block("jq -r 'select(.error =="));
  INFO(jq.err);
  CHECK(jq.exit_code == 0);
  std::string escaped;
  for (const char c : chat) c == '\n' ? escaped += "\\n" : escaped += c;
  Has(jq.out, "a\t" + escaped + "\n");
  Has(jq.out, "b\t" + text + "\n");
  Has(jq.out, "\nline 3: the line is a JSON array, an object is expected\n");
  const ProgramOutcome all = folder.Run("exec jq .line answers.jsonl");
  CHECK(all.out.size() == 6);  // 1, 2 and 3, in the order of the records

  folder.Dir().Write("program", Block("from openai.types"));
  const ProgramOutcome python = folder.Run("python=$('" COLIBRI_SOURCE_DIR
                                           "/tests/client_python.sh') && exec \"$python\" program");
  INFO(python.err);
  CHECK(python.exit_code == 0);
  CHECK(python.out == chat + "\n");
}

TEST_CASE("the programs can be installed where the README's commands find them") {
  const Folder folder;
  CHECK(folder.Run("cmake --install '" COLIBRI_BINARY_DIR "' --prefix .").exit_code == 0);
  for (const char* program : {"colibri-run", "colibri-bench"}) {
    const ProgramOutcome found = folder.Run("hash -r; command -v " + std::string(program));
    Has(found.out, "/bin/" + std::string(program));
    CHECK(folder.Run("exec bin/" + std::string(program) + " --help").exit_code == 0);
  }
}

TEST_CASE("the README's Slurm array, merged, gives what one process gives") {
  const Folder folder;
  folder.Dir().Write("prompts.jsonl", Prompts());
  const std::string script = Block("#SBATCH --array");
  folder.Dir().Write("job.sh", script);
  const std::string range = "#SBATCH --array=0-";
  const int last = std::atoi(script.c_str() + script.find(range) + range.size());
  REQUIRE(last > 0);
  std::vector<std::unique_ptr<RunningProgram>> tasks;
  for (int task = 0; task <= last; ++task) {
    tasks.push_back(std::make_unique<RunningProgram>(
        "/bin/bash", folder.Bash("exec bash job.sh"),
        Words{"SLURM_ARRAY_TASK_ID=" + std::to_string(task),
              "SLURM_ARRAY_TASK_COUNT=" + std::to_string(last + 1)}));
  }
  for (const auto& task : tasks) {
    const ProgramOutcome outcome = task->Wait();
    INFO(outcome.err);
    CHECK((outcome.exit_code == 0 || outcome.exit_code == 1));
  }
  CheckMerged(folder, last + 1);
}

TEST_CASE("the README's line for GNU parallel, merged, gives what one process gives") {
  const Folder folder;
  folder.Dir().Write("prompts.jsonl", Prompts());
  // Any host is this machine: ssh HOST -- COMMAND. As sshd does, it says which shell and which home
  // the user has; GNU parallel runs nothing, and calls that success, where SHELL is not set.
  std::filesystem::create_directory(folder.Dir().Path("bin"));
  const std::string ssh =
      folder.Dir().Write("bin/ssh", "#!/bin/sh\necho \"$1\" >> '" + folder.Dir().Path("hosts") +
                                        "'\nshift\n[ \"$1\" = -- ] && shift\n"
                                        "SHELL=/bin/sh HOME=/ exec sh -c \"$*\"\n");
  std::filesystem::permissions(ssh, std::filesystem::perms::owner_all);
  const ProgramOutcome outcome =
      folder.Run("export HOME=\"$PWD\"; unset SHELL\n" + Block("parallel -j1"));
  INFO(outcome.err);
  CHECK(outcome.exit_code == 1);  // the number of jobs that did not exit with 0
  const std::string hosts = ReadWhole(folder.Dir().Path("hosts"));
  for (const char* host : {"one\n", "two\n", "three\n"}) Has(hosts, host);
  CheckMerged(folder, 3);
}

}  // namespace colibri
