#include "bench/drafts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>

#include "graph/engine.h"
#include "graph/tbb_parallel.h"
#include "io/check.h"
#include "io/error.h"
#include "runtime/draft.h"
#include "runtime/reference.h"

namespace colibri {
namespace {

size_t S(int64_t v) { return static_cast<size_t>(v); }

struct Continuation {
  std::vector<int32_t> tokens;  // prompt, then what the model wrote
  size_t prompt = 0;
  std::vector<float> final;  // [tokens - prompt][hidden]: from the prompt's last row on
  KvPages pages;
};

std::vector<Continuation> ReadContinuations(const DraftsOptions& options, int32_t vocab) {
  std::ifstream file(options.file);
  if (!file) throw IoError(fmt::format("{}: cannot be read", options.file));
  std::vector<Continuation> all;
  std::string line;
  for (size_t number = 1; std::getline(file, line); ++number) {
    if (line.empty()) continue;
    Continuation c;
    try {
      const auto json = nlohmann::json::parse(line);
      const auto& kinds = options.kinds;
      if (!kinds.empty() &&
          std::find(kinds.begin(), kinds.end(), json.value("kind", "")) == kinds.end()) {
        continue;
      }
      c.tokens = json.at("prompt_ids").get<std::vector<int32_t>>();
      c.prompt = c.tokens.size();
      const auto more = json.at("greedy_ids").get<std::vector<int32_t>>();
      c.tokens.insert(c.tokens.end(), more.begin(), more.end());
    } catch (const nlohmann::json::exception& e) {
      throw IoError(fmt::format("{}: line {}: expected \"prompt_ids\" and \"greedy_ids\": {}",
                                options.file, number, e.what()));
    }
    for (const int32_t id : c.tokens) {
      if (id < 0 || id >= vocab) {
        throw IoError(fmt::format("{}: line {}: id {} is outside the vocabulary of {}",
                                  options.file, number, id, vocab));
      }
    }
    if (c.prompt > 0) all.push_back(std::move(c));
  }
  if (all.empty()) throw IoError(fmt::format("{}: has no continuation", options.file));
  return all;
}

// The likeliest token of each row.
class BestSink final : public LogitsSink {
 public:
  void Row(Frame& frame, size_t row, std::span<float> logits) override {
    frame.drawn[row] =
        static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
};

class Measurement {
 public:
  Measurement(const Model& model, const DraftsOptions& options, std::vector<Continuation>& all,
              KvStore& kv, Parallel& parallel, int32_t longest)
      : model_(model),
        options_(options),
        all_(all),
        engine_(model, kv, nullptr, &parallel),
        frame_(model, {options.rows, longest, parallel.Threads()}) {}

  DraftsResult Run() {
    StoreAll();
    DraftsResult result;
    for (DraftHits* hits : {&result.mtp, &result.lookup}) {
      hits->positions.assign(S(options_.depth), 0);
      hits->accepted.assign(S(options_.depth), 0);
    }
    size_t longest = 0;
    for (const Continuation& c : all_) longest = std::max(longest, c.tokens.size() - c.prompt);
    for (size_t at = 0; at + 1 < longest; ++at) {
      std::vector<Continuation*> going;
      for (Continuation& c : all_) {
        if (c.prompt + at + 1 < c.tokens.size()) going.push_back(&c);
      }
      for (size_t first = 0; first < going.size(); first += S(options_.rows)) {
        const size_t n = std::min(going.size() - first, S(options_.rows));
        DraftAt(std::span(going).subspan(first, n), at, &result.mtp);
      }
      for (const Continuation* c : going) Lookup(*c, at, &result.lookup);
    }
    result.bytes_read = engine_.BytesRead();
    return result;
  }

 private:
  void CheckRows() const {
    for (const FrameRow& row : frame_.rows) {
      if (row.state != RowState::kLive) throw IoError("a row failed: not finite, or a read failed");
    }
  }

  // Adds rows [first, first + count) of a continuation.
  void Place(const Continuation& c, size_t first, size_t count) {
    FrameSequence place;
    place.pages = &c.pages;
    place.first_row = static_cast<int32_t>(frame_.rows.size());
    place.rows = static_cast<int32_t>(count);
    for (size_t i = first; i < first + count; ++i) {
      FrameRow row;
      row.sequence = static_cast<int32_t>(frame_.sequences.size());
      row.position = static_cast<int32_t>(i);
      row.token = c.tokens[i];
      frame_.rows.push_back(row);
    }
    frame_.sequences.push_back(place);
  }
  void Clear() {
    frame_.rows.clear();
    frame_.sequences.clear();
  }

  // All rows of all continuations through the model, their keys into the MTP layer.
  void StoreAll() {
    std::vector<Continuation*> placed;
    Clear();
    for (Continuation& c : all_) {
      for (size_t first = 0; first < c.tokens.size();) {
        const size_t n = std::min(c.tokens.size() - first, S(options_.rows) - frame_.Rows());
        Place(c, first, n);
        placed.push_back(&c);
        first += n;
        if (frame_.Rows() == S(options_.rows)) StoreFrame(&placed);
      }
    }
    if (!placed.empty()) StoreFrame(&placed);
  }

  void StoreFrame(std::vector<Continuation*>* placed) {
    const size_t hidden = frame_.HiddenSize();
    engine_.Run(frame_, sink_);
    CheckRows();
    for (size_t r = 0; r < frame_.Rows(); ++r) {
      FrameRow& row = frame_.rows[r];
      Continuation& c = *(*placed)[S(row.sequence)];
      const size_t next = S(row.position) + 1;
      if (next >= c.prompt) {
        c.final.insert(c.final.end(), frame_.final + r * hidden, frame_.final + (r + 1) * hidden);
      }
      if (next < c.tokens.size()) row.token = c.tokens[next];  // else nobody looks at the key
    }
    engine_.RunMtpKeys(frame_);
    placed->clear();
    Clear();
  }

  // Drafts behind token `at` of what was written, and how far they are what was written.
  void DraftAt(std::span<Continuation* const> going, size_t at, DraftHits* hits) {
    const size_t hidden = frame_.HiddenSize();
    Clear();
    for (size_t i = 0; i < going.size(); ++i) {
      const Continuation& c = *going[i];
      Place(c, c.prompt - 1 + at, 1);
      frame_.rows[i].token = c.tokens[c.prompt + at];
      frame_.rows[i].wants_logits = true;
      std::memcpy(frame_.final + i * hidden, c.final.data() + at * hidden, hidden * sizeof(float));
    }
    std::vector<std::vector<int32_t>> drafts(going.size());
    for (int32_t step = 0; step < options_.depth; ++step) {
      if (step > 0) {
        std::vector<int32_t> last;
        for (const auto& one : drafts) last.push_back(one.back());
        NextDraftStep(frame_, last, model_.Config().index_share_for_mtp);
      }
      engine_.RunMtp(frame_, sink_);
      CheckRows();
      for (size_t i = 0; i < going.size(); ++i) drafts[i].push_back(frame_.drawn[i]);
    }
    for (size_t i = 0; i < going.size(); ++i) Count(*going[i], at, drafts[i], hits);
  }

  void Lookup(const Continuation& c, size_t at, DraftHits* hits) const {
    std::vector<int32_t> drafts;
    LookupDrafts(std::span(c.tokens).first(c.prompt + at + 1), options_.depth, &drafts);
    Count(c, at, drafts, hits);
  }

  static void Count(const Continuation& c, size_t at, const std::vector<int32_t>& drafts,
                    DraftHits* hits) {
    const size_t next = c.prompt + at + 1;
    bool right = true;
    for (size_t d = 0; d < hits->positions.size() && next + d < c.tokens.size(); ++d) {
      right = right && d < drafts.size() && drafts[d] == c.tokens[next + d];
      ++hits->positions[d];
      hits->accepted[d] += right ? 1 : 0;
    }
  }

  const Model& model_;
  const DraftsOptions& options_;
  std::vector<Continuation>& all_;
  ReferenceEngine engine_;
  Frame frame_;
  BestSink sink_;
};

std::vector<double> ReadReference(const std::string& path) {
  if (path.empty()) return {};
  std::ifstream file(path);
  if (!file) throw IoError(fmt::format("{}: cannot be read", path));
  const auto json = nlohmann::json::parse(file, nullptr, false);
  const char* key = "mtp_prefix_acceptance_by_depth";
  if (!json.is_object() || !json.contains(key) || !json.at(key).is_array()) {
    throw IoError(fmt::format("{}: has no \"{}\"", path, key));
  }
  std::vector<double> shares;
  for (const auto& share : json.at(key))
    shares.push_back(share.is_number() ? share.get<double>() : 0);
  return shares;
}

}  // namespace

DraftsResult MeasureDrafts(const DraftsOptions& options) {
  Model model(options.model);
  if (!model.HasMtp()) {
    throw ModelError(fmt::format("{}: has no MTP layer{}", options.model.front(),
                                 model.Notes().empty() ? "" : ": " + model.Notes().back()));
  }
  if (options.dense_attention) model.DropIndexer();
  model.SetInt8Activations(options.int8);
  std::vector<Continuation> all = ReadContinuations(options, model.Config().vocab);
  model.LoadDense();
  const int32_t threads = options.threads > 0 ? options.threads : ThreadsOfMachine();
  oneapi::tbb::task_arena arena(threads);
  TbbParallel parallel(threads);
  const KvShape shape = KvShapeOf(model, kDefaultPageTokens, options.kv);
  int32_t pages = 0, longest = 2;
  const auto places = [&](const Continuation& c) {
    return static_cast<int32_t>(c.tokens.size()) + options.depth;
  };
  for (const Continuation& c : all) {
    pages += places(c) / kDefaultPageTokens + 1;
    longest = std::max(longest, places(c));
  }
  KvStore kv(shape, pages);
  for (Continuation& c : all) COLIBRI_CHECK(kv.Grow(&c.pages, places(c)));
  DraftsResult result;
  arena.execute([&] { result = Measurement(model, options, all, kv, parallel, longest).Run(); });
  return result;
}

int RunDrafts(const DraftsOptions& options) {
  const std::vector<double> reference = ReadReference(options.reference);
  const DraftsResult result = MeasureDrafts(options);
  Table table({{"source", "drafts by", false},
               {"depth", "depth"},
               {"positions", "positions"},
               {"accepted", "accepted"},
               {"share", "% accepted"},
               {"reference", "reference %"},
               {"mean", "tokens a step"}});
  const auto add = [&](const char* source, const DraftHits& hits,
                       const std::vector<double>& beside) {
    double mean = 1;
    for (size_t d = 0; d < hits.positions.size(); ++d) {
      mean += hits.Share(d);
      table.Add({source, fmt::format("{}", d + 1), fmt::format("{}", hits.positions[d]),
                 fmt::format("{}", hits.accepted[d]), fmt::format("{:.2f}", 100 * hits.Share(d)),
                 d < beside.size() ? fmt::format("{:.2f}", 100 * beside[d]) : "",
                 fmt::format("{:.3f}", mean)});
    }
  };
  add("MTP layer", result.mtp, reference);
  add("prompt lookup", result.lookup, {});
  fmt::print("{}", table.Text(options.format));
  return 0;
}

}  // namespace colibri
