// The plain scalar reference of every kernel: what the SIMD ones are tested against, and what runs
// where Highway offers no vectors. Written to be checked by eye; speed is not its purpose.
// Threads: any; no state.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/kernels.h"

namespace colibri::scalar {
namespace {

// memcpy: neither weights nor stored vectors need be aligned.
template <typename T>
T LoadAt(const std::byte* base, size_t index) {
  T value;
  std::memcpy(&value, base + index * sizeof(T), sizeof(T));
  return value;
}

float FloatFromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float FromBF16(uint16_t h) { return FloatFromBits(static_cast<uint32_t>(h) << 16); }

float FromF16(uint16_t h) {
  const int exponent = (h >> 10) & 31;
  const int mantissa = h & 1023;
  float magnitude;
  if (exponent == 31) {
    magnitude = mantissa == 0 ? std::numeric_limits<float>::infinity()
                              : std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  }
  return std::copysign(magnitude, (h & 0x8000) != 0 ? -1.0f : 1.0f);
}

uint16_t ToBF16(float x) {
  const uint32_t bits = BitsOf(x);
  // A NaN whose payload sits in the lower half would become infinity: make it quiet instead.
  if (std::isnan(x)) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

float WeightAt(const PackedMatrix& w, size_t row, size_t col) {
  const std::byte* data = w.data + row * RowBytes(w.format, w.cols);
  const size_t scale_row = row * static_cast<size_t>(ScalesPerRow(w.format, w.cols, w.group));
  switch (w.format) {
    case WeightFormat::kF32:
      return LoadAt<float>(data, col);
    case WeightFormat::kBF16:
      return FromBF16(LoadAt<uint16_t>(data, col));
    case WeightFormat::kF16:
      return FromF16(LoadAt<uint16_t>(data, col));
    case WeightFormat::kInt8Row:
      return static_cast<float>(LoadAt<int8_t>(data, col)) * LoadAt<float>(w.scales, scale_row);
    case WeightFormat::kInt4Row:
    case WeightFormat::kInt4Grouped: {
      const size_t group =
          w.format == WeightFormat::kInt4Row ? 0 : col / static_cast<size_t>(w.group);
      const int byte = LoadAt<uint8_t>(data, col / 2);
      const int nibble = col % 2 == 0 ? byte & 15 : byte >> 4;
      return static_cast<float>(nibble - 8) * LoadAt<float>(w.scales, scale_row + group);
    }
  }
  return 0;
}

// A sum of products in the order every SIMD target keeps: sixteen lanes taken in turn, each a chain
// of fused multiply-adds, added up pairwise at the end.
class LaneSum {
 public:
  void Add(float a, float b) {
    lanes_[next_] = std::fma(a, b, lanes_[next_]);
    next_ = (next_ + 1) % 16;
  }
  // Goes on with lane 0: what follows is another vector.
  void StartVector() { next_ = 0; }
  float Total() const {
    float blocks[4];
    for (size_t k = 0; k < 4; ++k) {
      const float* lane = lanes_ + 4 * k;
      blocks[k] = (lane[0] + lane[2]) + (lane[1] + lane[3]);
    }
    return (blocks[0] + blocks[2]) + (blocks[1] + blocks[3]);
  }

 private:
  float lanes_[16] = {};
  size_t next_ = 0;
};

const std::byte* StoredVector(const KvView& kv, int64_t position) {
  return kv.pages[position / kv.page_tokens] + static_cast<size_t>(position % kv.page_tokens) *
                                                   static_cast<size_t>(kv.width) * KvBytes(kv.type);
}

float StoredValue(const KvView& kv, const std::byte* vector, size_t i) {
  return kv.type == KvType::kF32 ? LoadAt<float>(vector, i) : FromBF16(LoadAt<uint16_t>(vector, i));
}

// exp of a number that is not above 0, for softmax weights, within 1 ulp; NaN stays NaN. Our own,
// so that bits depend neither on the C library nor on Highway: n is x / ln 2 to the nearest integer
// (adding 1.5 * 2^23 leaves it in the lowest bits), then Taylor's series for the rest, below 0.35,
// whose eighth power over 8! is 5e-9. The factor 2^n comes in two halves, which rounds once where
// the result is denormal.
float ExpNegative(float x) {
  constexpr float kMagic = 0x1.8p23f;
  if (x < -104.0f) x = -104.0f;  // rounds to 0 like all below
  const float shifted = std::fma(x, 0x1.715476p0f, kMagic);
  const float n = shifted - kMagic;
  const float rest = std::fma(-n, -0x1.05c61p-29f, std::fma(-n, 0x1.62e43p-1f, x));
  float y = 1.0f / 5040;
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    y = std::fma(y, rest, c);
  }
  const auto exponent = static_cast<int32_t>(BitsOf(shifted) - BitsOf(kMagic));
  const int32_t half = exponent >> 1;
  const auto power = [](int32_t e) { return FloatFromBits(static_cast<uint32_t>(e + 127) << 23); };
  return y * power(half) * power(exponent - half);
}

// One head of one row of AttendLatents; `out` is its running weighted sum.
class HeadAttention {
 public:
  HeadAttention(const LatentAttention& a, const AttentionRow& row, int32_t head)
      : a_(a),
        row_(row),
        latent_(static_cast<size_t>(a.latent)),
        rope_(static_cast<size_t>(a.rope)),
        q_latent_(row.q_latent + static_cast<size_t>(head) * latent_),
        q_rope_(row.q_rope + static_cast<size_t>(head) * rope_),
        out_(row.out + static_cast<size_t>(head) * latent_) {
    std::fill(out_, out_ + latent_, 0.0f);
  }

  // Listed positions [begin, end), all of one block.
  void AddBlock(int32_t begin, int32_t end) {
    float scores[kAttentionBlock];
    float max = max_;
    for (int32_t i = begin; i < end; ++i) {
      scores[i - begin] = Score(i);
      max = std::max(max, scores[i - begin]);
    }
    const float shrink = ExpNegative(max_ - max);
    max_ = max;
    sum_ *= shrink;
    for (size_t j = 0; j < latent_; ++j) out_[j] *= shrink;
    for (int32_t i = begin; i < end; ++i) {
      const float p = ExpNegative(scores[i - begin] - max);
      const std::byte* c = StoredVector(a_.kv, PositionAt(i));
      sum_ += p;
      for (size_t j = 0; j < latent_; ++j) {
        out_[j] = std::fma(p, StoredValue(a_.kv, c, j), out_[j]);
      }
    }
  }

  void Finish() {
    for (size_t j = 0; j < latent_; ++j) out_[j] /= sum_;
  }

  int32_t PositionAt(int32_t i) const { return row_.positions == nullptr ? i : row_.positions[i]; }

 private:
  float Score(int32_t i) const {
    const std::byte* c = StoredVector(a_.kv, PositionAt(i));
    LaneSum dot;
    for (size_t j = 0; j < latent_; ++j) dot.Add(q_latent_[j], StoredValue(a_.kv, c, j));
    dot.StartVector();
    for (size_t j = 0; j < rope_; ++j) dot.Add(q_rope_[j], StoredValue(a_.kv, c, latent_ + j));
    return dot.Total() * a_.scale;
  }

  const LatentAttention& a_;
  const AttentionRow& row_;
  const size_t latent_;
  const size_t rope_;
  const float* q_latent_;
  const float* q_rope_;
  float* out_;
  float max_ = -std::numeric_limits<float>::infinity();
  float sum_ = 0;
};

}  // namespace

void Matmul(const PackedMatrix& w, int32_t first, int32_t last, const float* x, size_t x_stride,
            size_t rows, float* y, size_t y_stride) {
  for (size_t r = 0; r < rows; ++r) {
    for (size_t o = static_cast<size_t>(first); o < static_cast<size_t>(last); ++o) {
      LaneSum sum;
      for (size_t i = 0; i < static_cast<size_t>(w.cols); ++i) {
        sum.Add(WeightAt(w, o, i), x[r * x_stride + i]);
      }
      y[r * y_stride + o] = sum.Total();
    }
  }
}

void MatmulTransposed(const PackedMatrix& w, int32_t first, int32_t last, const float* x,
                      size_t x_stride, size_t rows, float* y, size_t y_stride) {
  for (size_t r = 0; r < rows; ++r) {
    for (size_t i = 0; i < static_cast<size_t>(w.cols); ++i) {
      float sum = 0;
      for (int32_t o = first; o < last; ++o) {
        sum = std::fma(x[r * x_stride + static_cast<size_t>(o - first)],
                       WeightAt(w, static_cast<size_t>(o), i), sum);
      }
      y[r * y_stride + i] = sum;
    }
  }
}

void DequantiseRow(const PackedMatrix& w, int32_t row, float* y) {
  for (size_t i = 0; i < static_cast<size_t>(w.cols); ++i) {
    y[i] = WeightAt(w, static_cast<size_t>(row), i);
  }
}

void RmsNorm(const float* x, const float* w, size_t n, float eps, float* y) {
  double squares = 0;
  for (size_t i = 0; i < n; ++i) squares += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  const float mean = static_cast<float>(squares / static_cast<double>(n));
  const float inverse = 1.0f / std::sqrt(mean + eps);
  for (size_t i = 0; i < n; ++i) y[i] = x[i] * inverse * w[i];
}

void LayerNorm(const float* x, const float* w, const float* b, size_t n, float eps, float* y) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]);
  const double mean = sum / static_cast<double>(n);
  double squares = 0;
  for (size_t i = 0; i < n; ++i) {
    const double d = static_cast<double>(x[i]) - mean;
    squares += d * d;
  }
  const float variance = static_cast<float>(squares / static_cast<double>(n));
  const float inverse = 1.0f / std::sqrt(variance + eps);
  for (size_t i = 0; i < n; ++i) y[i] = (x[i] - static_cast<float>(mean)) * inverse * w[i] + b[i];
}

void Rope(float* x, const float* cos, const float* sin, size_t pairs) {
  for (size_t j = 0; j < pairs; ++j) {
    const float even = x[2 * j];
    const float odd = x[2 * j + 1];
    x[2 * j] = even * cos[j] - odd * sin[j];
    x[2 * j + 1] = odd * cos[j] + even * sin[j];
  }
}

void SiluMul(const float* gate, const float* up, size_t n, float* y) {
  for (size_t i = 0; i < n; ++i) y[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

void AddScaled(float a, const float* x, size_t n, float* y) {
  for (size_t i = 0; i < n; ++i) y[i] = std::fma(a, x[i], y[i]);
}

void StoreKv(const float* x, size_t n, KvType type, std::byte* dst) {
  if (type == KvType::kF32) {
    if (n != 0) std::memcpy(dst, x, n * sizeof(float));
    return;
  }
  for (size_t i = 0; i < n; ++i) {
    const uint16_t rounded = ToBF16(x[i]);
    std::memcpy(dst + i * sizeof(rounded), &rounded, sizeof(rounded));
  }
}

void IndexScores(const IndexScoring& a, int32_t first, int32_t last) {
  const size_t width = static_cast<size_t>(a.keys.width);
  for (size_t r = 0; r < a.row_count; ++r) {
    const IndexRow& row = a.rows[r];
    for (int32_t p = first; p < std::min(last, row.count); ++p) {
      const std::byte* key = StoredVector(a.keys, p);
      float score = 0;
      for (size_t h = 0; h < static_cast<size_t>(a.heads); ++h) {
        LaneSum sum;
        for (size_t i = 0; i < width; ++i) {
          sum.Add(row.q[h * width + i], StoredValue(a.keys, key, i));
        }
        const float dot = sum.Total() * a.scale;
        // Not std::max, which would hide a NaN.
        score = std::fma(row.w[h], dot < 0 ? 0.0f : dot, score);
      }
      row.scores[p] = score;
    }
  }
}

void AttendLatents(const LatentAttention& a, int32_t first_head, int32_t last_head) {
  for (size_t r = 0; r < a.row_count; ++r) {
    const AttentionRow& row = a.rows[r];
    for (int32_t head = first_head; head < last_head; ++head) {
      HeadAttention attention(a, row, head);
      for (int32_t begin = 0; begin < row.count;) {
        const int32_t block = attention.PositionAt(begin) / kAttentionBlock;
        int32_t end = begin + 1;
        while (end < row.count && attention.PositionAt(end) / kAttentionBlock == block) ++end;
        attention.AddBlock(begin, end);
        begin = end;
      }
      if (row.count > 0) attention.Finish();
    }
  }
}

bool AllFinite(const float* x, size_t n) {
  uint32_t bad = 0;  // no early exit: the compiler vectorises this loop
  for (size_t i = 0; i < n; ++i) bad |= (BitsOf(x[i]) & 0x7F800000u) == 0x7F800000u ? 1u : 0u;
  return bad == 0;
}

double LogSumExp(const float* x, size_t n) {
  float max = -std::numeric_limits<float>::infinity();
  for (size_t i = 0; i < n; ++i) max = std::max(max, x[i]);
  if (std::isinf(max)) return static_cast<double>(max);
  double sum = 0;
  for (size_t i = 0; i < n; ++i)
    sum += std::exp(static_cast<double>(x[i]) - static_cast<double>(max));
  return std::log(sum) + static_cast<double>(max);
}

}  // namespace colibri::scalar
