#include "runtime/scheduler.h"

#include <algorithm>
#include <limits>
#include <thread>
#include <utility>

#include "io/check.h"
#include "runtime/line_limits.h"

namespace colibri {
namespace {

// One-token prompts are prefill: whoever starts does so in order of age.
bool Decodes(const Sequence& s) { return s.stored > 0 && s.Known() - s.stored == 1; }

// What others may have stored: the last token's logits are wanted, so its row is always computed.
std::span<const int32_t> Sharable(const Sequence& s) {
  return std::span(s.tokens).first(s.tokens.size() - 1);
}

}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options, const Tokenizer& tokenizer,
                     std::span<const int32_t> stop_ids, KvStore& kv, RequestSource& source,
                     Refused refused)
    : options_(options),
      tokenizer_(tokenizer),
      stop_ids_(stop_ids),
      kv_(kv),
      source_(source),
      refused_(std::move(refused)),
      table_(static_cast<size_t>(options.sequences)),
      left_(table_.size()) {
  for (uint32_t i = Sequences(); i-- > 0;) {
    table_[i].index = i;
    free_.push_back(i);
  }
}

bool Scheduler::WantsLine() const {
  if (!open_) return false;
  if (ahead_.empty() && pending_ == nullptr && !free_.empty()) return true;
  return ahead_.size() < options_.ahead && ahead_bytes_ < options_.ahead_bytes;
}

RequestSource::Next Scheduler::TakeLine() {
  using Next = RequestSource::Next;
  auto line = std::make_shared<LineState>();
  const Next next = source_.TryNext(&line->request, &line->error);
  if (next == Next::kEnd) open_ = false;
  if (next != Next::kRequest) return next;
  ++stats_.lines_read;
  ahead_bytes_ += RequestBytes(line->request);
  ahead_.push_back(std::move(line));
  return next;
}

// The next line, or, where no more are to come, the one that takes most sweeps; those that cannot
// be run need none and go out at once.
void Scheduler::ChooseLine() {
  auto chosen = ahead_.begin();
  if (!open_) {
    const auto sweeps = [&](const std::shared_ptr<LineState>& line) {
      if (line->error) return std::numeric_limits<int64_t>::max();
      const Request& request = line->request;
      const auto prompt = static_cast<int64_t>(request.prompt.size());
      return prompt / options_.prefill_rows + TokenLimit(request, options_.context);
    };
    chosen = std::max_element(ahead_.begin(), ahead_.end(), [&](const auto& a, const auto& b) {
      return sweeps(a) < sweeps(b);  // of equals the first
    });
  }
  pending_ = std::move(*chosen);
  ahead_.erase(chosen);
  ahead_bytes_ -= RequestBytes(pending_->request);
  pending_->open_choices = pending_->error ? 1 : pending_->request.choices;
  // Copied: finished choices count the line's own number down while others still wait here.
  pending_choices_ = pending_->open_choices;
  next_choice_ = 0;
}

// Others may come in between where lines are skipped: nothing is kept across it.
void Scheduler::Pull(std::unique_lock<std::mutex>& lock) {
  while (!stopped_) {
    const RequestSource::Next next = WantsLine() ? TakeLine() : RequestSource::Next::kAgain;
    if (next == RequestSource::Next::kRequest) continue;
    if (next == RequestSource::Next::kSkipped) {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
      continue;
    }
    if (!StartChoice()) return;
  }
}

void Scheduler::Reset(Sequence& s) {
  s.error.reset();
  s.cause = StopCause::kNone;
  s.done = false;
  s.stored = 0;
  s.waits = 0;
  s.cached = -1;
  s.sweeps = 0;
  s.drafts.clear();
  s.keyed = true;
  s.unkeyed = 0;
  s.draft_counts = {};
  s.draft_bytes = 0;
  s.bytes_read = 0;
  s.hit_sum = 0;
  s.admitted = Clock::now();
  s.prompt = static_cast<int32_t>(s.line->request.prompt.size());
  s.tokens.clear();
  s.logprobs = {};
}

void Scheduler::Admit(Sequence& s) {
  const Request& request = s.line->request;
  s.age = next_age_++;
  Reset(s);
  // A later choice's line may have got its error from the deliverer, who tells it once, at the end.
  if (s.choice == 0 && s.line->error) return Refuse(s, *s.line->error);
  if (auto error = AdmissionError(request, options_.context)) {
    // All choices of a line fail as one: the ones not yet given a sequence are not tried.
    s.line->open_choices = 1;
    pending_.reset();
    return Refuse(s, std::move(*error));
  }
  const int32_t limit = TokenLimit(request, options_.context);
  s.tokens.reserve(request.prompt.size() + static_cast<size_t>(limit));
  s.tokens = request.prompt;
  if (request.logprobs) s.logprobs.Reserve(limit, request.top_logprobs);
  s.stop.emplace(tokenizer_, stop_ids_, request, limit);
  stats_.prompt_tokens += static_cast<uint64_t>(s.prompt);
  ++stats_.started;
  stats_.limits += static_cast<uint64_t>(limit);
  left_[s.index] = {s.prompt, 0, static_cast<int32_t>(limit)};
  s.owner = Sequence::kNobody;
  runnable_.push_back(&s);
}

void Scheduler::Refuse(Sequence& s, LineError error) {
  ++stats_.lines_refused;
  s.error = std::move(error);
  s.done = true;
  s.owner = Sequence::kDeliver;
  refused_(s);
}

int32_t Scheduler::Holders() const {
  return static_cast<int32_t>(std::count_if(
      table_.begin(), table_.end(), [](const Sequence& s) { return !s.pages.ids.empty(); }));
}

// A sequence starts only when all it knows fits with a page to spare for everyone running; else it
// would soon be preempted, or preempt others, for nothing. The pages it shares it has already.
bool Scheduler::MayStart(const Sequence& s) const {
  const auto shared = static_cast<int32_t>(s.pages.ids.size());
  const int32_t holders = Holders() - (shared > 0 ? 1 : 0);
  return holders == 0 || kv_.FreePages() >= kv_.PagesFor(s.Known() + 1) - shared + holders;
}

// Whether the page behind the `found` first positions of `s` is being stored by a sequence in a
// frame, or by `next` if that is placed. Of a sequence in a frame only what stays as it was placed
// is read.
bool Scheduler::AwaitsPage(const Sequence& s, int32_t found, const Sequence* next) const {
  const int32_t n = kv_.Shape().page_tokens;
  const int32_t end = found + n;
  if (!options_.share_prefixes || end >= s.Known() || s.waits >= s.Known()) return false;
  return std::any_of(table_.begin(), table_.end(), [&](const Sequence& other) {
    if (&other == &s || (other.owner < 0 && &other != next)) return false;
    if (other.placed >= end || other.prompt < end) return false;
    const int32_t *own = s.tokens.data(), *its = other.tokens.data();
    // The page itself first: that is where prompts part.
    return std::equal(own + found, own + end, its + found) && std::equal(own, own + found, its);
  });
}

void Scheduler::Drop(Sequence& s) {
  kv_.Release(&s.pages);
  s.stored = 0;
  s.drafts.clear();
  s.keyed = true;
  s.unkeyed = 0;
}

// False: it waits, for stored pages or for free ones, and holds none.
bool Scheduler::TryStart(Sequence& s) {
  if (s.age >= start_before_ || prefill_left_ == 0) return false;
  if (options_.share_prefixes) s.stored = kv_.Share(&s.pages, Sharable(s));
  const bool awaits = AwaitsPage(s, s.stored);
  if (!awaits && MayStart(s)) return true;
  Drop(s);
  if (awaits) {
    ++s.waits;
  } else {
    start_before_ = s.age;
  }
  return false;
}

// What is stored for sure, and so never before the frame that stored it is released.
void Scheduler::Publish(Sequence& s) {
  if (!options_.share_prefixes || s.pages.ids.empty()) return;
  kv_.Publish(&s.pages, std::span(s.tokens).first(static_cast<size_t>(s.stored)));
}

// The youngest sequence in no frame that is younger than the asking one: so the oldest is never
// preempted, and nobody preempts in a circle.
Sequence* Scheduler::Victim(const Sequence& asking) {
  Sequence* youngest = nullptr;
  for (Sequence* s : runnable_) {
    if (s->owner != Sequence::kNobody || s->pages.ids.empty() || s->age <= asking.age) continue;
    if (youngest == nullptr || s->age > youngest->age) youngest = s;
  }
  return youngest;
}

void Scheduler::Preempt(Sequence& s) {
  Drop(s);
  NoteLeft(s);
  ++stats_.preemptions;
}

// Pages for up to `rows` more positions; returns for how many there are some (0: none).
int32_t Scheduler::GrowPages(Sequence& s, int32_t rows) {
  while (!kv_.Grow(&s.pages, int64_t{s.stored} + rows)) {
    Sequence* victim = Victim(s);
    if (victim == nullptr) {
      const int64_t held = static_cast<int64_t>(s.pages.ids.size()) + kv_.FreePages();
      rows = static_cast<int32_t>(
          std::min<int64_t>(rows - 1, held * kv_.Shape().page_tokens - s.stored));
      if (rows < 1) return 0;
      continue;
    }
    Preempt(*victim);
  }
  return rows;
}

// Rows that prompts younger than `s` could take in this sweep beside `rows` of it, counted up to
// `enough`.
int32_t Scheduler::WantedBehind(const Sequence& s, int32_t rows, int32_t enough) const {
  const auto growth = [&](const Sequence& one, int32_t known) {
    return kv_.PagesFor(known) - static_cast<int32_t>(one.pages.ids.size());
  };
  int32_t holders = Holders() + (s.pages.ids.empty() ? 1 : 0);
  int32_t free = kv_.FreePages() - growth(s, s.stored + rows);
  int32_t wanted = 0;
  for (const Sequence* other : runnable_) {  // ascending in age
    if (other->age <= s.age || other->owner != Sequence::kNobody || Decodes(*other)) continue;
    int32_t pages = growth(*other, other->Known() + 1);
    int32_t stored = other->stored;
    if (other->pages.ids.empty()) {
      if (options_.share_prefixes) {
        const KvStore::Prefix prefix = kv_.Find(Sharable(*other));
        stored = prefix.pages * kv_.Shape().page_tokens;
        if (AwaitsPage(*other, stored, &s)) continue;
        pages += prefix.free - prefix.pages;
      }
      // If this one cannot start (MayStart), none behind it does.
      if (other->age >= start_before_ || free < pages + holders) break;
      ++holders;
    }
    free -= pages;
    wanted += std::min(enough - wanted, other->Known() - stored);
    if (wanted == enough) break;
  }
  return wanted;
}

int32_t Scheduler::ChunkOf(const Sequence& s, int32_t room) const {
  // Row i attends to stored + i + 1 positions.
  const auto work = [&](int64_t n) { return n * s.stored + n * (n + 1) / 2; };
  const int32_t left = s.Known() - s.stored;
  room = std::min(room, prefill_left_);
  int64_t most_work = work_left_;
  if (left > room || work(left) > work_left_) {
    const int32_t behind = WantedBehind(s, room, room / 2);
    room -= behind;
    if (behind > 0) most_work /= 2;
  }
  int32_t rows = std::min(left, room);
  while (rows > 1 && work(rows) > most_work) rows /= 2;
  // A frame's first chunk has a row at any rate, or a long context would never end its prefill
  // beside sequences that decode.
  const bool first = work_left_ == options_.prefill_work;
  if (rows == 1 && work(1) > most_work && !first) rows = 0;
  return rows;
}

void Scheduler::Place(Frame& frame, Sequence& s, int32_t rows) {
  COLIBRI_CHECK(s.owner.exchange(frame.id) == Sequence::kNobody);
  COLIBRI_CHECK(kv_.Writable(s.pages, s.stored, rows));
  FrameSequence place;
  place.sequence = &s;
  place.pages = &s.pages;
  place.first_row = static_cast<int32_t>(frame.rows.size());
  place.rows = rows;
  const auto number = static_cast<int32_t>(frame.sequences.size());
  frame.sequences.push_back(place);
  for (int32_t i = 0; i < rows; ++i) {
    FrameRow row;
    row.sequence = number;
    row.position = s.stored + i;
    row.token = s.tokens[static_cast<size_t>(row.position)];
    row.wants_logits = row.position + 1 == s.Known();
    frame.rows.push_back(row);
  }
}

// False: the sequence sits this sweep out.
bool Scheduler::TryPlace(Frame& frame, Sequence& s) {
  const bool starts = s.pages.ids.empty();
  if (starts && !TryStart(s)) return false;
  const bool decode = !starts && Decodes(s);
  const auto room = options_.rows - static_cast<int32_t>(frame.rows.size());
  s.placed = s.stored;
  int32_t rows = decode ? 1 : ChunkOf(s, room);
  const int32_t unwritten = kv_.Unwritten(s.pages, s.stored);
  rows = kv_.RowsWithin(s.pages, s.stored, rows, completed_left_ - unwritten);
  if (rows > 0) rows = GrowPages(s, rows);
  if (rows == 0) {
    if (starts) Drop(s);
    return false;
  }
  if (!decode) {
    prefill_left_ -= rows;
    work_left_ -= int64_t{rows} * s.stored + int64_t{rows} * (rows + 1) / 2;
    stats_.prefill_rows += static_cast<uint64_t>(rows);
  }
  if (s.cached < 0) {
    s.cached = s.stored;
    stats_.cached_tokens += static_cast<uint64_t>(s.cached);
  }
  const int32_t n = kv_.Shape().page_tokens;
  completed_left_ -= unwritten + (s.stored + rows) / n - s.stored / n;
  Place(frame, s, rows);
  return true;
}

void Scheduler::PlaceAll(Frame& frame, bool decode) {
  for (Sequence* s : runnable_) {
    if (static_cast<int32_t>(frame.rows.size()) >= options_.rows) return;
    if (s->owner == Sequence::kNobody && Decodes(*s) == decode) TryPlace(frame, *s);
  }
}

void Scheduler::PlaceRows(Frame& frame) {
  std::sort(runnable_.begin(), runnable_.end(),
            [](const Sequence* a, const Sequence* b) { return a->age < b->age; });
  prefill_left_ = std::min(options_.prefill_rows, options_.rows);
  work_left_ = options_.prefill_work;
  completed_left_ = kv_.Streams() ? kv_.Layout().MostCompleted() : options_.rows;
  start_before_ = std::numeric_limits<uint64_t>::max();
  PlaceAll(frame, true);
  PlaceAll(frame, false);
  const bool alone = static_cast<int32_t>(parked_.size()) + 1 == options_.frames;
  if (frame.rows.empty() && !runnable_.empty() && alone) {
    // Everybody sits out for want of pages: the oldest has the right to all of them (the plan holds
    // one whole context), so that some sequence always goes on.
    Sequence& oldest = *runnable_.front();
    for (Sequence* s : runnable_) {
      if (s != &oldest && !s->pages.ids.empty()) Preempt(*s);
    }
    start_before_ = std::numeric_limits<uint64_t>::max();
    COLIBRI_CHECK(TryPlace(frame, oldest));
  }
  PlaceDrafts(frame);
  std::erase_if(runnable_, [](const Sequence* s) { return s->owner != Sequence::kNobody; });
}

int32_t Scheduler::TakeParkedIfWork() {
  if (runnable_.empty() || parked_.empty() || stopped_) return -1;
  const int32_t frame = parked_.back();
  parked_.pop_back();
  return frame;
}

Scheduler::Filled Scheduler::Fill(Frame& frame) {
  std::unique_lock lock(mutex_);
  frame.rows.clear();
  frame.sequences.clear();
  kv_.CollectWrites();
  if (!stopped_) Pull(lock);
  if (!stopped_) PlaceRows(frame);
  if (frame.rows.empty()) {
    ++stats_.parks;
    parked_.push_back(frame.id);
    return {false, -1};
  }
  MakeView(kv_, &frame);
  ++stats_.frames_filled;
  stats_.rows += frame.rows.size();
  return {true, TakeParkedIfWork()};
}

void Scheduler::Release(Frame& frame) {
  const std::lock_guard lock(mutex_);
  kv_.CloseView(&frame.view);
  for (const FrameSequence& place : frame.sequences) {
    CountDrafts(place);
    Sequence& s = *place.sequence;
    // Finished ones belong to the deliverer, who may close them late: their pages are wanted now,
    // or a full store would leave the others, and the engine, without any. One that was closed
    // already, taken up again and finished in another frame needs its pages no more either.
    if (s.owner == Sequence::kDeliver) {
      Publish(s);
      kv_.Release(&s.pages);
    }
    if (s.owner != frame.id) continue;
    Publish(s);
    kv_.Shrink(&s.pages, s.stored);  // what lies behind were rejected drafts
    s.owner = Sequence::kNobody;
    runnable_.push_back(&s);
    NoteLeft(s);
  }
  ++stats_.sweeps;
}

void Scheduler::NoteLeft(const Sequence& s) {
  SequenceLeft& left = left_[s.index];
  left.prefill = Decodes(s) ? 0 : s.Known() - s.stored;
  left.generated = s.Generated();
}

void Scheduler::Close(uint32_t sequence) {
  const std::lock_guard lock(mutex_);
  Sequence& s = table_[sequence];
  COLIBRI_CHECK(s.done && s.owner.exchange(Sequence::kNobody) == Sequence::kDeliver);
  stats_.generated_tokens += static_cast<uint64_t>(std::max(0, s.Generated()));
  Publish(s);  // its frame may not have been released yet
  kv_.Release(&s.pages);
  // Only this table and pending_ hold lines, all under the lock.
  if (s.line.use_count() == 1) pool_taken_ -= s.line->charge;
  stats_.ended += left_[sequence].limit > 0 ? 1 : 0;
  left_[sequence] = {};
  s.line.reset();
  s.stop.reset();
  free_.push_back(sequence);
}

Scheduler::After Scheduler::Drained(int32_t* wake, bool* poll_input) {
  std::unique_lock lock(mutex_);
  COLIBRI_CHECK(static_cast<int32_t>(parked_.size()) == options_.frames);
  if (!stopped_) Pull(lock);
  if (stopped_) return After::kFinished;
  *wake = TakeParkedIfWork();
  if (*wake >= 0) return After::kWake;
  if (static_cast<int32_t>(free_.size()) == options_.sequences) {
    COLIBRI_CHECK(kv_.FreePages() == kv_.Pages());  // nobody is left who could hold one
    if (!open_) return After::kFinished;
  }
  *poll_input = open_ && !free_.empty() && pending_ == nullptr;
  return After::kBlock;
}

bool Scheduler::Gather() {
  std::unique_lock lock(mutex_);
  if (!stopped_) Pull(lock);
  return stopped_ || !open_ || free_.empty() || pending_ != nullptr ||
         static_cast<int32_t>(runnable_.size()) >= options_.rows;
}

}  // namespace colibri
