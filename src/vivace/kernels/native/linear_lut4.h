// Sums of weights that are codes into their tile's codebook of sixteen bfloat16 entries: codes are decoded to bfloat16
// tiles in registers, and the sums have the bits of linear_bf16.h.
#pragma once
#include "linear_bf16.h"

namespace {

constexpr int64_t LUT_STEP = 8;  // inputs whose codes of sixteen outputs fill 64 bytes
constexpr int64_t LUT_AHEAD = 2048, MOST_LUT_AHEAD = 8192;  // bytes, as AHEAD and MOST_AHEAD

// Adds the products of up to four pairs of inputs.
template <int R, int M>
inline void step_pairs(const Tile (*tiles)[4], int64_t pairs, const bf16* x, int64_t stride, Sums (*acc)[R]) {
#pragma GCC unroll 4
    for (int64_t p = 0; p < pairs; ++p)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Inputs inputs(x + r * stride + 2 * p);
#pragma GCC unroll 4
            for (int i = 0; i < M; ++i) acc[i][r].step(tiles[i][p], inputs);
        }
}

// sums[m][r][lane] of R rows over M tiles; at the end of the tiles it prefetches the beginning of the M that follow.
template <int R, int M>
void sum_lut4_block(const Matrix& m, int64_t tile, const bf16* x, int64_t stride, int64_t rows, float* sums) {
    const int64_t pairs = (m.in + 1) / 2, size = (pairs + 3) / 4 * 64;
    const int64_t near = size <= LUT_AHEAD || size * M <= MOST_LUT_AHEAD ? size : LUT_AHEAD;
    const uint8_t* w = (const uint8_t*)m.weight + tile * size;
    const uint8_t* const turn = w + size - near;
    Entries entries[M];
    for (int i = 0; i < M; ++i) entries[i] = Entries((const bf16*)m.scales + (tile + i) * 16);
    Sums acc[M][R];
    for (int64_t p = 0; p < pairs; p += 4, w += 64) {
        const int64_t ahead = w < turn ? near : near + (M - 1) * size;
        Tile tiles[M][4];
#pragma GCC unroll 4
        for (int i = 0; i < M; ++i) {
            __builtin_prefetch(w + i * size + ahead);
            entries[i].choose(w + i * size, tiles[i]);
        }
        if (p + 4 <= pairs) step_pairs<R, M>(tiles, 4, x + 2 * p, stride, acc);
        else step_pairs<R, M>(tiles, pairs - p, x + 2 * p, stride, acc);
    }
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) acc[i][r].put(sums + (i * rows + r) * LANES);
}

template <int R>
void sum_lut4_rows(const Matrix& m, int64_t tile, int count, const bf16* x, int64_t stride, int64_t rows, float* sums) {
    constexpr int M = 4 * R <= MAX_LUT_SUMS ? 4 : 2 * R <= MAX_LUT_SUMS ? 2 : 1;
    int i = 0;
    for (; i + M <= count; i += M) sum_lut4_block<R, M>(m, tile + i, x, stride, rows, sums + i * rows * LANES);
    if constexpr (M > 1)
        for (; i < count; ++i) sum_lut4_block<R, 1>(m, tile + i, x, stride, rows, sums + i * rows * LANES);
}

using SumLut4 = void (*)(const Matrix&, int64_t, int, const bf16*, int64_t, int64_t, float*);
const SumLut4 SUM_LUT4[] = {
    sum_lut4_rows<1>, sum_lut4_rows<2>, sum_lut4_rows<3>, sum_lut4_rows<4>,
#if defined(__AVX512BF16__)
    sum_lut4_rows<5>, sum_lut4_rows<6>, sum_lut4_rows<7>, sum_lut4_rows<8>,
    sum_lut4_rows<9>, sum_lut4_rows<10>, sum_lut4_rows<11>, sum_lut4_rows<12>,
#endif
};

// sums[i][r][lane] of tiles tile..tile+count-1, for at most MAX_ROWS rows.
inline void sum_lut4_tiles(const Matrix& m, int64_t tile, int count, const bf16* x, int64_t stride, int64_t rows,
                           float* sums) {
    SUM_LUT4[rows - 1](m, tile, count, x, stride, rows, sums);
}

}  // namespace
