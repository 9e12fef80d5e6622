// Blocks of dense weights read into windows: what is read when, who waits for what, and what a read
// that fails costs.
#include "runtime/dense_stream.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/weights_visit.h"
#include "tests/fake_reader.h"
#include "tests/shard_files.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

using Places = std::vector<std::pair<uint16_t, int32_t>>;  // frame, layer

constexpr int32_t kFirst = 2, kLayers = 7;  // streamed layers of the fixture: 2 to 6
const DenseResidents kLayersOnly{.layers = kFirst};
const DenseResidents kHeadToo{.layers = kFirst, .mtp = false, .head = false};
const DenseResidents kHeadAlone{.mtp = false, .head = false};

// A stream over a scripted reader, with frames of one row each.
class Rig {
 public:
  explicit Rig(int32_t windows, int32_t frames = 1, const DenseResidents& residents = kLayersOnly,
               const std::string& model = FixtureModel("quant-int4-g64"))
      : model_({model}) {
    model_.LoadDense(residents);
    reader_.emplace(&model_.Files().Files());
    stream_.emplace(model_, *reader_, windows, frames);
    stream_->OnHead([this](uint16_t frame) { arrived_.push_back({frame, kHead}); });
    stream_->Start([this](uint16_t frame, int32_t layer) { arrived_.push_back({frame, layer}); });
    for (int32_t i = 0; i < frames; ++i) {
      frames_.push_back(std::make_unique<Frame>(model_, FrameShape{1, 8, 1}));
      frames_.back()->id = static_cast<uint16_t>(i);
      Refill(i);
    }
  }
  ~Rig() { reader_->Stop(); }

  static constexpr int32_t kHead = 1000;  // in Arrived()

  // As a sweep begins.
  void Refill(int32_t frame, bool wants_logits = true) {
    At(frame).rows.assign(1, FrameRow{});
    At(frame).rows[0].wants_logits = wants_logits;
    At(frame).sequences.assign(1, FrameSequence{});
    At(frame).sequences[0].rows = 1;
  }
  void Prepare(int32_t layer, int32_t frame = 0) { stream_->Prepare(At(frame), layer); }
  bool Await(int32_t layer, int32_t frame = 0) { return stream_->Await(At(frame), layer); }
  void Begin(int32_t layer, int32_t frame = 0) { stream_->Begin(At(frame), layer); }
  void Left(int32_t layer, int32_t frame = 0) { stream_->Left(At(frame), layer); }
  Places Arrived() { return std::exchange(arrived_, {}); }

  // The layers that are being read.
  std::vector<int32_t> Reading() const {
    std::vector<int32_t> layers;
    for (const FakeReader::Pending& p : reader_->All()) layers.push_back(LayerOf(p.job));
    return layers;
  }
  // Of the layer's read.
  FakeReader::Pending Job(int32_t layer) const {
    for (const FakeReader::Pending& p : reader_->All()) {
      if (LayerOf(p.job) == layer) return p;
    }
    FAIL("layer ", layer, " is not being read");
    return {};
  }
  void Complete(int32_t layer, int error = 0) { reader_->Complete(Job(layer).job.id, error); }

  // What a stage would compute with is what the shards have.
  bool Shows(int32_t layer) const {
    const PackedMatrix& down = model_.Layer(layer).ffn.down;
    const std::string name = LayerPrefix(layer) +
                             (model_.Config().Sparse(layer) ? "mlp.shared_experts." : "mlp.") +
                             "down_proj.weight";
    const auto same = [&](const std::byte* bytes, uint64_t size, const std::string& tensor) {
      return bytes != nullptr && std::string(reinterpret_cast<const char*>(bytes), size) ==
                                     TensorBytes(model_.Files(), tensor);
    };
    return same(down.data, DataBytes(down), name) &&
           same(down.scales, ScaleBytes(down), name + ".qs");
  }
  Frame& At(int32_t frame) { return *frames_[static_cast<size_t>(frame)]; }
  size_t Submissions() const { return reader_->Submissions(); }
  DenseStats Stats() const { return stream_->Stats(); }
  const Model& TheModel() const { return model_; }

 private:
  int32_t LayerOf(const ReadJob& job) const {
    for (int32_t layer = 0; layer < kLayers + model_.HeadParts(); ++layer) {
      const std::vector<Extent>& block =
          layer < kLayers ? model_.Block(layer).extents : model_.HeadBlock(layer - kLayers).extents;
      if (std::equal(job.extents.begin(), job.extents.end(), block.begin(), block.end())) {
        return layer;
      }
    }
    return -1;
  }

  Model model_;
  std::optional<FakeReader> reader_;
  std::optional<DenseStream> stream_;
  std::vector<std::unique_ptr<Frame>> frames_;
  Places arrived_;
};

using Layers = std::vector<int32_t>;

// The frame works on the layer, reading ahead from its attention on.
void Work(Rig& rig, int32_t layer, int32_t frame = 0) {
  if (!rig.Await(layer, frame)) rig.Complete(layer);
  CHECK(rig.Shows(layer));
  rig.Begin(layer, frame);
  rig.Prepare(layer + 1, frame);
}

}  // namespace

TEST_CASE("resident layers are there, the next streamed ones are read ahead meanwhile") {
  Rig rig(2);
  rig.Prepare(0);
  CHECK(rig.Reading() == Layers{2, 3});
  CHECK(rig.Job(2).job.read_class == ReadClass::kAhead);
  CHECK(rig.Await(0));
  rig.Begin(0);
  rig.Prepare(1);
  rig.Left(0);
  CHECK(rig.Reading() == Layers{2, 3});
  CHECK(rig.Await(1));
  rig.Left(1);
  rig.Complete(2);
  CHECK(rig.Await(2));
  CHECK(rig.Shows(2));
  CHECK(rig.Arrived().empty());
  CHECK(rig.Stats().bytes_ahead == rig.TheModel().Block(2).bytes);
  CHECK(rig.Stats().waits == 0);
}

TEST_CASE("a frame that comes before its bytes waits, and its read becomes a demand") {
  Rig rig(2);
  rig.Prepare(2);
  CHECK_FALSE(rig.Await(2));
  CHECK(rig.Job(2).promoted);
  CHECK_FALSE(rig.Job(3).promoted);
  CHECK(rig.Arrived().empty());
  rig.Complete(3);
  CHECK(rig.Arrived().empty());
  rig.Complete(2);
  CHECK(rig.Arrived() == Places{{0, 2}});
  CHECK(rig.Shows(2));
  CHECK(rig.Stats().waits == 1);
}

TEST_CASE("with two windows every layer is read ahead once, into the next sweep too") {
  Rig rig(2);
  rig.Prepare(0);
  for (int sweep = 0; sweep < 3; ++sweep) {
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      while (!rig.Reading().empty()) rig.Complete(rig.Reading().front());
      CHECK(rig.Await(layer));
      rig.Begin(layer);
      rig.Prepare(layer + 1);
      rig.Left(layer);
    }
  }
  CHECK(rig.Stats().waits == 0);
  // Five a sweep, and at the end the first of the next.
  CHECK(rig.Submissions() == 3 * 5 + 1);
}

TEST_CASE("with one window nothing is read ahead of a layer at work, and all layers come") {
  Rig rig(1);
  rig.Prepare(0);
  CHECK(rig.Reading() == Layers{2});
  for (int32_t layer = kFirst; layer < kLayers; ++layer) {
    Work(rig, layer);
    CHECK(rig.Reading().empty());
    rig.Left(layer);
  }
}

TEST_CASE("two frames at different layers share one window by turns, in the order they came") {
  Rig rig(1, 3);
  CHECK_FALSE(rig.Await(2, 0));
  CHECK_FALSE(rig.Await(4, 1));
  CHECK_FALSE(rig.Await(3, 2));
  CHECK(rig.Reading() == Layers{2});
  rig.Complete(2);
  CHECK(rig.Arrived() == Places{{0, 2}});
  rig.Left(2, 0);
  CHECK(rig.Reading() == Layers{4});
  CHECK_FALSE(rig.Await(3, 0));
  rig.Complete(4);
  CHECK(rig.Arrived() == Places{{1, 4}});
  rig.Left(4, 1);
  rig.Complete(3);
  CHECK(rig.Arrived() == Places{{2, 3}, {0, 3}});
  CHECK(rig.Reading().empty());
}

TEST_CASE("frames at one layer share its window, which stays until the last has left") {
  Rig rig(2, 2);
  CHECK_FALSE(rig.Await(5, 0));
  CHECK_FALSE(rig.Await(5, 1));
  CHECK(rig.Submissions() == 1);
  rig.Complete(5);
  CHECK(rig.Arrived() == Places{{0, 5}, {1, 5}});
  rig.Left(5, 0);
  CHECK_FALSE(rig.Await(6, 0));
  rig.Complete(6);
  rig.Left(6, 0);
  CHECK_FALSE(rig.Await(2, 0));  // takes the other window
  rig.Complete(2);
  CHECK(rig.Shows(5));
  rig.Left(5, 1);
  CHECK(rig.Await(2, 1));
}

TEST_CASE("what was read ahead for a frame is taken by another's demand alone, as the last") {
  Rig rig(3, 2);
  Work(rig, 3, 0);
  Work(rig, 5, 1);
  CHECK(rig.Reading() == Layers{4});  // frame 0 came first; nothing is free for frame 1
  rig.Complete(4);
  rig.Left(5, 1);
  CHECK_FALSE(rig.Await(6, 1));  // into the window of layer 5
  rig.Complete(6);
  rig.Left(6, 1);
  rig.Prepare(0, 1);  // takes that of layer 6
  rig.Complete(2);
  CHECK(rig.Await(2, 1));
  CHECK(rig.Shows(4));
  rig.Left(3, 0);
  CHECK(rig.Await(4, 0));
  CHECK(rig.Stats().waits == 3);  // the two first layers, and layer 6
}

TEST_CASE("a demand takes what was read ahead for another frame where nothing else is left") {
  Rig rig(2, 2);
  Work(rig, 3, 0);
  rig.Complete(4);
  CHECK_FALSE(rig.Await(6, 1));
  CHECK(rig.Reading() == Layers{6});
  rig.Complete(6);
  rig.Left(3, 0);
  CHECK_FALSE(rig.Await(4, 0));
  CHECK(rig.Reading() == Layers{4});
}

TEST_CASE("a demand that finds all windows being read ahead gets the first that is done") {
  Rig rig(2, 2);
  rig.Prepare(3, 0);
  rig.Prepare(5, 1);
  CHECK(rig.Reading() == Layers{3, 5});
  CHECK_FALSE(rig.Await(2, 0));
  rig.Complete(5);
  CHECK(rig.Reading() == Layers{3, 2});
  rig.Complete(2);
  CHECK(rig.Arrived() == Places{{0, 2}});
  CHECK(rig.Shows(2));
}

TEST_CASE("a block that cannot be read fails every row of its frame, and is tried again later") {
  Rig rig(2, 2);
  CHECK_FALSE(rig.Await(4, 0));
  rig.Complete(4, EIO);
  CHECK(rig.Arrived() == Places{{0, 4}});
  rig.Begin(4, 0);
  CHECK(rig.At(0).rows[0].state == RowState::kReadFailed);
  CHECK(rig.At(0).rows[0].failed_layer == 4);
  CHECK(rig.At(0).sequences[0].failed == FailedRead::kDense);
  const Extent& first = rig.TheModel().Block(4).extents.front();
  CHECK(rig.At(0).sequences[0].error.error == EIO);
  CHECK(rig.At(0).sequences[0].error.file == first.file);
  CHECK(rig.At(0).sequences[0].error.offset == first.offset);
  CHECK(rig.Stats().failures == 1);
  // Nothing is read for rows that have failed.
  const size_t before = rig.Submissions();
  rig.Prepare(5, 0);
  rig.Left(4, 0);
  CHECK(rig.Await(5, 0));
  rig.Left(5, 0);
  CHECK(rig.Submissions() == before);
  // The next sweep, and the other frame.
  rig.Refill(0);
  CHECK_FALSE(rig.Await(4, 0));
  CHECK_FALSE(rig.Await(4, 1));
  rig.Complete(4);
  rig.Begin(4, 0);
  rig.Begin(4, 1);
  CHECK(rig.At(0).AnyLive());
  CHECK(rig.At(1).AnyLive());
  CHECK(rig.Shows(4));
}

TEST_CASE("a read ahead that fails is read once more for the frame that waits for it") {
  Rig rig(2);
  rig.Prepare(3);
  CHECK_FALSE(rig.Await(3));
  rig.Complete(3, EIO);
  CHECK(rig.Arrived().empty());
  CHECK(rig.Job(3).job.read_class == ReadClass::kDemand);
  rig.Complete(3, EIO);
  CHECK(rig.Arrived() == Places{{0, 3}});
  rig.Begin(3);
  CHECK_FALSE(rig.At(0).AnyLive());
}

TEST_CASE("a read ahead that failed before it was wanted is forgotten") {
  Rig rig(2);
  rig.Prepare(3);
  rig.Complete(3, EIO);
  CHECK_FALSE(rig.Await(3));
  CHECK(rig.Job(3).job.read_class == ReadClass::kDemand);
  rig.Complete(3);
  rig.Begin(3);
  CHECK(rig.At(0).AnyLive());
  CHECK(rig.Shows(3));
}

TEST_CASE("the parts of the head follow the layers, the next sweep's first layer follows them") {
  Rig rig(2, 1, kHeadToo);
  const int32_t end = kLayers + rig.TheModel().HeadParts();
  rig.Prepare(0);
  for (int sweep = 0; sweep < 2; ++sweep) {
    for (int32_t block = 0; block < end; ++block) {
      while (!rig.Reading().empty()) rig.Complete(rig.Reading().front());
      CHECK(rig.Await(block));
      rig.Begin(block);
      rig.Prepare(block + 1);
      rig.Left(block);
    }
  }
  CHECK(rig.Stats().waits == 0);
  CHECK(rig.Arrived().empty());
  CHECK(rig.Submissions() == static_cast<size_t>(2 * (end - kFirst) + 1));
}

TEST_CASE("a frame that comes before its part of the head is told so when it is there") {
  Rig rig(2, 2, kHeadAlone);
  rig.Prepare(0);
  CHECK(rig.Reading() == Layers{kLayers});
  CHECK(rig.Await(0));
  CHECK_FALSE(rig.Await(kLayers));
  CHECK(rig.Job(kLayers).promoted);
  CHECK_FALSE(rig.Await(kLayers, 1));
  rig.Complete(kLayers);
  CHECK(rig.Arrived() == Places{{0, Rig::kHead}, {1, Rig::kHead}});
  CHECK(rig.TheModel().HeadPart(0).data != nullptr);
  rig.Prepare(kLayers + 1);
  CHECK(rig.Reading() == Layers{kLayers + 1});
  rig.Left(kLayers);
  rig.Left(kLayers, 1);
}

TEST_CASE("for a frame that draws nothing no part of the head is read ahead") {
  Rig both(2, 1, kHeadToo), alone(2, 1, kHeadAlone);
  for (Rig* rig : {&both, &alone}) rig->Refill(0, false);
  alone.Prepare(0);
  alone.Prepare(kLayers);
  CHECK(alone.Reading().empty());
  both.Prepare(kLayers);
  CHECK(both.Reading() == Layers{kFirst, kFirst + 1});
}

TEST_CASE("a part of the head that cannot be read fails the sequences that draw") {
  Rig rig(2, 1, kHeadToo);
  Frame& frame = rig.At(0);
  frame.rows.assign(4, FrameRow{});
  frame.sequences.assign(2, FrameSequence{});
  for (size_t i = 0; i < 2; ++i) {  // a prompt that goes on, and one that ends
    frame.sequences[i].first_row = static_cast<int32_t>(2 * i);
    frame.sequences[i].rows = 2;
    frame.rows[2 * i].sequence = frame.rows[2 * i + 1].sequence = static_cast<int32_t>(i);
  }
  frame.rows[3].wants_logits = true;
  CHECK_FALSE(rig.Await(kLayers + 1));
  rig.Complete(kLayers + 1, EIO);
  rig.Begin(kLayers + 1);
  CHECK(frame.rows[0].state == RowState::kLive);
  CHECK(frame.rows[1].state == RowState::kLive);
  CHECK(frame.rows[3].state == RowState::kReadFailed);
  CHECK(frame.sequences[1].failed == FailedRead::kHead);
  CHECK(frame.sequences[1].error.error == EIO);
  CHECK(frame.sequences[0].error.error == 0);
  CHECK_FALSE(frame.WantsLogits());
  rig.Left(kLayers + 1);
  rig.Refill(0);
  CHECK_FALSE(rig.Await(kLayers + 1));  // tried again
}

TEST_CASE("scales that are not finite fail the block's frame by their place, until they are") {
  TempDir dir;
  const std::string folder = dir.Path("model");
  std::filesystem::copy(FixtureModel("quant-int4-g64"), folder);
  Rig rig(2, 2, kLayersOnly, folder);
  // Nothing that is computed with an indexer's scales shows that they are no numbers.
  std::string name;
  for (const char* tensor : {"self_attn.indexer.wk.weight.qs", "self_attn.kv_b_proj.weight.qs"}) {
    if (rig.TheModel().Files().Find(LayerPrefix(4) + tensor) == nullptr) continue;
    name = LayerPrefix(4) + tensor;
    break;
  }
  const TensorEntry& scales = *rig.TheModel().Files().Find(name);
  const std::string path = rig.TheModel().Files().Files().Path(scales.file);
  const std::string good = TensorBytes(rig.TheModel().Files(), name).substr(0, sizeof(float));
  const auto write = [&](std::string_view bytes) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(scales.offset));
    file << bytes;
  };
  for (const uint32_t bits : {0x7fc00000u, 0xff800000u}) {  // no number, minus infinity
    write({reinterpret_cast<const char*>(&bits), sizeof bits});
    const uint64_t failures = rig.Stats().failures;
    for (const int32_t frame : {0, 1}) {
      rig.Refill(frame);
      CHECK_FALSE(rig.Await(4, frame));
    }
    rig.Complete(4);
    for (const int32_t frame : {0, 1}) {
      rig.Begin(4, frame);
      CHECK(rig.At(frame).rows[0].state == RowState::kReadFailed);
      const FrameSequence& sequence = rig.At(frame).sequences[0];
      CHECK(sequence.failed == FailedRead::kDense);
      CHECK(sequence.error.error == EILSEQ);
      CHECK(sequence.error.file == scales.file);
      CHECK(sequence.error.offset == scales.offset);
      rig.Left(4, frame);
    }
    CHECK(rig.Stats().failures == failures + 1);
  }
  write(good);
  rig.Refill(0);
  CHECK_FALSE(rig.Await(4));
  rig.Complete(4);
  rig.Begin(4);
  CHECK(rig.At(0).AnyLive());
  CHECK(rig.Shows(4));
}

TEST_CASE("windows are as large as the largest streamed block, and no more than layers") {
  const Model model({FixtureModel("quant-int4-g64")});
  const auto largest = [&](int32_t from) {
    uint64_t bytes = 0;
    for (int32_t layer = from; layer < kLayers; ++layer) {
      bytes = std::max(bytes, model.Block(layer).bytes);
    }
    return bytes;
  };
  CHECK(DenseStream::WindowBytes(model, {.layers = 0}) == largest(0));
  CHECK(DenseStream::WindowBytes(model, {.layers = 3}) == largest(3));
  CHECK(DenseStream::WindowBytes(model, {}) == 0);
  CHECK(DenseStream::Windows(model, {}, 2) == 0);
  CHECK(DenseStream::Windows(model, {.layers = 0}, 1) == 2);
  CHECK(DenseStream::Windows(model, {.layers = 0}, 2) == 3);
  CHECK(DenseStream::Windows(model, {.layers = 5}, 2) == 2);
  CHECK(DenseStream::Windows(model, kHeadAlone, 2) == 3);
  CHECK(DenseStream::WindowBytes(model, kHeadAlone) == model.HeadBlock(0).bytes);
  CHECK(DenseStream::WindowBytes(model, kHeadToo) >= largest(2));
}

}  // namespace colibri
