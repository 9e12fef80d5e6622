// Exact products of packed weights and int8 activations, four to a 32-bit lane, and the transposed
// panels that put sixteen outputs across the lanes. All integer, so any order gives the same bits.
#if defined(COLIBRI_KERNELS_DOT_I8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef COLIBRI_KERNELS_DOT_I8_INL_H_
#undef COLIBRI_KERNELS_DOT_I8_INL_H_
#else
#define COLIBRI_KERNELS_DOT_I8_INL_H_
#endif

#include "kernels/vector-inl.h"

#if HWY_ARCH_ARM_A64 && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#if HWY_TARGET != HWY_SCALAR

// AVX-512 VNNI; multiply-add of bytes (x86 from SSE4.1 on). EMU128 is a higher number.
#define COLIBRI_VNNI (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL)
#define COLIBRI_MADD (HWY_ARCH_X86 && HWY_TARGET <= HWY_SSE4)

COLIBRI_BEFORE_NAMESPACE();
namespace colibri {
namespace HWY_NAMESPACE {

using I32s = hn::RebindToSigned<F32>;
using VI32 = hn::Vec<I32s>;
using U32s = hn::RebindToUnsigned<F32>;
using VU32 = hn::Vec<U32s>;
using I16s = hn::Repartition<int16_t, F32>;
using VI16 = hn::Vec<I16s>;

// Weights and activations travel as 32-bit lanes of four bytes.

#if COLIBRI_MADD
// Sums of neighbouring products of 16-bit lanes.
HWY_INLINE VI32 PairProducts(VI16 a, VI16 b) {
#if HWY_MAX_BYTES == 64
  return VI32{_mm512_madd_epi16(a.raw, b.raw)};
#elif HWY_MAX_BYTES == 32
  return VI32{_mm256_madd_epi16(a.raw, b.raw)};
#else
  return VI32{_mm_madd_epi16(a.raw, b.raw)};
#endif
}
#endif

// sum + the four products of each lane; both operands signed bytes.
HWY_INLINE VI32 DotSigned(VI32 sum, VU32 w, VU32 x) {
#if HWY_ARCH_ARM_A64 && defined(__ARM_FEATURE_DOTPROD)
  return VI32(vdotq_s32(sum.raw, vreinterpretq_s8_u32(w.raw), vreinterpretq_s8_u32(x.raw)));
#else
  const I16s d;
  const VI16 w16 = hn::BitCast(d, w), x16 = hn::BitCast(d, x);
  const VI16 w_even = hn::ShiftRight<8>(hn::ShiftLeft<8>(w16)), w_odd = hn::ShiftRight<8>(w16);
  const VI16 x_even = hn::ShiftRight<8>(hn::ShiftLeft<8>(x16)), x_odd = hn::ShiftRight<8>(x16);
#if COLIBRI_MADD
  return hn::Add(sum, hn::Add(PairProducts(w_even, x_even), PairProducts(w_odd, x_odd)));
#else
  // A product is at most 2^14, so 16 bits hold it, but not the sum of two.
  const I32s d32;
  for (const VI16 product : {hn::Mul(w_even, x_even), hn::Mul(w_odd, x_odd)}) {
    const VI32 both = hn::BitCast(d32, product);
    sum = hn::Add(sum,
                  hn::Add(hn::ShiftRight<16>(hn::ShiftLeft<16>(both)), hn::ShiftRight<16>(both)));
  }
  return sum;
#endif
#endif
}

// The same with weights 0..15.
HWY_INLINE VI32 DotNibbles(VI32 sum, VU32 w, VU32 x) {
#if COLIBRI_VNNI
  return VI32{_mm512_dpbusd_epi32(sum.raw, w.raw, x.raw)};
#elif COLIBRI_MADD
  // 2 * 15 * 128 = 3,840: the 16-bit sums do not saturate.
#if HWY_MAX_BYTES == 64
  const VI16 pairs{_mm512_maddubs_epi16(w.raw, x.raw)};
#elif HWY_MAX_BYTES == 32
  const VI16 pairs{_mm256_maddubs_epi16(w.raw, x.raw)};
#else
  const VI16 pairs{_mm_maddubs_epi16(w.raw, x.raw)};
#endif
  return hn::Add(sum, PairProducts(pairs, hn::Set(I16s(), int16_t{1})));
#else
  return DotSigned(sum, w, x);
#endif
}

// The same with weights of 8 bits as ByteWeights gives them: kByteZero stands for 0.
#if COLIBRI_VNNI
constexpr int32_t kByteZero = 128;
HWY_INLINE VU32 ByteWeights(VU32 packed) { return hn::Xor(packed, hn::Set(U32s(), 0x80808080u)); }
HWY_INLINE VI32 DotBytes(VI32 sum, VU32 w, VU32 x) {
  return VI32{_mm512_dpbusd_epi32(sum.raw, w.raw, x.raw)};
}
#else
constexpr int32_t kByteZero = 0;
HWY_INLINE VU32 ByteWeights(VU32 packed) { return packed; }
HWY_INLINE VI32 DotBytes(VI32 sum, VU32 w, VU32 x) { return DotSigned(sum, w, x); }
#endif

HWY_INLINE VU32 LowNibbles(VU32 packed) { return hn::And(packed, hn::Set(U32s(), 0x0F0F0F0Fu)); }
HWY_INLINE VU32 HighNibbles(VU32 packed) {
  return hn::And(hn::ShiftRight<4>(packed), hn::Set(U32s(), 0x0F0F0F0Fu));
}

// Lane c of row r to lane r of out[c] within each block of 16 bytes: four rows of four columns.
HWY_INLINE void TransposeBlocks(const VU32* rows, VU32* out) {
  const U32s d;
  const hn::RepartitionToWide<U32s> d64;
  const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d, rows[0], rows[1]));
  const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(d, rows[0], rows[1]));
  const auto low23 = hn::BitCast(d64, hn::InterleaveLower(d, rows[2], rows[3]));
  const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d, rows[2], rows[3]));
  out[0] = hn::BitCast(d, hn::InterleaveLower(d64, low01, low23));
  out[1] = hn::BitCast(d, hn::InterleaveUpper(d64, low01, low23));
  out[2] = hn::BitCast(d, hn::InterleaveLower(d64, high01, high23));
  out[3] = hn::BitCast(d, hn::InterleaveUpper(d64, high01, high23));
}

// Lane c of row r to lane r of out[c]: kLanes x kLanes values of 32 bits.
HWY_INLINE void TransposeLanes(const VU32* rows, VU32* out) {
  VU32 four[kLanes];  // [4 * i + c]: block b holds column 4 * b + c of rows 4 * i ..
  for (size_t i = 0; i < kLanes; i += 4) TransposeBlocks(rows + i, four + i);
#if HWY_MAX_BYTES == 64
  for (size_t c = 0; c < 4; ++c) {
    const __m512i even_a = _mm512_shuffle_i32x4(four[c].raw, four[4 + c].raw, 0x88);
    const __m512i odd_a = _mm512_shuffle_i32x4(four[c].raw, four[4 + c].raw, 0xDD);
    const __m512i even_b = _mm512_shuffle_i32x4(four[8 + c].raw, four[12 + c].raw, 0x88);
    const __m512i odd_b = _mm512_shuffle_i32x4(four[8 + c].raw, four[12 + c].raw, 0xDD);
    out[c] = VU32{_mm512_shuffle_i32x4(even_a, even_b, 0x88)};
    out[4 + c] = VU32{_mm512_shuffle_i32x4(odd_a, odd_b, 0x88)};
    out[8 + c] = VU32{_mm512_shuffle_i32x4(even_a, even_b, 0xDD)};
    out[12 + c] = VU32{_mm512_shuffle_i32x4(odd_a, odd_b, 0xDD)};
  }
#elif HWY_MAX_BYTES == 32
  for (size_t c = 0; c < 4; ++c) {
    out[c] = hn::ConcatLowerLower(U32s(), four[4 + c], four[c]);
    out[4 + c] = hn::ConcatUpperUpper(U32s(), four[4 + c], four[c]);
  }
#else
  for (size_t c = 0; c < 4; ++c) out[c] = four[c];
#endif
}

// A panel: 64 bytes (16 columns of four) of each of 16 outputs, as [column][output] words. `from`
// at any alignment, rows `stride` bytes apart; `to` aligned.
HWY_INLINE void TransposePanel(const std::byte* from, size_t stride, uint32_t* to) {
  const U32s d;
  for (size_t column = 0; column < 16; column += kLanes) {
    for (size_t output = 0; output < 16; output += kLanes) {
      VU32 rows[kLanes], columns[kLanes];
      for (size_t k = 0; k < kLanes; ++k) {
        rows[k] =
            hn::LoadU(d, reinterpret_cast<const uint32_t*>(from + (output + k) * stride) + column);
      }
      TransposeLanes(rows, columns);
      for (size_t k = 0; k < kLanes; ++k) {
        hn::Store(columns[k], d, to + (column + k) * 16 + output);
      }
    }
  }
}

// The 16 bytes at `from` + block * 4 * stride for each block of a vector.
HWY_INLINE VU32 LoadBlocks(const std::byte* from, size_t stride) {
  const auto block = [&](size_t b) COLIBRI_ATTR {
    return hn::LoadU(hn::Full128<uint32_t>(),
                     reinterpret_cast<const uint32_t*>(from + 4 * b * stride));
  };
#if HWY_MAX_BYTES == 64
  __m512i all = _mm512_castsi128_si512(block(0).raw);
  all = _mm512_mask_broadcast_i32x4(all, 0x00F0, block(1).raw);
  all = _mm512_mask_broadcast_i32x4(all, 0x0F00, block(2).raw);
  return VU32{_mm512_mask_broadcast_i32x4(all, 0xF000, block(3).raw)};
#elif HWY_MAX_BYTES == 32
  return hn::Combine(U32s(), block(1), block(0));
#else
  return block(0);
#endif
}

// The same of columns [4 * quarter, 4 * quarter + 4).
HWY_INLINE void TransposeQuarter(const std::byte* from, size_t stride, size_t quarter,
                                 uint32_t* to) {
  for (size_t output = 0; output < 16; output += kLanes) {
    VU32 rows[4], columns[4];
    for (size_t k = 0; k < 4; ++k) {
      rows[k] = LoadBlocks(from + (output + k) * stride + 16 * quarter, stride);
    }
    TransposeBlocks(rows, columns);
    for (size_t k = 0; k < 4; ++k) {
      hn::Store(columns[k], U32s(), to + (4 * quarter + k) * 16 + output);
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace colibri
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET != HWY_SCALAR
#endif  // per-target toggle
