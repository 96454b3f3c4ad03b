/* Vectors of the machine's width, bfloat16 in and out of them, and exp: what all operators share.
 *
 * Written with the compilers' vector types, so that AVX512, AVX2 and others come from one text; intrinsics only where
 * an instruction has no other name. Numbers are float32 inside; `bf16` says what lies in memory and is a constant
 * wherever these functions are inlined. */
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define VL 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define VL 8
#else
#define VL 4
#endif

/* Whether two bfloat16 products can be added to a float32 in one instruction. */
#if VL == 16 && defined(__AVX512BF16__)
#define HAS_DOT 1
#else
#define HAS_DOT 0
#endif

/* Whether four products of unsigned and signed int8 can be added to an int32 in one instruction. */
#if (VL == 16 && defined(__AVX512VNNI__)) || (VL == 8 && defined(__AVXVNNI__))
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef vf vf_mem __attribute__((aligned(4), may_alias));
typedef vu vu_mem __attribute__((aligned(4), may_alias));
typedef vh vh_mem __attribute__((aligned(2), may_alias));
typedef uint32_t word __attribute__((aligned(2), may_alias)); /* two bfloat16 or one float32 */

typedef int8_t vb_mem __attribute__((vector_size(VL), aligned(1), may_alias));

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf load_f32(const float *p) { return *(const vf_mem *)p; }
INLINE void store_f32(float *p, vf x) { *(vf_mem *)p = x; }
INLINE vf low_half(vu pairs) { return (vf)(pairs << 16); }
INLINE vf high_half(vu pairs) { return (vf)(pairs & 0xffff0000u); }
/* VL int8, widened. */
INLINE vi load_int8(const void *p) {
#if VL == 16
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(p));
#elif VL == 8
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(p));
#else
    return __builtin_convertvector(*(const vb_mem *)p, vi);
#endif
}
/* VL float16, exactly, whatever the processor does with numbers below the normal ones. */
INLINE vf load_half(const uint16_t *p) {
#if VL == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif VL == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vi half = __builtin_convertvector(*(const vh_mem *)p, vi), amount = half & 0x7fff;
    vf small = __builtin_convertvector(amount, vf) * 5.9604644775390625e-8f; /* 2^-24 */
    vi normal = (amount << 13) + (112 << 23), is_small = amount < 0x400;
    return (vf)((((vi)small & is_small) | (normal & ~is_small)) | (half & 0x8000) << 16);
#endif
}
INLINE vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
#if VL == 16 /* compilers make masks and blends of the general way */
INLINE vf maximum(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf minimum(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#else
INLINE vf maximum(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf minimum(vf a, vf b) { return choose(a < b, a, b); }
#endif

/* a * b + c with one rounding, whatever the compiler would make of the expression. */
INLINE vf fused(vf a, vf b, vf c) {
#if VL == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    vf sum;
    for (int j = 0; j < VL; j++) sum[j] = fmaf(a[j], b[j], c[j]);
    return sum;
#endif
}

INLINE vf load(const void *p, int64_t i, int bf16) {
    if (!bf16) return load_f32((const float *)p + i);
    return (vf)(__builtin_convertvector(*(const vh_mem *)((const uint16_t *)p + i), vu) << 16);
}

/* To the nearest bfloat16, ties to even; a NaN stays one. */
INLINE vh round_bf16(vf x) {
#if HAS_DOT
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    vu bits = (vu)x, nan = (vu)(x != x);
    return __builtin_convertvector((((bits + 0x7fff + ((bits >> 16) & 1)) & ~nan) | (0x7fc00000u & nan)) >> 16, vh);
#endif
}

/* x as it is in memory: rounded if that is bfloat16. */
INLINE vf rounded(vf x, int bf16) { return bf16 ? (vf)(__builtin_convertvector(round_bf16(x), vu) << 16) : x; }

INLINE void store(void *p, int64_t i, vf x, int bf16) {
    if (bf16)
        *(vh_mem *)((uint16_t *)p + i) = round_bf16(x);
    else
        store_f32((float *)p + i, x);
}

INLINE float load_one(const void *p, int64_t i, int bf16) {
    if (!bf16) return ((const float *)p)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE void store_one(void *p, int64_t i, float x, int bf16) {
    if (bf16)
        ((uint16_t *)p)[i] = round_bf16(splat(x))[0];
    else
        ((float *)p)[i] = x;
}

/* The last, incomplete vector of a row: `count` numbers, zeros after them. */
INLINE vf load_some(const void *p, int64_t i, int64_t count, int bf16) {
    vf x = {0};
    for (int64_t j = 0; j < count; j++) x[j] = load_one(p, i + j, bf16);
    return x;
}

INLINE vf load_upto(const void *p, int64_t i, int64_t count, int bf16) {
    return count < VL ? load_some(p, i, count, bf16) : load(p, i, bf16);
}

INLINE void store_some(void *p, int64_t i, int64_t count, vf x, int bf16) {
    for (int64_t j = 0; j < count; j++) store_one(p, i + j, x[j], bf16);
}

INLINE float sum(vf x) {
    float total = 0;
    for (int j = 0; j < VL; j++) total += x[j];
    return total;
}

INLINE float largest(vf x) {
#if VL == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int j = 1; j < VL; j++) most = x[j] > most ? x[j] : most;
    return most;
#endif
}

/* e^x within 2 ulp; exactly 0 from -87.3 down and exactly 1 at 0. Cephes' expf. */
INLINE vf vexp(vf x) {
    vi gone = x < -87.3f;
    x = minimum(maximum(x, splat(-87.3f)), splat(88.3f));
    vf n = x * 1.44269504f + 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
    n -= 12582912.0f;
    vf r = x - n * 0.693359375f - n * -2.12194440e-4f;
    vf y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    return (vf)((vi)(y * (vf)power) & ~gone);
}

INLINE vf vtanh(vf x) { return 1.0f - 2.0f / (vexp(2.0f * x) + 1.0f); }
