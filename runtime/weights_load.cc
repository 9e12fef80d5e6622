// Reads the dense weights into memory, and answers what a loaded model is asked.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "io/check.h"
#include "io/error.h"
#include "runtime/tensor_format.h"
#include "runtime/weights.h"
#include "runtime/weights_dense.h"

namespace colibri {
namespace {

constexpr uint64_t kTensorAlign = 64;  // a cache line and an AVX-512 register
constexpr uint64_t kPageBytes = 4096;
// What one tensor costs in the container's index: node, name, shape and allocator overhead
// (190 measured with the 118,654 tensors of a container of GLM-5.2's layer and expert counts).
constexpr uint64_t kIndexBytesPerTensor = 192;

constexpr uint64_t RoundUp(uint64_t n, uint64_t align) { return (n + align - 1) / align * align; }

float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = half >> 10 & 0x1f;
  const uint32_t mantissa = half & 0x3ff;
  if (exponent == 0) {  // zero and subnormals: multiples of 2^-24
    const float value = static_cast<float>(mantissa) * 0x1p-24F;
    return sign != 0 ? -value : value;
  }
  const uint32_t bits =
      sign | (exponent == 31 ? 0x7f800000U : (exponent + 112) << 23) | mantissa << 13;
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

float LoadValue(const std::byte* at, WeightFormat format) {
  if (format == WeightFormat::kF32) {
    float value = 0;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  uint16_t half = 0;
  std::memcpy(&half, at, sizeof(half));
  if (format == WeightFormat::kF16) return HalfToFloat(half);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Values whose exponent is all ones are infinite or no number.
template <class Bits>
bool Finite(const std::byte* bytes, uint64_t size, Bits exponent) {
  bool finite = true;
  for (uint64_t i = 0; i < size; i += sizeof(Bits)) {
    Bits bits = 0;
    std::memcpy(&bits, bytes + i, sizeof(bits));
    finite &= (bits & exponent) != exponent;
  }
  return finite;
}

bool FiniteFloats(const std::byte* bytes, uint64_t size) {
  return Finite<uint32_t>(bytes, size, 0x7f800000);
}

// Of a matrix without scales.
bool FiniteData(const PackedMatrix& m) {
  switch (m.format) {
    case WeightFormat::kF32:
      return FiniteFloats(m.data, DataBytes(m));
    case WeightFormat::kF16:
      return Finite<uint16_t>(m.data, DataBytes(m), 0x7c00);
    case WeightFormat::kBF16:
      return Finite<uint16_t>(m.data, DataBytes(m), 0x7f80);
    default:
      return true;
  }
}

std::string FullName(int32_t layer, const std::string& name) {
  return layer < 0 ? name : LayerPrefix(layer) + name;
}

struct Measure {
  uint64_t arena = 0, vectors = 0;
  void Matrix(int32_t, const std::string&, int64_t, int64_t, const PackedMatrix& m, bool whole) {
    if (whole) arena += RoundUp(DataBytes(m), kTensorAlign);
    arena += RoundUp(ScaleBytes(m), kTensorAlign);
  }
  void Vector(int32_t, const std::string&, int64_t size, const std::vector<float>&) {
    vectors += static_cast<uint64_t>(size) * sizeof(float);
  }
};

// One tensor on its way into the arena.
struct PendingRead {
  uint32_t file;
  uint64_t offset;
  std::span<std::byte> into;
};

// Places the matrices in the arena and collects their reads; reads the vectors at once.
struct Loader {
  const Container& container;
  std::byte* next;
  std::vector<PendingRead> reads;

  std::byte* Place(const TensorEntry& entry) {
    reads.push_back({entry.file, entry.offset, {next, entry.bytes}});
    return std::exchange(next, next + RoundUp(entry.bytes, kTensorAlign));
  }

  void Matrix(int32_t layer, const std::string& name, int64_t, int64_t, PackedMatrix& m,
              bool whole) {
    const std::string full = FullName(layer, name);
    const TensorEntry& data = *container.Find(full);
    COLIBRI_CHECK(data.bytes == DataBytes(m));
    if (whole) m.data = Place(data);
    if (!HasScales(m.format)) return;
    const TensorEntry& scales = *container.Find(full + ".qs");
    COLIBRI_CHECK(scales.bytes == ScaleBytes(m));
    m.scales = Place(scales);
  }

  void Vector(int32_t layer, const std::string& name, int64_t size, std::vector<float>& v) {
    const std::string full = FullName(layer, name);
    const TensorEntry& entry = *container.Find(full);
    std::vector<std::byte> bytes(entry.bytes);
    container.Files().ReadExact(entry.file, entry.offset, bytes);
    const WeightFormat format = *PlainFormat(entry.dtype);
    v.resize(static_cast<size_t>(size));
    for (size_t i = 0; i < v.size(); ++i) {
      v[i] = LoadValue(bytes.data() + RowBytes(format, static_cast<int64_t>(i)), format);
    }
    if (!FiniteFloats(reinterpret_cast<const std::byte*>(v.data()), v.size() * sizeof(float))) {
      throw ModelError(fmt::format("{}: {} has values that are not finite",
                                   container.Files().Path(entry.file), full));
    }
  }
};

// A damaged download shows in the scales, or in values that have none, and is cheaper found here
// than in fluent nonsense later: a router takes what is not a number for one expert less.
struct CheckFinite {
  const Container& container;
  void Matrix(int32_t layer, const std::string& name, int64_t, int64_t, const PackedMatrix& m,
              bool whole) {
    const bool scaled = HasScales(m.format);
    if (scaled ? FiniteFloats(m.scales, ScaleBytes(m)) : !whole || FiniteData(m)) return;
    const std::string full = FullName(layer, name) + (scaled ? ".qs" : "");
    throw ModelError(fmt::format("{}: {} has {} that are not finite",
                                 container.Files().Path(container.Find(full)->file), full,
                                 scaled ? "scales" : "values"));
  }
  void Vector(int32_t, const std::string&, int64_t, const std::vector<float>&) {}
};

// Formats by how many matrices have them.
class FormatCounts {
 public:
  void Add(const PackedMatrix& m) { ++counts_[FormatName(m)]; }
  void Add(const FfnWeights& w) {
    Add(w.gate);
    Add(w.up);
    Add(w.down);
  }
  // "int4-g64", or "int4-g64/int8-row" with the most frequent first.
  std::string Text() const {
    std::vector<std::pair<uint64_t, std::string>> order;
    for (const auto& [name, count] : counts_) order.emplace_back(~count, name);
    std::sort(order.begin(), order.end());
    std::string text;
    for (const auto& [count, name] : order) text += (text.empty() ? "" : "/") + name;
    return text;
  }

 private:
  std::map<std::string, uint64_t> counts_;
};

}  // namespace

uint64_t Model::Dense::ArenaBytes(const Model& m, const DenseResidents& residents) {
  Measure measure;
  VisitResident(const_cast<Model&>(m), residents, measure);  // Measure changes nothing
  return RoundUp(measure.arena, kPageBytes);
}

uint64_t Model::Dense::TotalBytes(const Model& m, const DenseResidents& residents) {
  Measure measure;
  VisitResident(const_cast<Model&>(m), residents, measure);
  uint64_t tables = m.container_.TensorCount() * kIndexBytesPerTensor +
                    m.layers_.capacity() * sizeof(LayerWeights) +
                    m.experts_.capacity() * (sizeof(ExpertLayout) + sizeof(int32_t)) +
                    (m.blocks_.capacity() + m.head_blocks_.capacity()) * sizeof(DenseBlock);
  for (const ExpertLayout& expert : m.experts_) tables += expert.extents.size() * sizeof(Extent);
  for (const DenseBlock& block : m.blocks_) {
    tables += block.extents.size() * sizeof(Extent) + block.places.size() * sizeof(block.places[0]);
  }
  tables += m.head_blocks_.size() *
            (sizeof(Extent) + sizeof(DenseBlock::Place) + sizeof(const std::byte*));
  return RoundUp(measure.arena, kPageBytes) + measure.vectors + tables;
}

Model::~Model() = default;
Model::Model(Model&&) noexcept = default;

void Model::DropIndexer() {
  COLIBRI_CHECK(arena_.data() == nullptr);
  for (LayerWeights& layer : layers_) layer.indexer.reset();
  has_indexer_ = false;
  Dense::MakeBlocks(*this);
}

uint64_t Model::DenseBytes(const DenseResidents& residents) const {
  return Dense::TotalBytes(*this, residents);
}

void Model::LoadDense(const DenseResidents& residents) {
  COLIBRI_CHECK(arena_.data() == nullptr);
  PopulatedBuffer arena(Dense::ArenaBytes(*this, residents), "the dense weights");
  Loader loader{container_, arena.data(), {}};
  Dense::VisitResident(*this, residents, loader);
  // In file order the drive reads ahead.
  std::sort(loader.reads.begin(), loader.reads.end(),
            [](const PendingRead& a, const PendingRead& b) {
              return std::pair(a.file, a.offset) < std::pair(b.file, b.offset);
            });
  for (const PendingRead& read : loader.reads) {
    container_.Files().ReadExact(read.file, read.offset, read.into);
  }
  Dense::VisitResident(*this, residents, CheckFinite{container_});
  arena_ = std::move(arena);
  residents_ = residents;
  head_data_.assign(head_blocks_.size(), nullptr);
}

void Model::PlaceLayer(int32_t layer, const std::byte* base) const {
  COLIBRI_DCHECK(Streams(layer));
  LayerWeights& weights = layers_[static_cast<size_t>(layer)];
  auto place = Block(layer).places.begin();
  VisitBlock(config_, layer, weights, [&](const std::string&, PackedMatrix& m) {
    m.data = base == nullptr ? nullptr : base + place->data_at;
    if (HasScales(m.format)) m.scales = base == nullptr ? nullptr : base + place->scales_at;
    ++place;
  });
}

int32_t Model::HeadOutput(int32_t part) const {
  return static_cast<int32_t>(
      std::min(int64_t{part} * head_outputs_, static_cast<int64_t>(head_.rows)));
}

void Model::PlaceHead(int32_t part, const std::byte* base) const {
  COLIBRI_DCHECK(StreamsHead());
  head_data_[static_cast<size_t>(part)] =
      base == nullptr ? nullptr : base + HeadBlock(part).places.front().data_at;
}

PackedMatrix Model::HeadPart(int32_t part) const {
  PackedMatrix m = head_;
  const int32_t first = HeadOutput(part);
  m.rows = HeadOutput(part + 1) - first;
  m.data = head_data_[static_cast<size_t>(part)];
  if (HasScales(m.format)) m.scales += ScalesPerRow(m.format, m.cols, m.group) * first * 4;
  return m;
}

const TensorEntry* Model::BadScales(int32_t layer) const {
  const TensorEntry* bad = nullptr;
  VisitBlock(config_, layer, layers_[static_cast<size_t>(layer)],
             [&](const std::string& name, const PackedMatrix& m) {
               if (bad != nullptr || !HasScales(m.format)) return;
               if (FiniteFloats(m.scales, ScaleBytes(m))) return;
               bad = container_.Find(FullName(layer, name) + ".qs");
             });
  return bad;
}

FfnWeights Model::ExpertView(uint32_t item, const std::byte* slot) const {
  const ExpertLayout& expert = experts_[item];
  const auto view = [slot](const ExpertLayout::Matrix& matrix) {
    PackedMatrix m = matrix.shape;
    m.data = slot + matrix.data_at;
    if (HasScales(m.format)) m.scales = slot + matrix.scales_at;
    return m;
  };
  return {view(expert.gate), view(expert.up), view(expert.down)};
}

std::string Model::FormatSummary() const {
  FormatCounts experts, mtp, attention, head;
  for (size_t i = 0; i < experts_.size(); ++i) {
    FormatCounts& counts = expert_layer_[i] < config_.layers ? experts : mtp;
    for (const auto* m : {&experts_[i].gate, &experts_[i].up, &experts_[i].down}) {
      counts.Add(m->shape);
    }
  }
  for (size_t i = 0; i < static_cast<size_t>(config_.layers); ++i) {
    for (const PackedMatrix* m :
         {&layers_[i].q_a, &layers_[i].q_b, &layers_[i].kv_a, &layers_[i].kv_b, &layers_[i].o}) {
      attention.Add(*m);
    }
  }
  head.Add(head_);
  std::string text;
  if (!experts.Text().empty()) text += experts.Text() + " experts, ";
  text += attention.Text() + " attention, " + head.Text() + " head";
  if (!mtp.Text().empty()) text += ", " + mtp.Text() + " MTP experts";
  return text;
}

}  // namespace colibri
