// Projections of few rows. Every output is one chain of sums over the inputs in order, whatever stands beside it.
#pragma once
#include "elementwise.h"

namespace {

constexpr int GROUP = 4;  // tiles that are summed together where there are few rows

// sums[m][r][lane] of R rows over M tiles.
template <int R, int M>
void sum_block(const bf16* const* w, int64_t pairs, const bf16* x, int64_t width, float* sums) {
    Sums acc[M][R];
    for (int64_t k = 0; k < pairs; ++k) {
        Tile tile[M];
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) tile[m] = Tile(w[m] + k * 2 * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Inputs inputs(x + r * width + 2 * k);
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) acc[m][r].step(tile[m], inputs);
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) acc[m][r].put(sums + (m * R + r) * LANES);
}

template <int R>
void sum_tiles(const bf16* const* w, int count, int64_t pairs, const bf16* x, int64_t width, float* sums) {
    int m = 0;
    if constexpr (4 * R <= MAX_SUMS)
        for (; m + 4 <= count; m += 4) sum_block<R, 4>(w + m, pairs, x, width, sums + m * R * LANES);
    if constexpr (2 * R <= MAX_SUMS)
        for (; m + 2 <= count; m += 2) sum_block<R, 2>(w + m, pairs, x, width, sums + m * R * LANES);
    for (; m < count; ++m) sum_block<R, 1>(w + m, pairs, x, width, sums + m * R * LANES);
}

using SumTiles = void (*)(const bf16* const*, int, int64_t, const bf16*, int64_t, float*);
const SumTiles SUM_TILES[] = {
    sum_tiles<1>, sum_tiles<2>, sum_tiles<3>, sum_tiles<4>,
#if defined(__AVX512BF16__)
    sum_tiles<5>, sum_tiles<6>, sum_tiles<7>, sum_tiles<8>, sum_tiles<9>, sum_tiles<10>, sum_tiles<11>, sum_tiles<12>,
#endif
};

// sums[r][lane] of R rows over four outputs of a row-major matrix; w[o] is where an output's weights lie.
template <int R>
void dot_block(const bf16* const* w, const bf16* x, int64_t width, int64_t stride, float* sums) {
    Vec acc[R][4];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int o = 0; o < 4; ++o) acc[r][o] = broadcast(0);
    int64_t k = 0;
    for (; k + DOT_WIDTH <= width; k += DOT_WIDTH)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int o = 0; o < 4; ++o) acc[r][o] = dot(acc[r][o], x + r * stride + k, w[o] + k);
    if (k < width)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int o = 0; o < 4; ++o) acc[r][o] = dot(acc[r][o], x + r * stride + k, w[o] + k, width - k);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sum_four(acc[r], sums + r * LANES);
}

// sums[r][lane] of the outputs of one tile of a row-major matrix; those beyond its end repeat the last.
void sum_rows(const Matrix& m, int64_t tile, const bf16* x, int64_t stride, int64_t rows, float* sums) {
    for (int64_t lane = 0; lane < LANES && tile * LANES + lane < m.out; lane += 4) {
        const bf16* w[4];
        for (int64_t o = 0; o < 4; ++o) {
            const int64_t output = tile * LANES + lane + o;
            w[o] = m.weight + (output < m.out ? output : m.out - 1) * m.in;
        }
        int64_t r = 0;
        for (; r + 2 <= rows; r += 2) dot_block<2>(w, x + r * stride, m.in, stride, sums + r * LANES + lane);
        if (r < rows) dot_block<1>(w, x + r * stride, m.in, stride, sums + r * LANES + lane);
    }
}

// Rows of a call in blocks of equal size that fit the registers.
struct RowBlocks {
    int64_t rows, size;
    explicit RowBlocks(int64_t rows) : rows(rows) {
        const int64_t count = (rows + MAX_ROWS - 1) / MAX_ROWS;
        size = count ? (rows + count - 1) / count : 1;
    }
    int64_t at(int64_t first) const { return first + size <= rows ? size : rows - first; }
};

// Vectors of a tile's sixteen outputs: lane 0, how many of them there are.
template <class Use>
inline void for_lanes(int64_t tile, int64_t out, Use use) {
    for (int64_t lane = 0; lane < LANES; lane += WIDTH) {
        const int64_t left = out - tile * LANES - lane;
        if (left <= 0) break;
        use(lane, left < WIDTH ? left : WIDTH);
    }
}

// use(tile, row, sums of that row) for tiles first..stop-1; x rows are `stride` apart.
template <class Use>
inline void for_sums(const Matrix& m, const bf16* x, int64_t stride, int64_t rows, int64_t first, int64_t stop, Use use) {
    float sums[GROUP * MAX_ROWS * LANES];
    const RowBlocks blocks(rows);
    const int64_t pairs = (m.in + 1) / 2;
    for (int64_t tile = first; tile < stop; tile += GROUP) {
        const int count = (int)(stop - tile < GROUP ? stop - tile : GROUP);
        for (int64_t row = 0; row < rows; row += blocks.size) {
            const int64_t some = blocks.at(row);
            if (m.is_packed) {
                const bf16* w[GROUP];
                for (int i = 0; i < count; ++i) w[i] = m.weight + (tile + i) * pairs * 2 * LANES;
                SUM_TILES[some - 1](w, count, pairs, x + row * stride, stride, sums);
            } else {
                for (int i = 0; i < count; ++i)
                    sum_rows(m, tile + i, x + row * stride, stride, some, sums + i * some * LANES);
            }
            for (int i = 0; i < count; ++i)
                for (int64_t r = 0; r < some; ++r) use(tile + i, row + r, sums + (i * some + r) * LANES);
        }
    }
}

inline Vec with_bias(const Matrix& m, Vec v, int64_t output, int64_t n) {
    return m.bias == nullptr ? v : add(v, load_some(m.bias + output, n));
}

// out = [plus +] round(x W^T + b)
void project(const Matrix& m, const bf16* x, const bf16* plus, bf16* out, int64_t rows, int64_t first, int64_t stop) {
    for_sums(m, x, m.is_packed ? even(m.in) : m.in, rows, first, stop, [&](int64_t tile, int64_t row, const float* sums) {
        for_lanes(tile, m.out, [&](int64_t lane, int64_t n) {
            const int64_t at = tile * LANES + lane;
            Vec v = with_bias(m, load(sums + lane), at, n);
            if (plus != nullptr) v = add(load_some(plus + row * m.out + at, n), rounded(v));
            store_some(out + row * m.out + at, v, n);
        });
    });
}

void project_gated(const Gated& g, int64_t first, int64_t stop) {
    float sums[4 * MAX_ROWS * LANES];
    const RowBlocks blocks(g.rows);
    const int64_t pairs = (g.gate.in + 1) / 2, stride = even(g.gate.in), size = pairs * 2 * LANES;
    for (int64_t tile = first; tile < stop; tile += 2) {
        const int count = stop - tile < 2 ? 1 : 2;
        const bf16* w[4];
        for (int i = 0; i < count; ++i) {
            w[i] = g.gate.weight + (tile + i) * size;
            w[count + i] = g.up.weight + (tile + i) * size;
        }
        for (int64_t row = 0; row < g.rows; row += blocks.size) {
            const int64_t some = blocks.at(row);
            SUM_TILES[some - 1](w, 2 * count, pairs, g.x + row * stride, stride, sums);
            for (int i = 0; i < count; ++i)
                for (int64_t r = 0; r < some; ++r)
                    for_lanes(tile + i, g.gate.out, [&](int64_t lane, int64_t n) {
                        const int64_t at = (tile + i) * LANES + lane;
                        const Vec gate = with_bias(g.gate, load(sums + (i * some + r) * LANES + lane), at, n);
                        const Vec up = with_bias(g.up, load(sums + ((count + i) * some + r) * LANES + lane), at, n);
                        const Vec active = rounded(activated(rounded(gate), g.activation));
                        store_some(g.out + (row + r) * g.gate.out + at, mul(active, rounded(up)), n);
                    });
        }
    }
}

// The first largest of the rounded outputs in tiles first..stop-1, for each row.
void choose_greedily(const Linear& l, int64_t first, int64_t stop, float* best, int64_t* index) {
    const Matrix& m = l.matrix;
    for (int64_t r = 0; r < l.rows; ++r) best[r] = -__builtin_inff(), index[r] = first * LANES;
    for_sums(m, l.x, m.is_packed ? even(m.in) : m.in, l.rows, first, stop,
             [&](int64_t tile, int64_t row, const float* sums) {
        for_lanes(tile, m.out, [&](int64_t lane, int64_t n) {
            const int64_t at = tile * LANES + lane;
            const Vec v = rounded(with_bias(m, load(sums + lane), at, n));
            if (!any_greater(v, best[row])) return;
            float values[WIDTH];
            store(values, v);
            for (int64_t i = 0; i < n; ++i)
                if (values[i] > best[row]) best[row] = values[i], index[row] = at + i;
        });
    });
}

}  // namespace
