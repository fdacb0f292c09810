/* Attention of one token over cached keys and values, for the query heads that share a key-value head. */

INLINE f32x16 load_cached(const void *src, int64_t offset, int bf16) {
    return bf16 ? load_bf16((const uint16_t *)src + offset) : load((const float *)src + offset);
}

/* The last `left` elements of a head whose size is no multiple of 16. */
INLINE f32x16 load_tail(const void *src, int64_t offset, int bf16, int64_t left) {
    if (!bf16) return load_some((const float *)src + offset, left);
    uint16_t padded[LANES] = {0};
    memcpy(padded, (const uint16_t *)src + offset, (size_t)left * 2);
    return load_bf16(padded);
}

INLINE void attend_head(const struct attention *a, const float *q, float *out, float *scores, int64_t head_dim,
                        int bf16) {
    const float scale = 1.0f / sqrtf((float)head_dim);
    const int64_t whole = head_dim / LANES * LANES, left = head_dim - whole;
    const f32x16 q_tail = left ? load_some(q + whole, left) : broadcast(0.0f);
    f32x16 max = broadcast(-INFINITY), total = {};
    for (int64_t first = 0; first < a->count; first += LANES) {
        f32x16 s[LANES];
        _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) {
            const int64_t offset = a->slots[first + i] * a->slot_stride;
            s[i] = broadcast(0.0f);
            _Pragma("GCC unroll 8") for (int64_t e = 0; e < whole; e += LANES)
                s[i] += load(q + e) * load_cached(a->keys, offset + e, bf16);
            if (left) s[i] += q_tail * load_tail(a->keys, offset + whole, bf16, left);
        }
        _Pragma("GCC unroll 8") for (int i = 0; i < LANES; i += 2) s[i / 2] = hadd1(s[i], s[i + 1]);
        _Pragma("GCC unroll 4") for (int i = 0; i < LANES / 2; i += 2) s[i / 2] = hadd2(s[i], s[i + 1]);
        f32x16 dots = hadd8(hadd4(s[0], s[1]), hadd4(s[2], s[3])) * scale;
        if (a->count - first < LANES) dots = blend(LANE_IDS < (int32_t)(a->count - first), dots, broadcast(-INFINITY));
        store(scores + first, dots);
        max = max_of(dots, max);
    }
    const f32x16 row_max = broadcast(reduce_max(max));
    for (int64_t first = 0; first < a->count; first += LANES) {
        const f32x16 weights = exp_nonpositive(load(scores + first) - row_max);
        store(scores + first, weights);
        total += weights;
    }
    const float inverse = 1.0f / reduce_sum(total);
    for (int64_t e = 0; e < whole; e += 4 * LANES) { /* four sums at a time stay in registers */
        const int vectors = whole - e < 4 * LANES ? (int)((whole - e) / LANES) : 4;
        f32x16 acc[4] = {};
        for (int64_t i = 0; i < a->count; i++) {
            const int64_t offset = a->slots[i] * a->slot_stride + e;
            _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++)
                acc[v] += scores[i] * load_cached(a->values, offset + v * LANES, bf16);
        }
        _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) store(out + e + v * LANES, acc[v] * inverse);
    }
    if (left) {
        f32x16 acc = {};
        for (int64_t i = 0; i < a->count; i++)
            acc += scores[i] * load_tail(a->values, a->slots[i] * a->slot_stride + whole, bf16, left);
        acc *= inverse;
        memcpy(out + whole, &acc, (size_t)left * sizeof(float));
    }
}

/* queries and out: (query_heads, E); scores: room for `count` padded to 16. Without keys the result is zeros. */
static void attend(const struct attention *a, const float *queries, float *out, float *scores) {
    for (int64_t h = 0; h < a->query_heads; h++) {
        const float *q = queries + h * a->head_dim;
        float *to = out + h * a->head_dim;
        if (a->count == 0) memset(to, 0, (size_t)a->head_dim * sizeof(float));
        /* constants let the compiler unroll the loops */
        else if (a->head_dim == 64 && a->kv_bf16) attend_head(a, q, to, scores, 64, 1);
        else if (a->head_dim == 64) attend_head(a, q, to, scores, 64, 0);
        else if (a->head_dim == 32 && a->kv_bf16) attend_head(a, q, to, scores, 32, 1);
        else if (a->head_dim == 32) attend_head(a, q, to, scores, 32, 0);
        else if (a->kv_bf16) attend_head(a, q, to, scores, a->head_dim, 1);
        else attend_head(a, q, to, scores, a->head_dim, 0);
    }
}
