// Projections of few rows, in every layout of weights. The other linear_*.h compute the sums of tiles for one layout
// each; this file divides rows into blocks, adds biases, rounds and stores.
#pragma once
#if defined(__AMX_TILE__)
#include "linear_amx.h"
#else
#include "linear_no_amx.h"
#endif
#include "linear_wide.h"

namespace {

// The distance between rows of inputs in bfloat16 numbers; layouts that read pairs need an even one.
inline int64_t row_stride(const Matrix& m) {
    if (is_low_bit(m)) return prepared_width(m);
    switch ((Format)m.format) {
        case TILES:
        case LUT2:
        case LUT3:
        case LUT4:
        case EXACT12:
        case FLOAT16_TILES:
        case BFLOAT16_TILES:
            return even(m.in);
        default:
            return m.in;
    }
}

// Quantizes a row of inputs for a matrix of integers; does nothing for other matrices, and float32 has no others.
inline void prepare(const Matrix& m, const bf16* x, bf16* prepared, int64_t row) {
#if !defined(VIVACE_FLOAT32)
    if (is_grid(m)) prepare_grid_row(m, x + row * m.in, prepared + row * prepared_width(m));
    else if (is_low_bit(m)) prepare_int_row(x + row * m.in, m.in, prepared + row * prepared_width(m));
#endif
}

// sums[i][r][lane] of at most BLOCK_ROWS rows over tiles tile..tile+count-1, in vector registers. Tiles of numbers that are
// at hand already are not prefetched (FETCHES).
template <bool FETCHES = true>
inline void sum_in_vectors(const Matrix& m, int64_t tile, int count, const bf16* x, int64_t stride, int64_t rows,
                           float* sums) {
    switch ((Format)m.format) {
        case TILES:
            return sum_number_tiles<bf16, FETCHES>(m, tile, count, x, stride, rows, sums);
        case ROW_MAJOR:
            for (int i = 0; i < count; ++i) sum_rows(m, tile + i, x, stride, rows, sums + i * rows * LANES);
            return;
#if defined(VIVACE_FLOAT32)
        case FLOAT16_TILES:
            return sum_number_tiles<Float16>(m, tile, count, x, stride, rows, sums);
        case BFLOAT16_TILES:
            return sum_number_tiles<Bfloat16>(m, tile, count, x, stride, rows, sums);
        case FLOAT16_ROWS:
            for (int i = 0; i < count; ++i) sum_rows<Float16>(m, tile + i, x, stride, rows, sums + i * rows * LANES);
            return;
        case BFLOAT16_ROWS:
            for (int i = 0; i < count; ++i) sum_rows<Bfloat16>(m, tile + i, x, stride, rows, sums + i * rows * LANES);
            return;
#else
        case INT8:
            return sum_int_tiles<Int8Tiles>(m, tile, count, x, stride, rows, sums);
        case Q4:
            return sum_int_tiles<Q4Tiles>(m, tile, count, x, stride, rows, sums);
        case LUT2:
            return sum_lut_tiles<2>(m, tile, count, x, stride, rows, sums);
        case LUT3:
            return sum_lut_tiles<3>(m, tile, count, x, stride, rows, sums);
        case LUT4:
            return sum_lut_tiles<4>(m, tile, count, x, stride, rows, sums);
        case GRID4:
            return sum_grid_tiles<4>(m, tile, count, x, stride, rows, sums);
        case GRID8:
            return sum_grid_tiles<8>(m, tile, count, x, stride, rows, sums);
        case LUT2_INTS:
            return sum_int_tiles<IntPalette<2>>(m, tile, count, x, stride, rows, sums);
        case LUT3_INTS:
            return sum_int_tiles<IntPalette<3>>(m, tile, count, x, stride, rows, sums);
        case LUT4_INTS:
            return sum_int_tiles<IntPalette<4>>(m, tile, count, x, stride, rows, sums);
        case EXACT12:
            return sum_exact_tiles(m, tile, x, stride, rows, sums);
        case EXACT12_ROWS:
            for (int i = 0; i < count; ++i) sum_exact_rows(m, tile + i, x, stride, rows, sums + i * rows * LANES);
            return;
#endif
        default:
            return;
    }
}

// The same for at most BLOCK_ROWS rows, and for as many of the tiles as possible in the tile registers of AMX.
template <bool FETCHES = true>
inline void sum_group(TileUnit& unit, const Matrix& m, int64_t tile, int count, const bf16* x, int64_t stride, int64_t rows,
                      float* sums) {
    const int some = count_in_tiles(m, tile, count, rows);
    if (some > 0) sum_in_tiles(unit, m, tile, some, x, stride, rows, sums);
    if (some < count) sum_in_vectors<FETCHES>(m, tile + some, count - some, x, stride, rows, sums + some * rows * LANES);
}

// Divides the rows of a call into blocks of equal size, at most `most`, since each block reads all weights.
struct RowBlocks {
    int64_t rows, size;
    explicit RowBlocks(int64_t rows, int64_t most = BLOCK_ROWS) : rows(rows) {
        const int64_t count = (rows + most - 1) / most;
        size = count ? (rows + count - 1) / count : 1;
    }
    int64_t at(int64_t first) const { return first + size <= rows ? size : rows - first; }
};

// Calls use(first lane, number of lanes) for the vectors of a tile's sixteen outputs, up to the end of the matrix.
template <class Use>
inline void for_lanes(int64_t tile, int64_t out, Use use) {
    for (int64_t lane = 0; lane < LANES; lane += WIDTH) {
        const int64_t left = out - tile * LANES - lane;
        if (left <= 0) break;
        use(lane, left < WIDTH ? left : WIDTH);
    }
}

// Rows from `first` on that meet the same tiles one after another, widened once for all of these.
class InputRows {
public:
    InputRows(const Matrix& m, const bf16* x, int64_t stride, int64_t first, int64_t rows)
        : x_(x), stride_(stride), wide_(is_wide(m, rows) ? widened(x + first * stride, stride, rows) : nullptr),
          first_(first), blocks_(rows, wide_ != nullptr ? MOST_WIDE : BLOCK_ROWS) {}

    // sums[i][r][lane] of tiles tile..tile+count-1 for one of the blocks of rows.
    void sum(TileUnit& unit, const Matrix& m, int64_t tile, int count, int64_t row, int64_t rows, float* sums) const {
        if (wide_ == nullptr) return sum_group(unit, m, tile, count, x_ + row * stride_, stride_, rows, sums);
        sum_wide_tiles(m, tile, count, wide_ + (row - first_) * stride_, stride_, rows, sums);
    }

    // Calls use(row, rows) for each block.
    template <class Use>
    void for_blocks(Use use) const {
        for (int64_t row = 0; row < blocks_.rows; row += blocks_.size) use(first_ + row, blocks_.at(row));
    }

private:
    const bf16* x_;
    int64_t stride_;
    const float* wide_;
    int64_t first_;
    RowBlocks blocks_;
};

constexpr int64_t MOST_BLOCK_ROWS = WIDENS ? MOST_WIDE : BLOCK_ROWS;

// Calls use(inputs, tile, number of tiles, row, number of rows) for tiles first..stop-1 and all rows. Four tiles are summed
// together (GROUP), so that an input that was loaded is used for 64 outputs.
template <class Use>
inline void for_groups(const Matrix& m, const bf16* x, int64_t stride, int64_t rows, int64_t first, int64_t stop, Use use) {
    const RowBlocks stretches(rows, WIDENS ? MOST_WIDE : rows + 1);
    for (int64_t begin = 0; begin < rows; begin += stretches.size) {
        const InputRows inputs(m, x, stride, begin, stretches.at(begin));
        for (int64_t tile = first; tile < stop; tile += GROUP) {
            const int count = (int)(stop - tile < GROUP ? stop - tile : GROUP);
            inputs.for_blocks([&](int64_t row, int64_t some) { use(inputs, tile, count, row, some); });
        }
    }
}

// Calls use(tile, row, sums of that row) for tiles first..stop-1.
template <class Use>
inline void for_sums(const Matrix& m, const bf16* x, int64_t stride, int64_t rows, int64_t first, int64_t stop, Use use) {
    TileUnit unit;
    float sums[GROUP * MOST_BLOCK_ROWS * LANES];
    for_groups(m, x, stride, rows, first, stop,
               [&](const InputRows& inputs, int64_t tile, int count, int64_t row, int64_t some) {
        inputs.sum(unit, m, tile, count, row, some, sums);
        for (int i = 0; i < count; ++i)
            for (int64_t r = 0; r < some; ++r) use(tile + i, row + r, sums + (i * some + r) * LANES);
    });
}

inline Vec with_bias(const Matrix& m, Vec v, int64_t output, int64_t n) {
    return m.bias == nullptr ? v : add(v, load_some(m.bias + output, n));
}

// out = [plus +] round(x W^T + b)
void project(const Matrix& m, const bf16* x, const bf16* plus, bf16* out, int64_t rows, int64_t first, int64_t stop) {
    for_sums(m, x, row_stride(m), rows, first, stop, [&](int64_t tile, int64_t row, const float* sums) {
        for_lanes(tile, m.out, [&](int64_t lane, int64_t n) {
            const int64_t at = tile * LANES + lane;
            Vec v = with_bias(m, load(sums + lane), at, n);
            if (plus != nullptr) v = add(load_some(plus + row * m.out + at, n), rounded(v));
            store_some(out + row * m.out + at, v, n);
        });
    });
}

// out = round(act(round(x W^T + b))), for tiles first..stop-1.
void project_activated(const Matrix& m, const bf16* x, bf16* out, int64_t rows, int64_t activation, int64_t first,
                       int64_t stop) {
    for_sums(m, x, row_stride(m), rows, first, stop, [&](int64_t tile, int64_t row, const float* sums) {
        for_lanes(tile, m.out, [&](int64_t lane, int64_t n) {
            const int64_t at = tile * LANES + lane;
            const Vec v = rounded(with_bias(m, load(sums + lane), at, n));
            store_some(out + row * m.out + at, activated(v, activation), n);
        });
    });
}

// out = round(act(round(gate))) * round(up), for tiles first..stop-1 of both projections.
void project_gated(const Gated& g, int64_t first, int64_t stop) {
    TileUnit unit;
    float gates[GROUP * MOST_BLOCK_ROWS * LANES], ups[GROUP * MOST_BLOCK_ROWS * LANES];
    for_groups(g.gate, g.x, row_stride(g.gate), g.rows, first, stop,
               [&](const InputRows& inputs, int64_t tile, int count, int64_t row, int64_t some) {
        inputs.sum(unit, g.gate, tile, count, row, some, gates);
        inputs.sum(unit, g.up, tile, count, row, some, ups);
        for (int i = 0; i < count; ++i)
            for (int64_t r = 0; r < some; ++r)
                for_lanes(tile + i, g.gate.out, [&](int64_t lane, int64_t n) {
                    const int64_t at = (tile + i) * LANES + lane;
                    const Vec gate = with_bias(g.gate, load(gates + (i * some + r) * LANES + lane), at, n);
                    const Vec up = with_bias(g.up, load(ups + (i * some + r) * LANES + lane), at, n);
                    const Vec active = rounded(activated(rounded(gate), g.activation));
                    store_some(g.out + (row + r) * g.gate.out + at, mul(active, rounded(up)), n);
                });
    });
}

// Finds the largest rounded output of each row in tiles first..stop-1, the first of equals, without storing outputs.
void choose_greedily(const Linear& l, int64_t first, int64_t stop, float* best, int64_t* index) {
    const Matrix& m = l.matrix;
    for (int64_t r = 0; r < l.rows; ++r) best[r] = -__builtin_inff(), index[r] = first * LANES;
    for_sums(m, l.x, row_stride(m), l.rows, first, stop,
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
