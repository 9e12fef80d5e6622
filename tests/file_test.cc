// FileTable: opening, sizes, whole reads, the second descriptor for direct reads.
#include "io/file.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "io/error.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

std::string ErrorOf(const std::string& path) {
  FileTable files;
  try {
    files.Add(path);
  } catch (const IoError& error) {
    return error.what();
  }
  return "no error";
}

TEST_CASE("files are numbered in the order they are added and know path and size") {
  TempDir dir;
  FileTable files;
  CHECK(files.Count() == 0);
  CHECK(files.Add(dir.Write("a", "hello")) == 0);
  CHECK(files.Add(dir.Write("b", "")) == 1);
  CHECK(files.Count() == 2);
  CHECK(files.Size(0) == 5);
  CHECK(files.Size(1) == 0);
  CHECK(files.Path(1) == dir.Path("b"));
  CHECK(files.Fd(0) >= 0);
  CHECK(files.Fd(0) != files.Fd(1));
}

TEST_CASE("a file that cannot be opened is named with the reason") {
  TempDir dir;
  const std::string missing = ErrorOf(dir.Path("missing"));
  CHECK(missing.find(dir.Path("missing")) != std::string::npos);
  CHECK(missing.find("No such file") != std::string::npos);
  CHECK(ErrorOf(dir.Path("")).find("not a regular file") != std::string::npos);
}

TEST_CASE("a FIFO is refused and does not block the start") {
  TempDir dir;
  REQUIRE(mkfifo(dir.Path("pipe").c_str(), 0600) == 0);
  CHECK(ErrorOf(dir.Path("pipe")).find("not a regular file") != std::string::npos);
}

TEST_CASE("a whole read returns the bytes asked for at any offset") {
  TempDir dir;
  FileTable files;
  files.Add(dir.Write("a", PatternBytes(1, 10'000)));
  std::vector<std::byte> bytes(5'001);
  files.ReadExact(0, 4'999, bytes);
  CHECK(bytes.front() == PatternByte(1, 4'999));
  CHECK(bytes.back() == PatternByte(1, 9'999));
  files.ReadExact(0, 10'000, {});
}

TEST_CASE("a read past the end says how many bytes the file lacks") {
  TempDir dir;
  FileTable files;
  files.Add(dir.Write("a", std::string(100, 'x')));
  std::array<std::byte, 64> bytes{};
  std::string message;
  try {
    files.ReadExact(0, 90, bytes);
  } catch (const IoError& error) {
    message = error.what();
  }
  CHECK(message.find(dir.Path("a")) != std::string::npos);
  CHECK(message.find("54 bytes missing of 64 at offset 90") != std::string::npos);
}

TEST_CASE("direct reads get a descriptor of their own until the file gives them up") {
  TempDir dir;
  FileTable files;
  files.Add(dir.Write("a", PatternBytes(1, 8192)));
  CHECK_FALSE(files.IsDirect(0));
  CHECK(files.DirectFd(0) == files.Fd(0));
  const std::string report = files.EnableDirect();
  if (report.empty()) {
    CHECK(files.IsDirect(0));
    CHECK(files.DirectFd(0) != files.Fd(0));
    CHECK((fcntl(files.DirectFd(0), F_GETFL) & O_DIRECT) != 0);
    CHECK((fcntl(files.Fd(0), F_GETFL) & O_DIRECT) == 0);
  } else {
    CHECK(report.find(dir.Path("a")) != std::string::npos);
    CHECK_FALSE(files.IsDirect(0));
  }
  files.GiveUpDirect(0);
  CHECK_FALSE(files.IsDirect(0));
  CHECK(files.DirectFd(0) == files.Fd(0));
}

TEST_CASE("a file system that refuses direct reads is reported once and read buffered") {
  // procfs takes no O_DIRECT and holds regular files.
  FileTable files;
  files.Add("/proc/self/status");
  files.Add("/proc/self/stat");
  const std::string report = files.EnableDirect();
  CHECK(report.find("/proc/self/status") != std::string::npos);
  CHECK(report.find('\n') == std::string::npos);
  CHECK_FALSE(files.IsDirect(0));
  CHECK_FALSE(files.IsDirect(1));
  CHECK(files.DirectFd(1) == files.Fd(1));
}

TEST_CASE("a moved table keeps its files and the old one closes nothing") {
  TempDir dir;
  FileTable files;
  files.Add(dir.Write("a", "hello"));
  FileTable moved = std::move(files);
  std::array<std::byte, 5> bytes{};
  moved.ReadExact(0, 0, bytes);
  CHECK(bytes[4] == std::byte{'o'});
}

TEST_CASE("more files than the soft limit allows are opened when the hard limit allows them") {
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  rlimit low = before;
  low.rlim_cur = 32;
  REQUIRE(before.rlim_max > 128);
  REQUIRE(setrlimit(RLIMIT_NOFILE, &low) == 0);
  TempDir dir;
  FileTable files;
  const std::string path = dir.Write("a", "hello");
  for (int i = 0; i < 64; ++i) files.Add(path);
  CHECK(files.Count() == 64);
  setrlimit(RLIMIT_NOFILE, &before);
}

}  // namespace
}  // namespace colibri
