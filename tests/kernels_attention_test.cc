// Attention over stored latents and index scores: against double arithmetic and the scalar
// reference, and the promise that rows beside a row, pages, cuts of heads or positions, and dense
// or listed positions never show in the bits.
#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>

#include "tests/kernel_inputs.h"

namespace colibri {
namespace {

struct Shape {
  int32_t heads, latent, rope, count;
};

// The positions a row attends to.
struct RowSet {
  int32_t count = 0;
  const std::vector<int32_t>* listed = nullptr;  // in place of the first `count`
};

// Queries of rows and the stored vectors they attend to. Values are rounded to bf16 so that both KV
// types hold them exactly.
class Attention {
 public:
  Attention(const Shape& shape, uint32_t seed, size_t rows = 1) : shape_(shape) {
    Random random(seed);
    const size_t heads = static_cast<size_t>(shape.heads);
    q_latent_ = random.Floats(rows * heads * static_cast<size_t>(shape.latent));
    q_rope_ = random.Floats(rows * heads * static_cast<size_t>(shape.rope));
    values_ = random.Floats(static_cast<size_t>(shape.count) * Width());
    for (float& v : values_) {
      uint32_t bits;
      std::memcpy(&bits, &v, 4);
      bits &= 0xFFFF0000u;
      std::memcpy(&v, &bits, 4);
    }
  }

  // What rows [first, first + sets.size()) give together, in the given cuts of heads.
  std::vector<float> Rows(KvType type, int32_t page_tokens, size_t first,
                          const std::vector<RowSet>& sets, const std::vector<int32_t>& cuts) const {
    const size_t heads = static_cast<size_t>(shape_.heads);
    const size_t q = heads * static_cast<size_t>(shape_.latent);
    const size_t q_rope = heads * static_cast<size_t>(shape_.rope);
    const StoredVectors stored(values_, static_cast<int32_t>(Width()), page_tokens, type);
    std::vector<float> out(sets.size() * q, NAN);
    std::vector<float> scratch(AttentionScratch(shape_.latent, shape_.rope), NAN);
    std::vector<AttentionRow> rows;
    for (size_t r = 0; r < sets.size(); ++r) {
      const std::vector<int32_t>* listed = sets[r].listed;
      rows.push_back({q_latent_.data() + (first + r) * q, q_rope_.data() + (first + r) * q_rope,
                      listed == nullptr ? nullptr : listed->data(),
                      listed == nullptr ? sets[r].count : static_cast<int32_t>(listed->size()),
                      out.data() + r * q});
    }
    const LatentAttention a{stored.view, shape_.latent, shape_.rope,   0.25f,
                            rows.data(), rows.size(),   scratch.data()};
    for (size_t c = 0; c + 1 < cuts.size(); ++c) AttendLatents(a, cuts[c], cuts[c + 1]);
    return out;
  }
  std::vector<float> Run(KvType type, int32_t page_tokens, const std::vector<int32_t>* positions,
                         const std::vector<int32_t>& cuts) const {
    return Rows(type, page_tokens, 0, {{shape_.count, positions}}, cuts);
  }
  std::vector<float> Run(KvType type, int32_t page_tokens) const {
    return Run(type, page_tokens, nullptr, {0, shape_.heads});
  }

  std::vector<double> Exact(const std::vector<int32_t>& positions) const {
    const size_t latent = static_cast<size_t>(shape_.latent);
    std::vector<double> out(static_cast<size_t>(shape_.heads) * latent, 0.0);
    for (size_t h = 0; h < static_cast<size_t>(shape_.heads); ++h) {
      std::vector<double> weights;
      for (int32_t p : positions) weights.push_back(std::exp(ExactScore(h, p)));
      const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
      for (size_t k = 0; k < positions.size(); ++k) {
        for (size_t i = 0; i < latent; ++i) {
          out[h * latent + i] += weights[k] / sum * double{Vector(positions[k])[i]};
        }
      }
    }
    return out;
  }

  std::vector<float>& q_latent() { return q_latent_; }
  std::vector<float>& values() { return values_; }
  size_t Width() const { return static_cast<size_t>(shape_.latent + shape_.rope); }

 private:
  const float* Vector(int32_t p) const { return values_.data() + static_cast<size_t>(p) * Width(); }

  double ExactScore(size_t h, int32_t p) const {
    const size_t latent = static_cast<size_t>(shape_.latent);
    const size_t rope = static_cast<size_t>(shape_.rope);
    double dot = 0;
    for (size_t i = 0; i < latent; ++i) dot += double{q_latent_[h * latent + i]} * Vector(p)[i];
    for (size_t i = 0; i < rope; ++i) dot += double{q_rope_[h * rope + i]} * Vector(p)[latent + i];
    return dot * 0.25;
  }

  Shape shape_;
  std::vector<float> q_latent_, q_rope_, values_;
};

std::vector<int32_t> FirstPositions(int32_t count) {
  std::vector<int32_t> positions(static_cast<size_t>(count));
  std::iota(positions.begin(), positions.end(), 0);
  return positions;
}

double Distance(const std::vector<float>& a, const std::vector<double>& b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    // A comparison with NaN is false: written so that it counts as far away.
    const double distance = std::abs(double{a[i]} - b[i]);
    worst = distance <= worst ? worst : distance;
  }
  return worst;
}

// Scores below 0.25 * width with width / 16 roundings a lane move a weight by that much relative
// to itself; the sum over positions adds count roundings of a value below 1.
double Tolerance(const Shape& s) {
  const double width = s.latent + s.rope;
  return kEpsilon * (0.25 * width * (width / 16 + 6) + s.count + 16);
}

TEST_CASE("attention agrees with double arithmetic for every width and count") {
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    for (const Shape& shape : std::vector<Shape>{{1, 1, 1, 1},
                                                 {3, 7, 2, 5},
                                                 {5, 16, 4, 63},
                                                 {4, 17, 16, 64},
                                                 {6, 64, 18, 65},
                                                 {2, 33, 0, 130},
                                                 {3, 31, 8, 200},
                                                 {9, 130, 16, 66}}) {
      CAPTURE(shape.latent);
      CAPTURE(shape.count);
      const Attention attention(shape, 1);
      const std::vector<double> exact = attention.Exact(FirstPositions(shape.count));
      for (KvType type : {KvType::kF32, KvType::kBF16}) {
        CHECK(Distance(attention.Run(type, 4), exact) <= Tolerance(shape));
      }
    }
  });
}

TEST_CASE("attention has the bits of the scalar reference on targets that fuse multiply and add") {
  // Lists that fill tiles with one position a block, with whole blocks, and with both.
  std::vector<int32_t> sparse, mixed;
  for (int32_t p = 3; p < 700; p += 37) sparse.push_back(p);
  for (int32_t p = 0; p < 700; p += p < 130 || p > 500 ? 1 : 11) mixed.push_back(p);
  for (const Shape& shape :
       std::vector<Shape>{{1, 1, 1, 700}, {9, 512, 64, 700}, {21, 33, 0, 700}, {3, 100, 18, 700}}) {
    CAPTURE(shape.latent);
    const Attention attention(shape, 2, 4);
    const std::vector<RowSet> sets{{700, nullptr}, {0, &sparse}, {129, nullptr}, {0, &mixed}};
    ForceSimdTarget("SCALAR");
    const std::vector<float> reference =
        attention.Rows(KvType::kBF16, 32, 0, sets, {0, shape.heads});
    ForEachTarget([&](const std::string& target) {
      CAPTURE(target);
      const std::vector<float> out = attention.Rows(KvType::kBF16, 32, 0, sets, {0, shape.heads});
      if (FusesMultiplyAdd(target)) CHECK(SameBits(out, reference));
      CHECK(Distance(out, {reference.begin(), reference.end()}) <= Tolerance(shape));
    });
  }
}

TEST_CASE("rows attended to together have the bits they have alone") {
  const std::vector<int32_t> listed{0, 3, 64, 65, 66, 127, 139};
  const int32_t heads = 19;
  const Attention attention({heads, 18, 4, 140}, 9, 64);
  ForEachTarget([&](const std::string& target) {
    CAPTURE(target);
    const std::vector<float> alone = [&] {
      std::vector<float> rows;
      for (size_t r = 0; r < 64; ++r) {
        const RowSet set{77 + static_cast<int32_t>(r), r % 7 == 4 ? &listed : nullptr};
        const std::vector<float> row = attention.Rows(KvType::kF32, 16, r, {set}, {0, heads});
        rows.insert(rows.end(), row.begin(), row.end());
      }
      return rows;
    }();
    const size_t width = alone.size() / 64;
    for (size_t count : {1u, 2u, 3u, 5u, 8u, 64u}) {
      CAPTURE(count);
      // From the last rows down: causal counts differ, blocks end at different rows.
      std::vector<RowSet> sets;
      const size_t first = 64 - count;
      for (size_t r = first; r < 64; ++r) {
        sets.push_back({77 + static_cast<int32_t>(r), r % 7 == 4 ? &listed : nullptr});
      }
      const std::vector<float> expected(alone.begin() + static_cast<std::ptrdiff_t>(first * width),
                                        alone.end());
      const std::vector<int32_t> whole{0, heads}, cut{0, 1, 16, 18, heads};
      CHECK(SameBits(attention.Rows(KvType::kBF16, 4, first, sets, whole), expected));
      CHECK(SameBits(attention.Rows(KvType::kF32, 16, first, sets, cut), expected));
      CHECK(SameBits(attention.Rows(KvType::kBF16, 32, first, sets, cut), expected));
    }
  });
}

TEST_CASE("a row beside longer ones never sees what is stored after it") {
  const Attention clean({5, 24, 4, 150}, 10, 3);
  Attention poisoned = clean;
  std::fill(poisoned.values().begin() + static_cast<std::ptrdiff_t>(70 * clean.Width()),
            poisoned.values().end(), NAN);
  ForEachTarget([&](const std::string& target) {
    CAPTURE(target);
    const std::vector<RowSet> sets{{69, nullptr}, {70, nullptr}, {150, nullptr}};
    std::vector<float> out = poisoned.Rows(KvType::kBF16, 16, 0, sets, {0, 5});
    std::vector<float> expected = clean.Rows(KvType::kBF16, 16, 0, sets, {0, 5});
    CHECK(std::isnan(out.back()));
    out.resize(2 * 5 * 24);
    expected.resize(2 * 5 * 24);
    CHECK(SameBits(out, expected));
  });
}

TEST_CASE("page sizes, stored types and cuts of heads leave the bits of attention alone") {
  const Attention attention({70, 40, 8, 150}, 3);
  ForEachTarget([&](const std::string& target) {
    CAPTURE(target);
    const std::vector<float> all = attention.Run(KvType::kF32, 32);
    for (KvType type : {KvType::kF32, KvType::kBF16}) {
      for (int32_t page : {1, 4, 7, 16, 32, 64, 256}) {
        CHECK(SameBits(attention.Run(type, page), all));
      }
    }
    for (const auto& cuts : std::vector<std::vector<int32_t>>{
             {0, 1, 70}, {0, 3, 5, 10, 69, 70}, {0, 0, 64, 70}, {0, 35, 70}}) {
      CHECK(SameBits(attention.Run(KvType::kBF16, 16, nullptr, cuts), all));
    }
  });
}

TEST_CASE("listing every position gives the bits of dense attention") {
  const Attention attention({5, 40, 8, 150}, 4);
  const std::vector<int32_t> all = FirstPositions(150);
  ForEachTarget([&](const std::string& target) {
    CAPTURE(target);
    CHECK(
        SameBits(attention.Run(KvType::kBF16, 16, &all, {0, 5}), attention.Run(KvType::kBF16, 16)));
  });
}

TEST_CASE("positions that are not listed are never touched") {
  const std::vector<int32_t> listed{0, 3, 64, 65, 66, 127, 149};
  Attention attention({5, 40, 8, 150}, 5);
  const std::vector<double> exact = attention.Exact(listed);
  Attention poisoned = attention;
  for (int32_t p = 0; p < 150; ++p) {
    if (std::find(listed.begin(), listed.end(), p) != listed.end()) continue;
    for (size_t i = 0; i < poisoned.Width(); ++i) {
      poisoned.values()[static_cast<size_t>(p) * poisoned.Width() + i] = NAN;
    }
  }
  ForEachTarget([&](const std::string& target) {
    CAPTURE(target);
    for (int32_t page : {4, 16, 32}) {
      const std::vector<float> out = attention.Run(KvType::kBF16, page, &listed, {0, 5});
      CHECK(Distance(out, exact) <= Tolerance({5, 40, 8, 150}));
      CHECK(SameBits(poisoned.Run(KvType::kBF16, page, &listed, {0, 5}), out));
    }
  });
}

TEST_CASE("attention over one position is its latent, over none zeros") {
  const Attention attention({3, 20, 4, 70}, 6);
  ForEachTarget([&](const std::string& target) {
    CAPTURE(target);
    const std::vector<int32_t> one{69}, none;
    const std::vector<float> out = attention.Run(KvType::kF32, 16, &one, {0, 3});
    CHECK(Distance(out, attention.Exact(one)) == 0);
    CHECK(attention.Run(KvType::kF32, 16, &none, {0, 3}) == std::vector<float>(60, 0.0f));
  });
}

TEST_CASE("scores far apart neither overflow nor lose the largest, in whichever block it is") {
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    for (int32_t largest : {0, 70, 149}) {
      Attention attention({2, 20, 4, 150}, 7);
      for (float& q : attention.q_latent()) q = 500.0f;
      std::fill(attention.values().begin(), attention.values().end(), -1.0f);
      float* top = attention.values().data() + static_cast<size_t>(largest) * attention.Width();
      std::fill(top, top + 20, 2.0f);
      CHECK(attention.Run(KvType::kBF16, 16) == std::vector<float>(40, 2.0f));
    }
  });
}

TEST_CASE("a NaN in a query comes out of its head and of no other") {
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    Attention attention({6, 20, 4, 70}, 8);
    const std::vector<float> clean = attention.Run(KvType::kBF16, 16);
    attention.q_latent()[2 * 20 + 3] = NAN;
    const std::vector<float> out = attention.Run(KvType::kBF16, 16);
    for (size_t i = 0; i < out.size(); ++i) {
      if (i / 20 == 2) {
        CHECK(std::isnan(out[i]));
      } else {
        CHECK(out[i] == clean[i]);
      }
    }
  });
}

// Scores of positions [first, last); those before `first` are left out.
std::vector<float> Scores(const StoredVectors& keys, int32_t heads, const std::vector<float>& q,
                          const std::vector<float>& w, int32_t first, int32_t last) {
  std::vector<float> scores(static_cast<size_t>(last), NAN);
  std::vector<float> scratch(IndexScratch(heads, keys.view.width), NAN);
  const IndexRow row{q.data(), w.data(), last, scores.data()};
  IndexScores({keys.view, heads, 0.125f, &row, 1, scratch.data()}, first, last);
  return {scores.begin() + first, scores.end()};
}

TEST_CASE("index scores agree with double arithmetic and, fused, with the reference's bits") {
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    for (const auto& [heads, width] :
         std::vector<std::pair<int32_t, int32_t>>{{1, 1}, {3, 15}, {4, 16}, {5, 33}, {32, 128}}) {
      const size_t n = static_cast<size_t>(width);
      CAPTURE(n);
      const std::vector<float> q = Random(1).Floats(static_cast<size_t>(heads) * n);
      const std::vector<float> w = Random(2).Floats(static_cast<size_t>(heads));
      const std::vector<float> values = Random(3).Floats(131 * n);
      const StoredVectors keys(values, width, 16, KvType::kF32);
      const std::vector<float> scores = Scores(keys, heads, q, w, 0, 131);
      for (size_t p = 0; p < 131; ++p) {
        double exact = 0;
        for (size_t h = 0; h < static_cast<size_t>(heads); ++h) {
          double dot = 0;
          for (size_t i = 0; i < n; ++i) dot += double{q[h * n + i]} * double{values[p * n + i]};
          exact += w[h] * std::max(0.0, dot * 0.125);
        }
        // Each head adds less than width / 8, rounded width / 16 + 6 times, then heads times.
        CHECK(std::abs(scores[p] - exact) <=
              kEpsilon * heads * width * 0.125 * (width / 16 + 6 + heads));
      }
      if (!FusesMultiplyAdd(target)) continue;
      std::vector<float> reference(131);
      const IndexRow row{q.data(), w.data(), 131, reference.data()};
      scalar::IndexScores({keys.view, heads, 0.125f, &row, 1, nullptr}, 0, 131);
      CHECK(SameBits(scores, reference));
    }
  });
}

TEST_CASE("an index score depends on its position alone, not on the range or the page") {
  const std::vector<float> q = Random(1).Floats(5 * 40), w = Random(2).Floats(5);
  const std::vector<float> values = Random(3).Floats(150 * 40);
  ForEachTarget([&](const std::string& target) {
    CAPTURE(target);
    for (KvType type : {KvType::kF32, KvType::kBF16}) {
      const StoredVectors keys(values, 40, 32, type);
      const std::vector<float> all = Scores(keys, 5, q, w, 0, 150);
      for (int32_t page : {4, 16, 32}) {
        const StoredVectors paged(values, 40, page, type);
        for (const auto& [first, last] : std::vector<std::pair<int32_t, int32_t>>{
                 {0, 1}, {1, 150}, {63, 66}, {7, 130}, {149, 150}, {20, 20}}) {
          const std::vector<float> part = Scores(paged, 5, q, w, first, last);
          CHECK(std::equal(part.begin(), part.end(), all.begin() + first));
        }
      }
    }
  });
}

TEST_CASE("rows scored together have the index scores they have alone and no others") {
  const int32_t heads = 6, width = 20;
  const size_t query = static_cast<size_t>(heads * width);
  const std::vector<float> q = Random(1).Floats(64 * query), w = Random(2).Floats(64 * 6);
  const std::vector<float> values = Random(3).Floats(200 * static_cast<size_t>(width));
  ForEachTarget([&](const std::string& target) {
    CAPTURE(target);
    const StoredVectors keys(values, width, 16, KvType::kBF16);
    std::vector<std::vector<float>> alone;
    for (size_t r = 0; r < 64; ++r) {
      const auto at = static_cast<std::ptrdiff_t>(r);
      alone.push_back(Scores(keys, heads, {q.begin() + at * heads * width, q.end()},
                             {w.begin() + at * heads, w.end()}, 0, 125 + static_cast<int32_t>(r)));
    }
    for (size_t count : {1u, 2u, 3u, 5u, 8u, 64u}) {
      std::vector<float> scores(count * 200, -7.0f), scratch(IndexScratch(heads, width), NAN);
      std::vector<IndexRow> rows;
      for (size_t r = 0; r < count; ++r) {
        rows.push_back({q.data() + r * query, w.data() + r * 6, 125 + static_cast<int32_t>(r),
                        scores.data() + r * 200});
      }
      const IndexScoring a{keys.view, heads, 0.125f, rows.data(), count, scratch.data()};
      for (int32_t first : {0, 64, 128}) IndexScores(a, first, first + 64);
      IndexScores(a, 192, 200);
      for (size_t r = 0; r < count; ++r) {
        std::vector<float> expected = alone[r];
        expected.resize(200, -7.0f);
        CHECK(std::equal(expected.begin(), expected.end(), scores.data() + r * 200));
      }
    }
  });
}

TEST_CASE("a negative head product counts as zero and a NaN is not hidden") {
  ForEachTarget([](const std::string& target) {
    CAPTURE(target);
    const StoredVectors keys({1.0f, -1.0f, NAN}, 1, 4, KvType::kF32);
    const std::vector<float> scores = Scores(keys, 2, {8.0f, 16.0f}, {3.0f, -5.0f}, 0, 3);
    CHECK(scores[0] == 3.0f * 1.0f - 5.0f * 2.0f);
    CHECK(scores[1] == 0.0f);
    CHECK(std::isnan(scores[2]));
  });
}

}  // namespace
}  // namespace colibri
