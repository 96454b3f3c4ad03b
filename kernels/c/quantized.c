/* y = x W^T + bias with a W of 8 or 4 bits, whose groups of inputs have a scale and perhaps an offset for each output.
 *
 * Groups are cut into parts of PART inputs, the last one filled up with zeros. A row of x is first rounded to int8 part
 * by part, or only widened; then tiles of rows meet panels of outputs. A number of y is the same to the bit whatever
 * rows it is computed with. With int8 inputs it is so on every processor: sums over a part are integers, and all that
 * follows are fused multiply-adds in a fixed order (`invariant.py` has it in torch). */
#include <stdlib.h>

#include "amx.h"
#include "parallel.h"
#include "tile.h"

#define TILE_ROWS (VL == 16 ? 6 : 4)              /* more, and sums over groups leave the registers */
#define ROWS_AT_ONCE (HAS_AMX ? 128 : 16 * TILE_ROWS) /* that meet a panel while it is in the second cache */
#define PANELS_AT_ONCE 2
#define WORTH_TILES 8 /* rows */
#define LINE 64 /* bytes */
#define PAGE 4096
#define LINES_OF_PAGE 4 /* that make the processor ask for the others */
#define FEW_ROWS (VL == 16 ? 2 : 0) /* with more the processor does not look far enough ahead */

/* The struct of quantized.py. `packed` is [panel, group], and of each the codes of its parts, PANEL scales, in float16 if
 * `half`, and PANEL offsets, if any: one stream of memory. Input k of the packed weight is input columns[k] of x, or a
 * zero if that is negative; none: x's own order. */
typedef struct Weight {
    const void *packed;
    const float *bias;
    const int32_t *columns;
    int64_t n, k, groups, parts; /* parts of a group */
    int32_t bits, int8, half, has_offsets;
} Weight;

static int64_t panels_of(int64_t n) { return (n + PANEL - 1) / PANEL; }
INLINE int64_t part_bytes(int bits) { return PART * PANEL * bits / 8; }
INLINE int64_t scales_bytes(const Weight *w) { return PANEL * (w->half ? 2 : 4); }
INLINE int64_t group_bytes(const Weight *w, int bits) {
    return w->parts * part_bytes(bits) + scales_bytes(w) + (w->has_offsets ? PANEL * 4 : 0);
}

EXPORT int64_t raytide_quantized_bytes(const Weight *w) { return panels_of(w->n) * w->groups * group_bytes(w, w->bits); }

/* Where the code of input k and output j lies in a part: the byte, and the bits in it. With int8 inputs, words of four
 * inputs; with float ones the outputs follow each other, and two inputs of 4 bits share a byte. */
INLINE void place(int bits, int int8, int k, int j, int *byte, int *shift) {
    if (int8) {
        int quad = bits == 4 ? k / 8 : k / 4;
        *byte = (quad * PANEL + j) * 4 + k % 4;
        *shift = k / 4 % 2 * 4;
    } else {
        *byte = (bits == 4 ? k / 2 : k) * PANEL + j;
        *shift = k % 2 * 4;
    }
    if (bits == 8) *shift = 0;
}

/* Codes [n, k], scales and offsets [n, groups] into w->packed, which is zeroed memory. */
EXPORT void raytide_pack_quantized(const Weight *w, const int8_t *codes, const char *scales, const float *offsets) {
    int64_t size = w->k / w->groups, each = w->half ? 2 : 4;
    int bits = w->bits, int8 = w->int8, added = int8 ? zero_point(bits) : 0, mask = bits == 4 ? 15 : 255;
    for (int64_t row = 0; row < w->n; row++)
        for (int64_t group = 0; group < w->groups; group++) {
            uint8_t *to = (uint8_t *)w->packed + (row / PANEL * w->groups + group) * group_bytes(w, bits);
            for (int64_t column = 0; column < size; column++) {
                int byte, shift;
                place(bits, int8, (int)(column % PART), (int)(row % PANEL), &byte, &shift);
                int code = (codes[row * w->k + group * size + column] + added) & mask;
                to[column / PART * part_bytes(bits) + byte] |= (uint8_t)(code << shift);
            }
            to += w->parts * part_bytes(bits);
            memcpy(to + row % PANEL * each, scales + (row * w->groups + group) * each, each);
            if (w->has_offsets) memcpy(to + scales_bytes(w) + row % PANEL * 4, offsets + row * w->groups + group, 4);
        }
}

/* A call. A prepared row is its inputs, with int8 the scale and the start of each part's sums, and with offsets the sum
 * of each group's inputs; all arrays of 4-byte numbers but the first. */
typedef struct {
    const Weight *w;
    const void *x;
    char *rows;
    void *y;
    int64_t m, stride, scales, starts, sums; /* bytes from row to row, and where its arrays are */
    int64_t chunks;                          /* of panels */
    int bf16;
} Call;

INLINE void read_part(const Weight *w, const void *x, int64_t at, vf *part, int bf16) {
    if (!w->columns) {
        for (int j = 0; j < PART / VL; j++) part[j] = load(x, at + j * VL, bf16);
        return;
    }
    float numbers[PART];
    for (int j = 0; j < PART; j++) numbers[j] = w->columns[at + j] < 0 ? 0 : load_one(x, w->columns[at + j], bf16);
    for (int j = 0; j < PART / VL; j++) part[j] = load_f32(numbers + j * VL);
}

INLINE void prepare_row(const Call *c, int64_t row, int int8, int bits, int bf16) {
    const Weight *w = c->w;
    const char *x = (const char *)c->x + row * w->k * (bf16 ? 2 : 4);
    char *to = c->rows + row * c->stride;
    float *scales = (float *)(to + c->scales), *sums = (float *)(to + c->sums);
    int32_t *starts = (int32_t *)(to + c->starts);
    for (int64_t group = 0, at = 0; group < w->groups; group++) {
        float total = 0;
        for (int64_t part = 0; part < w->parts; part++, at++) {
            vf numbers[PART / VL];
            read_part(w, x, at * PART, numbers, bf16);
            if (int8) {
                int32_t codes = round_part(numbers, (int8_t *)to + at * PART, scales + at);
                starts[at] = -zero_point(bits) * codes;
                if (w->has_offsets) total = fmaf((float)codes, scales[at], total);
            } else {
                for (int j = 0; j < PART / VL; j++) {
                    store_f32((float *)to + at * PART + j * VL, numbers[j]);
                    total += sum(numbers[j]);
                }
            }
        }
        if (w->has_offsets) sums[group] = total;
    }
}

static void prepare(const void *context, int64_t row) {
    const Call *c = context;
    if (!c->w->int8)
        c->bf16 ? prepare_row(c, row, 0, 0, 1) : prepare_row(c, row, 0, 0, 0);
    else if (c->w->bits == 8)
        c->bf16 ? prepare_row(c, row, 1, 8, 1) : prepare_row(c, row, 1, 8, 0);
    else
        c->bf16 ? prepare_row(c, row, 1, 4, 1) : prepare_row(c, row, 1, 4, 0);
}

/* Adds the products of a part's float inputs with its codes, input after input. */
INLINE void part_products(int bits, int mr, const char *x, int64_t stride, const void *codes, vf totals[][2]) {
#pragma GCC unroll 1
    for (int k = 0; k < PART; k += 2)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++) {
                vi code = load_int8((const int8_t *)codes + (bits == 4 ? k / 2 : k + half) * PANEL + j * VL);
                if (bits == 4) code = half ? code >> 4 : code << 28 >> 28;
                vf w = __builtin_convertvector(code, vf);
#pragma GCC unroll 8
                for (int i = 0; i < mr; i++)
                    totals[i][j] = fused(w, splat(((const float *)(x + i * stride))[k + half]), totals[i][j]);
            }
}

/* The scales of outputs j * VL to (j + 1) * VL of a panel. */
INLINE vf load_scales(const Weight *w, const char *scales, int j) {
    return w->half ? load_half((const uint16_t *)scales + j * VL) : load_f32((const float *)scales + j * VL);
}

/* Asks for the first lines of the next page where a part is the first to begin in a page. The processor asks for the rest
 * itself, faster than each line's own request would, but it does not look past the end of a page. */
INLINE void prefetch_next_page(const char *codes, int bits) {
    if (((uintptr_t)codes & (PAGE - 1)) >= (uintptr_t)part_bytes(bits) + PANEL * 8) return; /* 8: scale and offset */
    const char *next = codes - ((uintptr_t)codes & (PAGE - 1)) + PAGE;
    for (int64_t at = 0; at < LINES_OF_PAGE * LINE; at += LINE) __builtin_prefetch(next + at);
}

/* The sums of `mr` rows from `row` on with a panel's outputs, into sums [mr, PANEL]. `parts` is w->parts; as a constant 1
 * it keeps the sums over groups in registers. Each part asks for `lines` of what lies at `ahead`; 0: of its own next page. */
INLINE void quantized_tile(const Call *c, int64_t row, int64_t panel, float *sums, int mr, int int8, int bits,
                           int64_t parts, const char *ahead, int lines) {
    const Weight *w = c->w;
    const char *x = c->rows + row * c->stride;
    const char *codes = (const char *)w->packed + panel * w->groups * group_bytes(w, bits);
    vf y[TILE_ROWS][2] = {0};
    for (int64_t group = 0, at = 0; group < w->groups; group++) {
        vf totals[TILE_ROWS][2];
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) totals[i][0] = totals[i][1] = (vf){0};
#pragma GCC unroll 1
        for (int64_t part = 0; part < parts; part++, at++, codes += part_bytes(bits)) {
            if (!lines) prefetch_next_page(codes, bits);
            for (const char *end = ahead + lines * LINE; ahead < end; ahead += LINE) __builtin_prefetch(ahead);
            if (!int8) {
                part_products(bits, mr, x + at * PART * 4, c->stride, codes, totals);
                continue;
            }
            vi products[TILE_ROWS][2];
            part_sums(bits, mr, x + at * PART, c->stride, x + c->starts + at * 4, (const uint32_t *)codes, products);
#pragma GCC unroll 8
            for (int i = 0; i < mr; i++) {
                vf scale = splat(((const float *)(x + i * c->stride + c->scales))[at]);
#pragma GCC unroll 2
                for (int j = 0; j < 2; j++)
                    totals[i][j] = fused(__builtin_convertvector(products[i][j], vf), scale, totals[i][j]);
            }
        }
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            vf scale = load_scales(w, codes, j);
#pragma GCC unroll 8
            for (int i = 0; i < mr; i++) y[i][j] = fused(totals[i][j], scale, y[i][j]);
        }
        codes += scales_bytes(w);
        if (!w->has_offsets) continue;
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++, codes += VL * 4) {
            vf offset = load_f32((const float *)codes);
#pragma GCC unroll 8
            for (int i = 0; i < mr; i++)
                y[i][j] = fused(splat(((const float *)(x + i * c->stride + c->sums))[group]), offset, y[i][j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) store_f32(sums + i * PANEL + j * VL, y[i][j]);
}

/* The tile for a number of rows that only the run knows. While all tiles of `rows` rows from `begin` on meet a panel, they
 * ask for the next one, each for its share of it; a tile without others asks for its own weights, a page ahead. */
INLINE void any_quantized_tile(const Call *c, int64_t row, int64_t panel, float *sums, int mr, int int8, int bits,
                               int64_t begin, int64_t rows) {
    int64_t bytes = c->w->groups * group_bytes(c->w, bits), each = (group_bytes(c->w, bits) / c->w->parts + LINE - 1) / LINE;
    const char *ahead = (const char *)c->w->packed + panel * bytes;
    int lines = rows <= FEW_ROWS ? 0 : (int)((each * mr + rows - 1) / rows);
    ahead += mr == rows ? PAGE : bytes + bytes * (row - begin) / rows;
#define CASE(ROWS)                                                                                           \
    case ROWS:                                                                                               \
        if (c->w->parts == 1)                                                                                \
            quantized_tile(c, row, panel, sums, ROWS, int8, bits, 1, ahead, lines);                          \
        else                                                                                                 \
            quantized_tile(c, row, panel, sums, ROWS, int8, bits, c->w->parts, ahead, lines);                \
        break;
    switch (mr) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if VL == 16
        CASE(5) CASE(6)
#endif
    }
#undef CASE
}

#if HAS_AMX
/* Asks for a later part's cache lines. */
INLINE void prefetch(const char *codes, int bits) {
    for (int64_t at = 0; at < part_bytes(bits); at += LINE) __builtin_prefetch(codes + PAGE + at);
}

/* What a tile of AMX_ROWS rows keeps in memory, at distances that keep loads from waiting for stores 4096 bytes off. */
typedef struct {
    int32_t products[AMX_ROWS * PANEL];
    char gap[PAGE / 4];
    vf totals[AMX_ROWS][2];
    char other_gap[PAGE / 4];
    vf y[AMX_ROWS][2];
} Sums;

/* Adds a part's products to the totals of its group, and the group's, if it is complete, to y. */
INLINE void add_part(const Call *c, const char *x, Sums *s, int rows, int64_t group, int64_t at, const char *scales,
                     int is_first, int is_last, int has_offsets) {
    const float *offsets = (const float *)(scales + scales_bytes(c->w));
    for (int i = 0; i < rows; i++, x += c->stride) {
        vi start = splat_int(x + c->starts + at * 4);
        vf scale = splat(((const float *)(x + c->scales))[at]);
        vf inputs = has_offsets ? splat(((const float *)(x + c->sums))[group]) : (vf){0};
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            vf products = __builtin_convertvector(*(const vi *)(s->products + i * PANEL + j * VL) + start, vf);
            vf total = fused(products, scale, is_first ? (vf){0} : s->totals[i][j]);
            if (!is_last) {
                s->totals[i][j] = total;
                continue;
            }
            vf y = fused(total, load_scales(c->w, scales, j), s->y[i][j]);
            s->y[i][j] = has_offsets ? fused(inputs, load_f32(offsets + j * VL), y) : y;
        }
    }
}

/* quantized_tile for up to AMX_ROWS rows, into s->y. */
INLINE void amx_tile(const Call *c, int64_t row, int64_t panel, Sums *s, int rows, int bits) {
    const Weight *w = c->w;
    const char *x = c->rows + row * c->stride;
    const char *codes = (const char *)w->packed + panel * w->groups * group_bytes(w, bits);
    memset(s->y, 0, sizeof s->y);
    for (int64_t group = 0, at = 0; group < w->groups; group++) {
        const char *scales = codes + w->parts * part_bytes(bits);
        for (int64_t part = 0; part < w->parts; part++, at++, codes += part_bytes(bits)) {
            vu words[PART / 4 * 2];
            if (bits == 4) unpack(codes, words);
            prefetch(codes, bits);
            tile_sums(rows, x + at * PART, c->stride, bits == 4 ? (const void *)words : codes, s->products);
            if (part < w->parts - 1) {
                if (part == 0)
                    add_part(c, x, s, rows, group, at, scales, 1, 0, 0);
                else
                    add_part(c, x, s, rows, group, at, scales, 0, 0, 0);
            } else if (w->has_offsets)
                add_part(c, x, s, rows, group, at, scales, part == 0, 1, 1);
            else if (part == 0)
                add_part(c, x, s, rows, group, at, scales, 1, 1, 0);
            else
                add_part(c, x, s, rows, group, at, scales, 0, 1, 0);
        }
        codes = scales + group_bytes(w, bits) - w->parts * part_bytes(bits);
    }
}

INLINE void amx_multiply(const Call *c, int64_t begin, int64_t end, int64_t first, int64_t last, int bits) {
    Sums sums __attribute__((aligned(LINE)));
    for (int64_t row = begin; row < end; row += AMX_ROWS) {
        int rows = (int)(end - row < AMX_ROWS ? end - row : AMX_ROWS);
        shape_tiles(rows);
        for (int64_t panel = first; panel < last; panel++) {
            amx_tile(c, row, panel, &sums, rows, bits);
            store_sums((const float *)sums.y, PANEL, c->w->bias, 0, c->y, c->w->n, row, row + rows, panel * PANEL, c->bf16);
        }
    }
    release_tiles();
}
#endif

INLINE void multiply(const Call *c, int64_t item, int int8, int bits) {
    int64_t begin = item / c->chunks * ROWS_AT_ONCE, end = begin + ROWS_AT_ONCE < c->m ? begin + ROWS_AT_ONCE : c->m;
    int64_t first = item % c->chunks * PANELS_AT_ONCE, last = first + PANELS_AT_ONCE;
    if (last > panels_of(c->w->n)) last = panels_of(c->w->n);
#if HAS_AMX
    if (int8 && end - begin >= WORTH_TILES && may_use_tiles()) {
        amx_multiply(c, begin, end, first, last, bits);
        return;
    }
#endif
    for (int64_t panel = first; panel < last; panel++)
        for (int64_t row = begin; row < end;) {
            int mr = rows_of_tile(row, end, TILE_ROWS);
            float sums[TILE_ROWS * PANEL];
            any_quantized_tile(c, row, panel, sums, mr, int8, bits, begin, end - begin);
            store_sums(sums, PANEL, c->w->bias, 0, c->y, c->w->n, row, row + mr, panel * PANEL, c->bf16);
            row += mr;
        }
}

static void multiply_float_8(const void *c, int64_t item) { multiply(c, item, 0, 8); }
static void multiply_float_4(const void *c, int64_t item) { multiply(c, item, 0, 4); }
static void multiply_int8_8(const void *c, int64_t item) { multiply(c, item, 1, 8); }
static void multiply_int8_4(const void *c, int64_t item) { multiply(c, item, 1, 4); }

static int64_t aligned(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

/* Returns 0, or -1 if there is no memory for the prepared rows. */
EXPORT int raytide_quantized_linear(const Weight *w, const void *x, void *y, int64_t m, int bf16) {
    int64_t parts = w->groups * w->parts;
    Call c = {.w = w, .x = x, .y = y, .m = m, .bf16 = bf16};
    c.chunks = (panels_of(w->n) + PANELS_AT_ONCE - 1) / PANELS_AT_ONCE;
    c.scales = aligned(parts * PART * (w->int8 ? 1 : 4));
    c.starts = c.scales + (w->int8 ? parts * 4 : 0);
    c.sums = c.starts + (w->int8 ? parts * 4 : 0);
    c.stride = aligned(c.sums + w->groups * 4);
    if (c.stride % PAGE == 0) c.stride += LINE; /* rows a page apart would share one set of the first cache */
    c.rows = aligned_alloc(LINE, m * c.stride);
    if (!c.rows) return -1;
    for_each(prepare, &c, m, m * w->k * 16);
    for_each(w->int8 ? (w->bits == 8 ? multiply_int8_8 : multiply_int8_4)
                     : (w->bits == 8 ? multiply_float_8 : multiply_float_4),
             &c, (m + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * c.chunks, w->n * w->k * (1 + m / 8));
    free(c.rows);
    return 0;
}
