// Which Highway targets exist and how a file is compiled for each. Every SIMD .cc defines
// HWY_TARGET_INCLUDE as its own path and includes this first; it takes the place of
// foreach_target.h and highway.h. No include guard: read again for each target.

// Vectors whose length is known only at run time cannot be held in arrays, which all our register
// blocks are; on such machines the fixed-length target (NEON) runs. Machines without SSE4.1 are
// older than the memory this engine needs: they take the portable target, and builds get shorter.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3)
#endif

#include "hwy/foreach_target.h"  // must come before highway.h
#include "hwy/highway.h"

// Before 1.0.4 the AVX3_DL target enables AVX-VNNI in place of AVX-512 VNNI: intrinsics of the
// latter do not compile, and compilers may emit the former, which Ice Lake lacks.
// COLIBRI_ATTR is what lambdas need in place of HWY_ATTR.
#undef COLIBRI_BEFORE_NAMESPACE
#undef COLIBRI_ATTR
#if HWY_TARGET == HWY_AVX3_DL && HWY_MAJOR == 1 && HWY_MINOR == 0 && HWY_PATCH < 4
#define COLIBRI_BEFORE_NAMESPACE()                  \
  HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512vnni") \
  static_assert(true, "")
#define COLIBRI_ATTR __attribute__((target(HWY_TARGET_STR ",avx512vnni")))
#else
#define COLIBRI_BEFORE_NAMESPACE() HWY_BEFORE_NAMESPACE()
#define COLIBRI_ATTR HWY_ATTR
#endif
