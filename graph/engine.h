// The engine: owns arena, reader, slots, cache, KV, frames, scheduler and the flow graph, and runs
// a source of requests to its end. What the nodes of the graph do is here. Threads: Run on one
// thread, the engine thread, which waits inside the arena; Closed, Stop and the getters from any
// other.
#pragma once

#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/task_arena.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "graph/decode_graph.h"
#include "graph/metered_reader.h"
#include "graph/profile.h"
#include "graph/tbb_parallel.h"
#include "io/expert_cache.h"
#include "io/read_hub.h"
#include "io/slot_pool.h"
#include "runtime/delivery.h"
#include "runtime/dense_stream.h"
#include "runtime/draft.h"
#include "runtime/embedding_rows.h"
#include "runtime/frame.h"
#include "runtime/governor.h"
#include "runtime/kv_store.h"
#include "runtime/kv_stream.h"
#include "runtime/layer_supplier.h"
#include "runtime/route_trace.h"
#include "runtime/scheduler.h"
#include "runtime/stages.h"
#include "runtime/verify.h"
#include "runtime/weights.h"

namespace colibri {

#ifdef NDEBUG
inline constexpr bool kDebugBuild = false;
#else
inline constexpr bool kDebugBuild = true;
#endif

// A file of the reader's that holds nothing of the model, and its name for messages.
struct ScratchFile {
  uint32_t file = UINT32_MAX;
  std::string path;
};

struct EngineOptions {
  int32_t threads = 1;
  int32_t context = 4096;
  SchedulerOptions scheduler;  // sequences, rows, frames, prefill; context is set from above
  int32_t kv_pages = 0;
  int32_t page_tokens = kDefaultPageTokens;
  KvType kv_type = KvType::kBF16;
  // Layers whose KV pages all stay in memory, the first ones; those of the others are in the file.
  int32_t kv_ram_layers = INT32_MAX;
  ScratchFile kv_file;
  bool kv_check = kDebugBuild;   // pages are compared with checksums
  int32_t dense_windows = 0;     // for layers whose dense weights are streamed; 0: as many as serve
  std::vector<SlotClass> slots;  // one for each of Model::ExpertClasses()
  bool prefetch = true;
  CachePolicyKind cache_policy = CachePolicyKind::kSweep;
  // By the MTP layer, if the model has one and its dense weights, the embedding and the head are in
  // memory.
  DraftOptions drafts;
  bool govern_drafts = false;  // a Governor says how many, up to drafts.most
  // Takes a line for the user. Any thread.
  std::function<void(const std::string&)> say;
  std::vector<float> heat;             // of each expert (PolicyItems); empty: unknown
  RouteTraceWriter* routes = nullptr;  // takes every choice and guess; outlives the engine
  // What layers wait for besides what the engine makes itself; outlives it. Tests.
  std::vector<LayerSupplier*> suppliers;
  // Tests: yield after a node's last put, where a frame may already be somebody else's.
  bool pause_after_puts = false;
};

struct EngineStats {
  SchedulerStats scheduler;
  CacheStats cache;
  ReaderStats reader;
  KvStreamStats kv;
  DenseStats dense;
  OverlapFigures overlap;
  double seconds = 0;
  // Read because of drafts alone: experts that only their rows chose, what the MTP layer's steps
  // read.
  uint64_t draft_bytes = 0;
};

// Threads the machine offers this process: its affinity mask, and its cgroup's CPU quota, which
// oneTBB before 2022.3 ignores.
int32_t ThreadsOfMachine();

class Engine final : public NodeBodies {
 public:
  // Everything outlives the engine. `model` is loaded, with all its dense weights or with some; if
  // some are streamed, no other engine runs with it meanwhile. `reader` is not started.
  Engine(const Model& model, const Tokenizer& tokenizer, const EngineOptions& options,
         std::unique_ptr<Reader> reader, RequestSource& source);
  ~Engine() override;

  // Runs the source to its end, or until Stop. `delivery` sees every sequence.
  void Run(Delivery& delivery);

  // The output thread took a sequence's last record.
  void Closed(uint32_t sequence);
  // The sweep under way is finished, no other is begun. Async-signal-safe callers use a thread.
  void Stop();

  EngineStats Stats() const;
  // Where every frame is and what it waits for, what every node did and does, experts, reads under
  // way, sequences: lines for people who look at a run that stands still. Any thread; never waits
  // long.
  std::string StateText() const;
  std::vector<SequenceLeft> Left() const { return scheduler_.Left(); }
  Profile& TheProfile() { return profile_; }
  const Profile& TheProfile() const { return profile_; }
  // How often each expert was chosen so far, by item; rows count.
  std::vector<uint64_t> Chosen() const;
  std::string ReaderName() const { return reader_.Name(); }

  // Node bodies.
  Scheduler::Filled Admit(FrameRef frame) noexcept override;
  void Embed(FrameRef frame) noexcept override;
  bool LayerReady(LayerRef at) noexcept override;
  void Attention(LayerRef at) noexcept override;
  std::span<const uint16_t> Route(LayerRef at) noexcept override;
  void Lookahead(LayerRef at) noexcept override;
  const std::byte* Fetch(ExpertJob job) noexcept override;
  void ExpertFfn(const ReadyExpert& expert) noexcept override;
  void SharedFfn(LayerRef at) noexcept override;
  Next Combine(LayerRef at) noexcept override;
  bool HeadReady(LayerRef at) noexcept override;
  bool Head(LayerRef at) noexcept override;
  Verified Verify(LayerRef at) noexcept override;
  LayerRef Draft(FrameRef frame) noexcept override;
  void Release(FrameRef frame) noexcept override;
  void Deliver(const Notice& notice) noexcept override;

 private:
  // A frame and what the graph keeps beside it.
  struct SweepStart {
    Clock::time_point time;
    OverlapFigures overlap;
  };
  struct GraphFrame {
    GraphFrame(const Model& model, const FrameShape& shape, int32_t page_tokens)
        : frame(model, shape), pass(page_tokens, model.Config().index_share_for_mtp) {}
    Frame frame;
    DraftPass pass;
    int32_t draft_steps = 0;  // of this pass, so far
    int32_t base_rows = 0;    // of the frame that was verified: no drafts
    SweepStart start;
    Clock::time_point verified;      // and then its drafts were made
    std::vector<DraftAsker> asking;  // who may have drafts, and how many
    std::vector<Sequence*> asking_sequences;
    std::atomic<int32_t> remaining{0};  // of the layer: jobs + shared_ffn + lookahead
    std::atomic<int32_t> awaited{0};    // of the layer: suppliers + layer_ready itself
    std::vector<uint16_t> issue_order;
    std::vector<uint32_t> items;  // of the jobs
    std::vector<Notice> notices;
    std::vector<float> predict_scratch;
    std::vector<uint32_t> votes;           // [experts] for the next layer's experts
    std::vector<uint32_t> first_votes;     // [experts]: rows in the first sparse layer, this sweep
    std::vector<uint32_t> draft_votes;     // [experts]: in the MTP layer, of the last draft step
    std::vector<uint16_t> hint_order;      // experts with votes
    std::vector<uint32_t> hint_items;      // the same as items
    CacheStats before;                     // when the frame was admitted
    uint64_t bytes_before = 0;             // of all kinds read by then
    uint64_t draft_bytes = 0;              // read while its drafts were made
    std::atomic<uint64_t> alone_bytes{0};  // read in this sweep for experts that drafts alone chose
  };

  void MakeSuppliers();
  KvStreamStats KvStats() const;
  DenseStats DenseFigures() const;
  uint64_t BytesRead(const CacheStats& cache) const;
  std::string PathOf(uint32_t file) const;
  GraphFrame& At(LayerRef at) const;
  void OnReady(const ReadyItem& item);
  // A supplier's answer to an Await that returned false. Any thread.
  void LayerPartArrived(uint16_t frame, int32_t layer);
  // One part of a streamed head, which is there or cannot be had. True: another follows.
  bool HeadPart(GraphFrame& f);
  int32_t NextSparse(int32_t layer) const;
  bool IsMtp(LayerRef at) const { return at.layer >= model_.Config().layers; }
  void TellGovernor(GraphFrame& f);
  // True: a draft step follows.
  bool BeginDrafts(GraphFrame& f);
  void GiveUpKeys(GraphFrame& f);
  void LookUp(GraphFrame& f, bool mtp);
  void TakeLookups(GraphFrame& f);
  bool WriteKeys(GraphFrame& f);
  bool TakeDrafts(GraphFrame& f);
  void ChooseDepths(GraphFrame& f);
  void CountStep(const GraphFrame& f);
  void CountForDrafts(ExpertJob job);
  uint64_t TakeDraftBytes(GraphFrame& f);
  static void CountRows(const Frame& frame, std::vector<uint32_t>* votes);
  // For the route trace: what the router of sparse layer `layer` makes of the state as it is now.
  void RecordGuess(GraphFrame& f, int32_t layer, Guess way);
  void Hint(GraphFrame& f, int32_t layer);
  void GuessAgain(GraphFrame& f, int32_t layer);
  void Pause() const;
  void WaitForWork(bool poll_input);
  void Linger();

  const Model& model_;
  const EngineOptions options_;
  Profile profile_;
  oneapi::tbb::global_control thread_limit_;
  oneapi::tbb::task_arena arena_;
  TbbParallel parallel_;
  KvStore kv_;
  Stages stages_;
  VocabMask mask_;
  TokenDrawer drawer_;
  DraftDrawer draft_drawer_;
  const bool mtp_;  // the MTP layer makes drafts
  std::mutex governor_mutex_;
  std::optional<Governor> governor_;                // under the mutex, as what follows
  std::array<int32_t, kMaxDrafts> step_rows_ = {};  // of draft steps since the last sweep's end
  double step_seconds_ = 0;
  std::atomic<uint64_t> draft_bytes_{0};  // of EngineStats
  std::atomic<bool> noise_{false};        // the governor wants no more drafts of the MTP layer
  Scheduler scheduler_;
  std::vector<std::unique_ptr<GraphFrame>> frames_;
  std::vector<std::atomic<uint64_t>> chosen_;  // by item
  SlotPool slots_;
  MeteredReader reader_;
  ReadHub hub_;
  std::unique_ptr<Reader> expert_port_, kv_port_, dense_port_, embedding_port_;
  std::unique_ptr<KvStream> kv_stream_;            // where layers' KV is streamed
  std::unique_ptr<DenseStream> dense_stream_;      // where layers' dense weights or the head are
  std::unique_ptr<EmbeddingRows> embedding_rows_;  // where the embedding is not in memory
  std::vector<LayerSupplier*> suppliers_;
  std::unique_ptr<DecodeGraph> graph_;
  std::unique_ptr<ExpertCache> cache_;  // after the graph: its I/O thread puts into it
  Delivery* delivery_ = nullptr;
  int wake_fd_ = -1;
};

}  // namespace colibri
