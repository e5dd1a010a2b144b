// Sums of bfloat16 weights that are stored in twelve bits without loss: weights are decoded in registers, and the sums
// have the bits of linear_bf16.h.
#pragma once
#include "linear_bf16.h"

namespace {

constexpr int64_t EXACT_AHEAD = 64;   // steps by which each plane is prefetched, 4 KiB
constexpr int64_t EXACT_INPUTS = 32;  // inputs of a step of EXACT12_ROWS

// Calls use(k, tiles) for the steps of a group in order, with M of its four tiles from tile 2 HALF on. The planes are
// three streams, which memory delivers faster than one. The first half of a group prefetches for the second half too,
// and at its end the beginning of the next group. `whole` counts the uncompressed steps, which interrupt the runs of
// packed ones.
template <int M, int HALF, class Use>
inline __attribute__((always_inline)) void for_steps(const Matrix& m, int64_t group, int64_t steps, Use use) {
    const ExactSide& side = *(const ExactSide*)m.scales;
    const int32_t* places = side.places();
    const UpperBytes upper(side.upper);
    const int64_t plane = steps * 64, near = steps < EXACT_AHEAD ? steps : EXACT_AHEAD, turn = steps - near;
    const uint8_t* w = (const uint8_t*)m.weight + group * 3 * plane;
    Tile tiles[M];
    for (int64_t k = 0, whole = places[group];; ++whole, ++k, w += 64) {
        const int64_t stop = whole < places[group + 1] ? places[whole] : steps;
        for (; k < stop; ++k, w += 64) {
            if constexpr (HALF == 0) {
                const uint8_t* const ahead = w + 64 * near + (k < turn ? 0 : 2 * plane);
                for (int which = 0; which < 3; ++which) __builtin_prefetch(ahead + which * plane);
            }
            upper.template join<HALF>(w + HALF * plane, w + 2 * plane, tiles);
            if constexpr (M > 2) upper.template join<true>(w + plane, w + 2 * plane, tiles + 2);
            use(k, tiles);
        }
        if (k == steps) return;
        const bf16* last = side.last(whole - places[0]);
#pragma GCC unroll 4
        for (int i = 0, which = 2 * HALF; i < M; ++i, ++which)
            tiles[i] = Tile(which < 3 ? (const bf16*)(w + which * plane) : last);
        use(k, tiles);
    }
}

// sums[i][r][lane] of R rows over the four tiles of a group, M of them at a time; acc holds M x R sums in registers.
template <int R, int M, int HALF = 0>
void sum_exact_block(const Matrix& m, int64_t group, const bf16* x, int64_t stride, int64_t rows, float* sums) {
    Sums acc[M][R];
    for_steps<M, HALF>(m, group, (m.in + 1) / 2, [&](int64_t k, const Tile* tiles) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Inputs inputs(x + r * stride + 2 * k);
#pragma GCC unroll 4
            for (int i = 0; i < M; ++i) acc[i][r].step(tiles[i], inputs);
        }
    });
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) acc[i][r].put(sums + ((2 * HALF + i) * rows + r) * LANES);
    if constexpr (M == 2 && HALF == 0) sum_exact_block<R, M, 1>(m, group, x, stride, rows, sums);
}

using SumExact = void (*)(const Matrix&, int64_t, const bf16*, int64_t, int64_t, float*);

template <int R>
constexpr SumExact sum_exact = sum_exact_block<R, 4 * R <= MAX_EXACT_SUMS ? 4 : 2>;

const SumExact SUM_EXACT[] = {
    sum_exact<1>, sum_exact<2>,
#if defined(__AVX512BF16__)
    sum_exact<3>, sum_exact<4>,  sum_exact<5>,  sum_exact<6>,  sum_exact<7>,
    sum_exact<8>, sum_exact<9>, sum_exact<10>, sum_exact<11>, sum_exact<12>,
#endif
};

// sums[i][r][lane] of the four tiles from `tile` on, for at most MAX_ROWS rows.
inline void sum_exact_tiles(const Matrix& m, int64_t tile, const bf16* x, int64_t stride, int64_t rows, float* sums) {
    for (int64_t row = 0; row < rows; row += MAX_EXACT_ROWS) {
        const int64_t some = rows - row < MAX_EXACT_ROWS ? rows - row : MAX_EXACT_ROWS;
        SUM_EXACT[some - 1](m, tile / GROUP, x + row * stride, stride, rows, sums + row * LANES);
    }
}

// sums[r][lane] of R rows over four outputs of EXACT12_ROWS, to the bits of dot_block.
template <int R>
void dot_exact_block(const Matrix& m, int64_t group, const bf16* x, int64_t stride, float* sums) {
    constexpr int M = 4 * R <= MAX_EXACT_SUMS && R <= 4 ? 4 : 2;
    Vec acc[R][4];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int o = 0; o < 4; ++o) acc[r][o] = broadcast(0);
    const auto pass = [&]<int HALF>() __attribute__((always_inline)) {
        const auto add = [&](int64_t k, const Tile* tiles) __attribute__((always_inline)) {
            const int64_t at = k * EXACT_INPUTS, left = m.in - at;
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int o = 0; o < M; ++o) {
                    Vec& sum = acc[r][2 * HALF + o];
                    const bf16* inputs = x + r * stride + at;
                    sum = left >= EXACT_INPUTS ? dot(sum, inputs, tiles[o]) : dot(sum, inputs, tiles[o], left);
                }
        };
        for_steps<M, HALF>(m, group, (m.in + EXACT_INPUTS - 1) / EXACT_INPUTS, add);
    };
    pass.template operator()<0>();
    if constexpr (M == 2) pass.template operator()<1>();
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum_four(acc[r], sums + r * LANES);
}

using DotExact = void (*)(const Matrix&, int64_t, const bf16*, int64_t, float*);
const DotExact DOT_EXACT[] = {
    dot_exact_block<1>, dot_exact_block<2>,
#if defined(__AVX512BF16__)
    dot_exact_block<3>, dot_exact_block<4>, dot_exact_block<5>, dot_exact_block<6>, dot_exact_block<7>, dot_exact_block<8>,
#endif
};

// sums[r][lane] of the outputs of one tile, four at a time.
void sum_exact_rows(const Matrix& m, int64_t tile, const bf16* x, int64_t stride, int64_t rows, float* sums) {
    for (int64_t lane = 0; lane < LANES && tile * LANES + lane < m.out; lane += 4)
        for (int64_t row = 0; row < rows; row += MAX_EXACT_DOTS) {
            const int64_t some = rows - row < MAX_EXACT_DOTS ? rows - row : MAX_EXACT_DOTS;
            DOT_EXACT[some - 1](m, (tile * LANES + lane) / 4, x + row * stride, stride, sums + row * LANES + lane);
        }
}

}  // namespace
