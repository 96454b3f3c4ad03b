/* What is computed token by token: norms, rotation and cache write, activations. Roundings to bfloat16 fall where the
 * reference in ref.py has them. */
#include "dot.h"
#include "parallel.h"

#define GRAIN 16384 /* numbers in an item */
#define WEIGHT 4    /* a number costs as much as some multiplications */

typedef struct {
    void *x;
    const void *delta, *weight, *bias;
    void *out;
    int64_t tokens, size, rows;
    float eps;
    int bf16, layer;
} NormTask;

/* weight * x / rms(x) over `size` numbers; x may be out. */
INLINE void rms_row(const void *x, const void *weight, void *out, int64_t size, float eps, int bf16) {
    int64_t whole = size / VL * VL, rest = size - whole;
    vf squares = {0};
    for (int64_t i = 0; i < whole; i += VL) {
        vf v = load(x, i, bf16);
        squares += v * v;
    }
    vf tail = load_some(x, whole, rest, bf16);
    float factor = 1.0f / sqrtf(sum(squares + tail * tail) / (float)size + eps);
    for (int64_t i = 0; i < whole; i += VL)
        store(out, i, rounded(load(x, i, bf16) * factor, bf16) * load(weight, i, bf16), bf16);
    if (rest) {
        vf scaled = rounded(tail * factor, bf16) * load_some(weight, whole, rest, bf16);
        store_some(out, whole, rest, scaled, bf16);
    }
}

INLINE void layer_row(const void *x, const void *weight, const void *bias, void *out, int64_t size, float eps,
                      int bf16) {
    double total = 0, squares = 0;
    for (int64_t i = 0; i < size; i++) total += load_one(x, i, bf16);
    float mean = (float)(total / (double)size);
    for (int64_t i = 0; i < size; i++) {
        double off = load_one(x, i, bf16) - mean;
        squares += off * off;
    }
    float factor = 1.0f / sqrtf((float)(squares / (double)size) + eps);
    for (int64_t i = 0; i < size; i++) {
        float y = (load_one(x, i, bf16) - mean) * factor * load_one(weight, i, bf16);
        store_one(out, i, y + (bias ? load_one(bias, i, bf16) : 0), bf16);
    }
}

INLINE void norm_rows(const NormTask *t, int64_t item, int bf16) {
    int64_t bytes = t->size * (bf16 ? 2 : 4), end = (item + 1) * t->rows;
    for (int64_t row = item * t->rows; row < end && row < t->tokens; row++) {
        void *x = (char *)t->x + row * bytes, *out = (char *)t->out + row * bytes;
        if (t->delta) {
            const void *delta = (const char *)t->delta + row * bytes;
            int64_t i = 0;
            for (; i + VL <= t->size; i += VL) store(x, i, load(x, i, bf16) + load(delta, i, bf16), bf16);
            for (; i < t->size; i++) store_one(x, i, load_one(x, i, bf16) + load_one(delta, i, bf16), bf16);
        }
        if (t->layer)
            layer_row(x, t->weight, t->bias, out, t->size, t->eps, bf16);
        else
            rms_row(x, t->weight, out, t->size, t->eps, bf16);
    }
}

static void norm_f32(const void *t, int64_t item) { norm_rows(t, item, 0); }
static void norm_bf16(const void *t, int64_t item) { norm_rows(t, item, 1); }

/* x += delta, if there is one; out = norm(x). Rows of `size` numbers. */
EXPORT void raytide_norm(void *x, const void *delta, const void *weight, const void *bias, void *out, int64_t tokens,
                         int64_t size, float eps, int bf16, int layer) {
    NormTask t = {x, delta, weight, bias, out, tokens, size, 1 + GRAIN / size, eps, bf16, layer};
    for_each(bf16 ? norm_bf16 : norm_f32, &t, (tokens + t.rows - 1) / t.rows, tokens * size * WEIGHT);
}

typedef struct {
    void *qkv;
    const void *cos, *sin, *q_weight, *k_weight;
    void *cache;
    const int64_t *positions, *slots;
    int64_t tokens, heads, kv_heads, dim, turned, num_slots, rows;
    float eps;
    int bf16, int8;
} RopeTask;

/* PART numbers of a head from `at` on; zeros behind its last. */
INLINE const vf *read_part(const void *head, int64_t at, int64_t dim, vf *part, int bf16) {
    for (int j = 0; j < PART / VL; j++, at += VL) {
        int64_t left = dim - at;
        part[j] = left >= VL ? load(head, at, bf16) : left > 0 ? load_some(head, at, left, bf16) : (vf){0};
    }
    return part;
}

/* A head's numbers as codes of -127 to 127, and behind them the float that they are multiples of: the largest amount /
 * 127, NaN if a number is not finite. */
INLINE void round_head(const void *head, int64_t dim, char *to, int bf16) {
    vf part[PART / VL];
    vi most = {0};
    for (int64_t at = 0; at < dim; at += PART) most = larger_amounts(most, read_part(head, at, dim, part, bf16));
    Rounding by = rounding_of(most);
    for (int64_t at = 0; at < dim; at += PART) {
        int8_t codes[PART];
        round_by(by.inverse, read_part(head, at, dim, part, bf16), codes);
        memcpy(to + at, codes, dim - at < PART ? dim - at : PART);
    }
    memcpy(to + dim, &by.scale, sizeof by.scale);
}

/* The pairs (i, i + turned / 2): x * cos + swapped(x) * sin, where sin's first half comes negated. */
INLINE void turn(void *head, const void *cos, const void *sin, int64_t turned, int bf16) {
    int64_t half = turned / 2, i = 0;
    for (; i + VL <= half; i += VL) {
        vf a = load(head, i, bf16), b = load(head, half + i, bf16);
        store(head, i, rounded(a * load(cos, i, bf16), bf16) + b * load(sin, i, bf16), bf16);
        store(head, half + i, rounded(b * load(cos, half + i, bf16), bf16) + a * load(sin, half + i, bf16), bf16);
    }
    for (; i < half; i++) {
        float a = load_one(head, i, bf16), b = load_one(head, half + i, bf16);
        store_one(head, i, a * load_one(cos, i, bf16) + b * load_one(sin, i, bf16), bf16);
        store_one(head, half + i, b * load_one(cos, half + i, bf16) + a * load_one(sin, half + i, bf16), bf16);
    }
}

INLINE void rope_rows(const RopeTask *t, int64_t item, int bf16) {
    int64_t width = bf16 ? 2 : 4, head_bytes = t->dim * width, end = (item + 1) * t->rows;
    int64_t kv_bytes = t->kv_heads * head_bytes;
    for (int64_t row = item * t->rows; row < end && row < t->tokens; row++) {
        char *token = (char *)t->qkv + row * (t->heads + 2 * t->kv_heads) * head_bytes;
        for (int64_t h = 0; h < t->heads + t->kv_heads; h++) {
            char *head = token + h * head_bytes;
            const void *weight = h < t->heads ? t->q_weight : t->k_weight;
            if (weight) rms_row(head, weight, head, t->dim, t->eps, bf16);
            if (t->cos) {
                int64_t at = (t->positions ? t->positions[row] : row) * t->turned * width;
                turn(head, (const char *)t->cos + at, (const char *)t->sin + at, t->turned, bf16);
            }
        }
        char *k = token + t->heads * head_bytes;
        if (t->int8) {
            int64_t each = t->dim + 4, behind = (t->num_slots - 1) * t->kv_heads * each;
            char *to = (char *)t->cache + t->slots[row] * t->kv_heads * each;
            for (int64_t h = 0; h < 2 * t->kv_heads; h++)
                round_head(k + h * head_bytes, t->dim, to + h * each + (h < t->kv_heads ? 0 : behind), bf16);
            continue;
        }
        char *slot = (char *)t->cache + t->slots[row] * kv_bytes;
        memcpy(slot, k, kv_bytes);
        memcpy(slot + t->num_slots * kv_bytes, k + kv_bytes, kv_bytes);
    }
}

static void rope_f32(const void *t, int64_t item) { rope_rows(t, item, 0); }
static void rope_bf16(const void *t, int64_t item) { rope_rows(t, item, 1); }

/* Norm and turn the query and key heads of qkv [tokens, heads + 2 kv_heads, dim] in place; put keys and values into
 * their slots of the cache [2, num_slots, kv_heads, dim], or rounded into one of int8 [2, num_slots, kv_heads, dim + 4].
 * Row positions[t] of cos and sin is token t's; without positions, row t. */
EXPORT void raytide_rope_write(void *qkv, const void *cos, const void *sin, const int64_t *positions,
                               const void *q_weight, const void *k_weight, void *cache, const int64_t *slots,
                               int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim, int64_t turned,
                               int64_t num_slots, float eps, int bf16, int int8) {
    int64_t rows = 1 + GRAIN / ((heads + 2 * kv_heads) * dim);
    RopeTask t = {qkv,   cos,      sin, q_weight, k_weight,  cache, positions, slots, tokens,
                  heads, kv_heads, dim, turned,   num_slots, rows,  eps,       bf16,  int8};
    for_each(bf16 ? rope_bf16 : rope_f32, &t, (tokens + rows - 1) / rows,
             tokens * (heads + 2 * kv_heads) * dim * WEIGHT);
}

typedef enum { SILU, GELU, GELU_TANH } Activation;

typedef struct {
    const void *x;
    void *out;
    int64_t tokens, size, rows;
    int gated, kind, bf16;
} ActivationTask;

INLINE vf activated(vf x, int kind) {
    if (kind == SILU) return x / (1.0f + vexp(-x));
    if (kind == GELU_TANH) return 0.5f * x * (1.0f + vtanh(0.7978845608f * (x + 0.044715f * x * x * x)));
    for (int i = 0; i < VL; i++) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
    return x;
}

INLINE void activate_rows(const ActivationTask *t, int64_t item, int kind, int bf16) {
    int64_t stride = t->size * (t->gated ? 2 : 1), end = (item + 1) * t->rows;
    int64_t whole = t->size / VL * VL, rest = t->size - whole;
    for (int64_t row = item * t->rows; row < end && row < t->tokens; row++) {
        int64_t in = row * stride, up = in + t->size, out = row * t->size;
        for (int64_t i = 0; i < whole; i += VL) {
            vf y = activated(load(t->x, in + i, bf16), kind);
            store(t->out, out + i, t->gated ? rounded(y, bf16) * load(t->x, up + i, bf16) : y, bf16);
        }
        if (rest) {
            vf y = activated(load_some(t->x, in + whole, rest, bf16), kind);
            if (t->gated) y = rounded(y, bf16) * load_some(t->x, up + whole, rest, bf16);
            store_some(t->out, out + whole, rest, y, bf16);
        }
    }
}

INLINE void activate_any(const ActivationTask *t, int64_t item, int bf16) {
    if (t->kind == SILU)
        activate_rows(t, item, SILU, bf16);
    else if (t->kind == GELU)
        activate_rows(t, item, GELU, bf16);
    else
        activate_rows(t, item, GELU_TANH, bf16);
}

static void activate_f32(const void *t, int64_t item) { activate_any(t, item, 0); }
static void activate_bf16(const void *t, int64_t item) { activate_any(t, item, 1); }

/* out = act(x), or act(gate) * up when `gated`: then x has rows of gate and up, `size` numbers each. */
EXPORT void raytide_activate(const void *x, void *out, int64_t tokens, int64_t size, int gated, int kind, int bf16) {
    ActivationTask t = {x, out, tokens, size, 1 + GRAIN / size, gated, kind, bf16};
    for_each(bf16 ? activate_bf16 : activate_f32, &t, (tokens + t.rows - 1) / t.rows, tokens * size * WEIGHT);
}
