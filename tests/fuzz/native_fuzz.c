/* libFuzzer harness of ops/native/native.c under ASan and UBSan: shapes, strides and values from the input, every
   buffer exactly as large as library.py allocates it, results compared with plain loops where they are finite. */

#include "../../src/clearhead/ops/native/native.c"

#include <stdio.h>
#include <string.h>

static const uint8_t *input;
static size_t left;

static uint32_t take(uint32_t below) {
    uint32_t value = 0;
    for (int n = 0; n < 2 && left; n++, left--) value = value << 8 | *input++;
    return value % below;
}

static void check(int holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

static int wild; /* whether floats may be infinite, NaN or huge */

static float take_float(void) {
    static const float special[] = {INFINITY, -INFINITY, NAN, 3e38f, -3e38f, 1e-40f, -0.0f, 1e30f};
    const uint32_t value = take(65536);
    if (wild && value % 16 == 0) return special[value / 16 % 8];
    return ((float)value - 32768.0f) / 8192.0f;
}

static void *array(int64_t count, int64_t size) { return calloc(count ? count : 1, size); }

static float *floats(int64_t count) {
    float *values = array(count, sizeof(float));
    for (int64_t n = 0; n < count; n++) values[n] = left ? take_float() : (float)(n % 7) - 3.0f;
    return values;
}

static float *maybe_floats(int64_t count) { return take(2) ? floats(count) : NULL; }

static float from_bf16(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static float kv(const void *values, int64_t at, int is_bf16) {
    return is_bf16 ? from_bf16(((const uint16_t *)values)[at]) : ((const float *)values)[at];
}

static void attention(void) {
    struct attention_args a = {0};
    a.batch = 1 + take(3), a.heads = 1 + take(3), a.queries = 1 + take(4), a.head_dim = 32 * (1 + take(4));
    const int64_t slots = a.queries + take(40), parts = take(2) ? 3 : 1, pad = take(2) * 32;
    a.is_bf16 = take(2);
    a.keys_visible = slots;
    a.key_stride = a.head_dim + pad, a.head_stride = slots * a.key_stride, a.batch_stride = a.heads * a.head_stride;
    if (take(2)) a.head_stride = a.head_dim + pad, a.key_stride = a.heads * a.head_stride;
    a.write_slot = parts == 3 ? (int64_t)take((uint32_t)(slots - a.queries + 1)) : -1;
    const int64_t lines = a.batch * a.queries, dim = a.heads * a.head_dim;
    a.qkv_stride = parts * dim;
    float *qkv = floats(lines * a.qkv_stride), *scales = maybe_floats(lines), *bias = maybe_floats(a.qkv_stride);
    const int64_t size = (a.batch - 1) * a.batch_stride + (a.heads - 1) * a.head_stride +
                         (slots - 1) * a.key_stride + a.head_dim;
    float *keys = floats(size), *values = floats(size);
    if (a.is_bf16)
        for (int64_t n = 0; n < size; n++) { /* in place: the upper half of each */
            uint32_t k, v;
            memcpy(&k, keys + n, 4), memcpy(&v, values + n, 4);
            ((uint16_t *)keys)[n] = (uint16_t)(k >> 16), ((uint16_t *)values)[n] = (uint16_t)(v >> 16);
        }
    const int64_t bytes = size * (a.is_bf16 ? 2 : 4); /* exactly */
    a.keys = memcpy(malloc(bytes), keys, bytes), a.values = memcpy(malloc(bytes), values, bytes);
    uint8_t *mask = NULL;
    int64_t *lengths = NULL;
    const uint32_t kind = take(3);
    if (kind == 1) {
        a.keys_visible = 1 + take((uint32_t)slots);
        mask = array(lines * a.keys_visible, 1);
        for (int64_t n = 0; n < lines * a.keys_visible; n++) mask[n] = take(2);
        for (int64_t n = 0; n < lines; n++) mask[n * a.keys_visible + take((uint32_t)a.keys_visible)] = 1;
    } else if (kind == 2) {
        lengths = array(a.batch, 8);
        for (int64_t n = 0; n < a.batch; n++) lengths[n] = (int64_t)take(60) - 2;
    }
    a.qkv = qkv, a.scales = scales, a.bias = bias, a.mask = mask, a.lengths = lengths;
    a.out = array(lines * dim, 4);
    if (take(2)) a.quantized = array(lines * dim, 1), a.quantized_scales = array(lines, 4);
    check(clearhead_attention(&a, 1 + take(3)), "attention: out of memory");
    for (int64_t n = 0; !wild && n < lines * a.heads; n++) {
        const int64_t line = n / a.heads, h = n % a.heads, b = line / a.queries;
        const int64_t at = b * a.batch_stride + h * a.head_stride;
        double weight[64], total = 0, max = -1e300;
        int64_t visible[64], count = 0;
        for (int64_t i = 0; i < a.keys_visible; i++)
            if (mask ? mask[line * a.keys_visible + i] : !lengths || i < lengths[b]) visible[count++] = i;
        for (int64_t i = 0; i < count; i++) {
            weight[i] = 0;
            for (int64_t e = 0; e < a.head_dim; e++) {
                const int64_t column = h * a.head_dim + e;
                const double q = (double)(qkv[line * a.qkv_stride + column] * (scales ? scales[line] : 1.0f) +
                                          (bias ? bias[column] : 0.0f));
                weight[i] += q * kv(a.keys, at + visible[i] * a.key_stride + e, (int)a.is_bf16);
            }
            weight[i] /= sqrt((double)a.head_dim);
            if (weight[i] > max) max = weight[i];
        }
        for (int64_t i = 0; i < count; i++) total += weight[i] = exp(weight[i] - max);
        for (int64_t e = 0; count && e < a.head_dim; e++) {
            double expected = 0, largest = 0;
            for (int64_t i = 0; i < count; i++) {
                const double v = kv(a.values, at + visible[i] * a.key_stride + e, (int)a.is_bf16);
                expected += weight[i] / total * v;
                if (fabs(v) > largest) largest = fabs(v);
            }
            check(fabs(expected - a.out[line * dim + h * a.head_dim + e]) <= 1e-2 * largest + 1e-6, "attention: value");
        }
    }
    void *owned[] = {qkv, scales, bias, keys, values, a.keys, a.values, mask, lengths, a.out, a.quantized,
                     a.quantized_scales};
    for (size_t n = 0; n < sizeof(owned) / sizeof(*owned); n++) free(owned[n]);
}

static void residual_norm(void) {
    struct residual_norm_args a = {0};
    a.rows = take(5), a.dim = 32 * (1 + take(6)), a.relu = take(2), a.eps = 1e-5f;
    const int64_t size = a.rows * a.dim;
    float *x = floats(size), *scales = maybe_floats(a.rows), *bias = maybe_floats(a.dim), *residual = maybe_floats(size);
    float *weight = maybe_floats(a.dim), *norm_bias = weight ? maybe_floats(a.dim) : NULL;
    a.x = x, a.scales = scales, a.bias = bias, a.residual = residual, a.weight = weight, a.norm_bias = norm_bias;
    float *sum = take(2) ? array(size, 4) : NULL;
    a.sum = sum && take(2) ? x : sum; /* may be the input itself */
    if (weight && take(2)) a.normed = array(size, 4);
    if (take(2)) a.quantized = array(size, 1), a.quantized_scales = array(a.rows, 4);
    check(clearhead_residual_norm_quantize(&a, 1 + take(3)), "norm: out of memory");
    const float *last = weight ? a.normed : a.sum;
    for (int64_t n = 0; !wild && last && a.quantized && n < size; n++) {
        const float scale = a.quantized_scales[n / a.dim];
        check(fabsf(((float)a.quantized[n] - 128.0f) * scale - last[n]) <= 0.51f * scale + 1e-6f, "norm: quantized");
    }
    void *owned[] = {x, scales, bias, residual, weight, norm_bias, sum, a.normed, a.quantized, a.quantized_scales};
    for (size_t n = 0; n < sizeof(owned) / sizeof(*owned); n++) free(owned[n]);
}

static void topk(void) {
    struct topk_args a = {0};
    a.rows = take(4), a.beam_count = 1 + take(4), a.vocab_size = 1 + take(200);
    const int64_t all = a.beam_count * a.vocab_size;
    a.k = 1 + take((uint32_t)(all < 12 ? all : 12));
    float *logprobs = floats(a.rows * all), *beam_scores = floats(a.rows * a.beam_count);
    a.logprobs = logprobs, a.beam_scores = beam_scores;
    a.scores = array(a.rows * a.k, 4), a.beams = array(a.rows * a.k, 8), a.tokens = array(a.rows * a.k, 8);
    clearhead_topk(&a, 1 + take(3));
    for (int64_t n = 0; n < a.rows * a.k; n++) {
        const int64_t row = n / a.k, index = a.beams[n] * a.vocab_size + a.tokens[n];
        check(index >= 0 && index < all, "topk: index");
        const float sum = logprobs[row * all + index] + beam_scores[row * a.beam_count + a.beams[n]];
        check(memcmp(&sum, a.scores + n, 4) == 0 || sum != sum, "topk: score");
        int64_t before = 0; /* better ones, and equals that come first */
        for (int64_t i = 0; i < all; i++) {
            const float other = logprobs[row * all + i] + beam_scores[row * a.beam_count + i / a.vocab_size];
            const int above = other != other ? sum == sum : other > sum;
            before += above || ((other == sum || (other != other && sum != sum)) && i < index);
        }
        check(before == n % a.k, "topk: rank");
    }
    void *owned[] = {logprobs, beam_scores, a.scores, a.beams, a.tokens};
    for (size_t n = 0; n < sizeof(owned) / sizeof(*owned); n++) free(owned[n]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input = data, left = size;
    const uint32_t kind = take(3);
    wild = (int)take(2);
    (kind == 0 ? attention : kind == 1 ? residual_norm : topk)();
    return 0;
}
