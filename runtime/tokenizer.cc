#include "runtime/tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>

#include "io/container.h"
#include "io/error.h"
#include "runtime/bpe.h"
#include "runtime/pretokenizer.h"
#include "runtime/tokenizer_json.h"
#include "runtime/utf8.h"

namespace colibri {
namespace {

// Added tokens inside a text, leftmost then longest.
class AddedMatcher {
 public:
  void Add(std::string_view content, int32_t id) { tokens_.push_back({std::string(content), id}); }

  void Finish() {
    std::sort(tokens_.begin(), tokens_.end(),
              [](const Token& a, const Token& b) { return a.content < b.content; });
    for (size_t i = 0; i < tokens_.size(); ++i) {
      Range& range = by_first_byte_[static_cast<uint8_t>(tokens_[i].content[0])];
      if (range.begin == range.end) range.begin = i;
      range.end = i + 1;
    }
  }

  // The longest token at the beginning of `text`; -1 if there is none.
  int32_t Longest(std::string_view text, size_t* length) const {
    Range range = by_first_byte_[static_cast<uint8_t>(text[0])];
    int32_t id = -1;
    // Narrowed byte by byte to the tokens that agree with the text so far; the shortest is first.
    for (size_t depth = 1; range.begin < range.end; ++depth) {
      if (tokens_[range.begin].content.size() == depth) {
        id = tokens_[range.begin++].id;
        *length = depth;
      }
      if (depth == text.size()) break;
      const auto byte = static_cast<uint8_t>(text[depth]);
      const auto begin = tokens_.begin() + static_cast<ptrdiff_t>(range.begin);
      const auto end = tokens_.begin() + static_cast<ptrdiff_t>(range.end);
      const auto at = [depth](const Token& token) {
        return static_cast<uint8_t>(token.content[depth]);
      };
      const auto low = std::partition_point(begin, end, [&](auto& t) { return at(t) < byte; });
      const auto high = std::partition_point(low, end, [&](auto& t) { return at(t) == byte; });
      range = {static_cast<size_t>(low - tokens_.begin()),
               static_cast<size_t>(high - tokens_.begin())};
    }
    return id;
  }

  // Calls ordinary(text) and token(id, text) in order.
  template <typename Ordinary, typename Found>
  void Split(std::string_view text, const Ordinary& ordinary, const Found& found) const {
    size_t begin = 0;
    for (size_t i = 0; i < text.size();) {
      size_t length = 0;
      const Range& range = by_first_byte_[static_cast<uint8_t>(text[i])];
      const int32_t id = range.begin == range.end ? -1 : Longest(text.substr(i), &length);
      if (id < 0) {
        ++i;
        continue;
      }
      if (i > begin) ordinary(text.substr(begin, i - begin));
      found(id, text.substr(i, length));
      begin = i += length;
    }
    if (begin < text.size()) ordinary(text.substr(begin));
  }

 private:
  struct Token {
    std::string content;
    int32_t id = -1;
  };
  struct Range {
    size_t begin = 0, end = 0;
  };
  std::vector<Token> tokens_;  // by content
  std::array<Range, 256> by_first_byte_{};
};

}  // namespace

struct Tokenizer::Impl {
  enum Kind : uint8_t { kAddedToken = 1, kSpecialToken = 2 };

  Impl(TokenizerFile from, Pretokenizer cutter)
      : file(std::move(from)), pretokenizer(std::move(cutter)) {
    kinds.resize(static_cast<size_t>(file.vocabulary.Size()));
    for (const AddedToken& token : file.added) {
      kinds[static_cast<size_t>(token.id)] =
          static_cast<uint8_t>(kAddedToken | (token.special ? kSpecialToken : 0));
      matchers[token.normalized ? 1 : 0].Add(token.content, token.id);
      all.Add(token.content, token.id);
    }
    for (AddedMatcher& matcher : matchers) matcher.Finish();
    all.Finish();
    for (size_t byte = 0; byte < 256; ++byte) {
      const char c = static_cast<char>(byte);
      byte_ids[byte] = file.vocabulary.Find(std::string_view(&c, 1));
      // A byte without an id is left out of what a text becomes.
      every_byte = every_byte && byte_ids[byte] >= 0;
    }
    for (int32_t id = 0; id < file.vocabulary.Size(); ++id) {
      longest = std::max(longest, file.vocabulary.Bytes(id).size());
    }
  }

  uint8_t Kinds(int32_t id) const {
    return id >= 0 && id < file.vocabulary.Size() ? kinds[static_cast<size_t>(id)] : uint8_t{0};
  }

  template <typename Ordinary, typename Found>
  void Split(std::string_view text, const Ordinary& ordinary, const Found& found) const {
    matchers[0].Split(
        text, [&](std::string_view part) { matchers[1].Split(part, ordinary, found); }, found);
  }

  TokenizerFile file;
  Pretokenizer pretokenizer;
  // The reference looks for those not flagged "normalized" first, for the others in what is left.
  std::array<AddedMatcher, 2> matchers;
  AddedMatcher all;
  std::vector<uint8_t> kinds;  // by id
  std::array<int32_t, 256> byte_ids{};
  bool every_byte = true;
  size_t longest = 1;  // bytes of a token
};

namespace {

// One call of Encode: text without added tokens to ids.
class TextEncoder {
 public:
  TextEncoder(const TokenizerFile& file, const Pretokenizer& pretokenizer,
              const std::array<int32_t, 256>& byte_ids, size_t most, std::vector<int32_t>* ids)
      : file_(file),
        splitter_(pretokenizer),
        merger_(file.merges, byte_ids),
        most_(most),
        ids_(ids) {}

  // The reference knows valid text only. Here a run of broken bytes is one piece, and what stands
  // before and after it is cut as if it were alone. Stops once there are more than `most` ids.
  void Append(std::string_view text) {
    while (!text.empty() && ids_->size() <= most_) {
      const size_t valid = ValidPrefix(text);
      splitter_.Start(text.substr(0, valid));
      for (std::string_view piece; splitter_.Next(&piece);) {
        AppendPiece(piece);
        if (ids_->size() > most_) return;
      }
      size_t end = valid;
      while (end < text.size()) {
        const Utf8Sequence sequence = FirstSequence(text.substr(end));
        if (sequence.kind == Utf8Kind::kWhole) break;
        end += sequence.length;
      }
      if (end > valid) AppendPiece(text.substr(valid, end - valid));
      text.remove_prefix(end);
    }
  }

 private:
  void AppendPiece(std::string_view piece) {
    if (file_.ignore_merges) {
      if (const int32_t id = file_.vocabulary.Find(piece); id >= 0) {
        ids_->push_back(id);
        return;
      }
    }
    merger_.Append(piece, ids_);
  }

  const TokenizerFile& file_;
  PieceSplitter splitter_;
  Merger merger_;
  const size_t most_;
  std::vector<int32_t>* ids_;
};

// GLM-5.2's has 20 MB.
constexpr size_t kMostFileBytes = 100'000'000;

std::string ReadFile(const std::string& path) {
  CheckRegular(path);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             &std::fclose);
  if (!file) FailToOpen(path, errno);
  std::string text;
  size_t got = 0;
  do {
    const size_t size = text.size();
    text.resize(size + (size_t{1} << 20));
    got = std::fread(text.data() + size, 1, text.size() - size, file.get());
    text.resize(size + got);
    if (text.size() > kMostFileBytes) {
      throw ModelError(fmt::format("{}: longer than {} bytes", path, kMostFileBytes));
    }
  } while (got > 0);
  if (std::ferror(file.get())) throw IoError(fmt::format("{}: {}", path, std::strerror(errno)));
  return text;
}

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Tokenizer Tokenizer::Load(const std::string& path) { return Parse(ReadFile(path), path); }

Tokenizer Tokenizer::Parse(std::string_view json, const std::string& path) {
  TokenizerFile file = ReadTokenizerJson(json, path);
  try {
    Pretokenizer pretokenizer(file.pattern);
    return Tokenizer(std::make_unique<Impl>(std::move(file), std::move(pretokenizer)));
  } catch (const std::invalid_argument& error) {
    throw ModelError(fmt::format("{}: pre_tokenizer: {}", path, error.what()));
  }
}

size_t Tokenizer::MostBytes(size_t tokens) const {
  const bool known = impl_->every_byte && tokens < SIZE_MAX / impl_->longest;
  return known ? tokens * impl_->longest : SIZE_MAX;
}

std::vector<int32_t> Tokenizer::Encode(std::string_view text, AddedTokens added) const {
  return *EncodeUpTo(text, added, SIZE_MAX);
}

std::optional<std::vector<int32_t>> Tokenizer::EncodeUpTo(std::string_view text, AddedTokens added,
                                                          size_t most) const {
  if (text.size() > MostBytes(most)) return {};
  // Positions inside a piece have 32 bits; the longest context takes a thousandth of that.
  if (text.size() >= UINT32_MAX) throw std::length_error("a text of 4 GiB or more");
  std::vector<int32_t> ids;
  TextEncoder encoder(impl_->file, impl_->pretokenizer, impl_->byte_ids, most, &ids);
  if (added == AddedTokens::kPlain) {
    encoder.Append(text);
  } else {
    impl_->Split(
        text, [&](std::string_view part) { encoder.Append(part); },
        [&](int32_t id, std::string_view) {
          if (ids.size() <= most) ids.push_back(id);
        });
  }
  if (ids.size() > most) return {};
  return ids;
}

std::vector<TextPart> Tokenizer::SplitAdded(std::string_view text) const {
  std::vector<TextPart> parts;
  impl_->Split(
      text,
      [&](std::string_view part) {
        parts.push_back({part, -1});
      },
      [&](int32_t id, std::string_view part) {
        parts.push_back({part, id});
      });
  return parts;
}

std::string Tokenizer::DecodeBytes(std::span<const int32_t> ids, SpecialTokens special) const {
  std::string bytes;
  for (const int32_t id : ids) {
    if (special == SpecialTokens::kSkip && IsSpecial(id)) continue;
    bytes.append(Bytes(id));
  }
  return bytes;
}

std::string Tokenizer::Decode(std::span<const int32_t> ids, SpecialTokens special) const {
  std::string text;
  const std::string bytes = DecodeBytes(ids, special);
  if (AppendRepaired(bytes, &text) < bytes.size()) text.append(kReplacementCharacter);
  return text;
}

std::string_view Tokenizer::Bytes(int32_t id) const { return impl_->file.vocabulary.Bytes(id); }
bool Tokenizer::Has(int32_t id) const { return impl_->file.vocabulary.Has(id); }
bool Tokenizer::IsAdded(int32_t id) const { return (impl_->Kinds(id) & Impl::kAddedToken) != 0; }
bool Tokenizer::IsSpecial(int32_t id) const {
  return (impl_->Kinds(id) & Impl::kSpecialToken) != 0;
}
int32_t Tokenizer::Size() const { return impl_->file.vocabulary.Size(); }

int32_t Tokenizer::Find(std::string_view added_token) const {
  if (added_token.empty()) return -1;
  size_t length = 0;
  const int32_t id = impl_->all.Longest(added_token, &length);
  return length == added_token.size() ? id : -1;
}

std::string StreamDecoder::Push(int32_t id) {
  std::string text;
  if (special_ == SpecialTokens::kSkip && tokenizer_->IsSpecial(id)) return text;
  pending_.append(tokenizer_->Bytes(id));
  pending_.erase(0, AppendRepaired(pending_, &text));
  return text;
}

std::string StreamDecoder::Flush() {
  std::string text;
  if (!pending_.empty()) text.append(kReplacementCharacter);
  pending_.clear();
  return text;
}

}  // namespace colibri
