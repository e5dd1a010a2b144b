// Threads of our own: phases of independent items, claimed one by one, each thread its own share first.
//
// Whoever claims an item computes exactly what anybody else would, so results do not depend on how many threads
// there are or on who comes late; a thread that is busy elsewhere holds nobody up. A caller that finds the threads
// taken by another caller does its work alone.
#pragma once
#include <cstdint>

using Item = void (*)(const void* context, int64_t phase, int64_t item);

// Runs counts[p] items of phase p for p = 0..phases-1; a phase begins when the one before is complete.
void run_phases(int64_t threads, int64_t phases, const int64_t* counts, Item item, const void* context);
