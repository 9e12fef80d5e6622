#include "runtime/stop.h"

#include <doctest/doctest.h>

#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/text_assembler.h"
#include "runtime/tokenizer.h"
#include "tests/fixture_tokenizer.h"

using colibri::AddedTokens;
using colibri::LoopDetector;
using colibri::Request;
using colibri::StopCause;
using colibri::StopMatcher;
using colibri::TextAssembler;
using colibri::Tok;
using colibri::Tokenizer;

namespace {

const std::vector<int32_t>& StopIds() {
  static const std::vector<int32_t> ids = {Tok().Find("<|endoftext|>"), Tok().Find("<|user|>"),
                                           Tok().Find("<|observation|>")};
  return ids;
}

// The tokens of each piece, so that a test decides where tokens end.
std::vector<int32_t> Tokens(const std::vector<std::string>& pieces) {
  std::vector<int32_t> ids;
  for (const std::string& piece : pieces) {
    const auto part = Tok().Encode(piece, AddedTokens::kRecognise);
    ids.insert(ids.end(), part.begin(), part.end());
  }
  return ids;
}

std::vector<int32_t> ByteTokens(std::string_view text) {
  std::vector<int32_t> ids;
  for (const char c : text) {
    const auto part = Tok().Encode(std::string_view(&c, 1), AddedTokens::kPlain);
    REQUIRE(part.size() == 1);
    ids.push_back(part[0]);
  }
  return ids;
}

Request WithStop(std::vector<std::string> stop) {
  Request request;
  request.stop = std::move(stop);
  return request;
}

struct Ended {
  StopCause cause = StopCause::kNone;
  size_t tokens = 0;
  std::string matched;
  std::string text;
};

// Feeds tokens until the matcher ends the choice; the text as the assembler shows it, piece by
// piece.
Ended Feed(const Request& request, const std::vector<int32_t>& tokens,
           int32_t max_tokens = 100000) {
  StopMatcher matcher(Tok(), StopIds(), request, max_tokens);
  TextAssembler assembler(Tok(), request);
  Ended ended;
  for (const int32_t token : tokens) {
    ended.cause = matcher.Push(token);
    ++ended.tokens;
    if (ended.cause != StopCause::kStopToken) ended.text += assembler.Push(token).content;
    if (ended.cause != StopCause::kNone) break;
  }
  ended.text += assembler.Finish().content;
  CHECK(ended.text == assembler.Content());
  ended.matched = matcher.MatchedStop();
  return ended;
}

std::vector<int32_t> Random(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 4000);
  return tokens;
}

// The rule, word for word and slow: the first i (from 1) at which it holds, 0 if never.
size_t SlowLoop(const std::vector<int32_t>& t) {
  for (size_t i = 256; i <= t.size(); ++i) {
    for (size_t q = 1; q <= 32; ++q) {
      bool loops = true;
      for (size_t j = i - (256 - q); j < i; ++j) loops = loops && t[j] == t[j - q];
      if (loops) return i;
    }
  }
  return 0;
}

size_t FastLoop(const std::vector<int32_t>& tokens) {
  LoopDetector detector;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (detector.Push(tokens[i])) return i + 1;
  }
  return 0;
}

}  // namespace

TEST_CASE("each of the end tokens ends a choice and none of them is text") {
  for (const int32_t id : StopIds()) {
    auto tokens = Tokens({"Hello"});
    tokens.push_back(id);
    tokens.push_back(tokens[0]);
    const Ended ended = Feed(Request{}, tokens);
    CHECK(ended.cause == StopCause::kStopToken);
    CHECK(ended.tokens == tokens.size() - 1);
    CHECK(ended.text == "Hello");
  }
}

TEST_CASE("an end token that is spelled in the text does not end a choice") {
  auto tokens = Tok().Encode("a <|user|> b", AddedTokens::kPlain);
  const Ended ended = Feed(Request{}, tokens);
  CHECK(ended.cause == StopCause::kNone);
  CHECK(ended.text == "a <|user|> b");
}

TEST_CASE("a stop string ends a choice, is cut off and is named") {
  const Ended ended = Feed(WithStop({"END"}), Tokens({"some text END and more"}));
  CHECK(ended.cause == StopCause::kStopString);
  CHECK(ended.text == "some text ");
  CHECK(ended.matched == "END");
}

TEST_CASE("a stop string split over three tokens is found and never shown") {
  const Request request = WithStop({"STOP!"});
  const auto tokens = Tokens({"ab", "S", "TO", "P!", "cd"});
  StopMatcher matcher(Tok(), StopIds(), request, 100);
  TextAssembler assembler(Tok(), request);
  std::string shown;
  for (const int32_t token : tokens) {
    const StopCause cause = matcher.Push(token);
    shown += assembler.Push(token).content;
    CHECK(shown.substr(0, 2) == std::string("ab").substr(0, shown.size()));
    CHECK(shown.size() <= 2);
    if (cause != StopCause::kNone) break;
  }
  shown += assembler.Finish().content;
  CHECK(shown == "ab");
}

TEST_CASE("the beginning of a stop string is shown once it turns out to be none") {
  const Request request = WithStop({"aab"});
  TextAssembler assembler(Tok(), request);
  const auto tokens = ByteTokens("xaaab");
  std::string shown;
  const std::vector<std::string> after = {"x", "x", "x", "xa", "xa"};
  for (size_t i = 0; i < tokens.size(); ++i) {
    shown += assembler.Push(tokens[i]).content;
    CHECK(shown == after[i]);
  }
  CHECK(assembler.Finish().content.empty());
  CHECK(assembler.Content() == "xa");
  // At the end of the tokens a begun one is text.
  CHECK(Feed(request, ByteTokens("xaa")).text == "xaa");
}

TEST_CASE("where a stop string is found does not depend on where tokens end") {
  const std::string text = "one two three four five six seven";
  const std::vector<std::vector<std::string>> stops = {
      {"three"}, {"three four", "ee"}, {"e t", " th"}, {"seven"}, {"r five", "four f", "ur"}};
  for (const auto& stop : stops) {
    const Ended whole = Feed(WithStop(stop), Tokens({text}));
    const Ended bytes = Feed(WithStop(stop), ByteTokens(text));
    CHECK(whole.cause == StopCause::kStopString);
    CHECK(whole.text == bytes.text);
    CHECK(whole.matched == bytes.matched);
  }
}

TEST_CASE("the stop string that ends first counts, of those that end together the longest") {
  CHECK(Feed(WithStop({"bcd", "c"}), Tokens({"abcd"})).text == "ab");
  CHECK(Feed(WithStop({"c", "abc", "bc"}), Tokens({"xabcd"})).text == "x");
}

TEST_CASE("special tokens are no text for stop strings and answers") {
  auto tokens = Tokens({"a"});
  tokens.push_back(Tok().Find("<|begin_of_image|>"));
  const auto more = Tokens({"b"});
  tokens.insert(tokens.end(), more.begin(), more.end());
  const Ended ended = Feed(WithStop({"ab"}), tokens);
  CHECK(ended.cause == StopCause::kStopString);
  CHECK(ended.text.empty());
}

TEST_CASE("max_tokens ends a choice at that token, and other causes at the same token go first") {
  const auto tokens = Tokens({"one two three four five"});
  const Ended ended = Feed(Request{}, tokens, 3);
  CHECK(ended.cause == StopCause::kLength);
  CHECK(ended.tokens == 3);
  CHECK(Feed(Request{}, {StopIds()[0]}, 1).cause == StopCause::kStopToken);
  CHECK(Feed(WithStop({"one"}), Tokens({"one"}), 1).cause == StopCause::kStopString);
}

TEST_CASE("256 equal tokens are a loop, 255 are none") {
  CHECK(FastLoop(std::vector<int32_t>(400, 7)) == 256);
  CHECK(FastLoop(std::vector<int32_t>(255, 7)) == 0);
}

TEST_CASE("loops of every period up to 32 are found where the rule says, longer ones never") {
  for (size_t q = 1; q <= 34; ++q) {
    auto tokens = Random(300, static_cast<uint32_t>(q));
    const auto cycle = Random(q, static_cast<uint32_t>(q) + 100);
    for (size_t i = 0; i < 400; ++i) tokens.push_back(cycle[i % q]);
    CHECK(FastLoop(tokens) == SlowLoop(tokens));
    CHECK((FastLoop(tokens) != 0) == (q <= 32));
  }
}

TEST_CASE("the loop rule agrees with its slow form on sequences that almost repeat") {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    const size_t q = 1 + random() % 32;
    std::vector<int32_t> tokens;
    for (size_t i = 0; i < 700; ++i) {
      const bool slip = random() % 250 == 0;
      tokens.push_back(i < q || slip ? static_cast<int32_t>(random() % 3) : tokens[i - q]);
    }
    CHECK(FastLoop(tokens) == SlowLoop(tokens));
  }
}

TEST_CASE("a loop ends a choice as degenerate unless the request switches that off") {
  Request request;
  const std::vector<int32_t> tokens(300, Tokens({"a"})[0]);
  const Ended ended = Feed(request, tokens);
  CHECK(ended.cause == StopCause::kDegenerate);
  CHECK(ended.tokens == 256);
  request.loop_stop = false;
  CHECK(Feed(request, tokens).cause == StopCause::kNone);
}

TEST_CASE("reasoning ends at the token </think> and its tokens are counted without it") {
  Request request;
  request.starts_in_reasoning = true;
  TextAssembler assembler(Tok(), request);
  std::string reasoning, content;
  const auto thought = Tokens({"I think so."});
  for (const int32_t token : Tokens({"I think so.", "</think>", "Yes."})) {
    const auto delta = assembler.Push(token);
    reasoning += delta.reasoning;
    content += delta.content;
  }
  const auto rest = assembler.Finish();
  CHECK(reasoning + rest.reasoning == "I think so.");
  CHECK(content + rest.content == "Yes.");
  CHECK_FALSE(assembler.InReasoning());
  CHECK(assembler.ReasoningTokens() == static_cast<int32_t>(thought.size()));
}

TEST_CASE(
    "a spelled </think> does not end the reasoning, and without its token there is no content") {
  Request request;
  request.starts_in_reasoning = true;
  TextAssembler assembler(Tok(), request);
  for (const int32_t token : Tok().Encode("a</think>b", AddedTokens::kPlain)) assembler.Push(token);
  assembler.Finish();
  CHECK(assembler.InReasoning());
  CHECK(assembler.Reasoning() == "a</think>b");
  CHECK(assembler.Content().empty());
}

TEST_CASE("a completion keeps its think marks in the text") {
  Request request;
  request.chat = false;
  CHECK(Feed(request, Tokens({"<think>a</think>b"})).text == "<think>a</think>b");
}

TEST_CASE("a stop string may begin in the reasoning and be </think> itself") {
  Request request = WithStop({"</think>"});
  request.starts_in_reasoning = true;
  StopMatcher matcher(Tok(), StopIds(), request, 100);
  TextAssembler assembler(Tok(), request);
  StopCause cause = StopCause::kNone;
  for (const int32_t token : Tokens({"hm", "</think>"})) {
    cause = matcher.Push(token);
    assembler.Push(token);
  }
  assembler.Finish();
  CHECK(cause == StopCause::kStopString);
  CHECK(assembler.Reasoning() == "hm");
  CHECK(assembler.Content().empty());
}

TEST_CASE("a stop string that begins before </think> and is none leaves each part in its place") {
  Request request = WithStop({"m</think>N"});
  request.starts_in_reasoning = true;
  TextAssembler assembler(Tok(), request);
  for (const int32_t token : Tokens({"hm", "</think>", "Yes"})) assembler.Push(token);
  assembler.Finish();
  CHECK(assembler.Reasoning() == "hm");
  CHECK(assembler.Content() == "Yes");
}

TEST_CASE("characters split over tokens are shown whole, broken ones as U+FFFD") {
  TextAssembler assembler(Tok(), Request{});
  std::string shown;
  for (const int32_t token : ByteTokens("\xF0\x9F\x98\x80!")) {
    const std::string piece = assembler.Push(token).content;
    CHECK((piece.empty() || piece == "\xF0\x9F\x98\x80" || piece == "!"));
    shown += piece;
  }
  CHECK(shown == "\xF0\x9F\x98\x80!");
  CHECK(Feed(Request{}, ByteTokens("a\xF0\x9F")).text == "a\xEF\xBF\xBD");
  CHECK(Feed(Request{}, ByteTokens("\xE6\xAD"
                                   "b"))
            .text ==
        "\xEF\xBF\xBD"
        "b");
}
