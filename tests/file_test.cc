// FileTable: opening, sizes, whole reads, the second descriptor for direct reads.
#include "io/file.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/error.h"
#include "io/reader.h"
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

std::string ScratchErrorOf(const std::string& directory, uint64_t bytes) {
  FileTable files;
  try {
    files.AddScratch(directory, bytes);
  } catch (const IoError& error) {
    CHECK(files.Count() == 0);
    return error.what();
  }
  return "no error";
}

TEST_CASE("a scratch file leaves no name, has its size at once and keeps what is written") {
  TempDir dir;
  FileTable files;
  files.Add(dir.Write("a", "hello"));
  CHECK(files.AddScratch(dir.Path(""), 3 * kIoAlign) == 1);
  CHECK(files.AddScratch(dir.Path(""), 2 * kIoAlign + 1) == 2);
  CHECK(files.Path(1) == "scratch file in " + dir.Path(""));
  CHECK(files.Size(1) == 3 * kIoAlign);
  CHECK(files.Size(2) == 3 * kIoAlign);
  const std::filesystem::directory_iterator names(dir.Path(""));
  CHECK(std::distance(begin(names), end(names)) == 1);
  struct stat info {};
  REQUIRE(fstat(files.Fd(1), &info) == 0);
  CHECK(info.st_nlink == 0);
  CHECK(static_cast<uint64_t>(info.st_size) == 3 * kIoAlign);
  std::array<std::byte, 2> bytes{std::byte{1}, std::byte{2}};
  files.ReadExact(1, 3 * kIoAlign - 2, bytes);
  CHECK(bytes[0] == std::byte{0});
  REQUIRE(pwrite(files.Fd(1), "xy", 2, 5000) == 2);
  files.ReadExact(1, 5000, bytes);
  CHECK(bytes[1] == std::byte{'y'});
}

TEST_CASE("the bytes of a scratch file are reserved on the drive") {
  TempDir dir;
  FileTable files;
  files.AddScratch(dir.Path(""), 64 * kIoAlign);
  struct stat info {};
  REQUIRE(fstat(files.Fd(0), &info) == 0);
  if (fallocate(files.Fd(0), 0, 0, 1) != 0 && errno == EOPNOTSUPP) {
    MESSAGE("the file system of the temporary directory reserves nothing: not tested");
    return;
  }
  CHECK(static_cast<uint64_t>(info.st_blocks) * 512 >= 64 * kIoAlign);
}

TEST_CASE("a scratch file without room says where, how much was wanted and how much is free") {
  TempDir dir;
  const std::string text = ScratchErrorOf(dir.Path(""), uint64_t{1} << 60);
  CHECK(text.find(dir.Path("") + ": 1152921504606846976 bytes wanted, ") != std::string::npos);
  CHECK(text.find(" free: No space left on device") != std::string::npos);
  CHECK(text.find(" 0 free") == std::string::npos);
  CHECK(ScratchErrorOf(dir.Path(""), UINT64_MAX).find("No space left") != std::string::npos);
}

TEST_CASE("a scratch file in a directory that is none says so by name") {
  TempDir dir;
  const std::string missing = ScratchErrorOf(dir.Path("missing"), kIoAlign);
  CHECK(missing ==
        "cannot make a scratch file in " + dir.Path("missing") + ": No such file or directory");
  const std::string file = ScratchErrorOf(dir.Write("a", "hello"), kIoAlign);
  CHECK(file.find("Not a directory") != std::string::npos);
}

// From now on this thread finds neither O_TMPFILE nor fallocate, as on some network file systems.
bool DenyNamelessAndReserving() {
  constexpr uint32_t kTmpFile = O_TMPFILE & ~O_DIRECTORY;
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_fallocate, 3, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_openat, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[2])),
      BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, kTmpFile, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EOPNOTSUPP),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter = {std::size(program), program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0;
}

TEST_CASE("a scratch file leaves no name where the file system makes no nameless ones either") {
  TempDir dir;
  FileTable files;
  // What a process left that was killed in between, long ago; others that are not that.
  const std::string left = dir.Write("colibri-scratch-killed", "");
  const std::vector<std::string> kept = {dir.Write("colibri-scratch-young", ""),
                                         dir.Write("colibri-scratch-full", "data"),
                                         dir.Write("mine", "")};
  const timespec long_ago[2] = {{1'000'000'000, 0}, {1'000'000'000, 0}};
  for (const std::string& path : {left, kept[1], kept[2]}) {
    REQUIRE(utimensat(AT_FDCWD, path.c_str(), long_ago, 0) == 0);
  }
  bool denied = false;
  std::thread sandbox([&] {
    denied = DenyNamelessAndReserving();
    if (denied) files.AddScratch(dir.Path(""), 2 * kIoAlign);
  });
  sandbox.join();
  if (!denied) {
    MESSAGE("seccomp filters cannot be set here: not tested");
    return;
  }
  struct stat info {};
  REQUIRE(fstat(files.Fd(0), &info) == 0);
  CHECK(info.st_nlink == 0);
  CHECK(info.st_blocks == 0);
  CHECK(static_cast<uint64_t>(info.st_size) == 2 * kIoAlign);
  CHECK_FALSE(std::filesystem::exists(left));
  for (const std::string& path : kept) CHECK(std::filesystem::remove(path));
  CHECK(std::filesystem::is_empty(dir.Path("")));
}

TEST_CASE("a scratch file is direct, for writes too, whether it comes before or after the others") {
  TempDir dir;
  FileTable files;
  files.AddScratch(dir.Path(""), kIoAlign);
  CHECK_FALSE(files.IsDirect(0));
  const std::string report = files.EnableDirect();
  files.AddScratch(dir.Path(""), kIoAlign);
  for (const uint32_t file : {0u, 1u}) {
    CHECK(files.IsDirect(file) == report.empty());
    if (!files.IsDirect(file)) continue;
    const int flags = fcntl(files.DirectFd(file), F_GETFL);
    CHECK((flags & O_DIRECT) != 0);
    CHECK((flags & O_ACCMODE) == O_RDWR);
    CHECK((fcntl(files.Fd(file), F_GETFL) & O_DIRECT) == 0);
  }
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
