#include "runtime/output_writer.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/output_records.h"

using colibri::FileSizeLimit;
using colibri::OutputWriter;
using State = OutputWriter::State;

namespace {

// Tokens whose records were taken, in order; Wait blocks until there are `count` of them.
class Taken {
 public:
  void Add(uint32_t token) {
    const std::lock_guard lock(mutex_);
    tokens_.push_back(token);
    changed_.notify_all();
  }
  std::vector<uint32_t> Wait(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return tokens_.size() >= count; });
    return tokens_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<uint32_t> tokens_;
};

OutputWriter::Options To(int fd, Taken* taken) {
  OutputWriter::Options options;
  options.fd = fd;
  options.name = "the test's output";
  options.on_written = [taken](uint32_t token) { taken->Add(token); };
  return options;
}

int TemporaryFile() {
  const int fd = memfd_create("output", 0);
  REQUIRE(fd >= 0);
  return fd;
}

std::string Content(int fd) {
  std::string text(static_cast<size_t>(lseek(fd, 0, SEEK_END)), '\0');
  REQUIRE(pread(fd, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
  return text;
}

}  // namespace

TEST_CASE("records are written in the order they were pushed, and each is reported once") {
  const int fd = TemporaryFile();
  Taken taken;
  std::string expected;
  {
    OutputWriter writer(To(fd, &taken));
    for (uint32_t i = 0; i < 500; ++i) {
      const std::string record = "record " + std::to_string(i) + '\n';
      expected += record;
      writer.Push(record, i);
    }
    CHECK(writer.Finish() == State::kOk);
    CHECK(writer.Finish() == State::kOk);
    CHECK(writer.Error().empty());
  }
  CHECK(Content(fd) == expected);
  const auto tokens = taken.Wait(500);
  REQUIRE(tokens.size() == 500);
  for (uint32_t i = 0; i < 500; ++i) CHECK(tokens[i] == i);
  close(fd);
}

TEST_CASE("a record is in the file before its sequence is given back") {
  const int fd = TemporaryFile();
  OutputWriter::Options options;
  options.fd = fd;
  std::string seen;
  options.on_written = [&](uint32_t) { seen = Content(fd); };
  OutputWriter writer(options);
  writer.Push("one\n", 3);
  writer.Finish();
  CHECK(seen == "one\n");
  close(fd);
}

TEST_CASE("what belongs to no sequence is written and not reported") {
  const int fd = TemporaryFile();
  Taken taken;
  OutputWriter writer(To(fd, &taken));
  writer.Push("a\n", OutputWriter::kNoToken);
  writer.Push("b\n", 1);
  writer.Finish();
  CHECK(taken.Wait(1) == std::vector<uint32_t>{1});
  CHECK(Content(fd) == "a\nb\n");
  close(fd);
}

TEST_CASE("a regular file is synced when the interval is over and at the end, only after writes") {
  const int fd = TemporaryFile();
  Taken taken, synced;
  auto options = To(fd, &taken);
  options.sync_interval = std::chrono::milliseconds(1);
  options.sync = [&](int which) {
    synced.Add(static_cast<uint32_t>(which));
    return 0;
  };
  {
    OutputWriter writer(options);
    writer.Push("a\n", 0);
    // Nothing more is pushed: the wait itself ends with the interval.
    CHECK(synced.Wait(1).size() == 1);
    CHECK(writer.Finish() == State::kOk);
  }
  CHECK(synced.Wait(1).size() == 1);
  options.sync_interval = std::chrono::hours(1);
  {
    OutputWriter writer(options);
    writer.Push("b\n", 1);
    CHECK(writer.Finish() == State::kOk);
  }
  CHECK(synced.Wait(2).size() == 2);
  close(fd);
}

TEST_CASE("a sync that fails is an error, and a pipe is never synced") {
  const int fd = TemporaryFile();
  int fds[2];
  REQUIRE(pipe2(fds, O_CLOEXEC) == 0);
  Taken taken;
  for (const int to : {fd, fds[1]}) {
    auto options = To(to, &taken);
    options.sync = [](int) {
      errno = EIO;
      return -1;
    };
    OutputWriter writer(options);
    writer.Push("a\n", 0);
    CHECK(writer.Finish() == (to == fd ? State::kFailed : State::kOk));
    CHECK(writer.Error() ==
          (to == fd ? "syncing the test's output failed: Input/output error" : ""));
  }
  close(fd);
  close(fds[0]);
  close(fds[1]);
}

TEST_CASE("a record larger than the pipe arrives whole") {
  int fds[2];
  REQUIRE(pipe2(fds, O_CLOEXEC) == 0);
  const std::string record(300000, 'x');
  std::string got;
  std::thread reader([&] {
    char buffer[4096];
    ssize_t n;
    while ((n = read(fds[0], buffer, sizeof buffer)) > 0)
      got.append(buffer, static_cast<size_t>(n));
  });
  Taken taken;
  {
    OutputWriter writer(To(fds[1], &taken));
    writer.Push(record, 0);
    CHECK(writer.Finish() == State::kOk);
  }
  close(fds[1]);
  reader.join();
  CHECK((got == record));
  close(fds[0]);
}

TEST_CASE("a non-blocking descriptor is waited for, not failed") {
  int fds[2];
  REQUIRE(pipe2(fds, O_CLOEXEC) == 0);
  REQUIRE(fcntl(fds[1], F_SETFL, O_NONBLOCK) == 0);
  size_t got = 0;
  Taken taken;
  OutputWriter writer(To(fds[1], &taken));
  writer.Push(std::string(300000, 'x'), 0);
  char buffer[4096];
  while (got < 300000) {
    const ssize_t n = read(fds[0], buffer, sizeof buffer);
    REQUIRE(n > 0);
    got += static_cast<size_t>(n);
  }
  CHECK(writer.Finish() == State::kOk);
  close(fds[0]);
  close(fds[1]);
}

TEST_CASE("a reader that went away is noticed without a signal, and sequences still come back") {
  int fds[2];
  REQUIRE(pipe2(fds, O_CLOEXEC) == 0);
  close(fds[0]);
  Taken taken;
  OutputWriter writer(To(fds[1], &taken));
  writer.Push("a\n", 4);
  writer.Push("b\n", 5);
  CHECK(taken.Wait(2) == std::vector<uint32_t>{4, 5});
  CHECK(writer.GetState() == State::kReaderGone);
  CHECK(writer.Error().empty());
  CHECK(writer.Finish() == State::kReaderGone);
  close(fds[1]);
}

TEST_CASE("a full drive is an error with its reason, and sequences still come back") {
  const int fd = open("/dev/full", O_WRONLY | O_CLOEXEC);
  REQUIRE(fd >= 0);
  Taken taken;
  OutputWriter writer(To(fd, &taken));
  writer.Push("a\n", 0);
  writer.Push("b\n", 1);
  CHECK(taken.Wait(2) == std::vector<uint32_t>{0, 1});
  CHECK(writer.GetState() == State::kFailed);
  CHECK(writer.Error() == "writing the test's output failed: No space left on device");
  CHECK(writer.Finish() == State::kFailed);
  close(fd);
}

TEST_CASE("a record that does not fit is taken back whole, and nothing is written after it") {
  const int fd = TemporaryFile();
  Taken taken;
  auto options = To(fd, &taken);
  options.advice = "make room and go on";
  OutputWriter writer(options);
  writer.Push("one record\n", 0);
  taken.Wait(1);
  {
    const FileSizeLimit full(15);
    writer.Push("two records\n", 1);
    writer.Push("3\n", 2);
    taken.Wait(3);
  }
  CHECK(writer.Finish() == State::kFailed);
  CHECK(writer.Error() == "writing the test's output failed: File too large; make room and go on");
  CHECK(Content(fd) == "one record\n");
  close(fd);
}

TEST_CASE("a line counts once its record is written whole, before its sequence is free") {
  const int fd = TemporaryFile();
  Taken taken, lines;
  auto options = To(fd, &taken);
  options.on_line = [&](const colibri::LineOutcome& line) {
    CHECK(taken.Wait(0).size() == line.line);
    lines.Add(static_cast<uint32_t>(line.line));
  };
  OutputWriter writer(options);
  const auto outcome = [](uint64_t line) {
    auto made = std::make_shared<colibri::LineOutcome>();
    made->line = line;
    return made;
  };
  {
    const FileSizeLimit full(15);
    writer.Push("one record\n", 0, outcome(0));
    writer.Push("", 1);
    writer.Push("two records\n", 2, outcome(2));
    writer.Push("3\n", 3, outcome(3));
    taken.Wait(4);
  }
  writer.Finish();
  CHECK(lines.Wait(0) == std::vector<uint32_t>{0});
  close(fd);
}

TEST_CASE("what another process appended behind a half record is not cut off") {
  const int fd = TemporaryFile();
  REQUIRE(write(fd, "old\n", 4) == 4);
  REQUIRE(pwrite(fd, "theirs\n", 7, 12) == 7);
  Taken taken;
  OutputWriter writer(To(fd, &taken));
  {
    const FileSizeLimit full(10);
    writer.Push("our record\n", 0);
    taken.Wait(1);
  }
  CHECK(writer.Finish() == State::kFailed);
  CHECK(Content(fd) == std::string("old\nour re\0\0theirs\n", 19));
  close(fd);
}

TEST_CASE("threads may push at the same time") {
  const int fd = TemporaryFile();
  Taken taken;
  {
    OutputWriter writer(To(fd, &taken));
    std::vector<std::thread> threads;
    for (uint32_t t = 0; t < 4; ++t) {
      threads.emplace_back([&writer, t] {
        for (uint32_t i = 0; i < 50; ++i) writer.Push("0123456789\n", t * 50 + i);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  CHECK(taken.Wait(200).size() == 200);
  std::string expected;
  for (int i = 0; i < 200; ++i) expected += "0123456789\n";
  CHECK(Content(fd) == expected);
  close(fd);
}
