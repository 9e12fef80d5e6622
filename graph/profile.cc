#include "graph/profile.h"

#include <fmt/format.h>

#include <cstdio>
#include <functional>
#include <thread>

#include "io/error.h"

namespace colibri {
namespace {

double Seconds(Profile::Clock::duration d) { return std::chrono::duration<double>(d).count(); }

uint32_t ThreadNumber() {
  static std::atomic<uint32_t> next{1};
  thread_local const uint32_t number = next.fetch_add(1, std::memory_order_relaxed);
  return number;
}

void AddTo(OverlapFigures* figures, bool computing, bool reading, double seconds) {
  double& into = computing && reading ? figures->both_s
                 : computing          ? figures->compute_only_s
                 : reading            ? figures->io_only_s
                                      : figures->neither_s;
  into += seconds;
}

// The others work on a frame beside each other, or on none.
bool HasFrameAlone(NodeId node) {
  switch (node) {
    case NodeId::kFetch:
    case NodeId::kExpertFfn:
    case NodeId::kSharedFfn:
    case NodeId::kLookahead:
    case NodeId::kDeliver:
      return false;
    default:
      return true;
  }
}

constexpr uint32_t kNowhere = static_cast<uint32_t>(NodeId::kCount) << 16;

}  // namespace

const char* NodeName(NodeId node) {
  static constexpr std::array<const char*, static_cast<size_t>(NodeId::kCount)> kNames = {
      "admit",      "embed",      "layer_ready", "attention", "route",
      "fetch",      "expert_ffn", "shared_ffn",  "lookahead", "combine",
      "head_ready", "head",       "verify",      "draft",     "deliver"};
  return kNames[static_cast<size_t>(node)];
}

Profile::Profile(size_t frames) : places_(frames) {
  for (auto& place : places_) place = kNowhere;
  Start();
}

void Profile::Start() {
  const std::lock_guard lock(mutex_);
  for (Counter& c : nodes_) {
    c.count = 0;
    c.busy_ns = 0;
  }
  start_ = changed_ = Clock::now();
  overlap_ = {};
  events_.clear();
  reads_.clear();
}

uint64_t Profile::SinceStart(Clock::time_point t) const {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(t - start_).count());
}

void Profile::Change(int compute, int io) {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  AddTo(&overlap_, computing_ > 0, reading_ > 0, colibri::Seconds(now - changed_));
  changed_ = now;
  computing_ += compute;
  reading_ += io;
}

void Profile::ReadsBusy(bool busy) { Change(0, busy ? 1 : -1); }

void Profile::AddRead(Clock::time_point start, const char* name, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (reads_.size() >= kMaxEvents) return;
  const uint64_t start_ns = SinceStart(start);
  reads_.push_back({name, bytes, start_ns, SinceStart(Clock::now()) - start_ns});
}

Profile::Span::Span(Profile& profile, NodeId node, uint16_t frame, uint16_t layer)
    : profile_(profile), node_(node), frame_(frame), layer_(layer), start_(Clock::now()) {
  if (node == NodeId::kAttention) profile.layer_.store(layer, std::memory_order_relaxed);
  if (HasFrameAlone(node) && frame < profile.places_.size()) {
    profile.places_[frame].store(static_cast<uint32_t>(node) << 16 | layer,
                                 std::memory_order_relaxed);
  }
  profile.nodes_[static_cast<size_t>(node)].running.fetch_add(1, std::memory_order_relaxed);
  profile.Change(1, 0);
}

Profile::Span::~Span() {
  const auto end = Clock::now();
  const auto ns = static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(end - start_).count());
  Counter& counter = profile_.nodes_[static_cast<size_t>(node_)];
  counter.count.fetch_add(1, std::memory_order_relaxed);
  counter.busy_ns.fetch_add(ns, std::memory_order_relaxed);
  counter.running.fetch_sub(1, std::memory_order_relaxed);
  profile_.Change(-1, 0);
  if (!profile_.trace_) return;
  const std::lock_guard lock(profile_.mutex_);
  if (profile_.events_.size() < kMaxEvents) {
    profile_.events_.push_back(
        {node_, frame_, layer_, ThreadNumber(), profile_.SinceStart(start_), ns});
  }
}

NodeFigures Profile::Node(NodeId node) const {
  const Counter& c = nodes_[static_cast<size_t>(node)];
  return {c.count.load(std::memory_order_relaxed), c.busy_ns.load(std::memory_order_relaxed),
          c.running.load(std::memory_order_relaxed)};
}

FramePlace Profile::Place(uint16_t frame) const {
  const uint32_t place = places_[frame].load(std::memory_order_relaxed);
  return {static_cast<NodeId>(place >> 16), static_cast<uint16_t>(place)};
}

OverlapFigures Profile::Overlap() const {
  const std::lock_guard lock(mutex_);
  OverlapFigures figures = overlap_;
  AddTo(&figures, computing_ > 0, reading_ > 0, colibri::Seconds(Clock::now() - changed_));
  return figures;
}

double Profile::Seconds() const { return colibri::Seconds(Clock::now() - start_); }

void Profile::WriteTrace(const std::string& path) const {
  const std::lock_guard lock(mutex_);
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (file == nullptr) throw IoError(fmt::format("{}: cannot be written", path));
  fmt::print(file, "{{\"traceEvents\":[\n");
  for (size_t i = 0; i < events_.size(); ++i) {
    const Event& e = events_[i];
    fmt::print(file,
               "{}{{\"name\":\"{}\",\"ph\":\"X\",\"pid\":1,\"tid\":{},\"ts\":{:.3f},\"dur\":{:.3f},"
               "\"args\":{{\"frame\":{},\"layer\":{}}}}}",
               i == 0 ? "" : ",\n", NodeName(e.node), e.thread,
               static_cast<double>(e.start_ns) / 1e3, static_cast<double>(e.duration_ns) / 1e3,
               e.frame, e.layer);
  }
  // Reads overlap, so each is an async pair of its own.
  for (size_t i = 0; i < reads_.size(); ++i) {
    const ReadEvent& r = reads_[i];
    const auto at = [&](uint64_t ns) { return static_cast<double>(ns) / 1e3; };
    fmt::print(
        file,
        ",\n{{\"name\":\"{}\",\"cat\":\"read\",\"ph\":\"b\",\"id\":{},\"pid\":1,\"ts\":{:.3f},"
        "\"args\":{{\"bytes\":{}}}}},\n"
        "{{\"name\":\"{}\",\"cat\":\"read\",\"ph\":\"e\",\"id\":{},\"pid\":1,\"ts\":{:.3f}}}",
        r.name, i, at(r.start_ns), r.bytes, r.name, i, at(r.start_ns + r.duration_ns));
  }
  fmt::print(file, "\n]}}\n");
  if (std::fclose(file) != 0) throw IoError(fmt::format("{}: writing failed", path));
}

}  // namespace colibri
