/* A decoder over the tokens of a step: the operators in the order of decoder.py, without a return to Python between them,
 * which takes as long as the operators themselves where one token is computed. */
#include <stdlib.h>

#include "operators.h"
#include "parallel.h"

#define LINE 64 /* bytes */
#define PARTS 3 /* queries, keys and values in formats of their own */

/* The structs of layers.py. A norm without a weight is none. */
typedef struct {
    const void *weight, *bias;
    float eps;
    int32_t layer;
} Norm;

/* y = x W^T + bias. `weight` is a Weight of quantized.c, which has its bias, or what raytide_pack returned. */
typedef struct {
    const void *weight, *bias;
    int64_t n, k, quantized;
} Product;

/* The products' outputs side by side. */
typedef struct {
    Product products[PARTS];
    int64_t count, n;
} Linear;

typedef struct {
    Norm input, after_attention, ffn, after_ffn;
    Linear qkv, attention_out, up, down; /* up: gate and up, if gated */
    const void *q_norm, *k_norm;
    int64_t rope, attention; /* indices; rope -1: none */
    float head_eps;
} Layer;

typedef struct {
    const void *cos, *sin; /* of all positions, [positions, turned] */
    int64_t turned;
} Rope;

typedef struct {
    const Layer *layers;
    void *const *caches;
    const Geometry *attentions;
    const Rope *ropes;
    const void *embedding;
    Norm last;
    Linear head;
    const int64_t *ids, *positions, *slots, *rows; /* rows: the tokens whose results are wanted */
    void *x, *delta;  /* [tokens, hidden]: the residual stream, and what is to be added to it */
    void *normed;     /* [num_rows, hidden], of the wanted tokens; NULL: only the layers are wanted */
    float *logits;    /* [num_rows, head.n] */
    int64_t num_layers, tokens, num_rows, hidden, heads, kv_heads, dim, ffn, num_slots; /* ffn: the most of a layer */
    int32_t gated, kind, bf16, int8;
} Pass;

/* Where a layer's intermediate results lie: few places, so that they stay in the caches. */
typedef struct {
    char *normed, *wide, *narrow, *part; /* wide: qkv, then gate and up; narrow: what attention and activation made of it */
} Scratch;

static int product(const Product *by, const void *x, void *y, int64_t rows, int bf16) {
    if (by->quantized) return raytide_quantized_linear(by->weight, x, y, rows, bf16);
    raytide_linear(x, by->weight, by->bias, y, rows, by->n, by->k, bf16);
    return 0;
}

static int linear(const Linear *by, const void *x, char *y, char *part, int64_t rows, int bf16) {
    if (by->count == 1) return product(by->products, x, y, rows, bf16);
    int64_t width = bf16 ? 2 : 4, at = 0;
    for (int64_t i = 0; i < by->count; at += by->products[i++].n * width) {
        int64_t bytes = by->products[i].n * width;
        if (product(by->products + i, x, part, rows, bf16)) return -1;
        for (int64_t row = 0; row < rows; row++) memcpy(y + row * by->n * width + at, part + row * bytes, bytes);
    }
    return 0;
}

/* out = norm(x), after x += delta if there is one. */
static void norm(const Pass *p, const Norm *by, void *x, const void *delta, void *out) {
    raytide_norm(x, delta, by->weight, by->bias, out, p->tokens, p->hidden, by->eps, p->bf16, by->layer);
}

static int layer(const Pass *p, const Layer *l, void *cache, const Scratch *s) {
    static const Rope none;
    const Rope *rope = l->rope < 0 ? &none : p->ropes + l->rope;
    norm(p, &l->input, p->x, p->delta, s->normed);
    if (linear(&l->qkv, s->normed, s->wide, s->part, p->tokens, p->bf16)) return -1;
    raytide_rope_write(s->wide, rope->cos, rope->sin, p->positions, l->q_norm, l->k_norm, cache, p->slots, p->tokens,
                       p->heads, p->kv_heads, p->dim, rope->turned, p->num_slots, l->head_eps, p->bf16, p->int8);
    if (raytide_attention(p->attentions + l->attention, s->wide, cache, s->narrow)) return -1;
    if (linear(&l->attention_out, s->narrow, p->delta, s->part, p->tokens, p->bf16)) return -1;
    if (l->after_attention.weight) norm(p, &l->after_attention, p->delta, NULL, p->delta);
    norm(p, &l->ffn, p->x, p->delta, s->normed);
    if (linear(&l->up, s->normed, s->wide, s->part, p->tokens, p->bf16)) return -1;
    raytide_activate(s->wide, s->narrow, p->tokens, l->down.products->k, p->gated, p->kind, p->bf16);
    if (linear(&l->down, s->narrow, p->delta, s->part, p->tokens, p->bf16)) return -1;
    if (l->after_ffn.weight) norm(p, &l->after_ffn, p->delta, NULL, p->delta);
    return 0;
}

/* Copies the rows `rows` of [.., bytes]. */
static void gather(const void *from, const int64_t *rows, void *to, int64_t count, int64_t bytes) {
    for (int64_t i = 0; i < count; i++) memcpy((char *)to + i * bytes, (const char *)from + rows[i] * bytes, bytes);
}

typedef struct {
    const uint16_t *from;
    float *to;
    int64_t n;
} Wide;

static void widen_row(const void *context, int64_t row) {
    const Wide *w = context;
    for (int64_t i = row * w->n; i < (row + 1) * w->n; i++) w->to[i] = load_one(w->from, i, 1);
}

/* The norm of the wanted tokens into p->normed, and their logits if p->logits is given. `x` and `delta` are scratch. */
static int leave(const Pass *p, char *x, char *delta) {
    int64_t bytes = p->hidden * (p->bf16 ? 2 : 4);
    gather(p->x, p->rows, x, p->num_rows, bytes);
    gather(p->delta, p->rows, delta, p->num_rows, bytes);
    raytide_norm(x, delta, p->last.weight, p->last.bias, p->normed, p->num_rows, p->hidden, p->last.eps, p->bf16,
                 p->last.layer);
    if (!p->logits) return 0;
    if (!p->bf16) return product(p->head.products, p->normed, p->logits, p->num_rows, 0);
    uint16_t *rounded = malloc((size_t)(p->num_rows * p->head.n * 2));
    if (!rounded) return -1;
    int failed = product(p->head.products, p->normed, rounded, p->num_rows, 1);
    Wide wide = {rounded, p->logits, p->head.n};
    if (!failed) for_each(widen_row, &wide, p->num_rows, p->num_rows * p->head.n);
    free(rounded);
    return failed;
}

/* Writes the KV of all tokens, and the results of the wanted ones. With `ids` the first layer's input are their
 * embeddings; else it is x + delta, which then are the last layer's output. Returns 0, or -1 without memory. */
EXPORT int raytide_layers(Pass *p) {
    int64_t qkv = (p->heads + 2 * p->kv_heads) * p->dim, up = p->ffn * (p->gated ? 2 : 1), attended = p->heads * p->dim;
    int64_t wide = qkv > up ? qkv : up, narrow = attended > p->ffn ? attended : p->ffn, bytes = 0;
    enum { NORMED, WIDE, NARROW, PART, X, DELTA, LAST_X, LAST_DELTA, PLACES };
    int64_t sizes[PLACES] = {[NORMED] = p->hidden, [WIDE] = wide,  [NARROW] = narrow,   [PART] = wide,
                             [X] = p->hidden,      [DELTA] = p->hidden, [LAST_X] = p->hidden, [LAST_DELTA] = p->hidden};
    char *places[PLACES], *memory;
    for (int i = 0; i < PLACES; i++) {
        sizes[i] *= (i < LAST_X ? p->tokens : p->num_rows) * (p->bf16 ? 2 : 4);
        bytes += sizes[i] = (sizes[i] + LINE - 1) / LINE * LINE;
    }
    if (!(memory = aligned_alloc(LINE, bytes))) return -1;
    places[0] = memory;
    for (int i = 1; i < PLACES; i++) places[i] = places[i - 1] + sizes[i - 1];
    if (p->ids) {
        p->x = places[X];
        p->delta = places[DELTA];
        gather(p->embedding, p->ids, p->x, p->tokens, p->hidden * (p->bf16 ? 2 : 4));
        memset(p->delta, 0, sizes[DELTA]);
    }
    Scratch s = {places[NORMED], places[WIDE], places[NARROW], places[PART]};
    int failed = 0;
    for (int64_t i = 0; i < p->num_layers && !failed; i++) failed = layer(p, p->layers + i, p->caches[i], &s);
    if (!failed && p->normed) failed = leave(p, places[LAST_X], places[LAST_DELTA]);
    free(memory);
    return failed;
}
