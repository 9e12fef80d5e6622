// A lock for whoever only looks, and must not wait for ever: what it would look at may stand still
// with the lock held.
#pragma once

#include <chrono>
#include <mutex>
#include <thread>

namespace colibri {

// Not owned if others held it for about 100 ms.
inline std::unique_lock<std::mutex> LockSoon(std::mutex& mutex) {
  std::unique_lock lock(mutex, std::try_to_lock);
  for (int tries = 0; !lock.owns_lock() && tries < 100; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    (void)lock.try_lock();
  }
  return lock;
}

}  // namespace colibri
