/* Single operations of a step, for linear layers outside it and for tests; the choice of the SIMD level. */

#include <string.h>

#include "step.h"

enum { OK, BAD_INPUT, SMALL_WORKSPACE, NO_LEVEL };

const struct kernels *clearhead_kernels(int64_t level) {
#ifdef HAS_X86_LEVELS
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                       __builtin_cpu_supports("avx512vnni");
    if (avx512 && (level == AVX512 || level == BEST_LEVEL)) return &clearhead_avx512;
    if (avx2 && (level == AVX2 || level == BEST_LEVEL)) return &clearhead_avx2;
    if (level != PORTABLE && level != BEST_LEVEL) return NULL;
#else
    if (level > PORTABLE) return NULL;
#endif
    return &clearhead_portable;
}

struct linear_run {
    const struct linear *linear;
    const struct kernels *kernels;
    struct activations in;
    const float *x;
    float *out;
    int64_t rows, out_stride;
};

static void run_linear(void *context, struct team *team, int64_t thread) {
    const struct linear_run *run = context;
    const struct linear *l = run->linear;
    (void)thread;
    for (int64_t n; (n = clearhead_take(team, run->rows)) >= 0;) {
        float *row = run->in.values + n * run->in.stride;
        memcpy(row, run->x + n * l->inputs, (size_t)l->inputs * sizeof(float));
        memset(row + l->inputs, 0, (size_t)(run->in.stride - l->inputs) * sizeof(float));
        if (l->kind >= INT8) run->kernels->quantize(&run->in, n, l->inputs);
    }
    clearhead_barrier(team);
    const int64_t panels = (l->outputs + LANES - 1) / LANES, chunks = clearhead_team_size(team) * 4;
    const int64_t chunk = ALIGN_UP((panels + chunks - 1) / chunks, 3);
    for (int64_t item; (item = clearhead_take(team, (panels + chunk - 1) / chunk)) >= 0;) {
        const int64_t last = (item + 1) * chunk < panels ? (item + 1) * chunk : panels;
        run->kernels->linear(l, &run->in, run->rows, item * chunk, last, run->out, run->out_stride, 0);
    }
}

/* Bytes of workspace for some rows of a linear. */
int64_t clearhead_linear_workspace(const struct linear *l, int64_t rows) {
    const int64_t stride = ALIGN_UP(l->inputs, PAD_TO);
    return ALIGN_UP(rows, ROW_BLOCK) * (stride * 5 + stride / GROUP * 12);
}

/* x (rows, inputs) to out (rows, panels · 16). */
int64_t clearhead_linear(const struct linear *l, const float *x, int64_t rows, float *out, char *workspace,
                         int64_t level, int64_t threads) {
    const int64_t stride = ALIGN_UP(l->inputs, PAD_TO);
    struct linear_run run = {l, clearhead_kernels(level), {0}, x, out, rows, ALIGN_UP(l->outputs, LANES)};
    if (!run.kernels) return NO_LEVEL;
    const int64_t padded = ALIGN_UP(rows, ROW_BLOCK), groups = padded * stride / GROUP;
    float *values = (float *)workspace, *scales = values + padded * stride, *sums = scales + groups;
    int32_t *offsets = (int32_t *)(sums + groups);
    run.in = (struct activations){values, stride, (int8_t *)(offsets + groups), scales, sums, offsets};
    clearhead_run_team(run_linear, &run, threads);
    return OK;
}

int64_t clearhead_embed(const struct linear *l, int64_t id, float *out, int64_t level) {
    const struct kernels *kernels = clearhead_kernels(level);
    if (!kernels) return NO_LEVEL;
    if (id < 0 || id >= l->outputs) return BAD_INPUT;
    kernels->embed(l, id, 1.0f, out);
    return OK;
}

/* In place on rows padded to PAD_TO. */
int64_t clearhead_norm(const struct norm *norm, float *x, int64_t rows, int64_t dim, int64_t level) {
    const struct kernels *kernels = clearhead_kernels(level);
    for (int64_t n = 0; kernels && n < rows; n++)
        kernels->norm(norm, x + n * ALIGN_UP(dim, PAD_TO), x + n * ALIGN_UP(dim, PAD_TO), dim);
    return kernels ? OK : NO_LEVEL;
}

/* In place on one row, which has room for its size (twice `dim` if gated) padded to PAD_TO. */
int64_t clearhead_activate(int64_t kind, float *x, int64_t dim, int64_t level) {
    const struct kernels *kernels = clearhead_kernels(level);
    if (kernels) kernels->activate(kind, x, dim);
    return kernels ? OK : NO_LEVEL;
}

int64_t clearhead_attend(const struct attention *a, int64_t level) {
    const struct kernels *kernels = clearhead_kernels(level);
    if (kernels) kernels->attend(a);
    return kernels ? OK : NO_LEVEL;
}

int64_t clearhead_argmax(const float *logits, int64_t count, int64_t level) {
    const struct kernels *kernels = clearhead_kernels(level);
    return kernels ? kernels->argmax(logits, count) : -1;
}

struct top_run {
    const struct kernels *kernels;
    const float *logits;
    float *logprobs;
    int32_t *tokens;
    int64_t rows, stride, count, k;
};

static void run_top(void *context, struct team *team, int64_t thread) {
    const struct top_run *run = context;
    (void)thread;
    for (int64_t n; (n = clearhead_take(team, run->rows)) >= 0;)
        run->kernels->top_logprobs(run->logits + n * run->stride, run->count, run->k, run->logprobs + n * run->k,
                                   run->tokens + n * run->k);
}

/* logits (rows, stride), of which `count` of each row are used, to logprobs and tokens (rows, k). */
int64_t clearhead_top_logprobs(const float *logits, int64_t rows, int64_t stride, int64_t count, int64_t k,
                               float *logprobs, int32_t *tokens, int64_t level, int64_t threads) {
    struct top_run run = {clearhead_kernels(level), logits, logprobs, tokens, rows, stride, count, k};
    if (!run.kernels) return NO_LEVEL;
    if (k < 1 || k > count) return BAD_INPUT;
    clearhead_run_team(run_top, &run, threads);
    return OK;
}

/* Sizes of the structs, which structs.py compares with its own, and the version of the interface. */
int64_t clearhead_step_abi(void) {
    const int64_t sizes = sizeof(struct linear) + sizeof(struct norm) + sizeof(struct layer) + sizeof(struct network) +
                          sizeof(struct step) + sizeof(struct attention);
    return ABI + 1000 * sizes;
}
