/* Kernels for x86-64 CPUs with AVX2. */

#include "step.h"

#ifdef HAS_X86_LEVELS
#include <immintrin.h>
#include <math.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")
#endif
#define KERNELS clearhead_avx2
#define SIMD_LEVEL 1
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
typedef int no_avx2;
#endif
