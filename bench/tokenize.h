// `colibri-bench tokenize`: text to ids and back, the reference's cases, and what loading costs.
// Threads: one.
#pragma once

#include <cstdint>
#include <string>

namespace colibri {

struct TokenizeOptions {
  // A model directory or a tokenizer.json. Not needed with generate_merges.
  std::string model_dir_or_tokenizer_json;
  std::string file;    // the text; "" or "-" is the standard input
  bool plain = false;  // recognise no added tokens
  std::string cases;   // instead of a text: a cases.jsonl, of the tokenizer or of the chat template
  bool json = false;   // one JSON object instead of lines; with all ids of a text
  // Instead of all that: load a made-up tokenizer.json with this many merges, several times.
  int64_t generate_merges = 0;
};

// 0, or 1 if a case fails or the text does not come back. Throws ModelError, IoError, UsageError.
int RunTokenize(const TokenizeOptions& options);

// A tokenizer.json with GLM's pattern and exactly `merges` merges of 2 to 4 letters, most results
// reached by two of them, laid out as the reference writes it (17 MB for 320,000).
std::string GenerateTokenizerJson(int64_t merges);

}  // namespace colibri
