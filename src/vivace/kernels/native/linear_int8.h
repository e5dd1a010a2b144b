// Sums of quantized weights. The inputs of a row are quantized to eight bits with a scale for each group of 64. Sums of
// products within a group are exact integers; groups are scaled and added in order, independent of the other rows.
#pragma once
#include "linear_bf16.h"
#include "unrolled.h"

namespace {

inline int64_t int_groups(int64_t in) { return (in + INT_GROUP - 1) / INT_GROUP; }

// A quantized row of inputs in working space: bytes, scales, shifts.
struct IntRow {
    const int8_t* bytes;   // first, so that the 64 bytes of a group are one line of the cache
    const float* scale;    // per group
    const int32_t* shift;  // per group: -128 times the sum of its bytes
    IntRow(const bf16* row, int64_t groups)
        : bytes((const int8_t*)row),
          scale((const float*)(bytes + groups * INT_GROUP)),
          shift((const int32_t*)(scale + groups)) {}
};

// bytes = round(x / scale) with scale = max |x| / 127 over a group; a group below 1e-30 becomes zero. Sums of bytes are
// exact: at most 64 * 127 = 8,128. Where an input is infinite, or no number, the scale of its group is no number, nor is
// any output: the largest of a vector's numbers alone would not show it.
void prepare_int_row(const bf16* x, int64_t in, bf16* row) {
    const int64_t groups = int_groups(in);
    int8_t* bytes = (int8_t*)row;
    float* scales = (float*)(bytes + groups * INT_GROUP);
    int32_t* shifts = (int32_t*)(scales + groups);
    for (int64_t g = 0; g < groups; ++g, bytes += INT_GROUP) {
        const int64_t first = g * INT_GROUP, count = in - first < INT_GROUP ? in - first : INT_GROUP;
        Vec values[INT_GROUP / WIDTH], most = broadcast(0), sum = broadcast(0), zero = broadcast(0);
        for (int64_t i = 0; i < INT_GROUP / WIDTH; ++i) {
            const int64_t left = count - i * WIDTH;
            values[i] = left <= 0 ? broadcast(0) : load_some(x + first + i * WIDTH, left < WIDTH ? left : WIDTH);
            most = max(most, max(values[i], sub(broadcast(0), values[i])));
            zero = fma(values[i], broadcast(0), zero);
        }
        const float size = max_of(most) + sum_of(zero);
        const bool is_nothing = size < 1e-30f, is_number = size == size;
        const Vec factor = broadcast(is_nothing ? 0 : 127.0f / size);
        for (int64_t i = 0; i < INT_GROUP / WIDTH; ++i) {
            const Vec whole = is_number ? nearest(mul(values[i], factor)) : broadcast(0);
            sum = add(sum, whole);
            store_bytes(bytes + i * WIDTH, whole);
        }
        scales[g] = is_nothing ? 0 : size / 127.0f;
        shifts[g] = -128 * (int32_t)sum_of(sum);
    }
}

// Bytes by which weights are prefetched, across the ends of tiles. One stream, tile after tile, is read faster than
// several side by side, even for few rows (except on processors with AMX: MAX_INT_STREAMS).
constexpr int64_t INT_AHEAD = 4096;

// Float totals of sixteen outputs.
struct Floats {
    Vec parts[LANES / WIDTH];
    Floats() {
        for (Vec& part : parts) part = broadcast(0);
    }
    explicit Floats(const bf16* p) {
        for (int i = 0; i < LANES / WIDTH; ++i) parts[i] = load(p + i * WIDTH);
    }
    void add(const Ints& ints, float scale) {
        for (int i = 0; i < LANES / WIDTH; ++i) parts[i] = fma(ints.part(i), broadcast(scale), parts[i]);
    }
    void add(const Ints& ints, float scale, const Floats& scales) {
        for (int i = 0; i < LANES / WIDTH; ++i)
            parts[i] = fma(ints.part(i), mul(scales.parts[i], broadcast(scale)), parts[i]);
    }
    void add(const Floats& factors, float scale) {
        for (int i = 0; i < LANES / WIDTH; ++i) parts[i] = fma(factors.parts[i], broadcast(scale), parts[i]);
    }
    void add(const Floats& values, const Floats& factors) {
        for (int i = 0; i < LANES / WIDTH; ++i) parts[i] = fma(values.parts[i], factors.parts[i], parts[i]);
    }
    void put(float* p) const {
        for (int i = 0; i < LANES / WIDTH; ++i) store(p + i * WIDTH, parts[i]);
    }
    void put_scaled(float* p, const float* scales) const {
        for (int i = 0; i < LANES / WIDTH; ++i) store(p + i * WIDTH, mul(parts[i], load(scales + i * WIDTH)));
    }
};

// Whether a format decodes its blocks part by part; otherwise it decodes a line of 64 bytes at once.
template <class Kind>
constexpr bool HAS_PARTS = requires(const Kind& kind, const uint8_t* p) { kind.template part<0>(p); };

// Adds the products of a group of inputs for R rows and M tiles whose codes are decoded part by part, and prefetches
// what lies `ahead`; returns the bytes of a group.
template <class Kind, int R, int M>
inline int64_t add_parts(const Matrix& m, int64_t tile, const uint8_t* w, int64_t ahead, const int8_t* const* bytes,
                         Ints (*acc)[R]) {
    constexpr int64_t BLOCK = Kind::BYTES * Kind::PARTS * 4 / INT_GROUP;
    const int64_t groups = int_groups(m.in), size = groups * Kind::BYTES;
    for (int64_t k = 0; k < INT_GROUP; k += 4 * Kind::PARTS, w += BLOCK)
#pragma GCC unroll 4
        for (int i = 0; i < M; ++i) {
            const Kind kind(m, tile + i, groups);
            for (int64_t line = 0; line < BLOCK; line += 64) __builtin_prefetch(w + i * size + ahead + line);
            for_each_of<Kind::PARTS>([&]<int P>() __attribute__((always_inline)) {
                const Codes codes = kind.template part<P>(w + i * size);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) acc[i][r].step(codes, bytes[r] + k + 4 * P);
            });
        }
    return Kind::BYTES;
}

// sums[m][r][lane] of R rows over M tiles. Kind is a format: how a group is decoded and what its sums are scaled by.
template <class Kind, int R, int M>
void sum_int_block(const Matrix& m, int64_t tile, const bf16* x, int64_t stride, int64_t rows, float* sums) {
    const int64_t groups = int_groups(m.in), size = groups * Kind::BYTES;
    const int64_t ahead = M == 1 ? INT_AHEAD : size < INT_AHEAD ? size : INT_AHEAD;
    const uint8_t* w = (const uint8_t*)m.weight + tile * size;
    const uint8_t* const turn = w + size - ahead;  // from here on, the beginning of the next M tiles is prefetched
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
#pragma GCC unroll 4
        for (int i = 0; i < M; ++i) Kind(m, tile + i, groups).fetch(g);
        if constexpr (HAS_PARTS<Kind>) w += add_parts<Kind, R, M>(m, tile, w, ahead + (w < turn ? 0 : (M - 1) * size), bytes, acc);
        else for (int64_t k = 0; k < INT_GROUP; k += 4 * Kind::PARTS, w += 64)
#pragma GCC unroll 4
            for (int i = 0; i < M; ++i) {
                __builtin_prefetch(w + i * size + ahead + (w < turn ? 0 : (M - 1) * size));
                Codes codes[Kind::PARTS];
                Kind(m, tile + i, groups).read(w + i * size, codes);
#pragma GCC unroll 2
                for (int part = 0; part < Kind::PARTS; ++part)
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r) acc[i][r].step(codes[part], bytes[r] + k + 4 * part);
            }
#pragma GCC unroll 4
        for (int i = 0; i < M; ++i) {
            const Kind kind(m, tile + i, groups);
            const auto scales = kind.scales_of(g);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) kind.add(total[i][r], acc[i][r], IntRow(x + r * stride, groups).scale[g], scales);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) Kind(m, tile + i, groups).put(total[i][r], sums + (i * rows + r) * LANES);
}

template <class Kind, int R>
void sum_int_rows(const Matrix& m, int64_t tile, int count, const bf16* x, int64_t stride, int64_t rows, float* sums) {
    constexpr int M = 4 * R <= MAX_INT_STREAMS ? 4 : 2 * R <= MAX_INT_STREAMS ? 2 : 1;
    int i = 0;
    for (; i + M <= count; i += M) sum_int_block<Kind, R, M>(m, tile + i, x, stride, rows, sums + i * rows * LANES);
    if constexpr (M > 1)
        for (; i < count; ++i) sum_int_block<Kind, R, 1>(m, tile + i, x, stride, rows, sums + i * rows * LANES);
}

using SumInts = void (*)(const Matrix&, int64_t, int, const bf16*, int64_t, int64_t, float*);

template <class Kind>
constexpr SumInts SUM_INTS[] = {
    sum_int_rows<Kind, 1>, sum_int_rows<Kind, 2>, sum_int_rows<Kind, 3>, sum_int_rows<Kind, 4>,
#if defined(__AVX512F__)
    sum_int_rows<Kind, 5>, sum_int_rows<Kind, 6>, sum_int_rows<Kind, 7>, sum_int_rows<Kind, 8>,
    sum_int_rows<Kind, 9>, sum_int_rows<Kind, 10>, sum_int_rows<Kind, 11>, sum_int_rows<Kind, 12>,
#endif
};

// The sums of all rows, in blocks of equal size whose sums fit the registers.
template <class Kind>
inline void sum_int_tiles(const Matrix& m, int64_t tile, int count, const bf16* x, int64_t stride, int64_t rows,
                          float* sums) {
    const int64_t blocks = (rows + MAX_INT_ROWS - 1) / MAX_INT_ROWS, size = (rows + blocks - 1) / blocks;
    for (int64_t row = 0; row < rows; row += size) {
        const int64_t some = row + size <= rows ? size : rows - row;
        SUM_INTS<Kind>[some - 1](m, tile, count, x + row * stride, stride, rows, sums + row * LANES);
    }
}

// INT8: a group of a tile is sixteen times 64 bytes, each four inputs of sixteen outputs; one scale for each output.
struct Int8Tiles {
    static constexpr int64_t BYTES = INT_GROUP * LANES;
    static constexpr int PARTS = 1;
    static constexpr bool IS_SIGNED = false;
    const float* scales;
    Int8Tiles(const Matrix& m, int64_t tile, int64_t) : scales((const float*)m.scales + tile * LANES) {}
    void read(const uint8_t* p, Codes* codes) const { *codes = Codes(p); }
    void fetch(int64_t) const {}
    int scales_of(int64_t) const { return 0; }
    void add(Floats& total, const Ints& ints, float scale, int) const { total.add(ints, scale); }
    void put(const Floats& total, float* p) const { total.put_scaled(p, scales); }
};

}  // namespace
