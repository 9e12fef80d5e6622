// KV pages on their way between memory and the scratch file. Before a frame computes attention of a
// streamed layer its cold pages are read into a window, while the layer before is worked on; after
// it the pages that the frame's rows have filled are written. The write of a layer is over before
// the same frame comes to that layer again.
//
// A read or write that fails is tried again page by page; only the sequences that hold a page that
// fails once more fail.
// Threads: as LayerSupplier; the reader's callbacks on its thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "io/reader.h"
#include "runtime/kv_store.h"
#include "runtime/layer_supplier.h"

namespace colibri {

struct KvStreamStats {
  uint64_t bytes_read = 0, bytes_written = 0;  // that were wanted; whole pages
  uint64_t failures = 0;                       // pages that could not be read or written
};

class KvStream final : public LayerSupplier {
 public:
  // `store` streams; it and `reader`, a port of this object's own, outlive it. `file` has at least
  // the layout's FileBytes(). `check`: pages are compared with checksums made when they were
  // written.
  KvStream(KvStore& store, Reader& reader, uint32_t file, bool check);
  ~KvStream() override;

  void Start(Arrived arrived) override;
  void Prepare(Frame& frame, int32_t layer) override;
  bool Await(Frame& frame, int32_t layer) override;
  void Begin(Frame& frame, int32_t layer) override;
  void Attended(Frame& frame, int32_t layer) override;

  KvStreamStats Stats() const;
  static uint64_t ChecksumBytes(const KvLayout& layout);

 private:
  struct Failure {
    int32_t slot = 0;  // in the window
    ReadResult result;
  };
  // What is under way for a frame and layer: all pages at once, or again page by page.
  struct Transfer {
    bool over = true;
    std::vector<KvPlace> pages;
    std::vector<Extent> extents;
    size_t single = 0;          // pages that are tried again and not over
    std::vector<Extent> again;  // theirs
    std::vector<Failure> failures;
  };
  struct FrameState {
    std::mutex mutex;
    std::byte* windows[2] = {nullptr, nullptr};
    int32_t awaited = -1;          // the layer that the frame waits for
    Transfer reads[2];             // of even and odd layers
    std::vector<Transfer> writes;  // [streamed layers]
  };
  enum class Kind : uint8_t { kRead, kReadPage, kWrite, kWritePage };
  struct Tag {
    Kind kind = Kind::kRead;
    uint16_t frame = 0;
    int32_t layer = 0;
    size_t number = 0;  // of a page in Transfer::pages
    bool Writes() const { return kind == Kind::kWrite || kind == Kind::kWritePage; }
    bool Single() const { return kind == Kind::kReadPage || kind == Kind::kWritePage; }
  };

  static uint64_t IdOf(const Tag& tag);
  static Tag TagOf(uint64_t id);
  Transfer& TransferOf(FrameState& state, const Tag& tag);
  bool Over(FrameState& state, int32_t layer);
  void OnDone(uint64_t id, const ReadResult& result);
  Extent LatentExtent(const Tag& tag, KvPlace page) const;
  Extent IndexExtent(const Tag& tag, KvPlace page) const;
  void Submit(FrameState& state, const Tag& tag, ReadClass read_class,
              std::span<const Extent> extents);
  void SubmitAll(FrameState& state, const Tag& tag);
  void TryPages(FrameState& state, Tag tag);
  void PageEnded(FrameState& state, const Tag& tag, const ReadResult& result);
  void MarkPage(Frame& frame, int32_t layer, const Failure& failure, int32_t page) const;
  void MarkLost(Frame& frame) const;
  uint64_t Checksum(std::span<const std::byte> bytes) const;
  uint64_t* ChecksumsOf(int32_t layer, int32_t page);
  void MakeChecksums(const Frame& frame, int32_t layer);
  void CheckPages(const Frame& frame, int32_t layer, Transfer& read);

  KvStore& store_;
  Reader& reader_;
  const uint32_t file_;
  Arrived arrived_;
  std::vector<std::unique_ptr<FrameState>> frames_;
  std::vector<uint64_t> checksums_;  // [streamed layers][ids][2]; empty: not compared
  std::atomic<uint64_t> bytes_read_{0}, bytes_written_{0}, failures_{0};
};

}  // namespace colibri
