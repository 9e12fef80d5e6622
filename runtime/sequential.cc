#include "runtime/sequential.h"

#include <poll.h>

#include <algorithm>

#include "io/check.h"
#include "runtime/reference.h"
#include "runtime/verify.h"

namespace colibri {
namespace {

SchedulerOptions WithDrafts(const SequentialOptions& options) {
  SchedulerOptions s = options.scheduler;
  s.drafts = options.drafts.most;
  return s;
}

// Makes the drafts of the sequences whose frame was verified.
class Drafting {
 public:
  Drafting(const Model& model, const KvStore& kv, const VocabMask& mask,
           const DraftOptions& options)
      : options_(options),
        drawer_(mask, serial_),
        pass_(kv.Shape().page_tokens, model.Config().index_share_for_mtp),
        by_mtp_(model.HasMtp()) {}

  void Make(ReferenceEngine& engine, Frame& frame) {
    if (options_.most == 0) return;
    if (by_mtp_ && pass_.Begin(frame)) {
      const auto depth = [this](const Sequence& s) {
        return options_.depth ? std::min(options_.depth(s), options_.most) : options_.most;
      };
      const bool any = pass_.Choose(frame, depth, false);
      while (pass_.Keys(frame)) engine.RunMtpKeys(frame, pass_.Hidden());
      if (any) {
        pass_.First(frame);
        do {
          engine.RunMtp(frame, drawer_);
        } while (pass_.Next(frame));
      }
      pass_.End(frame);
    }
    ProposeDrafts(frame, options_);
  }

 private:
  const DraftOptions& options_;
  SerialParallel serial_;
  DraftDrawer drawer_;
  DraftPass pass_;
  const bool by_mtp_;
};

}  // namespace

SchedulerStats RunSequential(const Model& model, const Tokenizer& tokenizer,
                             const SequentialOptions& options, RequestSource& source,
                             Delivery& delivery) {
  COLIBRI_CHECK(options.scheduler.frames == 1);
  KvStore kv(KvShapeOf(model, options.page_tokens, options.kv_type), options.kv_pages);
  // Refusals come under the scheduler's lock: they are closed once it is given back.
  std::vector<uint32_t> refused;
  Scheduler scheduler(WithDrafts(options), tokenizer, model.Config().stop_ids, kv, source,
                      [&](Sequence& s) {
                        delivery.Refuse(s);
                        refused.push_back(s.index);
                      });
  ReferenceEngine engine(model, kv);
  engine.FailItems(options.failing);
  SerialParallel serial;
  const VocabMask mask(tokenizer, model.Config().vocab);
  TokenDrawer drawer(mask, serial);
  Drafting drafting(model, kv, mask, options.drafts);
  Frame frame(model, {options.scheduler.rows, options.scheduler.context, 1});
  const auto path_of = [&](uint32_t file) { return model.Files().Files().Path(file); };
  const auto close_refused = [&] {
    for (uint32_t index : refused) scheduler.Close(index);
    refused.clear();
  };
  // The frame is parked. False: there will be no more work.
  const auto wait_for_work = [&] {
    for (;;) {
      int32_t wake = -1;
      bool poll_input = false;
      const Scheduler::After after = scheduler.Drained(&wake, &poll_input);
      const bool freed = !refused.empty();
      close_refused();
      if (after != Scheduler::After::kBlock) return after == Scheduler::After::kWake;
      if (freed) continue;
      // Nobody else holds a sequence: only input can bring work.
      COLIBRI_CHECK(poll_input && source.Fd() >= 0);
      pollfd input{source.Fd(), POLLIN, 0};
      if (!source.Buffered()) poll(&input, 1, -1);
    }
  };
  for (;;) {
    const bool filled = scheduler.Fill(frame).filled;
    close_refused();
    if (!filled) {
      if (!wait_for_work()) return scheduler.Stats();
      continue;
    }
    engine.Run(frame, drawer);
    std::vector<Notice> notices;
    AcceptTokens(frame, {}, path_of, [&](const Notice& n) { notices.push_back(n); });
    for (const Notice& n : notices) delivery.Deliver(scheduler.At(n.sequence), n);
    drafting.Make(engine, frame);
    scheduler.Release(frame);
    for (const Notice& n : notices) {
      if (n.final != 0) scheduler.Close(n.sequence);
    }
  }
}

}  // namespace colibri
