// Ends a test that hangs: if the object outlives its time, the program aborts with its name, and
// whoever looks sees which run stood still, and what it waited for. Threads: one of its own, which
// only waits; Asking from any.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace colibri {

class Watchdog {
 public:
  using State = std::function<std::string()>;

  explicit Watchdog(std::string what, std::chrono::seconds limit = std::chrono::seconds(120))
      : what_(std::move(what)), thread_([this, limit] {
          std::unique_lock lock(mutex_);
          if (wake_.wait_for(lock, limit, [this] { return over_; })) return;
          std::fprintf(stderr, "no end after %lld s: %s\n%s\n",
                       static_cast<long long>(limit.count()), what_.c_str(),
                       state_ ? state_().c_str() : "");
          std::abort();
        }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // While it lives, `state` tells what the run waits for.
  class Asking {
   public:
    Asking(Watchdog& dog, State state) : dog_(dog) { dog_.Ask(std::move(state)); }
    ~Asking() { dog_.Ask(nullptr); }
    Asking(const Asking&) = delete;
    Asking& operator=(const Asking&) = delete;

   private:
    Watchdog& dog_;
  };

 private:
  void Ask(State state) {
    const std::lock_guard lock(mutex_);
    state_ = std::move(state);
  }

  const std::string what_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool over_ = false;
  State state_;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace colibri
