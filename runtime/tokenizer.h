// Text to token ids and back: byte-level BPE from tokenizer.json (model spec 5.1).
// Threads: const methods from any thread (matching state is per call).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace colibri {

// Whether spellings of added tokens (<|user|>, <think>) inside a text become those tokens.
enum class AddedTokens : uint8_t { kRecognise, kPlain };
enum class SpecialTokens : uint8_t { kKeep, kSkip };

// A part of a text: an added token's spelling (id >= 0), or what lies between them (-1).
struct TextPart {
  std::string_view text;
  int32_t id = -1;
};

class Tokenizer {
 public:
  // Throws ModelError with the path and what is wrong or not supported.
  static Tokenizer Load(const std::string& path);
  static Tokenizer Parse(std::string_view json, const std::string& path);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // Any bytes are accepted, broken UTF-8 included.
  std::vector<int32_t> Encode(std::string_view text, AddedTokens added) const;
  // nullopt: they are more than `most`. Time and memory follow `most`, not the text.
  std::optional<std::vector<int32_t>> EncodeUpTo(std::string_view text, AddedTokens added,
                                                 size_t most) const;
  // No text of more bytes is `tokens` tokens or fewer.
  size_t MostBytes(size_t tokens) const;
  // The text cut at the added tokens that Encode recognises; parts are views into it.
  std::vector<TextPart> SplitAdded(std::string_view text) const;
  // The bytes of the ids put together; not necessarily whole UTF-8 sequences. Unknown ids give
  // nothing. kSkip leaves out tokens flagged special.
  std::string DecodeBytes(std::span<const int32_t> ids, SpecialTokens special) const;
  // As DecodeBytes, but every broken sequence becomes U+FFFD as the reference does.
  std::string Decode(std::span<const int32_t> ids, SpecialTokens special) const;

  std::string_view Bytes(int32_t id) const;  // "" for unknown ids
  bool Has(int32_t id) const;
  bool IsAdded(int32_t id) const;
  bool IsSpecial(int32_t id) const;
  int32_t Find(std::string_view added_token) const;  // -1 when there is none
  int32_t Size() const;                              // highest id + 1

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Feeds tokens one at a time, gives text that always ends at a character boundary: bytes of an
// unfinished UTF-8 sequence are kept back, broken ones become U+FFFD. One a sequence; one thread.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, SpecialTokens special)
      : tokenizer_(&tokenizer), special_(special) {}
  std::string Push(int32_t id);
  std::string Flush();  // at the end: what is still kept back, as U+FFFD

 private:
  const Tokenizer* tokenizer_;
  SpecialTokens special_;
  std::string pending_;
};

}  // namespace colibri
