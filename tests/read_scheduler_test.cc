// ReadScheduler alone: order, cutting, caps, what answers of the kernel mean, throttle, closing.
// Length: one class and one Setup; a test of writes wants to stand beside that of reads.
#include "io/read_scheduler.h"

#include <doctest/doctest.h>

#include <cerrno>
#include <optional>
#include <string>
#include <vector>

#include "io/file.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// A sparse file of 8 MiB + 100 bytes and a scheduler whose clock the test moves. Nothing is read:
// the destination is an address that is only computed with.
struct Setup {
  explicit Setup(const ReaderOptions& options = {})
      : scheduler(Files(), options, [this] { return now; }) {}

  const FileTable& Files() {
    dir.Write("a", "");
    std::filesystem::resize_file(dir.Path("a"), 8 * kMiB + 100);
    files.Add(dir.Path("a"));
    return files;
  }

  ReadJob Job(uint64_t id, ReadClass read_class, const std::vector<Extent>& extents) {
    return {id, read_class, Base(), extents};
  }
  ReadJob Write(uint64_t id, ReadClass read_class, const std::vector<Extent>& extents) {
    return {id, read_class, Base(), extents, true};
  }
  std::byte* Base() { return memory.data(); }

  Segment Next() {
    const ReadScheduler::Turn turn = scheduler.TryNext();
    REQUIRE(turn.segment);
    return *turn.segment;
  }
  bool Nothing() {
    const ReadScheduler::Turn turn = scheduler.TryNext();
    return !turn.segment && turn.wait_ns == 0;
  }
  void Answer(const Segment& segment, int64_t received) {
    scheduler.Complete(segment.index, segment.generation, received);
  }
  void AnswerFully(const Segment& segment) { Answer(segment, segment.bytes); }
  // The only job that ended since the last call.
  FinishedRead Finished() {
    const std::vector<FinishedRead> finished = scheduler.TakeFinished();
    REQUIRE(finished.size() == 1);
    return finished.front();
  }
  bool NoneFinished() { return scheduler.TakeFinished().empty(); }

  TempDir dir;
  FileTable files;
  std::vector<std::byte> memory = std::vector<std::byte>(16 * kMiB);
  uint64_t now = 1;
  ReadScheduler scheduler;
};

TEST_CASE("an extent is cut into aligned segments that cover it exactly, in order") {
  Setup setup;
  const std::vector<Extent> extents = {{0, 4096, 2 * kMiB + 8192, 0}, {0, 0, 4096, 3 * kMiB}};
  setup.scheduler.Submit(setup.Job(7, ReadClass::kDemand, extents));
  const std::vector<Extent> expected = {{0, 4096, kMiB, 0},
                                        {0, 4096 + kMiB, kMiB, kMiB},
                                        {0, 4096 + 2 * kMiB, 8192, 2 * kMiB},
                                        {0, 0, 4096, 3 * kMiB}};
  std::vector<Segment> segments;
  for (const Extent& want : expected) {
    const Segment segment = setup.Next();
    CHECK(segment.offset == want.offset);
    CHECK(segment.bytes == want.bytes);
    CHECK(segment.memory == setup.Base() + want.dest);
    segments.push_back(segment);
  }
  CHECK(setup.Nothing());
  // Answers in any order; the job ends with the last.
  for (const int i : {2, 0, 3}) setup.AnswerFully(segments[static_cast<size_t>(i)]);
  CHECK(setup.NoneFinished());
  CHECK_FALSE(setup.scheduler.Empty());
  setup.AnswerFully(segments[1]);
  const FinishedRead finished = setup.Finished();
  CHECK(finished.id == 7);
  CHECK(finished.result.error == 0);
  CHECK(setup.scheduler.Empty());
  CHECK(setup.scheduler.Stats().segments == 4);
  CHECK(setup.scheduler.Stats().demand_bytes == 2 * kMiB + 8192 + 4096);
}

TEST_CASE("a demand overtakes a prefetch between two segments") {
  Setup setup;
  const std::vector<Extent> a = {{0, 0, 3 * kMiB, 0}}, b = {{0, 4 * kMiB, kMiB, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kPrefetch, a));
  CHECK(setup.Next().offset == 0);
  setup.scheduler.Submit(setup.Job(2, ReadClass::kDemand, b));
  CHECK(setup.Next().offset == 4 * kMiB);
  CHECK(setup.Next().offset == kMiB);
}

TEST_CASE("a demand is sent whole while only the prefetch segments in flight are ahead of it") {
  Setup setup({.depth = 8, .prefetch_depth = 3});
  const std::vector<Extent> a = {{0, 0, 8 * kMiB, 0}}, b = {{0, 0, 5 * kMiB, 8 * kMiB}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kPrefetch, a));
  for (int i = 0; i < 3; ++i) setup.Next();
  CHECK(setup.Nothing());
  setup.scheduler.Submit(setup.Job(2, ReadClass::kDemand, b));
  for (uint64_t i = 0; i < 5; ++i) CHECK(setup.Next().memory == setup.Base() + (8 + i) * kMiB);
}

TEST_CASE("jobs submitted in file order are read at ascending offsets") {
  Setup setup;
  const std::vector<Extent> jobs[] = {{{0, 0, 2 * kMiB, 0}, {0, 2 * kMiB + 8192, 4096, 2 * kMiB}},
                                      {{0, 3 * kMiB, 2 * kMiB, 0}},
                                      {{0, 5 * kMiB, kMiB + 4096, 0}}};
  for (uint64_t id = 0; id < 3; ++id) {
    setup.scheduler.Submit(setup.Job(id, ReadClass::kDemand, jobs[id]));
  }
  uint64_t end = 0;
  for (int i = 0; i < 7; ++i) {
    const Segment segment = setup.Next();
    CHECK(segment.offset >= end);
    end = segment.offset + segment.bytes;
  }
  CHECK(setup.Nothing());
}

TEST_CASE("within a class jobs go first come first served") {
  Setup setup;
  const std::vector<Extent> a = {{0, 0, 2 * kMiB, 0}}, b = {{0, 4 * kMiB, kMiB, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kDemand, a));
  setup.scheduler.Submit(setup.Job(2, ReadClass::kDemand, b));
  CHECK(setup.Next().offset == 0);
  CHECK(setup.Next().offset == kMiB);
  CHECK(setup.Next().offset == 4 * kMiB);
}

TEST_CASE("prefetch keeps to its own depth, all segments together to the whole one") {
  Setup setup({.depth = 3, .prefetch_depth = 2});
  const std::vector<Extent> a = {{0, 0, 4 * kMiB, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kPrefetch, a));
  const Segment first = setup.Next();
  setup.Next();
  CHECK(setup.Nothing());
  setup.scheduler.Submit(setup.Job(2, ReadClass::kDemand, a));
  const Segment demand = setup.Next();
  CHECK(setup.Nothing());
  setup.AnswerFully(demand);
  CHECK(setup.Next().offset == kMiB);  // the demand's second, not the prefetch's third
  CHECK(setup.Nothing());
  setup.AnswerFully(first);
  CHECK(setup.Next().offset == 2 * kMiB);
}

TEST_CASE("depths below one still read") {
  Setup setup({.depth = 0, .prefetch_depth = 0});
  const std::vector<Extent> a = {{0, 0, 4096, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kPrefetch, a));
  setup.AnswerFully(setup.Next());
  CHECK(setup.Finished().id == 1);
}

TEST_CASE("a promoted prefetch queues as a demand and frees the prefetch depth") {
  Setup setup({.depth = 8, .prefetch_depth = 1});
  const std::vector<Extent> a = {{0, 0, 2 * kMiB, 0}}, b = {{0, 4 * kMiB, 2 * kMiB, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kPrefetch, a));
  setup.scheduler.Submit(setup.Job(2, ReadClass::kPrefetch, b));
  const Segment first = setup.Next();
  CHECK(setup.Nothing());
  setup.scheduler.Promote(1);
  CHECK(setup.Next().offset == kMiB);
  CHECK(setup.Next().offset == 4 * kMiB);  // the depth of 1 is free for the other prefetch
  CHECK(setup.Nothing());
  setup.AnswerFully(first);
  CHECK(setup.scheduler.Stats().demand_bytes == kMiB);
  setup.scheduler.Promote(99);
}

TEST_CASE("a promoted prefetch that was queued behind others overtakes them") {
  Setup setup;
  const std::vector<Extent> a = {{0, 0, kMiB, 0}}, b = {{0, 4 * kMiB, kMiB, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kPrefetch, a));
  setup.scheduler.Submit(setup.Job(2, ReadClass::kPrefetch, b));
  setup.scheduler.Promote(2);
  CHECK(setup.Next().offset == 4 * kMiB);
}

TEST_CASE("what is needed ahead goes after demands and before prefetches") {
  Setup setup;
  const std::vector<Extent> prefetch = {{0, 0, kMiB, 0}}, ahead = {{0, kMiB, 2 * kMiB, 0}},
                            demand = {{0, 4 * kMiB, kMiB, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kPrefetch, prefetch));
  setup.scheduler.Submit(setup.Job(2, ReadClass::kAhead, ahead));
  CHECK(setup.Next().offset == kMiB);
  setup.scheduler.Submit(setup.Job(3, ReadClass::kDemand, demand));
  CHECK(setup.Next().offset == 4 * kMiB);
  CHECK(setup.Next().offset == 2 * kMiB);
  CHECK(setup.Next().offset == 0);
  CHECK(setup.Nothing());
}

TEST_CASE("what is needed ahead has the whole depth and leaves prefetches theirs") {
  Setup setup({.depth = 6, .prefetch_depth = 2});
  const std::vector<Extent> a = {{0, 0, 4 * kMiB, 0}}, b = {{0, 4 * kMiB, 4 * kMiB, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kAhead, a));
  setup.scheduler.Submit(setup.Job(2, ReadClass::kPrefetch, b));
  for (uint64_t i = 0; i < 6; ++i) CHECK(setup.Next().offset == i * kMiB);
  CHECK(setup.Nothing());
}

TEST_CASE("what is needed ahead is promoted to a demand, and prefetches keep their count") {
  Setup setup({.depth = 8, .prefetch_depth = 1});
  const std::vector<Extent> a = {{0, 0, kMiB, 0}}, b = {{0, kMiB, 2 * kMiB, 0}},
                            c = {{0, 4 * kMiB, 2 * kMiB, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kAhead, a));
  setup.scheduler.Submit(setup.Job(2, ReadClass::kAhead, b));
  setup.scheduler.Submit(setup.Job(3, ReadClass::kPrefetch, c));
  setup.scheduler.Promote(2);
  const Segment first = setup.Next();
  CHECK(first.offset == kMiB);
  setup.scheduler.Promote(2);
  CHECK(setup.Next().offset == 2 * kMiB);
  CHECK(setup.Next().offset == 0);
  setup.scheduler.Promote(1);
  CHECK(setup.Next().offset == 4 * kMiB);
  CHECK(setup.Nothing());
  setup.AnswerFully(first);
  CHECK(setup.scheduler.Stats().demand_bytes == kMiB);
  CHECK(setup.Nothing());
}

TEST_CASE("what is needed ahead can be cancelled, or cut short once it was sent") {
  Setup setup;
  const std::vector<Extent> a = {{0, 0, 2 * kMiB, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kAhead, a));
  setup.scheduler.Submit(setup.Job(2, ReadClass::kAhead, a));
  CHECK(setup.scheduler.Cancel(1));
  const Segment first = setup.Next();
  CHECK_FALSE(setup.scheduler.Cancel(2));
  setup.scheduler.CutShort(2);
  CHECK(setup.Nothing());
  setup.AnswerFully(first);
  CHECK(setup.Finished().result.error == ECANCELED);
  CHECK(setup.scheduler.Stats().ahead_bytes == kMiB);
  CHECK(setup.scheduler.Stats().demand_bytes + setup.scheduler.Stats().prefetch_bytes == 0);
}

TEST_CASE("a write is cut like a read, keeps to its class and is counted apart") {
  Setup setup;
  const std::vector<Extent> a = {{0, 4096, kMiB + 8192, 8192}}, b = {{0, 4 * kMiB, kMiB, 0}};
  setup.scheduler.Submit(setup.Write(1, ReadClass::kAhead, a));
  setup.scheduler.Submit(setup.Job(2, ReadClass::kDemand, b));
  const Segment read = setup.Next(), first = setup.Next(), second = setup.Next();
  CHECK_FALSE(read.write);
  CHECK(first.write);
  CHECK(first.offset == 4096);
  CHECK(first.bytes == kMiB);
  CHECK(first.memory == setup.Base() + 8192);
  CHECK(second.write);
  CHECK(second.bytes == 8192);
  setup.AnswerFully(first);
  setup.AnswerFully(second);
  CHECK(setup.Finished().result.bytes == kMiB + 8192);
  const ReaderStats stats = setup.scheduler.Stats();
  CHECK(stats.written_bytes == kMiB + 8192);
  CHECK(stats.ahead_bytes == 0);
}

TEST_CASE("a short write goes on from the last aligned byte") {
  Setup setup;
  const std::vector<Extent> a = {{0, 0, kMiB, 0}};
  setup.scheduler.Submit(setup.Write(1, ReadClass::kDemand, a));
  setup.Answer(setup.Next(), 2 * 4096 + 100);
  const Segment rest = setup.Next();
  CHECK(rest.write);
  CHECK(rest.offset == 2 * 4096);
  CHECK(rest.memory == setup.Base() + 2 * 4096);
  CHECK(rest.bytes == kMiB - 2 * 4096);
  setup.Answer(rest, -EINTR);
  setup.Answer(setup.Next(), -EAGAIN);
  setup.AnswerFully(setup.Next());
  CHECK(setup.Finished().result.error == 0);
  CHECK(setup.scheduler.Stats().written_bytes == kMiB);
}

TEST_CASE("a write that fails, or of which nothing more is taken, ends with error and place") {
  Setup setup;
  const std::vector<Extent> a = {{0, 4096, kMiB, 0}};
  setup.scheduler.Submit(setup.Write(1, ReadClass::kDemand, a));
  SUBCASE("nothing taken") {
    setup.Answer(setup.Next(), 0);
    const ReadResult result = setup.Finished().result;
    CHECK(result.error == EIO);
    CHECK(result.offset == 4096);
  }
  SUBCASE("the same bytes of a page taken twice") {
    setup.Answer(setup.Next(), 4096 + 10);
    setup.Answer(setup.Next(), 10);
    const ReadResult result = setup.Finished().result;
    CHECK(result.error == EIO);
    CHECK(result.offset == 2 * 4096 + 10);
  }
  SUBCASE("a full drive, after a first part") {
    setup.Answer(setup.Next(), 8192);
    setup.Answer(setup.Next(), -ENOSPC);
    const ReadResult result = setup.Finished().result;
    CHECK(result.error == ENOSPC);
    CHECK(result.file == 0);
    CHECK(result.offset == 4096 + 8192);
    CHECK(result.bytes == 8192);
  }
  SUBCASE("a drive that fails") {
    setup.Answer(setup.Next(), -EIO);
    CHECK(setup.Finished().result.error == EIO);
  }
  CHECK(setup.scheduler.Empty());
  CHECK(setup.scheduler.Stats().failures == 1);
}

TEST_CASE("EINVAL of a direct write makes the file buffered and the segment is written again") {
  Setup setup;
  if (!setup.files.EnableDirect().empty()) return;  // a file system without direct reads
  const std::vector<Extent> a = {{0, 0, kMiB, 0}};
  setup.scheduler.Submit(setup.Write(1, ReadClass::kDemand, a));
  const Segment direct = setup.Next();
  CHECK(direct.direct);
  setup.Answer(direct, -EINVAL);
  const Segment again = setup.Next();
  CHECK_FALSE(again.direct);
  CHECK(again.write);
  CHECK(again.bytes == kMiB);
  setup.AnswerFully(again);
  CHECK(setup.Finished().result.error == 0);
}

TEST_CASE("the throttle counts what is written") {
  Setup setup({.bytes_per_second = kMiB});
  const std::vector<Extent> a = {{0, 0, 2 * kMiB, 0}};
  setup.scheduler.Submit(setup.Write(1, ReadClass::kDemand, a));
  setup.AnswerFully(setup.Next());  // the burst
  const uint64_t wait_ns = setup.scheduler.TryNext().wait_ns;
  CHECK(wait_ns > 999'000'000);
  CHECK(wait_ns < 1'001'000'000);
}

TEST_CASE("a prefetch cut short sends nothing more and ends with what is in flight") {
  Setup setup;
  const std::vector<Extent> a = {{0, 0, 3 * kMiB, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kPrefetch, a));
  const Segment first = setup.Next();
  setup.scheduler.CutShort(1);
  CHECK(setup.Nothing());
  setup.AnswerFully(first);
  const FinishedRead over = setup.Finished();
  CHECK(over.id == 1);
  CHECK(over.result.error == ECANCELED);
  CHECK(over.result.bytes == kMiB);
  CHECK(setup.scheduler.Stats().failures == 0);

  SUBCASE("one that is all sent ends well") {
    setup.scheduler.Submit(setup.Job(2, ReadClass::kPrefetch, a));
    const Segment sent[] = {setup.Next(), setup.Next(), setup.Next()};
    setup.scheduler.CutShort(2);
    for (const Segment& segment : sent) setup.AnswerFully(segment);
    CHECK(setup.Finished().result.error == 0);
  }
  SUBCASE("a demand is not cut") {
    setup.scheduler.Submit(setup.Job(2, ReadClass::kPrefetch, a));
    const Segment sent = setup.Next();
    setup.scheduler.Promote(2);
    setup.scheduler.CutShort(2);
    setup.AnswerFully(sent);
    setup.AnswerFully(setup.Next());
    setup.AnswerFully(setup.Next());
    CHECK(setup.Finished().result.error == 0);
  }
}

TEST_CASE("a job is cancelled only while no segment was handed out") {
  Setup setup;
  const std::vector<Extent> a = {{0, 0, 2 * kMiB, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kPrefetch, a));
  setup.scheduler.Submit(setup.Job(2, ReadClass::kPrefetch, a));
  CHECK(setup.scheduler.Cancel(1));
  CHECK_FALSE(setup.scheduler.Cancel(1));
  const Segment first = setup.Next();
  CHECK_FALSE(setup.scheduler.Cancel(2));
  setup.AnswerFully(first);
  CHECK_FALSE(setup.scheduler.Cancel(2));
  setup.AnswerFully(setup.Next());
  CHECK(setup.Finished().id == 2);
  CHECK(setup.Nothing());
}

TEST_CASE("a short read goes on from the last aligned byte") {
  Setup setup;
  const std::vector<Extent> a = {{0, 0, kMiB, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kDemand, a));
  setup.Answer(setup.Next(), 3 * 4096 + 17);
  const Segment rest = setup.Next();
  CHECK(rest.offset == 3 * 4096);
  CHECK(rest.memory == setup.Base() + 3 * 4096);
  CHECK(rest.bytes == kMiB - 3 * 4096);
  setup.AnswerFully(rest);
  CHECK(setup.Finished().result.error == 0);
  CHECK(setup.scheduler.Stats().retries == 1);
  CHECK(setup.scheduler.Stats().demand_bytes == kMiB);
}

TEST_CASE("a read that ends with the file is complete although it is short") {
  Setup setup;
  const std::vector<Extent> tail = {{0, 8 * kMiB - 4096, 3 * kMiB, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kDemand, tail));
  const Segment segment = setup.Next();
  CHECK(segment.bytes == 8192);  // the page that holds the last 100 bytes, and no page after it
  CHECK(setup.Nothing());
  setup.Answer(segment, 4096 + 100);
  CHECK(setup.Finished().result.error == 0);
}

TEST_CASE("a file shorter than when it was opened fails with ENODATA and the place") {
  Setup setup;
  const std::vector<Extent> a = {{0, 4096, kMiB, 0}};
  SUBCASE("nothing at all") {
    setup.scheduler.Submit(setup.Job(1, ReadClass::kDemand, a));
    setup.Answer(setup.Next(), 0);
    const FinishedRead finished = setup.Finished();
    CHECK(finished.result.error == ENODATA);
    CHECK(finished.result.offset == 4096);
  }
  SUBCASE("an end inside a page repeats that page once, not for ever") {
    setup.scheduler.Submit(setup.Job(1, ReadClass::kDemand, a));
    setup.Answer(setup.Next(), 4096 + 10);
    setup.Answer(setup.Next(), 10);
    const FinishedRead finished = setup.Finished();
    CHECK(finished.result.error == ENODATA);
    CHECK(finished.result.offset == 2 * 4096 + 10);
  }
  SUBCASE("an extent that begins at the end of the file") {
    const std::vector<Extent> beyond = {{0, 0, 4096, 0}, {0, 8 * kMiB + 4096, 4096, 4096}};
    setup.scheduler.Submit(setup.Job(1, ReadClass::kDemand, beyond));
    const FinishedRead finished = setup.Finished();
    CHECK(finished.result.error == ENODATA);
    CHECK(finished.result.offset == 8 * kMiB + 4096);
  }
  CHECK(setup.Nothing());
  CHECK(setup.scheduler.Empty());
  CHECK(setup.scheduler.Stats().failures == 1);
}

TEST_CASE("interrupted reads are sent again, but not for ever") {
  Setup setup;
  const std::vector<Extent> a = {{0, 0, 8192, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kDemand, a));
  setup.Answer(setup.Next(), -EINTR);
  setup.Answer(setup.Next(), -EAGAIN);
  setup.AnswerFully(setup.Next());
  CHECK(setup.Finished().result.error == 0);

  setup.scheduler.Submit(setup.Job(2, ReadClass::kDemand, a));
  int answers = 0;
  while (const std::optional<Segment> segment = setup.scheduler.TryNext().segment) {
    setup.Answer(*segment, -EAGAIN);
    REQUIRE(++answers < 100'000);
  }
  CHECK(setup.Finished().result.error == EAGAIN);
}

TEST_CASE("EINVAL of a direct read makes the file buffered and the segment is read again") {
  Setup setup;
  if (!setup.files.EnableDirect().empty()) return;  // a file system without direct reads
  const std::vector<Extent> a = {{0, 0, 2 * kMiB, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kDemand, a));
  const Segment first = setup.Next(), second = setup.Next();
  CHECK(first.direct);
  CHECK(second.direct);
  setup.Answer(first, -EINVAL);
  CHECK_FALSE(setup.files.IsDirect(0));
  setup.Answer(second, -EINVAL);  // was on its way when the file gave up
  const Segment again = setup.Next(), second_again = setup.Next();
  CHECK_FALSE(again.direct);
  CHECK(again.offset == 0);
  setup.AnswerFully(again);
  setup.Answer(second_again, -EINVAL);  // buffered: an error like any other
  CHECK(setup.Finished().result.error == EINVAL);
}

TEST_CASE("a failed job waits for what was sent, keeps its first error and sends no more") {
  Setup setup;
  const std::vector<Extent> a = {{0, 0, 6 * kMiB, 0}}, b = {{0, 0, 4096, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kDemand, a));
  const Segment first = setup.Next(), second = setup.Next(), third = setup.Next(),
                fourth = setup.Next();
  setup.Answer(first, 4096);  // would be read on from there
  setup.Answer(second, -EIO);
  CHECK(setup.Nothing());
  setup.Answer(third, -EBADF);
  CHECK(setup.NoneFinished());
  setup.Answer(fourth, -EINTR);
  const FinishedRead finished = setup.Finished();
  CHECK(finished.result.error == EIO);
  CHECK(finished.result.file == 0);
  CHECK(finished.result.offset == kMiB);
  // All records are free again.
  CHECK(setup.scheduler.Empty());
  setup.scheduler.Submit(setup.Job(1, ReadClass::kDemand, b));
  setup.AnswerFully(setup.Next());
  CHECK(setup.Finished().result.error == 0);
}

TEST_CASE("a late answer to a record that is used again is ignored") {
  Setup setup({.depth = 1, .prefetch_depth = 1});
  const std::vector<Extent> a = {{0, 0, 4096, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kDemand, a));
  const Segment old = setup.Next();
  setup.AnswerFully(old);
  setup.AnswerFully(old);
  CHECK(setup.Finished().id == 1);
  setup.scheduler.Submit(setup.Job(2, ReadClass::kDemand, a));
  const Segment next = setup.Next();
  CHECK(next.index == old.index);
  setup.Answer(old, -EIO);
  CHECK(setup.NoneFinished());
  setup.AnswerFully(next);
  CHECK(setup.Finished().result.error == 0);
}

TEST_CASE("a job without bytes ends at once") {
  Setup setup;
  const std::vector<Extent> empty = {{0, 4096, 0, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kDemand, {}));
  CHECK(setup.Finished().id == 1);
  setup.scheduler.Submit(setup.Job(2, ReadClass::kPrefetch, empty));
  CHECK(setup.Finished().id == 2);
  CHECK(setup.Nothing());
}

TEST_CASE("the throttle lets bytes out at the given rate and says how long to wait") {
  Setup setup({.depth = 32, .prefetch_depth = 8, .bytes_per_second = kMiB});
  const std::vector<Extent> a = {{0, 0, 8 * kMiB, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kDemand, a));
  setup.AnswerFully(setup.Next());  // the burst
  uint64_t segments = 1;
  const uint64_t start = setup.now;
  while (setup.NoneFinished()) {
    const ReadScheduler::Turn turn = setup.scheduler.TryNext();
    if (turn.segment) {
      ++segments;
      setup.AnswerFully(*turn.segment);
    } else {
      REQUIRE(turn.wait_ns > 0);
      setup.now += turn.wait_ns;
    }
  }
  CHECK(segments == 8);
  // The burst is one segment; the other seven take a second each.
  CHECK(setup.now - start >= 7'000'000'000);
  CHECK(setup.now - start < 7'001'000'000);
}

TEST_CASE("the throttle gives back what a short or failed read did not bring") {
  Setup setup({.depth = 32, .prefetch_depth = 8, .bytes_per_second = kMiB});
  const std::vector<Extent> a = {{0, 0, kMiB, 0}};
  for (uint64_t id = 1; id <= 5; ++id) {
    setup.scheduler.Submit(setup.Job(id, ReadClass::kDemand, a));
    setup.Answer(setup.Next(), -EIO);
    CHECK(setup.Finished().id == id);
  }
  setup.scheduler.Submit(setup.Job(6, ReadClass::kDemand, a));
  setup.Answer(setup.Next(), 4096);
  setup.AnswerFully(setup.Next());
  CHECK(setup.Finished().result.error == 0);
  const std::vector<Extent> page = {{0, 0, 4096, 0}};
  setup.scheduler.Submit(setup.Job(7, ReadClass::kDemand, page));
  const uint64_t wait_ns = setup.scheduler.TryNext().wait_ns;
  CHECK(wait_ns > 0);
  CHECK(wait_ns < 4'000'000);  // one page at 1 MiB a second is 3.9 ms
}

TEST_CASE("busy time runs while anything is in flight") {
  Setup setup;
  const std::vector<Extent> a = {{0, 0, 2 * kMiB, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kDemand, a));
  setup.now = 100;
  const Segment first = setup.Next();
  setup.now = 150;
  const Segment second = setup.Next();
  CHECK(setup.scheduler.Stats().busy_ns == 50);
  setup.AnswerFully(first);
  setup.now = 200;
  setup.AnswerFully(second);
  setup.now = 1000;
  CHECK(setup.scheduler.Stats().busy_ns == 100);
}

TEST_CASE("closing cancels what is queued and lets end what is in flight") {
  Setup setup({.depth = 2, .prefetch_depth = 1});
  const std::vector<Extent> one = {{0, 0, kMiB, 0}}, two = {{0, 0, 2 * kMiB, 0}};
  setup.scheduler.Submit(setup.Job(1, ReadClass::kDemand, one));
  setup.scheduler.Submit(setup.Job(2, ReadClass::kDemand, two));
  setup.scheduler.Submit(setup.Job(3, ReadClass::kDemand, one));
  setup.scheduler.Submit(setup.Job(4, ReadClass::kPrefetch, one));
  const Segment whole = setup.Next(), half = setup.Next();
  setup.scheduler.Close();
  const std::vector<FinishedRead> dropped = setup.scheduler.TakeFinished();
  REQUIRE(dropped.size() == 2);
  CHECK(dropped[0].id == 3);
  CHECK(dropped[1].id == 4);
  CHECK(dropped[0].result.error == ECANCELED);
  CHECK_FALSE(setup.scheduler.Empty());
  setup.Answer(whole, 4096);  // was sent completely: it ends well, also over a short read
  setup.AnswerFully(setup.Next());
  CHECK(setup.Finished().result.error == 0);
  setup.AnswerFully(half);
  CHECK(setup.Finished().result.error == ECANCELED);
  CHECK(setup.scheduler.Empty());
  setup.scheduler.Submit(setup.Job(5, ReadClass::kDemand, one));
  CHECK(setup.Finished().result.error == ECANCELED);
  CHECK(setup.scheduler.Stats().failures == 0);
}

}  // namespace
}  // namespace colibri
