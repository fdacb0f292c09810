/* Random networks and steps for ops/native/step under AddressSanitizer and UBSan, or ThreadSanitizer with several
   callers: every buffer is exactly as large as native_network.py allocates it; indices are sometimes out of range.

   native_step_fuzz CALLS SEED CALLERS; `make torture` builds and runs it. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../src/clearhead/ops/native/step/step.h"

int64_t clearhead_step_workspace(const struct network *, const struct step *, int64_t threads);
int64_t clearhead_step(const struct network *, const struct step *, int64_t level, int64_t threads);
int64_t clearhead_linear_workspace(const struct linear *, int64_t rows);
int64_t clearhead_linear(const struct linear *, const float *x, int64_t rows, float *out, char *workspace,
                         int64_t level, int64_t threads);
int64_t clearhead_top_logprobs(const float *, int64_t rows, int64_t stride, int64_t count, int64_t k, float *, int32_t *,
                               int64_t level, int64_t threads);

struct source {
    uint64_t state;
    void *owned[1024];
    int count;
};

static uint32_t take(struct source *s, uint32_t below) {
    s->state = s->state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(s->state >> 33) % below;
}

static void *own(struct source *s, int64_t size) {
    void *p = malloc(size ? (size_t)size : 1);
    if (!p || s->count == 1024) abort();
    return s->owned[s->count++] = p;
}

static float *floats(struct source *s, int64_t count) {
    static const float special[] = {__builtin_inff(), -__builtin_inff(), __builtin_nanf(""), 3e38f, -3e38f, 1e-40f, -0.0f};
    float *x = own(s, count * 4);
    for (int64_t n = 0; n < count; n++) x[n] = ((float)take(s, 65536) - 32768.0f) / 16384.0f;
    if (count && take(s, 16) == 0) x[take(s, (uint32_t)count)] = special[take(s, 7)];
    return x;
}

static int32_t *ints(struct source *s, int64_t count, int64_t below) {
    int32_t *x = own(s, count * 4);
    for (int64_t n = 0; n < count; n++) x[n] = below ? (int32_t)take(s, (uint32_t)below) : 0;
    if (count && take(s, 400) == 0) x[take(s, (uint32_t)count)] = take(s, 2) ? -1 : (int32_t)below;
    return x;
}

static void *bytes(struct source *s, int64_t count) {
    uint8_t *x = own(s, count);
    for (int64_t n = 0; n < count; n++) x[n] = (uint8_t)take(s, 120); /* finite in bf16 and fp16 */
    return x;
}

static struct linear make_linear(struct source *s, int64_t outputs, int64_t inputs, int64_t kind) {
    const int64_t panels = (outputs + 15) / 16, groups = (inputs + 31) / 32;
    struct linear l = {.outputs = outputs, .inputs = inputs, .kind = kind, .factor = 0.01};
    if (kind == FP32) l.weight = floats(s, panels * 16 * inputs);
    if (kind == BF16) l.weight = bytes(s, panels * 16 * ((inputs + 1) / 2) * 4);
    if (kind == INT8) l.weight = bytes(s, panels * 16 * groups * 32), l.scales = bytes(s, panels * groups * 32);
    if (kind == INT4) l.weight = bytes(s, panels * 16 * groups * 16), l.scales = bytes(s, panels * groups * 64);
    if (take(s, 2)) l.bias = floats(s, panels * 16);
    return l;
}

static struct norm make_norm(struct source *s, int64_t dim, int optional) {
    struct norm n = {.eps = 1e-5};
    if (optional && take(s, 2)) return n;
    n.kind = 1 + take(s, 3), n.weight = floats(s, ALIGN_UP(dim, PAD_TO));
    if (take(s, 2)) n.bias = floats(s, ALIGN_UP(dim, PAD_TO));
    return n;
}

static int64_t level_of(struct source *s) { return (int64_t)take(s, 4) - 1; }

static void linear_call(struct source *s) {
    const int64_t inputs = 1 + take(s, 80), outputs = 1 + take(s, 80), rows = 1 + take(s, 20);
    const struct linear l = make_linear(s, outputs, inputs, take(s, 4));
    clearhead_linear(&l, floats(s, rows * inputs), rows, own(s, rows * ALIGN_UP(outputs, 16) * 4),
                     own(s, clearhead_linear_workspace(&l, rows)), level_of(s), 1 + take(s, 2));
    const int64_t stride = outputs + take(s, 3), k = take(s, (uint32_t)outputs + 2);
    clearhead_top_logprobs(floats(s, rows * stride), rows, stride, outputs, k, own(s, rows * k * 4),
                           own(s, rows * k * 4), level_of(s), 1 + take(s, 2));
}

static void step_call(struct source *s) {
    static const int64_t head_dims[] = {2, 6, 8, 16, 32, 34, 64, 96};
    const int64_t kind = take(s, 4), cross = take(s, 2), pages = 3 + take(s, 4), vocab = 1 + take(s, 40);
    struct network net = {.num_layers = 1 + take(s, 2), .dim = 1 + take(s, 70), .kv_heads = 1 + take(s, 2)};
    net.heads = net.kv_heads * (1 + take(s, 4)), net.head_dim = head_dims[take(s, 8)], net.ff_dim = 1 + take(s, 70);
    net.activation = take(s, 6), net.pre_norm = take(s, 2), net.causal = take(s, 4) > 0, net.slots = pages * PAGE_SIZE;
    net.max_positions = 40, net.kv_bf16 = take(s, 2), net.embedding_scale = 2.0;
    net.embedding = make_linear(s, vocab, net.dim, kind), net.lm_head = make_linear(s, vocab, net.dim, kind);
    net.embedding_norm = make_norm(s, net.dim, 1), net.final_norm = make_norm(s, net.dim, 1);
    if (take(s, 2)) net.positions = floats(s, net.max_positions * net.dim);
    else if (take(s, 2)) net.rope_frequencies = floats(s, net.head_dim / 2);
    struct layer *layers = own(s, net.num_layers * (int64_t)sizeof *layers);
    const int64_t q = net.heads * net.head_dim, kv = net.kv_heads * net.head_dim;
    for (int64_t n = 0; n < net.num_layers; n++) {
        layers[n] = (struct layer){.has_cross = cross, .pattern = take(s, 5), .pattern_size = 1 + take(s, 5)};
        layers[n].pattern_summary = 1 + take(s, (uint32_t)layers[n].pattern_size);
        layers[n].attention_norm = make_norm(s, net.dim, 0), layers[n].cross_norm = make_norm(s, net.dim, 0);
        layers[n].feed_forward_norm = make_norm(s, net.dim, 0), layers[n].query_norm = make_norm(s, net.head_dim, 1);
        layers[n].key_norm = make_norm(s, net.head_dim, 1), layers[n].cross_query_norm = make_norm(s, net.head_dim, 1);
        layers[n].qkv = make_linear(s, q + 2 * kv, net.dim, kind), layers[n].output = make_linear(s, net.dim, q, kind);
        layers[n].cross_query = make_linear(s, q, net.dim, kind);
        layers[n].cross_output = make_linear(s, net.dim, q, kind);
        layers[n].up = make_linear(s, net.ff_dim * (net.activation >= SWIGLU ? 2 : 1), net.dim, kind);
        layers[n].down = make_linear(s, net.dim, net.ff_dim, kind);
        layers[n].keys = bytes(s, net.slots * kv * (net.kv_bf16 ? 2 : 4));
        layers[n].values = bytes(s, net.slots * kv * (net.kv_bf16 ? 2 : 4));
    }
    net.layers = layers;
    struct step t = {.num_rows = 1 + take(s, 4), .span = take(s, 2) ? 1 : PAGE_SIZE};
    t.table_width = t.span == 1 ? 1 + take(s, 40) : 1 + take(s, 3);
    t.num_tokens = t.num_rows * (1 + take(s, 5)), t.num_outputs = take(s, 5);
    int32_t *rows = own(s, t.num_tokens * 4), *positions = own(s, t.num_tokens * 4);
    const int64_t keys = t.table_width * t.span < net.max_positions ? t.table_width * t.span : net.max_positions;
    for (int64_t n = 0; n < t.num_tokens; n++) {
        rows[n] = (int32_t)(n * t.num_rows / t.num_tokens), positions[n] = (int32_t)take(s, (uint32_t)keys);
        if (n && rows[n] == rows[n - 1] && positions[n] < positions[n - 1]) positions[n] = positions[n - 1];
    }
    t.rows = rows, t.positions = positions, t.ids = ints(s, t.num_tokens, vocab);
    int32_t *slots = ints(s, t.num_tokens, 0);
    for (int64_t n = 0, first = take(s, 8); n < t.num_tokens; n++) /* all different, as those of a pool of pages */
        slots[n] += (int32_t)((first + 2 * n) % net.slots);
    t.slots = slots, t.outputs = ints(s, t.num_outputs, t.num_tokens);
    t.table = ints(s, t.num_rows * t.table_width, net.slots / t.span);
    t.lengths = ints(s, t.num_rows, keys + 1);
    if (cross) {
        t.source_width = 1 + take(s, 2), t.source_table = ints(s, t.num_rows * t.source_width, pages);
        t.source_lengths = ints(s, t.num_rows, t.source_width * PAGE_SIZE + 1);
    }
    if (take(s, 4)) t.logits = own(s, t.num_outputs * ALIGN_UP(vocab, 16) * 4), t.tokens = own(s, t.num_outputs * 4);
    else t.hidden = own(s, t.num_outputs * net.dim * 4);
    const int64_t threads = 1 + take(s, 3);
    t.workspace_size = clearhead_step_workspace(&net, &t, threads) - (take(s, 100) == 0 ? 64 : 0);
    t.workspace = own(s, t.workspace_size);
    clearhead_step(&net, &t, level_of(s), threads);
}

static long calls;

static void *work(void *seed) {
    for (long n = 0; n < calls; n++) {
        struct source s = {.state = (uint64_t)(uintptr_t)seed * 1000003 + (uint64_t)n};
        if (take(&s, 3)) step_call(&s);
        else linear_call(&s);
        while (s.count) free(s.owned[--s.count]);
    }
    return NULL;
}

int main(int argc, char **argv) {
    calls = argc > 1 ? atol(argv[1]) : 1000;
    const long seed = argc > 2 ? atol(argv[2]) : 1, callers = argc > 3 ? atol(argv[3]) : 1;
    pthread_t threads[16];
    for (long n = 1; n < callers && n < 16; n++) pthread_create(&threads[n], NULL, work, (void *)(seed + n));
    work((void *)seed);
    for (long n = 1; n < callers && n < 16; n++) pthread_join(threads[n], NULL);
    printf("%ld calls of each of %ld callers\n", calls, callers);
    return 0;
}
