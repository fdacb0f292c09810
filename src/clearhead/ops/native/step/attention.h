/* Attention over cached keys and values, for queries that share a key-value head: the heads of a group, and neighboring
   tokens of a row. Keys and values are read once for a few queries; each query's sums are in the same order alone. */

#define MAX_FAST_DIM 256
#define PREFETCH_KEYS 32 /* keys ahead: a step reads each once, from memory */
#if SIMD_LEVEL == 2
#define QUERY_BLOCK 6
#else
#define QUERY_BLOCK 2
#endif

/* Half `n` of 32 elements. For bf16, half 0 holds the even and half 1 the odd elements, the cheapest way to unpack
   them: queries and outputs are permuted to match. */
INLINE f32x16 load_half(const void *src, int64_t offset, int n, int bf16) {
    if (!bf16) return load((const float *)src + offset + n * LANES);
    const i32x16 pairs = *(const i32x16 *)((const uint16_t *)src + offset);
    if (n) return (f32x16)(pairs & (int32_t)0xffff0000);
    return (f32x16)(pairs << 16);
}
#define EVEN_LANES(a, b) SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD_LANES(a, b) SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#define INTERLEAVE_LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define INTERLEAVE_HIGH(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)

/* Write exp(s - max) over the scores; return 1 / their sum. */
INLINE float softmax_scores(float *scores, int64_t count, f32x16 max) {
    const f32x16 row_max = broadcast(reduce_max(max));
    f32x16 total = {};
    for (int64_t first = 0; first < count; first += LANES) {
        const f32x16 weights = exp_nonpositive(load(scores + first) - row_max);
        store(scores + first, weights);
        total += weights;
    }
    return 1.0f / reduce_sum(total);
}

INLINE f32x16 mask_scores(f32x16 dots, int64_t left) {
    return left >= LANES ? dots : blend(LANE_IDS < (int32_t)left, dots, broadcast(-INFINITY));
}

/* The sums of 16 vectors, as one vector. */
INLINE f32x16 sum_each(f32x16 *s) {
    UNROLL for (int i = 0; i < LANES; i += 2) s[i / 2] = hadd1(s[i], s[i + 1]);
    UNROLL for (int i = 0; i < LANES / 2; i += 2) s[i / 2] = hadd2(s[i], s[i + 1]);
    return hadd8(hadd4(s[0], s[1]), hadd4(s[2], s[3]));
}

/* `n` queries from `at` on, for head dims that are multiples of 32 up to MAX_FAST_DIM. */
INLINE void attend_block(const struct attention *a, int64_t at, int n, int64_t dim, int bf16) {
    const float scale = 1.0f / sqrtf((float)dim);
    const int64_t *counts = a->counts + at;
    float q[QUERY_BLOCK][MAX_FAST_DIM] __attribute__((aligned(64))), inverse[QUERY_BLOCK];
    float unpacked[LANES * MAX_FAST_DIM] __attribute__((aligned(64)));
    f32x16 max[QUERY_BLOCK];
    int64_t most = 0, least = counts[0];
    UNROLL for (int i = 0; i < n; i++) {
        for (int64_t e = 0; e < dim; e += 2 * LANES) {
            f32x16 low = load(a->queries[at + i] + e) * scale, high = load(a->queries[at + i] + e + LANES) * scale;
            const f32x16 first = low, second = high;
            if (bf16) low = EVEN_LANES(first, second), high = ODD_LANES(first, second);
            store(q[i] + e, low);
            store(q[i] + e + LANES, high);
        }
        max[i] = broadcast(-INFINITY);
        most = counts[i] > most ? counts[i] : most, least = counts[i] < least ? counts[i] : least;
    }
    const int64_t itemsize = bf16 ? 2 : 4;
    for (int64_t first = 0; first < most; first += LANES) {
        for (int64_t k = first + PREFETCH_KEYS; k < first + PREFETCH_KEYS + LANES && k < most; k++)
            for (int64_t byte = 0; byte < dim * itemsize; byte += 64) {
                const int64_t at_byte = a->slots[k] * a->slot_stride * itemsize + byte;
                __builtin_prefetch((const char *)a->keys + at_byte);
                __builtin_prefetch((const char *)a->values + at_byte, 0, 2);
            }
        const int share = bf16 && n > 1;
        for (int k = 0; share && k < LANES; k++) {
            const int64_t offset = a->slots[first + k] * a->slot_stride;
            for (int64_t e = 0; e < dim; e += 2 * LANES) {
                store(unpacked + k * dim + e, load_half(a->keys, offset + e, 0, 1));
                store(unpacked + k * dim + e + LANES, load_half(a->keys, offset + e, 1, 1));
            }
        }
        UNROLL for (int i = 0; i < n; i++) {
            if (first >= counts[i]) continue;
            f32x16 s[LANES];
            UNROLL for (int k = 0; k < LANES; k++) {
                const void *keys = share ? (const void *)unpacked : a->keys;
                const int64_t offset = share ? k * dim : a->slots[first + k] * a->slot_stride;
                s[k] = broadcast(0.0f);
                UNROLL for (int64_t e = 0; e < dim; e += 2 * LANES) {
                    s[k] += load(q[i] + e) * load_half(keys, offset + e, 0, bf16 && !share);
                    s[k] += load(q[i] + e + LANES) * load_half(keys, offset + e, 1, bf16 && !share);
                }
            }
            const f32x16 dots = mask_scores(sum_each(s), counts[i] - first);
            store(a->scores + i * a->scores_stride + first, dots);
            max[i] = max_of(dots, max[i]);
        }
    }
    UNROLL for (int i = 0; i < n; i++) inverse[i] = softmax_scores(a->scores + i * a->scores_stride, counts[i], max[i]);
    for (int64_t e = 0; e < dim; e += 4 * LANES) { /* four sums of each query stay in registers */
        const int vectors = dim - e < 4 * LANES ? 2 : 4;
        f32x16 acc[QUERY_BLOCK * 4] = {};
        for (int64_t k = 0; k < least; k++) {
            const int64_t offset = a->slots[k] * a->slot_stride + e;
            f32x16 v[4];
            UNROLL for (int p = 0; p < vectors; p++)
                v[p] = load_half(a->values, offset + p / 2 * 2 * LANES, p % 2, bf16);
            UNROLL for (int i = 0; i < n; i++) UNROLL for (int p = 0; p < vectors; p++)
                acc[i * 4 + p] += a->scores[i * a->scores_stride + k] * v[p];
        }
        UNROLL for (int i = 0; i < n; i++) {
            for (int64_t k = least; k < counts[i]; k++) {
                const int64_t offset = a->slots[k] * a->slot_stride + e;
                UNROLL for (int p = 0; p < vectors; p++) acc[i * 4 + p] +=
                    a->scores[i * a->scores_stride + k] * load_half(a->values, offset + p / 2 * 2 * LANES, p % 2, bf16);
            }
            UNROLL for (int p = 0; p < vectors; p += 2) {
                f32x16 low = acc[i * 4 + p] * inverse[i], high = acc[i * 4 + p + 1] * inverse[i], even = low, odd = high;
                if (bf16) low = INTERLEAVE_LOW(even, odd), high = INTERLEAVE_HIGH(even, odd);
                store(a->out[at + i] + e + p * LANES, low);
                store(a->out[at + i] + e + p * LANES + LANES, high);
            }
        }
    }
}

/* Up to 16 elements of a head of any size. */
INLINE f32x16 load_cached(const void *src, int64_t offset, int64_t left, int bf16) {
    left = left < LANES ? left : LANES;
    if (!bf16) return load_some((const float *)src + offset, left);
    uint16_t padded[LANES] = {0};
    memcpy(padded, (const uint16_t *)src + offset, (size_t)left * 2);
    return load_bf16(padded);
}

/* One query of any head dim. */
INLINE void attend_any(const struct attention *a, int64_t at, int64_t dim, int bf16) {
    const float scale = 1.0f / sqrtf((float)dim);
    f32x16 max = broadcast(-INFINITY);
    for (int64_t first = 0; first < a->counts[at]; first += LANES) {
        f32x16 s[LANES] = {};
        for (int k = 0; k < LANES; k++)
            for (int64_t e = 0; e < dim; e += LANES)
                s[k] += load_cached(a->queries[at], e, dim - e, 0) *
                        load_cached(a->keys, a->slots[first + k] * a->slot_stride + e, dim - e, bf16);
        const f32x16 dots = mask_scores(sum_each(s) * scale, a->counts[at] - first);
        store(a->scores + first, dots);
        max = max_of(dots, max);
    }
    const float inverse = softmax_scores(a->scores, a->counts[at], max);
    for (int64_t e = 0; e < dim; e += LANES) {
        f32x16 acc = {};
        for (int64_t k = 0; k < a->counts[at]; k++)
            acc += a->scores[k] * load_cached(a->values, a->slots[k] * a->slot_stride + e, dim - e, bf16);
        acc *= inverse;
        memcpy(a->out[at] + e, &acc, (size_t)(dim - e < LANES ? dim - e : LANES) * sizeof(float));
    }
}

#define ATTEND(n)                                                   \
    do {                                                            \
        /* constants let the compiler unroll the loops */           \
        if (dim == 64 && a->kv_bf16) attend_block(a, at, n, 64, 1); \
        else if (dim == 64) attend_block(a, at, n, 64, 0);          \
        else if (dim == 32 && a->kv_bf16) attend_block(a, at, n, 32, 1); \
        else if (dim == 32) attend_block(a, at, n, 32, 0);          \
        else if (a->kv_bf16) attend_block(a, at, n, dim, 1);        \
        else attend_block(a, at, n, dim, 0);                        \
        at += n;                                                    \
    } while (0)

/* A query without keys gives zeros. */
static void attend(const struct attention *a) {
    const int64_t dim = a->head_dim, end = a->num_queries;
    const int fast = dim % (2 * LANES) == 0 && dim <= MAX_FAST_DIM;
    for (int64_t at = 0; at < end;) {
        int64_t same = 0; /* queries in a row that have keys */
        while (at + same < end && a->counts[at + same] > 0) same++;
        if (!same) memset(a->out[at++], 0, (size_t)dim * sizeof(float));
        else if (!fast) attend_any(a, at, dim, (int)a->kv_bf16), at++;
#if QUERY_BLOCK == 6
        else if (same >= 6) ATTEND(6);
        else if (same >= 3) ATTEND(3);
#endif
        else if (same >= 2) ATTEND(2);
        else ATTEND(1);
    }
}
