// The tile registers of AMX: products of up to sixteen rows with sixteen outputs at a time.
//
// Instructions are written out, since compilers' intrinsics do not say which memory they read. PyTorch configures the
// same registers on the same thread for its own products, so each item sets what it needs and leaves nothing behind.
#pragma once
#include "ints_avx512.h"

namespace {

constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_PAIRS = 16;  // of inputs in bfloat16
constexpr int64_t TILE_SIZE = TILE_PAIRS * 2 * LANES;  // bfloat16 of a whole tile of weights

// Registers: sums of tiles of outputs from 0 on, whole tiles of inputs and weights, and those of the last pairs.
constexpr int SUMS = 0, INPUTS = 4, WEIGHTS = 5, LAST_INPUTS = 6, LAST_WEIGHTS = 7;

// What LDTILECFG reads.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, unused[14] = {};
    uint16_t bytes[16] = {};  // of a row
    uint8_t rows[16] = {};

    void set(int tile, int64_t height, int64_t width) { rows[tile] = (uint8_t)height, bytes[tile] = (uint16_t)width; }
};

// The registers while an item uses them.
class TileRegisters {
public:
    ~TileRegisters() {
        if (rows_ != 0) asm volatile("tilerelease");
    }

    // For `rows` rows of inputs, and matrices whose pairs of inputs leave `rest` beyond whole tiles.
    void shape(int64_t rows, int64_t rest) {
        if (rows == rows_ && rest == rest_) return;
        TileShapes shapes;
        for (int tile = SUMS; tile <= INPUTS; ++tile) shapes.set(tile, rows, 64);
        shapes.set(WEIGHTS, TILE_PAIRS, 64);
        if (rest != 0) shapes.set(LAST_INPUTS, rows, rest * 4), shapes.set(LAST_WEIGHTS, rest, 64);
        asm volatile("ldtilecfg %0" : : "m"(shapes));
        rows_ = rows, rest_ = rest;
    }

private:
    int64_t rows_ = 0, rest_ = 0;
};

template <int TILE>
inline void clear_tile() {
    asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
}
template <int TILE>
inline void load_tile(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
inline void store_tile(void* p) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"((int64_t)64), "i"(TILE) : "memory");
}
// Each sum: even products of the tile, odd ones, both added to what there is.
template <int SUM, int X, int W>
inline void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(X), "i"(W));
}
// Signed inputs times weights with a sign or without.
template <bool IS_SIGNED, int SUM, int X, int W>
inline void multiply_int_tiles() {
    if constexpr (IS_SIGNED) asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(X), "i"(W));
    else asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(X), "i"(W));
}

// use<0>() .. use<N - 1>(): registers are named by constants.
template <int N, class Use>
inline __attribute__((always_inline)) void for_each_of(Use use) {
    if constexpr (N > 1) for_each_of<N - 1>(use);
    use.template operator()<N - 1>();
}

// M whole tiles of weights, `apart` bytes from each other, are about to be loaded; those `ahead` of them are fetched. Tile
// loads by themselves do not keep memory busy, plain loads do.
template <int M>
inline __attribute__((always_inline)) void approach(const void* tiles, int64_t apart, int64_t ahead) {
#pragma GCC unroll 16
    for (int line = 0; line < 16; ++line)
#pragma GCC unroll 4
        for (int i = 0; i < M; ++i) {
            const char* p = (const char*)tiles + i * apart + 64 * line;
            __builtin_prefetch(p + ahead);
            asm volatile("movl (%0), %%eax" : : "r"(p) : "eax", "memory");
        }
}

}  // namespace
