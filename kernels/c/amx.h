/* Sums of 32 products of int8 inputs with unsigned weights by AMX's tiles: many rows with PANEL outputs at a time.
 *
 * A tile of weights is 8 words of 16 outputs, as they are packed for VNNI; a tile of inputs is up to 16 rows. */
#pragma once

#include "dot.h"
#include "tile.h" /* PANEL */

#if VL == 16 && HAS_VNNI && defined(__AMX_INT8__) && defined(__linux__)
#define HAS_AMX 1
#define AMX_ROWS 64
#include <sys/syscall.h>
#include <unistd.h>

#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM, of asm/prctl.h */
#define TILE_DATA 18              /* XFEATURE_XTILEDATA */

/* Whether the kernel lets this process use tiles. */
static int may_use_tiles(void) {
    static int answer = -1;
    if (answer < 0) answer = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return answer;
}

/* Shape this thread's tiles: 0 and 1 are weights; 2 is inputs of 16 rows, with sums in 4 and 5; 3, 6 and 7 are the same
 * for the last rows, 1 to 16. */
INLINE void shape_tiles(int rows) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {1, 0, {0}, {64, 64, PART, PART, 64, 64, 64, 64}, {8, 8, 16, 0, 16, 16}};
    shape.rows[3] = shape.rows[6] = shape.rows[7] = (uint8_t)((rows - 1) % 16 + 1);
    _tile_loadconfig(&shape);
}

INLINE void release_tiles(void) { _tile_release(); }

/* Row i's inputs are at x + i * stride; sums are [rows, PANEL]. */
INLINE void tile_sums(int rows, const char *x, int64_t stride, const void *weights, int32_t *sums) {
    _tile_loadd(0, weights, PANEL * 4);
    _tile_loadd(1, (const char *)weights + VL * 4, PANEL * 4);
    for (; rows > 16; rows -= 16, x += 16 * stride, sums += 16 * PANEL) {
        _tile_zero(4);
        _tile_zero(5);
        _tile_loadd(2, x, stride);
        _tile_dpbsud(4, 2, 0);
        _tile_dpbsud(5, 2, 1);
        _tile_stored(4, sums, PANEL * 4);
        _tile_stored(5, sums + VL, PANEL * 4);
    }
    _tile_zero(6);
    _tile_zero(7);
    _tile_loadd(3, x, stride);
    _tile_dpbsud(6, 3, 0);
    _tile_dpbsud(7, 3, 1);
    _tile_stored(6, sums, PANEL * 4);
    _tile_stored(7, sums + VL, PANEL * 4);
}

#else
#define HAS_AMX 0
#endif
