/* Attention of one new token: each key and value is read once, as it lies, for all query heads of the group. */
#include "attention.h"

#define TILE 64                /* the most positions of a tile, */
#define TILE_BYTES (16 * 1024) /* and the most of its keys and values: two tiles fit the first cache */
#define LINE 64                /* bytes */
#define STRETCH 64             /* numbers of a head, with each of which some lines are asked for */
#define HEADS_AT_ONCE 4
#define ONE_GROUP 16

/* Numbers to a chunk of a head: two vectors, which for bfloat16 are the even and the odd numbers of one load. */
#define CHUNK (2 * VL)

/* How a head's numbers lie in memory. CODES: as int8, with a scale behind them, while q is in float32. */
typedef enum { FLOAT32, BFLOAT16, CODES } Form;

int attends_one(const Geometry *g) { return g->dim % CHUNK == 0 && g->heads / g->kv_heads <= ONE_GROUP; }

INLINE void split(const void *row, int64_t at, vf *even, vf *odd, Form form) {
    if (form == BFLOAT16) {
        vu pairs = *(const vu_mem *)((const uint16_t *)row + at);
        *even = low_half(pairs);
        *odd = high_half(pairs);
    } else if (form == CODES) {
        *even = __builtin_convertvector(load_int8((const int8_t *)row + at), vf);
        *odd = __builtin_convertvector(load_int8((const int8_t *)row + at + VL), vf);
    } else {
        *even = load_f32((const float *)row + at);
        *odd = load_f32((const float *)row + at + VL);
    }
}

/* The sums of VL vectors, as one vector. */
INLINE vf sums(vf *x) {
#if VL == 16
    __m512 t[16], u[16];
    for (int i = 0; i < 8; i++) { /* lanes of x[i] and x[i + 8] side by side in halves, added up */
        __m512 a = (__m512)x[i], b = (__m512)x[i + 8];
        t[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    for (int i = 0; i < 4; i++)
        u[i] = _mm512_add_ps(_mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd));
    /* u[i] lanes of 128 bits: x[i], x[i + 8], x[i + 4], x[i + 12] in some order; now within the lanes. */
    for (int i = 0; i < 2; i++)
        t[i] = _mm512_add_ps(_mm512_unpacklo_ps(u[i], u[i + 2]), _mm512_unpackhi_ps(u[i], u[i + 2]));
    __m512 lo = _mm512_unpacklo_ps(t[0], t[1]), hi = _mm512_unpackhi_ps(t[0], t[1]);
    const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15);
    return (vf)_mm512_permutexvar_ps(order, _mm512_add_ps(lo, hi));
#else
    vf out;
    for (int i = 0; i < VL; i++) out[i] = sum(x[i]);
    return out;
#endif
}

/* Positions that will be read next, and the lines of theirs that memory is asked for meanwhile: first those of the keys,
 * then, `values` bytes further, those of the values; of each position `bytes` from `begin` on, all heads of the item. */
typedef struct {
    const char *rows[TILE + VL];
    int64_t count; /* of this sequence: none when they are the next sequence's */
    int64_t known, position, begin, at, bytes, values;
} Tile;

/* How many lines, if it is `lines` in bfloat16: so many that all are asked for, whatever the size of heads and groups. */
INLINE int pace(Form form, int lines) { return form == FLOAT32 ? 2 * lines : lines; }

/* Asks for the next lines. A few at a time: a burst would wait for memory itself. */
INLINE void fetch(Tile *tile, int lines) {
#pragma GCC unroll 6
    for (int i = 0; i < lines && tile->position < tile->known; i++) {
        __builtin_prefetch(tile->rows[tile->position] + tile->begin + tile->at);
        if ((tile->at += LINE) < tile->bytes) continue;
        tile->at = 0;
        if (++tile->position < tile->known || !tile->values) continue;
        tile->position = 0;
        tile->begin += tile->values;
        tile->values = 0;
    }
}

/* scores of VL positions whose keys are at `rows`, for one head's q; those of codes are yet to be scaled. */
INLINE vf score(const char *const *rows, const void *q, int64_t dim, Tile *next, Form form) {
    vf acc[VL];
    for (int t = 0; t < VL; t++) acc[t] = (vf){0};
    for (int64_t at = 0; at < dim; at += CHUNK) {
        vf q_even, q_odd;
        split(q, at, &q_even, &q_odd, form == CODES ? FLOAT32 : form);
#if HAS_DOT
        if (form == BFLOAT16) {
            __m512bh pairs = (__m512bh)_mm512_loadu_si512((const uint16_t *)q + at);
#pragma GCC unroll 16
            for (int t = 0; t < VL; t++) {
                if (at % STRETCH == 0) fetch(next, pace(form, 1));
                __m512bh k = (__m512bh)_mm512_loadu_si512((const uint16_t *)rows[t] + at);
                acc[t] = (vf)_mm512_dpbf16_ps((__m512)acc[t], k, pairs);
            }
            continue;
        }
#endif
#pragma GCC unroll 16
        for (int t = 0; t < VL; t++) {
            if (at % STRETCH == 0) fetch(next, pace(form, 1));
            vf even, odd;
            split(rows[t], at, &even, &odd, form);
            acc[t] += even * q_even + odd * q_odd;
        }
    }
    return sums(acc);
}

/* out[heads][chunks * CHUNK] += weights of `heads` heads x values, for some chunks of the head. */
INLINE void mix(int heads, int chunks, const char *const *rows, int64_t count, int64_t at, const float *weights,
                float *out, int64_t dim, Tile *next, Form form) {
    vf even[HEADS_AT_ONCE][2], odd[HEADS_AT_ONCE][2];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 2
        for (int c = 0; c < chunks; c++) {
            even[h][c] = load_f32(out + h * dim + at + c * CHUNK);
            odd[h][c] = load_f32(out + h * dim + at + c * CHUNK + VL);
        }
    for (int64_t t = 0; t < count; t++) {
        if (at % STRETCH == 0) fetch(next, pace(form, heads == 1 ? 3 : 2));
        vf v_even[2], v_odd[2];
#pragma GCC unroll 2
        for (int c = 0; c < chunks; c++) split(rows[t], at + c * CHUNK, &v_even[c], &v_odd[c], form);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            float weight = weights[h * TILE + t];
#pragma GCC unroll 2
            for (int c = 0; c < chunks; c++) {
                even[h][c] += v_even[c] * weight;
                odd[h][c] += v_odd[c] * weight;
            }
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 2
        for (int c = 0; c < chunks; c++) {
            store_f32(out + h * dim + at + c * CHUNK, even[h][c]);
            store_f32(out + h * dim + at + c * CHUNK + VL, odd[h][c]);
        }
}

/* The same for all heads of a group and all of the head. */
INLINE void mix_all(int64_t group, const char *const *rows, int64_t count, const float *weights, float *out,
                    int64_t dim, Tile *next, Form form) {
    for (int64_t h = 0; h < group; h += HEADS_AT_ONCE, weights += HEADS_AT_ONCE * TILE, out += HEADS_AT_ONCE * dim) {
        int64_t heads = group - h < HEADS_AT_ONCE ? group - h : HEADS_AT_ONCE, at = 0;
#define MIX(HEADS, CHUNKS) mix(HEADS, CHUNKS, rows, count, at, weights, out, dim, next, form)
        for (; at + 2 * CHUNK <= dim; at += 2 * CHUNK)
            heads == 4 ? MIX(4, 2) : heads == 3 ? MIX(3, 2) : heads == 2 ? MIX(2, 2) : MIX(1, 2);
        if (at < dim) heads == 4 ? MIX(4, 1) : heads == 3 ? MIX(3, 1) : heads == 2 ? MIX(2, 1) : MIX(1, 1);
#undef MIX
    }
}

/* Weights of `count` positions from one head's scores; the head's maximum, sum and output are brought to them. */
INLINE void soften(const Geometry *g, float *weights, int64_t count, float *most, vf *total, float *out) {
    vf highest = splat(-INFINITY);
    for (int64_t i = count; i % VL; i++) weights[i] = -INFINITY; /* what the last vector holds beyond the context */
    for (int64_t i = 0; i < count; i += VL) {
        vf x = load_f32(weights + i);
        x = choose(x == -INFINITY, x, scaled(g, x));
        store_f32(weights + i, x);
        highest = maximum(highest, x);
    }
    float now = largest(highest);
    if (now > *most) {
        float factor = *most == -INFINITY ? 0 : vexp(splat(*most - now))[0];
        for (int64_t i = 0; i < g->dim; i += VL) store_f32(out + i, load_f32(out + i) * factor);
        *total *= factor;
        *most = now;
    }
    for (int64_t i = 0; i < count; i += VL) {
        vf weight = vexp(load_f32(weights + i) - *most);
        *total += weight;
        store_f32(weights + i, weight);
    }
}

INLINE void finish(const float *out, void *to, int64_t at, int64_t dim, float factor, Form form, int bf16) {
    for (int64_t i = 0; i < dim; i += CHUNK) {
        vf even = load_f32(out + i) * factor, odd = load_f32(out + i + VL) * factor;
        if (form == BFLOAT16) {
            *(vu_mem *)((uint16_t *)to + at + i) = (vu)rounded(even, 1) >> 16 | (vu)rounded(odd, 1);
        } else {
            store(to, at + i, even, bf16);
            store(to, at + i + VL, odd, bf16);
        }
    }
}

/* The scales behind the codes of a tile's positions. */
INLINE void read_scales(const char *const *rows, int64_t count, int64_t dim, float *scales) {
    for (int64_t t = 0; t < count; t++) memcpy(scales + t, rows[t] + dim, sizeof *scales);
}

INLINE void scale(float *numbers, const float *scales, int64_t count) {
    for (int64_t t = 0; t < count; t += VL) store_f32(numbers + t, load_f32(numbers + t) * load_f32(scales + t));
}

INLINE int64_t first_position(const Geometry *g, int64_t sequence) {
    int64_t length = g->context_lens[sequence];
    return g->window > 0 && length > g->window ? length - g->window : 0;
}

/* Locates a tile of positions; after the sequence's last one the next sequence's first. */
INLINE void look_ahead(const Item *item, int64_t at, Tile *tile, int bf16) {
    const Geometry *g = item->of;
    int64_t sequence = item->sequence, bytes = item->kv_heads * head_bytes(g, bf16);
    tile->count = tile->known = tile->position = 0;
    int is_other = at >= g->context_lens[sequence];
    if (is_other && ++sequence == g->batch) return;
    if (is_other) at = first_position(g, sequence);
    int64_t most = TILE_BYTES / (2 * bytes) / VL * VL, left = g->context_lens[sequence] - at;
    most = most < VL ? VL : most > TILE || g->int8 ? TILE : most; /* to widen codes takes longer than memory does */
    tile->known = left < most ? left : most;
    tile->count = is_other ? 0 : tile->known;
    tile->begin = item->kv_head * head_bytes(g, bf16);
    tile->at = 0;
    tile->bytes = bytes;
    tile->values = values_behind(g, bf16);
    locate(item, sequence, at, tile->known, tile->rows, bf16);
}

INLINE void attend(const Item *item, Form form, int bf16) {
    const Geometry *g = item->of;
    int64_t group = g->heads / g->kv_heads, dim = g->dim, heads = item->kv_heads * group, values = values_behind(g, bf16);
    float weights[ONE_GROUP * TILE], out[heads * dim], most[heads], wide_q[form == CODES ? heads * dim : 1];
    float k_scales[TILE + VL] = {0}, v_scales[TILE + VL] = {0};
    vf total[heads];
    memset(out, 0, sizeof out);
    for (int64_t h = 0; h < heads; h++) {
        most[h] = -INFINITY;
        total[h] = (vf){0};
    }
    int64_t first_number = item->first_row * g->q_stride + item->kv_head * group * dim, width = bf16 ? 2 : 4;
    const char *q = (const char *)item->q + first_number * width;
    if (form == CODES) {
        for (int64_t i = 0; i < heads * dim; i += VL) store_f32(wide_q + i, load(q, i, bf16));
        q = (const char *)wide_q, width = 4;
    }
    Tile tiles[2], *tile = tiles, *next = tiles + 1;
    int64_t at = first_position(g, item->sequence);
    look_ahead(item, at, tile, bf16);
    for (; tile->count > 0; next = tile, tile = tile == tiles ? tiles + 1 : tiles) {
        look_ahead(item, at += tile->count, next, bf16);
        for (int64_t head = 0; head < item->kv_heads; head++) {
            int64_t first = head * group, begin = (item->kv_head + head) * head_bytes(g, bf16);
            const char *k[TILE + VL], *v[TILE];
            for (int64_t t = 0; t < tile->count; t++) {
                k[t] = tile->rows[t] + begin;
                v[t] = k[t] + values;
            }
            if (form == CODES) {
                read_scales(k, tile->count, dim, k_scales);
                read_scales(v, tile->count, dim, v_scales);
            }
            for (int64_t t = tile->count; t % VL; t++) k[t] = k[0];
            for (int64_t t = 0; t < tile->count; t += VL)
                for (int64_t h = 0; h < group; h++)
                    store_f32(weights + h * TILE + t, score(k + t, q + (first + h) * dim * width, dim, next, form));
            for (int64_t h = 0; h < group; h++) {
                if (form == CODES) scale(weights + h * TILE, k_scales, tile->count);
                soften(g, weights + h * TILE, tile->count, most + first + h, total + first + h, out + (first + h) * dim);
                if (form == CODES) scale(weights + h * TILE, v_scales, tile->count);
            }
            mix_all(group, v, tile->count, weights, out + first * dim, dim, next, form);
        }
    }
    for (int64_t h = 0; h < heads; h++) {
        int64_t to = (item->first_row * g->heads + item->kv_head * group + h) * dim;
        finish(out + h * dim, item->out, to, dim, 1.0f / sum(total[h]), form, bf16);
    }
}

void attend_one(const Item *item) {
    const Geometry *g = item->of;
    if (g->int8)
        g->bf16 ? attend(item, CODES, 1) : attend(item, CODES, 0);
    else
        g->bf16 ? attend(item, BFLOAT16, 1) : attend(item, FLOAT32, 0);
}
