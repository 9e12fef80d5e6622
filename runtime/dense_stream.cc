#include "runtime/dense_stream.h"

#include <algorithm>
#include <cerrno>

#include "io/check.h"
#include "runtime/stages.h"

namespace colibri {

DenseStats& DenseStats::operator+=(const DenseStats& other) {
  bytes_demand += other.bytes_demand;
  bytes_ahead += other.bytes_ahead;
  waits += other.waits;
  failures += other.failures;
  return *this;
}

namespace {

int32_t FirstBlock(const Model& model, const DenseResidents& residents) {
  return std::min(residents.layers, model.Config().layers);
}

int32_t EndBlock(const Model& model, const DenseResidents& residents) {
  return model.Config().layers + (residents.head ? 0 : model.HeadParts());
}

const DenseBlock& BlockOf(const Model& model, int32_t block) {
  const int32_t layers = model.Config().layers;
  return block < layers ? model.Block(block) : model.HeadBlock(block - layers);
}

}  // namespace

int32_t DenseStream::Windows(const Model& model, const DenseResidents& residents, int32_t frames) {
  return std::min(frames + 1, EndBlock(model, residents) - FirstBlock(model, residents));
}

uint64_t DenseStream::WindowBytes(const Model& model, const DenseResidents& residents) {
  uint64_t bytes = 0;
  const int32_t end = EndBlock(model, residents);
  for (int32_t block = FirstBlock(model, residents); block < end; ++block) {
    bytes = std::max(bytes, BlockOf(model, block).bytes);
  }
  return bytes;
}

DenseStream::DenseStream(const Model& model, Reader& reader, int32_t windows, int32_t frames)
    : model_(model),
      reader_(reader),
      layers_(model.Config().layers),
      first_(FirstBlock(model, model.Residents())),
      end_(EndBlock(model, model.Residents())),
      most_kept_(std::max(1, windows / frames)),
      window_bytes_(WindowBytes(model, model.Residents())),
      buffer_(window_bytes_ * static_cast<uint64_t>(windows), "windows of dense weights"),
      windows_(static_cast<size_t>(windows)),
      checked_(static_cast<size_t>(model.Config().layers)),
      held_(static_cast<size_t>(frames), kNobody) {
  COLIBRI_CHECK(windows > 0 && window_bytes_ > 0);
  for (Window& w : windows_) w.waiting.reserve(static_cast<size_t>(frames));
}

const DenseBlock& DenseStream::Block(int32_t block) const { return BlockOf(model_, block); }

// The model shows the block that is read to `base`.
void DenseStream::Point(int32_t block, const std::byte* base) const {
  block < layers_ ? model_.PlaceLayer(block, base) : model_.PlaceHead(block - layers_, base);
}

void DenseStream::Start(Arrived arrived) {
  arrived_ = std::move(arrived);
  reader_.Start([this](uint64_t id, const ReadResult& result) { Done(id, result); });
}

DenseStream::Window* DenseStream::Find(int32_t block) {
  for (Window& w : windows_) {
    if (w.state != State::kEmpty && w.block == block) return &w;
  }
  return nullptr;
}

// An empty window, else the one whose users are gone longest. What was read ahead for a frame to
// come goes last, and only to one that waits.
DenseStream::Window* DenseStream::Free(bool demand) {
  Window* best = nullptr;
  const auto better = [](const Window& a, const Window& b) {
    const auto rank = [](const Window& w) {
      return w.state == State::kEmpty ? 0 : w.kept_for == kNobody ? 1 : 2;
    };
    return std::pair(rank(a), a.left) < std::pair(rank(b), b.left);
  };
  for (Window& w : windows_) {
    if (w.users > 0 || w.state == State::kReading) continue;
    if (!demand && w.kept_for != kNobody) continue;
    if (best == nullptr || better(w, *best)) best = &w;
  }
  return best;
}

void DenseStream::Empty(Window& window) {
  if (window.state != State::kEmpty) Point(window.block, nullptr);
  window.state = State::kEmpty;
  window.kept_for = kNobody;
}

void DenseStream::Read(Window& window, int32_t block, bool ahead) {
  Empty(window);
  const auto number = static_cast<uint64_t>(&window - windows_.data());
  window.state = State::kReading;
  window.block = block;
  window.ahead = window.again = ahead;
  Point(block, buffer_.data() + number * window_bytes_);
  Submit(window, ahead ? ReadClass::kAhead : ReadClass::kDemand);
}

void DenseStream::Submit(const Window& window, ReadClass read_class) {
  ReadJob job;
  job.id = static_cast<uint64_t>(&window - windows_.data());
  job.read_class = read_class;
  job.destination = buffer_.data() + job.id * window_bytes_;
  job.extents = Block(window.block).extents;
  reader_.Submit(job);
}

void DenseStream::Prepare(Frame& frame, int32_t block) {
  if (!frame.AnyLive()) return;
  const int32_t end = frame.WantsLogits() ? end_ : layers_, streamed = end - first_;
  const std::lock_guard lock(mutex_);
  for (Window& w : windows_) {
    if (w.kept_for == frame.id) w.kept_for = kNobody;
  }
  if (!starved_.empty()) return;
  // After the last block comes the next sweep's first.
  int32_t next = block < end ? std::max(block, first_) : first_;
  for (int32_t i = 0; i < std::min(most_kept_, streamed); ++i) {
    Window* w = Find(next);
    if (w == nullptr) {
      w = Free(false);
      if (w == nullptr) return;
      Read(*w, next, true);
    }
    if (w->users == 0) w->kept_for = frame.id;
    if (++next == end) next = first_;
  }
}

// True: the bytes are there, or cannot be had.
bool DenseStream::Use(Window& window, uint16_t frame) {
  held_[frame] = static_cast<int32_t>(&window - windows_.data());
  ++window.users;
  if (window.kept_for == frame) window.kept_for = kNobody;
  if (window.state != State::kReading) return true;
  if (window.ahead) {
    window.ahead = false;
    reader_.Promote(static_cast<uint64_t>(held_[frame]));
  }
  window.waiting.push_back(frame);
  return false;
}

bool DenseStream::Await(Frame& frame, int32_t block) {
  // Rows that have failed compute nothing any more (Stages).
  if (block < first_ || block >= end_ || !frame.AnyLive()) return true;
  const std::lock_guard lock(mutex_);
  COLIBRI_DCHECK(held_[frame.id] == kNobody);
  Window* w = Find(block);
  if (w == nullptr) {
    w = Free(true);
    if (w != nullptr) Read(*w, block, false);
  }
  const bool there = w != nullptr && Use(*w, frame.id);
  if (w == nullptr) starved_.push_back({frame.id, block});
  if (!there) ++stats_.waits;
  return there;
}

// Gives windows to frames that could not get one, in their order.
void DenseStream::Serve(std::vector<Place>* arrived) {
  while (!starved_.empty()) {
    const Place place = starved_.front();
    Window* w = Find(place.block);
    if (w == nullptr) {
      w = Free(true);
      if (w == nullptr) return;
      Read(*w, place.block, false);
    }
    starved_.pop_front();
    if (Use(*w, place.frame)) arrived->push_back(place);
  }
}

// A damaged download shows in the scales, and not always in what is computed with them: of an
// indexer it is only other tokens that are looked at. Here, before the first frame computes with
// the block, rather than on the I/O thread; once, since at real size it takes some ms a layer.
void DenseStream::CheckOnce(Window& window) {
  if (window.state != State::kReady || window.block >= layers_) return;  // the head's stay
  const auto layer = static_cast<size_t>(window.block);
  if (checked_[layer]) return;
  const TensorEntry* bad = model_.BadScales(window.block);
  checked_[layer] = bad == nullptr;
  if (bad == nullptr) return;
  ++stats_.failures;
  window.state = State::kFailed;
  window.result = {EILSEQ, bad->file, bad->offset};
}

void DenseStream::Begin(Frame& frame, int32_t block) {
  ReadResult result;
  {
    const std::lock_guard lock(mutex_);
    const int32_t held = held_[frame.id];
    if (held == kNobody) return;
    Window& w = windows_[static_cast<size_t>(held)];
    CheckOnce(w);
    if (w.state != State::kFailed) return;
    result = w.result;
  }
  const bool head = block >= layers_;
  for (FrameSequence& sequence : frame.sequences) {
    const auto first = frame.rows.begin() + sequence.first_row;
    const bool concerned =
        !head || std::any_of(first, first + sequence.rows, [](const FrameRow& r) {
          return r.wants_logits && r.state == RowState::kLive;
        });
    if (!concerned) continue;  // its prompt goes on
    sequence.error = result;
    sequence.failed = head ? FailedRead::kHead : FailedRead::kDense;
    MarkFailed(frame, static_cast<size_t>(sequence.first_row), RowState::kReadFailed, block);
  }
}

void DenseStream::Left(Frame& frame, int32_t /*block*/) {
  std::vector<Place> arrived;
  {
    const std::lock_guard lock(mutex_);
    const int32_t held = std::exchange(held_[frame.id], kNobody);
    if (held == kNobody) return;
    Window& w = windows_[static_cast<size_t>(held)];
    if (--w.users > 0) return;
    w.left = ++clock_;
    if (w.state == State::kFailed) Empty(w);  // the next frame tries again
    Serve(&arrived);
  }
  Tell(arrived);
}

void DenseStream::Done(uint64_t id, const ReadResult& result) {
  std::vector<Place> arrived;
  {
    const std::lock_guard lock(mutex_);
    Window& w = windows_[id];
    if (result.error == 0) {
      (w.ahead ? stats_.bytes_ahead : stats_.bytes_demand) += Block(w.block).bytes;
      w.state = State::kReady;
    } else if (std::exchange(w.again, false) && w.users > 0 && result.error != ECANCELED) {
      // Nobody waited for it when it was sent: what fails a line is a read made for the line.
      Submit(w, ReadClass::kDemand);
      return;
    } else {
      ++stats_.failures;
      w.state = State::kFailed;
      w.result = result;
    }
    for (const uint16_t frame : w.waiting) arrived.push_back({frame, w.block});
    w.waiting.clear();
    if (w.state == State::kFailed && w.users == 0) Empty(w);
    Serve(&arrived);
  }
  Tell(arrived);
}

void DenseStream::Tell(const std::vector<Place>& arrived) const {
  for (const Place& place : arrived) {
    place.block < layers_ ? arrived_(place.frame, place.block) : head_arrived_(place.frame);
  }
}

DenseStats DenseStream::Stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace colibri
