/* The network of a native inference step, its inputs, and the kernels that compute it at one SIMD level.

   N tokens · R rows · M outputs · D dim · H heads · G key-value heads · E head dim · F feed-forward dim · V vocabulary

   All structs are mirrored in structs.py; their sizes are compared when the library is loaded. */

#ifndef CLEARHEAD_STEP_H
#define CLEARHEAD_STEP_H

#include <stdint.h>

#define ABI 5        /* must equal ABI in structs.py */
#define LANES 16     /* outputs of a panel, floats of a vector */
#define GROUP 32     /* inputs that share a scale */
#define PAD_TO 64    /* rows of activations are padded with zeros to a multiple of this */
#define ROW_BLOCK 8  /* rows whose int8 values are interleaved */
#define PAGE_SIZE 16 /* slots of a page */
#define ALIGN_UP(n, to) (((n) + (to) - 1) / (to) * (to))

enum weight_kind { FP32, BF16, INT8, INT4 };
enum norm_kind { NO_NORM, LAYER_NORM, RMS_NORM, AFFINE }; /* affine: a BatchNorm with fixed statistics */
enum activation_kind { RELU, GELU, GELU_TANH, SILU, SWIGLU, GEGLU };
enum pattern_kind { FULL, WINDOW, COLUMN, BLOCK, SUMMARY };

/* y = x Wᵀ + b. The outputs are split into panels of 16, zero-padded; a panel holds, for each input,
   fp32: 16 values · bf16: for each two inputs, 16 pairs · int8: for each four inputs, 16 quadruples with 128 added ·
   int4: for each eight inputs, 16 quadruples of the first four inputs (low bits) and the others (high bits).
   int8 has a scale and int4 a scale and a minimum for each output of a group of 32 inputs, in fp16 times `factor`. */
struct linear {
    const void *weight;
    const uint16_t *scales; /* (panels, groups, 16), or for int4 (panels, groups, 2, 16) */
    const float *bias;      /* (panels · 16), or NULL */
    int64_t outputs, inputs, kind;
    double factor;
};

struct norm {
    const float *weight, *bias; /* (D,) padded to PAD_TO; bias may be NULL */
    int64_t kind;
    double eps;
};

struct layer {
    struct norm attention_norm, cross_norm, feed_forward_norm;
    struct norm query_norm, key_norm, cross_query_norm;             /* (E,), of each head */
    struct linear qkv, output, cross_query, cross_output, up, down; /* up: gate and up of a gated feed-forward */
    void *keys, *values;                                            /* (slots, G, E) */
    int64_t has_cross, pattern, pattern_size, pattern_summary;
};

struct network {
    const struct layer *layers;
    struct linear embedding, lm_head;
    struct norm embedding_norm, final_norm;
    const float *positions;        /* (max_positions, D) learned or sinusoidal, or NULL */
    const float *segments;         /* (D,) added to every token, or NULL */
    const float *rope_frequencies; /* (E/2,), or NULL */
    int64_t num_layers, dim, heads, kv_heads, head_dim, ff_dim, activation;
    int64_t pre_norm, causal, slots, max_positions, kv_bf16;
    double embedding_scale;
};

struct step {
    const int32_t *ids, *rows, *positions, *slots; /* (N,) */
    const int32_t *outputs;                        /* (M,) */
    const int32_t *table;                          /* (R, table_width) */
    const int32_t *source_table;                   /* (R, source_width) pages of the source, or NULL */
    const int32_t *source_lengths;                 /* (R,) */
    const int32_t *lengths;                        /* (R,) keys of a row, where attention is not causal */
    float *hidden;                                 /* (M, D) after the final norm, or NULL */
    float *logits;                                 /* (M, panels · 16), or NULL */
    int32_t *tokens;                               /* (M,) the most likely token, or -1 where the largest logit is not finite */
    int64_t num_tokens, num_rows, num_outputs, table_width, span, source_width;
    void *workspace;
    int64_t workspace_size;
};

/* Rows of activations as a linear reads them: in fp32, or in groups of int8. Those of ROW_BLOCK rows are interleaved:
   four inputs of each row, then the next four; the scale of a group of each row, then the next group. */
struct activations {
    float *values; /* (rows, stride) */
    int64_t stride;
    int8_t *quantized;    /* (rows / ROW_BLOCK, stride / 4, ROW_BLOCK, 4) */
    float *scales, *sums; /* (rows / ROW_BLOCK, stride / GROUP, ROW_BLOCK): x ≈ scale · quantized, scale · its sum */
    int32_t *offsets;     /* -128 · the sum of quantized */
};

/* Attention of queries over the keys and values of one key-value head. A query sees the first `counts` slots. */
struct attention {
    const void *keys, *values; /* at the key-value head */
    const int32_t *slots;      /* as many as the largest count, padded to 16 with copies of the last */
    const float *const *queries;
    float *const *out;
    const int64_t *counts;
    float *scores; /* scratch of MAX_SHARED rows */
    int64_t num_queries, slot_stride, scores_stride, head_dim, kv_bf16;
};
#define MAX_SHARED 6 /* queries that read keys and values together */

struct kernels {
    void (*linear)(const struct linear *, const struct activations *, int64_t rows, int64_t first_panel,
                   int64_t last_panel, float *out, int64_t out_stride, int add);
    void (*embed)(const struct linear *, int64_t id, float scale, float *out);
    void (*norm)(const struct norm *, const float *x, float *out, int64_t dim);
    void (*activate)(int64_t kind, float *x, int64_t dim);
    void (*quantize)(const struct activations *, int64_t row, int64_t dim);
    void (*add)(float *x, const float *y, int64_t dim);
    void (*rotate)(float *x, const float *cos_sin, int64_t head_dim);
    void (*store_kv)(const float *x, void *out, int64_t dim, int64_t bf16);
    void (*attend)(const struct attention *);
    int64_t (*argmax)(const float *logits, int64_t count);
    void (*top_logprobs)(const float *logits, int64_t count, int64_t k, float *logprobs, int32_t *tokens);
};

extern const struct kernels clearhead_portable;
#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_X86_LEVELS 1
extern const struct kernels clearhead_avx2, clearhead_avx512;
#endif

enum level { BEST_LEVEL = -1, PORTABLE, AVX2, AVX512 };
const struct kernels *clearhead_kernels(int64_t level); /* NULL where this CPU does not have the level */

/* threads.c: run `work` on up to `threads` threads, the caller included. Between phases, all threads of a team wait
   for each other; the items of a phase are taken by whoever is free. */
struct team;
typedef void (*team_work)(void *context, struct team *team, int64_t thread);
void clearhead_run_team(team_work work, void *context, int64_t threads);
int64_t clearhead_team_size(const struct team *team);
int64_t clearhead_take(struct team *team, int64_t items); /* the next item of this phase, or -1 */
void clearhead_barrier(struct team *team);                /* ends the phase */

#endif
