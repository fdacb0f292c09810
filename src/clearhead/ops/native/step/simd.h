/* Vectors of 16 floats in GCC vector extensions, and the few operations that need instructions of their own.
   Included by each SIMD level: SIMD_LEVEL is 0 (portable), 1 (AVX2) or 2 (AVX-512 with VNNI). */

#include <math.h>
#include <string.h>

#include "step.h"

typedef float f32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(2), may_alias));

#if SIMD_LEVEL > 0
#define UNROLL _Pragma("GCC unroll 16") /* small loops whose arrays must be registers */
#else
#define UNROLL
#endif
#define INLINE static inline __attribute__((always_inline))
#define ROUND_MAGIC 12582912.0f /* 1.5 · 2^23: adding it rounds to an integer, in the low bits */

static const i32x16 LANE_IDS = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

INLINE f32x16 load(const float *src) { return *(const f32x16 *)src; }
INLINE void store(float *dst, f32x16 x) { *(f32x16 *)dst = x; }
INLINE f32x16 broadcast(float x) { return x - (f32x16){}; }
INLINE i32x16 broadcast_int(int32_t x) { return x - (i32x16){}; }
INLINE f32x16 blend(i32x16 mask, f32x16 a, f32x16 b) {
    return (f32x16)(((i32x16)a & mask) | ((i32x16)b & ~mask));
}
INLINE i32x16 low_byte(i32x16 x) { return (i32x16)((u32x16)x << 24) >> 24; } /* with its sign */
INLINE f32x16 to_float(i32x16 x) { return __builtin_convertvector(x, f32x16); }
/* The first `count` (up to 16) floats, then zeros. */
INLINE f32x16 load_some(const float *src, int64_t count) {
    f32x16 x = {};
    memcpy(&x, src, (size_t)count * sizeof(float));
    return x;
}

INLINE f32x16 load_bf16(const uint16_t *src) {
    return (f32x16)(__builtin_convertvector(*(const u16x16 *)src, u32x16) << 16);
}
INLINE u16x16 to_bf16(f32x16 x) {
    const u32x16 bits = (u32x16)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to nearest even */
    const i32x16 number = x == x;
    return __builtin_convertvector(((i32x16)rounded & number) | ((i32x16)(bits >> 16 | 64) & ~number), u16x16);
}

#if SIMD_LEVEL == 2
INLINE f32x16 load_fp16(const uint16_t *src) { return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)src)); }
#else
INLINE f32x16 load_fp16(const uint16_t *src) {
    const u32x16 bits = __builtin_convertvector(*(const u16x16 *)src, u32x16);
    const f32x16 magnitude = (f32x16)((bits & 0x7fff) << 13) * 0x1p112f; /* finite, subnormal included */
    return (f32x16)((u32x16)magnitude | (bits & 0x8000) << 16);
}
#endif

#define SHUFFLE(a, b, ...) (__builtin_shufflevector(a, b, __VA_ARGS__))
/* Pairwise horizontal adds at distance 1, 2, 4 and 8 of two vectors: applied in turn, they reduce sixteen vectors to
   one vector of their sums. */
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
/* Reductions of a vector, and its low bytes; compilers make them of single elements without help. */
#if SIMD_LEVEL == 2
INLINE f32x16 max_of(f32x16 a, f32x16 b) { return (f32x16)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE float reduce_sum(f32x16 x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE float reduce_max(f32x16 x) { return _mm512_reduce_max_ps((__m512)x); }
INLINE int32_t reduce_sum_int(i32x16 x) { return _mm512_reduce_add_epi32((__m512i)x); }
INLINE int32_t reduce_max_int(i32x16 x) { return _mm512_reduce_max_epi32((__m512i)x); }
INLINE i32x16 max_int(i32x16 a, i32x16 b) { return (i32x16)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE void store_bytes(int8_t *dst, i32x16 x) { _mm_storeu_si128((void *)dst, _mm512_cvtepi32_epi8((__m512i)x)); }
#else
INLINE f32x16 max_of(f32x16 a, f32x16 b) { return blend(a > b, a, b); }
INLINE i32x16 max_int(i32x16 a, i32x16 b) { return (a & (a > b)) | (b & ~(a > b)); }
#define SPLIT(type, x)      \
    type lanes[LANES / 4];  \
    memcpy(lanes, &(x), 64)
typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
INLINE float reduce_sum(f32x16 x) {
    SPLIT(f32x4, x);
    const f32x4 y = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
    return (y[0] + y[2]) + (y[1] + y[3]);
}
INLINE float reduce_max(f32x16 x) {
    SPLIT(f32x4, x);
    float max = lanes[0][0];
    for (int n = 0; n < LANES; n++) max = lanes[n / 4][n % 4] > max ? lanes[n / 4][n % 4] : max;
    return max;
}
INLINE int32_t reduce_sum_int(i32x16 x) {
    SPLIT(i32x4, x);
    const i32x4 y = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
    return (y[0] + y[2]) + (y[1] + y[3]);
}
INLINE int32_t reduce_max_int(i32x16 x) {
    SPLIT(i32x4, x);
    int32_t max = lanes[0][0];
    for (int n = 0; n < LANES; n++) max = lanes[n / 4][n % 4] > max ? lanes[n / 4][n % 4] : max;
    return max;
}
INLINE void store_bytes(int8_t *dst, i32x16 x) {
    for (int n = 0; n < LANES; n++) dst[n] = (int8_t)x[n];
}
#endif

/* exp(x) for x <= 0, by the polynomial of Cephes' expf; below -87 it is 0, NaN stays NaN. */
INLINE f32x16 exp_nonpositive(f32x16 x) {
    const float log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    const i32x16 underflow = x < broadcast(-87.0f);
    x = blend(underflow, broadcast(0.0f), x);
    const f32x16 shifted = x * log2e + ROUND_MAGIC, n = shifted - ROUND_MAGIC;
    const f32x16 r = x - n * ln2_high - n * ln2_low;
    f32x16 y = broadcast(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const f32x16 power_of_two = (f32x16)(((i32x16)shifted << 23) + 0x3f800000);
    return blend(underflow, broadcast(0.0f), y * power_of_two);
}
INLINE f32x16 abs_of(f32x16 x) { return (f32x16)((i32x16)x & 0x7fffffff); }
INLINE f32x16 sigmoid(f32x16 x) {
    const f32x16 e = exp_nonpositive(-abs_of(x));
    return blend(x < broadcast(0.0f), e, broadcast(1.0f)) / (e + 1.0f);
}

/* Add to each of 16 sums a dot product of four unsigned bytes with the four signed bytes in x. `dot_int8` is for
   weights of int8 with 128 added; sums start at dot_start(-128 · the sum of all signed bytes). */
#if SIMD_LEVEL == 2
INLINE i32x16 dot_int4(i32x16 sums, __m512i w, int32_t x) {
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sums, w, _mm512_set1_epi32(x));
}
#define dot_int8 dot_int4
INLINE i32x16 dot_start(int32_t offset) { return broadcast_int(offset); }
typedef __m512i bytes64;
INLINE bytes64 load_bytes(const uint8_t *src) { return _mm512_loadu_si512((const void *)src); }
INLINE bytes64 low_bits(bytes64 w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
INLINE bytes64 high_bits(bytes64 w) { return _mm512_and_si512(_mm512_srli_epi16(w, 4), _mm512_set1_epi8(15)); }
#elif SIMD_LEVEL == 1
typedef struct {
    __m256i half[2];
} bytes64;
INLINE i32x16 dot_bytes(i32x16 sums, bytes64 w, __m256i x, int is_signed) {
    __m256i parts[2];
    for (int n = 0; n < 2; n++) {
        __m256i a = w.half[n], b = x;
        if (is_signed) { /* |w| · sign(w) x: sums of two products of at most 127 · 127 do not saturate */
            a = _mm256_xor_si256(a, _mm256_set1_epi8((char)128));
            b = _mm256_sign_epi8(b, a);
            a = _mm256_abs_epi8(a);
        }
        parts[n] = _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1));
    }
    i32x16 products;
    memcpy(&products, parts, sizeof products);
    return sums + products;
}
INLINE i32x16 dot_int8(i32x16 sums, bytes64 w, int32_t x) { return dot_bytes(sums, w, _mm256_set1_epi32(x), 1); }
INLINE i32x16 dot_int4(i32x16 sums, bytes64 w, int32_t x) { return dot_bytes(sums, w, _mm256_set1_epi32(x), 0); }
INLINE i32x16 dot_start(int32_t offset) {
    (void)offset;
    return (i32x16){};
}
INLINE bytes64 load_bytes(const uint8_t *src) {
    return (bytes64){{_mm256_loadu_si256((const void *)src), _mm256_loadu_si256((const void *)(src + 32))}};
}
INLINE bytes64 low_bits(bytes64 w) {
    for (int n = 0; n < 2; n++) w.half[n] = _mm256_and_si256(w.half[n], _mm256_set1_epi8(15));
    return w;
}
INLINE bytes64 high_bits(bytes64 w) {
    for (int n = 0; n < 2; n++)
        w.half[n] = _mm256_and_si256(_mm256_srli_epi16(w.half[n], 4), _mm256_set1_epi8(15));
    return w;
}
#else
typedef i32x16 bytes64; /* quadruples, lowest byte first */
INLINE i32x16 dot_int4(i32x16 sums, bytes64 w, int32_t x) {
    for (int n = 0; n < 4; n++) sums += (w >> 8 * n & 255) * (int32_t)(int8_t)((uint32_t)x >> 8 * n);
    return sums;
}
#define dot_int8 dot_int4
INLINE i32x16 dot_start(int32_t offset) { return broadcast_int(offset); }
INLINE bytes64 load_bytes(const uint8_t *src) { return *(const i32x16 *)src; }
INLINE bytes64 low_bits(bytes64 w) { return w & 0x0f0f0f0f; }
INLINE bytes64 high_bits(bytes64 w) { return w >> 4 & 0x0f0f0f0f; }
#endif
