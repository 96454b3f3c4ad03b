/* Attention of one new token: each key and value is read once, as it lies, for all query heads of the group. */
#include "attention.h"

#define TILE 256
#define HEADS_AT_ONCE 4
#define ONE_GROUP 16

/* Numbers to a chunk of a head: two vectors, which for bfloat16 are the even and the odd numbers of one load. */
#define CHUNK (2 * VL)

int attends_one(const Geometry *g) { return g->dim % CHUNK == 0 && g->heads / g->kv_heads <= ONE_GROUP; }

INLINE void split(const void *row, int64_t at, vf *even, vf *odd, int bf16) {
    if (bf16) {
        vu pairs = *(const vu_mem *)((const uint16_t *)row + at);
        *even = low_half(pairs);
        *odd = high_half(pairs);
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

/* scores of VL positions whose keys are at `rows`, for one head's q. */
INLINE vf score(const void *const *rows, const void *q, int64_t dim, int bf16) {
    vf acc[VL];
    for (int t = 0; t < VL; t++) acc[t] = (vf){0};
    for (int64_t at = 0; at < dim; at += CHUNK) {
        vf q_even, q_odd;
        split(q, at, &q_even, &q_odd, bf16);
#if HAS_DOT
        if (bf16) {
            __m512bh pairs = (__m512bh)_mm512_loadu_si512((const uint16_t *)q + at);
#pragma GCC unroll 16
            for (int t = 0; t < VL; t++) {
                __m512bh k = (__m512bh)_mm512_loadu_si512((const uint16_t *)rows[t] + at);
                acc[t] = (vf)_mm512_dpbf16_ps((__m512)acc[t], k, pairs);
            }
            continue;
        }
#endif
#pragma GCC unroll 16
        for (int t = 0; t < VL; t++) {
            vf even, odd;
            split(rows[t], at, &even, &odd, bf16);
            acc[t] += even * q_even + odd * q_odd;
        }
    }
    return sums(acc);
}

/* out[heads][CHUNK] += weights of `heads` heads x values, for one chunk of the head. */
INLINE void mix(int heads, const void *const *rows, int64_t count, int64_t at, const float *weights, float *out,
                int64_t stride, int bf16) {
    vf even[HEADS_AT_ONCE], odd[HEADS_AT_ONCE];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++) {
        even[h] = load_f32(out + h * stride);
        odd[h] = load_f32(out + h * stride + VL);
    }
    for (int64_t t = 0; t < count; t++) {
        vf v_even, v_odd;
        split(rows[t], at, &v_even, &v_odd, bf16);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            even[h] += v_even * weights[h * TILE + t];
            odd[h] += v_odd * weights[h * TILE + t];
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++) {
        store_f32(out + h * stride, even[h]);
        store_f32(out + h * stride + VL, odd[h]);
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

INLINE void finish(const float *out, void *to, int64_t at, int64_t dim, float factor, int bf16) {
    for (int64_t i = 0; i < dim; i += CHUNK) {
        vf even = load_f32(out + i) * factor, odd = load_f32(out + i + VL) * factor;
        if (bf16) {
            *(vu_mem *)((uint16_t *)to + at + i) = round_bf16(even) | (round_bf16(odd) << 16);
        } else {
            store_f32((float *)to + at + i, even);
            store_f32((float *)to + at + i + VL, odd);
        }
    }
}

INLINE void attend(const Item *item, int bf16) {
    const Geometry *g = item->of;
    int64_t group = g->heads / g->kv_heads, dim = g->dim, width = bf16 ? 2 : 4;
    int64_t position = g->context_lens[item->sequence] - 1, begin = 0;
    if (g->window > 0 && position + 1 > g->window) begin = position + 1 - g->window;
    float weights[ONE_GROUP * TILE], out[ONE_GROUP * MAX_DIM], most[ONE_GROUP];
    vf total[ONE_GROUP];
    memset(out, 0, (size_t)(group * dim * 4));
    for (int64_t h = 0; h < group; h++) {
        most[h] = -INFINITY;
        total[h] = (vf){0};
    }
    const char *q = (const char *)item->q + (item->first_row * g->q_stride + item->kv_head * group * dim) * width;
    for (int64_t at = begin; at <= position; at += TILE) {
        int64_t count = position + 1 - at < TILE ? position + 1 - at : TILE;
        const void *k[TILE + VL], *v[TILE];
        for (int64_t t = 0; t < count; t++) {
            int64_t row = (slot_of(g, item->sequence, at + t) * g->kv_heads + item->kv_head) * dim * width;
            k[t] = (const char *)item->cache + row;
            v[t] = (const char *)k[t] + g->num_slots * g->kv_heads * dim * width;
        }
        for (int64_t t = count; t % VL; t++) k[t] = k[0];
        for (int64_t t = 0; t < count; t += VL)
            for (int64_t h = 0; h < group; h++)
                store_f32(weights + h * TILE + t, score(k + t, q + h * dim * width, dim, bf16));
        for (int64_t h = 0; h < group; h++) soften(g, weights + h * TILE, count, most + h, total + h, out + h * dim);
        for (int64_t h = 0; h < group; h += HEADS_AT_ONCE)
            for (int64_t i = 0; i < dim; i += CHUNK) {
                const float *w = weights + h * TILE;
                float *o = out + h * dim + i;
                int64_t heads = group - h;
                if (heads >= 4) mix(4, v, count, i, w, o, dim, bf16);
                else if (heads == 3) mix(3, v, count, i, w, o, dim, bf16);
                else if (heads == 2) mix(2, v, count, i, w, o, dim, bf16);
                else mix(1, v, count, i, w, o, dim, bf16);
            }
    }
    for (int64_t h = 0; h < group; h++) {
        int64_t to = (item->first_row * g->heads + item->kv_head * group + h) * dim;
        finish(out + h * dim, item->out, to, dim, 1.0f / sum(total[h]), bf16);
    }
}

void attend_one(const Item *item) {
    if (item->of->bf16)
        attend(item, 1);
    else
        attend(item, 0);
}
