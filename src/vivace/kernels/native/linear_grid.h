// Sums of the codes of a file: integers times a scale for each output and 16, 32 or 64 inputs, less the code that
// stands for zero, plus an offset. Inputs are quantized to eight bits with a scale for each 16, since rounding them is
// all that is lost here. Sums of products of 16 inputs are exact integers; they are scaled and added in order, first
// within the inputs that share a scale of the weights.
#pragma once
#include "linear_q4.h"

namespace {

constexpr int64_t QUARTER = INT_GROUP / 4;  // the fewest inputs that share a scale

// A group of 64 quantized inputs in working space: bytes and, for each quarter, their scale, their scaled sum, and -128
// times the sum of the bytes, at most 16 * 127 * 128 in size.
struct GridInputs {
    int8_t bytes[INT_GROUP];
    float scale[4], sum[4];
    int32_t shift[4];
    uint8_t unused[16];  // to two lines of the cache
};

inline const GridInputs* grid_inputs(const bf16* row) { return (const GridInputs*)row; }

void prepare_grid_row(const Matrix& m, const bf16* x, bf16* row) {
    const GridSide& side = *(const GridSide*)m.scales;
    const int32_t* order = side.at<int32_t>(side.order);
    const int64_t groups = int_groups(m.in);
    GridInputs* to = (GridInputs*)row;
    bf16 taken[INT_GROUP];
    for (int64_t g = 0; g < groups; ++g, ++to) {
        const int64_t first = g * INT_GROUP, count = m.in - first < INT_GROUP ? m.in - first : INT_GROUP;
        const bf16* from = x + first;
        if (side.is_ordered) {
            for (int64_t i = 0; i < count; ++i) taken[i] = x[order[first + i]];
            from = taken;
        }
        for (int64_t q = 0; q < 4; ++q) {
            constexpr int64_t VECTORS = QUARTER / WIDTH;
            Vec values[VECTORS], most = broadcast(0), sum = broadcast(0), zero = broadcast(0);
            for (int64_t i = 0; i < VECTORS; ++i) {
                const int64_t at = q * QUARTER + i * WIDTH, left = count - at;
                values[i] = left <= 0 ? broadcast(0) : load_some(from + at, left < WIDTH ? left : WIDTH);
                most = max(most, max(values[i], sub(broadcast(0), values[i])));
                zero = fma(values[i], broadcast(0), zero);
            }
            const float size = max_of(most) + sum_of(zero);  // no number where an input is infinite or none
            const bool is_nothing = size < 1e-30f, is_number = size == size;
            const Vec inverse = broadcast(is_nothing ? 0 : 127.0f / size);
            for (int64_t i = 0; i < VECTORS; ++i) {
                const Vec whole = is_number ? nearest(mul(values[i], inverse)) : broadcast(0);
                sum = add(sum, whole);
                store_bytes(to->bytes + q * QUARTER + i * WIDTH, whole);
            }
            const float total = sum_of(sum);
            to->scale[q] = is_nothing ? 0 : size / 127.0f;
            to->sum[q] = to->scale[q] * total;
            to->shift[q] = -128 * (int32_t)total;
        }
    }
}

// One kind of number of the groups of a tile: scales or offsets, sixteen of each part of a group.
struct Factors {
    const int64_t kind;
    const uint8_t* values;
    const uint16_t* units;
    Factors(const GridSide& side, int64_t kind, int64_t values, int64_t units, int64_t tile, int64_t groups)
        : kind(kind),
          values(side.at<uint8_t>(values)),
          units(side.at<uint16_t>(units) + tile * ((groups + 3) / 4) * LANES) {
        const int64_t size = kind == HALVES ? 2 : kind == FLOATS ? 4 : 1;
        this->values += tile * groups * (INT_GROUP / side.group) * LANES * size;
    }
    // Those of a part, which is in group g.
    Floats at(int64_t g, int64_t part) const {
        Floats found;
        for (int i = 0; i < LANES / WIDTH; ++i) {
            const int64_t lane = part * LANES + i * WIDTH;
            if (kind == HALVES) found.parts[i] = load_halves((const uint16_t*)values + lane);
            else if (kind == FLOATS) found.parts[i] = load((const float*)values + lane);
            else {
                const Vec unit = load_halves(units + g / 4 * LANES + i * WIDTH);
                found.parts[i] = mul(unit, load_integers((const int8_t*)values + lane));
            }
        }
        return found;
    }
    void fetch(int64_t part) const {
        __builtin_prefetch(values + part * LANES * (kind == HALVES ? 2 : kind == FLOATS ? 4 : 1) + 1024);
    }
};

// sums[r][lane] of R rows over a tile.
template <int BITS, int R>
void sum_grid_block(const Matrix& m, int64_t tile, const bf16* x, int64_t stride, float* sums) {
    constexpr int64_t BYTES = INT_GROUP * BITS / 8 * LANES, READS = QUARTER * BITS / 8 * LANES / 64;
    constexpr int PARTS = 8 / BITS;
    const GridSide& side = *(const GridSide*)m.scales;
    const int64_t groups = int_groups(m.in), quarters = side.group / QUARTER;
    const uint8_t* w = (const uint8_t*)m.weight + tile * groups * BYTES;
    const Table table(side.table, 128);
    const Factors scales(side, side.scale, side.scales, side.scale_units, tile, groups);
    const Factors offsets(side, side.offset, side.offsets, side.offset_units, tile, groups);
    const int8_t* zeros = side.at<int8_t>(side.zeros) + tile * groups * (4 / quarters) * LANES;
    const bool has_zeros = side.has_zeros, has_offsets = side.offset != NOTHING;
    Floats total[R];
    for (int64_t g = 0, part = 0; g < groups; ++g)
        for (int64_t quarter = 0; quarter < 4; ++part) {
            Floats some[R];
            float sum[R] = {};
            scales.fetch(part);
            if (has_offsets) offsets.fetch(part);
            for (const int64_t stop = quarter + quarters; quarter < stop; ++quarter) {
                Ints acc[R];
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const GridInputs& in = grid_inputs(x + r * stride)[g];
                    acc[r] = Ints(in.shift[quarter]);
                    sum[r] += in.sum[quarter];
                }
#pragma GCC unroll 4
                for (int64_t read = 0; read < READS; ++read, w += 64) {
                    __builtin_prefetch(w + INT_AHEAD);
                    Codes codes[PARTS];
                    if constexpr (BITS == 4) table.look_up(w, codes[0], codes[1]);
                    else codes[0] = Codes(w);
#pragma GCC unroll 2
                    for (int p = 0; p < PARTS; ++p)
#pragma GCC unroll 16
                        for (int r = 0; r < R; ++r)
                            acc[r].step(codes[p], grid_inputs(x + r * stride)[g].bytes + quarter * QUARTER +
                                                      4 * (read * PARTS + p));
                }
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) some[r].add(acc[r], grid_inputs(x + r * stride)[g].scale[quarter]);
            }
            const Floats own = scales.at(g, part);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) total[r].add(some[r], own);
            if (has_zeros) {
                Floats zero;
                for (int i = 0; i < LANES / WIDTH; ++i)
                    zero.parts[i] = mul(own.parts[i], load_integers(zeros + part * LANES + i * WIDTH));
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) total[r].add(zero, -sum[r]);
            }
            if (has_offsets) {
                const Floats offset = offsets.at(g, part);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) total[r].add(offset, sum[r]);
            }
        }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) total[r].put(sums + r * LANES);
}

using SumGrid = void (*)(const Matrix&, int64_t, const bf16*, int64_t, float*);

template <int BITS>
constexpr SumGrid SUM_GRID[] = {
    sum_grid_block<BITS, 1>, sum_grid_block<BITS, 2>, sum_grid_block<BITS, 3>, sum_grid_block<BITS, 4>,
#if defined(__AVX512F__)
    sum_grid_block<BITS, 5>, sum_grid_block<BITS, 6>, sum_grid_block<BITS, 7>, sum_grid_block<BITS, 8>,
#endif
};

// sums[i][r][lane] of tiles tile..tile+count-1, in blocks of equal size whose sums fit the registers.
template <int BITS>
inline void sum_grid_tiles(const Matrix& m, int64_t tile, int count, const bf16* x, int64_t stride, int64_t rows,
                           float* sums) {
    constexpr int64_t MOST = sizeof(SUM_GRID<BITS>) / sizeof(SumGrid);
    const int64_t blocks = (rows + MOST - 1) / MOST, size = (rows + blocks - 1) / blocks;
    for (int64_t row = 0; row < rows; row += size) {
        const int64_t some = row + size <= rows ? size : rows - row;
        for (int i = 0; i < count; ++i)
            SUM_GRID<BITS>[some - 1](m, tile + i, x + row * stride, stride, sums + (i * rows + row) * LANES);
    }
}

}  // namespace
