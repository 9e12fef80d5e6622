#include "runtime/json_text.h"

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace colibri {
namespace {

using Json = nlohmann::ordered_json;

// Marks a binary value (which JSON text cannot hold) as the digits of an integer.
constexpr uint64_t kBigIntegerSubtype = 0x696e74;  // "int"

// Up to this many keys a linear search is faster than a set; above it, it would be quadratic.
constexpr size_t kLinearKeys = 16;

// An array or object that is not closed yet.
struct OpenValue {
  Json value;
  std::string key;    // of an object: the key whose value comes next
  bool kept = false;  // of an object: that value stays
  std::unordered_set<std::string> keys;
};

// "[json.exception.parse_error.101] parse error at line 1, column 2: ..." without the bracket, the
// line (of the text, where a reader would take it for the file's), and the bytes last read, which
// may be broken UTF-8.
std::string Reason(const char* what) {
  std::string text = what;
  if (const size_t end = text.find("] "); !text.empty() && text[0] == '[' && end != text.npos) {
    text.erase(0, end + 2);
  }
  constexpr std::string_view kLine = "parse error at line 1, column ";
  if (text.starts_with(kLine)) text.replace(0, kLine.size(), "parse error at byte ");
  if (const size_t last = text.find("; last read:"); last != text.npos) text.resize(last);
  return text;
}

// The events of nlohmann's parser; every error leaves as std::invalid_argument.
class JsonBuilder : public nlohmann::json_sax<Json> {
 public:
  explicit JsonBuilder(size_t most) : left_(most) {}
  Json TakeRoot() { return std::move(root_); }
  bool LeftOut() const { return left_out_; }

  bool null() override { return Add(Json()); }
  bool boolean(bool value) override { return Add(Json(value)); }
  bool number_integer(int64_t value) override { return Add(Json(value)); }
  bool number_unsigned(uint64_t value) override { return Add(Json(value)); }
  bool string(std::string& value) override { return Add(Json(std::move(value))); }
  bool binary(Json::binary_t&) override { return false; }

  bool number_float(double value, const std::string& text) override {
    if (text.find_first_of(".eE") != std::string::npos) return Add(Json(value));
    // An integer that overflowed: the parser falls back to a double.
    return Add(Json::binary(std::vector<uint8_t>(text.begin(), text.end()), kBigIntegerSubtype));
  }

  bool start_object(size_t) override { return Open(Json::object()); }
  bool start_array(size_t) override { return Open(Json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }

  bool key(std::string& name) override {
    OpenValue& top = open_.back();
    top.kept = left_ > 0 || (open_.size() == 1 && name == "custom_id");
    if (!top.kept) return true;
    const auto& members = top.value.get_ref<const Json::object_t&>();
    bool twice = false;
    if (members.size() < kLinearKeys) {
      for (const auto& member : members) twice = twice || member.first == name;
    } else {
      if (top.keys.empty()) {
        for (const auto& member : members) top.keys.insert(member.first);
      }
      twice = top.keys.count(name) != 0;
    }
    if (twice) throw std::invalid_argument(fmt::format("an object has the key \"{}\" twice", name));
    if (!top.keys.empty()) top.keys.insert(name);
    top.key = std::move(name);
    return true;
  }

  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& error) override {
    throw std::invalid_argument(Reason(error.what()));
  }

 private:
  bool Open(Json value) {
    if (open_.size() >= static_cast<size_t>(kMaxJsonDepth)) {
      throw std::invalid_argument(fmt::format("nested deeper than {} levels", kMaxJsonDepth));
    }
    open_.emplace_back().value = std::move(value);
    return true;
  }

  bool Close() {
    Json value = std::move(open_.back().value);
    open_.pop_back();
    return Add(std::move(value));
  }

  bool Add(Json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return true;
    }
    OpenValue& top = open_.back();
    const bool is_array = top.value.is_array();
    if (is_array ? left_ == 0 : !top.kept) {
      left_out_ = true;
      return true;
    }
    if (left_ > 0) --left_;
    if (is_array) {
      top.value.get_ref<Json::array_t&>().push_back(std::move(value));
    } else {
      // Not operator[] or emplace: ordered_map searches from the front for each new key.
      top.value.get_ref<Json::object_t&>().emplace_back(std::move(top.key), std::move(value));
    }
    return true;
  }

  Json root_;
  std::vector<OpenValue> open_;
  size_t left_;  // values that are still kept
  bool left_out_ = false;
};

}  // namespace

Json ParseJson(std::string_view text) {
  bool left_out = false;
  return ParseJsonUpTo(text, SIZE_MAX, &left_out);
}

Json ParseJsonUpTo(std::string_view text, size_t most, bool* left_out) {
  // The parser takes a zero byte for the end of the text and would not see what follows.
  if (const size_t zero = text.find('\0'); zero != std::string_view::npos) {
    throw std::invalid_argument(fmt::format("a zero byte at byte {}", zero + 1));
  }
  JsonBuilder builder(most);
  Json::sax_parse(text.begin(), text.end(), &builder);
  *left_out = builder.LeftOut();
  return builder.TakeRoot();
}

bool IsBigInteger(const Json& value) {
  return value.is_binary() && value.get_binary().has_subtype() &&
         value.get_binary().subtype() == kBigIntegerSubtype;
}

std::string BigIntegerDigits(const Json& value) {
  if (!IsBigInteger(value)) return {};
  const auto& digits = value.get_binary();
  return std::string(digits.begin(), digits.end());
}

namespace {

// At most this much of a value is repeated in a message.
constexpr size_t kShown = 60;

// What dump() gives, or a beginning of it of more than kShown bytes: a value may be as long as a
// line.
void AppendShort(const Json& value, std::string* out) {
  const bool object = value.is_object();
  if (value.is_string()) {
    // Each byte gives one or more, and the character that is cut stands behind what is shown.
    const std::string& text = value.get_ref<const std::string&>();
    *out += Json(text.substr(0, kShown + 4)).dump(-1, ' ', true, Json::error_handler_t::replace);
  } else if (object || value.is_array()) {
    *out += object ? '{' : '[';
    const char* separator = "";
    for (const auto& [key, member] : value.items()) {
      if (out->size() > kShown) return;
      *out += separator;
      if (object) {
        AppendShort(key, out);
        *out += ':';
      }
      AppendShort(member, out);
      separator = ",";
    }
    *out += object ? '}' : ']';
  } else {
    *out += value.dump();
  }
}

}  // namespace

std::string ShownJson(const Json& value) {
  if (IsBigInteger(value)) return BigIntegerDigits(value).substr(0, 40);
  std::string text;
  AppendShort(value, &text);
  if (text.size() > kShown) text = text.substr(0, kShown - 3) + "...";
  return text;
}

}  // namespace colibri
