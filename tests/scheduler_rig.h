// A scheduler with a scripted input, small pages and no weights. Latents stand for what a real
// frame stores: each row checks that all positions before it still hold its sequence's values, or,
// where prefixes are shared, those of its sequence's tokens.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/scheduler.h"
#include "runtime/verify.h"

namespace colibri {

inline constexpr int32_t kPageTokens = 4;

inline const Model& Headers() {
  static const Model model({COLIBRI_SOURCE_DIR "/tests/fixtures/tiny/model"});
  return model;
}

inline const Tokenizer& TheTokenizer() {
  static const Tokenizer tokenizer =
      Tokenizer::Load(COLIBRI_SOURCE_DIR "/tests/fixtures/tokenizer/tokenizer.json");
  return tokenizer;
}

inline KvShape Shape() {
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

  void Add(Request request) {
    request.line = ++count_;
    request.custom_id = std::to_string(count_);
    lines_.emplace_back(std::move(request), std::nullopt);
  }
  // A line of `prompt` tokens that asks for `max_tokens` (0: what the context has room for).
  void Add(int32_t prompt, int32_t max_tokens, int32_t choices = 1) {
    Request request;
    request.loop_stop = false;
    for (int32_t i = 0; i < prompt; ++i) request.prompt.push_back(10 + i % 100);
    request.max_tokens = max_tokens;
    request.choices = choices;
    Add(std::move(request));
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

inline int32_t TokenOf(uint64_t line, int32_t choice, int32_t position) {
  return 200 + static_cast<int32_t>(line * 31 + static_cast<uint64_t>(choice * 17 + position)) % 99;
}

struct Rig {
  Rig(SchedulerOptions options, int32_t pages)
      : kv(Shape(), pages),
        scheduler(options, TheTokenizer(), stop_ids, kv, source,
                  [this](Sequence& s) { to_close.push_back(s.index); }),
        shares_(options.share_prefixes) {
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
    for (const FrameSequence& place : At(i).sequences) {
      if (propose && place.sequence->owner == At(i).id) propose(*place.sequence);
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
      const Sequence& s = scheduler.At(index);
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
      Scheduler::After after = Scheduler::After::kBlock;
      do {
        CloseAll();
        int32_t wake = -1;
        bool poll = false;
        after = scheduler.Drained(&wake, &poll);
      } while (after == Scheduler::After::kBlock && !to_close.empty());  // refused just now
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

  // Off for long prompts: what is stored is not looked at, only tokens are drawn.
  bool stores = true;
  // Makes the drafts of a sequence that goes on, once its frame is verified.
  std::function<void(Sequence&)> propose;
  // Rows of a sequence for which it says so have logits that are not finite.
  std::function<bool(const Sequence&)> fails;
  FakeSource source;
  KvStore kv;
  const std::vector<int32_t> stop_ids{1};
  std::vector<uint32_t> to_close;
  Scheduler scheduler;
  std::vector<std::unique_ptr<Frame>> frames;
  std::vector<Finished> finished;

 private:
  // What the positions hold that a sequence knows, and those of its drafts: a wrong token is never
  // taken for the right one.
  std::vector<float> Marks(const Frame& frame, const FrameSequence& place) const {
    const Sequence& s = *place.sequence;
    std::vector<float> marks;
    uint32_t tokens = 0;
    const int32_t first = frame.rows[static_cast<size_t>(place.first_row)].position;
    const int32_t end = std::max(s.Known(), first + place.rows);
    for (int32_t p = 0; p < end; ++p) {
      const bool known = p < s.Known();
      const auto at = static_cast<size_t>(known ? p : place.first_row + p - first);
      const int32_t token = known ? s.tokens[at] : frame.rows[at].token;
      tokens = (tokens + static_cast<uint32_t>(token) + 1) * 2654435761u;
      const uint64_t own =
          s.line->request.line * 10'000 + static_cast<uint64_t>(s.choice * 1000 + p);
      const bool wrong = !known && token != TokenOf(s.line->request.line, s.choice, p);
      marks.push_back(static_cast<float>(shares_ ? tokens >> 8 : own) + (wrong ? 0.5f : 0.0f));
    }
    return marks;
  }
  void Draw(Frame& frame, const FrameSequence& place) {
    const Sequence& s = *place.sequence;
    const auto first = static_cast<size_t>(place.first_row);
    for (size_t r = first; r < first + static_cast<size_t>(place.rows); ++r) {
      frame.drawn[r] = fails && fails(s)
                           ? -1
                           : TokenOf(s.line->request.line, s.choice, frame.rows[r].position + 1);
    }
  }
  void Store(Frame& frame, const FrameSequence& place) {
    Draw(frame, place);
    if (!stores) return;
    const Sequence& s = *place.sequence;
    const std::vector<float> marks = Marks(frame, place);
    const auto first = static_cast<size_t>(place.first_row);
    for (size_t r = first; r < first + static_cast<size_t>(place.rows); ++r) {
      const FrameRow& row = frame.rows[r];
      std::memcpy(kv.LatentAt(0, *place.pages, row.position),
                  &marks[static_cast<size_t>(row.position)], sizeof(float));
      for (int32_t p = 0; p <= row.position; ++p) {
        float stored = 0;
        std::memcpy(&stored, kv.LatentAt(0, *place.pages, p), sizeof stored);
        if (stored != marks[static_cast<size_t>(p)])
          FAIL("line ", s.line->request.line, " lost position ", p);
      }
      if (row.draft != (row.position >= s.Known())) FAIL("drafts come behind what is known");
      if (row.draft) continue;
      if (row.token != s.tokens[static_cast<size_t>(row.position)]) FAIL("wrong token");
    }
  }

  const bool shares_;
};

inline SchedulerOptions Options(int32_t sequences, int32_t rows, int32_t context = 64) {
  SchedulerOptions options;
  options.sequences = sequences;
  options.rows = rows;
  options.prefill_rows = rows;
  options.context = context;
  // The lines that Add(prompt, ...) makes begin alike: rules about rows and pages are looked at
  // without sharing.
  options.share_prefixes = false;
  return options;
}

}  // namespace colibri
