/* Linear layers on packed weights, for one or many rows.

   An output is a sum in the order of the inputs, whatever the number of rows, so that a row's result never depends on
   the others. A tile is a few rows times a few panels, whose sums stay in registers. */

#if SIMD_LEVEL == 2
#define TILE_ROWS 8
#define TILE_PANELS 3 /* of fp32 and bf16 */
#define INT_PANELS 2
#else
#define TILE_ROWS 4
#define TILE_PANELS 1
#define INT_PANELS 1
#endif

INLINE int64_t panel_groups(const struct linear *l) { return (l->inputs + GROUP - 1) / GROUP; }

/* Bytes of a panel. */
INLINE int64_t panel_size(const struct linear *l) {
    if (l->kind == FP32) return l->inputs * LANES * 4;
    if (l->kind == BF16) return (l->inputs + 1) / 2 * LANES * 4;
    return panel_groups(l) * GROUP * LANES / (l->kind == INT4 ? 2 : 1);
}

INLINE void fp32_tile(const struct linear *l, const struct activations *in, int64_t row, int64_t panel, int rows,
                      int panels, f32x16 *acc) {
    const int64_t size = l->inputs * LANES;
    const float *weight = (const float *)l->weight + panel * size, *x = in->values + row * in->stride;
    for (int64_t k = 0; k < l->inputs; k++) {
        f32x16 w[TILE_PANELS];
        UNROLL for (int p = 0; p < panels; p++) w[p] = load(weight + p * size + k * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            const f32x16 value = broadcast(x[r * in->stride + k]);
            UNROLL for (int p = 0; p < panels; p++) acc[r * panels + p] += value * w[p];
        }
    }
}

INLINE void bf16_tile(const struct linear *l, const struct activations *in, int64_t row, int64_t panel, int rows,
                      int panels, f32x16 *acc) {
    const int64_t pairs = (l->inputs + 1) / 2, size = pairs * LANES;
    const int32_t *weight = (const int32_t *)l->weight + panel * size;
    const float *x = in->values + row * in->stride;
    for (int64_t k = 0; k < pairs; k++) {
        f32x16 even[TILE_PANELS], odd[TILE_PANELS];
        UNROLL for (int p = 0; p < panels; p++) {
            const i32x16 w = *(const i32x16 *)(weight + p * size + k * LANES);
            even[p] = (f32x16)(w << 16), odd[p] = (f32x16)(w & (int32_t)0xffff0000);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            const f32x16 first = broadcast(x[r * in->stride + 2 * k]), second = broadcast(x[r * in->stride + 2 * k + 1]);
            UNROLL for (int p = 0; p < panels; p++) {
                acc[r * panels + p] += first * even[p];
                acc[r * panels + p] += second * odd[p];
            }
        }
    }
}

INLINE int32_t load_int(const int8_t *src) {
    int32_t x;
    memcpy(&x, src, sizeof x);
    return x;
}

/* Rows of int8 are interleaved in blocks of ROW_BLOCK: one pointer reads them all. */
#define ROWS_AT(array, size) (in->array + row / ROW_BLOCK * ROW_BLOCK * (size) + row % ROW_BLOCK)

INLINE void int8_tile(const struct linear *l, const struct activations *in, int64_t row, int64_t panel, int rows,
                      int panels, f32x16 *acc) {
    const int64_t groups = panel_groups(l), stride = in->stride / GROUP, size = groups * GROUP * LANES;
    const uint8_t *weight = (const uint8_t *)l->weight + panel * size;
    const uint16_t *scales = l->scales + panel * groups * LANES;
    const int8_t *x = in->quantized + row / ROW_BLOCK * ROW_BLOCK * in->stride + row % ROW_BLOCK * 4;
    const float *x_scales = ROWS_AT(scales, stride);
    const int32_t *offsets = ROWS_AT(offsets, stride);
    for (int64_t g = 0; g < groups; g++) {
        i32x16 dots[TILE_ROWS * INT_PANELS];
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < panels; p++)
            dots[r * panels + p] = dot_start(offsets[g * ROW_BLOCK + r]);
        UNROLL for (int k = 0; k < GROUP; k += 4) {
            bytes64 w[INT_PANELS];
            UNROLL for (int p = 0; p < panels; p++) w[p] = load_bytes(weight + p * size + (g * GROUP + k) * LANES);
            UNROLL for (int r = 0; r < rows; r++) {
                const int32_t value = load_int(x + (g * GROUP + k) * ROW_BLOCK + r * 4);
                UNROLL for (int p = 0; p < panels; p++) dots[r * panels + p] = dot_int8(dots[r * panels + p], w[p], value);
            }
        }
        f32x16 scale[INT_PANELS];
        UNROLL for (int p = 0; p < panels; p++) scale[p] = load_fp16(scales + (p * groups + g) * LANES);
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < panels; p++)
            acc[r * panels + p] += to_float(dots[r * panels + p]) * (scale[p] * x_scales[g * ROW_BLOCK + r]);
    }
}

INLINE void int4_tile(const struct linear *l, const struct activations *in, int64_t row, int64_t panel, int rows,
                      int panels, f32x16 *acc) {
    const int64_t groups = panel_groups(l), stride = in->stride / GROUP, size = groups * GROUP * LANES / 2;
    const uint8_t *weight = (const uint8_t *)l->weight + panel * size;
    const uint16_t *scales = l->scales + panel * groups * 2 * LANES;
    const int8_t *x = in->quantized + row / ROW_BLOCK * ROW_BLOCK * in->stride + row % ROW_BLOCK * 4;
    const float *x_scales = ROWS_AT(scales, stride), *sums = ROWS_AT(sums, stride);
    for (int64_t g = 0; g < groups; g++) {
        i32x16 dots[TILE_ROWS * INT_PANELS];
        UNROLL for (int r = 0; r < rows * panels; r++) dots[r] = (i32x16){};
        UNROLL for (int k = 0; k < GROUP; k += 8) {
            bytes64 low[INT_PANELS], high[INT_PANELS];
            UNROLL for (int p = 0; p < panels; p++) {
                const bytes64 w = load_bytes(weight + p * size + (g * GROUP + k) * LANES / 2);
                low[p] = low_bits(w), high[p] = high_bits(w);
            }
            UNROLL for (int r = 0; r < rows; r++) {
                const int8_t *at = x + (g * GROUP + k) * ROW_BLOCK + r * 4;
                const int32_t first = load_int(at), second = load_int(at + 4 * ROW_BLOCK);
                UNROLL for (int p = 0; p < panels; p++)
                    dots[r * panels + p] = dot_int4(dot_int4(dots[r * panels + p], low[p], first), high[p], second);
            }
        }
        f32x16 scale[INT_PANELS], minimum[INT_PANELS];
        UNROLL for (int p = 0; p < panels; p++) {
            scale[p] = load_fp16(scales + (p * groups + g) * 2 * LANES);
            minimum[p] = load_fp16(scales + ((p * groups + g) * 2 + 1) * LANES);
        }
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < panels; p++) {
            acc[r * panels + p] += to_float(dots[r * panels + p]) * (scale[p] * x_scales[g * ROW_BLOCK + r]);
            acc[r * panels + p] += minimum[p] * sums[g * ROW_BLOCK + r];
        }
    }
}

/* Write a tile: scale, add the bias and, with `add`, what `out` holds (the residual). */
INLINE void finish_tile(const struct linear *l, const f32x16 *acc, int64_t row, int64_t panel, int rows, int panels,
                        float *out, int64_t out_stride, int add) {
    const float factor = (float)l->factor;
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < panels; p++) {
        float *dst = out + (row + r) * out_stride + (panel + p) * LANES;
        f32x16 y = acc[r * panels + p];
        if (l->kind >= INT8) y *= factor;
        if (l->bias) y += load(l->bias + (panel + p) * LANES);
        if (add) y += load(dst);
        store(dst, y);
    }
}

#define TILE(kind, rows, panels)                                                   \
    do {                                                                           \
        f32x16 acc[(rows) * (panels)] = {};                                        \
        kind##_tile(l, in, row, panel, rows, panels, acc);                         \
        finish_tile(l, acc, row, panel, rows, panels, out, out_stride, add);       \
        row += rows;                                                               \
    } while (0)

/* One function for each kind and number of panels: all rows times these panels. */
#define PANEL_FUNCTION(kind, panels)                                                                             \
    static void kind##_times_##panels(const struct linear *l, const struct activations *in, int64_t row,         \
                                      int64_t end, int64_t panel, float *out, int64_t out_stride, int add) {     \
        while (end - row >= TILE_ROWS) TILE(kind, TILE_ROWS, panels);                                            \
        if (TILE_ROWS > 4 && end - row >= 4) TILE(kind, 4, panels);                                              \
        if (end - row >= 2) TILE(kind, 2, panels);                                                               \
        if (end - row >= 1) TILE(kind, 1, panels);                                                               \
    }
PANEL_FUNCTION(fp32, 1)
PANEL_FUNCTION(bf16, 1)
PANEL_FUNCTION(int8, 1)
PANEL_FUNCTION(int4, 1)
#if TILE_PANELS == 3
PANEL_FUNCTION(fp32, 3)
PANEL_FUNCTION(bf16, 3)
PANEL_FUNCTION(int8, 2)
PANEL_FUNCTION(int4, 2)
#endif

#define CACHED_ROWS 96 /* rows whose activations stay in the cache while panels pass; a multiple of TILE_ROWS */

static void linear_panels(const struct linear *l, const struct activations *in, int64_t rows, int64_t first,
                          int64_t last, float *out, int64_t out_stride, int add) {
    for (int64_t row = 0; row < rows; row += CACHED_ROWS) {
        const int64_t end = rows - row > CACHED_ROWS ? row + CACHED_ROWS : rows;
        int64_t panel = first;
#define TIMES(kind, panels) kind##_times_##panels(l, in, row, end, panel, out, out_stride, add)
#if TILE_PANELS == 3
        for (; l->kind == FP32 && panel + 3 <= last; panel += 3) TIMES(fp32, 3);
        for (; l->kind == BF16 && panel + 3 <= last; panel += 3) TIMES(bf16, 3);
        for (; l->kind == INT8 && rows > 1 && panel + 2 <= last; panel += 2) TIMES(int8, 2);
        for (; l->kind == INT4 && rows > 1 && panel + 2 <= last; panel += 2) TIMES(int4, 2);
#endif
        for (; panel < last; panel++) {
            if (l->kind == FP32) TIMES(fp32, 1);
            else if (l->kind == BF16) TIMES(bf16, 1);
            else if (l->kind == INT8) TIMES(int8, 1);
            else TIMES(int4, 1);
        }
    }
}

INLINE float from_fp16(uint16_t bits) {
    uint16_t sixteen[LANES] = {bits};
    return load_fp16(sixteen)[0];
}

/* Row `id` of the weight, dequantized: an embedding that may share its weight with lm_head. */
static void embed(const struct linear *l, int64_t id, float scale, float *out) {
    const int64_t panel = id / LANES, n = id % LANES, groups = panel_groups(l);
    const char *weight = (const char *)l->weight + panel * panel_size(l);
    const uint16_t *scales = l->scales + panel * groups * LANES * (l->kind == INT4 ? 2 : 1) + n;
    if (l->kind == FP32) {
        for (int64_t k = 0; k < l->inputs; k++) out[k] = ((const float *)weight)[k * LANES + n] * scale;
    } else if (l->kind == BF16) {
        for (int64_t k = 0; k < l->inputs; k++) {
            const uint32_t bits = (uint32_t)((const uint16_t *)weight)[(k / 2 * LANES + n) * 2 + k % 2] << 16;
            memcpy(out + k, &bits, sizeof bits);
            out[k] *= scale;
        }
    } else {
        for (int64_t g = 0; g < groups; g++) {
            const int64_t end = l->inputs < (g + 1) * GROUP ? l->inputs : (g + 1) * GROUP;
            const int is_int8 = l->kind == INT8;
            const float step = from_fp16(scales[g * LANES * (is_int8 ? 1 : 2)]) * (float)l->factor;
            const float minimum = is_int8 ? -128 * step : from_fp16(scales[(g * 2 + 1) * LANES]) * (float)l->factor;
            for (int64_t k = g * GROUP; k < end; k++) {
                const uint8_t *bytes = (const uint8_t *)weight + (k / (is_int8 ? 4 : 8) * LANES + n) * 4;
                const int byte = bytes[k % 4], q = is_int8 ? byte : k % 8 < 4 ? byte & 15 : byte >> 4;
                out[k] = ((float)q * step + minimum) * scale;
            }
        }
    }
}
