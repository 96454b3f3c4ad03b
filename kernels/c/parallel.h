/* Work shared among the threads of torch's own OpenMP runtime: two runtimes on one machine would fight over its cores. */
#pragma once

#include <stdint.h>

/* Call `work(context, item)` once for each item below `count`, in any order, on any thread. `cost`, the multiplications
 * of all items or so, says whether other threads are worth waking. */
void for_each(void (*work)(const void *context, int64_t item), const void *context, int64_t count, int64_t cost);
