#include "bench/fixture.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "io/check.h"
#include "io/error.h"
#include "runtime/draft.h"
#include "runtime/reference.h"

namespace colibri {
namespace {

size_t S(int64_t v) { return static_cast<size_t>(v); }

std::string LayerName(std::string_view kind, int32_t layer, std::string_view rest = "") {
  return fmt::format("{}.{}{}", kind, layer, rest);
}

int32_t ArgMax(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// Reads a tensor of the fixture's own file.
template <class T>
std::vector<T> ReadTensor(const Container& file, const std::string& name, DType dtype) {
  const TensorEntry* entry = file.Find(name);
  if (entry == nullptr || entry->dtype != dtype) {
    throw ModelError(fmt::format("{}: tensor {} is missing or not of the expected type",
                                 file.Files().Path(0), name));
  }
  std::vector<T> values(entry->bytes / sizeof(T));
  file.Files().ReadExact(entry->file, entry->offset, std::as_writable_bytes(std::span(values)));
  return values;
}

// Runs the prompt and keeps everything the fixture has a value for.
class FixtureRun final : public StageHook, public LogitsSink {
 public:
  FixtureRun(const std::string& directory, const FixtureOptions& options)
      : options_(options), model_({directory + "/model"}) {
    std::ifstream meta_file(directory + "/meta.json");
    const auto meta = nlohmann::json::parse(meta_file);
    model_.MutableConfig().latent_eps = meta.at("latent_norm_eps").get<float>();
    drafts_ = meta.at("drafts").get<int32_t>();
    const Container expected({directory});
    ids_ = ReadTensor<int32_t>(expected, "input_ids", DType::kI32);
    model_.SetInt8Activations(false);
    if (options_.dense) model_.DropIndexer();
    if (options_.dense_by_top_k) model_.MutableConfig().index_top_k = 64;
    model_.LoadDense();
    if (options_.change_model) options_.change_model(model_);
  }

  FixtureValues Run() {
    const ModelConfig& c = model_.Config();
    const auto tokens = static_cast<int32_t>(ids_.size());
    KvStore kv(KvShapeOf(model_, options_.page_tokens, KvType::kF32),
               (tokens + drafts_) / options_.page_tokens + 1);
    KvPages pages;
    COLIBRI_CHECK(kv.Grow(&pages, tokens + drafts_));
    ReferenceEngine engine(model_, kv, this);
    Frame frame(model_, {std::max(tokens, 2), tokens + drafts_, 1});
    width_ = std::min(options_.dense || options_.dense_by_top_k ? tokens : c.index_top_k, tokens);
    size_t chunk = 0;
    for (int32_t first = 0; first < tokens;) {
      const int32_t rows =
          options_.chunks.empty()
              ? tokens
              : std::min(options_.chunks[std::min(chunk, options_.chunks.size() - 1)],
                         tokens - first);
      RunChunk(engine, frame, pages, first, rows);
      first += rows;
      ++chunk;
    }
    if (model_.HasMtp()) RunDrafts(engine, frame);
    return std::move(values_);
  }

  void At(StagePoint point, Frame& frame, int32_t layer) override {
    if (options_.hook != nullptr) options_.hook->At(point, frame, layer);
    const ModelConfig& c = model_.Config();
    const bool mtp = layer >= c.layers;
    const size_t hidden = S(c.hidden), k = S(c.top_k), rows = frame.Rows();
    if (point == StagePoint::kLayerStart && !mtp) {
      Append("hidden", layer, frame.x, rows * hidden);
    } else if (point == StagePoint::kAttention && !mtp) {
      Append("attn", layer, frame.attention_out, rows * hidden);
    } else if (point == StagePoint::kChosen && !mtp) {
      auto& experts = values_.ints[Name(LayerName("router", layer, ".experts"))];
      experts.insert(experts.end(), frame.experts.begin(),
                     frame.experts.begin() + static_cast<std::ptrdiff_t>(rows * k));
      auto& weights = values_.floats[Name(LayerName("router", layer, ".weights"))];
      weights.insert(weights.end(), frame.weights.begin(),
                     frame.weights.begin() + static_cast<std::ptrdiff_t>(rows * k));
    } else if (point == StagePoint::kIndexSets && !drafting_) {
      auto& index = values_.ints[Name(mtp ? "mtp.index" : LayerName("index", layer))];
      for (size_t r = 0; r < rows; ++r) {
        const IndexSet& set = frame.index_sets[r];
        for (int32_t i = 0; i < width_; ++i) {
          index.push_back(i >= set.count ? -1 : set.listed ? frame.IndexList(r)[i] : i);
        }
      }
    }
  }

  void Row(Frame& frame, size_t row, std::span<float> logits) override {
    auto& all = values_.floats[Name(logits_name_)];
    all.insert(all.end(), logits.begin(), logits.end());
    best_[row] = ArgMax(logits);
    if (logits_name_ == "logits") values_.ints[Name("greedy_next")].push_back(best_[row]);
    COLIBRI_CHECK(frame.rows[row].state == RowState::kLive);
  }

 private:
  std::string Name(const std::string& name) const {
    return options_.dense || options_.dense_by_top_k ? "dense." + name : name;
  }
  void Append(std::string_view kind, int32_t layer, const float* from, size_t count) {
    auto& values = values_.floats[Name(LayerName(kind, layer))];
    values.insert(values.end(), from, from + count);
  }
  void Append(const std::string& name, const float* from, size_t count) {
    auto& values = values_.floats[Name(name)];
    values.insert(values.end(), from, from + count);
  }

  void RunChunk(ReferenceEngine& engine, Frame& frame, const KvPages& pages, int32_t first,
                int32_t rows) {
    const size_t hidden = S(model_.Config().hidden);
    frame.rows.clear();
    frame.sequences.assign(1, {});
    frame.sequences[0].pages = &pages;
    frame.sequences[0].rows = rows;
    for (int32_t i = first; i < first + rows; ++i) {
      FrameRow row;
      row.position = i;
      row.token = ids_[S(i)];
      row.wants_logits = true;
      frame.rows.push_back(row);
    }
    best_.assign(S(rows), -1);
    logits_name_ = "logits";
    engine.Run(frame, *this);
    Append("final_norm", frame.final, S(rows) * hidden);
    if (!model_.HasMtp()) return;
    for (int32_t i = 0; i < rows; ++i) {
      const int32_t next = first + i + 1;
      frame.rows[S(i)].token =
          next < static_cast<int32_t>(ids_.size()) ? ids_[S(next)] : best_[S(i)];
    }
    logits_name_ = "mtp.logits";
    engine.RunMtp(frame, *this);
    Append("mtp.hidden", frame.final, S(rows) * hidden);
  }

  // Chained drafts from the last MTP row, once with its index set shared, once with each step's
  // own.
  void RunDrafts(ReferenceEngine& engine, Frame& frame) {
    drafting_ = true;
    const ModelConfig& c = model_.Config();
    const size_t hidden = S(c.hidden), vocab = S(c.vocab), last = frame.Rows() - 1;
    const std::vector<FrameRow> rows = frame.rows;
    const std::vector<FrameSequence> sequences = frame.sequences;
    const std::vector<float> final(frame.final, frame.final + frame.Rows() * hidden);
    const IndexSet set = frame.index_sets[last];
    std::vector<int32_t> list;
    if (set.listed) list.assign(frame.IndexList(last), frame.IndexList(last) + set.count);
    const int32_t first_draft = best_[last];
    const std::vector<float>& first_logits = values_.floats[Name("mtp.logits")];
    for (const bool share : {true, false}) {
      const std::string base = share ? "mtp.drafts.shared_index" : "mtp.drafts.own_index";
      frame.rows = rows;
      frame.sequences = sequences;
      std::memcpy(frame.final, final.data(), final.size() * sizeof(float));
      frame.index_sets[last] = set;
      if (set.listed) std::copy(list.begin(), list.end(), frame.IndexList(last));
      int32_t draft = first_draft;
      values_.ints[Name(base + ".ids")].push_back(draft);
      values_.floats[Name(base + ".logits")].assign(
          first_logits.end() - static_cast<std::ptrdiff_t>(vocab), first_logits.end());
      logits_name_ = base + ".logits";
      for (int32_t step = 1; step < drafts_; ++step) {
        NextDraftStep(frame, {&draft, 1}, share);
        best_.assign(1, -1);
        engine.RunMtp(frame, *this);
        draft = best_[0];
        values_.ints[Name(base + ".ids")].push_back(draft);
      }
    }
  }

  FixtureOptions options_;
  Model model_;
  std::vector<int32_t> ids_;
  int32_t drafts_ = 0;
  int32_t width_ = 0;
  bool drafting_ = false;
  std::string logits_name_;
  std::vector<int32_t> best_;  // argmax of each row's last logits
  FixtureValues values_;
};

// Tolerances of the fixtures: about three times the noise of f32, below what the smallest mistake
// moves.
double ToleranceOf(std::string_view name) {
  if (name.starts_with("dense.")) name.remove_prefix(6);
  if (name.starts_with("hidden.")) return 2.5e-4;
  if (name.starts_with("attn.")) return 6e-5;
  if (name.starts_with("router.")) return 2e-5;
  return 7e-5;
}

}  // namespace

FixtureValues ComputeFixture(const std::string& directory, const FixtureOptions& options) {
  return FixtureRun(directory, options).Run();
}

std::vector<TensorDifference> CompareFixture(const std::string& directory,
                                             const FixtureValues& values,
                                             const FixtureOptions& options) {
  const Container expected({directory});
  const bool dense = options.dense || options.dense_by_top_k;
  std::vector<TensorDifference> all;
  for (const std::string& name : expected.Names()) {
    if (name == "input_ids" || name.starts_with("dense.") != dense) continue;
    TensorDifference d;
    d.name = name;
    const bool integers = expected.Find(name)->dtype == DType::kI32;
    constexpr double kMissing = std::numeric_limits<double>::infinity();
    if (integers) {
      const auto want = ReadTensor<int32_t>(expected, name, DType::kI32);
      const auto got = values.ints.find(name);
      if (got == values.ints.end() || got->second.size() != want.size()) {
        d.largest = kMissing;
      } else {
        for (size_t i = 0; i < want.size(); ++i) d.largest += want[i] != got->second[i];
      }
      d.passed = d.largest == 0;
    } else {
      const auto want = ReadTensor<float>(expected, name, DType::kF32);
      const auto got = values.floats.find(name);
      d.tolerance = ToleranceOf(name);
      if (got == values.floats.end() || got->second.size() != want.size()) {
        d.largest = kMissing;
      } else {
        for (size_t i = 0; i < want.size(); ++i) {
          const double difference = std::abs(static_cast<double>(want[i]) - got->second[i]);
          d.largest = std::max(d.largest, std::isnan(difference) ? kMissing : difference);
        }
      }
      d.passed = d.largest <= d.tolerance;
    }
    all.push_back(d);
  }
  return all;
}

int RunVerify(const VerifyOptions& options) {
  bool passed = true;
  auto report = nlohmann::ordered_json::array();
  for (const std::string& directory : options.directories) {
    std::vector<TensorDifference> rows;
    for (const bool dense : {false, true}) {
      FixtureOptions run;
      run.dense = dense;
      if (dense && Container({directory}).Find("dense.logits") == nullptr) continue;
      const auto part = CompareFixture(directory, ComputeFixture(directory, run), run);
      rows.insert(rows.end(), part.begin(), part.end());
    }
    if (!options.json) fmt::print("{}\n", directory);
    for (const TensorDifference& d : rows) {
      passed = passed && d.passed;
      if (options.json) {
        report.push_back({{"folder", directory},
                          {"tensor", d.name},
                          {"largest", d.largest},
                          {"tolerance", d.tolerance},
                          {"passed", d.passed}});
      } else {
        fmt::print("  {:<36} {:>10.3g} {:>9} {}\n", d.name, d.largest,
                   d.tolerance == 0 ? "equal" : fmt::format("{:.1e}", d.tolerance),
                   d.passed ? "ok" : "FAILED");
      }
    }
  }
  if (options.json) {
    fmt::print("{}\n", report.dump(1));
  } else {
    fmt::print("{}\n", passed ? "verified: every tensor within its tolerance" : "FAILED");
  }
  return passed ? 0 : 1;
}

}  // namespace colibri
