// ExpertCache with a scripted reader: states, pins, hints, eviction, failures.
// Length: one scripted cache serves every case.
#include "io/expert_cache.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <utility>
#include <vector>

#include "io/slot_pool.h"
#include "tests/fake_reader.h"

namespace colibri {
namespace {

constexpr uint32_t kPerLayer = 10;

// Items 0-9 are layer 0, 10-19 layer 1, and so on; item i is page i of file 0. Items from
// `second_class` on take slots of class 1.
struct Setup {
  explicit Setup(std::vector<SlotClass> slots, uint32_t second_class = 1000,
                 CachePolicyKind policy = CachePolicyKind::kLru)
      : pool(slots),
        cache(
            Items(second_class), pool, reader,
            [this](const ReadyItem& ready) { answers.push_back(ready); }, policy) {}

  std::vector<CacheItem> Items(uint32_t second_class) {
    for (uint32_t i = 0; i < 4 * kPerLayer; ++i) {
      extents.push_back({0, i * kIoAlign, kIoAlign, 0});
    }
    std::vector<CacheItem> items;
    for (uint32_t i = 0; i < extents.size(); ++i) {
      items.push_back({static_cast<uint16_t>(i / kPerLayer),
                       static_cast<uint16_t>(i >= second_class), std::span(&extents[i], 1)});
    }
    return items;
  }

  // The items being read, oldest first.
  std::vector<uint32_t> Reading() const {
    std::vector<uint32_t> items;
    for (const FakeReader::Pending& pending : reader.All()) {
      items.push_back(static_cast<uint32_t>(pending.job.extents[0].offset / kIoAlign));
    }
    return items;
  }
  FakeReader::Pending PendingOf(uint32_t item) const {
    for (const FakeReader::Pending& pending : reader.All()) {
      if (pending.job.extents[0].offset == item * kIoAlign) return pending;
    }
    REQUIRE_MESSAGE(false, "no read of this item is pending");
    return {};
  }
  void Complete(uint32_t item, int error = 0) { reader.Complete(PendingOf(item).job.id, error); }
  // One more guess of `frame`, after those before.
  void Hint(uint32_t item, uint16_t frame) {
    const auto layer = static_cast<uint16_t>(item / kPerLayer);
    std::vector<uint32_t>& guessed = hinted[{layer, frame}];
    if (std::find(guessed.begin(), guessed.end(), item) == guessed.end()) guessed.push_back(item);
    cache.Hint(layer, frame, guessed);
  }
  // Requests, reads and unpins.
  void Touch(uint32_t item) {
    if (cache.Request(item, 0) == nullptr) Complete(item);
    cache.Unpin(item);
  }
  // The only answer since the last call.
  ReadyItem Answer() {
    REQUIRE(answers.size() == 1);
    const ReadyItem answer = answers.front();
    answers.clear();
    return answer;
  }
  bool HoldsBytesOf(uint32_t item, const std::byte* data) const {
    for (uint64_t i = 0; i < kIoAlign; ++i) {
      if (data[i] != FakeReader::SyntheticByte(0, item * kIoAlign + i)) return false;
    }
    return true;
  }

  std::vector<Extent> extents;
  std::vector<ReadyItem> answers;
  std::map<std::pair<uint16_t, uint16_t>, std::vector<uint32_t>> hinted;  // [{layer, frame}]
  SlotPool pool;
  FakeReader reader;
  ExpertCache cache;
};

using Items = std::vector<uint32_t>;

std::vector<SlotClass> Slots(uint32_t count) { return {{kIoAlign, count}}; }

TEST_CASE("a first request reads and answers later, a second is answered at once") {
  Setup setup(Slots(2));
  CHECK(setup.cache.Request(3, 77) == nullptr);
  CHECK_FALSE(setup.cache.IsReady(3));
  CHECK(setup.PendingOf(3).job.read_class == ReadClass::kDemand);
  CHECK(setup.answers.empty());
  setup.Complete(3);
  const ReadyItem answer = setup.Answer();
  CHECK(answer.waiter == 77);
  CHECK(answer.item == 3);
  CHECK(answer.result.error == 0);
  CHECK(setup.HoldsBytesOf(3, answer.data));
  CHECK(setup.cache.IsReady(3));
  CHECK(setup.cache.Request(3, 78) == answer.data);
  CHECK(setup.answers.empty());
  setup.cache.Unpin(3);
  setup.cache.Unpin(3);
  setup.cache.CheckIdle();
  const CacheStats stats = setup.cache.Stats();
  CHECK(stats.misses == 1);
  CHECK(stats.hits == 1);
  CHECK(stats.bytes_demand == kIoAlign);
}

TEST_CASE("requests of one item share one read, each has its pin") {
  Setup setup(Slots(1));
  for (uint64_t waiter = 1; waiter <= 3; ++waiter) setup.cache.Request(5, waiter);
  CHECK(setup.Reading() == Items{5});
  setup.Complete(5);
  REQUIRE(setup.answers.size() == 3);
  for (uint64_t i = 0; i < 3; ++i) CHECK(setup.answers[i].waiter == i + 1);
  setup.cache.Request(6, 4);
  setup.cache.Unpin(5);
  setup.cache.Unpin(5);
  CHECK(setup.Reading().empty());
  setup.cache.Unpin(5);
  CHECK(setup.Reading() == Items{6});
  CHECK(setup.cache.Stats().joined == 2);
}

TEST_CASE("with one slot demands take turns in the order they came") {
  Setup setup(Slots(1));
  for (const uint32_t item : Items{4, 2, 9, 2}) setup.cache.Request(item, item);
  for (const uint32_t item : Items{4, 2, 9}) {
    CHECK(setup.Reading() == Items{item});
    setup.Complete(item);
    for (const ReadyItem& answer : std::exchange(setup.answers, {})) {
      CHECK(answer.item == item);
      CHECK(setup.HoldsBytesOf(item, answer.data));
      CHECK(setup.Reading().empty());
      setup.cache.Unpin(answer.item);
    }
  }
  CHECK(setup.Reading().empty());
  setup.cache.CheckIdle();
}

TEST_CASE("the least recently used entry is evicted first") {
  Setup setup(Slots(3));
  for (const uint32_t item : Items{0, 1, 2, 0}) setup.Touch(item);
  setup.Touch(3);
  CHECK(setup.cache.IsReady(0));
  CHECK_FALSE(setup.cache.IsReady(1));
  CHECK(setup.cache.IsReady(2));
  setup.Touch(4);
  CHECK(setup.cache.IsReady(0));
  CHECK_FALSE(setup.cache.IsReady(2));
  CHECK(setup.cache.Stats().evictions == 2);
}

TEST_CASE("a pinned entry is never evicted, its unpin serves who waits") {
  Setup setup(Slots(2));
  setup.cache.Request(0, 0);
  setup.Complete(0);
  setup.Touch(1);
  setup.Touch(2);
  CHECK(setup.cache.IsReady(0));
  setup.cache.Request(3, 3);
  setup.Complete(3);
  setup.cache.Request(4, 4);
  CHECK(setup.Reading().empty());
  setup.cache.Unpin(0);
  CHECK(setup.Reading() == Items{4});
  CHECK_FALSE(setup.cache.IsReady(0));
}

TEST_CASE("a failed demand answers all its waiters, frees the slot and can be asked for again") {
  Setup setup(Slots(1));
  setup.cache.Request(1, 10);
  setup.cache.Request(1, 11);
  setup.cache.Request(2, 12);
  setup.Complete(1, EIO);
  REQUIRE(setup.answers.size() == 2);
  for (const ReadyItem& answer : std::exchange(setup.answers, {})) {
    CHECK(answer.data == nullptr);
    CHECK(answer.result.error == EIO);
    CHECK(answer.result.offset == kIoAlign);
  }
  CHECK(setup.Reading() == Items{2});
  setup.Complete(2);
  setup.cache.Unpin(2);
  setup.Touch(1);
  CHECK(setup.cache.IsReady(1));
  CHECK(setup.cache.Stats().failures == 1);
  setup.cache.CheckIdle();
}

TEST_CASE("a hint is read into a free slot and the request hits it") {
  Setup setup(Slots(2));
  setup.Hint(12, 0);
  setup.Hint(12, 0);
  setup.Hint(12, 1);
  CHECK(setup.Reading() == Items{12});
  CHECK(setup.PendingOf(12).job.read_class == ReadClass::kPrefetch);
  setup.Complete(12);
  CHECK(setup.answers.empty());
  CHECK(setup.cache.Request(12, 1) != nullptr);
  setup.cache.Request(12, 2);
  setup.cache.Unpin(12);
  setup.cache.Unpin(12);
  const CacheStats stats = setup.cache.Stats();
  CHECK(stats.hints == 1);
  CHECK(stats.hints_read == 1);
  CHECK(stats.hints_used == 1);
  CHECK(stats.bytes_prefetch == kIoAlign);
  CHECK(stats.bytes_prefetch_used == kIoAlign);
  CHECK(stats.bytes_demand == 0);
  CHECK(stats.hits == 2);
}

TEST_CASE("a demand joins a hint that is being read and promotes it") {
  Setup setup(Slots(1));
  setup.Hint(12, 0);
  CHECK(setup.cache.Request(12, 5) == nullptr);
  CHECK(setup.PendingOf(12).promoted);
  CHECK(setup.reader.Submissions() == 1);
  setup.Complete(12);
  CHECK(setup.Answer().waiter == 5);
  setup.cache.Unpin(12);
  const CacheStats stats = setup.cache.Stats();
  CHECK(stats.joined == 1);
  CHECK(stats.misses == 0);
  CHECK(stats.hints_used == 1);
  CHECK(stats.bytes_prefetch_used == kIoAlign);
}

TEST_CASE("a demand for an item whose hint is still queued reads it as demand, once") {
  Setup setup(Slots(1));
  setup.cache.Request(0, 0);
  setup.Hint(12, 0);
  CHECK(setup.Reading() == Items{0});
  setup.cache.Request(12, 1);
  setup.Complete(0);
  setup.cache.Unpin(0);
  CHECK(setup.PendingOf(12).job.read_class == ReadClass::kDemand);
  setup.Complete(12);
  setup.cache.Unpin(12);
  CHECK(setup.Reading().empty());
  CHECK(setup.cache.Stats().misses == 2);
}

TEST_CASE("no hint is read while a demand waits for a slot") {
  Setup setup(Slots(1));
  setup.cache.Request(0, 0);
  setup.cache.Request(1, 1);
  setup.Hint(12, 0);
  setup.Complete(0);
  CHECK(setup.Reading().empty());
  setup.cache.Unpin(0);
  CHECK(setup.Reading() == Items{1});
}

TEST_CASE("a hint takes a cold entry and leaves a warm one") {
  Setup setup(Slots(2));
  setup.Touch(0);
  setup.Touch(1);
  setup.Hint(12, 0);
  // Two uses went by since item 0 (taking a slot and filling it for item 1): cold.
  CHECK(setup.Reading() == Items{12});
  CHECK_FALSE(setup.cache.IsReady(0));
  setup.Hint(13, 0);
  CHECK(setup.Reading() == Items{12});
  CHECK(setup.cache.IsReady(1));
  setup.Complete(12);
  // Now item 1 is cold too; 12 is not, and is protected besides.
  CHECK(setup.Reading() == Items{13});
}

TEST_CASE("what comes back late gives way to a hint where the drive would rest, and only there") {
  // Layers 0 to 3 in a cycle; every item of theirs is used at every turn.
  Setup setup(Slots(4), 1000, CachePolicyKind::kSweep);
  const auto turn = [&](uint16_t layer) {
    const uint32_t item = layer * kPerLayer;
    setup.cache.LayerRouted(layer, 0, std::span(&item, 1));
    setup.Touch(item);
  };
  for (int sweep = 0; sweep < 40; ++sweep) {
    for (uint16_t layer = 0; layer < 4; ++layer) turn(layer);
  }
  turn(0);
  turn(1);
  // The one just used is cold, that of layer 0 comes back three turns from now, 20 is the next.
  setup.Hint(21, 0);
  CHECK(setup.Reading() == Items{21});
  CHECK_FALSE(setup.cache.IsReady(10));
  setup.Hint(22, 0);
  setup.Hint(23, 0);
  CHECK(setup.Reading() == Items{21, 22});
  CHECK_FALSE(setup.cache.IsReady(0));
  CHECK(setup.cache.IsReady(20));
  CHECK(setup.cache.IsReady(30));
}

TEST_CASE("a hint never evicts a hinted entry whose layer is not routed yet, a demand may") {
  Setup setup(Slots(2));
  setup.Hint(10, 0);
  setup.Hint(11, 0);
  setup.Complete(10);
  setup.Complete(11);
  setup.Hint(12, 0);
  for (int i = 0; i < 10; ++i) setup.cache.Unpin((setup.cache.Request(11, 0), 11));
  CHECK(setup.Reading().empty());  // 10 is cold, but hinted
  CHECK(setup.cache.Request(5, 0) == nullptr);
  CHECK(setup.Reading() == Items{5});
  CHECK_FALSE(setup.cache.IsReady(10));
  CHECK(setup.cache.Stats().bytes_prefetch_wasted == kIoAlign);
}

TEST_CASE("what is not surely needed is kept from other hints and not read") {
  Setup setup(Slots(2));
  setup.Touch(10);
  setup.Touch(0);
  setup.cache.Hint(1, 0, Items{11, 12, 10}, 0);
  for (int i = 0; i < 3; ++i) setup.Touch(0);
  setup.Hint(22, 0);
  CHECK(setup.Reading().empty());  // 10 is cold, but may be needed
  CHECK(setup.cache.Stats().hints == 1);
  setup.cache.LayerRouted(1, 0);
  CHECK(setup.Reading() == Items{22});
  CHECK_FALSE(setup.cache.IsReady(10));
}

TEST_CASE("a hint also protects what was resident before") {
  Setup setup(Slots(2));
  setup.Touch(10);
  setup.Touch(0);
  setup.Hint(10, 0);
  for (int i = 0; i < 3; ++i) setup.Touch(0);
  setup.Hint(12, 0);
  CHECK(setup.Reading().empty());
  setup.cache.LayerRouted(1, 0);  // 10 gives way now, but so does the hint for 12
  setup.Hint(22, 0);
  CHECK(setup.Reading() == Items{22});
}

TEST_CASE("a guess that came true is read to its end") {
  Setup setup(Slots(2));
  setup.Hint(12, 0);
  setup.Hint(13, 0);
  for (const uint32_t item : {12u, 13u}) setup.reader.MarkSent(setup.PendingOf(item).job.id);
  setup.cache.LayerRouted(1, 0, std::vector<uint32_t>{12});
  CHECK_FALSE(setup.PendingOf(12).cut);
  CHECK(setup.PendingOf(13).cut);
  CHECK(setup.cache.Request(12, 0) == nullptr);
  CHECK(setup.PendingOf(12).promoted);
  setup.Complete(12);
  setup.cache.Unpin(12);
  CHECK(setup.cache.Stats().bytes_prefetch_used == kIoAlign);
}

TEST_CASE("a better guess takes the place of the one before") {
  Setup setup(Slots(2));
  for (const uint32_t item : {10u, 11u, 12u, 13u}) setup.Hint(item, 0);
  CHECK(setup.Reading() == Items{10, 11});
  setup.reader.MarkSent(setup.PendingOf(11).job.id);
  setup.Hint(22, 0);  // of another layer: stays
  setup.cache.Hint(1, 0, Items{13, 10, 14});
  CHECK(setup.PendingOf(11).cut);
  CHECK(setup.Reading() == Items{10, 11});
  setup.reader.Complete(setup.PendingOf(11).job.id, ECANCELED);
  CHECK(setup.Reading() == Items{10, 22});
  setup.Complete(10);
  setup.Touch(10);
  setup.cache.LayerRouted(1, 0);
  CHECK(setup.cache.Stats().hints == 6);  // 10 to 13, 22 and 14
}

TEST_CASE("a refuted hint gives its slot back") {
  SUBCASE("still in the queue: dropped") {
    Setup setup(Slots(1));
    setup.cache.Request(0, 0);
    setup.Hint(12, 0);
    setup.cache.LayerRouted(1, 0);
    setup.Complete(0);
    setup.cache.Unpin(0);
    CHECK(setup.Reading().empty());
    CHECK(setup.cache.Stats().hints_dropped == 1);
  }
  SUBCASE("handed to the reader but not sent: taken back") {
    Setup setup(Slots(1));
    setup.Hint(12, 0);
    setup.cache.LayerRouted(1, 0);
    CHECK(setup.Reading().empty());
    CHECK(setup.cache.Stats().hints_dropped == 1);
    setup.Hint(22, 0);
    CHECK(setup.Reading() == Items{22});
  }
  SUBCASE("being read: the next hint takes its slot when it has come") {
    Setup setup(Slots(1));
    setup.Hint(12, 0);
    setup.reader.MarkSent(setup.PendingOf(12).job.id);
    setup.cache.LayerRouted(1, 0);
    setup.Hint(22, 0);
    CHECK(setup.Reading() == Items{12});
    setup.Complete(12);
    CHECK(setup.Reading() == Items{22});
    CHECK(setup.cache.Stats().bytes_prefetch_wasted == kIoAlign);
  }
  SUBCASE("being read: cut short, and its bytes are counted as wasted") {
    Setup setup(Slots(1));
    setup.Hint(12, 0);
    const uint64_t id = setup.PendingOf(12).job.id;
    setup.reader.MarkSent(id);
    CHECK_FALSE(setup.PendingOf(12).cut);
    setup.cache.LayerRouted(1, 0);
    CHECK(setup.PendingOf(12).cut);
    setup.reader.Answer(id, {ECANCELED, 0, 0, 512});
    CHECK(setup.cache.Stats().bytes_prefetch_wasted == 512);
    CHECK(setup.cache.Stats().BytesRead() == 512);
    CHECK(setup.cache.Stats().failures == 0);
  }
  SUBCASE("cut short, and then wanted: read once more") {
    Setup setup(Slots(1));
    setup.Hint(12, 0);
    const uint64_t id = setup.PendingOf(12).job.id;
    setup.reader.MarkSent(id);
    setup.cache.LayerRouted(1, 0);
    CHECK(setup.cache.Request(12, 7) == nullptr);
    setup.reader.Complete(id, ECANCELED);
    CHECK(setup.Reading() == Items{12});
    setup.Complete(12);
    CHECK(setup.cache.IsReady(12));
    setup.cache.Unpin(12);
  }
  SUBCASE("read: the next hint takes its slot") {
    Setup setup(Slots(1));
    setup.Hint(12, 0);
    setup.Complete(12);
    setup.Hint(22, 0);
    CHECK(setup.Reading().empty());
    setup.cache.LayerRouted(1, 0);
    CHECK(setup.Reading() == Items{22});
  }
}

TEST_CASE("routing a layer drops the hints of that frame and that layer only") {
  Setup setup(Slots(1));
  setup.cache.Request(0, 0);
  setup.Hint(12, 0);
  setup.Hint(12, 1);
  setup.Hint(13, 0);
  setup.Hint(22, 0);
  setup.cache.LayerRouted(1, 0);
  CHECK(setup.cache.Stats().hints_dropped == 1);  // 13; frame 1 still wants 12
  setup.cache.LayerRouted(1, 1);
  CHECK(setup.cache.Stats().hints_dropped == 2);
  setup.cache.LayerRouted(99, 0);
  setup.cache.DropHints();
  CHECK(setup.cache.Stats().hints_dropped == 3);
}

TEST_CASE("a hint that came true is as warm as any entry after its layer is routed") {
  Setup setup(Slots(1));
  setup.Hint(12, 0);
  setup.Complete(12);
  CHECK(setup.cache.Request(12, 0) != nullptr);
  setup.cache.LayerRouted(1, 0);
  setup.cache.Unpin(12);
  setup.Hint(22, 0);
  CHECK(setup.Reading().empty());
  CHECK(setup.cache.IsReady(12));
}

TEST_CASE("a demand takes back the newest hint that is not being read, which stays a hint") {
  Setup setup(Slots(2));
  setup.Hint(12, 0);
  setup.Hint(13, 0);
  setup.cache.Request(5, 5);
  CHECK(setup.Reading() == Items{12, 5});
  setup.Complete(5);
  setup.Complete(12);
  setup.cache.Unpin(5);
  CHECK(setup.Reading().empty());
  setup.Touch(12);
  CHECK(setup.Reading() == Items{13});  // 5 is cold
}

TEST_CASE("a demand waits for hints that are being read") {
  Setup setup(Slots(1));
  setup.Hint(12, 0);
  setup.reader.MarkSent(setup.PendingOf(12).job.id);
  setup.cache.Request(5, 5);
  CHECK(setup.Reading() == Items{12});
  setup.Complete(12);
  CHECK(setup.Reading() == Items{5});
}

TEST_CASE("a demand does not take back a hint that another demand has joined") {
  Setup setup(Slots(1));
  setup.Hint(12, 0);
  setup.cache.Request(12, 1);
  setup.cache.Request(5, 5);
  CHECK(setup.Reading() == Items{12});
  setup.Complete(12);
  CHECK(setup.Answer().item == 12);
  setup.cache.Unpin(12);
  CHECK(setup.Reading() == Items{5});
}

TEST_CASE("a failed prefetch that a demand joined is read once more before it fails") {
  for (const int second : {0, EIO}) {
    Setup setup(Slots(1));
    setup.Hint(12, 0);
    setup.cache.Request(12, 3);
    setup.Complete(12, ENODATA);
    CHECK(setup.answers.empty());
    CHECK(setup.PendingOf(12).job.read_class == ReadClass::kDemand);
    setup.Complete(12, second);
    const ReadyItem answer = setup.Answer();
    CHECK(answer.result.error == second);
    CHECK((answer.data != nullptr) == (second == 0));
    CHECK(setup.Reading().empty());
    if (second == 0) setup.cache.Unpin(12);
    CHECK(setup.cache.Stats().failures == (second == 0 ? 0 : 1));
    setup.cache.CheckIdle();
  }
}

TEST_CASE("a failed prefetch without a demand is forgotten and its slot is free") {
  Setup setup(Slots(1));
  setup.Hint(12, 0);
  setup.Hint(13, 0);
  setup.Complete(12, EIO);
  CHECK(setup.answers.empty());
  CHECK(setup.Reading() == Items{13});
  CHECK(setup.cache.Stats().failures == 0);
  setup.Complete(13);
  setup.Touch(12);
  CHECK(setup.cache.IsReady(12));
}

TEST_CASE("an answer that belongs to an earlier read of the item is ignored") {
  Setup setup(Slots(1));
  setup.cache.Request(3, 1);
  const uint64_t old = setup.PendingOf(3).job.id;
  setup.Complete(3);
  setup.cache.Unpin(3);
  setup.Touch(4);
  setup.answers.clear();
  setup.reader.Answer(old, {});  // Absent
  CHECK_FALSE(setup.cache.IsReady(3));
  setup.cache.Request(3, 2);
  CHECK(setup.PendingOf(3).job.id != old);
  setup.reader.Answer(old, {});  // Reading again
  setup.reader.Answer(old, {EIO, 0, 0});
  CHECK(setup.answers.empty());
  setup.Complete(3);
  CHECK(setup.Answer().waiter == 2);
  setup.reader.Answer(old, {EIO, 0, 0});  // Ready
  CHECK(setup.cache.IsReady(3));
  setup.cache.Unpin(3);
  setup.cache.CheckIdle();
}

TEST_CASE("slot classes do not wait for each other") {
  Setup setup({{kIoAlign, 1}, {2 * kIoAlign, 1}}, 30);
  setup.cache.Request(0, 0);
  setup.cache.Request(1, 1);
  setup.cache.Request(30, 30);
  CHECK(setup.Reading() == Items{0, 30});
  setup.Hint(31, 0);
  setup.Complete(30);
  setup.cache.Unpin(30);
  setup.cache.Request(32, 32);
  CHECK(setup.Reading() == Items{0, 32});
  setup.Complete(0);
  setup.cache.Unpin(0);
  CHECK(setup.Reading() == Items{32, 1});
}

TEST_CASE("only so many hints are with the reader at one time") {
  Setup setup(Slots(20));
  for (uint32_t item = 10; item < 30; ++item) setup.Hint(item, 0);
  CHECK(setup.Reading().size() == 8);
  setup.Complete(10);
  CHECK(setup.Reading().size() == 8);
  CHECK(setup.Reading().back() == 18);
}

TEST_CASE("stopping answers every demand, with or without a slot, and takes no pin") {
  Setup setup(Slots(1));
  setup.cache.Request(0, 0);
  setup.cache.Request(1, 1);
  setup.cache.Request(1, 2);
  setup.Hint(12, 0);
  setup.cache.Stop();
  REQUIRE(setup.answers.size() == 3);
  for (const ReadyItem& answer : setup.answers) {
    CHECK(answer.data == nullptr);
    CHECK(answer.result.error == ECANCELED);
  }
  CHECK(setup.reader.PendingCount() == 0);
  setup.cache.CheckIdle();
  setup.cache.Stop();
  CHECK(setup.answers.size() == 3);
}

TEST_CASE("stopping does not read a joined hint once more") {
  Setup setup(Slots(1));
  setup.Hint(12, 0);
  setup.cache.Request(12, 1);
  setup.cache.Stop();
  CHECK(setup.Answer().result.error == ECANCELED);
  CHECK(setup.reader.Submissions() == 1);
}

TEST_CASE("a hint never evicts what the layer at hand needs, a demand does it last") {
  Setup setup(Slots(3));
  for (const uint32_t item : Items{0, 1, 2}) setup.Touch(item);
  for (int i = 0; i < 4; ++i) setup.Touch(2);  // 0 and 1 are cold
  const Items needed = {0, 1, 5};
  setup.cache.LayerRouted(0, 0, needed);
  setup.Hint(10, 0);
  CHECK(setup.Reading().empty());
  setup.cache.Request(5, 0);
  CHECK(setup.Reading() == Items{5});
  CHECK(setup.cache.IsReady(0));
  CHECK(setup.cache.IsReady(1));
  setup.cache.Request(6, 0);  // nobody said that it would come
  CHECK(setup.Reading() == Items{5, 6});
  setup.Complete(5);
  setup.Complete(6);
  setup.cache.Unpin(5);
  setup.cache.Unpin(6);
}

TEST_CASE("a layer is ready when all its items are, and no longer when one was evicted") {
  Setup setup(Slots(kPerLayer));
  for (uint32_t item = 0; item < kPerLayer; ++item) {
    CHECK_FALSE(setup.cache.LayerReady(0));
    setup.Touch(item);
  }
  CHECK(setup.cache.LayerReady(0));
  setup.Touch(kPerLayer);
  CHECK_FALSE(setup.cache.LayerReady(0));
  CHECK_FALSE(setup.cache.LayerReady(99));
}

}  // namespace
}  // namespace colibri
