// The scheduler under random load: that everybody ends, whatever the pages, rows, frames and
// threads.
#include <doctest/doctest.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "tests/scheduler_rig.h"

namespace colibri {
namespace {

TEST_CASE("everybody ends with the fewest pages, sequences in any number and rows in any width") {
  std::mt19937 random(11);
  for (int round = 0; round < 120; ++round) {
    const auto context = static_cast<int32_t>(8 + random() % 40);
    SchedulerOptions options = Options(static_cast<int32_t>(1 + random() % 5),
                                       static_cast<int32_t>(1 + random() % 9), context);
    options.prefill_rows = static_cast<int32_t>(1 + random() % 9);
    options.prefill_work = static_cast<int64_t>(1 + random() % 200);
    options.share_prefixes = round % 2 == 0;
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
  for (int round = 0; round < 40; ++round) {
    SchedulerOptions options = Options(5, 6, 32);
    options.frames = 1 + round % 3;
    options.share_prefixes = round % 2 == 0;
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
