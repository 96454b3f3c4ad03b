/* Sums of 32 products of int8 inputs with weights of 8 or 4 bits, 2 * VL outputs at a time: integers, so that they are
 * equal on every instruction set.
 *
 * A word of weights is four inputs of one output. Weights of 4 bits lie two words in one, as 0 to 15: the first word is
 * the low halves of its bytes. Some instructions take unsigned weights: then `zero_point` is added to them at packing,
 * and a sum starts at -zero_point * the sum of its inputs. */
#pragma once

#include "vector.h"

#define PART 32 /* inputs that share a scale */

/* Without VNNI, pairs of int16 are multiplied. For 8-bit numbers, too, there is an instruction that adds two products,
 * but as int16: products with weights of 4 bits fit. */
#define MADD (VL >= 8 && !HAS_VNNI)

typedef int16_t vs __attribute__((vector_size(VL * 4)));

INLINE int zero_point(int bits) { return bits == 4 ? 8 : HAS_VNNI ? 128 : 0; }

/* Bytes that an input takes: MADD has those for 8-bit weights as int16, of each four the 1st, 3rd, 2nd and 4th. */
INLINE int input_bytes(int bits) { return MADD && bits == 8 ? 2 : 1; }

#if VL == 16
#define WIDE(NAME) _mm512_##NAME
typedef __m512i wide;
#elif VL == 8
#define WIDE(NAME) _mm256_##NAME
typedef __m256i wide;
#endif

#if HAS_VNNI && VL == 16
INLINE vi quad_dot(vi sum, vu w, vi x) { return (vi)_mm512_dpbusd_epi32((wide)sum, (wide)w, (wide)x); }
#elif HAS_VNNI
INLINE vi quad_dot(vi sum, vu w, vi x) { return (vi)_mm256_dpbusd_avx_epi32((wide)sum, (wide)w, (wide)x); }
#elif !MADD
INLINE vi quad_dot(vi sum, vu w, vi x) {
    for (int byte = 24; byte >= 0; byte -= 8) sum += ((vi)(w << byte) >> 24) * ((x << byte) >> 24);
    return sum;
}
#endif

INLINE vi splat_int(const void *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x - (vi){0};
}

INLINE vu low_codes(vu words) { return words & 0x0f0f0f0f; }
INLINE vu high_codes(vu words) { return words >> 4 & 0x0f0f0f0f; }

/* A part's words of 4 bits as words of 8. */
INLINE void unpack(const void *codes, vu *words) {
    const vu_mem *w = codes;
    for (int step = 0; step < PART / 8; step++)
        for (int j = 0; j < 2; j++) {
            words[step * 4 + j] = low_codes(w[step * 2 + j]);
            words[step * 4 + 2 + j] = high_codes(w[step * 2 + j]);
        }
}

/* The sums of `mr` rows with PANEL outputs over one part. Row i's inputs are at x + i * stride, its start in starts[i].
 * The loops over a part stay loops: unrolled, compilers hoist more products than there are registers. */
INLINE void part_sums(int bits, int mr, const char *x, int64_t stride, const int32_t *starts, const uint32_t *weights,
                      vi sums[][2]) {
    const vu_mem *w = (const vu_mem *)weights;
#if MADD
    if (bits == 4) {
        vs pairs[8][2] = {0};
#pragma GCC unroll 1
        for (int step = 0; step < PART / 8; step++, w += 2, x += 8)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                wide words[2];
                for (int j = 0; j < 2; j++) words[j] = (wide)(half ? high_codes(w[j]) : low_codes(w[j]));
#pragma GCC unroll 8
                for (int i = 0; i < mr; i++) {
                    wide input = (wide)splat_int(x + i * stride + half * 4);
                    for (int j = 0; j < 2; j++) pairs[i][j] += (vs)WIDE(maddubs_epi16)(words[j], input);
                }
            }
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) /* 16 products of at most 15 * 127 have fit int16 */
            for (int j = 0; j < 2; j++)
                sums[i][j] = splat_int(starts + i) + (vi)WIDE(madd_epi16)((wide)pairs[i][j], WIDE(set1_epi16)(1));
        return;
    }
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) sums[i][0] = sums[i][1] = (vi){0};
#pragma GCC unroll 1
    for (int quad = 0; quad < PART / 4; quad++, w += 2, x += 8) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            wide pairs[2];
            for (int j = 0; j < 2; j++) pairs[j] = (wide)(half ? (vs)w[j] >> 8 : (vs)w[j] << 8 >> 8);
#pragma GCC unroll 8
            for (int i = 0; i < mr; i++) {
                wide input = (wide)splat_int(x + i * stride + half * 4);
                for (int j = 0; j < 2; j++) sums[i][j] += (vi)WIDE(madd_epi16)(pairs[j], input);
            }
        }
    }
#else
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) sums[i][0] = sums[i][1] = splat_int(starts + i);
#pragma GCC unroll 1
    for (int step = 0; step < PART / 8; step++, w += bits / 2, x += 8)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            vu words[2];
            for (int j = 0; j < 2; j++) {
                if (bits == 8)
                    words[j] = w[half * 2 + j];
                else
                    words[j] = half ? high_codes(w[j]) : low_codes(w[j]);
            }
#pragma GCC unroll 8
            for (int i = 0; i < mr; i++) {
                vi input = splat_int(x + i * stride + half * 4);
                for (int j = 0; j < 2; j++) sums[i][j] = quad_dot(sums[i][j], words[j], input);
            }
        }
#endif
}
