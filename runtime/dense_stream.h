// Dense weights that are not in memory: the blocks of streamed layers, and after them the parts of
// a streamed head, are read into windows, one block ahead of the frame that needs them. Blocks are
// numbered as their layers; `layers` + i is part i of the head. A frame takes the parts one after
// another as it took the layers, if some row wants logits.
//
// A window belongs to a block; frames at that block share it. Its users are counted from Await to
// Left, which no frame's progress lies between (a layer's other work waits for slots, never for
// windows), and a frame holds at most one window while it awaits none: so one window is enough for
// any number of frames to finish. Reading ahead takes only windows without users, and never one
// that another frame's block was read ahead into; a frame that awaits a block may take those too.
//
// Threads: as LayerSupplier says; the reader's callbacks from its I/O thread.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "io/memory.h"
#include "io/reader.h"
#include "runtime/layer_supplier.h"
#include "runtime/weights.h"

namespace colibri {

// Monotonic totals of blocks and embedding rows, rounding included. waits: how often a frame came
// before its bytes.
struct DenseStats {
  uint64_t bytes_demand = 0, bytes_ahead = 0;
  uint64_t waits = 0, failures = 0;
  uint64_t Bytes() const { return bytes_demand + bytes_ahead; }
  DenseStats& operator+=(const DenseStats& other);
};

class DenseStream final : public LayerSupplier {
 public:
  // `model` is loaded and streams at least one block. Model and reader outlive the stream, which is
  // the reader's only user; the reader has been stopped when the stream is destroyed.
  DenseStream(const Model& model, Reader& reader, int32_t windows, int32_t frames);

  // As many as serve: a block at hand for each frame and one ahead, no more than streamed blocks.
  static int32_t Windows(const Model& model, const DenseResidents& residents, int32_t frames);
  // Of one window: the largest streamed block.
  static uint64_t WindowBytes(const Model& model, const DenseResidents& residents);

  // Called for a part of the head as `arrived` is for a layer. Before Start.
  void OnHead(std::function<void(uint16_t frame)> arrived) { head_arrived_ = std::move(arrived); }
  void Start(Arrived arrived) override;
  // For the head as for layers, with the numbers of its parts; the one after the last part is the
  // next sweep's first block.
  void Prepare(Frame& frame, int32_t block) override;
  bool Await(Frame& frame, int32_t block) override;
  // The rows that want logits need the head, every row needs a layer.
  void Begin(Frame& frame, int32_t block) override;
  void Left(Frame& frame, int32_t block) override;
  DenseStats Stats() const;

 private:
  enum class State : uint8_t { kEmpty, kReading, kReady, kFailed };
  struct Window {
    State state = State::kEmpty;
    int32_t block = -1;
    int32_t users = 0;
    int32_t kept_for = kNobody;  // the frame that has it read ahead and not come to it
    bool ahead = false;          // the read has not been asked for by a frame that waits
    bool again = false;          // of such a read: if it fails, it is tried once more
    uint64_t left = 0;           // when the last user left
    ReadResult result;
    std::vector<uint16_t> waiting;  // frames
  };
  struct Place {
    uint16_t frame;
    int32_t block;
  };
  static constexpr int32_t kNobody = -1;

  const DenseBlock& Block(int32_t block) const;
  void Point(int32_t block, const std::byte* base) const;

  // All of these are called under the lock.
  Window* Find(int32_t block);
  Window* Free(bool demand);
  void Read(Window& window, int32_t block, bool ahead);
  void Submit(const Window& window, ReadClass read_class);
  void Empty(Window& window);
  void CheckOnce(Window& window);
  bool Use(Window& window, uint16_t frame);
  void Serve(std::vector<Place>* arrived);

  void Done(uint64_t id, const ReadResult& result);
  void Tell(const std::vector<Place>& arrived) const;

  const Model& model_;
  Reader& reader_;
  const int32_t layers_;
  const int32_t first_, end_;  // streamed blocks
  const int32_t most_kept_;    // windows that one frame reads ahead into
  const uint64_t window_bytes_;
  PopulatedBuffer buffer_;
  Arrived arrived_;
  std::function<void(uint16_t frame)> head_arrived_;

  mutable std::mutex mutex_;  // guards everything below; taken before any lock of the reader
  std::vector<Window> windows_;
  std::vector<bool> checked_;  // by layer: its scales were finite, as those loaded once are
  std::vector<int32_t> held_;  // by frame: the window it uses, kNobody for none
  std::deque<Place> starved_;  // no window is free for them
  uint64_t clock_ = 0;
  DenseStats stats_;
};

}  // namespace colibri
