#include "runtime/sampler.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "runtime/tokenizer.h"

using colibri::DrawUniform;
using colibri::LogprobOf;
using colibri::PickToken;
using colibri::Sample;
using colibri::SampleScratch;
using colibri::Sampling;
using colibri::VocabMask;

namespace {

VocabMask All(size_t size) { return VocabMask(std::vector<uint8_t>(size, 1)); }

// Logits whose softmax at temperature 1 is `p`.
std::vector<float> LogitsOf(const std::vector<double>& p) {
  std::vector<float> logits;
  for (const double x : p) logits.push_back(static_cast<float>(std::log(x)));
  return logits;
}

// The exact share of each token: draws at the middles of `steps` equal pieces of [0, 1).
std::map<int32_t, double> Shares(const std::vector<float>& logits, const Sampling& sampling,
                                 const VocabMask& mask, int steps = 4000) {
  SampleScratch scratch;
  std::map<int32_t, double> shares;
  for (int i = 0; i < steps; ++i) {
    shares[PickToken(logits, sampling, (i + 0.5) / steps, mask, &scratch)] += 1.0 / steps;
  }
  return shares;
}

// PickToken as its contract reads: the whole list sorted.
int32_t PickFromSorted(const std::vector<float>& logits, const Sampling& sampling, double u,
                       const std::vector<uint8_t>& allowed) {
  std::vector<size_t> ids;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (allowed[i] != 0) ids.push_back(i);
  }
  const float highest = logits[*std::max_element(
      ids.begin(), ids.end(), [&](size_t a, size_t b) { return logits[a] < logits[b]; })];
  const auto weight = [&](size_t id) {
    return std::exp((static_cast<double>(logits[id]) - static_cast<double>(highest)) /
                    static_cast<double>(sampling.temperature));
  };
  double total = 0;
  for (const size_t id : ids) total += weight(id);
  std::stable_sort(ids.begin(), ids.end(),
                   [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  const bool whole = sampling.top_p >= 1 && sampling.min_p <= 0 &&
                     (sampling.top_k == 0 || static_cast<size_t>(sampling.top_k) >= ids.size());
  double sum = 0;
  size_t kept = 0;
  while (kept < ids.size() && (sampling.top_k == 0 || kept < size_t(sampling.top_k)) &&
         (kept == 0 || ((sampling.top_p >= 1 || sum < double{sampling.top_p} * total) &&
                        weight(ids[kept]) >= static_cast<double>(sampling.min_p)))) {
    sum += weight(ids[kept++]);
  }
  const double end = u * (whole ? total : sum);
  double running = 0;
  for (size_t k = 0; k < kept; ++k) {
    running += weight(ids[k]);
    if (running > end) return static_cast<int32_t>(ids[k]);
  }
  return static_cast<int32_t>(ids[kept - 1]);
}

}  // namespace

TEST_CASE("a draw equals the draw from the whole sorted list, for every kind of logits") {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1);
  const std::vector<std::function<float(size_t)>> kinds = {
      [&](size_t) { return 2.5f * normal(random); },
      [&](size_t) { return 0.01f * normal(random); },
      [](size_t) { return 3.0f; },
      [&](size_t) { return static_cast<float>(random() % 3) - 1.0f; },
      [&](size_t) { return random() % 2 == 0 ? 0.0f : -0.0f; },
      [&](size_t i) { return i % 97 == 5 ? 20 + normal(random) : normal(random); },
      [&](size_t i) { return i % 50 == 3 ? -1e30f : normal(random); },
      [&](size_t i) { return i % 50 == 3 ? 3e38f : -3e38f * std::abs(std::sin(float(i))); },
      [&](size_t) { return 1e-40f * static_cast<float>(random() % 5); },
      [](size_t i) { return -0.001f * static_cast<float>(i); },
  };
  std::vector<Sampling> settings;
  for (const float temperature : {1.0f, 0.3f, 20.0f, 1e-30f}) {
    Sampling s;
    s.temperature = temperature;
    settings.push_back(s);
    s.top_p = 0.9f;
    settings.push_back(s);
    s.top_k = 7;
    s.min_p = 0.05f;
    settings.push_back(s);
    s.top_p = 1;
    s.top_k = 900;
    s.min_p = 0;
    settings.push_back(s);
  }
  SampleScratch scratch;  // one for all: what was there before must not matter
  for (const size_t size : {1u, 2u, 600u, 5000u}) {
    for (const auto& kind : kinds) {
      std::vector<float> logits(size);
      for (size_t i = 0; i < size; ++i) logits[i] = kind(i);
      std::vector<uint8_t> allowed(size);
      for (uint8_t& a : allowed) a = random() % 8 != 0 ? 1 : 0;
      allowed[random() % size] = 1;
      const VocabMask mask(allowed);
      for (const Sampling& sampling : settings) {
        for (const double u : {0.0, 1 - 0x1p-53, 0x1p-32 * static_cast<double>(random())}) {
          REQUIRE(PickToken(logits, sampling, u, mask, &scratch) ==
                  PickFromSorted(logits, sampling, u, allowed));
        }
      }
    }
  }
}

TEST_CASE("draws follow the distribution") {
  const auto logits = LogitsOf({0.1, 0.4, 0.2, 0.3});
  const auto shares = Shares(logits, Sampling{}, All(4));
  CHECK(shares.at(0) == doctest::Approx(0.1).epsilon(0.001));
  CHECK(shares.at(1) == doctest::Approx(0.4).epsilon(0.001));
  CHECK(shares.at(2) == doctest::Approx(0.2).epsilon(0.001));
  CHECK(shares.at(3) == doctest::Approx(0.3).epsilon(0.001));
}

TEST_CASE("the inverse CDF runs from the best token down") {
  const auto logits = LogitsOf({0.1, 0.4, 0.2, 0.3});
  SampleScratch scratch;
  const VocabMask mask = All(4);
  CHECK(PickToken(logits, Sampling{}, 0.0, mask, &scratch) == 1);
  CHECK(PickToken(logits, Sampling{}, 0.39, mask, &scratch) == 1);
  CHECK(PickToken(logits, Sampling{}, 0.41, mask, &scratch) == 3);
  CHECK(PickToken(logits, Sampling{}, 0.69, mask, &scratch) == 3);
  CHECK(PickToken(logits, Sampling{}, 0.71, mask, &scratch) == 2);
  CHECK(PickToken(logits, Sampling{}, 0.91, mask, &scratch) == 0);
  CHECK(PickToken(logits, Sampling{}, 1 - 0x1p-53, mask, &scratch) == 0);
}

TEST_CASE("the last number below 1 still draws a token when rounding eats the tail") {
  // 0.1 has no exact double: ten of them in another order do not sum to Z exactly.
  std::vector<float> logits(1000);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = 0.001f * static_cast<float>(i % 37);
  SampleScratch scratch;
  Sampling narrow;
  narrow.top_k = 999;
  CHECK(PickToken(logits, Sampling{}, 1 - 0x1p-53, All(1000), &scratch) >= 0);
  CHECK(PickToken(logits, narrow, 1 - 0x1p-53, All(1000), &scratch) >= 0);
}

TEST_CASE("temperature divides the logits before the other steps") {
  Sampling sampling;
  sampling.temperature = 0.5f;
  const auto shares = Shares(LogitsOf({0.2, 0.4}), sampling, All(2));
  CHECK(shares.at(0) == doctest::Approx(0.2).epsilon(0.002));
  CHECK(shares.at(1) == doctest::Approx(0.8).epsilon(0.002));
  // p = 0.2, 0.8 by now: 0.3 of the best is 0.24, which drops token 0 (at temperature 1 it stays).
  sampling.min_p = 0.3f;
  CHECK(Shares(LogitsOf({0.2, 0.4}), sampling, All(2)).size() == 1);
  sampling.temperature = 1;
  CHECK(Shares(LogitsOf({0.2, 0.4}), sampling, All(2)).size() == 2);
}

TEST_CASE("temperature 0 takes the highest logit and of equal ones the lowest id") {
  Sampling greedy;
  greedy.temperature = 0;
  SampleScratch scratch;
  const std::vector<float> logits = {-1.0f, 3.0f, 2.0f, 3.0f};
  CHECK(PickToken(logits, greedy, 0.99, All(4), &scratch) == 1);
  CHECK(PickToken(std::vector<float>{-0.0f, 0.0f}, greedy, 0, All(2), &scratch) == 0);
  CHECK(PickToken(std::vector<float>{0.0f, -0.0f}, greedy, 0, All(2), &scratch) == 0);
}

TEST_CASE("a tiny temperature is greedy without overflow") {
  Sampling cold;
  cold.temperature = std::numeric_limits<float>::denorm_min();
  SampleScratch scratch;
  CHECK(PickToken(std::vector<float>{-30000.0f, 5.0f, 4.999f}, cold, 0.999, All(3), &scratch) == 1);
}

TEST_CASE("top-k keeps the first k, equal logits by lower id") {
  Sampling sampling;
  sampling.top_k = 2;
  const auto shares = Shares({1.0f, 2.0f, 1.0f, 1.0f}, sampling, All(4));
  CHECK(shares.size() == 2);
  const double e = std::exp(1.0);
  CHECK(shares.at(1) == doctest::Approx(e / (e + 1)).epsilon(0.002));
  CHECK(shares.at(0) == doctest::Approx(1 / (e + 1)).epsilon(0.002));
  sampling.top_k = 1;
  CHECK(Shares({1.0f, 2.0f, 1.0f, 1.0f}, sampling, All(4)).size() == 1);
}

TEST_CASE("top-p keeps the shortest prefix that reaches its share") {
  const auto logits = LogitsOf({0.125, 0.5, 0.125, 0.25});
  Sampling sampling;
  sampling.top_p = 0.7f;
  auto shares = Shares(logits, sampling, All(4));
  CHECK(shares.size() == 2);
  CHECK(shares.at(1) == doctest::Approx(2.0 / 3).epsilon(0.002));
  CHECK(shares.at(3) == doctest::Approx(1.0 / 3).epsilon(0.002));
  sampling.top_p = 0.8f;
  shares = Shares(logits, sampling, All(4));
  CHECK(shares.size() == 3);
  CHECK(shares.count(0) == 1);  // the tie of 0 and 2 goes to the lower id
  sampling.top_p = 1e-30f;
  CHECK(Shares(logits, sampling, All(4)).size() == 1);
}

TEST_CASE("a prefix that reaches its share exactly is not lengthened") {
  // Equal logits weigh 1 each, so the sums are exact: half of 4 is reached by 2.
  Sampling sampling;
  sampling.top_p = 0.5f;
  CHECK(Shares({3.0f, 3.0f, 3.0f, 3.0f}, sampling, All(4)).size() == 2);
}

TEST_CASE("top-p is a share of all allowed tokens, also after top-k") {
  const auto logits = LogitsOf({0.4, 0.3, 0.2, 0.1});
  Sampling sampling;
  sampling.top_k = 3;
  sampling.top_p = 0.72f;  // of everything: three tokens; of the best three: two
  CHECK(Shares(logits, sampling, All(4)).size() == 3);
}

TEST_CASE("min-p keeps what weighs enough beside the best token") {
  const auto logits = LogitsOf({0.4, 0.3, 0.2, 0.1});
  Sampling sampling;
  sampling.min_p = 0.4f;  // 0.16 and more
  CHECK(Shares(logits, sampling, All(4)).size() == 3);
  sampling.min_p = 1;
  CHECK(Shares(logits, sampling, All(4)).size() == 1);
}

TEST_CASE("masked ids are never drawn and do not weigh") {
  const VocabMask mask(std::vector<uint8_t>{1, 0, 1, 0});
  const std::vector<float> logits = {0.0f, 50.0f, 0.0f, std::numeric_limits<float>::quiet_NaN()};
  const auto shares = Shares(logits, Sampling{}, mask);
  CHECK(shares.size() == 2);
  CHECK(shares.at(0) == doctest::Approx(0.5).epsilon(0.001));
  CHECK(shares.at(2) == doctest::Approx(0.5).epsilon(0.001));
  Sampling greedy;
  greedy.temperature = 0;
  SampleScratch scratch;
  CHECK(PickToken(logits, greedy, 0, mask, &scratch) == 0);
}

TEST_CASE("a logit that is not finite gives no token") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  SampleScratch scratch;
  Sampling greedy;
  greedy.temperature = 0;
  for (const Sampling& sampling : {Sampling{}, greedy}) {
    CHECK(PickToken(std::vector<float>{nan, nan}, sampling, 0.5, All(2), &scratch) == -1);
    CHECK(PickToken(std::vector<float>{1.0f, nan}, sampling, 0.5, All(2), &scratch) == -1);
    CHECK(PickToken(std::vector<float>{inf, 1.0f}, sampling, 0.5, All(2), &scratch) == -1);
    CHECK(PickToken(std::vector<float>{1.0f}, sampling, 0.5, VocabMask({0}), &scratch) == -1);
  }
}

TEST_CASE("a draw depends on seed, custom_id, choice and position and on nothing else") {
  const double u = DrawUniform(7, "line-3", 1, 12);
  CHECK(u == DrawUniform(7, "line-3", 1, 12));
  CHECK(u != DrawUniform(8, "line-3", 1, 12));
  CHECK(u != DrawUniform(7, "line-4", 1, 12));
  CHECK(u != DrawUniform(7, "line-3", 2, 12));
  CHECK(u != DrawUniform(7, "line-3", 1, 13));
  CHECK(DrawUniform(0, "", 1, 0) != DrawUniform(0, "", 0, 1));
}

TEST_CASE("the bytes behind a draw are fixed: a change would alter every sampled answer") {
  // Computed by the one-shot XXH3_64bits of libxxhash over bytes packed by hand as documented.
  CHECK(DrawUniform(0, "a", 0, 0) == 0x1.7eef0e8631cd8p-3);
  CHECK(DrawUniform(~uint64_t{0}, "line-12", 3, 1000) == 0x1.a3bba49437aabp-1);
}

TEST_CASE("uniform numbers fill 0 to 1 evenly") {
  int tenths[10] = {};
  double sum = 0;
  for (int i = 0; i < 20000; ++i) {
    const double u = DrawUniform(0, "even", i % 3, i);
    REQUIRE(u >= 0);
    REQUIRE(u < 1);
    ++tenths[static_cast<int>(u * 10)];
    sum += u;
  }
  CHECK(sum / 20000 == doctest::Approx(0.5).epsilon(0.02));
  // 2000 each, standard deviation 42.
  for (const int count : tenths) CHECK(std::abs(count - 2000) < 210);
}

TEST_CASE("sampled shares of many lines approach the probabilities") {
  const auto logits = LogitsOf({0.1, 0.4, 0.2, 0.3});
  SampleScratch scratch;
  int count[4] = {};
  const VocabMask mask = All(4);
  for (int i = 0; i < 20000; ++i) {
    ++count[Sample(logits, Sampling{}, "line-" + std::to_string(i), 0, 5, mask, &scratch)];
  }
  CHECK(std::abs(count[0] - 2000) < 215);  // five standard deviations
  CHECK(std::abs(count[1] - 8000) < 350);
  CHECK(std::abs(count[2] - 4000) < 285);
  CHECK(std::abs(count[3] - 6000) < 325);
}

TEST_CASE("what was drawn before does not change a draw") {
  const auto a = LogitsOf({0.1, 0.4, 0.2, 0.3});
  const std::vector<float> b(500, 1.0f);
  SampleScratch used, fresh;
  const VocabMask four = All(4), many = All(500);
  for (int i = 0; i < 50; ++i) {
    Sample(b, Sampling{}, "other", 0, i, many, &used);
    SampleScratch clean;
    CHECK(Sample(a, Sampling{}, "x", 0, i, four, &used) ==
          Sample(a, Sampling{}, "x", 0, i, four, &clean));
  }
}

TEST_CASE("log probabilities are of the raw logits over the allowed ids") {
  auto logits = LogitsOf({0.1, 0.4, 0.2, 0.3});
  for (float& logit : logits) logit += 20.0f;
  const auto all = LogprobOf(logits, 2, 3, All(4));
  CHECK(all.id == 2);
  CHECK(all.logprob == doctest::Approx(std::log(0.2)));
  REQUIRE(all.top.size() == 3);
  CHECK(all.top[0].first == 1);
  CHECK(all.top[0].second == doctest::Approx(std::log(0.4)));
  CHECK(all.top[1].first == 3);
  CHECK(all.top[2].first == 2);
  CHECK(all.top[2].second == all.logprob);

  const auto masked = LogprobOf(logits, 2, 20, VocabMask({1, 0, 1, 0}));
  CHECK(masked.logprob == doctest::Approx(std::log(2.0 / 3)));
  REQUIRE(masked.top.size() == 2);
  CHECK(masked.top[0].first == 2);
  CHECK(LogprobOf(logits, 2, 0, All(4)).top.empty());
}

TEST_CASE("equal log probabilities are listed by lower id") {
  const auto top = LogprobOf(std::vector<float>{1, 2, 1, 2, 2}, 0, 4, All(5)).top;
  REQUIRE(top.size() == 4);
  CHECK(top[0].first == 1);
  CHECK(top[1].first == 3);
  CHECK(top[2].first == 4);
  CHECK(top[3].first == 0);
}

TEST_CASE("the mask of a tokenizer leaves out the padded ids") {
  const auto tokenizer =
      colibri::Tokenizer::Load(COLIBRI_SOURCE_DIR "/tests/fixtures/tokenizer/tokenizer.json");
  const VocabMask mask(tokenizer, tokenizer.Size() + 24);
  CHECK(mask.Size() == static_cast<size_t>(tokenizer.Size()) + 24);
  CHECK(mask.Allows(0));
  CHECK(mask.Allows(static_cast<size_t>(tokenizer.Size()) - 1));
  CHECK_FALSE(mask.Allows(static_cast<size_t>(tokenizer.Size())));
}
