// ReadHub over the scripted reader and over every real one.
#include "io/read_hub.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "io/slot_pool.h"
#include "tests/fake_reader.h"
#include "tests/reader_rig.h"

namespace colibri {
namespace {

constexpr uint64_t kLastId = (uint64_t{1} << 56) - 1;

// Two users of the scripted reader.
struct Setup {
  Setup() : hub(fake), a(hub.AddPort()), b(hub.AddPort()) {
    a->Start(answers_a.Callback());
    b->Start(answers_b.Callback());
  }
  void Submit(Reader& port, uint64_t id, ReadClass read_class = ReadClass::kPrefetch) {
    port.Submit({id, read_class, memory.data(), page});
  }
  // What the reader under the hub has of the `n`th job that is pending.
  FakeReader::Pending At(size_t n) const { return fake.All().at(n); }

  std::vector<std::byte> memory = std::vector<std::byte>(4096);
  const std::vector<Extent> page = {{3, 8192, 4096, 0}};
  Answers answers_a, answers_b;
  FakeReader fake;
  ReadHub hub;
  std::unique_ptr<Reader> a, b;
};

TEST_CASE("two users of one reader may use the same ids, up to the last, and get their own") {
  Setup setup;
  for (const uint64_t id : {uint64_t{0}, uint64_t{7}, kLastId}) {
    setup.Submit(*setup.a, id, ReadClass::kAhead);
    setup.Submit(*setup.b, id);
    const ReadJob of_a = setup.At(0).job, of_b = setup.At(1).job;
    CHECK(of_a.id != of_b.id);
    CHECK(of_a.read_class == ReadClass::kAhead);
    CHECK(of_b.destination == setup.memory.data());
    setup.fake.Complete(of_b.id, EIO);
    const size_t before = setup.answers_a.Count();
    CHECK(setup.answers_b.Of(id).error == EIO);
    CHECK(setup.answers_b.Of(id).file == 3);
    CHECK(setup.answers_b.Of(id).offset == 8192);
    setup.fake.Complete(of_a.id);
    CHECK(setup.answers_a.Count() == before + 1);
    CHECK(setup.answers_a.Of(id).error == 0);
  }
  CHECK(setup.answers_b.Count() == 3);
}

TEST_CASE("a user promotes, cancels and cuts short its own job only") {
  Setup setup;
  setup.Submit(*setup.a, 1);
  setup.Submit(*setup.b, 1);
  setup.b->Promote(1);
  CHECK_FALSE(setup.At(0).promoted);
  CHECK(setup.At(1).promoted);
  setup.a->CutShort(1);
  CHECK(setup.At(0).cut);
  CHECK_FALSE(setup.At(1).cut);
  CHECK(setup.a->Cancel(1));
  CHECK_FALSE(setup.a->Cancel(1));
  CHECK(setup.At(0).promoted);
  CHECK(setup.b->Cancel(1));
  CHECK(setup.fake.PendingCount() == 0);
}

TEST_CASE("a write through a port stays a write") {
  Setup setup;
  setup.a->Submit({1, ReadClass::kAhead, setup.memory.data(), setup.page, true});
  CHECK(setup.At(0).job.write);
}

TEST_CASE("a stop of one user's reader runs the callbacks of all, once") {
  Setup setup;
  setup.Submit(*setup.a, 1);
  setup.Submit(*setup.b, 2, ReadClass::kDemand);
  setup.b->Stop();
  CHECK(setup.answers_a.Of(1).error == ECANCELED);
  CHECK(setup.answers_b.Of(2).error == ECANCELED);
  // The scripted reader would end this one as well if it were stopped again.
  setup.Submit(*setup.a, 3);
  setup.a->Stop();
  CHECK(setup.answers_a.Count() == 1);
}

TEST_CASE("a port that goes away while it is started stops the reader, an unused one does not") {
  Setup setup;
  setup.hub.AddPort().reset();
  setup.Submit(*setup.a, 1);
  setup.Submit(*setup.b, 1);
  CHECK(setup.answers_a.Count() == 0);
  setup.b.reset();
  CHECK(setup.answers_a.Of(1).error == ECANCELED);
  CHECK(setup.answers_b.Of(1).error == ECANCELED);
}

TEST_CASE("name and statistics of a port are the reader's") {
  Shards shards({});
  const auto reader = MakeReader(IoBackend::kPread, shards.files, {}, nullptr);
  ReadHub hub(*reader);
  const std::unique_ptr<Reader> a = hub.AddPort(), b = hub.AddPort();
  Answers answers;
  a->Start(answers.Callback());
  SlotPool pool({{4096, 1}});
  const std::vector<Extent> page = {{2, 0, 4096, 0}};
  a->Submit({1, ReadClass::kDemand, pool.Data(0, 0), page});
  CHECK(answers.Of(1).error == 0);
  CHECK(b->Name() == "pread x8");
  CHECK(b->Stats().demand_bytes == 4096);
  a->Stop();  // before what the callback and the job use goes
}

TEST_CASE("users on threads of their own write and read over one reader, each its own bytes") {
  ForEach(AllBackends(), [](const Backend& backend) {
    constexpr uint32_t kUsers = 3, kJobs = 40;
    constexpr uint64_t kBytes = 16'384;
    Shards shards(backend);
    const uint32_t scratch =
        shards.files.AddScratch(shards.dir.Path(""), uint64_t{kUsers} * kJobs * kBytes);
    SlotPool pool({{kBytes, 2 * kUsers * kJobs}});
    const std::unique_ptr<Reader> reader = backend.make(shards.files, {.depth = 4});
    ReadHub hub(*reader);
    std::vector<std::unique_ptr<Reader>> ports;
    for (uint32_t user = 0; user < kUsers; ++user) ports.push_back(hub.AddPort());
    std::vector<Answers> answers(kUsers);
    const auto use = [&](uint32_t user) {
      Reader& port = *ports[user];
      port.Start(answers[user].Callback());
      std::vector<std::vector<Extent>> extents(kJobs);
      const auto submit = [&](uint64_t id, uint32_t job, bool write) {
        const uint32_t slot = (user * kJobs + job) * 2 + (write ? 0 : 1);
        if (write) std::fill_n(pool.Data(0, slot), kBytes, PatternByte(user, job));
        const auto read_class = static_cast<ReadClass>(job % kReadClasses);
        port.Submit({id, read_class, pool.Data(0, slot), extents[job], write});
        port.Promote(id);
      };
      for (uint32_t job = 0; job < kJobs; ++job) {
        extents[job] = {{scratch, (user * kJobs + job) * kBytes, kBytes, 0}};
        submit(job, job, true);
      }
      answers[user].WaitFor(kJobs);
      for (uint32_t job = 0; job < kJobs; ++job) submit(kJobs + job, job, false);
      answers[user].WaitFor(2 * kJobs);
    };
    std::vector<std::thread> threads;
    for (uint32_t user = 0; user < kUsers; ++user) threads.emplace_back(use, user);
    for (std::thread& thread : threads) thread.join();
    ports[1]->Stop();
    for (uint32_t user = 0; user < kUsers; ++user) {
      CHECK(answers[user].Count() == 2 * kJobs);
      CHECK(answers[user].Threads() == 1);
      for (uint64_t id = 0; id < 2 * kJobs; ++id) CHECK(answers[user].Of(id).error == 0);
      for (uint32_t job = 0; job < kJobs; ++job) {
        const std::byte* read = pool.Data(0, (user * kJobs + job) * 2 + 1);
        CHECK(std::all_of(read, read + kBytes,
                          [&](std::byte b) { return b == PatternByte(user, job); }));
      }
    }
  });
}

TEST_CASE("stops of two users at once both wait for the last callback") {
  ForEach(RealBackends(), [](const Backend& backend) {
    Shards shards(backend);
    SlotPool pool({{4 * kMiB, 1}});
    const std::unique_ptr<Reader> reader =
        backend.make(shards.files, {.depth = 4, .bytes_per_second = 1});
    ReadHub hub(*reader);
    const std::unique_ptr<Reader> a = hub.AddPort(), b = hub.AddPort(), unused = hub.AddPort();
    Answers answers_a, answers_b;
    a->Start(answers_a.Callback());
    b->Start(answers_b.Callback());
    const std::vector<Extent> all = {{0, 0, 3 * kMiB, 0}};
    for (uint64_t id = 0; id < 20; ++id) {
      a->Submit({id, ReadClass::kAhead, pool.Data(0, 0), all});
      b->Submit({id, ReadClass::kDemand, pool.Data(0, 0), all});
    }
    size_t after_a = 0, after_b = 0;
    const auto stop = [&](Reader& port, size_t* after) {
      port.Stop();
      *after = answers_a.Count() + answers_b.Count();
    };
    std::thread other([&] { stop(*a, &after_a); });
    stop(*b, &after_b);
    other.join();
    CHECK(after_a == 40);
    CHECK(after_b == 40);
    unused->Stop();
  });
}

TEST_CASE("a hub of which nobody starts anything stops") {
  Shards shards({});
  const auto reader = MakeReader(IoBackend::kPread, shards.files, {}, nullptr);
  ReadHub hub(*reader);
  const std::unique_ptr<Reader> a = hub.AddPort(), b = hub.AddPort();
  a->Stop();
  Answers answers;
  b->Start(answers.Callback());
  b->Stop();
  CHECK(answers.Count() == 0);
}

}  // namespace
}  // namespace colibri
