/* Kernels on rows: norms, activations, quantization, rotary positions, argmax. Rows are padded with zeros to a
   multiple of PAD_TO floats, and stay so. */

INLINE f32x16 mask_tail(f32x16 x, int64_t left) {
    return left >= LANES ? x : blend(LANE_IDS < (int32_t)left, x, broadcast(0.0f));
}

static void norm_row(const struct norm *norm, const float *x, float *out, int64_t dim) {
    float mean = 0, scale = 1;
    f32x16 total = {}, squares = {};
    if (norm->kind == LAYER_NORM) {
        for (int64_t d = 0; d < dim; d += LANES) total += load(x + d);
        mean = reduce_sum(total) / (float)dim;
    }
    if (norm->kind == LAYER_NORM || norm->kind == RMS_NORM) {
        for (int64_t d = 0; d < dim; d += LANES) {
            const f32x16 y = mask_tail(load(x + d) - mean, dim - d);
            squares += y * y;
        }
        scale = 1.0f / sqrtf(reduce_sum(squares) / (float)dim + (float)norm->eps);
    }
    for (int64_t d = 0; d < dim; d += LANES) {
        f32x16 y = (load(x + d) - mean) * scale * load(norm->weight + d);
        if (norm->bias) y += load(norm->bias + d);
        store(out + d, mask_tail(y, dim - d));
    }
}

/* y is not padded. */
static void add_row(float *x, const float *y, int64_t dim) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) store(x + d, load(x + d) + load(y + d));
    for (; d < dim; d++) x[d] += y[d];
}

/* erf by formula 7.1.26 of Abramowitz and Stegun, to 1.5e-7. */
INLINE f32x16 erf_of(f32x16 x) {
    const f32x16 magnitude = abs_of(x), t = 1.0f / (magnitude * 0.3275911f + 1.0f);
    f32x16 y = broadcast(1.061405429f);
    y = y * t - 1.453152027f;
    y = y * t + 1.421413741f;
    y = y * t - 0.284496736f;
    y = y * t + 0.254829592f;
    y = 1.0f - y * t * exp_nonpositive(-magnitude * magnitude);
    return blend(x < broadcast(0.0f), -y, y);
}

INLINE f32x16 activate(int64_t kind, f32x16 x) {
    const float cubic = 0.044715f * 1.5957691216f, linear = 1.5957691216f; /* √(8/π) */
    switch (kind) {
    case RELU: return blend(x < broadcast(0.0f), broadcast(0.0f), x);
    case GELU: case GEGLU: return x * 0.5f * (erf_of(x * 0.70710678118f) + 1.0f);
    case GELU_TANH: return x * sigmoid(x * (x * x * cubic + linear));
    default: return x * sigmoid(x);
    }
}

/* Apply the activation in place; a gated row holds `dim` gates, then `dim` values, and its first `dim` are written. */
static void activate_row(int64_t kind, float *x, int64_t dim) {
    const int gated = kind == SWIGLU || kind == GEGLU;
    for (int64_t d = 0; d < dim; d += LANES) {
        f32x16 y = activate(kind, load(x + d));
        const int64_t left = dim - d;
        if (gated) y *= left >= LANES ? load(x + dim + d) : load_some(x + dim + d, left);
        store(x + d, mask_tail(y, left));
    }
}

/* Quantize row `row` of `values` to int8, each group by its own largest magnitude. NaN and infinity make the scale so,
   because their bits are larger than those of all other magnitudes. */
static void quantize_row(const struct activations *a, int64_t row, int64_t dim) {
    const float *x = a->values + row * a->stride;
    const int64_t block = row / ROW_BLOCK * ROW_BLOCK, lane = row % ROW_BLOCK;
    int8_t *quantized = a->quantized + block * a->stride + lane * 4;
    const int64_t first = block * (a->stride / GROUP) + lane;
    for (int64_t g = 0; g * GROUP < dim; g++) {
        const f32x16 low = mask_tail(load(x + g * GROUP), dim - g * GROUP);
        const int64_t left = dim - g * GROUP - LANES;
        const f32x16 high = left > 0 ? mask_tail(load(x + g * GROUP + LANES), left) : broadcast(0.0f);
        const int32_t bits = reduce_max_int(max_int((i32x16)abs_of(low), (i32x16)abs_of(high)));
        float absmax;
        memcpy(&absmax, &bits, sizeof absmax);
        const float inverse = absmax > 1e-30f ? 127.0f / absmax : 0.0f; /* below it, 1 / absmax may overflow */
        const i32x16 low_bits = (i32x16)(low * inverse + ROUND_MAGIC), high_bits = (i32x16)(high * inverse + ROUND_MAGIC);
        int8_t bytes[GROUP];
        store_bytes(bytes, low_bits);
        store_bytes(bytes + LANES, high_bits);
        for (int k = 0; k < GROUP; k += 4) memcpy(quantized + (g * GROUP + k) * ROW_BLOCK, bytes + k, 4);
        const int32_t sum = reduce_sum_int(low_byte(low_bits) + low_byte(high_bits));
        const float scale = absmax > 1e-30f || absmax != absmax ? absmax / 127.0f : 0.0f;
        a->scales[first + g * ROW_BLOCK] = scale;
        a->sums[first + g * ROW_BLOCK] = scale * (float)sum;
        a->offsets[first + g * ROW_BLOCK] = (int32_t)(-128u * (uint32_t)sum);
    }
}

/* Rotate each pair (x[e], x[e + E/2]) of a head by its angle; `cos_sin` holds E/2 cosines, then sines. */
static void rotate_head(float *x, const float *cos_sin, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    int64_t e = 0;
    for (; e + LANES <= half; e += LANES) {
        const f32x16 a = load(x + e), b = load(x + half + e), c = load(cos_sin + e), s = load(cos_sin + half + e);
        store(x + e, a * c - b * s);
        store(x + half + e, b * c + a * s);
    }
    for (; e < half; e++) {
        const float a = x[e], b = x[half + e], c = cos_sin[e], s = cos_sin[half + e];
        x[e] = a * c - b * s, x[half + e] = b * c + a * s;
    }
}

static void store_kv(const float *x, void *out, int64_t dim, int64_t bf16) {
    if (!bf16) {
        memcpy(out, x, (size_t)dim * sizeof(float));
        return;
    }
    for (int64_t d = 0; d < dim; d += LANES) {
        const int64_t left = dim - d < LANES ? dim - d : LANES;
        const u16x16 y = to_bf16(left == LANES ? load(x + d) : load_some(x + d, left));
        memcpy((uint16_t *)out + d, &y, (size_t)left * 2);
    }
}

/* The index of the largest logit, the first of equals; -1 if it is not finite or one is NaN. */
static int64_t argmax(const float *logits, int64_t count) {
    f32x16 best = broadcast(-INFINITY);
    i32x16 is_nan = {};
    int64_t n = 0;
    for (; n + LANES <= count; n += LANES) {
        const f32x16 x = load(logits + n);
        is_nan |= x != x;
        best = max_of(x, best);
    }
    float max = reduce_max(best);
    int nan = reduce_max_int(is_nan & 1);
    for (int64_t i = n; i < count; i++) {
        nan |= logits[i] != logits[i];
        if (logits[i] > max) max = logits[i];
    }
    if (nan || max == -INFINITY || max == INFINITY) return -1;
    for (n = 0; n + LANES <= count; n += LANES)
        if (reduce_max_int((load(logits + n) == broadcast(max)) & 1)) break;
    while (logits[n] != max) n++;
    return n;
}

/* Whether one of the next 64 is above the threshold, or NaN. */
INLINE int any_above(const float *x, float threshold) {
    i32x16 above = {};
    for (int n = 0; n < 4 * LANES; n += LANES) above |= ~(load(x + n) <= broadcast(threshold));
    return reduce_max_int(above & 1);
}

/* The k highest log-probabilities of a row of logits and their tokens, highest first, the first of equals first. NaN
   goes before everything, so that it shows. */
static void top_logprobs(const float *logits, int64_t count, int64_t k, float *logprobs, int32_t *tokens) {
    f32x16 best = broadcast(-INFINITY), total = {};
    int64_t n = 0, found = 0;
    for (; n + LANES <= count; n += LANES) best = max_of(load(logits + n), best);
    float max = reduce_max(best);
    for (int64_t i = n; i < count; i++) max = logits[i] > max ? logits[i] : max;
    for (n = 0; n + LANES <= count; n += LANES) total += exp_nonpositive(load(logits + n) - max);
    float sum = reduce_sum(total);
    if (n < count) {
        f32x16 last = broadcast(-INFINITY);
        memcpy(&last, logits + n, (size_t)(count - n) * sizeof(float));
        sum += reduce_sum(exp_nonpositive(last - max));
    }
    const float log_total = max + logf(sum);
#define ABOVE(x, i) ((x) > logprobs[i] || ((x) != (x) && logprobs[i] == logprobs[i]))
    for (n = 0; n < count; n += 4 * LANES) {
        const int64_t end = n + 4 * LANES < count ? n + 4 * LANES : count;
        if (found == k && end == n + 4 * LANES && !any_above(logits + n, logprobs[k - 1])) continue;
        for (int64_t i = n; i < end; i++) {
            const float x = logits[i];
            if (found == k && !ABOVE(x, k - 1)) continue;
            int64_t at = found < k ? found++ : k - 1;
            for (; at > 0 && ABOVE(x, at - 1); at--) logprobs[at] = logprobs[at - 1], tokens[at] = tokens[at - 1];
            logprobs[at] = x, tokens[at] = (int32_t)i;
        }
    }
#undef ABOVE
    for (int64_t i = 0; i < k; i++) logprobs[i] -= log_total;
}
