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
  std::string key;  // of an object: the key whose value comes next
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
  Json TakeRoot() { return std::move(root_); }

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
    open_.push_back({std::move(value), {}, {}});
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
    if (top.value.is_array()) {
      top.value.get_ref<Json::array_t&>().push_back(std::move(value));
    } else {
      // Not operator[] or emplace: ordered_map searches from the front for each new key.
      top.value.get_ref<Json::object_t&>().emplace_back(std::move(top.key), std::move(value));
    }
    return true;
  }

  Json root_;
  std::vector<OpenValue> open_;
};

}  // namespace

Json ParseJson(std::string_view text) {
  // The parser takes a zero byte for the end of the text and would not see what follows.
  if (const size_t zero = text.find('\0'); zero != std::string_view::npos) {
    throw std::invalid_argument(fmt::format("a zero byte at byte {}", zero + 1));
  }
  JsonBuilder builder;
  Json::sax_parse(text.begin(), text.end(), &builder);
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

std::string ShownJson(const Json& value) {
  if (IsBigInteger(value)) return BigIntegerDigits(value).substr(0, 40);
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

}  // namespace colibri
