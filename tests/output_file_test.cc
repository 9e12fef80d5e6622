#include "runtime/output_file.h"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "io/error.h"
#include "io/whole_file.h"
#include "tests/output_records.h"
#include "tests/temp_dir.h"

using colibri::FileSizeLimit;
using colibri::Has;
using colibri::IoError;
using colibri::OutputFile;
using colibri::OutputScan;
using colibri::ReadWhole;
using colibri::TempDir;
using colibri::TestRecord;

namespace {

std::string Simple(uint64_t line, int status = 200) {
  return TestRecord(line, "text " + std::to_string(line), "q-" + std::to_string(line), status);
}

std::string MessageOf(const OutputFile& file) {
  try {
    file.Scan();
  } catch (const IoError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("an output cut at any byte keeps its whole records and loses the rest") {
  const TempDir dir;
  const std::vector<std::string> records = {Simple(2), Simple(1, 400), Simple(5)};
  const std::string all = records[0] + records[1] + records[2];
  for (size_t length = 0; length <= all.size(); ++length) {
    const std::string path = dir.Write("out", all.substr(0, length));
    std::string expected;
    size_t whole = 0, at = 0;
    for (const std::string& record : records) {
      at += record.size();
      // A record without its line feed is complete.
      if (at - 1 > length) break;
      expected += record;
      ++whole;
    }
    OutputFile file(path);
    const OutputScan scan = file.Scan();
    CHECK(scan.finished.Count() == whole);
    file.Mend(scan);
    CHECK((ReadWhole(path) == expected));
    const OutputScan again = file.Scan();
    CHECK(again.finished.Count() == whole);
    CHECK(again.end.cut_bytes == 0);
    CHECK_FALSE(again.end.missing_feed);
  }
}

TEST_CASE("zeros of a power cut at the end are cut off, with and without line ends in them") {
  const TempDir dir;
  const std::string good = Simple(1);
  const std::string zeros(5000, '\0');
  for (const std::string& tail :
       {zeros, Simple(2).substr(0, 40) + zeros, zeros + "\n", zeros + "tail of a record}\n",
        zeros + "\n" + zeros, zeros + "a}\n{\"id\":" + zeros + "\n{\"id\":"}) {
    OutputFile file(dir.Write("out", good + tail));
    const OutputScan scan = file.Scan();
    CHECK(scan.finished.Count() == 1);
    CHECK(scan.end.cut_bytes == tail.size());
    file.Mend(scan);
    CHECK(ReadWhole(file.Path()) == good);
  }
}

TEST_CASE("a damaged line before others is an error with its number, and nothing is changed") {
  const TempDir dir;
  for (const std::string& damage :
       {std::string("{\"id\":\n"), std::string("\n"), std::string(10, '\0') + "\n"}) {
    const std::string text = Simple(1) + damage + Simple(3);
    OutputFile file(dir.Write("out", text));
    Has(MessageOf(file), "line 2 is no record");
    CHECK(ReadWhole(file.Path()) == text);
  }
}

TEST_CASE("a file of someone else's lines is refused, not cut") {
  const TempDir dir;
  const OutputFile file(dir.Write("out", "dear diary\ntoday\nI wrote\n"));
  Has(MessageOf(file), "line 1 is no record");
}

TEST_CASE("records of two inputs in one file are refused, the same record twice is not") {
  const TempDir dir;
  const OutputFile mixed(
      dir.Write("mixed", TestRecord(4, "one text", "a") + TestRecord(4, "another", "a")));
  Has(MessageOf(mixed), "input line 4");
  const OutputFile twice(dir.Write("twice", Simple(4) + Simple(4)));
  CHECK(twice.Scan().finished.Duplicates() == 1);
  const OutputFile huge(dir.Write("huge", TestRecord(uint64_t{1} << 40, "x", "a")));
  Has(MessageOf(huge), "impossible number");
}

TEST_CASE("an empty output has no records and needs no mending") {
  const TempDir dir;
  OutputFile file(dir.Path("out"));
  const OutputScan scan = file.Scan();
  CHECK(scan.finished.Empty());
  CHECK(scan.end.cut_bytes == 0);
  file.Mend(scan);
  CHECK(std::filesystem::file_size(file.Path()) == 0);
}

TEST_CASE("a second run on the same output is refused while the first holds it") {
  const TempDir dir;
  const std::string path = dir.Path("out");
  int ready[2], done[2];
  REQUIRE(pipe(ready) == 0);
  REQUIRE(pipe(done) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const OutputFile held(path);
    char byte = 1;
    (void)!write(ready[1], &byte, 1);
    (void)!read(done[0], &byte, 1);
    _exit(0);
  }
  char byte = 0;
  REQUIRE(read(ready[0], &byte, 1) == 1);
  std::string message;
  try {
    const OutputFile second(path);
  } catch (const IoError& error) {
    message = error.what();
  }
  Has(message, "is being written by ");
  Has(message, "process");
  REQUIRE(write(done[1], &byte, 1) == 1);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK_NOTHROW(OutputFile{path});
  for (const int fd : {ready[0], ready[1], done[0], done[1]}) close(fd);
}

TEST_CASE("the lock holds while the file is replaced and afterwards") {
  const TempDir dir;
  const std::string path = dir.Write("out", Simple(1) + Simple(2, 500));
  OutputFile file(path);
  file.Replace([&](const OutputFile::Append& append) {
    CHECK_THROWS_AS(OutputFile{path}, IoError);
    append("x");
  });
  CHECK_THROWS_AS(OutputFile{path}, IoError);
  colibri::WriteAll(file.Fd(), "y", path);
  CHECK(ReadWhole(path) == "xy");
}

TEST_CASE("failed lines are dropped and the others keep their bytes and order") {
  const TempDir dir;
  OutputFile file(dir.Write("out", Simple(3) + Simple(1, 400) + Simple(2) + Simple(9, 500)));
  file.DropFailed();
  CHECK(ReadWhole(file.Path()) == Simple(3) + Simple(2));
  colibri::WriteAll(file.Fd(), Simple(1), file.Path());
  CHECK(file.Scan().finished.Count() == 3);
}

TEST_CASE("sorting puts records in the order of lines and is stable") {
  const TempDir dir;
  const std::string first = TestRecord(2, "t", "q", 400, "first");
  const std::string second = TestRecord(2, "t", "q", 200, "second");
  OutputFile file(dir.Write("out", Simple(30) + first + Simple(1) + second + Simple(4)));
  file.SortByLine();
  CHECK(ReadWhole(file.Path()) == Simple(1) + first + second + Simple(4) + Simple(30));
}

TEST_CASE("a file in order is not rewritten") {
  const TempDir dir;
  OutputFile file(dir.Write("out", Simple(1) + Simple(4)));
  struct stat before {
  }, after{};
  REQUIRE(stat(file.Path().c_str(), &before) == 0);
  file.SortByLine();
  REQUIRE(stat(file.Path().c_str(), &after) == 0);
  CHECK(before.st_ino == after.st_ino);
}

TEST_CASE("a drive that fills up while the file is rewritten leaves it as it was") {
  const TempDir dir;
  std::string text;
  for (uint64_t line = 200; line > 0; --line) text += Simple(line, line % 2 == 0 ? 200 : 400);
  OutputFile file(dir.Write("out", text));
  {
    const FileSizeLimit full(text.size() / 4);
    CHECK_THROWS_AS(file.SortByLine(), IoError);
    CHECK_THROWS_AS(file.DropFailed(), IoError);
  }
  CHECK((ReadWhole(file.Path()) == text));
  CHECK_FALSE(std::filesystem::exists(file.Path() + ".part"));
  CHECK_THROWS_AS(OutputFile{file.Path()}, IoError);
  file.SortByLine();
  CHECK((ReadWhole(file.Path()).starts_with(Simple(1, 400))));
}

TEST_CASE("a link is followed, and permissions are kept") {
  const TempDir dir;
  const std::string real = dir.Write("real", Simple(2) + Simple(1));
  REQUIRE(chmod(real.c_str(), 0640) == 0);
  std::filesystem::create_symlink(real, dir.Path("link"));
  OutputFile file(dir.Path("link"));
  file.SortByLine();
  CHECK(std::filesystem::is_symlink(dir.Path("link")));
  CHECK(ReadWhole(real) == Simple(1) + Simple(2));
  struct stat info {};
  REQUIRE(stat(real.c_str(), &info) == 0);
  CHECK((info.st_mode & 0777) == 0640);
}

TEST_CASE("a file that was removed while it is open is written again and stays locked") {
  const TempDir dir;
  OutputFile file(dir.Write("out", Simple(2) + Simple(1)));
  CHECK(file.KeepNamed() == "");
  std::filesystem::remove(file.Path());
  CHECK(Has(file.KeepNamed(), "out was removed while it was written: written again"));
  CHECK(ReadWhole(file.Path()) == Simple(2) + Simple(1));
  CHECK_THROWS_AS(OutputFile{file.Path()}, IoError);
  file.SortByLine();
  CHECK(ReadWhole(file.Path()) == Simple(1) + Simple(2));
}

TEST_CASE("a file whose name was given away keeps its records and leaves the other one alone") {
  const TempDir dir;
  const std::string text = Simple(2) + Simple(1);
  const auto message = [](OutputFile& file) -> std::string {
    try {
      return file.KeepNamed();
    } catch (const IoError& error) {
      return error.what();
    }
  };
  {
    OutputFile saved(dir.Write("out", text));
    std::filesystem::remove(saved.Path());
    dir.Write("out", "other");
    CHECK_THROWS_AS(saved.SortByLine(), IoError);
    const std::string kept = saved.Path() + "." + std::to_string(getpid());
    CHECK(Has(message(saved), "the records are in " + kept));
    CHECK(ReadWhole(kept) == text);
    CHECK(ReadWhole(saved.Path()) == "other");
  }
  OutputFile moved(dir.Write("old", text));
  std::filesystem::rename(moved.Path(), dir.Path("new"));
  CHECK(Has(message(moved), "its records are in " + dir.Path("new")));
  CHECK(ReadWhole(dir.Path("new")) == text);
}

TEST_CASE("a device is written to and neither locked nor emptied") {
  OutputFile first("/dev/null");
  OutputFile second("/dev/null");
  CHECK_FALSE(first.Regular());
  CHECK(first.Size() == 0);
  CHECK_NOTHROW(first.Empty());
  CHECK_NOTHROW(colibri::WriteAll(second.Fd(), "x", "null"));
}

TEST_CASE("an output that cannot be opened is named") {
  const TempDir dir;
  CHECK_THROWS_WITH_AS(
      OutputFile(dir.Path("none/out")),
      ("opening " + dir.Path("none/out") + " failed: No such file or directory").c_str(), IoError);
}

TEST_CASE("only a file that this run created and left empty is discarded") {
  const TempDir dir;
  OutputFile fresh(dir.Path("fresh"));
  fresh.Discard();
  CHECK_FALSE(std::filesystem::exists(dir.Path("fresh")));
  OutputFile old(dir.Write("old", ""));
  old.Discard();
  CHECK(std::filesystem::exists(dir.Path("old")));
  OutputFile used(dir.Path("used"));
  colibri::WriteAll(used.Fd(), "x", "used");
  used.Discard();
  CHECK(std::filesystem::exists(dir.Path("used")));
}
