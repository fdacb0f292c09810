/* One inference step of a whole network: embedding, layers, final norm, lm_head and the most likely tokens.

   All threads of the team run the same phases; `clearhead_take` hands out the items of a phase and a barrier ends it.
   A row's result is independent of the other rows and of the number of threads. */

#include <math.h>
#include <string.h>

#include "step.h"

enum { OK, BAD_INPUT, SMALL_WORKSPACE, NO_LEVEL };

struct buffers {
    float *x, *normed, *wide, *heads, *cos_sin; /* (N, …) */
    int8_t *quantized;
    float *scales, *sums;
    int32_t *offsets;
    float *scores; /* MAX_SHARED rows for each thread; slots: one */
    int32_t *slots;
    int64_t x_stride, wide_stride, heads_stride, keys_stride;
};

struct run {
    const struct network *net;
    const struct step *step;
    const struct kernels *kernels;
    struct buffers b;
};

static int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t max_keys(const struct step *s) {
    return ALIGN_UP(at_least(s->table_width * s->span, s->source_width * PAGE_SIZE), LANES) + LANES;
}

/* Lay the buffers out from `base` on; return their size. */
static int64_t lay_out(const struct network *net, const struct step *s, int64_t threads, char *base,
                       struct buffers *b) {
    const int64_t rows = ALIGN_UP(at_least(s->num_tokens, s->num_outputs), ROW_BLOCK);
    const int gated = net->activation == SWIGLU || net->activation == GEGLU;
    const int64_t qkv = (net->heads + 2 * net->kv_heads) * net->head_dim;
    int64_t size = 0;
    b->x_stride = ALIGN_UP(net->dim, PAD_TO);
    b->heads_stride = ALIGN_UP(net->heads * net->head_dim, PAD_TO);
    b->wide_stride = ALIGN_UP(at_least(qkv, net->ff_dim * (gated ? 2 : 1)), PAD_TO);
    const int64_t widest = at_least(at_least(b->x_stride, b->heads_stride), b->wide_stride);
#define TAKE(field, count)                                         \
    do {                                                           \
        b->field = (void *)(base + size);                          \
        size += ALIGN_UP((int64_t)sizeof(*b->field) * (count), 64); \
    } while (0)
    TAKE(x, rows * b->x_stride);
    TAKE(normed, rows * b->x_stride);
    TAKE(wide, rows * b->wide_stride);
    TAKE(heads, rows * b->heads_stride);
    TAKE(cos_sin, rows * net->head_dim);
    TAKE(quantized, rows * widest);
    TAKE(scales, rows * widest / GROUP);
    TAKE(sums, rows * widest / GROUP);
    TAKE(offsets, rows * widest / GROUP);
    b->keys_stride = at_least(max_keys(s), ALIGN_UP(net->head_dim, LANES)); /* also scratch for a head */
    TAKE(scores, threads * b->keys_stride * MAX_SHARED);
    TAKE(slots, threads * b->keys_stride);
#undef TAKE
    return size;
}

int64_t clearhead_step_workspace(const struct network *net, const struct step *s, int64_t threads) {
    struct buffers b;
    return lay_out(net, s, at_least(threads, 1), 0, &b) + 64;
}

/* Whether every index of the step is in range. */
static int is_valid(const struct network *net, const struct step *s) {
    if (s->num_tokens < 0 || s->num_rows < 0 || s->num_outputs < 0 || s->table_width < 0 || s->span < 1) return 0;
    for (int64_t n = 0; n < s->num_tokens; n++) {
        const int64_t row = s->rows[n], position = s->positions[n];
        if (row < 0 || row >= s->num_rows || position < 0 || position >= net->max_positions) return 0;
        if (s->ids[n] < 0 || s->ids[n] >= net->embedding.outputs) return 0;
        if (s->slots[n] < 0 || s->slots[n] >= net->slots) return 0;
        const int64_t keys = net->causal ? position + 1 : s->lengths[row];
        if (keys > s->table_width * s->span) return 0;
        if (n + 1 < s->num_tokens && s->rows[n + 1] == row && net->causal) continue; /* its last token sees most */
        for (int64_t i = 0; i * s->span < keys; i++) {
            const int64_t entry = s->table[row * s->table_width + i];
            const int64_t used = keys - i * s->span < s->span ? keys - i * s->span : s->span;
            if (entry < 0 || entry * s->span + used > net->slots) return 0;
        }
    }
    for (int64_t r = 0; s->source_table && r < s->num_rows; r++) {
        const int64_t length = s->source_lengths[r];
        if (length < 0 || length > s->source_width * PAGE_SIZE) return 0;
        for (int64_t i = 0; i * PAGE_SIZE < length; i++) {
            const int64_t page = s->source_table[r * s->source_width + i];
            if (page < 0 || (page + 1) * PAGE_SIZE > net->slots) return 0;
        }
    }
    for (int64_t m = 0; m < s->num_outputs; m++)
        if (s->outputs[m] < 0 || s->outputs[m] >= s->num_tokens) return 0;
    return 1;
}

static void start_token(const struct run *run, int64_t n) {
    const struct network *net = run->net;
    const struct step *s = run->step;
    float *x = run->b.x + n * run->b.x_stride;
    memset(x + net->dim, 0, (size_t)(run->b.x_stride - net->dim) * sizeof(float));
    run->kernels->embed(&net->embedding, s->ids[n], (float)net->embedding_scale, x);
    if (net->positions) run->kernels->add(x, net->positions + s->positions[n] * net->dim, net->dim);
    if (net->segments) run->kernels->add(x, net->segments, net->dim);
    if (net->embedding_norm.kind) run->kernels->norm(&net->embedding_norm, x, x, net->dim);
    const int64_t half = net->rope_frequencies ? net->head_dim / 2 : 0;
    float *cos_sin = run->b.cos_sin + n * net->head_dim;
    for (int64_t e = 0; e < half; e++) {
        const float angle = (float)s->positions[n] * net->rope_frequencies[e];
        cos_sin[e] = cosf(angle), cos_sin[half + e] = sinf(angle);
    }
    memset(run->b.heads + n * run->b.heads_stride, 0, (size_t)run->b.heads_stride * sizeof(float));
}

/* Rows of `values` as the linear reads them; a quantized one needs `quantize` on each row first. */
static struct activations as_activations(const struct run *run, float *values, int64_t stride) {
    const struct buffers *b = &run->b;
    return (struct activations){values, stride, b->quantized, b->scales, b->sums, b->offsets};
}

/* Multiply `rows` rows with the linear; ends with a barrier. */
static void multiply(const struct run *run, struct team *team, const struct linear *l, const struct activations *in,
                     int64_t rows, float *out, int64_t out_stride, int add) {
    const int64_t panels = (l->outputs + LANES - 1) / LANES, size = clearhead_team_size(team);
    const int64_t chunk = size == 1 && rows < 8 ? panels : ALIGN_UP(at_least(panels / (size * 4), 1), 3);
    for (int64_t item; (item = clearhead_take(team, (panels + chunk - 1) / chunk)) >= 0;) {
        const int64_t last = (item + 1) * chunk < panels ? (item + 1) * chunk : panels;
        run->kernels->linear(l, in, rows, item * chunk, last, out, out_stride, add);
    }
    clearhead_barrier(team);
}

/* The input of a sublayer's first linear. `before` is the norm of a pre-norm layer, which leaves x as it is; `after`
   that of the sublayer that ended, in a post-norm layer, which is applied to x itself. */
static struct activations prepare(const struct run *run, struct team *team, const struct norm *before,
                                  const struct norm *after, const struct linear *next) {
    const struct buffers *b = &run->b;
    const struct activations in = as_activations(run, before ? b->normed : b->x, b->x_stride);
    const int quantized = next && next->kind >= INT8;
    if (!before && !after && !quantized) return in;
    for (int64_t n; (n = clearhead_take(team, run->step->num_tokens)) >= 0;) {
        float *x = b->x + n * b->x_stride;
        if (after) run->kernels->norm(after, x, x, run->net->dim);
        if (before) run->kernels->norm(before, x, b->normed + n * b->x_stride, run->net->dim);
        if (quantized) run->kernels->quantize(&in, n, run->net->dim);
    }
    clearhead_barrier(team);
    return in;
}

/* Normalize heads in place; a copy, because norms write whole vectors. */
static void norm_heads(const struct run *run, const struct norm *norm, float *heads, int64_t count, float *scratch) {
    const int64_t dim = run->net->head_dim, padded = ALIGN_UP(dim, LANES);
    for (int64_t h = 0; norm->kind && h < count; h++) {
        memset(scratch + dim, 0, (size_t)(padded - dim) * sizeof(float));
        memcpy(scratch, heads + h * dim, (size_t)dim * sizeof(float));
        run->kernels->norm(norm, scratch, scratch, dim);
        memcpy(heads + h * dim, scratch, (size_t)dim * sizeof(float));
    }
}

/* Normalize and rotate queries and keys in place, and write keys and values to the cache. */
static void cache_token(const struct run *run, const struct layer *layer, int64_t n, float *scratch) {
    const struct network *net = run->net;
    const int64_t dim = net->head_dim, kv_dim = net->kv_heads * dim, itemsize = net->kv_bf16 ? 2 : 4;
    float *qkv = run->b.wide + n * run->b.wide_stride, *k = qkv + net->heads * dim;
    norm_heads(run, &layer->query_norm, qkv, net->heads, scratch);
    norm_heads(run, &layer->key_norm, k, net->kv_heads, scratch);
    if (net->rope_frequencies)
        for (int64_t h = 0; h < net->heads + net->kv_heads; h++)
            run->kernels->rotate(qkv + h * dim, run->b.cos_sin + n * dim, dim);
    const int64_t at = run->step->slots[n] * kv_dim * itemsize;
    run->kernels->store_kv(k, (char *)layer->keys + at, kv_dim, net->kv_bf16);
    run->kernels->store_kv(k + kv_dim, (char *)layer->values + at, kv_dim, net->kv_bf16);
}

static int sees(const struct layer *layer, int64_t i, int64_t j) {
    const int64_t size = layer->pattern_size;
    switch (layer->pattern) {
    case WINDOW: return (i > j ? i - j : j - i) < size;
    case COLUMN: return (i - j) % size == 0;
    case BLOCK: return i / size == j / size;
    case SUMMARY: return j % size >= size - layer->pattern_summary;
    default: return 1;
    }
}

/* The slots that a thread listed last; the next token of the row extends them. */
struct listed {
    int64_t row, valid;
    int32_t *slots;
};

/* List the slots that token n attends to, padded to 16 with copies of the last; return how many they are. */
static int64_t list_slots(const struct run *run, const struct layer *layer, int64_t n, int is_source,
                          struct listed *list) {
    const struct step *s = run->step;
    const int64_t row = s->rows[n], position = s->positions[n];
    const int64_t span = is_source ? PAGE_SIZE : s->span;
    const int64_t keys = is_source ? s->source_lengths[row] : run->net->causal ? position + 1 : s->lengths[row];
    const int32_t *table = is_source ? s->source_table + row * s->source_width : s->table + row * s->table_width;
    const int full = is_source || layer->pattern == FULL;
    if (!full || list->row != row) list->valid = 0;
    list->row = full ? row : -1;
    int64_t count = keys;
    if (full) {
        for (int64_t j = list->valid; j < keys; j++) list->slots[j] = (int32_t)(table[j / span] * span + j % span);
        list->valid = at_least(list->valid, keys);
    } else {
        count = 0;
        for (int64_t j = 0; j < keys; j++)
            if (sees(layer, position, j)) list->slots[count++] = (int32_t)(table[j / span] * span + j % span);
        list->valid = count;
    }
    for (int64_t i = list->valid; i % LANES; i++) list->slots[i] = list->slots[list->valid - 1];
    return count;
}

#define TOKEN_BLOCK 8    /* neighboring tokens of a row that attend together */
#define MAX_QUERIES 48   /* of one call */

/* The queries of some tokens of a row for one key-value head, collected to read keys and values together. */
struct collected {
    struct attention a;
    const float *queries[MAX_QUERIES];
    float *out[MAX_QUERIES];
    int64_t counts[MAX_QUERIES];
};

static void flush(const struct run *run, struct collected *c) {
    if (c->a.num_queries) run->kernels->attend(&c->a);
    c->a.num_queries = 0;
}

/* Attention of tokens [first, last) for `heads` query heads from `head` on. */
static void attend_tokens(const struct run *run, const struct layer *layer, int is_source, int64_t first, int64_t last,
                          int64_t head, int64_t heads, struct listed *list, struct collected *c) {
    const struct buffers *b = &run->b;
    const int64_t dim = run->net->head_dim;
    const int shared = is_source || layer->pattern == FULL; /* whether tokens of a row see a prefix of the same slots */
    for (int64_t n = first; n < last; n++) {
        if (!shared || (n > first && run->step->rows[n] != run->step->rows[n - 1])) flush(run, c);
        const int64_t count = list_slots(run, layer, n, is_source, list);
        for (int64_t h = head; h < head + heads; h++) {
            if (c->a.num_queries == MAX_QUERIES) flush(run, c);
            c->queries[c->a.num_queries] = b->wide + n * b->wide_stride + h * dim;
            c->out[c->a.num_queries] = b->heads + n * b->heads_stride + h * dim;
            c->counts[c->a.num_queries++] = count;
        }
    }
    flush(run, c);
}

/* Attention of every token; queries are in `wide`. Ends with a barrier. */
static void attend(const struct run *run, struct team *team, const struct layer *layer, int64_t thread,
                   int is_source) {
    const struct network *net = run->net;
    const struct buffers *b = &run->b;
    const int64_t dim = net->head_dim, group = net->heads / net->kv_heads, itemsize = net->kv_bf16 ? 2 : 4;
    const int64_t tokens = run->step->num_tokens, block = tokens > run->step->num_rows ? TOKEN_BLOCK : 1;
    const int64_t blocks = (tokens + block - 1) / block;
    const int split = clearhead_team_size(team) > 1 && blocks * net->kv_heads < 4 * clearhead_team_size(team);
    const int64_t heads = split ? 1 : group, items = net->heads / heads; /* few items: single heads */
    struct listed list = {-1, 0, b->slots + thread * b->keys_stride};
    struct collected c = {.a = {.slots = list.slots, .scores = b->scores + thread * b->keys_stride * MAX_SHARED,
                                .scores_stride = b->keys_stride, .slot_stride = net->kv_heads * dim, .head_dim = dim,
                                .kv_bf16 = net->kv_bf16}};
    c.a.queries = c.queries, c.a.out = c.out, c.a.counts = c.counts;
    for (int64_t item; (item = clearhead_take(team, blocks * items)) >= 0;) {
        const int64_t first = item / items * block, last = first + block < tokens ? first + block : tokens;
        const int64_t head = item % items * heads;
        c.a.keys = (const char *)layer->keys + head / group * dim * itemsize;
        c.a.values = (const char *)layer->values + head / group * dim * itemsize;
        attend_tokens(run, layer, is_source, first, last, head, heads, &list, &c);
    }
    clearhead_barrier(team);
}

/* Project the heads back and add them to x. */
static void merge_heads(const struct run *run, struct team *team, const struct linear *output) {
    const struct buffers *b = &run->b;
    const struct activations in = as_activations(run, b->heads, b->heads_stride);
    const int64_t rows = run->step->num_tokens;
    if (output->kind >= INT8) {
        for (int64_t n; (n = clearhead_take(team, rows)) >= 0;) run->kernels->quantize(&in, n, output->inputs);
        clearhead_barrier(team);
    }
    multiply(run, team, output, &in, rows, b->x, b->x_stride, 1);
}

static void feed_forward(const struct run *run, struct team *team, const struct layer *layer,
                         const struct activations *in) {
    const struct buffers *b = &run->b;
    const int64_t rows = run->step->num_tokens, inputs = layer->down.inputs;
    multiply(run, team, &layer->up, in, rows, b->wide, b->wide_stride, 0);
    const struct activations hidden = as_activations(run, b->wide, b->wide_stride);
    for (int64_t n; (n = clearhead_take(team, rows)) >= 0;) {
        run->kernels->activate(run->net->activation, b->wide + n * b->wide_stride, inputs);
        if (layer->down.kind >= INT8) run->kernels->quantize(&hidden, n, inputs);
    }
    clearhead_barrier(team);
    multiply(run, team, &layer->down, &hidden, rows, b->x, b->x_stride, 1);
}

static void run_layers(const struct run *run, struct team *team, int64_t thread) {
    const struct network *net = run->net;
    const struct buffers *b = &run->b;
    const int64_t rows = run->step->num_tokens;
    float *scratch = b->scores + thread * b->keys_stride * MAX_SHARED;
    const struct norm *ended = NULL; /* the norm after the last sublayer, in a post-norm network */
#define PREPARE(norm, next) prepare(run, team, net->pre_norm ? &(norm) : NULL, ended, &(next))
#define END(norm) ended = net->pre_norm ? NULL : &(norm)
    for (int64_t l = 0; l < net->num_layers; l++) {
        const struct layer *layer = &net->layers[l];
        struct activations in = PREPARE(layer->attention_norm, layer->qkv);
        multiply(run, team, &layer->qkv, &in, rows, b->wide, b->wide_stride, 0);
        for (int64_t n; (n = clearhead_take(team, rows)) >= 0;) cache_token(run, layer, n, scratch);
        clearhead_barrier(team);
        attend(run, team, layer, thread, 0);
        merge_heads(run, team, &layer->output);
        END(layer->attention_norm);
        if (layer->has_cross) {
            in = PREPARE(layer->cross_norm, layer->cross_query);
            multiply(run, team, &layer->cross_query, &in, rows, b->wide, b->wide_stride, 0);
            if (layer->cross_query_norm.kind) {
                for (int64_t n; (n = clearhead_take(team, rows)) >= 0;)
                    norm_heads(run, &layer->cross_query_norm, b->wide + n * b->wide_stride, net->heads, scratch);
                clearhead_barrier(team);
            }
            attend(run, team, layer, thread, 1);
            merge_heads(run, team, &layer->cross_output);
            END(layer->cross_norm);
        }
        in = PREPARE(layer->feed_forward_norm, layer->up);
        feed_forward(run, team, layer, &in);
        END(layer->feed_forward_norm);
    }
    prepare(run, team, NULL, ended, NULL);
}

static void run_step(void *context, struct team *team, int64_t thread) {
    const struct run *run = context;
    const struct network *net = run->net;
    const struct step *s = run->step;
    const struct buffers *b = &run->b;
    for (int64_t n; (n = clearhead_take(team, s->num_tokens)) >= 0;) start_token(run, n);
    clearhead_barrier(team);
    run_layers(run, team, thread);
    const struct activations in = as_activations(run, b->normed, b->x_stride);
    for (int64_t m; (m = clearhead_take(team, s->num_outputs)) >= 0;) {
        const float *x = b->x + s->outputs[m] * b->x_stride;
        float *out = b->normed + m * b->x_stride;
        if (net->final_norm.kind) run->kernels->norm(&net->final_norm, x, out, net->dim);
        else memcpy(out, x, (size_t)b->x_stride * sizeof(float));
        if (s->hidden) memcpy(s->hidden + m * net->dim, out, (size_t)net->dim * sizeof(float));
        if (s->logits && net->lm_head.kind >= INT8) run->kernels->quantize(&in, m, net->dim);
    }
    clearhead_barrier(team);
    if (!s->logits) return;
    const int64_t stride = ALIGN_UP(net->lm_head.outputs, LANES);
    multiply(run, team, &net->lm_head, &in, s->num_outputs, s->logits, stride, 0);
    for (int64_t m; s->tokens && (m = clearhead_take(team, s->num_outputs)) >= 0;)
        s->tokens[m] = (int32_t)run->kernels->argmax(s->logits + m * stride, net->lm_head.outputs);
}

int64_t clearhead_step(const struct network *net, const struct step *s, int64_t level, int64_t threads) {
    struct run run = {.net = net, .step = s, .kernels = clearhead_kernels(level)};
    if (!run.kernels) return NO_LEVEL;
    if (!is_valid(net, s)) return BAD_INPUT;
    char *base = (char *)ALIGN_UP((intptr_t)s->workspace, 64);
    if (lay_out(net, s, at_least(threads, 1), base, &run.b) + 64 > s->workspace_size) return SMALL_WORKSPACE;
    clearhead_run_team(run_step, &run, at_least(threads, 1));
    return OK;
}
