#include "apps/answers.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "apps/say.h"
#include "io/error.h"
#include "io/whole_file.h"
#include "runtime/merge.h"
#include "runtime/resume.h"
#include "runtime/strict_check.h"

namespace colibri {
namespace {

bool Regular(int fd) {
  struct stat info {};
  return fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
}

// The number N if the name, or the link it is, stands for this process's /proc/self/fd/N.
std::optional<int> OpenDescriptor(std::filesystem::path path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path ours = fs::canonical("/proc/self/fd", error);
  // As many links as the kernel follows.
  for (int links = 0; links < 40 && !ours.empty(); ++links) {
    const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
    const std::string name = path.filename().string();
    if (fs::canonical(folder, error) == ours) {
      int number = -1;
      const char* end = name.data() + name.size();
      const auto parsed = std::from_chars(name.data(), end, number);
      if (parsed.ec == std::errc() && parsed.ptr == end) return number;
      return std::nullopt;
    }
    const fs::path target = fs::read_symlink(path, error);
    if (error) return std::nullopt;
    path = folder / target;  // an absolute target replaces the folder
  }
  return std::nullopt;
}

// Readable text: no manifest, nothing to go on in.
std::unique_ptr<OutputFile> OpenText(const RunOptions& o) {
  if (o.resume) {
    throw UsageError("--resume: text output cannot be resumed, --output-format jsonl can");
  }
  auto file = std::make_unique<OutputFile>(o.output);
  if (!file->Regular() || file->Size() == 0) return file;
  if (!o.overwrite) {
    throw UsageError(fmt::format("{} exists and is not empty: --overwrite empties it", o.output));
  }
  file->Empty();
  return file;
}

}  // namespace

int Answers::Fd() const { return run.file ? run.file->Fd() : STDOUT_FILENO; }

std::optional<InputFormat> GivenFormat(const RunOptions& o) {
  return o.input_format ? o.input_format : FormatFromName(o.input);
}

Answers OpenAnswers(const RunOptions& o, bool text, const std::function<Manifest()>& manifest) {
  Answers answers;
  if (o.output == "-") return answers;
  if (text) {
    answers.run.file = OpenText(o);
    return answers;
  }
  answers.run = OpenRunOutput(o.output, {o.resume, o.overwrite, o.retry_errors}, manifest());
  answers.records = answers.run.file->Regular();
  answers.done_before = answers.run.finished.Count();
  answers.failed_before = answers.run.finished.Failed();
  for (const std::string& note : answers.run.notes) Say(note);
  if (answers.done_before > 0) {
    Say(fmt::format("resumed: {} lines have their record in {}", answers.done_before, o.output));
  }
  if (answers.failed_before > 0) {
    Say(fmt::format("{} of them failed: --retry-errors runs them again", answers.failed_before));
  }
  return answers;
}

void SortAnswers(const RunOptions& o, Answers& answers) {
  if (!o.ordered || !answers.records) return;
  try {
    answers.run.file->SortByLine();
  } catch (const IoError& error) {
    throw IoError(fmt::format(
        "{}; {} has every answer, in the order in which they came: --resume --ordered sorts it",
        error.what(), o.output));
  }
}

void RefuseSameFile(const RunOptions& o, int input) {
  struct stat in {};
  if (input < 0 || o.output == "-" || fstat(input, &in) != 0) return;
  const std::string name = NameWritten(o.output, in);
  if (name == o.output) throw UsageError(fmt::format("-i and -o name the same file: {}", name));
  if (!name.empty()) {
    throw UsageError(fmt::format("-o {}: writes {}, which is the file of prompts", o.output, name));
  }
}

std::optional<PromptSurvey> Survey(const RunOptions& o, int input, const FinishedLines& finished,
                                   int32_t context) {
  std::optional<PromptSurvey> survey;
  if (input < 0) {
    if (!o.prompts.empty()) survey = SurveyPrompts(o.prompts, o.shard, finished);
  } else if (Regular(input)) {
    survey = SurveyLines(input, GivenFormat(o), o.shard, finished, context);
  }
  if (survey && survey->changed) {
    throw UsageError(fmt::format("{} cannot be resumed: {} ({})", o.output, survey->changed->what,
                                 input < 0        ? "the command line"
                                 : o.input == "-" ? "standard input"
                                                  : o.input));
  }
  return survey;
}

void RefuseForStandardOutput(const RunOptions& o) {
  if (o.output != "-") return;
  if (o.resume) {
    throw UsageError("--resume is for an output file (-o): standard output cannot be read again");
  }
  if (o.overwrite) throw UsageError("--overwrite is for an output file (-o)");
}

std::string OutputName(const std::string& path) {
  const std::optional<int> number = OpenDescriptor(path);
  if (!number) return path;
  if (*number == STDOUT_FILENO) return "-";
  if (Regular(*number)) {
    throw UsageError(fmt::format(
        "-o {}: a file that is open already; give its own name, or - for standard output", path));
  }
  return path;
}

void CheckStrictly(const RunOptions& o, int input, RequestParser& parser) {
  const StrictReport report = CheckAllLines(input, GivenFormat(o), parser);
  if (report.bad > 0) throw UsageError(fmt::format("--strict: {}", report.Text()));
}

int Merge(const RunOptions& o) {
  const MergeRequest request{o.input, GivenFormat(o), o.merge_files, o.mixed_targets};
  MergeReport report;
  if (o.output != "-") {
    report = MergeIntoFile(request, o.output, o.overwrite);
  } else {
    constexpr size_t kChunk = size_t{64} << 10;
    std::string buffer;
    const auto flush = [&buffer] {
      WriteAll(STDOUT_FILENO, buffer, "standard output");
      buffer.clear();
    };
    report = MergeOutputs(request, [&](std::string_view bytes) {
      buffer += bytes;
      if (buffer.size() >= kChunk) flush();
    });
    flush();
  }
  for (const std::string& note : report.notes) Say(note);
  Say(fmt::format("{} records of {} lines, {} failed, {} in more than one output", report.records,
                  report.lines, report.failed, report.duplicates));
  if (report.missing > 0) Say(report.MissingText());
  return report.missing > 0 || report.failed > 0 ? 1 : 0;
}

}  // namespace colibri
