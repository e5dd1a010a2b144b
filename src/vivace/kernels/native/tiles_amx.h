// The tile registers of AMX, which multiply up to sixteen rows by sixteen outputs at a time.
//
// There are eight registers of sixteen rows of 64 bytes. The instructions are in assembly, since the intrinsics of GCC
// 12 do not tell the compiler which memory they read. PyTorch configures the same registers on the same thread for its
// own products, so each item configures what it needs and releases the registers when it ends.
#pragma once
#include "ints_avx512.h"
#include "unrolled.h"

namespace {

constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_PAIRS = 16;  // pairs of bfloat16 inputs in the 64 bytes of a register's row
constexpr int64_t TILE_SIZE = TILE_PAIRS * 2 * LANES;  // bfloat16 numbers of a whole tile of weights, one register

// Registers 0..3 hold the sums of four tiles of outputs, 4 and 5 inputs and weights of 16 pairs, 6 and 7 those of the
// last pairs where their number is not a multiple of 16: a register of fewer columns, or rows, multiplies no more than
// these.
constexpr int SUMS = 0, INPUTS = 4, WEIGHTS = 5, LAST_INPUTS = 6, LAST_WEIGHTS = 7;

// The memory operand of LDTILECFG: rows, and bytes of a row, of each register.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, unused[14] = {};
    uint16_t bytes[16] = {};  // bytes of a row
    uint8_t rows[16] = {};

    void set(int tile, int64_t height, int64_t width) { rows[tile] = (uint8_t)height, bytes[tile] = (uint16_t)width; }
};

// Configures the registers for an item and releases them when it ends.
class TileRegisters {
public:
    ~TileRegisters() {
        if (rows_ != 0) asm volatile("tilerelease");
    }

    // Configures for `rows` rows of inputs and `rest` pairs of inputs after those that fill whole tiles.
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
// Adds to each sum the products of the even inputs and of the odd inputs, each summed apart in float32.
template <int SUM, int X, int W>
inline void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(X), "i"(W));
}
// Adds products of signed inputs and weights, which have a sign or not.
template <bool IS_SIGNED, int SUM, int X, int W>
inline void multiply_int_tiles() {
    if constexpr (IS_SIGNED) asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(X), "i"(W));
    else asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(X), "i"(W));
}

// Reads a word of every line of M tiles of weights, `apart` bytes from each other, that are loaded next, and prefetches
// the lines that are `ahead`. Tile loads alone do not use the whole bandwidth of memory; plain loads do.
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
