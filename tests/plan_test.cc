// The memory plan: what the machine and its cgroups leave, how it is shared out, and what is said
// when it is too little. Length: all of it is about one function, with one set of models.
#include "runtime/plan.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "io/error.h"
#include "runtime/draft.h"
#include "runtime/frame.h"
#include "runtime/line_limits.h"
#include "runtime/model_writer.h"
#include "tests/real_size_model.h"
#include "tests/shard_files.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// A machine as far as /proc and /sys tell of it.
class FakeMachine {
 public:
  explicit FakeMachine(uint64_t available_mib) {
    Write("proc/meminfo", "MemTotal:       99999999 kB\nMemAvailable:   " +
                              std::to_string(available_mib * 1024) + " kB\n");
  }
  void Write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(dir_.Path(path)).parent_path());
    dir_.Write(path, text);
  }
  MemoryBudget Budget() const {
    std::string root = dir_.Path("");
    root.pop_back();
    return AvailableMemory(root);
  }

 private:
  TempDir dir_;
};

// 3 sparse layers of 16 experts and an MTP layer of larger ones.
const Model& SmallModel() {
  static const TempDir dir;
  static const Model model = [] {
    SyntheticModel m;
    m.layers = 4;
    m.experts = 16;
    m.hidden = 512;
    m.vocab = 512;
    WriteSyntheticModel(m, dir.Path("model"));
    return Model({dir.Path("model")});
  }();
  return model;
}

Plan RealPlan(uint64_t gigabytes, std::optional<uint64_t> answers = {}, uint64_t kv_space = 0) {
  PlanRequest r;
  r.kv_space = kv_space;
  r.ram = gigabytes * 1'000'000'000;
  r.threads = 8;
  r.answers = answers;
  const Plan p = MakePlan(RealSize(), r);
  CHECK(p.Total() <= p.budget - p.margin);
  return p;
}

PlanRequest Wanted(uint64_t ram) {
  PlanRequest r;
  r.ram = ram;
  r.threads = 2;
  r.context = 512;
  return r;
}

uint64_t Limit(const Plan& p) { return p.budget - p.margin; }

// A budget that leaves `more` beyond what a plan of one row and one slot a class takes.
uint64_t RamFor(PlanRequest r, uint64_t more) {
  r.ram = 2'000'000'000;  // more would make the lines' pool larger
  r.rows = 1;
  r.slot_count = 1;
  r.answers = 1;
  return MakePlan(SmallModel(), r).Total() + 64'000'000 + more;
}

std::string Refusal(const PlanRequest& r) {
  return MessageOf<UsageError>([&] { (void)MakePlan(SmallModel(), r); });
}

}  // namespace

TEST_CASE("without cgroups the budget is what is free, less a reserve") {
  CHECK(FakeMachine(20'000).Budget().bytes == 19'000 * kMiB);
  CHECK(FakeMachine(4'000).Budget().bytes == 3'488 * kMiB);
  CHECK(FakeMachine(4'000).Budget().source == "memory available");
  // Less than the reserve is no reason to plan with nothing.
  CHECK(FakeMachine(300).Budget().bytes == 150 * kMiB);
}

TEST_CASE("a cgroup v2 limit binds, less what is in use and cannot be reclaimed") {
  const FakeMachine machine(20'000);
  machine.Write("proc/self/cgroup", "0::/user/job\n");
  machine.Write("sys/fs/cgroup/user/job/memory.max", std::to_string(8'000 * kMiB) + "\n");
  machine.Write("sys/fs/cgroup/user/job/memory.current", std::to_string(3'000 * kMiB) + "\n");
  machine.Write("sys/fs/cgroup/user/job/memory.stat",
                "anon 1\ninactive_file " + std::to_string(1'500 * kMiB) + "\nactive_file " +
                    std::to_string(1'000 * kMiB) + "\n");
  CHECK(machine.Budget().bytes == 7'500 * kMiB);
  CHECK(machine.Budget().source == "cgroup limit");
}

TEST_CASE("a parent cgroup's limit binds as well, and max is none") {
  const FakeMachine machine(20'000);
  machine.Write("proc/self/cgroup", "0::/user/job\n");
  machine.Write("sys/fs/cgroup/user/job/memory.max", "max\n");
  CHECK(machine.Budget().source == "memory available");
  machine.Write("sys/fs/cgroup/user/memory.max", std::to_string(6'000 * kMiB) + "\n");
  CHECK(machine.Budget().bytes == 6'000 * kMiB);
}

TEST_CASE("of nested cgroups the one that leaves the least binds, by what all in it use") {
  const FakeMachine machine(20'000);
  machine.Write("proc/self/cgroup", "0::/a/b/c\n");
  const auto cgroup = [&](const std::string& path, uint64_t limit_mib, uint64_t used_mib) {
    machine.Write("sys/fs/cgroup" + path + "/memory.max", std::to_string(limit_mib * kMiB) + "\n");
    machine.Write("sys/fs/cgroup" + path + "/memory.current",
                  std::to_string(used_mib * kMiB) + "\n");
  };
  cgroup("/a/b/c", 5'000, 100);
  cgroup("/a", 8'000, 6'000);  // a neighbour of b has most of it
  CHECK(machine.Budget().bytes == 2'000 * kMiB);
  cgroup("/a/b", 1'500, 100);
  CHECK(machine.Budget().bytes == 1'400 * kMiB);
  cgroup("", 1'000, 0);
  CHECK(machine.Budget().bytes == 1'000 * kMiB);
}

TEST_CASE("memory.high binds like a limit") {
  const FakeMachine machine(20'000);
  machine.Write("proc/self/cgroup", "0::/job\n");
  machine.Write("sys/fs/cgroup/job/memory.max", "max\n");
  machine.Write("sys/fs/cgroup/job/memory.high", std::to_string(3'000 * kMiB) + "\n");
  machine.Write("sys/fs/cgroup/job/memory.current", std::to_string(500 * kMiB) + "\n");
  CHECK(machine.Budget().bytes == 2'500 * kMiB);
  machine.Write("sys/fs/cgroup/job/memory.max", std::to_string(2'000 * kMiB) + "\n");
  CHECK(machine.Budget().bytes == 1'500 * kMiB);
}

TEST_CASE("under cgroup v1 the limit of ancestors that a container cannot see binds") {
  const FakeMachine machine(20'000);
  machine.Write("proc/self/cgroup", "4:hugetlb,memory:/kubepods/pod\n0::/\n");
  const std::string folder = "sys/fs/cgroup/memory/";
  machine.Write(folder + "memory.limit_in_bytes", "9223372036854771712\n");
  machine.Write(folder + "memory.usage_in_bytes", std::to_string(900 * kMiB) + "\n");
  machine.Write(folder + "memory.stat",
                "hierarchical_memory_limit " + std::to_string(4'000 * kMiB) +
                    "\nactive_file 5\ntotal_active_file " + std::to_string(500 * kMiB) + "\n");
  CHECK(machine.Budget().bytes == 3'600 * kMiB);
}

TEST_CASE("inside a container the limit is at the mount, whatever the path says") {
  const FakeMachine machine(20'000);
  machine.Write("proc/self/cgroup", "0::/docker/0123456789\n");
  machine.Write("sys/fs/cgroup/memory.max", std::to_string(2'000 * kMiB) + "\n");
  CHECK(machine.Budget().bytes == 2'000 * kMiB);
}

TEST_CASE("a cgroup v1 limit binds, and its way to say unlimited does not") {
  const FakeMachine machine(20'000);
  machine.Write("proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/a\n");
  const std::string folder = "sys/fs/cgroup/memory/a/";
  machine.Write(folder + "memory.limit_in_bytes", "9223372036854771712\n");
  machine.Write(folder + "memory.usage_in_bytes", std::to_string(900 * kMiB) + "\n");
  CHECK(machine.Budget().source == "memory available");
  machine.Write(folder + "memory.limit_in_bytes", std::to_string(5'000 * kMiB) + "\n");
  machine.Write(folder + "memory.stat", "cache 5\ntotal_inactive_file 0\n");
  CHECK(machine.Budget().bytes == 4'100 * kMiB);
}

TEST_CASE("a cgroup that is full leaves nothing") {
  const FakeMachine machine(20'000);
  machine.Write("proc/self/cgroup", "0::/\n");
  machine.Write("sys/fs/cgroup/memory.max", "1000000\n");
  machine.Write("sys/fs/cgroup/memory.current", "2000000\n");
  CHECK(machine.Budget().bytes == 0);
}

TEST_CASE("the total of every plan stays below the budget less its margin") {
  const PlanRequest least = Wanted(0);
  for (const uint64_t more : {uint64_t{0}, kMiB, 10 * kMiB, 50 * kMiB, 500 * kMiB, 8'000 * kMiB}) {
    for (const std::optional<uint64_t> answers : {std::optional<uint64_t>(), {1}, {5}}) {
      CAPTURE(more);
      PlanRequest r = Wanted(RamFor(least, more + kMiB));
      r.answers = answers;
      const Plan p = MakePlan(SmallModel(), r);
      CHECK(p.Total() <= Limit(p));
      CHECK(p.margin >= 64'000'000);
      CHECK(p.margin >= p.budget / 100 * 3);
      CHECK(p.kv_pages >= 512 / p.page_tokens);
      for (const SlotClass& s : p.slot_classes) CHECK(s.count >= 1);
    }
  }
}

TEST_CASE("with drafts the MTP layer and the embedding are in memory and rows have room for them") {
  PlanRequest r = Wanted(20'000 * kMiB);
  r.answers = 2;
  r.prompt_tokens = 2;
  const Plan off = MakePlan(SmallModel(), r);
  CHECK_FALSE(off.resident.mtp);
  r.drafts = true;
  const Plan on = MakePlan(SmallModel(), r);
  CHECK(on.resident.mtp);
  CHECK(on.dense == SmallModel().DenseBytes(on.resident));
  CHECK(on.dense > off.dense);
  CHECK(on.rows == off.rows + 2 * kMaxDrafts);
  CHECK(on.slot_total == SmallModel().ExpertCount());
  r.dense = 0;
  const Plan none = MakePlan(SmallModel(), r);
  CHECK(none.resident == DenseResidents{0, true, true, true});
  CHECK(Contains(none.Table(), "head, embedding (both for drafts)"));
}

TEST_CASE("the MTP layer is left out where its memory gains more as slots") {
  PlanRequest r = Wanted(RamFor(Wanted(0), 4 * kMiB));
  r.answers = 1;
  const Plan off = MakePlan(SmallModel(), r);
  r.drafts = r.weigh_mtp = true;
  const Plan weighed = MakePlan(SmallModel(), r);
  CHECK_FALSE(weighed.drafts);
  CHECK(weighed.mtp_outweighed);
  CHECK_FALSE(weighed.resident.mtp);
  CHECK(weighed.expert_total == off.expert_total);
  // By hand it is there all the same, if it fits.
  r.weigh_mtp = false;
  r.ram = RamFor(r, 32 * kMiB);
  CHECK(MakePlan(SmallModel(), r).drafts);
}

TEST_CASE(
    "the MTP layer stays where unions are full, so that a draft's row reads next to nothing") {
  PlanRequest r;
  r.ram = 32'000'000'000;
  r.threads = 8;
  r.context = 512;
  r.answers = 256;
  r.rows_per_token = 1;
  r.drafts = r.weigh_mtp = true;
  const Plan p = MakePlan(RealSize(), r);
  CHECK(p.drafts);
  CHECK_FALSE(p.mtp_outweighed);
  CHECK(p.rows > p.filled_rows);
}

TEST_CASE("frames are wide for long prompts with short answers, though few answers are under way") {
  PlanRequest r = Wanted(20'000 * kMiB);
  r.slot_share = 0.25;
  r.answers = 4;
  r.prompt_tokens = 1200;
  r.rows_per_token = 1;
  CHECK(MakePlan(SmallModel(), r).filled_rows <= 4);
  r.rows_per_token = 100;
  const Plan p = MakePlan(SmallModel(), r);
  CHECK(p.rows >= 128);
  CHECK(p.filled_rows > 64);
}

TEST_CASE("little memory makes frames narrow, much makes every expert resident") {
  const Plan narrow = MakePlan(SmallModel(), Wanted(RamFor(Wanted(0), 2 * kMiB)));
  const Plan wide = MakePlan(SmallModel(), Wanted(20'000 * kMiB));
  CHECK(narrow.rows < 32);
  CHECK(wide.rows == 256);
  REQUIRE(SmallModel().ExpertClasses().size() == 2);
  CHECK(narrow.slot_classes[0].count < 48);
  CHECK(wide.slot_classes[0].count == 48);
}

TEST_CASE("experts of the MTP layer, which nothing asks for, take one slot") {
  const Plan p = MakePlan(SmallModel(), Wanted(20'000 * kMiB));
  CHECK(SmallModel().ExpertClasses()[1].first_layer == SmallModel().Config().layers);
  CHECK(p.slot_classes[1].count == 1);
  CHECK(p.slot_total == 49);
  CHECK(p.expert_total == 49);  // so that the line says: all of them
}

TEST_CASE("--slots gives each class that number or share, and never more than there are") {
  PlanRequest r = Wanted(20'000 * kMiB);
  const auto counts = [&] {
    const Plan p = MakePlan(SmallModel(), r);
    CHECK(p.slot_total == p.slot_classes[0].count + p.slot_classes[1].count);
    return std::pair(p.slot_classes[0].count, p.slot_classes[1].count);
  };
  r.slot_count = 1;
  CHECK(counts() == std::pair(1u, 1u));
  r.slot_count = 20;
  CHECK(counts() == std::pair(20u, 16u));
  r.slot_count.reset();
  r.slot_share = 0.25;
  CHECK(counts() == std::pair(12u, 4u));
  r.slot_share = 0.001;
  CHECK(counts() == std::pair(1u, 1u));
  r.slot_share = 1;
  CHECK(counts() == std::pair(48u, 16u));
}

TEST_CASE("KV is planned for the answers the input can ask for and no more") {
  PlanRequest r = Wanted(20'000 * kMiB);
  const int32_t whole = 512 / r.page_tokens;
  r.answers = 1;
  const Plan one = MakePlan(SmallModel(), r);
  CHECK(one.sequences == 1);
  CHECK(one.kv_pages == whole);
  CHECK(one.rows == 256);  // a prompt's rows still go together
  r.answers = 3;
  CHECK(MakePlan(SmallModel(), r).kv_pages == 3 * whole);
  r.answers = 0;
  CHECK(MakePlan(SmallModel(), r).sequences == 1);
  r.answers.reset();
  CHECK(MakePlan(SmallModel(), r).kv_pages == 256 * whole);
  r.answers = 3;
  r.sequences = 2;
  CHECK(MakePlan(SmallModel(), r).sequences == 2);
}

TEST_CASE("lines are planned for by the context and what they may ask for") {
  PlanRequest r = Wanted(20'000 * kMiB);
  const Plan asking = MakePlan(SmallModel(), r);
  // A line's largest charge, or more where there is more.
  CHECK(asking.line_pool == std::max(kMaxLogprobBytes, r.ram.value() / 64));
  CHECK(MakePlan(SmallModel(), Wanted(400 * kMiB)).line_pool == kMaxLogprobBytes);
  CHECK(asking.lines > asking.line_pool + 4 * MaxLineBytes(512));
  r.logprobs = false;
  const Plan plain = MakePlan(SmallModel(), r);
  CHECK(plain.line_pool < asking.line_pool / 8);
  CHECK(plain.lines - plain.line_pool == asking.lines - asking.line_pool);
  r.held_back = true;
  CHECK(MakePlan(SmallModel(), r).lines == plain.lines + plain.line_pool);
  r.held_back = false;
  // Longer tokens make longer prompts, up to what a line has room for.
  r.token_bytes = 128;
  const uint64_t longer = MakePlan(SmallModel(), r).lines;
  CHECK(longer > plain.lines);
  r.token_bytes = SIZE_MAX;
  CHECK(MakePlan(SmallModel(), r).lines > longer);
}

TEST_CASE("a plan that does not fit says what takes the memory and which flag gains how much") {
  PlanRequest r = Wanted(0);
  r.rows = 64;
  r.frames = 2;
  r.kv_type = KvType::kF32;
  r.slot_share = 1;
  r.ram = RamFor(r, 0);
  const std::string text = Refusal(r);
  INFO(text);
  CHECK(Contains(text, "does not fit"));
  CHECK(Contains(text, "(--ram)"));
  for (const char* part :
       {"process", "dense weights", "KV", "scratch", "prompt lines", "expert slots"}) {
    CHECK(Contains(text, part));
  }
  for (const char* flag : {"--ctx-size 256 gains", "--max-rows 1 gains", "--frames 1 gains",
                           "--slots 1 gains", "--kv bf16 gains", "--ram "}) {
    CHECK(Contains(text, flag));
  }
  CHECK_FALSE(Contains(text, "--resident"));  // none is by now
  r.slot_share.reset();
  r.frames = 1;
  CHECK_FALSE(Contains(Refusal(r), "--frames"));
  r.dense = UINT64_MAX;
  r.rows = 4096;
  CHECK(Contains(Refusal(r), "--resident none gains"));
}

TEST_CASE("the --ram that a refusal names is enough") {
  for (const int32_t rows : {1, 256}) {
    PlanRequest r = Wanted(10 * kMiB);
    r.rows = rows;
    const std::string text = Refusal(r);
    INFO(text);
    const size_t at = text.find("--ram ");
    REQUIRE(at != std::string::npos);
    CHECK(Contains(text.substr(at), "MB would do"));
    r.ram = std::stoull(text.substr(at + 6)) * 1'000'000 + kMiB;
    CHECK(Refusal(r) == "");
  }
}

TEST_CASE("a budget of nothing is refused, not planned with") {
  CHECK(Contains(Refusal(Wanted(0)), "does not fit"));
  CHECK(Contains(Refusal(Wanted(1)), "does not fit"));
  CHECK(Contains(Refusal(Wanted(63'000'000)), "does not fit"));
}

TEST_CASE("at real size memory goes to KV first, dense weights make room, frames grow with it") {
  const Plan small = RealPlan(25), large = RealPlan(64), huge = RealPlan(600);
  CHECK(small.rows == 512);
  CHECK(small.together > 200);
  CHECK(small.resident.layers < 8);
  CHECK(small.sweep_dense < small.sweep_bytes / 40);
  CHECK(small.kv > 4 * small.slots);
  // Enough slots to go on reading while attention computes.
  CHECK(small.slot_total >= 64);
  CHECK(large.rows >= 512);
  CHECK(large.together > 2 * small.together);
  // A wide sweep chooses all experts, and there is no room for a share that matters.
  CHECK(small.union_share > 0.99);
  CHECK(small.resident_share < 0.01);
  CHECK(small.sweep_bytes > 380'000'000'000);
  CHECK(small.sweep_bytes < 430'000'000'000);
  // Everything fits: slots first.
  CHECK(huge.slot_total == huge.expert_total);
  CHECK(huge.sweep_bytes == 0);
  CHECK(huge.rows == 256);
}

TEST_CASE("where dense weights do not fit, those of the last layers are read with every sweep") {
  const Plan p = RealPlan(8, 1);
  CHECK(p.resident.layers > 0);
  CHECK(p.resident.layers < 78);
  CHECK_FALSE(p.resident.embedding);
  CHECK(p.dense_windows == 2);
  uint64_t blocks = 0, largest = 0;
  for (int32_t layer = p.resident.layers; layer < 78; ++layer) {
    blocks += RealSize().Block(layer).bytes;
    largest = std::max(largest, RealSize().Block(layer).bytes);
  }
  CHECK_FALSE(p.resident.head);
  for (int32_t part = 0; part < RealSize().HeadParts(); ++part) {
    blocks += RealSize().HeadBlock(part).bytes;
  }
  CHECK(p.dense == RealSize().DenseBytes(p.resident) + 2 * largest);
  CHECK(p.sweep_dense > blocks);
  CHECK(p.sweep_dense < blocks + kMiB);
  CHECK(p.sweep_bytes > p.sweep_dense);
  CHECK(Contains(p.Table(), "the first "));
  CHECK(Contains(p.Line(), "of it dense weights"));
  // With more memory all of them stay.
  const Plan more = RealPlan(25, 1);
  CHECK(more.resident.layers >= 78);
  CHECK(more.resident.embedding);
  CHECK(more.dense_windows == 0);
  CHECK(more.sweep_dense == 0);
}

TEST_CASE("--resident keeps what it allows: the first layers, and the embedding last") {
  const auto plan = [](uint64_t dense) {
    PlanRequest r;
    r.ram = 64'000'000'000;
    r.answers = 1;
    r.dense = dense;
    return MakePlan(RealSize(), r);
  };
  const Plan all = plan(UINT64_MAX), none = plan(0), some = plan(5'000'000'000);
  CHECK(all.resident == DenseResidents{78, true, false});
  CHECK(all.dense == RealSize().DenseBytes(all.resident));
  CHECK(none.resident == DenseResidents{0, false, false, false});
  CHECK(Contains(none.Table(), ", 78 layers, the head, rows of the embedding"));
  CHECK(none.sweep_dense > 9'000'000'000);
  CHECK(some.dense <= 5'000'000'000);
  CHECK(some.dense > 4'700'000'000);
  CHECK_FALSE(some.resident.embedding);
  // One byte less than everything: the embedding goes.
  CHECK(plan(all.dense).resident == all.resident);
  CHECK(plan(all.dense - 1).resident == DenseResidents{78, false, false});
  CHECK(plan(all.dense - 1).dense_windows == 0);
  // Then the head, before any layer: it takes smaller windows.
  const Plan most = plan(plan(all.dense - 1).dense - 1);
  CHECK(most.resident == DenseResidents{78, false, false, false});
  CHECK(most.dense_windows == 2);
  CHECK(most.dense <= plan(all.dense - 1).dense - 850'000'000);
  CHECK(most.dense == RealSize().DenseBytes(most.resident) + 2 * RealSize().HeadBlock(0).bytes);
  CHECK(most.sweep_dense > DataBytes(RealSize().Head()));
  CHECK(most.sweep_dense < DataBytes(RealSize().Head()) + 8 * kMiB);
  CHECK(Contains(most.Table(), "all layers, 2 windows; a sweep reads"));
}

TEST_CASE("at real size logits of all rows have room where layers work") {
  const FrameShape usual{256, 4096, 8}, streamed{256, 4096, 8, true};
  CHECK(streamed.Bytes(RealSize()) <= usual.Bytes(RealSize()));
  // Not so in a model with many tokens and small layers.
  const Model& small = SmallModel();
  const FrameShape all{64, 128, 2, true};
  const Frame frame(small, all);
  const size_t hidden = static_cast<size_t>(small.Config().hidden);
  const float* end = frame.logits + 64 * static_cast<size_t>(small.Config().vocab);
  for (const float* kept : {frame.final, frame.attention_out, frame.ffn_out}) {
    CHECK((kept + 64 * hidden <= frame.logits || kept >= end));
  }
}

TEST_CASE("at real size a few answers leave their memory to experts") {
  const Plan one = RealPlan(64, 1), some = RealPlan(64, 20);
  CHECK(one.together == 1);
  CHECK(one.slots > 40'000'000'000);
  CHECK(some.kv > 5 * one.kv);
  CHECK(some.slots < one.slots);
  // A sweep has a row, or one of the few that the prompt fills.
  CHECK(one.filled_rows < 2);
  CHECK(one.union_share < 2 * 8.0 / 256);
}

TEST_CASE("prompts and answers of known length share KV out for what they hold") {
  PlanRequest r;
  r.ram = 25'000'000'000;
  r.threads = 8;
  r.answers = 100'000;
  const Plan unknown = MakePlan(RealSize(), r);
  r.held_tokens = 100;
  r.most_tokens = 200;
  r.prompt_tokens = 5'000'000;
  const Plan shorter = MakePlan(RealSize(), r);
  CHECK(shorter.together > 2 * unknown.together);
  CHECK(shorter.rows > unknown.rows);
  CHECK(shorter.context == unknown.context);
  r.answers = 3;
  r.prompt_tokens = 40;
  const Plan few = MakePlan(RealSize(), r);
  CHECK(few.rows == 40);  // no frame can hold more
  // One whole context is held whatever is asked for.
  CHECK(few.kv_pages == few.context / few.page_tokens);
}

TEST_CASE("settings that nothing can use are named with what they take") {
  const auto wasted = [](const PlanRequest& r) {
    std::string all;
    const Plan p = MakePlan(SmallModel(), r);
    for (const std::string& one : p.wasted) all += one + "\n";
    CHECK(Contains(p.Table(), all));
    return all;
  };
  const PlanRequest usual = [] {
    PlanRequest r = Wanted(20'000'000'000);
    r.answers = 4;
    r.prompt_tokens = 100;
    r.most_tokens = 60;
    r.context = 0;
    return r;
  }();
  PlanRequest r = usual;
  CHECK(Contains(wasted(r), "--ram 20.0 GB: no use is made of 1"));
  r.ram.reset();
  CHECK(wasted(r) == "");
  r.rows = 4096;
  CHECK(
      Contains(wasted(r), "--max-rows 4096: the prompts fill 100 at most; scratch is smaller by"));
  CHECK(MakePlan(SmallModel(), r).rows == 100);
  r = usual;
  r.sequences = 1000;
  CHECK(Contains(wasted(r), "--max-seqs 1000: the prompts ask for 4; lists of tokens are smaller"));
  CHECK(MakePlan(SmallModel(), r).sequences == 4);
  r = usual;
  r.frames = 64;
  CHECK(Contains(wasted(r), "--frames 64: the prompts fill 4 at most; scratch is smaller by"));
  CHECK(MakePlan(SmallModel(), r).frames == 4);
  r = usual;
  r.context = 8192;
  CHECK(
      Contains(wasted(r), "--ctx-size 8192: prompts and answers take 64 at most; --ctx-size 64 "));
  CHECK(MakePlan(SmallModel(), r).context == 8192);  // answers depend on it
  r.most_tokens = 0;
  CHECK_FALSE(Contains(wasted(r), "--ctx-size"));
  r = usual;
  r.slot_count = 1000;
  CHECK(Contains(wasted(r), "--slots 1000: the model has 64 experts; slots are smaller by"));
  CHECK(Contains(wasted(r), "--slots: 16 are for experts of the MTP layer"));
  r.slot_count = 2;
  CHECK(Contains(wasted(r), "--slots: without it more experts would stay in memory"));
  r = usual;
  r.dense = 0;
  CHECK(Contains(wasted(r), "--resident: without it more dense weights would stay in memory"));
}

TEST_CASE("a list of selected positions is no longer than the context") {
  Model model({COLIBRI_SOURCE_DIR "/tests/fixtures/tiny/model"});
  REQUIRE(model.HasIndexer());
  const uint64_t before = FrameShape{64, 100, 1}.Bytes(model);
  model.MutableConfig().index_top_k = 100;
  const uint64_t whole = FrameShape{64, 100, 1}.Bytes(model);
  CHECK(whole > before);
  model.MutableConfig().index_top_k = 1'000'000;
  CHECK(FrameShape{64, 100, 1}.Bytes(model) == whole);
  CHECK(Frame(model, FrameShape{64, 100, 1}).IndexList(1) != nullptr);
}

TEST_CASE("the line of a plan is one line, and its table adds up") {
  const Plan p = MakePlan(SmallModel(), Wanted(2'000'000'000));
  CHECK_FALSE(Contains(p.Line(), "\n"));
  CHECK(p.Line().size() < 240);
  CHECK(p.Total() == p.base + p.dense + p.kv + p.scratch + p.lines + p.slots);
  for (const char* part :
       {"budget", "dense weights", "KV", "scratch", "lines", "expert slots", "total"}) {
    CHECK(Contains(p.Table(), part));
  }
}

TEST_CASE("sizes have three digits and a unit") {
  CHECK(SizeText(0) == "0 kB");
  CHECK(SizeText(98'304) == "98 kB");
  CHECK(SizeText(999'499) == "999 kB");
  CHECK(SizeText(999'600) == "1.00 MB");
  CHECK(SizeText(12'040'000) == "12.0 MB");
  CHECK(SizeText(777'700'000) == "778 MB");
  CHECK(SizeText(21'300'000'000) == "21.3 GB");
  CHECK(SizeText(384'000'000'000) == "384 GB");
  CHECK(SizeText(1'250'000'000'000) == "1.25 TB");
}

TEST_CASE("at real size KV on the drive makes frames wider and a row cheaper") {
  const Plan memory = RealPlan(25), drive = RealPlan(25, {}, 500'000'000'000);
  CHECK(memory.kv_file == 0);
  CHECK(drive.kv_file > 30'000'000'000);
  CHECK(drive.kv_file < 500'000'000'000);
  CHECK(drive.kv_ram_layers < 20);
  CHECK(drive.together > 2 * memory.together);
  // What a sweep reads grows by an eighth, what a row reads shrinks to less than half.
  CHECK(drive.kv_sweep_bytes > 30'000'000'000);
  CHECK(drive.sweep_bytes / 6 < memory.sweep_bytes / 5);
  const auto row = [](const Plan& p) { return static_cast<double>(p.sweep_bytes) / p.filled_rows; };
  CHECK(row(drive) < 0.5 * row(memory));
  CHECK(Contains(drive.Line(), "KV file "));
  CHECK(Contains(drive.Table(), "KV file "));
  // Little room on the drive is not exceeded.
  const Plan little = RealPlan(25, {}, 20'000'000'000);
  CHECK(little.kv_file <= 20'000'000'000);
  CHECK(row(little) < row(memory));
  // Where memory holds all that answers may need, nothing goes to the drive.
  CHECK(RealPlan(600, {}, 500'000'000'000).kv_file == 0);
  CHECK(RealPlan(64, 20, 500'000'000'000).kv_file == 0);
}

TEST_CASE("a memory for KV by hand is not exceeded, and what it lacks is on the drive") {
  PlanRequest r = Wanted(400'000'000);
  r.answers = 64;
  r.kv_space = 1'000'000'000;
  const Plan all = MakePlan(SmallModel(), r);
  REQUIRE(all.kv_file == 0);
  uint64_t last = UINT64_MAX;
  for (const uint64_t share : {2u, 3u, 4u}) {
    r.kv_ram = all.kv / share;
    const Plan p = MakePlan(SmallModel(), r);
    CHECK(p.kv <= *r.kv_ram);
    CHECK(p.kv < last);
    CHECK(p.kv_file > 0);
    CHECK(p.kv_pages >= 512 / p.page_tokens);
    CHECK(p.Total() <= Limit(p));
    last = p.kv;
  }
  r.kv_ram = all.kv;
  CHECK(MakePlan(SmallModel(), r).kv_file == 0);
  r.kv_ram = 1000;
  CHECK(Contains(Refusal(r), "--kv-ram 1 kB: KV takes "));
  CHECK_FALSE(Contains(Refusal(r), "--kv-dir"));
  // What would do does.
  const std::string refusal = Refusal(r);
  constexpr std::string_view kBefore = "; --kv-ram ";
  const size_t at = refusal.find(kBefore);
  REQUIRE(at != std::string::npos);
  r.kv_ram = 1000 * std::stoull(refusal.substr(at + kBefore.size()));
  CHECK(MakePlan(SmallModel(), r).kv <= *r.kv_ram);
  r.kv_ram = 1000;
  r.kv_space = 0;
  CHECK(Contains(Refusal(r), "without a file (--kv-dir)"));
}

TEST_CASE("a memory for KV that is little takes fewer answers at once, unless these are given") {
  PlanRequest r = Wanted(400'000'000);
  r.answers = 64;
  r.kv_space = 1'000'000'000;
  // What one answer at a time takes at least, and half as much again.
  r.kv_ram = 1000;
  const std::string refusal = Refusal(r);
  CHECK_FALSE(Contains(refusal, "--max-seqs"));
  constexpr std::string_view kBefore = "; --kv-ram ";
  r.kv_ram = 1500 * std::stoull(refusal.substr(refusal.find(kBefore) + kBefore.size()));
  const Plan p = MakePlan(SmallModel(), r);
  CHECK(p.kv <= *r.kv_ram);
  CHECK(p.sequences < 64);
  r.sequences = 64;
  CHECK(Contains(Refusal(r), "with 64 answers at once"));
  CHECK(Contains(Refusal(r), ", or a lower --max-seqs"));
}

TEST_CASE("a context that memory cannot hold is held by the drive") {
  PlanRequest r;
  r.ram = 12'000'000'000;
  r.context = 131'072;
  CHECK_THROWS_AS(MakePlan(RealSize(), r), UsageError);
  r.kv_space = 100'000'000'000;
  const Plan p = MakePlan(RealSize(), r);
  CHECK(p.kv_file > 10'000'000'000);
  CHECK(p.kv_pages >= 131'072 / p.page_tokens);
  CHECK(p.Total() <= Limit(p));
}

}  // namespace colibri
