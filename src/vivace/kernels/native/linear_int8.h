// Sums of weights in eight bits. A row's inputs become eight bits as well, with a scale for each 64 of them;
// the products are exact integers, scaled and added group by group in order, whatever stands beside the row.
#pragma once
#include "linear_bf16.h"

namespace {

inline int64_t int_groups(int64_t in) { return (in + INT_GROUP - 1) / INT_GROUP; }

// A row ready for integer products: scales, shifts, bytes.
struct IntRow {
    const float* scale;    // per group
    const int32_t* shift;  // per group: -128 times the sum of its bytes
    const int8_t* bytes;
    IntRow(const bf16* row, int64_t groups)
        : scale((const float*)row), shift((const int32_t*)(scale + groups)), bytes((const int8_t*)(shift + groups)) {}
};

// bytes = round(x / scale), scale = max |x| / 127 over a group; a group of next to nothing is nothing.
void prepare_int_row(const bf16* x, int64_t in, bf16* row) {
    const int64_t groups = int_groups(in);
    float* scales = (float*)row;
    int32_t* shifts = (int32_t*)(scales + groups);
    int8_t* bytes = (int8_t*)(shifts + groups);
    for (int64_t g = 0; g < groups; ++g, bytes += INT_GROUP) {
        const int64_t first = g * INT_GROUP, count = in - first < INT_GROUP ? in - first : INT_GROUP;
        Vec values[INT_GROUP / WIDTH], most = broadcast(0), sum = broadcast(0);
        for (int64_t i = 0; i < INT_GROUP / WIDTH; ++i) {
            const int64_t left = count - i * WIDTH;
            values[i] = left <= 0 ? broadcast(0) : load_some(x + first + i * WIDTH, left < WIDTH ? left : WIDTH);
            most = max(most, max(values[i], sub(broadcast(0), values[i])));
        }
        const float size = max_of(most);
        const bool is_nothing = size < 1e-30f;
        const Vec factor = broadcast(is_nothing ? 0 : 127.0f / size);
        for (int64_t i = 0; i < INT_GROUP / WIDTH; ++i) {
            const Vec whole = nearest(mul(values[i], factor));
            sum = add(sum, whole);
            store_bytes(bytes + i * WIDTH, whole);
        }
        scales[g] = is_nothing ? 0 : size / 127.0f;
        shifts[g] = -128 * (int32_t)sum_of(sum);
    }
}

// Sixteen floats.
struct Floats {
    Vec parts[LANES / WIDTH];
    Floats() {
        for (Vec& part : parts) part = broadcast(0);
    }
    void add_scaled(const Ints& ints, Vec scale) {
        for (int i = 0; i < LANES / WIDTH; ++i) parts[i] = fma(ints.part(i), scale, parts[i]);
    }
    void add_scaled(const Ints& ints, float scale, const bf16* scales) {
        for (int i = 0; i < LANES / WIDTH; ++i) {
            const Vec both = mul(load(scales + i * WIDTH), broadcast(scale));
            parts[i] = fma(ints.part(i), both, parts[i]);
        }
    }
    void put(float* p) const {
        for (int i = 0; i < LANES / WIDTH; ++i) store(p + i * WIDTH, parts[i]);
    }
    void put_scaled(float* p, const float* scales) const {
        for (int i = 0; i < LANES / WIDTH; ++i) store(p + i * WIDTH, mul(parts[i], load(scales + i * WIDTH)));
    }
};

// Tiles that are summed together for this many rows: enough chains of sums to keep the multipliers busy, no more.
constexpr int int_tiles(int rows) {
    if (rows > 2) return 1;
    return 4 * rows <= MAX_INT_SUMS ? 4 : 2 * rows <= MAX_INT_SUMS ? 2 : 1;
}

// sums[m][r][lane] of R rows over M tiles. A group of a tile is sixteen times 64 bytes, four inputs of sixteen outputs.
template <int R, int M>
void sum_int8_block(const Matrix& m, int64_t tile, const bf16* x, int64_t stride, int64_t rows, float* sums) {
    const int64_t groups = int_groups(m.in), size = groups * INT_GROUP * LANES;
    const uint8_t* w = (const uint8_t*)m.weight + tile * size;
    Floats total[M][R];
    for (int64_t g = 0; g < groups; ++g) {
        Ints acc[M][R];
        const int8_t* bytes[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const IntRow row(x + r * stride, groups);
            bytes[r] = row.bytes + g * INT_GROUP;
#pragma GCC unroll 4
            for (int i = 0; i < M; ++i) acc[i][r] = Ints(row.shift[g]);
        }
        for (int64_t k = 0; k < INT_GROUP; k += 4, w += 4 * LANES) {
            Codes codes[M];
#pragma GCC unroll 4
            for (int i = 0; i < M; ++i) codes[i] = Codes(w + i * size);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Four four(bytes[r] + k);
#pragma GCC unroll 4
                for (int i = 0; i < M; ++i) acc[i][r].step(codes[i], four);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Vec scale = broadcast(IntRow(x + r * stride, groups).scale[g]);
#pragma GCC unroll 4
            for (int i = 0; i < M; ++i) total[i][r].add_scaled(acc[i][r], scale);
        }
    }
    const float* scales = (const float*)m.scales + tile * LANES;
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) total[i][r].put_scaled(sums + (i * rows + r) * LANES, scales + i * LANES);
}

template <int R>
void sum_int8_rows(const Matrix& m, int64_t tile, int count, const bf16* x, int64_t stride, int64_t rows, float* sums) {
    constexpr int M = int_tiles(R);
    int i = 0;
    for (; i + M <= count; i += M) sum_int8_block<R, M>(m, tile + i, x, stride, rows, sums + i * rows * LANES);
    if constexpr (M > 1)
        for (; i < count; ++i) sum_int8_block<R, 1>(m, tile + i, x, stride, rows, sums + i * rows * LANES);
}

using SumInts = void (*)(const Matrix&, int64_t, int, const bf16*, int64_t, int64_t, float*);

// All rows in blocks of equal size that fit the registers.
inline void sum_in_blocks(const SumInts* bodies, const Matrix& m, int64_t tile, int count, const bf16* x, int64_t stride,
                          int64_t rows, float* sums) {
    const int64_t blocks = (rows + MAX_INT_ROWS - 1) / MAX_INT_ROWS, size = (rows + blocks - 1) / blocks;
    for (int64_t row = 0; row < rows; row += size) {
        const int64_t some = row + size <= rows ? size : rows - row;
        bodies[some - 1](m, tile, count, x + row * stride, stride, rows, sums + row * LANES);
    }
}

const SumInts SUM_INT8[] = {
    sum_int8_rows<1>, sum_int8_rows<2>, sum_int8_rows<3>, sum_int8_rows<4>,
#if defined(__AVX512F__)
    sum_int8_rows<5>, sum_int8_rows<6>, sum_int8_rows<7>, sum_int8_rows<8>,
    sum_int8_rows<9>, sum_int8_rows<10>, sum_int8_rows<11>, sum_int8_rows<12>,
#endif
};

inline void sum_int8_tiles(const Matrix& m, int64_t tile, int count, const bf16* x, int64_t stride, int64_t rows,
                           float* sums) {
    sum_in_blocks(SUM_INT8, m, tile, count, x, stride, rows, sums);
}

}  // namespace
