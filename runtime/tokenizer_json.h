// Reads tokenizer.json and refuses what the tokenizer would not do as the reference does it.
// Private to the tokenizer.
// Threads: a pure function.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/bpe.h"

namespace colibri {

struct AddedToken {
  std::string content;
  int32_t id = -1;
  bool special = false;     // left out by SpecialTokens::kSkip
  bool normalized = false;  // looked for only where no other added token was found
};

struct TokenizerFile {
  Vocabulary
      vocabulary;  // with the added tokens; those that are no entries of their own are hidden
  MergeTable merges;
  std::string pattern;
  bool ignore_merges = false;  // a piece that is an entry is that entry, however it would merge
  std::vector<AddedToken> added;
};

// Throws ModelError "<path>: ...".
TokenizerFile ReadTokenizerJson(std::string_view json, const std::string& path);

// The bytes that a spelling stands for in the byte-to-character map of GPT-2; false (and nothing of
// use in *bytes) if it holds any other character.
bool SpellingToBytes(std::string_view spelling, std::string* bytes);

}  // namespace colibri
