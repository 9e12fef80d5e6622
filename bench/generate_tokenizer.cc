// GenerateTokenizerJson of bench/tokenize.h: as many merges as the real file has, which is not ours
// to ship.
#include <fmt/format.h>

#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/tokenize.h"
#include "io/error.h"
#include "runtime/utf8.h"

namespace colibri {
namespace {

constexpr int64_t kLetters = 26;
constexpr int64_t kWords3 = kLetters * kLetters * kLetters, kWords4 = kWords3 * kLetters;
// All words of two letters by one merge each, of three and of four letters by two.
constexpr int64_t kMostMerges = kLetters * kLetters + 2 * kWords3 + 2 * kWords4;

// Number `index` of the words of `length` letters.
std::string Word(int64_t index, size_t length) {
  std::string word(length, 'a');
  for (char& letter : word) {
    letter = static_cast<char>('a' + index % kLetters);
    index /= kLetters;
  }
  return word;
}

// The characters that spell the bytes 0 to 255 in GPT-2's map, as JSON text.
std::vector<std::string> ByteSpellings() {
  std::vector<std::string> spellings;
  char32_t renamed = 0x100;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool kept = (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);
    std::string& text = spellings.emplace_back(byte == '"' || byte == '\\' ? "\\" : "");
    AppendUtf8(kept ? byte : renamed++, &text);
  }
  return spellings;
}

struct Pair {
  std::string word;
  size_t cut = 0;
};

std::vector<Pair> Pairs(int64_t merges) {
  std::vector<Pair> pairs;
  const auto full = [&] { return static_cast<int64_t>(pairs.size()) == merges; };
  const auto add = [&](int64_t words, size_t length) {
    for (int64_t i = 0; i < words && !full(); ++i) {
      // Scattered (7919 has no factor in common with 26), as ranks of a trained file are.
      const std::string word = Word(i * 7919 % words, length);
      pairs.push_back({word, length - 1});
      if (length > 2 && !full()) pairs.push_back({word, 1});
    }
  };
  add(kLetters * kLetters, 2);
  add(kWords3, 3);
  add(kWords4, 4);
  return pairs;
}

}  // namespace

std::string GenerateTokenizerJson(int64_t merges) {
  if (merges < 0 || merges > kMostMerges) {
    throw UsageError(fmt::format("at most {} merges can be generated", kMostMerges));
  }
  const std::vector<Pair> pairs = Pairs(merges);
  std::string text = R"({
  "version": "1.0",
  "truncation": null,
  "padding": null,
  "normalizer": null,
  "pre_tokenizer": {
    "type": "Sequence",
    "pretokenizers": [
      {
        "type": "Split",
        "pattern": {
          "Regex": "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
        },
        "behavior": "Isolated",
        "invert": false
      },
      {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}
    ]
  },
  "post_processor": null,
  "decoder": {"type": "ByteLevel"},
  "model": {
    "type": "BPE",
    "ignore_merges": true,
    "vocab": {)";
  auto out = std::back_inserter(text);
  int64_t id = 0;
  for (const std::string& spelling : ByteSpellings()) {
    fmt::format_to(out, "{}\n      \"{}\": {}", id == 0 ? "" : ",", spelling, id);
    ++id;
  }
  for (size_t i = 0; i < pairs.size(); ++i) {
    // The second merge of a word follows its first.
    if (i > 0 && pairs[i].word == pairs[i - 1].word) continue;
    fmt::format_to(out, ",\n      \"{}\": {}", pairs[i].word, id++);
  }
  text += "\n    },\n    \"merges\": [";
  for (size_t i = 0; i < pairs.size(); ++i) {
    const std::string_view word = pairs[i].word;
    fmt::format_to(out, "{}\n      [\n        \"{}\",\n        \"{}\"\n      ]", i == 0 ? "" : ",",
                   word.substr(0, pairs[i].cut), word.substr(pairs[i].cut));
  }
  fmt::format_to(out, "\n    ]\n  }},\n  \"added_tokens\": [{{\"id\": {}, ", id);
  text += "\"content\": \"<|endoftext|>\", \"special\": true}]\n}\n";
  return text;
}

}  // namespace colibri
