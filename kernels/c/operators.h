/* The operators that `layers.c` calls, as the other files define them. */
#pragma once

#include <stdint.h>

#include "attention/attention.h"

typedef struct Weight Weight; /* quantized.c */

void raytide_norm(void *x, const void *delta, const void *weight, const void *bias, void *out, int64_t tokens,
                  int64_t size, float eps, int bf16, int layer);
void raytide_rope_write(void *qkv, const void *cos, const void *sin, const int64_t *positions, const void *q_weight,
                        const void *k_weight, void *cache, const int64_t *slots, int64_t tokens, int64_t heads,
                        int64_t kv_heads, int64_t dim, int64_t turned, int64_t num_slots, float eps, int bf16, int int8);
void raytide_activate(const void *x, void *out, int64_t tokens, int64_t size, int gated, int kind, int bf16);
void raytide_linear(const void *x, const uint32_t *packed, const void *bias, void *y, int64_t m, int64_t n, int64_t k,
                    int bf16);
int raytide_quantized_linear(const Weight *w, const void *x, void *y, int64_t m, int bf16);
int raytide_attention(const Geometry *g, const void *q, const void *cache, void *out);
