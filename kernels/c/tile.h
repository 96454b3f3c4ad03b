/* A tile of a matrix product in registers: C[mr, panels] (+)= A[mr, K] x B, with B packed in panels of PANEL columns.
 *
 * Each number of C is one chain of additions over K in order, whatever the tile's size is: a row's result never
 * depends on how many rows are computed with it. */
#pragma once

#include "vector.h"

#define PANEL (2 * VL)
#define PAGE_STEPS (1024 / PANEL) /* rows of PANEL words in a page of memory */
#define MAX_ROWS (VL == 16 ? 14 : 6) /* x 2 accumulators, and 2 of B and 1 of A, fill the register file */

/* What a word of B is. PAIRS: two bfloat16 that follow each other in K, multiplied with A's by the dot instruction.
 * WIDENED: the same for machines without it, where A comes as float32. */
typedef enum { FLOATS, PAIRS, WIDENED } Words;

/* Asks for cache lines of the panels' next page at row `k`: past the end of a page the processor itself does not look.
 * One row of A is so fast that requests for all lines take time: with AVX512 it asks for the first four of a page, whose
 * followers the processor then asks for, and for one panel after the other. `phase` is b's place in its page. */
INLINE void ask_ahead(int mr, int panels, const uint32_t *b, int64_t ldb, int64_t k, int64_t phase) {
    if (VL < 16 || mr > 1) {
#pragma GCC unroll 8
        for (int j = 0; j < 2 * panels; j += 16 / VL)
            __builtin_prefetch(b + ((j / 2) * ldb + k + PAGE_STEPS) * PANEL + (j % 2) * VL);
        return;
    }
    int64_t place = k + phase, panel = place % PAGE_STEPS / (PAGE_STEPS / 4);
    if (place % (PAGE_STEPS / 4) || panel >= panels) return;
    const uint32_t *next = b + (panel * ldb + k + PAGE_STEPS - place % PAGE_STEPS) * PANEL;
#pragma GCC unroll 4
    for (int line = 0; line < 4; line++) __builtin_prefetch(next + line * 16);
}

/* Of `b`, `steps` rows of PANEL words in each panel, and panels are `ldb` rows apart; A's rows are `lda` words (WIDENED:
 * floats) apart. */
INLINE void tile(Words words, int mr, int panels, const void *a, int64_t lda, const uint32_t *b, int64_t ldb,
                 int64_t steps, float *c, int64_t ldc, int add) {
    vf acc[MAX_ROWS][8];
#pragma GCC unroll 16
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * panels; j++) acc[i][j] = add ? load_f32(c + i * ldc + j * VL) : (vf){0};
    int64_t phase = (int64_t)((uintptr_t)b % 4096 / (PANEL * 4));
    for (int64_t k = 0; k < steps; k++) {
        vu w[8];
#pragma GCC unroll 8
        for (int j = 0; j < 2 * panels; j++)
            w[j] = *(const vu_mem *)(b + ((j / 2) * ldb + k) * PANEL + (j % 2) * VL);
        if (mr <= 2) ask_ahead(mr, panels, b, ldb, k, phase); /* then memory is what one waits for */
#pragma GCC unroll 16
        for (int i = 0; i < mr; i++) {
            if (words == WIDENED) {
                float even = ((const float *)a)[i * lda + 2 * k], odd = ((const float *)a)[i * lda + 2 * k + 1];
#pragma GCC unroll 8
                for (int j = 0; j < 2 * panels; j++) acc[i][j] += low_half(w[j]) * even;
#pragma GCC unroll 8
                for (int j = 0; j < 2 * panels; j++) acc[i][j] += high_half(w[j]) * odd;
            } else if (words == FLOATS) {
                float x = ((const float *)a)[i * lda + k];
#pragma GCC unroll 8
                for (int j = 0; j < 2 * panels; j++) acc[i][j] += (vf)w[j] * x;
            }
#if HAS_DOT
            else {
                __m512bh x = (__m512bh)_mm512_set1_epi32((int)((const word *)a)[i * lda + k]);
#pragma GCC unroll 8
                for (int j = 0; j < 2 * panels; j++)
                    acc[i][j] = (vf)_mm512_dpbf16_ps((__m512)acc[i][j], x, (__m512bh)w[j]);
            }
#endif
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * panels; j++) store_f32(c + i * ldc + j * VL, acc[i][j]);
}

/* How many panels a tile of `mr` rows can have at once: more where rows are few, for loads and sums in flight. */
INLINE int panels_at_once(int mr) {
    return mr * 4 <= MAX_ROWS ? 4 : mr * 2 < MAX_ROWS ? 2 : 1;
}

/* The tile for a number of rows that only the run knows; `panels` is 1 or panels_at_once(mr). */
INLINE void any_tile(Words words, int mr, int panels, const void *a, int64_t lda, const uint32_t *b, int64_t ldb,
                     int64_t steps, float *c, int64_t ldc, int add) {
#define CASE(ROWS)                                                                                                    \
    case ROWS:                                                                                                        \
        if (panels == 1)                                                                                              \
            tile(words, ROWS, 1, a, lda, b, ldb, steps, c, ldc, add);                                                 \
        else                                                                                                          \
            tile(words, ROWS, panels_at_once(ROWS), a, lda, b, ldb, steps, c, ldc, add);                              \
        break;
    switch (mr) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if VL == 16
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
#endif
    }
#undef CASE
}

/* Split `rows` into tiles of nearly equal size, at most `most` each: the size of the tile that starts at `row`. */
INLINE int rows_of_tile(int64_t row, int64_t rows, int64_t most) {
    int64_t left = rows - row, tiles = (left + most - 1) / most;
    return (int)((left + tiles - 1) / tiles);
}

/* Sums of the rows `begin` to `end`, `columns` for each, plus the bias, into y [rows, n] from `column` on. */
INLINE void store_sums(const float *c, int64_t columns, const void *bias, int bias_bf16, void *y, int64_t n,
                       int64_t begin, int64_t end, int64_t column, int bf16) {
    int64_t width = n - column < columns ? n - column : columns;
    for (int64_t row = begin; row < end; row++, c += columns) {
        int64_t at = row * n + column, j = 0;
        for (; j + VL <= width; j += VL) {
            vf sums = load_f32(c + j);
            store(y, at + j, bias ? sums + load(bias, column + j, bias_bf16) : sums, bf16);
        }
        for (; j < width; j++) store_one(y, at + j, c[j] + (bias ? load_one(bias, column + j, bias_bf16) : 0), bf16);
    }
}
