// The scheduler with a scripted input, small pages and no weights: who gets rows, who waits, who
// gives pages back, and that everybody ends. Latents stand for what a real frame stores: each row
// checks that all positions before it still hold its sequence's values.
#include "runtime/scheduler.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/verify.h"

namespace colibri {
namespace {

constexpr int32_t kPageTokens = 4;

const Model& Headers() {
  static const Model model({COLIBRI_SOURCE_DIR "/tests/fixtures/tiny/model"});
  return model;
}

const Tokenizer& TheTokenizer() {
  static const Tokenizer tokenizer =
      Tokenizer::Load(COLIBRI_SOURCE_DIR "/tests/fixtures/tokenizer/tokenizer.json");
  return tokenizer;
}

KvShape Shape() {
  KvShape shape;
  shape.layers = 1;
  shape.latent_width = 1;
  shape.has_index = {false};
  shape.page_tokens = kPageTokens;
  shape.type = KvType::kF32;
  return shape;
}

class FakeSource final : public RequestSource {
 public:
  Next TryNext(Request* request, std::optional<LineError>* error) override {
    if (lines_.empty()) return ended_ ? Next::kEnd : Next::kAgain;
    *request = std::move(lines_.front().first);
    *error = std::move(lines_.front().second);
    lines_.pop_front();
    return Next::kRequest;
  }
  int Fd() const override { return -1; }
  bool Buffered() const override { return !lines_.empty(); }

  // A line of `prompt` tokens that asks for `max_tokens` (0: what the context has room for).
  void Add(int32_t prompt, int32_t max_tokens, int32_t choices = 1) {
    Request request;
    request.line = ++count_;
    request.custom_id = std::to_string(count_);
    request.loop_stop = false;
    for (int32_t i = 0; i < prompt; ++i) request.prompt.push_back(10 + i % 100);
    request.max_tokens = max_tokens;
    request.choices = choices;
    lines_.emplace_back(std::move(request), std::nullopt);
  }
  void AddError(const LineError& error) {
    Request request;
    request.line = ++count_;
    lines_.emplace_back(std::move(request), error);
  }
  void End() { ended_ = true; }

 private:
  std::deque<std::pair<Request, std::optional<LineError>>> lines_;
  uint64_t count_ = 0;
  bool ended_ = false;
};

// What a finished choice leaves behind.
struct Finished {
  uint64_t line = 0;
  int32_t choice = 0;
  std::vector<int32_t> tokens;
  std::optional<LineError> error;
  StopCause cause = StopCause::kNone;
};

int32_t TokenOf(uint64_t line, int32_t choice, int32_t position) {
  return 200 + static_cast<int32_t>(line * 31 + static_cast<uint64_t>(choice * 17 + position)) % 99;
}

struct Rig {
  Rig(SchedulerOptions options, int32_t pages)
      : kv(Shape(), pages),
        scheduler(options, TheTokenizer(), stop_ids, kv, source,
                  [this](Sequence& s) { to_close.push_back(s.index); }) {
    for (int32_t i = 0; i < options.frames; ++i) {
      frames.push_back(
          std::make_unique<Frame>(Headers(), FrameShape{options.rows, options.context, 1}));
      frames.back()->id = static_cast<uint16_t>(i);
    }
  }

  Frame& At(size_t i) { return *frames[i]; }
  bool Fill(size_t i = 0) { return scheduler.Fill(At(i)).filled; }

  // The forward pass and the end of a filled frame, up to its release.
  std::vector<Notice> Compute(size_t i = 0) {
    Frame& frame = At(i);
    for (const FrameSequence& place : frame.sequences) Store(frame, place);
    std::vector<Notice> notices;
    AcceptTokens(
        frame, {}, [](uint32_t) { return std::string(); },
        [&](const Notice& n) { notices.push_back(n); });
    return notices;
  }
  void Finish(size_t i = 0) {
    for (const Notice& n : Compute(i)) {
      if (n.final != 0) to_close.push_back(n.sequence);
    }
    scheduler.Release(At(i));
  }
  bool Step(size_t i = 0) {
    if (!Fill(i)) return false;
    Finish(i);
    return true;
  }
  void CloseAll() {
    for (const uint32_t index : to_close) {
      Sequence& s = scheduler.At(index);
      --s.line->open_choices;  // as the deliverer does
      finished.push_back({s.line->request.line,
                          s.choice,
                          {s.tokens.begin() + std::min(s.prompt, s.Known()), s.tokens.end()},
                          s.error,
                          s.cause});
      scheduler.Close(index);
    }
    to_close.clear();
  }
  // Frame 0 alone until everything is done.
  void RunToEnd() {
    source.End();
    for (int32_t parks = 0;;) {
      if (Step()) {
        CloseAll();
        continue;
      }
      REQUIRE(++parks < 1000);
      CloseAll();
      int32_t wake = -1;
      bool poll = false;
      const Scheduler::After after = scheduler.Drained(&wake, &poll);
      if (after == Scheduler::After::kFinished) return;
      REQUIRE(after == Scheduler::After::kWake);
    }
  }

  const Finished& Of(uint64_t line, int32_t choice = 0) const {
    for (const Finished& f : finished) {
      if (f.line == line && f.choice == choice) return f;
    }
    FAIL("line ", line, " did not finish");
    return finished.front();
  }
  void CheckTokens(uint64_t line, int32_t choice, int32_t prompt, int32_t count) const {
    const Finished& f = Of(line, choice);
    CHECK_FALSE(f.error);
    CHECK(f.cause == StopCause::kLength);
    REQUIRE(static_cast<int32_t>(f.tokens.size()) == count);
    for (int32_t i = 0; i < count; ++i) {
      CHECK(f.tokens[static_cast<size_t>(i)] == TokenOf(line, choice, prompt + i));
    }
  }

  FakeSource source;
  KvStore kv;
  const std::vector<int32_t> stop_ids{1};
  std::vector<uint32_t> to_close;
  Scheduler scheduler;
  std::vector<std::unique_ptr<Frame>> frames;
  std::vector<Finished> finished;

 private:
  static float Mark(const Sequence& s, int32_t position) {
    return static_cast<float>(s.line->request.line * 10'000 +
                              static_cast<uint64_t>(s.choice * 1000 + position));
  }
  void Store(Frame& frame, const FrameSequence& place) {
    const Sequence& s = *place.sequence;
    const auto first = static_cast<size_t>(place.first_row);
    for (size_t r = first; r < first + static_cast<size_t>(place.rows); ++r) {
      const FrameRow& row = frame.rows[r];
      const float mark = Mark(s, row.position);
      std::memcpy(kv.LatentAt(0, *place.pages, row.position), &mark, sizeof mark);
      for (int32_t p = 0; p <= row.position; ++p) {
        float stored = 0;
        std::memcpy(&stored, kv.LatentAt(0, *place.pages, p), sizeof stored);
        if (stored != Mark(s, p)) FAIL("line ", s.line->request.line, " lost position ", p);
      }
      if (row.token != s.tokens[static_cast<size_t>(row.position)]) FAIL("wrong token");
      frame.drawn[r] = TokenOf(s.line->request.line, s.choice, row.position + 1);
    }
  }
};

SchedulerOptions Options(int32_t sequences, int32_t rows, int32_t context = 64) {
  SchedulerOptions options;
  options.sequences = sequences;
  options.rows = rows;
  options.prefill_rows = rows;
  options.context = context;
  return options;
}

TEST_CASE("decode rows come before prefill chunks, oldest first") {
  Rig rig(Options(4, 8), 64);
  rig.source.Add(3, 10);
  rig.source.Add(2, 10);
  REQUIRE(rig.Step());  // both prompts whole
  rig.source.Add(20, 1);
  REQUIRE(rig.Fill());
  const Frame& frame = rig.At(0);
  REQUIRE(frame.sequences.size() == 3);
  CHECK(frame.sequences[0].sequence->line->request.line == 1);
  CHECK(frame.sequences[1].sequence->line->request.line == 2);
  CHECK(frame.sequences[2].sequence->line->request.line == 3);
  CHECK(frame.sequences[0].rows == 1);
  CHECK(frame.sequences[1].rows == 1);
  CHECK(frame.sequences[2].rows == 6);
  CHECK(frame.rows[0].position == 3);
  CHECK(frame.rows[0].token == TokenOf(1, 0, 3));
  CHECK(frame.rows[0].wants_logits);
  for (size_t r = 2; r < 8; ++r) {
    CHECK(frame.rows[r].position == static_cast<int32_t>(r) - 2);
    CHECK(frame.rows[r].sequence == 2);
    CHECK_FALSE(frame.rows[r].wants_logits);
  }
}

TEST_CASE("prefill takes at most its share of the rows and logits only of the last one") {
  SchedulerOptions options = Options(2, 16);
  options.prefill_rows = 4;
  Rig rig(options, 64);
  rig.source.Add(3, 5);
  rig.source.Add(6, 5);
  REQUIRE(rig.Fill());
  CHECK(rig.At(0).sequences[0].rows == 3);
  CHECK(rig.At(0).sequences[1].rows == 1);
  CHECK(rig.At(0).rows[2].wants_logits);
  CHECK_FALSE(rig.At(0).rows[3].wants_logits);
  rig.Finish();
  REQUIRE(rig.Fill());  // one row decodes, four of prefill
  CHECK(rig.At(0).rows.size() == 5);
  CHECK_FALSE(rig.At(0).rows[4].wants_logits);
  rig.Finish();
  REQUIRE(rig.Fill());  // the prompt's last token
  CHECK(rig.At(0).rows.size() == 2);
  CHECK(rig.At(0).rows[1].wants_logits);
  CHECK(rig.At(0).rows[1].position == 5);
  rig.Finish();
  CHECK(rig.scheduler.Stats().prefill_rows == 8);
  CHECK(rig.scheduler.Stats().prompt_tokens == 9);
}

TEST_CASE("prefill is bounded by rows times context") {
  SchedulerOptions options = Options(1, 32, 64);
  options.prefill_work = 100;
  Rig rig(options, 64);
  rig.source.Add(60, 1);
  int64_t sweeps = 0;
  for (int32_t stored = 0; stored < 60; ++sweeps) {
    REQUIRE(rig.Fill());
    int64_t work = 0;
    for (const FrameRow& row : rig.At(0).rows) work += row.position + 1;
    CHECK(work <= 100);
    stored += rig.At(0).sequences[0].rows;
    rig.Finish();
  }
  CHECK(sweeps > 18);  // 1,830 in all
  CHECK(rig.to_close.size() == 1);
}

TEST_CASE("a context longer than the bound still ends its prefill beside sequences that decode") {
  SchedulerOptions options = Options(2, 8, 64);
  options.prefill_work = 5;
  Rig rig(options, 64);
  rig.source.Add(1, 60);
  REQUIRE(rig.Step());
  rig.source.Add(20, 1);
  for (int i = 0; i < 30 && rig.to_close.empty(); ++i) REQUIRE(rig.Step());
  REQUIRE(rig.to_close.size() == 1);
  rig.CloseAll();
  rig.CheckTokens(2, 0, 20, 1);
}

TEST_CASE("a frame without work parks and is woken by input") {
  Rig rig(Options(2, 8), 64);
  CHECK_FALSE(rig.Fill());
  int32_t wake = -1;
  bool poll = false;
  CHECK(rig.scheduler.Drained(&wake, &poll) == Scheduler::After::kBlock);
  CHECK(poll);
  CHECK(rig.scheduler.Stats().parks == 1);
  rig.source.Add(2, 1);
  CHECK(rig.scheduler.Drained(&wake, &poll) == Scheduler::After::kWake);
  CHECK(wake == 0);
  CHECK(rig.Step());
  CHECK_FALSE(rig.Fill());
  // The sequence waits for its output: not finished, and there is room for another line.
  CHECK(rig.scheduler.Drained(&wake, &poll) == Scheduler::After::kBlock);
  CHECK(poll);
  rig.source.End();
  CHECK(rig.scheduler.Drained(&wake, &poll) == Scheduler::After::kBlock);
  CHECK_FALSE(poll);
  CHECK_FALSE(rig.scheduler.Stats().input_open);
  rig.CloseAll();
  CHECK(rig.scheduler.Drained(&wake, &poll) == Scheduler::After::kFinished);
}

TEST_CASE("input is not polled while every sequence object has a line") {
  Rig rig(Options(1, 8), 64);
  rig.source.Add(2, 1);
  REQUIRE(rig.Step());
  REQUIRE_FALSE(rig.Fill());
  int32_t wake = -1;
  bool poll = true;
  CHECK(rig.scheduler.Drained(&wake, &poll) == Scheduler::After::kBlock);
  CHECK_FALSE(poll);
  rig.CloseAll();
  CHECK(rig.scheduler.Drained(&wake, &poll) == Scheduler::After::kBlock);
  CHECK(poll);
}

TEST_CASE("a fill that leaves runnable rows wakes a parked frame") {
  SchedulerOptions options = Options(4, 2);
  options.frames = 2;
  Rig rig(options, 64);
  CHECK_FALSE(rig.Fill(1));
  for (int i = 0; i < 3; ++i) rig.source.Add(2, 3);
  const Scheduler::Filled filled = rig.scheduler.Fill(rig.At(0));
  CHECK(filled.filled);
  CHECK(filled.wake == 1);
  const Scheduler::Filled second = rig.scheduler.Fill(rig.At(1));
  CHECK(second.filled);
  CHECK(second.wake == -1);  // none is parked
  CHECK(rig.At(0).sequences[0].sequence != rig.At(1).sequences[0].sequence);
}

TEST_CASE("a sequence is in at most one frame") {
  SchedulerOptions options = Options(2, 8);
  options.frames = 2;
  Rig rig(options, 64);
  rig.source.Add(2, 9);
  rig.source.Add(2, 9);
  REQUIRE(rig.Fill(0));
  CHECK(rig.At(0).sequences.size() == 2);
  CHECK_FALSE(rig.Fill(1));
  rig.Finish(0);
  const Scheduler::Filled filled = rig.scheduler.Fill(rig.At(0));
  CHECK(filled.filled);
  CHECK(filled.wake == -1);  // nothing is left for the other frame
}

TEST_CASE("a prompt that leaves no room is refused with the counts") {
  Rig rig(Options(8, 8, 16), 64);
  rig.source.Add(14, 3);
  rig.source.Add(16, 0);
  rig.source.Add(20, 1, 3);  // all choices at once
  rig.source.Add(14, 2);
  rig.source.Add(15, 0);
  rig.source.Add(1, std::numeric_limits<int32_t>::max());
  rig.RunToEnd();
  for (const uint64_t line : {1u, 2u, 3u, 6u}) {
    const Finished& f = rig.Of(line);
    REQUIRE(f.error);
    CHECK(f.error->status == 400);
    CHECK(f.error->code == "context_length_exceeded");
    CHECK(f.error->message.find("16") != std::string::npos);
    CHECK(f.tokens.empty());
  }
  CHECK(rig.Of(1).error->message.find("14 tokens") != std::string::npos);
  CHECK(rig.Of(1).error->message.find("max_tokens is 3") != std::string::npos);
  CHECK(rig.finished.size() == 6);
  rig.CheckTokens(4, 0, 14, 2);
  rig.CheckTokens(5, 0, 15, 1);
  CHECK(rig.scheduler.Stats().lines_refused == 4);
  CHECK(rig.scheduler.Stats().lines_read == 6);
  CHECK(rig.scheduler.Stats().generated_tokens == 3);
}

TEST_CASE("a line that cannot be run keeps its own error and does not hold up the others") {
  Rig rig(Options(1, 8), 64);
  rig.source.AddError({422, "invalid_request", "no such field", "colour"});
  rig.source.Add(2, 2);
  rig.RunToEnd();
  REQUIRE(rig.Of(1).error);
  CHECK(rig.Of(1).error->status == 422);
  CHECK(rig.Of(1).error->param == "colour");
  rig.CheckTokens(2, 0, 2, 2);
}

TEST_CASE("with one sequence object the choices of a line come one by one") {
  Rig rig(Options(1, 8), 64);
  rig.source.Add(3, 2, 3);
  rig.source.Add(2, 1);
  rig.RunToEnd();
  REQUIRE(rig.finished.size() == 4);
  for (int32_t c = 0; c < 3; ++c) {
    CHECK(rig.finished[static_cast<size_t>(c)].choice == c);
    rig.CheckTokens(1, c, 3, 2);
  }
  CHECK(rig.finished[3].line == 2);
  CHECK(rig.scheduler.Stats().lines_read == 2);
}

TEST_CASE("choices of a line share its state and run side by side when there is room") {
  Rig rig(Options(4, 16), 64);
  rig.source.Add(3, 2, 3);
  REQUIRE(rig.Fill());
  REQUIRE(rig.At(0).sequences.size() == 3);
  const auto& places = rig.At(0).sequences;
  CHECK(places[0].sequence->line == places[2].sequence->line);
  CHECK(places[0].sequence->line->open_choices == 3);
  CHECK(places[1].sequence->choice == 1);
}

TEST_CASE("out of pages the youngest gives its own back, the oldest never") {
  // 6 pages of 4: at position 8 the third page of A and B comes from C, at 12 A's fourth from B.
  Rig rig(Options(3, 12, 24), 6);
  for (int i = 0; i < 3; ++i) rig.source.Add(4, 20);
  std::vector<uint64_t> preempted;
  std::map<uint64_t, size_t> held;
  rig.source.End();
  uint64_t before = 0;
  while (rig.Fill()) {
    const uint64_t now = rig.scheduler.Stats().preemptions;
    if (now != before) {
      for (uint32_t i = 0; i < 3; ++i) {
        const Sequence& s = rig.scheduler.At(i);
        if (s.line == nullptr || s.done) continue;
        if (held[s.line->request.line] > 0 && s.pages.ids.empty()) {
          CHECK(s.stored == 0);
          preempted.push_back(s.line->request.line);
        }
      }
      before = now;
    }
    for (uint32_t i = 0; i < 3; ++i) {
      const Sequence& s = rig.scheduler.At(i);
      if (s.line != nullptr) held[s.line->request.line] = s.pages.ids.size();
    }
    rig.Finish();
    rig.CloseAll();
  }
  REQUIRE(preempted.size() >= 2);
  CHECK(preempted[0] == 3);
  CHECK(preempted[1] == 2);
  CHECK(std::count(preempted.begin(), preempted.end(), 1u) == 0);
  CHECK(rig.finished[0].line == 1);
  for (uint64_t line = 1; line <= 3; ++line) rig.CheckTokens(line, 0, 4, 20);
  CHECK(rig.kv.FreePages() == 6);
}

TEST_CASE("a preempted sequence returns only with room for its length and a page for each other") {
  Rig rig(Options(2, 12, 24), 7);
  rig.source.Add(4, 20);
  rig.source.Add(4, 20);
  int32_t returned_with = -1;
  bool out = false;
  while (rig.to_close.empty() || returned_with < 0) {
    const int32_t free = rig.kv.FreePages();
    REQUIRE(rig.Fill());
    const Sequence& b = rig.scheduler.At(1);
    if (!out && b.stored == 0 && b.Generated() > 0 && b.pages.ids.empty()) out = true;
    if (out && !b.pages.ids.empty() && returned_with < 0) {
      returned_with = free;
      CHECK(b.stored == 0);
    }
    rig.Finish();
    if (!rig.to_close.empty()) rig.CloseAll();
    if (returned_with >= 0) break;
  }
  REQUIRE(out);
  CHECK(returned_with >= 4);
  rig.RunToEnd();
  rig.CheckTokens(1, 0, 4, 20);
  rig.CheckTokens(2, 0, 4, 20);
}

TEST_CASE("one sequence of the full context always fits") {
  for (const int32_t prompt : {1, 5, 23}) {
    Rig rig(Options(3, 5, 24), 6);
    for (int i = 0; i < 3; ++i) rig.source.Add(prompt, 0);
    rig.RunToEnd();
    for (uint64_t line = 1; line <= 3; ++line) rig.CheckTokens(line, 0, prompt, 24 - prompt);
  }
}

// The record of a finished line may wait long for the output; its pages must not.
TEST_CASE("a finished sequence gives its pages back before its record is written") {
  Rig rig(Options(2, 24, 24), 6);
  rig.source.Add(20, 4);
  rig.source.Add(20, 4);
  while (rig.to_close.empty()) REQUIRE(rig.Step());
  CHECK(rig.scheduler.At(rig.to_close[0]).pages.ids.empty());
  CHECK(rig.kv.FreePages() == 6);
  while (rig.to_close.size() < 2) REQUIRE(rig.Step());
  rig.CloseAll();
  rig.CheckTokens(2, 0, 20, 4);
}

TEST_CASE("a sequence closed and taken up again before its frame is released is left alone") {
  SchedulerOptions options = Options(1, 8);
  options.frames = 2;
  Rig rig(options, 64);
  rig.source.Add(2, 1);
  rig.source.Add(6, 4);
  REQUIRE(rig.Fill(0));
  const auto notices = rig.Compute(0);
  REQUIRE(notices.size() == 1);
  REQUIRE(notices[0].final == 1);
  rig.to_close.push_back(notices[0].sequence);
  rig.CloseAll();
  REQUIRE(rig.Fill(1));
  CHECK(rig.At(1).sequences[0].sequence->line->request.line == 2);
  rig.scheduler.Release(rig.At(0));
  CHECK(rig.At(1).sequences[0].sequence->owner == 1);
  CHECK(rig.At(1).sequences[0].pages->ids.size() == 2);
  CHECK_FALSE(rig.Fill(0));
  rig.Finish(1);
  while (rig.to_close.empty()) REQUIRE(rig.Step(1));
  rig.CloseAll();
  rig.CheckTokens(2, 0, 6, 4);
}

TEST_CASE("short lines do not pass a long one by for ever") {
  Rig rig(Options(4, 16, 40), 12);
  rig.source.Add(4, 12);
  rig.source.Add(4, 12);
  REQUIRE(rig.Step());
  rig.source.Add(36, 4);  // needs ten pages and one for each other
  for (int i = 0; i < 40; ++i) rig.source.Add(4, 12);
  rig.RunToEnd();
  for (size_t i = 0; i < 3; ++i) CHECK(rig.finished[i].line <= 3);
  rig.CheckTokens(3, 0, 36, 4);
  CHECK(rig.finished.size() == 43);
}

TEST_CASE("the oldest has the right to every page, even beside one-token prompts") {
  Rig rig(Options(4, 8, 16), 4);
  rig.source.Add(14, 2);
  for (int i = 0; i < 6; ++i) rig.source.Add(1, 15);
  rig.RunToEnd();
  CHECK(rig.finished[0].line == 1);
  for (uint64_t line = 2; line <= 7; ++line) rig.CheckTokens(line, 0, 1, 15);
}

TEST_CASE("everybody ends with the fewest pages, sequences in any number and rows in any width") {
  std::mt19937 random(11);
  for (int round = 0; round < 60; ++round) {
    const auto context = static_cast<int32_t>(8 + random() % 40);
    SchedulerOptions options = Options(static_cast<int32_t>(1 + random() % 5),
                                       static_cast<int32_t>(1 + random() % 9), context);
    options.prefill_rows = static_cast<int32_t>(1 + random() % 9);
    options.prefill_work = static_cast<int64_t>(1 + random() % 200);
    Rig rig(options,
            (context + kPageTokens - 1) / kPageTokens + static_cast<int32_t>(random() % 3));
    std::vector<std::array<int32_t, 3>> lines;
    for (int i = 0; i < 12; ++i) {
      const auto prompt = static_cast<int32_t>(1 + random() % static_cast<uint32_t>(context - 1));
      const auto most = static_cast<uint32_t>(context - prompt);
      const auto max_tokens = static_cast<int32_t>(1 + random() % most);
      const auto choices = static_cast<int32_t>(1 + random() % 3);
      lines.push_back({prompt, max_tokens, choices});
      rig.source.Add(prompt, max_tokens, choices);
    }
    rig.RunToEnd();
    CAPTURE(round);
    for (size_t i = 0; i < lines.size(); ++i) {
      for (int32_t c = 0; c < lines[i][2]; ++c) {
        rig.CheckTokens(i + 1, c, lines[i][0], lines[i][1]);
      }
    }
    CHECK(rig.kv.FreePages() == rig.kv.Pages());
    CHECK(rig.scheduler.Stats().running == 0);
  }
}

TEST_CASE("after a stop no frame starts, and what runs is finished") {
  SchedulerOptions options = Options(4, 2);
  options.frames = 2;
  Rig rig(options, 64);
  for (int i = 0; i < 4; ++i) rig.source.Add(2, 9);
  REQUIRE(rig.Fill(0));
  REQUIRE(rig.Fill(1));
  rig.scheduler.Stop();
  CHECK(rig.scheduler.Gather());
  rig.Finish(0);
  CHECK_FALSE(rig.Fill(0));
  rig.Finish(1);
  CHECK_FALSE(rig.Fill(1));
  int32_t wake = -1;
  bool poll = false;
  CHECK(rig.scheduler.Drained(&wake, &poll) == Scheduler::After::kFinished);
  CHECK(wake == -1);
}

TEST_CASE("gathering ends with a frame's worth of lines, the end or no free object") {
  Rig rig(Options(8, 2), 64);
  CHECK_FALSE(rig.scheduler.Gather());
  rig.source.Add(2, 2);
  CHECK_FALSE(rig.scheduler.Gather());
  rig.source.Add(2, 2);
  CHECK(rig.scheduler.Gather());
  Rig ended(Options(8, 4), 64);
  ended.source.Add(2, 2);
  ended.source.End();
  CHECK(ended.scheduler.Gather());
  Rig full(Options(1, 4), 64);
  full.source.Add(2, 2);
  CHECK(full.scheduler.Gather());
  CHECK(full.scheduler.Stats().running == 1);
}

// The graph in small: workers take free frames, fill, compute and release them; another thread
// closes sequences; the main thread is the engine's.
class Workers {
 public:
  Workers(Rig& rig, int threads) : rig_(rig) {
    for (size_t i = 0; i < rig.frames.size(); ++i) free_.push_back(static_cast<int32_t>(i));
    busy_ = static_cast<int32_t>(free_.size());
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
    threads_.emplace_back([this] { Close(); });
  }
  void Run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return busy_ == 0; });
      const uint64_t closed = closed_;
      lock.unlock();
      int32_t wake = -1;
      bool poll = false;
      const Scheduler::After after = rig_.scheduler.Drained(&wake, &poll);
      if (after == Scheduler::After::kFinished) break;
      if (after == Scheduler::After::kWake) {
        Put(wake);
        continue;
      }
      lock.lock();
      changed_.wait(lock, [&] { return closed_ != closed; });
    }
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    for (std::thread& t : threads_) t.join();
  }

 private:
  void Put(int32_t frame) {
    const std::lock_guard lock(mutex_);
    ++busy_;
    free_.push_back(frame);
    changed_.notify_all();
  }
  void Work() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return over_ || !free_.empty(); });
      if (over_) return;
      const auto frame = static_cast<size_t>(free_.front());
      free_.pop_front();
      lock.unlock();
      const Scheduler::Filled filled = rig_.scheduler.Fill(rig_.At(frame));
      if (filled.wake >= 0) Put(filled.wake);
      std::vector<Notice> notices;
      if (filled.filled) notices = rig_.Compute(frame);
      lock.lock();
      for (const Notice& n : notices) {
        if (n.final != 0) closing_.push_back(n.sequence);
      }
      changed_.notify_all();
      if (!filled.filled) {
        --busy_;  // the frame may be in another worker's hands
        continue;
      }
      lock.unlock();
      rig_.scheduler.Release(rig_.At(frame));
      lock.lock();
      free_.push_back(static_cast<int32_t>(frame));
      changed_.notify_all();
    }
  }
  void Close() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return over_ || !closing_.empty(); });
      if (over_) return;
      const uint32_t index = closing_.back();
      closing_.pop_back();
      lock.unlock();
      rig_.to_close.assign(1, index);
      rig_.CloseAll();
      lock.lock();
      ++closed_;
      changed_.notify_all();
    }
  }

  Rig& rig_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<int32_t> free_;
  std::vector<uint32_t> closing_;
  int32_t busy_ = 0;  // frames that are not parked
  uint64_t closed_ = 0;
  bool over_ = false;
  std::vector<std::thread> threads_;
};

TEST_CASE("two frames, three workers and a closing thread finish every line") {
  std::mt19937 random(5);
  for (int round = 0; round < 20; ++round) {
    SchedulerOptions options = Options(5, 6, 32);
    options.frames = 1 + round % 3;
    Rig rig(options, 8 + static_cast<int32_t>(random() % 8));
    std::vector<std::array<int32_t, 2>> lines;
    for (int i = 0; i < 40; ++i) {
      const auto prompt = static_cast<int32_t>(1 + random() % 31);
      const auto max_tokens =
          static_cast<int32_t>(1 + random() % static_cast<uint32_t>(32 - prompt));
      lines.push_back({prompt, max_tokens});
      rig.source.Add(prompt, max_tokens);
    }
    rig.source.End();
    Workers(rig, 3).Run();
    CAPTURE(round);
    for (size_t i = 0; i < lines.size(); ++i) rig.CheckTokens(i + 1, 0, lines[i][0], lines[i][1]);
    CHECK(rig.kv.FreePages() == rig.kv.Pages());
  }
}

}  // namespace
}  // namespace colibri
