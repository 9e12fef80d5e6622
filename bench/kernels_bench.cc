#include "bench/kernels_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <random>

#include "bench/attention_bench.h"
#include "graph/engine.h"
#include "graph/tbb_parallel.h"
#include "io/error.h"
#include "io/memory.h"
#include "kernels/peak.h"
#include "runtime/int8_products.h"
#include "runtime/stages.h"

namespace colibri {
namespace {

size_t S(int32_t v) { return static_cast<size_t>(v); }

double SecondsOf(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

PackedMatrix MatrixOf(const std::string& format, const std::string& shape) {
  PackedMatrix m;
  if (std::sscanf(shape.c_str(), "%dx%d", &m.rows, &m.cols) != 2 || m.rows < 1 || m.cols < 64) {
    throw UsageError(fmt::format("--shape {}: OUTPUTSxINPUTS is expected", shape));
  }
  if (format == "int4-g32" || format == "int4-g64" || format == "int4-g128") {
    m.format = WeightFormat::kInt4Grouped;
    m.group = std::stoi(format.substr(6));
  } else if (format == "int4-row") {
    m.format = WeightFormat::kInt4Row;
  } else if (format == "int8-row") {
    m.format = WeightFormat::kInt8Row;
  } else if (format == "bf16") {
    m.format = WeightFormat::kBF16;
  } else if (format == "f32") {
    m.format = WeightFormat::kF32;
  } else {
    throw UsageError(fmt::format(
        "--format {}: int4-g32, int4-g64, int4-g128, int4-row, int8-row, bf16 or f32 is expected",
        format));
  }
  return m;
}

// Matrices one behind the other, more than any cache holds, taken in turn.
class Weights {
 public:
  Weights(const PackedMatrix& shape, uint64_t bytes) : matrix_(shape) {
    useful_ = DataBytes(shape) + ScaleBytes(shape);
    stride_ = (useful_ + 4095) / 4096 * 4096;
    count_ = std::max<size_t>(1, bytes / stride_);
    buffer_ = PopulatedBuffer(count_ * stride_, "the weights");
    std::mt19937_64 random(1);
    const bool plain = !HasScales(shape.format);
    for (size_t n = 0; n < count_; ++n) {
      std::byte* at = buffer_.data() + n * stride_;
      for (uint64_t i = 0; i + 8 <= DataBytes(shape); i += 8) {
        // Plain formats: exponents that are neither huge nor tiny.
        const uint64_t bits =
            plain ? (random() & 0x807F807F807F807Full) | 0x3F003F003F003F00ull : random();
        std::memcpy(at + i, &bits, sizeof(bits));
      }
      for (uint64_t i = 0; i < ScaleBytes(shape) / 4; ++i) {
        const float scale = 0.001f + 1e-6f * static_cast<float>(i % 977);
        std::memcpy(at + DataBytes(shape) + 4 * i, &scale, sizeof(scale));
      }
    }
  }
  PackedMatrix Next() {
    const std::byte* at = buffer_.data() + next_ * stride_;
    next_ = (next_ + 1) % count_;
    PackedMatrix m = matrix_;
    m.data = at;
    m.scales = at + DataBytes(m);
    return m;
  }
  size_t Count() const { return count_; }
  uint64_t Useful() const { return useful_; }
  const PopulatedBuffer& Buffer() const { return buffer_; }

 private:
  PackedMatrix matrix_;
  uint64_t useful_ = 0, stride_ = 0;
  size_t count_ = 0, next_ = 0;
  PopulatedBuffer buffer_;
};

struct Figure {
  double seconds = 0;  // of one product
  double read_share = 0, compute_share = 0;
};

// All numbers of rows of one format, shape and kind of activations.
class ProductBench {
 public:
  ProductBench(const KernelsOptions& options, const PackedMatrix& shape, int32_t planes)
      : options_(options),
        planes_(planes),
        parallel_(options.threads),
        weights_(shape, options.bytes),
        most_(S(*std::max_element(options.rows.begin(), options.rows.end()))),
        x_(most_ * S(shape.cols)),
        memory_(x_.size()),
        y_(most_ * S(shape.rows)) {
    std::mt19937 random(1);
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (float& v : x_) v = uniform(random);
    if (planes_ > 0) {
      quantised_ = ParallelQuantise(parallel_, weights_.Next(), x_.data(), nullptr, most_,
                                    memory_.data(), planes_);
    }
  }

  // Takes turns with the loops, so that a busy machine slows all; the loops run on as many threads.
  std::vector<Figure> Run() {
    std::vector<std::vector<double>> seconds(options_.rows.size());
    std::vector<std::vector<double>> read(options_.rows.size()), compute(options_.rows.size());
    double read_rate = ReadRate(), compute_rate = ComputeRate();
    for (int32_t repetition = 0; repetition < options_.repetitions; ++repetition) {
      for (size_t k = 0; k < options_.rows.size(); ++k) {
        const double s = Seconds(S(options_.rows[k]));
        const double next_read = ReadRate(), next_compute = ComputeRate();
        seconds[k].push_back(s);
        read[k].push_back(static_cast<double>(weights_.Useful()) / s /
                          ((read_rate + next_read) / 2));
        compute[k].push_back(MultiplyAdds(S(options_.rows[k])) / s /
                             ((compute_rate + next_compute) / 2));
        read_rate = next_read;
        compute_rate = next_compute;
      }
    }
    std::vector<Figure> figures;
    for (size_t k = 0; k < seconds.size(); ++k) {
      figures.push_back({Median(seconds[k]), Median(read[k]), Median(compute[k])});
    }
    return figures;
  }
  double MultiplyAdds(size_t rows) const {
    return static_cast<double>(rows * x_.size() / most_ * (y_.size() / most_));
  }
  uint64_t Useful() const { return weights_.Useful(); }

 private:
  // Of one product, over so many that they take some 20 ms.
  double Seconds(size_t rows) {
    const size_t products = std::clamp<size_t>(weights_.Count() / (rows < 4 ? 1 : rows), 2, 48);
    return SecondsOf([&] {
             for (size_t n = 0; n < products; ++n) {
               const PackedMatrix w = weights_.Next();
               if (planes_ > 0) {
                 ParallelMatmulInt8(parallel_, w, quantised_, nullptr, rows, y_.data());
               } else {
                 ParallelMatmul(parallel_, w, x_.data(), rows, y_.data());
               }
             }
           }) /
           static_cast<double>(products);
  }
  // Each thread its part of what products read, elsewhere in the buffer each time.
  double ReadRate() {
    const size_t threads = S(options_.threads);
    const size_t part = (size_t{64} << 20) / threads, all = weights_.Buffer().size();
    read_at_ = read_at_ + 2 * threads * part <= all ? read_at_ + threads * part : 0;
    const size_t bytes = std::min(part, all / threads) / 256 * 256;
    const double s = SecondsOf([&] {
      parallel_.For(threads, 1, [&](size_t begin, size_t end) {
        for (size_t t = begin; t < end; ++t) {
          RunReadLoop(weights_.Buffer().data() + read_at_ + t * bytes, bytes);
        }
      });
    });
    return static_cast<double>(bytes * threads) / s;
  }
  double ComputeRate() {
    const size_t threads = S(options_.threads);
    std::vector<uint64_t> done(threads);
    const double s = SecondsOf([&] {
      parallel_.For(threads, 1, [&](size_t begin, size_t end) {
        for (size_t t = begin; t < end; ++t) {
          done[t] = planes_ > 0 ? RunDotLoop(uint64_t{1} << 19) : RunMulAddLoop(uint64_t{1} << 19);
        }
      });
    });
    uint64_t total = 0;
    for (uint64_t n : done) total += n;
    return static_cast<double>(total) / s;
  }

  const KernelsOptions& options_;
  const int32_t planes_;  // 0: f32
  TbbParallel parallel_;
  Weights weights_;
  size_t most_;
  std::vector<float> x_, memory_, y_;
  QuantisedRows quantised_;
  size_t read_at_ = 0;
};

void AddProducts(const KernelsOptions& options, const std::string& format, const std::string& shape,
                 const std::string& activations, Table* table) {
  const PackedMatrix matrix = MatrixOf(format, shape);
  const int32_t planes = activations == "f32" ? 0 : activations == "int8" ? 1 : 2;
  if ((planes == 1 && !TakesInt8(matrix)) || (planes == 2 && !TakesTwoPlanes(matrix))) return;
  ProductBench bench(options, matrix, planes);
  const std::vector<Figure> figures = bench.Run();
  for (size_t k = 0; k < figures.size(); ++k) {
    const Figure& f = figures[k];
    const double rate = bench.MultiplyAdds(S(options.rows[k])) / f.seconds;
    table->Add({SimdTarget(), "product", format, activations, shape,
                std::to_string(options.rows[k]), fmt::format("{:.3f}", f.seconds * 1e3),
                fmt::format("{:.1f}", static_cast<double>(bench.Useful()) / f.seconds / 1e9),
                fmt::format("{:.1f}", 100 * f.read_share), fmt::format("{:.1f}", 2 * rate / 1e9),
                fmt::format("{:.1f}", 100 * f.compute_share)});
  }
}

void AddAttention(const KernelsOptions& options, Table* table) {
  AttentionBenchOptions attention;
  attention.repetitions = options.repetitions;
  for (const AttentionFigure& f : MeasureAttention(attention)) {
    table->Add({SimdTarget(), f.kernel, f.kv == KvType::kF32 ? "f32" : "bf16", "f32",
                fmt::format("{} positions", attention.positions), std::to_string(f.rows),
                fmt::format("{:.3f}", f.seconds * 1e3), "", "",
                fmt::format("{:.1f}", 2 * f.multiply_adds / f.seconds / 1e9),
                fmt::format("{:.1f}", 100 * f.share)});
  }
}

}  // namespace

int RunKernels(const KernelsOptions& options) {
  Table table({{"target", "target", false},
               {"kernel", "kernel", false},
               {"format", "format", false},
               {"activations", "activations", false},
               {"shape", "shape", false},
               {"rows", "rows"},
               {"ms", "ms"},
               {"gb_per_second", "GB/s"},
               {"read_share", "% of reads"},
               {"gop_per_second", "GOP/s"},
               {"compute_share", "% of peak"}});
  std::vector<std::string> targets = options.targets;
  if (targets.empty()) targets = {SimdTarget()};
  const std::vector<std::string> known = SimdTargets();
  for (const std::string& target : targets) {
    if (std::find(known.begin(), known.end(), target) == known.end()) {
      throw UsageError(
          fmt::format("--target {}: this machine has {}", target, fmt::join(known, ", ")));
    }
  }
  oneapi::tbb::task_arena arena(options.threads);
  for (const std::string& target : targets) {
    ForceSimdTarget(target);
    arena.execute([&] {
      for (const std::string& format : options.formats) {
        for (const std::string& shape : options.shapes) {
          for (const std::string& activations : options.activations) {
            AddProducts(options, format, shape, activations, &table);
          }
        }
      }
      if (options.attention) AddAttention(options, &table);
    });
  }
  ForceSimdTarget("");
  fmt::print("{}", table.Text(options.format));
  return 0;
}

}  // namespace colibri
