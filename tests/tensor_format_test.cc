// Formats inferred from sizes, and those refused by name.
#include "runtime/tensor_format.h"

#include <doctest/doctest.h>

#include "io/error.h"
#include "tests/shard_files.h"

namespace colibri {
namespace {

TEST_CASE("an ambiguous group size with no other tensor to tell takes the first that fits") {
  // 80 columns with two scales a row: groups of 48 or of 64.
  const TensorEntry weight{0, 0, 3 * 40, DType::kU8, {120}};
  const TensorEntry scales{0, 0, 3 * 2 * 4, DType::kF32, {6}};
  const TensorFormat format = InferFormat("t", weight, &scales, 3, 80, "");
  CHECK(format.group == 48);
  CHECK(format.groups == 0b1100);
}

TEST_CASE("every group size is recognised") {
  for (const int32_t group : kGroupSizes) {
    CAPTURE(group);
    const uint64_t groups = static_cast<uint64_t>((6144 + group - 1) / group);
    const TensorEntry weight{0, 0, 2048 * 3072, DType::kU8, {2048 * 3072}};
    const TensorEntry scales{0, 0, 2048 * groups * 4, DType::kF32, {}};
    const TensorFormat format = InferFormat("t", weight, &scales, 2048, 6144, "");
    CHECK(format.format == WeightFormat::kInt4Grouped);
    CHECK(format.group == group);
    CHECK(__builtin_popcount(format.groups) == 1);
  }
}

std::string FormatComplaint(uint64_t weight_bytes, uint64_t scale_bytes, int64_t rows, int64_t cols,
                            const std::string& stamp = "") {
  const TensorEntry weight{0, 0, weight_bytes, DType::kU8, {}};
  const TensorEntry scales{0, 0, scale_bytes, DType::kF32, {}};
  return MessageOf<ModelError>(
      [&] { InferFormat("some.weight", weight, &scales, rows, cols, stamp); });
}

TEST_CASE("formats we lack are refused by name") {
  CHECK(Contains(FormatComplaint(64 * 128, 64 * 4, 64, 512), "some.weight: format int2-row"));
  CHECK(Contains(FormatComplaint(64 * 8 * 24, 64 * 8 * 4, 64, 512), "format int3-g64"));
  CHECK(Contains(FormatComplaint(64 * 2 * 98, 4, 64, 512), "format e8-iq3-lattice"));
  CHECK(Contains(FormatComplaint(256 * 512, 2 * 4 * 4, 256, 512), "format fp8-e4m3-b128"));
  const TensorEntry fp8{0, 0, 64, DType::kF8E4M3, {8, 8}};
  CHECK(Contains(MessageOf<ModelError>([&] { InferFormat("t", fp8, nullptr, 8, 8, ""); }),
                 "fp8-e4m3-b128"));
}

TEST_CASE("sizes that fit no format are refused with both numbers") {
  CHECK(Contains(FormatComplaint(64 * 512 - 1, 64 * 4, 64, 512),
                 "some.weight: 32767 bytes of weights and 256 of scales for [64 x 512] fit no"));
  CHECK(Contains(FormatComplaint(64 * 512, 64 * 4 + 4, 64, 512), "fit no known format"));
  CHECK(Contains(FormatComplaint(64 * 256, 64 * 5 * 4, 64, 512), "fit no known format"));
  CHECK(Contains(FormatComplaint(64 * 128, 64 * 8, 64, 512), "fit no known format"));
}

TEST_CASE("int8 wins where block scales have the same size, unless the tensor is stamped") {
  // GLM-5.2's o_proj: 48 * 128 blocks are as many as there are rows.
  const TensorEntry weight{0, 0, 6144ULL * 16384, DType::kU8, {}};
  const TensorEntry scales{0, 0, 24576, DType::kF32, {}};
  CHECK(InferFormat("o", weight, &scales, 6144, 16384, "").format == WeightFormat::kInt8Row);
  CHECK(InferFormat("o", weight, &scales, 6144, 16384, "int8-row").format ==
        WeightFormat::kInt8Row);
  CHECK(Contains(FormatComplaint(6144ULL * 16384, 24576, 6144, 16384, "fp8-e4m3-b128"),
                 "fp8-e4m3-b128 is not supported"));
}

TEST_CASE("stamps that are unknown or contradict the sizes are refused") {
  CHECK(Contains(FormatComplaint(64 * 512, 64 * 4, 64, 512, "int5"), "unknown format \"int5\""));
  CHECK(Contains(FormatComplaint(64 * 512, 64 * 4, 64, 512, "int4-row"),
                 "stamped int4-row, but has"));
}

}  // namespace
}  // namespace colibri
