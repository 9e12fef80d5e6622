// A SAX parser with one state for each place in the fixed structure of a header. A DOM would keep
// the last of two equal keys without a word, and take ten times the memory.
#include "io/safetensors_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "io/error.h"
#include "io/strict_json.h"

namespace colibri {
namespace {

using nlohmann::json;

constexpr size_t kMaxNameBytes = 512;
constexpr size_t kMaxRank = 8;
// What is legal and of no use is bounded by count, as each costs more memory than its text: all of
// GLM-5.2 has 118,654 tensors, and its shards one key.
constexpr size_t kMaxTensors = 500'000;
constexpr size_t kMaxMetadata = 65'536;
constexpr size_t kMaxMetadataKey = 4096;
constexpr std::string_view kFormatKey = "colibri.fmt";

struct DTypeName {
  std::string_view name;
  DType dtype;
  uint32_t bits;
};
constexpr DTypeName kDTypes[] = {
    {"F32", DType::kF32, 32},      {"BF16", DType::kBF16, 16},     {"F16", DType::kF16, 16},
    {"U8", DType::kU8, 8},         {"I8", DType::kI8, 8},          {"I32", DType::kI32, 32},
    {"I64", DType::kI64, 64},      {"F8_E4M3", DType::kF8E4M3, 8}, {"F8_E8M0", DType::kF8E8M0, 8},
    {"F8_E5M2", DType::kOther, 8}, {"BOOL", DType::kOther, 8},     {"U16", DType::kOther, 16},
    {"I16", DType::kOther, 16},    {"U32", DType::kOther, 32},     {"U64", DType::kOther, 64},
    {"F64", DType::kOther, 64},    {"C64", DType::kOther, 64},     {"F4", DType::kOther, 4},
    {"F6_E2M3", DType::kOther, 6}, {"F6_E3M2", DType::kOther, 6},
};

const DTypeName* FindDType(std::string_view name) {
  const auto* it = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                [&](const DTypeName& d) { return d.name == name; });
  return it == std::end(kDTypes) ? nullptr : it;
}

class HeaderHandler final : public nlohmann::json_sax<json> {
 public:
  HeaderHandler(uint64_t data_start, const std::string& path)
      : data_start_(data_start), path_(path) {}

  SafetensorsHeader Take() { return std::move(header_); }

  bool null() override { return Unexpected("null"); }
  bool boolean(bool) override { return Unexpected("a boolean"); }
  // Only negative integers and -0 come here.
  bool number_integer(number_integer_t) override { return Unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t&) override {
    return Unexpected("a number that is no plain integer");
  }
  bool binary(binary_t&) override { return Unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::kShapeItem) {
      if (entry_.shape.size() == kMaxRank) Fail(fmt::format("more than {} dimensions", kMaxRank));
      if (value > INT64_MAX) Fail("a dimension beyond 2^63");
      entry_.shape.push_back(static_cast<int64_t>(value));
    } else if (place_ == Place::kOffsetItem) {
      if (offset_count_ == 2) Fail("data_offsets with more than two numbers");
      offsets_[offset_count_++] = value;
    } else {
      return Unexpected("a number");
    }
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::kDType) {
      dtype_ = FindDType(value);
      if (dtype_ == nullptr) Fail(fmt::format("unknown dtype \"{}\"", Printable(value)));
      place_ = Place::kField;
    } else if (place_ == Place::kMetadataValue) {
      if (metadata_key_ == kFormatKey) header_.formats = std::move(value);
      place_ = Place::kMetadataKey;
    } else {
      return Unexpected("a string");
    }
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::kStart) {
      place_ = Place::kName;
    } else if (place_ == Place::kTensor) {
      place_ = Place::kField;
    } else if (place_ == Place::kMetadata) {
      place_ = Place::kMetadataKey;
    } else {
      return Unexpected("an object");
    }
    return true;
  }

  bool key(string_t& value) override {
    if (place_ == Place::kName) {
      StartTensor(value);
    } else if (place_ == Place::kMetadataKey) {
      AddMetadataKey(value);
      metadata_key_ = std::move(value);
      place_ = Place::kMetadataValue;
    } else {
      StartField(value);
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kField) {
      EndTensor();
      place_ = Place::kName;
    } else if (place_ == Place::kMetadataKey) {
      place_ = Place::kName;
    } else {
      place_ = Place::kEnd;
    }
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ == Place::kShape) {
      place_ = Place::kShapeItem;
    } else if (place_ == Place::kOffsets) {
      place_ = Place::kOffsetItem;
    } else {
      return Unexpected("an array");
    }
    return true;
  }

  bool end_array() override {
    place_ = Place::kField;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    throw ModelError(
        fmt::format("{}: the safetensors header is not valid JSON at byte {}", path_, position));
  }

 private:
  enum class Place {
    kStart,
    kName,
    kTensor,
    kField,
    kDType,
    kShape,
    kShapeItem,
    kOffsets,
    kOffsetItem,
    kMetadata,
    kMetadataKey,
    kMetadataValue,
    kEnd
  };

  [[noreturn]] void Fail(const std::string& what) const {
    const std::string where = name_.empty() ? "" : fmt::format(" at {}", Printable(name_));
    throw ModelError(fmt::format("{}: bad safetensors header{}: {}", path_, where, what));
  }
  bool Unexpected(const char* what) const { Fail(fmt::format("{} is out of place", what)); }

  void AddMetadataKey(const std::string& key) {
    if (key.size() > kMaxMetadataKey) Fail(fmt::format("a metadata key of {} bytes", key.size()));
    if (!metadata_keys_.insert(key).second) {
      Fail(fmt::format("metadata key \"{}\" is given twice", Printable(key)));
    }
    if (metadata_keys_.size() > kMaxMetadata) {
      Fail(fmt::format("more than {} metadata keys", kMaxMetadata));
    }
  }

  void StartTensor(std::string& name) {
    if (name == "__metadata__") {
      if (metadata_seen_) Fail("__metadata__ is given twice");
      metadata_seen_ = true;
      name_ = std::move(name);
      place_ = Place::kMetadata;
      return;
    }
    if (header_.tensors.size() == kMaxTensors) {
      Fail(fmt::format("more than {} tensors", kMaxTensors));
    }
    if (name.size() > kMaxNameBytes || name.empty()) {
      Fail(fmt::format("a tensor name of {} bytes", name.size()));
    }
    name_ = std::move(name);
    entry_ = TensorEntry();
    dtype_ = nullptr;
    shape_seen_ = offsets_seen_ = false;
    offset_count_ = 0;
    place_ = Place::kTensor;
  }

  void StartField(const std::string& field) {
    bool twice = false;
    if (field == "dtype") {
      twice = dtype_ != nullptr;
      place_ = Place::kDType;
    } else if (field == "shape") {
      twice = std::exchange(shape_seen_, true);
      place_ = Place::kShape;
    } else if (field == "data_offsets") {
      twice = std::exchange(offsets_seen_, true);
      place_ = Place::kOffsets;
    } else {
      Fail(fmt::format("unknown field \"{}\"", Printable(field)));
    }
    if (twice) Fail(fmt::format("{} is given twice", field));
  }

  void EndTensor() {
    if (dtype_ == nullptr) Fail("dtype is missing");
    if (!shape_seen_) Fail("shape is missing");
    if (!offsets_seen_) Fail("data_offsets is missing");
    if (offset_count_ != 2) Fail("data_offsets with fewer than two numbers");
    const auto [begin, end] = offsets_;
    if (begin > end) Fail(fmt::format("data_offsets reversed: {} to {}", begin, end));
    uint64_t bits = dtype_->bits;
    bool overflow = false;
    for (const int64_t dim : entry_.shape) {
      overflow |= __builtin_mul_overflow(bits, static_cast<uint64_t>(dim), &bits);
    }
    // With a dimension of 0 a wrapped product is no harm to anybody, but no writer makes one.
    if (overflow) Fail("the product of the dimensions overflows");
    if (bits % 8 != 0 || bits / 8 != end - begin) {
      Fail(fmt::format("shape [{}] of {} needs {} bytes, data_offsets give {}",
                       fmt::join(entry_.shape, ", "), dtype_->name, (bits + 7) / 8, end - begin));
    }
    entry_.dtype = dtype_->dtype;
    entry_.bytes = end - begin;
    if (__builtin_add_overflow(begin, data_start_, &entry_.offset) ||
        entry_.offset > UINT64_MAX - entry_.bytes) {
      Fail("data_offsets beyond 2^64");
    }
    header_.tensors.push_back({std::move(name_), std::move(entry_)});
    name_.clear();
  }

  const uint64_t data_start_;
  const std::string& path_;
  Place place_ = Place::kStart;
  SafetensorsHeader header_;
  std::set<std::string> metadata_keys_;
  std::string metadata_key_;
  bool metadata_seen_ = false;
  // The tensor being read.
  std::string name_;
  TensorEntry entry_;
  const DTypeName* dtype_ = nullptr;
  bool shape_seen_ = false, offsets_seen_ = false;
  uint64_t offsets_[2] = {};
  size_t offset_count_ = 0;
};

// Every byte of the data belongs to exactly one tensor (no two readers can disagree about it), and
// the file is as long as its header says.
void CheckRanges(SafetensorsHeader& header, uint64_t data_start, uint64_t file_bytes,
                 const std::string& path) {
  using Tensor = SafetensorsHeader::Tensor;
  auto& tensors = header.tensors;
  std::sort(tensors.begin(), tensors.end(),
            [](const Tensor& a, const Tensor& b) { return a.name < b.name; });
  for (size_t i = 1; i < tensors.size(); ++i) {
    if (tensors[i].name == tensors[i - 1].name) {
      throw ModelError(fmt::format("{}: bad safetensors header: tensor {} is given twice", path,
                                   Printable(tensors[i].name)));
    }
  }
  std::sort(tensors.begin(), tensors.end(), [](const Tensor& a, const Tensor& b) {
    return std::pair(a.entry.offset, a.entry.bytes) < std::pair(b.entry.offset, b.entry.bytes);
  });
  uint64_t end = data_start;
  for (const Tensor& t : tensors) {
    if (t.entry.offset != end) {
      throw ModelError(fmt::format(
          "{}: bad safetensors header: {} {} the tensor before it", path, Printable(t.name),
          t.entry.offset < end ? "overlaps" : "does not start at the end of"));
    }
    end += t.entry.bytes;
  }
  if (file_bytes < end) {
    throw ModelError(fmt::format("{}: truncated: has {} bytes, header says {}; download it again",
                                 path, file_bytes, end));
  }
  if (file_bytes > end) {
    throw ModelError(fmt::format("{}: {} bytes after the last tensor: has {} bytes, header says {}",
                                 path, file_bytes - end, file_bytes, end));
  }
}

}  // namespace

SafetensorsHeader ParseSafetensorsHeader(std::string_view text, uint64_t data_start,
                                         uint64_t file_bytes, const std::string& path) {
  if (text.empty() || text.front() != '{') {
    throw ModelError(
        fmt::format("{}: no safetensors file: its header does not start with '{{'", path));
  }
  // The JSON lexer takes a NUL for the end of its input.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos) {
    throw ModelError(fmt::format("{}: bad safetensors header: a NUL byte at {}", path, nul));
  }
  HeaderHandler handler(data_start, path);
  json::sax_parse(text, &handler);
  SafetensorsHeader header = handler.Take();
  CheckRanges(header, data_start, file_bytes, path);
  return header;
}

}  // namespace colibri
