// Pages on the drive: which of them a frame finds where, what is read and written for it and when,
// and that slots and ids come back only when nothing needs them any more.
// Length: a page's way from memory to the drive and back, step by step, with one rig.
#include "runtime/kv_stream.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "runtime/frame.h"
#include "runtime/kv_store.h"
#include "runtime/weights.h"
#include "tests/fake_reader.h"

namespace colibri {
namespace {

constexpr int32_t kLayers = 4;
constexpr int32_t kPage = 4;

KvShape Shape() {
  KvShape shape;
  shape.layers = kLayers;
  shape.latent_width = 6;
  shape.index_width = 5;
  shape.has_index = {true, false, true, false};
  shape.page_tokens = kPage;
  shape.type = KvType::kF32;
  return shape;
}

KvStreaming Streaming(int32_t first, int32_t frames = 1, int32_t sequences = 4) {
  return {first, kLayers, frames, 8, sequences, 64};
}

// Only the sizes of its frames are used.
const Model& AnyModel() {
  static const Model model({COLIBRI_SOURCE_DIR "/tests/fixtures/groups/model"});
  return model;
}

// A sequence as a frame sees it: what it stored is a number for each of its positions and layers.
struct User {
  int32_t serial = 0;
  KvPages pages;
  std::vector<int32_t> text;
  int32_t stored = 0;
  int32_t frame = -1;
};

class Rig {
 public:
  explicit Rig(int32_t pages, const KvStreaming& streaming)
      : kv(Shape(), pages, streaming), stream(kv, reader, 7, true) {
    stream.Start([this](uint16_t frame, int32_t layer) { arrived.push_back({frame, layer}); });
    for (int32_t i = 0; i < streaming.frames; ++i) {
      frames.push_back(std::make_unique<Frame>(AnyModel(), FrameShape{8, 64, 1}));
      frames.back()->id = static_cast<uint16_t>(i);
    }
  }
  ~Rig() { reader.Stop(); }

  // Adds `rows` positions of a sequence to a frame that is being filled, and drafts behind them, of
  // which those behind the first `right` store something wrong.
  void Place(Frame& frame, User& user, int32_t rows, int32_t drafts = 0, int32_t right = 0) {
    REQUIRE(kv.Grow(&user.pages, user.stored + rows + drafts));
    user.frame = frame.id;
    FrameSequence s;
    s.pages = &user.pages;
    s.first_row = static_cast<int32_t>(frame.rows.size());
    s.rows = rows + drafts;
    s.drafts = drafts;
    s.accepted = right;
    for (int32_t i = 0; i < s.rows; ++i) {
      FrameRow row;
      row.sequence = static_cast<int32_t>(frame.sequences.size());
      row.position = user.stored + i;
      row.draft = i >= rows + right;
      frame.rows.push_back(row);
    }
    frame.sequences.push_back(s);
  }
  void Clear(Frame& frame) {
    kv.CollectWrites();
    frame.rows.clear();
    frame.sequences.clear();
  }
  void Begin(Frame& frame) {
    MakeView(kv, &frame);
    stream.Prepare(frame, 0);
  }
  // Everything between layer_ready and the next layer. `number(user, position)` is what is stored.
  template <class Number>
  void Layer(Frame& frame, int32_t layer, const Number& number) {
    stream.Begin(frame, layer);
    stream.Prepare(frame, layer + 1);
    for (const FrameRow& row : frame.rows) {
      const FrameSequence& s = frame.sequences[static_cast<size_t>(row.sequence)];
      Store(frame, layer, s, row.position,
            number(row.sequence, row.position) + (row.draft ? 5 : 0));
    }
    for (size_t i = 0; i < frame.sequences.size(); ++i) {
      const FrameSequence& s = frame.sequences[i];
      const FrameRow& last = frame.rows[static_cast<size_t>(s.first_row + s.rows - 1)];
      REQUIRE(last.state == RowState::kLive);
      for (int32_t p = 0; p <= last.position - (s.drafts - s.accepted); ++p) {
        REQUIRE(Stored(frame, layer, s, p) == number(static_cast<int32_t>(i), p) * 10 + layer);
      }
    }
    stream.Attended(frame, layer);
    stream.Left(frame, layer);
  }
  // A sweep that waits for nothing: whatever is asked of the reader is done at once.
  template <class Number>
  void Sweep(Frame& frame, const Number& number) {
    Begin(frame);
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      while (reader.CompleteOldest()) {
      }
      REQUIRE(stream.Await(frame, layer));
      Layer(frame, layer, number);
    }
    End(frame);
  }
  void End(Frame& frame) { kv.CloseView(&frame.view); }

  FakeReader reader;
  KvStore kv;
  KvStream stream;
  std::vector<std::unique_ptr<Frame>> frames;
  std::vector<std::pair<uint16_t, int32_t>> arrived;

 private:
  // Latents and, in layers with an index, index keys hold the same number.
  void Store(const Frame& frame, int32_t layer, const FrameSequence& s, int32_t position,
             int32_t number) {
    const KvPlace at = frame.Place(s, static_cast<size_t>(position / kPage));
    number = number * 10 + layer;
    std::memcpy(kv.Latents(layer, frame.view, at) + kv.LatentOffset(position), &number, 4);
    if (!Shape().has_index[static_cast<size_t>(layer)]) return;
    std::memcpy(kv.IndexKeys(layer, frame.view, at) + kv.IndexKeyOffset(position), &number, 4);
  }
  int32_t Stored(const Frame& frame, int32_t layer, const FrameSequence& s, int32_t position) {
    const KvPlace at = frame.Place(s, static_cast<size_t>(position / kPage));
    int32_t latent = 0, key = 0;
    std::memcpy(&latent, kv.Latents(layer, frame.view, at) + kv.LatentOffset(position), 4);
    if (!Shape().has_index[static_cast<size_t>(layer)]) return latent;
    std::memcpy(&key, kv.IndexKeys(layer, frame.view, at) + kv.IndexKeyOffset(position), 4);
    REQUIRE(key == latent);
    return latent;
  }
};

// One sequence: its number at a position is the position.
int32_t Position(int32_t /*sequence*/, int32_t position) { return position; }

}  // namespace

TEST_CASE("pages that are full are written once in each streamed layer, and read the sweep after") {
  Rig rig(8, Streaming(1));
  Frame& frame = *rig.frames[0];
  User user;
  rig.Clear(frame);
  rig.Place(frame, user, 7);
  rig.Sweep(frame, Position);
  // One page is full: three layers, one of them with index keys.
  CHECK(rig.reader.Submissions() == 3);
  while (rig.reader.CompleteOldest()) {
  }
  const uint64_t block = 4096;
  CHECK(rig.stream.Stats().bytes_written == 4 * block);
  CHECK(rig.stream.Stats().bytes_read == 0);
  user.stored = 7;
  rig.Clear(frame);
  rig.Place(frame, user, 1);
  rig.Sweep(frame, Position);
  while (rig.reader.CompleteOldest()) {
  }
  CHECK(frame.view.cold == std::vector<int32_t>{0});
  CHECK(rig.stream.Stats().bytes_read == 4 * block);
  CHECK(rig.stream.Stats().bytes_written == 8 * block);
}

TEST_CASE("cold pages that lie together are read with one extent for latents and one for keys") {
  Rig rig(12, Streaming(0));
  Frame& frame = *rig.frames[0];
  User a, b;
  for (int32_t step = 0; step < 5; ++step) {
    rig.Clear(frame);
    rig.Place(frame, a, 4);
    rig.Place(frame, b, 4);
    rig.Sweep(frame, Position);
    while (rig.reader.CompleteOldest()) {
    }
    a.stored = b.stored = 4 * (step + 1);
  }
  rig.Clear(frame);
  rig.Place(frame, a, 1);
  rig.Place(frame, b, 1);
  rig.Begin(frame);
  CHECK(frame.view.cold.size() == 10);
  const std::vector<FakeReader::Pending> pending = rig.reader.All();
  REQUIRE(pending.size() == 1);
  CHECK(pending[0].job.read_class == ReadClass::kAhead);
  CHECK(pending[0].job.extents.size() == 2);
  CHECK(pending[0].job.extents[0].bytes == 10 * 4096);
  rig.End(frame);
}

TEST_CASE("a frame waits for its window and for what it wrote of the layer the sweep before") {
  Rig rig(8, Streaming(0));
  Frame& frame = *rig.frames[0];
  User user;
  const auto pass = [&](int32_t layer) {
    REQUIRE(rig.stream.Await(frame, layer));
    rig.Layer(frame, layer, Position);
  };
  rig.Clear(frame);
  rig.Place(frame, user, 4);
  rig.Begin(frame);
  for (int32_t layer = 0; layer < kLayers; ++layer) pass(layer);
  rig.End(frame);
  CHECK(rig.reader.PendingCount() == kLayers);  // writes
  user.stored = 4;

  rig.Clear(frame);
  rig.Place(frame, user, 1);
  rig.Begin(frame);
  CHECK(frame.view.cold.empty());  // it is still hot
  CHECK_FALSE(rig.stream.Await(frame, 0));
  const std::vector<FakeReader::Pending> writes = rig.reader.All();
  CHECK(writes[0].promoted);
  CHECK_FALSE(writes[1].promoted);
  rig.reader.Complete(writes[1].job.id);
  CHECK(rig.arrived.empty());
  rig.reader.Complete(writes[0].job.id);
  REQUIRE(rig.arrived.size() == 1);
  CHECK(rig.arrived[0] == std::pair<uint16_t, int32_t>{0, 0});
  rig.Layer(frame, 0, Position);
  rig.reader.Complete(writes[2].job.id);
  rig.reader.Complete(writes[3].job.id);
  for (int32_t layer = 1; layer < kLayers; ++layer) pass(layer);
  rig.End(frame);
  user.stored = 5;

  rig.Clear(frame);
  rig.Place(frame, user, 1);
  rig.Begin(frame);
  CHECK(frame.view.cold.size() == 1);
  CHECK_FALSE(rig.stream.Await(frame, 0));
  CHECK(rig.reader.All()[0].promoted);
  CHECK(rig.reader.CompleteOldest());
  CHECK(rig.arrived.size() == 2);
  rig.Layer(frame, 0, Position);
  CHECK(rig.reader.PendingCount() == 1);  // the next layer's window
  rig.reader.Stop();
  rig.End(frame);
}

TEST_CASE("a page given back while it is written is handed out when its writes are over") {
  Rig rig(2, Streaming(0));
  Frame& frame = *rig.frames[0];
  User first, second;
  rig.Clear(frame);
  rig.Place(frame, first, 8);
  rig.Begin(frame);
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    REQUIRE(rig.stream.Await(frame, layer));
    rig.Layer(frame, layer, Position);
  }
  rig.End(frame);
  CHECK(rig.kv.FreePages() == 0);
  rig.kv.Release(&first.pages);
  CHECK(rig.kv.FreePages() == 2);  // for the scheduler they are free
  rig.kv.CollectWrites();
  REQUIRE(rig.kv.Grow(&second.pages, 8));
  CHECK(second.pages.ids == std::vector<int32_t>{2, 3});
  rig.kv.Release(&second.pages);
  while (rig.reader.CompleteOldest()) {
  }
  rig.kv.CollectWrites();
  REQUIRE(rig.kv.Grow(&second.pages, 8));
  CHECK(second.pages.ids == std::vector<int32_t>{0, 1});
  rig.kv.Release(&second.pages);
  CHECK(rig.kv.FreeHotSlots() == rig.kv.Layout().HotSlots());
}

TEST_CASE("a hot slot that a frame found stays until the frame is done") {
  Rig rig(4, Streaming(0, 2));
  Frame &one = *rig.frames[0], &other = *rig.frames[1];
  User first, second;
  first.text = {1, 2, 3, 4};
  rig.Clear(one);
  rig.Place(one, first, 4);
  rig.Begin(one);
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    REQUIRE(rig.stream.Await(one, layer));
    rig.Layer(one, layer, Position);
  }
  rig.End(one);
  rig.kv.Publish(&first.pages, first.text);
  // A second sequence shares the page while it is on its way to the drive.
  rig.Clear(other);
  second.stored = rig.kv.Share(&second.pages, first.text);
  REQUIRE(second.stored == 4);
  rig.Place(other, second, 1);
  rig.Begin(other);
  const int32_t slots = rig.kv.FreeHotSlots();
  while (rig.reader.CompleteOldest()) {
  }
  rig.kv.CollectWrites();
  CHECK(rig.kv.FreeHotSlots() == slots);
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    REQUIRE(rig.stream.Await(other, layer));
    rig.Layer(other, layer, Position);
  }
  rig.End(other);
  CHECK(rig.kv.FreeHotSlots() == slots + 1);
  rig.kv.Release(&first.pages);
  rig.kv.Release(&second.pages);
  CHECK(rig.kv.FreeHotSlots() == rig.kv.Layout().HotSlots());
}

TEST_CASE("a frame completes no more pages than can be on their way at once") {
  Rig rig(40, Streaming(0));
  const int32_t most = rig.kv.Layout().MostCompleted();
  KvPages pages;
  CHECK(rig.kv.RowsWithin(pages, 0, 1000, most) == (most + 1) * kPage - 1);
  CHECK(rig.kv.RowsWithin(pages, 3, 1000, 0) == 0);
  CHECK(rig.kv.RowsWithin(pages, 2, 1000, 0) == 1);
  CHECK(rig.kv.RowsWithin(pages, 3, 1000, 1) == 4);
  // Slots that are taken already bound it too.
  const int32_t slots = rig.kv.Layout().HotSlots();
  REQUIRE(rig.kv.Grow(&pages, (slots - 1) * kPage));
  KvPages more;
  CHECK(rig.kv.RowsWithin(more, 0, 1000, most) == kPage);
  CHECK(rig.kv.RowsWithin(pages, (slots - 1) * kPage - 1, 1000, most) == 1 + kPage);
  KvStore memory(Shape(), 40);
  CHECK(memory.RowsWithin(pages, 0, 1000, 0) == 1000);
  rig.kv.Release(&pages);
}

TEST_CASE(
    "a page whose last position is a draft's is written by the frame after, if it was accepted") {
  for (const bool accepted : {false, true}) {
    Rig rig(8, Streaming(0));
    Frame& frame = *rig.frames[0];
    User user;
    user.text.assign(9, 0);
    const auto sweep = [&](int32_t rows, int32_t drafts, int32_t right) {
      rig.Clear(frame);
      rig.Place(frame, user, rows, drafts, right);
      rig.Sweep(frame, Position);
      user.stored += rows + right;
      rig.kv.Publish(&user.pages, std::span(user.text).first(static_cast<size_t>(user.stored)));
      rig.kv.Shrink(&user.pages, user.stored);
      return frame.view.completed.size();
    };
    CHECK(sweep(3, 2, accepted ? 2 : 0) == 0);
    CHECK(rig.stream.Stats().bytes_written == 0);
    CHECK(user.pages.ids.size() == (accepted ? 2 : 1));
    CHECK(rig.kv.Unwritten(user.pages, user.stored) == (accepted ? 1 : 0));
    CHECK(user.pages.known == 0);  // nobody shares it before it is on its way
    CHECK(sweep(1, 0, 0) == 1);
    CHECK(rig.kv.Unwritten(user.pages, user.stored) == 0);
    CHECK(user.pages.known == 1);
    while (rig.reader.CompleteOldest()) {
    }
    rig.kv.CollectWrites();
    CHECK(rig.kv.FreeHotSlots() == rig.kv.Layout().HotSlots() - (accepted ? 1 : 0));
    sweep(1, 0, 0);  // which reads it, and looks at every position
    rig.kv.Release(&user.pages);
    CHECK(rig.kv.FreeHotSlots() == rig.kv.Layout().HotSlots());
  }
}

TEST_CASE("a lost page fails who holds it at the next sweep and is found by nobody") {
  Rig rig(8, Streaming(0));
  Frame& frame = *rig.frames[0];
  User user;
  user.text = {1, 2, 3, 4};
  rig.Clear(frame);
  rig.Place(frame, user, 4);
  rig.Begin(frame);
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    REQUIRE(rig.stream.Await(frame, layer));
    rig.Layer(frame, layer, Position);
  }
  rig.End(frame);
  user.stored = 4;
  rig.kv.Publish(&user.pages, user.text);
  CHECK(rig.kv.Find(user.text).pages == 1);
  // The write of layer 2 fails, and its second try.
  rig.reader.Complete(rig.reader.All()[2].job.id, ENOSPC);
  CHECK(rig.reader.PendingCount() == 4);
  rig.reader.Complete(rig.reader.All()[3].job.id, ENOSPC);
  while (rig.reader.CompleteOldest()) {
  }
  rig.Clear(frame);
  CHECK(rig.kv.Find(user.text).pages == 0);
  rig.Place(frame, user, 1);
  rig.Begin(frame);
  REQUIRE(frame.rows.size() == 1);
  CHECK(frame.rows[0].state == RowState::kReadFailed);
  CHECK(frame.rows[0].failed_layer == 2);
  CHECK(frame.sequences[0].failed == FailedRead::kKvWrite);
  CHECK(frame.sequences[0].failed_page == 0);
  CHECK(frame.sequences[0].error.error == ENOSPC);
  rig.End(frame);
  rig.kv.Release(&user.pages);
  // The id is as good as any other again.
  rig.kv.CollectWrites();
  REQUIRE(rig.kv.Grow(&user.pages, 4));
  CHECK(user.pages.ids == std::vector<int32_t>{0});
  rig.kv.Release(&user.pages);
}

TEST_CASE("through any order of sweeps, transfers and faults every page holds what was stored") {
  for (const int32_t first : {0, 2}) {
    std::mt19937 random(static_cast<uint32_t>(first) + 5);
    const auto below = [&](int32_t n) {
      return static_cast<int32_t>(random() % static_cast<uint32_t>(n));
    };
    Rig rig(20, Streaming(first, 2, 5));
    std::vector<User> users(5);
    std::vector<int32_t> layer(2, -1);  // of each frame: that it waits for, or -1
    std::vector<std::vector<User*>> inside(2);
    size_t cold = 0, sweeps = 0, shared = 0, late = 0;
    const auto number = [&](size_t f) {
      // Texts are of zeros and ones, so that prefixes meet: a position's number says all of them.
      return [&inside, f](int32_t sequence, int32_t position) {
        const std::vector<int32_t>& text = inside[f][static_cast<size_t>(sequence)]->text;
        int32_t n = 1;
        for (int32_t p = 0; p <= position; ++p)
          n = (2 * n + text[static_cast<size_t>(p)]) % 9999991;
        return n % 10'000'000;
      };
    };
    for (int step = 0; step < 30'000; ++step) {
      if (below(3) > 0) {
        const std::vector<FakeReader::Pending> pending = rig.reader.All();
        if (pending.empty()) continue;
        const ReadJob& job =
            pending[static_cast<size_t>(below(static_cast<int32_t>(pending.size())))].job;
        // Whole transfers may fail; what is tried again does not.
        const bool fails = job.read_class == ReadClass::kAhead && below(10) == 0;
        rig.reader.Complete(job.id, fails ? EIO : 0);
        continue;
      }
      const auto f = static_cast<size_t>(below(2));
      Frame& frame = *rig.frames[f];
      if (layer[f] >= 0) {
        const std::pair<uint16_t, int32_t> mine{static_cast<uint16_t>(f), layer[f]};
        const auto at = std::find(rig.arrived.begin(), rig.arrived.end(), mine);
        if (at == rig.arrived.end()) continue;
        rig.arrived.erase(at);
        rig.Layer(frame, layer[f], number(f));
        if (++layer[f] == kLayers) {
          ++sweeps;
          layer[f] = -1;
          rig.End(frame);
          for (size_t i = 0; i < inside[f].size(); ++i) {
            User& user = *inside[f][i];
            const FrameSequence& place = frame.sequences[i];
            user.stored += place.rows - place.drafts + place.accepted;
            user.frame = -1;
            rig.kv.Publish(&user.pages,
                           std::span(user.text).first(static_cast<size_t>(user.stored)));
            rig.kv.Shrink(&user.pages, user.stored);
            if (user.stored == static_cast<int32_t>(user.text.size()) || below(8) == 0) {
              rig.kv.Release(&user.pages);
              user.stored = 0;
              user.text.clear();
            }
          }
          continue;
        }
      } else {
        rig.Clear(frame);
        inside[f].clear();
        int32_t completed = rig.kv.Layout().MostCompleted(), left = 8;
        for (User& user : users) {
          if (user.frame >= 0 || below(3) == 0 || left == 0) continue;
          if (user.text.empty()) {
            user.text.resize(static_cast<size_t>(1 + below(60)));
            for (int32_t& token : user.text) token = below(6) == 0 ? 1 : 0;
            user.stored =
                rig.kv.Share(&user.pages, std::span(user.text).first(user.text.size() - 1));
            shared += user.stored > 0 ? 1 : 0;
          }
          int32_t rows =
              std::min({1 + below(6), left, static_cast<int32_t>(user.text.size()) - user.stored});
          const int32_t unwritten = rig.kv.Unwritten(user.pages, user.stored);
          late += unwritten > 0 ? 1 : 0;
          rows = rig.kv.RowsWithin(user.pages, user.stored, rows, completed - unwritten);
          const int32_t room = static_cast<int32_t>(user.pages.ids.size()) + rig.kv.FreePages();
          rows = std::min(rows, room * kPage - user.stored);
          if (rows <= 0) continue;
          completed -= unwritten + (user.stored + rows) / kPage - user.stored / kPage;
          left -= rows;
          const int32_t behind = static_cast<int32_t>(user.text.size()) - user.stored - rows;
          int32_t drafts = std::min({below(5), left, behind});
          const int32_t held = static_cast<int32_t>(user.pages.ids.size());
          const auto more = [&] { return rig.kv.PagesFor(user.stored + rows + drafts) - held; };
          while (more() > std::min(rig.kv.FreePages(), rig.kv.FreeHotSlots())) --drafts;
          left -= drafts;
          rig.Place(frame, user, rows, drafts, below(drafts + 1));
          inside[f].push_back(&user);
        }
        if (inside[f].empty()) {
          for (User& user : users) {  // nobody has a page to grow by
            if (user.frame < 0) rig.kv.Release(&user.pages), user.stored = 0, user.text.clear();
          }
          continue;
        }
        layer[f] = 0;
        rig.Begin(frame);
        cold += frame.view.cold.size();
      }
      if (rig.stream.Await(frame, layer[f])) rig.arrived.push_back({frame.id, layer[f]});
    }
    CHECK(sweeps > 300);
    CHECK(cold > 300);
    CHECK(shared > 10);
    CHECK(late > 10);
    CHECK(rig.stream.Stats().failures == 0);
  }
}

}  // namespace colibri
