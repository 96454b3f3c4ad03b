/* y = x W^T + bias with W packed once. The additions of each number of y run over K in order: rows are independent of
 * each other to the bit. */
#include "parallel.h"
#include "tile.h"

#define BLOCK 512             /* steps: a tile's part of x fits the first cache */
#define CHUNK (14 * MAX_ROWS) /* rows: their part of x, the weights it meets and the sums fit the second cache */
#define MAX_K 65536           /* copied rows live on the stack; longer ones are not packed */
#define PAGE 4096             /* bytes apart, all rows of a tile would share one set of the first cache */
#define LINE 16               /* words */

static int64_t steps_of(int64_t k, int bf16) { return bf16 ? k / 2 : k; }
static int64_t panels_of(int64_t n) { return (n + PANEL - 1) / PANEL; }

/* Words that the packed weight takes, or 0 when this shape is not packed. */
EXPORT int64_t raytide_packed_words(int64_t n, int64_t k, int bf16) {
    if ((bf16 && k % 2) || k > MAX_K) return 0;
    return panels_of(n) * PANEL * steps_of(k, bf16);
}

/* [n, k] row by row into panels [steps, PANEL], the last one filled up with zeros. */
EXPORT void raytide_pack(const word *weight, uint32_t *packed, int64_t n, int64_t k, int bf16) {
    int64_t steps = steps_of(k, bf16);
    for (int64_t panel = 0; panel < panels_of(n); panel++)
        for (int64_t step = 0; step < steps; step++)
            for (int64_t j = 0; j < PANEL; j++) {
                int64_t column = panel * PANEL + j;
                packed[(panel * steps + step) * PANEL + j] = column < n ? weight[column * steps + step] : 0;
            }
}

typedef struct {
    const void *x, *bias;
    const uint32_t *packed;
    void *y;
    int64_t m, n, k, chunk, groups;
    int bf16, group;
} Product;

/* Words `at` to `at + depth` of each of `mr` rows, `lda` apart, copied to `rows`. */
INLINE void copy_rows(const Product *p, int64_t row, int mr, int64_t at, int64_t depth, Words words, word *rows,
                      int64_t lda) {
    int64_t width = steps_of(p->k, words != FLOATS);
    for (int64_t i = 0; i < mr; i++) {
        const word *x = (const word *)p->x + (row + i) * width + at;
        if (words == WIDENED)
            for (int64_t k = 0; k < 2 * depth; k++) ((float *)rows)[i * lda + k] = load_one(x, k, 1);
        else
            memcpy(rows + i * lda, x, depth * 4);
    }
}

/* Some rows times some panels, a block of K after the other; sums wait in `c` meanwhile, so their order stays. */
INLINE void multiply(const Product *p, int64_t item, Words words, int bf16) {
    int64_t begin = item / p->groups * p->chunk, end = begin + p->chunk < p->m ? begin + p->chunk : p->m;
    int64_t first = item % p->groups * p->group, steps = steps_of(p->k, bf16);
    int64_t last = first + p->group < panels_of(p->n) ? first + p->group : panels_of(p->n);
    int64_t columns = (last - first) * PANEL, block = end - begin > MAX_ROWS ? BLOCK : steps;
    int copies = words == WIDENED || (steps * 4 % PAGE == 0 && end - begin > 1);
    int64_t lda = copies ? (words == WIDENED ? 2 : 1) * block + LINE : steps;
    float c[(end - begin) * columns];
    word rows[copies ? MAX_ROWS * lda : 1];
    for (int64_t at = 0; at < steps; at += block) {
        int64_t depth = at + block < steps ? block : steps - at;
        for (int64_t row = begin; row < end;) {
            int mr = rows_of_tile(row, end, MAX_ROWS), at_once = panels_at_once(mr);
            const word *a = (const word *)p->x + row * steps + at;
            if (copies) {
                copy_rows(p, row, mr, at, depth, words, rows, lda);
                a = rows;
            }
            for (int64_t panel = first; panel < last;) {
                int panels = panel + at_once <= last ? at_once : 1;
                any_tile(words, mr, panels, a, lda, p->packed + (panel * steps + at) * PANEL, steps, depth,
                         c + (row - begin) * columns + (panel - first) * PANEL, columns, at > 0);
                panel += panels;
            }
            row += mr;
        }
    }
    store_sums(c, columns, p->bias, bf16, p->y, p->n, begin, end, first * PANEL, bf16);
}

static void multiply_f32(const void *p, int64_t item) { multiply(p, item, FLOATS, 0); }
static void multiply_bf16(const void *p, int64_t item) { multiply(p, item, HAS_DOT ? PAIRS : WIDENED, 1); }

EXPORT void raytide_linear(const void *x, const uint32_t *packed, const void *bias, void *y, int64_t m, int64_t n,
                           int64_t k, int bf16) {
    Product p = {x, bias, packed, y, m, n, k, CHUNK, 0, bf16, m < MAX_ROWS ? 4 : 2};
    p.groups = (panels_of(n) + p.group - 1) / p.group;
    for_each(bf16 ? multiply_bf16 : multiply_f32, &p, (m + p.chunk - 1) / p.chunk * p.groups,
             n * k * (1 + m / 8)); /* few rows take as long as one */
}
