/* Sums of 32 products of int8 inputs with weights of 8 or 4 bits, 2 * VL outputs at a time: integers, so that they are
 * equal on every instruction set.
 *
 * A word of weights is four inputs of one output. Weights of 4 bits lie two words in one, as 0 to 15: the first word is
 * the low halves of its bytes. Some instructions take unsigned weights: then `zero_point` is added to them at packing,
 * and a sum starts at -zero_point * the sum of its inputs. */
#pragma once

#include "vector.h"

#define PART 32 /* inputs that share a scale */

/* Without VNNI, there is an instruction that adds two products of unsigned and signed bytes, as int16. Products with
 * weights of 4 bits fit. Weights of 8 bits give their sign to the input: then two of 128 * 127 fit. */
#define MADD (VL >= 8 && !HAS_VNNI)

typedef int16_t vs __attribute__((vector_size(VL * 4)));

INLINE int zero_point(int bits) { return bits == 4 ? 8 : HAS_VNNI ? 128 : 0; }

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

/* Inputs times the signs of the weights; where a weight is 0, anything. */
#if MADD && VL == 16
INLINE wide signed_inputs(wide x, wide w) {
    return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
}
#elif MADD
INLINE wide signed_inputs(wide x, wide w) { return _mm256_sign_epi8(x, w); }
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

/* The sums of `mr` rows with PANEL outputs over one part. Row i's inputs are at x + i * stride, its start at
 * starts + i * stride. Without VNNI the loop over a part stays one: unrolled, compilers hoist more products than there are
 * registers. */
INLINE void part_sums(int bits, int mr, const char *x, int64_t stride, const char *starts, const uint32_t *weights,
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
                sums[i][j] = splat_int(starts + i * stride) + (vi)WIDE(madd_epi16)((wide)pairs[i][j], WIDE(set1_epi16)(1));
        return;
    }
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) sums[i][0] = sums[i][1] = (vi){0};
#pragma GCC unroll 1
    for (int quad = 0; quad < PART / 4; quad++, w += 2, x += 4) {
        wide words[2], amounts[2];
        for (int j = 0; j < 2; j++) words[j] = (wide)w[j], amounts[j] = WIDE(abs_epi8)(words[j]);
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
            wide input = (wide)splat_int(x + i * stride);
            for (int j = 0; j < 2; j++) {
                wide pairs = WIDE(maddubs_epi16)(amounts[j], signed_inputs(input, words[j]));
                sums[i][j] += (vi)WIDE(madd_epi16)(pairs, WIDE(set1_epi16)(1));
            }
        }
    }
#else
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) sums[i][0] = sums[i][1] = splat_int(starts + i * stride);
#pragma GCC unroll 4
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

/* The larger of two integers, lane by lane. */
INLINE vi larger(vi a, vi b) {
#if VL == 16
    return (vi)_mm512_max_epi32((wide)a, (wide)b);
#else
    vi more = a > b;
    return (a & more) | (b & ~more);
#endif
}

#if VL == 8
INLINE __m128i low_lanes(vi x) { return _mm256_castsi256_si128((wide)x); }
INLINE __m128i high_lanes(vi x) { return _mm256_extracti128_si256((wide)x, 1); }
#endif

INLINE int32_t largest_lane(vi x) {
#if VL == 16
    return _mm512_reduce_max_epi32((wide)x);
#elif VL == 8
    __m128i most = _mm_max_epi32(low_lanes(x), high_lanes(x));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
#else
    int32_t most = x[0];
    for (int j = 1; j < VL; j++) most = x[j] > most ? x[j] : most;
    return most;
#endif
}

/* Stores PART codes as bytes and returns their sum. */
INLINE int32_t store_codes(const vi *codes, int8_t *to) {
#if VL >= 8
#if VL == 16
    __m128i low = _mm512_cvtepi32_epi8((wide)codes[0]), high = _mm512_cvtepi32_epi8((wide)codes[1]);
    __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
#else
    wide low = _mm256_packs_epi32((wide)codes[0], (wide)codes[1]), high = _mm256_packs_epi32((wide)codes[2], (wide)codes[3]);
    wide order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* packing works on each half of a vector */
    __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
#endif
    _mm256_storeu_si256((__m256i *)to, bytes);
    __m256i sums = _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e))) - PART * 128; /* 128 was added to each */
#else
    int32_t sum = 0;
    for (int k = 0; k < PART; k++) sum += to[k] = (int8_t)codes[k / VL][k % VL];
    return sum;
#endif
}

/* The larger amounts of `most` and a part's numbers, as bits: those of numbers that are not finite are the largest. */
INLINE vi larger_amounts(vi most, const vf *part) {
    for (int j = 0; j < PART / VL; j++) most = larger(most, (vi)part[j] & 0x7fffffff);
    return most;
}

/* The rounding of numbers: the code of x is the integer nearest to x * inverse, and stands for code * scale. */
typedef struct {
    float scale, inverse;
} Rounding;

/* Returns the rounding of numbers of magnitudes up to `most`: the scale is the largest / 127, NaN if one is not finite.
 * All codes are 0 if the largest is so small that 127 / largest is no float32. */
INLINE Rounding rounding_of(vi most) {
    int32_t largest = largest_lane(most);
    float amount;
    memcpy(&amount, &largest, 4);
    if (largest >= 0x7f800000) return (Rounding){NAN, 0};
    return (Rounding){amount / 127.0f, amount >= 0x1p-119f ? 127.0f / amount : 0};
}

/* Rounds a part to codes in -127..127 and returns their sum. Codes are arbitrary if a number is not finite. */
INLINE int32_t round_by(float inverse, const vf *part, int8_t *to) {
    vi codes[PART / VL];
    vf magic = splat(12582912.0f), by = splat(inverse); /* adding 1.5 * 2^23 rounds to an integer: the sum's low bits */
    for (int j = 0; j < PART / VL; j++) codes[j] = (vi)fused(part[j], by, magic) - (vi)magic;
    return store_codes(codes, to);
}

INLINE int32_t round_part(const vf *part, int8_t *to, float *scale) {
    Rounding by = rounding_of(larger_amounts((vi){0}, part));
    *scale = by.scale;
    return round_by(by.inverse, part, to);
}
