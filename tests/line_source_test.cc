#include "runtime/line_source.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/temp_dir.h"

using colibri::FormatFromLine;
using colibri::FormatFromName;
using colibri::InputFormat;
using colibri::LineSource;
using colibri::TempDir;
using Next = LineSource::Next;

constexpr size_t kCap = size_t{1} << 20;

namespace {

class Pipe {
 public:
  Pipe() { REQUIRE(pipe2(fds_, O_CLOEXEC) == 0); }
  ~Pipe() {
    CloseWriter();
    close(fds_[0]);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  int Reader() const { return fds_[0]; }
  void Write(std::string_view text) {
    REQUIRE(write(fds_[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  }
  void CloseWriter() {
    if (fds_[1] >= 0) close(fds_[1]);
    fds_[1] = -1;
  }

 private:
  int fds_[2] = {-1, -1};
};

using Lines = std::vector<std::pair<uint64_t, std::string>>;

// All lines of a pipe that is closed after `text`.
Lines LinesOf(std::string_view text) {
  Pipe pipe;
  pipe.Write(text);
  pipe.CloseWriter();
  LineSource source(pipe.Reader(), kCap);
  Lines lines;
  std::string line;
  uint64_t number = 0;
  Next next;
  while ((next = source.TryNext(&line, &number)) == Next::kLine) lines.emplace_back(number, line);
  CHECK(next == Next::kEnd);
  CHECK(source.AtEnd());
  return lines;
}

}  // namespace

TEST_CASE("blank lines are skipped and counted") {
  CHECK(LinesOf("\n a \n\n \t \nb\n") == Lines{{2, " a "}, {5, "b"}});
  CHECK(LinesOf("") == Lines{});
  CHECK(LinesOf("\n\n") == Lines{});
}

TEST_CASE("a last line without a line end is a line") {
  CHECK(LinesOf("a\nb") == Lines{{1, "a"}, {2, "b"}});
  CHECK(LinesOf("a\n \t") == Lines{{1, "a"}});
}

TEST_CASE("CR LF ends a line, a CR elsewhere belongs to it") {
  CHECK(LinesOf("a\r\nb\rc\r\n\r\nd\r") == Lines{{1, "a"}, {2, "b\rc"}, {4, "d"}});
}

TEST_CASE("a byte order mark is skipped at the very beginning only") {
  CHECK(LinesOf("\xEF\xBB\xBF{}\n\xEF\xBB\xBFx\n") == Lines{{1, "{}"}, {2, "\xEF\xBB\xBFx"}});
  CHECK(LinesOf("\xEF\xBB\xBF\na\n") == Lines{{2, "a"}});
}

TEST_CASE("bytes that are no text pass through unchanged") {
  const std::string text("a\0b\xff\n", 5);
  CHECK(LinesOf(text) == Lines{{1, text.substr(0, 4)}});
}

TEST_CASE("a slow pipe gives a line once it is whole and never blocks") {
  Pipe pipe;
  LineSource source(pipe.Reader(), kCap);
  std::string line;
  uint64_t number = 0;
  CHECK(source.TryNext(&line, &number) == Next::kAgain);
  pipe.Write("ha");
  CHECK(source.TryNext(&line, &number) == Next::kAgain);
  CHECK_FALSE(source.Buffered());
  CHECK_FALSE(source.AtEnd());
  pipe.Write("lf\nsecond\nthi");
  CHECK(source.TryNext(&line, &number) == Next::kLine);
  CHECK(line == "half");
  CHECK(source.Buffered());
  CHECK(source.TryNext(&line, &number) == Next::kLine);
  CHECK(line == "second");
  CHECK_FALSE(source.Buffered());
  CHECK(source.TryNext(&line, &number) == Next::kAgain);
  pipe.CloseWriter();
  CHECK(source.TryNext(&line, &number) == Next::kLine);
  CHECK(line == "thi");
  CHECK(number == 3);
  CHECK(source.AtEnd());
  CHECK(source.TryNext(&line, &number) == Next::kEnd);
}

TEST_CASE("zeros without end are passed in portions") {
  const int fd = open("/dev/zero", O_RDONLY | O_CLOEXEC);
  LineSource source(fd, kCap);
  std::string line;
  uint64_t number = 0;
  CHECK(source.TryNext(&line, &number) == Next::kTooLong);
  for (int call = 0; call < 3; ++call) {
    const uint64_t before = source.TakenBytes();
    CHECK(source.TryNext(&line, &number) == Next::kSkipped);
    CHECK(source.TakenBytes() - before <= uint64_t{2} << 20);
  }
  CHECK(number == 1);
  close(fd);
}

TEST_CASE("a portion of blank lines ends a call, the line behind them keeps its number") {
  const TempDir dir;
  const int fd = open(dir.Write("in", std::string(size_t{3} << 20, '\n') + "a\n").c_str(),
                      O_RDONLY | O_CLOEXEC);
  LineSource source(fd, kCap);
  std::string line;
  uint64_t number = 0;
  int skips = 0;
  Next next;
  while ((next = source.TryNext(&line, &number)) == Next::kSkipped) ++skips;
  CHECK(next == Next::kLine);
  CHECK(line == "a");
  CHECK(number == (uint64_t{3} << 20) + 1);
  CHECK(skips == 3);
  close(fd);
}

TEST_CASE("a line over the cap is reported once and skipped to its end") {
  Pipe pipe;
  LineSource source(pipe.Reader(), 10);
  std::string line;
  uint64_t number = 0;
  pipe.Write("0123456789\n0123456789a\nb\n" + std::string(30, 'x'));
  CHECK(source.TryNext(&line, &number) == Next::kLine);
  CHECK(line == "0123456789");
  CHECK(source.TryNext(&line, &number) == Next::kTooLong);
  CHECK(number == 2);
  CHECK(source.TryNext(&line, &number) == Next::kLine);
  CHECK(line == "b");
  CHECK(number == 3);
  CHECK(source.TryNext(&line, &number) == Next::kTooLong);
  CHECK(number == 4);
  pipe.Write(std::string(500, 'y'));
  CHECK(source.TryNext(&line, &number) == Next::kAgain);
  CHECK_FALSE(source.Buffered());
  pipe.Write("\nc\n");
  CHECK(source.TryNext(&line, &number) == Next::kLine);
  CHECK(line == "c");
  CHECK(number == 5);
}

TEST_CASE("lines at the cap that follow each other stay whole, and none of their bytes moves far") {
  // 700 KB: several reads a line, and no room for two lines beside each other.
  constexpr size_t kBytes = 700'000;
  const int fd = memfd_create("lines", 0);
  REQUIRE(fd >= 0);
  std::string text;
  for (char c = 'a'; c < 'i'; ++c) {
    // Every other line is one byte too long.
    text += std::string(kBytes + static_cast<size_t>((c - 'a') % 2), c) + '\n';
  }
  REQUIRE(write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  REQUIRE(lseek(fd, 0, SEEK_SET) == 0);
  LineSource source(fd, kBytes);
  std::string line;
  uint64_t number = 0;
  for (char c = 'a'; c < 'i'; ++c) {
    if ((c - 'a') % 2 == 1) {
      REQUIRE(source.TryNext(&line, &number) == Next::kTooLong);
      continue;
    }
    REQUIRE(source.TryNext(&line, &number) == Next::kLine);
    CHECK((line == std::string(kBytes, c)));
  }
  CHECK(source.TryNext(&line, &number) == Next::kEnd);
  CHECK(number == 8);
  close(fd);
}

TEST_CASE("lines longer than what one read brings stay whole") {
  const int fd = memfd_create("lines", 0);
  REQUIRE(fd >= 0);
  std::string text;
  for (size_t i = 0; i < 7; ++i) {
    text += std::string(100000 + 77777 * i, static_cast<char>('a' + i)) + '\n';
  }
  REQUIRE(write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  REQUIRE(lseek(fd, 0, SEEK_SET) == 0);
  LineSource source(fd, kCap);
  std::string line;
  uint64_t number = 0;
  for (size_t i = 0; i < 7; ++i) {
    REQUIRE(source.TryNext(&line, &number) == Next::kLine);
    CHECK(number == i + 1);
    CHECK((line == std::string(100000 + 77777 * i, static_cast<char>('a' + i))));
  }
  CHECK(source.TryNext(&line, &number) == Next::kEnd);
  close(fd);
}

TEST_CASE("a read error is reported with its reason and stays") {
  const int directory = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  REQUIRE(directory >= 0);
  LineSource source(directory, kCap);
  std::string line;
  uint64_t number = 0;
  CHECK(source.TryNext(&line, &number) == Next::kError);
  CHECK(source.Error() == "reading the input failed after line 0: Is a directory");
  CHECK(source.TryNext(&line, &number) == Next::kError);
  CHECK(source.AtEnd());
  close(directory);
}

TEST_CASE("the format follows the name, else the first byte that is not blank") {
  CHECK(FormatFromName("a/b.jsonl") == InputFormat::kJsonl);
  CHECK(FormatFromName("b.json") == InputFormat::kJsonl);
  CHECK_FALSE(FormatFromName("prompts.txt").has_value());
  CHECK_FALSE(FormatFromName("-").has_value());
  CHECK(FormatFromLine("  {\"a\": 1}") == InputFormat::kJsonl);
  CHECK(FormatFromLine("[1]") == InputFormat::kJsonl);
  CHECK(FormatFromLine("Tell me {more}") == InputFormat::kLines);
}
