// Checks of things that cannot happen. A failed one is a defect of ours, never of the input:
// input errors are exceptions (io/error.h) at start and values in the frame later.
#pragma once

#include <cstdio>
#include <cstdlib>

#define COLIBRI_CHECK(condition)                                                                 \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      std::fprintf(stderr, "colibri: internal check failed: %s (%s:%d)\n", #condition, __FILE__, \
                   __LINE__);                                                                    \
      std::abort();                                                                              \
    }                                                                                            \
  } while (0)

#ifdef NDEBUG
#define COLIBRI_DCHECK(condition) \
  do {                            \
  } while (0)
#else
#define COLIBRI_DCHECK(condition) COLIBRI_CHECK(condition)
#endif
