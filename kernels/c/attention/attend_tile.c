/* Attention of a tile of tokens: two small matrix products for each 64 positions of the context, with the softmax kept
 * up to date between them.
 *
 * The tiles of positions start at multiples of 64 and a token adds them in order, so its result depends neither on the
 * other tokens of the tile nor on how its prompt was cut. */
#include "attention.h"
#include "tile.h"

#define TILE 64
#define ROWS MAX_GROUP
#define PADDED (MAX_DIM + PANEL) /* a head, filled up to whole panels */

typedef struct {
    uint32_t keys[TILE * MAX_DIM];   /* panels of positions: a word for each (step of dim, position) */
    uint32_t values[TILE * PADDED];  /* panels of dim: a word for each (step of positions, dim) */
    uint32_t q[ROWS * MAX_DIM];
    float scores[ROWS * TILE], out[ROWS * PADDED], most[ROWS];
    uint32_t weights[ROWS * TILE];   /* softmax numerators, as the product with values takes them */
    vf total[ROWS];
} Scratch;

#if VL == 16
/* 16 rows of 16 words, transposed. */
INLINE void transpose(const uint32_t *const *rows, int64_t at, uint32_t *out, int64_t stride) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(rows[i] + at);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        _mm512_storeu_si512(out + i * stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
        _mm512_storeu_si512(out + (i + 8) * stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    }
}
#endif

/* The heads' rows of a tile's positions as panels of positions. */
INLINE void pack_keys(const char *const *rows, int64_t panels, uint32_t *keys, int64_t dim, Words words, int bf16) {
    int64_t steps = words == PAIRS ? dim / 2 : dim;
    for (int64_t panel = 0; panel < panels; panel++) {
        uint32_t *out = keys + panel * steps * PANEL;
        int64_t step = 0;
#if VL == 16
        if (words == PAIRS || !bf16)
            for (; step + 16 <= steps; step += 16)
                for (int half = 0; half < 2; half++)
                    transpose((const uint32_t *const *)rows + panel * PANEL + half * 16, step,
                              out + step * PANEL + half * 16, PANEL);
#endif
        for (; step < steps; step++)
            for (int j = 0; j < PANEL; j++) {
                const char *row = rows[panel * PANEL + j];
                if (words == PAIRS)
                    out[step * PANEL + j] = ((const word *)row)[step];
                else
                    ((float *)out)[step * PANEL + j] = load_one(row, step, bf16);
            }
    }
}

/* The heads' rows of `steps` positions, or twice as many where words are pairs of them, as panels of dim. */
INLINE void pack_values(const char *const *rows, int64_t steps, uint32_t *values, int64_t dim, Words words, int bf16) {
    for (int64_t at = 0; at < dim; at += VL) {
        uint32_t *out = values + at / PANEL * steps * PANEL + at % PANEL;
        int64_t count = dim - at < VL ? dim - at : VL;
        for (int64_t step = 0; step < steps; step++, out += PANEL) {
            if (words == PAIRS) {
                vf even = load_upto(rows[2 * step], at, count, 1);
                vf odd = load_upto(rows[2 * step + 1], at, count, 1);
                *(vu_mem *)out = ((vu)even >> 16) | (vu)odd;
            } else {
                store_f32((float *)out, load_upto(rows[step], at, count, bf16));
            }
        }
    }
}

/* C[rows, panels] (+)= A B in register tiles. */
INLINE void product(Words words, const void *a, int64_t lda, int64_t rows, const uint32_t *b, int64_t steps,
                    int64_t panels, float *c, int64_t ldc, int add) {
    for (int64_t row = 0; row < rows;) {
        int mr = rows_of_tile(row, rows, MAX_ROWS);
        for (int64_t panel = 0; panel < panels; panel++)
            any_tile(words, mr, 1, (const word *)a + row * lda, lda, b + panel * steps * PANEL, steps,
                     steps, c + row * ldc + panel * PANEL, ldc, add);
        row += mr;
    }
}

/* Turn a row of scores into weights, zero outside of the positions [from, to) of the tile, and keep the row's sum and maximum. */
INLINE void soften(const Geometry *g, Scratch *s, int64_t row, int64_t from, int64_t to, int64_t columns,
                   int64_t padded, Words words) {
    vf scores[TILE / VL], most = splat(-INFINITY);
    vi lane;
    for (int j = 0; j < VL; j++) lane[j] = j;
    for (int i = 0; i < columns / VL; i++) {
        vi at = lane + i * VL;
        scores[i] = choose((at >= (int32_t)from) & (at < (int32_t)to),
                           scaled(g, load_f32(s->scores + row * TILE + i * VL)), splat(-INFINITY));
        most = maximum(most, scores[i]);
    }
    float before = s->most[row], now = largest(most);
    now = now > before ? now : before;
    if (now > before) {
        float factor = before == -INFINITY ? 0 : vexp(splat(before - now))[0];
        for (int64_t i = 0; i < padded; i += VL)
            store_f32(s->out + row * PADDED + i, load_f32(s->out + row * PADDED + i) * factor);
        s->total[row] *= factor;
        s->most[row] = now;
    }
    vf total = s->total[row];
    for (int i = 0; i < columns / VL; i++) {
        vf weight = now == -INFINITY ? splat(0) : vexp(scores[i] - now);
        total += weight;
        store(s->weights, row * TILE + i * VL, weight, words == PAIRS);
    }
    s->total[row] = total;
}

INLINE void attend(const Item *item, Words words, int bf16) {
    const Geometry *g = item->of;
    Scratch scratch, *s = &scratch;
    int64_t group = g->heads / g->kv_heads, rows = item->num_queries * group, dim = g->dim;
    int64_t width = bf16 ? 2 : 4, panels = (dim + PANEL - 1) / PANEL, padded = panels * PANEL;
    int64_t steps = words == PAIRS ? dim / 2 : dim;
    char wide_k[g->int8 ? TILE * dim * width : 1], wide_v[sizeof wide_k];
    for (int64_t row = 0; row < rows; row++) {
        int64_t head = item->kv_head * group + row % group;
        const void *q = (const char *)item->q + ((item->first_row + row / group) * g->q_stride + head * dim) * width;
        if (words == PAIRS)
            memcpy(s->q + row * steps, q, dim * width);
        else
            for (int64_t i = 0; i < dim; i++) ((float *)s->q)[row * steps + i] = load_one(q, i, bf16);
        s->most[row] = -INFINITY;
        s->total[row] = (vf){0};
        memset(s->out + row * PADDED, 0, padded * 4);
    }
    if (padded > dim) memset(s->values, 0, TILE * padded * 4);
    int64_t position = g->context_lens[item->sequence] - g->query_lens[item->sequence] + item->first_query;
    int64_t end = position + item->num_queries, begin = 0;
    if (g->window > 0 && position + 1 > g->window) begin = (position + 1 - g->window) / TILE * TILE;
    for (int64_t tile_at = begin; tile_at < end; tile_at += TILE) {
        const char *k[TILE], *v[TILE];
        int64_t count = end - tile_at < TILE ? end - tile_at : TILE;
        locate(item, item->sequence, tile_at, count, k, bf16);
        for (int64_t j = 0; j < count; j++) {
            const char *head = k[j] + item->kv_head * head_bytes(g, bf16);
            k[j] = widened(g, head, wide_k + j * dim * width, bf16);
            v[j] = widened(g, head + values_behind(g, bf16), wide_v + j * dim * width, bf16);
        }
        for (int64_t j = count; j < TILE; j++) k[j] = k[0], v[j] = v[0]; /* masked, but they have to be numbers */
        /* What is not computed here would have added zeros. */
        int64_t columns = (count + PANEL - 1) / PANEL * PANEL, value_steps = words == PAIRS ? columns / 2 : columns;
        pack_keys(k, columns / PANEL, s->keys, dim, words, bf16);
        pack_values(v, value_steps, s->values, dim, words, bf16);
        product(words, s->q, steps, rows, s->keys, steps, columns / PANEL, s->scores, TILE, 0);
        for (int64_t row = 0; row < rows; row++) {
            int64_t sees = position + row / group + 1, from = g->window > 0 ? sees - g->window - tile_at : 0;
            soften(g, s, row, from > 0 ? from : 0, sees - tile_at < columns ? sees - tile_at : columns, columns,
                   padded, words);
        }
        product(words, s->weights, words == PAIRS ? TILE / 2 : TILE, rows, s->values, value_steps, panels, s->out, PADDED,
                1);
    }
    for (int64_t row = 0; row < rows; row++) {
        int64_t head = item->kv_head * group + row % group, i = 0;
        int64_t at = ((item->first_row + row / group) * g->heads + head) * dim;
        float factor = 1.0f / sum(s->total[row]);
        const float *out = s->out + row * PADDED;
        for (; i + VL <= dim; i += VL) store(item->out, at + i, load_f32(out + i) * factor, bf16);
        for (; i < dim; i++) store_one(item->out, at + i, out[i] * factor, bf16);
    }
}

void attend_tile(const Item *item) {
    if (item->of->bf16)
        attend(item, HAS_DOT ? PAIRS : FLOATS, 1);
    else
        attend(item, FLOATS, 0);
}
