#include "bench/quality.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "graph/engine.h"
#include "graph/tbb_parallel.h"
#include "io/check.h"
#include "io/error.h"
#include "runtime/reference.h"
#include "runtime/tokenizer.h"

namespace colibri {
namespace {

using Window = std::vector<int32_t>;

std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw IoError(fmt::format("{}: cannot be read", path));
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<Window> IdWindows(const std::string& path, int32_t vocab) {
  std::vector<Window> windows;
  std::istringstream lines(ReadText(path));
  std::string line;
  for (size_t number = 1; std::getline(lines, line); ++number) {
    if (line.empty()) continue;
    try {
      windows.push_back(nlohmann::json::parse(line).at("ids").get<Window>());
    } catch (const nlohmann::json::exception& e) {
      throw IoError(
          fmt::format("{}: line {}: expected an object with \"ids\": {}", path, number, e.what()));
    }
    for (int32_t id : windows.back()) {
      if (id < 0 || id >= vocab) {
        throw IoError(fmt::format("{}: line {}: id {} is outside the vocabulary of {}", path,
                                  number, id, vocab));
      }
    }
  }
  return windows;
}

std::vector<Window> TextWindows(const std::string& path, const Tokenizer& tokenizer,
                                int32_t length) {
  const Window prefix = tokenizer.Encode("[gMASK]<sop>", AddedTokens::kRecognise);
  const Window ids = tokenizer.Encode(ReadText(path), AddedTokens::kPlain);
  const auto step = static_cast<size_t>(length) - prefix.size();
  std::vector<Window> windows;
  for (size_t first = 0; first < ids.size(); first += step) {
    Window window = prefix;
    window.insert(window.end(), ids.begin() + static_cast<std::ptrdiff_t>(first),
                  ids.begin() + static_cast<std::ptrdiff_t>(std::min(ids.size(), first + step)));
    windows.push_back(std::move(window));
  }
  return windows;
}

// Adds up the loss of every next id of one window.
class LossSink final : public LogitsSink {
 public:
  explicit LossSink(const Window& ids) : ids_(ids), losses_(ids.size(), 0) {}
  void Row(Frame& frame, size_t row, std::span<float> logits) override {
    const auto next = static_cast<size_t>(frame.rows[row].position) + 1;
    losses_[next] = LogSumExp(logits.data(), logits.size()) -
                    static_cast<double>(logits[static_cast<size_t>(ids_[next])]);
  }
  double Sum() const {
    double sum = 0;
    for (double loss : losses_) sum += loss;
    return sum;
  }

 private:
  const Window& ids_;
  std::vector<double> losses_;
};

double WindowLoss(const Window& ids, ReferenceEngine& engine, KvStore& kv, Frame& frame) {
  KvPages pages;
  COLIBRI_CHECK(kv.Grow(&pages, static_cast<int64_t>(ids.size())));
  LossSink sink(ids);
  for (size_t first = 0; first < ids.size();) {
    const size_t rows = std::min(static_cast<size_t>(frame.shape.rows), ids.size() - first);
    frame.rows.clear();
    frame.sequences.assign(1, {});
    frame.sequences[0].pages = &pages;
    frame.sequences[0].rows = static_cast<int32_t>(rows);
    for (size_t i = first; i < first + rows; ++i) {
      FrameRow row;
      row.position = static_cast<int32_t>(i);
      row.token = ids[i];
      row.wants_logits = i + 1 < ids.size();
      frame.rows.push_back(row);
    }
    engine.Run(frame, sink);
    for (const FrameRow& row : frame.rows) {
      if (row.state != RowState::kLive) throw IoError("a row failed: not finite, or a read failed");
    }
    first += rows;
  }
  kv.Release(&pages);
  return sink.Sum();
}

QualityResult Measure(const Model& model, const std::vector<Window>& windows,
                      const QualityOptions& options, KvType type) {
  const auto start = std::chrono::steady_clock::now();
  size_t longest = 2;
  for (const Window& w : windows) longest = std::max(longest, w.size());
  const int32_t threads = options.threads > 0 ? options.threads : ThreadsOfMachine();
  oneapi::tbb::task_arena arena(threads);
  TbbParallel parallel(threads);
  KvStore kv(KvShapeOf(model, kDefaultPageTokens, type),
             static_cast<int32_t>(longest) / kDefaultPageTokens + 1);
  ReferenceEngine engine(model, kv, nullptr, &parallel);
  Frame frame(model, {options.rows, static_cast<int32_t>(longest), threads});
  QualityResult result;
  result.kv = type;
  double loss = 0;
  arena.execute([&] {
    for (const Window& window : windows) {
      if (window.size() < 2) continue;
      loss += WindowLoss(window, engine, kv, frame);
      result.predictions += static_cast<int64_t>(window.size()) - 1;
    }
  });
  if (result.predictions == 0) throw IoError("nothing to predict: no window has two ids");
  result.perplexity = std::exp(loss / static_cast<double>(result.predictions));
  result.bytes_read = engine.BytesRead();
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace

std::vector<QualityResult> MeasureQuality(const QualityOptions& options) {
  Model model(options.model);
  if (options.dense_attention) model.DropIndexer();
  std::vector<Window> windows;
  for (const std::string& file : options.files) {
    const bool ids = file.ends_with(".jsonl");
    std::vector<Window> more =
        ids ? IdWindows(file, model.Config().vocab)
            : TextWindows(file, Tokenizer::Load(options.model.front() + "/tokenizer.json"),
                          options.window);
    windows.insert(windows.end(), more.begin(), more.end());
  }
  if (options.max_windows > 0 && windows.size() > static_cast<size_t>(options.max_windows)) {
    windows.resize(static_cast<size_t>(options.max_windows));
  }
  model.LoadDense();
  std::vector<QualityResult> results;
  for (bool int8 : options.int8) {
    model.SetInt8Activations(int8);
    for (KvType type : options.kv) {
      results.push_back(Measure(model, windows, options, type));
      results.back().int8 = int8;
    }
  }
  return results;
}

namespace {

// The rows of a reference.json, made by the reference implementation in f32.
void AddReference(const QualityOptions& options, nlohmann::ordered_json* report) {
  std::ifstream file(options.reference);
  if (!file) throw IoError(fmt::format("{}: cannot be read", options.reference));
  const auto json = nlohmann::json::parse(file, nullptr, false);
  if (!json.is_object() || !json.contains("perplexity")) {
    throw IoError(fmt::format("{}: has no \"perplexity\"", options.reference));
  }
  for (const auto& [weights, values] : json.at("perplexity").items()) {
    for (const auto& [attention, value] : values.items()) {
      if (options.json) {
        report->push_back(
            {{"reference", weights}, {"attention", attention}, {"perplexity", value}});
      } else {
        fmt::print("{:<19}{:<11}{:>13.4f}\n", "reference " + weights, attention,
                   value.get<double>());
      }
    }
  }
}

}  // namespace

int RunQuality(const QualityOptions& options) {
  const std::vector<QualityResult> results = MeasureQuality(options);
  auto report = nlohmann::ordered_json::array();
  if (!options.json) {
    fmt::print("{:<12}{:<7}{:<11}{:>13}{:>13}{:>10}{:>11}\n", "activations", "KV", "attention",
               "perplexity", "predictions", "GB read", "tokens/s");
  }
  for (const QualityResult& r : results) {
    const char* kv = r.kv == KvType::kF32 ? "f32" : "bf16";
    const char* attention = options.dense_attention ? "dense" : "auto";
    const double rate = static_cast<double>(r.predictions) / r.seconds;
    if (options.json) {
      report.push_back({{"activations", r.int8 ? "auto" : "f32"},
                        {"kv", kv},
                        {"attention", attention},
                        {"perplexity", r.perplexity},
                        {"predictions", r.predictions},
                        {"bytes_read", r.bytes_read},
                        {"tokens_per_second", rate}});
    } else {
      fmt::print("{:<12}{:<7}{:<11}{:>13.4f}{:>13}{:>10.3f}{:>11.1f}\n", r.int8 ? "auto" : "f32",
                 kv, attention, r.perplexity, r.predictions,
                 static_cast<double>(r.bytes_read) / 1e9, rate);
    }
  }
  if (!options.reference.empty()) AddReference(options, &report);
  if (options.json) fmt::print("{}\n", report.dump(1));
  return 0;
}

}  // namespace colibri
