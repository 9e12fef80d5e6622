#include "runtime/record_reader.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "io/error.h"
#include "runtime/finished_lines.h"
#include "runtime/record.h"
#include "tests/output_records.h"

using colibri::FinishedLines;
using colibri::HashText;
using colibri::ReadRecordFacts;
using colibri::RecordReader;
using colibri::TestRecord;

namespace {

class Bytes {
 public:
  explicit Bytes(const std::string& text) : fd_(memfd_create("records", 0)) {
    REQUIRE(write(fd_, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  }
  ~Bytes() { close(fd_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  int Fd() const { return fd_; }

 private:
  int fd_;
};

colibri::RecordFacts Facts(uint64_t line, uint64_t hash, uint64_t id, bool failed = false) {
  return {line, hash, id, failed};
}

}  // namespace

TEST_CASE("the facts of a record are read without its other parts") {
  const auto facts = ReadRecordFacts(TestRecord(7, "the line", "q-7"));
  REQUIRE(facts.has_value());
  CHECK(facts->line == 7);
  CHECK(facts->line_hash == HashText("the line"));
  CHECK(facts->id_hash == HashText("q-7"));
  CHECK_FALSE(facts->failed);
  CHECK(ReadRecordFacts(TestRecord(7, "x", "q-7", 400))->failed);
  CHECK(ReadRecordFacts(TestRecord(7, "x", ""))->id_hash == HashText(""));
}

TEST_CASE("what the record builder writes for failed lines is a record") {
  const colibri::LineError error{400, "c", "m", ""};
  colibri::RecordContext context;
  const auto facts = ReadRecordFacts(colibri::BuildErrorRecord(3, "id", error, context, 0xab));
  REQUIRE(facts.has_value());
  CHECK(facts->line == 3);
  CHECK(facts->line_hash == 0xab);
  CHECK(facts->failed);
}

TEST_CASE("keys of the same name deeper in a record do not count") {
  const auto facts = ReadRecordFacts(
      R"({"x":{"line":1,"custom_id":5,"status_code":1},"line":2,"line_hash":"00000000000000ff",)"
      R"("custom_id":"a","response":{"body":{"status_code":7,"response":{}},"status_code":200,)"
      R"("list":[{"status_code":9},[1,-1,1.5,true,null]]},"y":{"status_code":3}})");
  REQUIRE(facts.has_value());
  CHECK(facts->line == 2);
  CHECK_FALSE(facts->failed);
}

TEST_CASE("anything that is not one whole record is none") {
  const std::string good = TestRecord(7, "the line", "q-7");
  const auto changed = [&good](const std::string& from, const std::string& to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    return text;
  };
  for (const std::string& text : {std::string(),
                                  std::string("{}"),
                                  std::string("[1]"),
                                  std::string("7"),
                                  std::string("null"),
                                  std::string("\"text\""),
                                  "[" + good + "]",
                                  good + good,
                                  good + "x",
                                  changed("\"line\":7", "\"line\":\"7\""),
                                  changed("\"line\":7", "\"line\":0"),
                                  changed("\"line\":7", "\"line\":-7"),
                                  changed("\"line\":7", "\"line\":7.5"),
                                  changed("\"line\":7", "\"line\":[7]"),
                                  changed("\"line\":7", "\"line\":{}"),
                                  changed("\"line\":7", "\"line\":null"),
                                  changed("\"line\":7", "\"line\":7,\"line\":7"),
                                  changed("\"line\":7", "\"lines\":7"),
                                  changed("\"q-7\"", "7"),
                                  changed("\"q-7\"", "\"\xff\""),
                                  changed("\"status_code\":200", "\"status_code\":\"200\""),
                                  changed("\"line_hash\":\"", "\"line_hash\":\"0"),
                                  changed("\"response\":", "\"answer\":")}) {
    INFO(text);
    CHECK_FALSE(ReadRecordFacts(text).has_value());
  }
}

TEST_CASE("a record cut at any byte is none") {
  std::string record = TestRecord(7, "the line", "q-7");
  record.pop_back();
  for (size_t length = 0; length < record.size(); ++length) {
    CHECK_FALSE(ReadRecordFacts(std::string_view(record).substr(0, length)).has_value());
  }
}

TEST_CASE("lines come with their place, also those longer than what one read brings") {
  const std::string longer(3000000, 'x');
  const Bytes file("a\n\n" + longer + "\nend");
  RecordReader reader(file.Fd(), "file");
  RecordReader::Line line;
  REQUIRE(reader.Next(&line));
  CHECK(line.text == "a");
  CHECK(line.terminated);
  REQUIRE(reader.Next(&line));
  CHECK(line.text == "");
  CHECK(line.begin == 2);
  CHECK(line.end == 3);
  REQUIRE(reader.Next(&line));
  CHECK((line.text == longer));
  CHECK(line.begin == 3);
  REQUIRE(reader.Next(&line));
  CHECK(line.number == 4);
  CHECK(line.text == "end");
  CHECK_FALSE(line.terminated);
  CHECK(line.end == 3000000 + 7);
  CHECK_FALSE(reader.Next(&line));
}

TEST_CASE("zeros are noticed in any part of a line and not kept") {
  const Bytes file("a\n" + std::string(2500000, '\0') + "b\nx" + std::string(1, '\0') + "\nc\n");
  RecordReader reader(file.Fd(), "file");
  RecordReader::Line line;
  REQUIRE(reader.Next(&line));
  CHECK_FALSE(line.zeros);
  REQUIRE(reader.Next(&line));
  CHECK(line.zeros);
  CHECK(line.text.empty());
  CHECK(line.end == 2500004);
  REQUIRE(reader.Next(&line));
  CHECK(line.zeros);
  REQUIRE(reader.Next(&line));
  CHECK_FALSE(line.zeros);
  CHECK(line.text == "c");
}

TEST_CASE("a file that became shorter is an error, not a short record") {
  const Bytes file("abc");
  std::string record;
  colibri::ReadAt(file.Fd(), "file", 1, 2, &record);
  CHECK(record == "bc");
  CHECK_THROWS_AS(colibri::ReadAt(file.Fd(), "file", 1, 3, &record), colibri::IoError);
}

TEST_CASE("finished lines are in order whatever order their records had") {
  FinishedLines lines;
  for (const uint64_t line : {5u, 1u, 9u, 3u}) REQUIRE(lines.Add(Facts(line, line * 10, line)));
  CHECK_FALSE(lines.Settle().has_value());
  REQUIRE(lines.Count() == 4);
  CHECK(lines.At(0).line == 1);
  CHECK(lines.At(3).line == 9);
  CHECK(lines.At(3).line_hash == 90);
  lines.DropFirst();
  CHECK(lines.At(0).line == 3);
}

TEST_CASE("two records of a line count once, as finished if one of them is, and must agree") {
  FinishedLines lines;
  lines.Add(Facts(2, 20, 7, true));
  lines.Add(Facts(1, 10, 7));
  lines.Add(Facts(2, 20, 7, false));
  CHECK_FALSE(lines.Settle().has_value());
  CHECK(lines.Count() == 2);
  CHECK(lines.Duplicates() == 1);
  CHECK(lines.Failed() == 0);
  FinishedLines hashes;
  hashes.Add(Facts(4, 1, 7));
  hashes.Add(Facts(4, 2, 7));
  CHECK(hashes.Settle() == 4);
  FinishedLines ids;
  ids.Add(Facts(4, 1, 7));
  ids.Add(Facts(4, 1, 8));
  CHECK(ids.Settle() == 4);
}

TEST_CASE("the largest line number fits and a larger one is refused") {
  FinishedLines lines;
  CHECK(lines.Add(Facts(FinishedLines::kMaxLine, ~uint64_t{0}, ~uint64_t{0}, true)));
  CHECK_FALSE(lines.Add(Facts(FinishedLines::kMaxLine + 1, 0, 0)));
  lines.Settle();
  CHECK(lines.At(0).line == FinishedLines::kMaxLine);
  CHECK(lines.At(0).line_hash == ~uint64_t{0});
  CHECK(lines.At(0).id_hash == FinishedLines::ShortId(~uint64_t{0}));
  CHECK(lines.At(0).failed);
}
