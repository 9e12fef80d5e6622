#include "bench/tokenize.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "io/error.h"
#include "runtime/chat_template.h"
#include "runtime/json_text.h"
#include "runtime/tokenizer.h"

namespace colibri {
namespace {

using Clock = std::chrono::steady_clock;
using Ids = std::vector<int32_t>;
using Json = nlohmann::ordered_json;

// Failures beyond these are counted only.
constexpr int kShownFailures = 5;

double Seconds(Clock::time_point since) {
  return std::chrono::duration<double>(Clock::now() - since).count();
}

std::string ReadAll(const std::string& path) {
  if (path.empty() || path == "-") {
    return std::string(std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>());
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) throw IoError(fmt::format("{}: cannot be opened", path));
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad()) throw IoError(fmt::format("{}: cannot be read", path));
  return text;
}

std::string TokenizerPath(const std::string& given) {
  return std::filesystem::is_directory(given) ? given + "/tokenizer.json" : given;
}

// Where two texts or id lists part, with a few elements from there on.
template <typename Sequence>
std::string Difference(const Sequence& expected, const Sequence& found) {
  constexpr size_t kShown = 8;
  const size_t shorter = std::min(expected.size(), found.size());
  size_t at = 0;
  while (at < shorter && expected[at] == found[at]) ++at;
  const auto part = [&](const Sequence& sequence) {
    const auto begin = sequence.begin() + static_cast<ptrdiff_t>(at);
    const auto end = begin + static_cast<ptrdiff_t>(std::min(kShown, sequence.size() - at));
    return Json(Sequence(begin, end)).dump(-1, ' ', true, Json::error_handler_t::replace);
  };
  return fmt::format("differs at {}: expected {}, found {}", at, part(expected), part(found));
}

class CaseRunner {
 public:
  explicit CaseRunner(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  void Run(const Json& one, int64_t line) {
    name_ = fmt::format("line {}", line);
    good_ = true;
    if (one.contains("messages")) {
      Chat(one);
    } else {
      Text(one);
    }
    (good_ ? passed : failed) += 1;
  }

  int64_t passed = 0, failed = 0;
  std::vector<std::string> failures;

 private:
  template <typename Sequence>
  void Expect(const char* what, const Sequence& expected, const Sequence& found) {
    if (expected != found) Fail(fmt::format("{} {}", what, Difference(expected, found)));
  }

  void Fail(const std::string& what) {
    good_ = false;
    if (failures.size() < kShownFailures) failures.push_back(fmt::format("{}: {}", name_, what));
  }

  void Text(const Json& one) {
    const auto text = one.at("text").get<std::string>();
    const auto ids = one.at("ids").get<Ids>();
    Expect("ids", ids, tokenizer_.Encode(text, AddedTokens::kRecognise));
    Expect("plain_ids", one.at("plain_ids").get<Ids>(),
           tokenizer_.Encode(text, AddedTokens::kPlain));
    Expect("decoded", one.at("decoded").get<std::string>(),
           tokenizer_.Decode(ids, SpecialTokens::kKeep));
    Expect("decoded_without_special", one.at("decoded_without_special").get<std::string>(),
           tokenizer_.Decode(ids, SpecialTokens::kSkip));
  }

  void Chat(const Json& one) {
    if (one.contains("name")) name_ += fmt::format(" ({})", one["name"].get<std::string>());
    try {
      TemplateArguments arguments;
      ApplyTemplateArguments(one.at("arguments"), &arguments);
      arguments.add_generation_prompt = one.at("add_generation_prompt").get<bool>();
      const auto pieces = RenderChat(one.at("messages"), one.at("tools"), arguments);
      Expect("rendered", one.at("rendered").get<std::string>(), PiecesText(pieces));
      Expect("ids", one.at("ids").get<Ids>(), EncodePieces(tokenizer_, pieces, false).value());
    } catch (const TemplateError& error) {
      Fail(error.what());
    }
  }

  const Tokenizer& tokenizer_;
  std::string name_;
  bool good_ = true;
};

int RunCases(const Tokenizer& tokenizer, const TokenizeOptions& options, Json* report) {
  std::ifstream file(options.cases);
  if (!file) throw IoError(fmt::format("{}: cannot be opened", options.cases));
  CaseRunner runner(tokenizer);
  int64_t number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    if (line.empty()) continue;
    try {
      runner.Run(ParseJson(line), number);
    } catch (const std::invalid_argument& error) {
      throw IoError(fmt::format("{}: line {}: {}", options.cases, number, error.what()));
    } catch (const Json::exception& error) {
      throw IoError(fmt::format("{}: line {}: {}", options.cases, number, error.what()));
    }
  }
  if (number == 0) throw IoError(fmt::format("{}: no cases", options.cases));
  (*report)["passed"] = runner.passed;
  (*report)["failed"] = runner.failed;
  (*report)["failures"] = runner.failures;
  if (!options.json) {
    for (const std::string& failure : runner.failures) fmt::print("{}\n", failure);
    fmt::print("cases         {} passed, {} failed\n", runner.passed, runner.failed);
  }
  return runner.failed == 0 ? 0 : 1;
}

int RunText(const Tokenizer& tokenizer, const TokenizeOptions& options, Json* report) {
  constexpr size_t kShownIds = 32;
  const std::string text = ReadAll(options.file);
  const Clock::time_point begin = Clock::now();
  const Ids ids =
      tokenizer.Encode(text, options.plain ? AddedTokens::kPlain : AddedTokens::kRecognise);
  const double encode = Seconds(begin);
  const Clock::time_point middle = Clock::now();
  const bool back = tokenizer.DecodeBytes(ids, SpecialTokens::kKeep) == text;
  const double decode = Seconds(middle);
  const double megabytes = static_cast<double>(text.size()) / 1e6;
  (*report)["bytes"] = text.size();
  (*report)["tokens"] = ids.size();
  (*report)["encode_seconds"] = encode;
  (*report)["decode_seconds"] = decode;
  (*report)["same_text_back"] = back;
  if (options.json) {
    (*report)["ids"] = ids;
  } else {
    const Ids shown(ids.begin(),
                    ids.begin() + static_cast<ptrdiff_t>(std::min(kShownIds, ids.size())));
    fmt::print("ids           {}{}\n", fmt::join(shown, " "),
               shown.size() < ids.size() ? " ..." : "");
    fmt::print(
        "text          {} bytes, {} tokens, {:.2f} bytes a token\n", text.size(), ids.size(),
        ids.empty() ? 0 : static_cast<double>(text.size()) / static_cast<double>(ids.size()));
    fmt::print("encode        {:.3f} s, {:.1f} MB/s\n", encode, megabytes / encode);
    fmt::print("decode        {:.3f} s, {:.1f} MB/s\n", decode, megabytes / decode);
    fmt::print("back          {}\n", back ? "the same bytes" : "OTHER BYTES");
  }
  return back ? 0 : 1;
}

int RunGenerated(const TokenizeOptions& options, Json* report) {
  constexpr int kRuns = 5;
  const std::string text = GenerateTokenizerJson(options.generate_merges);
  std::vector<double> seconds;
  int32_t entries = 0;
  for (int run = 0; run < kRuns; ++run) {
    const Clock::time_point begin = Clock::now();
    const Tokenizer tokenizer = Tokenizer::Parse(text, "generated tokenizer.json");
    seconds.push_back(Seconds(begin));
    entries = tokenizer.Size();
  }
  std::sort(seconds.begin(), seconds.end());
  (*report)["merges"] = options.generate_merges;
  (*report)["entries"] = entries;
  (*report)["bytes"] = text.size();
  (*report)["load_seconds"] = seconds;
  if (!options.json) {
    fmt::print("generated     {} merges, {} entries, {:.1f} MB\n", options.generate_merges, entries,
               static_cast<double>(text.size()) / 1e6);
    fmt::print("load          {:.3f} s (median of {}; {:.3f} to {:.3f})\n", seconds[kRuns / 2],
               kRuns, seconds.front(), seconds.back());
  }
  return 0;
}

}  // namespace

int RunTokenize(const TokenizeOptions& options) {
  Json report = Json::object();
  int code = 0;
  if (options.generate_merges > 0) {
    code = RunGenerated(options, &report);
  } else {
    if (options.model_dir_or_tokenizer_json.empty()) {
      throw UsageError("tokenize: a model directory or a tokenizer.json is needed");
    }
    const std::string path = TokenizerPath(options.model_dir_or_tokenizer_json);
    const Clock::time_point begin = Clock::now();
    const Tokenizer tokenizer = Tokenizer::Load(path);
    const double load = Seconds(begin);
    report["tokenizer"] = path;
    report["load_seconds"] = load;
    if (!options.json) {
      fmt::print("tokenizer     {}\n", path);
      fmt::print("load          {:.3f} s, ids 0 to {}\n", load, tokenizer.Size() - 1);
    }
    code = options.cases.empty() ? RunText(tokenizer, options, &report)
                                 : RunCases(tokenizer, options, &report);
  }
  if (options.json) fmt::print("{}\n", report.dump());
  return code;
}

}  // namespace colibri
