// What travels along the graph's edges: indices, never data. Everything else is in the frame that
// the indices name; whoever receives the last message about a frame owns it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace colibri {

struct FrameRef {
  uint16_t frame = 0;
};

// A frame at a layer; layer number `layers` is the MTP layer.
struct LayerRef {
  uint16_t frame = 0, layer = 0;
};

// One expert of the layer's union: number `job` of the frame's jobs.
struct ExpertJob {
  uint16_t frame = 0, layer = 0, job = 0;
};

// Its bytes, pinned for the job, or nullptr: the read failed (the job says how).
struct ReadyExpert {
  uint16_t frame = 0, layer = 0, job = 0;
  const std::byte* data = nullptr;
};

// TBB copies messages and default-constructs them in its queues.
template <class T>
inline constexpr bool kSmallMessage =
    std::is_trivially_copyable_v<T>&& std::is_default_constructible_v<T> && sizeof(T) <= 16;
static_assert(kSmallMessage<FrameRef> && kSmallMessage<LayerRef> && kSmallMessage<ExpertJob> &&
              kSmallMessage<ReadyExpert>);

}  // namespace colibri
