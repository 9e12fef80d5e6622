// What a run spent its time on: busy time and count of every node, time with reads in flight, with
// compute running, with both and with neither, and (when asked for) every span for a Chrome trace.
// The progress line, the summary and `colibri-bench pipeline` all read these figures.
// Threads: Span and ReadsBusy from any thread; the getters any time.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace colibri {

enum class NodeId : uint8_t {
  kAdmit,
  kEmbed,
  kLayerReady,
  kAttention,
  kRoute,
  kFetch,
  kExpertFfn,
  kSharedFfn,
  kLookahead,
  kCombine,
  kHeadReady,
  kHead,
  kVerify,
  kDraft,
  kDeliver,
  kCount
};
const char* NodeName(NodeId node);

struct NodeFigures {
  uint64_t count = 0, busy_ns = 0;
  int32_t running = 0;  // bodies, now
};

// The last node that had a frame for itself, and the layer.
struct FramePlace {
  NodeId node = NodeId::kCount;  // kCount: it has not been anywhere
  uint16_t layer = 0;
};

// Wall time by what ran; the four add up to the time between Start and now.
struct OverlapFigures {
  double both_s = 0, io_only_s = 0, compute_only_s = 0, neither_s = 0;
  double Total() const { return both_s + io_only_s + compute_only_s + neither_s; }
};

class Profile {
 public:
  using Clock = std::chrono::steady_clock;

  // A node's body at work; ends with the scope.
  class Span {
   public:
    Span(Profile& profile, NodeId node, uint16_t frame, uint16_t layer);
    ~Span();
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

   private:
    Profile& profile_;
    NodeId node_;
    uint16_t frame_, layer_;
    Clock::time_point start_;
  };

  // `frames`: how many there are.
  explicit Profile(size_t frames = 0);
  // Clears everything and starts the clock.
  void Start();
  // The reader has something in flight, or nothing any more.
  void ReadsBusy(bool busy);
  // One read or write of `bytes` from `start` to now, under a name that stays valid; for the trace.
  void AddRead(Clock::time_point start, const char* name, uint64_t bytes);
  // Keeps spans for WriteTrace, at most kMaxEvents of them.
  void EnableTrace() { trace_ = true; }
  bool Tracing() const { return trace_; }
  static constexpr size_t kMaxEvents = size_t{1} << 21;  // 64 MiB of spans

  NodeFigures Node(NodeId node) const;
  FramePlace Place(uint16_t frame) const;
  OverlapFigures Overlap() const;
  double Seconds() const;
  // The layer the last attention ran in; for progress.
  int32_t Layer() const { return layer_.load(std::memory_order_relaxed); }
  // Chrome trace JSON; throws IoError.
  void WriteTrace(const std::string& path) const;

 private:
  struct Event {
    NodeId node;
    uint16_t frame, layer;
    uint32_t thread;
    uint64_t start_ns, duration_ns;
  };
  struct ReadEvent {
    const char* name;
    uint64_t bytes, start_ns, duration_ns;
  };
  void Change(int compute, int io);
  uint64_t SinceStart(Clock::time_point t) const;

  struct alignas(64) Counter {
    std::atomic<uint64_t> count{0}, busy_ns{0};
    std::atomic<int32_t> running{0};
  };
  std::array<Counter, static_cast<size_t>(NodeId::kCount)> nodes_;
  std::vector<std::atomic<uint32_t>> places_;  // by frame: node and layer
  std::atomic<int32_t> layer_{-1};
  Clock::time_point start_;
  bool trace_ = false;

  mutable std::mutex mutex_;
  int computing_ = 0, reading_ = 0;
  mutable Clock::time_point changed_;
  mutable OverlapFigures overlap_;
  std::vector<Event> events_;
  std::vector<ReadEvent> reads_;
};

}  // namespace colibri
