// Packed weights of one row as floats, sixteen at a time, rounded once as the contract of
// kernels.h says: (q - 8) * scale for int4, q * scale for int8, exact for the plain formats.
#if defined(COLIBRI_KERNELS_WEIGHTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef COLIBRI_KERNELS_WEIGHTS_INL_H_
#undef COLIBRI_KERNELS_WEIGHTS_INL_H_
#else
#define COLIBRI_KERNELS_WEIGHTS_INL_H_
#endif

#include <algorithm>

#include "kernels/vector-inl.h"
#include "kernels/weight_format.h"

#if HWY_TARGET != HWY_SCALAR

COLIBRI_BEFORE_NAMESPACE();
namespace colibri {
namespace HWY_NAMESPACE {

using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using U16 = hn::Rebind<uint16_t, F32>;

// Sixteen bf16 values, at any alignment.
HWY_INLINE Vec16 DecodeBF16(const std::byte* from) {
  const uint16_t* values = reinterpret_cast<const uint16_t*>(from);
  Vec16 v;
  for (size_t p = 0; p < kParts; ++p) {
    const auto bits = hn::PromoteTo(U32(), hn::LoadU(U16(), values + p * kLanes));
    v.part[p] = hn::BitCast(F32(), hn::ShiftLeft<16>(bits));
  }
  return v;
}

// Our own, because Highway's emulation on old targets leaves out infinities and NaN.
HWY_INLINE Vec16 DecodeF16(const std::byte* from) {
  const uint16_t* values = reinterpret_cast<const uint16_t*>(from);
  const U32 d;
  const auto exponent = hn::Set(d, 0x7C00u);
  Vec16 v;
  for (size_t p = 0; p < kParts; ++p) {
    const auto half = hn::PromoteTo(d, hn::LoadU(U16(), values + p * kLanes));
    const auto magnitude = hn::ShiftLeft<13>(hn::And(half, hn::Set(d, 0x7FFFu)));
    // Read as a float its exponent is 112 too small; the product is exact, denormals included.
    const auto scaled =
        hn::BitCast(d, hn::Mul(hn::BitCast(F32(), magnitude), hn::Set(F32(), 0x1p112f)));
    const auto special =
        hn::IfThenElseZero(hn::Eq(hn::And(half, exponent), exponent), hn::Set(d, 0x7F800000u));
    const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(d, 0x8000u)));
    v.part[p] = hn::BitCast(F32(), hn::Or(hn::Or(scaled, special), sign));
  }
  return v;
}

// Sixteen bytes as floats.
HWY_INLINE Vec16 FloatsOfInt8(hn::Vec<hn::Full128<int8_t>> bytes) {
  Vec16 v;
#if HWY_MAX_BYTES == 64
  v.part[0] = hn::ConvertTo(F32(), hn::PromoteTo(I32(), bytes));
#elif HWY_MAX_BYTES == 32
  const hn::Full64<int8_t> half;
  v.part[0] = hn::ConvertTo(F32(), hn::PromoteTo(I32(), hn::LowerHalf(half, bytes)));
  v.part[1] = hn::ConvertTo(F32(), hn::PromoteTo(I32(), hn::UpperHalf(half, bytes)));
#else
  const hn::Full64<int8_t> half;
  const hn::Full128<int16_t> d16;
  const hn::Full64<int16_t> half16;
  const auto low = hn::PromoteTo(d16, hn::LowerHalf(half, bytes));
  const auto high = hn::PromoteTo(d16, hn::UpperHalf(half, bytes));
  v.part[0] = hn::ConvertTo(F32(), hn::PromoteTo(I32(), hn::LowerHalf(half16, low)));
  v.part[1] = hn::ConvertTo(F32(), hn::PromoteTo(I32(), hn::UpperHalf(half16, low)));
  v.part[2] = hn::ConvertTo(F32(), hn::PromoteTo(I32(), hn::LowerHalf(half16, high)));
  v.part[3] = hn::ConvertTo(F32(), hn::PromoteTo(I32(), hn::UpperHalf(half16, high)));
#endif
  return v;
}

HWY_INLINE Vec16 DecodeInt8(const std::byte* from, const Vec16& scale) {
  const hn::Full128<int8_t> d8;
  return Mul16(FloatsOfInt8(hn::LoadU(d8, reinterpret_cast<const int8_t*>(from))), scale);
}

// What int4 needs of a scale: the scale itself, or with 16 lanes the 16 possible products, which a
// permutation then looks up (one instruction in place of subtract, convert and multiply).
HWY_INLINE Vec16 Int4Scale(float scale) {
#if HWY_MAX_BYTES == 64
  alignas(64) static constexpr float kValues[16] = {-8, -7, -6, -5, -4, -3, -2, -1,
                                                    0,  1,  2,  3,  4,  5,  6,  7};
  return Mul16(Load16(kValues), Set16(scale));
#else
  return Set16(scale);
#endif
}

// Eight bytes: sixteen weights in input order.
HWY_INLINE Vec16 DecodeInt4(const std::byte* from, const Vec16& scale) {
#if HWY_MAX_BYTES == 64
  // A byte in each 64-bit lane; its high nibble moves to the upper 32 bits. The permutation looks
  // at the lowest 4 bits of its indices only.
  const __m512i byte =
      _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  const __m512i index = _mm512_or_si512(byte, _mm512_slli_epi64(byte, 28));
  return Vec16{{V{_mm512_permutexvar_ps(index, scale.part[0].raw)}}};
#else
  const hn::Full128<uint16_t> d16;
  const hn::Full128<int8_t> d8;
  const auto byte =
      hn::PromoteTo(d16, hn::LoadU(hn::Full64<uint8_t>(), reinterpret_cast<const uint8_t*>(from)));
  const auto nibbles =
      hn::And(hn::Or(byte, hn::ShiftLeft<4>(byte)), hn::Set(d16, uint16_t{0x0F0F}));
  return Mul16(FloatsOfInt8(hn::Sub(hn::BitCast(d8, nibbles), hn::Set(d8, int8_t{8}))), scale);
#endif
}

// True if sixteen weights that start at a multiple of sixteen always share a scale.
HWY_INLINE bool StepsShareScale(const PackedMatrix& w) {
  return w.format != WeightFormat::kInt4Grouped || w.group % static_cast<int32_t>(kStep) == 0;
}

// Reads one row of a matrix. SetGroup comes before the reads of that group's weights; formats
// with one scale a row have group 0 alone.
template <WeightFormat kFormat>
class RowReader {
 public:
  HWY_INLINE void SetRow(const PackedMatrix& w, size_t row) {
    data_ = w.data + row * RowBytes(kFormat, w.cols);
    scales_ = w.scales +
              row * sizeof(float) * static_cast<size_t>(ScalesPerRow(kFormat, w.cols, w.group));
  }

  HWY_INLINE void SetGroup(size_t group) {
    if constexpr (kFormat == WeightFormat::kInt8Row) scale_ = Set16(ScaleAt(group));
    if constexpr (kIsInt4) scale_ = Int4Scale(ScaleAt(group));
  }

  // For groups that 16 does not divide: gives the bare q - 8.
  HWY_INLINE void SetUnitScale() {
    if constexpr (kIsInt4) scale_ = Int4Scale(1.0f);
  }

  // Weights i .. i + 15; i is a multiple of 16.
  HWY_INLINE Vec16 At(size_t i) const { return Decode(data_ + BytesBefore(i)); }

  // Weights i .. i + n - 1, n <= 16, then zeros. Reads nothing beyond them.
  HWY_INLINE Vec16 FirstAt(size_t i, size_t n) const {
    std::byte packed[kStep * sizeof(float)] = {};
    std::memcpy(packed, data_ + BytesBefore(i), BytesBefore(n + (kIsInt4 ? 1 : 0)));
    return KeepFirst(Decode(packed), n);
  }

  HWY_INLINE float ScaleAt(size_t group) const {
    float scale;
    std::memcpy(&scale, scales_ + group * sizeof(float), sizeof(scale));
    return scale;
  }

 private:
  static constexpr bool kIsInt4 =
      kFormat == WeightFormat::kInt4Row || kFormat == WeightFormat::kInt4Grouped;

  static HWY_INLINE size_t BytesBefore(size_t i) {
    if constexpr (kFormat == WeightFormat::kF32) return i * 4;
    if constexpr (kFormat == WeightFormat::kBF16 || kFormat == WeightFormat::kF16) return i * 2;
    if constexpr (kIsInt4) return i / 2;
    return i;
  }

  HWY_INLINE Vec16 Decode(const std::byte* from) const {
    if constexpr (kFormat == WeightFormat::kF32) {
      return Load16(reinterpret_cast<const float*>(from));
    } else if constexpr (kFormat == WeightFormat::kBF16) {
      return DecodeBF16(from);
    } else if constexpr (kFormat == WeightFormat::kF16) {
      return DecodeF16(from);
    } else if constexpr (kFormat == WeightFormat::kInt8Row) {
      return DecodeInt8(from, scale_);
    } else {
      return DecodeInt4(from, scale_);
    }
  }

  const std::byte* data_;
  const std::byte* scales_;
  Vec16 scale_;
};

// Inputs that share a scale; whole rows where there is one scale or none.
template <WeightFormat kFormat>
HWY_INLINE size_t GroupInputs(const PackedMatrix& w) {
  return static_cast<size_t>(kFormat == WeightFormat::kInt4Grouped ? w.group : w.cols);
}

// Weights [begin, end) of a row, begin a multiple of 16, then zeros up to a multiple of 16.
template <WeightFormat kFormat>
HWY_NOINLINE void DequantiseSpan(const PackedMatrix& w, size_t row, size_t begin, size_t end,
                                 float* to) {
  RowReader<kFormat> reader;
  reader.SetRow(w, row);
  const size_t group = GroupInputs<kFormat>(w);
  const bool steps_share_scale = StepsShareScale(w);
  for (size_t i = begin; i < end;) {
    const size_t whole = end - (end - begin) % kStep;
    if (steps_share_scale && i < whole) {
      reader.SetGroup(i / group);
      const size_t stop = std::min(whole, (i / group + 1) * group);
      for (; i < stop; i += kStep) Store16(reader.At(i), to + (i - begin));
      continue;
    }
    const size_t n = std::min(kStep, end - i);
    float scales[kStep] = {};
    if (steps_share_scale) {
      reader.SetGroup(i / group);
      std::fill(scales, scales + kStep, 1.0f);
    } else {
      reader.SetUnitScale();
      for (size_t j = 0; j < n; ++j) scales[j] = reader.ScaleAt((i + j) / group);
    }
    Store16(Mul16(reader.FirstAt(i, n), Load16(scales)), to + (i - begin));
    i += kStep;
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace colibri
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET != HWY_SCALAR
#endif  // per-target toggle
