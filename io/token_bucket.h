// The arithmetic of --io-limit: how long the next read has to wait so that the bytes read never
// run ahead of bytes_per_second by more than a burst. Keeps no clock: the caller passes the time.
// Threads: none of its own; ReadScheduler uses it under its lock.
#pragma once

#include <algorithm>
#include <cstdint>

namespace colibri {

class TokenBucket {
 public:
  // Rate 0: never a wait. `burst` bytes may go out at once; no read is larger.
  TokenBucket(uint64_t bytes_per_second, uint64_t burst)
      : rate_(static_cast<double>(bytes_per_second)),
        burst_(static_cast<double>(burst)),
        tokens_(burst_) {}

  // Nanoseconds until `bytes` may be read; 0: now.
  uint64_t WaitNs(uint64_t bytes, uint64_t now_ns) {
    if (rate_ == 0) return 0;
    if (last_ns_ == 0) last_ns_ = now_ns;
    tokens_ = std::min(burst_, tokens_ + static_cast<double>(now_ns - last_ns_) * 1e-9 * rate_);
    last_ns_ = now_ns;
    const double missing = static_cast<double>(bytes) - tokens_;
    if (missing <= 0) return 0;
    return static_cast<uint64_t>(std::min(missing / rate_ * 1e9, 1e18)) + 1;
  }

  // No wait from now on.
  void Lift() { rate_ = 0; }

  void Take(uint64_t bytes) { tokens_ -= static_cast<double>(bytes); }
  void GiveBack(uint64_t bytes) { tokens_ += static_cast<double>(bytes); }

 private:
  double rate_;
  double burst_;
  double tokens_;
  uint64_t last_ns_ = 0;
};

}  // namespace colibri
