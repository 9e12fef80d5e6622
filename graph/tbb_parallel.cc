#include "graph/tbb_parallel.h"

#include <fmt/format.h>
#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>
#include <pthread.h>

#include <atomic>
#include <cstring>
#include <vector>

#include "io/error.h"

namespace colibri {

namespace tbb = oneapi::tbb;

namespace {

// Nine of the pread reader, the output's, the signals', the progress's.
constexpr int kOtherThreads = 12;

void* WaitForZero(void* number) {
  static_cast<std::atomic<int>*>(number)->wait(1);
  return nullptr;
}

// Starts so many threads at once and ends them: oneTBB, which starts its own when there is work,
// ends the process where it cannot have one.
void CheckThreads(int threads) {
  std::atomic<int> wait{1};
  std::vector<pthread_t> started;
  started.reserve(static_cast<size_t>(threads));
  int error = 0;
  for (int i = 0; i < threads && error == 0; ++i) {
    pthread_t thread{};
    error = pthread_create(&thread, nullptr, WaitForZero, &wait);
    if (error == 0) started.push_back(thread);
  }
  wait = 0;
  wait.notify_all();
  for (const pthread_t thread : started) pthread_join(thread, nullptr);
  if (error == 0) return;
  throw IoError(
      fmt::format("{} threads can be started, {} are needed: {} (ulimit -u, ulimit -v and the "
                  "cgroup's pids.max bound them; --threads takes fewer)",
                  started.size(), threads, std::strerror(error)));
}

}  // namespace

TbbParallel::TbbParallel(int threads) : threads_(threads) { CheckThreads(threads + kOtherThreads); }

void TbbParallel::For(size_t count, size_t grain, RangeBody body) {
  if (count == 0) return;
  if (threads_ == 1 || count <= grain) {
    body(0, count);
    return;
  }
  tbb::this_task_arena::isolate([&] {
    tbb::parallel_for(
        tbb::blocked_range<size_t>(0, count, grain),
        [&](const tbb::blocked_range<size_t>& range) { body(range.begin(), range.end()); });
  });
}

int TbbParallel::ThreadIndex() const {
  const int index = tbb::this_task_arena::current_thread_index();
  return index < 0 ? 0 : index;
}

}  // namespace colibri
