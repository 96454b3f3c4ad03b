/* One step's attention, as both of its kernels take it. */
#pragma once

#include "vector.h"

#define MAX_DIM 256
#define MAX_GROUP 64

/* Sequence b owns the next query_lens[b] tokens of q [tokens, heads, dim] (`q_stride` numbers from token to token), the
 * last of its context_lens[b]; its KV lies in the blocks of row b of `tables`. `window` 0 and `softcap` 0: none. */
typedef struct {
    const int64_t *tables, *query_lens, *context_lens;
    int64_t batch, table_width, block_size, window;
    float scale, softcap;
    int32_t bf16, invariant, int8; /* int8: a head's numbers are codes, and a float behind them is their scale */
    int64_t heads, kv_heads, dim, q_stride, num_slots;
} Geometry;

typedef struct {
    const Geometry *of;
    const void *q, *cache;
    void *out;
    int64_t sequence, first_query, num_queries, first_row; /* of this item; rows are tokens of the step */
    int64_t kv_head, kv_heads;                             /* the first one, and how many */
} Item;

/* The bytes of one head of one position in the cache. */
INLINE int64_t head_bytes(const Geometry *g, int bf16) { return g->int8 ? g->dim + 4 : g->dim * (bf16 ? 2 : 4); }

/* Where `count` positions from `at` on have their keys, all heads of them; values lie values_behind() bytes further. */
INLINE void locate(const Item *item, int64_t sequence, int64_t at, int64_t count, const char **rows, int bf16) {
    const Geometry *g = item->of;
    const int64_t *table = g->tables + sequence * g->table_width + at / g->block_size;
    int64_t offset = at % g->block_size, row_bytes = g->kv_heads * head_bytes(g, bf16);
    for (int64_t t = 0; t < count; table++, offset = 0)
        for (; offset < g->block_size && t < count; offset++)
            rows[t++] = (const char *)item->cache + (*table * g->block_size + offset) * row_bytes;
}

INLINE int64_t values_behind(const Geometry *g, int bf16) { return g->num_slots * g->kv_heads * head_bytes(g, bf16); }

/* A position's head in q's numbers: where it lies, or its codes times their scale, in `to`. */
INLINE const char *widened(const Geometry *g, const char *head, char *to, int bf16) {
    if (!g->int8) return head;
    float scale;
    int64_t i = 0;
    memcpy(&scale, head + g->dim, sizeof scale);
    for (; i + VL <= g->dim; i += VL) store(to, i, __builtin_convertvector(load_int8(head + i), vf) * scale, bf16);
    for (; i < g->dim; i++) store_one(to, i, ((const int8_t *)head)[i] * scale, bf16);
    return to;
}

/* Scores times scale, and bounded by the softcap. */
INLINE vf scaled(const Geometry *g, vf scores) {
    scores *= g->scale;
    return g->softcap > 0 ? g->softcap * vtanh(scores / g->softcap) : scores;
}

/* One new token over its context, for some KV heads: keys read as they lie. Fast, but adds
 * in another order than attend_tile. */
void attend_one(const Item *item);
int attends_one(const Geometry *g);

/* Some tokens over their context, for one KV head; each token's result is the same to the bit whatever the tile. */
void attend_tile(const Item *item);
