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
    int32_t bf16, invariant;
    int64_t heads, kv_heads, dim, q_stride, num_slots;
} Geometry;

typedef struct {
    const Geometry *of;
    const void *q, *cache;
    void *out;
    int64_t sequence, first_query, num_queries, first_row; /* of this item; rows are tokens of the step */
    int64_t kv_head;
} Item;

/* The slot of a position of the context. */
INLINE int64_t slot_of(const Geometry *g, int64_t sequence, int64_t position) {
    const int64_t *table = g->tables + sequence * g->table_width;
    return table[position / g->block_size] * g->block_size + position % g->block_size;
}

/* Scores times scale, and bounded by the softcap. */
INLINE vf scaled(const Geometry *g, vf scores) {
    scores *= g->scale;
    return g->softcap > 0 ? g->softcap * vtanh(scores / g->softcap) : scores;
}

/* One new token over its context, keys read as they lie. Fast, but adds in another order than attend_tile. */
void attend_one(const Item *item);
int attends_one(const Geometry *g);

/* Up to QUERIES(group) tokens over their context; each token's result is the same to the bit whatever the tile. */
void attend_tile(const Item *item);
