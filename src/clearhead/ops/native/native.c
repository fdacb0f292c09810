/* What a step of decoding does between its matrix products, on a CPU: attention of a few queries a row over what is
   held, and everything that happens to a row of numbers from one product to the next. native.py calls it; torch's own
   operations do the same where this file could not be compiled.

   B rows · H heads · T queries · S keys · E head width · M rows of numbers · D width

   Vectors are GCC's own, 16 floats wide, which it fits to any processor; threads are those of torch's OpenMP. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bf16 is taken apart as it lies on little-endian machines"
#endif

#define WIDE 16
#define NEAR (1 << 17) /* bytes that are fetched ahead: a good part of the cache of one core */
#define VERSION 1      /* of what this file does, as native.py has it */
typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));

static const Ints NUMBERS = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

#define INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__)
#define EVERY_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EVERY_PROCESSOR
#endif

INLINE Floats load(const float *from) { return *(const Floats *)from; }
INLINE void store(float *to, Floats x) { *(Floats *)to = x; }
INLINE Floats all(float x) { return x - (Floats){}; }
INLINE Ints choose_bits(Ints which, Ints yes, Ints no) { return (yes & which) | (no & ~which); }
INLINE Floats choose(Ints which, Floats yes, Floats no) { return (Floats)choose_bits(which, (Ints)yes, (Ints)no); }

/* Numbers that are held in fp32, or in bf16, whose bits are the upper half of fp32's. 32 of them are two vectors: the
   first and the second half, but of bf16 those at even and at odd places, as they come apart with the least work. */
INLINE Floats held(const void *from, int64_t at, int second, int halves) {
    if (!halves) return load((const float *)from + at + second * WIDE);
    const Ints both = *(const Ints *)((const uint16_t *)from + at);
    if (second) return (Floats)(both & (int32_t)0xffff0000);
    return (Floats)(both << 16);
}
INLINE void keep(void *to, int64_t at, Floats x, int halves) {
    if (!halves) return store((float *)to + at, x);
    Bits bits = (Bits)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to the nearest, or the even one */
    Ints kept = choose_bits(x == x, (Ints)rounded, (Ints)(bits >> 16 | 64)); /* NaN stays */
    *(Halves *)((uint16_t *)to + at) = __builtin_convertvector((Bits)kept, Halves);
}

/* Numbers added to those 1, 2, 4 or 8 places behind them, those of both vectors side by side: after all four, sixteen
   vectors have become one, of their sums. */
#define PAIRED(a, b, ...) (__builtin_shufflevector(a, b, __VA_ARGS__))
INLINE Floats add1(Floats a, Floats b) {
    return PAIRED(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           PAIRED(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}
INLINE Floats add2(Floats a, Floats b) {
    return PAIRED(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           PAIRED(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
INLINE Floats add4(Floats a, Floats b) {
    return PAIRED(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           PAIRED(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
}
INLINE Floats add8(Floats a, Floats b) {
    return PAIRED(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           PAIRED(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
#define FIRST_TOGETHER(a, b) PAIRED(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define LAST_TOGETHER(a, b) PAIRED(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define EVEN(a, b) PAIRED(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD(a, b) PAIRED(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
INLINE float sum(Floats x) {
    x = add1(x, x);
    x = add2(x, x);
    x = add4(x, x);
    return x[0] + x[8];
}
#define LARGER(x, ...) (choose(PAIRED(x, x, __VA_ARGS__) > x, PAIRED(x, x, __VA_ARGS__), x))
INLINE float largest(Floats x) {
    x = LARGER(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x = LARGER(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    x = LARGER(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return x[0] > x[1] ? x[0] : x[1];
}

/* e to the power of x, for x up to 0: 2^n times a polynomial, right to the last bit or two; -inf gives 0, NaN stays. */
INLINE Floats power(Floats x) {
    const float to_twos = 1.44269504f, high = 0.693359375f, low = -2.12194440e-4f, whole = 12582912.0f; /* 1.5 · 2^23 */
    Ints none = x < all(-87.0f);
    x = choose(none, all(0.0f), x);
    Floats shifted = x * to_twos + whole, n = shifted - whole;
    Floats r = x - n * high - n * low;
    Floats y = all(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    Floats twos = (Floats)(((Ints)shifted << 23) + 0x3f800000);
    return choose(none, all(0.0f), y * twos);
}

/* One query q (E) over the keys and values that lie at the places `seen`: softmax(q kᵀ / √E) v to out (E).
   Behind the last place, up to a multiple of 16, it stands again. Scores have as much room. Of halves, q lies as `held`
   gives them. */
INLINE void look_once(const float *q, const void *keys, const void *values, const int64_t *seen, int64_t count,
                      int64_t width, int halves, float *scores, float *out) {
    const float scale = 1.0f / sqrtf((float)width);
    Floats most = all(-INFINITY), total = {};
    for (int64_t first = 0; first < count; first += WIDE) {
        Floats s[WIDE];
#pragma GCC unroll 16
        for (int i = 0; i < WIDE; i++) {
            const int64_t at = seen[first + i];
            s[i] = load(q) * held(keys, at, 0, halves) + load(q + WIDE) * held(keys, at, 1, halves);
#pragma GCC unroll 2
            for (int64_t e = 2 * WIDE; e < width; e += 2 * WIDE)
                s[i] += load(q + e) * held(keys, at + e, 0, halves) +
                        load(q + e + WIDE) * held(keys, at + e, 1, halves);
        }
#pragma GCC unroll 8
        for (int i = 0; i < WIDE; i += 2) s[i / 2] = add1(s[i], s[i + 1]);
#pragma GCC unroll 4
        for (int i = 0; i < WIDE / 2; i += 2) s[i / 2] = add2(s[i], s[i + 1]);
        Floats found = add8(add4(s[0], s[1]), add4(s[2], s[3])) * scale;
        found = choose(NUMBERS < (int32_t)(count - first), found, all(-INFINITY));
        store(scores + first, found);
        most = choose(found > most, found, most);
    }
    const Floats top = all(largest(most));
    for (int64_t first = 0; first < count; first += WIDE) {
        Floats weights = power(load(scores + first) - top);
        store(scores + first, weights);
        total += weights;
    }
    const float share = 1.0f / sum(total);
    for (int64_t e = 0; e < width; e += 4 * WIDE) { /* four vectors at a time stay in registers */
        const int parts = width - e < 4 * WIDE ? 2 : 4;
        Floats brought[4] = {};
        for (int64_t i = 0; i < count; i++)
#pragma GCC unroll 4
            for (int p = 0; p < parts; p++)
                brought[p] += scores[i] * held(values, seen[i] + e + p / 2 * 2 * WIDE, p % 2, halves);
        for (int p = 0; p < parts; p += 2) {
            Floats one = brought[p] * share, two = brought[p + 1] * share, even = one, odd = two;
            if (halves) one = FIRST_TOGETHER(even, odd), two = LAST_TOGETHER(even, odd);
            store(out + e + p * WIDE, one);
            store(out + e + p * WIDE + WIDE, two);
        }
    }
}

/* Rows of numbers in bytes: of each row the nearest to its largest / 127, 128 standing for 0. */
INLINE void round_row(const float *row, int64_t width, float top, uint8_t *bytes, float *size) {
    const float rate = top > 1e-30f ? 127.0f / top : 0.0f; /* below it, 1 / top may be none */
    for (int64_t d = 0; d < width; d += WIDE) {
        Floats y = load(row + d) * rate + (12582912.0f + 128.0f); /* rounded by the addition itself */
        *(Bytes *)(bytes + d) = __builtin_convertvector((Ints)y, Bytes);
    }
    *size = top > 1e-30f || top != top ? top / 127.0f : 0.0f;
}

/* What a row's largest is, given the largest in each place and the sum: where a number is none, that shows. */
INLINE float top_of(Floats most, Floats total) {
    const float all_of_it = sum(total);
    return all_of_it == all_of_it ? largest(most) : NAN;
}

struct look {
    const float *asked;        /* (B, T, N) what a product has given: queries of all heads, and behind them, if there */
    int64_t apart, place;      /* are new ones, keys and values, which are put in place first; N, and where, or -1 */
    const float *scales;       /* (B, T) what all that must be multiplied with */
    const float *bias;         /* (N,) and what is added then */
    void *keys, *values;       /* (B, H, S, E) each, laid out alike */
    int64_t row, head, key;    /* how far they lie apart */
    const uint8_t *allowed;    /* (B, T, S) which keys a query sees; or */
    const int64_t *lengths;    /* (B,) the first so many; or, with neither, all */
    float *out;                /* (B, T, H, E) */
    uint8_t *bytes;            /* (B, T, H, E) the same in bytes, */
    float *sizes;              /* (B, T) with what a step of one is worth */
    int64_t rows, heads, queries, count, width, halves;
};

/* A head's numbers of what was asked, from n on, with their scale and bias: E of them. */
INLINE void take(const struct look *l, int64_t line, int64_t n, void *to, int64_t at, int halves) {
    const float scale = l->scales ? l->scales[line] : 1.0f;
    for (int64_t e = 0; e < l->width; e += WIDE) {
        Floats x = load(l->asked + line * l->apart + n + e) * scale;
        if (l->bias) x += load(l->bias + n + e);
        keep(to, at + e, x, halves);
    }
}

/* The places of the keys that query t of row b sees, behind their number. */
INLINE void find_seen(const struct look *l, int64_t b, int64_t t, int64_t *seen) {
    int64_t count = 0, *places = seen + 1;
    if (l->allowed) {
        const uint8_t *allowed = l->allowed + (b * l->queries + t) * l->count;
        for (int64_t i = 0; i < l->count; i++) {
            places[count] = i * l->key;
            count += allowed[i];
        }
    } else {
        count = l->lengths && l->lengths[b] < l->count ? l->lengths[b] : l->count;
        if (count < 0) count = 0;
        for (int64_t i = 0; i < count; i++) places[i] = i * l->key;
    }
    *seen = count;
    for (int64_t i = count; i % WIDE; i++) places[i] = places[count - 1];
}

/* Of all heads of all rows one after the other, some; false if there is no memory. */
EVERY_PROCESSOR static int look_part(const struct look *l, int64_t first, int64_t last) {
    const int64_t most = (l->count + WIDE - 1) / WIDE * WIDE, size = l->halves ? 2 : 4, all_heads = l->heads * l->width;
    const int64_t kinds = l->allowed ? l->queries : 1; /* of lists of places: a row's heads see the same */
    int64_t *lists = malloc((kinds * (most + 1) + most) * sizeof(int64_t) + l->width * sizeof(float));
    if (!lists) return 0;
    float *scores = (float *)(lists + kinds * (most + 1)), *q = scores + 2 * most;
    char *keys = l->keys, *values = l->values;
    for (int64_t item = first; item < last; item++) {
        const int64_t b = item / l->heads, h = item % l->heads, next = item + 1;
        if (item == first || h == 0)
            for (int64_t t = 0; t < kinds; t++) find_seen(l, b, t, lists + t * (most + 1));
        const int64_t here = (b * l->row + h * l->head) * size;
        const int64_t there = (next / l->heads * l->row + next % l->heads * l->head) * size;
        if (next < last) /* reading memory takes longer than computing: let it begin */
            for (int64_t n = 0; n < l->count * l->key * size && n < NEAR; n += 64) {
                __builtin_prefetch(keys + there + n, 0, 2);
                __builtin_prefetch(values + there + n, 0, 2);
            }
        for (int64_t t = 0; l->place >= 0 && t < l->queries; t++) {
            const int64_t line = b * l->queries + t, to = (l->place + t) * l->key;
            take(l, line, all_heads + h * l->width, keys + here, to, (int)l->halves);
            take(l, line, 2 * all_heads + h * l->width, values + here, to, (int)l->halves);
        }
        for (int64_t t = 0; t < l->queries; t++) {
            const int64_t *seen = lists + (l->allowed ? t * (most + 1) : 0), line = b * l->queries + t;
            float *out = l->out + line * all_heads + h * l->width;
            take(l, line, h * l->width, q, 0, 0);
            for (int64_t e = 0; l->halves && e < l->width; e += 2 * WIDE) { /* as keys come apart */
                Floats one = load(q + e), two = load(q + e + WIDE);
                store(q + e, EVEN(one, two));
                store(q + e + WIDE, ODD(one, two));
            }
#define LOOK(width, halves) look_once(q, keys + here, values + here, seen + 1, *seen, width, halves, scores, out)
            if (l->width == 64 && l->halves) LOOK(64, 1); /* what is known here need not be asked in every loop */
            else if (l->width == 64) LOOK(64, 0);
            else if (l->width == 32 && l->halves) LOOK(32, 1);
            else if (l->width == 32) LOOK(32, 0);
            else if (l->halves) LOOK(l->width, 1);
            else LOOK(l->width, 0);
        }
        for (int64_t t = 0; l->bytes && h == l->heads - 1 && t < l->queries; t++) { /* the row is complete */
            const int64_t line = b * l->queries + t;
            const float *out = l->out + line * all_heads;
            Floats top = {}, total = {};
            for (int64_t d = 0; d < all_heads; d += WIDE) {
                Floats y = load(out + d), magnitude = choose(y < all(0.0f), -y, y);
                top = choose(magnitude > top, magnitude, top);
                total += y;
            }
            round_row(out, all_heads, top_of(top, total), l->bytes + line * all_heads, l->sizes + line);
        }
    }
    free(lists);
    return 1;
}

/* False if there is no memory. Where a row becomes bytes, all its heads are one thread's. */
int clearhead_look(const struct look *l, int64_t threads) {
    const int64_t together = l->bytes ? l->heads : 1, items = l->rows * l->heads / together;
    int done = 1;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(&: done)
    for (int64_t n = 0; n < threads; n++)
        done &= look_part(l, items * n / threads * together, items * (n + 1) / threads * together);
    return done;
}

struct between {
    const float *x;              /* (M, D) what a product has given */
    const float *scales;         /* (M,) what its rows must be multiplied with */
    const float *bias;           /* (D,) and what is added then */
    const float *residual;       /* (M, D) and then */
    const float *weight, *shift; /* (D,) of the norm that follows */
    float *sum, *normed;         /* (M, D) where all that goes */
    uint8_t *bytes;              /* (M, D) and what came last, rounded by each row's largest, 128 for 0 */
    float *sizes;                /* (M,) with what a step of one is worth; any of these but x may be missing */
    int64_t rows, width, relu;
    float eps;
};

EVERY_PROCESSOR static int between_part(const struct between *w, int64_t first, int64_t last) {
    const int64_t width = w->width;
    float *row = malloc(width * sizeof(float));
    if (!row) return 0;
    for (int64_t b = first; b < last; b++) {
        const float *x = w->x + b * width, *residual = w->residual ? w->residual + b * width : 0;
        const float scale = w->scales ? w->scales[b] : 1.0f;
        Floats total = {}, most = {};
        for (int64_t d = 0; d < width; d += WIDE) {
            Floats y = load(x + d) * scale;
            if (w->bias) y += load(w->bias + d);
            if (residual) y += load(residual + d);
            if (w->relu) y = choose(y < all(0.0f), all(0.0f), y);
            store(row + d, y);
            total += y;
            if (w->sum) store(w->sum + b * width + d, y);
            Floats size = choose(y < all(0.0f), -y, y);
            most = choose(size > most, size, most);
        }
        if (w->weight) {
            const float mean = sum(total) / (float)width;
            Floats square = {};
            for (int64_t d = 0; d < width; d += WIDE) {
                Floats y = load(row + d) - mean;
                square += y * y;
            }
            const float rate = 1.0f / sqrtf(sum(square) / (float)width + w->eps);
            most = total = all(0.0f);
            for (int64_t d = 0; d < width; d += WIDE) {
                Floats y = (load(row + d) - mean) * rate * load(w->weight + d);
                if (w->shift) y += load(w->shift + d);
                store(row + d, y);
                if (w->normed) store(w->normed + b * width + d, y);
                Floats size = choose(y < all(0.0f), -y, y);
                most = choose(size > most, size, most);
                total += y;
            }
        }
        if (w->bytes) round_row(row, width, top_of(most, total), w->bytes + b * width, w->sizes + b);
    }
    free(row);
    return 1;
}

/* False if there is no memory. */
int clearhead_between(const struct between *w, int64_t threads) {
    int done = 1;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(&: done)
    for (int64_t n = 0; n < threads; n++) done &= between_part(w, w->rows * n / threads, w->rows * (n + 1) / threads);
    return done;
}

struct best {
    const float *scores; /* (B, K, V) */
    const float *totals; /* (B, K) added to them */
    float *sums;         /* (B, C) the highest sums, highest first, the first of equals; */
    int64_t *beams;      /* (B, C) of which beam */
    int64_t *words;      /* (B, C) and which word */
    int64_t rows, each, count, kept;
};
#define MANY (4 * WIDE)

/* One more sum takes its place among the highest, if it is one of them; behind its equals, and one that is no number
   before all others, so that it shows. How many there are then. */
INLINE int64_t rank(float x, int64_t beam, int64_t word, int64_t found, int64_t kept, float *sums, int64_t *beams,
                    int64_t *words) {
#define ABOVE(n) (x > sums[n] || (x != x && sums[n] == sums[n]))
    if (found == kept && !ABOVE(found - 1)) return found;
    int64_t place = found < kept ? found++ : found - 1;
    for (; place > 0 && ABOVE(place - 1); place--) {
        sums[place] = sums[place - 1];
        beams[place] = beams[place - 1];
        words[place] = words[place - 1];
    }
    sums[place] = x;
    beams[place] = beam;
    words[place] = word;
    return found;
}

/* Whether any of the next MANY scores, with the total, may be among the highest: of nearly all, none is. */
INLINE int any_higher(const float *scores, float total, float lowest) {
    Ints higher = {};
    for (int n = 0; n < MANY; n += WIDE) higher |= ~(load(scores + n) + total <= all(lowest));
    return sum(choose(higher, all(1.0f), all(0.0f))) > 0;
}

EVERY_PROCESSOR static void best_part(const struct best *w, int64_t first, int64_t last) {
    for (int64_t b = first; b < last; b++) {
        float *sums = w->sums + b * w->kept;
        int64_t *beams = w->beams + b * w->kept, *words = w->words + b * w->kept, found = 0;
        for (int64_t k = 0; k < w->each; k++) {
            const float total = w->totals[b * w->each + k];
            const float *scores = w->scores + (b * w->each + k) * w->count;
            for (int64_t n = 0; n < w->count; n += MANY) {
                const int64_t end = n + MANY < w->count ? n + MANY : w->count;
                if (found == w->kept && end == n + MANY && !any_higher(scores + n, total, sums[found - 1])) continue;
                for (int64_t i = n; i < end; i++)
                    found = rank(scores[i] + total, k, i, found, w->kept, sums, beams, words);
            }
        }
    }
}

int clearhead_best(const struct best *w, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < threads; n++) best_part(w, w->rows * n / threads, w->rows * (n + 1) / threads);
    return 1;
}

/* What native.py compares with its own: a library that was compiled from another version of this file is not used. */
int64_t clearhead_layout(void) {
    return VERSION + 1000 * (sizeof(struct look) + sizeof(struct between) + sizeof(struct best));
}
