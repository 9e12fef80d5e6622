#include "graph/tbb_parallel.h"

#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

namespace colibri {

namespace tbb = oneapi::tbb;

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
