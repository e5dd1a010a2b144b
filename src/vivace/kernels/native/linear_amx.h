// Sums in tile registers, whatever the weights lie in. A row's sums are made in the same order alone and among others,
// and all formats of bfloat16 weights give the same bits; integer products are exact, so theirs are any body's.
#pragma once
#include "linear_exact.h"
#include "linear_lut4.h"
#include "linear_q4.h"
#include "tiles_amx.h"

namespace {

constexpr int64_t BLOCK_ROWS = TILE_ROWS;

// Rows of inputs of a call.
struct Rows {
    const bf16* x;
    int64_t stride, count;
};

// Sums of M tiles of outputs, in their registers.
template <int M>
struct TileSums {
    TileSums() {
        for_each_of<M>([]<int I>() { clear_tile<SUMS + I>(); });
    }
    // The pairs of inputs from `pair` on, whose weights for output tile i lie at weights(i).
    template <class Weights>
    void step(const Rows& rows, int64_t pair, int64_t pairs, Weights weights) {
        if (pairs - pair >= TILE_PAIRS) multiply<INPUTS, WEIGHTS>(rows, pair, weights);
        else multiply<LAST_INPUTS, LAST_WEIGHTS>(rows, pair, weights);
    }
    void put(float* sums, int64_t rows) const {
        for_each_of<M>([&]<int I>() { store_tile<SUMS + I>(sums + I * rows * LANES); });
    }

private:
    template <int X, int W, class Weights>
    void multiply(const Rows& rows, int64_t pair, Weights weights) {
        load_tile<X>(rows.x + 2 * pair, rows.stride * (int64_t)sizeof(bf16));
        for_each_of<M>([&]<int I>() {
            load_tile<W>(weights(I), 64);
            multiply_tiles<SUMS + I, X, W>();
        });
    }
};

// Weights of M tiles of outputs that are put together before they are multiplied.
template <int M>
struct Assembled {
    alignas(64) bf16 tiles[M][TILE_SIZE];
    void set(int i, int64_t pair, const Tile& weights) {
        _mm512_store_si512(tiles[i] + pair % TILE_PAIRS * 2 * LANES, (__m512i)weights.pair);
    }
    const bf16* operator()(int i) const { return tiles[i]; }
};

template <int M>
void sum_tiles_amx(const Matrix& m, int64_t tile, const Rows& rows, float* sums) {
    const int64_t pairs = (m.in + 1) / 2, size = pairs * 2 * LANES, near = pairs < AHEAD ? size : AHEAD * 2 * LANES;
    const bf16* w = m.weight + tile * size;
    TileSums<M> acc;
    for (int64_t pair = 0; pair < pairs; pair += TILE_PAIRS) {
        const int64_t at = pair * 2 * LANES, ahead = at + near + (at + near < size ? 0 : (M - 1) * size);
        acc.step(rows, pair, pairs, [&](int i) {
            if (pairs - pair >= TILE_PAIRS) approach(w + i * size + at, w + i * size + ahead);
            return w + i * size + at;
        });
    }
    acc.put(sums, rows.count);
}

template <int M>
void sum_lut4_amx(const Matrix& m, int64_t tile, const Rows& rows, float* sums) {
    const int64_t pairs = (m.in + 1) / 2, size = (pairs + 3) / 4 * 64;
    const uint8_t* w = (const uint8_t*)m.weight + tile * size;
    Entries entries[M];
    for (int i = 0; i < M; ++i) entries[i] = Entries((const bf16*)m.scales + (tile + i) * 16);
    TileSums<M> acc;
    Assembled<M> whole;
    for (int64_t pair = 0; pair < pairs; pair += TILE_PAIRS) {
        for (int i = 0; i < M; ++i)
            for (int64_t p = pair; p < pairs && p < pair + TILE_PAIRS; p += 4) {
                const uint8_t* codes = w + i * size + p * 16;
                __builtin_prefetch(codes + LUT_AHEAD);
                Tile four[4];
                entries[i].choose(codes, four);
                for (int j = 0; j < 4; ++j) whole.set(i, p + j, four[j]);
            }
        acc.step(rows, pair, pairs, whole);
    }
    acc.put(sums, rows.count);
}

void sum_exact_amx(const Matrix& m, int64_t tile, const Rows& rows, float* sums) {
    const int64_t pairs = (m.in + 1) / 2;
    TileSums<GROUP> acc;
    Assembled<GROUP> whole;
    for_steps<GROUP, 0>(m, tile / GROUP, pairs, [&](int64_t pair, const Tile* tiles) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int i = 0; i < GROUP; ++i) whole.set(i, pair, tiles[i]);
        if (pair % TILE_PAIRS == TILE_PAIRS - 1 || pair == pairs - 1)
            acc.step(rows, pair / TILE_PAIRS * TILE_PAIRS, pairs, whole);
    });
    acc.put(sums, rows.count);
}

// Rows from which on integer products are faster in tiles.
constexpr int64_t MIN_INT_ROWS = 3;

// The weights of a group, 64 inputs of sixteen outputs, a byte each.
template <class Kind>
inline const void* int_tile(const Kind& kind, const uint8_t* w, uint8_t* room) {
    if constexpr (Kind::PARTS == 1) {
        approach(w, w + INT_AHEAD);
        return w;
    }
    for (int64_t at = 0; at < INT_GROUP * LANES; at += 64 * Kind::PARTS, w += 64) {
        __builtin_prefetch(w + INT_AHEAD);
        Codes codes[Kind::PARTS];
        kind.read(w, codes);
        for (int part = 0; part < Kind::PARTS; ++part) _mm512_store_si512(room + at + 64 * part, codes[part].bytes);
    }
    return room;
}

// sums[i][r][lane] of M tiles, as sum_int_tile makes them.
template <class Kind, int M>
void sum_ints_amx(const Matrix& m, int64_t tile, const Rows& rows, float* sums) {
    const int64_t groups = int_groups(m.in), size = groups * Kind::BYTES;
    const uint8_t* w = (const uint8_t*)m.weight + tile * size;
    Floats total[M][TILE_ROWS];
    alignas(64) int32_t products[M][TILE_ROWS][LANES];
    alignas(64) uint8_t room[M][INT_GROUP * LANES];
    for (int64_t g = 0; g < groups; ++g, w += Kind::BYTES) {
        load_tile<INPUTS>(IntRow(rows.x, groups).bytes + g * INT_GROUP, rows.stride * (int64_t)sizeof(bf16));
        for_each_of<M>([&]<int I>() {
            const Kind kind(m, tile + I, groups);
            kind.fetch(g);
            clear_tile<SUMS + I>();
            load_tile<WEIGHTS>(int_tile(kind, w + I * size, room[I]), 64);
            multiply_int_tiles<SUMS + I, INPUTS, WEIGHTS>();
            store_tile<SUMS + I>(products[I]);
        });
        for (int i = 0; i < M; ++i) {
            const Kind kind(m, tile + i, groups);
            const auto scales = kind.scales_of(g);
            for (int64_t r = 0; r < rows.count; ++r) {
                const IntRow row(rows.x + r * rows.stride, groups);
                const Ints sum(_mm512_add_epi32(_mm512_set1_epi32(row.shift[g]), _mm512_load_si512(products[i][r])));
                kind.add(total[i][r], sum, row.scale[g], scales);
            }
        }
    }
    for (int i = 0; i < M; ++i)
        for (int64_t r = 0; r < rows.count; ++r)
            Kind(m, tile + i, groups).put(total[i][r], sums + (i * rows.count + r) * LANES);
}

using SumGroup = void (*)(const Matrix&, int64_t, const Rows&, float*);
const SumGroup SUM_TILES_AMX[] = {sum_tiles_amx<1>, sum_tiles_amx<2>, sum_tiles_amx<3>, sum_tiles_amx<4>};
const SumGroup SUM_LUT4_AMX[] = {sum_lut4_amx<1>, sum_lut4_amx<2>, sum_lut4_amx<3>, sum_lut4_amx<4>};
template <class Kind>
constexpr SumGroup SUM_INTS_AMX[] = {sum_ints_amx<Kind, 1>, sum_ints_amx<Kind, 2>, sum_ints_amx<Kind, 3>,
                                     sum_ints_amx<Kind, 4>};

// What makes the sums of a group of `count` tiles; null where dot products in registers do.
inline SumGroup sum_in_tiles(const Matrix& m, int count, int64_t rows) {
    if (is_low_bit(m) && rows < MIN_INT_ROWS) return nullptr;
    switch ((Format)m.format) {
        case TILES:
            return SUM_TILES_AMX[count - 1];
        case INT8:
            return SUM_INTS_AMX<Int8Tiles>[count - 1];
        case Q4:
            return SUM_INTS_AMX<Q4Tiles>[count - 1];
        case LUT4:
            return SUM_LUT4_AMX[count - 1];
        case EXACT12:
            return sum_exact_amx;
        default:
            return nullptr;
    }
}

// Makes them and is true, or leaves them to registers.
inline bool try_tiles(TileUnit& unit, const Matrix& m, int64_t tile, int count, const bf16* x, int64_t stride,
                      int64_t rows, float* sums) {
    const SumGroup sum = sum_in_tiles(m, count, rows);
    if (sum == nullptr) return false;
    unit.shape(rows, is_low_bit(m) ? 0 : (m.in + 1) / 2 % TILE_PAIRS);
    sum(m, tile, {x, stride, rows}, sums);
    return true;
}

}  // namespace
