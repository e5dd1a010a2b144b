// A pool of threads that runs phases of independent items; each thread takes the items of its own share first.
//
// The result of an item does not depend on the thread that computes it, so results do not depend on the number of
// threads, and a thread that is late holds nothing up: others take its items. A caller that finds the pool in use by
// another caller does its work alone.
#pragma once
#include <cstdint>

using Item = void (*)(const void* context, int64_t phase, int64_t item);

// Runs counts[p] items of each phase p = 0..phases-1; a phase begins when all items of the one before are finished.
void run_phases(int64_t threads, int64_t phases, const int64_t* counts, Item item, const void* context);
