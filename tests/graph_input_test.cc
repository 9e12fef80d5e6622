// Lines that come late, in pieces, broken or too long; output that is slow; a stop in the middle.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "runtime/prompt_source.h"
#include "tests/engine_lines.h"
#include "tests/engine_rig.h"

namespace colibri {
namespace {

// A line of a batch file; every fifth cannot be run, every ninth is longer than the context.
std::string BatchLine(uint64_t number) {
  const std::string id = fmt::format("id-{}", number);
  if (number % 10 == 5) return fmt::format("{{\"custom_id\": \"{}\", \"body\": 7}}", id);
  if (number % 10 == 7) return "{\"custom_id\": ";
  Request r = MixedLine(number).request;
  if (number % 9 == 0) r.prompt.resize(400, 11);
  nlohmann::json body = {{"model", "any"},
                         {"prompt", r.prompt},
                         {"max_tokens", r.max_tokens},
                         {"temperature", r.sampling.temperature == 0 ? 0.0 : 0.9},
                         {"seed", number},
                         {"n", r.choices}};
  if (r.logprobs) body["logprobs"] = 2;
  const nlohmann::json line = {
      {"custom_id", id}, {"method", "POST"}, {"url", "/v1/completions"}, {"body", body}};
  return line.dump();
}

std::string BatchFile(size_t lines) {
  std::string text;
  for (size_t i = 1; i <= lines; ++i) text += BatchLine(i) + "\n";
  return text;
}

PromptSource::Options SourceOptions(int fd) {
  PromptSource::Options options;
  options.fd = fd;
  options.format = InputFormat::kJsonl;
  return options;
}

RequestParser ParserOf(const TestModel& m) {
  return RequestParser(m.tokenizer, m.model.Config().vocab, RunConfig().context, {});
}

Outcome ExpectedOf(const TestModel& m, const std::string& text) {
  const int fd = memfd_create("batch", MFD_CLOEXEC);
  REQUIRE(fd >= 0);
  REQUIRE(pwrite(fd, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
  RequestParser parser = ParserOf(m);
  PromptSource source(SourceOptions(fd), parser);
  RunConfig c;
  c.sequences = 1;
  c.rows = 1;
  Outcome expected = RunSequentially(m, c, source);
  close(fd);
  return expected;
}

// Writes `text` into a pipe in pieces of random length, with pauses between them.
class Feeder {
 public:
  Feeder(const std::string& text, uint32_t seed) {
    REQUIRE(pipe2(fds_, O_CLOEXEC) == 0);
    thread_ = std::thread([this, text, seed] {
      std::mt19937 random(seed);
      for (size_t at = 0; at < text.size();) {
        const size_t bytes = std::min<size_t>(1 + random() % 700, text.size() - at);
        if (write(fds_[1], text.data() + at, bytes) != static_cast<ssize_t>(bytes)) break;
        at += bytes;
        for (uint32_t i = static_cast<uint32_t>(random()) % 400; i > 0; --i) {
          std::this_thread::yield();
        }
      }
      close(fds_[1]);
    });
  }
  ~Feeder() {
    // An engine that stopped reads no more: the feeder must not wait for it.
    char rest[4096];
    while (read(fds_[0], rest, sizeof rest) > 0) {
    }
    thread_.join();
    close(fds_[0]);
  }
  Feeder(const Feeder&) = delete;
  Feeder& operator=(const Feeder&) = delete;
  int Fd() const { return fds_[0]; }

 private:
  int fds_[2] = {-1, -1};
  std::thread thread_;
};

Outcome RunPiped(const TestModel& m, const RunConfig& c, const std::string& text,
                 const RunHooks& hooks = {}) {
  const Feeder feeder(text, c.seed);
  RequestParser parser = ParserOf(m);
  PromptSource source(SourceOptions(feeder.Fd()), parser);
  return RunGraph(m, c, source, hooks);
}

}  // namespace

TEST_CASE("lines that come through a pipe in pieces give the bytes they have in a file") {
  const TestModel& m = SmallModel();
  const std::string text = BatchFile(40);
  const Outcome expected = ExpectedOf(m, text);
  REQUIRE(expected.records.size() == 40);
  // Not vacuous: unparsable, ill-formed, over-long and good lines are all there.
  const auto errors = ErrorsOf(expected);
  CHECK(errors.at(9) == "context_length_exceeded");
  CHECK(errors.size() == 11);
  for (const bool slow_output : {false, true}) {
    for (const int32_t threads : {1, 2}) {
      for (const int32_t frames : {1, 2}) {
        RunConfig c;
        c.threads = threads;
        c.frames = frames;
        c.sequences = frames == 1 ? 3 : 20;
        c.rows = 16;
        c.slots = 6;
        c.pauses = slow_output;
        c.slow_output = slow_output;
        c.seed = static_cast<uint32_t>(threads * 2 + frames);
        INFO(c.Text());
        const Outcome got = RunPiped(m, c, text);
        CheckSameLines(got, expected);
        CHECK(ErrorsOf(got) == errors);
      }
    }
  }
}

TEST_CASE("a last line without a line end is answered when the pipe closes") {
  std::string text = BatchFile(3);
  text.pop_back();
  CHECK(RunPiped(SmallModel(), {}, text).records.size() == 3);
}

TEST_CASE("an empty pipe ends the run when it closes") {
  CHECK(RunPiped(SmallModel(), {}, "").records.empty());
  CHECK(RunPiped(SmallModel(), {}, "\n\n  \n").records.empty());
}

TEST_CASE("more lines than sequences wait for slow output and all come out") {
  const std::vector<TestLine> lines = MixedLines(60);
  const Outcome expected = LineByLine(SmallModel(), lines);
  for (const int32_t sequences : {1, 2, 9}) {
    RunConfig c;
    c.threads = 2;
    c.frames = 2;
    c.sequences = sequences;
    c.slow_output = true;
    c.pauses = true;
    INFO(c.Text());
    CheckSameLines(RunGraph(SmallModel(), c, lines), expected);
  }
}

TEST_CASE("a file of broken and over-long lines alone gives a record for each") {
  std::vector<TestLine> lines = MixedLines(50);
  for (TestLine& line : lines) {
    if (line.request.line % 2 == 0) {
      line.error = LineError{400, "invalid_request", "no", "body"};
    } else {
      line.request.prompt.resize(500, 3);
    }
  }
  for (const int32_t sequences : {1, 7, 60}) {
    for (const bool slow_output : {false, true}) {
      RunConfig c;
      c.frames = 2;
      c.sequences = sequences;
      c.slow_output = slow_output;
      INFO(c.Text());
      const auto errors = ErrorsOf(RunGraph(SmallModel(), c, lines));
      CHECK(errors.size() == 50);
      CHECK(errors.at(1) == "context_length_exceeded");
      CHECK(errors.at(2) == "invalid_request");
    }
  }
}

TEST_CASE("a stop in the middle writes whole records only, each as it would have been") {
  const std::vector<TestLine> lines = MixedLines(40);
  const Outcome expected = LineByLine(SmallModel(), lines);
  for (const int32_t frames : {1, 2}) {
    for (const size_t after : {size_t{1}, size_t{5}, size_t{20}}) {
      RunConfig c;
      c.threads = 2;
      c.frames = frames;
      c.sequences = 4;
      c.slots = 5;
      c.pauses = true;
      RunHooks hooks;
      hooks.written = [after](Engine& engine, size_t count) {
        if (count == after) engine.Stop();
      };
      INFO(c.Text());
      const Outcome got = RunGraph(SmallModel(), c, lines, hooks);
      CHECK(got.records.size() >= after);
      CHECK(got.records.size() < lines.size());
      for (const auto& record : got.records) {
        CHECK(LineBytes(record.second) == LineBytes(expected.records.at(record.first)));
      }
    }
  }
}

TEST_CASE("a stop before the run begins no sweep") {
  RunHooks hooks;
  hooks.before_run = [](Engine& engine) { engine.Stop(); };
  const Outcome got = RunGraph(SmallModel(), {}, MixedLines(5), hooks);
  CHECK(got.records.empty());
  CHECK(got.stats.scheduler.frames_filled == 0);
}

TEST_CASE("a stop wakes an engine that waits for input") {
  // The first line is answered, the pipe stays open and silent.
  int fds[2];
  REQUIRE(pipe2(fds, O_CLOEXEC) == 0);
  const std::string text = BatchLine(1) + "\n";
  REQUIRE(write(fds[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  RequestParser parser = ParserOf(SmallModel());
  PromptSource source(SourceOptions(fds[0]), parser);
  RunHooks hooks;
  hooks.written = [](Engine& engine, size_t) { engine.Stop(); };
  CHECK(RunGraph(SmallModel(), {}, source, hooks).records.size() == 1);
  close(fds[0]);
  close(fds[1]);
}

}  // namespace colibri
