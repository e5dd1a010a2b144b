// Sums of weights that are codes of two, three or four bits into their tile's codebook (layouts LUT* in abi.h).
//
// Entries in bfloat16 are decoded to bfloat16 tiles in registers, and the sums have the bits of linear_bf16.h. Integer
// entries are decoded to bytes and multiplied with quantized inputs, as those of linear_q4.h.
#pragma once
#include "linear_q4.h"
#include "unrolled.h"

namespace {

constexpr int64_t LUT_AHEAD = 2048, MOST_LUT_AHEAD = 8192;  // bytes, as AHEAD and MOST_AHEAD

// The codes of one output and parity in a block of PAIRS pairs of inputs, in words of 16 bits.
template <int BITS>
struct LutWords {
    static constexpr int PAIRS = BITS == 3 ? 16 : 16 / BITS;
    static constexpr int64_t BYTES = BITS == 3 ? 192 : 64;

    // Bytes of a tile's codes.
    static int64_t size(int64_t pairs) { return (pairs + PAIRS - 1) / PAIRS * BYTES; }
    static Entries entries(const Matrix& m, int64_t tile) {
        return Entries((const bf16*)m.scales + (tile << BITS), Bits<BITS>());
    }
    // Words whose lowest bits are the code of pair J of a block; the bits above it are any.
    template <int J>
    static Words words(const uint8_t* p) {
        if constexpr (BITS != 3) return Words(p).template shifted<BITS * J>();
        else if constexpr (J < 15) return Words(p + J / 5 * 64).template shifted<J % 5 * 3>();
        else
            return Words(p).template shifted<15>() | Words(p + 64).template shifted<14, 2>() |
                   Words(p + 128).template shifted<13, 4>();
    }
    // Decodes a block to a tile of numbers.
    static void decode(const Entries& entries, const uint8_t* p, bf16* tile) {
        for_each_of<PAIRS>([&]<int J>() __attribute__((always_inline)) { entries.choose(words<J>(p), tile + 2 * LANES * J); });
    }
    // Decodes pairs 4 Q .. 4 Q + 3 of a block.
    template <int Q>
    static void choose(const Entries& entries, const uint8_t* p, Tile* tiles) {
        for_each_of<4>([&]<int J>() __attribute__((always_inline)) { entries.choose(words<4 * Q + J>(p), tiles[J]); });
    }
};

// Adds the products of up to four pairs of inputs.
template <int R, int M>
inline void step_pairs(const Tile (*tiles)[4], int64_t pairs, const bf16* x, int64_t stride, Sums (*acc)[R]) {
#pragma GCC unroll 4
    for (int64_t p = 0; p < pairs; ++p)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Inputs inputs(x + r * stride + 2 * p);
#pragma GCC unroll 4
            for (int i = 0; i < M; ++i) acc[i][r].step(tiles[i][p], inputs);
        }
}

// sums[m][r][lane] of R rows over M tiles; at the end of the tiles it prefetches the beginning of the M that follow.
template <int BITS, int R, int M>
void sum_lut_block(const Matrix& m, int64_t tile, const bf16* x, int64_t stride, int64_t rows, float* sums) {
    using Block = LutWords<BITS>;
    const int64_t pairs = (m.in + 1) / 2, size = Block::size(pairs);
    const int64_t near = size <= LUT_AHEAD || size * M <= MOST_LUT_AHEAD ? size : LUT_AHEAD;
    const uint8_t* w = (const uint8_t*)m.weight + tile * size;
    const uint8_t* const turn = w + size - near;
    Entries entries[M];
    for (int i = 0; i < M; ++i) entries[i] = Block::entries(m, tile + i);
    Sums acc[M][R];
    for (int64_t first = 0; first < pairs; first += Block::PAIRS, w += Block::BYTES) {
        const int64_t ahead = w < turn ? near : near + (M - 1) * size;
#pragma GCC unroll 4
        for (int i = 0; i < M; ++i)
            for (int64_t line = 0; line < Block::BYTES; line += 64) __builtin_prefetch(w + i * size + ahead + line);
        for_each_of<Block::PAIRS / 4>([&]<int Q>() __attribute__((always_inline)) {
            const int64_t p = first + 4 * Q;
            if (Q > 0 && p >= pairs) return;
            Tile tiles[M][4];
#pragma GCC unroll 4
            for (int i = 0; i < M; ++i) Block::template choose<Q>(entries[i], w + i * size, tiles[i]);
            if (p + 4 <= pairs) step_pairs<R, M>(tiles, 4, x + 2 * p, stride, acc);
            else step_pairs<R, M>(tiles, pairs - p, x + 2 * p, stride, acc);
        });
    }
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) acc[i][r].put(sums + (i * rows + r) * LANES);
}

template <int BITS, int R>
void sum_lut_rows(const Matrix& m, int64_t tile, int count, const bf16* x, int64_t stride, int64_t rows, float* sums) {
    constexpr int M = 4 * R <= MAX_LUT_SUMS ? 4 : 2 * R <= MAX_LUT_SUMS ? 2 : 1;
    int i = 0;
    for (; i + M <= count; i += M) sum_lut_block<BITS, R, M>(m, tile + i, x, stride, rows, sums + i * rows * LANES);
    if constexpr (M > 1)
        for (; i < count; ++i) sum_lut_block<BITS, R, 1>(m, tile + i, x, stride, rows, sums + i * rows * LANES);
}

using SumLut = void (*)(const Matrix&, int64_t, int, const bf16*, int64_t, int64_t, float*);

template <int BITS>
constexpr SumLut SUM_LUT[] = {
    sum_lut_rows<BITS, 1>, sum_lut_rows<BITS, 2>, sum_lut_rows<BITS, 3>, sum_lut_rows<BITS, 4>,
#if defined(__AVX512BF16__)
    sum_lut_rows<BITS, 5>, sum_lut_rows<BITS, 6>, sum_lut_rows<BITS, 7>, sum_lut_rows<BITS, 8>,
    sum_lut_rows<BITS, 9>, sum_lut_rows<BITS, 10>, sum_lut_rows<BITS, 11>, sum_lut_rows<BITS, 12>,
#endif
};

// sums[i][r][lane] of tiles tile..tile+count-1, for at most MAX_ROWS rows.
template <int BITS>
inline void sum_lut_tiles(const Matrix& m, int64_t tile, int count, const bf16* x, int64_t stride, int64_t rows,
                          float* sums) {
    SUM_LUT<BITS>[rows - 1](m, tile, count, x, stride, rows, sums);
}

// Codes into integers: a format for sum_int_block, with a table for each tile and scales as Q4 has them.
template <int BITS>
struct IntPalette {
    static constexpr bool IS_SIGNED = false;
    static constexpr int64_t BYTES = INT_GROUP * LANES / 8 * BITS;
    static constexpr int PARTS = BITS == 3 ? 8 : 8 / BITS;
    Table table;
    const bf16* scales;
    IntPalette(const Matrix& m, int64_t tile, int64_t groups)
        : table(m.table + tile * 16, 128), scales((const bf16*)m.scales + tile * groups * LANES) {}
    // Bytes whose lowest bits are the codes of step P of a block; the bits above them are any.
    template <int P>
    static Words words(const uint8_t* p) {
        if constexpr (BITS != 3) return Words(p).template shifted<BITS * P>();
        else if constexpr (P < 6) return Words(p + P / 2 * 64).template shifted<P % 2 * 3>();
        else
            return Words(p + (P - 6) * 64).template shifted<6, 0x0303>() |
                   Words(p + 128).template shifted<P - 2, 0x0404>();
    }
    template <int P>
    Codes part(const uint8_t* p) const {
        return table.chosen(words<P>(p));
    }
    void fetch(int64_t g) const { __builtin_prefetch(scales + (g + INT_AHEAD / BYTES) * LANES); }
    Floats scales_of(int64_t g) const { return Floats(scales + g * LANES); }
    void add(Floats& total, const Ints& ints, float scale, const Floats& own) const { total.add(ints, scale, own); }
    void put(const Floats& total, float* p) const { total.put(p); }
};

}  // namespace
