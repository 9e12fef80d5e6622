#include "runtime/tokenizer_json.h"

#include <fmt/format.h>

#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "io/error.h"
#include "runtime/json_cursor.h"
#include "runtime/json_text.h"
#include "runtime/utf8.h"

namespace colibri {
namespace {

using Json = nlohmann::ordered_json;

// GPT-2's map takes printable Latin-1 for itself and numbers the other 68 bytes from U+0100.
constexpr char32_t kFirstRenamed = 0x100;
constexpr size_t kCharacters = kFirstRenamed + 68;

constexpr bool KeepsItsCharacter(uint32_t byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

// The byte of each character, -1 for characters that stand for none.
constexpr std::array<int16_t, kCharacters> MakeByteOfCharacter() {
  std::array<int16_t, kCharacters> map{};
  size_t renamed = kFirstRenamed;
  for (size_t i = 0; i < kCharacters; ++i) map[i] = -1;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    map[KeepsItsCharacter(byte) ? byte : renamed++] = static_cast<int16_t>(byte);
  }
  return map;
}
constexpr std::array<int16_t, kCharacters> kByteOfCharacter = MakeByteOfCharacter();

std::string Short(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > 200) text = text.substr(0, 200) + "...";
  return text;
}

[[noreturn]] void Unsupported(std::string_view name, const Json& value, std::string_view expected) {
  throw std::invalid_argument(
      fmt::format("{} = {} is not supported, {} expected", name, Short(value), expected));
}

const Json& Member(const Json& object, const char* key) {
  static const Json kNull;
  if (!object.is_object()) return kNull;
  const auto found = object.find(key);
  return found == object.end() ? kNull : *found;
}

// A flag that may be left out or null for `fallback`.
bool Flag(const Json& object, const char* key, std::string_view name, bool fallback) {
  const Json& value = Member(object, key);
  if (value.is_null()) return fallback;
  if (!value.is_boolean()) Unsupported(fmt::format("{}.{}", name, key), value, "true or false");
  return value.get<bool>();
}

void ExpectFlag(const Json& object, const char* key, std::string_view name, bool fallback,
                bool expected) {
  if (Flag(object, key, name, fallback) != expected) {
    Unsupported(fmt::format("{}.{}", name, key), !expected, expected ? "true" : "false");
  }
}

void ExpectNull(const Json& object, const char* key, std::string_view name) {
  if (!Member(object, key).is_null()) Unsupported(name, Member(object, key), "null");
}

void ExpectType(const Json& object, std::string_view name, const char* type) {
  const Json& value = Member(object, "type");
  if (value != type) Unsupported(fmt::format("{}.type", name), value, fmt::format("\"{}\"", type));
}

// The pattern of: a Split that keeps matches as pieces, then bytes without a pattern of their own.
std::string ReadPattern(const Json& pre_tokenizer) {
  ExpectType(pre_tokenizer, "pre_tokenizer", "Sequence");
  const Json& steps = Member(pre_tokenizer, "pretokenizers");
  if (!steps.is_array() || steps.size() != 2) {
    Unsupported("pre_tokenizer.pretokenizers", steps, "a Split and a ByteLevel");
  }
  ExpectType(steps[0], "pre_tokenizer.pretokenizers[0]", "Split");
  ExpectType(steps[1], "pre_tokenizer.pretokenizers[1]", "ByteLevel");
  if (Member(steps[0], "behavior") != "Isolated") {
    Unsupported("Split.behavior", Member(steps[0], "behavior"), "\"Isolated\"");
  }
  ExpectFlag(steps[0], "invert", "Split", false, false);
  ExpectFlag(steps[1], "add_prefix_space", "ByteLevel", true, false);
  ExpectFlag(steps[1], "use_regex", "ByteLevel", true, false);
  const Json& pattern = Member(Member(steps[0], "pattern"), "Regex");
  if (!pattern.is_string()) {
    Unsupported("Split.pattern", Member(steps[0], "pattern"), "a Regex");
  }
  return pattern.get<std::string>();
}

// Where the large values stand; the others are parsed at once.
struct Skimmed {
  Json top = Json::object();    // without "model"
  Json model = Json::object();  // without "vocab" and "merges"
  std::optional<JsonCursor::Range> vocab, merges;
};

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  TokenizerFile Run() {
    JsonCursor cursor(text_);
    Skim(&cursor, false);
    cursor.ExpectEnd();
    CheckModel();
    CheckTop();
    file_.pattern = ReadPattern(Member(skimmed_.top, "pre_tokenizer"));
    if (!skimmed_.vocab) throw std::invalid_argument("model.vocab is missing");
    if (!skimmed_.merges) throw std::invalid_argument("model.merges is missing");
    ReadVocabulary();
    ReadMerges();
    ReadAdded();
    return std::move(file_);
  }

 private:
  void Skim(JsonCursor* cursor, bool in_model) {
    Json& small = in_model ? skimmed_.model : skimmed_.top;
    cursor->Expect('{');
    for (bool first = true; cursor->More('}', &first);) {
      std::string scratch;
      const std::string key(cursor->String(&scratch));
      if (ValidPrefix(key) != key.size()) cursor->Fail("a key that is not valid UTF-8");
      cursor->Expect(':');
      std::optional<JsonCursor::Range>* range = nullptr;
      if (in_model && key == "vocab") range = &skimmed_.vocab;
      if (in_model && key == "merges") range = &skimmed_.merges;
      if (small.contains(key) || (range != nullptr && range->has_value())) {
        cursor->Fail(fmt::format("the key \"{}\" stands twice", key));
      }
      if (!in_model && key == "model") {
        small[key] = true;
        Skim(cursor, true);
        continue;
      }
      const JsonCursor::Range value = cursor->Skip();
      if (range != nullptr) {
        *range = value;
        continue;
      }
      try {
        small[key] = ParseJson(text_.substr(value.begin, value.end - value.begin));
      } catch (const std::invalid_argument& error) {
        throw std::invalid_argument(
            fmt::format("value of \"{}\" at byte {}: {}", key, value.begin + 1, error.what()));
      }
    }
  }

  void CheckModel() {
    const Json& model = skimmed_.model;
    ExpectType(model, "model", "BPE");
    ExpectFlag(model, "byte_fallback", "model", false, false);
    ExpectNull(model, "dropout", "model.dropout");
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (Member(model, key) != "") ExpectNull(model, key, fmt::format("model.{}", key));
    }
    file_.ignore_merges = Flag(model, "ignore_merges", "model", false);
  }

  void CheckTop() {
    const Json& top = skimmed_.top;
    for (const char* key : {"truncation", "padding", "normalizer"}) ExpectNull(top, key, key);
    ExpectType(Member(top, "decoder"), "decoder", "ByteLevel");
    // A ByteLevel one changes offsets only.
    if (!Member(top, "post_processor").is_null()) {
      ExpectType(Member(top, "post_processor"), "post_processor", "ByteLevel");
    }
  }

  void ReadVocabulary() {
    // An entry takes at least 8 bytes, mostly about 20.
    file_.vocabulary = Vocabulary((skimmed_.vocab->end - skimmed_.vocab->begin) / 16);
    JsonCursor cursor(text_, skimmed_.vocab->begin, skimmed_.vocab->end);
    std::string scratch, bytes;
    cursor.Expect('{');
    for (bool first = true; cursor.More('}', &first);) {
      const std::string_view spelling = cursor.String(&scratch);
      const bool is_bytes = SpellingToBytes(spelling, &bytes);
      if (!is_bytes && ValidPrefix(spelling) != spelling.size()) {
        cursor.Fail("an entry that is not valid UTF-8");
      }
      cursor.Expect(':');
      const int64_t id = cursor.Integer();
      if (id < 0 || id >= kMaxTokenIds) {
        cursor.Fail(
            fmt::format("\"{}\" has id {}, 0 to {} expected", spelling, id, kMaxTokenIds - 1));
      }
      const auto id32 = static_cast<int32_t>(id);
      Vocabulary::Added added = Vocabulary::Added::kBytesTaken;
      if (is_bytes) {
        added = file_.vocabulary.Add(bytes, id32, Vocabulary::Lookup::kFindable);
      } else if (verbatim_.emplace(spelling, id32).second) {
        // No text becomes this entry, but the id has a spelling, and merges may name it.
        added = file_.vocabulary.Add(spelling, id32, Vocabulary::Lookup::kHidden);
      }
      if (added != Vocabulary::Added::kYes) {
        cursor.Fail(fmt::format("\"{}\" or its id {} stands twice", spelling, id));
      }
    }
    cursor.ExpectEnd();
    // Every byte that UTF-8 text can hold; the others would be dropped, as in the reference.
    for (int byte = 0; byte < 0xF5; ++byte) {
      if (byte == 0xC0 || byte == 0xC1) continue;
      const char c = static_cast<char>(byte);
      if (file_.vocabulary.Find(std::string_view(&c, 1)) < 0) {
        throw std::invalid_argument(fmt::format("model.vocab has no entry for byte {:#x}", byte));
      }
    }
  }

  // The two halves of one merge; views into the text or into the scratch strings.
  std::pair<std::string_view, std::string_view> ReadPair(JsonCursor* cursor) {
    if (cursor->Consume('[')) {
      const std::string_view left = cursor->String(&scratch_left_);
      cursor->Expect(',');
      const std::string_view right = cursor->String(&scratch_right_);
      cursor->Expect(']');
      return {left, right};
    }
    const std::string_view both = cursor->String(&scratch_left_);
    const size_t space = both.find(' ');
    if (space == both.npos || both.find(' ', space + 1) != both.npos) {
      cursor->Fail(fmt::format("merge \"{}\": two entries with one space between expected",
                               Printable(both)));
    }
    return {both.substr(0, space), both.substr(space + 1)};
  }

  void ReadMerges() {
    // A merge takes at least 8 bytes, as an indented pair about 60.
    file_.merges = MergeTable((skimmed_.merges->end - skimmed_.merges->begin) / 32);
    JsonCursor cursor(text_, skimmed_.merges->begin, skimmed_.merges->end);
    std::string bytes, right_bytes;
    uint32_t rank = 0;
    cursor.Expect('[');
    for (bool first = true; cursor.More(']', &first); ++rank) {
      const auto [left, right] = ReadPair(&cursor);
      int32_t ids[3] = {-1, -1, -1};
      const bool is_bytes = SpellingToBytes(left, &bytes) && SpellingToBytes(right, &right_bytes);
      if (is_bytes) {
        ids[0] = file_.vocabulary.Find(bytes);
        ids[1] = file_.vocabulary.Find(right_bytes);
        ids[2] = file_.vocabulary.Find(bytes += right_bytes);
      } else {
        ids[0] = FindSpelling(left);
        ids[1] = FindSpelling(right);
        ids[2] = FindSpelling(fmt::format("{}{}", left, right));
      }
      if (ids[0] < 0 || ids[1] < 0 || ids[2] < 0) {
        cursor.Fail(fmt::format("merge {} (\"{}\", \"{}\"): {} is not in model.vocab", rank,
                                Printable(left), Printable(right),
                                ids[0] < 0   ? "the first part"
                                : ids[1] < 0 ? "the second part"
                                             : "what they become"));
      }
      // Parts that no text becomes never meet.
      if (is_bytes) file_.merges.Add(ids[0], ids[1], {rank, ids[2]});
    }
    cursor.ExpectEnd();
  }

  int32_t FindSpelling(std::string_view spelling) const {
    std::string bytes;
    if (SpellingToBytes(spelling, &bytes)) return file_.vocabulary.Find(bytes);
    const auto found = verbatim_.find(std::string(spelling));
    return found == verbatim_.end() ? -1 : found->second;
  }

  static std::string Printable(std::string_view text) {
    std::string out;
    const size_t taken = AppendRepaired(text, &out);
    if (taken < text.size()) out += kReplacementCharacter;
    return out;
  }

  void ReadAdded() {
    const Json& list = Member(skimmed_.top, "added_tokens");
    if (list.is_null()) return;
    if (!list.is_array()) Unsupported("added_tokens", list, "a list");
    std::unordered_map<std::string, int32_t> seen;
    for (const Json& item : list) {
      const Json& content = Member(item, "content");
      const Json& id = Member(item, "id");
      if (!content.is_string() || content.get_ref<const std::string&>().empty()) {
        Unsupported("added_tokens: content", content, "a text");
      }
      AddedToken token{content.get<std::string>(), -1, false, false};
      const std::string name = fmt::format("added token {}", Short(content));
      if (!id.is_number_unsigned() || id.get<uint64_t>() >= kMaxTokenIds) {
        Unsupported(name + ": id", id, fmt::format("0 to {}", kMaxTokenIds - 1));
      }
      token.id = id.get<int32_t>();
      for (const char* flag : {"single_word", "lstrip", "rstrip"}) {
        ExpectFlag(item, flag, name, false, false);
      }
      token.special = Flag(item, "special", name, false);
      token.normalized = Flag(item, "normalized", name, !token.special);
      if (!seen.emplace(token.content, token.id).second) {
        throw std::invalid_argument(name + " stands twice");
      }
      // It may be an entry of the vocabulary as well, under the same id.
      const int32_t entry = FindSpelling(token.content);
      if (entry >= 0 && entry != token.id) {
        throw std::invalid_argument(
            fmt::format("{}: id {}, but {} in model.vocab", name, token.id, entry));
      }
      if (entry < 0 && file_.vocabulary.Add(token.content, token.id, Vocabulary::Lookup::kHidden) !=
                           Vocabulary::Added::kYes) {
        throw std::invalid_argument(
            fmt::format("{}: id {} belongs to another entry", name, token.id));
      }
      file_.added.push_back(std::move(token));
    }
  }

  std::string_view text_;
  Skimmed skimmed_;
  TokenizerFile file_;
  std::unordered_map<std::string, int32_t> verbatim_;  // entries that are no spelling of bytes
  std::string scratch_left_, scratch_right_;
};

}  // namespace

bool SpellingToBytes(std::string_view spelling, std::string* bytes) {
  bytes->clear();
  for (size_t i = 0; i < spelling.size(); ++i) {
    uint32_t character = static_cast<uint8_t>(spelling[i]);
    if (character >= 0x80) {
      // Characters of the map have at most two bytes, led by C2 to C5.
      if (character < 0xC2 || character > 0xC5 || i + 1 == spelling.size()) return false;
      const uint32_t second = static_cast<uint8_t>(spelling[++i]);
      if ((second & 0xC0) != 0x80) return false;
      character = (character & 0x1F) << 6 | (second & 0x3F);
    }
    if (character >= kCharacters || kByteOfCharacter[character] < 0) return false;
    bytes->push_back(static_cast<char>(kByteOfCharacter[character]));
  }
  return true;
}

TokenizerFile ReadTokenizerJson(std::string_view json, const std::string& path) {
  try {
    return Reader(json).Run();
  } catch (const std::invalid_argument& error) {
    throw ModelError(fmt::format("{}: {}", path, error.what()));
  }
}

}  // namespace colibri
