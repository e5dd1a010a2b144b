// Sums of weights that are stored as numbers (bfloat16, or float32), in tiles or row-major. Every output is one chain of sums over the inputs in order,
// independent of the other rows and outputs.
#pragma once
#include "elementwise.h"

namespace {

constexpr int GROUP = 4;  // tiles summed together where there are few rows: an input is loaded once for 64 outputs

// Pairs of inputs by which weights are prefetched: far enough for memory to answer (4 KiB for each tile), near enough
// to stay in the first cache. Where that reaches beyond a tile, the next tiles are prefetched instead.
constexpr int64_t AHEAD = 64, MOST_AHEAD = 256;

// Most rows that read row-major outputs of few inputs (STREAMED_INPUTS) one after another: memory delivers one stream faster
// than short pieces of four side by side (on a core of Zen 4 20 to 26 GB/s and 10 to 13), and reads ahead by itself.
constexpr int64_t STREAMED_ROWS = 2;

// tile[p][i] = word p of rows[i]: arranges sixteen rows of an even number of numbers as a tile of weights.
inline void turn_rows(const bf16* const* rows, int64_t width, bf16* tile) {
    const int64_t words = width / WORD;
    int64_t word = 0;
    for (; word + WIDTH <= words; word += WIDTH) turn_words(rows, WORD * word, tile + word * WORD * LANES);
    for (; word < words; ++word)
        for (int64_t i = 0; i < LANES; ++i)
            __builtin_memcpy(tile + (word * LANES + i) * WORD, rows[i] + WORD * word, WORD * sizeof(bf16));
}

// sums[m][r][lane] of R rows over M tiles. acc holds M x R sums in registers (at most MAX_SUMS) and tile the weights of
// one pair of inputs. The second turn of the outer loop prefetches the beginning of the M tiles that follow; tiles that
// are at hand already are not prefetched (FETCHES). W is how weights are stored.
template <int R, int M, bool FETCHES, class W>
void sum_block(const W* const* w, int64_t pairs, const bf16* x, int64_t width, float* sums) {
    Sums acc[M][R];
    const int64_t near = pairs <= AHEAD || pairs * M <= MOST_AHEAD ? pairs : AHEAD, turn = pairs - near;
    int64_t ahead = near * 2 * LANES;
    for (int64_t k = 0, stop = turn; k < pairs; stop = pairs, ahead += (M - 1) * pairs * 2 * LANES) {
        for (; k < stop; ++k) {
            Tile tile[M];
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) {
                if constexpr (FETCHES) __builtin_prefetch(w[m] + k * 2 * LANES + ahead);
                if constexpr (FETCHES && sizeof(W) == 4) __builtin_prefetch(w[m] + k * 2 * LANES + ahead + LANES);
                tile[m] = Tile(w[m] + k * 2 * LANES);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Inputs inputs(x + r * width + 2 * k);
#pragma GCC unroll 4
                for (int m = 0; m < M; ++m) acc[m][r].step(tile[m], inputs);
            }
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) acc[m][r].put(sums + (m * R + r) * LANES);
}

// The same for `count` tiles, as many at a time as the registers hold sums of R rows.
template <int R, bool FETCHES, class W>
void sum_tiles(const W* const* w, int count, int64_t pairs, const bf16* x, int64_t width, float* sums) {
    int m = 0;
    if constexpr (4 * R <= MAX_SUMS)
        for (; m + 4 <= count; m += 4) sum_block<R, 4, FETCHES>(w + m, pairs, x, width, sums + m * R * LANES);
    if constexpr (2 * R <= MAX_SUMS)
        for (; m + 2 <= count; m += 2) sum_block<R, 2, FETCHES>(w + m, pairs, x, width, sums + m * R * LANES);
    for (; m < count; ++m) sum_block<R, 1, FETCHES>(w + m, pairs, x, width, sums + m * R * LANES);
}

template <class W>
using SumTiles = void (*)(const W* const*, int, int64_t, const bf16*, int64_t, float*);

template <bool FETCHES, class W>
constexpr SumTiles<W> SUM_TILES[] = {
    sum_tiles<1, FETCHES, W>,  sum_tiles<2, FETCHES, W>,  sum_tiles<3, FETCHES, W>, sum_tiles<4, FETCHES, W>,
#if defined(__AVX512F__)
    sum_tiles<5, FETCHES, W>,  sum_tiles<6, FETCHES, W>,  sum_tiles<7, FETCHES, W>, sum_tiles<8, FETCHES, W>,
    sum_tiles<9, FETCHES, W>,  sum_tiles<10, FETCHES, W>,
#if !defined(VIVACE_FLOAT32)
    sum_tiles<11, FETCHES, W>, sum_tiles<12, FETCHES, W>,
#endif
#endif
};

// For which of four outputs the weights that are `ahead` are prefetched while they are summed.
enum Fetch { ALL, EVEN, ODD, NONE };

// sums[r][lane] of R rows over four outputs of a row-major matrix; w[o] points to the weights of an output. acc holds R
// x 4 vectors of partial sums; inputs beyond the last whole vector are loaded in part.
template <int R, Fetch FETCH = NONE, class W>
void dot_block(const W* const* w, const bf16* x, int64_t width, int64_t stride, float* sums, int64_t ahead = 0) {
    Vec acc[R][4];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int o = 0; o < 4; ++o) acc[r][o] = broadcast(0);
    int64_t k = 0;
    for (; k + DOT_WIDTH <= width; k += DOT_WIDTH) {
#pragma GCC unroll 4
        for (int o = 0; o < 4; ++o)
            if (FETCH == ALL || FETCH == (o % 2 == 0 ? EVEN : ODD)) __builtin_prefetch(w[o] + k + ahead);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int o = 0; o < 4; ++o) acc[r][o] = dot(acc[r][o], x + r * stride + k, w[o] + k);
    }
    if (k < width)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int o = 0; o < 4; ++o) acc[r][o] = dot(acc[r][o], x + r * stride + k, w[o] + k, width - k);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sum_four(acc[r], sums + r * LANES);
}

// The same to the same bits, one output after another.
template <int R, class W>
void dot_streams(const W* const* w, const bf16* x, int64_t width, int64_t stride, float* sums) {
    Vec acc[R][4];
#pragma GCC unroll 4
    for (int o = 0; o < 4; ++o) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[r][o] = broadcast(0);
        int64_t k = 0;
        for (; k + DOT_WIDTH <= width; k += DOT_WIDTH)
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) acc[r][o] = dot(acc[r][o], x + r * stride + k, w[o] + k);
        if (k < width)
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) acc[r][o] = dot(acc[r][o], x + r * stride + k, w[o] + k, width - k);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sum_four(acc[r], sums + r * LANES);
}

// sums[r][lane] of the outputs of one tile of a row-major matrix; outputs beyond its end repeat the last one.
template <class W = bf16>
void sum_rows(const Matrix& m, int64_t tile, const bf16* x, int64_t stride, int64_t rows, float* sums) {
    for (int64_t lane = 0; lane < LANES && tile * LANES + lane < m.out; lane += 4) {
        const W* w[4];
        for (int64_t o = 0; o < 4; ++o) {
            const int64_t output = tile * LANES + lane + o;
            w[o] = (const W*)m.weight + (output < m.out ? output : m.out - 1) * m.in;
        }
        if (rows <= STREAMED_ROWS && m.in <= STREAMED_INPUTS) {
            (rows == 1 ? dot_streams<1, W> : dot_streams<2, W>)(w, x, m.in, stride, sums + lane);
            continue;
        }
        int64_t r = 0;
        const auto dots = [&]<int R>() {
            for (; r + R <= rows; r += R) {
                // Half of the weights that follow are prefetched with the first rows, the other half with the next.
                const auto dot = rows <= R ? dot_block<R, ALL, W> : r == 0 ? dot_block<R, EVEN, W> : dot_block<R, ODD, W>;
                dot(w, x + r * stride, m.in, stride, sums + r * LANES + lane, 8 * m.in);
            }
        };
        if constexpr (MAX_SUMS > 16) dots.template operator()<4>();
        dots.template operator()<2>();
        dots.template operator()<1>();
    }
}

// sums[i][r][lane] of tiles tile..tile+count-1. Few rows wait for memory, which reads ahead by itself; a single row takes
// tiles one after another, as one stream.
template <class W = bf16, bool FETCHES = true>
inline void sum_number_tiles(const Matrix& m, int64_t tile, int count, const bf16* x, int64_t stride, int64_t rows,
                             float* sums) {
    const int64_t pairs = (m.in + 1) / 2;
    const W* w[GROUP];
    for (int i = 0; i < count; ++i) w[i] = (const W*)m.weight + (tile + i) * pairs * 2 * LANES;
    if (FETCHES && rows == 1) {
        for (int i = 0; i < count; ++i) sum_block<1, 1, false>(w + i, pairs, x, stride, sums + i * LANES);
        return;
    }
    const auto sum = FETCHES && rows >= LEAST_FETCHED ? SUM_TILES<true, W>[rows - 1] : SUM_TILES<false, W>[rows - 1];
    sum(w, count, pairs, x, stride, sums);
}

}  // namespace
