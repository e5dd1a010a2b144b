// The part of linear_amx.h for a body without tile registers: everything is summed in vector registers.
#pragma once
#if defined(VIVACE_FLOAT32)
#include "linear_bf16.h"
#else
#include "linear_exact.h"
#include "linear_grid.h"
#include "linear_palette.h"
#endif

namespace {

constexpr int64_t BLOCK_ROWS = MAX_ROWS;

struct TileUnit {};

inline int count_in_tiles(const Matrix&, int64_t, int, int64_t) { return 0; }
inline void sum_in_tiles(TileUnit&, const Matrix&, int64_t, int, const bf16*, int64_t, int64_t, float*) {}

}  // namespace
