#include "runtime/kv_stream.h"

#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>

#include "io/check.h"
#include "runtime/stages.h"

namespace colibri {
namespace {

size_t S(int32_t v) { return static_cast<size_t>(v); }

uint64_t Bytes(std::span<const Extent> extents) {
  uint64_t bytes = 0;
  for (const Extent& extent : extents) bytes += extent.bytes;
  return bytes;
}

// One extent more, or a longer one.
void Append(const Extent& extent, std::vector<Extent>* extents) {
  if (!extents->empty()) {
    Extent& last = extents->back();
    if (last.offset + last.bytes == extent.offset && last.dest + last.bytes == extent.dest) {
      last.bytes += extent.bytes;
      return;
    }
  }
  extents->push_back(extent);
}

}  // namespace

KvStream::KvStream(KvStore& store, Reader& reader, uint32_t file, bool check)
    : store_(store), reader_(reader), file_(file) {
  const KvLayout& layout = store.Layout();
  COLIBRI_CHECK(layout.Streams());
  const auto window = static_cast<size_t>(layout.WindowPages());
  for (int32_t i = 0; i < layout.Frames(); ++i) {
    frames_.push_back(std::make_unique<FrameState>());
    FrameState& state = *frames_.back();
    for (Transfer& read : state.reads) {
      read.pages.reserve(window);
      read.extents.reserve(2 * window);
    }
    state.writes.resize(S(layout.StreamedLayers()));
    for (Transfer& write : state.writes) {
      write.pages.reserve(S(layout.MostCompleted()));
      write.extents.reserve(2 * S(layout.MostCompleted()));
    }
  }
  if (check) checksums_.resize(ChecksumBytes(layout) / sizeof(uint64_t));
}

KvStream::~KvStream() = default;

uint64_t KvStream::ChecksumBytes(const KvLayout& layout) {
  return static_cast<uint64_t>(layout.StreamedLayers()) * static_cast<uint64_t>(layout.Ids()) * 2 *
         sizeof(uint64_t);
}

void KvStream::Start(Arrived arrived) {
  arrived_ = std::move(arrived);
  reader_.Start([this](uint64_t id, const ReadResult& result) { OnDone(id, result); });
}

uint64_t KvStream::IdOf(const Tag& tag) {
  return static_cast<uint64_t>(tag.kind) << 54 | uint64_t{tag.frame} << 40 |
         static_cast<uint64_t>(tag.layer) << 28 | static_cast<uint64_t>(tag.number);
}

KvStream::Tag KvStream::TagOf(uint64_t id) {
  return {static_cast<Kind>(id >> 54), static_cast<uint16_t>(id >> 40 & 0x3fff),
          static_cast<int32_t>(id >> 28 & 0xfff), static_cast<size_t>(id & 0xfffffff)};
}

KvStream::Transfer& KvStream::TransferOf(FrameState& state, const Tag& tag) {
  if (!tag.Writes()) return state.reads[tag.layer % 2];
  return state.writes[S(tag.layer - store_.Layout().FirstStreamed())];
}

// The layer's window is read, and what the sweep before wrote of the layer is on the drive.
bool KvStream::Over(FrameState& state, int32_t layer) {
  return TransferOf(state, {Kind::kRead, 0, layer, 0}).over &&
         TransferOf(state, {Kind::kWrite, 0, layer, 0}).over;
}

Extent KvStream::LatentExtent(const Tag& tag, KvPlace page) const {
  const KvLayout& layout = store_.Layout();
  return {file_, layout.FileLatents(tag.layer, page.page), layout.LatentStride(),
          page.place < 0 ? layout.HotLatents(tag.layer, ~page.place)
                         : layout.WindowLatents(page.place)};
}

Extent KvStream::IndexExtent(const Tag& tag, KvPlace page) const {
  const KvLayout& layout = store_.Layout();
  return {file_, layout.FileIndexKeys(tag.layer, page.page), layout.IndexStride(),
          page.place < 0 ? layout.HotIndexKeys(tag.layer, ~page.place)
                         : layout.WindowIndexKeys(page.place)};
}

void KvStream::Submit(FrameState& state, const Tag& tag, ReadClass read_class,
                      std::span<const Extent> extents) {
  ReadJob job;
  job.id = IdOf(tag);
  job.read_class = read_class;
  job.destination = tag.Writes() ? store_.HotBase() : state.windows[tag.layer % 2];
  job.extents = extents;
  job.write = tag.Writes();
  reader_.Submit(job);
}

// All pages of a transfer in few extents. The frame's state is locked.
void KvStream::SubmitAll(FrameState& state, const Tag& tag) {
  Transfer& transfer = TransferOf(state, tag);
  COLIBRI_CHECK(transfer.over);
  transfer.over = transfer.pages.empty();
  transfer.failures.clear();
  transfer.extents.clear();
  if (transfer.over) return;
  for (const KvPlace page : transfer.pages) Append(LatentExtent(tag, page), &transfer.extents);
  if (store_.Layout().HasIndex(tag.layer)) {
    for (const KvPlace page : transfer.pages) Append(IndexExtent(tag, page), &transfer.extents);
  }
  Submit(state, tag, ReadClass::kAhead, transfer.extents);
}

// One job for each page of a transfer that failed as a whole.
void KvStream::TryPages(FrameState& state, Tag tag) {
  Transfer& transfer = TransferOf(state, tag);
  const bool indexed = store_.Layout().HasIndex(tag.layer);
  tag.kind = tag.Writes() ? Kind::kWritePage : Kind::kReadPage;
  transfer.single = transfer.pages.size();
  transfer.again.clear();
  for (const KvPlace page : transfer.pages) {
    transfer.again.push_back(LatentExtent(tag, page));
    if (indexed) transfer.again.push_back(IndexExtent(tag, page));
  }
  const size_t each = indexed ? 2 : 1;
  for (tag.number = 0; tag.number < transfer.pages.size(); ++tag.number) {
    Submit(state, tag, ReadClass::kDemand,
           std::span(transfer.again).subspan(tag.number * each, each));
  }
}

void KvStream::PageEnded(FrameState& state, const Tag& tag, const ReadResult& result) {
  Transfer& transfer = TransferOf(state, tag);
  const KvPlace page = transfer.pages[tag.number];
  if (result.error != 0) failures_.fetch_add(1, std::memory_order_relaxed);
  if (tag.Writes()) {
    store_.WriteEnded(page.page, tag.layer, result);
  } else if (result.error != 0) {
    transfer.failures.push_back({page.place, result});
  }
}

void KvStream::OnDone(uint64_t id, const ReadResult& result) {
  Tag tag = TagOf(id);
  FrameState& state = *frames_[tag.frame];
  int32_t arrived = -1;
  {
    const std::lock_guard lock(state.mutex);
    Transfer& transfer = TransferOf(state, tag);
    if (tag.Single()) {
      PageEnded(state, tag, result);
      transfer.over = --transfer.single == 0;
    } else if (result.error != 0 && result.error != ECANCELED) {
      TryPages(state, tag);
    } else {
      for (tag.number = 0; tag.number < transfer.pages.size(); ++tag.number) {
        PageEnded(state, tag, result);
      }
      if (result.error == 0) {
        (tag.Writes() ? bytes_written_ : bytes_read_)
            .fetch_add(Bytes(transfer.extents), std::memory_order_relaxed);
      }
      transfer.over = true;
    }
    if (state.awaited >= 0 && Over(state, state.awaited)) {
      arrived = std::exchange(state.awaited, -1);
    }
  }
  if (arrived >= 0) arrived_(tag.frame, arrived);
}

void KvStream::Prepare(Frame& frame, int32_t layer) {
  FrameState& state = *frames_[frame.id];
  if (layer == 0) {
    MarkLost(frame);
    const std::lock_guard lock(state.mutex);
    std::copy(std::begin(frame.view.windows), std::end(frame.view.windows), state.windows);
  }
  if (!store_.Layout().Streamed(layer)) return;
  const std::lock_guard lock(state.mutex);
  const Tag tag{Kind::kRead, frame.id, layer, 0};
  Transfer& read = TransferOf(state, tag);
  read.pages.clear();
  for (size_t i = 0; i < frame.view.cold.size(); ++i) {
    read.pages.push_back({frame.view.cold[i], static_cast<int32_t>(i)});
  }
  SubmitAll(state, tag);
}

bool KvStream::Await(Frame& frame, int32_t layer) {
  if (!store_.Layout().Streamed(layer)) return true;
  FrameState& state = *frames_[frame.id];
  const std::lock_guard lock(state.mutex);
  if (Over(state, layer)) return true;
  state.awaited = layer;
  for (const Kind kind : {Kind::kRead, Kind::kWrite}) {
    const Tag tag{kind, frame.id, layer, 0};
    if (!TransferOf(state, tag).over) reader_.Promote(IdOf(tag));
  }
  return false;
}

void KvStream::Begin(Frame& frame, int32_t layer) {
  if (!store_.Layout().Streamed(layer)) return;
  FrameState& state = *frames_[frame.id];
  const std::lock_guard lock(state.mutex);
  Transfer& read = TransferOf(state, {Kind::kRead, frame.id, layer, 0});
  if (!checksums_.empty()) CheckPages(frame, layer, read);
  for (const Failure& failure : read.failures) {
    MarkPage(frame, layer, failure, frame.view.cold[S(failure.slot)]);
  }
}

void KvStream::Attended(Frame& frame, int32_t layer) {
  if (!store_.Layout().Streamed(layer) || frame.view.completed.empty()) return;
  if (!checksums_.empty()) MakeChecksums(frame, layer);
  FrameState& state = *frames_[frame.id];
  const std::lock_guard lock(state.mutex);
  const Tag tag{Kind::kWrite, frame.id, layer, 0};
  TransferOf(state, tag).pages = frame.view.completed;
  SubmitAll(state, tag);
}

void KvStream::MarkPage(Frame& frame, int32_t layer, const Failure& failure, int32_t page) const {
  for (FrameSequence& s : frame.sequences) {
    const auto first = frame.view.places.begin() + static_cast<std::ptrdiff_t>(s.first_place);
    const auto last = first + static_cast<std::ptrdiff_t>(s.pages->ids.size());
    if (std::find(first, last, failure.slot) == last) continue;
    // One that failed before keeps its reason; of a lost page there is no place to be found.
    if (frame.rows[S(s.first_row)].state != RowState::kLive) continue;
    s.error = failure.result;
    s.failed = FailedRead::kKvPage;
    s.failed_page = page;
    MarkFailed(frame, S(s.first_row), RowState::kReadFailed, layer);
  }
}

void KvStream::MarkLost(Frame& frame) const {
  for (const PageView::Lost& lost : frame.view.lost) {
    FrameSequence& s = frame.sequences[lost.sequence];
    if (frame.rows[S(s.first_row)].state != RowState::kLive) continue;
    s.error = lost.page.error;
    s.failed = FailedRead::kKvWrite;
    s.failed_page = lost.page.page;
    MarkFailed(frame, S(s.first_row), RowState::kReadFailed, lost.page.layer);
  }
}

uint64_t KvStream::Checksum(std::span<const std::byte> bytes) const {
  return XXH3_64bits(bytes.data(), bytes.size());
}

uint64_t* KvStream::ChecksumsOf(int32_t layer, int32_t page) {
  const KvLayout& layout = store_.Layout();
  return checksums_.data() + (S(layer - layout.FirstStreamed()) * S(layout.Ids()) + S(page)) * 2;
}

void KvStream::MakeChecksums(const Frame& frame, int32_t layer) {
  const KvShape& shape = store_.Shape();
  for (const KvPlace page : frame.view.completed) {
    uint64_t* sums = ChecksumsOf(layer, page.page);
    sums[0] = Checksum({store_.Latents(layer, frame.view, page), shape.LatentPageBytes()});
    if (!store_.Layout().HasIndex(layer)) continue;
    sums[1] = Checksum({store_.IndexKeys(layer, frame.view, page), shape.IndexPageBytes()});
  }
}

// Pages whose bytes are not those that were written count as failed.
void KvStream::CheckPages(const Frame& frame, int32_t layer, Transfer& read) {
  const KvShape& shape = store_.Shape();
  const size_t failed = read.failures.size();
  for (const KvPlace page : read.pages) {
    const auto known = read.failures.begin() + static_cast<std::ptrdiff_t>(failed);
    if (std::any_of(read.failures.begin(), known,
                    [&](const Failure& f) { return f.slot == page.place; })) {
      continue;
    }
    const uint64_t* sums = ChecksumsOf(layer, page.page);
    const Tag tag{Kind::kReadPage, frame.id, layer, 0};
    const auto fail = [&](const Extent& extent) {
      failures_.fetch_add(1, std::memory_order_relaxed);
      read.failures.push_back({page.place, {EBADMSG, extent.file, extent.offset, 0}});
    };
    if (Checksum({store_.Latents(layer, frame.view, page), shape.LatentPageBytes()}) != sums[0]) {
      fail(LatentExtent(tag, page));
    } else if (store_.Layout().HasIndex(layer) &&
               Checksum({store_.IndexKeys(layer, frame.view, page), shape.IndexPageBytes()}) !=
                   sums[1]) {
      fail(IndexExtent(tag, page));
    }
  }
}

KvStreamStats KvStream::Stats() const {
  return {bytes_read_.load(std::memory_order_relaxed),
          bytes_written_.load(std::memory_order_relaxed),
          failures_.load(std::memory_order_relaxed)};
}

}  // namespace colibri
