// layer_ready: a frame waits for every part that its next layer needs, whoever brings it and when.
#include <doctest/doctest.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/layer_supplier.h"
#include "tests/engine_lines.h"
#include "tests/engine_rig.h"

namespace colibri {
namespace {

// Has some parts at once and brings others later: from a thread of its own, or still inside Await.
class LateSupplier final : public LayerSupplier {
 public:
  LateSupplier(uint32_t seed, int32_t frames)
      : seed_(seed), states_(static_cast<size_t>(frames)), thread_([this] { Loop(); }) {}
  ~LateSupplier() override {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

  void Start(Arrived arrived) override { arrived_ = std::move(arrived); }
  void Prepare(Frame& frame, int32_t layer) override {
    State& s = Of(frame);
    ok_ = ok_ && (layer == 0 ? s.step != Step::kBegun : s.step == Step::kBegun);
    s.prepared = layer;
  }
  bool Await(Frame& frame, int32_t layer) override {
    State& s = Of(frame);
    ok_ = ok_ && s.prepared == layer;
    s.step = Step::kAwaited;
    s.there = false;
    switch ((seed_ + static_cast<uint32_t>(layer) + frame.id) % 3) {
      case 0:
        s.there = true;
        return true;
      case 1:
        s.there = true;
        ++late_;
        arrived_(frame.id, layer);
        return false;
      default:
        break;
    }
    ++late_;
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back({&frame, layer});
    }
    wake_.notify_one();
    return false;
  }
  void Begin(Frame& frame, int32_t /*layer*/) override {
    State& s = Of(frame);
    ok_ = ok_ && s.step == Step::kAwaited && s.there;
    s.step = Step::kBegun;
  }
  void Attended(Frame& frame, int32_t layer) override {
    State& s = Of(frame);
    ok_ = ok_ && s.step == Step::kBegun && s.prepared == layer + 1;
    s.step = Step::kAttended;
  }
  void Left(Frame& frame, int32_t /*layer*/) override {
    State& s = Of(frame);
    ok_ = ok_ && s.step == Step::kAttended;
    s.step = Step::kLeft;
  }

  bool Ok() const { return ok_; }
  int Late() const { return late_; }

 private:
  enum class Step : uint8_t { kLeft, kAwaited, kBegun, kAttended };
  struct State {
    Step step = Step::kLeft;
    int32_t prepared = -1;
    bool there = false;
  };
  struct Waiting {
    Frame* frame;
    int32_t layer;
  };
  State& Of(const Frame& frame) { return states_[frame.id]; }
  void Loop() {
    std::mt19937 random(seed_);
    for (;;) {
      Waiting one{};
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] { return over_ || !waiting_.empty(); });
        if (waiting_.empty()) return;
        one = waiting_.front();
        waiting_.pop_front();
      }
      for (uint32_t pauses = static_cast<uint32_t>(random()) % 50; pauses > 0; --pauses) {
        std::this_thread::yield();
      }
      Of(*one.frame).there = true;
      arrived_(one.frame->id, one.layer);
    }
  }

  const uint32_t seed_;
  Arrived arrived_;
  std::vector<State> states_;
  std::atomic<bool> ok_{true};
  std::atomic<int> late_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Waiting> waiting_;
  bool over_ = false;
  std::thread thread_;
};

}  // namespace

TEST_CASE("a frame waits until every supplier of its layer has answered") {
  const std::vector<TestLine> lines = MixedLines(12);
  const Outcome expected = LineByLine(SmallModel(), lines);
  for (const int32_t threads : {1, 2, 4}) {
    for (const int32_t frames : {1, 2}) {
      for (const size_t suppliers : {size_t{1}, size_t{3}}) {
        RunConfig c;
        c.threads = threads;
        c.frames = frames;
        c.slots = threads == 1 ? 1 : 4;
        c.pauses = threads != 2;
        INFO(c.Text());
        std::vector<std::unique_ptr<LateSupplier>> late;
        for (uint32_t i = 0; i < suppliers; ++i) {
          late.push_back(std::make_unique<LateSupplier>(i, frames));
        }
        RunHooks hooks;
        hooks.options = [&](EngineOptions* options) {
          for (const auto& one : late) options->suppliers.push_back(one.get());
        };
        CheckSameLines(RunGraph(SmallModel(), c, lines, hooks), expected);
        for (const auto& one : late) {
          CHECK(one->Ok());
          CHECK(one->Late() > 0);
        }
      }
    }
  }
}

}  // namespace colibri
