// Sums of the codes of a file: integers times a scale for each output and 16, 32 or 64 inputs, less the code that stands
// for zero, plus an offset. Inputs are quantized as for INT8 and Q4, with a scale for each group of 64. Sums of products
// within a part of a group are exact integers, and so are sums of inputs, which zeros and offsets are multiplied with;
// parts are scaled and added in order.
#pragma once
#include "linear_q4.h"

namespace {

constexpr int64_t QUARTER = INT_GROUP / 4;  // the fewest inputs that share a scale

// A quantized row of inputs in working space: bytes, scales, and sums of the bytes of each quarter of a group.
struct GridRow {
    const int8_t* bytes;
    const float* scale;   // per group
    const int16_t* sums;  // per quarter, at most 16 * 127 = 2,032
    GridRow(const bf16* row, int64_t groups)
        : bytes((const int8_t*)row),
          scale((const float*)(bytes + groups * INT_GROUP)),
          sums((const int16_t*)(scale + groups)) {}
};

void prepare_grid_row(const Matrix& m, const bf16* x, bf16* row) {
    const GridSide& side = *(const GridSide*)m.scales;
    const int32_t* order = side.at<int32_t>(side.order);
    const int64_t groups = int_groups(m.in);
    int8_t* bytes = (int8_t*)row;
    float* scales = (float*)(bytes + groups * INT_GROUP);
    int16_t* sums = (int16_t*)(scales + groups);
    bf16 taken[INT_GROUP];
    for (int64_t g = 0; g < groups; ++g, bytes += INT_GROUP) {
        const int64_t first = g * INT_GROUP, count = m.in - first < INT_GROUP ? m.in - first : INT_GROUP;
        const bf16* from = x + first;
        if (side.is_ordered) {
            for (int64_t i = 0; i < count; ++i) taken[i] = x[order[first + i]];
            from = taken;
        }
        Vec values[INT_GROUP / WIDTH], most = broadcast(0);
        for (int64_t i = 0; i < INT_GROUP / WIDTH; ++i) {
            const int64_t left = count - i * WIDTH;
            values[i] = left <= 0 ? broadcast(0) : load_some(from + i * WIDTH, left < WIDTH ? left : WIDTH);
            most = max(most, max(values[i], sub(broadcast(0), values[i])));
        }
        const float size = max_of(most);
        const bool is_nothing = size < 1e-30f;
        const Vec inverse = broadcast(is_nothing ? 0 : 127.0f / size);
        for (int64_t q = 0; q < 4; ++q) {
            Vec sum = broadcast(0);
            for (int64_t i = q * (QUARTER / WIDTH); i < (q + 1) * (QUARTER / WIDTH); ++i) {
                const Vec whole = nearest(mul(values[i], inverse));
                sum = add(sum, whole);
                store_bytes(bytes + i * WIDTH, whole);
            }
            sums[4 * g + q] = (int16_t)sum_of(sum);
        }
        scales[g] = is_nothing ? 0 : size / 127.0f;
    }
}

// One kind of number of the groups of a tile: scales or offsets, sixteen of each part of a group.
struct Factors {
    const int64_t kind;
    const uint8_t* values;
    const uint16_t* units;
    Factors(const GridSide& side, int64_t kind, int64_t values, int64_t units, int64_t tile, int64_t groups)
        : kind(kind), values(side.at<uint8_t>(values)), units(side.at<uint16_t>(units) + tile * ((groups + 3) / 4) * LANES) {
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
        for (int64_t quarter = 0; quarter < 4; quarter += quarters, ++part) {
            Ints acc[R];
            int32_t sum[R];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const int16_t* some = GridRow(x + r * stride, groups).sums + 4 * g + quarter;
                sum[r] = some[0];
                for (int64_t q = 1; q < quarters; ++q) sum[r] += some[q];
                acc[r] = Ints(-128 * sum[r]);
            }
            scales.fetch(part);
            if (has_offsets) offsets.fetch(part);
            for (int64_t q = quarter; q < quarter + quarters; ++q) {
                const int64_t first = g * INT_GROUP + q * QUARTER;
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
                            acc[r].step(codes[p], GridRow(x + r * stride, groups).bytes + first + 4 * (read * PARTS + p));
                }
            }
            const Floats own = scales.at(g, part);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) total[r].add(acc[r], GridRow(x + r * stride, groups).scale[g], own);
            if (has_zeros) {
                Floats zero;
                for (int i = 0; i < LANES / WIDTH; ++i)
                    zero.parts[i] = mul(own.parts[i], load_integers(zeros + part * LANES + i * WIDTH));
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) total[r].add(zero, GridRow(x + r * stride, groups).scale[g] * -(float)sum[r]);
            }
            if (has_offsets) {
                const Floats offset = offsets.at(g, part);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) total[r].add(offset, GridRow(x + r * stride, groups).scale[g] * (float)sum[r]);
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
    sum_grid_block<BITS, 9>, sum_grid_block<BITS, 10>, sum_grid_block<BITS, 11>, sum_grid_block<BITS, 12>,
#endif
};

// sums[i][r][lane] of tiles tile..tile+count-1, in blocks of equal size whose sums fit the registers.
template <int BITS>
inline void sum_grid_tiles(const Matrix& m, int64_t tile, int count, const bf16* x, int64_t stride, int64_t rows,
                           float* sums) {
    const int64_t blocks = (rows + MAX_INT_ROWS - 1) / MAX_INT_ROWS, size = (rows + blocks - 1) / blocks;
    for (int64_t row = 0; row < rows; row += size) {
        const int64_t some = row + size <= rows ? size : rows - row;
        for (int i = 0; i < count; ++i)
            SUM_GRID<BITS>[some - 1](m, tile + i, x + row * stride, stride, sums + (i * rows + row) * LANES);
    }
}

}  // namespace
