// Sums in the tile registers of AMX, for every layout of weights. A row is summed in the same order alone and among
// others. The layouts of bfloat16 weights in tiles give the same bits as each other, and so do the row-major ones;
// integer products are exact, so they have the bits of every other body.
#pragma once
#include "linear_exact.h"
#include "linear_grid.h"
#include "linear_palette.h"
#include "tiles_amx.h"

namespace {

constexpr int64_t BLOCK_ROWS = TILE_ROWS;  // a tile register holds sixteen rows of inputs

// Rows of inputs, `stride` bfloat16 numbers apart.
struct Rows {
    const bf16* x;
    int64_t stride, count;
};

// Sums of M tiles of outputs in registers SUMS..SUMS+M-1. M <= 4: with four sums a register of inputs that was loaded
// is used four times, and the other four registers hold inputs, weights and the remainders of both.
template <int M>
struct TileSums {
    TileSums() {
        for_each_of<M>([]<int I>() { clear_tile<SUMS + I>(); });
    }
    // Adds the products of 16 pairs of inputs from `pair` on (fewer at the end); weights(i) are those of output tile i.
    template <class Weights>
    void step(const Rows& rows, int64_t pair, int64_t pairs, Weights weights) {
        for_each_of<M>([&]<int I>() { step_one<I>(rows, pair, pairs, weights(I), I == 0); });
    }
    // The same for output tile I alone; the first one loads the inputs for all.
    template <int I>
    void step_one(const Rows& rows, int64_t pair, int64_t pairs, const bf16* weights, bool is_first) {
        if (pairs - pair >= TILE_PAIRS) multiply<I, INPUTS, WEIGHTS>(rows, pair, weights, is_first);
        else multiply<I, LAST_INPUTS, LAST_WEIGHTS>(rows, pair, weights, is_first);
    }
    void put(float* sums, int64_t rows) const {
        for_each_of<M>([&]<int I>() { store_tile<SUMS + I>(sums + I * rows * LANES); });
    }

private:
    template <int I, int X, int W>
    void multiply(const Rows& rows, int64_t pair, const bf16* weights, bool is_first) {
        if (is_first) load_tile<X>(rows.x + 2 * pair, rows.stride * (int64_t)sizeof(bf16));
        load_tile<W>(weights, 64);
        multiply_tiles<SUMS + I, X, W>();
    }
};

// Buffers in which the weights of M tiles of outputs are decoded before they are loaded into a tile register.
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
        const bf16* const tiles = w + pair * 2 * LANES;
        const int64_t ahead = near + (pair * 2 * LANES + near < size ? 0 : (M - 1) * size);
        if (pairs - pair >= TILE_PAIRS) approach<M>(tiles, size * sizeof(bf16), ahead * sizeof(bf16));
        acc.step(rows, pair, pairs, [&](int i) { return tiles + i * size; });
    }
    acc.put(sums, rows.count);
}

template <int BITS, int M>
void sum_lut_amx(const Matrix& m, int64_t tile, const Rows& rows, float* sums) {
    using Words = LutWords<BITS>;
    const int64_t pairs = (m.in + 1) / 2, size = Words::size(pairs);
    const uint8_t* w = (const uint8_t*)m.weight + tile * size;
    Entries entries[M];
    for (int i = 0; i < M; ++i) entries[i] = Words::entries(m, tile + i);
    TileSums<M> acc;
    Assembled<M> whole;
    for (int64_t pair = 0; pair < pairs; pair += TILE_PAIRS) {
        for (int i = 0; i < M; ++i)
            for (int64_t p = pair; p < pairs && p < pair + TILE_PAIRS; p += Words::PAIRS) {
                const uint8_t* codes = w + i * size + p / Words::PAIRS * Words::BYTES;
                for (int64_t line = 0; line < Words::BYTES; line += 64) __builtin_prefetch(codes + LUT_AHEAD + line);
                for_each_of<Words::PAIRS / 4>([&]<int Q>() {
                    Tile four[4];
                    Words::template choose<Q>(entries[i], codes, four);
                    for (int j = 0; j < 4; ++j) whole.set(i, p + 4 * Q + j, four[j]);
                });
            }
        acc.step(rows, pair, pairs, whole);
    }
    acc.put(sums, rows.count);
}

// While weights of 16 pairs are decoded into one buffer, those of the 16 pairs before are multiplied from the other,
// one tile of outputs every TURN steps. Loading a tile register from memory that was just stored would stall, and
// decoding uses the vector units while the tile unit multiplies.
void sum_exact_amx(const Matrix& m, int64_t tile, const Rows& rows, float* sums) {
    constexpr int64_t TURN = TILE_PAIRS / GROUP;
    const int64_t pairs = (m.in + 1) / 2, last = (pairs - 1) / TILE_PAIRS * TILE_PAIRS;
    TileSums<GROUP> acc;
    Assembled<GROUP> whole[2];
    for_steps<GROUP, 0>(m, tile / GROUP, pairs, [&](int64_t pair, const Tile* tiles) __attribute__((always_inline)) {
        Assembled<GROUP>& now = whole[pair / TILE_PAIRS % 2];
#pragma GCC unroll 4
        for (int i = 0; i < GROUP; ++i) now.set(i, pair, tiles[i]);
        const int64_t before = pair / TILE_PAIRS * TILE_PAIRS - TILE_PAIRS;
        if (pair % TURN == 0 && before >= 0)
            for_each_of<GROUP>([&]<int I>() {
                if (pair % TILE_PAIRS == I * TURN)
                    acc.template step_one<I>(rows, before, pairs, whole[before / TILE_PAIRS % 2](I), I == 0);
            });
    });
    const int64_t done = (pairs - 1 - last) / TURN + 1;  // tiles of outputs that were multiplied during the last pairs
    for_each_of<GROUP>([&]<int I>() {
        if (last > 0 && I >= done)
            acc.template step_one<I>(rows, last - TILE_PAIRS, pairs, whole[(last / TILE_PAIRS - 1) % 2](I), false);
    });
    acc.step(rows, last, pairs, whole[last / TILE_PAIRS % 2]);
    acc.put(sums, rows.count);
}

// Most inputs of row-major weights that are multiplied in tile registers, so that the transposed inputs take 128 KiB;
// wider matrices, and those with an odd number of inputs, are multiplied in vectors.
constexpr int64_t MOST_TURNED = 4096;

inline bool is_turned(const Matrix& m) { return m.in % 2 == 0 && m.in <= MOST_TURNED; }

// Row-major weights are multiplied the other way round: a tile register takes 32 inputs of sixteen outputs as they lie,
// times inputs that are transposed once for all outputs.
class TurnedRows {
public:
    void hold(const Rows& rows, int64_t pairs) {
        if (rows.x == x_ && rows.count == count_) return;
        const bf16* each[LANES];
        for (int64_t i = 0; i < LANES; ++i) each[i] = rows.x + (i < rows.count ? i : rows.count - 1) * rows.stride;
        turn_rows(each, 2 * pairs, turned_);
        x_ = rows.x, count_ = rows.count;
    }

    // Products of outputs whose weights are `stride` numbers apart, 32 inputs at a time, in four chains of sums, so
    // that a product does not wait for the one before.
    void begin() const {
        for_each_of<GROUP>([]<int I>() { clear_tile<SUMS + I>(); });
    }
    void step(const bf16* w, int64_t stride, int64_t pair, int64_t pairs) const {
        switch (pair / TILE_PAIRS % GROUP) {
            case 0:
                return step_chain<SUMS>(w, stride, pair, pairs);
            case 1:
                return step_chain<SUMS + 1>(w, stride, pair, pairs);
            case 2:
                return step_chain<SUMS + 2>(w, stride, pair, pairs);
            default:
                return step_chain<SUMS + 3>(w, stride, pair, pairs);
        }
    }
    // sums[r][lane]
    void put(float* sums) const {
        alignas(64) float chains[GROUP][LANES][TILE_ROWS], turned[TILE_ROWS][LANES];
        for_each_of<GROUP>([&]<int I>() { store_tile<SUMS + I>(chains[I]); });
        const bf16* each[LANES];
        for (int64_t i = 0; i < LANES; ++i) {
            float* const sum = chains[0][i];
            store(sum, add(add(load(sum), load(chains[1][i])), add(load(chains[2][i]), load(chains[3][i]))));
            each[i] = (const bf16*)sum;
        }
        turn_words(each, 0, (bf16*)turned);
        __builtin_memcpy(sums, turned, count_ * sizeof *turned);
    }

private:
    template <int SUM>
    void step_chain(const bf16* w, int64_t stride, int64_t pair, int64_t pairs) const {
        if (pairs - pair >= TILE_PAIRS) multiply<SUM, INPUTS, WEIGHTS>(w, stride, pair);
        else multiply<SUM, LAST_INPUTS, LAST_WEIGHTS>(w, stride, pair);
    }
    template <int SUM, int W, int X>
    void multiply(const bf16* w, int64_t stride, int64_t pair) const {
        load_tile<X>(turned_ + pair * 2 * LANES, 64);
        load_tile<W>(w, stride * (int64_t)sizeof(bf16));
        multiply_tiles<SUM, W, X>();
    }

    const bf16* x_ = nullptr;
    int64_t count_ = 0;
    alignas(64) bf16 turned_[MOST_TURNED * TILE_ROWS];
};

// sums[r][lane] of the outputs of one whole tile of a row-major matrix; prefetches the next tile in four streams.
inline void sum_rows_amx(const Matrix& m, int64_t tile, const TurnedRows& rows, float* sums) {
    const bf16* w = m.weight + tile * LANES * m.in;
    const char* next = (const char*)(w + LANES * m.in);
    const int64_t pairs = m.in / 2, quarter = m.in * LANES / 4 * (int64_t)sizeof(bf16);
    rows.begin();
    for (int64_t pair = 0; pair < pairs; pair += TILE_PAIRS) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < 16; ++i) __builtin_prefetch(next + i % 4 * quarter + (pair / 4 + i / 4) * 64);
        rows.step(w + 2 * pair, m.in, pair, pairs);
    }
    rows.put(sums);
}

// Decodes the steps of four outputs of an EXACT12_ROWS matrix in order.
class ExactOutputs {
public:
    void begin(const Matrix& m, int64_t group, int64_t steps) {
        const ExactSide& side = *(const ExactSide*)m.scales;
        const int32_t* places = side.places();
        plane_ = steps * 64;
        w_ = (const uint8_t*)m.weight + group * 3 * plane_;
        place_ = places + places[group], stop_ = places + places[group + 1];
        last_ = side.last(places[group] - places[0]);
    }
    // Decodes one step, 32 inputs of each output; prefetches what is read four groups later.
    void put(int64_t k, const UpperBytes& upper, bf16* to) {
        for (int which = 0; which < 3; ++which) __builtin_prefetch(w_ + (12 + which) * plane_);
        Tile tiles[4];
        if (place_ < stop_ && *place_ == k) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) tiles[i] = Tile(i < 3 ? (const bf16*)(w_ + i * plane_) : last_);
            ++place_, last_ += 2 * LANES;
        } else {
            upper.template join<false>(w_, w_ + 2 * plane_, tiles);
            upper.template join<true>(w_ + plane_, w_ + 2 * plane_, tiles + 2);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) _mm512_store_si512(to + i * EXACT_INPUTS, (__m512i)tiles[i].pair);
        w_ += 64;
    }

private:
    const uint8_t* w_;
    int64_t plane_;
    const int32_t *place_, *stop_;
    const bf16* last_;
};

// The same as sum_rows_amx for EXACT12_ROWS, whose weights are decoded one step ahead of the products.
inline void sum_exact_rows_amx(const Matrix& m, int64_t tile, const TurnedRows& rows, float* sums) {
    const int64_t pairs = m.in / 2, steps = (m.in + EXACT_INPUTS - 1) / EXACT_INPUTS;
    const UpperBytes upper(((const ExactSide*)m.scales)->upper);
    ExactOutputs outputs[LANES / 4];
    for (int i = 0; i < LANES / 4; ++i) outputs[i].begin(m, tile * LANES / 4 + i, steps);
    alignas(64) bf16 room[2][LANES * EXACT_INPUTS];
    rows.begin();
    for (int64_t k = 0; k <= steps; ++k) {
        if (k < steps)
#pragma GCC unroll 4
            for (int i = 0; i < LANES / 4; ++i) outputs[i].put(k, upper, room[k % 2] + i * 4 * EXACT_INPUTS);
        if (k > 0) rows.step(room[(k - 1) % 2], EXACT_INPUTS, (k - 1) * TILE_PAIRS, pairs);
    }
    rows.put(sums);
}

// Number of rows from which on integer products are faster in tile registers, with GROUP tiles of outputs side by side.
constexpr int64_t MIN_INT_ROWS = 5;

// Initial integer sums. They are loaded, since a product into a register that was cleared by tilezero waits for the
// product before.
alignas(64) constexpr int32_t ZEROS[LANES] = {};

// sums[i][r][lane] of R rows over GROUP tiles, to the bits of sum_int_block.
//
// A group of 64 inputs goes through three stages: codes are decoded to bytes (q4 only), tiles are multiplied, products
// are scaled and added. Each stage works one group behind the stage before, since loading what was just stored would
// stall, and the stages use different units of the processor.
template <class Kind, int R>
void sum_ints_amx(const Matrix& m, int64_t tile, const Rows& rows, float* sums) {
    constexpr bool IS_CODED = Kind::PARTS > 1;
    constexpr int64_t LAG = IS_CODED;
    const int64_t groups = int_groups(m.in), size = groups * Kind::BYTES;
    const int64_t near = size < INT_AHEAD ? size : INT_AHEAD;
    const uint8_t* const w = (const uint8_t*)m.weight + tile * size;
    Floats total[GROUP][R];
    alignas(64) int32_t products[GROUP][2][R][LANES];
    alignas(64) uint8_t bytes[GROUP][2][IS_CODED ? INT_GROUP * LANES : 1];
    for (int64_t g = 0; g <= groups + LAG; ++g) {
        const int64_t coming = g, here = coming - LAG, gone = here - 1;
        for_each_of<GROUP>([&]<int I>() __attribute__((always_inline)) {
            const Kind kind(m, tile + I, groups);
            const auto part_of = [&](int64_t group) { return w + I * size + group * Kind::BYTES; };
            // Distance to prefetch: further on in the tile, or at its end to the beginning of the next GROUP tiles.
            const auto ahead = [&](int64_t group) {
                return near + (group * Kind::BYTES + near < size ? 0 : (GROUP - 1) * size);
            };
            if (gone >= 0) {
                const auto scales = kind.scales_of(gone);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const IntRow row(rows.x + r * rows.stride, groups);
                    Ints sum(_mm512_load_si512(products[I][gone % 2][r]));
                    if (!Kind::IS_SIGNED) sum.value = _mm512_add_epi32(_mm512_set1_epi32(row.shift[gone]), sum.value);
                    kind.add(total[I][r], sum, row.scale[gone], scales);
                }
            }
            if (here >= 0 && here < groups) {
                const uint8_t* const p = IS_CODED ? bytes[I][here % 2] : part_of(here);
                for (int line = 0; line < 16 && !IS_CODED; ++line) __builtin_prefetch(p + ahead(here) + 64 * line);
                if (I == 0) {
                    const int8_t* const inputs = IntRow(rows.x, groups).bytes + here * INT_GROUP;
                    load_tile<INPUTS>(inputs, rows.stride * (int64_t)sizeof(bf16));
                }
                load_tile<SUMS + I>(ZEROS, 0);
                load_tile<WEIGHTS>(p, 64);
                multiply_int_tiles<Kind::IS_SIGNED, SUMS + I, INPUTS, WEIGHTS>();
                store_tile<SUMS + I>(products[I][here % 2]);
            }
            if (IS_CODED && coming < groups) {
                const uint8_t* p = part_of(coming);
                kind.fetch(coming);
                for (int64_t at = 0; at < INT_GROUP * LANES; at += 64 * Kind::PARTS, p += 64) {
                    __builtin_prefetch(p + ahead(coming));
                    Codes codes[Kind::PARTS];
                    kind.read(p, codes);
                    for (int part = 0; part < Kind::PARTS; ++part)
                        _mm512_store_si512(bytes[I][coming % 2] + at + 64 * part, codes[part].bytes);
                }
            }
        });
    }
    for (int i = 0; i < GROUP; ++i)
        for (int r = 0; r < R; ++r) Kind(m, tile + i, groups).put(total[i][r], sums + (i * R + r) * LANES);
}

using SumGroup = void (*)(const Matrix&, int64_t, const Rows&, float*);
const SumGroup SUM_TILES_AMX[] = {sum_tiles_amx<1>, sum_tiles_amx<2>, sum_tiles_amx<3>, sum_tiles_amx<4>};
template <int BITS>
constexpr SumGroup SUM_LUT_AMX[] = {
    sum_lut_amx<BITS, 1>, sum_lut_amx<BITS, 2>, sum_lut_amx<BITS, 3>, sum_lut_amx<BITS, 4>,
};
template <class Kind>
constexpr SumGroup SUM_INTS_AMX[] = {
    sum_ints_amx<Kind, 5>,  sum_ints_amx<Kind, 6>,  sum_ints_amx<Kind, 7>,  sum_ints_amx<Kind, 8>,
    sum_ints_amx<Kind, 9>,  sum_ints_amx<Kind, 10>, sum_ints_amx<Kind, 11>, sum_ints_amx<Kind, 12>,
    sum_ints_amx<Kind, 13>, sum_ints_amx<Kind, 14>, sum_ints_amx<Kind, 15>, sum_ints_amx<Kind, 16>,
};

// The state of an item that uses tile registers.
struct TileUnit {
    TileRegisters registers;
    TurnedRows turned;
};

// How many of `count` tiles of outputs are summed in tile registers: all, none, or all but a last one that is not
// whole.
inline int count_in_tiles(const Matrix& m, int64_t tile, int count, int64_t rows) {
    if (m.format >= LUT2_INTS) return 0;  // vector registers decode these
    if (is_low_bit(m)) return rows < MIN_INT_ROWS || count < GROUP ? 0 : count;
    if (m.format != ROW_MAJOR && m.format != EXACT12_ROWS) return count;
    return !is_turned(m) ? 0 : (tile + count) * LANES <= m.out ? count : count - 1;
}

// sums[i][r][lane] of those tiles.
inline void sum_in_tiles(TileUnit& unit, const Matrix& m, int64_t tile, int count, const bf16* x, int64_t stride,
                         int64_t num_rows, float* sums) {
    const Rows rows{x, stride, num_rows};
    const int64_t rest = is_low_bit(m) ? 0 : (m.in + 1) / 2 % TILE_PAIRS;
    const bool is_in_rows = m.format == ROW_MAJOR || m.format == EXACT12_ROWS;
    unit.registers.shape(is_in_rows ? LANES : num_rows, rest);
    if (is_in_rows) unit.turned.hold(rows, m.in / 2);
    switch ((Format)m.format) {
        case TILES:
            return SUM_TILES_AMX[count - 1](m, tile, rows, sums);
        case ROW_MAJOR:
            for (int i = 0; i < count; ++i) sum_rows_amx(m, tile + i, unit.turned, sums + i * num_rows * LANES);
            return;
        case INT8:
            return SUM_INTS_AMX<Int8Tiles>[num_rows - MIN_INT_ROWS](m, tile, rows, sums);
        case Q4:
            return SUM_INTS_AMX<SignedQ4Tiles>[num_rows - MIN_INT_ROWS](m, tile, rows, sums);
        case LUT2:
            return SUM_LUT_AMX<2>[count - 1](m, tile, rows, sums);
        case LUT3:
            return SUM_LUT_AMX<3>[count - 1](m, tile, rows, sums);
        case LUT4:
            return SUM_LUT_AMX<4>[count - 1](m, tile, rows, sums);
        case EXACT12:
            return sum_exact_amx(m, tile, rows, sums);
        case EXACT12_ROWS:
            for (int i = 0; i < count; ++i)
                sum_exact_rows_amx(m, tile + i, unit.turned, sums + i * num_rows * LANES);
            return;
        default:
            return;
    }
}

}  // namespace
