#include "graph/engine.h"

#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <fstream>
#include <thread>
#include <utility>

#include "io/check.h"
#include "io/error.h"

namespace colibri {
namespace {

// Frames of so few rows guess once more from a layer's input, while the drive would be idle through
// its attention: of 100 of one row's experts 89 are right, of those guessed a layer ahead 77.
constexpr size_t kGuessAgainRows = 4;
// After a pause the input is given so long to fall quiet, so that the first line of a slow pipe
// does not start a wide sweep alone.
constexpr int kLingerMs = 50;
// But an input that never falls quiet (lines of other shards, blank ones) must not keep a line from
// starting.
constexpr auto kLongestLinger = std::chrono::seconds(2);

SchedulerOptions WithContext(const EngineOptions& options) {
  SchedulerOptions s = options.scheduler;
  s.context = options.context;
  s.drafts = options.drafts.most;
  return s;
}

KvStreaming StreamingOf(const Model& model, const EngineOptions& options) {
  const SchedulerOptions& s = options.scheduler;
  return KvStreamingOf(model, options.kv_ram_layers, s.frames, s.rows, s.sequences,
                       options.context);
}

GovernorOptions GovernorOptionsOf(const Model& model, const EngineOptions& options) {
  const ModelConfig& c = model.Config();
  GovernorOptions g;
  g.experts = std::max(1, c.experts);
  g.top_k = std::max(1, c.top_k);
  g.layers = 0;
  for (int32_t layer = 0; layer < c.layers; ++layer) g.layers += c.Sparse(layer) ? 1 : 0;
  g.layers = std::max(1, g.layers);
  g.most = options.drafts.most;
  return g;
}

std::vector<CacheItem> ItemsOf(const Model& model) {
  std::vector<CacheItem> items(model.ExpertCount());
  for (uint32_t i = 0; i < model.ExpertCount(); ++i) {
    const ExpertLayout& layout = model.Expert(i);
    items[i] = {static_cast<uint16_t>(model.ExpertLayer(i)), layout.slot_class, layout.extents};
  }
  return items;
}

uint64_t WaiterOf(ExpertJob job) {
  return uint64_t{job.frame} << 32 | uint64_t{job.layer} << 16 | job.job;
}

}  // namespace

int32_t ThreadsOfMachine() {
  cpu_set_t set;
  int32_t threads = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  std::ifstream v2("/sys/fs/cgroup/cpu.max");
  std::ifstream v1_quota("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  std::ifstream v1_period("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  double quota = 0, period = 0;
  if ((v2 >> quota >> period || (v1_quota >> quota && v1_period >> period)) && quota > 0 &&
      period > 0) {
    threads = std::min(threads, static_cast<int32_t>(std::ceil(quota / period)));
  }
  return std::max(threads, 1);
}

Engine::Engine(const Model& model, const Tokenizer& tokenizer, const EngineOptions& options,
               std::unique_ptr<Reader> reader, RequestSource& source)
    : model_(model),
      options_(options),
      profile_(static_cast<size_t>(options.scheduler.frames)),
      thread_limit_(oneapi::tbb::global_control::max_allowed_parallelism,
                    static_cast<size_t>(options.threads)),
      arena_(options.threads, 1),
      parallel_(options.threads),
      kv_(KvShapeOf(model, options.page_tokens, options.kv_type), options.kv_pages,
          StreamingOf(model, options)),
      stages_(model, kv_, parallel_),
      mask_(tokenizer, model.Config().vocab),
      drawer_(mask_, parallel_),
      draft_drawer_(mask_, parallel_),
      mtp_(options.drafts.most > 0 && model.HasMtp() && model.Residents().mtp),
      scheduler_(WithContext(options), tokenizer, model.Config().stop_ids, kv_, source,
                 [this](Sequence& s) { delivery_->Refuse(s); }),
      chosen_(model.ExpertCount()),
      slots_(options.slots),
      reader_(std::move(reader), profile_),
      hub_(reader_),
      expert_port_(hub_.AddPort()),
      wake_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (wake_fd_ < 0) throw IoError(fmt::format("eventfd: {}", Reason(errno)));
  if ((mtp_ || options.drafts.lookup) && options.govern_drafts) {
    governor_.emplace(GovernorOptionsOf(model, options));
  }
  const DenseResidents& residents = model.Residents();
  COLIBRI_CHECK(!mtp_ || (residents.embedding && residents.head));
  const FrameShape shape{options.scheduler.rows, options.context, options.threads, !residents.head};
  const auto experts = static_cast<size_t>(model.Config().experts);
  for (int32_t i = 0; i < options.scheduler.frames; ++i) {
    frames_.push_back(std::make_unique<GraphFrame>(model, shape, options.page_tokens));
    GraphFrame& f = *frames_.back();
    f.frame.id = static_cast<uint16_t>(i);
    f.issue_order.reserve(experts);
    f.items.reserve(experts);
    f.notices.reserve(static_cast<size_t>(options.scheduler.rows));
    f.predict_scratch.resize(Stages::PredictScratch(model.Config()));
    f.votes.resize(experts);
    f.first_votes.resize(experts);
    f.draft_votes.resize(experts);
    f.hint_order.reserve(experts);
    f.hint_items.reserve(experts);
  }
  arena_.execute([&] { graph_ = std::make_unique<DecodeGraph>(this); });
  cache_ = std::make_unique<ExpertCache>(
      ItemsOf(model), slots_, *expert_port_, [this](const ReadyItem& item) { OnReady(item); },
      options.cache_policy, options.heat);
  MakeSuppliers();
}

// Whatever layers need besides experts: one more supplier is one more entry here.
void Engine::MakeSuppliers() {
  suppliers_ = options_.suppliers;
  const DenseResidents& residents = model_.Residents();
  const SchedulerOptions& s = options_.scheduler;
  if (!residents.embedding) {
    embedding_port_ = hub_.AddPort();
    embedding_rows_ = std::make_unique<EmbeddingRows>(model_, *embedding_port_, s.frames, s.rows);
    suppliers_.push_back(embedding_rows_.get());
  }
  if (const int32_t serve = DenseStream::Windows(model_, residents, s.frames); serve > 0) {
    dense_port_ = hub_.AddPort();
    dense_stream_ = std::make_unique<DenseStream>(
        model_, *dense_port_, options_.dense_windows > 0 ? options_.dense_windows : serve,
        s.frames);
    dense_stream_->OnHead([this](uint16_t frame) {
      graph_->PutHead({frame, static_cast<uint16_t>(model_.Config().layers - 1)});
    });
    suppliers_.push_back(dense_stream_.get());
  }
  if (kv_.Streams()) {
    kv_port_ = hub_.AddPort();
    kv_stream_ =
        std::make_unique<KvStream>(kv_, *kv_port_, options_.kv_file.file, options_.kv_check);
    suppliers_.push_back(kv_stream_.get());
  }
  for (LayerSupplier* supplier : suppliers_) {
    supplier->Start([this](uint16_t frame, int32_t layer) { LayerPartArrived(frame, layer); });
  }
}

Engine::~Engine() {
  cache_->Stop();  // I/O ends before what it reads into and puts into goes
  cache_.reset();
  arena_.execute([&] { graph_.reset(); });
  close(wake_fd_);
}

void Engine::Closed(uint32_t sequence) {
  scheduler_.Close(sequence);
  const uint64_t one = 1;
  (void)!write(wake_fd_, &one, sizeof one);
}

void Engine::Stop() {
  scheduler_.Stop();
  reader_.Unthrottle();  // at a byte a second the sweep would have no end
  const uint64_t one = 1;
  (void)!write(wake_fd_, &one, sizeof one);
}

// Gathers lines until the input has been quiet for a while, enough is there or it took too long.
void Engine::Linger() {
  RequestSource& source = scheduler_.Source();
  const auto end = std::chrono::steady_clock::now() + kLongestLinger;
  while (!scheduler_.Gather() && std::chrono::steady_clock::now() < end) {
    if (source.Fd() < 0) return;
    pollfd input{source.Fd(), POLLIN, 0};
    if (!source.Buffered() && poll(&input, 1, kLingerMs) <= 0) return;
  }
}

void Engine::WaitForWork(bool poll_input) {
  pollfd fds[2] = {{wake_fd_, POLLIN, 0}, {scheduler_.Source().Fd(), POLLIN, 0}};
  const bool input = poll_input && fds[1].fd >= 0;
  if (input && scheduler_.Source().Buffered()) return;
  while (poll(fds, input ? 2 : 1, -1) < 0 && errno == EINTR) {
  }
  uint64_t count = 0;
  (void)!read(wake_fd_, &count, sizeof count);
}

void Engine::Run(Delivery& delivery) {
  delivery_ = &delivery;
  profile_.Start();
  Linger();
  arena_.execute([&] {
    for (const auto& f : frames_) graph_->PutFrame(FrameRef{f->frame.id});
    for (;;) {
      graph_->WaitForAll();
      int32_t wake = -1;
      bool poll_input = false;
      const Scheduler::After after = scheduler_.Drained(&wake, &poll_input);
      if (after == Scheduler::After::kFinished) break;
      if (after == Scheduler::After::kWake) {
        graph_->PutFrame(FrameRef{static_cast<uint16_t>(wake)});
        continue;
      }
      WaitForWork(poll_input);
      if (poll_input) Linger();
    }
  });
  cache_->DropHints();
  cache_->CheckIdle();
}

EngineStats Engine::Stats() const {
  return {scheduler_.Stats(), cache_->Stats(),    reader_.Stats(),    KvStats(),
          DenseFigures(),     profile_.Overlap(), profile_.Seconds(), draft_bytes_};
}

KvStreamStats Engine::KvStats() const {
  return kv_stream_ == nullptr ? KvStreamStats{} : kv_stream_->Stats();
}

std::string Engine::PathOf(uint32_t file) const {
  return file == options_.kv_file.file ? options_.kv_file.path : model_.Files().Files().Path(file);
}

DenseStats Engine::DenseFigures() const {
  DenseStats figures;
  if (dense_stream_ != nullptr) figures += dense_stream_->Stats();
  if (embedding_rows_ != nullptr) figures += embedding_rows_->Stats();
  return figures;
}

uint64_t Engine::BytesRead(const CacheStats& cache) const {
  return cache.BytesRead() + KvStats().bytes_read + DenseFigures().Bytes();
}

std::vector<uint64_t> Engine::Chosen() const {
  std::vector<uint64_t> counts;
  for (const auto& count : chosen_) counts.push_back(count.load(std::memory_order_relaxed));
  return counts;
}

Engine::GraphFrame& Engine::At(LayerRef at) const {
  GraphFrame& f = *frames_[at.frame];
  COLIBRI_DCHECK(f.frame.layer == at.layer);
  return f;
}

void Engine::Pause() const {
  if (options_.pause_after_puts) std::this_thread::yield();
}

void Engine::OnReady(const ReadyItem& item) {
  const ReadyExpert ready{static_cast<uint16_t>(item.waiter >> 32),
                          static_cast<uint16_t>(item.waiter >> 16),
                          static_cast<uint16_t>(item.waiter), item.data};
  if (item.data == nullptr) {
    // The job is this message's alone until it is put.
    FrameJob& job = At({ready.frame, ready.layer}).frame.jobs[ready.job];
    job.failed = true;
    job.error = item.result;
  }
  graph_->PutReady(ready);
}

int32_t Engine::NextSparse(int32_t layer) const {
  const ModelConfig& c = model_.Config();
  while (layer < c.layers && !c.Sparse(layer)) ++layer;
  return layer;
}

Scheduler::Filled Engine::Admit(FrameRef ref) noexcept {
  const Profile::Span span(profile_, NodeId::kAdmit, ref.frame, 0);
  GraphFrame& f = *frames_[ref.frame];
  f.before = cache_->Stats();
  f.bytes_before = BytesRead(f.before);
  const Scheduler::Filled filled = scheduler_.Fill(f.frame);
  if (filled.filled) {
    f.start = {Clock::now(), profile_.Overlap()};
    for (LayerSupplier* s : suppliers_) s->Prepare(f.frame, 0);
  }
  Pause();  // a parked frame may be running again by now
  return filled;
}

void Engine::Embed(FrameRef ref) noexcept {
  const Profile::Span span(profile_, NodeId::kEmbed, ref.frame, 0);
  stages_.Embed(frames_[ref.frame]->frame);
}

// While KV and dense weights are in memory nothing is waited for.
bool Engine::LayerReady(LayerRef at) noexcept {
  const Profile::Span span(profile_, NodeId::kLayerReady, at.frame, at.layer);
  if (suppliers_.empty()) return true;
  GraphFrame& f = At(at);
  // Set before the first request: a part may arrive before the next one is asked for. This call is
  // counted too, so the frame stays here until all have been asked.
  auto there = static_cast<int32_t>(suppliers_.size()) + 1;
  f.awaited.store(there, std::memory_order_relaxed);
  there = 1;
  for (LayerSupplier* s : suppliers_) there += s->Await(f.frame, at.layer) ? 1 : 0;
  const bool ready = f.awaited.fetch_sub(there, std::memory_order_acq_rel) == there;
  if (!ready) Pause();  // the frame may be anybody's
  return ready;
}

void Engine::LayerPartArrived(uint16_t frame, int32_t layer) {
  const LayerRef at{frame, static_cast<uint16_t>(layer)};
  if (At(at).awaited.fetch_sub(1, std::memory_order_acq_rel) == 1) graph_->PutLayer(at);
}

void Engine::Attention(LayerRef at) noexcept {
  const Profile::Span span(profile_, NodeId::kAttention, at.frame, at.layer);
  Frame& frame = At(at).frame;
  for (LayerSupplier* s : suppliers_) {
    s->Begin(frame, at.layer);
    if (!IsMtp(at)) s->Prepare(frame, at.layer + 1);
  }
  if (options_.routes != nullptr) RecordGuess(At(at), at.layer, Guess::kInput);
  stages_.Attention(frame, at.layer);
  for (LayerSupplier* s : suppliers_) s->Attended(frame, at.layer);
  if (options_.routes != nullptr) RecordGuess(At(at), at.layer + 1, Guess::kState);
}

void Engine::RecordGuess(GraphFrame& f, int32_t layer, Guess way) {
  if (layer >= model_.Config().layers || !model_.Config().Sparse(layer)) return;
  std::fill(f.votes.begin(), f.votes.end(), 0);
  stages_.Predict(f.frame, layer, way == Guess::kShared, f.predict_scratch, f.votes);
  options_.routes->Guessed(f.frame.id, layer, way, f.votes);
}

std::span<const uint16_t> Engine::Route(LayerRef at) noexcept {
  const Profile::Span span(profile_, NodeId::kRoute, at.frame, at.layer);
  GraphFrame& f = At(at);
  stages_.Route(f.frame, at.layer);
  if (options_.routes != nullptr && !IsMtp(at)) options_.routes->Routed(f.frame, at.layer);
  f.items.clear();
  for (const FrameJob& job : f.frame.jobs) {
    f.items.push_back(job.item);
    chosen_[job.item].fetch_add(static_cast<uint64_t>(job.count), std::memory_order_relaxed);
  }
  cache_->LayerRouted(at.layer, at.frame, f.items);
  // Set before the first put: a job may be done before the last one is issued.
  const size_t jobs = f.frame.jobs.size();
  f.remaining.store(static_cast<int32_t>(jobs) + 2, std::memory_order_relaxed);
  f.issue_order.clear();
  for (size_t i = 0; i < jobs; ++i) {
    if (cache_->IsReady(f.frame.jobs[i].item)) f.issue_order.push_back(static_cast<uint16_t>(i));
  }
  const size_t ready = f.issue_order.size();
  for (size_t i = 0; i < jobs; ++i) {
    const auto begin = f.issue_order.begin();
    const auto number = static_cast<uint16_t>(i);
    if (!std::binary_search(begin, begin + static_cast<std::ptrdiff_t>(ready), number)) {
      f.issue_order.push_back(number);
    }
  }
  if (IsMtp(at)) {
    CountRows(f.frame, &f.draft_votes);
  } else if (at.layer == NextSparse(0)) {
    CountRows(f.frame, &f.first_votes);
  }
  return f.issue_order;
}

void Engine::Lookahead(LayerRef at) noexcept {
  if (!options_.prefetch) return;
  const Profile::Span span(profile_, NodeId::kLookahead, at.frame, at.layer);
  GraphFrame& f = At(at);
  const ModelConfig& c = model_.Config();
  int32_t next = at.layer + 1;
  const bool known = NextSparse(next) < c.layers;
  const bool drafts = mtp_ && !noise_ && !IsMtp(at);
  if (!known) next = drafts ? c.layers : NextSparse(0);
  if (next >= c.layers ? !drafts : !c.Sparse(next)) return;
  if (cache_->LayerReady(static_cast<uint16_t>(next))) return;
  std::fill(f.votes.begin(), f.votes.end(), 0);
  if (!known) {
    // The next sweep's first experts cannot be computed yet, nor the MTP layer's. Those of the last
    // time that two rows chose are more likely than not to come again; a single row takes 35 to 45
    // % of its last experts.
    const std::vector<uint32_t>& last = drafts ? f.draft_votes : f.first_votes;
    for (size_t e = 0; e < f.votes.size(); ++e) f.votes[e] = last[e] > 1 ? last[e] : 0;
  } else {
    stages_.Predict(f.frame, next, false, f.predict_scratch, f.votes);
  }
  Hint(f, next);
}

// The surest first: what is idle of the drive between two layers often suffices for one expert.
void Engine::Hint(GraphFrame& f, int32_t layer) {
  OrderByVotes(f.votes, &f.hint_order);
  f.hint_items.clear();
  for (const uint16_t e : f.hint_order) f.hint_items.push_back(model_.ExpertItem(layer, e));
  const uint64_t bytes = model_.Expert(model_.ExpertItem(layer, 0)).slot_bytes;
  const size_t sure = SureGuesses(model_.Config(), bytes, f.frame.Rows(), f.votes, f.hint_order);
  cache_->Hint(static_cast<uint16_t>(layer), f.frame.id, f.hint_items, sure);
}

void Engine::GuessAgain(GraphFrame& f, int32_t layer) {
  const ModelConfig& c = model_.Config();
  if (!options_.prefetch || f.frame.Rows() > kGuessAgainRows || !c.Sparse(layer)) return;
  if (cache_->LayerReady(static_cast<uint16_t>(layer))) return;
  std::fill(f.votes.begin(), f.votes.end(), 0);
  stages_.Predict(f.frame, layer, false, f.predict_scratch, f.votes);
  Hint(f, layer);
}

const std::byte* Engine::Fetch(ExpertJob job) noexcept {
  const Profile::Span span(profile_, NodeId::kFetch, job.frame, job.layer);
  const uint32_t item = At({job.frame, job.layer}).frame.jobs[job.job].item;
  CountForDrafts(job);
  return cache_->Request(item, WaiterOf(job));  // from here on the frame may be anywhere
}

void Engine::ExpertFfn(const ReadyExpert& expert) noexcept {
  const Profile::Span span(profile_, NodeId::kExpertFfn, expert.frame, expert.layer);
  if (expert.data == nullptr) return;  // the job is marked; combine sees it
  GraphFrame& f = At({expert.frame, expert.layer});
  const FrameJob& job = f.frame.jobs[expert.job];
  stages_.RunExpert(f.frame, job, model_.ExpertView(job.item, expert.data));
  cache_->Unpin(job.item);
}

void Engine::SharedFfn(LayerRef at) noexcept {
  const Profile::Span span(profile_, NodeId::kSharedFfn, at.frame, at.layer);
  Pause();  // it holds the layer open while the others finish
  stages_.SharedFfn(At(at).frame, at.layer);
}

NodeBodies::Next Engine::Combine(LayerRef at) noexcept {
  GraphFrame& f = At(at);
  // Release what this input wrote, acquire what the others did.
  if (f.remaining.fetch_sub(1, std::memory_order_acq_rel) != 1) return Next::kWait;
  const Profile::Span span(profile_, NodeId::kCombine, at.frame, at.layer);
  if (options_.routes != nullptr) RecordGuess(f, at.layer + 1, Guess::kShared);
  stages_.Combine(f.frame, at.layer);
  for (LayerSupplier* s : suppliers_) s->Left(f.frame, at.layer);
  if (at.layer + 1 >= model_.Config().layers) return Next::kHead;
  GuessAgain(f, at.layer + 1);
  f.frame.layer = at.layer + 1;
  return Next::kLayer;
}

NodeBodies::Verified Engine::Verify(LayerRef at) noexcept {
  const Profile::Span span(profile_, NodeId::kVerify, at.frame, at.layer);
  GraphFrame& f = At(at);
  if (IsMtp(at)) return {{}, TakeDrafts(f)};
  const CacheStats now = cache_->Stats();
  const uint64_t requests = now.Asked() - f.before.Asked();
  FrameFigures figures;
  const uint64_t read = BytesRead(now);
  figures.bytes_read = read - f.bytes_before + f.draft_bytes;
  figures.draft_bytes = TakeDraftBytes(f);
  f.bytes_before = read;
  figures.hit_rate =
      requests == 0 ? 1.0
                    : static_cast<double>(now.hits - f.before.hits) / static_cast<double>(requests);
  f.notices.clear();
  AcceptTokens(
      f.frame, figures, [this](uint32_t file) { return PathOf(file); },
      [&](const Notice& notice) { f.notices.push_back(notice); });
  TellGovernor(f);
  return {f.notices, BeginDrafts(f)};
}

void Engine::Release(FrameRef ref) noexcept {
  Pause();  // notices are out: finished sequences may be closed and reused by now
  scheduler_.Release(frames_[ref.frame]->frame);
}

void Engine::Deliver(const Notice& notice) noexcept {
  const Profile::Span span(profile_, NodeId::kDeliver, 0, 0);
  delivery_->Deliver(scheduler_.At(notice.sequence), notice);
}

}  // namespace colibri
