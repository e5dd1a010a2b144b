// Sums of weights in four bits: codes into sixteen bytes, times a scale for each output and 64 inputs.
#pragma once
#include "linear_int8.h"

namespace {

// sums[m][r][lane] of R rows over M tiles. A group of a tile is eight times 64 bytes, four inputs of sixteen outputs
// in their low halves and the next four in the high ones.
template <int R, int M>
void sum_q4_block(const Matrix& m, int64_t tile, const bf16* x, int64_t stride, int64_t rows, float* sums) {
    const int64_t groups = int_groups(m.in), size = groups * INT_GROUP / 2 * LANES;
    const uint8_t* w = (const uint8_t*)m.weight + tile * size;
    const bf16* scales = (const bf16*)m.scales + tile * groups * LANES;
    const Table table(m.table);
    Floats total[M][R];
    for (int64_t g = 0; g < groups; ++g, scales += LANES) {
        Ints acc[M][R];
        const int8_t* bytes[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const IntRow row(x + r * stride, groups);
            bytes[r] = row.bytes + g * INT_GROUP;
#pragma GCC unroll 4
            for (int i = 0; i < M; ++i) acc[i][r] = Ints(row.shift[g]);
        }
        for (int64_t k = 0; k < INT_GROUP; k += 8, w += 4 * LANES) {
#pragma GCC unroll 4
            for (int i = 0; i < M; ++i) {
                Codes low, high;
                table.look_up(w + i * size, low, high);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    acc[i][r].step(low, Four(bytes[r] + k));
                    acc[i][r].step(high, Four(bytes[r] + k + 4));
                }
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const float scale = IntRow(x + r * stride, groups).scale[g];
#pragma GCC unroll 4
            for (int i = 0; i < M; ++i) total[i][r].add_scaled(acc[i][r], scale, scales + i * groups * LANES);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) total[i][r].put(sums + (i * rows + r) * LANES);
}

template <int R>
void sum_q4_rows(const Matrix& m, int64_t tile, int count, const bf16* x, int64_t stride, int64_t rows, float* sums) {
    constexpr int M = int_tiles(R);
    int i = 0;
    for (; i + M <= count; i += M) sum_q4_block<R, M>(m, tile + i, x, stride, rows, sums + i * rows * LANES);
    if constexpr (M > 1)
        for (; i < count; ++i) sum_q4_block<R, 1>(m, tile + i, x, stride, rows, sums + i * rows * LANES);
}

const SumInts SUM_Q4[] = {
    sum_q4_rows<1>, sum_q4_rows<2>, sum_q4_rows<3>, sum_q4_rows<4>,
#if defined(__AVX512F__)
    sum_q4_rows<5>, sum_q4_rows<6>, sum_q4_rows<7>, sum_q4_rows<8>,
    sum_q4_rows<9>, sum_q4_rows<10>, sum_q4_rows<11>, sum_q4_rows<12>,
#endif
};

inline void sum_q4_tiles(const Matrix& m, int64_t tile, int count, const bf16* x, int64_t stride, int64_t rows,
                         float* sums) {
    sum_in_blocks(SUM_Q4, m, tile, count, x, stride, rows, sums);
}

}  // namespace
