/* Kernels for any CPU. */

#define KERNELS clearhead_portable
#define SIMD_LEVEL 0
#include "kernels.h"
