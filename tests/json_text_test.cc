#include "runtime/json_text.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace colibri {
namespace {

using Json = nlohmann::ordered_json;

// The text of the error, or "" if the text parses.
std::string ErrorOf(std::string_view text) {
  try {
    ParseJson(text);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("values keep their kinds and objects the order of their keys") {
  const Json value =
      ParseJson(" {\"z\": [1, -2, 1.0, true, null, \"s\\u00e9\"], \"a\": {}, \"m\": []} \n");
  REQUIRE(value.is_object());
  std::string keys;
  for (const auto& member : value.items()) keys += member.key();
  CHECK(keys == "zam");
  CHECK(value["z"][0].is_number_unsigned());
  CHECK(value["z"][1].get<int>() == -2);
  CHECK(value["z"][2].is_number_float());
  CHECK(value["z"][3].get<bool>());
  CHECK(value["z"][4].is_null());
  CHECK(value["z"][5].get<std::string>() == "s\xc3\xa9");
  CHECK(value["a"].is_object());
  CHECK(value["m"].is_array());
}

TEST_CASE("integers beyond 64 bits keep every digit") {
  const Json value = ParseJson(
      "[18446744073709551615, 18446744073709551616, -9223372036854775808, "
      "-9223372036854775809, 1e30]");
  CHECK(value[0].get<uint64_t>() == UINT64_MAX);
  CHECK_FALSE(IsBigInteger(value[0]));
  CHECK(IsBigInteger(value[1]));
  CHECK(BigIntegerDigits(value[1]) == "18446744073709551616");
  CHECK_FALSE(value[1].is_number());
  CHECK(value[2].get<int64_t>() == INT64_MIN);
  CHECK(BigIntegerDigits(value[3]) == "-9223372036854775809");
  CHECK(value[4].get<double>() == 1e30);
  CHECK(BigIntegerDigits(value[4]) == "");
}

TEST_CASE("a key that stands twice in an object is an error naming it") {
  CHECK(Contains(ErrorOf(R"({"a": 1, "bee": 2, "bee": 3})"), "\"bee\""));
  CHECK(Contains(ErrorOf(R"({"\u0062": 1, "b": 3})"), "\"b\""));
  CHECK(ErrorOf(R"([{"a": 1}, {"a": {"a": 2}}])") == "");
}

TEST_CASE("an object of 100,000 keys parses and a late duplicate is found") {
  std::string text = "{";
  for (int i = 0; i < 100000; ++i) text += "\"k" + std::to_string(i) + "\":0,";
  CHECK(ParseJson(text + "\"last\":1}").size() == 100001);
  CHECK(Contains(ErrorOf(text + "\"k3\":1}"), "\"k3\""));
  CHECK(Contains(ErrorOf(text + "\"k99999\":1}"), "\"k99999\""));
}

TEST_CASE("nesting of 512 levels is the deepest accepted") {
  const auto nested = [](size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  CHECK(ErrorOf(nested(512)) == "");
  CHECK(Contains(ErrorOf(nested(513)), "512"));
  CHECK(Contains(ErrorOf(std::string(1000000, '[')), "512"));
}

TEST_CASE("what is not exactly one JSON text is refused with its position") {
  CHECK(Contains(ErrorOf("{\"a\": tru}"), "at byte 10"));
  for (const char* text : {"", " ", "{} x", "[1,]", "{\"a\":1,}", "[01]", "NaN", "[Infinity]",
                           "'a'", "{a: 1}", "[1 2]", "\"open", "{\"a\":1", "// c\n1", "1e400",
                           "[\"tab\tinside\"]", "[\"\\ud800\"]", "[\"\\x\"]"}) {
    CAPTURE(text);
    CHECK(ErrorOf(text) != "");
  }
  CHECK(ErrorOf(std::string(400, '9')) != "");
}

TEST_CASE("invalid UTF-8 is refused by a message that is itself valid") {
  for (const char* text : {"\"\xff\"", "\"a\xc3\"", "\"\xed\xa0\x80\"", "\"\xc0\x80\"",
                           "\"\xf4\x90\x80\x80\"", "\xff\xfe"}) {
    CAPTURE(text);
    const std::string error = ErrorOf(text);
    CHECK(error != "");
    for (const char c : error) CHECK(static_cast<unsigned char>(c) < 0x80);
  }
}

TEST_CASE("a zero byte inside a text is a character of a string or an error, never an end") {
  CHECK(ParseJson("\"a\\u0000b\"").get<std::string>() == std::string("a\0b", 3));
  CHECK(ErrorOf(std::string_view("1\0 2", 4)) != "");
}

TEST_CASE("of more values than asked for the later ones are read and left out") {
  bool left_out = true;
  const std::string text = R"({"a":[1,2,3],"b":{"c":[[],[]]},"custom_id":"x","d":4})";
  CHECK(ParseJsonUpTo(text, 10, &left_out) == ParseJson(text));
  CHECK_FALSE(left_out);
  const auto kept = [&](size_t most) {
    std::string kept_text = ParseJsonUpTo(text, most, &left_out).dump();
    CHECK(left_out);
    return kept_text;
  };
  CHECK(kept(9) == R"({"a":[1,2,3],"b":{"c":[[],[]]},"custom_id":"x"})");
  CHECK(kept(5) == R"({"a":[1,2,3],"b":{"c":[[]]},"custom_id":"x"})");
  CHECK(kept(2) == R"({"a":[1,2],"custom_id":"x"})");
  CHECK(kept(0) == R"({"custom_id":"x"})");
  // What is left out is still checked.
  CHECK_THROWS_AS(ParseJsonUpTo("[1,2,x]", 1, &left_out), std::invalid_argument);
  CHECK_THROWS_AS(ParseJsonUpTo(R"({"custom_id":"x","custom_id":"y"})", 0, &left_out),
                  std::invalid_argument);
  CHECK_THROWS_AS(
      ParseJsonUpTo("[0," + std::string(600, '[') + std::string(600, ']') + "]", 1, &left_out),
      std::invalid_argument);
}

}  // namespace
}  // namespace colibri
