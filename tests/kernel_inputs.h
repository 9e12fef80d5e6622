// Inputs for the kernel tests: random packed matrices and stored vectors in buffers of the exact
// size (so that ASan sees a read beyond them), at odd addresses, and a walk over the SIMD targets.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace colibri {

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  float Uniform(float low, float high) {
    return std::uniform_real_distribution<float>(low, high)(engine_);
  }
  uint32_t Bits() { return static_cast<uint32_t>(engine_()); }
  std::vector<float> Floats(size_t n) {
    std::vector<float> values(n);
    for (float& v : values) v = Uniform(-1, 1);
    return values;
  }

 private:
  std::mt19937 engine_;
};

// Bytes that begin at an odd address and end with their allocation.
class OddBytes {
 public:
  explicit OddBytes(size_t n) : size_(n), bytes_(std::make_unique<std::byte[]>(n + 1)) {}
  std::byte* data() { return bytes_.get() + 1; }
  const std::byte* data() const { return bytes_.get() + 1; }
  size_t size() const { return size_; }

 private:
  size_t size_;
  std::unique_ptr<std::byte[]> bytes_;
};

// A packed matrix with its storage. Integer weights take every value, scales are 0.01 to 0.03.
struct RandomMatrix {
  RandomMatrix(WeightFormat format, int32_t rows, int32_t cols, int32_t group, uint32_t seed)
      : matrix{format,  rows,   cols, format == WeightFormat::kInt4Grouped ? group : 0,
               nullptr, nullptr},
        data(DataBytes(matrix)),
        scales(ScaleBytes(matrix)) {
    matrix.data = data.data();
    matrix.scales = HasScales(format) ? scales.data() : nullptr;
    Random random(seed);
    if (HasScales(format)) {
      for (size_t i = 0; i < data.size(); ++i) data.data()[i] = std::byte(random.Bits() & 255);
      for (size_t i = 0; i < scales.size() / 4; ++i)
        PutFloat(&scales, i, random.Uniform(.01f, .03f));
      return;
    }
    const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(cols);
    for (size_t i = 0; i < count; ++i) {
      if (format == WeightFormat::kF32) {
        PutFloat(&data, i, random.Uniform(-1, 1));
      } else {
        // Sign, small exponent and any mantissa: values below 2 in either format, some denormal.
        PutHalf(&data, i,
                static_cast<uint16_t>((random.Bits() & 0x3FFF) | ((random.Bits() & 1) << 15)));
      }
    }
  }

  static void PutFloat(OddBytes* to, size_t i, float value) {
    std::memcpy(to->data() + 4 * i, &value, 4);
  }
  static void PutHalf(OddBytes* to, size_t i, uint16_t value) {
    std::memcpy(to->data() + 2 * i, &value, 2);
  }

  PackedMatrix matrix;
  OddBytes data;
  OddBytes scales;
};

// Pages of stored vectors, each page its own odd allocation. The last one is cut to what is used.
struct StoredVectors {
  StoredVectors(const std::vector<float>& values, int32_t width, int32_t page_tokens, KvType type) {
    const size_t page_values = static_cast<size_t>(width) * static_cast<size_t>(page_tokens);
    for (size_t begin = 0; begin < values.size(); begin += page_values) {
      const size_t n = std::min(page_values, values.size() - begin);
      storage.emplace_back(n * KvBytes(type));
      StoreKv(values.data() + begin, n, type, storage.back().data());
    }
    for (const OddBytes& page : storage) pages.push_back(page.data());
    view = {pages.data(), page_tokens, width, type};
  }

  std::vector<OddBytes> storage;
  std::vector<const std::byte*> pages;
  KvView view;
};

inline const char* NameOf(WeightFormat format) {
  static constexpr const char* kNames[] = {"f32", "bf16", "f16", "int8", "int4", "int4 grouped"};
  return kNames[static_cast<size_t>(format)];
}

// Runs `body` under each SIMD target of the machine, then goes back to the best.
template <typename Body>
void ForEachTarget(const Body& body) {
  for (const std::string& name : SimdTargets()) {
    ForceSimdTarget(name);
    body(name);
  }
  ForceSimdTarget("");
}

// Bit for bit, NaN included.
inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), 4 * a.size()) == 0);
}

// The targets that fuse multiply and add sum exactly as the scalar reference does.
inline bool FusesMultiplyAdd(const std::string& target) {
  return target != "EMU128" && target.find("SSE") == std::string::npos;
}

inline constexpr double kEpsilon = std::numeric_limits<float>::epsilon();

}  // namespace colibri
