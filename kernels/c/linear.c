/* y = x W^T + bias with W packed once. The additions of each number of y run over K in order: rows are independent of
 * each other to the bit. */
#include "parallel.h"
#include "tile.h"

#define CHUNK_BYTES (384 * 1024) /* of x that stay in the core's cache while weights pass by */
#define MAX_K 65536              /* copied rows live on the stack; longer ones are not packed */
#define PAGE 4096                /* bytes apart, all rows of a tile would share one set of the first cache */
#define LINE 16                  /* words */

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

INLINE void finish(const Product *p, const float *c, int64_t ldc, int64_t row, int mr, int64_t column, int bf16) {
    int64_t width = p->n - column < ldc ? p->n - column : ldc;
    for (int i = 0; i < mr; i++) {
        int64_t at = (row + i) * p->n + column, j = 0;
        for (; j + VL <= width; j += VL) {
            vf y = load_f32(c + i * ldc + j);
            store(p->y, at + j, p->bias ? y + load(p->bias, column + j, bf16) : y, bf16);
        }
        for (; j < width; j++)
            store_one(p->y, at + j, c[i * ldc + j] + (p->bias ? load_one(p->bias, column + j, bf16) : 0), bf16);
    }
}

/* Some rows times some panels. */
INLINE void multiply(const Product *p, int64_t item, Words words, int bf16) {
    int64_t begin = item / p->groups * p->chunk, end = begin + p->chunk < p->m ? begin + p->chunk : p->m;
    int64_t first = item % p->groups * p->group, steps = steps_of(p->k, bf16);
    int64_t last = first + p->group < panels_of(p->n) ? first + p->group : panels_of(p->n);
    int64_t width = words == WIDENED ? p->k : steps, apart = width * 4 % PAGE ? width : width + LINE;
    int copies = words == WIDENED || (apart > width && end - begin > 1);
    float c[MAX_ROWS * PANEL * 4];
    word rows[copies ? MAX_ROWS * apart : 1];
    for (int64_t row = begin; row < end;) {
        int mr = rows_of_tile(row, end), at_once = panels_at_once(mr);
        int64_t lda = copies ? apart : width;
        const void *a = (const char *)p->x + row * p->k * (bf16 ? 2 : 4);
        if (copies) {
            for (int64_t i = 0; i < mr; i++)
                if (words == WIDENED)
                    for (int64_t k = 0; k < width; k++) ((float *)rows)[i * lda + k] = load_one(a, i * p->k + k, 1);
                else
                    memcpy(rows + i * lda, (const word *)a + i * width, width * 4);
            a = rows;
        }
        for (int64_t panel = first; panel < last;) {
            int panels = panel + at_once <= last ? at_once : 1;
            any_tile(words, mr, panels, a, lda, p->packed + panel * steps * PANEL, steps, c, panels * PANEL, 0);
            finish(p, c, panels * PANEL, row, mr, panel * PANEL, bf16);
            panel += panels;
        }
        row += mr;
    }
}

static void multiply_f32(const void *p, int64_t item) { multiply(p, item, FLOATS, 0); }
static void multiply_bf16(const void *p, int64_t item) { multiply(p, item, HAS_DOT ? PAIRS : WIDENED, 1); }

EXPORT void raytide_linear(const void *x, const uint32_t *packed, const void *bias, void *y, int64_t m, int64_t n,
                           int64_t k, int bf16) {
    int64_t fitting = CHUNK_BYTES / (k * (bf16 ? 2 : 4)) / MAX_ROWS * MAX_ROWS;
    Product p = {x, bias, packed, y, m, n, k, fitting < MAX_ROWS ? MAX_ROWS : fitting, 0, bf16, m < MAX_ROWS ? 4 : 2};
    p.groups = (panels_of(n) + p.group - 1) / p.group;
    for_each(bf16 ? multiply_bf16 : multiply_f32, &p, (m + p.chunk - 1) / p.chunk * p.groups,
             n * k * (1 + m / 8)); /* few rows take as long as one */
}
