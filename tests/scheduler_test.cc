// The scheduler's rules: who gets rows, who waits, who gives pages back.
// Length: each rule has a case here.
#include "runtime/scheduler.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/scheduler_rig.h"
#include "tests/watchdog.h"

namespace colibri {
namespace {

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

TEST_CASE("choices that end while others of their line still wait are not taken for those") {
  // The deliverer counts open_choices down: that is not for the scheduler.
  Rig rig(Options(1, 8), 64);
  rig.source.Add(3, 2, 3);
  rig.source.Add(2, 1);
  rig.source.End();
  for (size_t closed = 0; closed < 4; ++closed) {
    while (rig.to_close.empty()) REQUIRE(rig.Step());
    --rig.scheduler.At(0).line->open_choices;
    rig.CloseAll();
  }
  CHECK_FALSE(rig.Step());
  for (int32_t c = 0; c < 3; ++c) rig.CheckTokens(1, c, 3, 2);
  rig.CheckTokens(2, 0, 2, 1);
  CHECK(rig.scheduler.Stats().lines_refused == 0);
}

TEST_CASE("after a choice that failed the others of its line end, or never begin") {
  // Two sequences: choice 0 fails at its second token, choice 1 ends then, 2 to 4 get no sequence.
  Rig rig(Options(2, 8), 64);
  rig.source.Add(3, 6, 5);
  rig.source.Add(2, 3);
  rig.source.End();
  rig.fails = [](const Sequence& s) {
    return s.line->request.line == 1 && s.choice == 0 && s.Generated() == 1;
  };
  const auto deliver = [&](const LineError& error) {
    while (rig.to_close.empty()) REQUIRE(rig.Step());
    for (const uint32_t index : rig.to_close) {
      const Sequence& s = rig.scheduler.At(index);
      if (s.error) s.line->error = error;
      --s.line->open_choices;
    }
    rig.CloseAll();
  };
  const LineError error{500, "read_error", "why", ""};
  deliver(error);
  REQUIRE(rig.finished.size() == 2);
  CHECK(rig.Of(1, 0).error);
  CHECK(rig.Of(1, 1).tokens.size() == 1);
  CHECK(rig.Of(1, 1).cause == StopCause::kNone);
  // All that ran have ended, so the scheduler gives the line to be recorded, once.
  REQUIRE(rig.Step());
  REQUIRE(rig.to_close.size() == 1);
  const Sequence& last = rig.scheduler.At(rig.to_close.front());
  CHECK(last.choice == 2);
  REQUIRE(last.error);
  CHECK(last.error->message == "why");
  CHECK(last.line->open_choices == 0);
  rig.CloseAll();
  deliver(error);
  rig.CheckTokens(2, 0, 2, 3);
  CHECK(rig.finished.size() == 4);
  CHECK(rig.scheduler.Stats().started == 3);
  CHECK(rig.scheduler.Stats().ended == 3);
  CHECK(rig.kv.FreePages() == rig.kv.Pages());
}

TEST_CASE("of choices that still run when their line has failed the last has the record written") {
  Rig rig(Options(3, 8), 64);
  rig.source.Add(3, 6, 4);
  rig.source.End();
  rig.fails = [](const Sequence& s) { return s.choice == 2; };
  while (rig.to_close.empty()) REQUIRE(rig.Step());
  // The deliverer has only seen the one that failed: its sequence is free, choice 3 is dropped.
  Sequence& failed = rig.scheduler.At(2);
  REQUIRE(failed.error);
  const std::shared_ptr<LineState> line = failed.line;
  line->error = failed.error;
  --line->open_choices;
  rig.CloseAll();
  CHECK(rig.finished.size() == 1);
  rig.Step();
  CHECK(line->open_choices == 2);  // those that ran, without choice 3
  CHECK(rig.to_close.size() == 2);
  rig.CloseAll();
  CHECK(rig.scheduler.Stats().started == 3);
  for (const Finished& f : rig.finished) CHECK(f.choice != 3);
  CHECK_FALSE(rig.Step());
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

TEST_CASE("a sequence starts only with room for its length and a page for each other") {
  for (const int32_t prompt : {15, 16}) {  // 4 or 5 pages with the next token
    Rig rig(Options(2, 32, 24), 8);
    rig.source.Add(8, 4);
    REQUIRE(rig.Step());  // its next row takes a third page: five are free
    rig.source.Add(prompt, 4);
    REQUIRE(rig.Fill());
    CHECK(rig.At(0).sequences.size() == (prompt == 15 ? 2 : 1));
  }
}

TEST_CASE("a younger sequence that decodes does not take the pages of an older one's prefill") {
  SchedulerOptions options = Options(2, 8, 24);
  options.prefill_rows = 4;
  options.prefill_work = 10;  // a long prefill goes on row by row and leaves room to start another
  Rig rig(options, 7);
  rig.source.Add(22, 2);
  rig.source.Add(1, 20);
  int32_t before = 0;
  while (rig.to_close.empty()) {
    REQUIRE(rig.Step());
    CHECK(rig.scheduler.At(0).stored > before);
    before = rig.scheduler.At(0).stored;
  }
  CHECK(rig.scheduler.At(1).Generated() > 8);
  CHECK(rig.scheduler.Stats().preemptions == 1);
  rig.RunToEnd();
  CHECK(rig.finished[0].line == 1);
  rig.CheckTokens(2, 0, 1, 20);
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

// Sweeps until all lines of the source have ended.
uint64_t SweepsToEnd(Rig& rig) {
  rig.RunToEnd();
  return rig.scheduler.Stats().sweeps;
}

TEST_CASE("of the last lines of an input the longest start first, which shortens the tail") {
  const auto sweeps = [](size_t ahead) {
    SchedulerOptions options = Options(4, 8);
    options.ahead = ahead;
    Rig rig(options, 64);
    for (int i = 0; i < 24; ++i) rig.source.Add(2, 4);
    rig.source.Add(2, 40);
    const uint64_t count = SweepsToEnd(rig);
    for (uint64_t line = 1; line <= 24; ++line) rig.CheckTokens(line, 0, 2, 4);
    rig.CheckTokens(25, 0, 2, 40);
    return count;
  };
  CHECK(sweeps(0) >= 24 * 4 / 4 + 40);
  CHECK(sweeps(25) <= 40 + 4);
  // What is held of the input is bounded: then only the last lines are put in order.
  CHECK(sweeps(8) < sweeps(0) - 6);
}

TEST_CASE("while more lines may come they start in the order of the input") {
  SchedulerOptions options = Options(1, 8);
  options.ahead = 3;
  Rig rig(options, 64);
  const std::vector<int32_t> limits{2, 9, 3, 2, 2, 8};
  for (const int32_t limit : limits) rig.source.Add(2, limit);
  while (rig.finished.size() < 3) {
    REQUIRE(rig.Step());
    rig.CloseAll();
    CHECK(rig.scheduler.Stats().lines_ahead <= 3);
  }
  rig.RunToEnd();
  std::vector<uint64_t> order;
  for (const Finished& f : rig.finished) order.push_back(f.line);
  CHECK(order == std::vector<uint64_t>{1, 2, 3, 4, 6, 5});
}

TEST_CASE(
    "lines held ahead of their turn stop at so many bytes, and a slow input is not waited for") {
  SchedulerOptions options = Options(1, 8);
  options.ahead = 100;
  options.ahead_bytes = 1;
  Rig rig(options, 64);
  for (int i = 0; i < 10; ++i) rig.source.Add(2, 2);
  REQUIRE(rig.Fill());
  CHECK(rig.scheduler.Stats().lines_read == 2);  // one runs, one is ahead
  CHECK(rig.scheduler.Stats().lines_ahead == 1);
  rig.Finish();
  rig.RunToEnd();
  CHECK(rig.finished.size() == 10);
}

TEST_CASE("a line that cannot be run does not wait behind long ones") {
  SchedulerOptions options = Options(1, 8);
  options.ahead = 10;
  Rig rig(options, 64);
  rig.source.Add(2, 9);
  rig.source.AddError({400, "invalid_request", "no", ""});
  rig.RunToEnd();
  CHECK(rig.finished.front().line == 2);
  rig.CheckTokens(1, 0, 2, 9);
}

TEST_CASE("one long prompt holds up neither those that decode nor short prompts behind it") {
  SchedulerOptions options = Options(12, 16, 400);
  Rig rig(options, 400);
  for (int i = 0; i < 4; ++i) rig.source.Add(2, 60);
  REQUIRE(rig.Step());
  rig.source.Add(300, 4);
  for (int i = 0; i < 6; ++i) rig.source.Add(5, 9);
  uint64_t sweeps = 0;
  int32_t last_short = 0, long_stored = 0;
  for (bool prefill = true; prefill; rig.Finish(), ++sweeps) {
    REQUIRE(rig.Fill());
    prefill = false;
    int32_t decoding = 0, chunk = 0;
    for (const FrameSequence& place : rig.At(0).sequences) {
      const uint64_t line = place.sequence->line->request.line;
      if (line <= 4) ++decoding;
      if (line == 5) chunk = place.rows;
      if (line > 5 && place.sequence->stored == 0) last_short = static_cast<int32_t>(sweeps);
    }
    if (sweeps < 58) CHECK(decoding == 4);
    if (long_stored < 300) {
      CHECK(chunk >= 1);
      // At least half of what those that decode leave.
      const int32_t most = std::min(300 - long_stored, 16 - 10);
      CHECK(chunk >= most / 2);
      long_stored += chunk;
      prefill = true;
    }
  }
  CHECK(last_short < 8);  // 30 tokens, in half of at most 12 rows
  CHECK(sweeps < 80);
  rig.RunToEnd();
  rig.CheckTokens(5, 0, 300, 4);
}

TEST_CASE("a long prompt takes every row where those behind it cannot start") {
  const auto first_chunk = [](int32_t pages) {
    Rig rig(Options(4, 16, 60), pages);
    rig.source.Add(56, 4);
    rig.source.Add(48, 4);
    REQUIRE(rig.Fill());
    const int32_t rows = rig.At(0).sequences[0].rows;
    CHECK(rig.At(0).rows.size() == 16);
    rig.Finish();
    rig.RunToEnd();
    rig.CheckTokens(1, 0, 56, 4);
    rig.CheckTokens(2, 0, 48, 4);
    return rows;
  };
  CHECK(first_chunk(30) == 8);
  // Its 16 rows take four pages, the other prompt needs 13 and one to spare.
  CHECK(first_chunk(15) == 16);
}

TEST_CASE("the oldest has the right to every page, even beside one-token prompts") {
  Rig rig(Options(4, 8, 16), 4);
  rig.source.Add(14, 2);
  for (int i = 0; i < 6; ++i) rig.source.Add(1, 15);
  rig.RunToEnd();
  CHECK(rig.finished[0].line == 1);
  for (uint64_t line = 2; line <= 7; ++line) rig.CheckTokens(line, 0, 1, 15);
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

// Lines that are not run, without end.
struct SkippedLines final : RequestSource {
  Next TryNext(Request*, std::optional<LineError>*) override {
    if (++calls == 3 && third) third();
    return Next::kSkipped;
  }
  int Fd() const override { return -1; }
  bool Buffered() const override { return true; }
  int calls = 0;
  std::function<void()> third;
};

TEST_CASE("skipping lines without end holds up neither a stop nor who asks for the figures") {
  const Watchdog watchdog("a stop while lines are skipped");
  const std::vector<int32_t> stop_ids{1};
  KvStore kv(Shape(), 8);
  Frame frame(Headers(), FrameShape{1, 64, 1});
  {
    SkippedLines source;
    Scheduler scheduler(Options(1, 1), TheTokenizer(), stop_ids, kv, source, [](Sequence&) {});
    source.third = [&] { scheduler.Stop(); };  // under the scheduler's lock
    CHECK_FALSE(scheduler.Fill(frame).filled);
    CHECK(source.calls == 3);
  }
  SkippedLines source;
  Scheduler scheduler(Options(1, 1), TheTokenizer(), stop_ids, kv, source, [](Sequence&) {});
  std::thread other;
  source.third = [&] {
    other = std::thread([&] {
      CHECK(scheduler.Stats().input_open);
      CHECK(scheduler.Left().empty());
      scheduler.Stop();
    });
  };
  CHECK(scheduler.Gather());
  other.join();
}

TEST_CASE("what sequences may still need is known as of their last sweep") {
  Rig rig(Options(3, 8), 64);
  rig.source.Add(3, 10);
  rig.source.Add(20, 5);
  rig.source.Add(64, 1);  // refused
  rig.source.End();
  const auto left = [&] {
    std::vector<std::vector<int32_t>> all;
    for (const SequenceLeft& s : rig.scheduler.Left())
      all.push_back({s.prefill, s.generated, s.limit});
    return all;
  };
  using Left = std::vector<std::vector<int32_t>>;
  REQUIRE(rig.Fill());
  CHECK(left() == Left{{3, 0, 10}, {20, 0, 5}});
  rig.Finish();
  CHECK(left() == Left{{0, 1, 10}, {15, 0, 5}});
  REQUIRE(rig.Step());
  CHECK(left() == Left{{0, 2, 10}, {8, 0, 5}});
  const SchedulerStats stats = rig.scheduler.Stats();
  CHECK(stats.sweeps == 2);
  CHECK(stats.started == 2);
  CHECK(stats.limits == 15);
  CHECK(stats.ended == 0);
  rig.RunToEnd();
  CHECK(left().empty());
  CHECK(rig.scheduler.Stats().ended == 2);
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

}  // namespace
}  // namespace colibri
