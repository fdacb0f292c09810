/* CPU kernels for a decode step: attention of a few queries per row over a KV cache, fused residual + norm + int8
   quantization between two GEMMs, and beam top-k. Called from library.py through ctypes; without this library
   PyTorch ops compute the same.

   B batch · H heads · T queries · S keys · E head dim · M rows of a matrix · D dim

   SIMD uses GCC vector extensions, 16 floats wide, compiled for several x86-64 levels; threads are torch's OpenMP. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the bf16 loads assume a little-endian machine"
#endif

#define LANES 16
#define PREFETCH_BYTES (1 << 17) /* prefetched per head: a good part of one core's cache */
#define VERSION 2                /* must equal VERSION in library.py */
typedef float f32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint8_t u8x16 __attribute__((vector_size(16), aligned(1), may_alias));

static const i32x16 LANE_IDS = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

#define INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__)
#define MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MULTIVERSION
#endif

INLINE f32x16 load(const float *src) { return *(const f32x16 *)src; }
INLINE void store(float *dst, f32x16 x) { *(f32x16 *)dst = x; }
INLINE f32x16 broadcast(float x) { return x - (f32x16){}; }
INLINE i32x16 blend_bits(i32x16 mask, i32x16 a, i32x16 b) { return (a & mask) | (b & ~mask); }
INLINE f32x16 blend(i32x16 mask, f32x16 a, f32x16 b) { return (f32x16)blend_bits(mask, (i32x16)a, (i32x16)b); }

/* Load half (0 or 1) of 32 values stored in fp32, or in bf16 (the upper 16 bits of an fp32). For bf16, half 0 holds the
   even and half 1 the odd elements, the cheapest way to unpack them; queries are permuted to match. */
INLINE f32x16 load_kv(const void *src, int64_t offset, int half, int is_bf16) {
    if (!is_bf16) return load((const float *)src + offset + half * LANES);
    const i32x16 pairs = *(const i32x16 *)((const uint16_t *)src + offset);
    if (half) return (f32x16)(pairs & (int32_t)0xffff0000);
    return (f32x16)(pairs << 16);
}
INLINE void store_kv(void *dst, int64_t offset, f32x16 x, int is_bf16) {
    if (!is_bf16) return store((float *)dst + offset, x);
    u32x16 bits = (u32x16)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* round to nearest even */
    i32x16 result = blend_bits(x == x, (i32x16)rounded, (i32x16)(bits >> 16 | 64)); /* NaN stays NaN */
    *(u16x16 *)((uint16_t *)dst + offset) = __builtin_convertvector((u32x16)result, u16x16);
}

/* Pairwise horizontal adds at distance 1, 2, 4 and 8 of two vectors: applied in turn, they reduce sixteen vectors to
   one vector of their sums. */
#define SHUFFLE(a, b, ...) (__builtin_shufflevector(a, b, __VA_ARGS__))
INLINE f32x16 hadd1(f32x16 a, f32x16 b) {
    return SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}
INLINE f32x16 hadd2(f32x16 a, f32x16 b) {
    return SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
INLINE f32x16 hadd4(f32x16 a, f32x16 b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
}
INLINE f32x16 hadd8(f32x16 a, f32x16 b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
#define INTERLEAVE_LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define INTERLEAVE_HIGH(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define EVEN_LANES(a, b) SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD_LANES(a, b) SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
INLINE float reduce_sum(f32x16 x) {
    x = hadd1(x, x);
    x = hadd2(x, x);
    x = hadd4(x, x);
    return x[0] + x[8];
}
#define MAX_WITH_SHUFFLED(x, ...) (blend(SHUFFLE(x, x, __VA_ARGS__) > x, SHUFFLE(x, x, __VA_ARGS__), x))
INLINE float reduce_max(f32x16 x) {
    x = MAX_WITH_SHUFFLED(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x = MAX_WITH_SHUFFLED(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    x = MAX_WITH_SHUFFLED(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return x[0] > x[1] ? x[0] : x[1];
}

/* exp(x) for x <= 0 as 2^n times a polynomial, accurate to the last bit or two; exp(-inf) = 0, NaN stays NaN. */
INLINE f32x16 exp_nonpositive(f32x16 x) {
    const float log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    const float round_magic = 12582912.0f; /* 1.5 · 2^23: adding it rounds to an integer */
    i32x16 underflow = x < broadcast(-87.0f);
    x = blend(underflow, broadcast(0.0f), x);
    f32x16 shifted = x * log2e + round_magic, n = shifted - round_magic;
    f32x16 r = x - n * ln2_high - n * ln2_low;
    f32x16 y = broadcast(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    f32x16 power_of_two = (f32x16)(((i32x16)shifted << 23) + 0x3f800000);
    return blend(underflow, broadcast(0.0f), y * power_of_two);
}

/* Attention of one query q (E) over `count` keys and values at the given element offsets: out = softmax(q kᵀ / √E) v.
   `offsets` is padded to a multiple of 16 with copies of its last entry; `scores` is scratch space of that length.
   With bf16 keys, q is in the order of `load_kv`. */
INLINE void attend_query(const float *q, const void *keys, const void *values, const int64_t *offsets, int64_t count,
                         int64_t head_dim, int is_bf16, float *scores, float *out) {
    const float scale = 1.0f / sqrtf((float)head_dim);
    f32x16 max = broadcast(-INFINITY), total = {};
    for (int64_t first = 0; first < count; first += LANES) {
        f32x16 s[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            const int64_t offset = offsets[first + i];
            s[i] = load(q) * load_kv(keys, offset, 0, is_bf16) + load(q + LANES) * load_kv(keys, offset, 1, is_bf16);
#pragma GCC unroll 2
            for (int64_t e = 2 * LANES; e < head_dim; e += 2 * LANES)
                s[i] += load(q + e) * load_kv(keys, offset + e, 0, is_bf16) +
                        load(q + e + LANES) * load_kv(keys, offset + e, 1, is_bf16);
        }
#pragma GCC unroll 8
        for (int i = 0; i < LANES; i += 2) s[i / 2] = hadd1(s[i], s[i + 1]);
#pragma GCC unroll 4
        for (int i = 0; i < LANES / 2; i += 2) s[i / 2] = hadd2(s[i], s[i + 1]);
        f32x16 dots = hadd8(hadd4(s[0], s[1]), hadd4(s[2], s[3])) * scale;
        dots = blend(LANE_IDS < (int32_t)(count - first), dots, broadcast(-INFINITY));
        store(scores + first, dots);
        max = blend(dots > max, dots, max);
    }
    const f32x16 row_max = broadcast(reduce_max(max));
    for (int64_t first = 0; first < count; first += LANES) {
        f32x16 weights = exp_nonpositive(load(scores + first) - row_max);
        store(scores + first, weights);
        total += weights;
    }
    const float inv_total = 1.0f / reduce_sum(total);
    for (int64_t e = 0; e < head_dim; e += 4 * LANES) { /* four accumulators at a time stay in registers */
        const int vectors = head_dim - e < 4 * LANES ? 2 : 4;
        f32x16 acc[4] = {};
        for (int64_t i = 0; i < count; i++)
#pragma GCC unroll 4
            for (int p = 0; p < vectors; p++)
                acc[p] += scores[i] * load_kv(values, offsets[i] + e + p / 2 * 2 * LANES, p % 2, is_bf16);
        for (int p = 0; p < vectors; p += 2) {
            f32x16 low = acc[p] * inv_total, high = acc[p + 1] * inv_total, even = low, odd = high;
            if (is_bf16) low = INTERLEAVE_LOW(even, odd), high = INTERLEAVE_HIGH(even, odd);
            store(out + e + p * LANES, low);
            store(out + e + p * LANES + LANES, high);
        }
    }
}

/* Symmetric int8 quantization of a row with zero point 128; absmax is the row's largest magnitude. */
INLINE void quantize_row(const float *row, int64_t dim, float absmax, uint8_t *quantized, float *scale) {
    const float inv_scale = absmax > 1e-30f ? 127.0f / absmax : 0.0f; /* below it, 1 / absmax may overflow */
    for (int64_t d = 0; d < dim; d += LANES) {
        f32x16 y = load(row + d) * inv_scale + (12582912.0f + 128.0f); /* 1.5 · 2^23: the addition rounds */
        *(u8x16 *)(quantized + d) = __builtin_convertvector((i32x16)y, u8x16);
    }
    *scale = absmax > 1e-30f || absmax != absmax ? absmax / 127.0f : 0.0f;
}

/* A row's largest magnitude from its lane-wise maxima; NaN if the row has one, which its sum shows. */
INLINE float max_or_nan(f32x16 max, f32x16 total) {
    const float row_sum = reduce_sum(total);
    return row_sum == row_sum ? reduce_max(max) : NAN;
}

struct attention_args {
    const float *qkv;               /* (B, T, N) GEMM output: the queries of all heads, then, to be appended to the */
    int64_t qkv_stride, write_slot; /* cache, keys and values; N, and the first slot to write, or -1 */
    const float *scales;            /* (B, T) row scales of the GEMM output, or NULL */
    const float *bias;              /* (N,) added after scaling, or NULL */
    void *keys, *values;            /* (B, H, S, E) each, with the same strides, in elements: */
    int64_t batch_stride, head_stride, key_stride;
    const uint8_t *mask;     /* (B, T, S) nonzero where a query may attend; or */
    const int64_t *lengths;  /* (B,) number of keys of each row; with neither, all keys */
    float *out;              /* (B, T, H, E) */
    uint8_t *quantized;      /* (B, T, H, E) the output in int8 with zero point 128, or NULL */
    float *quantized_scales; /* (B, T) its scales */
    int64_t batch, heads, queries, keys_visible, head_dim, is_bf16;
};

/* Scale one head's E values of the GEMM output from column n on, add the bias and store them at dst + offset. */
INLINE void project_head(const struct attention_args *a, int64_t line, int64_t n, void *dst, int64_t offset,
                         int is_bf16) {
    const float scale = a->scales ? a->scales[line] : 1.0f;
    for (int64_t e = 0; e < a->head_dim; e += LANES) {
        f32x16 x = load(a->qkv + line * a->qkv_stride + n + e) * scale;
        if (a->bias) x += load(a->bias + n + e);
        store_kv(dst, offset + e, x, is_bf16);
    }
}

/* Write the number of keys that query t of row b attends to, then their offsets, padded to a multiple of 16. */
INLINE void visible_offsets(const struct attention_args *a, int64_t b, int64_t t, int64_t *list) {
    int64_t count = 0, *offsets = list + 1;
    if (a->mask) {
        const uint8_t *mask = a->mask + (b * a->queries + t) * a->keys_visible;
        for (int64_t i = 0; i < a->keys_visible; i++) {
            offsets[count] = i * a->key_stride;
            count += mask[i];
        }
    } else {
        count = a->lengths && a->lengths[b] < a->keys_visible ? a->lengths[b] : a->keys_visible;
        if (count < 0) count = 0;
        for (int64_t i = 0; i < count; i++) offsets[i] = i * a->key_stride;
    }
    *list = count;
    for (int64_t i = count; i % LANES; i++) offsets[i] = offsets[count - 1];
}

/* Attention for items [first, last) of the B · H (row, head) pairs; false if out of memory. */
MULTIVERSION static int attention_range(const struct attention_args *a, int64_t first, int64_t last) {
    const int64_t padded_keys = (a->keys_visible + LANES - 1) / LANES * LANES, itemsize = a->is_bf16 ? 2 : 4;
    const int64_t model_dim = a->heads * a->head_dim;
    const int64_t lists = a->mask ? a->queries : 1; /* offset lists per row: all heads of a row share a mask */
    const int64_t list_size = lists * (padded_keys + 1);
    int64_t *offsets = malloc((list_size + padded_keys) * sizeof(int64_t) + a->head_dim * sizeof(float));
    if (!offsets) return 0;
    float *scores = (float *)(offsets + list_size), *q = scores + 2 * padded_keys;
    char *keys = a->keys, *values = a->values;
    for (int64_t item = first; item < last; item++) {
        const int64_t b = item / a->heads, h = item % a->heads, next = item + 1;
        if (item == first || h == 0)
            for (int64_t t = 0; t < lists; t++) visible_offsets(a, b, t, offsets + t * (padded_keys + 1));
        const int64_t head_at = (b * a->batch_stride + h * a->head_stride) * itemsize;
        const int64_t next_at = (next / a->heads * a->batch_stride + next % a->heads * a->head_stride) * itemsize;
        if (next < last) /* memory-bound: prefetch the next head's keys and values */
            for (int64_t n = 0; n < a->keys_visible * a->key_stride * itemsize && n < PREFETCH_BYTES; n += 64) {
                __builtin_prefetch(keys + next_at + n, 0, 2);
                __builtin_prefetch(values + next_at + n, 0, 2);
            }
        for (int64_t t = 0; a->write_slot >= 0 && t < a->queries; t++) {
            const int64_t line = b * a->queries + t, offset = (a->write_slot + t) * a->key_stride;
            project_head(a, line, model_dim + h * a->head_dim, keys + head_at, offset, (int)a->is_bf16);
            project_head(a, line, 2 * model_dim + h * a->head_dim, values + head_at, offset, (int)a->is_bf16);
        }
        for (int64_t t = 0; t < a->queries; t++) {
            const int64_t *list = offsets + (a->mask ? t * (padded_keys + 1) : 0), line = b * a->queries + t;
            float *out = a->out + line * model_dim + h * a->head_dim;
            project_head(a, line, h * a->head_dim, q, 0, 0);
            for (int64_t e = 0; a->is_bf16 && e < a->head_dim; e += 2 * LANES) { /* the order of load_kv */
                f32x16 low = load(q + e), high = load(q + e + LANES);
                store(q + e, EVEN_LANES(low, high));
                store(q + e + LANES, ODD_LANES(low, high));
            }
#define ATTEND(dim, bf16) attend_query(q, keys + head_at, values + head_at, list + 1, *list, dim, bf16, scores, out)
            if (a->head_dim == 64 && a->is_bf16) ATTEND(64, 1); /* constants let the compiler unroll the loops */
            else if (a->head_dim == 64) ATTEND(64, 0);
            else if (a->head_dim == 32 && a->is_bf16) ATTEND(32, 1);
            else if (a->head_dim == 32) ATTEND(32, 0);
            else if (a->is_bf16) ATTEND(a->head_dim, 1);
            else ATTEND(a->head_dim, 0);
        }
        for (int64_t t = 0; a->quantized && h == a->heads - 1 && t < a->queries; t++) { /* all heads are done */
            const int64_t line = b * a->queries + t;
            const float *out = a->out + line * model_dim;
            f32x16 max = {}, total = {};
            for (int64_t d = 0; d < model_dim; d += LANES) {
                f32x16 y = load(out + d), magnitude = blend(y < broadcast(0.0f), -y, y);
                max = blend(magnitude > max, magnitude, max);
                total += y;
            }
            quantize_row(out, model_dim, max_or_nan(max, total), a->quantized + line * model_dim,
                         a->quantized_scales + line);
        }
    }
    free(offsets);
    return 1;
}

/* False if out of memory. Where rows are quantized, one thread computes all heads of a row. */
int clearhead_attention(const struct attention_args *a, int64_t threads) {
    const int64_t chunk = a->quantized ? a->heads : 1, chunks = a->batch * a->heads / chunk;
    int done = 1;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(&: done)
    for (int64_t n = 0; n < threads; n++)
        done &= attention_range(a, chunks * n / threads * chunk, chunks * (n + 1) / threads * chunk);
    return done;
}

struct residual_norm_args {          /* all pointers but x may be NULL */
    const float *x;                  /* (M, D) GEMM output */
    const float *scales;             /* (M,) its row scales */
    const float *bias;               /* (D,) added after scaling */
    const float *residual;           /* (M, D) added next */
    const float *weight, *norm_bias; /* (D,) of the LayerNorm */
    float *sum, *normed;             /* (M, D) outputs before and after the norm */
    uint8_t *quantized;              /* (M, D) the last of these in int8 with zero point 128 */
    float *quantized_scales;         /* (M,) its scales */
    int64_t rows, dim, relu;
    float eps;
};

MULTIVERSION static int residual_norm_range(const struct residual_norm_args *a, int64_t first, int64_t last) {
    const int64_t dim = a->dim;
    float *row = malloc(dim * sizeof(float));
    if (!row) return 0;
    for (int64_t m = first; m < last; m++) {
        const float *x = a->x + m * dim, *residual = a->residual ? a->residual + m * dim : 0;
        const float scale = a->scales ? a->scales[m] : 1.0f;
        f32x16 total = {}, max = {};
        for (int64_t d = 0; d < dim; d += LANES) {
            f32x16 y = load(x + d) * scale;
            if (a->bias) y += load(a->bias + d);
            if (residual) y += load(residual + d);
            if (a->relu) y = blend(y < broadcast(0.0f), broadcast(0.0f), y);
            store(row + d, y);
            total += y;
            if (a->sum) store(a->sum + m * dim + d, y);
            f32x16 magnitude = blend(y < broadcast(0.0f), -y, y);
            max = blend(magnitude > max, magnitude, max);
        }
        if (a->weight) {
            const float mean = reduce_sum(total) / (float)dim;
            f32x16 squares = {};
            for (int64_t d = 0; d < dim; d += LANES) {
                f32x16 y = load(row + d) - mean;
                squares += y * y;
            }
            const float rstd = 1.0f / sqrtf(reduce_sum(squares) / (float)dim + a->eps);
            max = total = broadcast(0.0f);
            for (int64_t d = 0; d < dim; d += LANES) {
                f32x16 y = (load(row + d) - mean) * rstd * load(a->weight + d);
                if (a->norm_bias) y += load(a->norm_bias + d);
                store(row + d, y);
                if (a->normed) store(a->normed + m * dim + d, y);
                f32x16 magnitude = blend(y < broadcast(0.0f), -y, y);
                max = blend(magnitude > max, magnitude, max);
                total += y;
            }
        }
        if (a->quantized)
            quantize_row(row, dim, max_or_nan(max, total), a->quantized + m * dim, a->quantized_scales + m);
    }
    free(row);
    return 1;
}

/* False if out of memory. */
int clearhead_residual_norm_quantize(const struct residual_norm_args *a, int64_t threads) {
    int done = 1;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(&: done)
    for (int64_t n = 0; n < threads; n++)
        done &= residual_norm_range(a, a->rows * n / threads, a->rows * (n + 1) / threads);
    return done;
}

struct topk_args {
    const float *logprobs;    /* (B, beams, V) */
    const float *beam_scores; /* (B, beams) added to them */
    float *scores;            /* (B, k) the highest sums in descending order, ties in order of appearance */
    int64_t *beams;           /* (B, k) */
    int64_t *tokens;          /* (B, k) */
    int64_t rows, beam_count, vocab_size, k;
};
#define TOPK_BLOCK (4 * LANES)

/* Insert a candidate among the k best so far, after its equals; NaN goes before everything, so that it shows. Return
   the new number of candidates. */
INLINE int64_t insert(float x, int64_t beam, int64_t token, int64_t count, int64_t k, float *scores, int64_t *beams,
                      int64_t *tokens) {
#define ABOVE(n) (x > scores[n] || (x != x && scores[n] == scores[n]))
    if (count == k && !ABOVE(count - 1)) return count;
    int64_t i = count < k ? count++ : count - 1;
    for (; i > 0 && ABOVE(i - 1); i--) {
        scores[i] = scores[i - 1];
        beams[i] = beams[i - 1];
        tokens[i] = tokens[i - 1];
    }
    scores[i] = x;
    beams[i] = beam;
    tokens[i] = token;
    return count;
}

/* Whether any of the next TOPK_BLOCK candidates exceeds the threshold (or is NaN): most blocks have none. */
INLINE int any_above(const float *logprobs, float beam_score, float threshold) {
    i32x16 above = {};
    for (int n = 0; n < TOPK_BLOCK; n += LANES) above |= ~(load(logprobs + n) + beam_score <= broadcast(threshold));
    return reduce_sum(blend(above, broadcast(1.0f), broadcast(0.0f))) > 0;
}

MULTIVERSION static void topk_range(const struct topk_args *a, int64_t first, int64_t last) {
    for (int64_t b = first; b < last; b++) {
        float *scores = a->scores + b * a->k;
        int64_t *beams = a->beams + b * a->k, *tokens = a->tokens + b * a->k, count = 0;
        for (int64_t beam = 0; beam < a->beam_count; beam++) {
            const float beam_score = a->beam_scores[b * a->beam_count + beam];
            const float *logprobs = a->logprobs + (b * a->beam_count + beam) * a->vocab_size;
            for (int64_t n = 0; n < a->vocab_size; n += TOPK_BLOCK) {
                const int64_t end = n + TOPK_BLOCK < a->vocab_size ? n + TOPK_BLOCK : a->vocab_size;
                if (count == a->k && end == n + TOPK_BLOCK && !any_above(logprobs + n, beam_score, scores[count - 1]))
                    continue;
                for (int64_t i = n; i < end; i++)
                    count = insert(logprobs[i] + beam_score, beam, i, count, a->k, scores, beams, tokens);
            }
        }
    }
}

int clearhead_topk(const struct topk_args *a, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < threads; n++) topk_range(a, a->rows * n / threads, a->rows * (n + 1) / threads);
    return 1;
}

/* Version and struct sizes; library.py refuses a library where this differs from its own. */
int64_t clearhead_abi(void) {
    return VERSION +
           1000 * (sizeof(struct attention_args) + sizeof(struct residual_norm_args) + sizeof(struct topk_args));
}
