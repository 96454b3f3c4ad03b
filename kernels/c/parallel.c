#include "parallel.h"

#include <stdio.h>

#include "amx.h"

#define WORTH_A_THREAD 100000

typedef void (*Parallel)(void (*)(void *), void *, unsigned threads, unsigned flags);

static Parallel parallel; /* GOMP_parallel of the runtime that torch has loaded; none: everything runs on the caller */
static unsigned num_threads = 1;

EXPORT void raytide_threads(Parallel runtime, unsigned threads) {
    parallel = runtime;
    num_threads = runtime ? threads : 1;
}

EXPORT const char *raytide_instructions(void) {
    const char *vectors = VL == 16 ? "AVX512" : VL == 8 ? "AVX2" : "128-bit vectors";
    static char name[40];
    snprintf(name, sizeof name, "%s%s%s%s", vectors, HAS_VNNI ? ", VNNI" : "", HAS_DOT ? ", BF16" : "", HAS_AMX ? ", AMX" : "");
    return name;
}

typedef struct {
    void (*work)(const void *, int64_t);
    const void *context;
    int64_t count, next;
} Queue;

static void drain(void *argument) {
    Queue *queue = argument;
    int64_t item;
    while ((item = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED)) < queue->count)
        queue->work(queue->context, item);
}

void for_each(void (*work)(const void *, int64_t), const void *context, int64_t count, int64_t cost) {
    Queue queue = {work, context, count, 0};
    if (num_threads > 1 && count > 1 && cost >= WORTH_A_THREAD)
        parallel(drain, &queue, num_threads, 0);
    else
        drain(&queue);
}
