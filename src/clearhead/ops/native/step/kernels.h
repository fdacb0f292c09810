/* The kernels of one SIMD level; included with KERNELS, SIMD_LEVEL and the target set. */

#include "simd.h"

#include "linear.h"

#include "rows.h"

#include "attention.h"

const struct kernels KERNELS = {linear_panels, embed,       norm_row, activate_row, quantize_row, add_row,
                                rotate_head,   store_kv,    attend,   argmax,       top_logprobs};
