// Opens a model: finds every tensor in the container, settles its format and lays out the experts.
// Reads no weights (runtime/weights_load.cc does).
#include "runtime/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <iterator>
#include <map>

#include "io/error.h"
#include "runtime/missing_tensors.h"
#include "runtime/tensor_format.h"
#include "runtime/weights_dense.h"

namespace colibri {
namespace {

constexpr std::string_view kExpertPrefix = "mlp.experts.";
constexpr const char* kIndexerNames[] = {"wq_b.weight", "wk.weight", "weights_proj.weight",
                                         "k_norm.weight", "k_norm.bias"};

bool IsBytes(DType dtype) { return dtype == DType::kU8 || dtype == DType::kI8; }

// Parts of the head are whole pieces of a product for so many threads as there may be, and at least
// so many: of a small head two windows shall not take the most.
constexpr int64_t kHeadAlign = 64;
constexpr uint64_t kLeastHeadParts = 8;

// Index into kGroupSizes of the first size that fits.
size_t FirstGroup(uint32_t groups) { return static_cast<size_t>(std::countr_zero(groups)); }

// The layer whose routed expert below `experts` the name is a weight of; -1 for other names.
int32_t ExpertWeightLayer(std::string_view name, int32_t experts) {
  const auto take = [&](std::string_view prefix) {
    if (!name.starts_with(prefix)) return false;
    name.remove_prefix(prefix.size());
    return true;
  };
  const auto number = [&](int32_t& value) {
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), value);
    if (error != std::errc() || value < 0) return false;
    name.remove_prefix(static_cast<size_t>(end - name.data()));
    return true;
  };
  int32_t layer = 0, expert = 0;
  if (!take("model.layers.") || !number(layer) || !take(".") || !take(kExpertPrefix) ||
      !number(expert) || expert >= experts) {
    return -1;
  }
  const bool weight =
      name == ".gate_proj.weight" || name == ".up_proj.weight" || name == ".down_proj.weight";
  return weight ? layer : -1;
}

// One of an expert's tensors, and where to note its place in the slot.
struct Part {
  const TensorEntry* entry;
  uint64_t* at;
};

// Extents over the parts in file order, and the parts' places where they are read to. Returns the
// bytes they fill.
uint64_t LayOut(std::vector<Part>& parts, std::vector<Extent>* to, uint64_t* useful) {
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
    return std::pair(a.entry->file, a.entry->offset) < std::pair(b.entry->file, b.entry->offset);
  });
  uint64_t filled = 0;
  std::vector<Extent> extents;
  for (const Part& part : parts) {
    const TensorEntry& e = *part.entry;
    const uint64_t begin = e.offset / kIoAlign * kIoAlign;
    const uint64_t end = (e.offset + e.bytes + kIoAlign - 1) / kIoAlign * kIoAlign;
    const bool joins = !extents.empty() && extents.back().file == e.file &&
                       begin <= extents.back().offset + extents.back().bytes;
    if (!joins) extents.push_back({e.file, begin, 0, filled});
    Extent& extent = extents.back();
    const uint64_t bytes = std::max(extent.bytes, end - extent.offset);
    filled += bytes - extent.bytes;
    extent.bytes = bytes;
    *part.at = extent.dest + (e.offset - extent.offset);
    *useful += e.bytes;
  }
  to->assign(extents.begin(), extents.end());
  return filled;
}

}  // namespace

// Fills shapes and formats; a visitor of runtime/weights_visit.h. Lives during the constructor.
struct Model::Resolver {
  explicit Resolver(Model& model) : m(model) {}

  struct Ambiguous {
    PackedMatrix* matrix;
    uint32_t groups;  // of TensorFormat
  };

  Model& m;
  MissingTensors missing;
  std::vector<Ambiguous> ambiguous;
  std::array<uint64_t, std::size(kGroupSizes)> votes{};
  // The tensors that the last Matrix() found.
  const TensorEntry* data = nullptr;
  const TensorEntry* scales = nullptr;

  std::string PathOf(const TensorEntry& entry) const {
    return m.container_.Files().Path(entry.file);
  }

  TensorFormat FormatOf(const std::string& full, int64_t rows, int64_t cols) const {
    try {
      return InferFormat(full, *data, scales, rows, cols, m.container_.Stamp(full));
    } catch (const ModelError& error) {
      throw ModelError(fmt::format("{}: {}", PathOf(*data), error.what()));
    }
  }

  // False: the tensor is missing, which is noted under `group` if given.
  bool Matrix(int32_t layer, const std::string& name, int64_t rows, int64_t cols, PackedMatrix& out,
              const char* group = nullptr) {
    const std::string full = layer < 0 ? name : LayerPrefix(layer) + name;
    data = m.container_.Find(full);
    if (data == nullptr) {
      missing.Add(layer, group != nullptr ? group : name);
      return false;
    }
    scales = m.container_.Find(full + ".qs");
    if (scales == nullptr && IsBytes(data->dtype)) {
      missing.Add(layer, group != nullptr ? group : name + ".qs");
      return false;
    }
    const TensorFormat format = FormatOf(full, rows, cols);
    out.format = format.format;
    out.rows = static_cast<int32_t>(rows);
    out.cols = static_cast<int32_t>(cols);
    out.group = format.group;
    if (std::has_single_bit(format.groups)) ++votes[FirstGroup(format.groups)];
    if (std::popcount(format.groups) > 1) ambiguous.push_back({&out, format.groups});
    return true;
  }

  void Vector(int32_t layer, const std::string& name, int64_t size, std::vector<float>& /*out*/) {
    const std::string full = layer < 0 ? name : LayerPrefix(layer) + name;
    const TensorEntry* entry = m.container_.Find(full);
    if (entry == nullptr) {
      missing.Add(layer, name);
    } else if (!PlainFormat(entry->dtype) || entry->shape != std::vector<int64_t>{size}) {
      throw ModelError(fmt::format("{}: {}: shape [{}], F32, BF16 or F16 [{}] expected",
                                   PathOf(*entry), full, fmt::join(entry->shape, ", "), size));
    }
  }

  bool HasIndexer(int32_t layer) const {
    for (const char* name : kIndexerNames) {
      const std::string full = LayerPrefix(layer) + "self_attn.indexer." + name;
      const TensorEntry* entry = m.container_.Find(full);
      if (entry == nullptr) return false;
      if (IsBytes(entry->dtype) && m.container_.Find(full + ".qs") == nullptr) return false;
    }
    return true;
  }

  void DecideIndexer() {
    std::vector<std::string> lacking;
    int32_t full = 0;
    for (int32_t layer = 0; layer < m.config_.layers; ++layer) {
      if (!m.config_.FullIndexer(layer)) continue;
      ++full;
      if (!HasIndexer(layer)) lacking.push_back(std::to_string(layer));
    }
    m.has_indexer_ = lacking.empty();
    if (m.has_indexer_) return;
    const int32_t count = static_cast<int32_t>(lacking.size());
    m.notes_.push_back(
        count == full
            ? std::string("dense attention at every length: the container has no indexer")
            : fmt::format("dense attention at every length: {} of {} indexers are missing "
                          "(first at layer {})",
                          count, full, lacking.front()));
  }

  void Experts(int32_t layer) {
    m.first_expert_.push_back(static_cast<uint32_t>(m.experts_.size()));
    if (!m.config_.Sparse(layer)) return;
    const int64_t width = m.config_.moe_intermediate, hidden = m.config_.hidden;
    std::vector<Part> parts;
    for (int32_t e = 0; e < m.config_.experts; ++e) {
      ExpertLayout& expert = m.experts_.emplace_back();
      m.expert_layer_.push_back(layer);
      const std::string prefix = std::string(kExpertPrefix) + std::to_string(e) + ".";
      const auto add = [&](const char* name, int64_t rows, int64_t cols,
                           ExpertLayout::Matrix& matrix) {
        if (!Matrix(layer, prefix + name, rows, cols, matrix.shape, "mlp.experts.*")) return;
        parts.push_back({data, &matrix.data_at});
        if (scales != nullptr) parts.push_back({scales, &matrix.scales_at});
      };
      parts.clear();
      add("gate_proj.weight", width, hidden, expert.gate);
      add("up_proj.weight", width, hidden, expert.up);
      add("down_proj.weight", hidden, width, expert.down);
      expert.slot_bytes = LayOut(parts, &expert.extents, &expert.useful_bytes);
    }
  }

  // Room for all experts, so that pointers into experts_ stay. A configuration that promises more
  // of them than the container has tensors never gets that far.
  void ReserveExperts() {
    uint64_t sparse = 0;
    for (const bool s : m.config_.sparse) sparse += s ? 1 : 0;
    const auto each = static_cast<uint64_t>(m.config_.experts);
    if (3 * sparse * each > m.container_.TensorCount()) {
      CountMissingExperts();
      throw ModelError(missing.Message(m.container_));
    }
    m.experts_.reserve((sparse + (m.mtp_ ? 1 : 0)) * each);
    m.expert_layer_.reserve(m.experts_.capacity());
  }

  void CountMissingExperts() {
    std::map<int32_t, uint64_t> found;
    for (const std::string& name : m.container_.Names()) {
      ++found[ExpertWeightLayer(name, m.config_.experts)];
    }
    const uint64_t wanted = 3 * static_cast<uint64_t>(m.config_.experts);
    for (int32_t layer = 0; layer < m.config_.layers; ++layer) {
      if (!m.config_.Sparse(layer) || found[layer] >= wanted) continue;
      missing.Add(layer, "mlp.experts.*", wanted - found[layer]);
    }
  }

  // The MTP layer is optional: an incomplete one is left out whole.
  void Mtp() {
    const int32_t layer = m.config_.layers;
    MissingTensors lacking;  // the MTP layer's, collected in `missing` while it is visited
    std::swap(lacking, missing);
    const size_t ambiguous_before = ambiguous.size();
    const auto votes_before = votes;
    LayerWeights& weights = m.layers_.emplace_back();
    if (m.has_indexer_) weights.indexer.emplace();
    VisitLayer(m.config_, layer, weights, *this);
    VisitMtp(m.config_, *m.mtp_, *this);
    Experts(layer);
    std::swap(lacking, missing);
    if (lacking.Empty()) {
      const WeightFormat format = m.mtp_->eh_proj.format;
      if (format == WeightFormat::kInt4Row || format == WeightFormat::kInt4Grouped) {
        m.notes_.push_back(
            fmt::format("eh_proj of the MTP layer is {}: few drafts will be accepted",
                        FormatName(m.mtp_->eh_proj)));
      }
      return;
    }
    m.notes_.push_back(fmt::format("no drafts: the MTP layer is incomplete ({})",
                                   fmt::join(lacking.Lines(), "; ")));
    ambiguous.resize(ambiguous_before);
    votes = votes_before;
    m.layers_.pop_back();
    m.mtp_.reset();
    m.experts_.resize(m.first_expert_.back());
    m.expert_layer_.resize(m.first_expert_.back());
    m.first_expert_.pop_back();
  }

  // Decisions 6: the size that most unambiguous tensors have, else colibri's order.
  void SettleGroups() {
    for (const Ambiguous& a : ambiguous) {
      size_t best = FirstGroup(a.groups);
      for (size_t i = best + 1; i < votes.size(); ++i) {
        if ((a.groups >> i & 1) != 0 && votes[i] > votes[best]) best = i;
      }
      a.matrix->group = kGroupSizes[best];
    }
  }

  // Classes in order of appearance. Experts of one size differ in slot bytes by how their ends
  // happen to lie in pages; the class takes the most.
  void Classify() {
    std::map<uint64_t, uint16_t> classes;
    for (size_t i = 0; i < m.experts_.size(); ++i) {
      ExpertLayout& expert = m.experts_[i];
      const auto next = static_cast<uint16_t>(classes.size());
      const auto [it, fresh] = classes.emplace(expert.useful_bytes, next);
      if (fresh) m.classes_.push_back({0, 0, m.expert_layer_[i], 0});
      expert.slot_class = it->second;
      ExpertClass& c = m.classes_[it->second];
      c.slot_bytes = std::max(c.slot_bytes, expert.slot_bytes);
      ++c.experts;
      c.last_layer = m.expert_layer_[i];
    }
  }
};

Model::Model(const std::vector<std::string>& directories)
    : container_(directories), config_(LoadConfig(directories.front())) {
  Resolver resolver(*this);
  resolver.DecideIndexer();
  layers_.reserve(static_cast<size_t>(config_.layers) + 1);
  layers_.resize(static_cast<size_t>(config_.layers));
  for (int32_t layer = 0; layer < config_.layers; ++layer) {
    if (has_indexer_ && config_.FullIndexer(layer)) {
      layers_[static_cast<size_t>(layer)].indexer.emplace();
    }
  }
  Dense::Visit(*this, resolver);
  if (config_.mtp) mtp_.emplace();
  resolver.ReserveExperts();
  for (int32_t layer = 0; layer < config_.layers; ++layer) resolver.Experts(layer);
  if (mtp_) resolver.Mtp();
  if (!resolver.missing.Empty()) throw ModelError(resolver.missing.Message(container_));
  resolver.SettleGroups();
  resolver.Classify();
  Dense::MakeBlocks(*this);
}

void Model::Dense::MakeBlocks(Model& m) {
  m.blocks_.assign(m.layers_.size(), {});
  for (int32_t layer = 0; layer < m.LayerCount(); ++layer) {
    DenseBlock& block = m.blocks_[static_cast<size_t>(layer)];
    std::vector<std::string> names;
    VisitBlock(m.config_, layer, m.layers_[static_cast<size_t>(layer)],
               [&](const std::string& name, const PackedMatrix&) { names.push_back(name); });
    block.places.resize(names.size());
    std::vector<Part> parts;
    for (size_t i = 0; i < names.size(); ++i) {
      const std::string full = LayerPrefix(layer) + names[i];
      parts.push_back({m.container_.Find(full), &block.places[i].data_at});
      const TensorEntry* scales = m.container_.Find(full + ".qs");
      if (scales != nullptr) parts.push_back({scales, &block.places[i].scales_at});
    }
    block.bytes = LayOut(parts, &block.extents, &block.useful_bytes);
  }
  MakeHeadBlocks(m);
}

void Model::Dense::MakeHeadBlocks(Model& m) {
  const TensorEntry& entry = *m.container_.Find(kHeadName);
  const uint64_t row = RowBytes(m.head_.format, m.head_.cols);
  const uint64_t all = DataBytes(m.head_);
  const auto outputs = static_cast<uint64_t>(m.head_.rows);
  // No more than so many bytes without rounding.
  const uint64_t most = std::min(kHeadPartBytes, all / kLeastHeadParts);
  const uint64_t each = std::max<uint64_t>(1, most / row / kHeadAlign) * kHeadAlign;
  m.head_outputs_ = static_cast<int32_t>(std::min(each, outputs));
  m.head_blocks_.clear();
  for (uint64_t first = 0; first < outputs; first += each) {
    DenseBlock& block = m.head_blocks_.emplace_back();
    block.places.resize(1);
    TensorEntry part = entry;
    part.offset += first * row;
    part.bytes = std::min(each, outputs - first) * row;
    std::vector<Part> parts{{&part, &block.places[0].data_at}};
    block.bytes = LayOut(parts, &block.extents, &block.useful_bytes);
  }
}

}  // namespace colibri
