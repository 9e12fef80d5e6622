#include "bench/attention_bench.h"

#include <time.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>

#include "kernels/peak.h"

namespace colibri {
namespace {

size_t S(int32_t v) { return static_cast<size_t>(v); }

constexpr int32_t kPageTokens = 32;

// Of this thread's processor time: what else runs on the machine takes only caches from it.
double SecondsOf(const std::function<void()>& run) {
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const double start = now();
  run();
  return now() - start;
}

// Multiply-adds a second of the register loop, over about 2 ms.
double PeakRate() {
  uint64_t done = 0;
  const double seconds = SecondsOf([&] { done = RunMulAddLoop(uint64_t{1} << 19); });
  return static_cast<double>(done) / seconds;
}

std::vector<float> RandomFloats(size_t n, std::mt19937* random) {
  std::vector<float> values(n);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (float& v : values) v = uniform(*random);
  return values;
}

// Stored vectors in pages that lie in a shuffled order.
struct Pages {
  Pages(int32_t positions, int32_t width, KvType type, std::mt19937* random)
      : values(S(positions + kPageTokens) * S(width) * KvBytes(type)) {
    const std::vector<float> vector = RandomFloats(values.size() / KvBytes(type), random);
    StoreKv(vector.data(), vector.size(), type, values.data());
    const size_t count = (S(positions) + S(kPageTokens) - 1) / S(kPageTokens);
    std::vector<size_t> order(count);
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), *random);
    for (size_t page : order) {
      pages.push_back(values.data() + page * S(kPageTokens) * S(width) * KvBytes(type));
    }
    view = {pages.data(), kPageTokens, width, type};
  }
  std::vector<std::byte> values;
  std::vector<const std::byte*> pages;
  KvView view;
};

// One kernel with its inputs, called again and again.
class AttentionCase {
 public:
  AttentionCase(const AttentionBenchOptions& o, KvType type, int32_t rows, bool listed,
                AttentionFigure* figure)
      : random_(1), heads_(o.heads), pages_(o.positions, o.latent + o.rope, type, &random_) {
    q_latent_ = RandomFloats(S(rows) * S(o.heads) * S(o.latent), &random_);
    q_rope_ = RandomFloats(S(rows) * S(o.heads) * S(o.rope), &random_);
    out_.resize(q_latent_.size());
    scratch_.resize(AttentionScratch(o.latent, o.rope));
    rows_.resize(S(rows));
    lists_.resize(S(rows));
    double positions = 0;
    for (size_t r = 0; r < rows_.size(); ++r) {
      AttentionRow& row = rows_[r];
      row.q_latent = q_latent_.data() + r * S(o.heads) * S(o.latent);
      row.q_rope = q_rope_.data() + r * S(o.heads) * S(o.rope);
      row.out = out_.data() + r * S(o.heads) * S(o.latent);
      row.count = std::max(1, o.positions - rows + 1 + static_cast<int32_t>(r));
      if (listed) {
        std::vector<int32_t> all(S(row.count));
        std::iota(all.begin(), all.end(), 0);
        std::sample(all.begin(), all.end(), std::back_inserter(lists_[r]), o.listed, random_);
        row.positions = lists_[r].data();
        row.count = static_cast<int32_t>(lists_[r].size());
      }
      positions += row.count;
    }
    arguments_ = {pages_.view,  o.latent,     o.rope,         0.02f,
                  rows_.data(), rows_.size(), scratch_.data()};
    figure->kernel = listed ? "attention, listed" : "attention";
    figure->multiply_adds = positions * o.heads * (2 * o.latent + o.rope);
  }

  void Run() const { AttendLatents(arguments_, 0, heads_); }

 private:
  std::mt19937 random_;
  int32_t heads_;
  Pages pages_;
  std::vector<float> q_latent_, q_rope_, out_, scratch_;
  std::vector<AttentionRow> rows_;
  std::vector<std::vector<int32_t>> lists_;
  LatentAttention arguments_;
};

class IndexCase {
 public:
  IndexCase(const AttentionBenchOptions& o, KvType type, int32_t rows, AttentionFigure* figure)
      : random_(2), positions_(o.positions), keys_(o.positions, o.index_width, type, &random_) {
    q_ = RandomFloats(S(rows) * S(o.index_heads) * S(o.index_width), &random_);
    w_ = RandomFloats(S(rows) * S(o.index_heads), &random_);
    scores_.resize(S(rows) * S(o.positions));
    scratch_.resize(IndexScratch(o.index_heads, o.index_width));
    rows_.resize(S(rows));
    double positions = 0;
    for (size_t r = 0; r < rows_.size(); ++r) {
      rows_[r] = {q_.data() + r * S(o.index_heads) * S(o.index_width),
                  w_.data() + r * S(o.index_heads),
                  std::max(1, o.positions - rows + 1 + static_cast<int32_t>(r)),
                  scores_.data() + r * S(o.positions)};
      positions += rows_[r].count;
    }
    arguments_ = {keys_.view, o.index_heads, 0.09f, rows_.data(), rows_.size(), scratch_.data()};
    figure->kernel = "index scores";
    figure->multiply_adds = positions * o.index_heads * o.index_width;
  }

  void Run() const { IndexScores(arguments_, 0, positions_); }

 private:
  std::mt19937 random_;
  int32_t positions_;
  Pages keys_;
  std::vector<float> q_, w_, scores_, scratch_;
  std::vector<IndexRow> rows_;
  IndexScoring arguments_;
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

}  // namespace

std::vector<AttentionFigure> MeasureAttention(const AttentionBenchOptions& o) {
  std::vector<AttentionFigure> figures;
  std::vector<std::function<void()>> runs;
  const auto add = [&](const AttentionFigure& figure, KvType type, int32_t rows, auto made) {
    figures.push_back(figure);
    figures.back().kv = type;
    figures.back().rows = rows;
    runs.emplace_back([made] { made->Run(); });
  };
  for (KvType type : {KvType::kBF16, KvType::kF32}) {
    for (int32_t rows : o.rows) {
      AttentionFigure figure;
      auto first = std::make_shared<AttentionCase>(o, type, rows, false, &figure);
      add(figure, type, rows, std::move(first));
      auto listed = std::make_shared<AttentionCase>(o, type, rows, true, &figure);
      add(figure, type, rows, std::move(listed));
      auto index = std::make_shared<IndexCase>(o, type, rows, &figure);
      add(figure, type, rows, std::move(index));
    }
  }
  std::vector<std::vector<double>> shares(figures.size());
  // The first round warms up.
  for (int32_t repetition = 0; repetition <= o.repetitions; ++repetition) {
    double before = PeakRate();
    for (size_t i = 0; i < figures.size(); ++i) {
      AttentionFigure& figure = figures[i];
      const double seconds = SecondsOf(runs[i]);
      const double after = PeakRate();
      const double peak = (before + after) / 2;
      before = after;
      if (repetition == 0) continue;
      shares[i].push_back(figure.multiply_adds / seconds / peak);
      figure.seconds = repetition == 1 ? seconds : std::min(figure.seconds, seconds);
    }
  }
  for (size_t i = 0; i < figures.size(); ++i) {
    if (!shares[i].empty()) figures[i].share = Median(shares[i]);
  }
  return figures;
}

}  // namespace colibri
