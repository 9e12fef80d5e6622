// Fills frames with rows: which sequences take part in the next sweep, with how many tokens each.
// Shared by the graph's `admit` and the sequential engine. Also the table of sequences, the
// admission of lines and the parking place of frames without work.
//
// Order within a frame: one row of every sequence that decodes, oldest first, then prefill chunks,
// oldest first, bounded in rows and in rows x context, then, in rows that are left, drafts of the
// sequences that decode, each behind its row. Drafts take pages that are free and never anybody's;
// they are held for this frame only. A prompt that does not end in this sweep
// leaves half of what it could take to the prompts behind it, as far as they need it. While the
// oldest sequence without pages waits for them, no younger one starts: short lines do not pass a
// long one by for ever. Lines start in the order of the input. Once all that are left are at hand,
// those with most to do start first, so that the last sweeps are not those of one line alone.
// Whoever starts holds by reference the pages of its tokens that are stored already, all but the
// last token; while a sequence in a frame stores the next of them, it lets others start and waits.
// It waits for rows that are under way and at most once for each of its tokens, so never for ever.
// Where KV pages are on the drive, a frame completes no more of them than can be on their way there
// at once: a prompt then takes fewer rows, a sequence that decodes sits a sweep out.
// Which rows share a frame, or pages, never changes a line's bytes; it decides only when they come.
// Threads: all
// methods from any thread (one mutex, given back between batches of skipped lines). Nothing here
// blocks.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/draft.h"
#include "runtime/frame.h"
#include "runtime/kv_store.h"
#include "runtime/request.h"
#include "runtime/sequence.h"
#include "runtime/tokenizer.h"

namespace colibri {

// Where lines come from. TryNext never blocks; it is called under the scheduler's lock.
class RequestSource {
 public:
  enum class Next : uint8_t { kRequest, kAgain, kSkipped, kEnd };
  virtual ~RequestSource() = default;
  // kRequest: `request` holds a line; when `error` is set it cannot be run and gets an error
  // record. kSkipped: some lines that are not run were passed; there may be more of them, so the
  // call ends to let others have the lock, and is to be made again.
  virtual Next TryNext(Request* request, std::optional<LineError>* error) = 0;
  virtual int Fd() const = 0;         // to poll for more, or -1
  virtual bool Buffered() const = 0;  // a line is there without polling
};

struct SchedulerOptions {
  int32_t sequences = 1;
  int32_t rows = 1;                // of a frame
  int32_t prefill_rows = 1;        // of those, at most so many of prefill
  int64_t prefill_work = 1 << 24;  // and at most so many rows x context
  int32_t frames = 1;
  int32_t context = 4096;  // prompt + max_tokens
  // What the lines under way may hold together (LineCharge of runtime/line_limits.h): a line that
  // does not fit yet waits, and those after it; one alone always runs.
  uint64_t line_pool = UINT64_MAX;
  // Lines read before there is a sequence for them: at most so many, and none once they hold so
  // many bytes (RequestBytes of runtime/line_limits.h).
  size_t ahead = 0;
  uint64_t ahead_bytes = UINT64_MAX;
  int32_t drafts = 0;          // most of a sequence; 0: sequences bring none
  bool share_prefixes = true;  // off in tests and colibri-bench pipeline: the bytes are the same
};

// Totals, for progress and the summary.
struct SchedulerStats {
  uint64_t lines_read = 0, lines_refused = 0;
  uint64_t lines_ahead = 0;  // read, and without a sequence yet
  uint64_t prompt_tokens = 0, generated_tokens = 0;
  uint64_t cached_tokens = 0;  // of the prompts', found stored when their sequences started
  uint64_t frames_filled = 0, rows = 0, prefill_rows = 0, preemptions = 0;
  uint64_t parks = 0;
  uint64_t sweeps = 0;              // ended
  uint64_t started = 0, ended = 0;  // sequences that were not refused
  DraftCounts mtp_drafts, looked_up;
  uint64_t limits = 0;  // most tokens that those started may generate, summed
  int32_t running = 0;  // sequences with a line
  bool input_open = true;
};

// Drafts of one source in one line: how many, how many a row had accepted, and the share of those
// at each position. "" without any.
std::string DraftsText(const DraftCounts& counts);

// What a sequence under way may still need, as of the end of its last sweep.
struct SequenceLeft {
  int32_t prefill = 0;               // positions to be stored before it decodes; 0: it decodes
  int32_t generated = 0, limit = 0;  // tokens so far, and the most there can be
};

class Scheduler {
 public:
  // A line that cannot be run, with its error in `sequence.error`: the receiver writes its record
  // and calls Close later, from another thread. Called under the lock.
  using Refused = std::function<void(Sequence& sequence)>;

  // `stop_ids` as in StopMatcher. All references outlive the scheduler.
  Scheduler(const SchedulerOptions& options, const Tokenizer& tokenizer,
            std::span<const int32_t> stop_ids, KvStore& kv, RequestSource& source, Refused refused);

  struct Filled {
    bool filled = false;
    int32_t wake = -1;  // a parked frame for which there is work too
  };
  // Fills the frame's rows and sequences, or parks it. After a park the caller no longer owns it:
  // it may be woken and filled before this returns.
  Filled Fill(Frame& frame);
  // The frame's sequences may take part in the next frame; finished ones give their pages back.
  void Release(Frame& frame);
  // The output thread has the sequence's last record: the object may take another line.
  void Close(uint32_t sequence);

  enum class After : uint8_t { kWake, kBlock, kFinished };
  // All frames are parked (checked). kWake: put frame *wake. kBlock: wait for Close, a signal and,
  // if *poll_input, for input; then call again.
  After Drained(int32_t* wake, bool* poll_input);
  // Takes in what the source has now; true if a frame's worth of sequences is waiting or nothing
  // more can be taken.
  bool Gather();
  // No further sweep is started; what runs is finished. Never waits, also while lines are skipped.
  void Stop() { stopped_ = true; }

  Sequence& At(uint32_t sequence) { return table_[sequence]; }
  uint32_t Sequences() const { return static_cast<uint32_t>(options_.sequences); }
  RequestSource& Source() { return source_; }
  SchedulerStats Stats() const;
  // Frames without work, sequences by who holds them, KV pages: lines for people. Any thread; never
  // waits long.
  std::string StateText() const;
  // Of every sequence that has been started and not ended.
  std::vector<SequenceLeft> Left() const;

 private:
  void Pull(std::unique_lock<std::mutex>& lock);
  bool WantsLine() const;
  RequestSource::Next TakeLine();
  void ChooseLine();
  bool StartChoice();
  void DropChoices();
  bool TakePool();
  static void Reset(Sequence& s);
  void Admit(Sequence& s);
  void Refuse(Sequence& s, LineError error);
  void PlaceRows(Frame& frame);
  void PlaceAll(Frame& frame, bool decode);
  bool TryPlace(Frame& frame, Sequence& s);
  bool TryStart(Sequence& s);
  void Drop(Sequence& s);
  void Publish(Sequence& s);
  bool AwaitsPage(const Sequence& s, int32_t found, const Sequence* next = nullptr) const;
  int32_t WantedBehind(const Sequence& s, int32_t rows, int32_t enough) const;
  int32_t ChunkOf(const Sequence& s, int32_t room) const;
  bool MayStart(const Sequence& s) const;
  int32_t GrowPages(Sequence& s, int32_t rows);
  Sequence* Victim(const Sequence& asking);
  void Preempt(Sequence& s);
  void NoteLeft(const Sequence& s);
  void Place(Frame& frame, Sequence& s, int32_t rows);
  bool GrowFree(Sequence& s, int64_t tokens);
  int32_t ChooseDrafts(Frame& frame);
  void PlaceDrafts(Frame& frame);
  void CountDrafts(const FrameSequence& place);
  int32_t TakeParkedIfWork();
  int32_t Holders() const;

  const SchedulerOptions options_;
  const Tokenizer& tokenizer_;
  const std::span<const int32_t> stop_ids_;
  KvStore& kv_;
  RequestSource& source_;
  const Refused refused_;

  mutable std::mutex mutex_;
  std::vector<Sequence> table_;
  std::vector<uint32_t> free_;
  std::vector<Sequence*> runnable_;
  std::vector<int32_t> parked_;
  std::deque<std::shared_ptr<LineState>> ahead_;
  uint64_t ahead_bytes_ = 0;            // of ahead_
  std::shared_ptr<LineState> pending_;  // a line whose choices have not all been given a sequence
  int32_t next_choice_ = 0;
  int32_t pending_choices_ = 0;  // of pending_
  uint64_t pool_taken_ = 0;      // charges of the lines under way
  uint64_t next_age_ = 0;
  // While a frame is filled.
  int32_t prefill_left_ = 0;
  int64_t work_left_ = 0;
  int32_t completed_left_ = 0;  // KV pages that may still be completed
  uint64_t start_before_ = 0;   // no sequence of this age or younger starts
  bool open_ = true;
  std::atomic<bool> stopped_{false};
  std::vector<SequenceLeft> left_;  // [sequences]; limit 0: none
  SchedulerStats stats_;
};

}  // namespace colibri
