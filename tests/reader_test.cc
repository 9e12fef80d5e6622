// One suite over every Reader: io_uring, pread and the scripted one, buffered and direct.
// Length: what holds for one backend is asked of all, in one place.
#include "io/reader.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "io/error.h"
#include "io/file.h"
#include "io/slot_pool.h"
#include "tests/deny_uring.h"
#include "tests/fake_reader.h"
#include "tests/reader_rig.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

TEST_CASE("a job of extents over several files brings their bytes to the right places") {
  ForEach(AllBackends(), [](const Backend& backend) {
    Shards shards(backend);
    SlotPool pool({{4 * kMiB, 2}});
    Answers answers;
    const std::unique_ptr<Reader> reader = backend.make(shards.files, {});
    reader->Start(answers.Callback());
    // The second ends with the file's last, partial page; the third in a page of 100 bytes.
    const std::vector<Extent> extents = {{0, 8192, 2 * kMiB, 0},
                                         {0, 3 * kMiB, 8192, 2 * kMiB},
                                         {1, 0, 4096, 2 * kMiB + 8192},
                                         {2, 4096, 61'440, 3 * kMiB}};
    pool.Data(0, 1)[0] = std::byte{42};
    reader->Submit({11, ReadClass::kDemand, pool.Data(0, 0), extents});
    CHECK(answers.Of(11).error == 0);
    for (const Extent& extent : extents) CHECK(shards.Holds(pool.Data(0, 0), extent));
    CHECK(pool.Data(0, 1)[0] == std::byte{42});
    reader->Stop();
    CHECK(answers.Count() == 1);
  });
}

TEST_CASE("an extent may reach far past the end of its file") {
  ForEach(AllBackends(), [](const Backend& backend) {
    Shards shards(backend);
    SlotPool pool({{4 * kMiB, 1}});
    Answers answers;
    const std::unique_ptr<Reader> reader = backend.make(shards.files, {});
    reader->Start(answers.Callback());
    const std::vector<Extent> extents = {{0, 2 * kMiB, 4 * kMiB, 0}};
    reader->Submit({1, ReadClass::kPrefetch, pool.Data(0, 0), extents});
    CHECK(answers.Of(1).error == 0);
    CHECK(shards.Holds(pool.Data(0, 0), extents[0]));
    reader->Stop();
  });
}

TEST_CASE("many jobs of both classes all end, once, with their own bytes, on one thread") {
  ForEach(AllBackends(), [](const Backend& backend) {
    Shards shards(backend);
    constexpr uint32_t kJobs = 200;
    SlotPool pool({{32'768, kJobs}});
    Answers answers;
    const std::unique_ptr<Reader> reader =
        backend.make(shards.files, {.depth = 16, .prefetch_depth = 3});
    reader->Start(answers.Callback());
    std::vector<std::vector<Extent>> extents(kJobs);
    for (uint32_t id = 0; id < kJobs; ++id) {
      extents[id] = {{0, 4096 * (id * 3 % 700), 12'288, 0}, {2, 4096 * (id % 12), 16'384, 16'384}};
    }
    const auto submit = [&](uint32_t from) {
      for (uint32_t id = from; id < kJobs; id += 2) {
        const ReadClass read_class = id % 3 == 0 ? ReadClass::kPrefetch : ReadClass::kDemand;
        reader->Submit({id, read_class, pool.Data(0, id), extents[id]});
        if (id % 5 == 0) reader->Promote(id);
      }
    };
    std::thread other([&] { submit(1); });
    submit(0);
    other.join();
    answers.WaitFor(kJobs);
    for (uint32_t id = 0; id < kJobs; ++id) {
      CHECK(answers.Of(id).error == 0);
      for (const Extent& extent : extents[id]) CHECK(shards.Holds(pool.Data(0, id), extent));
    }
    CHECK(answers.Threads() == 1);
    reader->Stop();
    CHECK(answers.Count() == kJobs);
  });
}

TEST_CASE("more segments than the ring is deep are read, from callbacks too") {
  ForEach(AllBackends(), [](const Backend& backend) {
    Shards shards(backend);
    SlotPool pool({{4 * kMiB, 1}});
    const std::vector<Extent> extents = {{0, 0, 3 * kMiB, 0}};
    Answers answers;
    const std::unique_ptr<Reader> reader =
        backend.make(shards.files, {.depth = 1, .prefetch_depth = 1});
    const ReadDone record = answers.Callback();
    reader->Start([&](uint64_t id, const ReadResult& result) {
      if (id < 4) reader->Submit({id + 1, ReadClass::kPrefetch, pool.Data(0, 0), extents});
      record(id, result);
    });
    reader->Submit({0, ReadClass::kDemand, pool.Data(0, 0), extents});
    for (uint64_t id = 0; id <= 4; ++id) CHECK(answers.Of(id).error == 0);
    CHECK(shards.Holds(pool.Data(0, 0), extents[0]));
    reader->Stop();
  });
}

TEST_CASE("a file truncated after it was opened fails the job with ENODATA, file and offset") {
  ForEach(RealBackends(), [](const Backend& backend) {
    Shards shards(backend);
    std::filesystem::resize_file(shards.dir.Path("0"), kMiB + 8192);
    SlotPool pool({{4 * kMiB, 1}});
    Answers answers;
    const std::unique_ptr<Reader> reader = backend.make(shards.files, {});
    reader->Start(answers.Callback());
    const std::vector<Extent> bad = {{2, 0, 4096, 3 * kMiB}, {0, 0, 2 * kMiB, 0}};
    const std::vector<Extent> good = {{0, 4096, 8192, 0}};
    reader->Submit({1, ReadClass::kDemand, pool.Data(0, 0), bad});
    const ReadResult result = answers.Of(1);
    CHECK(result.error == ENODATA);
    CHECK(result.file == 0);
    CHECK(result.offset == kMiB + 8192);
    // The reader lives on.
    reader->Submit({2, ReadClass::kDemand, pool.Data(0, 0), good});
    CHECK(answers.Of(2).error == 0);
    CHECK(reader->Stats().failures == 1);
    reader->Stop();
  });
}

TEST_CASE("a read that the kernel refuses fails its job alone") {
  ForEach(RealBackends(), [](const Backend& backend) {
    Shards shards(backend);
    SlotPool pool({{kMiB, 1}});
    Answers answers;
    const std::unique_ptr<Reader> reader = backend.make(shards.files, {});
    reader->Start(answers.Callback());
    const std::vector<Extent> extents = {{2, 4096, 4096, 0}};
    // Nothing is mapped there: EFAULT.
    reader->Submit({1, ReadClass::kDemand, reinterpret_cast<std::byte*>(kIoAlign), extents});
    const ReadResult result = answers.Of(1);
    CHECK(result.error == EFAULT);
    CHECK(result.file == 2);
    CHECK(result.offset == 4096);
    reader->Submit({2, ReadClass::kDemand, pool.Data(0, 0), extents});
    CHECK(answers.Of(2).error == 0);
    reader->Stop();
  });
}

TEST_CASE("a direct read refused with EINVAL is read buffered") {
  ForEach(RealBackends(), [](const Backend& backend) {
    if (!backend.direct) return;
    Shards shards(backend);
    if (!shards.files.IsDirect(2)) return;
    std::vector<std::byte> memory(3 * kIoAlign);
    Answers answers;
    const std::unique_ptr<Reader> reader = backend.make(shards.files, {});
    reader->Start(answers.Callback());
    const std::vector<Extent> extents = {{2, 4096, 4096, 0}};
    // A destination that no direct read takes stands for a file system that lies.
    std::byte* odd = memory.data();
    while (reinterpret_cast<uintptr_t>(odd) % 4 != 1) ++odd;
    reader->Submit({1, ReadClass::kDemand, odd, extents});
    CHECK(answers.Of(1).error == 0);
    CHECK(shards.Holds(odd, extents[0]));
    CHECK_FALSE(shards.files.IsDirect(2));
    CHECK(shards.files.IsDirect(0));
    reader->Stop();
  });
}

TEST_CASE("stop runs every callback: what was queued is cancelled, nothing comes after") {
  ForEach(AllBackends(), [](const Backend& backend) {
    Shards shards(backend);
    constexpr uint32_t kJobs = 100;
    SlotPool pool({{4 * kMiB, 1}});
    Answers answers;
    // One byte a second: after the first segment nothing moves until the stop.
    const std::unique_ptr<Reader> reader =
        backend.make(shards.files, {.depth = 4, .prefetch_depth = 1, .bytes_per_second = 1});
    reader->Start(answers.Callback());
    const std::vector<Extent> extents = {{0, 0, 3 * kMiB, 0}};
    for (uint32_t id = 0; id < kJobs; ++id) {
      reader->Submit(
          {id, id % 2 == 0 ? ReadClass::kDemand : ReadClass::kPrefetch, pool.Data(0, 0), extents});
    }
    reader->Stop();
    REQUIRE(answers.Count() == kJobs);
    for (uint32_t id = 0; id < kJobs; ++id) {
      const int error = answers.Of(id).error;
      CHECK((error == ECANCELED || (error == 0 && backend.name == "fake")));
    }
    reader->Stop();
    CHECK(answers.Count() == kJobs);
  });
}

TEST_CASE("a throttle that is lifted lets what waits go at once") {
  ForEach(RealBackends(), [](const Backend& backend) {
    Shards shards(backend);
    SlotPool pool({{4 * kMiB, 2}});
    Answers answers;
    // A byte a second: only the first segment goes, and the rest would take weeks.
    const std::unique_ptr<Reader> reader = backend.make(shards.files, {.bytes_per_second = 1});
    reader->Start(answers.Callback());
    const std::vector<Extent> extents = {{0, 0, 3 * kMiB, 0}};
    reader->Submit({1, ReadClass::kDemand, pool.Data(0, 0), extents});
    reader->Unthrottle();
    CHECK(answers.Of(1).error == 0);
    reader->Submit({2, ReadClass::kPrefetch, pool.Data(0, 1), extents});
    CHECK(answers.Of(2).error == 0);
  });
}

TEST_CASE("a stop right after a submission still runs the callback, once") {
  ForEach(AllBackends(), [](const Backend& backend) {
    Shards shards(backend);
    SlotPool pool({{kMiB, 1}});
    const std::vector<Extent> extents = {{2, 0, 8192, 0}};
    for (int i = 0; i < 40; ++i) {
      Answers answers;
      const std::unique_ptr<Reader> reader = backend.make(shards.files, {});
      reader->Start(answers.Callback());
      reader->Submit({1, ReadClass::kDemand, pool.Data(0, 0), extents});
      reader->Stop();
      REQUIRE(answers.Count() == 1);
      const int error = answers.Of(1).error;
      CHECK((error == 0 || error == ECANCELED));
    }
  });
}

TEST_CASE("a cancelled job is forgotten, one that was sent is not") {
  ForEach(RealBackends(), [](const Backend& backend) {
    Shards shards(backend);
    SlotPool pool({{4 * kMiB, 2}});
    Answers answers;
    const std::unique_ptr<Reader> reader =
        backend.make(shards.files, {.depth = 4, .prefetch_depth = 1, .bytes_per_second = 1});
    reader->Start(answers.Callback());
    const std::vector<Extent> one = {{0, 0, kMiB, 0}};
    reader->Submit({1, ReadClass::kDemand, pool.Data(0, 0), one});
    CHECK(answers.Of(1).error == 0);
    CHECK_FALSE(reader->Cancel(1));
    // The throttle holds back everything after the first segment.
    reader->Submit({2, ReadClass::kPrefetch, pool.Data(0, 1), one});
    CHECK(reader->Cancel(2));
    CHECK_FALSE(reader->Cancel(2));
    reader->Stop();
    CHECK(answers.Count() == 1);
  });
}

TEST_CASE("a reader that was never started, or has nothing to do, stops") {
  ForEach(AllBackends(), [](const Backend& backend) {
    Shards shards(backend);
    Answers answers;
    backend.make(shards.files, {})->Stop();
    { const std::unique_ptr<Reader> reader = backend.make(shards.files, {}); }
    const std::unique_ptr<Reader> reader = backend.make(shards.files, {});
    reader->Start(answers.Callback());
    reader->Stop();
    CHECK(answers.Count() == 0);
  });
}

TEST_CASE("statistics tell the classes apart and count what arrived") {
  ForEach(RealBackends(), [](const Backend& backend) {
    Shards shards(backend);
    SlotPool pool({{4 * kMiB, 2}});
    Answers answers;
    const std::unique_ptr<Reader> reader = backend.make(shards.files, {});
    reader->Start(answers.Callback());
    const std::vector<Extent> a = {{0, 0, 2 * kMiB, 0}}, b = {{1, 0, 4096, 0}};
    reader->Submit({1, ReadClass::kDemand, pool.Data(0, 0), a});
    reader->Submit({2, ReadClass::kPrefetch, pool.Data(0, 1), b});
    answers.WaitFor(2);
    reader->Stop();
    const ReaderStats stats = reader->Stats();
    CHECK(stats.demand_bytes == 2 * kMiB);
    CHECK(stats.prefetch_bytes == 100);
    CHECK(stats.segments >= 3);
    CHECK(stats.failures == 0);
    CHECK(stats.busy_ns > 0);
  });
}

TEST_CASE("what was written to a scratch file is read back, and nothing beside it is touched") {
  ForEach(AllBackends(), [](const Backend& backend) {
    Shards shards(backend);
    const uint32_t scratch = shards.files.AddScratch(shards.dir.Path(""), 4 * kMiB);
    SlotPool pool({{4 * kMiB, 2}});
    std::byte *from = pool.Data(0, 0), *to = pool.Data(0, 1);
    for (uint64_t i = 0; i < 4 * kMiB; ++i) from[i] = PatternByte(5, i);
    Answers answers;
    const std::unique_ptr<Reader> reader = backend.make(shards.files, {});
    reader->Start(answers.Callback());
    // Out of order, over segment borders, up to the file's last byte.
    const std::vector<Extent> parts = {{scratch, kMiB + 4096, 3 * kMiB - 4096, 8192},
                                       {scratch, 4096, 4096, 0}};
    reader->Submit({1, ReadClass::kAhead, from, parts, true});
    CHECK(answers.Of(1).error == 0);
    const std::vector<Extent> all = {{scratch, 0, 4 * kMiB, 0}};
    reader->Submit({2, ReadClass::kDemand, to, all});
    CHECK(answers.Of(2).error == 0);
    for (const Extent& part : parts) {
      CHECK(std::memcmp(to + part.offset, from + part.dest, part.bytes) == 0);
    }
    CHECK(std::all_of(to, to + 4096, [](std::byte b) { return b == std::byte{0}; }));
    CHECK(std::all_of(to + 8192, to + kMiB, [](std::byte b) { return b == std::byte{0}; }));
    // A second write replaces the first.
    const std::vector<Extent> page = {{scratch, 4096, 4096, 12'288}};
    reader->Submit({3, ReadClass::kPrefetch, from, page, true});
    CHECK(answers.Of(3).error == 0);
    reader->Submit({4, ReadClass::kDemand, to, all});
    CHECK(answers.Of(4).error == 0);
    CHECK(std::memcmp(to + 4096, from + 12'288, 4096) == 0);
    reader->Stop();
    if (backend.name == "fake") return;
    CHECK(reader->Stats().written_bytes == 3 * kMiB + 4096);
    CHECK(reader->Stats().demand_bytes == 8 * kMiB);
    CHECK(reader->Stats().ahead_bytes == 0);
  });
}

TEST_CASE("a write that the kernel refuses fails its job alone, with file and offset") {
  ForEach(RealBackends(), [](const Backend& backend) {
    Shards shards(backend);
    const uint32_t scratch = shards.files.AddScratch(shards.dir.Path(""), kMiB);
    SlotPool pool({{kMiB, 1}});
    Answers answers;
    const std::unique_ptr<Reader> reader = backend.make(shards.files, {});
    reader->Start(answers.Callback());
    // A shard is open for reading only.
    const std::vector<Extent> shard = {{2, 4096, 4096, 0}}, good = {{scratch, 4096, 4096, 0}};
    reader->Submit({1, ReadClass::kDemand, pool.Data(0, 0), shard, true});
    CHECK(answers.Of(1).error == EBADF);
    CHECK(answers.Of(1).file == 2);
    CHECK(answers.Of(1).offset == 4096);
    reader->Submit({2, ReadClass::kDemand, pool.Data(0, 0), good, true});
    CHECK(answers.Of(2).error == 0);
    CHECK(reader->Stats().failures == 1);
    reader->Stop();
  });
}

TEST_CASE("a direct write refused with EINVAL is written buffered") {
  ForEach(RealBackends(), [](const Backend& backend) {
    if (!backend.direct) return;
    Shards shards(backend);
    const uint32_t scratch = shards.files.AddScratch(shards.dir.Path(""), 8192);
    if (!shards.files.IsDirect(scratch)) return;
    std::vector<std::byte> memory(3 * kIoAlign, std::byte{9});
    std::byte* odd = memory.data();
    while (reinterpret_cast<uintptr_t>(odd) % 4 != 1) ++odd;
    Answers answers;
    const std::unique_ptr<Reader> reader = backend.make(shards.files, {});
    reader->Start(answers.Callback());
    const std::vector<Extent> extents = {{scratch, 4096, 4096, 0}};
    reader->Submit({1, ReadClass::kDemand, odd, extents, true});
    CHECK(answers.Of(1).error == 0);
    CHECK_FALSE(shards.files.IsDirect(scratch));
    std::byte last{};
    shards.files.ReadExact(scratch, 8191, {&last, 1});
    CHECK(last == std::byte{9});
    reader->Stop();
  });
}

TEST_CASE("demands are read first, then what is ahead, then prefetches") {
  ForEach(RealBackends(), [](const Backend& backend) {
    // Its callbacks run between two segments; those of the pread pool beside them, in no order.
    if (backend.name.find("io_uring") == std::string::npos) return;
    Shards shards(backend);
    SlotPool pool({{kMiB, 1}});
    Answers answers;
    std::vector<uint64_t> order;
    const ReadDone collect = answers.Callback();
    const std::unique_ptr<Reader> reader = backend.make(shards.files, {.depth = 1});
    const std::vector<Extent> one = {{0, 0, kMiB, 0}};
    reader->Start([&](uint64_t id, const ReadResult& result) {
      order.push_back(id);
      if (id == 1) {
        reader->Submit({2, ReadClass::kPrefetch, pool.Data(0, 0), one});
        reader->Submit({3, ReadClass::kAhead, pool.Data(0, 0), one});
        reader->Submit({4, ReadClass::kAhead, pool.Data(0, 0), one});
        reader->Submit({5, ReadClass::kDemand, pool.Data(0, 0), one});
        reader->Promote(4);
      }
      collect(id, result);
    });
    reader->Submit({1, ReadClass::kDemand, pool.Data(0, 0), one});
    answers.WaitFor(5);
    reader->Stop();
    CHECK(order == std::vector<uint64_t>{1, 5, 4, 3, 2});
    CHECK(reader->Stats().demand_bytes == 3 * kMiB);
    CHECK(reader->Stats().ahead_bytes == kMiB);
    CHECK(reader->Stats().prefetch_bytes == kMiB);
  });
}

TEST_CASE("a scripted reader without files reads back what was written and fails as told") {
  FakeReader reader;
  Answers answers;
  reader.Start(answers.Callback());
  std::vector<std::byte> from(8192, std::byte{7}), to(3 * 4096);
  const std::vector<Extent> pages = {{4, 4096, 8192, 0}}, around = {{4, 0, 3 * 4096, 0}};
  reader.Submit({1, ReadClass::kAhead, from.data(), pages, true});
  reader.Complete(1);
  reader.Submit({2, ReadClass::kDemand, to.data(), around});
  reader.Complete(2);
  CHECK(to[100] == FakeReader::SyntheticByte(4, 100));
  CHECK(std::equal(from.begin(), from.end(), to.begin() + 4096));
  from[0] = std::byte{8};
  reader.Submit({3, ReadClass::kDemand, from.data(), pages, true});
  reader.Complete(3, ENOSPC);
  CHECK(answers.Of(3).error == ENOSPC);
  CHECK(answers.Of(3).file == 4);
  CHECK(answers.Of(3).offset == 4096);
  reader.Submit({4, ReadClass::kDemand, to.data(), around});
  reader.Complete(4);
  CHECK(to[4096] == std::byte{7});
}

TEST_CASE("a reader of which nothing is wanted sleeps") {
  for (const IoBackend backend : {IoBackend::kUring, IoBackend::kPread}) {
    Shards shards({});
    SlotPool pool({{4 * kMiB, 2}});
    Answers idle_answers, answers;
    std::string note;
    // What passes the time is another reader that is throttled: 2 MiB beyond its burst in 0.1 s.
    const auto idle = MakeReader(backend, shards.files, {}, &note);
    const auto slow = MakeReader(backend, shards.files, {.bytes_per_second = 20'000'000}, &note);
    idle->Start(idle_answers.Callback());
    slow->Start(answers.Callback());
    const std::vector<Extent> all = {{0, 0, 3 * kMiB, 0}};
    idle->Submit({1, ReadClass::kDemand, pool.Data(0, 0), all});
    idle_answers.WaitFor(1);
    slow->Submit({1, ReadClass::kDemand, pool.Data(0, 1), all});
    answers.WaitFor(1);
    const uint64_t before = idle->Stats().wakes;
    CHECK(before > 0);
    slow->Submit({2, ReadClass::kDemand, pool.Data(0, 1), all});
    answers.WaitFor(2);
    // A thread that was woken for the job may come late; the pread pool has nine.
    CHECK(idle->Stats().wakes - before <= (backend == IoBackend::kUring ? 1 : 9));
  }
}

TEST_CASE("io_uring has segments in flight again before a callback runs") {
  Shards shards({});
  SlotPool pool({{4 * kMiB, 3}});
  const std::vector<Extent> one = {{2, 0, 4096, 0}}, three = {{0, 0, 3 * kMiB, 0}};
  const auto reader = MakeReader(IoBackend::kUring, shards.files, {.depth = 2}, nullptr);
  Answers answers;
  const ReadDone collect = answers.Callback();
  std::atomic<uint64_t> handed_out{0};
  reader->Start([&](uint64_t id, const ReadResult& result) {
    if (id == 1) {
      reader->Submit({2, ReadClass::kDemand, pool.Data(0, 1), one});
      reader->Submit({3, ReadClass::kDemand, pool.Data(0, 2), three});
    } else if (id == 2) {
      handed_out = reader->Stats().segments;
    }
    collect(id, result);
  });
  reader->Submit({1, ReadClass::kDemand, pool.Data(0, 0), one});
  answers.WaitFor(3);
  // Jobs 1 and 2, and two of the third: the second took the record that job 2 had given back.
  CHECK(handed_out >= 4);
  reader->Stop();
}

TEST_CASE("where io_uring is denied, auto reads with pread and says why, and uring refuses") {
  Shards shards({});
  SlotPool pool({{kMiB, 1}});
  bool denied = false;
  std::string note = "untouched", name, refusal;
  int error = -1;
  std::thread sandbox([&] {
    denied = DenyUring();
    if (!denied) return;
    try {
      MakeReader(IoBackend::kUring, shards.files, {}, nullptr);
    } catch (const IoError& thrown) {
      refusal = thrown.what();
    }
    Answers answers;
    const std::unique_ptr<Reader> reader = MakeReader(IoBackend::kAuto, shards.files, {}, &note);
    name = reader->Name();
    reader->Start(answers.Callback());
    const std::vector<Extent> extents = {{2, 0, 65'536, 0}};
    reader->Submit({1, ReadClass::kDemand, pool.Data(0, 0), extents});
    error = answers.Of(1).error;
    reader->Stop();
  });
  sandbox.join();
  if (!denied) {
    MESSAGE("seccomp filters cannot be set here: fallback not tested");
    return;
  }
  CHECK(name == "pread x8");
  CHECK(error == 0);
  CHECK(note.find("io_uring_setup: Operation not permitted") != std::string::npos);
  CHECK(note.find("kernel.io_uring_disabled: ") != std::string::npos);
  CHECK(note.find('\n') == std::string::npos);
  CHECK(refusal.find("Operation not permitted") != std::string::npos);
}

TEST_CASE("a reader that was asked for by name leaves no note") {
  Shards shards({});
  std::string note = "untouched";
  const std::unique_ptr<Reader> reader = MakeReader(IoBackend::kPread, shards.files, {}, &note);
  CHECK(reader->Name() == "pread x8");
  CHECK(note.empty());
}

}  // namespace
}  // namespace colibri
