/* Paged attention: cuts a step into items, a new token or a tile of a prompt's tokens, and one or all KV heads. */
#include "attention.h"

#include <stdlib.h>

#include "parallel.h"

#define MANY 4       /* sequences from which on threads are busy with one each */
#define TILE_ROWS 48 /* query rows, heads of a group times tokens, that read a tile of KV together */

static void attend(const void *context, int64_t i) {
    const Item *item = (const Item *)context + i;
    if (item->num_queries == 1 && !item->of->invariant && attends_one(item->of))
        attend_one(item);
    else
        attend_tile(item);
}

/* Whether these shapes are computed here at all. */
EXPORT int raytide_attends(int64_t heads, int64_t kv_heads, int64_t dim) {
    return dim <= MAX_DIM && dim % 2 == 0 && heads % kv_heads == 0 && heads / kv_heads <= MAX_GROUP;
}

/* Attention of all tokens of the step; 0, or -1 when memory ran out. */
EXPORT int raytide_attention(const Geometry *g, const void *q, const void *cache, void *out) {
    int64_t group = g->heads / g->kv_heads, queries = TILE_ROWS / group > 1 ? TILE_ROWS / group : 1;
    int64_t count = 0, cost = 0;
    for (int64_t b = 0; b < g->batch; b++) {
        count += (g->query_lens[b] + queries - 1) / queries * g->kv_heads;
        cost += g->query_lens[b] * g->context_lens[b] * g->heads * g->dim / 2;
    }
    Item *items = malloc((size_t)count * sizeof(Item)), *next = items;
    int many = !g->invariant && attends_one(g) && g->batch >= MANY; /* then cache lines are best read in order */
    if (!items) return -1;
    for (int64_t b = 0, row = 0; b < g->batch; row += g->query_lens[b++])
        for (int64_t first = 0; first < g->query_lens[b]; first += queries) {
            int64_t left = g->query_lens[b] - first;
            int64_t here = left < queries ? left : queries, at_once = here == 1 && many ? g->kv_heads : 1;
            for (int64_t head = 0; head < g->kv_heads; head += at_once)
                *next++ = (Item){g, q, cache, out, b, first, here, row + first, head, at_once};
        }
    for_each(attend, items, next - items, cost);
    free(items);
    return 0;
}
