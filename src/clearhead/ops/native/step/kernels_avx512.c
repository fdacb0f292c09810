/* Kernels for x86-64 CPUs with AVX-512 and VNNI. */

#include "step.h"

#ifdef HAS_X86_LEVELS
#include <immintrin.h>
#include <math.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif
#define KERNELS clearhead_avx512
#define SIMD_LEVEL 2
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
typedef int no_avx512;
#endif
