// Products of matrices in float32, for bodies that have no products of bfloat16: where there are many rows, they and the
// weights are widened once for all of them. Every number is the same chain of fused multiply-adds as in linear_bf16.h.
#pragma once
#include "elementwise.h"

namespace {

// Of sixteen registers six rows of sums over LANES numbers take twelve, the row that is multiplied two and a factor
// one.
constexpr int64_t MAX_FACTORS = 6;

// to[h][i] = keep[h] to[h][i] + sum over k < count of factors[h][k] rows[k][i], for R rows h and LANES numbers i; a sum
// begins at zero where `keep` is null.
template <int R>
void multiply_rows(const float* const* factors, const float* rows, int64_t stride, int64_t count, const float* keep,
                   float* const* to) {
    constexpr int PARTS = LANES / WIDTH;
    Vec acc[R][PARTS];
#pragma GCC unroll 6
    for (int h = 0; h < R; ++h)
#pragma GCC unroll 2
        for (int i = 0; i < PARTS; ++i)
            acc[h][i] = keep == nullptr ? broadcast(0) : mul(load(to[h] + i * WIDTH), broadcast(keep[h]));
    for (int64_t k = 0; k < count; ++k) {
        Vec row[PARTS];
#pragma GCC unroll 2
        for (int i = 0; i < PARTS; ++i) row[i] = load(rows + k * stride + i * WIDTH);
#pragma GCC unroll 6
        for (int h = 0; h < R; ++h) {
            const Vec factor = broadcast(factors[h][k]);
#pragma GCC unroll 2
            for (int i = 0; i < PARTS; ++i) acc[h][i] = fma(factor, row[i], acc[h][i]);
        }
    }
#pragma GCC unroll 6
    for (int h = 0; h < R; ++h)
#pragma GCC unroll 2
        for (int i = 0; i < PARTS; ++i) store(to[h] + i * WIDTH, acc[h][i]);
}

using MultiplyRows = void (*)(const float* const*, const float*, int64_t, int64_t, const float*, float* const*);
constexpr MultiplyRows MULTIPLY_ROWS[] = {multiply_rows<1>, multiply_rows<2>, multiply_rows<3>,
                                          multiply_rows<4>, multiply_rows<5>, multiply_rows<6>};

inline void widen_row(const bf16* x, int64_t width, float* out) {
    for_width(width, [&](int64_t i, int64_t n) {
        const Vec v = load_some(x + i, n);
        n == WIDTH ? store(out + i, v) : store(out + i, v, n);
    });
}

// Tiles of turn_rows in float32, number by number: [number][entry] for the sixteen entries of a tile.
inline void widen_tiles(const uint16_t* tiles, int64_t pairs, float* out) {
    for (int64_t p = 0; p < pairs; ++p, tiles += 2 * LANES, out += 2 * LANES) {
        uint32_t words[LANES], even[LANES], odd[LANES];
        __builtin_memcpy(words, tiles, sizeof words);
        for (int64_t i = 0; i < LANES; ++i) even[i] = words[i] << 16, odd[i] = words[i] & 0xffff0000;
        __builtin_memcpy(out, even, sizeof even);
        __builtin_memcpy(out + LANES, odd, sizeof odd);
    }
}
inline void widen_tiles(const float* tiles, int64_t pairs, float* out) {
    __builtin_memcpy(out, tiles, pairs * 2 * LANES * sizeof(float));
}

// Fewest rows for which widening the weights pays, the most that are multiplied together, and inputs of a step: a tile's
// weights of a step take half of the first cache, the inputs of all rows a fifth of the second.
constexpr int64_t LEAST_WIDE = 24, MOST_WIDE = 96, WIDE_INPUTS = 256;

// sums[i][r][lane] of tiles tile..tile+count-1 of a matrix of numbers, for at most MOST_WIDE rows.
void sum_wide_tiles(const Matrix& m, int64_t tile, int count, const bf16* x, int64_t stride, int64_t rows, float* sums) {
    constexpr float ONES[MAX_FACTORS] = {1, 1, 1, 1, 1, 1};
    alignas(64) float weights[WIDE_INPUTS * LANES], inputs[MOST_WIDE * WIDE_INPUTS];
    const int64_t width = even(m.in);
    for (int64_t at = 0; at < width; at += WIDE_INPUTS) {
        const int64_t some = width - at < WIDE_INPUTS ? width - at : WIDE_INPUTS;
        for (int64_t r = 0; r < rows; ++r) widen_row(x + r * stride + at, some, inputs + r * some);
        for (int i = 0; i < count; ++i) {
            widen_tiles((const bf16*)m.weight + ((tile + i) * width + at) * LANES, some / 2, weights);
            for (int64_t r = 0; r < rows; r += MAX_FACTORS) {
                const int64_t together = rows - r < MAX_FACTORS ? rows - r : MAX_FACTORS;
                const float* factors[MAX_FACTORS];
                float* to[MAX_FACTORS];
                for (int64_t f = 0; f < together; ++f)
                    factors[f] = inputs + (r + f) * some, to[f] = sums + (i * rows + r + f) * LANES;
                MULTIPLY_ROWS[together - 1](factors, weights, LANES, some, at == 0 ? nullptr : ONES, to);
            }
        }
    }
}

}  // namespace
