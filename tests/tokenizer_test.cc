// The tokenizer against the fixtures' cases, and what its files may not hold.
// Length: one case for each refusal of a tokenizer.json.
#include "runtime/tokenizer.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "io/error.h"
#include "runtime/bpe.h"
#include "runtime/pretokenizer.h"
#include "runtime/tokenizer_json.h"
#include "runtime/utf8.h"

namespace colibri {
namespace {

using Ids = std::vector<int32_t>;
using Json = nlohmann::ordered_json;

const char* const kFixture = COLIBRI_SOURCE_DIR "/tests/fixtures/tokenizer/tokenizer.json";

const Tokenizer& Fixture() {
  static const Tokenizer tokenizer = Tokenizer::Load(kFixture);
  return tokenizer;
}

std::vector<Json> Cases() {
  std::ifstream file(COLIBRI_SOURCE_DIR "/tests/fixtures/tokenizer/cases.jsonl");
  std::vector<Json> cases;
  for (std::string line; std::getline(file, line);) cases.push_back(Json::parse(line));
  return cases;
}

// How the byte-to-character map of GPT-2 spells a byte.
std::string Spelling(uint8_t byte) {
  std::string bytes, spelling;
  for (char32_t c = 0x21; c < 0x144; ++c) {
    spelling.clear();
    AppendUtf8(c, &spelling);
    if (SpellingToBytes(spelling, &bytes) && bytes == std::string(1, static_cast<char>(byte)))
      break;
  }
  return spelling;
}

// A tokenizer.json with the 256 bytes as ids 0 to 255 and `words` from 256 on.
Json SmallFile(const std::vector<std::string>& words, const Json& merges) {
  Json vocab = Json::object();
  for (int byte = 0; byte < 256; ++byte) vocab[Spelling(static_cast<uint8_t>(byte))] = byte;
  int id = 256;
  for (const std::string& word : words) vocab[word] = id++;
  Json file = Json::parse(R"({
    "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
      {"type": "Split", "pattern": {"Regex": "\\p{L}+|\\p{N}|[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"},
       "behavior": "Isolated", "invert": false},
      {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]},
    "post_processor": null, "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "ignore_merges": false}})");
  file["model"]["vocab"] = vocab;
  file["model"]["merges"] = merges;
  return file;
}

Tokenizer Small(const std::vector<std::string>& words, const Json& merges) {
  return Tokenizer::Parse(SmallFile(words, merges).dump(), "small");
}

std::string ErrorOf(const std::string& text) {
  try {
    Tokenizer::Parse(text, "dir/tokenizer.json");
  } catch (const ModelError& error) {
    return error.what();
  }
  return "";
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::vector<std::string> Cut(const Pretokenizer& pretokenizer, std::string_view text) {
  std::vector<std::string> pieces;
  PieceSplitter splitter(pretokenizer);
  splitter.Start(text);
  for (std::string_view piece; splitter.Next(&piece);) pieces.emplace_back(piece);
  return pieces;
}

TEST_CASE("all cases of the reference encode to its ids, with and without added tokens") {
  const std::vector<Json> cases = Cases();
  REQUIRE(cases.size() == 408);
  for (const Json& one : cases) {
    const auto text = one["text"].get<std::string>();
    CAPTURE(text);
    CHECK(Fixture().Encode(text, AddedTokens::kRecognise) == one["ids"].get<Ids>());
    CHECK(Fixture().Encode(text, AddedTokens::kPlain) == one["plain_ids"].get<Ids>());
  }
}

TEST_CASE("all cases of the reference decode to its texts, with and without special tokens") {
  for (const Json& one : Cases()) {
    CAPTURE(one["text"]);
    const Ids ids = one["ids"].get<Ids>();
    CHECK(Fixture().Decode(ids, SpecialTokens::kKeep) == one["decoded"].get<std::string>());
    CHECK(Fixture().Decode(ids, SpecialTokens::kSkip) ==
          one["decoded_without_special"].get<std::string>());
    CHECK(Fixture().DecodeBytes(ids, SpecialTokens::kKeep) == one["text"].get<std::string>());
    CHECK(Fixture().DecodeBytes(one["plain_ids"].get<Ids>(), SpecialTokens::kSkip) ==
          one["text"].get<std::string>());
  }
}

TEST_CASE("ids pushed one at a time give the text of the whole, cut at characters only") {
  for (const Json& one : Cases()) {
    CAPTURE(one["text"]);
    const Ids ids = one["plain_ids"].get<Ids>();
    StreamDecoder decoder(Fixture(), SpecialTokens::kKeep);
    std::string text;
    for (const int32_t id : ids) {
      const std::string part = decoder.Push(id);
      CHECK(ValidPrefix(part) == part.size());
      text += part;
    }
    text += decoder.Flush();
    CHECK(text == Fixture().Decode(ids, SpecialTokens::kKeep));
  }
}

TEST_CASE("a character whose bytes are separate tokens appears with its last byte") {
  const Tokenizer tokenizer = Small({}, Json::array());
  StreamDecoder decoder(tokenizer, SpecialTokens::kKeep);
  CHECK(decoder.Push(0xF0) == "");
  CHECK(decoder.Push(0x9F) == "");
  CHECK(decoder.Push(0x98) == "");
  CHECK(decoder.Push(0x80) == "\U0001F600");
  CHECK(decoder.Flush() == "");
}

TEST_CASE("broken bytes become one U+FFFD for each longest beginning of a character") {
  const Tokenizer tokenizer = Small({}, Json::array());
  StreamDecoder decoder(tokenizer, SpecialTokens::kKeep);
  CHECK(decoder.Push(0xE2) == "");
  CHECK(decoder.Push(0x82) == "");
  CHECK(decoder.Push('a') == "\uFFFDa");
  CHECK(decoder.Push(0xFF) == "\uFFFD");
  CHECK(decoder.Push(0xED) == "");
  CHECK(decoder.Push(0xA0) == "\uFFFD\uFFFD");
  CHECK(decoder.Push(0xC3) == "");
  CHECK(decoder.Flush() == "\uFFFD");
  CHECK(decoder.Flush() == "");
  CHECK(tokenizer.Decode(Ids{0xE2, 0x82, 'a', 0xFF, 0xED, 0xA0, 0xC3}, SpecialTokens::kKeep) ==
        "\uFFFDa\uFFFD\uFFFD\uFFFD\uFFFD");
}

TEST_CASE("a special token inside a character is skipped without cutting it") {
  Json file = SmallFile({}, Json::array());
  file["added_tokens"] = Json::parse(R"([{"id": 300, "content": "<s>", "special": true}])");
  const Tokenizer tokenizer = Tokenizer::Parse(file.dump(), "small");
  StreamDecoder skip(tokenizer, SpecialTokens::kSkip), keep(tokenizer, SpecialTokens::kKeep);
  CHECK(skip.Push(0xC3) == "");
  CHECK(skip.Push(300) == "");
  CHECK(skip.Push(0xA9) == "\u00e9");
  CHECK(keep.Push(0xC3) == "");
  CHECK(keep.Push(300) == "\uFFFD<s>");
  CHECK(keep.Push(0xA9) == "\uFFFD");
}

TEST_CASE("unknown ids give nothing and are not there") {
  const Tokenizer& tokenizer = Fixture();
  CHECK(tokenizer.Size() == 4096);
  for (const int32_t id : {-1, INT32_MIN, 4096, INT32_MAX}) {
    CAPTURE(id);
    CHECK_FALSE(tokenizer.Has(id));
    CHECK(tokenizer.Bytes(id) == "");
    CHECK_FALSE(tokenizer.IsAdded(id));
    CHECK_FALSE(tokenizer.IsSpecial(id));
    CHECK(tokenizer.Decode(Ids{id}, SpecialTokens::kKeep) == "");
    CHECK(StreamDecoder(tokenizer, SpecialTokens::kKeep).Push(id) == "");
  }
}

TEST_CASE("added tokens are found by their whole spelling and know whether they are special") {
  const Tokenizer& tokenizer = Fixture();
  const int32_t user = tokenizer.Find("<|user|>"), think = tokenizer.Find("<think>");
  REQUIRE(user == 4067);
  REQUIRE(think >= 0);
  CHECK(tokenizer.IsSpecial(user));
  CHECK(tokenizer.IsAdded(think));
  CHECK_FALSE(tokenizer.IsSpecial(think));
  CHECK(tokenizer.Bytes(user) == "<|user|>");
  for (const char* text : {"", "<|user|", "<|user|>x", "the", "x"}) {
    CHECK(tokenizer.Find(text) == -1);
  }
}

TEST_CASE("the longest added token wins where two begin at the same place") {
  Json file = SmallFile({}, Json::array());
  file["added_tokens"] = Json::parse(
      R"([{"id": 300, "content": "<a"}, {"id": 301, "content": "<ab>"}, {"id": 302, "content": "<abc"},
          {"id": 303, "content": "b>"}])");
  const Tokenizer tokenizer = Tokenizer::Parse(file.dump(), "small");
  const auto encode = [&](const char* text) {
    return tokenizer.Encode(text, AddedTokens::kRecognise);
  };
  CHECK(encode("<ab>") == Ids{301});
  CHECK(encode("<abx") == Ids{300, 'b', 'x'});
  CHECK(encode("<abcd") == Ids{302, 'd'});
  CHECK(encode("<a<ab") == Ids{300, 300, 'b'});
  CHECK(encode("xb>") == Ids{'x', 303});
  const auto parts = tokenizer.SplitAdded("x<ab>yb>");
  REQUIRE(parts.size() == 4);
  CHECK(parts[0].text == "x");
  CHECK(parts[0].id == -1);
  CHECK(parts[1].id == 301);
  CHECK(parts[3].text == "b>");
}

TEST_CASE("a token flagged normalized is looked for only between the others") {
  Json file = SmallFile({}, Json::array());
  file["added_tokens"] = Json::parse(
      R"([{"id": 300, "content": "ab", "normalized": true},
          {"id": 301, "content": "bc", "normalized": false}])");
  const Tokenizer tokenizer = Tokenizer::Parse(file.dump(), "small");
  CHECK(tokenizer.Encode("abcab", AddedTokens::kRecognise) == Ids{'a', 301, 300});
}

TEST_CASE("the pair of lowest rank merges first, the leftmost of equals before the others") {
  const Json merges = Json::parse(R"([["b", "c"], ["a", "b"], ["a", "a"], ["aa", "a"]])");
  const Tokenizer tokenizer = Small({"bc", "ab", "aa", "aaa"}, merges);
  const auto encode = [&](const char* text) { return tokenizer.Encode(text, AddedTokens::kPlain); };
  CHECK(encode("abc") == Ids{'a', 256});
  CHECK(encode("abab") == Ids{257, 257});
  CHECK(encode("aaaaa") == Ids{258, 259});
  CHECK(encode("bcbc") == Ids{256, 256});
}

TEST_CASE("merges are read as pairs and as texts, with the same ranks") {
  const Tokenizer pairs = Small({"ab", "bc"}, Json::parse(R"([["b", "c"], ["a", "b"]])"));
  const Tokenizer texts = Small({"ab", "bc"}, Json::parse(R"(["b c", "a b"])"));
  CHECK(pairs.Encode("abcab", AddedTokens::kPlain) == Ids{'a', 257, 256});
  CHECK(texts.Encode("abcab", AddedTokens::kPlain) == Ids{'a', 257, 256});
}

TEST_CASE("ignore_merges gives a piece that is an entry whole, and only then") {
  Json file = SmallFile({"ab", "abc"}, Json::parse(R"(["a b"])"));
  const Tokenizer merged = Tokenizer::Parse(file.dump(), "small");
  file["model"]["ignore_merges"] = true;
  const Tokenizer whole = Tokenizer::Parse(file.dump(), "small");
  CHECK(merged.Encode("abc", AddedTokens::kPlain) == Ids{256, 'c'});
  CHECK(whole.Encode("abc", AddedTokens::kPlain) == Ids{257});
  CHECK(whole.Encode("abcc", AddedTokens::kPlain) == Ids{256, 'c', 'c'});
}

TEST_CASE("any bytes encode and come back, broken UTF-8 included") {
  uint32_t state = 1;
  for (int round = 0; round < 300; ++round) {
    std::string text;
    for (int i = 0; i < round % 40; ++i) {
      state = state * 1664525 + 1013904223;
      const auto byte = static_cast<char>(state >> 24);
      if (state & 0x400) {
        text += byte;
      } else {
        AppendUtf8(0x20 + (state >> 20) % 0x3000, &text);
      }
    }
    for (const AddedTokens added : {AddedTokens::kPlain, AddedTokens::kRecognise}) {
      CHECK(Fixture().DecodeBytes(Fixture().Encode(text, added), SpecialTokens::kKeep) == text);
    }
  }
}

TEST_CASE("encoding up to a number of tokens gives all of them or none") {
  std::string text = "Once upon a time, <|user|> there were 123456 cats.   ";
  text += std::string(300, ' ') + "\xff\xff end";
  for (const AddedTokens added : {AddedTokens::kPlain, AddedTokens::kRecognise}) {
    const Ids ids = Fixture().Encode(text, added);
    REQUIRE(ids.size() > 20);
    for (const size_t most : {ids.size(), ids.size() + 1, size_t{SIZE_MAX}}) {
      CHECK(Fixture().EncodeUpTo(text, added, most) == ids);
    }
    for (const size_t most : {ids.size() - 1, ids.size() / 2, size_t{1}, size_t{0}}) {
      CHECK_FALSE(Fixture().EncodeUpTo(text, added, most).has_value());
    }
    CHECK(text.size() <= Fixture().MostBytes(ids.size()));
  }
  CHECK(Fixture().EncodeUpTo("", AddedTokens::kPlain, 0) == Ids{});
}

TEST_CASE("no token has more bytes than the bound, and one has as many") {
  size_t longest = 0;
  for (int32_t id = 0; id < Fixture().Size(); ++id) {
    longest = std::max(longest, Fixture().Bytes(id).size());
  }
  CHECK(Fixture().MostBytes(1) == longest);
  CHECK(Fixture().MostBytes(7) == 7 * longest);
  CHECK(Fixture().MostBytes(SIZE_MAX) == SIZE_MAX);
}

TEST_CASE("a run of broken bytes is one piece, and the text before it ends as at the end") {
  const Tokenizer tokenizer =
      Small({"\u00ff\u00ff", "\u0120\u0120"}, Json::parse(R"(["\u00ff \u00ff", "\u0120 \u0120"])"));
  CHECK(tokenizer.Encode("a\xff\xff"
                         "b",
                         AddedTokens::kPlain) == Ids{'a', 256, 'b'});
  // Before a letter the second space would be a piece of its own.
  CHECK(tokenizer.Encode("  \xff", AddedTokens::kPlain) == Ids{257, 0xFF});
  CHECK(tokenizer.Encode("  a", AddedTokens::kPlain) == Ids{' ', ' ', 'a'});
  CHECK(tokenizer.Encode("\xe2\x82", AddedTokens::kPlain) == Ids{0xE2, 0x82});
}

TEST_CASE("long runs of one kind of character encode in one go") {
  constexpr size_t kLength = 1 << 20;
  for (const std::string unit :
       {"a", " ", "\n", "!", "7", "\xff", "\u4e2d", "\u3000", "ab ", "<"}) {
    CAPTURE(unit);
    std::string text;
    while (text.size() < kLength) text += unit;
    const Ids ids = Fixture().Encode(text, AddedTokens::kRecognise);
    CHECK(Fixture().DecodeBytes(ids, SpecialTokens::kKeep) == text);
  }
}

TEST_CASE("the interpreter cuts as the compiled pattern does, long runs included") {
  const Json file = Json::parse(std::ifstream(kFixture));
  const auto pattern =
      file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"].get<std::string>();
  const Pretokenizer compiled(pattern), interpreted(pattern, Jit::kAvoid);
  for (const Json& one : Cases()) {
    const auto text = one["text"].get<std::string>();
    CAPTURE(text);
    CHECK(Cut(compiled, text) == Cut(interpreted, text));
  }
  // 12 million steps: more than PCRE2's own limit of 10 million.
  const std::string spaces(12000000, ' ');
  CHECK(Cut(interpreted, spaces + "a").size() == 2);
  CHECK(Cut(compiled, spaces + "a").size() == 2);
}

TEST_CASE("white space is Unicode's White_Space inside and outside of classes") {
  const Pretokenizer space(R"(\s+)"), other(R"(\S+)"), in_class(R"([\s]+)"), not_in(R"([^\s]+)");
  const Pretokenizer mixed(R"([a\s]+)");
  for (const char32_t c : {0x9u, 0xAu, 0xBu, 0xCu, 0xDu, 0x20u, 0x85u, 0xA0u, 0x1680u, 0x2000u,
                           0x200Au, 0x2028u, 0x2029u, 0x202Fu, 0x205Fu, 0x3000u}) {
    CAPTURE(static_cast<uint32_t>(c));
    std::string text = "a";
    AppendUtf8(c, &text);
    text += "a";
    for (const Pretokenizer* one : {&space, &other, &in_class, &not_in}) {
      CHECK(Cut(*one, text).size() == 3);
    }
    CHECK(Cut(mixed, text).size() == 1);
  }
  for (const char32_t c :
       {0x8u, 0xEu, 0x1Cu, 0x1Du, 0x1Eu, 0x1Fu, 0x84u, 0x180Eu, 0x200Bu, 0x2060u, 0xFEFFu}) {
    CAPTURE(static_cast<uint32_t>(c));
    std::string text = "a";
    AppendUtf8(c, &text);
    text += "a";
    for (const Pretokenizer* one : {&other, &not_in}) CHECK(Cut(*one, text).size() == 1);
  }
}

TEST_CASE("what the pattern does not match is a piece too, and empty matches cut") {
  const Pretokenizer digits(R"(\p{N}+)");
  CHECK(Cut(digits, "ab12cd3") == std::vector<std::string>{"ab", "12", "cd", "3"});
  CHECK(Cut(digits, "") == std::vector<std::string>{});
  const Pretokenizer empty("x*");
  CHECK(Cut(empty, "ab\u00e9xx") == std::vector<std::string>{"a", "b", "\u00e9", "xx"});
}

TEST_CASE("patterns that the two engines read differently or that may explode are refused") {
  for (const char* pattern :
       {"\\w+", "\\b",     "\\d+",          "\\h",    "\\X",   "\\Qa",  ".",       "^a",
        "a$",   "[a[b]]",  "[[:alpha:]]",   "[a&&b]", "[\\S]", "(a+)+", "(?:a*)*", "(a){2,}",
        "(?R)", "(*UTF)a", "(?<n>a)",       "(?C1)",  "(?i)a", "a{,3}", "a{2}+",   "(",
        "[",    "\\",      "\\p{Nonsense}", "\\pL",   "[]a]"}) {
    CAPTURE(pattern);
    CHECK_THROWS_AS(Pretokenizer{pattern}, std::invalid_argument);
  }
  CHECK_THROWS_AS(Pretokenizer(std::string(5000, 'a')), std::invalid_argument);
}

TEST_CASE("settings that would change ids are refused by name and value") {
  const auto changed = [](const char* pointer, const Json& value) {
    Json file = SmallFile({}, Json::array());
    file[Json::json_pointer(pointer)] = value;
    return ErrorOf(file.dump());
  };
  struct Setting {
    const char* pointer;
    Json value;
    const char* name;
  };
  const Setting settings[] = {
      {"/normalizer", Json::parse(R"({"type": "NFC"})"), "normalizer = {\"type\":\"NFC\"}"},
      {"/truncation", Json::parse(R"({"max_length": 5})"), "truncation"},
      {"/padding", Json::parse(R"({"pad_id": 0})"), "padding"},
      {"/model/type", "Unigram", "model.type = \"Unigram\""},
      {"/model/type", nullptr, "model.type = null"},
      {"/model/byte_fallback", true, "model.byte_fallback = true"},
      {"/model/dropout", 0.5, "model.dropout = 0.5"},
      {"/model/end_of_word_suffix", "</w>", "model.end_of_word_suffix = \"</w>\""},
      {"/model/continuing_subword_prefix", "##", "model.continuing_subword_prefix"},
      {"/model/ignore_merges", 1, "model.ignore_merges = 1"},
      {"/pre_tokenizer", nullptr, "pre_tokenizer.type"},
      {"/pre_tokenizer/type", "Metaspace", "pre_tokenizer.type = \"Metaspace\""},
      {"/pre_tokenizer/pretokenizers", Json::array(), "pretokenizers = []"},
      {"/pre_tokenizer/pretokenizers/0/behavior", "Removed", "behavior = \"Removed\""},
      {"/pre_tokenizer/pretokenizers/0/invert", true, "invert = true"},
      {"/pre_tokenizer/pretokenizers/0/pattern", Json::parse(R"({"String": " "})"), "pattern"},
      {"/pre_tokenizer/pretokenizers/0/pattern/Regex", "\\w+", "\\w"},
      {"/pre_tokenizer/pretokenizers/1/use_regex", true, "use_regex = true"},
      {"/pre_tokenizer/pretokenizers/1/add_prefix_space", true, "add_prefix_space = true"},
      {"/post_processor", Json::parse(R"({"type": "TemplateProcessing"})"), "TemplateProcessing"},
      {"/decoder", nullptr, "decoder.type = null"},
      {"/decoder/type", "Metaspace", "decoder.type = \"Metaspace\""},
  };
  CHECK(changed("/normalizer", nullptr) == "");
  for (const Setting& setting : settings) {
    CAPTURE(setting.pointer);
    const std::string error = changed(setting.pointer, setting.value);
    CAPTURE(error);
    CHECK(Contains(error, setting.name));
    CHECK(Contains(error, "dir/tokenizer.json: "));
  }
}

TEST_CASE("bad entries and merges are refused and named") {
  const auto with_vocab = [](const std::string& entry) {
    std::string text = SmallFile({}, Json::array()).dump();
    text.insert(text.find("\"vocab\":{") + 9, entry + ",");
    return ErrorOf(text);
  };
  CHECK(with_vocab("\"zz\": 256") == "");
  CHECK(Contains(with_vocab("\"zz\": -1"), "id -1"));
  CHECK(Contains(with_vocab("\"zz\": 2097152"), "id 2097152"));
  CHECK(Contains(with_vocab("\"zz\": 99999999999"), "id 99999999999"));
  CHECK(Contains(with_vocab("\"zz\": 1.5"), "integer"));
  CHECK(Contains(with_vocab("\"zz\": 65"), "twice"));
  CHECK(Contains(with_vocab("\"zz\": 256, \"zz\": 257"), "\"zz\""));
  CHECK(Contains(with_vocab("\"\\u4e2d\": 256, \"\\u4e2d\": 257"), "twice"));
  CHECK(Contains(with_vocab("\"\xff\": 256"), "UTF-8"));

  const auto with_merges = [](const char* merges) {
    return ErrorOf(SmallFile({"ab"}, Json::parse(merges)).dump());
  };
  CHECK(with_merges(R"(["a b"])") == "");
  CHECK(Contains(with_merges(R"(["a b", "a c"])"), "merge 1 (\"a\", \"c\"): what they become"));
  CHECK(Contains(with_merges(R"([["ac", "b"]])"), "the first part"));
  CHECK(Contains(with_merges(R"([["a", "bc"]])"), "the second part"));
  CHECK(Contains(with_merges(R"([["a", "\u4e2d"]])"), "the second part"));
  for (const char* merges : {R"(["ab"])", R"(["a b c"])", R"([["a"]])", R"([["a", "b", "c"]])",
                             R"([1])", R"([["a", 1]])", R"({"a": "b"})", "1"}) {
    CAPTURE(merges);
    CHECK(with_merges(merges) != "");
  }
}

TEST_CASE("a vocabulary without one of the bytes of UTF-8 text is refused") {
  Json file = SmallFile({}, Json::array());
  file["model"]["vocab"].erase("A");
  CHECK(Contains(ErrorOf(file.dump()), "byte 0x41"));
}

TEST_CASE("bad added tokens are refused and named") {
  const auto with = [](const char* added) {
    Json file = SmallFile({"<ab>"}, Json::array());
    file["added_tokens"] = Json::parse(added);
    return ErrorOf(file.dump());
  };
  CHECK(with(R"([{"id": 300, "content": "<s>"}])") == "");
  CHECK(with(R"([{"id": 256, "content": "<ab>", "special": true}])") == "");
  CHECK(Contains(with(R"([{"id": 65, "content": "<s>"}])"), "id 65"));
  CHECK(Contains(with(R"([{"id": 257, "content": "<ab>"}])"), "id 257, but 256"));
  for (const char* added :
       {R"([{"id": -1, "content": "<s>"}])", R"([{"id": 3000000, "content": "<s>"}])",
        R"([{"id": "1", "content": "<s>"}])", R"([{"content": "<s>"}])", R"([{"id": 300}])",
        R"([{"id": 300, "content": ""}])", R"([{"id": 300, "content": "<s>", "lstrip": true}])",
        R"([{"id": 300, "content": "<s>", "rstrip": true}])", "[7]", "{}",
        R"([{"id": 300, "content": "<s>", "single_word": true}])",
        R"([{"id": 300, "content": "<s>"}, {"id": 301, "content": "<s>"}])"}) {
    CAPTURE(added);
    CHECK(Contains(with(added), "added"));
  }
}

TEST_CASE("a file cut off anywhere is refused") {
  const std::string text = SmallFile({"ab"}, Json::parse(R"(["a b"])")).dump();
  REQUIRE(ErrorOf(text) == "");
  for (size_t length = 0; length < text.size(); length += length < 200 ? 1 : 17) {
    CAPTURE(length);
    CHECK(ErrorOf(text.substr(0, length)) != "");
  }
  CHECK(ErrorOf(text + "x") != "");
  CHECK(ErrorOf(text + " \n") == "");
}

TEST_CASE("keys that stand twice are refused") {
  std::string text = SmallFile({}, Json::array()).dump();
  CHECK(Contains(ErrorOf("{\"model\":{}," + text.substr(1)), "twice"));
  CHECK(Contains(ErrorOf("{\"decoder\":null," + text.substr(1)), "twice"));
  text.insert(text.find("\"vocab\""), "\"vocab\":{},");
  CHECK(Contains(ErrorOf(text), "twice"));
}

TEST_CASE("a file that is not there is a ModelError with its path") {
  CHECK_THROWS_WITH_AS(Tokenizer::Load("/nowhere/tokenizer.json"),
                       "/nowhere/tokenizer.json: No such file or directory", ModelError);
}

TEST_CASE("merging agrees with a search through all pairs at each step") {
  // Few letters and many merges, several of them with the same result.
  std::vector<std::string> words;
  Json merges = Json::array();
  const std::string letters = "abc";
  for (const char a : letters) {
    for (const char b : letters) words.push_back({a, b});
  }
  for (size_t i = 0; i < 9; ++i) {
    for (const char c : letters) words.push_back(words[i] + c);
  }
  uint32_t state = 7;
  for (const std::string& word : words) {
    for (size_t cut = 1; cut < word.size(); ++cut) {
      merges.push_back({word.substr(0, cut), word.substr(cut)});
    }
  }
  for (size_t i = merges.size(); i > 1; --i) {
    state = state * 1664525 + 1013904223;
    std::swap(merges[i - 1], merges[(state >> 8) % i]);
  }
  const Tokenizer tokenizer = Small(words, merges);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::string> parts;
    for (int i = 0; i < 1 + round % 30; ++i) {
      state = state * 1664525 + 1013904223;
      parts.push_back(std::string(1, letters[(state >> 8) % 3]));
    }
    std::string text;
    for (const std::string& part : parts) text += part;
    while (true) {
      size_t best = merges.size(), at = 0;
      for (size_t i = 0; i + 1 < parts.size(); ++i) {
        for (size_t rank = 0; rank < best; ++rank) {
          if (merges[rank][0] == parts[i] && merges[rank][1] == parts[i + 1]) best = rank, at = i;
        }
      }
      if (best == merges.size()) break;
      parts[at] += parts[at + 1];
      parts.erase(parts.begin() + static_cast<ptrdiff_t>(at) + 1);
    }
    std::vector<std::string> merged;
    for (const int32_t id : tokenizer.Encode(text, AddedTokens::kPlain)) {
      merged.emplace_back(tokenizer.Bytes(id));
    }
    CHECK(merged == parts);
  }
}

}  // namespace
}  // namespace colibri
