// The format rules of container spec 1.4, in their order.
#include "runtime/tensor_format.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <iterator>

#include "io/error.h"
#include "io/strict_json.h"

namespace colibri {
namespace {

constexpr uint64_t CeilDiv(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

// The names are colibri's; the same table serves inference (in this order) and stamps.
enum class Kind { kE8, kInt8Row, kFp8Block, kInt4Row, kInt4Grouped, kInt2Row, kInt3G64 };

struct KindName {
  Kind kind;
  std::string_view name;
  bool supported;
};
constexpr KindName kKinds[] = {
    {Kind::kE8, "e8-iq3-lattice", false},       {Kind::kInt8Row, "int8-row", true},
    {Kind::kFp8Block, "fp8-e4m3-b128", false},  {Kind::kInt4Row, "int4-row", true},
    {Kind::kInt4Grouped, "int4-grouped", true}, {Kind::kInt2Row, "int2-row", false},
    {Kind::kInt3G64, "int3-g64", false},
};

struct Sizes {
  uint64_t rows, cols, weight_bytes, scale_bytes;
};

uint32_t FittingGroups(const Sizes& s) {
  uint32_t groups = 0;
  for (size_t i = 0; i < std::size(kGroupSizes); ++i) {
    const auto size = static_cast<uint64_t>(kGroupSizes[i]);
    if (size <= s.cols && s.scale_bytes == 4 * s.rows * CeilDiv(s.cols, size)) groups |= 1U << i;
  }
  return groups;
}

bool Fits(Kind kind, const Sizes& s) {
  const bool row_scales = s.scale_bytes == 4 * s.rows;
  switch (kind) {
    case Kind::kE8:
      return s.scale_bytes == 4 && s.weight_bytes == s.rows * CeilDiv(s.cols, 256) * 98;
    case Kind::kInt8Row:
      return s.weight_bytes == s.rows * s.cols && row_scales;
    case Kind::kFp8Block:
      return s.weight_bytes == s.rows * s.cols &&
             s.scale_bytes == 4 * CeilDiv(s.rows, 128) * CeilDiv(s.cols, 128);
    case Kind::kInt4Row:
      return s.weight_bytes == s.rows * CeilDiv(s.cols, 2) && row_scales;
    case Kind::kInt4Grouped:
      return s.weight_bytes == s.rows * CeilDiv(s.cols, 2) && FittingGroups(s) != 0;
    case Kind::kInt2Row:
      return s.weight_bytes == s.rows * CeilDiv(s.cols, 4) && row_scales;
    case Kind::kInt3G64:
      return s.weight_bytes == s.rows * CeilDiv(s.cols, 64) * 24 &&
             s.scale_bytes == 4 * s.rows * CeilDiv(s.cols, 64);
  }
  return false;
}

TensorFormat PlainTensor(const std::string& name, const TensorEntry& weight, int64_t rows,
                         int64_t cols) {
  const std::optional<WeightFormat> format = PlainFormat(weight.dtype);
  if (!format) {
    const char* what = weight.dtype == DType::kF8E4M3
                           ? "fp8-e4m3-b128 is not supported; convert the checkpoint first"
                           : "neither F32, BF16 or F16 nor quantised";
    throw ModelError(fmt::format("{}: {}", name, what));
  }
  if (weight.shape != std::vector<int64_t>{rows, cols}) {
    throw ModelError(fmt::format("{}: shape [{}], [{}, {}] expected from config.json", name,
                                 fmt::join(weight.shape, ", "), rows, cols));
  }
  return {*format, 0, 0};
}

}  // namespace

std::optional<WeightFormat> PlainFormat(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return WeightFormat::kF32;
    case DType::kBF16:
      return WeightFormat::kBF16;
    case DType::kF16:
      return WeightFormat::kF16;
    default:
      return std::nullopt;
  }
}

TensorFormat InferFormat(const std::string& name, const TensorEntry& weight,
                         const TensorEntry* scales, int64_t rows, int64_t cols,
                         std::string_view stamp) {
  if (scales == nullptr) return PlainTensor(name, weight, rows, cols);
  if (weight.dtype == DType::kF8E4M3) {
    throw ModelError(name + ": fp8-e4m3-b128 is not supported");
  }
  if ((weight.dtype != DType::kU8 && weight.dtype != DType::kI8) || scales->dtype != DType::kF32) {
    throw ModelError(name + ": quantised, but not U8 (or I8) with F32 scales");
  }
  const Sizes sizes{static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), weight.bytes,
                    scales->bytes};
  const auto* kind = std::find_if(std::begin(kKinds), std::end(kKinds), [&](const KindName& k) {
    return stamp.empty() ? Fits(k.kind, sizes) : k.name == stamp;
  });
  const std::string found = fmt::format("{} bytes of weights and {} of scales for [{} x {}]",
                                        weight.bytes, scales->bytes, rows, cols);
  if (kind == std::end(kKinds)) {
    throw ModelError(stamp.empty()
                         ? fmt::format("{}: {} fit no known format", name, found)
                         : fmt::format("{}: unknown format \"{}\"", name, Printable(stamp)));
  }
  if (!kind->supported) {
    throw ModelError(fmt::format(
        "{}: format {} is not supported; int8-row, int4-row, int4-grouped, F32, BF16 and F16 are",
        name, kind->name));
  }
  if (!stamp.empty() && !Fits(kind->kind, sizes)) {
    throw ModelError(fmt::format("{}: stamped {}, but has {}", name, stamp, found));
  }
  if (kind->kind == Kind::kInt8Row) return {WeightFormat::kInt8Row, 0, 0};
  if (kind->kind == Kind::kInt4Row) return {WeightFormat::kInt4Row, 0, 0};
  const uint32_t groups = FittingGroups(sizes);
  return {WeightFormat::kInt4Grouped, kGroupSizes[std::countr_zero(groups)], groups};
}

std::string FormatName(const PackedMatrix& m) {
  switch (m.format) {
    case WeightFormat::kF32:
      return "f32";
    case WeightFormat::kBF16:
      return "bf16";
    case WeightFormat::kF16:
      return "f16";
    case WeightFormat::kInt8Row:
      return "int8-row";
    case WeightFormat::kInt4Row:
      return "int4-row";
    case WeightFormat::kInt4Grouped:
      return fmt::format("int4-g{}", m.group);
  }
  return "";
}

}  // namespace colibri
