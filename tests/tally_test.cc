#include "runtime/tally.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

using colibri::LineOutcome;
using colibri::Tally;

namespace {

LineOutcome Answered(uint64_t line, double seconds, uint64_t tokens) {
  LineOutcome outcome;
  outcome.line = line;
  outcome.seconds = seconds;
  outcome.prompt_tokens = 2;
  outcome.generated_tokens = tokens;
  outcome.reasoning_tokens = 1;
  outcome.ends.stop = 1;
  return outcome;
}

LineOutcome Failed(uint64_t line, const std::string& code) {
  LineOutcome outcome;
  outcome.line = line;
  outcome.error = code;
  return outcome;
}

std::vector<uint64_t> Numbers(const std::vector<LineOutcome>& lines) {
  std::vector<uint64_t> numbers;
  for (const LineOutcome& line : lines) numbers.push_back(line.line);
  return numbers;
}

}  // namespace

TEST_CASE("a tally adds lines, tokens and ends up") {
  Tally tally;
  tally.Add(Answered(1, 1, 10));
  LineOutcome three = Answered(2, 1, 20);
  three.ends = {1, 2, 3, 4};
  tally.Add(three);
  tally.Add(Failed(3, "invalid_json"));
  CHECK(tally.Lines() == 3);
  CHECK(tally.Failed() == 1);
  CHECK(tally.PromptTokens() == 4);
  CHECK(tally.GeneratedTokens() == 30);
  CHECK(tally.ReasoningTokens() == 2);
  CHECK(tally.HowEnded().stop == 2);
  CHECK(tally.HowEnded().length == 2);
  CHECK(tally.HowEnded().degenerate == 3);
  CHECK(tally.HowEnded().tool_calls == 4);
  CHECK(tally.HowEnded().Total() == 11);
}

TEST_CASE("failures are counted by code, the commonest first, with the lowest line") {
  Tally tally;
  for (const uint64_t line : {9u, 4u, 7u}) tally.Add(Failed(line, "invalid_request"));
  tally.Add(Failed(3, "read_error"));
  tally.Add(Failed(2, "invalid_json"));
  const std::vector<Tally::Failure> failures = tally.Failures();
  REQUIRE(failures.size() == 3);
  CHECK(failures[0].code == "invalid_request");
  CHECK(failures[0].count == 3);
  CHECK(failures[0].first_line == 4);
  CHECK(failures[1].code == "invalid_json");
  CHECK(failures[2].code == "read_error");
}

TEST_CASE("three lines are named as slowest and as longest, of equal ones the lower") {
  Tally tally;
  tally.Add(Answered(8, 2, 50));
  tally.Add(Answered(1, 5, 10));
  tally.Add(Answered(2, 2, 50));
  CHECK(Numbers(tally.Slowest()) == std::vector<uint64_t>{1, 2, 8});
  tally.Add(Answered(3, 9, 1));
  tally.Add(Answered(4, 2, 50));
  tally.Add(Failed(5, "invalid_json"));
  CHECK(Numbers(tally.Slowest()) == std::vector<uint64_t>{3, 1, 2});
  CHECK(Numbers(tally.Longest()) == std::vector<uint64_t>{2, 4, 8});
}
