// Which packed format a tensor has: inferred from its sizes alone (container spec 1.4), since the
// published containers say nothing. The only place that decides. Threads: any.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "io/container.h"
#include "kernels/weight_format.h"

namespace colibri {

// Group sizes of int4-grouped, in colibri's order of preference.
inline constexpr int32_t kGroupSizes[] = {16, 32, 48, 64, 96, 128, 192, 256};

struct TensorFormat {
  WeightFormat format = WeightFormat::kF32;
  int32_t group = 0;  // int4-grouped: the first size that fits
  // int4-grouped: bit i set when kGroupSizes[i] explains the number of scales. Several bits: the
  // caller settles it by the container's other tensors.
  uint32_t groups = 0;
};

// The format of a [rows x cols] matrix stored as `weight` and, when quantised, `scales` (else
// nullptr). `stamp` is the container's own word, or "". Throws ModelError that begins with `name`:
// a format this engine does not have (int2-row, int3-g64, e8-iq3-lattice, fp8-e4m3-b128), an
// unknown stamp, sizes that fit nothing or not the stamp.
TensorFormat InferFormat(const std::string& name, const TensorEntry& weight,
                         const TensorEntry* scales, int64_t rows, int64_t cols,
                         std::string_view stamp);

// "f32", "bf16", "f16", "int8-row", "int4-row", "int4-g64".
std::string FormatName(const PackedMatrix& m);

// The plain floating-point formats' counterpart of a safetensors type.
std::optional<WeightFormat> PlainFormat(DType dtype);

}  // namespace colibri
